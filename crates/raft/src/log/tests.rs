//! openraft's own storage suite on the log, and cases it does not cover: crashes, votes beside appends, old flush
//! reports.

mod power;

use std::path::Path;
use std::time::Duration;

use moim_base::clock::SystemClock;
use moim_journal::{DurableSink, RealDisk, StoreOptions};
use openraft::StorageError;
use openraft::storage::RaftLogStorageExt;
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::type_config::TypeConfigExt;
use tempfile::TempDir;

use super::*;
use crate::machine::{Machine, SnapshotWriter, StateMachine};
use crate::snapshot::SnapshotDir;
use crate::types::{Payload, Proposal};

const TAG: u64 = 7;

struct Sink(Logs);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.0.on_durable(advanced);
    }
}

fn open_store(dir: &Path, logs: &Logs) -> Store {
    let fatal: moim_journal::FatalHook = Arc::new(|what, error| panic!("{what}: {error}"));
    let options =
        StoreOptions { min_free_bytes: 0, commit_file_bytes: 4 << 20, fatal, ..StoreOptions::default() };
    let clock = Arc::new(SystemClock::new());
    let store = Store::open(dir, Arc::new(RealDisk), clock, options).unwrap();
    store.set_sink(Arc::new(Sink(logs.clone())));
    store.start();
    store
}

fn place() -> Place {
    Place { group: GroupId(1), voter: VoterId(1), incarnation: 77, folder: "raft/1".to_owned(), tag: TAG }
}

/// A store and the log in it; dropping it is a crash.
struct Opened {
    log: LogStore,
    store: Store,
}

async fn try_open(dir: &Path, place: Place) -> Result<Opened, OpenError> {
    let logs = Logs::default();
    let store = open_store(dir, &logs);
    let log = LogStore::open(&store, &logs, place).await?;
    Ok(Opened { log, store })
}

async fn open(dir: &Path) -> Opened {
    try_open(dir, place()).await.unwrap()
}

struct Nothing;

impl StateMachine for Nothing {
    fn apply(&mut self, _index: u64, _entry: &Bytes) -> Bytes {
        Bytes::new()
    }

    fn snapshot(&mut self) -> SnapshotWriter {
        Box::new(|_| Ok(()))
    }

    fn restore(&mut self, _content: &mut dyn io::Read) -> io::Result<()> {
        Ok(())
    }
}

struct OnDisk;

impl StoreBuilder<Types, LogStore, Machine, (Store, TempDir)> for OnDisk {
    async fn build(&self) -> Result<((Store, TempDir), LogStore, Machine), StorageError<Types>> {
        let dir = tempfile::tempdir().unwrap();
        let opened = open(dir.path()).await;
        let snapshots = SnapshotDir::open(Arc::new(RealDisk), dir.path(), "raft/1/snapshots").unwrap();
        Ok(((opened.store, dir), opened.log, Machine::new(Box::new(Nothing), snapshots)))
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let guarded = async { tokio::time::timeout(Duration::from_secs(120), future).await };
    runtime.block_on(guarded).expect("it ends")
}

fn at(term: u64, index: u64) -> LogId {
    LogId::new_term_index(term, index)
}

fn put(term: u64, index: u64) -> Entry {
    Entry { log_id: at(term, index), payload: Payload::Normal(Proposal(format!("{term}.{index}").into())) }
}

fn puts(term: u64, range: std::ops::Range<u64>) -> Vec<Entry> {
    range.map(|index| put(term, index)).collect()
}

async fn all(log: &mut LogStore) -> Vec<Entry> {
    log.try_get_log_entries(..).await.unwrap()
}

#[test]
fn openrafts_storage_suite_passes_on_the_journal() {
    block_on(Suite::test_all(OnDisk)).unwrap();
}

#[test]
fn entries_and_vote_survive_a_crash() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let vote = Vote::new_committed(3, 1);
        let mut opened = open(dir.path()).await;
        opened.log.save_vote(&vote).await.unwrap();
        opened.log.blocking_append(puts(3, 0..50)).await.unwrap();
        drop(opened);

