//! Answering a group's peers.
//!
//! Bytes from a peer are checked before they reach openraft, whose own checks are assertions. At most one snapshot
//! is on its way in at a time; a new transfer takes the place of an old one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use moim_base::task::offload;
use moim_journal::Store;
use openraft::Raft;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::VoteRequest;
use openraft::storage::Snapshot;

use super::GroupOptions;
use crate::machine::Machine;
use crate::rpc::{ReadIndexReply, Reply, Request, SnapshotPiece, SnapshotReply};
use crate::snapshot::{SnapshotDir, SnapshotFile};
use crate::transport::{Router, Transport};
use crate::types::Types;

/// What a group's handle and its router share.
pub(crate) struct Core {
    pub(super) raft: Raft<Types, Machine>,
    /// Whether there was a log when it was opened: the metrics say so a moment later only.
    pub(super) had_log: bool,
    pub(super) options: GroupOptions,
    pub(super) snapshots: Arc<SnapshotDir>,
    /// Whether the timers stand still, see [`super::Group::rest_while_alone`].
    pub(super) resting: AtomicBool,
    pub(super) incoming: tokio::sync::Mutex<Option<Incoming>>,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) router: Router,
    pub(super) store: Store,
}

/// A snapshot on its way in.
pub(super) struct Incoming {
    transfer: u64,
    file: SnapshotFile,
}

impl Core {
    /// Answers a request.
    pub(crate) async fn handle(&self, request: Bytes) -> Reply {
        let request = match Request::decode(request) {
            Ok(request) => request,
            Err(error) => return Reply::Failed(error.to_string()),
        };
        let failed = |error: String| Reply::Failed(error);
        match request {
            Request::Append(append) => match self.raft.append_entries(append).await {
                Ok(reply) => Reply::Append(reply),
                Err(error) => failed(error.to_string()),
            },
            Request::Vote(vote) => self.vote(vote, false).await,
            Request::PreVote(vote) => self.vote(vote, true).await,
            Request::Snapshot(piece) => match self.take_piece(piece).await {
                Ok(reply) => Reply::Snapshot(reply),
                Err(error) => failed(error.to_string()),
            },
            Request::Transfer(transfer) => match self.raft.handle_transfer_leader(transfer).await {
                Ok(reply) => Reply::Transfer(reply),
                Err(error) => failed(error.to_string()),
            },
            Request::ReadIndex => {
                Reply::ReadIndex(match self.raft.get_read_linearizer(openraft::ReadPolicy::ReadIndex).await {
                    Ok(linearizer) => ReadIndexReply::At(linearizer.read_log_id().index()),
                    Err(_) => ReadIndexReply::Refused,
                })
            }
        }
    }

    /// Whether this member is known to have a log.
    pub(super) fn has_log(&self) -> bool {
        self.had_log || self.raft.metrics().borrow_watched().last_log_index.is_some()
    }

    async fn vote(&self, request: VoteRequest<Types>, pre: bool) -> Reply {
        if !self.has_log() {
            return Reply::Failed("a member without a log does not vote".to_owned());
        }
        let voted = if pre { self.raft.pre_vote(request).await } else { self.raft.vote(request).await };
        match voted {
            Ok(reply) => Reply::Vote(reply),
            Err(error) => Reply::Failed(error.to_string()),
        }
    }

    async fn take_piece(&self, piece: SnapshotPiece) -> io::Result<SnapshotReply> {
        let mut incoming = self.incoming.lock().await;
        let kept = incoming.take().filter(|kept| piece.at > 0 && kept.transfer == piece.transfer);
        let snapshots = Arc::clone(&self.snapshots);
        let (at, bytes, last) = (piece.at, piece.bytes, piece.last);
        // None of these errors is the end of the group: the leader sends it again.
        let taken = offload(move || {
            let mut file = match kept {
                Some(kept) => kept.file,
                None if at == 0 => snapshots.draft()?,
                None => return Ok(None),
            };
            if file.len() != at {
                return Ok(None);
            }
            file.append(&bytes)?;
            let meta = if last { Some(file.verify()?) } else { None };
            Ok(Some((file, meta)))
        });
        match taken.await? {
            None => Ok(SnapshotReply::Restart),
            Some((file, None)) => {
                *incoming = Some(Incoming { transfer: piece.transfer, file });
                Ok(SnapshotReply::More)
            }
            Some((file, Some(meta))) => {
                let snapshot = Snapshot { meta, snapshot: file };
                let installed = self.raft.install_full_snapshot(piece.vote, snapshot).await;
                Ok(SnapshotReply::Done(installed.map_err(io::Error::other)?.vote))
            }
        }
    }

    pub(super) fn leave_router(&self) {
        self.router.remove(self.options.group);
    }
}
