//! The mark that says that this node serves: a key under a lease that the node renews.
//!
//! Each run of a node gets a mark of its own, with a create revision nobody had before: the broker epoch. So the
//! mark of an earlier run is taken away before a new one is made, never overwritten. The mark also says what the data
//! folder is worth: since which run it has lost nothing that was written, and which copies are damaged. Hence it is made
//! only after the journals were recovered ([`Presence::begin`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Shutdown;
use moim_cluster::nodes::{MemberRecord, NodeOrder, member_key, order_key};
use moim_cluster::{Compare, LeaseId, RepositoryError, StateRepository, Txn, TxnOutcome};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::admin::Readiness;
use crate::data_dir::DataDir;

/// A node that is silent for so long is down.
const TTL: Duration = Duration::from_secs(3);
/// Between renewals.
const RENEW: Duration = Duration::from_secs(1);
/// Before trying again what failed.
const RETRY: Duration = Duration::from_millis(200);
/// A node whose lease was not renewed for so long is isolated: the others may have elected leaders in its place, and its clients
/// are sent to them. Longer than an election of the coordination group; all that follows from it is fenced by epochs.
const OUT_OF_TOUCH: Duration = Duration::from_millis(2500);
/// How long the lease may take to be revoked when the disk does not work.
const REVOKE: Duration = Duration::from_millis(300);
/// What `/readyz` speaks of.
const QUORUM: &str = "quorum";

