//! The repository suite on a journal on a real disk, and the failure modes of the log.

use std::path::Path;
use std::time::Duration;

use moim_base::ManualClock;
use moim_journal::disk::{Fault, SimDisk, Survival};
use moim_journal::{DurableSink, RealDisk, StoreOptions};

use super::*;
use crate::repository::{StateRepository, Txn, TxnOutcome};
use crate::testing::Fixture;

const TAG: u64 = 7;
/// Small enough that the suite crosses many snapshots.
const SNAPSHOT_BYTES: usize = 512;

struct Running {
    store: Store,
    repository: Arc<LocalRepository>,
}

/// Stops the disk thread before the folder is deleted.
impl Drop for Running {
    fn drop(&mut self) {
        self.store.close().unwrap();
    }
}

/// A node and its disk, dropped in this order.
struct Node {
    running: Option<Running>,
    dir: tempfile::TempDir,
}

struct Sink(Arc<LocalRepository>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        for (tag, end) in advanced {
            assert_eq!(*tag, TAG);
            self.0.on_durable(*end);
        }
    }
}

fn open_store(dir: &Path, clock: &Arc<ManualClock>) -> Store {
    let clock: Arc<dyn Clock> = clock.clone();
    let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
    Store::open(dir, Arc::new(RealDisk), clock, options).unwrap()
}

fn start(dir: &Path, clock: &Arc<ManualClock>, with_sink: bool) -> Running {
    let store = open_store(dir, clock);
    let repository =
        Arc::new(LocalRepository::open_with(&store, clock.clone(), TAG, SNAPSHOT_BYTES).unwrap());
    if with_sink {
        store.set_sink(Arc::new(Sink(repository.clone())));
    }
    store.start();
    Running { store, repository }
}

fn fixture_with(with_sink: bool) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::at(1_000));
    let running = start(dir.path(), &clock, with_sink);
    let repository = running.repository.clone();
    let node = Arc::new(Mutex::new(Node { running: Some(running), dir }));
    let (ticked, ticking) = (node.clone(), clock.clone());
    Fixture {
        repository,
        advance_ms: Box::new(move |ms| {
            ticking.advance_ms(ms);
            ticked.lock().unwrap().running.as_ref().unwrap().repository.tick().unwrap();
        }),
        restart: Some(Box::new(move || {
            let mut node = node.lock().unwrap();
            node.running = None;
            let running = start(node.dir.path(), &clock, with_sink);
            let repository = running.repository.clone();
            node.running = Some(running);
            repository
        })),
    }
}

fn fixture() -> Fixture {
    fixture_with(true)
}

crate::conformance_tests!(fixture);

#[test]
fn replies_arrive_without_a_durable_sink() {
    crate::testing::list_then_watch_misses_no_event(fixture_with(false));
    crate::testing::watch_delivers_every_event_in_order(fixture_with(false));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

/// A store whose disk thread runs only when it is pumped: nothing becomes durable unintentionally.
#[test]
fn no_reply_or_event_before_durability() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::at(1_000));
    let store = open_store(dir.path(), &clock);
    let repository = Arc::new(LocalRepository::open(&store, clock, TAG).unwrap());
    store.set_sink(Arc::new(Sink(repository.clone())));
    runtime().block_on(async {
        let mut watch = repository.watch("", 0).await.unwrap();
        let mut change = repository.txn(Txn::new().put("k", "1"));
        let mut read = repository.get("k");
        let mut seen = Box::pin(watch.next());
        let soon = Duration::from_millis(30);
        assert!(tokio::time::timeout(soon, &mut change).await.is_err(), "acknowledged before it was durable");
        assert!(tokio::time::timeout(soon, &mut read).await.is_err(), "read before it was durable");
        assert!(tokio::time::timeout(soon, &mut seen).await.is_err(), "watched before it was durable");
        while store.pump() {}
        assert_eq!(change.await.unwrap(), TxnOutcome::Done { revision: 2 });
        assert_eq!(read.await.unwrap().unwrap().mod_revision, 2);
        assert_eq!(seen.await.unwrap().unwrap().revision(), 2);
    });
}

