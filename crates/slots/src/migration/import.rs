//! The target of a slot migration: loads the snapshot of the keys, applies the source's journal tail, has the slots
//! frozen, and flips their owner.
//!
//! Everything imported goes through the target's own journal (`state.rs`), so a new primary continues from the position
//! that is recorded there. Invariants: the flip happens only after everything below the freeze is committed here, and
//! only by the primary that the target has at that moment.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use moim_base::BrokerId;
use moim_base::task::offload;
use moim_replica::keys::{self, SHARDS};
use moim_replica::{PartitionId, PartitionState};
use moim_state::{Compare, RepositoryError, Txn, TxnOutcome};

use super::protocol::{MigrationRequest, MigrationResponse};
use super::state::{AT, STAGE};
use super::throttle::{self, Load, Throttle};
use crate::effects;
use crate::peer::PeerConnection;
use crate::service::slot_map::{Migration, Phase};
use crate::service::{MAP, PROGRESS, Service};
use crate::session::Session;
use crate::shard::{Role, Shard, Turn};
use crate::shared::lock;
use crate::snapshot::whole_keys;

/// Bytes of keys that are loaded in one turn; a larger key alone.
const LOAD_BYTES: usize = 512 << 10;
/// The pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The timeout of one response of the source.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// How often the progress is published.
const PROGRESS_INTERVAL_MS: u64 = 500;

/// Why an import stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    /// The migration is over, or this node does not lead the target any more.
    #[error("slot migration superseded")]
    Superseded,
    /// The imported data does not match the source's snapshot or journal: import from the start.
    #[error("slot migration restarts from the snapshot")]
    Restart,
    /// The source or the coordination core failed; try again.
    #[error("{0}")]
    Retry(String),
}

impl From<io::Error> for ImportError {
    fn from(error: io::Error) -> Self {
        Self::Retry(error.to_string())
    }
}

impl From<RepositoryError> for ImportError {
    fn from(error: RepositoryError) -> Self {
        Self::Retry(error.to_string())
    }
}

/// The progress of a migration, as it is published.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Progress {
    /// `keys`, `changes`, `frozen`.
    pub(crate) stage: String,
    /// Bytes imported.
    pub(crate) bytes: u64,
}

/// The primary of the source shard: this node, or a peer.
enum Source<'a> {
    Local(&'a Service),
    Remote(Box<PeerConnection>),
}

impl Source<'_> {
    async fn request(
        &mut self,
        request: MigrationRequest,
    ) -> Result<(MigrationResponse, Bytes), ImportError> {
        let exchange = async {
            match self {
                Self::Local(service) => service.export(request).await,
                Self::Remote(connection) => {
                    connection.send(&request, b"").await?;
                    connection.receive().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
                }
            }
        };
        let response = tokio::time::timeout(RESPONSE_TIMEOUT, exchange).await;
        match response.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
            (MigrationResponse::Restart, _) => Err(ImportError::Restart),
            (MigrationResponse::NotPrimary, _) => {
                Err(ImportError::Retry("the peer is not the source's primary".to_owned()))
            }
            response => Ok(response),
        }
    }
}

/// A journal end, and the shard's count of voided replies when it was read.
struct JournalEnd {
    position: i64,
    voided: u64,
}

/// A running import.
struct Import<'a> {
    service: &'a Service,
    shard: Arc<Shard>,
    migration: Migration,
    /// The leader epoch of the target in which this import started.
    leader_epoch: i32,
    progress: Progress,
    reported_ms: u64,
    /// The beginning of a key whose rest was not received yet.
    partial: BytesMut,
}

