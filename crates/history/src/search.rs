//! The linearizability search: an order in which every answer is right.
//!
//! After Wing and Gong, with Lowe's memoization: walk the operations in time order; of those that may come next
//! (invoked before the earliest answer not yet placed), place one whose answer fits the state, continue, and
//! backtrack where nothing fits; never visit the same set of placed operations with the same state twice. Keys that
//! no operation touches together are searched separately, because linearizability is local.
//!
//! An operation with an unknown outcome may be placed at any time after its invocation, and need not be placed. If
//! every write to its keys writes all of them, it is placed only directly before an operation that does not fit
//! without it. Nothing is lost by that: until an operation needs it, it can move behind an operation that leaves its
//! keys alone, and one that overwrites its keys makes it redundant. Other unknown operations are candidates at any
//! time, after all others.
//!
//! Limit: the problem is NP-complete. A history with many unknown outcomes on several keys, or many overlapping ones,
//! can exceed the bound on visited states; it is then reported as undecided, which is an error too.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::fmt;

use crate::model::{Names, Plan, State};
use crate::record::{Entry, Fate, History};
use crate::revisions;

/// The number of visited states after which a search gives up.
const MAX_STATES: usize = 2_000_000;
/// The number of placed operations that a counterexample shows.
const SHOWN: usize = 12;

/// Why no correct store can have given these answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counterexample {
    /// A one-sentence summary.
    pub what: String,
    /// The operations involved.
    pub lines: Vec<String>,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        for line in &self.lines {
            write!(f, "\n  {line}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Counterexample {}

/// Checks whether one correct store can have given all these answers.
pub fn check(history: &History) -> Result<(), Counterexample> {
    check_bounded(history, MAX_STATES)
}

/// Like [`check`], giving up after this many visited states per group of keys.
pub fn check_bounded(history: &History, max_states: usize) -> Result<(), Counterexample> {
    revisions::check(history)?;
    for group in groups(history) {
        Search::new(&group, max_states).run()?;
    }
    Ok(())
}

/// The relevant operations, grouped by keys that some operation touches together.
fn groups(history: &History) -> Vec<Vec<&Entry>> {
    let matters = |entry: &&Entry| match entry.fate {
        Fate::Failed => false,
        Fate::Unknown => entry.op.can_write(),
        Fate::Ok { .. } => true,
    };
    let entries: Vec<&Entry> = history.entries.iter().filter(matters).collect();
    // Union-find over keys: each points to another of its group, or to itself.
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut parent: Vec<usize> = Vec::new();
    let mut root_of_entry = Vec::new();
    fn root(parent: &mut [usize], mut at: usize) -> usize {
        while parent[at] != at {
            parent[at] = parent[parent[at]];
            at = parent[at];
        }
        at
    }
    for entry in &entries {
        let mut first = None;
        for key in entry.op.keys() {
            let next = parent.len();
            let number = *numbers.entry(key).or_insert(next);
            if number == next {
                parent.push(next);
            }
            let own = root(&mut parent, number);
            let group = *first.get_or_insert(own);
            parent[own] = root(&mut parent, group);
        }
        root_of_entry.push(first);
    }
    let mut groups: BTreeMap<usize, Vec<&Entry>> = BTreeMap::new();
    for (entry, first) in entries.into_iter().zip(root_of_entry) {
        if let Some(first) = first {
            groups.entry(root(&mut parent, first)).or_default().push(entry);
        }
    }
    groups.into_values().collect()
}

/// A set of operations, without its full prefix: long histories have long ones.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Placed {
    full: usize,
    words: Box<[u64]>,
    unknown: Box<[usize]>,
}

/// Operations to place directly after each other, and the state after them.
struct Candidate {
    ops: Vec<usize>,
    after: State,
}

/// A choice: the placed candidate, and its alternatives.
struct Choice {
    placed: Vec<usize>,
    /// The state before it.
    before: State,
    /// Further candidates to try at this point.
    rest: Vec<Candidate>,
}

/// The longest order found so far.
struct Best {
    open: usize,
    order: Vec<usize>,
    state: State,
    /// The operations that could have come next and did not fit.
    next: Vec<usize>,
}

/// Operations are indexed by their position in `entries`: first those with an answer, then the others, each in
/// invocation order.
struct Search<'a> {
    entries: Vec<&'a Entry>,
    plans: Vec<Plan>,
    /// The number of operations with an answer.
    answered: usize,
    names: Names,
    /// The operations whose keys are never written in part.
    whole: Vec<bool>,
    /// The placed operations with an answer.
    bits: Vec<u64>,
    /// The placed operations without an answer, ascending.
    used: Vec<usize>,
    state: State,
    choices: Vec<Choice>,
    seen: HashSet<(Placed, State)>,
    max_states: usize,
    /// The number of answered operations that are not placed yet.
    open: usize,
    best: Best,
}

