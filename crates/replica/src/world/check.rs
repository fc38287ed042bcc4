//! The invariants of every run. A violation is a message; the world stops at the first.

use std::collections::BTreeMap;

use moim_base::{LeaderEpoch, Offset};

use crate::log::LogView;
use crate::message::Sender;
use crate::toy::{Entry, ToyLog};

/// Records the guarantees given so far.
#[derive(Debug, Default)]
pub(super) struct Checker {
    parts: BTreeMap<usize, Part>,
    pub(super) violation: Option<String>,
    pub(super) acked: usize,
}

#[derive(Debug, Default)]
struct Part {
    /// Every record that a leader announced as committed, by offset, and the first leader epoch that did.
    committed: Vec<(Entry, LeaderEpoch)>,
    /// Every acknowledged record: offset and value.
    acked: BTreeMap<i64, u64>,
    /// The leader of each epoch.
    leaders: BTreeMap<LeaderEpoch, Sender>,
    /// The newest high watermark that each leader epoch announced.
    announced: BTreeMap<LeaderEpoch, Offset>,
    /// The sender of the appends seen in each leader epoch.
    appended: BTreeMap<LeaderEpoch, Sender>,
}

impl Checker {
    pub(super) fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// A leadership begins: the epoch must have no other leader, and no committed record may be missing.
    pub(super) fn on_leader(&mut self, part: usize, epoch: LeaderEpoch, who: Sender, log: &ToyLog) {
        let known = self.parts.entry(part).or_default();
        let first = *known.leaders.entry(epoch).or_insert(who);
        if first != who {
            self.fail(format!("partition {part}: {first:?} and {who:?} both lead in epoch {epoch}"));
        }
        // A node with a delayed watch may lead briefly in an epoch that is long past: records committed since then
        // are not required.
        self.compare(part, log, log.end(), &format!("new leader {} in epoch {epoch}", who.node), Some(epoch));
    }

    /// A leader appends.
    pub(super) fn on_append(&mut self, part: usize, epoch: LeaderEpoch, who: Sender) {
        let known = self.parts.entry(part).or_default();
        let first = *known.appended.entry(epoch).or_insert(who);
        if first != who {
            self.fail(format!("partition {part}: {first:?} and {who:?} both append in epoch {epoch}"));
        }
    }

    /// A leader announces a high watermark: everything below is committed from now on. `numbered`: its only producer
    /// numbers records from 1 and retries until acknowledged, so each must exist exactly once, in order, with no gap.
    pub(super) fn on_committed(
        &mut self,
        part: usize,
        epoch: LeaderEpoch,
        to: Offset,
        log: &ToyLog,
        numbered: bool,
    ) {
        let known = self.parts.entry(part).or_default();
        let before = known.announced.insert(epoch, to);
        if before.is_some_and(|before| before > to) {
            self.fail(format!("partition {part}: the high watermark went back in epoch {epoch}"));
        }
        self.compare(part, log, to, &format!("leader in epoch {epoch}"), None);
        let known = self.parts.entry(part).or_default();
        for offset in known.committed.len() as i64..to.0 {
            match log.get(Offset(offset)) {
                Some(entry) if numbered && entry.value != offset as u64 + 1 => {
                    let value = entry.value;
                    self.fail(format!("partition {part}: {value} at {offset} is doubled or out of order"));
                    return;
                }
                Some(entry) => known.committed.push((entry, epoch)),
                None => {
                    self.fail(format!("partition {part}: {offset} is announced and not there"));
                    return;
                }
            }
        }
    }

    /// A follower learns a high watermark.
    pub(super) fn on_followed(&mut self, part: usize, to: Offset, log: &ToyLog, who: Sender) {
        let committed = self.parts.entry(part).or_default().committed.len() as i64;
        if to.0 > committed {
            self.fail(format!("partition {part}: node {} has a high watermark above any commit", who.node));
        }
        self.compare(part, log, to, &format!("follower {}", who.node), None);
    }

    /// A producer's record is acknowledged.
    pub(super) fn on_ack(&mut self, part: usize, offset: Offset, value: u64) {
        self.acked += 1;
        let known = self.parts.entry(part).or_default();
        let later = known.acked.range(offset.0 + 1..).next().map(|(_, value)| *value);
        let earlier = known.acked.range(..offset.0).next_back().map(|(_, value)| *value);
        // One producer per partition, one record at a time: its acknowledgements arrive in order.
        if later.is_some_and(|later| later < value) || earlier.is_some_and(|earlier| earlier > value) {
            self.fail(format!("partition {part}: {value} at {offset} is out of order"));
        }
        let known = self.parts.entry(part).or_default();
        if known.committed.get(offset.0 as usize).map(|(entry, _)| entry.value) != Some(value) {
            self.fail(format!("partition {part}: {value} was acknowledged at {offset} and is not committed"));
        }
        self.parts.entry(part).or_default().acked.insert(offset.0, value);
    }

    /// After everything has healed: every replica has the same complete log.
    pub(super) fn on_rest(&mut self, part: usize, logs: &[&ToyLog]) {
        for log in logs {
            self.compare(part, log, log.end(), "a replica at rest", Some(LeaderEpoch(i32::MAX)));
        }
        let ends: Vec<Offset> = logs.iter().map(|log| log.end()).collect();
        if ends.windows(2).any(|pair| pair[0] != pair[1]) {
            self.fail(format!("partition {part}: replicas at rest end at {ends:?}"));
        }
    }

    /// Below `to` the log must equal the committed records; it must contain all records committed in epochs up to
    /// `whole`.
    fn compare(&mut self, part: usize, log: &ToyLog, to: Offset, who: &str, whole: Option<LeaderEpoch>) {
        let committed = &self.parts.entry(part).or_default().committed;
        let end = committed.partition_point(|(_, by)| whole.is_none_or(|epoch| *by <= epoch)) as i64;
        let wrong = (log.start().0..to.0.min(end))
            .find(|offset| log.get(Offset(*offset)) != Some(committed[*offset as usize].0));
        if let Some(offset) = wrong {
            let (has, should) = (log.get(Offset(offset)), committed[offset as usize]);
            self.fail(format!("partition {part}: {who} has {has:?} at {offset}, committed was {should:?}"));
        } else if whole.is_some() && log.end().0 < end {
            let has = log.end();
            self.fail(format!("partition {part}: {who} ends at {has}, committed are {end}"));
        }
    }
}
