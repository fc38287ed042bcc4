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
use crate::effects::{self, Effects};
use crate::log;
use crate::moves::{self, FREEZE, WIPE};
use crate::shard::{Role, Shard};
use crate::shared::lock;
use crate::slot_set::SlotSet;
use crate::snapshot::write_key;

/// What is written under the lock at a time, and given in one answer.
const STEP_BYTES: usize = 256 << 10;
/// What is read of the journal for one answer.
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
    /// A message for the subscribers of this node; there is no answer. The bytes are channel and message.
    Publish { sharded: bool, channel: usize },
}

/// What the source says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Said {
    /// The keys show the journal up to this position.
    Begun { position: i64 },
    /// Keys: pieces, each with its length before it; by how much the source's clients waited longer for them, and whether there
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
    /// The keys or the journal that were asked for are not there: from the beginning, please.
    Gone,
    /// This node cannot say: it does not lead the shard, or knows no such move.
    NotHere,
}

impl Service {
    /// Answers a target.
    pub(super) async fn give(&self, ask: Ask) -> io::Result<(Said, Bytes)> {
        let nothing = |said| Ok((said, Bytes::new()));
        let id = match ask {
            Ask::Begin { id } | Ask::More { id } | Ask::Tail { id, .. } | Ask::Freeze { id, .. } => id,
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
            Ask::Publish { .. } => nothing(Said::NotHere),
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
            let fits = whose.role() == Role::Primary && turn.state.fx.is_empty();
            if fits {
                turn.state.db.begin_image(of, Some(&slots), write_key);
                whose.keep_from(turn.state.applied);
            }
            let position = turn.state.applied;
            turn.finish();
            Ok(fits.then_some((position, whose.voided())))
        });
        let Some((position, voided)) = begun.await? else { return Ok((Said::NotHere, Bytes::new())) };
        lock(&self.giving).moves.insert(shard.index, one.id);
        let said = match self.commits(shard, position, voided).await {
            true => Said::Begun { position },
            false => Said::NotHere,
        };
        Ok((said, Bytes::new()))
    }

    async fn more(&self, shard: Arc<Shard>, id: u64) -> io::Result<(Said, Bytes)> {
        let (before, index) = (lock(&self.giving).last.take(), shard.index);
        let read = offload(move || Ok(more(&shard, id, before)));
        let (given, late_us) = pace::watched(self.parts.clock.as_ref(), read).await;
        let Some((is_last, keys)) = given? else { return Ok((Said::Gone, Bytes::new())) };
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

    /// Waits until a shard's journal is committed up to there; false when its lead has ended, or patience.
    pub(super) async fn commits(&self, shard: &Shard, end: i64, voided: u64) -> bool {
        let until = tokio::time::Instant::now() + PATIENCE;
        while shard.committed() < end {
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
    // A slot is written whole, so a piece may be somewhat larger than a step.
    out.reserve(STEP_BYTES * 5 / 4);
    out.extend_from_slice(&[0; 4]);
    let is_last = shard.lock().db.image_step(id, STEP_BYTES, &mut out)?;
    let len = (out.len() - 4) as u32;
    if len == 0 {
        out.clear();
    } else {
        out[..4].copy_from_slice(&len.to_le_bytes());
    }
    Some((is_last, out.into()))
}

/// What the journal says about the move's slots from a position on.
fn tail(shard: &Shard, one: &Move, from: i64) -> io::Result<(Said, Bytes)> {
    let (journal, until) = (shard.log.journal(), shard.committed());
    if from < journal.start() || from > until {
        return Ok((Said::Gone, Bytes::new()));
    }
    let mut next = from;
    let mut effects = Effects::default();
    if from < until {
        for (offset, payload) in log::read(journal, from, until, TAIL_BYTES).map_err(io::Error::other)? {
            let (_, commands) = effects::read(&payload).map_err(io::Error::other)?;
            commands.iter().for_each(|command| pick(&mut effects, &command.args(), one));
            next = offset + 1;
        }
    }
    let bytes = Bytes::copy_from_slice(effects.payload(0));
    Ok((Said::Tail { next, is_all: next >= until }, bytes))
}

/// Takes a command along if it changed one of the slots.
fn pick(effects: &mut Effects, args: &moim_wire_resp::Args<'_>, one: &Move) {
    if moves::is_step(args.name()) {
        return;
    }
    let Some(spec) = cmd::resolve(args) else { return };
    if matches!(spec.keys, Keys::None) {
        if matches!(spec.name, "flushall" | "flushdb") {
            effects.push_slices(&[WIPE, one.id.to_string().as_bytes()]);
        }
        return;
    }
    if touches(spec, args, &one.slots) {
        effects.push(args.iter());
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
        let mut effects = Effects::default();
        for command in [
            &["SET", "{a}1", "x"][..],
            &["SET", "{b}1", "x"],
            &["DEL", "{a}1", "{a}2"],
            &["FLUSHALL"],
            &["\0freeze", "1", "0", "5"],
            &["RPUSH", "{a}l", "1", "2"],
        ] {
            pick(&mut effects, &OwnedArgs::from_slices(command).args(), &map.moves[0]);
        }
        let (_, commands) = effects::read(effects.payload(0)).unwrap();
        let names: Vec<_> = commands
            .iter()
            .map(|command| String::from_utf8_lossy(command.args().name()).into_owned())
            .collect();
        assert_eq!(names, ["SET", "DEL", "\0wipe", "RPUSH"]);
    }
}
