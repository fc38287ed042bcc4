//! The outcome of something that runs in a process, seen from outside.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;

/// What became of it.
enum State<T> {
    Running,
    Done(Option<T>),
    /// Its process died.
    Lost,
}

/// A handle to it.
pub struct Task<T> {
    state: Arc<Mutex<State<T>>>,
}

struct Guard<T>(Arc<Mutex<State<T>>>);

impl<T> Guard<T> {
    fn set(&self, to: State<T>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = to;
    }
}

impl<T> Drop for Guard<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Running) {
            *state = State::Lost;
        }
    }
}

impl<T: Send + 'static> Task<T> {
    /// Runs `work` on a runtime.
    pub(super) fn spawn(on: &Handle, work: impl Future<Output = T> + Send + 'static) -> Self {
        let state = Arc::new(Mutex::new(State::Running));
        let guard = Guard(Arc::clone(&state));
        on.spawn(async move {
            let done = work.await;
            guard.set(State::Done(Some(done)));
        });
        Self { state }
    }

    /// Whether it has ended, one way or the other.
    pub fn is_over(&self) -> bool {
        !matches!(*self.state.lock().unwrap_or_else(PoisonError::into_inner), State::Running)
    }

    /// Its result, once.
    pub fn take(&self) -> Option<T> {
        match &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Done(done) => done.take(),
            State::Running | State::Lost => None,
        }
    }
}
