//! Sees moves of slots to their end, on the primaries of both sides.
//!
//! Whoever leads a shard looks at what its journal says of moves (`moves.rs`) and then at the slot map, in this order, and
//! does what the map decided: the map alone knows whether the slots changed hands. There is nobody who coordinates a move
//! and could be lost with it. Takings are begun here, too; one runs per move, on the primary of its target.
//!
//! Thawing is safe because of three things: the map says that the move was given up or is tried again, the slots can change
//! hands only under the attempt that the map has, and what is thawed is what was frozen under an older one, checked in the
//! turn that thaws.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::{Scope, offload};
use moim_cluster::{Compare, RepositoryError, Txn, TxnOutcome};

use super::map::{Move, Phase, Side, SlotMap};
use super::{MAP, PROGRESS, Service};
use crate::moves::{DISCARD, DROP, Moves, OWN, THAW};
use crate::shard::{Role, Shard, Turn};
use crate::shared::lock;
use crate::slot_set::SlotSet;

/// How often moves that are under way are looked at.
const LOOK: Duration = Duration::from_millis(100);
/// And how often when there are none.
const REST: Duration = Duration::from_secs(2);
/// How long a source holds commands for its target.
const FREEZE_MS: u64 = 5_000;
/// Attempts after which a move is given up.
const ATTEMPTS: u32 = 20;
/// Keys that change hands or go in one turn, if a slot does not have more.
const KEYS_AT_ONCE: usize = 1_000;

/// What a shard has to do about a move.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Duty {
    /// The slots stay: commands go on. What was frozen under a newer attempt than this stays frozen.
    Thaw { id: u64, attempt: u32 },
    /// The slots have left.
    Drop { id: u64 },
    /// The slots are ours.
    Own { id: u64 },
    /// The slots will not come.
    Discard { id: u64 },
    /// The outcome asks nothing more of this side.
    Settle { id: u64, side: Side },
    /// The keys are to be taken in.
    Take { id: u64 },
    /// The source waits for its target under this attempt.
    Wait { id: u64, attempt: u32 },
}

/// What the primary of a shard has to do, given its journal and a slot map that was read after it.
fn duties(shard: u16, moves: &Moves, map: &SlotMap) -> Vec<Duty> {
    let owners = map.owners();
    let owns = |slots: &SlotSet| slots.iter().next().is_some_and(|slot| owners[usize::from(slot)] == shard);
    let mut duties = Vec::new();
    for (id, frozen) in moves.frozen() {
        let (id, attempt) = (*id, frozen.attempt);
        duties.push(match map.find(id) {
            Some(one) if one.phase == Phase::Copying && one.attempt <= attempt => Duty::Wait { id, attempt },
            Some(one) if one.phase == Phase::Moved => Duty::Drop { id },
            Some(_) => Duty::Thaw { id, attempt },
            None if owns(&frozen.slots) => Duty::Thaw { id, attempt },
            None => Duty::Drop { id },
        });
    }
    for (id, staged) in moves.staged() {
        match map.find(*id) {
            Some(one) if one.phase == Phase::Copying => {}
            Some(one) if one.phase == Phase::Moved => duties.push(Duty::Own { id: *id }),
            None if owns(&staged.slots) => duties.push(Duty::Own { id: *id }),
            Some(_) | None => duties.push(Duty::Discard { id: *id }),
        }
    }
    for one in &map.moves {
        let is_over = one.phase != Phase::Copying;
        if is_over && one.from == shard && !one.source_done && !moves.frozen().contains_key(&one.id) {
            duties.push(Duty::Settle { id: one.id, side: Side::Source });
        }
        if is_over && one.to == shard && !one.target_done && !moves.staged().contains_key(&one.id) {
            duties.push(Duty::Settle { id: one.id, side: Side::Target });
        }
    }
    let takes = |one: &&Move| one.to == shard && one.phase == Phase::Copying;
    duties.extend(map.active().filter(takes).map(|one| Duty::Take { id: one.id }));
    duties
}

