//! Operations on a key-value store, their outcomes, and the recording of both.
//!
//! Time is a counter that advances at every call of the recorder: an operation precedes another if its client had the
//! answer before the other one was sent. Record [`Recorder::invoke`] before anything leaves the client, and the
//! answer after it is complete; the reverse hides real errors or invents some.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One step of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Reads a key.
    Get(String),
    /// Writes a value to a key.
    Put(String, String),
    /// Deletes a key.
    Delete(String),
}

impl Step {
    /// The key it touches.
    pub fn key(&self) -> &str {
        match self {
            Self::Get(key) | Self::Put(key, _) | Self::Delete(key) => key,
        }
    }
}

/// A condition of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Compare {
    /// The key holds this value; `None`: it does not exist.
    Value(String, Option<String>),
    /// The key was last changed at this revision; 0: it does not exist.
    ModRevision(String, i64),
}

impl Compare {
    fn key(&self) -> &str {
        match self {
            Self::Value(key, _) | Self::ModRevision(key, _) => key,
        }
    }
}

/// An operation: the steps of one branch, executed atomically. Without conditions the first branch is executed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Op {
    /// All of them must hold for the first branch.
    pub compares: Vec<Compare>,
    /// The steps if they hold.
    pub then: Vec<Step>,
    /// The steps if one does not.
    pub otherwise: Vec<Step>,
}

impl Op {
    fn single(step: Step) -> Self {
        Self { then: vec![step], ..Self::default() }
    }

    /// Reads a key.
    pub fn get(key: impl Into<String>) -> Self {
        Self::single(Step::Get(key.into()))
    }

    /// Writes a value to a key. Values that are written only once make every error visible.
    pub fn put(key: impl Into<String>, value: impl Into<String>) -> Self {
        Self::single(Step::Put(key.into(), value.into()))
    }

    /// Deletes a key.
    pub fn delete(key: impl Into<String>) -> Self {
        Self::single(Step::Delete(key.into()))
    }

    /// Compare-and-swap: writes a value if the key holds `expected`.
    pub fn cas(key: impl Into<String>, expected: Option<&str>, value: impl Into<String>) -> Self {
        let key = key.into();
        let compares = vec![Compare::Value(key.clone(), expected.map(str::to_owned))];
        Self { compares, then: vec![Step::Put(key, value.into())], otherwise: Vec::new() }
    }

    /// Every key it may touch.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let steps = self.then.iter().chain(&self.otherwise).map(Step::key);
        self.compares.iter().map(Compare::key).chain(steps)
    }

    /// True if it can change anything.
    pub fn can_write(&self) -> bool {
        self.then.iter().chain(&self.otherwise).any(|step| !matches!(step, Step::Get(_)))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Get(key) => write!(f, "get {key}"),
            Self::Put(key, value) => write!(f, "put {key}={value}"),
            Self::Delete(key) => write!(f, "delete {key}"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = |f: &mut fmt::Formatter<'_>, steps: &[Step]| {
            for (at, step) in steps.iter().enumerate() {
                write!(f, "{}{step}", if at == 0 { "" } else { "; " })?;
            }
            Ok(())
        };
        if self.compares.is_empty() {
            return steps(f, &self.then);
        }
        f.write_str("if")?;
        for (at, compare) in self.compares.iter().enumerate() {
            f.write_str(if at == 0 { " " } else { " and " })?;
            match compare {
                Compare::Value(key, Some(value)) => write!(f, "{key}={value}")?,
                Compare::Value(key, None) => write!(f, "{key} is absent")?,
                Compare::ModRevision(key, revision) => write!(f, "{key} changed at {revision}")?,
            }
        }
        f.write_str(" then [")?;
        steps(f, &self.then)?;
        f.write_str("] else [")?;
        steps(f, &self.otherwise)?;
        f.write_str("]")
    }
}

/// The result of a read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The value.
    pub value: String,
    /// The mod revision, if the client observed it.
    pub mod_revision: Option<i64>,
}

impl Found {
    /// A value and the revision that wrote it.
    pub fn at(value: impl Into<String>, mod_revision: i64) -> Self {
        Self { value: value.into(), mod_revision: Some(mod_revision) }
    }
}

/// The observed result of one step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// The result of a read.
    Got(Option<Found>),
    /// A put returns nothing.
    Put,
    /// True if the key existed; `None` if the client did not observe it.
    Deleted(Option<bool>),
}

