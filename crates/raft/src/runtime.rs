//! The async runtime under openraft: tokio, with every source of nondeterminism replaced.
//!
//! A test that owns the thread can make a run repeat itself exactly: it runs one tokio runtime with a paused clock,
//! seeds this thread's `fastrand`, and runs [`moim_base::task::offload`] on its own thread. Therefore randomness
//! comes from `fastrand` alone, the longest waiter for a change is woken first ([`watch`]), and nothing in this crate
//! selects randomly among ready futures. The shipped code is the code that the simulator runs.

mod watch;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::time::Duration;

use openraft::{AsyncRuntime, OptionalSend};
use openraft_rt_tokio::{TokioInstant, TokioMpsc, TokioMutex, TokioOneshot, TokioRuntime};

pub(crate) use self::watch::Watch;

/// The deterministic runtime, see the module comment.
#[derive(Debug)]
pub(crate) struct Runtime(TokioRuntime);

/// This thread's `fastrand`.
pub(crate) struct Random;

impl rand_core::TryRng for Random {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok(fastrand::u32(..))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(fastrand::u64(..))
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        fastrand::fill(bytes);
        Ok(())
    }
}

impl AsyncRuntime for Runtime {
    type JoinError = <TokioRuntime as AsyncRuntime>::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::JoinHandle<T>;
    type Sleep = <TokioRuntime as AsyncRuntime>::Sleep;
    type Instant = TokioInstant;
    type TimeoutError = <TokioRuntime as AsyncRuntime>::TimeoutError;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = <TokioRuntime as AsyncRuntime>::Timeout<R, T>;
    type ThreadLocalRng = Random;
    type Mpsc = TokioMpsc;
    type Watch = Watch;
    type Oneshot = TokioOneshot;
    type Mutex<T: OptionalSend + 'static> = TokioMutex<T>;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        TokioRuntime::spawn(future)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        TokioRuntime::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        TokioRuntime::sleep_until(deadline)
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(
        duration: Duration,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout(duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout_at(deadline, future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        join_error.is_panic()
    }

    fn thread_rng() -> Random {
        Random
    }

    fn new(threads: usize) -> Self {
        Self(TokioRuntime::new(threads))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }

    async fn spawn_blocking<F, T>(work: F) -> Result<T, io::Error>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        moim_base::task::offload(move || Ok(work())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_openraft_expects() {
        openraft::testing::runtime::Suite::<Runtime>::test_all();
    }

    #[test]
    fn a_seed_repeats_what_openraft_draws() {
        let draw = || {
            fastrand::seed(5);
            let mut random = Runtime::thread_rng();
            let mut bytes = [0; 5];
            rand_core::Rng::fill_bytes(&mut random, &mut bytes);
            (rand_core::Rng::next_u32(&mut random), rand_core::Rng::next_u64(&mut random), bytes)
        };
        assert_eq!(draw(), draw());
    }
}
