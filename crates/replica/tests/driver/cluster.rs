//! Three nodes in one process: real journals in temporary directories, real connections, records in memory. The test
//! acts as the controller.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use moim_base::{BrokerId, Clock, LeaderEpoch, Offset, SystemClock, TopicId};
use moim_journal::{
    Append, AppendError, DurableSink, Frame, Framing, Journal, JournalId, JournalOptions, PlainFraming,
    RealDisk, Store, StoreOptions,
};
use moim_replica::controller::batch::pack;
use moim_replica::driver::DriverTuning;
use moim_replica::keys;
use moim_replica::machine::{InstallError, Snapshot};
use moim_replica::message::Sender;
use moim_replica::transition::Draft;
use moim_replica::{
    AckError, BrokerEpoch, Change, Dialler, DirectoryId, Driver, DriverParts, Durability, InSync,
    LeaderTuning, Owner, PartitionId, PartitionState, Replicated, ResetPolicy, Versioned,
};
use moim_state::{BoxFuture, Compare, Event, MemoryRepository, StateRepository, Txn, TxnOutcome};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};

pub(crate) const ID: PartitionId = PartitionId { topic: TopicId(5), index: 0 };
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a test that must complete.
pub(crate) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(3 * PATIENCE, test).await }).expect("it ends");
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waits = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, waits).await.is_ok(), "{what} did not happen");
}

/// The listen addresses of all nodes.
#[derive(Default)]
struct Net(Mutex<HashMap<BrokerId, std::net::SocketAddr>>);

impl Dialler for Net {
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        let address = self.0.lock().unwrap().get(&node).copied();
        Box::pin(async move {
            let stream = TcpStream::connect(address.ok_or(io::ErrorKind::NotConnected)?).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Socket>)
        })
    }
}

/// The callbacks that an owner received.
pub(crate) struct RecordingOwner {
    journal: Arc<Journal>,
    pub(crate) leads: AtomicI32,
    pub(crate) follows: AtomicI32,
    pub(crate) high_watermark: AtomicI64,
    pub(crate) appended: AtomicUsize,
    pub(crate) truncations: AtomicUsize,
    pub(crate) installs: AtomicUsize,
    pub(crate) under_min: AtomicUsize,
    pub(crate) ended: AtomicUsize,
    pub(crate) dropped: AtomicUsize,
}

impl RecordingOwner {
    fn new(journal: Arc<Journal>) -> Self {
        Self {
            journal,
            leads: AtomicI32::new(-1),
            follows: AtomicI32::new(-1),
            high_watermark: AtomicI64::new(0),
            appended: AtomicUsize::new(0),
            truncations: AtomicUsize::new(0),
            installs: AtomicUsize::new(0),
            under_min: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            dropped: AtomicUsize::new(0),
        }
    }
}

impl Owner for RecordingOwner {
    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset) {
        self.follows.store(-1, Ordering::SeqCst);
        self.leads.store(epoch.0, Ordering::SeqCst);
        self.high_watermark.store(high_watermark.0, Ordering::SeqCst);
    }

    fn on_follow(&self, leader: BrokerId, _epoch: LeaderEpoch) {
        self.leads.store(-1, Ordering::SeqCst);
        self.follows.store(leader.0, Ordering::SeqCst);
    }

    fn on_idle(&self) {
        self.leads.store(-1, Ordering::SeqCst);
        self.follows.store(-1, Ordering::SeqCst);
    }

    fn on_leadership_ended(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    fn on_under_min_isr(&self) {
        self.under_min.fetch_add(1, Ordering::SeqCst);
    }

    fn on_high_watermark(&self, high_watermark: Offset) {
        let before = self.high_watermark.swap(high_watermark.0, Ordering::SeqCst);
        let cut = self.truncations.load(Ordering::SeqCst) > 0;
        assert!(high_watermark.0 >= before || cut, "a high watermark went back");
    }

    fn on_appended(&self, frames: &[Frame], bytes: &Bytes) {
        assert_eq!(bytes.len(), frames.iter().map(|frame| frame.len).sum::<usize>());
        self.appended.fetch_add(frames.len(), Ordering::SeqCst);
    }

    fn on_cut(&self, end: Offset) {
        assert_eq!(end.0, self.journal.end());
        self.truncations.fetch_add(1, Ordering::SeqCst);
    }

    /// The state is just its end offset.
    fn snapshot(&self) -> Option<Snapshot> {
        let end = self.high_watermark.load(Ordering::SeqCst);
        let last_epoch = LeaderEpoch(self.journal.epoch_before(end)?);
        let mut bytes = vec![7; 3 << 20];
        bytes[..8].copy_from_slice(&end.to_be_bytes());
        Some(Snapshot { end: Offset(end), last_epoch, bytes: bytes.into() })
    }

    fn install(&self, snapshot: Snapshot) -> Result<(), InstallError> {
        assert_eq!(snapshot.bytes.len(), 3 << 20);
        assert_eq!(snapshot.bytes[..8], snapshot.end.0.to_be_bytes());
        self.installs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn on_drop(&self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

struct Sink(Arc<Driver>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.0.on_durable(advanced);
    }
}

type Replicas = HashMap<PartitionId, (Arc<Replicated>, Arc<RecordingOwner>)>;

/// A running node.
pub(crate) struct Running {
    pub(crate) store: Store,
    pub(crate) driver: Arc<Driver>,
    pub(crate) replicas: Replicas,
    pub(crate) run: Sender,
    shutdown: Shutdown,
}

/// How the journals of a cluster are opened.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) policy: ResetPolicy,
    pub(crate) durability: Durability,
    pub(crate) partitions: u32,
    pub(crate) lag_ms: u64,
    /// The node whose disk is full.
    pub(crate) full: Option<i32>,
}

impl Default for Kind {
    fn default() -> Self {
        Self {
            policy: ResetPolicy::LogStart,
            durability: Durability::Fsync,
            partitions: 1,
            lag_ms: 10_000,
            full: None,
        }
    }
}

/// The nodes, numbered from 1.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Option<Running>>,
    /// After the nodes: their disk threads write there until they have stopped.
    dirs: Vec<TempDir>,
    pub(crate) repository: Arc<dyn StateRepository>,
    net: Arc<Net>,
    clock: Arc<dyn Clock>,
    kind: Kind,
}

