//! Cluster report and node operations of the admin API (`/api/v1/cluster`).
//!
//! The report is this node's local view, so it is available without a quorum; it states whether a quorum is reachable.

use std::sync::Arc;
use std::time::Duration;

use moim_coord::{Coordinator, SpaceId};
use moim_raft::{GroupMetrics, Member, VoterId};
use moim_state::StateRepository;
use moim_state::nodes::{NodeOrder, NodeRecord};
use serde::{Deserialize, Serialize};

use super::events::EventLog;
use super::failure_detector::FailureDetector;
use super::records::{self, NEXT_VOTER, RecordError};
use super::view::{PartitionCounts, Partitions, View};
use super::voters;
use crate::formation::fetch_card;
use crate::text::counted;

/// Timeout of the quorum check.
const QUORUM_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of the liveness probe of a node before its replacement.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Log lag, in entries, above which a member is reported.
const LAG: u64 = 10_000;

/// Response of `/api/v1/cluster`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterReport {
    /// The cluster.
    pub cluster_id: String,
    /// The node that says so.
    pub node_id: i32,
    /// Whether everything is as it should be.
    pub healthy: bool,
    /// What is not, in words.
    pub problems: Vec<String>,
    /// Whether this node reaches a quorum of the voters.
    pub quorum: bool,
    /// The node that leads the coordination group.
    pub leader: Option<i32>,
    /// The Raft term.
    pub term: u64,
    /// The last entry applied here.
    pub applied: u64,
    /// The revision of the clients' keys.
    pub revision: i64,
    /// Bytes of keys, values and history.
    pub db_bytes: u64,
    /// The format every node can take part in.
    pub feature_level: Option<u32>,
    /// The node that places partitions and elects their leaders.
    pub controller: Option<i32>,
    /// The partitions, of the queue and of the store.
    pub partitions: PartitionCounts,
    /// The nodes, by number.
    pub nodes: Vec<NodeReport>,
    /// Members of the coordination group that belong to no node: added by an etcd client, or about to leave.
    #[serde(default)]
    pub strangers: Vec<StrangerReport>,
}

/// A member of the coordination group without a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StrangerReport {
    /// Its voter id.
    pub voter: u64,
    /// `voter` or `learner`.
    pub role: String,
    /// Where the group looks for it.
    pub peer: String,
    /// Whether its node was removed or replaced, so that it is about to go.
    pub leaving: bool,
}

/// One node of the report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeReport {
    /// The stable number.
    pub node_id: i32,
    /// The Raft voter; null while a replacement is waited for.
    pub voter: Option<u64>,
    /// `leader`, `voter`, `learner`, `joining` or `replaced`.
    pub role: String,
    /// Whether it renews its lease.
    pub up: bool,
    /// What is wrong with its disk, as far as the node that reports knows.
    #[serde(default)]
    pub disk: Option<String>,
    /// Entries it is behind; null where only the leader knows.
    pub lag: Option<u64>,
    /// Told apart from every earlier life of the node; null while it is down.
    pub broker_epoch: Option<i64>,
    /// The life of its data folder.
    pub incarnation: u64,
    /// What is wanted of it: null, `drain` or `remove`.
    pub order: Option<NodeOrder>,
    /// Partitions it leads.
    pub leads: usize,
    /// Partitions it has a replica of.
    pub replicas: usize,
    /// Partitions whose only in-sync replica is on this node.
    pub only_copies: usize,
    /// For people.
    pub name: String,
    /// The failure domain.
    pub zone: Option<String>,
    /// Where other nodes reach it.
    pub peer: Option<String>,
    /// Where etcd clients reach it.
    pub etcd: Option<String>,
    /// Where Kafka clients reach it.
    pub kafka: Option<String>,
    /// Where Redis clients reach it.
    pub redis: Option<String>,
    /// Where its admin port is.
    pub admin: Option<String>,
    /// The Moim it runs.
    pub version: String,
    /// The newest cluster format it can take part in.
    pub feature_level: u32,
}

/// Cluster operations of the admin API.
pub(crate) struct ClusterApi {
    pub(crate) cluster_id: String,
    pub(crate) node_id: i32,
    pub(crate) coordinator: Coordinator,
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) events: Arc<EventLog>,
    pub(crate) failure_detector: Arc<FailureDetector>,
}

