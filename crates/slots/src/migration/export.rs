//! The source of a slot migration: exports a snapshot of the keys, then the journal tail with the changes since, and
//! finally freezes the slots.
//!
//! Only committed data leaves the source. The target asks and keeps the position, so a new primary on either side
//! continues where the previous one stopped; the source only has to retain its journal from that offset on.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use moim_base::task::offload;

use super::protocol::{MigrationRequest, MigrationResponse};
use super::state::{CLOCK, FREEZE, WIPE, effect_time, is_internal_effect};
use super::throttle;
use crate::cmd::{self, Keys};
use crate::effects::{self, Effects, Groups};
use crate::log;
use crate::service::Service;
use crate::service::slot_map::{Migration, Phase, SlotMap};
use crate::shard::{Role, Shard};
use crate::shared::lock;
use crate::slot_set::SlotSet;
use crate::snapshot::write_key;

/// Bytes that are serialized under the lock at a time, and sent in one response.
const STEP_BYTES: usize = 256 << 10;
/// The largest response: one key may need any number of them.
const MAX_RESPONSE_BYTES: usize = 8 << 20;
/// Bytes of the journal that are read for one response, and at least one batch.
const TAIL_BYTES: usize = 1 << 20;
/// How long a commit, or the wait for the serving right, may take.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The exports of this node.
#[derive(Default)]
pub(crate) struct Exports {
    /// The migration of each source shard that this node leads.
    pub(crate) by_source: BTreeMap<u16, u64>,
    /// The buffer of the last response, for reuse.
    pub(crate) last: Option<Bytes>,
    /// Serialized keys of a migration that did not fit the last response, and whether they are the last.
    pub(crate) rest: BTreeMap<u64, (Bytes, bool)>,
}

impl Exports {
    /// An export starts from the beginning.
    fn begin(&mut self, shard: u16, id: u64) {
        self.by_source.insert(shard, id);
        self.rest.remove(&id);
    }

    /// The migration of this source shard has ended.
    pub(crate) fn end(&mut self, shard: u16) {
        if let Some(id) = self.by_source.remove(&shard) {
            self.rest.remove(&id);
        }
        self.last = None;
    }
}

impl Service {
    /// Serves a request of a target.
    pub(crate) async fn export(&self, request: MigrationRequest) -> io::Result<(MigrationResponse, Bytes)> {
        let id = request.id();
        let Some((migration, shard)) = self.find_export(id).await else {
            return Ok((MigrationResponse::NotPrimary, Bytes::new()));
        };
        match request {
            MigrationRequest::StartSnapshot { .. } => self.start_snapshot(&shard, &migration).await,
            MigrationRequest::NextKeys { .. } => self.next_keys(shard, id).await,
            MigrationRequest::Tail { from, .. } => {
                shard.retain_journal_from(from);
                offload(move || read_tail(&shard, &migration, from)).await
            }
            MigrationRequest::Freeze { attempt, .. } => self.freeze(&shard, &migration, attempt).await,
        }
    }

    /// The migration, and its source shard if this node leads it.
    async fn find_export(&self, id: u64) -> Option<(Migration, Arc<Shard>)> {
        let known =
            |map: &SlotMap| map.find(id).filter(|migration| migration.phase == Phase::Copying).cloned();
        let mut found = known(&self.map());
        if found.is_none() {
            // The target may have read the slot map before this node did.
            self.refresh(0).await.ok()?;
            found = known(&self.map());
        }
        let migration = found?;
        let shard = self.local_primary(migration.from)?;
        Some((migration, shard))
    }

    async fn start_snapshot(
        &self,
        shard: &Arc<Shard>,
        migration: &Migration,
    ) -> io::Result<(MigrationResponse, Bytes)> {
        let (source, shared, id, slots) =
            (Arc::clone(shard), Arc::clone(&self.shared), migration.id, migration.slots.clone());
        let begun = offload(move || {
            let mut turn = source.turn_blocking(&shared);
            turn.append();
            let fits = source.role() == Role::Primary && turn.state.fx.is_settled();
            if fits {
                turn.state.db.begin_image(id, Some(&slots), write_key);
                source.retain_journal_from(turn.state.applied);
            }
            let position = turn.state.applied;
            turn.finish();
            Ok(fits.then_some((position, source.voided())))
        });
        let Some((position, voided)) = begun.await? else {
            return Ok((MigrationResponse::NotPrimary, Bytes::new()));
        };
        lock(&self.exports).begin(shard.index, migration.id);
        let response = match self.wait_committed(shard, position, voided).await {
            true => MigrationResponse::SnapshotStarted { position },
            false => MigrationResponse::NotPrimary,
        };
        Ok((response, Bytes::new()))
    }