        let mut opened = open(dir.path()).await;
        assert_eq!(opened.log.read_vote().await.unwrap(), Some(vote));
        assert_eq!(all(&mut opened.log).await, puts(3, 0..50));
        let state = opened.log.get_log_state().await.unwrap();
        assert_eq!(state, LogState { last_purged_log_id: None, last_log_id: Some(at(3, 49)) });
        opened.log.blocking_append(puts(4, 50..52)).await.unwrap();
        assert_eq!(all(&mut opened.log).await.len(), 52);
    });
}

#[test]
fn purge_past_the_log_end_continues_there() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut opened = open(dir.path()).await;
        // A greater term than the snapshot's: the index decides, so the snapshot wins.
        opened.log.blocking_append(puts(5, 0..10)).await.unwrap();
        opened.log.purge(at(3, 999)).await.unwrap();
        let empty = LogState { last_purged_log_id: Some(at(3, 999)), last_log_id: Some(at(3, 999)) };
        assert_eq!(opened.log.get_log_state().await.unwrap(), empty);
        assert_eq!(all(&mut opened.log).await, []);
        drop(opened);

        let mut opened = open(dir.path()).await;
        assert_eq!(opened.log.get_log_state().await.unwrap(), empty);
        opened.log.blocking_append(puts(6, 1_000..1_003)).await.unwrap();
        assert_eq!(all(&mut opened.log).await, puts(6, 1_000..1_003));
        drop(opened);

        let mut opened = open(dir.path()).await;
        assert_eq!(all(&mut opened.log).await, puts(6, 1_000..1_003));
        assert!(opened.log.append(puts(6, 1_004..1_005), IOFlushed::noop()).await.is_err(), "a hole");
    });
}

#[test]
fn purge_interrupted_by_a_crash_is_completed_at_next_start() {
    for (purged, left) in [(4, 5..10), (9, 10..10), (30, 31..31)] {
        block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let mut opened = open(dir.path()).await;
            opened.log.blocking_append(puts(2, 0..10)).await.unwrap();
            opened.log.inner.state().facts.purged = Some(at(2, purged));
            opened.log.write_facts().await.unwrap();
            drop(opened);

            let mut opened = open(dir.path()).await;
            assert_eq!(opened.log.inner.log.start(), offset(purged) + 1);
            assert_eq!(all(&mut opened.log).await, puts(2, left.clone()));
            let last = at(2, purged.max(9));
            let state = LogState { last_purged_log_id: Some(at(2, purged)), last_log_id: Some(last) };
            assert_eq!(opened.log.get_log_state().await.unwrap(), state);
        });
    }
}

#[test]
fn truncated_entries_never_return() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut opened = open(dir.path()).await;
        opened.log.blocking_append(puts(1, 0..20)).await.unwrap();
        opened.log.truncate_after(Some(at(1, 4))).await.unwrap();
        assert_eq!(all(&mut opened.log).await, puts(1, 0..5));
        opened.log.blocking_append(puts(2, 5..8)).await.unwrap();
        let expected = [puts(1, 0..5), puts(2, 5..8)].concat();
        assert_eq!(all(&mut opened.log).await, expected);
        drop(opened);

        let mut opened = open(dir.path()).await;
        assert_eq!(all(&mut opened.log).await, expected);
        opened.log.truncate_after(None).await.unwrap();
        let nothing = LogState { last_purged_log_id: None, last_log_id: None };
        assert_eq!(opened.log.get_log_state().await.unwrap(), nothing);
        opened.log.blocking_append(puts(3, 0..1)).await.unwrap();
        drop(opened);
        assert_eq!(all(&mut open(dir.path()).await.log).await, puts(3, 0..1));
    });
}

/// A log whose disk advances only on request.
async fn open_by_hand(dir: &Path) -> Opened {
    drop(open(dir).await);
    let logs = Logs::default();
    let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
    let store = Store::open(dir, Arc::new(RealDisk), Arc::new(SystemClock::new()), options).unwrap();
    store.set_sink(Arc::new(Sink(logs.clone())));
    let log = LogStore::open(&store, &logs, place()).await.unwrap();
    Opened { log, store }
}

/// Whether a future is ready when asked once.
async fn ready<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(match std::pin::Pin::new(&mut *future).poll(context) {
            std::task::Poll::Ready(done) => Some(done),
            std::task::Poll::Pending => None,
        })
    })
    .await
}

