//! A whole broker in this process, tested over a socket with the codec alone: requests that third-party clients never
//! send (every version of every API), and guarantees that hold for every client.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)] // tests

mod connections;
mod nodes;
mod replication;
mod support;
mod transactions;
mod versions;
