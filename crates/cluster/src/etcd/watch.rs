//! A watch that survives connection loss: it resumes at its position, on any server.
//!
//! Invariants: every event from the first revision on is delivered once and in order, or the watch ends with
//! the revision from which events are missing. The resume position is the revision after the last one that
//! was delivered completely; a server delivers revisions completely because the client never requests
//! fragments.

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

/// Timeout for the creation of a watch on one server.
const CREATE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to resume.
const PAUSE_MS: std::ops::RangeInclusive<u64> = 20..=200;

/// Parameters of a watch.
#[derive(Clone, Debug, Default)]
pub struct WatchOptions {
    /// The key, or the first key of a range.
    pub key: Bytes,
    /// The end of the range; empty for a single key.
    pub range_end: Bytes,
    /// The first revision; 0 means events after the creation of the watch.
    pub start_revision: i64,
    /// True if events carry the previous key-value pair.
    pub prev_kv: bool,
    /// True if the server sends progress notifications.
    pub progress_notify: bool,
    /// Event types to filter out.
    pub filters: Vec<FilterType>,
}

/// Events of one or more complete revisions, in order.
#[derive(Clone, Debug)]
pub struct WatchBatch {
    /// The store's revision when the server sent the batch.
    pub revision: i64,
    /// The events; empty in a progress notification.
    pub events: Vec<Event>,
}

/// End of a watch, or a failed creation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WatchError {
    /// The required revision has been compacted.
    #[error("history before revision {oldest} has been compacted")]
    Compacted {
        /// The oldest revision that can still be watched.
        oldest: i64,
    },
    /// The server rejected the watch.
    #[error("the watch was refused: {0}")]
    Refused(String),
    /// The creation timed out. Only returned on open: an established watch retries without limit.
    #[error(transparent)]
    Failed(#[from] EtcdError),
}

/// An etcd watch.
pub struct EtcdWatch {
    channel: Channel,
    options: WatchOptions,
    /// Resume position. Invariant: every event before it was delivered.
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
            match watch.create(deadline).await {
                Ok(()) => return Ok(watch),
                Err(WatchError::Failed(error)) if error.is_retryable_read() && Instant::now() < deadline => {
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

    /// The next batch of events. After an error the watch has ended. Cancel-safe.
    pub async fn next(&mut self) -> Result<WatchBatch, WatchError> {
        loop {
            let Some((link, stream)) = &mut self.stream else {
                let deadline = Instant::now() + CREATE_TIMEOUT;
                match self.create(deadline).await {
                    Err(WatchError::Failed(error)) if error.is_retryable_read() => pause().await,
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

    /// Opens a stream and waits for the creation of the watch.
    async fn create(&mut self, deadline: Instant) -> Result<(), WatchError> {
        let link = self.channel.link(deadline, false).await?;
        let deadline = deadline.min(Instant::now() + CREATE_TIMEOUT);
        let beginning = async {
            let mut stream = Stream::open(&link, method::watch::WATCH, None).await?;
            stream.send(&self.create_request(), false)?;
            match stream.next::<WatchResponse>().await? {
                Some(response) => Ok((stream, response)),
                None => Err(EtcdError::Unknown("watch stream ended before its creation".to_owned())),
            }
        };
        let created = timeout_at(deadline, beginning).await;
        let created =
            created.unwrap_or_else(|_| Err(EtcdError::Unknown("watch creation timed out".to_owned())));
        let (stream, response) = match created {
            Ok(created) => created,
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
                // The member lost its leader or stops: resume on another member.
                WatchError::Failed(_) => Ok(None),
                error => Err(error),
            };
        }
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        let last =
            response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision).max();
        match last {
            Some(last) => self.next_revision = self.next_revision.max(last + 1),
            // Progress notification: every event up to this revision was delivered.
            None if !response.created => self.next_revision = self.next_revision.max(revision + 1),
            None => {}
        }
        let silent = response.events.is_empty() && (response.created || !self.options.progress_notify);
        Ok((!silent).then_some(WatchBatch { revision, events: response.events }))
    }
}

/// The reason for which a server cancelled a watch.
fn ended(response: &WatchResponse) -> WatchError {
    if response.compact_revision > 0 {
        return WatchError::Compacted { oldest: response.compact_revision };
    }
    let reason = response.cancel_reason.as_str();
    if reason.is_empty() || reason.contains("no leader") || reason.contains("stopped") {
        return WatchError::Failed(EtcdError::Unknown(format!("watch cancelled by the server: {reason}")));
    }
    WatchError::Refused(reason.to_owned())
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(PAUSE_MS))).await;
}
