//! The partition record: replicas, in-sync set, leader.
//!
//! It is the JSON value of `/moim/partitions/<topic id>/<n>` and the only source of truth about leadership. Only
//! [`crate::transition`] changes it; this file owns its format and the invariants of every record.
//!
//! Invariants (checked by [`PartitionState::check`] on every read and every write):
//! - the leader is in the in-sync set;
//! - the sets `isr`, `eligible` and `last_known` are disjoint, and contain only replicas;
//! - `eligible` is empty while the in-sync set has the minimum. Only below the minimum does the high watermark stand
//!   still, and only then does a replica that left the in-sync set still have every committed record.

use moim_base::{BrokerId, LeaderEpoch};
use serde::{Deserialize, Serialize};

use crate::types::{BrokerEpoch, DirectoryId, Durability};

/// A replica entry, bound to the broker epoch and the data directory for which it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "(i32, i64, u64)", into = "(i32, i64, u64)")]
pub struct InSync {
    /// The node id.
    pub node: BrokerId,
    /// The broker epoch. An entry with another broker epoch does not apply to the node's present run.
    pub epoch: BrokerEpoch,
    /// The data directory.
    pub directory: DirectoryId,
}

impl From<(i32, i64, u64)> for InSync {
    fn from((node, epoch, directory): (i32, i64, u64)) -> Self {
        Self { node: BrokerId(node), epoch: BrokerEpoch(epoch), directory: DirectoryId(directory) }
    }
}

impl From<InSync> for (i32, i64, u64) {
    fn from(member: InSync) -> Self {
        (member.node.0, member.epoch.0, member.directory.0)
    }
}

/// The partition record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartitionState {
    /// Every node that has a replica or is receiving one; the first is the preferred leader.
    pub replicas: Vec<BrokerId>,
    /// The members of `replicas` that a reassignment adds.
    pub adding: Vec<BrokerId>,
    /// The members of `replicas` that a reassignment removes.
    pub removing: Vec<BrokerId>,
    /// The in-sync set: the replicas that a commit waits for.
    pub isr: Vec<InSync>,
    /// Replicas outside the in-sync set that still have every committed record: electable when the in-sync set is
    /// empty.
    pub eligible: Vec<InSync>,
    /// Replicas that left the in-sync and eligible sets because a crash may have lost their data. If no in-sync or
    /// eligible replica is left, the one with the longest log of these is elected, once all of them are back.
    pub last_known: Vec<InSync>,
    /// The leader; `None` when no replica may lead.
    pub leader: Option<BrokerId>,
    /// Counts leaderships. Grows with every election, even of the same node.
    pub leader_epoch: LeaderEpoch,
    /// The resolved `min.insync.replicas`. It is part of the record so that the leader and the controller never
    /// differ on it.
    pub min_isr: u32,
    /// The durability from which the high watermark is computed. It is part of the record for the same reason.
    pub durability: Durability,
    /// The leader epoch of the last unclean election (one that may have lost committed records), if there was one.
    pub unclean: Option<LeaderEpoch>,
    /// The leader epoch whose leader recorded that it had stopped answering. The leader of the next epoch need not
    /// wait for that serving right to expire.
    pub released: Option<LeaderEpoch>,
    /// The replication factor to restore, if a node was removed and too few other nodes could replace it.
    pub wanted: Option<u32>,
    /// Counts the changes of this record.
    pub version: u64,
}

