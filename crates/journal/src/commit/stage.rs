//! The staging queue of the next group commit.
//!
//! Appenders copy their small frames once into a shared chunk of memory and queue the record; the disk thread takes
//! everything that was queued while the previous fsync ran. There is no timer. The copies double as the recent ring: a
//! ring entry is a slice of the chunk. A chunk is reused once no slice of it is left, because fresh memory is slow to
//! touch.
//!
//! An event loop with many clients gathers ([`Stage::rest`]): its appends wake the disk thread not one by one but
//! together, when the loop has nothing else to do; a disk thread that has just finished an fsync waits for that, too.
//! An fsync of fifty frames costs little more than one of a single frame.
//!
//! Two lanes: records of priority journals go first. One journal is always in one lane, so its order is kept.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};

use bytes::{Bytes, BytesMut};

use super::Staged;
use crate::codec::{Locked, wait_on};

/// The largest record that is staged, whatever its journal.
pub(crate) const MAX_RECORD: usize = 1 << 20;
/// Size of a chunk. A few are in use at a time, and a larger record gets one of its own.
pub(crate) const CHUNK: usize = 256 << 10;

/// Maximum number of records that a thread gathers before they are released.
const GATHER: usize = 64;
/// Maximum bytes that a thread gathers.
const GATHER_BYTES: usize = 32 << 10;
/// Maximum work that a thread does while it gathers; a turn counts at least `TURN_WORK`.
const GATHER_WORK: usize = 512;
const TURN_WORK: usize = 16;

/// Number of consecutive checks that find superfluous retired chunks before one is freed.
const SPARE_CHECKS: usize = 8;

thread_local! {
    /// Records that this thread has queued without waking the disk thread, and its work since; `None` for a thread that
    /// does not gather. Of one stage: a thread that gathers for several would leave some waiting.
    static GATHERED: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

/// The queue of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Priority = 0,
    Normal = 1,
}

#[derive(Default)]
struct Queue {
    lanes: [VecDeque<Staged>; 2],
    bytes: usize,
    chunk: BytesMut,
    /// Used-up chunks, oldest first, kept until no slice of them is left.
    retired: VecDeque<BytesMut>,
    /// Consecutive checks that found more free chunks than are useful.
    spare_checks: usize,
    /// True if all queued records belong to gathering threads that have not released them yet.
    gathering: bool,
    sleeping: bool,
    stopped: bool,
}

/// The queue between appenders and the disk thread.
pub(crate) struct Stage {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Maximum number of chunks kept for reuse.
    keep: usize,
}

impl Stage {
    pub(crate) fn new(recent_bytes: usize) -> Self {
        Self { queue: Mutex::default(), wake: Condvar::new(), keep: recent_bytes / CHUNK + 8 }
    }

    /// Copies a frame into the shared chunk and queues its record under one lock.
    pub(crate) fn push_frame(
        &self,
        lane: Lane,
        parts: [&[u8]; 2],
        make: impl FnOnce(Bytes) -> [Option<Staged>; 2],
    ) {
        let mut queue = self.queue.locked();
        let copied = queue.copy(parts, self.keep);
        self.add(&mut queue, lane, make(copied).into_iter().flatten());
    }

    /// Copies a frame into the shared chunk without queueing anything.
    pub(crate) fn copy(&self, parts: [&[u8]; 2]) -> Bytes {
        self.queue.locked().copy(parts, self.keep)
    }

    /// Queues records in order.
    pub(crate) fn push(&self, lane: Lane, records: impl IntoIterator<Item = Staged>) {
        self.add(&mut self.queue.locked(), lane, records);
    }

    /// The calling thread is about to sleep, or has done this much work and continues: its queued records are released
    /// now, or after some more work. From the first call on its records wait for that, so it must call this whenever it
    /// sleeps, and before it ends.
    pub(crate) fn rest(&self, done: Option<usize>) {
        let (gathered, before) = GATHERED.get().unwrap_or_default();
        let work = before + done.unwrap_or(GATHER_WORK).max(TURN_WORK);
        let waits = gathered > 0 && work < GATHER_WORK;
        GATHERED.set(Some(if waits { (gathered, work) } else { (0, 0) }));
        if gathered > 0 && !waits {
            self.flush();
        }
    }

    /// Releases everything queued, also what other threads gather: a caller waits for it.
    pub(crate) fn flush(&self) {
        self.release(&mut self.queue.locked());
    }

