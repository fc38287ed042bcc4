//! The exactly-once pipeline: clients send lines to gateways, gateways persist them in the store and relay them to
//! the queue, counters count them per client in transactions, aggregators count them per text, and a verifier decides
//! whether every message was counted exactly once.
//!
//! It consists of clients only: the Kafka protocol to the queue, the Redis protocol to the store. For each way in
//! which a message could be lost or duplicated, docs/pipeline.md gives the rule that prevents it.
//!
//! | module | owns |
//! |---|---|
//! | [`lines`] | the built-in input text |
//! | [`frame`], [`identity`], [`tls`] | the protocol between clients and gateways, client authentication, encryption |
//! | [`client`] | a load client |
//! | [`gateway`], [`relay`] | from the client to the store, from the store to the queue |
//! | [`store`], [`queue`], [`partition`] | access to both: keys and scripts, topics and client settings, the partition of a key |
//! | [`counter`], [`aggregator`] | the consumers |
//! | [`verify`] | the verifier |
//! | [`config`], [`run`] | configuration, and all roles in one process |
//! | [`progress`], [`latency`] | progress counts for display, message latency |

#![warn(missing_docs)]

pub mod aggregator;
pub mod client;
pub mod config;
mod consume;
pub mod counter;
pub mod frame;
pub mod gateway;
pub mod identity;
pub mod latency;
pub mod lines;
pub mod partition;
pub mod progress;
pub mod queue;
pub mod relay;
pub mod run;
#[cfg(test)]
mod simulation;
pub mod store;
pub mod tls;
pub mod verify;

pub use client::{ClientOptions, ClientState, Sending};
pub use config::PipelineConfig;
pub use gateway::{Faults, Gateway, GatewayOptions};
pub use identity::Secret;
pub use latency::Latency;
pub use progress::{Counts, Progress};
pub use queue::QueueOptions;
pub use rdkafka::error::KafkaError;
pub use run::{Parts, Pipeline, RunError};
pub use store::{Commands, Reply, Store, StoreError};
pub use tls::{ClientTls, ServerTls};
pub use verify::{Verdict, judge, observe};
