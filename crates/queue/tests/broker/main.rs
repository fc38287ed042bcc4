//! A whole broker in this process, spoken to over a socket by the codec alone: what third-party clients never
//! send (every version of every API) and what must hold whoever asks.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)] // tests

mod connections;
mod nodes;
mod replication;
mod support;
mod transactions;
mod versions;
