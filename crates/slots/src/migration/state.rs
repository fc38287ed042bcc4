//! The slot migrations of a shard as its journal records them: frozen slots of the source, importing slots of the
//! target.
//!
//! A migration has six steps (docs/slots.md, "Moving slots"). The steps of a shard are effects in its journal like
//! those of commands, under names that no client can send: replicas replay them, snapshots contain them, and a new
//! primary is exactly in the state of the previous one.
//!
//! | effect | side | meaning |
//! |---|---|---|
//! | FREEZE id attempt slots | source | commands for these slots are held |
//! | THAW id | source | held commands continue: the migration was aborted or is retried |
//! | DROP id slots epoch | source | the slots belong to the target by the slot map of that epoch: their keys are deleted |
//! | STAGE id slots | target | the slots are importing: empty, and hidden from clients |
//! | PART id bytes | target | the beginning of a LOAD that is too large for one effect; in one batch with it |
//! | LOAD id keys | target | these keys were imported |
//! | CLOCK time | target | the commands that follow in the batch were executed at the source at that time |
//! | AT id position | target | the imported keys show the source's journal up to this offset |
//! | WIPE id | target | the source executed FLUSHALL |
//! | OWN id slots | target | the slots belong to this shard, with the imported keys |
//! | DISCARD id slots | target | the migration was aborted: the imported keys are deleted |
//!
//! Invariants: this shard serves no command for a frozen or importing slot, whatever the slot map shows; THAW, DROP,
//! OWN and DISCARD are recorded only after the slot map was read (`driver.rs` decides by it alone).

use std::collections::BTreeMap;
use std::sync::Arc;

use moim_replica::machine::InstallError;
use moim_wire_resp::Args;
use serde::{Deserialize, Serialize};

use crate::keyspace::Keyspace;
use crate::session::Mailbox;
use crate::shard::State;
use crate::shard::keyspace_hash::{CHECK, HASH};
use crate::shard::time::LAG;
use crate::slot_set::SlotSet;
use crate::snapshot;

pub(crate) const FREEZE: &[u8] = b"\0freeze";
pub(crate) const THAW: &[u8] = b"\0thaw";
pub(crate) const DROP: &[u8] = b"\0drop";
pub(crate) const STAGE: &[u8] = b"\0stage";
pub(crate) const LOAD: &[u8] = b"\0load";
pub(crate) const PART: &[u8] = b"\0part";
pub(crate) const AT: &[u8] = b"\0at";
pub(crate) const WIPE: &[u8] = b"\0wipe";
pub(crate) const OWN: &[u8] = b"\0own";
pub(crate) const DISCARD: &[u8] = b"\0discard";

/// Effect: the commands that follow in the batch were executed at this time.
pub(crate) const CLOCK: &[u8] = b"\0clock";

/// The time of a CLOCK effect; `None` for any other.
pub(crate) fn effect_time(args: &Args<'_>) -> Option<i64> {
    let text = args.get(1).filter(|_| args.name() == CLOCK)?;
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// True for an internal effect: a migration step or a keyspace hash check, not a command.
pub(crate) fn is_internal_effect(name: &[u8]) -> bool {
    name.first() == Some(&0)
}

/// The slot migrations of one shard. The JSON form is part of the snapshot format.
#[derive(Clone, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Migrations {
    frozen: BTreeMap<u64, Frozen>,
    staged: BTreeMap<u64, Staged>,
    /// The epoch of the slot map by which slots were dropped last: an older map still shows them here.
    #[serde(default)]
    epoch: u64,
    /// Invariant: the union of all frozen and staged slots; `None` if there are none.
    #[serde(skip)]
    held: Option<SlotSet>,
    /// The bytes of PART effects. Invariant: empty between batches.
    #[serde(skip)]
    parts: Vec<u8>,
}

/// The frozen slots of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Frozen {
    pub(crate) slots: SlotSet,
    pub(crate) attempt: u32,
}

/// The importing slots of a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    pub(crate) slots: SlotSet,
    /// The offset of the source's journal that the keys show; `None` until all keys of the snapshot are loaded.
    pub(crate) position: Option<i64>,
}

impl Migrations {
    /// True if commands for a slot are held.
    #[inline]
    pub(crate) fn holds(&self, slot: u16) -> bool {
        self.held.as_ref().is_some_and(|held| held.contains(slot))
    }

