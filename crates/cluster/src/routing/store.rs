//! Routing table storage in the state repository: `/<namespace>/routing`.
//!
//! A small table is one JSON value, `{version, entries}`. A large table is stored in chunks, which are
//! written first; then a compare-and-swap of the head, which names them, makes all of them the current table
//! atomically. Chunk boundaries depend on the partition ids in them, not on their position, so a change
//! rewrites only the chunks around it.
//!
//! Invariants: a chunk is never changed after a head named it; a head never names an unwritten chunk; chunks
//! that no head names any more are deleted after the swap, and a reader between the two reads the head
//! again. A chunk that a swap in flight may still name is kept: chunks written for a swap of unknown
//! outcome, and, without a fence that excludes other writers, all chunks of other writers.

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

/// A table with more entries is stored in chunks.
const INLINE_ENTRIES: usize = 1_000;
/// A chunk ends where the checksum of a partition id has these bits clear: about every 512 entries.
const CHUNK_MASK: u32 = 0x1ff;
/// Maximum number of entries in a chunk.
const CHUNK_MAX_ENTRIES: usize = 2_048;
/// Maximum bytes of a chunk: well below the request size limit.
const CHUNK_MAX_BYTES: usize = 512 << 10;
/// Timeout of reads.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of head reads when its chunks are deleted concurrently.
const MAX_READS: usize = 20;

/// A failed save or load.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// Another writer saved concurrently. Nothing was changed.
    #[error("routing table was changed by another writer")]
    Conflict,
    /// The writer is not the leader any more. Nothing was changed.
    #[error("this manager is not the leader any more")]
    Fenced,
    /// The stored table cannot be decoded.
    #[error("malformed routing table in the store: {0}")]
    Malformed(String),
    /// The table to save is invalid.
    #[error(transparent)]
    Invalid(#[from] TableError),
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// Value of the head key.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    version: i64,
    #[serde(default)]
    entries: Vec<RouteEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pieces: Vec<Piece>,
    /// Servers that are being drained.
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

/// A table as read from the store: the precondition of a save.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    /// The table.
    pub table: Arc<RoutingTable>,
    /// Servers that are being drained.
    pub draining: Vec<String>,
    /// Mod revision of the head; 0 for no head.
    pub revision: i64,
}

/// The routing table of a namespace. Cheap to clone.
#[derive(Clone)]
pub struct RoutingTableStore {
    context: Context,
    head: Arc<str>,
    cache: Arc<Mutex<Cache>>,
}

/// Cached chunks: unchanged chunks are neither read nor written again.
#[derive(Default)]
struct Cache {
    /// Chunks by key.
    pieces: HashMap<String, Known>,
    last: Option<Last>,
    /// Chunks that no head names any more and that are not deleted yet.
    left: Vec<String>,
    /// False if there can be unnamed chunks that `left` does not list.
    is_swept: bool,
}

#[derive(Clone)]
struct Known {
    entries: Arc<[Arc<RouteEntry>]>,
    crc32c: u32,
}