impl<'a> Search<'a> {
    fn new(group: &[&'a Entry], max_states: usize) -> Self {
        let (known, unknown): (Vec<&Entry>, Vec<&Entry>) =
            group.iter().partition(|entry| returned(entry).is_some());
        let answered = known.len();
        let entries = [known, unknown].concat();
        let mut names = Names::default();
        let plans: Vec<Plan> = entries.iter().map(|entry| names.learn(entry)).collect();
        let state = names.empty();
        Self {
            whole: whole(&plans),
            entries,
            plans,
            answered,
            bits: vec![0; answered.div_ceil(64)],
            used: Vec::new(),
            best: Best { open: answered + 1, order: Vec::new(), state: state.clone(), next: Vec::new() },
            state,
            names,
            choices: Vec::new(),
            seen: HashSet::new(),
            max_states,
            open: answered,
        }
    }

    fn run(mut self) -> Result<(), Counterexample> {
        let mut rest = self.candidates();
        while self.open > 0 {
            match rest.pop() {
                Some(Candidate { ops, after }) => {
                    self.mark(&ops, true);
                    if !self.seen.insert((self.placed(), after.clone())) {
                        self.mark(&ops, false);
                        continue;
                    }
                    if self.seen.len() > self.max_states {
                        return Err(self.counterexample("gave up: no order was found in time".to_owned()));
                    }
                    let before = std::mem::replace(&mut self.state, after);
                    self.choices.push(Choice { placed: ops, before, rest });
                    rest = self.candidates();
                }
                None => {
                    let Some(choice) = self.choices.pop() else {
                        let keys = self.names.keys().join(", ");
                        return Err(self.counterexample(format!("no order explains what was seen of {keys}")));
                    };
                    self.mark(&choice.placed, false);
                    self.state = choice.before;
                    rest = choice.rest;
                }
            }
        }
        Ok(())
    }

    fn mark(&mut self, ops: &[usize], placed: bool) {
        for &at in ops {
            if at >= self.answered {
                match self.used.binary_search(&at) {
                    Ok(found) => drop(self.used.remove(found)),
                    Err(place) => self.used.insert(place, at),
                }
                continue;
            }
            self.bits[at / 64] ^= 1 << (at % 64);
            self.open = if placed { self.open - 1 } else { self.open + 1 };
        }
    }

    fn placed(&self) -> Placed {
        let full = self.full();
        let end = self.bits.iter().rposition(|word| *word != 0).map_or(full, |last| last + 1).max(full);
        Placed { full, words: self.bits[full..end].into(), unknown: self.used.as_slice().into() }
    }

    /// The number of leading words in which everything is placed.
    fn full(&self) -> usize {
        self.bits.iter().take_while(|word| **word == u64::MAX).count()
    }

    /// The candidates for the next place, the best last.
    fn candidates(&mut self) -> Vec<Candidate> {
        let (known, unknown) = self.pending();
        // The operation with the least observed revision comes first: behind a greater one it never fits.
        let least = known.iter().filter_map(|at| self.plans[*at].told).min();
        let first = |at: &usize| self.plans[*at].told.is_none_or(|told| Some(told) <= least);
        let mut all = Vec::new();
        for at in unknown.iter().rev().filter(|at| !self.whole[**at]) {
            let after = self.state.step(&self.plans[*at]).into_iter();
            all.extend(after.map(|after| Candidate { ops: vec![*at], after }));
        }
        let mut plain = Vec::new();
        for &at in known.iter().rev().filter(|at| first(at)) {
            let before = plain.len();
            let after = self.state.step(&self.plans[at]).into_iter();
            plain.extend(after.map(|after| Candidate { ops: vec![at], after }));
            if plain.len() == before {
                self.with_help(at, &unknown, &mut all);
            }
        }
        all.append(&mut plain);
        if self.open < self.best.open {
            let order = self.choices.iter().flat_map(|choice| choice.placed.iter().copied()).collect();
            let next = known.into_iter().chain(unknown).collect();
            self.best = Best { open: self.open, order, state: self.state.clone(), next };
        }
        all
    }

    /// Finds unknown operations on keys of `wanted` after which it fits, the shortest chains first and one chain per
    /// state. A chain grows only by conditional operations: any other makes its predecessors redundant.
    fn with_help(&self, wanted: usize, unknown: &[usize], found: &mut Vec<Candidate>) {
        let mut visited = HashSet::from([self.state.clone()]);
        let mut open = VecDeque::from([(self.state.clone(), Vec::new())]);
        while let Some((state, chain)) = open.pop_front() {
            for &helper in unknown {
                let plan = &self.plans[helper];
                let touches = self.whole[helper] && !plan.keys.is_disjoint(&self.plans[wanted].keys);
                if !touches || chain.contains(&helper) || !(chain.is_empty() || plan.is_conditional()) {
                    continue;
                }
                for between in state.step(plan) {
                    if !visited.insert(between.clone()) {
                        continue;
                    }
                    let fits = between.step(&self.plans[wanted]);
                    let chain = || chain.iter().copied().chain([helper]);
                    if fits.is_empty() {
                        open.push_back((between, chain().collect()));
                    }
                    for after in fits {
                        found.push(Candidate { ops: chain().chain([wanted]).collect(), after });
                    }
                }
            }
        }
    }

    /// Operations invoked before the earliest unplaced answer, with and without an answer.
    fn pending(&self) -> (Vec<usize>, Vec<usize>) {
        let mut deadline = u64::MAX;
        let mut known = Vec::new();
        for at in self.full() * 64..self.answered {
            let entry = self.entries[at];
            if entry.invoked > deadline {
                break;
            }
            if self.bits[at / 64] & (1 << (at % 64)) == 0 {
                deadline = deadline.min(returned(entry).unwrap_or(u64::MAX));
                known.push(at);
            }
        }
        let early = |at: &usize| self.entries[*at].invoked < deadline;
        let unused = |at: &usize| self.used.binary_search(at).is_err();
        (known, (self.answered..self.entries.len()).take_while(early).filter(unused).collect())
    }

    fn counterexample(&self, what: String) -> Counterexample {
        let Best { order, state, next, .. } = &self.best;
        let mut lines = Vec::new();
        if order.len() > SHOWN {
            lines.push(format!("({} operations before these)", order.len() - SHOWN));
        }
        lines.extend(
            order[order.len().saturating_sub(SHOWN)..].iter().map(|at| self.entries[*at].to_string()),
        );
        lines.push(format!("here: {}", self.names.describe(state)));
        lines.push("and none of these leads on:".to_owned());
        lines.extend(next.iter().map(|at| self.entries[*at].to_string()));
        Counterexample { what, lines }
    }
}

/// For each operation, whether every write to one of its keys writes all of them.
fn whole(plans: &[Plan]) -> Vec<bool> {
    let writes: BTreeSet<BTreeSet<usize>> = plans.iter().flat_map(Plan::write_sets).collect();
    let is_whole = |plan: &Plan| {
        writes.iter().all(|written| written.is_disjoint(&plan.keys) || written.is_superset(&plan.keys))
    };
    plans.iter().map(is_whole).collect()
}

fn returned(entry: &Entry) -> Option<u64> {
    match &entry.fate {
        Fate::Ok { at, .. } => Some(*at),
        Fate::Unknown | Fate::Failed => None,
    }
}

#[cfg(test)]
mod tests;
