//! Drives slot migrations to their end, on the primaries of both sides.
//!
//! The primary of a shard reads the migrations of its journal (`state.rs`) and then the slot map, in this order, and
//! does what the map decided: the slot map alone knows whether the flip happened. There is no coordinator that a
//! migration could lose. Imports are started here, too: one per migration, on the primary of its target.
//!
//! A thaw is safe for three reasons: the slot map shows the migration aborted or retried, the flip succeeds only under
//! the attempt that the map has, and only slots that were frozen under an older attempt are thawed, which is checked in
//! the turn that thaws.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::{Scope, offload};
use moim_state::{Compare, RepositoryError, Txn, TxnOutcome};

use super::state::{DISCARD, DROP, Migrations, OWN, THAW};
use crate::service::slot_map::{Migration, Phase, Side, SlotMap};
use crate::service::{MAP, PROGRESS, Service};
use crate::shard::{Role, Shard, Turn};
use crate::shared::lock;
use crate::slot_set::SlotSet;

/// The poll interval while there are migrations.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The poll interval while there are none.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);
/// How long a source keeps its slots frozen for the target.
const FREEZE_TIMEOUT_MS: u64 = 5_000;
/// Attempts after which a migration is aborted.
const MAX_ATTEMPTS: u32 = 20;
/// Keys that are dropped, owned or discarded in one turn, unless one slot has more.
const KEYS_PER_TURN: usize = 1_000;

/// An action of a shard for one migration.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    /// Source: the slots stay; held commands continue. Slots frozen under a newer attempt stay frozen.
    Thaw { id: u64, attempt: u32 },
    /// Source: the slots belong to the target; drop their keys.
    Drop { id: u64 },
    /// Target: the slots belong to this shard; serve them.
    Own { id: u64 },
    /// Target: the migration was aborted; discard the imported keys.
    Discard { id: u64 },
    /// This side has done its part; record that in the slot map.
    Settle { id: u64, side: Side },
    /// Target: import the keys.
    Import { id: u64 },
    /// Source: stay frozen for the target under this attempt.
    Wait { id: u64, attempt: u32 },
}

/// The actions of a shard's primary, given its journal and a slot map that was read after it.
fn pending_actions(shard: u16, migrations: &Migrations, map: &SlotMap) -> Vec<Action> {
    let owners = map.owners();
    let owns = |slots: &SlotSet| slots.iter().next().is_some_and(|slot| owners[usize::from(slot)] == shard);
    let mut actions = Vec::new();
    for (id, frozen) in migrations.frozen() {
        let (id, attempt) = (*id, frozen.attempt);
        actions.push(match map.find(id) {
            Some(migration) if migration.phase == Phase::Copying && migration.attempt <= attempt => {
                Action::Wait { id, attempt }
            }
            Some(migration) if migration.phase == Phase::Moved => Action::Drop { id },
            Some(_) => Action::Thaw { id, attempt },
            None if owns(&frozen.slots) => Action::Thaw { id, attempt },
            None => Action::Drop { id },
        });
    }
    for (id, staged) in migrations.staged() {
        match map.find(*id) {
            Some(migration) if migration.phase == Phase::Copying => {}
            Some(migration) if migration.phase == Phase::Moved => actions.push(Action::Own { id: *id }),
            None if owns(&staged.slots) => actions.push(Action::Own { id: *id }),
            Some(_) | None => actions.push(Action::Discard { id: *id }),
        }
    }
    for migration in &map.migrations {
        let is_over = migration.phase != Phase::Copying;
        if is_over
            && migration.from == shard
            && !migration.source_done
            && !migrations.frozen().contains_key(&migration.id)
        {
            actions.push(Action::Settle { id: migration.id, side: Side::Source });
        }
        if is_over
            && migration.to == shard
            && !migration.target_done
            && !migrations.staged().contains_key(&migration.id)
        {
            actions.push(Action::Settle { id: migration.id, side: Side::Target });
        }
    }
    let is_importing = |migration: &&Migration| migration.to == shard && migration.phase == Phase::Copying;
    actions.extend(map.active().filter(is_importing).map(|migration| Action::Import { id: migration.id }));
    actions
}

