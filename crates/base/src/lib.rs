//! What every crate of Moim shares: identifiers, the clock, task scopes, metrics.
//!
//! This crate knows no other crate of the workspace. Nothing here does I/O; time enters the program
//! through [`clock::Clock`] alone, so that the simulator can own it.

pub mod clock;
pub mod ids;
pub mod metrics;
pub mod task;

pub use clock::{Clock, ManualClock, SystemClock};
pub use ids::{BrokerId, LeaderEpoch, Offset, TopicId};
