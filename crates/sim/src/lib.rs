//! Deterministic simulation: a whole cluster on one thread from one seed, with faults in disks, network and clocks.
//!
//! The code under test is the shipped code. [`run`] builds a world from a seed, runs clients and faults in it, heals
//! it, and checks the client histories: no acknowledged write is lost, every history is linearizable, a term has one
//! leader, a lease does not expire early, every member ends in the same state. The same seed gives the same run, to
//! the last message; so a seed is a complete bug report.
//!
//! | file | owns |
//! |---|---|
//! | `world.rs` | hosts, network, time; independent of the code that runs on it |
//! | `cluster.rs` | coordination nodes on hosts, and their invariants |
//! | `clients.rs` | clients of the coordination core, and their histories |
//! | `faults.rs` | fault injection for coordination nodes |
//! | `bit_rot.rs` | bit flips on disks at rest |
//! | `run.rs` | one run of the coordination core, from founding to verdict |
//! | `store.rs` | the simulation of the store |
//! | `testbed.rs` | hosts that serve a replicated service, and their faults |
//! | `queue.rs` | the simulation of the queue: transactions and consumer groups |

#![warn(missing_docs)]

mod bit_rot;
mod clients;
mod cluster;
mod faults;
mod queue;
mod run;
mod store;
mod testbed;
pub mod world;

pub use queue::{QueueOptions, QueueReport, run_queue};
pub use run::{Failure, Options, Report, run, run_traced};
pub use store::{ClockFaults, KilledAt, StoreOptions, StoreReport, Victim, run_store};