/// Sets on each shard of this node whether it is source or target of a migration.
pub(crate) fn mark_migrating(shards: &[(Arc<Shard>, Option<i32>)], map: &SlotMap) {
    for (shard, _) in shards {
        let is_migrating = map
            .migrations
            .iter()
            .any(|migration| migration.from == shard.index || migration.to == shard.index);
        shard.is_migrating.store(is_migrating, Ordering::Relaxed);
    }
}

/// Drives the migrations of this node's shards until the shutdown.
pub(crate) async fn run(service: Arc<Service>, scope: Scope) {
    loop {
        let busy = service.drive(&scope).await;
        tokio::select! {
            biased;
            () = service.migration_wakeup.notified() => {}
            () = rest(if busy { POLL_INTERVAL } else { IDLE_INTERVAL }) => {}
        }
    }
}

impl Service {
    /// Executes all pending actions. Returns whether there are migrations at all.
    async fn drive(self: &Arc<Self>, scope: &Scope) -> bool {
        let shards: Vec<Arc<Shard>> =
            lock(&self.locals).values().map(|local| Arc::clone(&local.shard)).collect();
        let mut busy = !self.map().migrations.is_empty();
        for shard in shards.iter().filter(|shard| shard.role() == Role::Primary) {
            // A script may hold the lock for long.
            let Some(migrations) = shard.lock_soon().map(|state| state.migrations.clone()) else { continue };
            if migrations.is_idle() && !busy {
                continue;
            }
            busy = true;
            // After the journal: then the slot map is at least as new, and commands are routed by it from now on.
            if let Err(error) = self.refresh(0).await {
                tracing::debug!(%error, "slot map read failed");
                continue;
            }
            let map = self.map();
            self.end_export(shard, &map);
            for action in pending_actions(shard.index, &migrations, &map) {
                if let Err(error) = self.execute_action(shard, &action, map.epoch, scope).await {
                    tracing::debug!(%error, ?action, "slot migration action delayed");
                }
            }
        }
        busy
    }

    /// Releases the image and the journal that were retained for a target once the export has ended.
    fn end_export(&self, shard: &Shard, map: &SlotMap) {
        let mut exports = lock(&self.exports);
        let Some(id) = exports.by_source.get(&shard.index).copied() else { return };
        if map.find(id).is_none_or(|migration| migration.phase != Phase::Copying) {
            exports.end(shard.index);
            shard.retain_journal_from(i64::MAX);
            if let Some(mut state) = shard.lock_soon() {
                state.db.drop_image(id);
            }
        }
    }

    async fn execute_action(
        self: &Arc<Self>,
        shard: &Arc<Shard>,
        action: &Action,
        epoch: u64,
        scope: &Scope,
    ) -> std::io::Result<()> {
        match *action {
            Action::Thaw { id, attempt } => self.thaw(shard, id, attempt).await,
            Action::Drop { id } => self.step_all_slots(shard, id, DROP, epoch).await,
            Action::Own { id } if !lock(&self.active_imports).contains(&id) => {
                self.step_all_slots(shard, id, OWN, epoch).await
            }
            Action::Discard { id } if !lock(&self.active_imports).contains(&id) => {
                self.step_all_slots(shard, id, DISCARD, epoch).await
            }
            Action::Own { .. } | Action::Discard { .. } => Ok(()),
            Action::Settle { id, side } => self.settle_migration(shard, id, side).await,
            Action::Import { id } => {
                if lock(&self.active_imports).insert(id) {
                    scope.spawn("slots-import", Arc::clone(self).run_import(Arc::clone(shard), id));
                }
                Ok(())
            }
            Action::Wait { id, attempt } => self.wait_for_target(shard, id, attempt).await,
        }
    }

