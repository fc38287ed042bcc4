//! Leader election by a key under a lease.
//!
//! The candidate that creates the key is the leader; the key's create revision is the *fencing token*,
//! larger for every leader. Writes of a leader compare it, so a replaced leader that has not noticed yet
//! changes nothing.
//!
//! Invariant: [`Leadership::holds`] is true only while the lease cannot have expired: the deadline counts
//! from the time at which the last successful renewal was *sent*, on this process's monotonic clock, with a
//! safety margin of a tenth of the TTL. A late reply must never extend it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use moim_base::Clock;

use crate::repository::{Compare, Entry, Event, LeaseId, RepositoryError, StateRepository, Txn, TxnOutcome};

/// Pause before a retry.
const RETRY: Duration = Duration::from_millis(50);

/// A candidate in one election.
#[derive(Clone)]
pub struct Election {
    repository: Arc<dyn StateRepository>,
    clock: Arc<dyn Clock>,
    key: String,
    value: Bytes,
    ttl: Duration,
}

impl Election {
    /// An election under `key`; the winner stores `value` there. A leader that does not renew its lease for
    /// `ttl` is replaced.
    pub fn new(
        repository: Arc<dyn StateRepository>,
        clock: Arc<dyn Clock>,
        key: impl Into<String>,
        value: impl Into<Bytes>,
        ttl: Duration,
    ) -> Self {
        Self { repository, clock, key: key.into(), value: value.into(), ttl }
    }

