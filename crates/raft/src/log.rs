//! The log of one group on two journals of the node's store: entries, and the facts about them ([`meta`]).
//!
//! An entry's index is its offset. Invariants:
//! - no gaps: an append continues the journal, and where a snapshot jumps ahead of the log, one *gap* frame covers
//!   every index that the log never had, below the log start;
//! - one write at a time: a vote, a truncation or a purge starts when every earlier entry is durable, and returns
//!   when it is durable itself, so nothing of a group is ever reordered;
//! - a flush is reported from the journal's present durable end, never from an old report: after a truncation the
//!   same offsets mean other entries.
//!
//! The durable end is known through [`Logs::on_durable`]; without that call nothing is ever acknowledged. This file
//! must never block on the disk on the caller's thread: that goes through `offload`.

mod meta;

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, stream};
use moim_base::task::offload;
use moim_journal::{
    Append, AppendError, Durability, Frame, Journal, JournalError, JournalId, JournalOptions, PlainFraming,
    ReadError, Store,
};
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use tokio::sync::Notify;

use self::meta::Facts;
use crate::codec;
use crate::types::{Entry, GroupId, LogId, OpenError, Types, Vote, VoterId};

/// The newest entries kept in memory, in bytes: what replication and apply read back immediately.
const RECENT_BYTES: usize = 2 << 20;
/// The approximate size of one read for replication or apply.
const READ_BYTES: usize = 1 << 20;
/// The retry interval for a busy or full journal.
const RETRY: Duration = Duration::from_millis(5);
/// The newest segment stays when the log is purged: small, so that a full disk regains its space.
const LOG_SEGMENT_BYTES: u64 = 16 << 20;
const META_SEGMENT_BYTES: u64 = 64 << 10;
/// The first payload byte of a gap frame; entries have smaller ones.
const GAP: u8 = 255;

/// The location of a group's journals.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) group: GroupId,
    pub(crate) voter: VoterId,
    /// The incarnation of the journal ids.
    pub(crate) incarnation: u128,
    /// The directory below the data directory.
    pub(crate) folder: String,
    /// The durable sink's tag for the entries; the meta journal has the next number.
    pub(crate) tag: u64,
}

/// The logs of a process, by the tags of their journals.
#[derive(Clone, Default)]
pub(crate) struct Logs {
    by_tag: Arc<RwLock<HashMap<u64, Weak<Inner>>>>,
}

impl Logs {
    fn add(&self, inner: &Arc<Inner>) {
        let mut by_tag = self.by_tag.write().unwrap_or_else(PoisonError::into_inner);
        by_tag.retain(|_, log| log.strong_count() > 0);
        for tag in [inner.tag, inner.tag + 1] {
            by_tag.insert(tag, Arc::downgrade(inner));
        }
    }

    /// Called by the owner of the store's durable sink, on the disk thread. Tags of other journals are ignored.
    pub(crate) fn on_durable(&self, advanced: &[(u64, i64)]) {
        let by_tag = self.by_tag.read().unwrap_or_else(PoisonError::into_inner);
        for log in advanced.iter().filter_map(|(tag, _)| by_tag.get(tag)).filter_map(Weak::upgrade) {
            log.report_flushed();
            log.durable.notify_waiters();
        }
    }
}

/// The log of one group.
#[derive(Clone)]
pub(crate) struct LogStore {
    inner: Arc<Inner>,
}

struct Inner {
    group: GroupId,
    log: Arc<Journal>,
    meta: Arc<Journal>,
    tag: u64,
    state: Mutex<State>,
    durable: Notify,
    /// An append was refused because the disk is full, and that was logged.
    waits_for_disk: AtomicBool,
}

struct State {
    facts: Facts,
    /// The newest entry, or the last purged one if the log is empty.
    last: Option<LogId>,
    /// The newest entries, consecutive, up to `last`.
    recent: VecDeque<Entry>,
    recent_bytes: usize,
    /// Appends not yet reported, with the log end that makes them durable.
    flushing: VecDeque<(i64, IOFlushed<Types>)>,
}

impl State {
    fn push(&mut self, entry: Entry) {
        self.last = Some(entry.log_id);
        self.recent_bytes += codec::entry_len(&entry);
        self.recent.push_back(entry);
        while self.recent_bytes > RECENT_BYTES && self.recent.len() > 1 {
            self.pop_front();
        }
    }

    fn pop_front(&mut self) {
        if let Some(entry) = self.recent.pop_front() {
            self.recent_bytes -= codec::entry_len(&entry);
        }
    }

    fn cut_recent(&mut self, end: u64) {
        while let Some(entry) = self.recent.pop_back_if(|entry| entry.log_id.index >= end) {
            self.recent_bytes -= codec::entry_len(&entry);
        }
    }
}

fn offset(index: u64) -> i64 {
    i64::try_from(index).unwrap_or(i64::MAX)
}

