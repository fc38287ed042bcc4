//! Client-observed histories, and the check that one correct store could have produced them.
//!
//! A [`Recorder`] records when each operation began and the answer of its client; [`check`] decides whether the
//! operations are linearizable: whether one order respects real time and explains every answer. An operation with an
//! unknown outcome may have happened at any later time, or never. [`Locks`] does the same for locks and their fencing
//! tokens, and [`Counters`] for counters.
//!
//! Nothing here knows the system under test: the simulator and the tests on real processes both use it. No clock, no
//! I/O, no randomness.
//!
//! | file | owns |
//! |---|---|
//! | `record.rs` | operations, outcomes, recording |
//! | `revisions.rs` | the rules of the store's revisions, without a search |
//! | `search.rs`, `model.rs` | the linearizability search |
//! | `locks.rs` | locks and fencing |
//! | `counters.rs` | counters, without a search |
//!
//! ```
//! use moim_history::{Op, Outcome, Recorder, check};
//!
//! let recorder = Recorder::new();
//! let put = recorder.invoke(1, Op::put("k", "a"));
//! recorder.ok(put, Outcome::wrote(2));
//! let get = recorder.invoke(2, Op::get("k"));
//! recorder.ok(get, Outcome::read(2, None));
//! let error = check(&recorder.history()).unwrap_err();
//! assert!(error.to_string().contains("no order"), "{error}");
//! ```

#![warn(missing_docs)]

mod counters;
mod locks;
mod model;
mod record;
mod revisions;
mod search;

pub use counters::{CallId, CounterViolation, Counters};
pub use locks::{Hold, LockViolation, Locks};
pub use record::{Compare, Entry, Fate, Found, History, Op, OpId, Outcome, Recorder, Seen, Step};
pub use search::{Counterexample, check, check_bounded};
