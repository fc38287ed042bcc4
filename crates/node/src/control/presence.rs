//! The mark that says that this node runs: a key under a lease that the node renews.
//!
//! Each life of a process gets a mark of its own, with a create revision nobody had before: the broker epoch. So the
//! mark of an earlier life is taken away before a new one is made, never overwritten.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::task::Shutdown;
use moim_cluster::nodes::{MemberRecord, member_key};
use moim_cluster::{Compare, LeaseId, RepositoryError, StateRepository, Txn, TxnOutcome};

use crate::admin::Readiness;

/// A node that is silent for so long is down.
const TTL: Duration = Duration::from_secs(3);
/// Between renewals.
const RENEW: Duration = Duration::from_secs(1);
/// Before trying again what failed.
const RETRY: Duration = Duration::from_millis(200);

/// Keeps this node's mark.
pub(crate) struct Presence {
    repository: Arc<dyn StateRepository>,
    record: MemberRecord,
    lease: Mutex<Option<LeaseId>>,
    /// The node stops: the mark is not made again.
    leaving: AtomicBool,
}

impl Presence {
    pub(crate) fn new(repository: Arc<dyn StateRepository>, record: MemberRecord) -> Self {
        Self { repository, record, lease: Mutex::default(), leaving: AtomicBool::new(false) }
    }

    fn lease(&self) -> Option<LeaseId> {
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_lease(&self, lease: Option<LeaseId>) {
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = lease;
    }

    /// Makes the mark, in place of one an earlier life may have left.
    async fn enlist(&self) -> Result<(), RepositoryError> {
        let key = member_key(self.record.node_id);
        if let Some(old) = self.repository.get(&key).await? {
            let same = Compare::CreateRevision(key.clone(), old.create_revision);
            self.repository.txn(Txn::new().when(same).delete(key.clone())).await?;
        }
        let lease = self.repository.grant(TTL).await?.id;
        let txn =
            Txn::new().when(Compare::Absent(key.clone())).put_leased(key, self.record.to_bytes(), lease);
        match self.repository.txn(txn).await? {
            TxnOutcome::Done { .. } => {
                self.set_lease(Some(lease));
                Ok(())
            }
            TxnOutcome::Conflict { .. } => {
                Err(RepositoryError::Unavailable("another process holds this node's mark".to_owned()))
            }
        }
    }

    /// Makes the mark, however often that has to be tried.
    pub(crate) async fn mark(&self) {
        while let Err(error) = self.enlist().await {
            tracing::debug!(%error, "this node's mark was not made; trying again");
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn renew(&self) -> Result<(), RepositoryError> {
        let Some(lease) = self.lease() else { return self.enlist().await };
        match self.repository.keep_alive(lease).await {
            Ok(_) => Ok(()),
            Err(RepositoryError::LeaseNotFound(_)) => {
                self.set_lease(None);
                if self.leaving.load(Ordering::Relaxed) {
                    return Ok(());
                }
                tracing::warn!("the cluster took this node for dead; it comes back as a new one");
                self.enlist().await
            }
            Err(error) => Err(error),
        }
    }

    /// Renews until the node stops. A renewal needs the coordination quorum, so this is also what knows of it.
    pub(crate) async fn keep(self: Arc<Self>, readiness: Readiness, shutdown: Shutdown) {
        const QUORUM: &str = "quorum";
        while !self.leaving.load(Ordering::Relaxed) {
            let renewed = tokio::time::timeout(TTL, self.renew()).await;
            let pause = match renewed {
                Ok(Ok(())) => {
                    readiness.holds(QUORUM);
                    RENEW
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, "this node's lease was not renewed");
                    readiness.fails(QUORUM, "no coordination quorum in sight");
                    RETRY
                }
                Err(_) => {
                    readiness.fails(QUORUM, "no coordination quorum in sight");
                    RETRY
                }
            };
            tokio::select! {
                () = shutdown.stopped() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Takes the mark away: nobody has to wait for the lease to end.
    pub(crate) async fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        let Some(lease) = self.lease() else { return };
        if let Err(error) = self.repository.revoke(lease).await {
            tracing::debug!(%error, "this node's lease was not revoked; it ends by itself");
        }
    }
}

#[cfg(test)]
mod tests {
    use moim_base::SystemClock;
    use moim_cluster::MemoryRepository;

    use super::*;

    #[test]
    fn every_life_has_a_mark_of_its_own() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let repository = Arc::new(MemoryRepository::new(Arc::new(SystemClock::new())));
            let record = MemberRecord { node_id: 4, incarnation: 1, voter: 2, ..MemberRecord::default() };
            let epoch = async || {
                let (_, members) = moim_cluster::nodes::members(repository.as_ref()).await.unwrap();
                members.first().map(|member| member.broker_epoch)
            };
            let first = Presence::new(repository.clone(), record.clone());
            first.enlist().await.unwrap();
            let before = epoch().await.unwrap();
            first.renew().await.unwrap();
            assert_eq!(epoch().await, Some(before));

            let second = Presence::new(repository.clone(), record);
            second.enlist().await.unwrap();
            let after = epoch().await.unwrap();
            assert!(after > before, "{after} {before}");

            repository.revoke(second.lease().unwrap()).await.unwrap();
            assert_eq!(epoch().await, None);
            second.renew().await.unwrap();
            assert!(epoch().await.unwrap() > after, "it comes back as a new one");
            second.leave().await;
            assert_eq!(epoch().await, None);
        });
    }
}
