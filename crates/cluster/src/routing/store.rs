//! The table in the state repository: `/<namespace>/routing`.
//!
//! A small table is one JSON value, `{version, entries}`. A large one is stored in pieces, which are written first; then a
//! compare-and-swap of the head, which names them, makes all of them the table at once. Where a piece ends depends on
//! the names in it, not on its place, so a change rewrites the pieces around it and no others.
//!
//! Invariants: a piece is never changed after it was named by a head; a head never names a piece that was not written;
//! pieces that no head names any more are removed after the swap, and a reader that was between the two reads the
//! head again. A piece that a swap on its way may still name is left alone: what was written for a swap of unknown
//! outcome, and, without a fence that says that nobody else saves, whatever another writer has written.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::table::{RouteEntry, RoutingTable, TableError};
use crate::backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::follow::{Change, Follower};
use crate::repository::{Compare, RepositoryError, Txn, TxnOutcome};

/// A table of more entries is stored in pieces.
const INLINE_ENTRIES: usize = 1_000;
/// A piece ends where the checksum of a name has these bits clear: every 512 entries or so.
const PIECE_MASK: u32 = 0x1ff;
/// And here at the latest.
const PIECE_ENTRIES: usize = 2_048;
/// And here, whatever the entries are: well below what a request may hold.
const PIECE_BYTES: usize = 512 << 10;
/// How long reads wait for the store.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a head is read again whose pieces were swept away meanwhile.
const TRIES: usize = 20;

/// Why a table was not saved or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// Somebody else saved meanwhile. Nothing was changed.
    #[error("the table was changed by somebody else")]
    Conflict,
    /// The one who saves does not lead any more. Nothing was changed.
    #[error("this manager does not lead any more")]
    Fenced,
    /// What is stored is no table.
    #[error("the table in the store is malformed: {0}")]
    Malformed(String),
    /// What was to be saved is no table.
    #[error(transparent)]
    Invalid(#[from] TableError),
    /// The store gave no answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// What is at the head.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    version: i64,
    #[serde(default)]
    entries: Vec<RouteEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pieces: Vec<Piece>,
    /// Servers that are to give away what they have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    draining: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Piece {
    key: String,
    entries: usize,
    crc32c: u32,
}

/// A table as it was read: what a save compares.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    /// The table.
    pub table: Arc<RoutingTable>,
    /// Servers that are to give away what they have.
    pub draining: Vec<String>,
    /// The head's mod revision; 0 for no head.
    pub revision: i64,
}

/// The table of a namespace. Cheap to clone.
#[derive(Clone)]
pub struct RoutingTableStore {
    context: Context,
    head: Arc<str>,
    cache: Arc<Mutex<Cache>>,
}

/// What is known of the store: what has not changed is neither read nor written again.
#[derive(Default)]
struct Cache {
    /// Pieces by their key.
    pieces: HashMap<String, Known>,
    last: Option<Last>,
    /// Pieces that no head names any more and that are still there.
    left: Vec<String>,
    /// Whether there can be such pieces that `left` does not know.
    is_swept: bool,
}

#[derive(Clone)]
struct Known {
    entries: Arc<[Arc<RouteEntry>]>,
    crc32c: u32,
}

/// The newest table that was read or saved, and the pieces its head names.
struct Last {
    saved: Saved,
    named: HashSet<String>,
}

impl Cache {
    /// A head was read or saved.
    fn on_head(&mut self, saved: &Saved, head: &Head) {
        if self.last.as_ref().is_some_and(|last| last.saved.revision > saved.revision) {
            return;
        }
        let named: HashSet<String> = head.pieces.iter().map(|piece| piece.key.clone()).collect();
        self.pieces.retain(|key, _| named.contains(key));
        self.last = Some(Last { saved: saved.clone(), named });
    }

    /// A head was saved in the place of another: what only that one named is of no use any more.
    fn on_saved(&mut self, before: i64, saved: &Saved, head: &Head) {
        match &self.last {
            Some(last) if last.saved.revision == before => {
                let is_named = |key: &String| head.pieces.iter().any(|piece| piece.key == *key);
                let left: Vec<String> = last.named.iter().filter(|key| !is_named(key)).cloned().collect();
                self.left.extend(left);
            }
            _ => self.is_swept = false,
        }
        self.on_head(saved, head);
    }
}

