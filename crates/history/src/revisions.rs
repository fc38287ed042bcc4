//! The rules of the store's revisions, checked without a search.
//!
//! Every change has its own revision, later changes have greater ones, and an answer carries the store's revision at
//! its time. Therefore an answer below an already known revision, a revision that was assigned twice, or a read that
//! misses a change between what it found and the revision it claims, is wrong in any order. This check covers all
//! keys at once, which the search does not.

use std::collections::BTreeMap;

use crate::record::{Entry, Fate, History, Outcome, Seen, Step};
use crate::search::Counterexample;

/// An operation with an answer that carries a revision.
struct Told<'a> {
    entry: &'a Entry,
    outcome: &'a Outcome,
    returned: u64,
    revision: i64,
}

impl Told<'_> {
    fn steps(&self) -> &[Step] {
        if self.outcome.succeeded { &self.entry.op.then } else { &self.entry.op.otherwise }
    }

    /// True if it certainly changed something.
    fn wrote(&self) -> bool {
        let changes = |(at, step): (usize, &Step)| match step {
            Step::Get(_) => false,
            Step::Put(_, _) => true,
            Step::Delete(_) => matches!(self.outcome.seen.get(at), Some(Seen::Deleted(Some(true)))),
        };
        self.steps().iter().enumerate().any(changes)
    }
}

fn told<'a>(history: &'a History) -> Vec<Told<'a>> {
    let of = |entry: &'a Entry| match &entry.fate {
        Fate::Ok { at, outcome } => {
            outcome.revision.map(|revision| Told { entry, outcome, returned: *at, revision })
        }
        Fate::Unknown | Fate::Failed => None,
    };
    history.entries.iter().filter_map(of).collect()
}

/// Checks the whole history.
pub(crate) fn check(history: &History) -> Result<(), Counterexample> {
    let told = told(history);
    unique(&told)?;
    never_back(&told)?;
    reads_miss_nothing(&told)
}

fn wrong(what: String, about: &[&Entry]) -> Counterexample {
    Counterexample { what, lines: about.iter().map(ToString::to_string).collect() }
}

fn unique(told: &[Told<'_>]) -> Result<(), Counterexample> {
    let mut writers: BTreeMap<i64, &Entry> = BTreeMap::new();
    for op in told.iter().filter(|op| op.wrote()) {
        if let Some(other) = writers.insert(op.revision, op.entry) {
            return Err(wrong(format!("two changes have revision {}", op.revision), &[other, op.entry]));
        }
    }
    Ok(())
}

fn never_back(told: &[Told<'_>]) -> Result<(), Counterexample> {
    let mut by_return: Vec<&Told<'_>> = told.iter().collect();
    by_return.sort_by_key(|op| op.returned);
    let mut returned = by_return.into_iter().peekable();
    let mut known: Option<&Told<'_>> = None;
    // In invocation order.
    for op in told {
        while let Some(before) = returned.next_if(|before| before.returned < op.entry.invoked) {
            if known.is_none_or(|known| known.revision < before.revision) {
                known = Some(before);
            }
        }
        if let Some(known) = known {
            let least = known.revision + i64::from(op.wrote());
            if op.revision < least {
                let what = format!("revision {} was known, then came {}", known.revision, op.revision);
                return Err(wrong(what, &[known.entry, op.entry]));
            }
        }
    }
    Ok(())
}

/// The result of a change of a key: a value, or nothing.
type Changes<'a> = BTreeMap<&'a str, BTreeMap<i64, (Option<&'a str>, &'a Entry)>>;

fn reads_miss_nothing(told: &[Told<'_>]) -> Result<(), Counterexample> {
    let mut changes: Changes<'_> = BTreeMap::new();
    for op in told {
        for (at, step) in op.steps().iter().enumerate() {
            let left = match (step, op.outcome.seen.get(at)) {
                (Step::Put(_, value), _) => Some(value.as_str()),
                (Step::Delete(_), Some(Seen::Deleted(Some(true)))) => None,
                (Step::Get(_) | Step::Delete(_), _) => continue,
            };
            changes.entry(step.key()).or_default().insert(op.revision, (left, op.entry));
        }
    }
    for op in told {
        // Inside a transaction that writes, a read may come before or after the write: the search checks those.
        if op.wrote() {
            continue;
        }
        for (step, seen) in op.steps().iter().zip(&op.outcome.seen) {
            let Seen::Got(Some(found)) = seen else { continue };
            let Some(at) = found.mod_revision else { continue };
            if at > op.revision {
                return Err(wrong(format!("a read at {} found a change of {at}", op.revision), &[op.entry]));
            }
            let Some(of_key) = changes.get(step.key()) else { continue };
            if let Some((left, by)) = of_key.get(&at)
                && *left != Some(found.value.as_str())
            {
                return Err(wrong(format!("revision {at} wrote something else"), &[by, op.entry]));
            }
            if let Some((missed, (_, by))) = of_key.range(at..=op.revision).find(|change| *change.0 > at) {
                let what = format!("a read at {} missed the change of {missed}", op.revision);
                return Err(wrong(what, &[by, op.entry]));
            }
        }
    }
    Ok(())
}
