//! The model of one correct store, small enough to be copied at every step of the search.
//!
//! Owns the effect of an operation, and whether an answer fits. Keys and values are numbers here, and operations are
//! translated once ([`Names::learn`]). Revisions are part of the state where they are known: a write whose answer was
//! lost leaves an unknown revision that the next read determines.

use std::collections::{BTreeSet, HashMap};

use crate::record::{Compare, Entry, Fate, Seen, Step};

/// The revision of a cell is unknown.
const UNKNOWN: i64 = -1;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Cell {
    value: Option<u32>,
    /// 0 without a value.
    revision: i64,
}

/// The store: one cell per key, and the lower bound of its revision.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct State {
    cells: Vec<Cell>,
    revision: i64,
}

#[derive(Clone, Copy)]
enum Condition {
    Value(usize, Option<u32>),
    Revision(usize, i64),
}

/// A step and its observed result, if any.
#[derive(Clone, Copy)]
enum Act {
    /// A read: a value and its revision, if observed.
    Get(usize, Option<Option<(u32, Option<i64>)>>),
    Put(usize, u32),
    Delete(usize, Option<bool>),
}

impl Act {
    fn key(self) -> usize {
        match self {
            Self::Get(key, _) | Self::Put(key, _) | Self::Delete(key, _) => key,
        }
    }
}

/// A translated operation.
pub(crate) struct Plan {
    conditions: Vec<Condition>,
    then: Vec<Act>,
    otherwise: Vec<Act>,
    /// The executed branch, if known.
    succeeded: Option<bool>,
    /// The revision of its answer.
    pub(crate) told: Option<i64>,
    /// Every key it may touch, once.
    pub(crate) keys: BTreeSet<usize>,
}

impl Plan {
    /// The keys that each of its branches writes, sorted.
    pub(crate) fn write_sets(&self) -> impl Iterator<Item = BTreeSet<usize>> {
        [&self.then, &self.otherwise]
            .into_iter()
            .map(|acts| acts.iter().filter(|act| !matches!(act, Act::Get(..))).map(|act| act.key()).collect())
    }

    /// True if its effect depends on the state.
    pub(crate) fn is_conditional(&self) -> bool {
        !self.conditions.is_empty()
    }
}

/// The numbering of the keys and values of a group of operations.
#[derive(Default)]
pub(crate) struct Names {
    keys: HashMap<String, usize>,
    key_names: Vec<String>,
    values: HashMap<String, u32>,
    value_names: Vec<String>,
}

impl Names {
    /// Translates an operation, adding its names.
    pub(crate) fn learn(&mut self, entry: &Entry) -> Plan {
        let outcome = match &entry.fate {
            Fate::Ok { outcome, .. } => Some(outcome),
            Fate::Unknown | Fate::Failed => None,
        };
        let condition = |compare: &Compare| match compare {
            Compare::Value(key, value) => {
                Condition::Value(self.key(key), value.as_ref().map(|value| self.value(value)))
            }
            Compare::ModRevision(key, revision) => Condition::Revision(self.key(key), *revision),
        };
        let conditions = entry.op.compares.iter().map(condition).collect();
        let seen = |branch| match outcome {
            Some(outcome) if outcome.succeeded == branch => &outcome.seen[..],
            Some(_) | None => &[],
        };
        Plan {
            conditions,
            keys: entry.op.keys().map(|key| self.key(key)).collect(),
            then: self.acts(&entry.op.then, seen(true)),
            otherwise: self.acts(&entry.op.otherwise, seen(false)),
            succeeded: outcome.map(|outcome| outcome.succeeded),
            told: outcome.and_then(|outcome| outcome.revision),
        }
    }

