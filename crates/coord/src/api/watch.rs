//! The Watch service: one stream, any number of watches.
//!
//! Owns the ids that clients see, which are per stream, and the order of what is said: that a watch was created
//! comes before anything else of it. What is due is read from history when the client has room for it, so a
//! stream that is not read holds one message and a mark per watch.

use std::collections::HashMap;
use std::sync::Arc;

use moim_base::Permit;
use moim_wire_grpc::Status;
use moim_wire_grpc::etcd as wire;

use super::call::{Body, Gone, Respond, Sender};
use super::dispatch::Terms;
use super::memory::Share;
use super::metrics::Counted;
use super::{Api, convert, status};
use crate::engine::{WatchItem, WatchStream};
use crate::error::Error;
use crate::watch::{WatchRequest, WatcherId};

/// The id of what is about no watch, or about all of a stream.
const NO_WATCH: i64 = -1;

/// The watches of one client's stream.
struct Session<'a> {
    api: &'a Api,
    stream: WatchStream,
    /// Each with the memory that it holds.
    by_client: HashMap<i64, (WatcherId, usize)>,
    by_watcher: HashMap<WatcherId, i64>,
    next_id: i64,
    share: Arc<Share>,
    /// For the watches.
    held: Option<Permit>,
}

pub(super) async fn serve(api: &Api, terms: Terms, body: Body, respond: Respond) -> Result<(), Gone> {
    let _counted = Counted::new(&api.counters.watch_streams);
    let mut sender = respond.start()?;
    let mut session = Session {
        api,
        stream: api.coordinator.watcher(),
        by_client: HashMap::new(),
        by_watcher: HashMap::new(),
        next_id: 0,
        share: Arc::clone(body.share()),
        held: None,
    };
    let status = session.run(terms, body, &mut sender).await?;
    drop(session);
    sender.finish(Err(status))
}

impl Session<'_> {
    /// Talks until something ends the stream from this side. A client that has said everything still hears.
    async fn run(&mut self, terms: Terms, mut body: Body, sender: &mut Sender) -> Result<Status, Gone> {
        let mut end = std::pin::pin!(self.api.stream_end(terms));
        let mut half_closed = false;
        loop {
            tokio::select! {
                status = &mut end => return Ok(status),
                gone = sender.reset() => return Err(gone),
                request = body.next_message(), if !half_closed => match request {
                    Ok(Some(request)) => {
                        if let Some(response) = self.on_request(request) {
                            sender.send(&response).await?;
                        }
                    }
                    Ok(None) => half_closed = true,
                    Err(status) => return Ok(status),
                },
                item = self.stream.next() => match item {
                    Some(item) => {
                        if let Some(response) = self.on_item(item) {
                            sender.send(&response).await?;
                        }
                    }
                    None => return Ok(status::stopped()),
                },
            }
        }
    }

    fn on_request(&mut self, request: wire::WatchRequest) -> Option<wire::WatchResponse> {
        match request.request? {
            wire::WatchRequestKind::Create(create) => Some(self.create(create)),
            wire::WatchRequestKind::Cancel(cancel) => self.cancel(cancel.watch_id),
            wire::WatchRequestKind::Progress(_) => {
                self.stream.request_progress();
                None
            }
        }
    }

    fn create(&mut self, request: wire::WatchCreateRequest) -> wire::WatchResponse {
        let id = match request.watch_id {
            0 => self.free_id(),
            id if self.by_client.contains_key(&id) => {
                return self.refused("mvcc: duplicate watch ID provided on the WatchStream");
            }
            id => id,
        };
        let held = match self.share.hold_watch(&mut self.held, request.key.len() + request.range_end.len()) {
            Ok(held) => held,
            Err(status) => return self.refused(&status.message),
        };
        let has_filter = |filter: wire::FilterType| request.filters.contains(&filter.into());
        let created = self.stream.create(WatchRequest {
            start_revision: request.start_revision,
            prev_kv: request.prev_kv,
            no_put: has_filter(wire::FilterType::NoPut),
            no_delete: has_filter(wire::FilterType::NoDelete),
            progress_notify: request.progress_notify,
            fragment: request.fragment,
            key: request.key,
            range_end: request.range_end,
        });
        match created {
            Ok((watcher, revision)) => {
                if request.watch_id == 0 {
                    self.next_id = id + 1;
                }
                self.by_client.insert(id, (watcher, held));
                self.by_watcher.insert(watcher, id);
                let header = Some(self.api.header(revision));
                wire::WatchResponse { header, watch_id: id, created: true, ..Default::default() }
            }
            Err(error) => {
                self.on_watch_ended(held);
                self.refused(&error.message())
            }
        }
    }

    /// Gives back the memory of one watch.
    fn on_watch_ended(&mut self, bytes: usize) {
        if let Some(held) = &mut self.held {
            drop(held.split(bytes));
        }
    }

    /// The next id that no watch of the stream has.
    fn free_id(&self) -> i64 {
        let mut id = self.next_id;
        while self.by_client.contains_key(&id) {
            id += 1;
        }
        id
    }

    /// A watch that never came to be. It is still announced, so that clients can match it to what they asked for.
    fn refused(&self, reason: &str) -> wire::WatchResponse {
        wire::WatchResponse {
            header: Some(self.api.header_now()),
            watch_id: NO_WATCH,
            created: true,
            canceled: true,
            cancel_reason: reason.to_owned(),
            ..Default::default()
        }
    }

    fn cancel(&mut self, id: i64) -> Option<wire::WatchResponse> {
        let (watcher, held) = self.by_client.remove(&id)?;
        self.on_watch_ended(held);
        self.by_watcher.remove(&watcher);
        self.stream.cancel(watcher);
        let header = Some(self.api.header_now());
        Some(wire::WatchResponse { header, watch_id: id, canceled: true, ..Default::default() })
    }

    /// `None` for what is about a watch that was ended meanwhile.
    fn on_item(&mut self, item: WatchItem) -> Option<wire::WatchResponse> {
        match item {
            WatchItem::Events { watcher, batch } => Some(wire::WatchResponse {
                header: Some(self.api.header(batch.revision)),
                watch_id: *self.by_watcher.get(&watcher)?,
                fragment: batch.fragment,
                events: batch.events.into_iter().map(convert::event).collect(),
                ..Default::default()
            }),
            WatchItem::Canceled { watcher, compact_revision } => {
                let id = self.by_watcher.remove(&watcher)?;
                if let Some((_, held)) = self.by_client.remove(&id) {
                    self.on_watch_ended(held);
                }
                Some(wire::WatchResponse {
                    header: Some(self.api.header_now()),
                    watch_id: id,
                    canceled: true,
                    compact_revision,
                    cancel_reason: Error::Compacted.message(),
                    ..Default::default()
                })
            }
            WatchItem::Progress { watcher, revision } => {
                let watch_id = match watcher {
                    Some(watcher) => *self.by_watcher.get(&watcher)?,
                    None => NO_WATCH,
                };
                let header = Some(self.api.header(revision));
                Some(wire::WatchResponse { header, watch_id, ..Default::default() })
            }
        }
    }
}
