//! The event loops and how they are woken.
//!
//! A connection lives on one loop. What happens elsewhere (the disk thread finished a sync, another loop
//! appended to a partition somebody waits for) reaches it through that loop's mailbox: one wake-up of the
//! loop for many news, because waking a sleeping thread costs a system call and news come in bunches.
//!
//! A [`Wake`] works from any thread; going through the mailbox only makes it cheap.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

use moim_journal::DurableSink;

thread_local! {
    /// Which loop this thread runs, and of which broker: one process may have several.
    static HERE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// How to wake one connection.
pub(crate) struct Wake {
    /// Which loop the connection lives on.
    pub(crate) on_loop: usize,
    /// Unique in the life of the process.
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

    /// Ready when somebody has had news for this connection since the last time it was ready.
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
    /// When it last said that it turns, on the monotonic clock; 0 before it runs.
    beat_ms: AtomicU64,
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

    /// Loop `at` turns.
    pub(crate) fn beat(&self, at: usize, now_ms: u64) {
        self.loops[at].beat_ms.store(now_ms.max(1), Ordering::Relaxed);
    }

    /// How many loops have not turned for so long.
    pub(crate) fn stalled(&self, now_ms: u64, for_ms: u64) -> usize {
        let beats = self.loops.iter().map(|one| one.beat_ms.load(Ordering::Relaxed));
        beats.filter(|beat_ms| *beat_ms != 0 && now_ms.saturating_sub(*beat_ms) >= for_ms).count()
    }

    /// How long the most silent loop has not turned; 0 before they run.
    pub(crate) fn silent_ms(&self, now_ms: u64) -> u64 {
        let beats = self.loops.iter().map(|one| one.beat_ms.load(Ordering::Relaxed));
        beats.filter(|beat_ms| *beat_ms != 0).map(|beat_ms| now_ms.saturating_sub(beat_ms)).max().unwrap_or(0)
    }

    /// This thread runs loop `at` from now on.
    pub(crate) fn enter(&self, at: usize) {
        HERE.set((std::ptr::from_ref(self).addr(), at));
    }

    /// The loop that this thread runs, if it runs one.
    fn here(&self) -> Option<usize> {
        let (of, at) = HERE.get();
        (of == std::ptr::from_ref(self).addr()).then_some(at)
    }

    /// Wakes connections, from any thread.
    pub(crate) fn wake(&self, wakes: &mut Vec<Arc<Wake>>) {
        if wakes.is_empty() {
            return;
        }
        let here = self.here();
        let mut touched = 0u128;
        for wake in wakes.drain(..) {
            if Some(wake.on_loop) == here {
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

    /// Wakes one connection from wherever the caller is.
    pub(crate) fn wake_one(&self, wake: &Arc<Wake>) {
        if Some(wake.on_loop) == self.here() {
            wake.wake();
        } else {
            let l = &self.loops[wake.on_loop];
            lock(&l.mailbox).wakes.push(Arc::clone(wake));
            l.notify.notify_one();
        }
    }

    /// Waits for mail of loop `at` and hands over what there is. `durable` and the vector are reused.
    pub(crate) async fn mail(&self, at: usize, durable: &mut Vec<(u64, i64)>) {
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
    /// Runs on the disk thread, once per sync. A partition's progress always goes to the same loop.
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
    // A panic while a lock was held stops the process through its task scope; until it does, nobody is
    // served from state that may be half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_silent_loop_is_told() {
        let loops = Loops::new(3);
        assert_eq!(loops.silent_ms(50_000), 0, "none runs yet");
        loops.beat(0, 40_000);
        loops.beat(1, 49_500);
        assert_eq!((loops.silent_ms(50_000), loops.stalled(50_000, 1_000)), (10_000, 1));
        loops.beat(0, 50_000);
        assert_eq!((loops.silent_ms(50_000), loops.stalled(50_000, 1_000)), (500, 0));
    }

    #[test]
    fn durable_news_reach_the_loop_that_owns_the_partition() {
        let loops = Loops::new(2);
        loops.on_durable(&[(4, 10), (5, 11)]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut durable = Vec::new();
            loops.mail(1, &mut durable).await;
            assert_eq!(durable, [(5, 11)]);
        });
    }

    #[test]
    fn a_wake_from_another_thread_is_delivered_by_the_loop_itself() {
        let loops = Loops::new(1);
        let wake = Wake::new(0, 7);
        loops.wake(&mut vec![Arc::clone(&wake)]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut durable = Vec::new();
            tokio::select! {
                () = loops.mail(0, &mut durable) => panic!("nothing durable was reported"),
                () = std::future::poll_fn(|cx| wake.poll_woken(cx)) => {}
            }
        });
    }
}