/// The later log id. By index: entries replaced by a snapshot may have had a greater term.
fn later(a: Option<LogId>, b: Option<LogId>) -> Option<LogId> {
    if a.map(|id| id.index) > b.map(|id| id.index) { a } else { b }
}

impl LogStore {
    /// Opens the log, completing a purge that a crash interrupted.
    pub(crate) async fn open(store: &Store, logs: &Logs, place: Place) -> Result<Self, OpenError> {
        let group = place.group;
        let open = |part: u32, name: &str, segment_bytes: u64| {
            let options = JournalOptions {
                folder: format!("{}/{name}", place.folder),
                framing: Arc::new(PlainFraming),
                durability: Durability::Fsync,
                segment_bytes,
                tag: place.tag + u64::from(part),
            };
            let id = JournalId { incarnation: place.incarnation, part };
            let journal =
                store.journal(id, options).map_err(|source| OpenError::Journal { group, source })?;
            // Coordination goes first in every group commit. A journal that is already in use keeps its lane.
            journal.set_priority(true);
            // Entries that are read again soon are in `State::recent`; the rest of the journal is for a restart.
            journal.set_uncached(true);
            Ok(journal)
        };
        let log = open(0, "log", LOG_SEGMENT_BYTES)?;
        let meta = open(1, "meta", META_SEGMENT_BYTES)?;
        let damaged = |what: String| OpenError::Damaged { group, what };
        if log.is_damaged() || meta.is_damaged() {
            return Err(damaged("the journal lost records that were durable".to_owned()));
        }
        let found = meta::read(&meta).map_err(damaged)?;
        if found.is_none() && log.end() > 0 {
            return Err(damaged("there are entries but no vote".to_owned()));
        }
        let facts = found.unwrap_or(Facts { voter: place.voter, vote: None, purged: None });
        if facts.voter != place.voter {
            return Err(OpenError::OtherVoter { group, found: facts.voter, wanted: place.voter });
        }
        let state = State {
            facts,
            last: facts.purged,
            recent: VecDeque::new(),
            recent_bytes: 0,
            flushing: VecDeque::new(),
        };
        let inner = Inner {
            group,
            log,
            meta,
            tag: place.tag,
            state: Mutex::new(state),
            durable: Notify::new(),
            waits_for_disk: AtomicBool::new(false),
        };
        let opened = Self { inner: Arc::new(inner) };
        logs.add(&opened.inner);
        opened.recover(found.is_none()).await.map_err(|error| damaged(error.to_string()))?;
        Ok(opened)
    }

    async fn recover(&self, new: bool) -> io::Result<()> {
        if new {
            self.write_facts().await?;
        }
        let purged = self.inner.state().facts.purged;
        if let Some(purged) = purged {
            self.drop_through(purged.index).await?;
        }
        let log = &self.inner.log;
        if log.start() != purged.map_or(0, |purged| offset(purged.index) + 1) {
            return Err(io::Error::other("the log does not start where it was purged"));
        }
        if log.end() > log.start() {
            let inner = Arc::clone(&self.inner);
            let last = offload(move || {
                inner.verify()?;
                inner.read_cold(inner.log.end() - 1, inner.log.end(), usize::MAX)
            });
            self.inner.state().last = last.await?.last().map(|entry| entry.log_id);
        }
        Ok(())
    }

    /// True if it has, or has had, any entry.
    pub(crate) fn is_used(&self) -> bool {
        self.inner.state().last.is_some()
    }

    /// The last log index, including purged entries.
    pub(crate) fn last_index(&self) -> Option<u64> {
        self.inner.state().last.map(|last| last.index)
    }

    /// The last index on stable storage.
    pub(crate) fn durable_index(&self) -> Option<u64> {
        u64::try_from(self.inner.log.durable_end()).ok()?.checked_sub(1)
    }

    /// Waits until the journal is durable up to `end`.
    async fn wait_durable(&self, journal: &Journal, end: i64) {
        loop {
            let notified = self.inner.durable.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if journal.durable_end() >= end {
                return;
            }
            notified.await;
        }
    }

    /// Waits until no write is in flight, and reports the completed ones.
    async fn settle(&self) {
        self.wait_durable(&self.inner.log, self.inner.log.end()).await;
        self.inner.report_flushed();
    }

    /// Writes the facts from memory.
    async fn write_facts(&self) -> io::Result<()> {
        let facts = self.inner.state().facts;
        let end = loop {
            match meta::append(&self.inner.meta, &facts) {
                Ok(end) => break end,
                Err(error) => self.refused(error).await?,
            }
        };
        self.wait_durable(&self.inner.meta, end).await;
        let journal = Arc::clone(&self.inner.meta);
        offload(move || meta::maybe_trim(&journal)).await
    }