    /// True if commands for no slot are held.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_none()
    }

    /// True if a slot is importing.
    pub(crate) fn stages(&self, slot: u16) -> bool {
        self.staged.values().any(|staged| staged.slots.contains(slot))
    }

    /// True if any slot is frozen.
    pub(crate) fn has_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// The epoch of the oldest slot map that commands may be routed by.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn frozen(&self) -> &BTreeMap<u64, Frozen> {
        &self.frozen
    }

    pub(crate) fn staged(&self) -> &BTreeMap<u64, Staged> {
        &self.staged
    }

    fn recount(&mut self) {
        let mut held = SlotSet::default();
        self.frozen.values().for_each(|frozen| held.add(&frozen.slots));
        self.staged.values().for_each(|staged| held.add(&staged.slots));
        self.held = Some(held).filter(|held| !held.is_empty());
    }

    /// The JSON form for a snapshot.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text serialize")
    }

    /// Decodes what [`Migrations::encode`] wrote.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut migrations: Self = serde_json::from_slice(bytes).ok()?;
        migrations.recount();
        Some(migrations)
    }

    /// Hides the importing slots, before their keys are loaded.
    pub(crate) fn hide_staged(&self, db: &mut Keyspace) {
        for staged in self.staged.values() {
            staged.slots.iter().for_each(|slot| db.hide_slot(slot));
        }
    }
}

/// Connections with a held command.
#[derive(Default)]
pub(crate) struct HeldConnections(Vec<Arc<Mailbox>>);

impl HeldConnections {
    pub(crate) fn add(&mut self, mailbox: &Arc<Mailbox>) {
        self.0.push(Arc::clone(mailbox));
    }

    /// Wakes all of them; each executes its command again.
    pub(crate) fn wake(&mut self) {
        self.0.drain(..).for_each(|mailbox| mailbox.request_retry());
    }
}

/// A migration step that is invalid in this state: a bug, or damage that no checksum detected.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid slot migration step {0}")]
pub(crate) struct InvalidStep(String);

impl State {
    /// LOAD: loads imported keys.
    pub(crate) fn load(&mut self, keys: &[u8]) -> Result<(), InstallError> {
        snapshot::read_keys(keys, &mut self.db)
    }

    /// Applies an internal effect: in the turn of the primary that records it, and on replay.
    pub(crate) fn apply_step(&mut self, args: &Args<'_>) -> Result<(), InvalidStep> {
        let bad = |what: &str| {
            InvalidStep(format!("{}: {what}", String::from_utf8_lossy(args.name()).escape_debug()))
        };
        let text = |at: usize| std::str::from_utf8(args.get(at).unwrap_or_default()).ok();
        let id: u64 = text(1).and_then(|id| id.parse().ok()).ok_or_else(|| bad("no number"))?;
        let slots =
            |at: usize| text(at).and_then(|text| SlotSet::parse(text).ok()).ok_or_else(|| bad("no slots"));
        match args.name() {
            FREEZE => {
                let attempt = text(2).and_then(|text| text.parse().ok()).ok_or_else(|| bad("no attempt"))?;
                self.migrations.frozen.insert(id, Frozen { slots: slots(3)?, attempt });
            }
            THAW => drop(self.migrations.frozen.remove(&id)),
            DROP => {
                let gone = slots(2)?;
                let epoch = text(3).and_then(|text| text.parse().ok()).ok_or_else(|| bad("no epoch"))?;
                self.migrations.epoch = self.migrations.epoch.max(epoch);
                self.clear_slots(&gone);
                if let Some(frozen) = self.migrations.frozen.get_mut(&id) {
                    frozen.slots.subtract(&gone);
                }
                self.migrations.frozen.retain(|_, frozen| !frozen.slots.is_empty());
            }
            STAGE => {
                let slots = slots(2)?;
                slots.iter().for_each(|slot| self.db.hide_slot(slot));
                self.migrations.staged.insert(id, Staged { slots, position: None });
            }
            PART => {
                self.migrations.parts.extend_from_slice(args.get(2).unwrap_or_default());
                return Ok(());
            }
            LOAD => {
                let (mut parts, last) =
                    (std::mem::take(&mut self.migrations.parts), args.get(2).unwrap_or_default());
                let loaded = if parts.is_empty() {
                    self.load(last)
                } else {
                    parts.extend_from_slice(last);
                    self.load(&parts)
                };
                loaded.map_err(|error| bad(&error.to_string()))?;
            }
            LAG => {
                self.set_lag_ms(i64::try_from(id).unwrap_or(i64::MAX));
                return Ok(());
            }
            CHECK => {
                self.begin_check(id);
                return Ok(());
            }
            HASH => {
                let hash = text(2).and_then(|text| text.parse().ok()).ok_or_else(|| bad("no hash"))?;
                self.end_check(id, hash);
                return Ok(());
            }
            AT => {
                let position =
                    text(2).and_then(|text| text.parse().ok()).ok_or_else(|| bad("no position"))?;
                if let Some(staged) = self.migrations.staged.get_mut(&id) {
                    staged.position = Some(position);
                }
            }
            WIPE => {
                let slots = self.migrations.staged.get(&id).map(|staged| staged.slots.clone());
                slots.iter().flat_map(SlotSet::iter).for_each(|slot| self.db.clear_slot(slot));
            }
            OWN | DISCARD => {
                let slots = slots(2)?;
                for slot in slots.iter() {
                    if args.name() == DISCARD {
                        self.db.clear_slot(slot);
                    }
                    self.db.reveal_slot(slot);
                }
                if let Some(staged) = self.migrations.staged.get_mut(&id) {
                    staged.slots.subtract(&slots);
                }
                self.migrations.staged.retain(|_, staged| !staged.slots.is_empty());
                self.events.invalidate_watches(|key| slots.contains(crate::slot_of(key)));
                // No reply may show these keys before the ownership is committed.
                self.events.hazards.mark_all();
            }
            _ => return Err(bad("unknown")),
        }
        self.migrations.recount();
        self.events.held.clone_from(&self.migrations.held);
        self.held_connections.wake();
        Ok(())
    }

