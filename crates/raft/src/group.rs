//! One member of one Raft group: its interface for the rest of the program, and for its peers.
//!
//! Errors state what is known: [`GroupError::Unknown`] is returned whenever an entry may still be committed, because
//! a caller that repeats a proposal must first know that the old one is dead.
//!
//! A member without a log grants no vote. Every initial member is initialised with the same list, every other member
//! joins as a learner; therefore a directory that lost its content cannot elect a leader.

mod options;
mod quorum;
mod serve;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{
    ClientWriteError, Fatal, ForwardToLeader, InitializeError, LinearizableReadError, RaftError,
};
use openraft::impls::ProgressResponder;
use openraft::metrics::{RaftMetrics, RaftServerMetrics};
use openraft::type_config::alias::{CommittedLeaderIdOf, WatchReceiverOf};
use openraft::{BasicNode, ChangeMembers, Raft, ReadPolicy, ServerState};

pub use self::options::{GroupOptions, Host, MAX_ENTRY_BYTES, Timers, is_raft_journal};
pub(crate) use self::serve::Core;
use crate::log::LogStore;
use crate::machine::{Machine, StateMachine};
use crate::network::Network;
use crate::rpc::{ReadIndexReply, Reply, Request};
use crate::snapshot::SnapshotDir;
use crate::types::{
    Applied, GroupError, GroupMetrics, Leadership, Member, OpenError, Proposal, Role, Types, VoterId,
};

/// The maximum lag of a learner at its promotion, in entries: with more, the promotion could cost the group its
/// quorum of up-to-date members.
const PROMOTE_LAG: u64 = 1_000;

/// A leader withholds appends and heartbeats because its disk does not work.
const MUTED_BY_DISK: u8 = 1;
/// A leader withholds them because no quorum answers it.
const MUTED_NO_QUORUM: u8 = 2;

/// A handle to this process's member of a group.
#[derive(Clone)]
pub struct Group {
    core: Arc<Core>,
}

impl Group {
    /// Opens the member from its data on disk, or as an empty one, and starts it. Needs a tokio runtime, which runs
    /// its tasks from then on.
    pub async fn open(
        host: &Host,
        options: GroupOptions,
        machine: Box<dyn StateMachine>,
    ) -> Result<Self, OpenError> {
        let group = options.group;
        let config = options.config()?;
        let log = LogStore::open(&host.store, host.router.logs(), options.place()).await?;
        let (had_log, kept_log) = (log.is_used(), log.clone());
        let (disk, root) = (Arc::clone(&host.disk), host.root.clone());
        let folder = format!("{}/snapshots", options.folder);
        let snapshots = moim_base::task::offload(move || SnapshotDir::open(disk, &root, &folder))
            .await
            .map_err(|source| OpenError::Io { group, source })?;
        let muted = Arc::new(AtomicU8::new(0));
        let network = Network {
            group,
            transport: Arc::clone(&host.transport),
            append_timeout: Duration::from_millis(options.timers.election_max_ms * 2),
            muted: Arc::clone(&muted),
        };
        let machine = Machine::new(machine, Arc::clone(&snapshots));
        let raft = Raft::new(options.voter.0, Arc::new(config), network, log, machine)
            .await
            .map_err(|error| OpenError::Damaged { group, what: error.to_string() })?;
        let core = Arc::new(Core {
            raft,
            log: kept_log,
            confirmed: AtomicBool::new(!options.unconfirmed),
            had_log,
            options,
            snapshots,
            incoming: Default::default(),
            resting: AtomicBool::new(false),
            transferred_term: AtomicU64::new(0),
            muted,
            transport: Arc::clone(&host.transport),
            router: host.router.clone(),
            store: host.store.clone(),
        });
        host.router.add(group, &core);
        Ok(Self { core })
    }

    fn raft(&self) -> &Raft<Types, Machine> {
        &self.core.raft
    }

    /// This member.
    pub fn voter(&self) -> VoterId {
        self.core.options.voter
    }

    /// Initialises the group. Every founding member gets the same list, and only when all of them are known to be
    /// empty.
    pub async fn initialize(&self, members: &[Member]) -> Result<(), GroupError> {
        let nodes: BTreeMap<u64, BasicNode> =
            members.iter().map(|member| (member.id.0, BasicNode::new(&member.address))).collect();
        match self.raft().initialize(nodes).await {
            Ok(()) => Ok(()),
            Err(RaftError::APIError(
                error @ (InitializeError::NotAllowed(_) | InitializeError::NotInMembers(_)),
            )) => Err(GroupError::Refused(error.to_string())),
            Err(RaftError::Fatal(error)) => Err(stopped(&error)),
        }
    }