    /// Runs turns on a shard that this node leads as long as `act` returns true.
    async fn run_turns(
        &self,
        shard: &Arc<Shard>,
        mut act: impl FnMut(&mut Turn<'_>) -> bool + Send + 'static,
    ) -> std::io::Result<()> {
        let (shard, shared) = (Arc::clone(shard), Arc::clone(&self.shared));
        offload(move || {
            loop {
                let mut turn = shard.turn_blocking(&shared);
                let more = shard.role() == Role::Primary && turn.state.epoch != -1 && act(&mut turn);
                turn.finish();
                if !more {
                    return Ok(());
                }
                std::thread::yield_now();
            }
        })
        .await?;
        self.migration_wakeup.notify_one();
        Ok(())
    }

    /// Applies a step to all slots of a migration, a few slots per turn.
    async fn step_all_slots(
        &self,
        shard: &Arc<Shard>,
        id: u64,
        step: &'static [u8],
        epoch: u64,
    ) -> std::io::Result<()> {
        self.run_turns(shard, move |turn| {
            let migrations = &turn.state.migrations;
            let slots = match step {
                DROP => migrations.frozen().get(&id).map(|frozen| &frozen.slots),
                _ => migrations.staged().get(&id).map(|staged| &staged.slots),
            };
            let Some(slots) = slots else { return false };
            let (mut batch, mut keys) = (SlotSet::default(), 0);
            for slot in slots.iter() {
                if keys > KEYS_PER_TURN {
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

    /// Records in the slot map that a side has done its part, once that is committed.
    async fn settle_migration(&self, shard: &Arc<Shard>, id: u64, side: Side) -> std::io::Result<()> {
        let (end, voided) = shard.with_state(|state| (state.end(), shard.voided())).await;
        if !self.wait_committed(shard, end, voided).await {
            return Ok(());
        }
        let changed = self.edit_slot_map(|map| map.settled(id, side)).await;
        changed.map_err(std::io::Error::other)?;
        self.migration_wakeup.notify_one();
        Ok(())
    }

    /// Thaws slots that were frozen under this attempt.
    async fn thaw(&self, shard: &Arc<Shard>, id: u64, attempt: u32) -> std::io::Result<()> {
        self.run_turns(shard, move |turn| {
            let frozen = turn.state.migrations.frozen().get(&id);
            if frozen.is_some_and(|frozen| frozen.attempt == attempt) {
                turn.step(&[THAW, id.to_string().as_bytes()]);
            }
            false
        })
        .await
    }

    /// The source stays frozen until [`FREEZE_TIMEOUT_MS`] has passed, and then serves again. It may thaw only when the
    /// slot map shows the next attempt or the abort.
    async fn wait_for_target(&self, shard: &Arc<Shard>, id: u64, attempt: u32) -> std::io::Result<()> {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ThawWithoutAbort) {
            return self.thaw(shard, id, attempt).await;
        }
        let now = self.parts.clock.monotonic_ms();
        let key = (shard.index, id, attempt);
        let since = *lock(&self.frozen_since).entry(key).or_insert(now);
        if now < since + FREEZE_TIMEOUT_MS {
            return Ok(());
        }
        let changed = self.edit_slot_map(|map| {
            if attempt < MAX_ATTEMPTS { map.retried(id, attempt) } else { map.aborted(id) }
        });
        changed.await.map_err(std::io::Error::other)?;
        lock(&self.frozen_since).remove(&key);
        tracing::warn!(id, attempt, "slot migration: target timed out; source thaws its slots");
        self.migration_wakeup.notify_one();
        Ok(())
    }

    /// Reads the slot map with its revision.
    pub(crate) async fn read_slot_map(&self) -> Result<(i64, SlotMap), RepositoryError> {
        let entry = self.parts.repository.get(MAP).await?;
        let entry =
            entry.ok_or_else(|| RepositoryError::Unavailable("there is no slot map yet".to_owned()))?;
        let map = SlotMap::decode(&entry.value);
        let map = map.ok_or_else(|| RepositoryError::Damaged("the slot map".to_owned()))?;
        Ok((entry.mod_revision, map))
    }

    /// Changes the slot map by compare-and-swap; `None` if `edit` found nothing to change.
    pub(crate) async fn edit_slot_map(
        &self,
        edit: impl Fn(&SlotMap) -> Option<SlotMap> + Send,
    ) -> Result<Option<SlotMap>, RepositoryError> {
        loop {
            let (revision, map) = self.read_slot_map().await?;
            let Some(changed) = edit(&map) else { return Ok(None) };
            let same = Compare::ModRevision(MAP.to_owned(), revision);
            let mut txn = Txn::new().when(same).put(MAP, changed.encode());
            for over in map.migrations.iter().filter(|migration| changed.find(migration.id).is_none()) {
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
    use crate::migration::state::{FREEZE, STAGE};
    use crate::shard::State;

    fn migrations(steps: &[&[&[u8]]]) -> Migrations {
        let mut state = State::empty();
        for step in steps {
            state.apply_step(&OwnedArgs::from_slices(*step).args()).unwrap();
        }
        state.migrations.clone()
    }

    #[test]
    fn the_slot_map_alone_decides_the_outcome_of_a_migration() {
        let map = SlotMap::even(2).with_migration(0, 1, &SlotSet::of(&[(5, 9)])).unwrap();
        let frozen = migrations(&[&[FREEZE, b"1", b"0", b"5-9"]]);
        let staged = migrations(&[&[STAGE, b"1", b"5-9"]]);
        let idle = Migrations::default();
        let (again, moved, aborted) =
            (map.retried(1, 0).unwrap(), map.flipped(1, 0).unwrap(), map.aborted(1).unwrap());
        let over = |map: &SlotMap| {
            map.settled(1, Side::Source).and_then(|map| map.settled(1, Side::Target)).unwrap()
        };
        let settle = |side| vec![Action::Settle { id: 1, side }];
        let (thaw, drop_them) = (Action::Thaw { id: 1, attempt: 0 }, Action::Drop { id: 1 });
        for (name, shard, journal, map, wanted) in [
            ("source, before the freeze", 0, &idle, &map, vec![]),
            ("source, frozen", 0, &frozen, &map, vec![Action::Wait { id: 1, attempt: 0 }]),
            ("source, retried", 0, &frozen, &again, vec![thaw.clone()]),
            ("source, aborted", 0, &frozen, &aborted, vec![thaw.clone()]),
            ("source, flipped", 0, &frozen, &moved, vec![drop_them.clone()]),
            ("source, dropped", 0, &idle, &moved, settle(Side::Source)),
            ("source, thawed", 0, &idle, &aborted, settle(Side::Source)),
            ("source, frozen, migration ended with the flip", 0, &frozen, &over(&moved), vec![drop_them]),
            ("source, frozen, migration ended with the abort", 0, &frozen, &over(&aborted), vec![thaw]),
            ("target, nothing imported", 1, &idle, &map, vec![Action::Import { id: 1 }]),
            ("target, importing", 1, &staged, &map, vec![Action::Import { id: 1 }]),
            ("target, flipped", 1, &staged, &moved, vec![Action::Own { id: 1 }]),
            ("target, aborted", 1, &staged, &aborted, vec![Action::Discard { id: 1 }]),
            ("target, owned", 1, &idle, &moved, settle(Side::Target)),
            (
                "target, importing, migration ended with the abort",
                1,
                &staged,
                &over(&aborted),
                vec![Action::Discard { id: 1 }],
            ),
            ("another shard", 7, &idle, &map, vec![]),
        ] {
            assert_eq!(pending_actions(shard, journal, map), wanted, "{name}");
        }
    }
}
