//! Loads the groups from the log.
//!
//! One loader reads one partition of `__consumer_offsets` from its start: a transaction marker in one partition says
//! nothing about another. Invariant: after all records the groups are what they were when the last of those records
//! was written: same offsets, same open transactions, same generation and members.

use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;

use super::api::{PersistToken, Protocol, TxnProducer};
use super::group::{Group, Member, Phase};
use super::offsets::{Committed, Offsets, TxnBatch};
use super::records::{self, GroupValue, Key, RecordError};
use super::{Config, Groups};

/// Rebuilds the groups of one partition; see the module comment.
#[derive(Default)]
pub struct Loader {
    groups: HashMap<Arc<str>, Loaded>,
    /// The groups with pending offsets of a producer's open transaction.
    open: HashMap<i64, Vec<Arc<str>>>,
    seq: u64,
}

#[derive(Default)]
struct Loaded {
    value: Option<GroupValue>,
    offsets: Offsets,
}

impl Loader {
    /// A loader before the first record.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies the next record; `txn` is the producer (id, epoch) if its batch is transactional.
    pub fn record(
        &mut self,
        key: Bytes,
        value: Option<Bytes>,
        txn: Option<(i64, i16)>,
    ) -> Result<(), RecordError> {
        self.seq += 1;
        match records::read_key(key)? {
            Key::Unknown(version) => tracing::debug!(version, "group record of unknown key version skipped"),
            Key::Group { group } => {
                let value = value.map(records::read_group_value).transpose()?;
                self.groups.entry(group).or_default().value = value;
            }
            Key::Offset { group, topic, partition } => {
                let value = value.map(records::read_offset_value).transpose()?;
                let offsets = &mut self.groups.entry(group.clone()).or_default().offsets;
                match (value, txn) {
                    (Some(value), None) => {
                        offsets.put((topic, partition), Committed { value, seq: self.seq })
                    }
                    (None, _) => offsets.on_tombstone(&topic, partition),
                    (Some(value), Some((id, epoch))) => {
                        let batch = TxnBatch {
                            write: PersistToken(self.seq),
                            durable: true,
                            decided: None,
                            offsets: vec![((topic, partition), value)],
                        };
                        offsets.begin_txn(TxnProducer { id, epoch }, batch);
                        self.open.entry(id).or_default().push(group);
                    }
                }
            }
        }
        Ok(())
    }

    /// Applies the next control marker. It ends the open transaction of its producer, under any epoch: the
    /// transaction of a fenced producer ends under a newer one.
    pub fn marker(&mut self, producer_id: i64, _epoch: i16, commit: bool) {
        for group in self.open.remove(&producer_id).unwrap_or_default() {
            if let Some(loaded) = self.groups.get_mut(&group) {
                loaded.offsets.on_marker(producer_id, PersistToken(u64::MAX), commit);
            }
        }
    }

    /// The groups of this partition alone.
    pub fn finish(self, now_ms: u64, wall_ms: i64, config: Config, seed: u128) -> Groups {
        let mut groups = Groups::new(config, seed);
        groups.set_wall_ms(now_ms, wall_ms);
        groups.install(now_ms, self);
        groups
    }

    pub(super) fn into_groups(self, now_ms: u64) -> (u64, impl Iterator<Item = Group>) {
        let alive = |(_, loaded): &(Arc<str>, Loaded)| loaded.value.is_some() || !loaded.offsets.is_empty();
        let groups = self.groups.into_iter().filter(alive);
        (self.seq, groups.map(move |(name, loaded)| group(name, loaded, now_ms)))
    }
}

/// Members get a full session timeout to send a heartbeat.
fn group(name: Arc<str>, loaded: Loaded, now_ms: u64) -> Group {
    // The offsets of a group that only ever committed offsets expire by their own age.
    let mut group = Group::new(name, -1);
    group.offsets = loaded.offsets;
    let Some(value) = loaded.value else { return group };
    group.protocol_type = Some(value.protocol_type).filter(|kind| !kind.is_empty());
    group.generation = value.generation;
    group.state_timestamp_ms = value.state_timestamp_ms;
    if value.members.is_empty() {
        return group;
    }
    group.phase = Phase::Stable;
    group.protocol = value.protocol;
    let protocol = group.protocol.clone().unwrap_or_default();
    for line in value.members {
        group.joins += 1;
        if let Some(instance) = &line.instance_id {
            group.instances.insert(instance.clone(), line.member_id.clone());
        }
        let mut member = Member {
            instance_id: line.instance_id,
            client_id: line.client_id,
            client_host: line.client_host,
            session_timeout_ms: u32::try_from(line.session_timeout_ms).unwrap_or(0),
            rebalance_timeout_ms: u32::try_from(line.rebalance_timeout_ms).unwrap_or(0),
            protocols: vec![Protocol { name: protocol.clone(), metadata: line.subscription }],
            assignment: line.assignment,
            awaiting_join: None,
            awaiting_sync: None,
            is_new: false,
            pending_sync: false,
            deadline: 0,
            joined: group.joins,
        };
        member.touch(now_ms);
        group.members.insert(line.member_id, member);
    }
    let known = value.leader.filter(|leader| group.members.contains_key(leader));
    group.leader = known.or_else(|| group.oldest_member());
    group.subscribed = group.read_subscriptions();
    group
}
