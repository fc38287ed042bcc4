//! The target of a move: takes the keys in, follows what is done to them, has them frozen, and makes them its own.
//!
//! Everything it takes in goes through its own journal (`moves.rs`), so a new primary goes on from the position that is
//! written there. Invariants: the slots change hands only after everything below the freeze is committed here, and only by
//! the primary that the target has at that moment.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use moim_base::BrokerId;
use moim_base::task::offload;
use moim_cluster::{Compare, RepositoryError, Txn, TxnOutcome};
use moim_replica::keys::{self, SHARDS};
use moim_replica::{PartitionId, PartitionState};

use super::give::{Ask, Said};
use super::map::{Move, Phase};
use super::pace::{self, Pace, Strain};
use super::{MAP, PROGRESS, Service};
use crate::effects;
use crate::moves::{AT, STAGE};
use crate::peer::Wire;
use crate::session::Session;
use crate::shard::{Role, Shard, Turn};
use crate::shared::lock;
use crate::snapshot::whole_keys;

/// Keys that are taken in at a time; a larger one alone.
const LOAD_BYTES: usize = 512 << 10;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);
/// For one answer of the source.
const ANSWER: Duration = Duration::from_secs(15);
/// How often the others hear how far a move is.
const TELL_MS: u64 = 500;

/// Why taking stopped.
#[derive(Debug, thiserror::Error)]
pub(super) enum Halt {
    /// There is nothing to take any more, or not by this node.
    #[error("the move is not ours to go on with")]
    Over,
    /// What has come so far does not fit what the source has.
    #[error("the source begins anew")]
    Anew,
    /// The source, or the coordination core, did not answer as it should.
    #[error("{0}")]
    Again(String),
}

impl From<io::Error> for Halt {
    fn from(error: io::Error) -> Self {
        Self::Again(error.to_string())
    }
}

impl From<RepositoryError> for Halt {
    fn from(error: RepositoryError) -> Self {
        Self::Again(error.to_string())
    }
}

/// How far a move is.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Progress {
    /// `keys`, `changes`, `frozen`.
    pub(super) stage: String,
    /// Bytes taken in.
    pub(super) bytes: u64,
}

/// The source: on this node, or elsewhere.
enum Giver<'a> {
    Here(&'a Service),
    There(Box<Wire>),
}

impl Giver<'_> {
    async fn ask(&mut self, ask: Ask) -> Result<(Said, Bytes), Halt> {
        let answer = async {
            match self {
                Self::Here(service) => service.give(ask).await,
                Self::There(wire) => {
                    wire.send(&ask, b"").await?;
                    wire.receive().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
                }
            }
        };
        let answer = tokio::time::timeout(ANSWER, answer).await;
        match answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
            (Said::Gone, _) => Err(Halt::Anew),
            (Said::NotHere, _) => Err(Halt::Again("the source has another primary".to_owned())),
            said => Ok(said),
        }
    }
}

/// An end of the journal, and how often waiting answers had become void when it was that.
struct End {
    position: i64,
    voided: u64,
}

/// A move that is being taken in.
struct Taking<'a> {
    service: &'a Service,
    shard: Arc<Shard>,
    one: Move,
    /// The lead under which it is done.
    lead: i32,
    progress: Progress,
    told_ms: u64,
    /// The beginning of a key of which the rest has not come.
    partial: BytesMut,
}

