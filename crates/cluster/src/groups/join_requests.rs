//! The group's side of a join: accepts requests, waits for approval, lets learners catch up, promotes them
//! to voters.
//!
//! A request is a record in the group, `cluster:raft/join-requests/{app}/{node}`, under a lease of the join
//! timeout. Every next step follows from the record and the group's members alone, so any leader can
//! continue it; after the lease expiry the leader removes the learner without a record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moim_coord::{CoordError, Coordinator};
use moim_raft::{BoxFuture, Member, Service, VoterId};
use serde::{Deserialize, Serialize};

use super::founding::FounderState;
use super::identity::{Founder, Identity};
use super::join::{JoinAcceptance, JoinCall, JoinReply, JoinRequest, JoinTicket};
use super::{GroupConfig, GroupRecord, PeerRecord, group_id};
use crate::CoordRepository;
use crate::backoff::{self, Change};
use crate::events::ClusterEvent;
use crate::keys;
use crate::repository::{Compare, Entry, RepositoryError, StateRepository as _, Txn, TxnOutcome};

/// Timeout for a change of a record.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// A learner without a request is removed after this many checks.
const CHECKS_BEFORE_REMOVAL: u32 = 4;
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Key of the next voter id.
const NEXT_VOTER: &str = "cluster:raft/next-peer/";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Record {
    #[serde(flatten)]
    request: JoinRequest,
    ticket: String,
    /// By the leader's wall clock. Informational.
    requested_at: i64,
    peer_id: u64,
    /// `requested`, `approved`, `accepted`, `rejected`.
    state: String,
    reason: String,
    /// By the leader's wall clock.
    accepted_at: i64,
}

pub(super) struct JoinRequests {
    config: GroupConfig,
    identity: Identity,
    address: String,
    coordinator: Coordinator,
    repository: Arc<CoordRepository>,
}

impl JoinRequests {
    pub(super) fn new(
        config: &GroupConfig,
        identity: &Identity,
        address: &str,
        coordinator: Coordinator,
        repository: Arc<CoordRepository>,
    ) -> Self {
        let (config, identity) = (config.clone(), identity.clone());
        Self { config, identity, address: address.to_owned(), coordinator, repository }
    }

    fn key(&self, node: &str) -> String {
        keys::raft_join(&self.config.app, node)
    }

    async fn handle_call(&self, call: JoinCall) -> JoinReply {
        // Only the leader decides, and a quorum must confirm its leadership.
        if !self.coordinator.group().is_leader() {
            let leader = self.coordinator.group().leader().map(|leader| leader.address);
            return JoinReply::Redirect { leader: leader.filter(|leader| *leader != self.address) };
        }
        let answered = match call {
            // Handled above.
            JoinCall::Status { .. } => return JoinReply::Pending,
            JoinCall::Request { app, request } => self.on_request(&app, request).await,
            JoinCall::Await { ticket } => self.on_await(&ticket).await,
            JoinCall::Complete { ticket, peer_id } => self.on_complete(&ticket, peer_id).await,
        };
        answered.unwrap_or_else(|error| JoinReply::Busy { reason: error.to_string() })
    }

    /// Publishes a step of a join to the log and the event bus.
    fn publish_step(&self, node: &str, step: &str, reason: &str) {
        if matches!(step, "rejected" | "expired") {
            self.config.metrics.join_failures.inc();
        }
        tracing::info!(app = self.config.app, node, step, reason, "group join step");
        let (app, node, step) = (self.config.app.clone(), node.to_owned(), step.to_owned());
        self.config.events.publish(ClusterEvent::Join { app, node, step, reason: reason.to_owned() });
    }

