//! The client and the repository against a real etcd: the one at `MOIM_TEST_ETCD` (`HOST:PORT`), or an
//! installed `etcd`, started for each test on free ports.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_wire_grpc::Code;
use moim_wire_grpc::etcd::{CompactionRequest, PutRequest, RangeRequest};
use tokio::time::{Instant, timeout};

use super::*;
use crate::repository::{Event, Expect, RepositoryError, StateRepository, Swap, WatchGap};
use moim_state::testing::{self, Fixture};

#[test]
fn prefix_end_is_the_next_prefix() {
    let cases: [(&[u8], &[u8]); 5] =
        [(b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0"), (b"/k/", b"/k0")];
    for (prefix, end) in cases {
        assert_eq!(prefix_end(prefix), end, "{prefix:?}");
    }
}

/// An etcd with one member. It ends with this process, also after a crash.
pub(crate) struct Etcd {
    /// `None` for an external or a stopped server. The child is a shell that runs the server and kills it
    /// when its standard input closes, which this process holds open.
    child: Option<Child>,
    dir: Option<tempfile::TempDir>,
    address: String,
    peer: String,
}

impl Etcd {
    /// `None`, with a message on stderr, when this machine has no etcd.
    pub(crate) fn start() -> Option<Self> {
        if let Ok(address) = std::env::var("MOIM_TEST_ETCD") {
            return Some(Self { child: None, dir: None, address, peer: String::new() });
        }
        if binary().is_none() {
            eprintln!("SKIPPED: no etcd is installed, and MOIM_TEST_ETCD names none");
            return None;
        }
        // In memory if possible: the tests exercise its protocol, not its disk.
        let in_memory = free_bytes_in("/dev/shm") >= MEMORY_FOR_ONE * 8;
        let dir = if in_memory { tempfile::tempdir_in("/dev/shm") } else { tempfile::tempdir() }.unwrap();
        let mut etcd = Self { child: None, dir: Some(dir), address: free_address(), peer: free_address() };
        etcd.launch();
        Some(etcd)
    }

    pub(crate) fn launch(&mut self) {
        let (client, peer) = (format!("http://{}", self.address), format!("http://{}", self.peer));
        let dir = self.dir.as_ref().unwrap().path();
        let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        let child = Command::new("sh")
            .args(["-c", "\"$@\" </dev/null & read _; kill -9 $!; wait $!", "sh"])
            .arg(binary().unwrap())
            .args(["--name", "one", "--data-dir", dir.join("data").to_str().unwrap()])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }

    fn client(&self) -> EtcdClient {
        let _runtime = io_runtime().enter();
        EtcdClient::new(EtcdOptions::new([&self.address]), &Scope::new(Shutdown::new()))
    }

    /// A repository with a unique prefix, also on a shared server.
    pub(crate) fn repository(&self) -> EtcdRepository {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        EtcdRepository::new(self.client(), format!("/test/{pid}/{count}/"))
    }

    fn is_own_process(&self) -> bool {
        self.dir.is_some()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// etcd preallocates its WAL in files of 64 MB.
const MEMORY_FOR_ONE: u64 = 256 << 20;

fn free_bytes_in(folder: &str) -> u64 {
    rustix::fs::statvfs(folder).map_or(0, |found| found.f_bavail * found.f_frsize)
}

fn binary() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("etcd")).find(|file| file.is_file())
}

fn free_address() -> String {
    crate::scenario::free_address().to_string()
}

/// Runtime of the connections, independent of the test's runtime.
fn io_runtime() -> &'static tokio::runtime::Handle {
    static HANDLE: OnceLock<tokio::runtime::Handle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        handle
    })
}

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(60), future).await.expect("test timeout") })
}

fn fixture() -> Option<Fixture> {
    let etcd = Etcd::start()?;
    let repository: Arc<dyn StateRepository> = Arc::new(etcd.repository());
    let is_own_process = etcd.is_own_process();
    let etcd = Arc::new(Mutex::new(etcd));
    let (kept, restarted) = (etcd.clone(), repository.clone());
    Some(Fixture {
        repository,
        advance_ms: Box::new(move |ms| {
            let _etcd = &kept;
            // Time is real here, and an etcd expires leases up to half a second late: a lease that must be
            // alive is checked early, one that must have expired is checked late.
            std::thread::sleep(if ms >= 1_000 {
                Duration::from_millis(ms - 500)
            } else {
                Duration::from_secs(1)
            });
        }),
        restart: is_own_process.then(|| {
            let restart = move || {
                let mut etcd = etcd.lock().unwrap();
                etcd.kill();
                etcd.launch();
                restarted.clone()
            };
            Box::new(restart) as testing::Restart
        }),
    })
}

/// The cases for a store with real time whose history ends only by compaction.
macro_rules! conformance {
    ($($case:ident),* $(,)?) => {
        mod conformance {
            $(
                #[test]
                fn $case() {
                    if let Some(fixture) = super::fixture() {
                        moim_state::testing::$case(fixture);
                    }
                }
            )*
        }
    };
}

conformance!(
    key_revisions_follow_its_changes,
    compare_and_swap_succeeds_only_if_precondition_holds,
    transaction_is_atomic_over_many_keys,
    invalid_transaction_is_rejected,
    list_returns_exactly_the_prefix,
    concurrent_compare_and_swaps_lose_no_update,
    lease_expiry_deletes_its_keys,
    revoked_lease_ends_immediately,
    key_put_without_lease_outlives_its_old_lease,
    watch_delivers_every_event_in_order,
    watch_from_past_revision_delivers_history,
    list_then_watch_misses_no_event,
    restart_keeps_keys_revisions_and_leases,
);