/// Keeps this node's mark.
pub(crate) struct Presence {
    repository: Arc<dyn StateRepository>,
    data: Arc<DataDir>,
    record: Mutex<MemberRecord>,
    lease: Mutex<Option<LeaseId>>,
    /// The journals are recovered: the mark may be made.
    begun: watch::Sender<bool>,
    /// The present run; none while there is no mark.
    run: watch::Sender<Option<i64>>,
    /// Whether a renewal succeeded lately.
    touch: watch::Sender<bool>,
    /// The node stops: the mark is not made again.
    leaving: AtomicBool,
    /// The node is about to stop: others lead from now on.
    resigned: AtomicBool,
    /// The disk does not work: there is no mark until it does.
    given_up: watch::Sender<bool>,
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
            begun: watch::Sender::new(false),
            run: watch::Sender::new(None),
            touch: watch::Sender::new(true),
            leaving: AtomicBool::new(false),
            resigned: AtomicBool::new(false),
            given_up: watch::Sender::new(false),
        }
    }

    /// The journals are recovered, and these copies are damaged: the mark may be made. Returns with the run it begins.
    pub(crate) async fn begin(&self, damaged: Vec<String>) -> i64 {
        {
            let mut record = lock(&self.record);
            record.intact_since = self.data.identity().intact_since;
            record.damaged = damaged;
        }
        self.begun.send_replace(true);
        let mut runs = self.run.subscribe();
        loop {
            if let Some(run) = *runs.borrow_and_update() {
                return run;
            }
            // The sender is ours: it does not end before we do.
            let _ = runs.changed().await;
        }
    }

    /// Says of more copies that they are damaged, in the run that found it.
    pub(crate) async fn on_damaged(&self, damaged: Vec<String>) -> Result<(), RepositoryError> {
        let record = {
            let mut record = lock(&self.record);
            record.damaged = damaged;
            record.clone()
        };
        // Without a mark the next one says it.
        let (run, lease) = (*self.run.borrow(), self.lease());
        let (Some(run), Some(lease)) = (run, lease) else { return Ok(()) };
        let key = member_key(record.node_id);
        let ours = Compare::CreateRevision(key.clone(), run);
        let txn = Txn::new().when(ours).put_leased(key, record.to_bytes(), lease);
        self.repository.txn(txn).await.map(drop)
    }

    /// The runs of this node: the present one, and those that follow when its lease was lost.
    pub(crate) fn runs(&self) -> watch::Receiver<Option<i64>> {
        self.run.subscribe()
    }

    /// Whether this node is in touch with the coordination quorum. While it is not, others may have taken over what it leads.
    pub(crate) fn touch(&self) -> watch::Receiver<bool> {
        self.touch.subscribe()
    }

    fn lease(&self) -> Option<LeaseId> {
        *lock(&self.lease)
    }

    /// Makes the mark, in place of one an earlier run may have left.
    async fn enlist(&self) -> Result<(), RepositoryError> {
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
                self.on_enlisted(revision, lease);
                Ok(())
            }
            TxnOutcome::Conflict { .. } => {
                Err(RepositoryError::Unavailable("another process holds this node's mark".to_owned()))
            }
        }
    }

    /// A run has begun. The first since something may have been lost is the one nothing was lost since.
    fn on_enlisted(&self, run: i64, lease: LeaseId) {
        let since = *lock(&self.record).intact_since.get_or_insert(run);
        let data = Arc::clone(&self.data);
        // Nobody waits for it: until it is written, and if it never is, the next start says less than it could, and never
        // more.
        tokio::task::spawn_blocking(move || {
            if let Err(failure) = data.set_intact_since(Some(since)) {
                tracing::warn!(%failure, "what this folder is worth was not written down");
            }
        });
        // Both or neither: a lease that is kept alive for a run nobody was told of would keep this node idle for ever.
        *lock(&self.lease) = Some(lease);
        self.run.send_replace(Some(run));
    }

    async fn renew(&self) -> Result<(), RepositoryError> {
        let Some(lease) = self.lease() else { return self.enlist().await };
        match self.repository.keep_alive(lease).await {
            Ok(_) => Ok(()),
            Err(RepositoryError::LeaseNotFound(_)) => {
                *lock(&self.lease) = None;
                self.run.send_replace(None);
                if self.leaving.load(Ordering::Relaxed) || self.has_given_up() {
                    return Ok(());
                }
                tracing::warn!("the cluster took this node for dead; it comes back as a new run");
                self.enlist().await
            }
            Err(error) => Err(error),
        }
    }

    /// Makes the mark when it may be made, and renews it until the node stops. A renewal needs the coordination quorum,
    /// so this is also what knows of it.
    pub(crate) async fn keep(self: Arc<Self>, readiness: Readiness, shutdown: Shutdown) {
        let mut begun = self.begun.subscribe();
        tokio::select! {
            () = shutdown.stopped() => return,
            _ = begun.wait_for(|begun| *begun) => {}
        }
        let mut renewed_at = Instant::now();
        let mut given_up = self.given_up.subscribe();
        while !self.leaving.load(Ordering::Relaxed) {
            if *given_up.borrow_and_update() {
                self.withdraw().await;
                tokio::select! {
                    () = shutdown.stopped() => return,
                    _ = given_up.changed() => renewed_at = Instant::now(),
                }
                continue;
            }
            let begun_at = Instant::now();
            let in_touch = *self.touch.borrow();
            let patience = if in_touch { (renewed_at + OUT_OF_TOUCH - begun_at).min(TTL) } else { TTL };
            let renewed = tokio::select! {
                renewed = tokio::time::timeout(patience, self.renew()) => renewed,
                _ = given_up.changed() => continue,
            };
            let pause = match renewed {
                Ok(Ok(())) => {
                    renewed_at = begun_at;
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
            let in_touch = renewed_at.elapsed() < OUT_OF_TOUCH;
            self.touch.send_if_modified(|known| std::mem::replace(known, in_touch) != in_touch);
            tokio::select! {
                () = shutdown.stopped() => return,
                _ = given_up.changed() => {}
                () = rest(pause) => {}
            }
        }
    }

    /// Takes the mark away because the disk does not work: others lead and no client waits for this node.
    async fn withdraw(&self) {
        self.touch.send_if_modified(|known| std::mem::replace(known, false));
        let lease = lock(&self.lease).take();
        if let Some(lease) = lease {
            match tokio::time::timeout(REVOKE, self.repository.revoke(lease)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, "this node's lease was not revoked; it ends by itself")
                }
                Err(_) => tracing::debug!("this node's lease was not revoked in time; it ends by itself"),
            }
        }
        self.run.send_replace(None);
    }

    /// Asks the controller to let others lead, for as long as this run lasts. An operator's order stays what it is.
    pub(crate) async fn resign(&self) -> Result<(), RepositoryError> {
        self.resigned.store(true, Ordering::Relaxed);
        self.order_drain().await
    }

    /// Whether the node is about to stop.
    pub(crate) fn has_resigned(&self) -> bool {
        self.resigned.load(Ordering::Relaxed)
    }

    /// Gives the mark up until [`Presence::come_back`], and tells clients to turn to the others. Returns when the lease is
    /// revoked, or after `patience`: it ends by itself.
    pub(crate) async fn give_up(&self, patience: Duration) {
        self.given_up.send_replace(true);
        let mut runs = self.run.subscribe();
        let _ = tokio::time::timeout(patience, runs.wait_for(Option::is_none)).await;
    }

    /// Whether it was.
    pub(crate) fn has_given_up(&self) -> bool {
        *self.given_up.borrow()
    }

    /// The same, and every change of it.
    pub(crate) fn withdrawals(&self) -> watch::Receiver<bool> {
        self.given_up.subscribe()
    }

    /// Makes a mark again, of a new run.
    pub(crate) fn come_back(&self) {
        self.given_up.send_replace(false);
    }

    async fn order_drain(&self) -> Result<(), RepositoryError> {
        let Some(lease) = self.lease() else { return Ok(()) };
        let key = order_key(lock(&self.record).node_id);
        let order = NodeOrder::Drain.as_str();
        let txn = Txn::new().when(Compare::Absent(key.clone())).put_leased(key, order, lease);
        // On a conflict there is such an order already.
        self.repository.txn(txn).await.map(drop)
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

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use moim_base::{ManualClock, SystemClock};
    use moim_cluster::MemoryRepository;
    use moim_cluster::nodes::LiveMember;

    use super::*;

    struct Fixture {
        repository: Arc<MemoryRepository>,
        folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let repository = Arc::new(MemoryRepository::new(Arc::new(SystemClock::new())));
            Self { repository, folder: tempfile::tempdir().unwrap() }
        }

        fn start(&self) -> Presence {
            let data = DataDir::open(self.folder.path(), 4, &ManualClock::at(1)).unwrap();
            let record = MemberRecord { node_id: 4, incarnation: 1, voter: 2, ..MemberRecord::default() };
            Presence::new(self.repository.clone(), Arc::new(data), record)
        }

        async fn member(&self) -> Option<LiveMember> {
            let (_, mut members) = moim_cluster::nodes::members(self.repository.as_ref()).await.unwrap();
            members.pop()
        }
    }

    fn block_on(future: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
    }

    #[test]
    fn every_run_has_a_mark_of_its_own() {
        block_on(async {
            let fixture = Fixture::new();
            let first = fixture.start();
            first.enlist().await.unwrap();
            let before = fixture.member().await.unwrap().broker_epoch;
            first.renew().await.unwrap();
            assert_eq!(fixture.member().await.unwrap().broker_epoch, before);
            assert_eq!(*first.runs().borrow(), Some(before));
            drop(first);

            let second = fixture.start();
            second.enlist().await.unwrap();
            let after = fixture.member().await.unwrap().broker_epoch;
            assert!(after > before, "{after} {before}");

            fixture.repository.revoke(second.lease().unwrap()).await.unwrap();
            assert_eq!(fixture.member().await, None);
            second.renew().await.unwrap();
            let back = fixture.member().await.unwrap();
            assert!(back.broker_epoch > after, "it comes back as a new run");
            assert_eq!(back.record.intact_since, Some(after), "which has lost nothing since the one before");
            second.leave().await;
            assert_eq!(fixture.member().await, None);
        });
    }

    #[test]
    fn a_folder_is_worth_what_it_was_since_it_last_lost_something() {
        block_on(async {
            let fixture = Fixture::new();
            let first = Arc::new(fixture.start());
            let keeps = Arc::clone(&first).keep(Readiness::not_yet("x"), Shutdown::new());
            let run = tokio::select! {
                run = first.begin(vec!["00/3".into()]) => run,
                () = keeps => panic!("it was not stopped"),
            };
            let member = fixture.member().await.unwrap();
            assert_eq!((member.record.intact_since, member.broker_epoch), (None, run));
            assert_eq!(member.record.damaged, ["00/3"]);
            // More is found later: the same run says so.
            first.on_damaged(vec!["00/3".into(), "00/4".into()]).await.unwrap();
            let member = fixture.member().await.unwrap();
            assert_eq!((member.record.damaged.len(), member.broker_epoch), (2, run));
            let written = async {
                while first.data.identity().intact_since != Some(run) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(30), written).await.expect("it is written down soon");
            drop(first);
            // A stop in order keeps it; a start after a crash takes it away.
            let second = fixture.start();
            second.record.lock().unwrap().intact_since = second.data.identity().intact_since;
            second.enlist().await.unwrap();
            assert_eq!(fixture.member().await.unwrap().record.intact_since, Some(run));
            drop(second);
            fixture.start().data.set_intact_since(None).unwrap();
            assert_eq!(fixture.start().data.identity().intact_since, None);
        });
    }

    #[test]
    fn a_mark_that_was_given_up_is_made_again_as_a_new_run_and_not_before() {
        block_on(async {
            let fixture = Fixture::new();
            let presence = Arc::new(fixture.start());
            let keeps = Arc::clone(&presence).keep(Readiness::not_yet("x"), Shutdown::new());
            let tested = async {
                let first = presence.begin(Vec::new()).await;
                let in_touch = presence.touch();
                assert!(*in_touch.borrow());
                presence.give_up(Duration::from_secs(5)).await;
                assert!(presence.has_given_up() && !*in_touch.borrow());
                assert_eq!(fixture.member().await, None, "no replica has to wait for the lease to end");
                assert_eq!(*presence.runs().borrow(), None);
                // Giving up once more changes nothing.
                presence.give_up(Duration::from_secs(5)).await;
                assert_eq!(fixture.member().await, None);
                presence.come_back();
                let mut runs = presence.runs();
                let second = runs.wait_for(Option::is_some).await.unwrap().unwrap();
                assert!(second > first, "{second} {first}");
                assert_eq!(fixture.member().await.unwrap().record.intact_since, Some(first));
                let mut in_touch = presence.touch();
                assert!(*in_touch.wait_for(|in_touch| *in_touch).await.unwrap());
            };
            tokio::select! {
                () = tested => {}
                () = keeps => panic!("it was not stopped"),
            }
        });
    }

    #[test]
    fn who_resigns_does_so_for_this_run_only() {
        block_on(async {
            let fixture = Fixture::new();
            let presence = fixture.start();
            presence.enlist().await.unwrap();
            presence.resign().await.unwrap();
            let order = fixture.repository.get(&order_key(4)).await.unwrap().unwrap();
            assert_eq!(NodeOrder::parse(&order.value), Some(NodeOrder::Drain));
            presence.leave().await;
            assert_eq!(fixture.repository.get(&order_key(4)).await.unwrap(), None);
        });
    }
}
