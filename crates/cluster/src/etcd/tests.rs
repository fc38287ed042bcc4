//! The client and the repository against a real etcd: the one `MOIM_TEST_ETCD` names (`HOST:PORT`), or an
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
use crate::testing::{self, Fixture};

#[test]
fn the_end_of_a_prefix() {
    let cases: [(&[u8], &[u8]); 5] =
        [(b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0"), (b"/k/", b"/k0")];
    for (prefix, end) in cases {
        assert_eq!(prefix_end(prefix), end, "{prefix:?}");
    }
}

/// An etcd of one member. It ends with this process, however that ends.
pub(crate) struct Etcd {
    /// `None` when it is somebody else's, or stopped. A shell that runs the server and kills it at the end of its input,
    /// which we hold.
    child: Option<Child>,
    dir: Option<tempfile::TempDir>,
    address: String,
    peer: String,
}

impl Etcd {
    /// `None`, said loudly, when there is none on this machine.
    pub(crate) fn start() -> Option<Self> {
        if let Ok(address) = std::env::var("MOIM_TEST_ETCD") {
            return Some(Self { child: None, dir: None, address, peer: String::new() });
        }
        if binary().is_none() {
            eprintln!("SKIPPED: no etcd is installed, and MOIM_TEST_ETCD names none");
            return None;
        }
        // In memory where that can be: what is asked of it here is its protocol, not its disk.
        let in_memory = room_in("/dev/shm") >= MEMORY_FOR_ONE * 8;
        let dir = if in_memory { tempfile::tempdir_in("/dev/shm") } else { tempfile::tempdir() }.unwrap();
        let mut etcd = Self { child: None, dir: Some(dir), address: free(), peer: free() };
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

    /// A repository of its own, also on a shared server.
    pub(crate) fn repository(&self) -> EtcdRepository {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        EtcdRepository::new(self.client(), format!("/test/{pid}/{count}/"))
    }

    fn is_ours(&self) -> bool {
        self.dir.is_some()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// It prewrites its log in files of 64 MB.
const MEMORY_FOR_ONE: u64 = 256 << 20;

fn room_in(folder: &str) -> u64 {
    rustix::fs::statvfs(folder).map_or(0, |found| found.f_bavail * found.f_frsize)
}

fn binary() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("etcd")).find(|file| file.is_file())
}

fn free() -> String {
    crate::scenario::free_address().to_string()
}

/// Where connections live, whatever runtime a test runs on.
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
    runtime.block_on(async { timeout(Duration::from_secs(60), future).await.expect("an answer in time") })
}

fn fixture() -> Option<Fixture> {
    let etcd = Etcd::start()?;
    let repository: Arc<dyn StateRepository> = Arc::new(etcd.repository());
    let is_ours = etcd.is_ours();
    let etcd = Arc::new(Mutex::new(etcd));
    let (kept, restarted) = (etcd.clone(), repository.clone());
    Some(Fixture {
        repository,
        advance_ms: Box::new(move |ms| {
            let _etcd = &kept;
            // Time is real here, and an etcd ends leases up to half a second late: what must not have ended
            // yet is looked at early, what must have ended late.
            std::thread::sleep(if ms >= 1_000 {
                Duration::from_millis(ms - 500)
            } else {
                Duration::from_secs(1)
            });
        }),
        restart: is_ours.then(|| {
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

/// The cases that hold for a store whose history ends only by compaction and whose time is real.
macro_rules! conformance {
    ($($case:ident),* $(,)?) => {
        mod conformance {
            $(
                #[test]
                fn $case() {
                    if let Some(fixture) = super::fixture() {
                        crate::testing::$case(fixture);
                    }
                }
            )*
        }
    };
}

conformance!(
    a_key_has_the_revisions_of_its_changes,
    compare_and_swap_wins_only_as_expected,
    a_transaction_compares_many_keys_and_changes_all_or_nothing,
    a_transaction_that_cannot_be_is_refused,
    a_listing_is_the_prefix_and_nothing_else,
    racing_swaps_lose_no_update,
    a_lease_takes_its_keys_when_it_ends,
    a_revoked_lease_is_gone_at_once,
    a_key_put_without_its_lease_outlives_it,
    a_watch_sees_every_change_in_order,
    a_watch_starts_in_the_past,
    a_listing_and_a_watch_leave_no_gap,
    a_restart_keeps_everything,
);

async fn put(repository: &EtcdRepository, key: &str, value: &str) -> i64 {
    let value = Some(value.to_owned().into());
    match repository.compare_and_swap(key, Expect::Any, value, None).await {
        Ok(Swap::Done { revision }) => revision,
        other => panic!("put {key}: {other:?}"),
    }
}

#[test]
fn a_lease_that_is_renewed_outlives_its_time() {
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
fn a_watch_from_before_a_compaction_is_told_where_history_begins() {
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
fn a_watch_outlives_its_server_and_misses_nothing() {
    let Some(mut etcd) = Etcd::start() else { return };
    if !etcd.is_ours() {
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
fn a_change_without_an_answer_is_unknown_and_a_server_that_is_not_there_is_not() {
    // Takes connections and requests, and never answers.
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
        let gone = client(free(), 300);
        let error = gone.put(&put).await.unwrap_err();
        assert!(matches!(error, EtcdError::Unreachable(_)), "{error:?}");
        assert!(matches!(gone.probe().await, Err(EtcdError::Unreachable(_))));
        let repository = EtcdRepository::new(gone, "/p/");
        let error = repository.compare_and_swap("k", Expect::Any, None, None).await.unwrap_err();
        assert!(matches!(error, RepositoryError::Unavailable(_)), "{error:?}");
    });
}

#[test]
fn a_silent_server_is_left_and_another_one_answers() {
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
fn answers_of_the_server_keep_their_code_and_text() {
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
fn a_snapshot_ends_with_its_checksum() {
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
