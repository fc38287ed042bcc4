//! The event loops and their wake-ups.
//!
//! A connection runs on one loop. Events from other threads (a sync completed on the disk thread, another loop
//! appended to a partition that a fetch waits for) reach it through that loop's mailbox: one wake-up of the loop
//! delivers many events, because waking a sleeping thread costs a system call and events come in bursts.
//!
//! A [`Wake`] works from any thread; the mailbox only makes it cheap.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

use moim_journal::DurableSink;

thread_local! {
    /// The loop that this thread runs, and of which broker: one process may have several.
    static CURRENT_LOOP: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// The wake-up handle of one connection.
pub(crate) struct Wake {
    /// The loop that the connection runs on.
    pub(crate) on_loop: usize,
    /// The connection's number, unique within the process.
    pub(crate) connection: u64,
    woken: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Wake {
    pub(crate) fn new(on_loop: usize, connection: u64) -> Arc<Self> {
        Arc::new(Self { on_loop, connection, woken: AtomicBool::new(false), waker: Mutex::new(None) })
    }

    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel)
            && let Some(waker) = &*lock(&self.waker)
        {
            waker.wake_by_ref();
        }
    }

    /// Ready if the connection was woken since the last time it was ready.
    pub(crate) fn poll_woken(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.woken.swap(false, Ordering::AcqRel) {
            return Poll::Ready(());
        }
        {
            // Kept from one wait to the next: a task has the same waker all its life.
            let mut waker = lock(&self.waker);
            match &mut *waker {
                Some(known) => known.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
        }
        if self.woken.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[derive(Default)]
struct Mailbox {
    durable: Vec<(u64, i64)>,
    wakes: Vec<Arc<Wake>>,
}

#[derive(Default)]
struct Loop {
    mailbox: Mutex<Mailbox>,
    notify: Notify,
    /// Time of the last heartbeat on the monotonic clock; 0 before the loop runs.
    heartbeat_ms: AtomicU64,
}

/// All loops of the broker.
pub(crate) struct Loops {
    loops: Vec<Loop>,
}

impl Loops {
    pub(crate) fn new(count: usize) -> Self {
        Self { loops: (0..count).map(|_| Loop::default()).collect() }
    }

    pub(crate) fn count(&self) -> usize {
        self.loops.len()
    }

    /// Records a heartbeat of loop `at`.
    pub(crate) fn heartbeat(&self, at: usize, now_ms: u64) {
        self.loops[at].heartbeat_ms.store(now_ms.max(1), Ordering::Relaxed);
    }

    /// Number of loops without a heartbeat for `for_ms`.
    pub(crate) fn stalled(&self, now_ms: u64, for_ms: u64) -> usize {
        let heartbeats = self.loops.iter().map(|one| one.heartbeat_ms.load(Ordering::Relaxed));
        heartbeats
            .filter(|heartbeat_ms| *heartbeat_ms != 0 && now_ms.saturating_sub(*heartbeat_ms) >= for_ms)
            .count()
    }

    /// Time since the oldest heartbeat; 0 before the loops run.
    pub(crate) fn stalled_ms(&self, now_ms: u64) -> u64 {
        let heartbeats = self.loops.iter().map(|one| one.heartbeat_ms.load(Ordering::Relaxed));
        heartbeats
            .filter(|heartbeat_ms| *heartbeat_ms != 0)
            .map(|heartbeat_ms| now_ms.saturating_sub(heartbeat_ms))
            .max()
            .unwrap_or(0)
    }

    /// Registers this thread as the one that runs loop `at`.
    pub(crate) fn enter(&self, at: usize) {
        CURRENT_LOOP.set((std::ptr::from_ref(self).addr(), at));
    }

    /// The loop that this thread runs, if any.
    fn current_loop(&self) -> Option<usize> {
        let (of, at) = CURRENT_LOOP.get();
        (of == std::ptr::from_ref(self).addr()).then_some(at)
    }

    /// Wakes connections, from any thread.
    pub(crate) fn wake(&self, wakes: &mut Vec<Arc<Wake>>) {
        if wakes.is_empty() {
            return;
        }
        let current_loop = self.current_loop();
        let mut touched = 0u128;
        for wake in wakes.drain(..) {
            if Some(wake.on_loop) == current_loop {
                wake.wake();
            } else {
                touched |= 1 << (wake.on_loop % 128);
                let at = wake.on_loop;
                lock(&self.loops[at].mailbox).wakes.push(wake);
            }
        }
        for (i, l) in self.loops.iter().enumerate() {
            if touched & (1 << (i % 128)) != 0 {
                l.notify.notify_one();
            }
        }
    }

    /// Wakes one connection, from any thread.
    pub(crate) fn wake_one(&self, wake: &Arc<Wake>) {
        if Some(wake.on_loop) == self.current_loop() {
            wake.wake();
        } else {
            let l = &self.loops[wake.on_loop];
            lock(&l.mailbox).wakes.push(Arc::clone(wake));
            l.notify.notify_one();
        }
    }

    /// Waits for the mail of loop `at`: delivers wake-ups and returns durable ends. `durable` and the vector are
    /// reused.
    pub(crate) async fn receive(&self, at: usize, durable: &mut Vec<(u64, i64)>) {
        let l = &self.loops[at];
        loop {
            let mut wakes = Vec::new();
            {
                let mut mailbox = lock(&l.mailbox);
                std::mem::swap(durable, &mut mailbox.durable);
                std::mem::swap(&mut wakes, &mut mailbox.wakes);
            }
            for wake in &wakes {
                wake.wake();
            }
            if !durable.is_empty() {
                return;
            }
            if wakes.is_empty() {
                l.notify.notified().await;
            }
        }
    }
}

impl DurableSink for Loops {
    /// Runs on the disk thread, once per sync. Progress of one partition always goes to the same loop.
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        let count = self.loops.len() as u64;
        for (i, l) in self.loops.iter().enumerate() {
            let mut mine = advanced.iter().filter(|(tag, _)| tag % count == i as u64).peekable();
            if mine.peek().is_some() {
                lock(&l.mailbox).durable.extend(mine.copied());
                l.notify.notify_one();
            }
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while a lock is held stops the process through its task scope; until it does, no request is served from
    // state that may be half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_stall_is_reported() {
        let loops = Loops::new(3);
        assert_eq!(loops.stalled_ms(50_000), 0, "no loop runs yet");
        loops.heartbeat(0, 40_000);
        loops.heartbeat(1, 49_500);
        assert_eq!((loops.stalled_ms(50_000), loops.stalled(50_000, 1_000)), (10_000, 1));
        loops.heartbeat(0, 50_000);
        assert_eq!((loops.stalled_ms(50_000), loops.stalled(50_000, 1_000)), (500, 0));
    }

    #[test]
    fn durability_notification_reaches_the_loop_that_owns_the_partition() {
        let loops = Loops::new(2);
        loops.on_durable(&[(4, 10), (5, 11)]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut durable = Vec::new();
            loops.receive(1, &mut durable).await;
            assert_eq!(durable, [(5, 11)]);
        });
    }

    #[test]
    fn wake_from_another_thread_is_delivered_by_the_loop() {
        let loops = Loops::new(1);
        let wake = Wake::new(0, 7);
        loops.wake(&mut vec![Arc::clone(&wake)]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut durable = Vec::new();
            tokio::select! {
                () = loops.receive(0, &mut durable) => panic!("nothing durable was reported"),
                () = std::future::poll_fn(|cx| wake.poll_woken(cx)) => {}
            }
        });
    }
}
