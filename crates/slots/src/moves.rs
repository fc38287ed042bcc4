//! The moves of slots that a shard takes part in, as its journal knows them.
//!
//! A move has six steps (docs/slots.md, "Moving slots"). What a shard does in them are effects in its journal like those of
//! commands, under names that no client can send: replicas replay them, snapshots carry them, and a new primary finds
//! itself exactly where the old one was.
//!
//! | effect | at | says |
//! |---|---|---|
//! | FREEZE id attempt slots | source | commands for these slots wait |
//! | THAW id | source | they go on: the move was given up |
//! | DROP id slots epoch | source | the slots have left, by the slot map of that epoch: their keys are gone |
//! | STAGE id slots | target | the slots are on their way here, invisible and empty |
//! | PART id bytes | target | the beginning of a LOAD that is too large for one effect; in one batch with it |
//! | LOAD id keys | target | these keys of them have come |
//! | CLOCK time | target | the commands that follow in the batch happened at the source at that time |
//! | AT id position | target | the keys show the source's journal up to there |
//! | WIPE id | target | the source forgot all its keys |
//! | OWN id slots | target | the slots are ours, with what has come |
//! | DISCARD id slots | target | the move was given up: what has come is gone |
//!
//! Invariants: a slot that is frozen or staged is served by nobody through this shard, whoever the slot map says owns it;
//! THAW, DROP, OWN and DISCARD come only after the slot map was read (`service/moves.rs` decides by it alone).

use std::collections::BTreeMap;
use std::sync::Arc;

use moim_replica::machine::InstallError;
use moim_wire_resp::Args;
use serde::{Deserialize, Serialize};

use crate::keyspace::Keyspace;
use crate::session::Mailbox;
use crate::shard::State;
use crate::shard::check::{CHECK, HASH};
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

/// What follows in the batch happened at this time.
pub(crate) const CLOCK: &[u8] = b"\0clock";

/// The time that CLOCK says, if this is it.
pub(crate) fn clock(args: &Args<'_>) -> Option<i64> {
    let text = args.get(1).filter(|_| args.name() == CLOCK)?;
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Whether an effect is one of these, and not a command.
pub(crate) fn is_step(name: &[u8]) -> bool {
    name.first() == Some(&0)
}

/// See the module.
#[derive(Clone, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moves {
    frozen: BTreeMap<u64, Frozen>,
    staged: BTreeMap<u64, Staged>,
    /// The slot map by which slots were dropped last: an older one says that they are still here.
    #[serde(default)]
    epoch: u64,
    /// Invariant: the slots of both.
    #[serde(skip)]
    held: Option<SlotSet>,
    /// What PART says. Invariant: empty between batches.
    #[serde(skip)]
    parts: Vec<u8>,
}

/// Slots that leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Frozen {
    pub(crate) slots: SlotSet,
    pub(crate) attempt: u32,
}

/// Slots that come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    pub(crate) slots: SlotSet,
    /// Up to where the keys show the source's journal; `None` while not all of them have come.
    pub(crate) position: Option<i64>,
}

impl Moves {
    /// Whether commands for a slot have to wait.
    #[inline]
    pub(crate) fn holds(&self, slot: u16) -> bool {
        self.held.as_ref().is_some_and(|held| held.contains(slot))
    }

    /// Whether commands for any slot have to wait.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_none()
    }

    /// Whether a slot is on its way here.
    pub(crate) fn stages(&self, slot: u16) -> bool {
        self.staged.values().any(|staged| staged.slots.contains(slot))
    }

    /// Whether any slot is frozen.
    pub(crate) fn has_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// The epoch of the oldest slot map that commands may go by.
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

    /// For a snapshot.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text can be written down")
    }

    /// What [`Moves::encode`] wrote.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut moves: Self = serde_json::from_slice(bytes).ok()?;
        moves.recount();
        Some(moves)
    }

    /// Sets the slots that are on their way aside, before their keys are read.
    pub(crate) fn hide_staged(&self, db: &mut Keyspace) {
        for staged in self.staged.values() {
            staged.slots.iter().for_each(|slot| db.hide_slot(slot));
        }
    }
}