    async fn next_keys(&self, shard: Arc<Shard>, id: u64) -> io::Result<(MigrationResponse, Bytes)> {
        let (previous, rest) = {
            let mut exports = lock(&self.exports);
            (exports.last.take(), exports.rest.remove(&id))
        };
        let index = shard.index;
        let read_step = async {
            match rest {
                Some((rest, is_last)) => Ok(Some((is_last, rest))),
                None => offload(move || Ok(next_keys(&shard, id, previous))).await,
            }
        };
        let (read, late_us) = throttle::measure_latency(self.parts.clock.as_ref(), read_step).await;
        let Some((mut is_last, mut keys)) = read? else {
            return Ok((MigrationResponse::Restart, Bytes::new()));
        };
        if keys.len() > MAX_RESPONSE_BYTES {
            let rest = keys.split_off(MAX_RESPONSE_BYTES);
            let mut exports = lock(&self.exports);
            if exports.by_source.get(&index) == Some(&id) {
                exports.rest.insert(id, (rest, is_last));
            }
            is_last = false;
        }
        let served = self.shared.stats.commands.get();
        let is_shared = self.served_before.swap(served, Ordering::Relaxed) != served;
        let mut exports = lock(&self.exports);
        // Not the buffer of a very large slot, and none once the migration has ended.
        if !is_last && keys.len() <= 2 * STEP_BYTES && exports.by_source.get(&index) == Some(&id) {
            exports.last = Some(keys.clone());
        }
        drop(exports);
        Ok((MigrationResponse::Keys { is_last, late_us, is_shared }, keys))
    }

    async fn freeze(
        &self,
        shard: &Arc<Shard>,
        migration: &Migration,
        attempt: u32,
    ) -> io::Result<(MigrationResponse, Bytes)> {
        let (source, shared, migration) = (Arc::clone(shard), Arc::clone(&self.shared), migration.clone());
        let frozen = offload(move || {
            let mut turn = source.turn_blocking(&shared);
            // Queued effects first: the frame of the freeze is the last one with an effect on the slots.
            turn.append();
            let leads = source.role() == Role::Primary && turn.state.epoch != -1;
            let known = turn.state.migrations.frozen().get(&migration.id).map(|frozen| frozen.attempt);
            if leads && known != Some(attempt) {
                let (id, attempt) = (migration.id.to_string(), attempt.to_string());
                turn.step(&[
                    FREEZE,
                    id.as_bytes(),
                    attempt.as_bytes(),
                    migration.slots.to_string().as_bytes(),
                ]);
                turn.append();
            }
            let end = turn.end();
            let voided = source.voided();
            turn.finish();
            Ok(leads.then_some((end, voided)))
        });
        let Some((end, voided)) = frozen.await? else {
            return Ok((MigrationResponse::NotPrimary, Bytes::new()));
        };
        self.migration_wakeup.notify_one();
        let is_frozen =
            self.wait_committed(shard, end, voided).await && self.wait_for_serving_right(shard, voided).await;
        Ok((
            if is_frozen { MigrationResponse::Frozen { end } } else { MigrationResponse::NotPrimary },
            Bytes::new(),
        ))
    }

