//! Tests of the services, each on every store: memory, three Moim nodes in this process, and an etcd when
//! one is installed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_base::Clock;
use moim_base::task::{Scope, Shutdown};
use moim_coord::testing::TestCluster;

use crate::clock::BootClock;
use crate::context::Context;
use crate::embedded::CoordRepository;
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
    /// A short lease, and long enough for a machine with other things to do: whoever is kept from renewing its lease loses it, and rightly.
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
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("an end in time") })
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

/// An address that nobody listens on now, each given out once, below the ports that the kernel takes for outgoing
/// connections: one of those that is free now may not be later.
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

/// Looks again and again until there is something.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let start = BootClock.monotonic_ms();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(BootClock.monotonic_ms() - start < 30_000, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How a [`Flaky`] store behaves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mood {
    /// Nothing gets through.
    pub(crate) away: bool,
    /// This share of the changes happens without an answer, in percent; as many do not happen, without an answer.
    pub(crate) lossy: u8,
    /// Leases are renewed, but nobody hears of it.
    pub(crate) deaf: bool,
    /// Whoever asks waits, before and after: as in a process that is paused.
    pub(crate) frozen: bool,
    /// Answers take this long.
    pub(crate) slow_ms: u64,
    /// And up to this much more, each its own.
    pub(crate) uneven_ms: u64,
}

/// A store whose answers get lost.
pub(crate) struct Flaky {
    inner: Arc<dyn StateRepository>,
    mood: Mutex<Mood>,
}

impl Flaky {
    pub(crate) fn new(inner: Arc<dyn StateRepository>) -> Arc<Self> {
        Arc::new(Self { inner, mood: Mutex::default() })
    }

    pub(crate) fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap_or_else(PoisonError::into_inner) = mood;
    }

    fn mood(&self) -> Mood {
        *self.mood.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as long as the mood says.
    async fn linger(&self) {
        let Mood { slow_ms, uneven_ms, .. } = self.mood();
        let slow_ms = slow_ms + if uneven_ms > 0 { fastrand::u64(0..uneven_ms) } else { 0 };
        if slow_ms > 0 {
            tokio::time::sleep(Duration::from_millis(slow_ms)).await;
        }
        while self.mood().frozen {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn here(&self) -> Result<(), RepositoryError> {
        if self.mood().away { Err(RepositoryError::Unavailable("away".to_owned())) } else { Ok(()) }
    }

    /// Whether a change happens, and whether its answer arrives.
    fn fate(&self) -> Result<bool, RepositoryError> {
        self.here()?;
        let (lossy, dice) = (self.mood().lossy, fastrand::u8(0..100));
        if dice < lossy {
            return Ok(false);
        }
        if dice < lossy.saturating_mul(2) { Err(RepositoryError::Unknown) } else { Ok(true) }
    }
}

impl StateRepository for Flaky {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(async move {
            self.here()?;
            let read = self.inner.get(key).await;
            self.linger().await;
            read
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(async move {
            self.here()?;
            let read = self.inner.list(prefix).await;
            self.linger().await;
            read
        })
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(async move {
            self.linger().await;
            let heard = self.fate()?;
            let done = self.inner.txn(txn).await;
            self.linger().await;
            if heard { done } else { Err(RepositoryError::Unknown) }
        })
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(async move {
            self.here()?;
            let granted = self.inner.grant(ttl).await;
            self.linger().await;
            granted
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(async move {
            self.here()?;
            let kept = self.inner.keep_alive(lease).await;
            self.linger().await;
            if self.mood().deaf { Err(RepositoryError::Unknown) } else { kept }
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(async move {
            self.here()?;
            let revoked = self.inner.revoke(lease).await;
            self.linger().await;
            revoked
        })
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            self.here()?;
            self.inner.watch(prefix, from_revision).await
        })
    }
}

/// A resource that checks fencing tokens, as whatever a leader writes to should.
#[derive(Default)]
pub(crate) struct Resource {
    state: Mutex<(i64, Vec<(i64, Bytes)>)>,
}

impl Resource {
    /// Refuses tokens older than one it has seen.
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
