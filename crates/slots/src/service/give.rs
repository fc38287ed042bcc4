//! What the source of a move gives to its target: keys as they were at one moment, what was done to them since, and at
//! last that nothing is done any more.
//!
//! Nothing leaves that is not committed here. The target asks and keeps the position, so a new primary on either side goes
//! on where the old one was; the source only has to keep its journal from there on.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use moim_base::task::offload;
use serde::{Deserialize, Serialize};

use super::map::{Move, Phase};
use super::{Service, pace};
use crate::cmd::{self, Keys};
use crate::effects::{self, Effects, Groups};
use crate::log;
use crate::moves::{self, CLOCK, FREEZE, WIPE};
use crate::shard::{Role, Shard};
use crate::shared::lock;
use crate::slot_set::SlotSet;
use crate::snapshot::write_key;

/// What is written under the lock at a time, and given in one answer.
const STEP_BYTES: usize = 256 << 10;
/// The most that is given in one answer: one key may be any number of these.
const GIVE_BYTES: usize = 8 << 20;
/// What is read of the journal for one answer, and at least one batch.
const TAIL_BYTES: usize = 1 << 20;
/// How long the journal may take to commit.
const PATIENCE: Duration = Duration::from_secs(10);

/// What this node gives.
#[derive(Default)]
pub(super) struct Giving {
    /// The moves whose source it leads, by shard.
    pub(super) moves: BTreeMap<u16, u64>,
    /// The keys that were given last.
    pub(super) last: Option<Bytes>,
    /// What was written of the keys of a move, but did not fit the last answer; and whether nothing comes after.
    pub(super) rest: BTreeMap<u64, (Bytes, bool)>,
}

impl Giving {
    /// A move is given from its beginning.
    fn begin(&mut self, shard: u16, id: u64) {
        self.moves.insert(shard, id);
        self.rest.remove(&id);
    }

    /// A move of this shard is over.
    pub(super) fn end(&mut self, shard: u16) {
        if let Some(id) = self.moves.remove(&shard) {
            self.rest.remove(&id);
        }
        self.last = None;
    }
}

/// A question of the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ask {
    /// The keys of the move's slots, from the beginning.
    Begin { id: u64 },
    /// More of them.
    More { id: u64 },
    /// What was done to them, from this position of the source's journal on.
    Tail { id: u64, from: i64 },
    /// Nothing shall be done to them any more.
    Freeze { id: u64, attempt: u32 },
    /// How many keys the primary of a shard has in a slot, by a slot map of at least this epoch.
    CountKeys { shard: u16, slot: u16, map_epoch: u64 },
    /// A message for the subscribers of this node; there is no answer. The bytes are channel and message.
    Publish { sharded: bool, channel: usize },
    /// What the wall clock shows.
    Clock,
}

/// What the source says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Said {
    /// The keys show the journal up to this position.
    Begun { position: i64 },
    /// Keys: the next bytes of them, cut anywhere; by how much the source's clients waited longer for them, and whether there
    /// were any.
    Keys {
        is_last: bool,
        #[serde(default)]
        late_us: u64,
        #[serde(default)]
        is_shared: bool,
    },
    /// Effects up to `next`; `is_all` when that was the end of what is committed.
    Tail { next: i64, is_all: bool },
    /// Everything that was done is below this position.
    Frozen { end: i64 },
    /// So many keys.
    Count { keys: u64 },
    /// The keys or the journal that were asked for are not there: from the beginning, please.
    Gone,
    /// Milliseconds since 1970.
    Clock { wall_ms: i64 },
    /// This node cannot say: it does not lead the shard, or knows no such move.
    NotHere,
}

