//! What clients saw, and whether one correct store could have shown it to them.
//!
//! A [`Recorder`] takes down when each operation began and what its client was told; [`check`] decides whether the
//! operations can be put in one order that respects real time and in which every answer is right. An operation whose
//! outcome nobody knows may have happened at any later time, or never. [`Locks`] does the same for locks and the
//! fencing tokens they hand out, and [`Counters`] for counters.
//!
//! Nothing here knows what was tested: the simulator and the tests on real processes use it alike. No clock, no I/O,
//! no randomness.
//!
//! | file | owns |
//! |---|---|
//! | `record.rs` | operations, outcomes, taking them down |
//! | `revisions.rs` | what the store's own numbering must fulfil, without any search |
//! | `search.rs`, `model.rs` | the search for an order |
//! | `locks.rs` | locks and fencing |
//! | `counters.rs` | counters, without any search |
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