    /// Replaces the migrations by those of a snapshot, or by none.
    pub(crate) fn set_migrations(&mut self, migrations: Migrations) {
        self.events.held.clone_from(&migrations.held);
        self.migrations = migrations;
    }

    /// Deletes the keys of slots that have left.
    fn clear_slots(&mut self, slots: &SlotSet) {
        let db = &self.db;
        self.events.on_all_changed(|key| slots.contains(crate::slot_of(key)) && db.contains(key));
        self.events.invalidate_watches(|key| slots.contains(crate::slot_of(key)));
        slots.iter().for_each(|slot| self.db.clear_slot(slot));
        drop(self.db.take_garbage());
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_resp::OwnedArgs;

    use super::*;
    use crate::slot_of;

    fn step(state: &mut State, args: &[&[u8]]) -> Result<(), InvalidStep> {
        state.apply_step(&OwnedArgs::from_slices(args).args())
    }

    #[test]
    fn importing_slots_are_visible_once_they_are_owned() {
        let mut state = State::empty();
        let slot = slot_of(b"{a}");
        let slots = slot.to_string();
        state.db.set_str(b"{a}old", b"left behind", None);
        step(&mut state, &[STAGE, b"7", slots.as_bytes()]).unwrap();
        assert!(state.migrations.holds(slot) && state.migrations.stages(slot) && state.db.total() == 0);
        let mut source = Keyspace::new(5);
        source.set_str(b"{a}1", b"one", Some(9_999));
        let mut keys = Vec::new();
        source.for_each(|key, item, expires_at| snapshot::write_key(&mut keys, key, item, expires_at));
        step(&mut state, &[LOAD, b"7", &keys]).unwrap();
        step(&mut state, &[AT, b"7", b"55"]).unwrap();
        assert_eq!(state.migrations.staged()[&7].position, Some(55));
        assert_eq!((state.db.len(), state.db.total()), (0, 1));
        let again = Migrations::decode(&state.migrations.encode()).unwrap();
        assert_eq!(again, state.migrations, "as a snapshot contains it");
        step(&mut state, &[OWN, b"7", slots.as_bytes()]).unwrap();
        assert_eq!((state.db.len(), state.db.expiring(), state.migrations.is_idle()), (1, 1, true));
    }

    #[test]
    fn frozen_slots_hold_commands_until_thaw_or_drop() {
        let mut state = State::empty();
        state.db.set_str(b"{a}1", b"one", None);
        state.db.set_str(b"{b}1", b"one", None);
        let (a, b) = (slot_of(b"{a}"), slot_of(b"{b}"));
        let slots = SlotSet::from_iter([a, b]).to_string();
        step(&mut state, &[FREEZE, b"3", b"0", slots.as_bytes()]).unwrap();
        assert!(state.migrations.holds(a) && state.migrations.holds(b) && !state.migrations.holds(a ^ 1));
        step(&mut state, &[THAW, b"3"]).unwrap();
        assert!(state.migrations.is_idle() && state.db.len() == 2);
        step(&mut state, &[FREEZE, b"3", b"1", slots.as_bytes()]).unwrap();
        step(&mut state, &[DROP, b"3", a.to_string().as_bytes(), b"4"]).unwrap();
        assert!(!state.migrations.holds(a) && state.migrations.holds(b), "one slot after the other");
        step(&mut state, &[DROP, b"3", b.to_string().as_bytes(), b"4"]).unwrap();
        assert!(state.migrations.is_idle() && state.db.total() == 0);
        assert_eq!(state.migrations.epoch(), 4);
    }

    #[test]
    fn an_aborted_import_leaves_nothing() {
        let mut state = State::empty();
        let empty = state.db.memory();
        step(&mut state, &[STAGE, b"7", b"0-16383"]).unwrap();
        state.db.set_str(b"k", b"v", Some(5));
        step(&mut state, &[DISCARD, b"7", b"0-16383"]).unwrap();
        assert_eq!((state.db.total(), state.db.memory()), (0, empty));
        assert!(state.migrations.is_idle() && state.db.hidden().is_none());
    }

    #[test]
    fn invalid_steps_are_refused() {
        let mut state = State::empty();
        let wrong: [&[&[u8]]; 4] = [
            &[FREEZE, b"x", b"0", b"1"],
            &[FREEZE, b"1", b"0", b"99999"],
            &[b"\0what", b"1"],
            &[STAGE, b"1", b"a"],
        ];
        for wrong in wrong {
            assert!(step(&mut state, wrong).is_err(), "{wrong:?}");
        }
    }
}