async fn put(repository: &EtcdRepository, key: &str, value: &str) -> i64 {
    let value = Some(value.to_owned().into());
    match repository.compare_and_swap(key, Expect::Any, value, None).await {
        Ok(Swap::Done { revision }) => revision,
        other => panic!("put {key}: {other:?}"),
    }
}

#[test]
fn renewed_lease_outlives_its_ttl() {
    let Some(etcd) = Etcd::start() else { return };
    let repository = etcd.repository();
    block_on(async {
        let lease = repository.grant(Duration::from_secs(2)).await.unwrap();
        let txn = crate::Txn::new().put_leased("k", "v", lease.id);
        repository.txn(txn).await.unwrap();
        let until = Instant::now() + lease.ttl * 3;
        while Instant::now() < until {
            assert_eq!(repository.keep_alive(lease.id).await.unwrap(), lease.ttl);
            assert!(repository.get("k").await.unwrap().is_some());
            tokio::time::sleep(lease.ttl / 4).await;
        }
    });
}

#[test]
fn watch_of_compacted_revision_gets_the_compact_revision() {
    let Some(etcd) = Etcd::start() else { return };
    let repository = etcd.repository();
    block_on(async {
        let first = put(&repository, "k", "1").await;
        let last = put(&repository, "k", "2").await;
        repository.client().compact(&CompactionRequest { revision: last, physical: true }).await.unwrap();
        let mut watch = repository.watch("k", first).await.unwrap();
        assert_eq!(watch.next().await, Some(Err(WatchGap::Compacted { oldest: last })));
        assert_eq!(watch.next().await, None);
        let mut watch = repository.watch("k", last).await.unwrap();
        assert_eq!(watch.next().await.unwrap().unwrap().revision(), last);
    });
}

#[test]
fn watch_survives_server_restart_without_missed_events() {
    let Some(mut etcd) = Etcd::start() else { return };
    if !etcd.is_own_process() {
        return;
    }
    let repository = etcd.repository();
    block_on(async {
        let mut from_now = repository.watch("", 0).await.unwrap();
        let first = put(&repository, "a", "0").await;
        let mut seen = vec![];
        for round in 1..4 {
            etcd.kill();
            etcd.launch();
            put(&repository, "a", &round.to_string()).await;
        }
        while seen.len() < 4 {
            match from_now.next().await.unwrap().unwrap() {
                Event::Put(entry) => seen.push((entry.mod_revision, entry.value)),
                other => panic!("{other:?}"),
            }
        }
        let expected: Vec<_> = (0..4).map(|i| (first + i, i.to_string().into())).collect();
        assert_eq!(seen, expected);
    });
}

#[test]
fn write_without_response_is_unknown_and_unreachable_server_is_not() {
    // Accepts connections and requests, and never responds.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = |address: String, wait: u64| {
        let _runtime = io_runtime().enter();
        let mut options = EtcdOptions::new([address]);
        options.call_timeout = Duration::from_millis(wait);
        EtcdClient::new(options, &Scope::new(Shutdown::new()))
    };
    block_on(async {
        let put = PutRequest { key: "k".into(), ..Default::default() };
        let error = client(silent.local_addr().unwrap().to_string(), 300).put(&put).await.unwrap_err();
        assert!(error.may_have_happened(), "{error:?}");
        let unreachable = client(free_address(), 300);
        let error = unreachable.put(&put).await.unwrap_err();
        assert!(matches!(error, EtcdError::Unreachable(_)), "{error:?}");
        assert!(matches!(unreachable.probe().await, Err(EtcdError::Unreachable(_))));
        let repository = EtcdRepository::new(unreachable, "/p/");
        let error = repository.compare_and_swap("k", Expect::Any, None, None).await.unwrap_err();
        assert!(matches!(error, RepositoryError::Unavailable(_)), "{error:?}");
    });
}

#[test]
fn client_fails_over_from_a_silent_server() {
    let Some(etcd) = Etcd::start() else { return };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = {
        let _runtime = io_runtime().enter();
        let mut options = EtcdOptions::new([silent.local_addr().unwrap().to_string(), etcd.address.clone()]);
        options.ping_interval = Duration::from_millis(200);
        options.ping_timeout = Duration::from_millis(200);
        EtcdClient::new(options, &Scope::new(Shutdown::new()))
    };
    block_on(async {
        client.range(&RangeRequest { key: "k".into(), ..Default::default() }).await.unwrap();
    });
}

#[test]
fn server_errors_keep_their_code_and_message() {
    let Some(etcd) = Etcd::start() else { return };
    let client = etcd.client();
    block_on(async {
        let error = client.put(&PutRequest::default()).await.unwrap_err();
        assert_eq!(
            (error.code(), error.to_string().as_str()),
            (Some(Code::InvalidArgument), "etcdserver: key is not provided")
        );
        let lost = client.lease_revoke(12_345).await.unwrap_err();
        assert_eq!((lost.code(), lost.may_have_happened()), (Some(Code::NotFound), false));
        assert_eq!(client.lease_keep_alive(12_345).await.unwrap().ttl, 0);
        assert_eq!(client.lease_time_to_live(12_345, true).await.unwrap().ttl, -1);
        assert_eq!(client.member_list().await.unwrap().members.len(), 1);
        assert!(client.status().await.unwrap().db_size > 0);
        assert!(client.alarms().await.unwrap().alarms.is_empty());
    });
}

#[test]
fn snapshot_stream_ends_with_its_checksum() {
    let Some(etcd) = Etcd::start() else { return };
    let client = etcd.client();
    block_on(async {
        let mut snapshot = client.snapshot().await.unwrap();
        let mut bytes = 0;
        while let Some(piece) = snapshot.next().await.unwrap() {
            bytes += piece.len();
        }
        assert_eq!(bytes % 512, 32, "pages and a checksum of 32 bytes");
    });
}