/// Connections with a command that waits for a slot.
#[derive(Default)]
pub(crate) struct Parked(Vec<Arc<Mailbox>>);

impl Parked {
    pub(crate) fn add(&mut self, mailbox: &Arc<Mailbox>) {
        self.0.push(Arc::clone(mailbox));
    }

    /// Everybody tries again.
    pub(crate) fn wake(&mut self) {
        self.0.drain(..).for_each(|mailbox| mailbox.nudge());
    }
}

/// A step that makes no sense where it stands: a bug, or damage that no checksum saw.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a step of a move that makes no sense: {0}")]
pub(crate) struct BadStep(String);

impl State {
    /// LOAD: these keys have come.
    pub(crate) fn load(&mut self, keys: &[u8]) -> Result<(), InstallError> {
        snapshot::read_keys(keys, &mut self.db)
    }

    /// Does what an effect of this module says: in a turn of the primary that records it, and wherever it is replayed.
    pub(crate) fn apply_step(&mut self, args: &Args<'_>) -> Result<(), BadStep> {
        let bad =
            |what: &str| BadStep(format!("{}: {what}", String::from_utf8_lossy(args.name()).escape_debug()));
        let text = |at: usize| std::str::from_utf8(args.get(at).unwrap_or_default()).ok();
        let id: u64 = text(1).and_then(|id| id.parse().ok()).ok_or_else(|| bad("no number"))?;
        let slots =
            |at: usize| text(at).and_then(|text| SlotSet::parse(text).ok()).ok_or_else(|| bad("no slots"));
        match args.name() {
            FREEZE => {
                let attempt = text(2).and_then(|text| text.parse().ok()).ok_or_else(|| bad("no attempt"))?;
                self.moves.frozen.insert(id, Frozen { slots: slots(3)?, attempt });
            }
            THAW => drop(self.moves.frozen.remove(&id)),
            DROP => {
                let gone = slots(2)?;
                let epoch = text(3).and_then(|text| text.parse().ok()).ok_or_else(|| bad("no epoch"))?;
                self.moves.epoch = self.moves.epoch.max(epoch);
                self.clear_slots(&gone);
                if let Some(frozen) = self.moves.frozen.get_mut(&id) {
                    frozen.slots.subtract(&gone);
                }
                self.moves.frozen.retain(|_, frozen| !frozen.slots.is_empty());
            }
            STAGE => {
                let slots = slots(2)?;
                slots.iter().for_each(|slot| self.db.hide_slot(slot));
                self.moves.staged.insert(id, Staged { slots, position: None });
            }
            PART => {
                self.moves.parts.extend_from_slice(args.get(2).unwrap_or_default());
                return Ok(());
            }
            LOAD => {
                let (mut parts, last) =
                    (std::mem::take(&mut self.moves.parts), args.get(2).unwrap_or_default());
                let loaded = if parts.is_empty() {
                    self.load(last)
                } else {
                    parts.extend_from_slice(last);
                    self.load(&parts)
                };
                loaded.map_err(|error| bad(&error.to_string()))?;
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
                if let Some(staged) = self.moves.staged.get_mut(&id) {
                    staged.position = Some(position);
                }
            }
            WIPE => {
                let slots = self.moves.staged.get(&id).map(|staged| staged.slots.clone());
                slots.iter().flat_map(SlotSet::iter).for_each(|slot| self.db.clear_slot(slot));
            }
            OWN | DISCARD => {
                let slots = slots(2)?;
                for slot in slots.iter() {
                    if args.name() == DISCARD {
                        self.db.clear_slot(slot);
                    }
                    self.db.show_slot(slot);
                }
                if let Some(staged) = self.moves.staged.get_mut(&id) {
                    staged.slots.subtract(&slots);
                }
                self.moves.staged.retain(|_, staged| !staged.slots.is_empty());
                self.events.invalidate_watches(|key| slots.contains(crate::slot_of(key)));
                // Nothing is said about these keys before it is sure that they are ours.
                self.events.hazards.mark_all();
            }
            _ => return Err(bad("not known")),
        }
        self.moves.recount();
        self.events.held.clone_from(&self.moves.held);
        self.parked.wake();
        Ok(())
    }

