//! The connection of a node that follows partitions of this node.
//!
//! Its session maps slots to partitions. A fetch with nothing to read is parked with its replica; an append puts the
//! slot on this connection's list, and its task reads and sends. Below the high watermark records go from the page
//! cache to the socket; above it they are copied into memory first, because that part of a file may be truncated and
//! rewritten. After the read the leader epoch is checked again: the records belong to the leadership only if it has
//! not ended.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hashbrown::HashSet;
use moim_base::socket::Socket;
use moim_base::{LeaderEpoch, Offset};
use moim_journal::{Journal, Read, ReadError};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};

use super::frame::{self, ToFollower, ToLeader};
use super::replicated::{ChunkAnswer, Reply, Span};
use super::stream::{Stream, Turn};
use super::throttle::Throttle;
use super::{Replicated, Shared, lock};
use crate::machine::{Chunk, SnapshotFetch};
use crate::message::{Answer, Refusal, Sender};
use crate::types::PartitionId;

/// The maximum number of slots per session.
const SLOTS: usize = 1 << 22;

/// A follower's connection, as seen by replicas.
pub(super) struct Inbound {
    from: Sender,
    heard_ms: AtomicU64,
    lists: Mutex<Lists>,
    notify: Notify,
}

/// Work for the connection's task. Bounded: its replica puts a slot on a list only once.
#[derive(Default)]
struct Lists {
    ready: Vec<u32>,
    advanced_watermark: Vec<u32>,
    chunks: Vec<(u32, LeaderEpoch, Option<Chunk>)>,
    reevaluate_held: bool,
    closed: bool,
}

impl Inbound {
    pub(super) fn from(&self) -> Sender {
        self.from
    }

    /// The time of the last received frame.
    pub(super) fn heard_ms(&self) -> u64 {
        self.heard_ms.load(Ordering::Relaxed)
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }

    /// A parked fetch has something to read, or must be refused.
    pub(super) fn note_ready(&self, slot: u32) {
        lock(&self.lists).ready.push(slot);
        self.notify.notify_one();
    }

    /// A high watermark has advanced.
    pub(super) fn note_high_watermark(&self, slot: u32) {
        let first = {
            let mut lists = lock(&self.lists);
            lists.advanced_watermark.push(slot);
            lists.advanced_watermark.len() == 1
        };
        // Not urgent: the task sends the rest when its delay has passed.
        if first {
            self.notify.notify_one();
        }
    }

    fn note_chunk(&self, slot: u32, epoch: LeaderEpoch, chunk: Option<Chunk>) {
        lock(&self.lists).chunks.push((slot, epoch, chunk));
        self.notify.notify_one();
    }

    /// Held-back answers may be sendable now.
    pub(super) fn reevaluate_held(&self) {
        lock(&self.lists).reevaluate_held = true;
        self.notify.notify_one();
    }

    fn close(&self) {
        lock(&self.lists).closed = true;
        self.notify.notify_one();
    }
}

/// Serves one connection until it ends.
pub(super) async fn serve(shared: Arc<Shared>, socket: Box<dyn Socket>) {
    let mut stream = Stream::new(socket);
    let limit = Duration::from_millis(shared.tuning.silence_ms);
    let from = match tokio::time::timeout(limit, handshake(&shared, &mut stream)).await {
        Ok(Ok(from)) => from,
        Ok(Err(error)) => return tracing::debug!(%error, "follower connection refused"),
        Err(_) => return tracing::debug!("follower handshake timed out"),
    };
    let inbound = Arc::new(Inbound {
        from,
        heard_ms: AtomicU64::new(shared.now_ms()),
        lists: Mutex::default(),
        notify: Notify::new(),
    });
    if let Some(older) = lock(&shared.inbound).insert(from.node, Arc::clone(&inbound)) {
        older.close();
    }
    let mut session = Session {
        shared: &shared,
        inbound: Arc::clone(&inbound),
        stream,
        slots: Vec::new(),
        replies: VecDeque::new(),
        taking: HashSet::new(),
        watermarks_at: None,
        held: VecDeque::new(),
        held_until: None,
    };
    let ended = session.run().await;
    let why = ended.err().map_or("closed".to_owned(), |error| error.to_string());
    tracing::debug!(node = %from.node, why, "replication connection from follower closed");
    let gone = {
        let mut all = lock(&shared.inbound);
        let newest = all.get(&from.node).is_some_and(|newest| newest.is(&inbound));
        if newest {
            all.remove(&from.node);
        }
        newest
    };
    for replica in session.slots.into_iter().filter_map(|slot| slot.and_then(|slot| slot.replica)) {
        replica.on_unsubscribed(&inbound, gone);
    }
}