impl Service {
    /// Runs an import to its end, or until this node does not lead the target any more.
    pub(crate) async fn run_import(self: Arc<Self>, shard: Arc<Shard>, id: u64) {
        let mut from_start = false;
        loop {
            match self.import_once(&shard, id, &mut from_start).await {
                Ok(()) | Err(ImportError::Superseded) => break,
                Err(ImportError::Restart) => from_start = true,
                Err(ImportError::Retry(reason)) => tracing::info!(id, reason, "slot import delayed"),
            }
            if self.parts.shutdown.is_stopped() {
                break;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        lock(&self.active_imports).remove(&id);
        self.migration_wakeup.notify_one();
    }

    async fn import_once(
        &self,
        shard: &Arc<Shard>,
        id: u64,
        from_start: &mut bool,
    ) -> Result<(), ImportError> {
        let leader_epoch = shard
            .log
            .leader_epoch()
            .filter(|_| shard.role() == Role::Primary)
            .ok_or(ImportError::Superseded)?;
        let map = self.read_slot_map().await?.1;
        let migration = map
            .find(id)
            .filter(|migration| migration.phase == Phase::Copying)
            .ok_or(ImportError::Superseded)?
            .clone();
        let mut source = self.source(migration.from).await?;
        let (service, shard) = (self, Arc::clone(shard));
        let reported_ms = self.parts.clock.monotonic_ms();
        let mut import = Import {
            service,
            shard,
            migration,
            leader_epoch,
            progress: Progress::default(),
            reported_ms,
            partial: BytesMut::new(),
        };
        let mut position = match import.loaded_position().await.filter(|_| !*from_start) {
            Some(position) => position,
            None => import.load_snapshot(&mut source).await?,
        };
        *from_start = false;
        while !import.apply_tail(&mut source, &mut position).await? {}
        import.report_progress("frozen").await;
        let attempt = import.migration.attempt;
        let (response, _) = source.request(MigrationRequest::Freeze { id, attempt }).await?;
        let MigrationResponse::Frozen { end } = response else { return Err(ImportError::Restart) };
        while position < end {
            import.apply_tail(&mut source, &mut position).await?;
        }
        import.wait_committed().await?;
        import.shard.is_flipping.store(true, Ordering::Release);
        let flipped = match self.flip(&import.migration, leader_epoch).await {
            Ok(()) => self.refresh(0).await.map(drop).map_err(ImportError::from),
            Err(error) => Err(error),
        };
        import.shard.is_flipping.store(false, Ordering::Release);
        import.shard.with_state(|state| state.held_connections.wake()).await;
        flipped?;
        let Migration { from, to, slots, .. } = &import.migration;
        tracing::info!(id, from, to, %slots, "slot migration: slots flipped to the target");
        Ok(())
    }

    /// The flip: the commit point of a migration. Fenced by the leader epoch: another primary of the target may have
    /// restarted the import.
    async fn flip(&self, migration: &Migration, leader_epoch: i32) -> Result<(), ImportError> {
        let repository = self.parts.repository.as_ref();
        let key = keys::partition(PartitionId { topic: SHARDS, index: u32::from(migration.to) });
        loop {
            let entry = repository.get(&key).await?.ok_or(ImportError::Superseded)?;
            let state = PartitionState::decode(&entry.value)
                .map_err(|error| ImportError::Retry(error.to_string()))?;
            if state.leader != Some(self.options.node) || state.leader_epoch.0 != leader_epoch {
                return Err(ImportError::Superseded);
            }
            let (revision, map) = self.read_slot_map().await?;
            let Some(flipped) = map.flipped(migration.id, migration.attempt) else {
                return Err(ImportError::Retry("the source did not stay frozen".to_owned()));
            };
            let txn = Txn::new()
                .when(Compare::ModRevision(MAP.to_owned(), revision))
                .when(Compare::ModRevision(key.clone(), entry.mod_revision))
                .put(MAP, flipped.encode());
            if let TxnOutcome::Done { .. } = repository.txn(txn).await? {
                return Ok(());
            }
        }
    }

    /// The primary of a source shard.
    async fn source(&self, shard: u16) -> Result<Source<'_>, ImportError> {
        if self.local_primary(shard).is_some() {
            return Ok(Source::Local(self));
        }
        let leader: Option<BrokerId> = lock(&self.records).get(&shard).and_then(|state| state.leader);
        let leader = leader.filter(|node| *node != self.options.node);
        let leader = leader.ok_or_else(|| ImportError::Retry(format!("shard {shard} has no primary")))?;
        let socket = self.parts.dialler.dial(leader).await?;
        Ok(Source::Remote(Box::new(PeerConnection::open(socket).await?)))
    }
}

impl Import<'_> {
    /// The offset of the source's journal that was imported, if all keys of the snapshot are loaded.
    async fn loaded_position(&self) -> Option<i64> {
        let id = self.migration.id;
        self.shard
            .with_state(|state| state.migrations.staged().get(&id).and_then(|staged| staged.position))
            .await
    }

