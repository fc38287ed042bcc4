//! How answers get from the control thread to whoever waits.
//!
//! An answer that wakes its waiter from another thread costs a system call, and so many of them wake the waiting
//! thread again and again, once for each. A thread with many waiters therefore has a [`Counter`]: the answers of a
//! whole batch are laid down there with one wake-up, and a task of that thread hands them out. Waiters without a
//! counter are woken directly, so that nobody depends on a thread that clients keep busy.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use super::error::CoordError;
use super::leases::Kept;
use crate::reply::Reply;

type Sender<T> = oneshot::Sender<Result<T, CoordError>>;
type Answer<T> = (Sender<T>, Result<T, CoordError>);

/// Where the answers for one thread are laid down.
#[derive(Default)]
pub(super) struct Counter {
    answers: Mutex<Answers>,
    wake: Notify,
}

/// Answers on their way, by kind.
#[derive(Default)]
pub(super) struct Answers {
    commands: Vec<Answer<Reply>>,
    reads: Vec<Answer<()>>,
    renewals: Vec<Answer<Kept>>,
    /// Nobody attends any more: whoever brings answers hands them out.
    closed: bool,
}

impl Answers {
    fn is_empty(&self) -> bool {
        self.commands.is_empty() && self.reads.is_empty() && self.renewals.is_empty()
    }

    fn append(&mut self, other: &mut Self) {
        self.commands.append(&mut other.commands);
        self.reads.append(&mut other.reads);
        self.renewals.append(&mut other.renewals);
    }

    fn hand_out(&mut self) {
        // Whoever asked may be gone.
        self.commands.drain(..).for_each(|(to, answer)| drop(to.send(answer)));
        self.reads.drain(..).for_each(|(to, answer)| drop(to.send(answer)));
        self.renewals.drain(..).for_each(|(to, answer)| drop(to.send(answer)));
    }
}

impl Counter {
    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands out what is laid down here, for ever.
    pub(super) async fn attend(&self) {
        let mut answers = Answers::default();
        loop {
            self.wake.notified().await;
            std::mem::swap(&mut *self.answers(), &mut answers);
            answers.hand_out();
        }
    }

    /// Nobody attends any more: hands out what is left, and from now on answers are given directly.
    pub(super) fn close(&self) {
        let mut answers =
            std::mem::replace(&mut *self.answers(), Answers { closed: true, ..Answers::default() });
        answers.hand_out();
    }
}

/// A kind of answer.
pub(super) trait Kind: Sized {
    fn of(answers: &mut Answers) -> &mut Vec<Answer<Self>>;
}

impl Kind for Reply {
    fn of(answers: &mut Answers) -> &mut Vec<Answer<Self>> {
        &mut answers.commands
    }
}

impl Kind for () {
    fn of(answers: &mut Answers) -> &mut Vec<Answer<Self>> {
        &mut answers.reads
    }
}

impl Kind for Kept {
    fn of(answers: &mut Answers) -> &mut Vec<Answer<Self>> {
        &mut answers.renewals
    }
}

/// Whoever waits for an answer.
pub(super) struct Waiter<T> {
    to: Sender<T>,
    through: Option<Arc<Counter>>,
}

impl<T: Kind> Waiter<T> {
    /// A waiter, and where its answer comes out.
    pub(super) fn new(through: Option<&Arc<Counter>>) -> (Self, oneshot::Receiver<Result<T, CoordError>>) {
        let (to, answer) = oneshot::channel();
        (Self { to, through: through.cloned() }, answer)
    }
}

/// Answers that are given together.
#[derive(Default)]
pub(super) struct Bundle {
    through: Option<Arc<Counter>>,
    answers: Answers,
}

impl Bundle {
    /// Answers a waiter, at the latest when the bundle is dropped.
    pub(super) fn answer<T: Kind>(&mut self, waiter: Waiter<T>, answer: Result<T, CoordError>) {
        let Some(through) = waiter.through else {
            let _ = waiter.to.send(answer);
            return;
        };
        if self.through.as_ref().is_some_and(|other| !Arc::ptr_eq(other, &through)) {
            self.deliver();
        }
        self.through = Some(through);
        T::of(&mut self.answers).push((waiter.to, answer));
    }

    fn deliver(&mut self) {
        let Some(through) = self.through.take() else { return };
        if self.answers.is_empty() {
            return;
        }
        let mut answers = through.answers();
        if answers.closed {
            drop(answers);
            self.answers.hand_out();
            return;
        }
        answers.append(&mut self.answers);
        drop(answers);
        through.wake.notify_one();
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        self.deliver();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_a_bundle_reach_the_counters_they_were_meant_for() {
        let (here, there) = (Arc::new(Counter::default()), Arc::new(Counter::default()));
        let mut bundle = Bundle::default();
        let mut receivers = Vec::new();
        for counter in [Some(&here), Some(&there), None, Some(&here)] {
            let (waiter, receiver) = Waiter::<()>::new(counter);
            bundle.answer(waiter, Err(CoordError::NoLeader));
            receivers.push(receiver);
        }
        drop(bundle);
        assert_eq!(receivers[2].try_recv(), Ok(Err(CoordError::NoLeader)), "answered directly");
        assert!(receivers[0].try_recv().is_err(), "it lies on the counter");
        here.close();
        assert_eq!(receivers[0].try_recv(), Ok(Err(CoordError::NoLeader)));
        assert_eq!(receivers[3].try_recv(), Ok(Err(CoordError::NoLeader)));
        assert!(receivers[1].try_recv().is_err());
        there.close();
        assert_eq!(receivers[1].try_recv(), Ok(Err(CoordError::NoLeader)));

        let (late, mut receiver) = Waiter::<()>::new(Some(&here));
        Bundle::default().answer(late, Ok(()));
        assert_eq!(receiver.try_recv(), Ok(Ok(())), "a closed counter keeps nothing");
    }
}