async fn handshake(shared: &Shared, stream: &mut Stream) -> io::Result<Sender> {
    let Turn::Frame(frame) = stream.turn(None).await? else { unreachable!("nothing is drained") };
    let ToLeader::Hello(from) = ToLeader::decode(frame, None)? else {
        return Err(io::Error::other("first frame is not a hello"));
    };
    let run = shared.run().ok_or_else(|| io::Error::other("this node has no registered run yet"))?;
    ToFollower::Hello(run).encode(stream.out());
    Ok(from)
}

/// One partition of a session.
struct Slot {
    id: PartitionId,
    replica: Option<Arc<Replicated>>,
}

struct Session<'a> {
    shared: &'a Arc<Shared>,
    inbound: Arc<Inbound>,
    stream: Stream,
    slots: Vec<Option<Slot>>,
    /// Answers to read and send when the connection has capacity. At most one per slot.
    replies: VecDeque<(u32, Reply)>,
    /// Slots for which a snapshot is being taken.
    taking: HashSet<u32>,
    /// When high watermarks are sent.
    watermarks_at: Option<Instant>,
    /// Answers to arriving replicas above the throttle rate. At most one per slot.
    held: VecDeque<(u32, Reply)>,
    /// When they are re-evaluated. Invariant: `Some` while anything is held back.
    held_until: Option<Instant>,
}

