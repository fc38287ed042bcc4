//! A queue of completions that a separate task handles.
//!
//! A coordinator's write completes on the thread that moves the high watermark, possibly under locks that the
//! coordinator needs. So the completion is only queued here; the coordinator's task takes it from the queue.

use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use crate::loops::lock;

/// A queue of completions.
pub(crate) struct Completions<T> {
    inner: Arc<Inner<T>>,
}

struct Inner<T> {
    list: Mutex<Vec<T>>,
    notify: Notify,
}

impl<T> Clone for Completions<T> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<T> Default for Completions<T> {
    fn default() -> Self {
        Self { inner: Arc::new(Inner { list: Mutex::new(Vec::new()), notify: Notify::new() }) }
    }
}

impl<T> Completions<T> {
    pub(crate) fn push(&self, item: T) {
        lock(&self.inner.list).push(item);
        self.inner.notify.notify_one();
    }

    /// All queued items.
    pub(crate) fn take_now(&self) -> Vec<T> {
        std::mem::take(&mut *lock(&self.inner.list))
    }

    /// All queued items; waits until there is one. Cancel-safe.
    pub(crate) async fn take(&self) -> Vec<T> {
        loop {
            let list = self.take_now();
            if !list.is_empty() {
                return list;
            }
            self.inner.notify.notified().await;
        }
    }
}
