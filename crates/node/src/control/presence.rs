//! Member key of this node (`/moim/members/<id>`), under a lease that the node renews.
//!
//! The create revision of the key is the broker epoch. Every registration must get a new one, so the key of an earlier
//! registration is deleted before a new one is created, never overwritten. The member record also states the condition
//! of the data directory: the broker epoch since which no written byte was lost, and the damaged replicas. Hence the
//! key is created only after journal recovery ([`Presence::begin`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Shutdown;
use moim_state::nodes::{MemberRecord, NodeOrder, member_key, order_key};
use moim_state::{Compare, LeaseId, RepositoryError, StateRepository, Txn, TxnOutcome};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::admin::Readiness;
use crate::data_dir::DataDir;

/// TTL of the member lease: a node that does not renew it is down.
const TTL: Duration = Duration::from_secs(3);
/// Interval of lease renewals.
const RENEW: Duration = Duration::from_secs(1);
/// Pause before the retry of a failed renewal.
const RETRY: Duration = Duration::from_millis(200);
/// A node whose lease was not renewed for this time is isolated: the controller may have elected other leaders, and
/// this node's clients are redirected. Longer than a leader election of the coordination group. All consequences are
/// fenced by epochs.
const ISOLATED_AFTER: Duration = Duration::from_millis(2500);
/// Timeout of the lease revocation while the disk is impaired or full.
const REVOKE_TIMEOUT: Duration = Duration::from_millis(300);
/// Readiness condition: the coordination quorum is reachable.
const QUORUM: &str = "quorum";

/// Creates and renews this node's member key.
pub(crate) struct Presence {
    repository: Arc<dyn StateRepository>,
    data: Arc<DataDir>,
    record: Mutex<MemberRecord>,
    lease: Mutex<Option<LeaseId>>,
    /// True after journal recovery: the member key may be created.
    recovered: watch::Sender<bool>,
    /// Broker epoch; `None` while this node has no member key.
    broker_epoch: watch::Sender<Option<i64>>,
    /// True if a lease renewal succeeded within [`ISOLATED_AFTER`].
    quorum_contact: watch::Sender<bool>,
    /// True when the node stops: the member key is not created again.
    leaving: AtomicBool,
    /// True when a graceful shutdown has begun: other replicas are to lead.
    resigned: AtomicBool,
    /// True while the disk is impaired or full: there is no member key meanwhile.
    withdrawn: watch::Sender<bool>,
}

impl Presence {
    pub(crate) fn new(
        repository: Arc<dyn StateRepository>,
        data: Arc<DataDir>,
        record: MemberRecord,
    ) -> Self {
        Self {
            repository,
            data,
            record: Mutex::new(record),
            lease: Mutex::default(),
            recovered: watch::Sender::new(false),
            broker_epoch: watch::Sender::new(None),
            quorum_contact: watch::Sender::new(true),
            leaving: AtomicBool::new(false),
            resigned: AtomicBool::new(false),
            withdrawn: watch::Sender::new(false),
        }
    }

    /// Allows the creation of the member key after journal recovery, with the damaged replicas. Returns the broker
    /// epoch.
    pub(crate) async fn begin(&self, damaged: Vec<String>) -> i64 {
        {
            let mut record = lock(&self.record);
            record.intact_since = self.data.identity().intact_since;
            record.damaged = damaged;
        }
        self.recovered.send_replace(true);
        let mut broker_epochs = self.broker_epoch.subscribe();
        loop {
            if let Some(broker_epoch) = *broker_epochs.borrow_and_update() {
                return broker_epoch;
            }
            // The sender is in `self`, so the channel is open.
            let _ = broker_epochs.changed().await;
        }
    }

    /// Updates the damaged replicas in the member record of the current broker epoch.
    pub(crate) async fn on_damaged(&self, damaged: Vec<String>) -> Result<(), RepositoryError> {
        let record = {
            let mut record = lock(&self.record);
            record.damaged = damaged;
            record.clone()
        };
        // Without a member key, the next registration includes them.
        let (broker_epoch, lease) = (*self.broker_epoch.borrow(), self.lease());
        let (Some(broker_epoch), Some(lease)) = (broker_epoch, lease) else { return Ok(()) };
        let key = member_key(record.node_id);
        let ours = Compare::CreateRevision(key.clone(), broker_epoch);
        let txn = Txn::new().when(ours).put_leased(key, record.to_bytes(), lease);
        self.repository.txn(txn).await.map(drop)
    }

