//! A task in a process, observed from outside of its runtime.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;

/// State of a task.
enum State<T> {
    Running,
    Done(Option<T>),
    /// The process crashed before the task ended.
    Lost,
}

/// Handle to a task in a process.
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
    /// Spawns `work` on a runtime.
    pub(super) fn spawn(on: &Handle, work: impl Future<Output = T> + Send + 'static) -> Self {
        let state = Arc::new(Mutex::new(State::Running));
        let guard = Guard(Arc::clone(&state));
        on.spawn(async move {
            let done = work.await;
            guard.set(State::Done(Some(done)));
        });
        Self { state }
    }

    /// True if the task has ended or was lost.
    pub fn is_over(&self) -> bool {
        !matches!(*self.state.lock().unwrap_or_else(PoisonError::into_inner), State::Running)
    }

    /// Takes the result; `None` if there is none, or on a second call.
    pub fn take(&self) -> Option<T> {
        match &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Done(done) => done.take(),
            State::Running | State::Lost => None,
        }
    }
}
