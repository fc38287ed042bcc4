//! Cluster membership: the group's members, joined with the records that the nodes write.
//!
//! Raft knows voter ids and peer addresses; names and client addresses are in the node records (`/moim/nodes/…`), which
//! nodes write when they join. The leader makes membership changes; other nodes forward them.
//!
//! A member that is a node of the cluster holds more than coordination state. Removing it takes its vote away at once
//! and hides it from clients; its node stays a learner until its replicas have moved to other nodes, then stops by
//! itself. The removal record ([`LEAVING`]) prevents it from being added again by the nodes' membership reconciliation.

use std::time::Duration;

use moim_raft::{GroupError, GroupMetrics, Member, VoterId};
use serde::Deserialize;

use super::Inner;
use super::error::CoordError;
use super::leases::LeaderReply;
use super::peer::{MemberChange, PeerReply, PeerRequest};
use crate::request::{
    Command, Compare, CompareResult, CompareTarget, Op, PutRequest, RangeRequest, TxnOp, TxnRequest,
};

/// Prefix of the node records.
const NODES: &str = "/moim/nodes/";
const NODES_END: &str = "/moim/nodes0";
/// Voters that were removed and whose nodes are being drained, by voter id.
const LEAVING: &str = "/moim/voters/leaving/";
const LEAVING_END: &str = "/moim/voters/leaving0";
/// Voters whose nodes were removed, until the group has removed them too.
const GONE: &str = "/moim/voters/gone/";
const GONE_END: &str = "/moim/voters/gone0";
/// The requested action for a node, by node id.
const ORDERS: &str = "/moim/orders/";
/// How long a removal waits until the vote is taken away.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A member of the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberInfo {
    /// Its id in the Raft group, and the member id that clients see.
    pub voter: VoterId,
    /// The node it runs on, if its node record exists.
    pub node_id: Option<i32>,
    /// The node's name; empty until it has joined.
    pub name: String,
    /// Its peer address.
    pub peer_addr: String,
    /// Its client addresses.
    pub client_urls: Vec<String>,
    /// True if it is a learner.
    pub learner: bool,
}

/// The fields read from a node record.
#[derive(Deserialize)]
struct NodeRecord {
    node_id: i32,
    voter: u64,
    #[serde(default)]
    name: String,
    #[serde(default)]
    etcd: String,
}

fn has(members: &[Member], id: VoterId) -> bool {
    members.iter().any(|member| member.id == id)
}

fn is_member(metrics: &GroupMetrics, id: VoterId) -> bool {
    has(&metrics.voters, id) || has(&metrics.learners, id)
}

/// The transaction that orders a node to be drained and its voter to be removed.
fn drain_and_remove(id: VoterId, node_id: i32) -> TxnRequest {
    let node = format!("{NODES}{node_id}");
    let known = Compare {
        key: node.into(),
        range_end: Default::default(),
        target: CompareTarget::Version(0),
        result: CompareResult::Greater,
    };
    let leaving = PutRequest::new(format!("{LEAVING}{id}"), node_id.to_string());
    let order = PutRequest::new(format!("{ORDERS}{node_id}"), "remove");
    let success = vec![TxnOp::Put(leaving), TxnOp::Put(order)];
    TxnRequest { compares: vec![known], success, failure: Vec::new() }
}

impl Inner {
    /// The members known to this node.
    pub(super) fn members(&self) -> Vec<MemberInfo> {
        let metrics = self.group.metrics();
        let request = RangeRequest::between(NODES, NODES_END);
        let records = self.shared.state().range(&request).map(|reply| reply.kvs).unwrap_or_default();
        let records: Vec<NodeRecord> =
            records.iter().filter_map(|kv| serde_json::from_slice(&kv.value).ok()).collect();
        let voters = metrics.voters.into_iter().map(|member| (member, false));
        let learners = metrics.learners.into_iter().map(|member| (member, true));
        let known = voters.chain(learners).map(|(member, learner)| {
            let record = records.iter().find(|record| record.voter == member.id.0);
            MemberInfo {
                voter: member.id,
                node_id: record.map(|record| record.node_id),
                name: record.map(|record| record.name.clone()).unwrap_or_default(),
                peer_addr: member.address,
                client_urls: record
                    .map(|record| record.etcd.as_str())
                    .filter(|address| !address.is_empty())
                    .map(|address| format!("http://{address}"))
                    .into_iter()
                    .collect(),
                learner,
            }
        });
        let leaving = self.leaving();
        let mut members: Vec<MemberInfo> =
            known.filter(|member| !leaving.contains(&member.voter.0)).collect();
        members.sort_by_key(|member| member.voter);
        members
    }