    /// Waits until the key is absent and becomes the leader. Retries without limit; dropping the future
    /// cancels the campaign.
    pub async fn campaign(&self) -> Leadership {
        loop {
            match self.try_campaign().await {
                Ok(leadership) => return leadership,
                Err(error) => {
                    tracing::debug!(%error, key = self.key, "election campaign failed; retrying");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn try_campaign(&self) -> Result<Leadership, RepositoryError> {
        loop {
            match self.repository.get(&self.key).await? {
                Some(entry) => self.wait_for_end(&entry).await?,
                None => {
                    if let Some(leadership) = self.create().await? {
                        return Ok(leadership);
                    }
                }
            }
        }
    }

    /// Replaces the current leader. Safe wherever a leader's writes compare the fencing token; meant for a
    /// candidate with a better claim than the first one.
    pub async fn take_over(&self) -> Leadership {
        loop {
            match self.try_take_over().await {
                Ok(Some(leadership)) => return leadership,
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%error, key = self.key, "leadership takeover failed; retrying");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn try_take_over(&self) -> Result<Option<Leadership>, RepositoryError> {
        if let Some(entry) = self.repository.get(&self.key).await? {
            // Delete and create, not a put: a put would keep the create revision, and with it the former
            // leader's token.
            let same = Compare::CreateRevision(entry.key.clone(), entry.create_revision);
            self.repository.txn(Txn::new().when(same).delete(entry.key)).await?;
        }
        self.create().await
    }

    /// Creates the key; `None` when another candidate created it first.
    async fn create(&self) -> Result<Option<Leadership>, RepositoryError> {
        let sent_ms = self.clock.monotonic_ms();
        let lease = self.repository.grant(self.ttl).await?;
        let absent = Compare::Absent(self.key.clone());
        let txn = Txn::new().when(absent).put_leased(self.key.clone(), self.value.clone(), lease.id);
        let token = match self.repository.txn(txn).await {
            Ok(TxnOutcome::Done { revision }) => Some(revision),
            Ok(TxnOutcome::Conflict { .. }) => None,
            // Unknown outcome: if the write committed, the key is attached to our lease, which no other
            // candidate has.
            Err(_) => {
                let found = self.repository.get(&self.key).await?;
                found.filter(|entry| entry.lease == Some(lease.id)).map(|entry| entry.create_revision)
            }
        };
        let Some(token) = token else {
            // No key is attached to the lease; without the revoke it would expire.
            let _ = self.repository.revoke(lease.id).await;
            return Ok(None);
        };
        let leadership = Leadership {
            election: self.clone(),
            token,
            lease: lease.id,
            ttl: lease.ttl,
            until_ms: AtomicU64::new(0),
            lost: AtomicBool::new(false),
        };
        leadership.extend(sent_ms);
        Ok(Some(leadership))
    }

    /// Returns when the key may be deleted.
    async fn wait_for_end(&self, entry: &Entry) -> Result<(), RepositoryError> {
        let mut watch = self.repository.watch(&self.key, entry.mod_revision + 1).await?;
        loop {
            match watch.next().await {
                Some(Ok(Event::Delete { key, .. })) if key == self.key => return Ok(()),
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Ok(()),
            }
        }
    }
}

/// A leadership that this candidate has won.
pub struct Leadership {
    election: Election,
    token: i64,
    lease: LeaseId,
    ttl: Duration,
    until_ms: AtomicU64,
    lost: AtomicBool,
}

impl Leadership {
    /// Fencing token, larger than the token of every previous leader.
    pub fn token(&self) -> i64 {
        self.token
    }

    /// True if no other candidate can be leader yet. Valid only until the next await.
    pub fn holds(&self) -> bool {
        !self.lost.load(Ordering::Acquire)
            && self.election.clock.monotonic_ms() < self.until_ms.load(Ordering::Acquire)
    }

    /// Renews the lease, and returns when the leadership is lost or can no longer be proven. Must be polled
    /// for as long as the leadership is used.
    pub async fn keep(&self) {
        let clock = &self.election.clock;
        while self.holds() {
            let left = self.until_ms.load(Ordering::Acquire).saturating_sub(clock.monotonic_ms());
            let sent_ms = clock.monotonic_ms();
            let renewal = self.election.repository.keep_alive(self.lease);
            let pause = match tokio::time::timeout(Duration::from_millis(left), renewal).await {
                Ok(Ok(_)) => {
                    self.extend(sent_ms);
                    self.ttl / 4
                }
                Ok(Err(RepositoryError::LeaseNotFound(_))) => break,
                Ok(Err(error)) => {
                    tracing::debug!(%error, key = self.election.key, "leadership renewal failed; retrying");
                    RETRY
                }
                Err(_) => break,
            };
            tokio::time::sleep(pause).await;
        }
        self.lost.store(true, Ordering::Release);
    }

    /// Resigns the leadership: the next leader need not wait for the lease expiry.
    pub async fn resign(&self) {
        self.lost.store(true, Ordering::Release);
        if let Err(error) = self.election.repository.revoke(self.lease).await {
            tracing::debug!(%error, key = self.election.key, "leadership resignation failed; the lease will expire");
        }
    }

    fn extend(&self, sent_ms: u64) {
        let ttl_ms = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
        self.until_ms.store(sent_ms + ttl_ms - ttl_ms / 10, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use moim_base::ManualClock;

    use super::*;
    use crate::MemoryRepository;

    const KEY: &str = "/moim/controller";

    struct Fixture {
        clock: Arc<ManualClock>,
        repository: Arc<MemoryRepository>,
    }

    impl Fixture {
        fn new() -> Self {
            let clock = Arc::new(ManualClock::at(1_000));
            Self { repository: Arc::new(MemoryRepository::new(clock.clone())), clock }
        }

        fn candidate(&self, name: &'static str) -> Election {
            let repository: Arc<dyn StateRepository> = self.repository.clone();
            Election::new(repository, self.clock.clone(), KEY, name, Duration::from_millis(400))
        }

        fn advance(&self, ms: u64) {
            self.clock.advance_ms(ms);
            self.repository.tick().unwrap();
        }
    }

    fn block_on(future: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let limit = Duration::from_secs(20);
        runtime.unwrap().block_on(async { tokio::time::timeout(limit, future).await.unwrap() });
    }

    #[test]
    fn one_candidate_leads_and_the_next_leader_has_a_larger_token() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.candidate("a").campaign().await;
            assert!(first.holds());
            let second = fixture.candidate("b");
            let mut waiting = std::pin::pin!(second.campaign());
            let patience = tokio::time::timeout(Duration::from_millis(150), &mut waiting).await;
            assert!(patience.is_err(), "the candidate waits while a leader is elected");
            first.resign().await;
            assert!(!first.holds());
            let second = waiting.await;
            assert!(second.holds() && second.token() > first.token());
        });
    }

    #[test]
    fn leadership_ends_before_its_lease_expires() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.candidate("a").campaign().await;
            fixture.clock.advance_ms(359);
            assert!(first.holds());
            fixture.clock.advance_ms(2);
            assert!(!first.holds(), "safety margin of a tenth of the TTL");
            first.keep().await;
            assert!(fixture.repository.get(KEY).await.unwrap().is_some(), "the lease has not expired yet");
            fixture.advance(100);
            let second = fixture.candidate("b").campaign().await;
            assert!(second.token() > first.token());
        });
    }

    #[test]
    fn leadership_is_kept_by_renewals_and_lost_with_the_lease() {
        block_on(async {
            let fixture = Fixture::new();
            let leader = fixture.candidate("a").campaign().await;
            let mut keeping = std::pin::pin!(leader.keep());
            // Three times the lease TTL, on a clock that advances with the renewals.
            for _ in 0..12 {
                fixture.advance(100);
                let kept = tokio::time::timeout(Duration::from_millis(100), &mut keeping).await;
                assert!(kept.is_err(), "leadership was lost");
            }
            assert!(leader.holds());
            fixture.repository.revoke(leader.lease).await.unwrap();
            keeping.await;
            assert!(!leader.holds());
        });
    }

    #[test]
    fn takeover_fences_the_former_token() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.candidate("a").campaign().await;
            let second = fixture.candidate("b").take_over().await;
            assert!(second.token() > first.token());
            let entry = fixture.repository.get(KEY).await.unwrap().unwrap();
            assert_eq!((entry.create_revision, entry.value), (second.token(), Bytes::from_static(b"b")));
            let act = Txn::new().when(Compare::CreateRevision(KEY.into(), first.token())).put("x", "1");
            let outcome = fixture.repository.txn(act).await.unwrap();
            assert!(matches!(outcome, TxnOutcome::Conflict { .. }), "the former leader is fenced");
        });
    }
}