#[test]
fn an_append_is_reported_when_it_is_durable_and_not_before() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut opened = open_by_hand(dir.path()).await;
        let (flushed, mut done) = Types::oneshot();
        opened.log.append(puts(1, 0..3), IOFlushed::signal(flushed)).await.unwrap();
        assert_eq!(all(&mut opened.log).await.len(), 3, "readable at once");
        assert!(ready(&mut done).await.is_none(), "not durable yet");
        // A report for offsets of an older history does not apply to these.
        opened.log.inner.report_flushed();
        assert!(ready(&mut done).await.is_none(), "still not durable");
        assert!(opened.store.pump());
        done.await.unwrap().unwrap();
    });
}

#[test]
fn a_vote_is_written_after_the_appends_before_it_and_returns_when_it_is_durable() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let opened = open_by_hand(dir.path()).await;
        let mut log = opened.log.clone();
        log.append(puts(1, 0..3), IOFlushed::noop()).await.unwrap();
        let votes = opened.log.inner.meta.end();
        let vote = Vote::new(2, 1);
        let mut saving = Box::pin(log.save_vote(&vote));
        assert!(ready(&mut saving).await.is_none());
        assert_eq!(opened.log.inner.meta.end(), votes, "the vote waits for the appends");
        assert!(opened.store.pump());
        assert!(ready(&mut saving).await.is_none());
        assert_eq!(opened.log.inner.meta.end(), votes + 1);
        assert!(opened.log.inner.meta.durable_end() <= votes, "written, not durable");
        assert!(opened.store.pump());
        saving.await.unwrap();
        assert_eq!(opened.log.inner.meta.durable_end(), votes + 1);
    });
}

#[test]
fn a_folder_of_another_voter_or_without_its_vote_is_refused() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut opened = open(dir.path()).await;
        opened.log.blocking_append(puts(1, 0..3)).await.unwrap();
        drop(opened);
        let other = Place { voter: VoterId(2), ..place() };
        let refused = try_open(dir.path(), other).await.err().unwrap();
        assert!(matches!(refused, OpenError::OtherVoter { found: VoterId(1), .. }), "{refused}");

        let opened = open(dir.path()).await;
        opened.store.delete(JournalId { incarnation: 77, part: 1 }).unwrap();
        drop(opened);
        let refused = try_open(dir.path(), place()).await.err().unwrap();
        assert!(matches!(refused, OpenError::Damaged { .. }), "{refused}");
    });
}

#[test]
fn reads_are_the_same_from_memory_and_from_disk_and_bounded_on_request() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let large = |index| Entry {
            log_id: at(1, index),
            payload: Payload::Normal(Proposal(vec![7; READ_BYTES / 3].into())),
        };
        let mut opened = open(dir.path()).await;
        opened.log.blocking_append((0..40).map(large)).await.unwrap();
        assert!(opened.log.inner.state().recent.len() < 40, "not all of it fits into memory");
        for _ in 0..2 {
            let log = &mut opened.log;
            assert_eq!(all(log).await, (0..40).map(large).collect::<Vec<_>>());
            assert_eq!(log.try_get_log_entries(38..=39).await.unwrap(), [large(38), large(39)]);
            assert_eq!(log.limited_get_log_entries(0, 40).await.unwrap().len(), 2);
            assert_eq!(log.limited_get_log_entries(30, 40).await.unwrap().len(), 2);
            let streamed: Vec<_> =
                futures_util::TryStreamExt::try_collect(log.entries_stream(3..40).await).await.unwrap();
            assert_eq!(streamed, (3..40).map(large).collect::<Vec<_>>());
            drop(opened);
            opened = open(dir.path()).await;
        }
    });
}

#[test]
fn old_votes_are_trimmed_away() {
    block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut opened = open(dir.path()).await;
        for term in 1..=600 {
            opened.log.save_vote(&Vote::new(term, 1)).await.unwrap();
        }
        assert!(opened.log.inner.meta.start() > 300);
        drop(opened);
        assert_eq!(open(dir.path()).await.log.read_vote().await.unwrap(), Some(Vote::new(600, 1)));
    });
}
