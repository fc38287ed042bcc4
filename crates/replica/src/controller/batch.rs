//! Packs changes into transactions: as few as the repository's limits allow, each fenced by the controller's term.
//!
//! A transaction applies all of its changes or none. If a comparison fails (a leader changed its in-sync set
//! concurrently, a member died), the affected changes are left out and the rest is retried at once, so that one busy
//! partition does not delay a hundred others.

use bytes::Bytes;
use moim_base::BrokerId;
use moim_state::repository::{MAX_TXN_BYTES, MAX_TXN_OPS};
use moim_state::{Compare, Entry, Op, Txn};

use crate::keys;
use crate::transition::{Change, Expected};
use crate::types::BrokerEpoch;

/// Changes that are written in one transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The changes of the transaction.
    pub changes: Vec<Change>,
    term: Option<i64>,
}

/// The reaction to a conflict.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Conflict {
    /// Another controller was elected: stop.
    Deposed,
    /// Some changes cannot be made; the others are retried.
    Retry {
        /// The remaining changes, if any.
        rest: Option<Batch>,
        /// The omitted changes; their records must be examined again.
        failed: Vec<Change>,
    },
}

/// Packs changes, in order, into transactions. `term` is the controller's; a leader's own change has none.
pub fn pack(changes: Vec<Change>, term: Option<i64>) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut batch = Batch { changes: Vec::new(), term };
    let (mut compares, mut bytes) = (1, 0);
    for change in changes {
        let size = 64 + change.next.as_ref().map_or(0, |next| next.encode().len());
        let ops = batch.changes.len() + 1 + batch.fences().len() + usize::from(change.fence.is_some());
        let full = compares + batch.cost(&change) > MAX_TXN_OPS
            || ops > MAX_TXN_OPS
            || bytes + size > MAX_TXN_BYTES / 2;
        if full && !batch.changes.is_empty() {
            let next = Batch { changes: Vec::new(), term };
            batches.push(std::mem::replace(&mut batch, next));
            (compares, bytes) = (1, 0);
        }
        compares += batch.cost(&change);
        bytes += size;
        batch.changes.push(change);
    }
    if !batch.changes.is_empty() {
        batches.push(batch);
    }
    batches
}

impl Batch {
    /// The transaction that writes the changes.
    pub fn txn(&self) -> Txn {
        let compares = self.compares().into_iter().map(|(compare, _)| compare).collect();
        let op = |change: &Change| {
            let key = keys::partition(change.partition);
            match &change.next {
                Some(next) => Op::Put { key, value: Bytes::from(next.encode()), lease: None },
                None => Op::Delete { key },
            }
        };
        let mut ops: Vec<Op> = self.changes.iter().map(op).collect();
        ops.extend(self.fences().into_iter().map(|node| Op::Put {
            key: keys::fence(node),
            // Only the new revision matters, not the value.
            value: Bytes::from_static(b"{}"),
            lease: None,
        }));
        Txn { compares, ops }
    }

    /// The remaining changes after a conflict; `current` holds the entry that each comparison of [`Batch::txn`]
    /// found.
    pub fn on_conflict(self, current: &[Option<Entry>]) -> Conflict {
        let mut failed = vec![false; self.changes.len()];
        let compares = self.compares();
        for ((compare, whose), found) in compares.iter().zip(current) {
            if holds(compare, found.as_ref()) {
                continue;
            }
            match whose {
                Whose::Controller => return Conflict::Deposed,
                Whose::Change(at) => failed[*at] = true,
                Whose::Member(guard) => {
                    for (at, change) in self.changes.iter().enumerate() {
                        failed[at] |= change.members.contains(guard);
                    }
                }
                Whose::Topic(topic) => {
                    for (at, change) in self.changes.iter().enumerate() {
                        failed[at] |= change.topic.as_ref() == Some(topic);
                    }
                }
            }
        }
        if !failed.contains(&true) {
            // The key changed back meanwhile, or the answer is not understood: no change is retried blindly.
            failed.fill(true);
        }
        let mut marks = failed.iter();
        let (failed, rest): (Vec<Change>, Vec<Change>) =
            self.changes.into_iter().partition(|_| marks.next() == Some(&true));
        let rest = (!rest.is_empty()).then_some(Batch { changes: rest, term: self.term });
        Conflict::Retry { rest, failed }
    }

    fn compares(&self) -> Vec<(Compare, Whose)> {
        let mut compares = Vec::new();
        if let Some(term) = self.term {
            let compare = Compare::CreateRevision(keys::CONTROLLER.to_owned(), term);
            compares.push((compare, Whose::Controller));
        }
        let mut members = Vec::new();
        let mut topics = Vec::new();
        for (at, change) in self.changes.iter().enumerate() {
            let key = keys::partition(change.partition);
            let compare = match change.expected {
                Expected::Absent => Compare::Absent(key),
                Expected::Revision(revision) => Compare::ModRevision(key, revision),
            };
            compares.push((compare, Whose::Change(at)));
            for guard in &change.members {
                if !members.contains(guard) {
                    members.push(*guard);
                }
            }
            if let Some(topic) = &change.topic
                && !topics.contains(topic)
            {
                topics.push(topic.clone());
            }
        }
        for (node, epoch) in members {
            let compare = Compare::CreateRevision(keys::member(node), epoch.0);
            compares.push((compare, Whose::Member((node, epoch))));
        }
        for (key, revision) in topics {
            let compare = Compare::CreateRevision(key.clone(), revision);
            compares.push((compare, Whose::Topic((key, revision))));
        }
        compares
    }

