//! A watch that outlives connections: after a break it begins again where it was, on whichever server answers.
//!
//! Invariants: every change from the first revision on is delivered once and in order, or the watch ends and
//! says from where changes are missing. The place to go on from is the revision after the last one that was
//! delivered whole, and a server delivers revisions whole because fragments are never asked for.

use std::time::Duration;

use bytes::Bytes;
use moim_wire_grpc::Code;
use moim_wire_grpc::etcd::{
    Event, FilterType, WatchCreateRequest, WatchRequest, WatchRequestKind, WatchResponse,
};
use moim_wire_grpc::method;
use tokio::time::{Instant, timeout_at};

use super::call::Stream;
use super::channel::{Channel, Link};
use super::error::EtcdError;

/// How long one server may take to begin a watch.
const CREATE_PATIENCE: Duration = Duration::from_secs(5);
/// Between two tries to begin again.
const PAUSE_MS: std::ops::RangeInclusive<u64> = 20..=200;

/// What is watched.
#[derive(Clone, Debug, Default)]
pub struct WatchOptions {
    /// The key, or the first of a range.
    pub key: Bytes,
    /// The end of the range; empty for the key alone.
    pub range_end: Bytes,
    /// The first revision; 0 means what comes after the watch has begun.
    pub start_revision: i64,
    /// Whether events carry what the key held before.
    pub prev_kv: bool,
    /// Whether the server says from time to time how far it is.
    pub progress_notify: bool,
    /// Kinds of events that are not wanted.
    pub filters: Vec<FilterType>,
}

/// Changes of one or more whole revisions, in order.
#[derive(Clone, Debug)]
pub struct WatchBatch {
    /// The store's revision when the server sent them.
    pub revision: i64,
    /// The changes; none in a notice of progress.
    pub events: Vec<Event>,
}

/// Why a watch ended, or could not begin.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WatchError {
    /// The history it needs is no longer kept.
    #[error("history before revision {oldest} is gone")]
    Compacted {
        /// The oldest revision that can still be watched from.
        oldest: i64,
    },
    /// The server will not have it.
    #[error("the watch was refused: {0}")]
    Refused(String),
    /// It could not begin in time. Only from opening: a watch that has begun tries for ever.
    #[error(transparent)]
    Failed(#[from] EtcdError),
}

/// A watch.
pub struct EtcdWatch {
    channel: Channel,
    options: WatchOptions,
    /// Where to begin again. Invariant: everything before it was delivered.
    next_revision: i64,
    stream: Option<(Link, Stream)>,
}

impl EtcdWatch {
    pub(super) async fn open(
        channel: Channel,
        options: WatchOptions,
        deadline: Instant,
    ) -> Result<Self, WatchError> {
        let next_revision = options.start_revision;
        let mut watch = Self { channel, options, next_revision, stream: None };
        loop {
            match watch.begin(deadline).await {
                Ok(()) => return Ok(watch),
                Err(WatchError::Failed(error)) if error.may_pass() && Instant::now() < deadline => {
                    pause().await
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The first revision that was not delivered yet.
    pub fn next_revision(&self) -> i64 {
        self.next_revision
    }

    /// The next changes. After an error the watch is over. Cancel-safe.
    pub async fn next(&mut self) -> Result<WatchBatch, WatchError> {
        loop {
            let Some((link, stream)) = &mut self.stream else {
                let deadline = Instant::now() + CREATE_PATIENCE;
                match self.begin(deadline).await {
                    Err(WatchError::Failed(error)) if error.may_pass() => pause().await,
                    Err(error) => return Err(error),
                    Ok(()) => {}
                }
                continue;
            };
            match stream.next::<WatchResponse>().await {
                Ok(Some(response)) => {
                    if let Some(batch) = self.on_response(response)? {
                        return Ok(batch);
                    }
                }
                Ok(None) => self.stream = None,
                Err(error) => {
                    let refused =
                        matches!(error.code(), Some(Code::PermissionDenied | Code::Unauthenticated));
                    if refused {
                        return Err(WatchError::Refused(error.to_string()));
                    }
                    self.channel.leave(link);
                    self.stream = None;
                }
            }
        }
    }

    /// Opens a stream and waits until the server watches.
    async fn begin(&mut self, deadline: Instant) -> Result<(), WatchError> {
        let link = self.channel.link(deadline, false).await?;
        let deadline = deadline.min(Instant::now() + CREATE_PATIENCE);
        let beginning = async {
            let mut stream = Stream::open(&link, method::watch::WATCH, None).await?;
            stream.send(&self.create_request(), false)?;
            match stream.next::<WatchResponse>().await? {
                Some(response) => Ok((stream, response)),
                None => Err(EtcdError::Unknown("the watch ended before it began".to_owned())),
            }
        };
        let begun = timeout_at(deadline, beginning).await;
        let begun = begun.unwrap_or_else(|_| Err(EtcdError::Unknown("the watch does not begin".to_owned())));
        let (stream, response) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.channel.leave(&link);
                return Err(error.into());
            }
        };
        if response.canceled {
            self.channel.leave(&link);
            return Err(ended(&response));
        }
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        if self.next_revision == 0 {
            self.next_revision = revision + 1;
        }
        self.stream = Some((link, stream));
        Ok(())
    }

    fn create_request(&self) -> WatchRequest {
        let WatchOptions { key, range_end, prev_kv, progress_notify, filters, .. } = &self.options;
        let create = WatchCreateRequest {
            key: key.clone(),
            range_end: range_end.clone(),
            start_revision: self.next_revision,
            progress_notify: *progress_notify,
            filters: filters.iter().map(|filter| *filter as i32).collect(),
            prev_kv: *prev_kv,
            watch_id: 0,
            fragment: false,
        };
        WatchRequest { request: Some(WatchRequestKind::Create(create)) }
    }

    fn on_response(&mut self, response: WatchResponse) -> Result<Option<WatchBatch>, WatchError> {
        if response.canceled {
            let error = ended(&response);
            if let Some((link, _)) = self.stream.take() {
                self.channel.leave(&link);
            }
            return match error {
                // The member lost its leader, or stops: another one goes on.
                WatchError::Failed(_) => Ok(None),
                error => Err(error),
            };
        }
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        let last =
            response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision).max();
        match last {
            Some(last) => self.next_revision = self.next_revision.max(last + 1),
            // Progress: everything up to here was delivered.
            None if !response.created => self.next_revision = self.next_revision.max(revision + 1),
            None => {}
        }
        let silent = response.events.is_empty() && (response.created || !self.options.progress_notify);
        Ok((!silent).then_some(WatchBatch { revision, events: response.events }))
    }
}

/// Why a server ended a watch.
fn ended(response: &WatchResponse) -> WatchError {
    if response.compact_revision > 0 {
        return WatchError::Compacted { oldest: response.compact_revision };
    }
    let reason = response.cancel_reason.as_str();
    if reason.is_empty() || reason.contains("no leader") || reason.contains("stopped") {
        return WatchError::Failed(EtcdError::Unknown(format!("the server ended the watch: {reason}")));
    }
    WatchError::Refused(reason.to_owned())
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(PAUSE_MS))).await;
}
