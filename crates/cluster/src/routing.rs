//! The routing table: which server has which range of keys.
//!
//! | part | owns |
//! |---|---|
//! | [`table`] | the table: what is valid, lookup, differences |
//! | [`store`] | the table in the state repository: one head, pieces, compare-and-swap |
//! | [`client`] | the SDK: follows a manager, finds servers, tries again when a range has moved |
//! | [`server`] | a range server: follows a manager, knows what is its own, does what operations ask |
//!
//! Who writes the table is the manager ([`crate::manager`]).

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
