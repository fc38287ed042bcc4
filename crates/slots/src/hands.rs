//! Threads for work that takes long: scripts, MIGRATE.
//!
//! A script that runs on must not take the processors from the rest of the node: after a while its thread gives way, which to
//! the kernel is a lower priority. An ordinary process may lower the priority of a thread and never raise it again. Such a
//! thread ends with its work; that is why these are not the runtime's threads for blocking calls. And it starts nobody any
//! more, because a thread inherits its priority: whoever takes its place is there before it gives way.
//!
//! Invariants: at most [`MOST`] threads and as many that take the place of others; what they have no hands for waits in order;
//! only threads of this pool give way.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{getpriority_process, setpriority_process};
use tokio::runtime::Handle;

/// Threads at a time.
const MOST: usize = 128;
/// How long a thread with nothing to do stays.
const IDLE: Duration = Duration::from_secs(10);
/// What a thread that gives way adds to its nice value: it gets a thirtieth of what others get while they want it.
const WAY: i32 = 15;

type Job = Box<dyn FnOnce() + Send>;

struct Pool {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { queue: VecDeque::new(), threads: 0, idle: 0 });
static MORE: Condvar = Condvar::new();

thread_local! {
    /// `None` on threads that are not of the pool.
    static GAVE_WAY: Cell<Option<bool>> = const { Cell::new(None) };
}

fn pool() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on a thread of its own, inside `runtime`.
pub(crate) fn give(runtime: Handle, work: impl FnOnce() + Send + 'static) {
    let job = Box::new(move || {
        let _inside = runtime.enter();
        work();
    });
    let mut pool = pool();
    pool.queue.push_back(job);
    if pool.queue.len() <= pool.idle {
        MORE.notify_one();
    } else if pool.threads < MOST {
        more_hands(&mut pool);
    }
}

/// Lets everybody else go first, from now until the work of this thread is done. Nothing on other threads.
pub(crate) fn give_way() {
    if GAVE_WAY.get() == Some(false) {
        let mut pool = pool();
        if pool.idle == 0 && pool.threads < 2 * MOST {
            more_hands(&mut pool);
        }
        drop(pool);
        let now = getpriority_process(None).unwrap_or(0);
        // It is no harm if the kernel does not want to.
        GAVE_WAY.set(Some(setpriority_process(None, now + WAY).is_ok()));
    }
}

/// Starts a thread. When there can be none, those that are there do the work.
fn more_hands(pool: &mut Pool) {
    pool.threads += 1;
    let started = std::thread::Builder::new().name("moim-away".to_owned()).spawn(run);
    if let Err(error) = started {
        tracing::warn!(%error, "a thread for long work could not be started");
        pool.threads -= 1;
    }
}

/// Counts a thread out when it ends, even by a panic.
struct Presence;

impl Drop for Presence {
    fn drop(&mut self) {
        let mut pool = pool();
        pool.threads -= 1;
        if GAVE_WAY.get() != Some(true) && pool.queue.len() > pool.idle {
            more_hands(&mut pool);
        }
    }
}

fn run() {
    let _present = Presence;
    GAVE_WAY.set(Some(false));
    let before = getpriority_process(None).unwrap_or(0);
    while let Some(job) = next() {
        job();
        if GAVE_WAY.get() == Some(true) {
            if setpriority_process(None, before).is_err() {
                return;
            }
            GAVE_WAY.set(Some(false));
        }
    }
}

/// Waits for something to do; `None` when there was nothing for long.
fn next() -> Option<Job> {
    let mut pool = pool();
    if pool.queue.is_empty() {
        pool.idle += 1;
        let waited = MORE.wait_timeout_while(pool, IDLE, |pool| pool.queue.is_empty());
        pool = waited.unwrap_or_else(PoisonError::into_inner).0;
        pool.idle -= 1;
    }
    pool.queue.pop_front()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn long_work_gives_way_and_nobody_after_it_is_slow() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (tell, told) = sync_channel(2 * MOST);
        let ours = getpriority_process(None).unwrap();
        give_way();
        assert_eq!(getpriority_process(None).unwrap(), ours, "a thread of somebody else");
        for _ in 0..2 * MOST {
            let tell = tell.clone();
            give(runtime.handle().clone(), move || {
                let before = getpriority_process(None).unwrap();
                give_way();
                give_way();
                tell.send((before, getpriority_process(None).unwrap())).unwrap();
            });
        }
        let seen: Vec<_> = (0..2 * MOST).map(|_| told.recv_timeout(IDLE).unwrap()).collect();
        assert!(seen.iter().all(|seen| *seen == (ours, ours + WAY)), "{seen:?}");
        assert!(pool().threads <= 2 * MOST);
    }

    #[test]
    fn a_panic_costs_a_thread_and_no_work() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (tell, told) = sync_channel(1);
        give(runtime.handle().clone(), || panic!("as meant"));
        give(runtime.handle().clone(), move || tell.send(()).unwrap());
        told.recv_timeout(IDLE).unwrap();
    }
}