    fn acts(&mut self, steps: &[Step], seen: &[Seen]) -> Vec<Act> {
        let mut acts = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            acts.push(match (step, seen.get(at)) {
                (Step::Get(key), Some(Seen::Got(found))) => {
                    let found = found.as_ref().map(|found| (self.value(&found.value), found.mod_revision));
                    Act::Get(self.key(key), Some(found))
                }
                (Step::Get(key), None | Some(Seen::Put | Seen::Deleted(_))) => Act::Get(self.key(key), None),
                (Step::Put(key, value), _) => Act::Put(self.key(key), self.value(value)),
                (Step::Delete(key), Some(Seen::Deleted(there))) => Act::Delete(self.key(key), *there),
                (Step::Delete(key), None | Some(Seen::Put | Seen::Got(_))) => {
                    Act::Delete(self.key(key), None)
                }
            });
        }
        acts
    }

    fn key(&mut self, key: &str) -> usize {
        if let Some(number) = self.keys.get(key) {
            return *number;
        }
        self.keys.insert(key.to_owned(), self.key_names.len());
        self.key_names.push(key.to_owned());
        self.key_names.len() - 1
    }

    fn value(&mut self, value: &str) -> u32 {
        if let Some(number) = self.values.get(value) {
            return *number;
        }
        let number = u32::try_from(self.value_names.len()).expect("a history is small");
        self.values.insert(value.to_owned(), number);
        self.value_names.push(value.to_owned());
        number
    }

    /// The keys, for messages.
    pub(crate) fn keys(&self) -> &[String] {
        &self.key_names
    }

    /// A store in which nothing was ever written.
    pub(crate) fn empty(&self) -> State {
        State { cells: vec![Cell { value: None, revision: 0 }; self.key_names.len()], revision: 0 }
    }

    /// A state, for messages.
    pub(crate) fn describe(&self, state: &State) -> String {
        let cell = |(key, cell): (&String, &Cell)| match cell.value {
            None => format!("{key} is absent"),
            Some(value) if cell.revision == UNKNOWN => format!("{key}={}", self.value_names[value as usize]),
            Some(value) => format!("{key}={}@{}", self.value_names[value as usize], cell.revision),
        };
        self.key_names.iter().zip(&state.cells).map(cell).collect::<Vec<_>>().join(", ")
    }
}

impl State {
    /// True if a condition holds; `None` if it depends on an unknown revision.
    fn holds(&self, condition: Condition) -> Option<bool> {
        match condition {
            Condition::Value(key, expected) => Some(self.cells[key].value == expected),
            Condition::Revision(key, _) if self.cells[key].revision == UNKNOWN => None,
            Condition::Revision(key, expected) => Some(self.cells[key].revision == expected),
        }
    }

    /// The states that an operation may lead to, given its observed answer; empty if it cannot happen here. More than
    /// one only if a condition depends on an unknown revision.
    pub(crate) fn step(&self, plan: &Plan) -> Vec<State> {
        let mut known = Some(true);
        for condition in &plan.conditions {
            known = match (known, self.holds(*condition)) {
                (_, Some(false)) | (Some(false), _) => Some(false),
                (Some(true), held) => held,
                (None, _) => None,
            };
        }
        let mut after = Vec::new();
        for branch in [true, false] {
            let wanted = plan.succeeded.is_none_or(|succeeded| succeeded == branch);
            if !wanted || known.is_some_and(|known| known != branch) {
                continue;
            }
            let mut state = self.clone();
            if branch && known.is_none() {
                state.teach(plan);
            }
            let acts = if branch { &plan.then } else { &plan.otherwise };
            if state.run(acts, plan.told).is_some() {
                after.push(state);
            }
        }
        after
    }

    /// A condition held: the revisions that it names are known now.
    fn teach(&mut self, plan: &Plan) {
        for condition in &plan.conditions {
            if let Condition::Revision(key, revision) = condition {
                self.cells[*key].revision = *revision;
            }
        }
    }

    fn run(&mut self, acts: &[Act], told: Option<i64>) -> Option<()> {
        let mut changed = false;
        for act in acts {
            let cell = &mut self.cells[act.key()];
            match *act {
                Act::Get(_, None) => {}
                Act::Get(_, Some(found)) => cell.read(found)?,
                Act::Put(_, value) => {
                    *cell = Cell { value: Some(value), revision: told.unwrap_or(UNKNOWN) };
                    changed = true;
                }
                Act::Delete(_, seen) => {
                    let there = cell.value.is_some();
                    if seen.is_some_and(|seen| seen != there) {
                        return None;
                    }
                    *cell = Cell { value: None, revision: 0 };
                    changed |= there;
                }
            }
        }
        // A write with an unknown revision requires none: the search may place it later than it happened.
        let least = self.revision + i64::from(changed && told.is_some());
        self.revision = match told {
            Some(told) if told < least => return None,
            Some(told) => told,
            None => least,
        };
        Some(())
    }
}

impl Cell {
    /// True if a read may return this; records the revision if it was unknown.
    fn read(&mut self, found: Option<(u32, Option<i64>)>) -> Option<()> {
        match (self.value, found) {
            (None, None) => Some(()),
            (Some(value), Some((found, revision))) if found == value => match revision {
                Some(revision) if self.revision == UNKNOWN => {
                    self.revision = revision;
                    Some(())
                }
                Some(revision) => (self.revision == revision).then_some(()),
                None => Some(()),
            },
            (None, Some(_)) | (Some(_), None | Some(_)) => None,
        }
    }
}
