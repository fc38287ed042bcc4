//! An answer that another task makes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use crate::loops::{Loops, Wake, lock};

/// What became of the request.
pub(crate) enum Answer {
    /// The encoded answer.
    Bytes(Bytes),
    /// There is none; the connection is closed so that the client asks again.
    Failed,
}

/// A place for one encoded answer.
pub(crate) struct Later {
    answer: Mutex<Option<Answer>>,
    done: AtomicBool,
    wake: Arc<Wake>,
}

impl Later {
    pub(crate) fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { answer: Mutex::new(None), done: AtomicBool::new(false), wake })
    }

    /// Puts the answer there and wakes the connection.
    pub(crate) fn set(&self, answer: Bytes, loops: &Loops) {
        self.finish(Answer::Bytes(answer), loops);
    }

    fn finish(&self, answer: Answer, loops: &Loops) {
        *lock(&self.answer) = Some(answer);
        self.done.store(true, Ordering::Release);
        loops.wake_one(&self.wake);
    }

    /// Says that no answer will come.
    pub(crate) fn fail(&self, loops: &Loops) {
        self.finish(Answer::Failed, loops);
    }

    /// Whether the request has ended, its answer taken or not.
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> Option<Answer> {
        lock(&self.answer).take()
    }
}