    /// Retries a temporary refusal: to openraft an error here is fatal for the node, and a full disk is not.
    async fn refused(&self, error: AppendError) -> io::Result<()> {
        match error {
            AppendError::Busy | AppendError::Full => {
                // Logged once for a wait of many retries.
                if !self.inner.waits_for_disk.swap(true, Ordering::Relaxed) {
                    tracing::warn!(group = %self.inner.group, %error, "Raft log waits for its disk");
                }
                tokio::time::sleep(RETRY).await;
                Ok(())
            }
            AppendError::Closed
            | AppendError::NotNext { .. }
            | AppendError::Damaged
            | AppendError::TooLarge { .. }
            | AppendError::Io(_) => Err(io::Error::other(error)),
        }
    }

    async fn append_frame(&self, base: i64, last: i64, payload: &[u8]) -> io::Result<()> {
        let body = PlainFraming::encode(base, last, 0, 0, payload);
        loop {
            let append = Append { base, last, epoch: 0, max_timestamp_ms: 0, prefix: &[], body: &body };
            match self.inner.log.append(append) {
                Ok(()) => {
                    self.inner.waits_for_disk.store(false, Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => self.refused(error).await?,
            }
        }
    }

    /// Advances the log start past `through`, over indexes that the log never had if necessary.
    async fn drop_through(&self, through: u64) -> io::Result<()> {
        let start = offset(through) + 1;
        let end = self.inner.log.end();
        if end < start {
            self.append_frame(end, start - 1, &[GAP]).await?;
            self.settle().await;
        }
        let inner = Arc::clone(&self.inner);
        offload(move || inner.log.set_start(start).map_err(io::Error::other)).await
    }

    async fn read(&self, range: impl RangeBounds<u64>, max_bytes: usize) -> io::Result<Vec<Entry>> {
        let (from, until) = bounds(&range);
        if let Some(entries) = self.inner.read_recent(from, until, max_bytes) {
            return Ok(entries);
        }
        let inner = Arc::clone(&self.inner);
        let (from, until) = (offset(from), offset(until));
        offload(move || inner.read_cold(from, until, max_bytes)).await
    }
}

/// The first index, and the one after the last.
fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(first) => *first,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let until = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => u64::MAX,
    };
    (from, until)
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_flushed(&self) {
        let mut done = Vec::new();
        {
            let mut state = self.state();
            let durable = self.log.durable_end();
            while let Some((_, flushed)) = state.flushing.pop_front_if(|waiting| waiting.0 <= durable) {
                done.push(flushed);
            }
        }
        for flushed in done {
            flushed.io_completed(Ok(()));
        }
    }

    /// Entries from memory, at least one; `None` if they are not all there.
    fn read_recent(&self, from: u64, until: u64, max_bytes: usize) -> Option<Vec<Entry>> {
        let state = self.state();
        let next = state.last.map_or(0, |last| last.index + 1);
        if from >= until || from >= next {
            return Some(Vec::new());
        }
        let first = state.recent.front()?.log_id.index;
        let skip = usize::try_from(from.checked_sub(first)?).ok()?;
        let mut bytes = 0;
        let mut entries = Vec::new();
        for entry in state.recent.range(skip..) {
            bytes += codec::entry_len(entry);
            if entry.log_id.index >= until || (bytes > max_bytes && !entries.is_empty()) {
                break;
            }
            entries.push(entry.clone());
        }
        Some(entries)
    }

    /// Reads every entry once. A voter with a gap in its log must not start: it would vote and campaign with entries
    /// that it no longer has, and its core would stop at the gap.
    fn verify(&self) -> io::Result<()> {
        let mut wrong = None;
        let (start, end) = (self.log.start(), self.log.end());
        let walked = self.log.for_each_frame(start, end, &mut |frame, whole| {
            let payload = PlainFraming::payload(whole);
            let sound = payload == [GAP]
                || codec::entry(Bytes::copy_from_slice(payload))
                    .is_ok_and(|entry| offset(entry.log_id.index) == frame.base);
            wrong = (!sound).then_some(frame.base);
            sound
        });
        walked.map_err(io::Error::other)?;
        match wrong {
            Some(at) => Err(io::Error::other(format!("entry {at} cannot be decoded"))),
            None => Ok(()),
        }
    }

    /// Entries from the journal, at least one if there are any.
    fn read_cold(&self, from: i64, until: i64, max_bytes: usize) -> io::Result<Vec<Entry>> {
        loop {
            let from = from.max(self.log.start());
            match self.read_frames(from, until.min(self.log.end()), max_bytes) {
                // The log start advanced meanwhile.
                Err(ReadError::OutOfRange { start, .. }) if start > from => {}
                Err(error) => return Err(io::Error::other(error)),
                Ok(entries) => return entries,
            }
        }
    }