impl Cluster {
    /// Three nodes; node 1 leads the first partition.
    pub(crate) async fn start(kind: Kind) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let mut cluster = Self {
            dirs: (0..3).map(|_| TempDir::new().unwrap()).collect(),
            nodes: (0..3).map(|_| None).collect(),
            repository: Arc::new(MemoryRepository::new(clock.clone())),
            net: Arc::default(),
            clock,
            kind,
        };
        for node in 1..=3 {
            cluster.up(node).await;
        }
        for index in 0..kind.partitions {
            let id = PartitionId { index, ..ID };
            let isr = (0..3).map(|at| cluster.member(1 + (index as i32 + at) % 3)).collect();
            let state = PartitionState::new(isr, 2, kind.durability);
            cluster.write(Change::create(id, state, None)).await;
        }
        cluster
    }

    pub(crate) fn node(&self, node: i32) -> &Running {
        self.nodes[node as usize - 1].as_ref().expect("it runs")
    }

    pub(crate) fn replica_of(&self, node: i32, id: PartitionId) -> &Arc<Replicated> {
        &self.node(node).replicas[&id].0
    }

    pub(crate) fn replica(&self, node: i32) -> &Arc<Replicated> {
        self.replica_of(node, ID)
    }

    pub(crate) fn owner(&self, node: i32) -> &Arc<RecordingOwner> {
        &self.node(node).replicas[&ID].1
    }

    pub(crate) fn journal(&self, node: i32) -> &Arc<Journal> {
        self.replica(node).journal()
    }

    /// Flips a byte of a replica's first segment, and lets the scrub find it.
    pub(crate) fn damage(&self, node: i32) {
        let folder = self.dirs[node as usize - 1].path().join("queue/t/Partition-0");
        let mut segments: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        segments.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
        segments.sort();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&segments[0]).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 5_000).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 5_000).unwrap();
        assert!(!self.node(node).store.scrub_step(u64::MAX).damage.is_empty());
        self.node(node).driver.on_damaged(ID);
    }

    pub(crate) fn member(&self, node: i32) -> InSync {
        let run = self.node(node).run;
        InSync { node: run.node, epoch: run.epoch, directory: run.directory }
    }

    /// Starts a node on its existing directory, and registers it.
    pub(crate) async fn up(&mut self, node: i32) {
        self.up_with(node, |_| ()).await;
    }

    /// The same, with a change of the first partition's journal before the node registers.
    pub(crate) async fn up_with(&mut self, node: i32, prepare: impl FnOnce(&Journal)) {
        let shutdown = Shutdown::new();
        let scope = Scope::new(shutdown.clone());
        let leader = LeaderTuning {
            lag_ms: self.kind.lag_ms,
            disconnect_grace_ms: 50,
            stall_ms: self.kind.lag_ms,
            retry_ms: 20,
        };
        let driver = Driver::start(DriverParts {
            node: BrokerId(node),
            repository: self.repository.clone(),
            dialler: self.net.clone(),
            clock: self.clock.clone(),
            scope: scope.clone(),
            tuning: DriverTuning { leader, tick_ms: 10, ..DriverTuning::default() },
        });
        let (store, replicas) = self.open(node, &driver);
        prepare(replicas[&ID].0.journal());
        self.listen(node, &driver, &scope).await;
        let others: Vec<BrokerId> = (1..=3).filter(|other| *other != node).map(BrokerId).collect();
        driver.set_peers(&others);
        let run = self.register(node).await;
        driver.set_run(run);
        scope.spawn("watch", watch(self.repository.clone(), driver.clone(), shutdown.clone()));
        self.nodes[node as usize - 1] = Some(Running { store, driver, replicas, run, shutdown });
    }

    fn open(&self, node: i32, driver: &Arc<Driver>) -> (Store, Replicas) {
        let dir: &Path = self.dirs[node as usize - 1].path();
        let options = StoreOptions {
            commit_file_bytes: 4 << 20,
            first_commit_file_bytes: 1 << 20,
            min_free_bytes: if self.kind.full == Some(node) { u64::MAX } else { 0 },
            recent_bytes: 512 << 10,
            bypass_bytes: 64 << 10,
            ..StoreOptions::default()
        };
        let store = Store::open(dir, Arc::new(RealDisk), self.clock.clone(), options).unwrap();
        store.set_sink(Arc::new(Sink(driver.clone())));
        store.start();
        let mut replicas = HashMap::new();
        for index in 0..self.kind.partitions {
            let id = PartitionId { index, ..ID };
            let options = JournalOptions {
                folder: format!("queue/t/Partition-{index}"),
                framing: Arc::new(PlainFraming),
                durability: match self.kind.durability {
                    Durability::Fsync => moim_journal::Durability::Fsync,
                    Durability::Replicated => moim_journal::Durability::Replicated,
                },
                segment_bytes: 1 << 20,
                tag: u64::from(index),
            };
            let journal = store.journal(JournalId { incarnation: 5, part: index }, options).unwrap();
            let owner = Arc::new(RecordingOwner::new(journal.clone()));
            let replica = driver.attach(id, journal, self.kind.policy, self.kind.durability, owner.clone());
            replicas.insert(id, (replica, owner));
        }
        (store, replicas)
    }

    async fn listen(&self, node: i32, driver: &Arc<Driver>, scope: &Scope) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.net.0.lock().unwrap().insert(BrokerId(node), listener.local_addr().unwrap());
        let (driver, shutdown) = (driver.clone(), scope.shutdown().clone());
        scope.spawn("listen", async move {
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let (stream, _) = accepted.unwrap();
                        stream.set_nodelay(true).unwrap();
                        driver.accept(Box::new(stream));
                    }
                    () = shutdown.stopped() => return,
                }
            }
        });
    }

    /// A new run of a node: its member key is deleted and created.
    pub(crate) async fn register(&self, node: i32) -> Sender {
        let key = keys::member(BrokerId(node));
        self.repository.txn(Txn::new().delete(key.clone())).await.unwrap();
        let put = Txn::new().when(Compare::Absent(key.clone())).put(key, "{}");
        let TxnOutcome::Done { revision } = self.repository.txn(put).await.unwrap() else { panic!("taken") };
        Sender { node: BrokerId(node), epoch: BrokerEpoch(revision), directory: DirectoryId(node as u64) }
    }

    /// Kills a node: its connections break, nothing is flushed.
    pub(crate) async fn kill(&mut self, node: i32) {
        let running = self.nodes[node as usize - 1].take().expect("it runs");
        self.net.0.lock().unwrap().remove(&BrokerId(node));
        running.shutdown.stop();
        // Tasks end on this runtime, the disk thread on its own.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        drop(running);
    }

    pub(crate) async fn write(&self, change: Change) -> i64 {
        let batch = pack(vec![change], None).remove(0);
        match self.repository.txn(batch.txn()).await.unwrap() {
            TxnOutcome::Done { revision } => revision,
            conflict => panic!("{conflict:?}"),
        }
    }

    pub(crate) async fn record(&self) -> Versioned<PartitionState> {
        let entry = self.repository.get(&keys::partition(ID)).await.unwrap().unwrap();
        Versioned { revision: entry.mod_revision, value: PartitionState::decode(&entry.value).unwrap() }
    }

    /// Changes the record as the controller would, and retries on conflicts.
    pub(crate) async fn change(&self, change: impl Fn(&mut Draft)) {
        for _ in 0..50 {
            let mut draft = Draft::new(&self.record().await);
            change(&mut draft);
            let batch = pack(vec![draft.finish(ID).expect("something changes")], None).remove(0);
            match self.repository.txn(batch.txn()).await.unwrap() {
                TxnOutcome::Done { .. } => return,
                TxnOutcome::Conflict { .. } => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        panic!("the record never stood still");
    }

    pub(crate) async fn in_sync(&self, nodes: &[i32]) {
        let waits = async {
            loop {
                let record = self.record().await;
                let mut isr: Vec<(i32, i64)> =
                    record.value.isr.iter().map(|member| (member.node.0, member.epoch.0)).collect();
                isr.sort_unstable();
                let there = |node: &i32| {
                    let running = self.nodes[*node as usize - 1].as_ref();
                    running.map_or((*node, 0), |running| (*node, running.run.epoch.0))
                };
                if isr == nodes.iter().map(there).collect::<Vec<_>>() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let done = tokio::time::timeout(PATIENCE, waits).await;
        assert!(done.is_ok(), "{nodes:?} are not in sync: {:?}", self.record().await);
    }

    /// Appends on a leader; `None` if its disk must catch up first.
    fn try_append(&self, node: i32, id: PartitionId, payload: &[u8]) -> Result<Option<i64>, AckError> {
        let replica = self.replica_of(node, id);
        replica.lead(true, |epoch| {
            let journal = replica.journal();
            let (base, epoch) = (journal.end(), epoch.0);
            let body = PlainFraming::encode(base, base, epoch, 1, payload);
            let append = Append { base, last: base, epoch, max_timestamp_ms: 1, prefix: &[], body: &body };
            match journal.append(append) {
                Ok(()) => Some(base),
                Err(AppendError::Busy) => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    /// Appends one frame of several offsets, like a batch of several records.
    pub(crate) fn append_batch(&self, node: i32, records: i64, payload: &[u8]) -> i64 {
        let replica = self.replica(node);
        let appended = replica.lead(true, |epoch| {
            let journal = replica.journal();
            let (base, epoch) = (journal.end(), epoch.0);
            let last = base + records - 1;
            let body = PlainFraming::encode(base, last, epoch, 1, payload);
            journal
                .append(Append { base, last, epoch, max_timestamp_ms: 1, prefix: &[], body: &body })
                .unwrap();
            base
        });
        appended.unwrap()
    }

    /// Deletes the directory of a stopped node.
    pub(crate) fn wipe(&mut self, node: i32) {
        self.dirs[node as usize - 1] = TempDir::new().unwrap();
    }

    pub(crate) fn append_to(&self, node: i32, id: PartitionId, payload: &[u8]) -> Result<i64, AckError> {
        Ok(self.try_append(node, id, payload)?.expect("the disk keeps up"))
    }

    pub(crate) fn append(&self, node: i32, payload: &[u8]) -> Result<i64, AckError> {
        self.append_to(node, ID, payload)
    }

    /// Appends many records, as fast as the disk accepts them.
    pub(crate) async fn fill(&self, node: i32, count: usize, bytes: usize) {
        let mut done = 0;
        while done < count {
            match self.try_append(node, ID, &vec![done as u8; bytes]).unwrap() {
                Some(_) => done += 1,
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }

    pub(crate) async fn leads(&self, node: i32) {
        until("leading", || self.replica(node).leader_epoch().is_some()).await;
    }

    /// Waits until a node's high watermark reaches an offset.
    pub(crate) async fn committed(&self, node: i32, offset: i64) {
        let replica = self.replica(node);
        until(&format!("a commit of {offset} on {node}"), || replica.high_watermark().0 >= offset).await;
    }

    /// Waits until two logs are equal, byte for byte.
    pub(crate) async fn same(&self, one: i32, two: i32) {
        let (one, two) = (self.journal(one), self.journal(two));
        until("catching up", || one.end() == two.end()).await;
        assert_eq!(frames(one), frames(two));
    }
}

pub(crate) fn frames(journal: &Journal) -> Vec<(i64, i32, Bytes)> {
    let mut all = Vec::new();
    let walk = &mut |frame: &Frame, bytes: &[u8]| {
        assert!(PlainFraming.verify(bytes));
        all.push((frame.base, frame.epoch, Bytes::copy_from_slice(bytes)));
        true
    };
    journal.for_each_frame(journal.start(), journal.end(), walk).unwrap();
    all
}

/// Delivers records to a driver: a listing, then a watch.
async fn watch(repository: Arc<dyn StateRepository>, driver: Arc<Driver>, shutdown: Shutdown) {
    let (revision, entries) = repository.list(keys::PARTITIONS).await.unwrap();
    let feed = |key: &str, revision: i64, value: &[u8]| {
        let record = Versioned { revision, value: PartitionState::decode(value).unwrap() };
        driver.on_record(keys::parse_partition(key).unwrap(), record);
    };
    entries.iter().for_each(|entry| feed(&entry.key, entry.mod_revision, &entry.value));
    let mut watch = repository.watch(keys::PARTITIONS, revision + 1).await.unwrap();
    loop {
        tokio::select! {
            event = watch.next() => match event.unwrap().unwrap() {
                Event::Put(entry) => feed(&entry.key, entry.mod_revision, &entry.value),
                Event::Delete { key, .. } => driver.on_deleted(keys::parse_partition(&key).unwrap()),
            },
            () = shutdown.stopped() => return,
        }
    }
}
