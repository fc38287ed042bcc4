//! The connection to another node, for all partitions that this node follows there.
//!
//! Replicas queue their fetches and reports (the newest wins); the connection's task sends them, many at a time, and
//! delivers the answers. Nothing is queued while there is no connection: after a connect every replica that follows
//! that node fetches again, so that whatever was lost with the old connection is sent again.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hashbrown::HashMap;
use moim_base::BrokerId;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::frame::{ToFollower, ToLeader};
use super::stream::{Stream, Turn};
use super::throttle::Throttle;
use super::{Replicated, Shared, lock};
use crate::controller::LogEnd;
use crate::machine::SnapshotFetch;
use crate::message::{Fetch, Report, Sender};
use crate::types::{BrokerEpoch, PartitionId};

/// The first pause before a reconnect.
const PAUSE: Duration = Duration::from_millis(20);
/// Above this many unsent bytes, nothing more is encoded for the socket.
const UNSENT: usize = 1 << 20;
/// The maximum number of log end requests in flight.
const MAX_LOG_END_REQUESTS: usize = 64;
/// The timeout of a log end request.
const LOG_END_TIMEOUT: Duration = Duration::from_secs(3);

/// A log end request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("node unreachable")]
pub struct Unreachable;

/// The log ends of a node, and its run.
type LogEnds = (BrokerEpoch, Vec<(PartitionId, Option<LogEnd>)>);

/// The connection to one node, established or not.
pub(super) struct Outbound {
    node: BrokerId,
    outbox: Mutex<Outbox>,
    notify: Notify,
    /// 0 while there is a connection.
    lost_since_ms: AtomicU64,
}

/// Queued messages. Invariant: empty while there is no connection.
#[derive(Default)]
struct Outbox {
    connected: bool,
    closed: bool,
    reconnect: bool,
    fetches: HashMap<PartitionId, (Arc<Replicated>, u64, Fetch)>,
    reports: HashMap<PartitionId, (Arc<Replicated>, Report)>,
    snapshots: HashMap<PartitionId, (Arc<Replicated>, SnapshotFetch)>,
    released_slots: Vec<PartitionId>,
    log_end_requests: Vec<(Vec<PartitionId>, oneshot::Sender<LogEnds>)>,
}

impl Outbound {
    pub(super) fn new(node: BrokerId, now_ms: u64) -> Self {
        Self {
            node,
            outbox: Mutex::default(),
            notify: Notify::new(),
            lost_since_ms: AtomicU64::new(now_ms.max(1)),
        }
    }

    pub(super) fn node(&self) -> BrokerId {
        self.node
    }

    pub(super) fn lost_since_ms(&self) -> Option<u64> {
        Some(self.lost_since_ms.load(Ordering::Acquire)).filter(|since| *since > 0)
    }

    pub(super) fn fetch(&self, replica: &Arc<Replicated>, id: u64, fetch: Fetch) {
        self.enqueue(|outbox| {
            // A fetch includes the disk progress.
            outbox.reports.remove(&replica.id());
            outbox.fetches.insert(replica.id(), (Arc::clone(replica), id, fetch));
        });
    }

    pub(super) fn report(&self, replica: &Arc<Replicated>, report: Report) {
        self.enqueue(|outbox| {
            outbox.reports.insert(replica.id(), (Arc::clone(replica), report));
        });
    }

    pub(super) fn fetch_snapshot(&self, replica: &Arc<Replicated>, fetch: SnapshotFetch) {
        self.enqueue(|outbox| {
            outbox.snapshots.insert(replica.id(), (Arc::clone(replica), fetch));
        });
    }

    pub(super) fn forget(&self, id: PartitionId) {
        self.enqueue(|outbox| {
            outbox.fetches.remove(&id);
            outbox.reports.remove(&id);
            outbox.snapshots.remove(&id);
            outbox.released_slots.push(id);
        });
    }

    pub(super) async fn ask_log_ends(&self, partitions: Vec<PartitionId>) -> Result<LogEnds, Unreachable> {
        let (sender, answer) = oneshot::channel();
        self.enqueue(|outbox| {
            if outbox.log_end_requests.len() < MAX_LOG_END_REQUESTS {
                outbox.log_end_requests.push((partitions, sender));
            }
        });
        match tokio::time::timeout(LOG_END_TIMEOUT, answer).await {
            Ok(Ok(ends)) => Ok(ends),
            Ok(Err(_)) | Err(_) => Err(Unreachable),
        }
    }

    /// Held-back fetches may be sendable now.
    pub(super) fn reevaluate_held(&self) {
        self.notify.notify_one();
    }

    /// Closes the connection and establishes a new one.
    pub(super) fn reconnect(&self) {
        lock(&self.outbox).reconnect = true;
        self.notify.notify_one();
    }

    /// Closes the connection for good.
    pub(super) fn close(&self) {
        lock(&self.outbox).closed = true;
        self.notify.notify_one();
    }

    fn enqueue(&self, enqueue: impl FnOnce(&mut Outbox)) {
        let mut outbox = lock(&self.outbox);
        if outbox.connected {
            enqueue(&mut outbox);
            drop(outbox);
            self.notify.notify_one();
        }
    }

