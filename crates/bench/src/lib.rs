//! Load tool and side-by-side comparisons.
//!
//! Owns the measurement: one client for every side ([`load`]), the servers under test ([`peers`]), the limits of the
//! machine ([`probes`]), the alternation of slices ([`slices`]), the metrics of the queue ([`queue`]), of
//! coordination ([`coord`]), of the store ([`slots`]), of the pipeline ([`pipeline`]) and of the cluster library
//! ([`cluster`]), and the report ([`report`]). It talks to every server through its protocol alone and never links
//! the node: a benchmark that calls internals measures something that no user gets. The cluster library is linked,
//! because users link it.
//!
//! Invariant: no figure is printed that was not measured in this run, and every figure names the durability it was taken at.

// A benchmark measures the real clock; it is never simulated.
#![allow(clippy::disallowed_methods)]

pub mod cluster;
pub mod coord;
mod judge;
pub mod load;
pub mod peers;
pub mod pipeline;
pub mod probes;
pub mod procfs;
pub mod queue;
pub mod report;
pub mod slices;
pub mod slots;
