//! librdkafka, unmodified, against a real `moim serve`: one module per area.
//!
//! Tests share one server where they can; those that kill it have their own. Topics and groups have unique names, so
//! the tests run concurrently. With `INTEROP_KAFKA=HOST:PORT` the shared server is that broker, and the tests that
//! need their own process are skipped. With `INTEROP_NODES=3` the shared server is a cluster.

#![allow(clippy::disallowed_methods)] // real processes, real time
#![allow(clippy::unwrap_used)] // all of it is test

mod admin;
mod auth;
mod bad_input;
mod compaction;
mod crash;
mod failover;
mod groups;
mod idempotence;
mod nodes;
mod offsets;
mod produce_consume;
mod retention;
mod support;
mod transactions;