/// The answer of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The executed branch. Always true without conditions.
    pub succeeded: bool,
    /// The store's revision at the operation, from its answer: that of the change itself if it changed something.
    pub revision: Option<i64>,
    /// The observed results of that branch's steps; empty if the client did not look.
    pub seen: Vec<Seen>,
}

impl Outcome {
    /// A put, or a transaction without reads, executed at this revision.
    pub fn wrote(revision: i64) -> Self {
        Self { succeeded: true, revision: Some(revision), seen: Vec::new() }
    }

    /// A read.
    pub fn read(revision: i64, found: Option<Found>) -> Self {
        Self { succeeded: true, revision: Some(revision), seen: vec![Seen::Got(found)] }
    }

    /// A deletion.
    pub fn deleted(revision: i64, there: bool) -> Self {
        Self { succeeded: true, revision: Some(revision), seen: vec![Seen::Deleted(Some(there))] }
    }

    /// A transaction.
    pub fn txn(revision: i64, succeeded: bool, seen: Vec<Seen>) -> Self {
        Self { succeeded, revision: Some(revision), seen }
    }
}

/// The outcome of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Unknown: it may have happened, or happen later, or never. Operations in flight count as this.
    Unknown,
    /// It did not happen and never will.
    Failed,
    /// The client had this answer at this time.
    Ok {
        /// The time of the answer.
        at: u64,
        /// The answer.
        outcome: Outcome,
    },
}

/// One operation of a history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The client that invoked it.
    pub client: u64,
    /// The time of the invocation.
    pub invoked: u64,
    /// The operation.
    pub op: Op,
    /// Its outcome.
    pub fate: Fate,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fate {
            Fate::Unknown => {
                write!(f, "[{:>6}..      ] client {}: {} -> ?", self.invoked, self.client, self.op)
            }
            Fate::Failed => {
                write!(f, "[{:>6}..      ] client {}: {} -> failed", self.invoked, self.client, self.op)
            }
            Fate::Ok { at, outcome } => {
                write!(f, "[{:>6}..{at:>6}] client {}: {} ->", self.invoked, self.client, self.op)?;
                if !outcome.succeeded {
                    f.write_str(" else")?;
                }
                for seen in &outcome.seen {
                    match seen {
                        Seen::Got(None) => f.write_str(" absent")?,
                        Seen::Got(Some(Found { value, mod_revision: Some(at) })) => {
                            write!(f, " {value}@{at}")?
                        }
                        Seen::Got(Some(Found { value, mod_revision: None })) => write!(f, " {value}")?,
                        Seen::Put | Seen::Deleted(None) => f.write_str(" done")?,
                        Seen::Deleted(Some(there)) => {
                            f.write_str(if *there { " was there" } else { " was not there" })?
                        }
                    }
                }
                match outcome.revision {
                    Some(revision) => write!(f, " (revision {revision})"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// The id of an operation in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpId(usize);

/// A recorded history.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// In invocation order.
    pub entries: Vec<Entry>,
}

/// Records the operations of clients. Usable from many threads.
#[derive(Default)]
pub struct Recorder {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    now: u64,
    history: History,
}

impl Recorder {
    /// An empty recorder.
    pub fn new() -> Self {
        Self::default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client is about to send an operation. Its outcome is unknown until recorded.
    pub fn invoke(&self, client: u64, op: Op) -> OpId {
        let mut inner = self.inner();
        inner.now += 1;
        let entry = Entry { client, invoked: inner.now, op, fate: Fate::Unknown };
        inner.history.entries.push(entry);
        OpId(inner.history.entries.len() - 1)
    }

    /// The client received its answer.
    pub fn ok(&self, id: OpId, outcome: Outcome) {
        let mut inner = self.inner();
        inner.now += 1;
        let at = inner.now;
        inner.history.entries[id.0].fate = Fate::Ok { at, outcome };
    }

    /// It is certain that the operation did not happen and never will. A refusal proves that; a timeout, a broken
    /// connection or a changed leader does not.
    pub fn failed(&self, id: OpId) {
        self.inner().history.entries[id.0].fate = Fate::Failed;
    }

    /// The outcome is unknown and will stay so.
    pub fn unknown(&self, id: OpId) {
        self.inner().history.entries[id.0].fate = Fate::Unknown;
    }

    /// The history recorded so far.
    pub fn history(&self) -> History {
        self.inner().history.clone()
    }
}