impl RoutingTableStore {
    /// The table of a namespace.
    pub fn new(context: &Context, namespace: &str) -> Self {
        let head = format!("/{}/routing", namespace.trim_matches('/'));
        Self { context: context.clone(), head: head.into(), cache: Arc::default() }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table, or nothing when there is none.
    pub async fn load(&self) -> Result<Option<Saved>, RoutingError> {
        for _ in 0..TRIES {
            let head = backoff::read(PATIENCE, || self.context.repository.get(&self.head)).await?;
            let Some(entry) = head else { return Ok(None) };
            if let Some(saved) = self.read(&entry.value, entry.create_revision, entry.mod_revision).await? {
                return Ok(Some(saved));
            }
        }
        Err(RoutingError::Malformed("pieces that the head names are not there".to_owned()))
    }

    /// Saves the next table, if the head is as it was when `before` was read; `fence` must hold, too.
    pub async fn save(
        &self,
        before: &Saved,
        table: RoutingTable,
        draining: Vec<String>,
        fence: Option<Compare>,
    ) -> Result<Saved, RoutingError> {
        let saved = self.swap(before, table, draining, fence.clone(), &[]).await?;
        self.sweep(fence).await;
        Ok(saved)
    }

    /// Saves like [`save`](Self::save), and leaves the pieces of the table before to a [`sweep`](Self::sweep): nobody who
    /// waits for the table need wait for that.
    /// `registrations` are compared with the head: what the change assumes about servers.
    pub(crate) async fn swap(
        &self,
        before: &Saved,
        table: RoutingTable,
        draining: Vec<String>,
        fence: Option<Compare>,
        registrations: &[Compare],
    ) -> Result<Saved, RoutingError> {
        let (head, written) = self.write_pieces(&table, draining.clone(), fence.as_ref()).await?;
        let value: Bytes = serde_json::to_vec(&head).expect("plain fields can be written down").into();
        let expected = match before.revision {
            0 => Compare::Absent(self.head.to_string()),
            revision => Compare::ModRevision(self.head.to_string(), revision),
        };
        let mut txn = Txn::new().when(expected).put(&*self.head, value.clone());
        txn.compares.extend(fence);
        txn.compares.extend_from_slice(registrations);
        let outcome = match self.context.repository.txn(txn).await {
            Err(RepositoryError::Unknown) => self.settle(&value, before.revision).await?,
            outcome => outcome?,
        };
        match outcome {
            TxnOutcome::Done { revision } => {
                let incarnation = if before.revision == 0 { revision } else { before.table.incarnation };
                let saved = Saved { table: Arc::new(table.of(incarnation)), draining, revision };
                self.cache().on_saved(before.revision, &saved, &head);
                Ok(saved)
            }
            TxnOutcome::Conflict { current, .. } => {
                let found = current.first().and_then(Option::as_ref).map_or(0, |entry| entry.mod_revision);
                self.forget(&written, None).await;
                Err(if found == before.revision { RoutingError::Fenced } else { RoutingError::Conflict })
            }
        }
    }

    /// The table of this moment, then every new one; some may be passed over, the last is always told.
    pub fn watch(&self) -> TableWatch {
        let (sender, receiver) = watch::channel(None);
        let store = self.clone();
        let mut follower = Follower::start(&self.context, self.head.to_string());
        self.context.scope.spawn("cluster routing watch", async move {
            // Pieces are under the head's key, too; only the head says that there is a new table.
            let mut head = None;
            loop {
                let change = tokio::select! {
                    () = sender.closed() => return,
                    change = follower.next() => change,
                };
                match change {
                    None => return,
                    Some(Change::Put(entry)) if entry.key == *store.head => head = Some(entry),
                    Some(Change::Gone(key)) if key == *store.head => {
                        head = None;
                        sender.send_replace(Some(Saved::default()));
                    }
                    Some(Change::Listed) if sender.borrow().is_none() && head.is_none() => {
                        sender.send_replace(Some(Saved::default()));
                    }
                    Some(_) => {}
                }
                let Some(entry) = head.take() else { continue };
                match store.read(&entry.value, entry.create_revision, entry.mod_revision).await {
                    // Its pieces are gone because a newer head is on its way.
                    Ok(None) => {}
                    Ok(Some(saved)) => drop(sender.send_replace(Some(saved))),
                    Err(error) => {
                        let (key, reason) = (store.head.to_string(), error.to_string());
                        tracing::warn!(%error, "the routing table is passed over");
                        store.context.events.publish(ClusterEvent::Malformed { key, reason });
                    }
                }
            }
        });
        TableWatch { receiver }
    }

    /// `None` when pieces were swept away meanwhile.
    async fn read(
        &self,
        value: &[u8],
        incarnation: i64,
        revision: i64,
    ) -> Result<Option<Saved>, RoutingError> {
        if let Some(last) = &self.cache().last
            && last.saved.revision == revision
        {
            return Ok(Some(last.saved.clone()));
        }
        let malformed = |error: String| RoutingError::Malformed(error);
        let mut head: Head = serde_json::from_slice(value).map_err(|error| malformed(error.to_string()))?;
        let mut entries: Vec<Arc<RouteEntry>> =
            std::mem::take(&mut head.entries).into_iter().map(Arc::new).collect();
        for piece in &head.pieces {
            let known = self.cache().pieces.get(&piece.key).cloned();
            let known = match known {
                Some(known) => known,
                None => {
                    let read = backoff::read(PATIENCE, || self.context.repository.get(&piece.key)).await?;
                    let Some(read) = read else { return Ok(None) };
                    if crc32c::crc32c(&read.value) != piece.crc32c {
                        return Err(malformed(format!("{} is not what the head says", piece.key)));
                    }
                    let read: Vec<RouteEntry> =
                        serde_json::from_slice(&read.value).map_err(|error| malformed(error.to_string()))?;
                    let entries = read.into_iter().map(Arc::new).collect();
                    let known = Known { entries, crc32c: piece.crc32c };
                    self.cache().pieces.insert(piece.key.clone(), known.clone());
                    known
                }
            };
            entries.extend(known.entries.iter().cloned());
        }
        let table =
            RoutingTable::shared(head.version, entries).map_err(|error| malformed(error.to_string()))?;
        let table = Arc::new(table.of(incarnation));
        let saved = Saved { table, draining: head.draining.clone(), revision };
        self.cache().on_head(&saved, &head);
        Ok(Some(saved))
    }

    fn pieces_prefix(&self) -> String {
        format!("{}/pieces/", self.head)
    }

    /// Writes what is new of a large table; answers the head and the keys that were written.
    async fn write_pieces(
        &self,
        table: &RoutingTable,
        draining: Vec<String>,
        fence: Option<&Compare>,
    ) -> Result<(Head, Vec<String>), RoutingError> {
        let mut head = Head { version: table.version, draining, ..Head::default() };
        let mut written = Vec::new();
        if table.entries().len() <= INLINE_ENTRIES {
            head.entries = table.entries().iter().map(|entry| (**entry).clone()).collect();
            return Ok((head, written));
        }
        let known = self.known();
        for (at, entries) in pieces(table.entries()).into_iter().enumerate() {
            let same = known.get(entries[0].partition_id.as_str());
            if let Some((key, known)) = same.filter(|(_, known)| *known.entries == *entries) {
                head.pieces.push(Piece { key: key.clone(), entries: entries.len(), crc32c: known.crc32c });
                continue;
            }
            let plain: Vec<&RouteEntry> = entries.iter().map(|entry| &**entry).collect();
            let value: Bytes = serde_json::to_vec(&plain).expect("plain fields can be written down").into();
            let crc32c = crc32c::crc32c(&value);
            let key = format!("{}{:016x}-{at:05}", self.pieces_prefix(), fastrand::u64(..));
            let mut txn = Txn::new().put(&key, value);
            txn.compares.extend(fence.cloned());
            // Writing the same again is as good as once.
            let put = || self.context.repository.txn(txn.clone());
            if let TxnOutcome::Conflict { .. } = backoff::read(PATIENCE, put).await? {
                self.forget(&written, None).await;
                return Err(RoutingError::Fenced);
            }
            self.cache().pieces.insert(key.clone(), Known { entries: entries.into(), crc32c });
            written.push(key.clone());
            head.pieces.push(Piece { key, entries: entries.len(), crc32c });
        }
        Ok((head, written))
    }

    /// The pieces of the newest head, by the name of their first partition.
    fn known(&self) -> HashMap<String, (String, Known)> {
        let cache = self.cache();
        let named = cache.last.iter().flat_map(|last| &last.named);
        let piece = |key: &String| {
            let known = cache.pieces.get(key)?;
            Some((known.entries.first()?.partition_id.clone(), (key.clone(), known.clone())))
        };
        named.filter_map(piece).collect()
    }

    /// The outcome of a swap was not heard: reads what became of it. While neither it nor another one is to be seen it
    /// may still come, and what it names must stay.
    async fn settle(&self, ours: &Bytes, before: i64) -> Result<TxnOutcome, RoutingError> {
        self.cache().is_swept = false;
        let head = backoff::read(PATIENCE, || self.context.repository.get(&self.head)).await?;
        let found = head.as_ref().map_or(0, |entry| entry.mod_revision);
        match head {
            _ if found == before => Err(RepositoryError::Unknown.into()),
            Some(entry) if entry.value == *ours => Ok(TxnOutcome::Done { revision: found }),
            current => Ok(TxnOutcome::Conflict { revision: found, current: vec![current] }),
        }
    }

    /// Removes pieces that no head names any more. With a fence also those that somebody before us left behind: while it
    /// holds nobody else writes any, so what is not named is not about to be.
    pub(crate) async fn sweep(&self, fence: Option<Compare>) {
        let (left, is_swept) = {
            let mut cache = self.cache();
            (std::mem::take(&mut cache.left), cache.is_swept)
        };
        self.forget(&left, None).await;
        if fence.is_none() || is_swept {
            return;
        }
        let Ok((_, entries)) = self.context.repository.list(&self.pieces_prefix()).await else { return };
        let named = self.cache().last.as_ref().map(|last| last.named.clone()).unwrap_or_default();
        let keys = entries.into_iter().map(|entry| entry.key);
        let gone: Vec<String> = keys.filter(|key| !named.contains(key)).collect();
        let is_swept = self.forget(&gone, fence.as_ref()).await;
        self.cache().is_swept = is_swept;
    }

    /// Removes pieces, while the fence holds; whether that is done.
    async fn forget(&self, keys: &[String], fence: Option<&Compare>) -> bool {
        let mut is_done = true;
        for some in keys.chunks(100) {
            let mut txn = some.iter().fold(Txn::new(), |txn, key| txn.delete(key));
            txn.compares.extend(fence.cloned());
            // Only space is lost, until the next save.
            is_done &= matches!(self.context.repository.txn(txn).await, Ok(TxnOutcome::Done { .. }));
        }
        let mut cache = self.cache();
        keys.iter().for_each(|key| drop(cache.pieces.remove(key)));
        is_done
    }
}

/// Runs of entries whose ends depend on the names in them.
fn pieces(entries: &[Arc<RouteEntry>]) -> Vec<&[Arc<RouteEntry>]> {
    let mut pieces = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, entry) in entries.iter().enumerate() {
        bytes += entry.partition_id.len()
            + entry.key_range_start.len()
            + entry.key_range_end.len()
            + entry.node_id.len()
            + entry.node_address.len()
            + 120;
        let is_end = crc32c::crc32c(entry.partition_id.as_bytes()) & PIECE_MASK == 0;
        if is_end || at + 1 - start >= PIECE_ENTRIES || bytes >= PIECE_BYTES {
            pieces.push(&entries[start..=at]);
            (start, bytes) = (at + 1, 0);
        }
    }
    if start < entries.len() {
        pieces.push(&entries[start..]);
    }
    pieces
}

/// A table that is watched.
#[derive(Clone)]
pub struct TableWatch {
    receiver: watch::Receiver<Option<Saved>>,
}

impl TableWatch {
    /// The next table: first the one of this moment. One without entries and version 0 says that there is none.
    /// Cancel-safe.
    pub async fn next(&mut self) -> Option<Saved> {
        loop {
            self.receiver.changed().await.ok()?;
            if let Some(saved) = self.receiver.borrow_and_update().clone() {
                return Some(saved);
            }
        }
    }

    /// The last table that is known.
    pub fn current(&self) -> Option<Saved> {
        self.receiver.borrow().clone()
    }
}
