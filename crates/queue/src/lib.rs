//! The queue: a broker that unmodified Kafka clients use.
//!
//! [`Broker::open`] recovers topics, groups and transactions from the journals; [`Server::start`] serves them on
//! event loops. The request path is `connection` → `dispatch` → `handlers/<api>` → `partition` (or a coordinator) →
//! journal. The cores of the group coordinator ([`groups`]), the transaction coordinator (`transactions`) and the
//! producer state manager (`producer_state`) are pure state machines; the services beside them do their I/O.

mod async_response;
mod broker;
mod broker_config;
mod brokers;
mod compaction;
mod completions;
mod config;
mod connection;
mod deadline_timer;
mod dispatch;
mod fetch_sessions;
mod framing;
mod group_service;
pub mod groups;
mod handlers;
mod housekeeping;
mod log_rate_limit;
mod loop_watchdog;
mod loops;
mod metadata_watch;
mod metrics;
mod partition;
mod partition_registration;
mod peers;
#[cfg(feature = "planted")]
pub mod planted;
mod producer_ids;
mod producer_state;
mod response_writer;
mod sasl;
mod server;
#[cfg(test)]
mod testing;
mod topics;
mod transaction_service;
pub mod transactions;

pub use broker::{Broker, BrokerOptions, BrokerParts, DECOMPRESSION_RESERVE, Summary};
pub use config::Defaults;
pub use framing::BatchFraming;
pub use moim_base::socket::{MemorySocket, Socket};
pub use partition::Refused;
pub use peers::Reach;
pub use sasl::{Users, UsersError};
pub use server::Server;
pub use topics::{OFFSETS_TOPIC, TRANSACTIONS_TOPIC};