    /// True if this member has a log or a vote: it was initialised, or it has joined. Queries the member itself, so
    /// it is correct from the start.
    pub async fn has_begun(&self) -> Result<bool, GroupError> {
        self.raft().is_initialized().await.map_err(|error| stopped(&error))
    }

    /// Confirms that this directory is the newest state of its voter: from now on the member participates. See
    /// [`GroupOptions::unconfirmed`].
    pub fn confirm(&self) {
        if !self.core.confirmed.swap(true, Ordering::Release) {
            self.raft().runtime_config().elect(true);
        }
    }

    /// The last log index, including purged entries.
    pub fn last_index(&self) -> Option<u64> {
        self.core.log.last_index()
    }

    /// The last index that is committed and on stable storage here: no crash of this node can lose it.
    pub fn settled_index(&self) -> Option<u64> {
        let committed = self.metrics().committed?;
        self.core.log.durable_index().map(|durable| durable.min(committed))
    }

    /// True if this member is known to have a log; directly after the open that may not be known yet.
    pub fn is_initialized(&self) -> bool {
        self.core.has_log()
    }

    /// Proposes an entry: replicates and applies it. On the leader only.
    pub async fn propose(&self, entry: Bytes) -> Result<Applied, GroupError> {
        self.check_proposal(&entry)?;
        let written = self.raft().client_write(Proposal(entry));
        match tokio::time::timeout(self.core.options.proposal_timeout, written).await {
            Ok(Ok(done)) => Ok(Applied { index: done.log_id.index, reply: done.data }),
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(GroupError::Unknown),
        }
    }

    fn check_proposal(&self, entry: &Bytes) -> Result<(), GroupError> {
        if entry.len() > MAX_ENTRY_BYTES {
            return Err(GroupError::TooLarge { bytes: entry.len(), limit: MAX_ENTRY_BYTES });
        }
        if self.core.store.is_exhausted() { Err(GroupError::Full) } else { Ok(()) }
    }

    /// Like [`Group::propose`], but only if this member still leads in `term`: a decision based on one leader's clock
    /// must not be executed under another leader. Once an entry of a later term is applied, the outcome of this one
    /// is known.
    pub async fn propose_in_term(&self, term: u64, entry: Bytes) -> Result<Applied, GroupError> {
        self.check_proposal(&entry)?;
        let (responder, done) = ProgressResponder::complete_only();
        let leader = CommittedLeaderIdOf::<Types>::from(term);
        let write = self.raft().write(Proposal(entry)).with_leader(leader).responder(responder);
        let written = async {
            write.await.map_err(|error| stopped(&error))?;
            match done.await {
                Ok(Ok(done)) => Ok(Applied { index: done.log_id.index, reply: done.data }),
                Ok(Err(error)) => Err(refused(RaftError::APIError(error))),
                Err(_) => Err(GroupError::Unknown),
            }
        };
        let timeout = self.core.options.proposal_timeout;
        tokio::time::timeout(timeout, written).await.unwrap_or(Err(GroupError::Unknown))
    }