impl Session<'_> {
    async fn run(&mut self) -> io::Result<()> {
        let shared = self.shared;
        let inbound = Arc::clone(&self.inbound);
        let mut beats = tokio::time::interval(Duration::from_millis(shared.tuning.beat_ms));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if !self.drain_lists() {
                return Ok(());
            }
            self.send_replies();
            let room = shared.tuning.unsent_bytes;
            let drain = (!self.replies.is_empty()).then_some(room);
            let (watermarks_at, held_until) = (self.watermarks_at, self.held_until);
            tokio::select! {
                turn = self.stream.turn(drain) => {
                    if let Turn::Frame(frame) = turn? {
                        inbound.heard_ms.store(shared.now_ms(), Ordering::Relaxed);
                        self.on_frame(ToLeader::decode(frame, Some(inbound.from))?)?;
                        // All received frames are processed before anything is sent: one write answers all of them.
                        while let Some(frame) = self.stream.arrived()? {
                            self.on_frame(ToLeader::decode(frame, Some(inbound.from))?)?;
                        }
                    }
                }
                () = inbound.notify.notified() => {}
                () = tokio::time::sleep_until(watermarks_at.unwrap_or_else(Instant::now)), if watermarks_at.is_some() => {
                    self.send_high_watermarks();
                }
                () = tokio::time::sleep_until(held_until.unwrap_or_else(Instant::now)), if held_until.is_some() => {
                    self.release_held();
                }
                _ = beats.tick() => {
                    if shared.now_ms().saturating_sub(inbound.heard_ms()) > shared.tuning.silence_ms {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    ToFollower::Beat.encode(self.stream.out());
                }
            }
        }
    }

    /// Processes the work lists. Returns whether the connection continues.
    fn drain_lists(&mut self) -> bool {
        let (ready, chunks, reevaluate_held, closed) = {
            let mut lists = lock(&self.inbound.lists);
            if self.watermarks_at.is_none() && !lists.advanced_watermark.is_empty() {
                self.watermarks_at = Some(Instant::now() + Duration::from_millis(self.shared.tuning.rise_ms));
            }
            let reevaluate_held = std::mem::take(&mut lists.reevaluate_held);
            (
                std::mem::take(&mut lists.ready),
                std::mem::take(&mut lists.chunks),
                reevaluate_held,
                lists.closed,
            )
        };
        if reevaluate_held {
            self.release_held();
        }
        for slot in ready {
            let replica = self.replica(slot).cloned();
            let reply = replica.and_then(|replica| replica.on_ready(&self.inbound, slot));
            self.replies.extend(reply.map(|reply| (slot, reply)));
        }
        for (slot, epoch, chunk) in chunks {
            self.taking.remove(&slot);
            self.send_chunk(slot, epoch, chunk);
        }
        !closed
    }

    fn on_frame(&mut self, message: ToLeader) -> io::Result<()> {
        match message {
            ToLeader::Hello(_) => return Err(io::Error::other("duplicate hello")),
            ToLeader::Beat => {}
            ToLeader::AssignSlots(assigned) => {
                for (slot, id) in assigned {
                    let at = slot as usize;
                    if at >= SLOTS {
                        return Err(io::Error::other("too many partitions in one session"));
                    }
                    if at >= self.slots.len() {
                        self.slots.resize_with(at + 1, || None);
                    }
                    self.slots[at] = Some(Slot { id, replica: None });
                }
            }
            ToLeader::ReleaseSlots(slots) => {
                for slot in slots {
                    let known = self.slots.get_mut(slot as usize).and_then(Option::take);
                    // Equivalent to a disconnect: the follower has detached its replica, or has no disk space for
                    // further records.
                    if let Some(replica) = known.and_then(|slot| slot.replica) {
                        replica.on_unsubscribed(&self.inbound, true);
                    }
                }
            }
            ToLeader::Fetches(due_fetches) => {
                for (slot, id, fetch) in due_fetches {
                    let Some(replica) = self.replica(slot).cloned() else {
                        self.refuse(slot, id, fetch.leader_epoch, fetch.offset, Refusal::NotLeader);
                        continue;
                    };
                    // This fetch replaces an earlier one of the same slot.
                    self.held.retain(|(held, _)| *held != slot);
                    if let Some(reply) = replica.on_fetch(&self.inbound, slot, id, &fetch) {
                        self.replies.push_back((slot, reply));
                    }
                }
            }
            ToLeader::Reports(reports) => {
                for (slot, report) in reports {
                    if let Some(replica) = self.replica(slot) {
                        replica.on_report(&report);
                    }
                }
            }
            ToLeader::Snapshot(slot, fetch) => self.on_snapshot_fetch(slot, fetch),
            ToLeader::LogEnds(call, partitions) => {
                let Some(run) = self.shared.run() else { return Ok(()) };
                let ends = self.shared.log_ends(&partitions);
                ToFollower::LogEnds(call, run.epoch, ends).encode(self.stream.out());
            }
        }
        Ok(())
    }

    /// The replica of a slot, looked up again if it was absent.
    fn replica(&mut self, slot: u32) -> Option<&Arc<Replicated>> {
        let slot = self.slots.get_mut(slot as usize)?.as_mut()?;
        if slot.replica.is_none() {
            slot.replica = self.shared.replica(slot.id);
        }
        slot.replica.as_ref()
    }

    /// Reads and sends answers while the connection has capacity.
    fn send_replies(&mut self) {
        while self.stream.unsent() < self.shared.tuning.unsent_bytes {
            let Some((slot, reply)) = self.replies.pop_front() else { return };
            let Some(replica) = self.replica(slot).cloned() else { continue };
            match reply.answer {
                Ok(Answer::Records { high_watermark, log_end, .. }) => {
                    let slowed =
                        self.shared.sending.limits() && replica.is_arriving_at(self.inbound.from.node);
                    if slowed && self.hold_back(slot, reply) {
                        continue;
                    }
                    let most = self.shared.tuning.answer_bytes;
                    let most = if slowed { self.shared.sending.answer_bytes(most) } else { most };
                    let read = read(replica.journal(), reply.offset, high_watermark, log_end, most);
                    if let (true, Ok(read)) = (slowed, &read) {
                        self.shared.sending.charge(read.bytes, self.shared.now_ms());
                    }
                    // Only after the read: before any truncation, the leadership had ended.
                    let is_leading = replica.leader_epoch() == Some(reply.epoch);
                    match read {
                        Ok(read) if is_leading => self.send_records(slot, &reply, replica.journal(), read),
                        Ok(_) => self.refuse(slot, reply.id, reply.epoch, reply.offset, Refusal::NotLeader),
                        Err(error) => {
                            tracing::debug!(partition = %replica.id(), %error, "log read for follower failed");
                            self.refuse(slot, reply.id, reply.epoch, reply.offset, Refusal::NotLeader);
                        }
                    }
                }
                answer => {
                    if answer == Err(Refusal::NotLeader) {
                        self.forget_detached(slot, &replica);
                    }
                    let span = Span { from: reply.offset, next: reply.offset, next_epoch: LeaderEpoch(-1) };
                    frame::put_answer(self.stream.out(), slot, (reply.id, reply.epoch), &answer, span, 0);
                }
            }
        }
    }

    /// Holds back an answer to an arriving replica while the throttle rate is used up; returns whether it does. Its
    /// source stays valid meanwhile: the log of a leader only grows.
    fn hold_back(&mut self, slot: u32, reply: Reply) -> bool {
        let wait_ms = self.shared.sending.wait_ms(self.shared.now_ms());
        if wait_ms > 0 {
            self.held.push_back((slot, reply));
            self.held_until =
                Some(Instant::now() + Duration::from_millis(Throttle::reevaluate_in_ms(wait_ms)));
        }
        wait_ms > 0
    }

    /// Re-evaluates the held-back answers, in order.
    fn release_held(&mut self) {
        self.held_until = None;
        self.replies.append(&mut self.held);
    }

    /// A replica that leads nothing may be detached by now, and a later lookup may find another one.
    fn forget_detached(&mut self, slot: u32, replica: &Arc<Replicated>) {
        let current = self.shared.replica(replica.id());
        if !current.is_some_and(|current| Arc::ptr_eq(&current, replica)) {
            replica.on_unsubscribed(&self.inbound, false);
            if let Some(Some(slot)) = self.slots.get_mut(slot as usize) {
                slot.replica = None;
            }
        }
    }

    fn send_records(&mut self, slot: u32, reply: &Reply, journal: &Journal, read: Read) {
        let next = Offset(read.next);
        let next_epoch = LeaderEpoch(journal.epoch_before(read.next).unwrap_or(-1));
        let span = Span { from: reply.offset, next, next_epoch };
        let (id, epoch) = (reply.id, reply.epoch);
        frame::put_answer(self.stream.out(), slot, (id, epoch), &reply.answer, span, read.bytes);
        self.stream.push_chunks(read.chunks);
    }

    fn refuse(&mut self, slot: u32, id: u64, epoch: LeaderEpoch, offset: Offset, refusal: Refusal) {
        let span = Span { from: offset, next: offset, next_epoch: LeaderEpoch(-1) };
        frame::put_answer(self.stream.out(), slot, (id, epoch), &Err(refusal), span, 0);
    }

    fn send_high_watermarks(&mut self) {
        self.watermarks_at = None;
        let advanced_watermark = std::mem::take(&mut lock(&self.inbound.lists).advanced_watermark);
        let mut advanced = Vec::with_capacity(advanced_watermark.len());
        for slot in advanced_watermark {
            let known = self.slots.get(slot as usize).and_then(Option::as_ref);
            let replica = known.and_then(|slot| slot.replica.as_ref());
            if let Some((epoch, high_watermark)) =
                replica.and_then(|replica| replica.pending_high_watermark(&self.inbound, slot))
            {
                advanced.push((slot, epoch, high_watermark));
            }
        }
        if !advanced.is_empty() {
            ToFollower::HighWatermarks(advanced).encode(self.stream.out());
        }
    }

    fn on_snapshot_fetch(&mut self, slot: u32, fetch: SnapshotFetch) {
        let max = self.shared.tuning.chunk_bytes;
        let Some(replica) = self.replica(slot).cloned() else {
            return self.send_chunk(slot, fetch.leader_epoch, None);
        };
        match replica.chunk(&fetch, None, max) {
            ChunkAnswer::Part(chunk) => self.send_chunk(slot, fetch.leader_epoch, Some(chunk)),
            ChunkAnswer::None => self.send_chunk(slot, fetch.leader_epoch, None),
            ChunkAnswer::Take => {
                if !self.taking.insert(slot) {
                    return;
                }
                let (inbound, taker) = (Arc::clone(&self.inbound), Arc::clone(&replica));
                let taken = Arc::new(Mutex::new(None));
                let put = Arc::clone(&taken);
                let work = move || {
                    *lock(&put) = taker.owner().and_then(|owner| owner.snapshot());
                    true
                };
                self.shared.spawn_change("replica-snapshot", work, move || {
                    let fresh = lock(&taken).take();
                    let chunk = fresh.and_then(|fresh| match replica.chunk(&fetch, Some(fresh), max) {
                        ChunkAnswer::Part(chunk) => Some(chunk),
                        ChunkAnswer::Take | ChunkAnswer::None => None,
                    });
                    inbound.note_chunk(slot, fetch.leader_epoch, chunk);
                });
            }
        }
    }

    fn send_chunk(&mut self, slot: u32, epoch: LeaderEpoch, chunk: Option<Chunk>) {
        match chunk {
            None => ToFollower::Chunk(slot, epoch, None).encode(self.stream.out()),
            Some(chunk) => {
                frame::put_chunk(self.stream.out(), slot, epoch, &chunk);
                self.stream.push_chunks(vec![moim_journal::Chunk::Mem(chunk.bytes)]);
            }
        }
    }
}

/// Reads for a follower: below the high watermark as file ranges, above it into memory.
fn read(
    journal: &Journal,
    from: Offset,
    high_watermark: Offset,
    end: Offset,
    max_bytes: usize,
) -> Result<Read, ReadError> {
    let committed = high_watermark.min(end);
    let mut read = match committed > from {
        true => journal.read_for_replica(from.0, committed.0, max_bytes)?,
        false => Read { next: from.0, ..Read::default() },
    };
    let rest = max_bytes.saturating_sub(read.bytes);
    if read.next < end.0 && (rest > 0 || read.bytes == 0) {
        let tail = journal.read_for_replica(read.next, end.0, rest)?;
        if read.bytes == 0 || tail.bytes <= rest {
            for chunk in tail.chunks {
                read.chunks.push(moim_journal::Chunk::Mem(chunk.bytes()?));
            }
            read.bytes += tail.bytes;
            read.next = tail.next;
        }
    }
    Ok(read)
}