    /// Removed voters that are still in the Raft group.
    fn leaving(&self) -> Vec<u64> {
        let mut found = Vec::new();
        for (prefix, end) in [(LEAVING, LEAVING_END), (GONE, GONE_END)] {
            let request = RangeRequest::between(prefix, end);
            let kvs = self.shared.state().range(&request).map(|reply| reply.kvs).unwrap_or_default();
            let voter = |key: &[u8]| std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.parse::<u64>().ok();
            found.extend(kvs.iter().filter_map(|kv| voter(&kv.key)));
        }
        found
    }

    /// Removes a member for good: it has no vote when this returns, and it is not added again.
    pub(super) async fn remove_member(&self, id: VoterId) -> Result<(), CoordError> {
        if self.leaving().contains(&id.0) {
            return Err(CoordError::MemberNotFound);
        }
        let members = self.members();
        let Some(node_id) = members.iter().find(|member| member.voter == id).and_then(|m| m.node_id) else {
            return self.change_members(MemberChange::Remove(id)).await;
        };
        if !members.iter().any(|member| member.voter != id && member.node_id.is_some()) {
            return Err(CoordError::NotEnoughMembers);
        }
        self.submit(&Command::node(Op::Txn(drain_and_remove(id, node_id))), None).await?;
        let vote_removed = async {
            while has(&self.group.metrics().voters, id) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(REMOVAL_TIMEOUT, vote_removed).await.map_err(|_| CoordError::Timeout)
    }

    /// Forwards a membership change to the leader.
    pub(super) async fn change_members(&self, change: MemberChange) -> Result<(), CoordError> {
        let known = self.group.metrics();
        let request = PeerRequest::Change(change.clone());
        let outcome = self.ask_leader(request, || self.change_members_on_leader(change.clone())).await;
        match (outcome, change) {
            (Ok(LeaderReply::Local(()) | LeaderReply::Peer(PeerReply::Done)), _) => Ok(()),
            (Ok(LeaderReply::Peer(_)), _) => Err(CoordError::Timeout),
            // A leader that failed during the change may have made it: the requested state is a success.
            (Err(CoordError::MemberNotFound), MemberChange::Remove(id)) if is_member(&known, id) => Ok(()),
            (Err(CoordError::NotLearner), MemberChange::Promote(id)) if has(&known.learners, id) => Ok(()),
            (Err(error), _) => Err(error),
        }
    }

    /// Changes the membership, on the leader itself.
    pub(super) async fn change_members_on_leader(&self, change: MemberChange) -> Result<(), CoordError> {
        let metrics = self.group.metrics();
        let done = match change {
            MemberChange::AddLearner(member) => {
                let mut others = metrics.voters.iter().chain(&metrics.learners);
                if others.any(|other| other.address == member.address && other.id != member.id) {
                    return Err(CoordError::MemberExists);
                }
                if has(&metrics.voters, member.id) {
                    return Ok(());
                }
                self.group.add_learner(&member).await
            }
            MemberChange::Promote(id) => {
                if has(&metrics.voters, id) {
                    return Err(CoordError::NotLearner);
                }
                if !is_member(&metrics, id) {
                    return Err(CoordError::MemberNotFound);
                }
                let promoted = self.group.promote(&[id]).await;
                if let Err(GroupError::Refused(_)) = promoted {
                    return Err(CoordError::LearnerNotReady);
                }
                promoted
            }
            MemberChange::Remove(id) => {
                if !is_member(&metrics, id) {
                    return Err(CoordError::MemberNotFound);
                }
                self.group.remove(id).await
            }
            MemberChange::UpdateAddress(member) => {
                if !is_member(&metrics, member.id) {
                    return Err(CoordError::MemberNotFound);
                }
                self.group.set_address(&member).await
            }
            MemberChange::Transfer(id) => {
                if !has(&metrics.voters, id) {
                    return Err(CoordError::BadLeaderTransferee);
                }
                if metrics.leadership.leader == Some(id) {
                    return Ok(());
                }
                self.group.transfer_leadership(id).await
            }
        };
        done.map_err(CoordError::of_group)
    }
}