    /// Waits until this node holds the serving right: a previous primary, which knows of no freeze, may hold it until
    /// then, and must not serve the slots after the flip.
    async fn wait_for_serving_right(&self, shard: &Shard, voided: u64) -> bool {
        let until = tokio::time::Instant::now() + COMMIT_TIMEOUT;
        while !shard.holds_serving_right(self.parts.clock.as_ref()) {
            if shard.voided() != voided || tokio::time::Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        shard.voided() == voided
    }

    /// Waits until the journal of a shard is committed up to `end`; false if leadership has ended, or nothing was
    /// committed within [`COMMIT_TIMEOUT`].
    pub(crate) async fn wait_committed(&self, shard: &Shard, end: i64, voided: u64) -> bool {
        let (mut until, mut before) = (tokio::time::Instant::now() + COMMIT_TIMEOUT, shard.committed());
        while shard.committed() < end {
            let committed = shard.committed();
            if committed > before {
                (until, before) = (tokio::time::Instant::now() + COMMIT_TIMEOUT, committed);
            }
            if shard.voided() != voided || tokio::time::Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        shard.voided() == voided
    }

    /// A shard that this node leads.
    pub(crate) fn local_primary(&self, index: u16) -> Option<Arc<Shard>> {
        let shard = lock(&self.locals).get(&index).map(|local| Arc::clone(&local.shard))?;
        (shard.role() == Role::Primary && shard.log.leader_epoch().is_some()).then_some(shard)
    }
}

/// The next keys of the snapshot, and whether they are the last; `None` if the image was dropped. The previous buffer
/// is reused if it was sent: fresh memory is slow to touch.
fn next_keys(shard: &Shard, id: u64, previous: Option<Bytes>) -> Option<(bool, Bytes)> {
    let mut out = match previous {
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

/// Reads the effects on the slots of a migration from a journal offset on.
fn read_tail(shard: &Shard, migration: &Migration, from: i64) -> io::Result<(MigrationResponse, Bytes)> {
    let (journal, until) = (shard.log.journal(), shard.committed());
    if from < journal.start() || from > until {
        return Ok((MigrationResponse::Restart, Bytes::new()));
    }
    // Below `next` there are complete batches only; `at` is the read position.
    let (mut next, mut at) = (from, from);
    let (mut filter, mut groups) = (TailFilter::default(), Groups::default());
    while next == from && at < until {
        let frames = log::read(journal, at, until, TAIL_BYTES).map_err(io::Error::other)?;
        if frames.is_empty() {
            return Err(io::Error::other(format!(
                "no frame at offset {at} of a journal that ends at {until}"
            )));
        }
        for (offset, payload) in frames {
            at = offset + 1;
            let frame = effects::parse(&payload).map_err(io::Error::other)?;
            if let Some((time_ms, commands)) = groups.take(frame).map_err(io::Error::other)? {
                filter.begin(time_ms);
                commands.iter().for_each(|command| filter.push(&command.args(), migration));
                next = at;
            }
        }
    }
    let bytes = Bytes::copy_from_slice(filter.effects.payload(0));
    // The rest of a group that is not committed yet is committed before the freeze, or never.
    let is_all = next >= until || at >= until && groups.is_open();
    Ok((MigrationResponse::Tail { next, is_all }, bytes))
}

/// Selects the effects on the slots of a migration, with the times at which they happened.
#[derive(Default)]
struct TailFilter {
    effects: Effects,
    /// The time of the next effect, and the time that the last emitted CLOCK set.
    time_ms: i64,
    emitted_ms: Option<i64>,
}

impl TailFilter {
    /// Starts a batch of the source's journal.
    fn begin(&mut self, time_ms: i64) {
        self.time_ms = time_ms;
    }

    /// Adds a command if it changed a key in one of the slots.
    fn push(&mut self, args: &moim_wire_resp::Args<'_>, migration: &Migration) {
        if is_internal_effect(args.name()) {
            if let Some(time_ms) = effect_time(args) {
                self.time_ms = time_ms;
            }
            return;
        }
        let Some(spec) = cmd::resolve(args) else { return };
        if matches!(spec.keys, Keys::None) {
            if matches!(spec.name, "flushall" | "flushdb") {
                self.effects.push_slices(&[WIPE, migration.id.to_string().as_bytes()]);
            }
            return;
        }
        if touches(spec, args, &migration.slots) {
            if self.emitted_ms.replace(self.time_ms) != Some(self.time_ms) {
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
    fn the_tail_contains_exactly_the_effects_on_the_migrating_slots() {
        let map = SlotMap::even(2);
        let slots = SlotSet::from_iter([slot_of(b"{a}")]);
        let from = map.owners()[usize::from(slot_of(b"{a}"))];
        let map = map.with_migration(from, 1 - from, &slots).unwrap();
        let mut filter = TailFilter::default();
        let batches = [
            (7, vec![&["SET", "{a}1", "x"][..], &["SET", "{b}1", "x"], &["DEL", "{a}1", "{a}2"]]),
            (7, vec![&["FLUSHALL"], &["\0freeze", "1", "0", "5"], &["APPEND", "{a}1", "x"]]),
            (8, vec![&["SET", "{b}1", "x"]]),
            // Effects of an earlier migration that imported other slots.
            (9, vec![&["\0clock", "3"], &["SET", "{a}2", "x"], &["\0at", "1", "9"]]),
            (9, vec![&["RPUSH", "{a}l", "1", "2"]]),
        ];
        for (time_ms, commands) in batches {
            filter.begin(time_ms);
            for command in commands {
                filter.push(&OwnedArgs::from_slices(command).args(), &map.migrations[0]);
            }
        }
        let (_, commands) = effects::read(filter.effects.payload(0)).unwrap();
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
