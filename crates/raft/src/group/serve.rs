//! Serving the RPCs of a group's peers.
//!
//! Requests are validated before they reach openraft, whose own checks are assertions: a peer may only act under its
//! own voter id, and no term may be so far ahead that terms could run out. At most one incoming snapshot transfer at
//! a time; a new transfer replaces an old one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use bytes::Bytes;
use moim_base::task::offload;
use moim_journal::Store;
use openraft::Raft;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::VoteRequest;
use openraft::storage::Snapshot;

use super::GroupOptions;
use crate::log::LogStore;
use crate::machine::Machine;
use crate::rpc::{ReadIndexReply, Reply, Request, SnapshotPiece, SnapshotReply};
use crate::snapshot::{SnapshotDir, SnapshotFile};
use crate::transport::{Router, Transport};
use crate::types::{Types, Vote, VoterId};

/// Unreachable by elections: terms count up from 1.
const TERM_LIMIT: u64 = 1 << 62;
/// The maximum jump of a peer's term over this member's: a century of elections, one per second. A group whose
/// members adopted a term near the limit could never elect a leader again.
const TERM_JUMP: u64 = 1 << 32;

/// The state shared by a group's handle and its router.
pub(crate) struct Core {
    pub(super) raft: Raft<Types, Machine>,
    pub(super) log: LogStore,
    /// True if this directory is known to be the newest state of its voter. Invariant: while false, no vote is
    /// granted and no append or snapshot acknowledged.
    pub(super) confirmed: AtomicBool,
    /// True if there was a log at the open: the metrics show it only a moment later.
    pub(super) had_log: bool,
    pub(super) options: GroupOptions,
    pub(super) snapshots: Arc<SnapshotDir>,
    /// True while the timers are suspended, see [`super::Group::rest_while_alone`].
    pub(super) resting: AtomicBool,
    /// The last term in which this member started a leadership transfer. Invariant: only grows.
    pub(super) transferred_term: AtomicU64,
    /// Why appends and heartbeats are withheld, see [`super::Group::step_down`] and [`super::quorum`]; 0 if they are
    /// not.
    pub(super) muted: Arc<AtomicU8>,
    pub(super) incoming: tokio::sync::Mutex<Option<Incoming>>,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) router: Router,
    pub(super) store: Store,
}

/// An incoming snapshot transfer.
pub(super) struct Incoming {
    transfer: u64,
    file: SnapshotFile,
}

impl Core {
    /// Serves a request; `peer` is the voter that sent it, if known.
    pub(crate) async fn handle(&self, peer: Option<VoterId>, request: Bytes) -> Reply {
        let request = match Request::decode(request) {
            Ok(request) => request,
            Err(error) => return Reply::Failed(error.to_string()),
        };
        if !self.confirmed.load(Ordering::Acquire) {
            return Reply::Failed("this member's run is not confirmed yet".to_owned());
        }
        if let Err(why) = self.check(peer, &request) {
            tracing::warn!(group = %self.options.group, ?peer, why, "Raft request refused");
            return Reply::Failed(why);
        }
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

    /// Refuses a request under another voter's id, and a term that no election can have reached, before it affects
    /// any state.
    fn check(&self, peer: Option<VoterId>, request: &Request) -> Result<(), String> {
        let (vote, newest): (&Vote, u64) = match request {
            Request::Append(append) => {
                let terms = append.entries.iter().map(|entry| **entry.log_id.committed_leader_id());
                (&append.vote, terms.max().unwrap_or(0))
            }
            Request::Vote(vote) | Request::PreVote(vote) => {
                (&vote.vote, vote.last_log_id.map_or(0, |last| **last.committed_leader_id()))
            }
            Request::Snapshot(piece) => (&piece.vote, 0),
            Request::Transfer(transfer) => (transfer.from_leader(), 0),
            Request::ReadIndex => return Ok(()),
        };
        let (term, voter) = (vote.leader_id.term, vote.leader_id.voted_for);
        if let Some(peer) = peer.filter(|peer| peer.0 != voter) {
            return Err(format!("voter {peer} sent a request in the name of voter {voter}"));
        }
        let known = self.raft.metrics().borrow_watched().current_term;
        if term >= TERM_LIMIT || term.saturating_sub(known) > TERM_JUMP {
            return Err(format!("term {term} is too far ahead of term {known}"));
        }
        if newest > term {
            return Err(format!("an entry of term {newest} is newer than term {term}"));
        }
        Ok(())
    }

    pub(super) fn mute(&self, why: u8) {
        self.muted.fetch_or(why, Ordering::Relaxed);
    }

    pub(super) fn unmute(&self, why: u8) {
        self.muted.fetch_and(!why, Ordering::Relaxed);
    }

    /// True if this member is known to have a log.
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
        // None of these errors ends the group: the leader sends the snapshot again.
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
