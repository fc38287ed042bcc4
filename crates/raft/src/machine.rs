//! The embedder's state machine, and how openraft drives it.
//!
//! The state itself lives in memory only; the log and the newest snapshot are durable. After a restart openraft
//! restores the snapshot and replays the log from there.
//!
//! Invariant: `applied` and `membership` are exactly those of the state in `machine`.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt};
use moim_base::task::offload;
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use openraft::type_config::alias::SnapshotOf;

use crate::snapshot::{SnapshotDir, SnapshotFile};
use crate::types::{LogId, Payload, SnapshotMeta, StoredMembership, Types};

/// Writes the state as of one moment, regardless of entries applied since.
pub type SnapshotWriter = Box<dyn FnOnce(&mut dyn io::Write) -> io::Result<()> + Send>;

/// The replicated state machine of a group.
///
/// Deterministic: the same entries in the same order give the same state and the same replies on every member. No
/// clock, no randomness; time arrives with the entries. Reads do not pass through here: the embedder shares the state
/// with its readers, which call [`crate::Group::linearizable`] first.
pub trait StateMachine: Send + Sync + 'static {
    /// Applies a committed entry. Must be quick: the whole group waits for it.
    fn apply(&mut self, index: u64, entry: &Bytes) -> Bytes;

    /// A run of entries was applied, up to `index`, an entry of `term`: wake watchers now.
    ///
    /// Terms never decrease along a log. Therefore an entry that was proposed for an earlier term only
    /// ([`crate::Group::propose_in_term`]) and has not been applied yet never will be.
    fn on_applied(&mut self, index: u64, term: u64) {
        let _ = (index, term);
    }

    /// A frozen view of the state. Taking it is quick; it is written on another thread.
    fn snapshot(&mut self) -> SnapshotWriter;

    /// Replaces the state by the output of a [`SnapshotWriter`], of this or another member.
    fn restore(&mut self, content: &mut dyn io::Read) -> io::Result<()>;
}

/// The adapter to openraft.
pub(crate) struct Machine {
    /// `None` only while a restore holds it on another thread.
    machine: Option<Box<dyn StateMachine>>,
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshots: Arc<SnapshotDir>,
}

impl Machine {
    pub(crate) fn new(machine: Box<dyn StateMachine>, snapshots: Arc<SnapshotDir>) -> Self {
        Self { machine: Some(machine), applied: None, membership: StoredMembership::default(), snapshots }
    }

    fn machine(&mut self) -> io::Result<&mut Box<dyn StateMachine>> {
        self.machine.as_mut().ok_or_else(|| io::Error::other("a restore did not finish"))
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotData = SnapshotFile;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<Types>>> + Unpin + Send,
    {
        while let Some((entry, responder)) = entries.try_next().await? {
            let reply = match entry.payload {
                Payload::Blank => Bytes::new(),
                Payload::Normal(proposal) => self.machine()?.apply(entry.log_id.index, &proposal.0),
                Payload::Membership(members) => {
                    self.membership = StoredMembership::new(Some(entry.log_id), members);
                    Bytes::new()
                }
            };
            self.applied = Some(entry.log_id);
            if let Some(responder) = responder {
                responder.send(reply);
            }
        }
        if let Some(applied) = self.applied {
            self.machine()?.on_applied(applied.index, **applied.committed_leader_id());
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let meta = SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() };
        let writer = self.machine.as_mut().map(|machine| machine.snapshot());
        Builder { meta, writer: Mutex::new(writer), snapshots: Arc::clone(&self.snapshots) }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: SnapshotFile) -> io::Result<()> {
        self.machine()?;
        let mut machine = self.machine.take().expect("it was there a line ago");
        let (snapshots, published) = (Arc::clone(&self.snapshots), meta.clone());
        // The rename comes last: if the embedder refuses the content, a restart returns to the older state.
        let restored = offload(move || {
            let (_, mut content) = snapshot.content()?;
            machine.restore(&mut content)?;
            // Content that the embedder left unread must be verified too.
            io::copy(&mut content, &mut io::sink())?;
            snapshots.publish(&published, snapshot)?;
            Ok(machine)
        });
        self.machine = Some(restored.await?);
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        if let Some(applied) = self.applied {
            self.machine()?.on_applied(applied.index, **applied.committed_leader_id());
        }
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<SnapshotOf<Types, SnapshotFile>>> {
        // On another thread: a snapshot that is being renamed holds the directory for a sync.
        let snapshots = Arc::clone(&self.snapshots);
        offload(move || Ok(snapshots.current().map(|(meta, snapshot)| Snapshot { meta, snapshot }))).await
    }
}

/// Writes one snapshot.
pub(crate) struct Builder {
    meta: SnapshotMeta,
    /// The lock is for the compiler: only the builder accesses it.
    writer: Mutex<Option<SnapshotWriter>>,
    snapshots: Arc<SnapshotDir>,
}

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = SnapshotFile;

    /// Never fails for an error of the disk or the embedder: openraft would stop the whole member, and one with a
    /// full disk would stop again at every start. Instead the log is not purged, and the embedder retries
    /// ([`crate::Group::snapshot_failed`]). (Snapshots are not postponed while the store is full: they shorten the
    /// log.)
    async fn build_snapshot(&mut self) -> io::Result<SnapshotOf<Types, SnapshotFile>> {
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let writer = writer.ok_or_else(|| io::Error::other("a builder builds once"))?;
        let (meta, snapshots) = (self.meta.clone(), Arc::clone(&self.snapshots));
        offload(move || {
            let written = snapshots.write(&meta, writer);
            snapshots.note(written.is_err());
            if let Err(error) = written {
                tracing::error!(%error, "no snapshot was made; the log stays as long as it is");
            }
            // openraft ignores a snapshot that it already knows, and an empty one.
            let (meta, snapshot) = snapshots.current().unwrap_or_else(|| snapshots.nothing());
            Ok(Snapshot { meta, snapshot })
        })
        .await
    }
}
