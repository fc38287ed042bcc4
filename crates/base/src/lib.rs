//! The code that every crate of Moim shares: identifiers, the clock, the memory budget, task scopes, metrics, and the
//! socket abstraction.
//!
//! This crate depends on no other crate of the workspace. Nothing here opens a file; time enters the program through
//! [`clock::Clock`] alone, so that the simulator can control it.

pub mod clock;
pub mod ids;
pub mod memory;
pub mod metrics;
pub mod require;
pub mod rest;
pub mod socket;
pub mod task;

pub use clock::{Clock, ManualClock, SystemClock};
pub use ids::{BrokerId, LeaderEpoch, Offset, TopicId};
pub use memory::{ConnectionBudget, Exhausted, LayerBudget, MemoryBudget, Permit};
