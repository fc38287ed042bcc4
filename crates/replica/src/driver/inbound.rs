//! The connection of a node that follows partitions of ours.
//!
//! Its session remembers which slot is which partition. A fetch with nothing to read waits with its copy; an append puts
//! the slot on this connection's list, and its task reads and sends. Below the high watermark records go from the page
//! cache to the socket; above it they are taken into memory first, because that part of a file may be cut and written
//! again. After reading the leadership is looked at once more: what was read belongs to it only if it still stands.

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

use super::copy::{ChunkAnswer, Reply, Span};
use super::frame::{self, ToFollower, ToLeader};
use super::stream::{Stream, Turn};
use super::throttle::Throttle;
use super::{Replicated, Shared, lock};
use crate::machine::{Chunk, SnapshotFetch};
use crate::message::{Answer, Refusal, Sender};
use crate::types::PartitionId;

/// Slots of one session.
const SLOTS: usize = 1 << 22;

/// A follower's connection, as copies know it.
pub(super) struct Inbound {
    from: Sender,
    heard_ms: AtomicU64,
    lists: Mutex<Lists>,
    notify: Notify,
}

/// What waits for the connection's task. Bounded: a slot is on a list once, its copy sees to that.
#[derive(Default)]
struct Lists {
    ready: Vec<u32>,
    risen: Vec<u32>,
    chunks: Vec<(u32, LeaderEpoch, Option<Chunk>)>,
    look_again: bool,
    closed: bool,
}

impl Inbound {
    pub(super) fn from(&self) -> Sender {
        self.from
    }

    /// When something was last heard on it.
    pub(super) fn heard_ms(&self) -> u64 {
        self.heard_ms.load(Ordering::Relaxed)
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }

    /// A fetch that waited has something to read, or is to be refused.
    pub(super) fn note_ready(&self, slot: u32) {
        lock(&self.lists).ready.push(slot);
        self.notify.notify_one();
    }

    /// A high watermark has moved.
    pub(super) fn note_risen(&self, slot: u32) {
        let first = {
            let mut lists = lock(&self.lists);
            lists.risen.push(slot);
            lists.risen.len() == 1
        };
        // Nobody is in a hurry: the task looks at the rest when its time has come.
        if first {
            self.notify.notify_one();
        }
    }

    fn note_chunk(&self, slot: u32, epoch: LeaderEpoch, chunk: Option<Chunk>) {
        lock(&self.lists).chunks.push((slot, epoch, chunk));
        self.notify.notify_one();
    }

    /// What was held back may go now.
    pub(super) fn look_again(&self) {
        lock(&self.lists).look_again = true;
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
    let from = match tokio::time::timeout(limit, welcome(&shared, &mut stream)).await {
        Ok(Ok(from)) => from,
        Ok(Err(error)) => return tracing::debug!(%error, "a follower was not taken in"),
        Err(_) => return tracing::debug!("a follower did not say who it is"),
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
        rise_at: None,
        held: VecDeque::new(),
        held_until: None,
    };
    let ended = session.run().await;
    let why = ended.err().map_or("closed".to_owned(), |error| error.to_string());
    tracing::debug!(node = %from.node, why, "a follower's connection ended");
    let gone = {
        let mut all = lock(&shared.inbound);
        let newest = all.get(&from.node).is_some_and(|newest| newest.is(&inbound));
        if newest {
            all.remove(&from.node);
        }
        newest
    };
    for copy in session.slots.into_iter().filter_map(|slot| slot.and_then(|slot| slot.copy)) {
        copy.on_unsubscribed(&inbound, gone);
    }
}

async fn welcome(shared: &Shared, stream: &mut Stream) -> io::Result<Sender> {
    let Turn::Frame(frame) = stream.turn(None).await? else { unreachable!("nothing is drained") };
    let ToLeader::Hello(from) = ToLeader::decode(frame, None)? else {
        return Err(io::Error::other("no hello"));
    };
    let run = shared.run().ok_or_else(|| io::Error::other("this node is not registered yet"))?;
    ToFollower::Hello(run).encode(stream.out());
    Ok(from)
}

/// One partition of a session.
struct Slot {
    id: PartitionId,
    copy: Option<Arc<Replicated>>,
}

struct Session<'a> {
    shared: &'a Arc<Shared>,
    inbound: Arc<Inbound>,
    stream: Stream,
    slots: Vec<Option<Slot>>,
    /// To be read and sent when there is room. At most one per slot.
    replies: VecDeque<(u32, Reply)>,
    /// Slots for which a snapshot is being taken.
    taking: HashSet<u32>,
    /// When high watermarks are told.
    rise_at: Option<Instant>,
    /// To replicas that are being moved, above the rate for them. At most one per slot.
    held: VecDeque<(u32, Reply)>,
    /// When they are looked at again. Invariant: some while anything is held.
    held_until: Option<Instant>,
}

