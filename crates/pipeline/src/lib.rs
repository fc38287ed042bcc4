//! The pipeline that proves it: clients send lines to gateways, gateways keep them in the store and relay them to the
//! queue, counters count them per client in transactions, aggregators count them per text, and a verifier says whether
//! every message was counted exactly once.
//!
//! It is made of clients only: the Kafka protocol to the queue, the Redis protocol to the store. Every hole through which
//! a message could slip, or come twice, is closed by a rule that docs/pipeline.md explains.
//!
//! | module | owns |
//! |---|---|
//! | [`lines`] | the built-in text |
//! | [`frame`], [`identity`], [`tls`] | what clients and gateways say to each other, how a client proves who it is, and in secret |
//! | [`client`] | a load client |
//! | [`gateway`], [`relay`] | from the client into the store, from the store into the queue |
//! | [`store`], [`queue`], [`partition`] | the two as the pipeline sees them: keys and scripts, topics and settings, and where a key goes |
//! | [`counter`], [`aggregator`] | the consumers |
//! | [`verify`] | the verdict |
//! | [`config`], [`run`] | settings, and all roles in one process |
//! | [`progress`], [`latency`] | counts for people to watch, and how long messages take |

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