    /// Broker epoch of this node; a new one follows each lease loss.
    pub(crate) fn broker_epochs(&self) -> watch::Receiver<Option<i64>> {
        self.broker_epoch.subscribe()
    }

    /// True while this node has contact with the coordination quorum. Without it, other replicas may have been elected.
    pub(crate) fn quorum_contact(&self) -> watch::Receiver<bool> {
        self.quorum_contact.subscribe()
    }

    fn lease(&self) -> Option<LeaseId> {
        *lock(&self.lease)
    }

    /// Creates the member key, after deleting the key of an earlier registration.
    async fn register_member(&self) -> Result<(), RepositoryError> {
        let record = lock(&self.record).clone();
        let key = member_key(record.node_id);
        if let Some(old) = self.repository.get(&key).await? {
            let same = Compare::CreateRevision(key.clone(), old.create_revision);
            self.repository.txn(Txn::new().when(same).delete(key.clone())).await?;
        }
        let lease = self.repository.grant(TTL).await?.id;
        let txn = Txn::new().when(Compare::Absent(key.clone())).put_leased(key, record.to_bytes(), lease);
        match self.repository.txn(txn).await? {
            TxnOutcome::Done { revision } => {
                self.on_registered(revision, lease);
                Ok(())
            }
            TxnOutcome::Conflict { .. } => Err(RepositoryError::Unavailable(
                "member key of this node is held by another process".to_owned(),
            )),
        }
    }

    /// Sets the broker epoch. The first one after a possible loss of written bytes becomes `intact_since`.
    fn on_registered(&self, broker_epoch: i64, lease: LeaseId) {
        let since = *lock(&self.record).intact_since.get_or_insert(broker_epoch);
        let data = Arc::clone(&self.data);
        // In the background: without this write, the next start claims less than is true, never more.
        tokio::task::spawn_blocking(move || {
            if let Err(failure) = data.set_intact_since(Some(since)) {
                tracing::warn!(%failure, "intact_since not written to node.json");
            }
        });
        // Lease and broker epoch are set together: a lease renewed for an unpublished broker epoch would keep this node
        // idle for ever.
        *lock(&self.lease) = Some(lease);
        self.broker_epoch.send_replace(Some(broker_epoch));
    }

    async fn renew(&self) -> Result<(), RepositoryError> {
        let Some(lease) = self.lease() else { return self.register_member().await };
        match self.repository.keep_alive(lease).await {
            Ok(_) => Ok(()),
            Err(RepositoryError::LeaseNotFound(_)) => {
                *lock(&self.lease) = None;
                self.broker_epoch.send_replace(None);
                if self.leaving.load(Ordering::Relaxed) || self.is_withdrawn() {
                    return Ok(());
                }
                tracing::warn!("member lease lost; registering with a new broker epoch");
                self.register_member().await
            }
            Err(error) => Err(error),
        }
    }

