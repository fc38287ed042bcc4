//! The record of one partition: who holds it, who is in sync, who leads.
//!
//! It is the JSON value of `/moim/partitions/<topic id>/<n>` and the only truth about leadership. Changes are made by
//! [`crate::transition`] alone; this file holds the form and what is true of every record.
//!
//! Invariants (checked by [`PartitionState::check`], on what is read and on what is written):
//! - the leader is in the in-sync set;
//! - the sets `isr`, `eligible` and `last_known` do not meet, and hold replicas only;
//! - `eligible` is empty while the in-sync set has the minimum: only below it does the high watermark stand still, and
//!   only then does somebody who left the in-sync set still have everything that is committed.

use moim_base::{BrokerId, LeaderEpoch};
use serde::{Deserialize, Serialize};

use crate::types::{BrokerEpoch, DirectoryId, Durability};

/// A replica of which something is known, and the run and data directory it is known of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "(i32, i64, u64)", into = "(i32, i64, u64)")]
pub struct InSync {
    /// Which node.
    pub node: BrokerId,
    /// In which run. A node that finds another run here than its own was not meant.
    pub epoch: BrokerEpoch,
    /// On which data directory.
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

/// Who holds a partition, who is in sync, who leads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartitionState {
    /// Every node that has or is getting a copy; the first is the preferred leader.
    pub replicas: Vec<BrokerId>,
    /// Those of `replicas` that a reassignment brings in.
    pub adding: Vec<BrokerId>,
    /// Those of `replicas` that a reassignment takes out.
    pub removing: Vec<BrokerId>,
    /// The replicas a commit waits for.
    pub isr: Vec<InSync>,
    /// Out of the in-sync set, and still with everything that is committed: may be elected when nobody in sync is left.
    pub eligible: Vec<InSync>,
    /// Left the in-sync and eligible sets because a crash may have cost them data. When nobody better is left, the
    /// one with the longest log of all of these is elected, once all are back.
    pub last_known: Vec<InSync>,
    /// Who leads; nobody when no replica may.
    pub leader: Option<BrokerId>,
    /// Counts leaderships. Grows with every election, also of the same node.
    pub leader_epoch: LeaderEpoch,
    /// The resolved `min.insync.replicas`. In the record, so that the leader and the controller never differ on it.
    pub min_isr: u32,
    /// What the high watermark is computed from. In the record for the same reason.
    pub durability: Durability,
    /// The leader epoch of the last election that may have lost committed records, if there was one.
    pub unclean: Option<LeaderEpoch>,
    /// The leader epoch whose leader put on record that it had stopped answering: who leads in the epoch after it need
    /// not wait for its serving right to run out.
    pub released: Option<LeaderEpoch>,
    /// How many replicas it is to have again, when a node was removed and there were too few others to take its place.
    pub wanted: Option<u32>,
    /// Counts changes of this record.
    pub version: u64,
}

