//! Test harness of the services, each test on every store: memory, three Moim nodes in this process, and an
//! etcd when one is installed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_base::Clock;
use moim_base::task::{Scope, Shutdown};
use moim_coord::testing::TestCluster;

use crate::CoordRepository;
use crate::clock::BootClock;
use crate::context::Context;
use crate::etcd::tests::Etcd;
use crate::memory::MemoryRepository;
use crate::repository::{
    BoxFuture, Entry, Lease, LeaseId, RepositoryError, StateRepository, Txn, TxnOutcome, Watch,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A store under test.
pub(crate) struct Store {
    pub(crate) name: &'static str,
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) scope: Scope,
    /// A short lease, and long enough for a busy machine: a process that cannot renew its lease in time
    /// loses it, and rightly.
    pub(crate) ttl: Duration,
}

impl Store {
    /// A node on this store.
    pub(crate) fn node(&self, id: &str) -> Context {
        Context::new(id, Arc::clone(&self.repository), &self.scope)
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("test timeout") })
}

/// Runs a scenario on memory.
pub(crate) fn in_memory<F: Future<Output = ()>>(scenario: impl FnOnce(Store) -> F) {
    block_on(async {
        let scope = Scope::new(Shutdown::new());
        let repository = MemoryRepository::started(Arc::new(BootClock), &scope);
        let ttl = Duration::from_secs(1);
        scenario(Store { name: "memory", repository, scope: scope.clone(), ttl }).await;
        assert!(!scope.shutdown().has_panicked());
    });
}

fn quick(options: &mut moim_coord::CoordinatorOptions) {
    options.group.timers = moim_raft::Timers { heartbeat_ms: 20, election_min_ms: 60, election_max_ms: 100 };
}

/// Runs a scenario on every store, one after the other.
pub(crate) fn everywhere<F: Future<Output = ()>>(scenario: impl Fn(Store) -> F) {
    in_memory(&scenario);
    let cluster = TestCluster::start(3, quick);
    cluster.settle();
    let repository = Arc::new(CoordRepository::new(cluster.node(cluster.follower())));
    block_on(async {
        let scope = Scope::new(Shutdown::new());
        let ttl = Duration::from_secs(4);
        scenario(Store { name: "moim", repository, scope: scope.clone(), ttl }).await;
        assert!(!scope.shutdown().has_panicked());
    });
    if let Some(etcd) = Etcd::start() {
        block_on(async {
            let scope = Scope::new(Shutdown::new());
            let repository = Arc::new(etcd.repository());
            let ttl = Duration::from_secs(4);
            scenario(Store { name: "etcd", repository, scope: scope.clone(), ttl }).await;
            assert!(!scope.shutdown().has_panicked());
        });
    }
}

/// An address without a listener, each returned once, below the kernel's ephemeral port range: a free
/// ephemeral port may be taken later.
pub(crate) fn free_address() -> std::net::SocketAddr {
    static NEXT: std::sync::OnceLock<std::sync::atomic::AtomicU32> = std::sync::OnceLock::new();
    let first = || (std::process::id().wrapping_mul(131) % 20_000).into();
    loop {
        let turn = NEXT.get_or_init(first).fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let port = u16::try_from(12_000 + turn % 20_000).unwrap_or(12_000);
        if let Ok(listener) = std::net::TcpListener::bind(("127.0.0.1", port)) {
            return listener.local_addr().unwrap();
        }
    }
}

/// Polls until the condition returns a value.
pub(crate) async fn until<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let start = BootClock.monotonic_ms();
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(BootClock.monotonic_ms() - start < 30_000, "timeout waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Injected faults of a [`Flaky`] store.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// The store is unreachable.
    pub(crate) unreachable: bool,
    /// Percentage of changes that are applied without a reply; the same percentage is dropped without a
    /// reply.
    pub(crate) lost_percent: u8,
    /// Leases are renewed, but the replies are lost.
    pub(crate) loses_renewal_replies: bool,
    /// Requests block before and after their execution, as in a paused process.
    pub(crate) frozen: bool,
    /// Delay of replies.
    pub(crate) delay_ms: u64,
    /// Additional random delay of each reply.
    pub(crate) jitter_ms: u64,
}

/// A store with injected faults.
pub(crate) struct Flaky {
    inner: Arc<dyn StateRepository>,
    faults: Mutex<Faults>,
}

impl Flaky {
    pub(crate) fn new(inner: Arc<dyn StateRepository>) -> Arc<Self> {
        Arc::new(Self { inner, faults: Mutex::default() })
    }

    pub(crate) fn set(&self, faults: Faults) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    fn faults(&self) -> Faults {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the injected delay.
    async fn delay(&self) {
        let Faults { delay_ms, jitter_ms, .. } = self.faults();
        let delay_ms = delay_ms + if jitter_ms > 0 { fastrand::u64(0..jitter_ms) } else { 0 };
        if delay_ms > 0 {
            tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        }
        while self.faults().frozen {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn check_reachable(&self) -> Result<(), RepositoryError> {
        if self.faults().unreachable { Err(RepositoryError::Unavailable("away".to_owned())) } else { Ok(()) }
    }

    /// True if the change is applied and its reply arrives, false if only applied; an error if it is
    /// dropped.
    fn draw_outcome(&self) -> Result<bool, RepositoryError> {
        self.check_reachable()?;
        let (lossy, dice) = (self.faults().lost_percent, fastrand::u8(0..100));
        if dice < lossy {
            return Ok(false);
        }
        if dice < lossy.saturating_mul(2) { Err(RepositoryError::Unknown) } else { Ok(true) }
    }
}

impl StateRepository for Flaky {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(async move {
            self.check_reachable()?;
            let read = self.inner.get(key).await;
            self.delay().await;
            read
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(async move {
            self.check_reachable()?;
            let read = self.inner.list(prefix).await;
            self.delay().await;
            read
        })
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(async move {
            self.delay().await;
            let is_replied = self.draw_outcome()?;
            let done = self.inner.txn(txn).await;
            self.delay().await;
            if is_replied { done } else { Err(RepositoryError::Unknown) }
        })
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(async move {
            self.check_reachable()?;
            let granted = self.inner.grant(ttl).await;
            self.delay().await;
            granted
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(async move {
            self.check_reachable()?;
            let kept = self.inner.keep_alive(lease).await;
            self.delay().await;
            if self.faults().loses_renewal_replies { Err(RepositoryError::Unknown) } else { kept }
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(async move {
            self.check_reachable()?;
            let revoked = self.inner.revoke(lease).await;
            self.delay().await;
            revoked
        })
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            self.check_reachable()?;
            self.inner.watch(prefix, from_revision).await
        })
    }
}

/// A resource that checks fencing tokens, as every target of a leader's writes should.
#[derive(Default)]
pub(crate) struct Resource {
    state: Mutex<(i64, Vec<(i64, Bytes)>)>,
}

impl Resource {
    /// Rejects tokens older than one it has seen.
    pub(crate) fn write(&self, token: i64, what: impl Into<Bytes>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if token < state.0 {
            return false;
        }
        state.0 = token;
        state.1.push((token, what.into()));
        true
    }

    pub(crate) fn writes(&self) -> Vec<(i64, Bytes)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}
