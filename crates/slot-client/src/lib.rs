//! The smart client for Redis Cluster and for Moim's store.
//!
//! A command is routed by the slot of its first key, follows redirections, waits for failovers and
//! resharding within its deadline, and never longer. Connections are shared and pipelined; commands of many
//! tasks are sent together.
//!
//! ```no_run
//! # async fn example() -> Result<(), moim_slot_client::Error> {
//! use moim_slot_client::{Client, Script, cmd};
//!
//! let client = Client::connect("127.0.0.1:6379,127.0.0.1:6380").await?;
//!
//! // Typed commands; the reply converts to the requested type.
//! client.set("user:1", "anna").await?;
//! let name: Option<String> = client.get("user:1").await?;
//!
//! // Any command at all.
//! let kind: String = client.run(cmd("OBJECT ENCODING").arg("user:1")).await?;
//!
//! // Many at once: one round trip per node.
//! let mut pipeline = client.pipeline();
//! pipeline.incr("visits").expire("visits", 60);
//! let replies = pipeline.run().await;
//!
//! // Keys in many slots are split and joined.
//! let values: Vec<Option<String>> = client.mget(["user:1", "user:2"]).await?;
//!
//! // A transaction and a script stay in one slot.
//! let (visits, _): (i64, bool) = client.transaction().then(cmd("INCR").arg("{a}n")).then(cmd("EXPIRE").arg(("{a}n", 5))).run().await?;
//! let script = Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
//! let total: i64 = client.eval(&script, ["{a}n"], [5]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! | behaviour | where |
//! |---|---|
//! | tables of 16,384 slots, swapped atomically; MOVED patches one slot immediately | `topology` |
//! | MOVED, ASK (as one unit with ASKING), at most five; TRYAGAIN, CLUSTERDOWN, LOADING, READONLY retried | `client`, `redirect` |
//! | MGET, MSET, DEL, UNLINK, EXISTS, TOUCH split and joined; DBSIZE, KEYS, FLUSHALL, SCRIPT LOAD everywhere | `spread` |
//! | refresh triggers, one rate limit, one refresh at a time; healthy and known majority, ties by epoch | `refresh`, `view` |
//! | reconnect, re-resolved addresses, hung nodes detected by silence, bounded queues | `connection` |

#![warn(missing_docs)]

mod address;
mod client;
mod command;
mod commands;
mod connection;
mod convert;
mod dedicated;
mod error;
mod node;
mod options;
mod pipeline;
mod pubsub;
mod redirect;
mod refresh;
mod scan;
mod script;
mod signals;
mod spec;
mod spread;
mod topology;
pub mod view;

pub use address::Address;
pub use client::Client;
pub use command::{Arg, Cmd, cmd};
pub use commands::SetOptions;
pub use convert::{FromValue, Scored};
pub use dedicated::Dedicated;
pub use error::{Error, ServerError};
pub use moim_wire_resp::{Slot, Value};
pub use options::{Builder, Delivery, ReadFrom};
pub use pipeline::{Pipeline, Transaction};
pub use pubsub::{Message, Subscription};
pub use scan::Scan;
pub use script::Script;
pub use signals::{Event, Metrics, Trigger};
