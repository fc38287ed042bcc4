//! A whole cluster on one thread from one seed: the shipped code, on disks that lose power and wires that lose packets.
//!
//! [`run`] makes a world from a seed, lets clients and faults loose on it, heals it, and checks what the clients saw: no
//! acknowledged write is lost, every history is linearizable, a term has one leader, a lease does not end early, every
//! member ends in the same state. The same seed gives the same run, to the last message; so a seed is a bug report.
//!
//! | file | owns |
//! |---|---|
//! | `world.rs` | machines, wires, time: knows nothing of what runs on it |
//! | `cluster.rs` | coordination nodes on machines, and what must hold among them |
//! | `clients.rs` | who uses them, and what they were promised |
//! | `faults.rs` | what goes wrong, and when |
//! | `rot.rs` | bits that flip on disks at rest |
//! | `run.rs` | one run from beginning to verdict |
//! | `store.rs` | the same for the store |
//! | `site.rs` | machines that serve something replicated, and what goes wrong with them |
//! | `queue.rs` | the same for the queue: transactions and groups |

#![warn(missing_docs)]

mod clients;
mod cluster;
mod faults;
mod queue;
mod rot;
mod run;
mod site;
mod store;
pub mod world;

pub use queue::{QueueOptions, QueueReport, run_queue};
pub use run::{Failure, Options, Report, run, run_traced};
pub use store::{ClockFaults, StoreOptions, StoreReport, Struck, Victim, run_store};