    fn read_frames(
        &self,
        from: i64,
        until: i64,
        max_bytes: usize,
    ) -> Result<io::Result<Vec<Entry>>, ReadError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut wrong = None;
        let mut bytes = 0;
        let mut take = |frame: &Frame, whole: &[u8]| {
            let payload = PlainFraming::payload(whole);
            if payload == [GAP] {
                return true;
            }
            bytes += payload.len();
            if bytes > max_bytes && !entries.is_empty() {
                return false;
            }
            match codec::entry(Bytes::copy_from_slice(payload)) {
                Ok(entry) if offset(entry.log_id.index) == frame.base => entries.push(entry),
                Ok(_) | Err(_) => wrong = Some(frame.base),
            }
            wrong.is_none()
        };
        if from < until {
            self.log.for_each_frame(from, until, &mut take)?;
        }
        let hole = entries.windows(2).any(|pair| pair[0].log_id.index + 1 != pair[1].log_id.index);
        Ok(match wrong {
            Some(at) => Err(io::Error::other(format!("entry {at} of group {} is damaged", self.group))),
            None if hole => Err(io::Error::other(format!("group {} has a hole in its log", self.group))),
            None => Ok(entries),
        })
    }
}

impl RaftLogReader<Types> for LogStore {
    async fn try_get_log_entries<R>(&mut self, range: R) -> io::Result<Vec<Entry>>
    where
        R: RangeBounds<u64> + Clone + Debug + Send,
    {
        self.read(range, usize::MAX).await
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.inner.state().facts.vote)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.read(start..end, READ_BYTES).await
    }

    /// In chunks: a restart applies everything since the last snapshot through here.
    async fn entries_stream<R>(&mut self, range: R) -> impl Stream<Item = io::Result<Entry>> + Send
    where
        R: RangeBounds<u64> + Clone + Debug + Send,
    {
        let (from, until) = bounds(&range);
        let start = (self.clone(), from, until, VecDeque::new());
        Box::pin(stream::try_unfold(start, |(log, from, until, mut ready)| async move {
            if ready.is_empty() {
                ready.extend(log.read(from..until, READ_BYTES).await?);
            }
            let next: Option<Entry> = ready.pop_front();
            Ok(next.map(|entry| {
                let from = entry.log_id.index + 1;
                (entry, (log, from, until, ready))
            }))
        }))
    }
}

impl RaftLogStorage<Types> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<Types>> {
        let state = self.inner.state();
        Ok(LogState { last_purged_log_id: state.facts.purged, last_log_id: state.last })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        self.settle().await;
        self.inner.state().facts.vote = Some(*vote);
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::VoteBeforeSync) {
            let facts = self.inner.state().facts;
            return meta::append(&self.inner.meta, &facts).map(|_| ()).map_err(io::Error::other);
        }
        self.write_facts().await
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + Send,
        I::IntoIter: Send,
    {
        let mut payload = BytesMut::new();
        for entry in entries {
            let at = offset(entry.log_id.index);
            if at > 0 && self.inner.log.end() == 0 {
                // A log that never had an entry may begin anywhere; openraft's suite begins one at 1.
                self.append_frame(0, at - 1, &[GAP]).await?;
            }
            payload.clear();
            codec::put_entry(&mut payload, &entry);
            self.append_frame(at, at, &payload).await?;
            self.inner.state().push(entry);
        }
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::AckBeforeSync) {
            callback.io_completed(Ok(()));
            return Ok(());
        }
        let end = self.inner.log.end();
        self.inner.state().flushing.push_back((end, callback));
        // It may have become durable before it was queued.
        self.inner.report_flushed();
        Ok(())
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> io::Result<()> {
        self.settle().await;
        let end = last_log_id.map_or(0, |last| last.index + 1);
        {
            let mut state = self.inner.state();
            if state.last.is_none_or(|last| last.index < end) {
                return Ok(());
            }
            state.cut_recent(end);
            state.last = later(last_log_id, state.facts.purged);
        }
        let inner = Arc::clone(&self.inner);
        offload(move || {
            let to = offset(end).max(inner.log.start());
            inner.log.truncate(to).map_err(|error: JournalError| io::Error::other(error))
        })
        .await
    }

    async fn purge(&mut self, log_id: LogId) -> io::Result<()> {
        self.settle().await;
        {
            let mut state = self.inner.state();
            if state.facts.purged.is_some_and(|purged| purged.index >= log_id.index) {
                return Ok(());
            }
            state.facts.purged = Some(log_id);
            state.last = later(state.last, Some(log_id));
            while state.recent.front().is_some_and(|entry| entry.log_id.index <= log_id.index) {
                state.pop_front();
            }
        }
        // First the fact, then the truncation: `recover` completes what a crash leaves between them.
        self.write_facts().await?;
        self.drop_through(log_id.index).await
    }
}

#[cfg(test)]
mod tests;
