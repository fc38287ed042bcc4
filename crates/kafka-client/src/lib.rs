//! A small Kafka client on `moim-wire-kafka` alone: works against any Kafka cluster and needs no C library.
//!
//! | file | owns |
//! |---|---|
//! | `client.rs` | a session with a cluster: bootstrap, metadata, controller and group coordinator lookup |
//! | `connection.rs` | one TCP connection to a broker: ApiVersions negotiation, framing, correlation ids |
//! | `exchange.rs` | the response type of each request, and the newest version that is used |
//! | `producer.rs` | record batches, sequence numbers of the idempotent producer, retries |
//! | `fetcher.rs` | fetch positions, isolation level, aborted transactions |
//! | `offsets.rs` | ListOffsets, OffsetFetch and OffsetCommit |
//! | `member.rs`, `subscription.rs` | membership in a consumer group (classic protocol), the range assignor |
//! | `error.rs` | the error type: what a Kafka error code means for the caller |
//! | `outage.rs` | tolerance for servers that are unavailable for a bounded time |
//!
//! Invariants: at most one request per connection is in flight, except in [`Fetcher::poll`], which pipelines one fetch
//! per broker; no operation outlives its timeout; a missing response is reported as a timeout or as unreachable, never
//! as a refusal. The client never prints and never reads configuration: addresses and timeouts are arguments.

#![warn(missing_docs)]

mod client;
mod connection;
mod error;
mod exchange;
mod fetcher;
mod member;
mod offsets;
mod outage;
mod producer;
mod subscription;

pub use self::client::{BACKOFF, Client, ClientOptions, TopicPartition};
pub use self::error::{Error, ErrorKind, Result, Transient, check, error_name, server_error};
pub use self::exchange::Exchange;
pub use self::fetcher::{Fetcher, OffsetReset, Sink};
pub use self::member::{Member, MemberState};
pub use self::offsets::{EARLIEST, Isolation, LATEST, OffsetSpec, Offsets};
pub use self::outage::OutageTolerance;
pub use self::producer::{Message, Producer, ProducerOptions, Written};
pub use self::subscription::decode_assignment;