    /// The moves are those of a snapshot, or none.
    pub(crate) fn set_moves(&mut self, moves: Moves) {
        self.events.held.clone_from(&moves.held);
        self.moves = moves;
    }

    /// Forgets the keys of slots that have left.
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

    fn step(state: &mut State, args: &[&[u8]]) -> Result<(), BadStep> {
        state.apply_step(&OwnedArgs::from_slices(args).args())
    }

    #[test]
    fn slots_that_come_are_seen_once_they_are_owned() {
        let mut state = State::empty();
        let slot = slot_of(b"{a}");
        let slots = slot.to_string();
        state.db.set_str(b"{a}old", b"left behind", None);
        step(&mut state, &[STAGE, b"7", slots.as_bytes()]).unwrap();
        assert!(state.moves.holds(slot) && state.moves.stages(slot) && state.db.total() == 0);
        let mut source = Keyspace::new(5);
        source.set_str(b"{a}1", b"one", Some(9_999));
        let mut keys = Vec::new();
        source.for_each(|key, item, expires_at| snapshot::write_key(&mut keys, key, item, expires_at));
        step(&mut state, &[LOAD, b"7", &keys]).unwrap();
        step(&mut state, &[AT, b"7", b"55"]).unwrap();
        assert_eq!(state.moves.staged()[&7].position, Some(55));
        assert_eq!((state.db.len(), state.db.total()), (0, 1));
        let again = Moves::decode(&state.moves.encode()).unwrap();
        assert_eq!(again, state.moves, "as a snapshot has it");
        step(&mut state, &[OWN, b"7", slots.as_bytes()]).unwrap();
        assert_eq!((state.db.len(), state.db.expiring(), state.moves.is_idle()), (1, 1, true));
    }

    #[test]
    fn slots_that_leave_wait_and_go_or_stay() {
        let mut state = State::empty();
        state.db.set_str(b"{a}1", b"one", None);
        state.db.set_str(b"{b}1", b"one", None);
        let (a, b) = (slot_of(b"{a}"), slot_of(b"{b}"));
        let slots = SlotSet::from_iter([a, b]).to_string();
        step(&mut state, &[FREEZE, b"3", b"0", slots.as_bytes()]).unwrap();
        assert!(state.moves.holds(a) && state.moves.holds(b) && !state.moves.holds(a ^ 1));
        step(&mut state, &[THAW, b"3"]).unwrap();
        assert!(state.moves.is_idle() && state.db.len() == 2);
        step(&mut state, &[FREEZE, b"3", b"1", slots.as_bytes()]).unwrap();
        step(&mut state, &[DROP, b"3", a.to_string().as_bytes(), b"4"]).unwrap();
        assert!(!state.moves.holds(a) && state.moves.holds(b), "one after the other");
        step(&mut state, &[DROP, b"3", b.to_string().as_bytes(), b"4"]).unwrap();
        assert!(state.moves.is_idle() && state.db.total() == 0);
        assert_eq!(state.moves.epoch(), 4);
    }

    #[test]
    fn a_move_that_is_given_up_leaves_nothing() {
        let mut state = State::empty();
        let empty = state.db.memory();
        step(&mut state, &[STAGE, b"7", b"0-16383"]).unwrap();
        state.db.set_str(b"k", b"v", Some(5));
        step(&mut state, &[DISCARD, b"7", b"0-16383"]).unwrap();
        assert_eq!((state.db.total(), state.db.memory()), (0, empty));
        assert!(state.moves.is_idle() && state.db.hidden().is_none());
    }

    #[test]
    fn steps_that_make_no_sense_are_refused() {
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
