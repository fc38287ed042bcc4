//! The Watch service: one stream, any number of watchers.
//!
//! Owns the watch ids that clients see, which are per stream, and the order of responses: the `created` response of a
//! watch comes before its other responses. Events are read from history when the client has window for them, so an
//! unread stream holds one message and one mark per watcher.

use std::collections::HashMap;
use std::sync::Arc;

use moim_base::Permit;
use moim_wire_grpc::Status;
use moim_wire_grpc::etcd as wire;

use super::call::{Body, ClientGone, Responder, Sender};
use super::dispatch::CallOptions;
use super::memory::Share;
use super::metrics::Counted;
use super::{Api, convert, status};
use crate::engine::{WatchItem, WatchStream};
use crate::error::Error;
use crate::watch::{WatchRequest, WatcherId};

/// The watch id of responses about no watch, or about all of a stream.
const NO_WATCH: i64 = -1;

/// The watches of one client's stream.
struct Session<'a> {
    api: &'a Api,
    stream: WatchStream,
    /// Client id to watcher, with the memory it holds.
    by_client: HashMap<i64, (WatcherId, usize)>,
    by_watcher: HashMap<WatcherId, i64>,
    next_id: i64,
    share: Arc<Share>,
    /// Permit for the watches.
    held: Option<Permit>,
}

pub(super) async fn serve(
    api: &Api,
    call_options: CallOptions,
    body: Body,
    respond: Responder,
) -> Result<(), ClientGone> {
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
    let status = session.run(call_options, body, &mut sender).await?;
    drop(session);
    sender.finish(Err(status))
}

impl Session<'_> {
    /// Serves until the server ends the stream. A client that has half-closed still receives events.
    async fn run(
        &mut self,
        call_options: CallOptions,
        mut body: Body,
        sender: &mut Sender,
    ) -> Result<Status, ClientGone> {
        let mut end = std::pin::pin!(self.api.stream_end(call_options));
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

    /// Releases the memory of one watch.
    fn on_watch_ended(&mut self, bytes: usize) {
        if let Some(held) = &mut self.held {
            drop(held.split(bytes));
        }
    }

    /// The next watch id that is free on the stream.
    fn free_id(&self) -> i64 {
        let mut id = self.next_id;
        while self.by_client.contains_key(&id) {
            id += 1;
        }
        id
    }

    /// Response to a refused watch. It has `created` set, so that clients can match it to their request.
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

    /// `None` for items of a watch that was canceled meanwhile.
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