impl Service {
    /// Takes a move in, to its end or until this node leads the target no more.
    pub(super) async fn take(self: Arc<Self>, shard: Arc<Shard>, id: u64) {
        let mut anew = false;
        loop {
            match self.take_once(&shard, id, &mut anew).await {
                Ok(()) | Err(Halt::Over) => break,
                Err(Halt::Anew) => anew = true,
                Err(Halt::Again(why)) => tracing::info!(id, why, "a move of slots is held up"),
            }
            if self.parts.shutdown.is_stopped() {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        lock(&self.at_work).remove(&id);
        self.moved.notify_one();
    }

    async fn take_once(&self, shard: &Arc<Shard>, id: u64, anew: &mut bool) -> Result<(), Halt> {
        let lead = shard.log.leads().filter(|_| shard.role() == Role::Primary).ok_or(Halt::Over)?;
        let map = self.read_map().await?.1;
        let one = map.find(id).filter(|one| one.phase == Phase::Copying).ok_or(Halt::Over)?.clone();
        let mut giver = self.giver(one.from).await?;
        let (service, shard) = (self, Arc::clone(shard));
        let told_ms = self.parts.clock.monotonic_ms();
        let mut taking = Taking {
            service,
            shard,
            one,
            lead,
            progress: Progress::default(),
            told_ms,
            partial: BytesMut::new(),
        };
        let mut position = match taking.staged_at().await.filter(|_| !*anew) {
            Some(position) => position,
            None => taking.load(&mut giver).await?,
        };
        *anew = false;
        while !taking.follow(&mut giver, &mut position).await? {}
        taking.tell("frozen").await;
        let attempt = taking.one.attempt;
        let (said, _) = giver.ask(Ask::Freeze { id, attempt }).await?;
        let Said::Frozen { end } = said else { return Err(Halt::Anew) };
        while position < end {
            taking.follow(&mut giver, &mut position).await?;
        }
        taking.committed().await?;
        taking.shard.is_flipping.store(true, Ordering::Release);
        let flipped = match self.flip(&taking.one, lead).await {
            Ok(()) => self.refresh(0).await.map(drop).map_err(Halt::from),
            Err(halt) => Err(halt),
        };
        taking.shard.is_flipping.store(false, Ordering::Release);
        taking.shard.look(|state| state.parked.wake()).await;
        flipped?;
        tracing::info!(id, from = taking.one.from, to = taking.one.to, slots = %taking.one.slots, "slots have moved");
        Ok(())
    }

    /// The commit point of a move. Fenced by the lead: another primary of the target may have begun to take the keys in anew.
    async fn flip(&self, one: &Move, lead: i32) -> Result<(), Halt> {
        let repository = self.parts.repository.as_ref();
        let key = keys::partition(PartitionId { topic: SHARDS, index: u32::from(one.to) });
        loop {
            let entry = repository.get(&key).await?.ok_or(Halt::Over)?;
            let state =
                PartitionState::decode(&entry.value).map_err(|error| Halt::Again(error.to_string()))?;
            if state.leader != Some(self.options.node) || state.leader_epoch.0 != lead {
                return Err(Halt::Over);
            }
            let (revision, map) = self.read_map().await?;
            let Some(flipped) = map.flipped(one.id, one.attempt) else {
                return Err(Halt::Again("the source did not wait".to_owned()));
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

    /// The primary of a shard, wherever it is.
    async fn giver(&self, shard: u16) -> Result<Giver<'_>, Halt> {
        if self.primary_here(shard).is_some() {
            return Ok(Giver::Here(self));
        }
        let leader: Option<BrokerId> = lock(&self.records).get(&shard).and_then(|state| state.leader);
        let leader = leader.filter(|node| *node != self.options.node);
        let leader = leader.ok_or_else(|| Halt::Again(format!("shard {shard} has no primary")))?;
        let socket = self.parts.dialler.dial(leader).await?;
        Ok(Giver::There(Box::new(Wire::open(socket).await?)))
    }
}

impl Taking<'_> {
    /// Up to where the source's journal is here, if all its keys are.
    async fn staged_at(&self) -> Option<i64> {
        let id = self.one.id;
        self.shard.look(|state| state.moves.staged().get(&id).and_then(|staged| staged.position)).await
    }

    /// Changes the shard in a turn, under the lead with which this began.
    async fn turn<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Turn<'_>) -> T + Send + 'static,
    ) -> Result<T, Halt> {
        let (shard, shared, lead) = (Arc::clone(&self.shard), Arc::clone(&self.service.shared), self.lead);
        let led = offload(move || {
            let mut turn = shard.turn_away(&shared);
            let leads = shard.role() == Role::Primary && turn.state.epoch == lead;
            let done = leads.then(|| act(&mut turn));
            turn.finish();
            Ok(done)
        });
        led.await?.ok_or(Halt::Over)
    }

    /// Where the journal ends.
    async fn end(&self) -> End {
        self.shard.look(|state| End { position: state.end(), voided: self.shard.voided() }).await
    }

    /// Waits until everything that was taken in is committed.
    async fn committed(&self) -> Result<(), Halt> {
        self.committed_to(self.end().await).await
    }

    async fn committed_to(&self, end: End) -> Result<(), Halt> {
        let leads = || self.shard.log.leads() == Some(self.lead);
        if !leads() || !self.service.commits(&self.shard, end.position, end.voided).await || !leads() {
            return Err(Halt::Over);
        }
        Ok(())
    }

    /// Takes in all keys; gives the position of the source's journal that they show.
    async fn load(&mut self, giver: &mut Giver<'_>) -> Result<i64, Halt> {
        let id = self.one.id;
        let (said, _) = giver.ask(Ask::Begin { id }).await?;
        let Said::Begun { position } = said else { return Err(Halt::Anew) };
        let (number, slots) = (id.to_string(), self.one.slots.to_string());
        self.turn(move |turn| turn.step(&[STAGE, number.as_bytes(), slots.as_bytes()])).await?;
        self.progress.bytes = 0;
        self.partial.clear();
        let (service, mut pace, mut end_before) = (self.service, Pace::default(), None);
        let mut answer = giver.ask(Ask::More { id }).await?;
        while let (Said::Keys { is_last, late_us, is_shared }, keys) = answer {
            self.progress.bytes += keys.len() as u64;
            self.tell("keys").await;
            let served_before = self.service.shared.stats.commands.get();
            // The next keys travel while these are written; no more than that is under way.
            let next = async { if is_last { Ok(None) } else { giver.ask(Ask::More { id }).await.map(Some) } };
            let work = async {
                let (taken, next) = tokio::join!(self.take_in(keys), next);
                // The disks have something to do while the next are taken in, and no more than that: what clients of the target
                // write meanwhile stands behind it in the journal.
                if let Some(end) = end_before.replace(taken?) {
                    self.committed_to(end).await?;
                }
                next
            };
            let (next, late_here_us) = pace::watched(service.parts.clock.as_ref(), work).await;
            let is_shared_here = self.service.shared.stats.commands.get() != served_before;
            let here = Strain { late_us: late_here_us, is_shared: is_shared_here };
            if let Some(rest) = pace.on_piece(here.and(Strain { late_us, is_shared })) {
                tokio::time::sleep(rest).await;
            }
            match next? {
                Some(next) => answer = next,
                // The last key has no end.
                None if !self.partial.is_empty() => return Err(Halt::Anew),
                None => {
                    self.note(position).await?;
                    return Ok(position);
                }
            }
        }
        Err(Halt::Anew)
    }

    /// Takes keys in; gives what must be committed for them to be safe.
    async fn take_in(&mut self, mut keys: Bytes) -> Result<End, Halt> {
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
            let id = self.one.id.to_string();
            self.turn(move |turn| turn.load(&id, &piece)).await?.map_err(|error| {
                tracing::error!(%error, "slot migration: keys of the source cannot be read");
                Halt::Anew
            })?;
        }
        if !keys.is_empty() {
            self.partial = BytesMut::from(&keys[..]);
        }
        Ok(self.end().await)
    }

    async fn note(&self, position: i64) -> Result<(), Halt> {
        let (id, position) = (self.one.id.to_string(), position.to_string());
        self.turn(move |turn| turn.step(&[AT, id.as_bytes(), position.as_bytes()])).await
    }

    /// Does here what was done there since `position`. Answers whether that was all.
    async fn follow(&mut self, giver: &mut Giver<'_>, position: &mut i64) -> Result<bool, Halt> {
        let (said, bytes) = giver.ask(Ask::Tail { id: self.one.id, from: *position }).await?;
        let Said::Tail { next, is_all } = said else { return Err(Halt::Anew) };
        if next == *position {
            // Frozen and not committed there yet, perhaps.
            tokio::time::sleep(Duration::from_millis(1)).await;
            return Ok(is_all);
        }
        self.progress.bytes += bytes.len() as u64;
        self.tell("changes").await;
        let commands = match bytes.is_empty() {
            true => Vec::new(),
            false => effects::read(&bytes).map_err(|error| Halt::Again(error.to_string()))?.1,
        };
        let (id, shared) = (self.one.id.to_string(), Arc::clone(&self.service.shared));
        let slots = self.one.slots.to_string();
        let replayed = self.turn(move |turn| {
            // In one frame with its position: a new primary does it once.
            turn.append();
            turn.state.fx.mark();
            let now = turn.now;
            let replayed = turn.state.replay(&shared, &mut Session::nobody(), now, &commands);
            if replayed.is_err() {
                // A part of it was done, to slots that nobody sees: they are taken in anew.
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
            tracing::error!(%error, id = self.one.id, "slot migration: effects of the source cannot be replayed");
            return Err(Halt::Anew);
        }
        *position = next;
        Ok(is_all)
    }

    /// Lets everybody know how far the move is, now and then.
    async fn tell(&mut self, stage: &str) {
        let now = self.service.parts.clock.monotonic_ms();
        stage.clone_into(&mut self.progress.stage);
        // What is over in a moment need not be told.
        if now < self.told_ms + TELL_MS {
            return;
        }
        self.told_ms = now;
        let key = format!("{PROGRESS}{}", self.one.id);
        let value = serde_json::to_vec(&self.progress).unwrap_or_default();
        if let Err(error) = self.service.parts.repository.txn(Txn::new().put(key, value)).await {
            tracing::debug!(%error, "nobody heard how far a move is");
        }
    }
}