impl Service {
    /// Answers a target.
    pub(super) async fn give(&self, ask: Ask) -> io::Result<(Said, Bytes)> {
        let nothing = |said| Ok((said, Bytes::new()));
        let id = match ask {
            Ask::Begin { id } | Ask::More { id } | Ask::Tail { id, .. } | Ask::Freeze { id, .. } => id,
            Ask::Clock => return nothing(Said::Clock { wall_ms: self.parts.clock.wall_ms() }),
            Ask::CountKeys { shard, slot, map_epoch } => {
                return nothing(self.count_keys(shard, slot, map_epoch).await);
            }
            Ask::Publish { .. } => return nothing(Said::NotHere),
        };
        let Some((one, shard)) = self.giving(id).await else { return nothing(Said::NotHere) };
        match ask {
            Ask::Begin { .. } => self.begin(&shard, &one).await,
            Ask::More { .. } => self.more(shard, id).await,
            Ask::Tail { from, .. } => {
                shard.keep_from(from);
                offload(move || tail(&shard, &one, from)).await
            }
            Ask::Freeze { attempt, .. } => self.freeze(&shard, &one, attempt).await,
            Ask::Publish { .. } | Ask::Clock | Ask::CountKeys { .. } => nothing(Said::NotHere),
        }
    }

    async fn count_keys(&self, shard: u16, slot: u16, map_epoch: u64) -> Said {
        if self.map().epoch < map_epoch && self.refresh(0).await.is_err() || self.map().epoch < map_epoch {
            return Said::NotHere;
        }
        match self.primary_here(shard) {
            Some(shard) => Said::Count { keys: shard.look(|state| state.db.slot_len(slot) as u64).await },
            None => Said::NotHere,
        }
    }

    /// The move, and its source if this node leads it.
    async fn giving(&self, id: u64) -> Option<(Move, Arc<Shard>)> {
        let known =
            |map: &super::map::SlotMap| map.find(id).filter(|one| one.phase == Phase::Copying).cloned();
        let mut found = known(&self.map());
        if found.is_none() {
            // The target may have heard of it before we did.
            self.refresh(0).await.ok()?;
            found = known(&self.map());
        }
        let one = found?;
        let shard = self.primary_here(one.from)?;
        Some((one, shard))
    }

    async fn begin(&self, shard: &Arc<Shard>, one: &Move) -> io::Result<(Said, Bytes)> {
        let (whose, shared, of, slots) =
            (Arc::clone(shard), Arc::clone(&self.shared), one.id, one.slots.clone());
        let begun = offload(move || {
            let mut turn = whose.turn_away(&shared);
            turn.append();
            let fits = whose.role() == Role::Primary && turn.state.fx.is_settled();
            if fits {
                turn.state.db.begin_image(of, Some(&slots), write_key);
                whose.keep_from(turn.state.applied);
            }
            let position = turn.state.applied;
            turn.finish();
            Ok(fits.then_some((position, whose.voided())))
        });
        let Some((position, voided)) = begun.await? else { return Ok((Said::NotHere, Bytes::new())) };
        lock(&self.giving).begin(shard.index, one.id);
        let said = match self.commits(shard, position, voided).await {
            true => Said::Begun { position },
            false => Said::NotHere,
        };
        Ok((said, Bytes::new()))
    }

    async fn more(&self, shard: Arc<Shard>, id: u64) -> io::Result<(Said, Bytes)> {
        let (before, rest) = {
            let mut giving = lock(&self.giving);
            (giving.last.take(), giving.rest.remove(&id))
        };
        let index = shard.index;
        let read = async {
            match rest {
                Some((rest, is_last)) => Ok(Some((is_last, rest))),
                None => offload(move || Ok(more(&shard, id, before))).await,
            }
        };
        let (given, late_us) = pace::watched(self.parts.clock.as_ref(), read).await;
        let Some((mut is_last, mut keys)) = given? else { return Ok((Said::Gone, Bytes::new())) };
        if keys.len() > GIVE_BYTES {
            let rest = keys.split_off(GIVE_BYTES);
            let mut giving = lock(&self.giving);
            if giving.moves.get(&index) == Some(&id) {
                giving.rest.insert(id, (rest, is_last));
            }
            is_last = false;
        }
        let served = self.shared.stats.commands.get();
        let is_shared = self.served_before.swap(served, Ordering::Relaxed) != served;
        let mut giving = lock(&self.giving);
        // Not what a very large slot needed, and nothing once the move is over.
        if !is_last && keys.len() <= 2 * STEP_BYTES && giving.moves.get(&index) == Some(&id) {
            giving.last = Some(keys.clone());
        }
        drop(giving);
        Ok((Said::Keys { is_last, late_us, is_shared }, keys))
    }