impl ClusterApi {
    /// True if this node reaches a quorum of the voters now or within a second, in case of an ongoing election.
    pub(crate) async fn sees_quorum(&self) -> bool {
        let confirmed = tokio::time::timeout(QUORUM_TIMEOUT, self.coordinator.linearizable()).await;
        matches!(confirmed, Ok(Ok(())))
    }

    /// Builds the cluster report.
    pub(crate) async fn report(&self) -> ClusterReport {
        let quorum = self.sees_quorum().await;
        let (view, metrics) = (View::of(&self.coordinator), self.coordinator.group().metrics());
        let status = self.coordinator.status();
        let node_of =
            |voter: u64| view.nodes.iter().find(|node| node.voter == voter).map(|node| node.node_id);
        // Without a quorum, the last known leader may be long dead.
        let leader = status.leader.filter(|_| quorum);
        let partitions = Partitions::of(&self.coordinator);
        let described = view.nodes.iter().map(|node| describe(node, &view, &metrics, leader, &partitions));
        let disks = self.failure_detector.impaired_disks();
        let problem_of = |node: &NodeReport| disks.get(&node.node_id).and_then(|disk| disk.problem());
        let nodes: Vec<_> =
            described.map(|node| NodeReport { disk: problem_of(&node).map(str::to_owned), ..node }).collect();
        let usable = nodes.iter().filter(|node| node.up && node.order.is_none()).count();
        let counts = partitions.counts(usable);
        let mut problems = problems(quorum, &nodes, &view, &metrics);
        problems.extend(partition_problems(&counts));
        let strangers = strangers(&view, &metrics.voters, &metrics.learners);
        ClusterReport {
            cluster_id: self.cluster_id.clone(),
            node_id: self.node_id,
            healthy: problems.is_empty(),
            problems,
            quorum,
            leader: leader.and_then(|leader| node_of(leader.0)),
            term: status.term,
            applied: status.applied,
            revision: self.coordinator.header(SpaceId::User).revision,
            db_bytes: status.db_size,
            feature_level: view.feature_level,
            controller: view.controller,
            partitions: counts,
            nodes,
            strangers,
        }
    }

    /// Removes a node from the cluster; with `force`, also one that still holds replicas.
    pub(crate) async fn remove(&self, node_id: i32, force: bool) -> Result<(), RecordError> {
        if !force {
            // Linearizable read: every change acknowledged before this request is visible afterwards.
            self.repository.get(NEXT_VOTER).await?;
            let held = Partitions::of(&self.coordinator).load(node_id).replicas;
            if held > 0 {
                return Err(RecordError::HasReplicas(node_id, held));
            }
        }
        records::remove(self.repository.as_ref(), node_id).await
    }

    /// Sets the order of a node; `None` deletes it.
    pub(crate) async fn order(&self, node_id: i32, order: Option<NodeOrder>) -> Result<(), RecordError> {
        records::set_order(self.repository.as_ref(), node_id, order).await
    }

    /// Retires a node's data directory and keeps its node id for a replacement. Rejected while the node runs.
    pub(crate) async fn replace(&self, node_id: i32) -> Result<(), RecordError> {
        if let Some((_, record)) = records::get(self.repository.as_ref(), node_id).await? {
            let card = fetch_card(&record.peer, PROBE_TIMEOUT).await;
            if card.is_ok_and(|card| card.directory_id == record.directory_id) {
                return Err(RecordError::Running(node_id));
            }
        }
        records::replace(self.repository.as_ref(), node_id).await
    }
}

/// Members of the group without a node.
fn strangers(view: &View, voters: &[Member], learners: &[Member]) -> Vec<StrangerReport> {
    let voters = voters.iter().map(|member| ("voter", member));
    let learners = learners.iter().map(|member| ("learner", member));
    let is_known = |id: u64| view.nodes.iter().any(|node| node.voter == id);
    let strangers = voters.chain(learners).filter(|(_, member)| !is_known(member.id.0));
    strangers
        .map(|(role, member)| StrangerReport {
            voter: member.id.0,
            role: role.to_owned(),
            peer: member.address.clone(),
            leaving: view.gone.contains(&member.id.0),
        })
        .collect()
}

