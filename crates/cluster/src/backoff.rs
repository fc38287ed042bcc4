//! Exponential backoff with jitter, and the compare-and-swap update loop without lost updates.

use std::time::Duration;

use bytes::Bytes;

use crate::repository::{Entry, Expect, LeaseId, RepositoryError, StateRepository, Swap};

/// A pause that doubles with each failure up to a limit; half of it is jitter.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// Pauses from about `first` to about `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// Number of consecutive failures.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Resets after a success: the next failure starts with the first pause again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// The next pause: between half of the current interval and the whole interval.
    pub fn next_pause(&mut self) -> Duration {
        let interval = self.first.saturating_mul(1 << self.failures.min(16)).min(self.longest);
        self.failures = self.failures.saturating_add(1);
        interval.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Sleeps for the next pause.
    pub async fn pause(&mut self) {
        tokio::time::sleep(self.next_pause()).await;
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new(Duration::from_millis(20), Duration::from_secs(1))
    }
}

/// Retries a read while the store is unavailable, up to `patience`.
pub async fn read<T, F>(patience: Duration, mut attempt: impl FnMut() -> F) -> Result<T, RepositoryError>
where
    F: Future<Output = Result<T, RepositoryError>>,
{
    let mut backoff = Backoff::default();
    let trying = async {
        loop {
            match attempt().await {
                Err(error) if error.is_retryable() => backoff.pause().await,
                done => return done,
            }
        }
    };
    match tokio::time::timeout(patience, trying).await {
        Ok(done) => done,
        Err(_) => Err(RepositoryError::Unavailable("no reply within the timeout".to_owned())),
    }
}

/// Decision of an [`update`] about a key.
pub enum Change {
    /// Write this value.
    Put(Bytes),
    /// Delete the key.
    Delete,
    /// Leave the key unchanged.
    Keep,
}

/// Result of an [`update`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Updated {
    /// The key was changed.
    Done {
        /// Revision of the change.
        revision: i64,
    },
    /// The key was left unchanged.
    Kept,
}

/// Reads a key, lets `decide` change it, and writes it back by compare-and-swap; a conflict repeats the
/// loop. While the store is unavailable it retries, up to `patience`.
///
/// No update is lost or applied twice: after an unknown outcome the key is read, and bytes equal to the
/// written ones under a later revision count as the own write. Values must name their writer where two
/// writers could write the same bytes.
pub async fn update(
    store: &dyn StateRepository,
    key: &str,
    lease: Option<LeaseId>,
    patience: Duration,
    mut decide: impl FnMut(Option<&Entry>) -> Change,
) -> Result<Updated, RepositoryError> {
    let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
    let mut in_doubt: Option<(i64, Option<Bytes>)> = None;
    let trying = async {
        loop {
            let entry = match store.get(key).await {
                Ok(entry) => entry,
                Err(error) if error.is_retryable() => {
                    backoff.pause().await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let found = entry.as_ref().map_or(0, |entry| entry.mod_revision);
            if let Some((before, ours)) = in_doubt.take()
                && found != before
                && ours == entry.as_ref().map(|entry| entry.value.clone())
            {
                return Ok(Updated::Done { revision: found });
            }
            let new = match decide(entry.as_ref()) {
                Change::Keep => return Ok(Updated::Kept),
                Change::Put(value) => Some(value),
                Change::Delete if entry.is_none() => return Ok(Updated::Kept),
                Change::Delete => None,
            };
            let expect = if entry.is_some() { Expect::Revision(found) } else { Expect::Absent };
            match store.compare_and_swap(key, expect, new.clone(), lease).await {
                Ok(Swap::Done { revision }) => return Ok(Updated::Done { revision }),
                Ok(Swap::Conflict { .. }) => {}
                Err(RepositoryError::Unknown) => in_doubt = Some((found, new)),
                Err(error) if error.is_retryable() => {}
                Err(error) => return Err(error),
            }
            backoff.pause().await;
        }
    };
    match tokio::time::timeout(patience, trying).await {
        Ok(done) => done,
        Err(_) => Err(RepositoryError::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_limit_with_jitter() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(100));
        let mut interval = Duration::from_millis(10);
        for _ in 0..10 {
            let pause = backoff.next_pause();
            assert!(pause >= interval / 2 && pause <= interval, "{pause:?} of {interval:?}");
            interval = (interval * 2).min(Duration::from_millis(100));
        }
        backoff.reset();
        assert!(backoff.next_pause() <= Duration::from_millis(10));
        let differ: std::collections::BTreeSet<_> =
            (0..20).map(|_| Backoff::default().next_pause()).collect();
        assert!(differ.len() > 10);
    }
}
