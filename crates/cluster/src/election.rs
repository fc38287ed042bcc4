//! One of several: an election by a key under a lease.
//!
//! Whoever makes the key leads; its create revision is the *fencing token*, larger for every leader. A leader's acts
//! compare it, so one that was replaced and does not know yet changes nothing.
//!
//! Invariant: a [`Leadership`] says that it holds only while its lease cannot have ended: it counts from when the last
//! renewal that succeeded was *sent*, on this process's monotonic clock, and gives a tenth of the time away. It must
//! never be believed for longer because an answer came late.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use moim_base::Clock;

use crate::repository::{Compare, Entry, Event, LeaseId, RepositoryError, StateRepository, Txn, TxnOutcome};

/// Before trying again what failed.
const RETRY: Duration = Duration::from_millis(50);

/// A candidate's view of one election.
#[derive(Clone)]
pub struct Election {
    repository: Arc<dyn StateRepository>,
    clock: Arc<dyn Clock>,
    key: String,
    value: Bytes,
    ttl: Duration,
}

impl Election {
    /// An election under `key`; whoever wins puts `value` there. A leader that is silent for `ttl` leads no more.
    pub fn new(
        repository: Arc<dyn StateRepository>,
        clock: Arc<dyn Clock>,
        key: impl Into<String>,
        value: impl Into<Bytes>,
        ttl: Duration,
    ) -> Self {
        Self { repository, clock, key: key.into(), value: value.into(), ttl }
    }

    /// Waits until nobody leads, and leads then. Tries for as long as it takes; dropping it gives up.
    pub async fn campaign(&self) -> Leadership {
        loop {
            match self.try_campaign().await {
                Ok(leadership) => return leadership,
                Err(error) => {
                    tracing::debug!(%error, key = self.key, "not elected; trying again");
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

    /// Takes the lead from whoever has it. Safe wherever a leader's acts compare the token; meant for a candidate that
    /// has a better reason to lead than having been first.
    pub async fn take_over(&self) -> Leadership {
        loop {
            match self.try_take_over().await {
                Ok(Some(leadership)) => return leadership,
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%error, key = self.key, "the lead was not taken over; trying again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn try_take_over(&self) -> Result<Option<Leadership>, RepositoryError> {
        if let Some(entry) = self.repository.get(&self.key).await? {
            // Not a put over it: that would keep the create revision, and with it the former leader's token.
            let same = Compare::CreateRevision(entry.key.clone(), entry.create_revision);
            self.repository.txn(Txn::new().when(same).delete(entry.key)).await?;
        }
        self.create().await
    }

    /// Makes the key; `None` when somebody else was quicker.
    async fn create(&self) -> Result<Option<Leadership>, RepositoryError> {
        let sent_ms = self.clock.monotonic_ms();
        let lease = self.repository.grant(self.ttl).await?;
        let absent = Compare::Absent(self.key.clone());
        let txn = Txn::new().when(absent).put_leased(self.key.clone(), self.value.clone(), lease.id);
        let token = match self.repository.txn(txn).await {
            Ok(TxnOutcome::Done { revision }) => Some(revision),
            Ok(TxnOutcome::Conflict { .. }) => None,
            // It may have happened: then the key is under our lease, which nobody else has.
            Err(_) => {
                let found = self.repository.get(&self.key).await?;
                found.filter(|entry| entry.lease == Some(lease.id)).map(|entry| entry.create_revision)
            }
        };
        let Some(token) = token else {
            // Nothing hangs on it; it would end by itself.
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

    /// Returns when the key may be gone.
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

/// The lead, once won.
pub struct Leadership {
    election: Election,
    token: i64,
    lease: LeaseId,
    ttl: Duration,
    until_ms: AtomicU64,
    lost: AtomicBool,
}

impl Leadership {
    /// Larger than the token of every leader before.
    pub fn token(&self) -> i64 {
        self.token
    }

    /// Whether nobody else can lead yet. True is worth something only until the next await.
    pub fn holds(&self) -> bool {
        !self.lost.load(Ordering::Acquire)
            && self.election.clock.monotonic_ms() < self.until_ms.load(Ordering::Acquire)
    }

    /// Keeps the lease alive, and returns when the lead is lost or can no longer be held for sure. Must be polled for
    /// as long as the lead is used.
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
                    tracing::debug!(%error, key = self.election.key, "the lead was not renewed; trying again");
                    RETRY
                }
                Err(_) => break,
            };
            tokio::time::sleep(pause).await;
        }
        self.lost.store(true, Ordering::Release);
    }

    /// Gives the lead back: the next one need not wait for the lease to end.
    pub async fn resign(&self) {
        self.lost.store(true, Ordering::Release);
        if let Err(error) = self.election.repository.revoke(self.lease).await {
            tracing::debug!(%error, key = self.election.key, "the lead ends with its lease");
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
    fn one_leads_and_the_next_has_a_larger_token() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.candidate("a").campaign().await;
            assert!(first.holds());
            let second = fixture.candidate("b");
            let mut waiting = std::pin::pin!(second.campaign());
            let patience = tokio::time::timeout(Duration::from_millis(150), &mut waiting).await;
            assert!(patience.is_err(), "while one leads the other waits");
            first.resign().await;
            assert!(!first.holds());
            let second = waiting.await;
            assert!(second.holds() && second.token() > first.token());
        });
    }

    #[test]
    fn a_lead_is_not_believed_until_its_lease_has_passed() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.candidate("a").campaign().await;
            fixture.clock.advance_ms(359);
            assert!(first.holds());
            fixture.clock.advance_ms(2);
            assert!(!first.holds(), "a tenth of the time is given away");
            first.keep().await;
            assert!(fixture.repository.get(KEY).await.unwrap().is_some(), "the lease has not ended yet");
            fixture.advance(100);
            let second = fixture.candidate("b").campaign().await;
            assert!(second.token() > first.token());
        });
    }

    #[test]
    fn a_lead_is_kept_by_renewals_and_lost_with_the_lease() {
        block_on(async {
            let fixture = Fixture::new();
            let leader = fixture.candidate("a").campaign().await;
            let mut keeping = std::pin::pin!(leader.keep());
            // Three times the lease, on a clock that runs as fast as the renewals'.
            for _ in 0..12 {
                fixture.advance(100);
                let kept = tokio::time::timeout(Duration::from_millis(100), &mut keeping).await;
                assert!(kept.is_err(), "the lead was lost");
            }
            assert!(leader.holds());
            fixture.repository.revoke(leader.lease).await.unwrap();
            keeping.await;
            assert!(!leader.holds());
        });
    }

    #[test]
    fn taking_over_ends_the_former_token() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.candidate("a").campaign().await;
            let second = fixture.candidate("b").take_over().await;
            assert!(second.token() > first.token());
            let entry = fixture.repository.get(KEY).await.unwrap().unwrap();
            assert_eq!((entry.create_revision, entry.value), (second.token(), Bytes::from_static(b"b")));
            let act = Txn::new().when(Compare::CreateRevision(KEY.into(), first.token())).put("x", "1");
            let outcome = fixture.repository.txn(act).await.unwrap();
            assert!(matches!(outcome, TxnOutcome::Conflict { .. }), "the former leader changes nothing");
        });
    }
}