fn describe(
    node: &NodeRecord,
    view: &View,
    metrics: &GroupMetrics,
    leader: Option<VoterId>,
    partitions: &Partitions,
) -> NodeReport {
    let is = |members: &[moim_raft::Member]| members.iter().any(|member| member.id.0 == node.voter);
    let role = match () {
        () if node.voter == 0 => "replaced",
        () if leader.is_some_and(|leader| leader.0 == node.voter) => "leader",
        () if is(&metrics.voters) => "voter",
        () if is(&metrics.learners) => "learner",
        () => "joining",
    };
    let live = view.members.iter().find(|member| {
        member.record.node_id == node.node_id && member.record.voter == node.voter && node.voter != 0
    });
    let matched = metrics.matched.iter().find(|(id, _)| id.0 == node.voter).and_then(|(_, at)| *at);
    let load = partitions.load(node.node_id);
    let address = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    NodeReport {
        node_id: node.node_id,
        voter: Some(node.voter).filter(|voter| *voter != 0),
        role: role.to_owned(),
        up: live.is_some(),
        disk: None,
        lag: matched.map(|at| metrics.last_index.unwrap_or(0).saturating_sub(at)),
        broker_epoch: live.map(|member| member.broker_epoch),
        incarnation: node.incarnation,
        order: view.orders.get(&node.node_id).copied(),
        leads: load.leads,
        replicas: load.replicas,
        only_copies: load.only_copies,
        name: node.name.clone(),
        zone: address(&node.zone),
        peer: address(&node.peer),
        etcd: address(&node.etcd),
        kafka: address(&node.kafka),
        redis: address(&node.redis),
        admin: address(&node.admin),
        version: node.version.clone(),
        feature_level: node.feature_level,
    }
}

fn partition_problems(counts: &PartitionCounts) -> Vec<String> {
    let kinds = [
        (counts.leaderless, "without a leader"),
        (counts.under_replicated, "with a replica that is not in sync"),
        (counts.under_min_isr, "with too few replicas in sync to take writes"),
        (counts.growing, "with fewer copies than the cluster has room for"),
    ];
    let describe = |(count, what): (usize, &str)| {
        (count > 0).then(|| format!("{} {what}", counted(count as u64, "partition")))
    };
    kinds.into_iter().filter_map(describe).collect()
}

fn problems(quorum: bool, nodes: &[NodeReport], view: &View, metrics: &GroupMetrics) -> Vec<String> {
    let mut problems = Vec::new();
    if !quorum {
        problems.push(format!("no quorum of the {} voters answers", metrics.voters.len()));
    }
    for node in nodes {
        let id = node.node_id;
        match (node.role.as_str(), node.up) {
            ("replaced", _) => problems.push(format!("node {id} waits for its replacement")),
            ("joining", _) => {
                problems.push(format!("node {id} is not a member of the coordination group yet"))
            }
            (_, false) if node.disk.is_some() => {}
            (_, false) => problems.push(format!("node {id} is down")),
            (_, true) => {}
        }
        if let Some(problem) = &node.disk {
            problems.push(format!("node {id}: {problem}"));
        }
        if let Some(lag) = node.lag.filter(|lag| *lag > LAG) {
            problems.push(format!("node {id} is {lag} entries behind"));
        }
    }
    let staying = view.nodes.iter().filter(|node| !view.leaving.contains(&node.voter)).count();
    let wanted = voters::wanted(staying);
    if metrics.voters.len() != wanted {
        problems.push(format!("{} voters instead of {wanted}", metrics.voters.len()));
    }
    for voter in metrics.voters.iter().filter(|voter| view.gone.contains(&voter.id.0)) {
        problems.push(format!("voter {} of a node that is gone still has its vote", voter.id));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_members_without_a_node_are_reported_as_strangers() {
        let member = |id: u64| Member { id: VoterId(id), address: format!("h{id}:1") };
        let (voters, learners) = ([member(1), member(2)], [member(3), member(7)]);
        let node = |voter: u64| NodeRecord { voter, ..NodeRecord::default() };
        let view = View { nodes: vec![node(1), node(3)], gone: vec![2], ..View::default() };
        let found = strangers(&view, &voters, &learners);
        let found: Vec<_> =
            found.iter().map(|s| (s.voter, s.role.as_str(), s.peer.as_str(), s.leaving)).collect();
        assert_eq!(found, [(2, "voter", "h2:1", true), (7, "learner", "h7:1", false)]);
    }
}