    fn on_connected(&self) {
        let mut outbox = lock(&self.outbox);
        outbox.connected = true;
        outbox.reconnect = false;
        self.lost_since_ms.store(0, Ordering::Release);
    }

    fn on_lost(&self, now_ms: u64) {
        let mut outbox = lock(&self.outbox);
        *outbox = Outbox { closed: outbox.closed, ..Outbox::default() };
        self.lost_since_ms.store(now_ms.max(1), Ordering::Release);
    }

    fn is_closed(&self) -> bool {
        lock(&self.outbox).closed
    }
}

/// Maintains a connection to a node until it is closed.
pub(super) async fn run(shared: Arc<Shared>, outbound: Arc<Outbound>) {
    let mut pause = PAUSE;
    while !outbound.is_closed() {
        match connect(&shared, &outbound).await {
            Ok((stream, run)) => {
                pause = PAUSE;
                outbound.on_connected();
                if shared.run() != Some(run) {
                    // The node registered again meanwhile: the peer knows us by a former run.
                    outbound.on_lost(shared.now_ms());
                    continue;
                }
                tracing::debug!(node = %outbound.node, "replication connection to leader established");
                let replicas = shared.replicas().into_iter();
                replicas
                    .filter(|replica| replica.leader() == Some(outbound.node))
                    .for_each(|replica| replica.on_connected());
                let ended = Session::new(&shared, &outbound, stream).run().await;
                outbound.on_lost(shared.now_ms());
                let why = ended.err().map_or("closed".to_owned(), |error| error.to_string());
                tracing::debug!(node = %outbound.node, why, "replication connection to leader closed");
            }
            Err(error) => tracing::trace!(node = %outbound.node, %error, "replication connect failed"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(shared.tuning.redial_ms));
    }
}

async fn connect(shared: &Shared, outbound: &Outbound) -> io::Result<(Stream, Sender)> {
    let run = shared.run().ok_or(io::ErrorKind::NotConnected)?;
    let connect = async {
        let mut stream = Stream::new(shared.dialler.dial(outbound.node).await?);
        ToLeader::Hello(run).encode(stream.out());
        let Turn::Frame(frame) = stream.turn(None).await? else { unreachable!("nothing is drained") };
        match ToFollower::decode(frame)? {
            ToFollower::Hello(there) if there.node == outbound.node => Ok((stream, run)),
            ToFollower::Hello(_) => Err(io::Error::other("hello from another node id")),
            _ => Err(io::Error::other("first frame is not a hello")),
        }
    };
    let limit = Duration::from_millis(shared.tuning.silence_ms);
    tokio::time::timeout(limit, connect).await.unwrap_or(Err(io::ErrorKind::TimedOut.into()))
}

/// The session of one connection.
struct Session<'a> {
    shared: &'a Arc<Shared>,
    outbound: &'a Outbound,
    stream: Stream,
    slots: HashMap<PartitionId, u32>,
    /// By slot. A slot is never reused: an answer to its former partition may be in flight.
    replicas: Vec<Option<Arc<Replicated>>>,
    next_call: u64,
    log_end_calls: HashMap<u64, oneshot::Sender<LogEnds>>,
    /// When the fetches of arriving replicas above the throttle rate are re-evaluated.
    held_until: Option<Instant>,
}

impl<'a> Session<'a> {
    fn new(shared: &'a Arc<Shared>, outbound: &'a Outbound, stream: Stream) -> Self {
        Self {
            shared,
            outbound,
            stream,
            slots: HashMap::new(),
            replicas: Vec::new(),
            next_call: 1,
            log_end_calls: HashMap::new(),
            held_until: None,
        }
    }

    async fn run(&mut self) -> io::Result<()> {
        let (shared, outbound) = (self.shared, self.outbound);
        let mut heard_ms = shared.now_ms();
        let mut beats = tokio::time::interval(Duration::from_millis(shared.tuning.beat_ms));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.stream.unsent() < UNSENT && !self.send_queued() {
                return Ok(());
            }
            let held_until = self.held_until;
            tokio::select! {
                turn = self.stream.turn((self.stream.unsent() >= UNSENT).then_some(UNSENT)) => {
                    if let Turn::Frame(frame) = turn? {
                        heard_ms = shared.now_ms();
                        self.on_frame(ToFollower::decode(frame)?)?;
                        // All received frames are processed before anything is sent: one write carries all resulting
                        // fetches.
                        while let Some(frame) = self.stream.arrived()? {
                            self.on_frame(ToFollower::decode(frame)?)?;
                        }
                    }
                }
                () = outbound.notify.notified() => {}
                () = tokio::time::sleep_until(held_until.unwrap_or_else(Instant::now)), if held_until.is_some() => {}
                _ = beats.tick() => {
                    if shared.now_ms().saturating_sub(heard_ms) > shared.tuning.silence_ms {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    self.log_end_calls.retain(|_, caller| !caller.is_closed());
                    ToLeader::Beat.encode(self.stream.out());
                }
            }
        }
    }