/// Why bytes are not a valid partition record.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The value is not the expected JSON.
    #[error("undecodable partition record: {0}")]
    Json(#[from] serde_json::Error),
    /// The record violates an invariant.
    #[error("partition record violates an invariant: {0}")]
    Broken(&'static str),
}

impl PartitionState {
    /// The number of in-sync replicas that the high watermark needs in order to advance. Never more than the number
    /// of settled replicas: a reassignment that has just begun must not stop the partition.
    pub fn effective_min(&self) -> usize {
        let settled = self.replicas.len() - self.adding.len();
        (self.min_isr as usize).min(settled).max(1)
    }

    /// The in-sync entry of a node.
    pub fn in_sync(&self, node: BrokerId) -> Option<&InSync> {
        self.isr.iter().find(|member| member.node == node)
    }

    /// The eligible entry of a node.
    pub fn eligible(&self, node: BrokerId) -> Option<&InSync> {
        self.eligible.iter().find(|member| member.node == node)
    }

    /// True if this run of this node leads. A restarted node does not lead because of a record that names its former
    /// run.
    pub fn is_led_by(&self, node: BrokerId, epoch: BrokerEpoch) -> bool {
        self.leader == Some(node) && self.in_sync(node).is_some_and(|member| member.epoch == epoch)
    }

    /// True if the previous leader had stopped answering before it was replaced.
    pub fn follows_a_release(&self) -> bool {
        self.released.is_some_and(|epoch| epoch.0 + 1 == self.leader_epoch.0)
    }

    /// The replicas after the reassignment in progress, or the present ones.
    pub fn target(&self) -> Vec<BrokerId> {
        self.replicas.iter().copied().filter(|node| !self.removing.contains(node)).collect()
    }

    /// The replicas before the reassignment in progress, or the present ones.
    pub fn settled(&self) -> Vec<BrokerId> {
        self.replicas.iter().copied().filter(|node| !self.adding.contains(node)).collect()
    }

    /// True if a reassignment adds a replica on this node and it is not in sync yet.
    pub fn is_arriving(&self, node: BrokerId) -> bool {
        self.adding.contains(&node) && self.in_sync(node).is_none()
    }

    /// True while a reassignment is in progress.
    pub fn is_moving(&self) -> bool {
        !self.adding.is_empty() || !self.removing.is_empty()
    }

    /// The record as stored in the state repository.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(&Json::from(self.clone())).expect("a partition record encodes to JSON")
    }

    /// Decodes the output of [`PartitionState::encode`] and checks the invariants.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let state = Self::from(serde_json::from_slice::<Json>(bytes)?);
        state.check().map_err(StateError::Broken)?;
        Ok(state)
    }

    /// The first violated invariant, if any.
    pub fn check(&self) -> Result<(), &'static str> {
        let replica = |node: &BrokerId| self.replicas.contains(node);
        let known = |members: &[InSync]| members.iter().all(|member| replica(&member.node));
        let nodes = |members: &[InSync]| members.iter().map(|member| member.node).collect::<Vec<_>>();
        let mut trusted = nodes(&self.isr);
        trusted.extend(nodes(&self.eligible));
        trusted.extend(nodes(&self.last_known));
        let rules = [
            (!self.replicas.is_empty(), "no replicas"),
            (distinct(&self.replicas), "duplicate replica"),
            (self.adding.iter().chain(&self.removing).all(replica), "reassigned node is not a replica"),
            (distinct(&self.adding) && distinct(&self.removing), "duplicate node in reassignment"),
            (!self.adding.iter().any(|node| self.removing.contains(node)), "node both added and removed"),
            (
                known(&self.isr) && known(&self.eligible) && known(&self.last_known),
                "in-sync, eligible or last-known member is not a replica",
            ),
            (distinct(&trusted), "duplicate in-sync, eligible or last-known member"),
            (
                self.leader.is_none_or(|leader| self.in_sync(leader).is_some()),
                "leader is not in the in-sync set",
            ),
            (self.min_isr >= 1, "minimum in-sync replicas is zero"),
            (self.leader_epoch.0 >= 0, "negative leader epoch"),
            (
                self.eligible.is_empty() || self.isr.len() < self.effective_min(),
                "eligible set not empty above the minimum",
            ),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, broken)| Err(*broken))
    }
}

fn distinct(nodes: &[BrokerId]) -> bool {
    nodes.iter().enumerate().all(|(at, node)| !nodes[..at].contains(node))
}

