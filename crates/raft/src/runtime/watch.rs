//! A watch channel: one side changes a value, many receivers observe it.
//!
//! Like tokio's, but waiters are woken in the order in which they began to wait; tokio spreads them over several
//! lists by a random number that cannot be seeded.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use openraft::OptionalSend;
use openraft::OptionalSync;
use openraft::async_runtime::watch::{RecvError, SendError};
use openraft::async_runtime::{Watch as WatchChannel, WatchReceiver, WatchSender};
use tokio::sync::Notify;

/// The channel type.
pub(crate) struct Watch;

struct Shared<T> {
    value: RwLock<T>,
    /// The number of changes. Advances only under the write lock.
    version: AtomicU64,
    changed: Notify,
    senders: AtomicUsize,
    receivers: AtomicUsize,
}

impl<T> Shared<T> {
    fn read(&self) -> RwLockReadGuard<'_, T> {
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sending side.
pub(crate) struct Sender<T>(Arc<Shared<T>>);

/// A receiving side.
pub(crate) struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: u64,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if self.0.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.changed.notify_waiters();
        }
    }
}

impl<T> Receiver<T> {
    fn new(shared: &Arc<Shared<T>>, seen: u64) -> Self {
        shared.receivers.fetch_add(1, Ordering::Relaxed);
        Self { shared: Arc::clone(shared), seen }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Self::new(&self.shared, self.seen)
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.receivers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl WatchChannel for Watch {
    type Sender<T: OptionalSend + OptionalSync> = Sender<T>;
    type Receiver<T: OptionalSend + OptionalSync> = Receiver<T>;
    type Ref<'a, T: OptionalSend + 'a> = RwLockReadGuard<'a, T>;

    fn channel<T: OptionalSend + OptionalSync>(init: T) -> (Sender<T>, Receiver<T>) {
        let shared = Arc::new(Shared {
            value: RwLock::new(init),
            version: AtomicU64::new(0),
            changed: Notify::new(),
            senders: AtomicUsize::new(1),
            receivers: AtomicUsize::new(0),
        });
        let receiver = Receiver::new(&shared, 0);
        (Sender(shared), receiver)
    }
}

impl<T: OptionalSend + OptionalSync> WatchSender<Watch, T> for Sender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        if self.0.receivers.load(Ordering::Acquire) == 0 {
            return Err(SendError(value));
        }
        self.send_if_modified(|current| {
            *current = value;
            true
        });
        Ok(())
    }

    fn send_if_modified<F>(&self, modify: F) -> bool
    where
        F: FnOnce(&mut T) -> bool,
    {
        {
            let mut value = self.0.value.write().unwrap_or_else(PoisonError::into_inner);
            if !modify(&mut value) {
                return false;
            }
            self.0.version.fetch_add(1, Ordering::Release);
        }
        self.0.changed.notify_waiters();
        true
    }

    fn borrow_watched(&self) -> RwLockReadGuard<'_, T> {
        self.0.read()
    }

    fn subscribe(&self) -> Receiver<T> {
        let _still = self.0.read();
        Receiver::new(&self.0, self.0.version.load(Ordering::Acquire))
    }
}

impl<T: OptionalSend + OptionalSync> WatchReceiver<Watch, T> for Receiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let version = self.shared.version.load(Ordering::Acquire);
            if version != self.seen {
                self.seen = version;
                return Ok(());
            }
            if self.shared.senders.load(Ordering::Acquire) == 0 {
                return Err(RecvError(()));
            }
            changed.await;
        }
    }

    fn borrow_watched(&self) -> RwLockReadGuard<'_, T> {
        self.shared.read()
    }

    fn borrow_and_update(&mut self) -> RwLockReadGuard<'_, T> {
        let value = self.shared.read();
        self.seen = self.shared.version.load(Ordering::Acquire);
        value
    }
}