    /// The read index: a read that waits for it sees everything that was acknowledged anywhere before the call. On
    /// any member: followers ask the leader.
    pub async fn read_point(&self) -> Result<u64, GroupError> {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::StaleRead) {
            return Ok(self.metrics().applied.unwrap_or(0));
        }
        match self.read_index().await {
            Err(GroupError::NotLeader { leader: Some(leader) }) if leader.id != self.voter() => {
                self.ask_read_index(&leader).await
            }
            index => index,
        }
    }

    /// Returns when the local state includes everything that was acknowledged anywhere before the call, with the
    /// applied index. On any member.
    pub async fn linearizable(&self) -> Result<u64, GroupError> {
        let index = self.read_point().await?;
        let timeout = Some(self.core.options.proposal_timeout);
        let waited = self.raft().wait(timeout).applied_index_at_least(Some(index), "a read").await;
        waited.map_err(|error| GroupError::NoQuorum(error.to_string()))?;
        Ok(index)
    }

    /// Confirms with a quorum that this member leads, and returns the read index.
    pub async fn read_index(&self) -> Result<u64, GroupError> {
        match self.raft().get_read_linearizer(ReadPolicy::ReadIndex).await {
            Ok(linearizer) => Ok(linearizer.read_log_id().index()),
            Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(to))) => Err(not_leader(to)),
            Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(error))) => {
                Err(GroupError::NoQuorum(error.to_string()))
            }
            Err(RaftError::Fatal(error)) => Err(stopped(&error)),
        }
    }

    async fn ask_read_index(&self, leader: &Member) -> Result<u64, GroupError> {
        let core = &self.core;
        let timeout = Duration::from_millis(core.options.timers.election_max_ms);
        let request = Request::ReadIndex.encode();
        let answer = core.transport.call(leader, core.options.group, request, timeout).await;
        let answer = answer.map_err(|error| GroupError::NoQuorum(error.to_string()))?;
        match Reply::decode(answer) {
            Ok(Reply::ReadIndex(ReadIndexReply::At(index))) => Ok(index),
            Ok(Reply::ReadIndex(ReadIndexReply::Refused)) => Err(GroupError::NotLeader { leader: None }),
            Ok(Reply::Failed(why)) => Err(GroupError::NoQuorum(why)),
            Ok(_) | Err(_) => Err(GroupError::NoQuorum("the leader's answer makes no sense".to_owned())),
        }
    }

    /// The known leader.
    pub fn leader(&self) -> Option<Member> {
        self.leader_in_term().map(|(_, leader)| leader)
    }

    /// The known leader and its term.
    pub fn leader_in_term(&self) -> Option<(u64, Member)> {
        let metrics = self.raft().metrics();
        let metrics = metrics.borrow_watched();
        let id = metrics.current_leader?;
        let node = metrics.membership_config.get_node(&id)?;
        Some((metrics.current_term, Member { id: VoterId(id), address: node.addr.clone() }))
    }

    /// True if this member believes that it leads. Only [`Group::read_index`] proves it.
    pub fn is_leader(&self) -> bool {
        self.raft().is_leader()
    }

    /// Leadership changes, from now on.
    pub fn leader_changes(&self) -> LeaderWatch {
        LeaderWatch { metrics: self.raft().server_metrics(), seen: None }
    }

    /// Adds a learner; it catches up by itself. Adding it again has no effect.
    pub async fn add_learner(&self, member: &Member) -> Result<(), GroupError> {
        let node = BasicNode::new(&member.address);
        self.changed(self.raft().add_learner(member.id.0, node, false)).await
    }

    /// Promotes learners to voters, through a joint configuration. Refused while one of them lags far behind.
    pub async fn promote(&self, learners: &[VoterId]) -> Result<(), GroupError> {
        let metrics = self.metrics();
        for learner in learners {
            let matched = metrics.matched.iter().find(|(id, _)| id == learner).and_then(|found| found.1);
            let behind = metrics.last_index.unwrap_or(0).saturating_sub(matched.unwrap_or(0));
            if metrics.role == Role::Leader && (matched.is_none() || behind > PROMOTE_LAG) {
                return Err(GroupError::Refused(format!("{learner} is {behind} entries behind")));
            }
        }
        let ids: BTreeSet<u64> = learners.iter().map(|learner| learner.0).collect();
        self.changed(self.raft().change_membership(ChangeMembers::AddVoterIds(ids), true)).await
    }

    /// Removes a member, voter or learner. Its id is never reused.
    pub async fn remove(&self, member: VoterId) -> Result<(), GroupError> {
        let ids = BTreeSet::from([member.0]);
        let is_voter = self.metrics().voters.iter().any(|voter| voter.id == member);
        let change =
            if is_voter { ChangeMembers::RemoveVoters(ids) } else { ChangeMembers::RemoveNodes(ids) };
        self.changed(self.raft().change_membership(change, false)).await
    }

    /// Changes the voters in one step, through a joint configuration. All of them must be members already; demoted
    /// voters stay as learners.
    pub async fn set_voters(&self, voters: &BTreeSet<VoterId>) -> Result<(), GroupError> {
        let ids: BTreeSet<u64> = voters.iter().map(|voter| voter.0).collect();
        self.changed(self.raft().change_membership(ChangeMembers::ReplaceAllVoters(ids), true)).await
    }

    /// Starts an election at once instead of waiting for a leader. For a voter that knows it has no peers.
    pub async fn campaign(&self) -> Result<(), GroupError> {
        self.raft().trigger().elect(false).await.map_err(|error| stopped(&error))
    }

    /// Changes the address of a member.
    pub async fn set_address(&self, member: &Member) -> Result<(), GroupError> {
        let nodes = BTreeMap::from([(member.id.0, BasicNode::new(&member.address))]);
        self.changed(self.raft().change_membership(ChangeMembers::SetNodes(nodes), true)).await
    }

    async fn changed<T>(
        &self,
        change: impl Future<Output = Result<T, RaftError<Types, ClientWriteError<Types>>>>,
    ) -> Result<(), GroupError> {
        match tokio::time::timeout(self.core.options.proposal_timeout, change).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(refused(error)),
            Err(_) => Err(GroupError::Unknown),
        }
    }

    /// True if this member has started a leadership transfer in `term`. From then on a quorum's confirmation proves
    /// nothing about the next moment: another leader can be elected at once.
    pub fn has_transferred(&self, term: u64) -> bool {
        self.core.transferred_term.load(Ordering::SeqCst) >= term
    }

    /// Transfers leadership to an up-to-date voter, and returns when it leads.
    pub async fn transfer_leadership(&self, to: VoterId) -> Result<(), GroupError> {
        if !self.is_leader() {
            return Err(GroupError::NotLeader { leader: self.leader() });
        }
        if !self.metrics().voters.iter().any(|voter| voter.id == to) {
            return Err(GroupError::Refused(format!("{to} is not a voter")));
        }
        // Before the message is sent: the target is elected without waiting for this leader's lease to expire.
        let term = self.raft().metrics().borrow_watched().current_term;
        self.core.transferred_term.fetch_max(term, Ordering::SeqCst);
        self.raft().trigger().transfer_leader(to.0).await.map_err(|error| stopped(&error))?;
        let timeout = Some(self.core.options.proposal_timeout);
        match self.raft().wait(timeout).current_leader(to.0, "a transfer").await {
            Ok(_) => Ok(()),
            Err(_) => Err(GroupError::Unknown),
        }
    }

    /// Sets whether this member starts elections. A member whose disk does not work must not: it could not sync its
    /// own log. Its vote is unaffected.
    pub fn set_electable(&self, electable: bool) {
        self.raft().runtime_config().elect(electable);
        if electable {
            self.core.unmute(MUTED_BY_DISK);
        }
    }

    /// Gives up leadership without using this member's disk: asks a voter to start an election at once. If it has not
    /// taken over after `patience`, appends and heartbeats are withheld, so that the other members elect a leader.
    /// The caller knows a working quorum of other voters. Ended by `set_electable(true)`.
    pub async fn step_down(&self, to: VoterId, patience: Duration) {
        self.set_electable(false);
        match tokio::time::timeout(patience, self.transfer_leadership(to)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => tracing::warn!(%error, %to, "leadership was not transferred"),
            Err(_) => tracing::debug!(%to, "leadership transfer not confirmed"),
        }
        if self.is_leader() {
            tracing::warn!(group = %self.core.options.group, "heartbeats withheld: the others elect another leader");
            self.core.mute(MUTED_BY_DISK);
        }
    }

    /// Purges the log up to the newest snapshot, to free disk space: members that lag slightly get the snapshot
    /// instead. Takes a snapshot first if that allows a purge.
    pub async fn free_log(&self) -> Result<(), GroupError> {
        let metrics = self.metrics();
        if metrics.snapshot < metrics.applied {
            self.snapshot().await?;
        }
        match metrics.snapshot.filter(|snapshot| metrics.purged < Some(*snapshot)) {
            Some(upto) => self.raft().trigger().purge_log(upto).await.map_err(|error| stopped(&error)),
            None => Ok(()),
        }
    }

    /// Requests a snapshot of the applied state, and a purge of the log before it.
    pub async fn snapshot(&self) -> Result<(), GroupError> {
        self.raft().trigger().snapshot().await.map_err(|error| stopped(&error))
    }

    /// True if the last snapshot could not be written: the log grows until [`Group::snapshot`] succeeds.
    pub fn snapshot_failed(&self) -> bool {
        self.core.snapshots.has_failed()
    }

    /// The present metrics of the group.
    pub fn metrics(&self) -> GroupMetrics {
        metrics_of(&self.raft().metrics().borrow_watched())
    }

    /// Suspends the timers while this member leads and is the only one: no member waits for heartbeats, and no other
    /// could lead. Returns when the group has stopped.
    pub async fn rest_while_alone(&self) {
        let mut metrics = self.raft().server_metrics();
        loop {
            let alone = is_alone(&metrics.borrow_watched());
            if self.core.resting.swap(alone, Ordering::Relaxed) != alone {
                self.raft().runtime_config().tick(!alone);
            }
            if metrics.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits until the metrics satisfy `ready`; returns them, or the last ones seen when `timeout` has passed or the
    /// group has stopped.
    pub async fn wait_for(
        &self,
        timeout: Duration,
        ready: impl Fn(&GroupMetrics) -> bool + Send,
    ) -> Result<GroupMetrics, GroupMetrics> {
        let wait = self.raft().wait(Some(timeout));
        match wait.metrics(move |now| ready(&metrics_of(now)), "a condition").await {
            Ok(now) => Ok(metrics_of(&now)),
            Err(_) => Err(self.metrics()),
        }
    }

    /// Returns when this member has stopped, with the reason. Unless the stop was requested, the process must end:
    /// its disk failed, or an invariant of Raft is violated.
    pub async fn stopped(&self) -> String {
        let mut metrics = self.raft().metrics();
        loop {
            if let Err(error) = &metrics.borrow_watched().running_state {
                return error.to_string();
            }
            if metrics.changed().await.is_err() {
                return "the group is gone".to_owned();
            }
        }
    }

    /// Stops this member; durable state is kept.
    pub async fn stop(&self) {
        self.core.leave_router();
        if let Err(error) = self.raft().shutdown().await {
            tracing::warn!(%error, group = %self.core.options.group, "the group did not stop cleanly");
        }
    }
}

/// A subscription to leadership changes.
pub struct LeaderWatch {
    metrics: WatchReceiverOf<Types, RaftServerMetrics<Types>>,
    seen: Option<Leadership>,
}

impl LeaderWatch {
    /// The present leadership.
    pub fn current(&self) -> Leadership {
        let metrics = self.metrics.borrow_watched();
        let vote = &metrics.vote;
        // The vote is the one on disk, the leader may belong to a newer one: a term must not be reported with the
        // leader of another term.
        let led = vote.committed && Some(vote.leader_id.voted_for) == metrics.current_leader;
        Leadership { term: vote.leader_id.term, leader: metrics.current_leader.filter(|_| led).map(VoterId) }
    }

    /// The next leadership that differs from the last reported one; at first the present one. `None` when the group
    /// has stopped. Intermediate ones may be skipped.
    pub async fn changed(&mut self) -> Option<Leadership> {
        loop {
            let current = self.current();
            if self.seen.as_ref() != Some(&current) {
                self.seen = Some(current.clone());
                return Some(current);
            }
            self.metrics.changed().await.ok()?;
        }
    }
}

fn is_alone(metrics: &RaftServerMetrics<Types>) -> bool {
    let membership = metrics.membership_config.membership();
    metrics.state == ServerState::Leader && membership.nodes().all(|(id, _)| *id == metrics.id)
}

fn metrics_of(metrics: &RaftMetrics<Types>) -> GroupMetrics {
    let members = metrics.membership_config.membership();
    let member = |id: u64| {
        let address = members.get_node(&id).map(|node| node.addr.clone()).unwrap_or_default();
        Member { id: VoterId(id), address }
    };
    let matched = metrics.replication.iter().flatten();
    GroupMetrics {
        voter: VoterId(metrics.id),
        role: match metrics.state {
            ServerState::Leader => Role::Leader,
            ServerState::Follower => Role::Follower,
            ServerState::Candidate => Role::Candidate,
            ServerState::Learner => Role::Learner,
            ServerState::Shutdown => Role::Stopped,
        },
        leadership: Leadership { term: metrics.current_term, leader: metrics.current_leader.map(VoterId) },
        last_index: metrics.last_log_index,
        committed: metrics.local_committed.map(|id| id.index),
        applied: metrics.last_applied.map(|id| id.index),
        snapshot: metrics.snapshot.map(|id| id.index),
        purged: metrics.purged.map(|id| id.index),
        voters: members.voter_ids().map(member).collect(),
        unfinished: match members.get_joint_config().as_slice() {
            [] | [_] => None,
            [.., goal] => Some(goal.iter().copied().map(VoterId).collect()),
        },
        learners: members.learner_ids().map(member).collect(),
        matched: matched.map(|(id, at)| (VoterId(*id), at.as_ref().map(|at| at.index))).collect(),
    }
}

fn stopped(error: &Fatal<Types>) -> GroupError {
    GroupError::Stopped(error.to_string())
}

fn not_leader(to: ForwardToLeader<Types>) -> GroupError {
    let leader = to.leader_id.zip(to.leader_node);
    GroupError::NotLeader { leader: leader.map(|(id, node)| Member { id: VoterId(id), address: node.addr }) }
}

fn refused(error: RaftError<Types, ClientWriteError<Types>>) -> GroupError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(to)) => not_leader(to),
        // Truncated from this log, or replaced by a snapshot: another leader may still commit it. A stopping group
        // does not report the outcome of its pending entries.
        RaftError::APIError(ClientWriteError::LogEntryDiscarded(_)) | RaftError::Fatal(_) => {
            GroupError::Unknown
        }
        RaftError::APIError(ClientWriteError::ChangeMembershipError(error)) => {
            GroupError::Refused(error.to_string())
        }
        RaftError::APIError(ClientWriteError::PreconditionFailed(error)) => {
            GroupError::Refused(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests;