impl Session<'_> {
    async fn run(&mut self) -> io::Result<()> {
        let shared = self.shared;
        let inbound = Arc::clone(&self.inbound);
        let mut beats = tokio::time::interval(Duration::from_millis(shared.tuning.beat_ms));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if !self.on_lists() {
                return Ok(());
            }
            self.send_replies();
            let room = shared.tuning.unsent_bytes;
            let drain = (!self.replies.is_empty()).then_some(room);
            let (rise_at, held_until) = (self.rise_at, self.held_until);
            tokio::select! {
                turn = self.stream.turn(drain) => {
                    if let Turn::Frame(frame) = turn? {
                        inbound.heard_ms.store(shared.now_ms(), Ordering::Relaxed);
                        self.on_frame(ToLeader::decode(frame, Some(inbound.from))?)?;
                        // What came with it is dealt with before anything is sent: one write answers all of it.
                        while let Some(frame) = self.stream.arrived()? {
                            self.on_frame(ToLeader::decode(frame, Some(inbound.from))?)?;
                        }
                    }
                }
                () = inbound.notify.notified() => {}
                () = tokio::time::sleep_until(rise_at.unwrap_or_else(Instant::now)), if rise_at.is_some() => {
                    self.tell_high_watermarks();
                }
                () = tokio::time::sleep_until(held_until.unwrap_or_else(Instant::now)), if held_until.is_some() => {
                    self.let_go();
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

    /// Takes what copies have put down. Answers whether the connection is to go on.
    fn on_lists(&mut self) -> bool {
        let (ready, chunks, look_again, closed) = {
            let mut lists = lock(&self.inbound.lists);
            if self.rise_at.is_none() && !lists.risen.is_empty() {
                self.rise_at = Some(Instant::now() + Duration::from_millis(self.shared.tuning.rise_ms));
            }
            let look_again = std::mem::take(&mut lists.look_again);
            (std::mem::take(&mut lists.ready), std::mem::take(&mut lists.chunks), look_again, lists.closed)
        };
        if look_again {
            self.let_go();
        }
        for slot in ready {
            let copy = self.copy(slot).cloned();
            let reply = copy.and_then(|copy| copy.on_ready(&self.inbound, slot));
            self.replies.extend(reply.map(|reply| (slot, reply)));
        }
        for (slot, epoch, chunk) in chunks {
            self.taking.remove(&slot);
            self.send_chunk(slot, epoch, chunk);
        }
        !closed
    }

    fn on_frame(&mut self, said: ToLeader) -> io::Result<()> {
        match said {
            ToLeader::Hello(_) => return Err(io::Error::other("a second hello")),
            ToLeader::Beat => {}
            ToLeader::Names(names) => {
                for (slot, id) in names {
                    let at = slot as usize;
                    if at >= SLOTS {
                        return Err(io::Error::other("too many partitions in one session"));
                    }
                    if at >= self.slots.len() {
                        self.slots.resize_with(at + 1, || None);
                    }
                    self.slots[at] = Some(Slot { id, copy: None });
                }
            }
            ToLeader::Forget(slots) => {
                for slot in slots {
                    let known = self.slots.get_mut(slot as usize).and_then(Option::take);
                    // As good as gone: it has let go of its copy, or has no room for what is to come.
                    if let Some(copy) = known.and_then(|slot| slot.copy) {
                        copy.on_unsubscribed(&self.inbound, true);
                    }
                }
            }
            ToLeader::Wants(wants) => {
                for (slot, id, fetch) in wants {
                    let Some(copy) = self.copy(slot).cloned() else {
                        self.refuse(slot, id, fetch.leader_epoch, fetch.offset, Refusal::NotLeader);
                        continue;
                    };
                    // Whatever it asked for before, it asks for this now.
                    self.held.retain(|(held, _)| *held != slot);
                    if let Some(reply) = copy.on_fetch(&self.inbound, slot, id, &fetch) {
                        self.replies.push_back((slot, reply));
                    }
                }
            }
            ToLeader::Reports(reports) => {
                for (slot, report) in reports {
                    if let Some(copy) = self.copy(slot) {
                        copy.on_report(&report);
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

    /// The copy a slot stands for, looked up again when it was not there.
    fn copy(&mut self, slot: u32) -> Option<&Arc<Replicated>> {
        let slot = self.slots.get_mut(slot as usize)?.as_mut()?;
        if slot.copy.is_none() {
            slot.copy = self.shared.copy(slot.id);
        }
        slot.copy.as_ref()
    }

    /// Reads and sends answers as long as there is room.
    fn send_replies(&mut self) {
        while self.stream.unsent() < self.shared.tuning.unsent_bytes {
            let Some((slot, reply)) = self.replies.pop_front() else { return };
            let Some(copy) = self.copy(slot).cloned() else { continue };
            match reply.answer {
                Ok(Answer::Records { high_watermark, log_end, .. }) => {
                    let slowed = self.shared.sending.limits() && copy.is_arriving_at(self.inbound.from.node);
                    if slowed && self.hold(slot, reply) {
                        continue;
                    }
                    let most = self.shared.tuning.answer_bytes;
                    let most = if slowed { self.shared.sending.answer_bytes(most) } else { most };
                    let read = read(copy.journal(), reply.offset, high_watermark, log_end, most);
                    if let (true, Ok(read)) = (slowed, &read) {
                        self.shared.sending.charge(read.bytes, self.shared.now_ms());
                    }
                    // Only now: whatever was cut, the leadership had ended before.
                    let stands = copy.leader_epoch() == Some(reply.epoch);
                    match read {
                        Ok(read) if stands => self.send_records(slot, &reply, copy.journal(), read),
                        Ok(_) => self.refuse(slot, reply.id, reply.epoch, reply.offset, Refusal::NotLeader),
                        Err(error) => {
                            tracing::debug!(partition = %copy.id(), %error, "a follower's fetch was not read");
                            self.refuse(slot, reply.id, reply.epoch, reply.offset, Refusal::NotLeader);
                        }
                    }
                }
                answer => {
                    if answer == Err(Refusal::NotLeader) {
                        self.forget_copy(slot, &copy);
                    }
                    let span = Span { from: reply.offset, next: reply.offset, next_epoch: LeaderEpoch(-1) };
                    frame::put_answer(self.stream.out(), slot, (reply.id, reply.epoch), &answer, span, 0);
                }
            }
        }
    }

    /// Holds an answer to a replica that is being moved back while the rate for them is used up; answers whether it does.
    /// What it may be read from stays true meanwhile: a log that is led only grows.
    fn hold(&mut self, slot: u32, reply: Reply) -> bool {
        let wait_ms = self.shared.sending.wait_ms(self.shared.now_ms());
        if wait_ms > 0 {
            self.held.push_back((slot, reply));
            self.held_until = Some(Instant::now() + Duration::from_millis(Throttle::look_in_ms(wait_ms)));
        }
        wait_ms > 0
    }

    /// What was held back is looked at again, in its order.
    fn let_go(&mut self) {
        self.held_until = None;
        self.replies.append(&mut self.held);
    }

    /// A copy that leads nothing may be detached by now, and another one be there the next time.
    fn forget_copy(&mut self, slot: u32, copy: &Arc<Replicated>) {
        let current = self.shared.copy(copy.id());
        if !current.is_some_and(|current| Arc::ptr_eq(&current, copy)) {
            copy.on_unsubscribed(&self.inbound, false);
            if let Some(Some(slot)) = self.slots.get_mut(slot as usize) {
                slot.copy = None;
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

    fn tell_high_watermarks(&mut self) {
        self.rise_at = None;
        let risen = std::mem::take(&mut lock(&self.inbound.lists).risen);
        let mut told = Vec::with_capacity(risen.len());
        for slot in risen {
            let known = self.slots.get(slot as usize).and_then(Option::as_ref);
            let copy = known.and_then(|slot| slot.copy.as_ref());
            if let Some((epoch, high_watermark)) = copy.and_then(|copy| copy.on_risen(&self.inbound, slot)) {
                told.push((slot, epoch, high_watermark));
            }
        }
        if !told.is_empty() {
            ToFollower::HighWatermarks(told).encode(self.stream.out());
        }
    }

    fn on_snapshot_fetch(&mut self, slot: u32, fetch: SnapshotFetch) {
        let max = self.shared.tuning.chunk_bytes;
        let Some(copy) = self.copy(slot).cloned() else {
            return self.send_chunk(slot, fetch.leader_epoch, None);
        };
        match copy.chunk(&fetch, None, max) {
            ChunkAnswer::Part(chunk) => self.send_chunk(slot, fetch.leader_epoch, Some(chunk)),
            ChunkAnswer::None => self.send_chunk(slot, fetch.leader_epoch, None),
            ChunkAnswer::Take => {
                if !self.taking.insert(slot) {
                    return;
                }
                let (inbound, taker) = (Arc::clone(&self.inbound), Arc::clone(&copy));
                let taken = Arc::new(Mutex::new(None));
                let put = Arc::clone(&taken);
                let work = move || {
                    *lock(&put) = taker.owner().and_then(|owner| owner.snapshot());
                    true
                };
                self.shared.spawn_change("replica-snapshot", work, move || {
                    let fresh = lock(&taken).take();
                    let chunk = fresh.and_then(|fresh| match copy.chunk(&fetch, Some(fresh), max) {
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

/// Reads for a follower: below the high watermark as it lies, above it into memory.
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
