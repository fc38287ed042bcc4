//! A response that another task computes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use crate::loops::{Loops, Wake, lock};

/// The outcome of an asynchronous request.
pub(crate) enum AsyncOutcome {
    /// The encoded response.
    Bytes(Bytes),
    /// There is no response; the connection is closed so that the client retries.
    Failed,
}

/// A slot for one encoded response.
pub(crate) struct AsyncResponse {
    response: Mutex<Option<AsyncOutcome>>,
    done: AtomicBool,
    wake: Arc<Wake>,
}

impl AsyncResponse {
    pub(crate) fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { response: Mutex::new(None), done: AtomicBool::new(false), wake })
    }

    /// Stores the response and wakes the connection.
    pub(crate) fn set(&self, response: Bytes, loops: &Loops) {
        self.finish(AsyncOutcome::Bytes(response), loops);
    }

    fn finish(&self, response: AsyncOutcome, loops: &Loops) {
        *lock(&self.response) = Some(response);
        self.done.store(true, Ordering::Release);
        loops.wake_one(&self.wake);
    }

    /// Reports that no response will come.
    pub(crate) fn fail(&self, loops: &Loops) {
        self.finish(AsyncOutcome::Failed, loops);
    }

    /// True if the request has completed, whether or not its response was taken.
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> Option<AsyncOutcome> {
        lock(&self.response).take()
    }
}