    /// Runs one turn on the target, in the leader epoch in which this import started.
    async fn turn<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Turn<'_>) -> T + Send + 'static,
    ) -> Result<T, ImportError> {
        let (shard, shared, leader_epoch) =
            (Arc::clone(&self.shard), Arc::clone(&self.service.shared), self.leader_epoch);
        let done = offload(move || {
            let mut turn = shard.turn_blocking(&shared);
            let leads = shard.role() == Role::Primary && turn.state.epoch == leader_epoch;
            let done = leads.then(|| act(&mut turn));
            turn.finish();
            Ok(done)
        });
        done.await?.ok_or(ImportError::Superseded)
    }

    /// The end of the target's journal.
    async fn end(&self) -> JournalEnd {
        self.shard.with_state(|state| JournalEnd { position: state.end(), voided: self.shard.voided() }).await
    }

    /// Waits until everything imported is committed.
    async fn wait_committed(&self) -> Result<(), ImportError> {
        self.wait_committed_to(self.end().await).await
    }

    async fn wait_committed_to(&self, end: JournalEnd) -> Result<(), ImportError> {
        let leads = || self.shard.log.leader_epoch() == Some(self.leader_epoch);
        if !leads() || !self.service.wait_committed(&self.shard, end.position, end.voided).await || !leads() {
            return Err(ImportError::Superseded);
        }
        Ok(())
    }

    /// Loads all keys of the snapshot; returns the offset of the source's journal that they show.
    async fn load_snapshot(&mut self, source: &mut Source<'_>) -> Result<i64, ImportError> {
        let id = self.migration.id;
        let (response, _) = source.request(MigrationRequest::StartSnapshot { id }).await?;
        let MigrationResponse::SnapshotStarted { position } = response else {
            return Err(ImportError::Restart);
        };
        let (number, slots) = (id.to_string(), self.migration.slots.to_string());
        self.turn(move |turn| turn.step(&[STAGE, number.as_bytes(), slots.as_bytes()])).await?;
        self.progress.bytes = 0;
        self.partial.clear();
        let (service, mut throttle, mut end_before) = (self.service, Throttle::default(), None);
        let mut response = source.request(MigrationRequest::NextKeys { id }).await?;
        while let (MigrationResponse::Keys { is_last, late_us, is_shared }, keys) = response {
            self.progress.bytes += keys.len() as u64;
            self.report_progress("keys").await;
            let served_before = self.service.shared.stats.commands.get();
            // The next keys are requested while these are loaded; no more than that is in flight.
            let next = async {
                if is_last {
                    Ok(None)
                } else {
                    source.request(MigrationRequest::NextKeys { id }).await.map(Some)
                }
            };
            let work = async {
                let (taken, next) = tokio::join!(self.load_keys(keys), next);
                // The disks sync one piece while the next is loaded, and no more than that: writes of the target's
                // clients queue behind it in the journal.
                if let Some(end) = end_before.replace(taken?) {
                    self.wait_committed_to(end).await?;
                }
                next
            };
            let (next, late_here_us) = throttle::measure_latency(service.parts.clock.as_ref(), work).await;
            let is_shared_here = self.service.shared.stats.commands.get() != served_before;
            let here = Load { late_us: late_here_us, is_shared: is_shared_here };
            if let Some(rest) = throttle.next_pause(here.and(Load { late_us, is_shared })) {
                tokio::time::sleep(rest).await;
            }
            match next? {
                Some(next) => response = next,
                // The last key is incomplete.
                None if !self.partial.is_empty() => return Err(ImportError::Restart),
                None => {
                    self.record_position(position).await?;
                    return Ok(position);
                }
            }
        }
        Err(ImportError::Restart)
    }

    /// Loads keys; returns the journal end that commits them.
    async fn load_keys(&mut self, mut keys: Bytes) -> Result<JournalEnd, ImportError> {
        if !self.partial.is_empty() {
            self.partial.extend_from_slice(&keys);
            keys = match whole_keys(&self.partial, LOAD_BYTES) {
                0 => Bytes::new(),
                _ => std::mem::take(&mut self.partial).freeze(),
            };
        }
        loop {
            let piece = keys.split_to(whole_keys(&keys, LOAD_BYTES));
            if piece.is_empty() {
                break;
            }
            let id = self.migration.id.to_string();
            self.turn(move |turn| turn.load(&id, &piece)).await?.map_err(|error| {
                tracing::error!(%error, "slot migration: keys of the source cannot be decoded");
                ImportError::Restart
            })?;
        }
        if !keys.is_empty() {
            self.partial = BytesMut::from(&keys[..]);
        }
        Ok(self.end().await)
    }

    async fn record_position(&self, position: i64) -> Result<(), ImportError> {
        let (id, position) = (self.migration.id.to_string(), position.to_string());
        self.turn(move |turn| turn.step(&[AT, id.as_bytes(), position.as_bytes()])).await
    }

    /// Applies the source's journal tail from `position` on. Returns whether the end of the committed tail was reached.
    async fn apply_tail(&mut self, source: &mut Source<'_>, position: &mut i64) -> Result<bool, ImportError> {
        let (response, bytes) =
            source.request(MigrationRequest::Tail { id: self.migration.id, from: *position }).await?;
        let MigrationResponse::Tail { next, is_all } = response else { return Err(ImportError::Restart) };
        if next == *position {
            // The freeze may not be committed at the source yet.
            tokio::time::sleep(Duration::from_millis(1)).await;
            return Ok(is_all);
        }
        self.progress.bytes += bytes.len() as u64;
        self.report_progress("changes").await;
        let commands = match bytes.is_empty() {
            true => Vec::new(),
            false => effects::read(&bytes).map_err(|error| ImportError::Retry(error.to_string()))?.1,
        };
        let (id, shared) = (self.migration.id.to_string(), Arc::clone(&self.service.shared));
        let slots = self.migration.slots.to_string();
        let replayed = self.turn(move |turn| {
            // In one frame with its position: a new primary applies it once.
            turn.append();
            turn.state.fx.mark();
            let now = turn.now;
            let replayed = turn.state.replay(&shared, &mut Session::internal(), now, &commands);
            if replayed.is_err() {
                // Applied in part, to slots that no client sees: the import restarts.
                turn.step(&[STAGE, id.as_bytes(), slots.as_bytes()]);
                return replayed;
            }
            for command in &commands {
                turn.state.fx.push(command.args().iter());
            }
            turn.step(&[AT, id.as_bytes(), next.to_string().as_bytes()]);
            Ok(())
        });
        if let Err(error) = replayed.await? {
            tracing::error!(%error, id = self.migration.id, "slot migration: effects of the source cannot be replayed");
            return Err(ImportError::Restart);
        }
        *position = next;
        Ok(is_all)
    }

    /// Publishes the progress, at most once per [`PROGRESS_INTERVAL_MS`].
    async fn report_progress(&mut self, stage: &str) {
        let now = self.service.parts.clock.monotonic_ms();
        stage.clone_into(&mut self.progress.stage);
        // A short migration publishes nothing.
        if now < self.reported_ms + PROGRESS_INTERVAL_MS {
            return;
        }
        self.reported_ms = now;
        let key = format!("{PROGRESS}{}", self.migration.id);
        let value = serde_json::to_vec(&self.progress).expect("plain data encodes as JSON");
        if let Err(error) = self.service.parts.repository.txn(Txn::new().put(key, value)).await {
            tracing::debug!(%error, "slot migration progress not published");
        }
    }
}