    fn fences(&self) -> Vec<BrokerId> {
        let mut nodes: Vec<BrokerId> = self.changes.iter().filter_map(|change| change.fence).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// The number of comparisons that a further change adds.
    fn cost(&self, change: &Change) -> usize {
        let new = |guard: &&(BrokerId, BrokerEpoch)| {
            !self.changes.iter().any(|other| other.members.contains(guard))
        };
        let topic = change.topic.is_some() && !self.changes.iter().any(|other| other.topic == change.topic);
        1 + change.members.iter().filter(new).count() + usize::from(topic)
    }
}

/// The subject of a comparison.
enum Whose {
    Controller,
    Change(usize),
    Member((BrokerId, BrokerEpoch)),
    Topic((String, i64)),
}

fn holds(compare: &Compare, found: Option<&Entry>) -> bool {
    match (compare, found) {
        (Compare::Absent(_), found) => found.is_none(),
        (_, None) => false,
        (Compare::Present(_), Some(_)) => true,
        (Compare::ModRevision(_, revision), Some(entry)) => entry.mod_revision == *revision,
        (Compare::CreateRevision(_, revision), Some(entry)) => entry.create_revision == *revision,
        (Compare::Value(_, value), Some(entry)) => entry.value == *value,
    }
}

#[cfg(test)]
mod tests {
    use moim_base::TopicId;

    use super::*;
    use crate::state::PartitionState;
    use crate::types::{Durability, PartitionId, Versioned};

    fn change(index: u32, member: i32) -> Change {
        let state = PartitionState::new(
            vec![(1, 101, 1).into(), (2, 102, 2).into(), (3, 103, 3).into()],
            2,
            Durability::Fsync,
        );
        let mut draft = crate::transition::Draft::new(&Versioned { revision: 50, value: state });
        assert!(draft.elect(BrokerId(member)));
        draft.finish(PartitionId { topic: TopicId(1), index }).unwrap()
    }

    fn found(txn: &Txn, wrong: impl Fn(&Compare) -> bool) -> Vec<Option<Entry>> {
        let entry = |compare: &Compare| {
            let (revision, shift) = match compare {
                Compare::ModRevision(_, revision) | Compare::CreateRevision(_, revision) => {
                    (*revision, i64::from(wrong(compare)))
                }
                _ => return None,
            };
            let revision = revision + shift;
            Some(Entry {
                key: compare.key().to_owned(),
                value: Bytes::new(),
                create_revision: revision,
                mod_revision: revision,
                version: 1,
                lease: None,
            })
        };
        txn.compares.iter().map(entry).collect()
    }

    #[test]
    fn transactions_respect_limits_and_compare_the_controller_term() {
        let changes: Vec<Change> = (0..1_000).map(|index| change(index, 1 + (index % 3) as i32)).collect();
        assert!(changes.iter().any(|change| change.fence.is_some()));
        let batches = pack(changes.clone(), Some(77));
        assert!(batches.len() <= 9, "{} transactions", batches.len());
        let fences = batches[0].txn().ops.iter().filter(|op| op.key() == keys::fence(BrokerId(1))).count();
        assert_eq!(fences, 1, "a key may be changed once per transaction");
        for batch in &batches {
            let txn = batch.txn();
            assert!(txn.compares.len() <= MAX_TXN_OPS && txn.ops.len() <= MAX_TXN_OPS);
            assert!(txn.compares.contains(&Compare::CreateRevision(keys::CONTROLLER.into(), 77)));
        }
        assert_eq!(batches.into_iter().flat_map(|b| b.changes).collect::<Vec<_>>(), changes);
    }

    #[test]
    fn conflict_drops_only_the_affected_change() {
        let batch =
            pack((0..10).map(|index| change(index, 1 + (index % 2) as i32)).collect(), Some(77)).remove(0);
        let txn = batch.txn();
        let key = keys::partition(PartitionId { topic: TopicId(1), index: 4 });
        let current = found(&txn, |compare| compare.key() == key);
        let Conflict::Retry { rest, failed } = batch.clone().on_conflict(&current) else { panic!("deposed") };
        assert_eq!((rest.unwrap().changes.len(), failed.len()), (9, 1));
        // A dead member fails every change that compares it.
        let current = found(&txn, |compare| compare.key() == keys::member(BrokerId(2)));
        let Conflict::Retry { rest, failed } = batch.clone().on_conflict(&current) else { panic!("deposed") };
        assert_eq!((rest.unwrap().changes.len(), failed.len()), (5, 5));
        let current = found(&txn, |compare| compare.key() == keys::CONTROLLER);
        assert_eq!(batch.on_conflict(&current), Conflict::Deposed);
    }
}