    async fn on_request(&self, app: &str, request: JoinRequest) -> Result<JoinReply, RepositoryError> {
        let node = request.node_id.clone();
        let rejected = |reason: String| {
            self.publish_step(&node, "rejected", &reason);
            Ok(JoinReply::Rejected { reason })
        };
        if app != self.config.app {
            return rejected(format!("this is the group of {}, not of {app}", self.config.app));
        }
        if request.node_id.is_empty() || request.endpoint.is_empty() {
            return rejected("a request needs a node id and an endpoint".to_owned());
        }
        let record = self.record().await?;
        if record.peers.iter().any(|peer| peer.node_id == request.node_id) {
            return rejected(format!("{} is a member already", request.node_id));
        }
        let lease = self.repository.grant(self.config.join_timeout).await?;
        let key = self.key(&request.node_id);
        let counter = format!("{NEXT_VOTER}{}", keys::segment(app));
        loop {
            let next = self.repository.get(&counter).await?;
            let known = self.coordinator.group().metrics();
            let least =
                known.voters.iter().chain(&known.learners).map(|member| member.id.0).max().unwrap_or(0);
            let number = next.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok()?.parse().ok());
            let peer_id = number.unwrap_or(0).max(least + 1);
            let entry = Record {
                request: request.clone(),
                ticket: format!("{:016x}", fastrand::u64(1..)),
                requested_at: now_ms(),
                peer_id,
                state: "requested".to_owned(),
                reason: String::new(),
                accepted_at: 0,
            };
            let expected = match &next {
                Some(next) => Compare::ModRevision(counter.clone(), next.mod_revision),
                None => Compare::Absent(counter.clone()),
            };
            let txn = Txn::new()
                .when(expected)
                .put(&counter, (peer_id + 1).to_string())
                // A second request of the same node replaces the first and invalidates its ticket.
                .put_leased(&key, to_bytes(&entry), lease.id);
            if let TxnOutcome::Done { .. } = self.repository.txn(txn).await? {
                let valid_ms = u64::try_from(lease.ttl.as_millis()).unwrap_or(u64::MAX);
                self.publish_step(&request.node_id, "requested", "");
                let ticket =
                    JoinTicket { app: app.to_owned(), node_id: request.node_id, id: entry.ticket, valid_ms };
                return Ok(JoinReply::Ticket { ticket });
            }
        }
    }

    /// The record of a ticket, if the ticket is still valid.
    async fn find(&self, ticket: &JoinTicket) -> Result<Option<(Entry, Record)>, RepositoryError> {
        let entry = self.repository.get(&self.key(&ticket.node_id)).await?;
        let found = entry.and_then(|entry| {
            let record: Record = serde_json::from_slice(&entry.value).ok()?;
            (record.ticket == ticket.id).then_some((entry, record))
        });
        Ok(found)
    }

    async fn on_await(&self, ticket: &JoinTicket) -> Result<JoinReply, RepositoryError> {
        let Some((entry, mut record)) = self.find(ticket).await? else { return Ok(JoinReply::Expired) };
        match record.state.as_str() {
            "rejected" => return Ok(JoinReply::Rejected { reason: record.reason }),
            "requested" if self.config.manual_approval => return Ok(JoinReply::Pending),
            _ => {}
        }
        let member = Member { id: VoterId(record.peer_id), address: record.request.endpoint.clone() };
        match self.coordinator.add_learner(member).await {
            Ok(()) => {}
            Err(CoordError::MemberExists) => {
                let reason = format!("{} is the address of another member", record.request.endpoint);
                self.publish_step(&ticket.node_id, "rejected", &reason);
                return Ok(JoinReply::Rejected { reason });
            }
            Err(error) => return Err(RepositoryError::Unavailable(error.to_string())),
        }
        if record.state != "accepted" {
            record.state = "accepted".to_owned();
            record.accepted_at = now_ms();
            let same = Compare::ModRevision(entry.key.clone(), entry.mod_revision);
            let mut txn = Txn::new().when(same);
            txn = match entry.lease {
                Some(lease) => txn.put_leased(&entry.key, to_bytes(&record), lease),
                None => txn.put(&entry.key, to_bytes(&record)),
            };
            if let TxnOutcome::Conflict { .. } = self.repository.txn(txn).await? {
                return Ok(JoinReply::Pending);
            }
            self.config.metrics.join_approval_time.observe(since(record.requested_at));
            self.publish_step(&ticket.node_id, "accepted", "");
        }
        let acceptance = JoinAcceptance {
            peer_id: record.peer_id,
            snapshot_source: self.address.clone(),
            effective_index: self.coordinator.group().metrics().committed.unwrap_or(0),
            cluster: self.identity.cluster.clone(),
            secret: self.identity.secret.clone(),
        };
        Ok(JoinReply::Accepted { acceptance })
    }

    async fn on_complete(&self, ticket: &JoinTicket, peer_id: u64) -> Result<JoinReply, RepositoryError> {
        let Some((entry, record)) = self.find(ticket).await? else {
            return self.on_complete_without_record(ticket, peer_id).await;
        };
        if record.state != "accepted" {
            return Ok(JoinReply::Pending);
        }
        match self.coordinator.promote_member(VoterId(record.peer_id)).await {
            Ok(()) | Err(CoordError::NotLearner) => {}
            Err(CoordError::LearnerNotReady) => return Ok(JoinReply::Pending),
            Err(CoordError::MemberNotFound) => return Ok(JoinReply::Expired),
            Err(error) => return Err(RepositoryError::Unavailable(error.to_string())),
        }
        let peer = PeerRecord {
            node_id: record.request.node_id.clone(),
            peer_id: record.peer_id,
            address: record.request.endpoint.clone(),
        };
        self.add_peer(peer).await?;
        self.repository.txn(Txn::new().delete(entry.key)).await?;
        self.config.metrics.sync_time.observe(since(record.accepted_at));
        self.publish_step(&ticket.node_id, "active", "");
        Ok(JoinReply::Active)
    }

    /// The join was completed by an earlier call whose reply was lost, or it has expired. A joining node
    /// that gets `Expired` abandons its voter id, so it must not be a voter.
    async fn on_complete_without_record(
        &self,
        ticket: &JoinTicket,
        peer_id: u64,
    ) -> Result<JoinReply, RepositoryError> {
        let members = self.record().await?;
        let is_recorded =
            |peer: &PeerRecord| peer.node_id == ticket.node_id && (peer_id == 0 || peer.peer_id == peer_id);
        if members.peers.iter().any(is_recorded) {
            return Ok(JoinReply::Active);
        }
        let voters = self.coordinator.group().metrics().voters;
        match voters.into_iter().find(|voter| voter.id.0 == peer_id) {
            // Promoted by a former leader that failed before it recorded the peer.
            Some(voter) => {
                let node_id = ticket.node_id.clone();
                self.add_peer(PeerRecord { node_id, peer_id, address: voter.address }).await?;
                Ok(JoinReply::Active)
            }
            None => Ok(JoinReply::Expired),
        }
    }

    /// The group record; the first caller writes the record of the founders.
    pub(super) async fn record(&self) -> Result<GroupRecord, RepositoryError> {
        let entry = self.repository.get(&keys::raft_group(&self.config.app)).await?;
        Ok(match entry.and_then(|entry| serde_json::from_slice(&entry.value).ok()) {
            Some(record) => record,
            None => self.first_record(),
        })
    }

    fn first_record(&self) -> GroupRecord {
        let peer = |one: &Founder| PeerRecord {
            node_id: one.node_id.clone(),
            peer_id: one.voter,
            address: one.address.clone(),
        };
        GroupRecord {
            group_id: group_id(&self.config.app).0,
            peers: self.identity.founders.iter().map(peer).collect(),
            equipment_group: self.config.equipment_group.clone(),
        }
    }

    async fn add_peer(&self, peer: PeerRecord) -> Result<(), RepositoryError> {
        let key = keys::raft_group(&self.config.app);
        let add = |entry: Option<&Entry>| {
            let found = entry.and_then(|entry| serde_json::from_slice(&entry.value).ok());
            let mut record: GroupRecord = found.unwrap_or_else(|| self.first_record());
            if record.peers.contains(&peer) {
                return Change::Keep;
            }
            record.peers.retain(|one| one.node_id != peer.node_id);
            record.peers.push(peer.clone());
            Change::Put(serde_json::to_vec(&record).expect("plain fields serialize to JSON").into())
        };
        backoff::update(&*self.repository, &key, None, WRITE_TIMEOUT, add).await.map(drop)
    }

    pub(super) async fn pending(&self) -> Result<Vec<JoinRequest>, RepositoryError> {
        let prefix = self.key("");
        let (_, entries) = self.repository.list(&prefix).await?;
        let records = entries.iter().filter_map(|entry| serde_json::from_slice::<Record>(&entry.value).ok());
        Ok(records.filter(|record| record.state == "requested").map(|record| record.request).collect())
    }

    /// An operator's decision on a request: `None` approves.
    pub(super) async fn decide(&self, node: &str, rejection: Option<&str>) -> Result<(), RepositoryError> {
        let key = self.key(node);
        loop {
            let Some(entry) = self.repository.get(&key).await? else {
                return Err(RepositoryError::Invalid(format!("{node} has no pending join request")));
            };
            let mut record: Record = serde_json::from_slice(&entry.value)
                .map_err(|error| RepositoryError::Damaged(format!("{key}: {error}")))?;
            record.state = if rejection.is_some() { "rejected" } else { "approved" }.to_owned();
            rejection.unwrap_or_default().clone_into(&mut record.reason);
            let mut txn = Txn::new().when(Compare::ModRevision(key.clone(), entry.mod_revision));
            txn = match entry.lease {
                Some(lease) => txn.put_leased(&key, to_bytes(&record), lease),
                None => txn.put(&key, to_bytes(&record)),
            };
            if let TxnOutcome::Done { .. } = self.repository.txn(txn).await? {
                if let Some(reason) = rejection {
                    self.publish_step(node, "rejected", reason);
                }
                return Ok(());
            }
        }
    }

    /// Removes learners with expired requests while this member is the leader, and publishes expired
    /// requests.
    pub(super) async fn run(&self) {
        let mut seen: BTreeMap<u64, u32> = BTreeMap::new();
        let mut open = BTreeSet::new();
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            if !self.coordinator.group().is_leader() {
                seen.clear();
                open.clear();
                continue;
            }
            let Ok((_, entries)) = self.repository.list(&self.key("")).await else { continue };
            let records: Vec<Record> =
                entries.iter().filter_map(|entry| serde_json::from_slice(&entry.value).ok()).collect();
            self.publish_expired(&mut open, &records).await;
            let wanted: BTreeSet<u64> = records.iter().map(|record| record.peer_id).collect();
            let learners = self.coordinator.group().metrics().learners;
            seen.retain(|id, _| learners.iter().any(|learner| learner.id.0 == *id));
            for learner in learners.iter().filter(|learner| !wanted.contains(&learner.id.0)) {
                let checks = seen.entry(learner.id.0).or_default();
                *checks += 1;
                if *checks >= CHECKS_BEFORE_REMOVAL
                    && let Err(error) = self.coordinator.remove_member(learner.id).await
                {
                    tracing::debug!(%error, "learner removal failed; retrying");
                }
            }
        }
    }

    /// Open requests without a record that were neither rejected nor completed have expired.
    async fn publish_expired(&self, open: &mut BTreeSet<String>, records: &[Record]) {
        let is_missing = |node: &&String| records.iter().all(|record| record.request.node_id != **node);
        let missing: Vec<String> = open.iter().filter(is_missing).cloned().collect();
        if !missing.is_empty() {
            let Ok(members) = self.record().await else { return };
            for node in missing {
                if members.peers.iter().all(|peer| peer.node_id != node) {
                    self.publish_step(&node, "expired", "it was not completed in time");
                }
            }
        }
        let still = records.iter().filter(|record| record.state != "rejected");
        *open = still.map(|record| record.request.node_id.clone()).collect();
    }
}