/// Why bytes are not the record of a partition.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not the JSON that is expected.
    #[error("a partition record is not understood: {0}")]
    Json(#[from] serde_json::Error),
    /// It contradicts itself.
    #[error("a partition record contradicts itself: {0}")]
    Broken(&'static str),
}

impl PartitionState {
    /// How many in-sync replicas the high watermark needs to move. Never more than there are settled replicas: a
    /// reassignment that has just begun must not stop the partition.
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

    /// Whether this run of this node leads. A node that was restarted does not lead on the strength of a record that
    /// names its former run.
    pub fn is_led_by(&self, node: BrokerId, epoch: BrokerEpoch) -> bool {
        self.leader == Some(node) && self.in_sync(node).is_some_and(|member| member.epoch == epoch)
    }

    /// Whether the leader before the present one had stopped answering before it was replaced.
    pub fn follows_a_release(&self) -> bool {
        self.released.is_some_and(|epoch| epoch.0 + 1 == self.leader_epoch.0)
    }

    /// Where a reassignment is going, or where the partition is.
    pub fn target(&self) -> Vec<BrokerId> {
        self.replicas.iter().copied().filter(|node| !self.removing.contains(node)).collect()
    }

    /// Where the partition is as long as a reassignment has not ended.
    pub fn settled(&self) -> Vec<BrokerId> {
        self.replicas.iter().copied().filter(|node| !self.adding.contains(node)).collect()
    }

    /// Whether a reassignment brings a replica to this node and it is not in sync yet.
    pub fn is_arriving(&self, node: BrokerId) -> bool {
        self.adding.contains(&node) && self.in_sync(node).is_none()
    }

    /// Whether replicas are being moved.
    pub fn is_moving(&self) -> bool {
        !self.adding.is_empty() || !self.removing.is_empty()
    }

    /// The record as the repository holds it.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(&Json::from(self.clone())).expect("a record of numbers is JSON")
    }

    /// Reads what [`PartitionState::encode`] wrote, and checks it.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let state = Self::from(serde_json::from_slice::<Json>(bytes)?);
        state.check().map_err(StateError::Broken)?;
        Ok(state)
    }

    /// What is wrong with it, if anything is.
    pub fn check(&self) -> Result<(), &'static str> {
        let replica = |node: &BrokerId| self.replicas.contains(node);
        let known = |members: &[InSync]| members.iter().all(|member| replica(&member.node));
        let nodes = |members: &[InSync]| members.iter().map(|member| member.node).collect::<Vec<_>>();
        let mut trusted = nodes(&self.isr);
        trusted.extend(nodes(&self.eligible));
        trusted.extend(nodes(&self.last_known));
        let rules = [
            (!self.replicas.is_empty(), "it has no replicas"),
            (distinct(&self.replicas), "a replica is named twice"),
            (self.adding.iter().chain(&self.removing).all(replica), "a moving node is not a replica"),
            (distinct(&self.adding) && distinct(&self.removing), "a moving node is named twice"),
            (!self.adding.iter().any(|node| self.removing.contains(node)), "a node is added and removed"),
            (known(&self.isr) && known(&self.eligible) && known(&self.last_known), "a member is no replica"),
            (distinct(&trusted), "a member is named twice"),
            (self.leader.is_none_or(|leader| self.in_sync(leader).is_some()), "the leader is not in sync"),
            (self.min_isr >= 1, "the minimum is zero"),
            (self.leader_epoch.0 >= 0, "the leader epoch is negative"),
            (self.eligible.is_empty() || self.isr.len() < self.effective_min(), "nobody needs the eligible"),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, broken)| Err(*broken))
    }
}

fn distinct(nodes: &[BrokerId]) -> bool {
    nodes.iter().enumerate().all(|(at, node)| !nodes[..at].contains(node))
}

/// The record as it is stored. Empty lists are left out: most records have three of them.
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
    fn the_stored_form_is_fixed() {
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
    fn a_record_of_a_newer_version_with_more_fields_is_read() {
        let text = r#"{"replicas":[1],"isr":[[1,10,1]],"leader":1,"leader_epoch":0,"min_isr":1,"version":1,"later":{}}"#;
        assert_eq!(PartitionState::decode(text.as_bytes()).unwrap().replicas, [BrokerId(1)]);
    }

    #[test]
    fn a_record_that_contradicts_itself_is_refused() {
        let check = |change: fn(&mut PartitionState), why: &str| {
            let mut state = three();
            change(&mut state);
            assert_eq!(state.check(), Err(why).map_err(|w| Box::leak(w.to_owned().into_boxed_str()) as &str));
            assert!(PartitionState::decode(&state.encode()).is_err(), "{why}");
        };
        check(|s| s.leader = Some(BrokerId(9)), "the leader is not in sync");
        check(|s| s.isr.push(member(1, 10)), "a member is named twice");
        check(|s| s.isr.push(member(7, 10)), "a member is no replica");
        check(|s| s.replicas.push(BrokerId(1)), "a replica is named twice");
        check(|s| s.min_isr = 0, "the minimum is zero");
        check(
            |s| {
                s.isr.pop();
                s.eligible = vec![member(3, 12)];
            },
            "nobody needs the eligible",
        );
    }

    #[test]
    fn replicas_that_are_being_added_do_not_raise_the_minimum() {
        let mut state = three();
        state.adding = vec![BrokerId(2), BrokerId(3)];
        assert_eq!(state.effective_min(), 1);
        state.adding.clear();
        assert_eq!(state.effective_min(), 2);
        state.min_isr = 5;
        assert_eq!(state.effective_min(), 3);
    }

    #[test]
    fn a_restarted_node_does_not_lead_on_an_old_record() {
        assert!(three().is_led_by(BrokerId(1), BrokerEpoch(10)));
        assert!(!three().is_led_by(BrokerId(1), BrokerEpoch(20)));
        assert!(!three().is_led_by(BrokerId(2), BrokerEpoch(11)));
    }
}
