//! openraft's RPCs to other members, carried by a [`Transport`].
//!
//! Timeouts are chosen here. openraft proposes its heartbeat interval for an append, but an append's answer waits for
//! the peer's fsync, and a slow disk must not look like a lost peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use moim_base::task::offload;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::type_config::alias::SnapshotOf;
use openraft::{AnyError, BasicNode};

use crate::rpc::{Reply, Request, SnapshotPiece, SnapshotReply};
use crate::snapshot::SnapshotFile;
use crate::transport::{Transport, TransportError};
use crate::types::{GroupId, Member, Types, Vote, VoterId};

/// The snapshot bytes per request.
const PIECE: usize = 512 << 10;
/// The timeout of a snapshot chunk.
const PIECE_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of the last chunk, whose answer waits for the install.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(600);

/// Creates the clients of one group.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) group: GroupId,
    pub(crate) transport: Arc<dyn Transport>,
    /// The timeout of an append.
    pub(crate) append_timeout: Duration,
    /// Why this leader withholds appends and heartbeats, so that the other members elect a leader; 0 if it does not.
    pub(crate) muted: Arc<AtomicU8>,
}

/// One group's client for one member.
pub(crate) struct Line {
    network: Network,
    to: Member,
}

impl RaftNetworkFactory<Types> for Network {
    type Network = Line;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Line {
        Line { network: self.clone(), to: Member { id: VoterId(target), address: node.addr.clone() } }
    }
}

fn failed(why: &str) -> RPCError<Types> {
    // An immediate retry would fail the same way.
    RPCError::Unreachable(Unreachable::new(&AnyError::error(why)))
}

impl Line {
    async fn call(&self, request: &Request, timeout: Duration) -> Result<Reply, RPCError<Types>> {
        let (network, to) = (&self.network, &self.to);
        let answer = network.transport.call(to, network.group, request.encode(), timeout).await;
        match answer.map(Reply::decode) {
            Ok(Ok(Reply::Failed(why))) => Err(failed(&why)),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(failed(&error.to_string())),
            Err(error @ (TransportError::Unreachable(_) | TransportError::TimedOut)) => {
                Err(failed(&error.to_string()))
            }
            Err(error @ TransportError::Broken(_)) => Err(RPCError::Network(NetworkError::new(&error))),
        }
    }

    async fn send(&self, vote: Vote, snapshot: Arc<SnapshotFile>) -> Result<Vote, RPCError<Types>> {
        let transfer = fastrand::u64(..);
        let mut at = 0;
        loop {
            let source = Arc::clone(&snapshot);
            let piece = offload(move || source.piece(at, PIECE)).await;
            let bytes = piece.map_err(|error| failed(&error.to_string()))?;
            let next = at + bytes.len() as u64;
            let last = next >= snapshot.len();
            let piece = SnapshotPiece { vote, transfer, at, last, bytes };
            let timeout = if last { INSTALL_TIMEOUT } else { PIECE_TIMEOUT };
            match self.call(&Request::Snapshot(piece), timeout).await? {
                Reply::Snapshot(SnapshotReply::Done(vote)) => return Ok(vote),
                Reply::Snapshot(SnapshotReply::More) if !last => at = next,
                _ => return Err(failed("the member wants the snapshot from its start")),
            }
        }
    }
}

impl RaftNetworkV2<Types> for Line {
    type SnapshotData = SnapshotFile;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        if self.network.muted.load(Ordering::Relaxed) != 0 {
            return Err(failed("this member gives up its leadership"));
        }
        match self.call(&Request::Append(rpc), self.network.append_timeout).await? {
            Reply::Append(reply) => Ok(reply),
            _ => Err(failed("not an answer to an append")),
        }
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        match self.call(&Request::Vote(rpc), option.hard_ttl()).await? {
            Reply::Vote(reply) => Ok(reply),
            _ => Err(failed("not an answer to a vote")),
        }
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        match self.call(&Request::PreVote(rpc), option.hard_ttl()).await? {
            Reply::Vote(reply) => Ok(reply),
            _ => Err(failed("not an answer to a pre-vote")),
        }
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: SnapshotOf<Types, SnapshotFile>,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        tokio::select! {
            biased;
            sent = self.send(vote, Arc::new(snapshot.snapshot)) => Ok(SnapshotResponse::new(sent?)),
            closed = cancel => Err(closed.into()),
        }
    }

    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RPCError<Types>> {
        match self.call(&Request::Transfer(req), option.hard_ttl()).await? {
            Reply::Transfer(reply) => Ok(reply),
            _ => Err(failed("not an answer to a transfer")),
        }
    }
}