/// The stored form. Empty lists are omitted: most records have three of them.
#[derive(Serialize, Deserialize)]
struct Json {
    replicas: Vec<i32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    adding: Vec<i32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    removing: Vec<i32>,
    isr: Vec<InSync>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    eligible: Vec<InSync>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    last_known: Vec<InSync>,
    leader: Option<i32>,
    leader_epoch: i32,
    min_isr: u32,
    #[serde(default)]
    durability: JsonDurability,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unclean: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    released: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wanted: Option<u32>,
    version: u64,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum JsonDurability {
    #[default]
    Fsync,
    Replicated,
}

impl From<PartitionState> for Json {
    fn from(state: PartitionState) -> Self {
        let numbers = |nodes: Vec<BrokerId>| nodes.into_iter().map(|node| node.0).collect();
        Self {
            replicas: numbers(state.replicas),
            adding: numbers(state.adding),
            removing: numbers(state.removing),
            isr: state.isr,
            eligible: state.eligible,
            last_known: state.last_known,
            leader: state.leader.map(|node| node.0),
            leader_epoch: state.leader_epoch.0,
            min_isr: state.min_isr,
            durability: match state.durability {
                Durability::Fsync => JsonDurability::Fsync,
                Durability::Replicated => JsonDurability::Replicated,
            },
            unclean: state.unclean.map(|epoch| epoch.0),
            released: state.released.map(|epoch| epoch.0),
            wanted: state.wanted,
            version: state.version,
        }
    }
}

impl From<Json> for PartitionState {
    fn from(json: Json) -> Self {
        let nodes = |numbers: Vec<i32>| numbers.into_iter().map(BrokerId).collect();
        Self {
            replicas: nodes(json.replicas),
            adding: nodes(json.adding),
            removing: nodes(json.removing),
            isr: json.isr,
            eligible: json.eligible,
            last_known: json.last_known,
            leader: json.leader.map(BrokerId),
            leader_epoch: LeaderEpoch(json.leader_epoch),
            min_isr: json.min_isr,
            durability: match json.durability {
                JsonDurability::Fsync => Durability::Fsync,
                JsonDurability::Replicated => Durability::Replicated,
            },
            unclean: json.unclean.map(LeaderEpoch),
            released: json.released.map(LeaderEpoch),
            wanted: json.wanted,
            version: json.version,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(node: i32, epoch: i64) -> InSync {
        (node, epoch, node as u64).into()
    }

    fn three() -> PartitionState {
        PartitionState {
            replicas: vec![BrokerId(1), BrokerId(2), BrokerId(3)],
            adding: vec![],
            removing: vec![],
            isr: vec![member(1, 10), member(2, 11), member(3, 12)],
            eligible: vec![],
            last_known: vec![],
            leader: Some(BrokerId(1)),
            leader_epoch: LeaderEpoch(4),
            min_isr: 2,
            durability: Durability::Fsync,
            unclean: None,
            released: None,
            wanted: None,
            version: 9,
        }
    }

    #[test]
    fn stored_json_format_is_stable() {
        let golden = r#"{"replicas":[1,2,3],"isr":[[1,10,1],[2,11,2],[3,12,3]],"leader":1,"leader_epoch":4,"min_isr":2,"durability":"fsync","version":9}"#;
        assert_eq!(String::from_utf8(three().encode()).unwrap(), golden);
        assert_eq!(PartitionState::decode(golden.as_bytes()).unwrap(), three());
        let mut full = three();
        full.adding = vec![BrokerId(3)];
        full.isr = vec![member(1, 10)];
        full.eligible = vec![member(2, 11)];
        full.last_known = vec![member(3, 12)];
        full.durability = Durability::Replicated;
        full.unclean = Some(LeaderEpoch(2));
        full.released = Some(LeaderEpoch(3));
        full.wanted = Some(4);
        assert_eq!(PartitionState::decode(&full.encode()).unwrap(), full);
    }

    #[test]
    fn record_with_unknown_fields_is_decoded() {
        let text = r#"{"replicas":[1],"isr":[[1,10,1]],"leader":1,"leader_epoch":0,"min_isr":1,"version":1,"later":{}}"#;
        assert_eq!(PartitionState::decode(text.as_bytes()).unwrap().replicas, [BrokerId(1)]);
    }

    #[test]
    fn record_that_violates_an_invariant_is_refused() {
        let check = |change: fn(&mut PartitionState), why: &str| {
            let mut state = three();
            change(&mut state);
            assert_eq!(state.check(), Err(why).map_err(|w| Box::leak(w.to_owned().into_boxed_str()) as &str));
            assert!(PartitionState::decode(&state.encode()).is_err(), "{why}");
        };
        check(|s| s.leader = Some(BrokerId(9)), "leader is not in the in-sync set");
        check(|s| s.isr.push(member(1, 10)), "duplicate in-sync, eligible or last-known member");
        check(|s| s.isr.push(member(7, 10)), "in-sync, eligible or last-known member is not a replica");
        check(|s| s.replicas.push(BrokerId(1)), "duplicate replica");
        check(|s| s.min_isr = 0, "minimum in-sync replicas is zero");
        check(
            |s| {
                s.isr.pop();
                s.eligible = vec![member(3, 12)];
            },
            "eligible set not empty above the minimum",
        );
    }

    #[test]
    fn adding_replicas_do_not_raise_the_effective_minimum() {
        let mut state = three();
        state.adding = vec![BrokerId(2), BrokerId(3)];
        assert_eq!(state.effective_min(), 1);
        state.adding.clear();
        assert_eq!(state.effective_min(), 2);
        state.min_isr = 5;
        assert_eq!(state.effective_min(), 3);
    }

    #[test]
    fn restarted_node_does_not_lead_by_a_record_of_its_former_run() {
        assert!(three().is_led_by(BrokerId(1), BrokerEpoch(10)));
        assert!(!three().is_led_by(BrokerId(1), BrokerEpoch(20)));
        assert!(!three().is_led_by(BrokerId(2), BrokerEpoch(11)));
    }
}
