//! The queue: a broker that Kafka clients use unmodified.
//!
//! [`Broker::open`] recovers topics, groups and transactions from the journals; [`Server::start`] serves them
//! on event loops. A request goes `connection` → `dispatch` → `handlers/<api>` → `partition` (or a
//! coordinator) → journal. The coordinators' cores ([`groups`], `transactions`, `producers`) are pure state
//! machines; the services beside them do their I/O.

mod broker;
mod broker_config;
mod brokers;
mod compaction;
mod completions;
mod config;
mod connection;
mod dispatch;
mod fetch_sessions;
mod framing;
mod group_service;
pub mod groups;
mod handlers;
mod housekeeping;
mod later;
mod log_budget;
mod loop_watch;
mod loops;
mod metrics;
mod partition;
mod peers;
mod placement;
#[cfg(feature = "planted")]
pub mod planted;
mod producer_ids;
mod producers;
mod reply;
mod sasl;
mod server;
#[cfg(test)]
mod testing;
mod ticker;
mod topics;
mod transaction_service;
pub mod transactions;
mod view;

pub use broker::{Broker, BrokerOptions, BrokerParts, DECOMPRESSION_RESERVE, Summary};
pub use config::Defaults;
pub use framing::BatchFraming;
pub use moim_base::socket::{MemorySocket, Socket};
pub use partition::Refused;
pub use peers::Reach;
pub use sasl::{Users, UsersError};
pub use server::Server;
pub use topics::{OFFSETS_TOPIC, TRANSACTIONS_TOPIC};
