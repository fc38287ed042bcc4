//! Operations on a key-value store, their outcomes, and the taking down of both.
//!
//! Time is a counter that moves at every call of the recorder: an operation is before another when its client had the
//! answer before the other one was sent. Record [`Recorder::invoke`] before anything leaves the client and the answer
//! after it is complete; the other way round hides real errors or invents some.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One step of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Reads a key.
    Get(String),
    /// Gives a key a value.
    Put(String, String),
    /// Takes a key away.
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

/// An operation: the steps of one branch, done at one moment. Without conditions the first branch is done.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Op {
    /// All of them must hold for the first branch.
    pub compares: Vec<Compare>,
    /// What is done when they hold.
    pub then: Vec<Step>,
    /// What is done when one does not.
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

    /// Gives a key a value. Values that are written once only make every mistake visible.
    pub fn put(key: impl Into<String>, value: impl Into<String>) -> Self {
        Self::single(Step::Put(key.into(), value.into()))
    }

    /// Takes a key away.
    pub fn delete(key: impl Into<String>) -> Self {
        Self::single(Step::Delete(key.into()))
    }

    /// Gives a key a value if it holds `expected`.
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

    /// Whether it can change anything.
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

/// What a read found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The value.
    pub value: String,
    /// The revision of its last change, where the client was told.
    pub mod_revision: Option<i64>,
}

impl Found {
    /// A value and the revision that wrote it.
    pub fn at(value: impl Into<String>, mod_revision: i64) -> Self {
        Self { value: value.into(), mod_revision: Some(mod_revision) }
    }
}

/// What a client saw of one step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// What a read found.
    Got(Option<Found>),
    /// A put has nothing to say.
    Put,
    /// Whether the key was there; `None` when the client was not told.
    Deleted(Option<bool>),
}

/// What a client was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Which branch was done. Always true without conditions.
    pub succeeded: bool,
    /// The store's revision at the operation, as its answer said: of the change itself if it changed something.
    pub revision: Option<i64>,
    /// What the steps of that branch saw; empty when the client did not look.
    pub seen: Vec<Seen>,
}

impl Outcome {
    /// A put, or a transaction without reads, that was done at this revision.
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

/// How an operation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Nobody knows: it may have happened, or happen later, or never. What is still under way counts as this.
    Unknown,
    /// It did not happen and never will.
    Failed,
    /// The client had this answer at this time.
    Ok {
        /// When.
        at: u64,
        /// What it said.
        outcome: Outcome,
    },
}

/// One operation of a history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Who asked.
    pub client: u64,
    /// When.
    pub invoked: u64,
    /// What for.
    pub op: Op,
    /// How it ended.
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

/// A name for an operation under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpId(usize);

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// In the order in which they were invoked.
    pub entries: Vec<Entry>,
}

/// Takes down what clients do. Usable from many threads.
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
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client is about to ask. Until it is told otherwise the outcome is unknown.
    pub fn invoke(&self, client: u64, op: Op) -> OpId {
        let mut inner = self.inner();
        inner.now += 1;
        let entry = Entry { client, invoked: inner.now, op, fate: Fate::Unknown };
        inner.history.entries.push(entry);
        OpId(inner.history.entries.len() - 1)
    }

    /// The client has its answer.
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

    /// The outcome is not known and will not be.
    pub fn unknown(&self, id: OpId) {
        self.inner().history.entries[id.0].fate = Fate::Unknown;
    }

    /// What was taken down so far.
    pub fn history(&self) -> History {
        self.inner().history.clone()
    }
}