/// Lets shards of this node know whether slots of theirs come or leave.
pub(super) fn mark(shards: &[(Arc<Shard>, Option<i32>)], map: &SlotMap) {
    for (shard, _) in shards {
        let is_moving = map.moves.iter().any(|one| one.from == shard.index || one.to == shard.index);
        shard.is_moving.store(is_moving, Ordering::Relaxed);
    }
}

/// Looks after the moves of this node's shards until the shutdown.
pub(super) async fn run(service: Arc<Service>, scope: Scope) {
    loop {
        let busy = service.tend(&scope).await;
        tokio::select! {
            biased;
            () = service.moved.notified() => {}
            () = rest(if busy { LOOK } else { REST }) => {}
        }
    }
}

impl Service {
    /// Does what is to be done now. Answers whether there are moves at all.
    async fn tend(self: &Arc<Self>, scope: &Scope) -> bool {
        let shards: Vec<Arc<Shard>> =
            lock(&self.locals).values().map(|local| Arc::clone(&local.shard)).collect();
        let mut busy = !self.map().moves.is_empty();
        for shard in shards.iter().filter(|shard| shard.role() == Role::Primary) {
            // A script may have the shard for long.
            let Some(moves) = shard.lock_soon().map(|state| state.moves.clone()) else { continue };
            if moves.is_idle() && !busy {
                continue;
            }
            busy = true;
            // After the journal: what the map says about it is then the newest there is, and commands go by it from now on.
            if let Err(error) = self.refresh(0).await {
                tracing::debug!(%error, "the slot map cannot be read");
                continue;
            }
            let map = self.map();
            self.end_giving(shard, &map);
            for duty in duties(shard.index, &moves, &map) {
                if let Err(error) = self.fulfil(shard, &duty, map.epoch, scope).await {
                    tracing::debug!(%error, ?duty, "a step of a move has to wait");
                }
            }
        }
        busy
    }

    /// What was kept for a target is let go once it is not needed any more.
    fn end_giving(&self, shard: &Shard, map: &SlotMap) {
        let mut giving = lock(&self.giving);
        let Some(id) = giving.moves.get(&shard.index).copied() else { return };
        if map.find(id).is_none_or(|one| one.phase != Phase::Copying) {
            giving.end(shard.index);
            shard.keep_from(i64::MAX);
            if let Some(mut state) = shard.lock_soon() {
                state.db.drop_image(id);
            }
        }
    }

    async fn fulfil(
        self: &Arc<Self>,
        shard: &Arc<Shard>,
        duty: &Duty,
        epoch: u64,
        scope: &Scope,
    ) -> std::io::Result<()> {
        match *duty {
            Duty::Thaw { id, attempt } => self.thaw(shard, id, attempt).await,
            Duty::Drop { id } => self.turns(shard, id, DROP, epoch).await,
            Duty::Own { id } if !lock(&self.at_work).contains(&id) => self.turns(shard, id, OWN, epoch).await,
            Duty::Discard { id } if !lock(&self.at_work).contains(&id) => {
                self.turns(shard, id, DISCARD, epoch).await
            }
            Duty::Own { .. } | Duty::Discard { .. } => Ok(()),
            Duty::Settle { id, side } => self.settle_move(shard, id, side).await,
            Duty::Take { id } => {
                if lock(&self.at_work).insert(id) {
                    scope.spawn("slots-take", Arc::clone(self).take(Arc::clone(shard), id));
                }
                Ok(())
            }
            Duty::Wait { id, attempt } => self.wait_for_target(shard, id, attempt).await,
        }
    }