#[test]
fn log_is_trimmed_by_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::at(1_000));
    let running = start(dir.path(), &clock, true);
    runtime().block_on(async {
        for i in 0..200 {
            running.repository.txn(Txn::new().put("k", format!("{i}"))).await.unwrap();
        }
    });
    let journal = running.store.journals();
    assert_eq!(journal, [(JOURNAL, FOLDER.to_owned())]);
    let log = &running.repository.log().journal;
    assert!(log.start() > 0, "starts at {} of {}", log.start(), log.end());
    assert!(log.end() - log.start() < 100, "keeps {} frames", log.end() - log.start());
}

/// Makes changes on a simulated disk until the power fails at its `operation`th operation. Returns the disk,
/// the number of acknowledged changes, and the list after each attempted change.
fn change_until_power_loss(operation: u64) -> (SimDisk, usize, Vec<(i64, Vec<String>)>) {
    let disk = SimDisk::new();
    disk.set_fault(Some((operation, Fault::PowerCut)));
    let (mut acknowledged, mut history) = (0, vec![(1, Vec::new())]);
    let Ok((store, repository)) = open_on(&disk) else { return (disk, acknowledged, history) };
    let mut model = std::collections::BTreeMap::new();
    for i in 0..20 {
        let (put, delete) = (format!("k{}", i % 5), format!("k{}", (i + 2) % 5));
        model.insert(put.clone(), format!("{put}={i}"));
        model.remove(&delete);
        history.push((i + 2, model.values().cloned().collect()));
        let mut change = repository.txn(Txn::new().put(put, i.to_string()).delete(delete));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        if change.as_mut().poll(&mut context).is_ready() {
            break; // rejected: nothing is durable before the disk has worked
        }
        while store.pump() {}
        match change.as_mut().poll(&mut context) {
            std::task::Poll::Ready(Ok(_)) => acknowledged += 1,
            _ => break,
        }
    }
    (disk, acknowledged, history)
}

fn open_on(disk: &SimDisk) -> Result<(Store, Arc<LocalRepository>), String> {
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::at(1_000));
    let options = StoreOptions {
        commit_file_bytes: 64 << 10,
        first_commit_file_bytes: 64 << 10,
        bypass_bytes: 16 << 10,
        min_free_bytes: 0,
        fatal: Arc::new(|_, _| {}),
        ..StoreOptions::default()
    };
    let store = Store::open(Path::new("/data"), Arc::new(disk.clone()), clock.clone(), options);
    let store = store.map_err(|error| error.to_string())?;
    let repository =
        LocalRepository::open_with(&store, clock, TAG, 128).map_err(|error| error.to_string())?;
    let repository = Arc::new(repository);
    store.set_sink(Arc::new(Sink(repository.clone())));
    Ok((store, repository))
}

#[test]
fn acknowledged_changes_survive_power_loss_at_any_operation() {
    let runtime = runtime();
    let _context = runtime.enter();
    let whole = change_until_power_loss(u64::MAX);
    assert_eq!(whole.1, 20);
    let mut partial = 0;
    for operation in 0..whole.0.operations() {
        let (disk, acknowledged, history) = change_until_power_loss(operation);
        partial += usize::from(acknowledged > 0 && acknowledged < 20);
        for (seed, survival) in
            [Survival::Nothing, Survival::Everything, Survival::Random].into_iter().enumerate()
        {
            let disk = disk.crash(survival, seed as u64);
            let (_store, repository) = open_on(&disk).unwrap();
            let (revision, entries) = runtime.block_on(repository.list("")).unwrap();
            let texts: Vec<String> = entries
                .iter()
                .map(|entry| format!("{}={}", entry.key, String::from_utf8_lossy(&entry.value)))
                .collect();
            let found = history.iter().position(|state| *state == (revision, texts.clone()));
            let at = format!("operation {operation}, seed {seed}, {acknowledged} acknowledged");
            let found = found.unwrap_or_else(|| panic!("{at}: never was {revision} {texts:?}"));
            assert!(found >= acknowledged, "{at}: only {found} are there");
        }
    }
    assert!(partial > 10, "the power went {partial} times between two changes");
}