/// The newest table that was read or saved, and the chunks its head names.
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

    /// A head replaced another: chunks named only by the old head are obsolete.
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

    /// Loads the table; `None` when there is none.
    pub async fn load(&self) -> Result<Option<Saved>, RoutingError> {
        for _ in 0..MAX_READS {
            let head = backoff::read(READ_TIMEOUT, || self.context.repository.get(&self.head)).await?;
            let Some(entry) = head else { return Ok(None) };
            if let Some(saved) = self.read(&entry.value, entry.create_revision, entry.mod_revision).await? {
                return Ok(Some(saved));
            }
        }
        Err(RoutingError::Malformed("chunks named by the head are missing".to_owned()))
    }

    /// Saves the next table, if the head is unchanged since `before` was read; `fence` must hold, too.
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

    /// Saves like [`save`](Self::save), and leaves the old table's chunks to a [`sweep`](Self::sweep): no
    /// caller waits for their deletion. `registrations` are compared together with the head: the change's
    /// assumptions about servers.
    pub(crate) async fn swap(
        &self,
        before: &Saved,
        table: RoutingTable,
        draining: Vec<String>,
        fence: Option<Compare>,
        registrations: &[Compare],
    ) -> Result<Saved, RoutingError> {
        let (head, written) = self.write_chunks(&table, draining.clone(), fence.as_ref()).await?;
        let value: Bytes = serde_json::to_vec(&head).expect("plain fields serialize to JSON").into();
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
                self.delete_chunks(&written, None).await;
                Err(if found == before.revision { RoutingError::Fenced } else { RoutingError::Conflict })
            }
        }
    }

    /// The current table, then every new one; intermediate tables may be skipped, the last one never.
    pub fn watch(&self) -> TableWatch {
        let (sender, receiver) = watch::channel(None);
        let store = self.clone();
        let mut follower = Follower::start(&self.context, self.head.to_string());
        self.context.scope.spawn("cluster routing watch", async move {
            // Chunks are under the head's key, too; only the head announces a new table.
            let mut head = None;
            loop {
                let change = tokio::select! {
                    () = sender.closed() => return,
                    change = follower.next() => change,
                };
                match change {
                    None => return,
                    Some(Change::Put(entry)) if entry.key == *store.head => head = Some(entry),
                    Some(Change::Deleted(key)) if key == *store.head => {
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
                    // Its chunks are deleted because a newer head is about to arrive.
                    Ok(None) => {}
                    Ok(Some(saved)) => drop(sender.send_replace(Some(saved))),
                    Err(error) => {
                        let (key, reason) = (store.head.to_string(), error.to_string());
                        tracing::warn!(%error, "malformed routing table skipped");
                        store.context.events.publish(ClusterEvent::Malformed { key, reason });
                    }
                }
            }
        });
        TableWatch { receiver }
    }

    /// `None` when chunks were deleted concurrently.
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
                    let read =
                        backoff::read(READ_TIMEOUT, || self.context.repository.get(&piece.key)).await?;
                    let Some(read) = read else { return Ok(None) };
                    if crc32c::crc32c(&read.value) != piece.crc32c {
                        return Err(malformed(format!("checksum mismatch of chunk {}", piece.key)));
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

    fn chunks_prefix(&self) -> String {
        format!("{}/pieces/", self.head)
    }

    /// Writes the new chunks of a large table; returns the head and the written keys.
    async fn write_chunks(
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
        for (at, entries) in chunks(table.entries()).into_iter().enumerate() {
            let same = known.get(entries[0].partition_id.as_str());
            if let Some((key, known)) = same.filter(|(_, known)| *known.entries == *entries) {
                head.pieces.push(Piece { key: key.clone(), entries: entries.len(), crc32c: known.crc32c });
                continue;
            }
            let plain: Vec<&RouteEntry> = entries.iter().map(|entry| &**entry).collect();
            let value: Bytes = serde_json::to_vec(&plain).expect("plain fields serialize to JSON").into();
            let crc32c = crc32c::crc32c(&value);
            let key = format!("{}{:016x}-{at:05}", self.chunks_prefix(), fastrand::u64(..));
            let mut txn = Txn::new().put(&key, value);
            txn.compares.extend(fence.cloned());
            // Idempotent: an unknown outcome is retried.
            let put = || self.context.repository.txn(txn.clone());
            if let TxnOutcome::Conflict { .. } = backoff::read(READ_TIMEOUT, put).await? {
                self.delete_chunks(&written, None).await;
                return Err(RoutingError::Fenced);
            }
            self.cache().pieces.insert(key.clone(), Known { entries: entries.into(), crc32c });
            written.push(key.clone());
            head.pieces.push(Piece { key, entries: entries.len(), crc32c });
        }
        Ok((head, written))
    }

    /// The chunks of the newest head, by their first partition id.
    fn known(&self) -> HashMap<String, (String, Known)> {
        let cache = self.cache();
        let named = cache.last.iter().flat_map(|last| &last.named);
        let piece = |key: &String| {
            let known = cache.pieces.get(key)?;
            Some((known.entries.first()?.partition_id.clone(), (key.clone(), known.clone())))
        };
        named.filter_map(piece).collect()
    }

    /// Resolves a swap of unknown outcome by a read of the head. While neither this swap nor another one is
    /// visible, it may still be applied, and its chunks must be kept.
    async fn settle(&self, ours: &Bytes, before: i64) -> Result<TxnOutcome, RoutingError> {
        self.cache().is_swept = false;
        let head = backoff::read(READ_TIMEOUT, || self.context.repository.get(&self.head)).await?;
        let found = head.as_ref().map_or(0, |entry| entry.mod_revision);
        match head {
            _ if found == before => Err(RepositoryError::Unknown.into()),
            Some(entry) if entry.value == *ours => Ok(TxnOutcome::Done { revision: found }),
            current => Ok(TxnOutcome::Conflict { revision: found, current: vec![current] }),
        }
    }

    /// Deletes chunks that no head names any more. With a fence also those of earlier writers: while it
    /// holds no other writer exists, so an unnamed chunk stays unnamed.
    pub(crate) async fn sweep(&self, fence: Option<Compare>) {
        let (left, is_swept) = {
            let mut cache = self.cache();
            (std::mem::take(&mut cache.left), cache.is_swept)
        };
        self.delete_chunks(&left, None).await;
        if fence.is_none() || is_swept {
            return;
        }
        let Ok((_, entries)) = self.context.repository.list(&self.chunks_prefix()).await else { return };
        let named = self.cache().last.as_ref().map(|last| last.named.clone()).unwrap_or_default();
        let keys = entries.into_iter().map(|entry| entry.key);
        let unnamed: Vec<String> = keys.filter(|key| !named.contains(key)).collect();
        let is_swept = self.delete_chunks(&unnamed, fence.as_ref()).await;
        self.cache().is_swept = is_swept;
    }

    /// Deletes chunks while the fence holds; true if all are deleted.
    async fn delete_chunks(&self, keys: &[String], fence: Option<&Compare>) -> bool {
        let mut is_done = true;
        for some in keys.chunks(100) {
            let mut txn = some.iter().fold(Txn::new(), |txn, key| txn.delete(key));
            txn.compares.extend(fence.cloned());
            // A failure costs only space until the next save.
            is_done &= matches!(self.context.repository.txn(txn).await, Ok(TxnOutcome::Done { .. }));
        }
        let mut cache = self.cache();
        keys.iter().for_each(|key| drop(cache.pieces.remove(key)));
        is_done
    }
}

/// Splits entries into chunks whose boundaries depend on the partition ids.
fn chunks(entries: &[Arc<RouteEntry>]) -> Vec<&[Arc<RouteEntry>]> {
    let mut pieces = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, entry) in entries.iter().enumerate() {
        bytes += entry.partition_id.len()
            + entry.key_range_start.len()
            + entry.key_range_end.len()
            + entry.node_id.len()
            + entry.node_address.len()
            + 120;
        let is_end = crc32c::crc32c(entry.partition_id.as_bytes()) & CHUNK_MASK == 0;
        if is_end || at + 1 - start >= CHUNK_MAX_ENTRIES || bytes >= CHUNK_MAX_BYTES {
            pieces.push(&entries[start..=at]);
            (start, bytes) = (at + 1, 0);
        }
    }
    if start < entries.len() {
        pieces.push(&entries[start..]);
    }
    pieces
}

/// A watch of the routing table.
#[derive(Clone)]
pub struct TableWatch {
    receiver: watch::Receiver<Option<Saved>>,
}

impl TableWatch {
    /// The next table, starting with the current one. A table without entries and with version 0 means that
    /// there is none. Cancel-safe.
    pub async fn next(&mut self) -> Option<Saved> {
        loop {
            self.receiver.changed().await.ok()?;
            if let Some(saved) = self.receiver.borrow_and_update().clone() {
                return Some(saved);
            }
        }
    }

    /// The last received table.
    pub fn current(&self) -> Option<Saved> {
        self.receiver.borrow().clone()
    }
}