    /// Changes a shard that this node leads, as often as `act` says that there is more to do.
    async fn turn(
        &self,
        shard: &Arc<Shard>,
        mut act: impl FnMut(&mut Turn<'_>) -> bool + Send + 'static,
    ) -> std::io::Result<()> {
        let (shard, shared) = (Arc::clone(shard), Arc::clone(&self.shared));
        offload(move || {
            loop {
                let mut turn = shard.turn_away(&shared);
                let more = shard.role() == Role::Primary && turn.state.epoch != -1 && act(&mut turn);
                turn.finish();
                if !more {
                    return Ok(());
                }
                std::thread::yield_now();
            }
        })
        .await?;
        self.moved.notify_one();
        Ok(())
    }

    /// Does a step to all slots of a move, a few at a time.
    async fn turns(
        &self,
        shard: &Arc<Shard>,
        id: u64,
        step: &'static [u8],
        epoch: u64,
    ) -> std::io::Result<()> {
        self.turn(shard, move |turn| {
            let moves = &turn.state.moves;
            let slots = match step {
                DROP => moves.frozen().get(&id).map(|frozen| &frozen.slots),
                _ => moves.staged().get(&id).map(|staged| &staged.slots),
            };
            let Some(slots) = slots else { return false };
            let (mut batch, mut keys) = (SlotSet::default(), 0);
            for slot in slots.iter() {
                if keys > KEYS_AT_ONCE {
                    break;
                }
                keys += turn.state.db.all_in_slot(slot);
                batch.insert(slot);
            }
            let (id, batch, epoch) = (id.to_string(), batch.to_string(), epoch.to_string());
            turn.step(&[step, id.as_bytes(), batch.as_bytes(), epoch.as_bytes()]);
            true
        })
        .await
    }

    /// Notes in the map that a side has done its part, once that is committed.
    async fn settle_move(&self, shard: &Arc<Shard>, id: u64, side: Side) -> std::io::Result<()> {
        let (end, voided) = shard.look(|state| (state.end(), shard.voided())).await;
        if !self.commits(shard, end, voided).await {
            return Ok(());
        }
        let changed = self.change_moves(|map| map.settled(id, side)).await;
        changed.map_err(std::io::Error::other)?;
        self.moved.notify_one();
        Ok(())
    }

    /// Commands for the slots go on, if they were frozen under this attempt.
    async fn thaw(&self, shard: &Arc<Shard>, id: u64, attempt: u32) -> std::io::Result<()> {
        self.turn(shard, move |turn| {
            let frozen = turn.state.moves.frozen().get(&id);
            if frozen.is_some_and(|frozen| frozen.attempt == attempt) {
                turn.step(&[THAW, id.to_string().as_bytes()]);
            }
            false
        })
        .await
    }

    /// A source waits for its target for a while, and then goes on serving. It may thaw only when the map says so.
    async fn wait_for_target(&self, shard: &Arc<Shard>, id: u64, attempt: u32) -> std::io::Result<()> {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ThawWithoutAbort) {
            return self.thaw(shard, id, attempt).await;
        }
        let now = self.parts.clock.monotonic_ms();
        let key = (shard.index, id, attempt);
        let since = *lock(&self.frozen_since).entry(key).or_insert(now);
        if now < since + FREEZE_MS {
            return Ok(());
        }
        let changed = self
            .change_moves(|map| if attempt < ATTEMPTS { map.retried(id, attempt) } else { map.aborted(id) });
        changed.await.map_err(std::io::Error::other)?;
        lock(&self.frozen_since).remove(&key);
        tracing::warn!(id, attempt, "the target of a move took too long; its slots are served again");
        self.moved.notify_one();
        Ok(())
    }

    /// The slot map as it is now, with its revision.
    pub(super) async fn read_map(&self) -> Result<(i64, SlotMap), RepositoryError> {
        let entry = self.parts.repository.get(MAP).await?;
        let entry =
            entry.ok_or_else(|| RepositoryError::Unavailable("there is no slot map yet".to_owned()))?;
        let map = SlotMap::decode(&entry.value);
        let map = map.ok_or_else(|| RepositoryError::Damaged("the slot map".to_owned()))?;
        Ok((entry.mod_revision, map))
    }