    async fn freeze(&self, shard: &Arc<Shard>, one: &Move, attempt: u32) -> io::Result<(Said, Bytes)> {
        let (whose, shared, one) = (Arc::clone(shard), Arc::clone(&self.shared), one.clone());
        let frozen = offload(move || {
            let mut turn = whose.turn_away(&shared);
            // What waits from before goes first: the frame of the freeze ends what is done to the slots.
            turn.append();
            let leads = whose.role() == Role::Primary && turn.state.epoch != -1;
            let known = turn.state.moves.frozen().get(&one.id).map(|frozen| frozen.attempt);
            if leads && known != Some(attempt) {
                let (id, attempt) = (one.id.to_string(), attempt.to_string());
                turn.step(&[FREEZE, id.as_bytes(), attempt.as_bytes(), one.slots.to_string().as_bytes()]);
                turn.append();
            }
            let end = turn.end();
            let voided = whose.voided();
            turn.finish();
            Ok(leads.then_some((end, voided)))
        });
        let Some((end, voided)) = frozen.await? else { return Ok((Said::NotHere, Bytes::new())) };
        self.moved.notify_one();
        let is_frozen = self.commits(shard, end, voided).await && self.speaks_alone(shard, voided).await;
        Ok((if is_frozen { Said::Frozen { end } } else { Said::NotHere }, Bytes::new()))
    }