    /// Sends the queued messages. Returns whether the connection continues.
    fn send_queued(&mut self) -> bool {
        let mut outbox = lock(&self.outbound.outbox);
        if outbox.closed || outbox.reconnect {
            return false;
        }
        let mut assigned = Vec::new();
        let released_slots: Vec<u32> =
            outbox.released_slots.drain(..).filter_map(|id| self.release(id)).collect();
        let wait_ms = self.shared.receiving.wait_ms(self.shared.now_ms());
        let may = |replica: &Replicated| wait_ms == 0 || !replica.is_arriving();
        let Outbox { fetches, reports, snapshots, .. } = &mut *outbox;
        let due_fetches: Vec<_> = fetches
            .extract_if(|_, (replica, ..)| may(replica))
            .map(|(_, (replica, id, fetch))| (self.slot_of(&replica, &mut assigned), id, fetch))
            .collect();
        // A report never overtakes its fetch, held back or not.
        let reports: Vec<_> = reports
            .extract_if(|id, _| !fetches.contains_key(id))
            .map(|(_, (replica, report))| (self.slot_of(&replica, &mut assigned), report))
            .collect();
        let snapshots: Vec<_> = snapshots
            .extract_if(|_, (replica, _)| may(replica))
            .map(|(_, (replica, fetch))| (self.slot_of(&replica, &mut assigned), fetch))
            .collect();
        let holds = !outbox.fetches.is_empty() || !outbox.snapshots.is_empty();
        self.held_until =
            holds.then(|| Instant::now() + Duration::from_millis(Throttle::reevaluate_in_ms(wait_ms)));
        let log_end_requests = std::mem::take(&mut outbox.log_end_requests);
        drop(outbox);
        let out = self.stream.out();
        if !released_slots.is_empty() {
            ToLeader::ReleaseSlots(released_slots).encode(out);
        }
        if !assigned.is_empty() {
            ToLeader::AssignSlots(assigned).encode(out);
        }
        if !due_fetches.is_empty() {
            ToLeader::Fetches(due_fetches).encode(out);
        }
        // After the fetches: a remaining report is newer than the fetch of the same replica. A fetch sets the
        // leader's knowledge, a report only adds to it.
        if !reports.is_empty() {
            ToLeader::Reports(reports).encode(out);
        }
        for (slot, fetch) in snapshots {
            ToLeader::Snapshot(slot, fetch).encode(out);
        }
        for (partitions, caller) in log_end_requests {
            ToLeader::LogEnds(self.next_call, partitions).encode(out);
            self.log_end_calls.insert(self.next_call, caller);
            self.next_call += 1;
        }
        true
    }

    fn slot_of(&mut self, replica: &Arc<Replicated>, assigned: &mut Vec<(u32, PartitionId)>) -> u32 {
        let id = replica.id();
        if let Some(slot) = self.slots.get(&id) {
            self.replicas[*slot as usize] = Some(Arc::clone(replica));
            return *slot;
        }
        let slot = u32::try_from(self.replicas.len()).expect("fewer replicas than 2^32");
        self.replicas.push(Some(Arc::clone(replica)));
        self.slots.insert(id, slot);
        assigned.push((slot, id));
        slot
    }

    fn release(&mut self, id: PartitionId) -> Option<u32> {
        let slot = self.slots.remove(&id)?;
        self.replicas[slot as usize] = None;
        Some(slot)
    }

    fn replica(&self, slot: u32) -> Option<&Arc<Replicated>> {
        self.replicas.get(slot as usize)?.as_ref()
    }

    fn charge(&self, replica: &Replicated, bytes: usize) {
        if bytes > 0 && replica.is_arriving() {
            self.shared.receiving.charge(bytes, self.shared.now_ms());
        }
    }

    fn on_frame(&mut self, message: ToFollower) -> io::Result<()> {
        match message {
            ToFollower::Hello(_) => return Err(io::Error::other("duplicate hello")),
            ToFollower::Beat => {}
            ToFollower::Answer { slot, id, epoch, answer, records } => {
                // An answer to a released slot finds no replica, or one that does not expect it.
                if let Some(replica) = self.replica(slot) {
                    self.charge(replica, records.bytes.len());
                    replica.on_answer(id, epoch, answer, &records);
                }
            }
            ToFollower::HighWatermarks(advanced_watermark) => {
                for (slot, epoch, high_watermark) in advanced_watermark {
                    if let Some(replica) = self.replica(slot) {
                        replica.on_leader_high_watermark(epoch, high_watermark);
                    }
                }
            }
            ToFollower::Chunk(slot, epoch, chunk) => {
                if let Some(replica) = self.replica(slot) {
                    self.charge(replica, chunk.as_ref().map_or(0, |chunk| chunk.bytes.len()));
                    replica.on_chunk(epoch, chunk);
                }
            }
            ToFollower::LogEnds(call, run, ends) => {
                if let Some(caller) = self.log_end_calls.remove(&call) {
                    // The caller may have given up.
                    let _ = caller.send((run, ends));
                }
            }
        }
        Ok(())
    }
}