    /// Changes the slot map; `None` when `edit` found nothing to change.
    pub(super) async fn change_moves(
        &self,
        edit: impl Fn(&SlotMap) -> Option<SlotMap> + Send,
    ) -> Result<Option<SlotMap>, RepositoryError> {
        loop {
            let (revision, map) = self.read_map().await?;
            let Some(changed) = edit(&map) else { return Ok(None) };
            let same = Compare::ModRevision(MAP.to_owned(), revision);
            let mut txn = Txn::new().when(same).put(MAP, changed.encode());
            for over in map.moves.iter().filter(|one| changed.find(one.id).is_none()) {
                txn = txn.delete(format!("{PROGRESS}{}", over.id));
            }
            if let TxnOutcome::Done { .. } = self.parts.repository.txn(txn).await? {
                return Ok(Some(changed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_resp::OwnedArgs;

    use super::*;
    use crate::moves::{FREEZE, STAGE};
    use crate::shard::State;

    fn moves(steps: &[&[&[u8]]]) -> Moves {
        let mut state = State::empty();
        for step in steps {
            state.apply_step(&OwnedArgs::from_slices(*step).args()).unwrap();
        }
        state.moves.clone()
    }

    #[test]
    fn the_map_alone_decides_what_becomes_of_slots() {
        let map = SlotMap::even(2).with_move(0, 1, &SlotSet::of(&[(5, 9)])).unwrap();
        let frozen = moves(&[&[FREEZE, b"1", b"0", b"5-9"]]);
        let staged = moves(&[&[STAGE, b"1", b"5-9"]]);
        let idle = Moves::default();
        let (again, moved, aborted) =
            (map.retried(1, 0).unwrap(), map.flipped(1, 0).unwrap(), map.aborted(1).unwrap());
        let over = |map: &SlotMap| {
            map.settled(1, Side::Source).and_then(|map| map.settled(1, Side::Target)).unwrap()
        };
        let settle = |side| vec![Duty::Settle { id: 1, side }];
        let (thaw, drop_them) = (Duty::Thaw { id: 1, attempt: 0 }, Duty::Drop { id: 1 });
        for (name, shard, journal, map, wanted) in [
            ("source, before the freeze", 0, &idle, &map, vec![]),
            ("source, frozen", 0, &frozen, &map, vec![Duty::Wait { id: 1, attempt: 0 }]),
            ("source, tried again", 0, &frozen, &again, vec![thaw.clone()]),
            ("source, given up", 0, &frozen, &aborted, vec![thaw.clone()]),
            ("source, moved", 0, &frozen, &moved, vec![drop_them.clone()]),
            ("source, dropped", 0, &idle, &moved, settle(Side::Source)),
            ("source, thawed", 0, &idle, &aborted, settle(Side::Source)),
            ("source, frozen for a move that is over, moved", 0, &frozen, &over(&moved), vec![drop_them]),
            ("source, frozen for a move that is over, stayed", 0, &frozen, &over(&aborted), vec![thaw]),
            ("target, nothing yet", 1, &idle, &map, vec![Duty::Take { id: 1 }]),
            ("target, staged", 1, &staged, &map, vec![Duty::Take { id: 1 }]),
            ("target, moved", 1, &staged, &moved, vec![Duty::Own { id: 1 }]),
            ("target, given up", 1, &staged, &aborted, vec![Duty::Discard { id: 1 }]),
            ("target, owned", 1, &idle, &moved, settle(Side::Target)),
            (
                "target, staged for a move that is over",
                1,
                &staged,
                &over(&aborted),
                vec![Duty::Discard { id: 1 }],
            ),
            ("somebody else", 7, &idle, &map, vec![]),
        ] {
            assert_eq!(duties(shard, journal, map), wanted, "{name}");
        }
    }
}
