//! Task scopes: every task has a name and is joined, and a panic in it stops the process in an orderly way instead of
//! leaving a half-dead server.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// The shutdown signal: given once, visible to every holder.
#[derive(Clone, Default)]
pub struct Shutdown {
    inner: Arc<ShutdownInner>,
}

#[derive(Default)]
struct ShutdownInner {
    stopped: AtomicBool,
    panicked: AtomicBool,
    notify: Notify,
}

impl Shutdown {
    /// A signal that has not been given.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives the signal. Idempotent.
    pub fn stop(&self) {
        self.inner.stopped.store(true, Ordering::SeqCst);
        self.inner.notify.notify_waiters();
    }

    /// True once the signal was given.
    pub fn is_stopped(&self) -> bool {
        self.inner.stopped.load(Ordering::SeqCst)
    }

    /// True if it was given because a task panicked: the process then exits with an error.
    pub fn has_panicked(&self) -> bool {
        self.inner.panicked.load(Ordering::SeqCst)
    }

    /// Returns when the signal is given. Cancel-safe.
    pub async fn stopped(&self) {
        loop {
            let notified = self.inner.notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.is_stopped() {
                return;
            }
            notified.await;
        }
    }
}

/// Spawns tasks on the current runtime and ties them to a [`Shutdown`].
#[derive(Clone)]
pub struct Scope {
    shutdown: Shutdown,
}

impl Scope {
    /// A scope whose tasks stop the process when one of them panics.
    pub fn new(shutdown: Shutdown) -> Self {
        Self { shutdown }
    }

    /// The signal that this scope obeys and, on a panic, gives.
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Runs `future` as a task named `name`.
    #[allow(clippy::disallowed_methods)] // the one place that may spawn
    pub fn spawn<F>(&self, name: &'static str, future: F) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let guard = PanicGuard { name, shutdown: self.shutdown.clone() };
        tokio::spawn(async move {
            let _guard = guard;
            future.await;
        })
    }

    /// Runs a `!Send` future as a task named `name`. Needs a `LocalRuntime`.
    pub fn spawn_local<F>(&self, name: &'static str, future: F) -> JoinHandle<()>
    where
        F: Future<Output = ()> + 'static,
    {
        let guard = PanicGuard { name, shutdown: self.shutdown.clone() };
        tokio::task::spawn_local(async move {
            let _guard = guard;
            future.await;
        })
    }
}

thread_local! {
    static INLINE: Cell<Option<fn() -> Duration>> = const { Cell::new(None) };
}

/// Runs blocking work on a blocking thread. A panic in it is an error.
pub async fn offload<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    if let Some(delay) = INLINE.get() {
        tokio::time::sleep(delay()).await;
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(io::Error::other(error)),
    }
}

/// From now on, work that this thread offloads runs on this thread, after the delay that `delay` returns; `None`
/// reverts that. For tests whose runs must be reproducible.
pub fn offload_inline(delay: Option<fn() -> Duration>) {
    INLINE.set(delay);
}

struct PanicGuard {
    name: &'static str,
    shutdown: Shutdown,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(task = self.name, "a task panicked; stopping the process");
            self.shutdown.inner.panicked.store(true, Ordering::SeqCst);
            self.shutdown.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn panic_in_a_task_stops_the_process() {
        block_on(async {
            let shutdown = Shutdown::new();
            let scope = Scope::new(shutdown.clone());
            let task = scope.spawn("doomed", async { panic!("on purpose") });
            shutdown.stopped().await;
            assert!(task.await.is_err());
            assert!(shutdown.has_panicked());
        });
    }

    #[test]
    fn work_leaves_the_thread_unless_it_was_told_to_stay() {
        let here = std::thread::current().id();
        let run = || block_on(offload(|| Ok(std::thread::current().id()))).unwrap();
        assert_ne!(run(), here);
        offload_inline(Some(|| Duration::from_millis(1)));
        assert_eq!(run(), here);
        offload_inline(None);
        assert_ne!(run(), here);
    }

    #[test]
    fn stopping_before_anyone_waits_is_not_lost() {
        block_on(async {
            let shutdown = Shutdown::new();
            shutdown.stop();
            shutdown.stopped().await;
            assert!(!shutdown.has_panicked());
        });
    }
}