    fn add(&self, queue: &mut Queue, lane: Lane, records: impl IntoIterator<Item = Staged>) {
        // Behind records that are released already these need not wait either.
        let may_wait = queue.bytes == 0 || queue.gathering;
        for staged in records {
            queue.push(lane, staged);
        }
        match GATHERED.get() {
            Some((gathered, work)) if gathered + 1 < GATHER && queue.bytes < GATHER_BYTES => {
                GATHERED.set(Some((gathered + 1, work)));
                queue.gathering = may_wait;
            }
            gathered_before => {
                GATHERED.set(gathered_before.map(|_| (0, 0)));
                self.release(queue);
            }
        }
    }

    /// Releases the queued records to the disk thread.
    fn release(&self, queue: &mut Queue) {
        queue.gathering = false;
        if queue.bytes > 0 && std::mem::take(&mut queue.sleeping) {
            self.wake.notify_one();
        }
    }

    /// Moves the next group into `group`: everything queued, up to `max_bytes` (at least one record).
    pub(crate) fn take(&self, group: &mut Vec<Staged>, max_bytes: usize) {
        self.queue.locked().take(group, max_bytes);
    }

    /// Like [`Stage::take`], but sleeps until there is something; false when stopped and empty.
    pub(crate) fn wait_and_take(&self, group: &mut Vec<Staged>, max_bytes: usize) -> bool {
        let mut queue = self.queue.locked();
        while queue.bytes == 0 || queue.gathering {
            if queue.stopped {
                if queue.bytes > 0 {
                    break;
                }
                return false;
            }
            queue.sleeping = true;
            queue = wait_on(&self.wake, queue, None);
        }
        queue.take(group, max_bytes);
        true
    }

    /// Lets the disk thread end once the queue is empty.
    pub(crate) fn stop(&self) {
        self.queue.locked().stopped = true;
        self.wake.notify_all();
    }

    /// Lets a new disk thread run after a stop.
    pub(crate) fn restart(&self) {
        self.queue.locked().stopped = false;
    }
}

impl Queue {
    fn push(&mut self, lane: Lane, staged: Staged) {
        self.bytes += staged.bytes();
        self.lanes[lane as usize].push_back(staged);
    }

    fn take(&mut self, group: &mut Vec<Staged>, max_bytes: usize) {
        let mut taken = 0;
        for lane in &mut self.lanes {
            while let Some(next) = lane.front() {
                if taken > 0 && taken + next.bytes() > max_bytes {
                    break;
                }
                taken += next.bytes();
                group.extend(lane.pop_front());
            }
        }
        self.bytes -= taken;
        self.gathering = false;
    }

    fn copy(&mut self, parts: [&[u8]; 2], keep: usize) -> Bytes {
        let len = parts[0].len() + parts[1].len();
        if self.chunk.capacity() - self.chunk.len() < len {
            self.next_chunk(len, keep);
        }
        self.chunk.extend_from_slice(parts[0]);
        self.chunk.extend_from_slice(parts[1]);
        self.chunk.split().freeze()
    }