    /// Creates the member key after recovery and renews its lease until the node stops. A renewal needs the
    /// coordination quorum, so it also determines quorum contact.
    pub(crate) async fn run(self: Arc<Self>, readiness: Readiness, shutdown: Shutdown) {
        let mut recovered = self.recovered.subscribe();
        tokio::select! {
            () = shutdown.stopped() => return,
            _ = recovered.wait_for(|recovered| *recovered) => {}
        }
        let mut renewed_at = Instant::now();
        let mut withdrawn = self.withdrawn.subscribe();
        while !self.leaving.load(Ordering::Relaxed) {
            if *withdrawn.borrow_and_update() {
                self.revoke_lease().await;
                tokio::select! {
                    () = shutdown.stopped() => return,
                    _ = withdrawn.changed() => renewed_at = Instant::now(),
                }
                continue;
            }
            let begun_at = Instant::now();
            let has_contact = *self.quorum_contact.borrow();
            let timeout = if has_contact { (renewed_at + ISOLATED_AFTER - begun_at).min(TTL) } else { TTL };
            let renewed = tokio::select! {
                renewed = tokio::time::timeout(timeout, self.renew()) => renewed,
                _ = withdrawn.changed() => continue,
            };
            let pause = match renewed {
                Ok(Ok(())) => {
                    renewed_at = begun_at;
                    readiness.clear_failing(QUORUM);
                    RENEW
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, "member lease renewal failed");
                    readiness.set_failing(QUORUM, "no coordination quorum in sight");
                    RETRY
                }
                Err(_) => {
                    readiness.set_failing(QUORUM, "no coordination quorum in sight");
                    RETRY
                }
            };
            let has_contact = renewed_at.elapsed() < ISOLATED_AFTER;
            self.quorum_contact
                .send_if_modified(|known| std::mem::replace(known, has_contact) != has_contact);
            tokio::select! {
                () = shutdown.stopped() => return,
                _ = withdrawn.changed() => {}
                () = rest(pause) => {}
            }
        }
    }

    /// Revokes the member lease because the disk is impaired or full, so that other replicas lead and no client waits.
    async fn revoke_lease(&self) {
        self.quorum_contact.send_if_modified(|known| std::mem::replace(known, false));
        let lease = lock(&self.lease).take();
        if let Some(lease) = lease {
            match tokio::time::timeout(REVOKE_TIMEOUT, self.repository.revoke(lease)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, "member lease revocation failed; the lease expires")
                }
                Err(_) => tracing::debug!("member lease revocation timed out; the lease expires"),
            }
        }
        self.broker_epoch.send_replace(None);
    }

    /// Orders the controller to move leadership away from this node, under the member lease. An operator's order stays.
    pub(crate) async fn resign(&self) -> Result<(), RepositoryError> {
        self.resigned.store(true, Ordering::Relaxed);
        self.order_drain().await
    }

    /// True after [`Presence::resign`].
    pub(crate) fn has_resigned(&self) -> bool {
        self.resigned.load(Ordering::Relaxed)
    }

    /// Withdraws the member key until [`Presence::reinstate`], and redirects clients. Returns when the lease is
    /// revoked, or after `timeout`; the lease then expires.
    pub(crate) async fn withdraw(&self, timeout: Duration) {
        self.withdrawn.send_replace(true);
        let mut broker_epochs = self.broker_epoch.subscribe();
        let _ = tokio::time::timeout(timeout, broker_epochs.wait_for(Option::is_none)).await;
    }

    /// True while the member key is withdrawn.
    pub(crate) fn is_withdrawn(&self) -> bool {
        *self.withdrawn.borrow()
    }

    /// Watches [`Presence::is_withdrawn`].
    pub(crate) fn withdrawals(&self) -> watch::Receiver<bool> {
        self.withdrawn.subscribe()
    }

    /// Ends the withdrawal: the node registers with a new broker epoch.
    pub(crate) fn reinstate(&self) {
        self.withdrawn.send_replace(false);
    }

    async fn order_drain(&self) -> Result<(), RepositoryError> {
        let Some(lease) = self.lease() else { return Ok(()) };
        let key = order_key(lock(&self.record).node_id);
        let order = NodeOrder::Drain.as_str();
        let txn = Txn::new().when(Compare::Absent(key.clone())).put_leased(key, order, lease);
        // On a conflict there is an order already.
        self.repository.txn(txn).await.map(drop)
    }

    /// Deletes the member key by revoking its lease, so that no node waits for the expiry.
    pub(crate) async fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        let Some(lease) = self.lease() else { return };
        if let Err(error) = self.repository.revoke(lease).await {
            tracing::debug!(%error, "member lease revocation failed; the lease expires");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use moim_base::{ManualClock, SystemClock};
    use moim_state::MemoryRepository;
    use moim_state::nodes::LiveMember;

    use super::*;

    struct Fixture {
        repository: Arc<MemoryRepository>,
        dir: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let repository = Arc::new(MemoryRepository::new(Arc::new(SystemClock::new())));
            Self { repository, dir: tempfile::tempdir().unwrap() }
        }

        fn start(&self) -> Presence {
            let data = DataDir::open(self.dir.path(), 4, &ManualClock::at(1)).unwrap();
            let record = MemberRecord { node_id: 4, incarnation: 1, voter: 2, ..MemberRecord::default() };
            Presence::new(self.repository.clone(), Arc::new(data), record)
        }

        async fn member(&self) -> Option<LiveMember> {
            let (_, mut members) = moim_state::nodes::members(self.repository.as_ref()).await.unwrap();
            members.pop()
        }
    }

    fn block_on(future: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
    }

    #[test]
    fn each_registration_gets_a_new_broker_epoch() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.start();
            first.register_member().await.unwrap();
            let before = fixture.member().await.unwrap().broker_epoch;
            first.renew().await.unwrap();
            assert_eq!(fixture.member().await.unwrap().broker_epoch, before);
            assert_eq!(*first.broker_epochs().borrow(), Some(before));
            drop(first);

            let second = fixture.start();
            second.register_member().await.unwrap();
            let after = fixture.member().await.unwrap().broker_epoch;
            assert!(after > before, "{after} {before}");

            fixture.repository.revoke(second.lease().unwrap()).await.unwrap();
            assert_eq!(fixture.member().await, None);
            second.renew().await.unwrap();
            let back = fixture.member().await.unwrap();
            assert!(back.broker_epoch > after, "a new broker epoch after the lease loss");
            assert_eq!(back.record.intact_since, Some(after), "intact since the earlier broker epoch");
            second.leave().await;
            assert_eq!(fixture.member().await, None);
        });
    }

    #[test]
    fn intact_since_survives_a_clean_stop_and_is_cleared_after_a_crash() {
        block_on(async {
            let fixture = Fixture::new();
            let first = Arc::new(fixture.start());
            let renewal = Arc::clone(&first).run(Readiness::not_ready_because("x"), Shutdown::new());
            let epoch = tokio::select! {
                epoch = first.begin(vec!["00/3".into()]) => epoch,
                () = renewal => panic!("presence task ended"),
            };
            let member = fixture.member().await.unwrap();
            assert_eq!((member.record.intact_since, member.broker_epoch), (None, epoch));
            assert_eq!(member.record.damaged, ["00/3"]);
            // Damage found later is added under the same broker epoch.
            first.on_damaged(vec!["00/3".into(), "00/4".into()]).await.unwrap();
            let member = fixture.member().await.unwrap();
            assert_eq!((member.record.damaged.len(), member.broker_epoch), (2, epoch));
            let written = async {
                while first.data.identity().intact_since != Some(epoch) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(30), written)
                .await
                .expect("intact_since written to node.json");
            drop(first);
            // A clean stop keeps it; a start after a crash clears it.
            let second = fixture.start();
            second.record.lock().unwrap().intact_since = second.data.identity().intact_since;
            second.register_member().await.unwrap();
            assert_eq!(fixture.member().await.unwrap().record.intact_since, Some(epoch));
            drop(second);
            fixture.start().data.set_intact_since(None).unwrap();
            assert_eq!(fixture.start().data.identity().intact_since, None);
        });
    }

    #[test]
    fn withdrawn_member_key_is_created_again_with_a_new_broker_epoch_only_after_reinstatement() {
        block_on(async {
            let fixture = Fixture::new();
            let presence = Arc::new(fixture.start());
            let renewal = Arc::clone(&presence).run(Readiness::not_ready_because("x"), Shutdown::new());
            let tested = async {
                let first = presence.begin(Vec::new()).await;
                let has_contact = presence.quorum_contact();
                assert!(*has_contact.borrow());
                presence.withdraw(Duration::from_secs(5)).await;
                assert!(presence.is_withdrawn() && !*has_contact.borrow());
                assert_eq!(fixture.member().await, None, "the lease is revoked, not left to expire");
                assert_eq!(*presence.broker_epochs().borrow(), None);
                // A second withdrawal changes nothing.
                presence.withdraw(Duration::from_secs(5)).await;
                assert_eq!(fixture.member().await, None);
                presence.reinstate();
                let mut broker_epochs = presence.broker_epochs();
                let second = broker_epochs.wait_for(Option::is_some).await.unwrap().unwrap();
                assert!(second > first, "{second} {first}");
                assert_eq!(fixture.member().await.unwrap().record.intact_since, Some(first));
                let mut has_contact = presence.quorum_contact();
                assert!(*has_contact.wait_for(|has_contact| *has_contact).await.unwrap());
            };
            tokio::select! {
                () = tested => {}
                () = renewal => panic!("presence task ended"),
            }
        });
    }

    #[test]
    fn resignation_ends_with_the_member_lease() {
        block_on(async {
            let fixture = Fixture::new();
            let presence = fixture.start();
            presence.register_member().await.unwrap();
            presence.resign().await.unwrap();
            let order = fixture.repository.get(&order_key(4)).await.unwrap().unwrap();
            assert_eq!(NodeOrder::parse(&order.value), Some(NodeOrder::Drain));
            presence.leave().await;
            assert_eq!(fixture.repository.get(&order_key(4)).await.unwrap(), None);
        });
    }
}