fn now_ms() -> i64 {
    moim_base::Clock::wall_ms(&crate::clock::BootClock)
}

/// Seconds since a wall clock time; 0 when the clock went back.
fn since(at_ms: i64) -> f64 {
    now_ms().saturating_sub(at_ms).max(0) as f64 / 1e3
}

fn to_bytes(record: &Record) -> Bytes {
    serde_json::to_vec(record).expect("plain fields serialize to JSON").into()
}

impl Service for JoinRequests {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            let call = serde_json::from_slice::<JoinCall>(&request);
            let reply = match call {
                Ok(JoinCall::Status { nonce, .. }) => {
                    let founders = &self.identity.founders;
                    let is_founder = founders.iter().any(|one| one.nonce == nonce);
                    // A founder must be able to show the secret to the other founders.
                    let shown_to = |one: &Founder| match is_founder {
                        true => one.clone(),
                        false => Founder { nonce: String::new(), ..one.clone() },
                    };
                    let shown = FounderState {
                        app: self.config.app.clone(),
                        node_id: self.config.node_id.clone(),
                        directory: self.identity.directory.clone(),
                        acted: founders.iter().map(shown_to).collect(),
                        nonce: String::new(),
                        secret: is_founder.then(|| self.identity.secret.clone()),
                    };
                    return serde_json::to_vec(&shown).expect("plain data encodes as JSON").into();
                }
                Ok(call) => self.handle_call(call).await,
                Err(error) => JoinReply::Rejected { reason: format!("malformed join request: {error}") },
            };
            serde_json::to_vec(&reply).expect("plain data encodes as JSON").into()
        })
    }
}