    fn next_chunk(&mut self, len: usize, keep: usize) {
        let want = len.max(CHUNK);
        let used = std::mem::take(&mut self.chunk);
        if used.capacity() > 0 || !used.is_empty() {
            self.retired.push_back(used);
        }
        // The oldest chunk is the first to lose its readers; check only a few.
        let checked = self.retired.len().min(4);
        let free: Vec<usize> = (0..checked).filter(|at| self.retired[*at].try_reclaim(want)).collect();
        // Memory of a burst is freed bit by bit. Chunks become free several at a time, so one check tells little.
        self.spare_checks = if free.len() > 2 { self.spare_checks + 1 } else { 0 };
        if self.spare_checks > SPARE_CHECKS {
            self.retired.remove(free[2]);
        }
        if let Some(chunk) = free.first().and_then(|at| self.retired.remove(*at)) {
            self.chunk = chunk;
            return;
        }
        while self.retired.len() > keep {
            self.retired.pop_front();
        }
        self.chunk = BytesMut::with_capacity(want);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Staged {
        let id = crate::types::JournalId { incarnation: 1, part: 1 };
        Staged {
            record: crate::commit::Record::control(crate::commit::Kind::Epoch, id, 0),
            payload: Bytes::new(),
            payload_crc: 0,
            journal: None,
            done: None,
        }
    }

    #[test]
    fn gathering_thread_wakes_the_disk_thread_when_it_sleeps() {
        let stage = std::sync::Arc::new(Stage::new(CHUNK));
        let is_sleeping = || stage.queue.locked().sleeping;
        let wait = |asleep: bool| {
            while is_sleeping() != asleep {
                std::thread::yield_now();
            }
        };
        let taker = std::thread::spawn({
            let stage = stage.clone();
            move || {
                let (mut group, mut groups) = (Vec::new(), Vec::new());
                while stage.wait_and_take(&mut group, CHUNK) {
                    groups.push(group.drain(..).count());
                }
                groups
            }
        });
        wait(true);
        stage.rest(None); // from now on this thread gathered_before
        for _ in 0..5 {
            stage.push(Lane::Normal, [record()]);
            assert!(is_sleeping(), "five records wait for the rest");
        }
        stage.rest(None);
        wait(true);
        // A thread that never sleeps releases only now and then, the less often the more it does.
        for (done, times) in [(1, GATHER_WORK / TURN_WORK), (GATHER_WORK / 2, 2), (GATHER_WORK, 1)] {
            stage.push(Lane::Normal, [record()]);
            for _ in 1..times {
                stage.rest(Some(done));
                assert!(is_sleeping());
            }
            stage.rest(Some(done));
            wait(true);
        }
        // Too many records to wait: the disk thread is woken although this thread continues.
        for _ in 0..GATHER {
            stage.push(Lane::Normal, [record()]);
        }
        wait(true);
        // Too many bytes have the same effect.
        let large = || Staged { payload: Bytes::from(vec![0; GATHER_BYTES / 2]), ..record() };
        stage.push(Lane::Normal, [large()]);
        assert!(is_sleeping());
        stage.push(Lane::Normal, [large()]);
        wait(true);
        // A caller that waits for a commit releases at once.
        stage.push(Lane::Normal, [record()]);
        stage.flush();
        wait(true);
        // A thread that does not gather releases the others' records too.
        stage.push(Lane::Normal, [record()]);
        std::thread::scope(|scope| {
            scope.spawn(|| stage.push(Lane::Normal, [record()]));
        });
        wait(true);
        stage.stop();
        assert_eq!(taker.join().unwrap(), [5, 1, 1, 1, GATHER, 2, 1, 2]);
    }

    #[test]
    fn disk_thread_waits_for_gathering_threads_after_an_fsync() {
        let stage = std::sync::Arc::new(Stage::new(CHUNK));
        let (took, groups) = std::sync::mpsc::sync_channel(9);
        let (release, may_go) = std::sync::mpsc::sync_channel(9);
        let taker = std::thread::spawn({
            let stage = stage.clone();
            move || {
                let mut group = Vec::new();
                while stage.wait_and_take(&mut group, CHUNK) {
                    took.send(group.drain(..).count()).unwrap();
                    // The fsync.
                    may_go.recv().unwrap();
                }
            }
        });
        let wait_for_sleep = || {
            while !stage.queue.locked().sleeping {
                std::thread::yield_now();
            }
        };
        stage.push(Lane::Normal, [record()]);
        assert_eq!(groups.recv(), Ok(1));
        stage.rest(None); // from now on this thread gathered_before
        stage.push(Lane::Normal, [record()]);
        release.send(()).unwrap();
        wait_for_sleep();
        stage.push(Lane::Normal, [record()]);
        assert!(stage.queue.locked().sleeping, "two records wait for the rest");
        stage.rest(None);
        assert_eq!(groups.recv(), Ok(2));
        // Records of a thread that does not gather wait for the fsync: others behind them are released too.
        std::thread::scope(|scope| {
            scope.spawn(|| stage.push(Lane::Normal, [record()]));
        });
        stage.push(Lane::Normal, [record()]);
        release.send(()).unwrap();
        assert_eq!(groups.recv(), Ok(2));
        // Records of a thread that has ended do not wait either.
        stage.rest(None);
        stage.push(Lane::Normal, [record()]);
        stage.stop();
        release.send(()).unwrap();
        assert_eq!(groups.recv(), Ok(1));
        release.send(()).unwrap();
        taker.join().unwrap();
    }

    #[test]
    fn chunk_is_reused_when_its_slices_are_dropped() {
        let stage = Stage::new(4 * CHUNK);
        let frame = vec![7; CHUNK / 4];
        let first = stage.copy([&frame, b"x"]);
        let address = first.as_ptr();
        drop(first);
        let mut addresses = Vec::new();
        for _ in 0..8 {
            addresses.push(stage.copy([&frame, b"x"]).as_ptr());
        }
        assert!(addresses.contains(&address), "the first chunk never came back");
    }

    #[test]
    fn memory_of_a_burst_is_freed() {
        let stage = Stage::new(64 * CHUNK);
        let frame = vec![7; CHUNK / 2];
        let burst: Vec<Bytes> = (0..40).map(|_| stage.copy([&frame, b"x"])).collect();
        let kept = || stage.queue.locked().retired.len();
        assert_eq!(kept(), 39);
        drop(burst);
        (0..60).for_each(|_| drop(stage.copy([&frame, b"x"])));
        assert!(kept() <= 3, "{}", kept());
    }
}
