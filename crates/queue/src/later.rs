//! An answer that another task makes.

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
    wake: Arc<Wake>,
}

impl Later {
    pub(crate) fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { answer: Mutex::new(None), wake })
    }

    /// Puts the answer there and wakes the connection.
    pub(crate) fn set(&self, answer: Bytes, loops: &Loops) {
        *lock(&self.answer) = Some(Answer::Bytes(answer));
        loops.wake_one(&self.wake);
    }

    /// Says that no answer will come.
    pub(crate) fn fail(&self, loops: &Loops) {
        *lock(&self.answer) = Some(Answer::Failed);
        loops.wake_one(&self.wake);
    }

    pub(crate) fn take(&self) -> Option<Answer> {
        lock(&self.answer).take()
    }
}
