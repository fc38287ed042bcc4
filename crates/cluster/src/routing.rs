//! The routing table: the server of each key range.
//!
//! | part | owns |
//! |---|---|
//! | [`table`] | the table: validation, lookup, deltas |
//! | [`store`] | the table in the state repository: one head, chunks, compare-and-swap |
//! | [`client`] | the SDK: follows a manager, routes calls, retries after a range migration |
//! | [`server`] | a range server: follows a manager, owns ranges, executes commands |
//!
//! The manager ([`crate::manager`]) writes the table.

pub mod client;
pub(crate) mod link;
pub mod server;
pub mod store;
pub mod table;

pub use self::client::{CallError, RoutingClient};
pub use self::server::{Moved, RangeHooks, RouteServer};
pub use self::store::{RoutingError, RoutingTableStore, Saved, TableWatch};
pub use self::table::{NodeStatus, RouteEntry, RoutingTable, TableError};

#[cfg(test)]
mod tests;