    /// Waits until this node may answer for the shard: a primary before it, which knows of no freeze, may have the right to
    /// answer until then, and must not see the slots change hands.
    async fn speaks_alone(&self, shard: &Shard, voided: u64) -> bool {
        let until = tokio::time::Instant::now() + PATIENCE;
        while !shard.may_answer(self.parts.clock.as_ref()) {
            if shard.voided() != voided || tokio::time::Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        shard.voided() == voided
    }

    /// Waits until a shard's journal is committed up to there; false when its lead has ended, or nothing was committed for long.
    pub(super) async fn commits(&self, shard: &Shard, end: i64, voided: u64) -> bool {
        let (mut until, mut before) = (tokio::time::Instant::now() + PATIENCE, shard.committed());
        while shard.committed() < end {
            let committed = shard.committed();
            if committed > before {
                (until, before) = (tokio::time::Instant::now() + PATIENCE, committed);
            }
            if shard.voided() != voided || tokio::time::Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        shard.voided() == voided
    }

    /// A shard that this node leads.
    pub(super) fn primary_here(&self, index: u16) -> Option<Arc<Shard>> {
        let shard = lock(&self.locals).get(&index).map(|local| Arc::clone(&local.shard))?;
        (shard.role() == Role::Primary && shard.log.leads().is_some()).then_some(shard)
    }
}

/// The next keys, and whether they are the last; `None` when nobody keeps them any more. They are written where those before
/// were, if these have left: fresh memory is slow to touch.
fn more(shard: &Shard, id: u64, before: Option<Bytes>) -> Option<(bool, Bytes)> {
    let mut out = match before {
        Some(mut left) if left.is_unique() => {
            left.truncate(0);
            Vec::from(left)
        }
        _ => Vec::new(),
    };
    // A key is written whole, so this may be somewhat larger than a step.
    out.reserve(STEP_BYTES * 5 / 4);
    let is_last = shard.lock().db.image_step(id, STEP_BYTES, &mut out)?;
    Some((is_last, out.into()))
}

/// What the journal says about the move's slots from a position on.
fn tail(shard: &Shard, one: &Move, from: i64) -> io::Result<(Said, Bytes)> {
    let (journal, until) = (shard.log.journal(), shard.committed());
    if from < journal.start() || from > until {
        return Ok((Said::Gone, Bytes::new()));
    }
    // Everything below `next` is whole batches; `at` is what has been read.
    let (mut next, mut at) = (from, from);
    let (mut picked, mut groups) = (Picked::default(), Groups::default());
    while next == from && at < until {
        let frames = log::read(journal, at, until, TAIL_BYTES).map_err(io::Error::other)?;
        if frames.is_empty() {
            return Err(io::Error::other(format!("no frame at {at} of a journal that ends at {until}")));
        }
        for (offset, payload) in frames {
            at = offset + 1;
            let frame = effects::parse(&payload).map_err(io::Error::other)?;
            if let Some((time_ms, commands)) = groups.take(frame).map_err(io::Error::other)? {
                picked.begin(time_ms);
                commands.iter().for_each(|command| picked.take(&command.args(), one));
                next = at;
            }
        }
    }
    let bytes = Bytes::copy_from_slice(picked.effects.payload(0));
    // The rest of a group that is not committed yet comes before the freeze, or never.
    let is_all = next >= until || at >= until && groups.is_open();
    Ok((Said::Tail { next, is_all }, bytes))
}

/// The effects on the slots of a move, with the times at which they happened.
#[derive(Default)]
struct Picked {
    effects: Effects,
    /// When the next one happened, and what the effects so far say about that.
    time_ms: i64,
    said_ms: Option<i64>,
}

impl Picked {
    fn begin(&mut self, time_ms: i64) {
        self.time_ms = time_ms;
    }

    /// Takes a command along if it changed one of the slots.
    fn take(&mut self, args: &moim_wire_resp::Args<'_>, one: &Move) {
        if moves::is_step(args.name()) {
            if let Some(time_ms) = moves::clock(args) {
                self.time_ms = time_ms;
            }
            return;
        }
        let Some(spec) = cmd::resolve(args) else { return };
        if matches!(spec.keys, Keys::None) {
            if matches!(spec.name, "flushall" | "flushdb") {
                self.effects.push_slices(&[WIPE, one.id.to_string().as_bytes()]);
            }
            return;
        }
        if touches(spec, args, &one.slots) {
            if self.said_ms.replace(self.time_ms) != Some(self.time_ms) {
                self.effects.push_slices(&[CLOCK, self.time_ms.to_string().as_bytes()]);
            }
            self.effects.push(args.iter());
        }
    }
}

fn touches(spec: &cmd::Spec, args: &moim_wire_resp::Args<'_>, slots: &SlotSet) -> bool {
    let mut keys = Vec::new();
    spec.keys.positions(args, &mut keys);
    keys.iter().any(|at| slots.contains(crate::slot_of(args.get(*at).unwrap_or_default())))
}

#[cfg(test)]
mod tests {
    use moim_wire_resp::OwnedArgs;

    use super::*;
    use crate::slot_of;

    #[test]
    fn a_target_gets_what_is_about_its_slots_and_nothing_else() {
        let map = super::super::map::SlotMap::even(2);
        let slots = SlotSet::from_iter([slot_of(b"{a}")]);
        let from = map.owners()[usize::from(slot_of(b"{a}"))];
        let map = map.with_move(from, 1 - from, &slots).unwrap();
        let mut picked = Picked::default();
        let batches = [
            (7, vec![&["SET", "{a}1", "x"][..], &["SET", "{b}1", "x"], &["DEL", "{a}1", "{a}2"]]),
            (7, vec![&["FLUSHALL"], &["\0freeze", "1", "0", "5"], &["APPEND", "{a}1", "x"]]),
            (8, vec![&["SET", "{b}1", "x"]]),
            // Effects of a move that brought other slots here before.
            (9, vec![&["\0clock", "3"], &["SET", "{a}2", "x"], &["\0at", "1", "9"]]),
            (9, vec![&["RPUSH", "{a}l", "1", "2"]]),
        ];
        for (time_ms, commands) in batches {
            picked.begin(time_ms);
            for command in commands {
                picked.take(&OwnedArgs::from_slices(command).args(), &map.moves[0]);
            }
        }
        let (_, commands) = effects::read(picked.effects.payload(0)).unwrap();
        let words = |command: &OwnedArgs| {
            command.args().iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect::<Vec<_>>()
        };
        let commands: Vec<_> = commands.iter().map(|command| words(command).join(" ")).collect();
        let wanted = [
            "\0clock 7",
            "SET {a}1 x",
            "DEL {a}1 {a}2",
            "\0wipe 1",
            "APPEND {a}1 x",
            "\0clock 3",
            "SET {a}2 x",
            "\0clock 9",
            "RPUSH {a}l 1 2",
        ];
        assert_eq!(commands, wanted);
    }
}
