//! Slot migration: moves whole slots from a source shard to a target shard while both serve clients
//! (docs/slots.md, "Moving slots"; docs/decisions/0016-slots-move-without-a-coordinator.md).
//!
//! The target *imports*: it asks the primary of the source for a snapshot of the keys, then for the tail of the
//! source's journal, has the source freeze the slots, and *flips* their owner in the slot map. The source *exports*.
//! Every step is an effect in the journal of a shard or a change of the slot map, so a new primary on either side
//! continues where the previous one stopped.
//!
//! | file | owns |
//! |---|---|
//! | `state.rs` | the migrations of a shard as its journal records them: frozen and importing slots |
//! | `driver.rs` | brings both sides to the outcome that the slot map decided |
//! | `export.rs` | the source: snapshot, journal tail, freeze |
//! | `import.rs` | the target: load, catch up, freeze, flip |
//! | `protocol.rs` | requests and responses between source and target |
//! | `throttle.rs` | the pause between two pieces, so that clients of both shards are served |
//!
//! Invariant: the slot map alone decides who owns a slot; the flip is its only commit point.

pub(crate) mod driver;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod protocol;
pub(crate) mod state;
mod throttle;
