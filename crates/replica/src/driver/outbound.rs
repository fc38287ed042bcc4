//! The connection to another node, for everything this node follows there.
//!
//! Copies put down what they want (the newest wins); the connection's task sends it, many at a time, and hands answers
//! back. While there is no connection nothing is kept: once there is one, every copy that follows that node asks anew, so
//! that what got lost with the old connection is said again.

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

/// The first pause before a new attempt to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// No more is put into the socket's queue while so much of it is unsent.
const UNSENT: usize = 1 << 20;
/// Questions about log ends under way.
const ASKS: usize = 64;
/// A question without an answer for this long gets none.
const ASK_TIMEOUT: Duration = Duration::from_secs(3);

/// A node could not be asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the node cannot be reached")]
pub struct Unreachable;

/// How far logs go on a node, and in which run it is.
type LogEnds = (BrokerEpoch, Vec<(PartitionId, Option<LogEnd>)>);

/// The connection to one node, present or not.
pub(super) struct Outbound {
    node: BrokerId,
    wishes: Mutex<Wishes>,
    notify: Notify,
    /// 0 while there is a connection.
    lost_since_ms: AtomicU64,
}

/// What is to be said. Invariant: empty while there is no connection.
#[derive(Default)]
struct Wishes {
    connected: bool,
    closed: bool,
    reconnect: bool,
    fetches: HashMap<PartitionId, (Arc<Replicated>, u64, Fetch)>,
    reports: HashMap<PartitionId, (Arc<Replicated>, Report)>,
    snapshots: HashMap<PartitionId, (Arc<Replicated>, SnapshotFetch)>,
    forgotten: Vec<PartitionId>,
    asks: Vec<(Vec<PartitionId>, oneshot::Sender<LogEnds>)>,
}

impl Outbound {
    pub(super) fn new(node: BrokerId, now_ms: u64) -> Self {
        Self {
            node,
            wishes: Mutex::default(),
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

    pub(super) fn fetch(&self, copy: &Arc<Replicated>, id: u64, fetch: Fetch) {
        self.wish(|wishes| {
            // A fetch says how far the disk is.
            wishes.reports.remove(&copy.id());
            wishes.fetches.insert(copy.id(), (Arc::clone(copy), id, fetch));
        });
    }

    pub(super) fn report(&self, copy: &Arc<Replicated>, report: Report) {
        self.wish(|wishes| {
            wishes.reports.insert(copy.id(), (Arc::clone(copy), report));
        });
    }

    pub(super) fn fetch_snapshot(&self, copy: &Arc<Replicated>, fetch: SnapshotFetch) {
        self.wish(|wishes| {
            wishes.snapshots.insert(copy.id(), (Arc::clone(copy), fetch));
        });
    }

    pub(super) fn forget(&self, id: PartitionId) {
        self.wish(|wishes| {
            wishes.fetches.remove(&id);
            wishes.reports.remove(&id);
            wishes.snapshots.remove(&id);
            wishes.forgotten.push(id);
        });
    }

    pub(super) async fn ask_log_ends(&self, partitions: Vec<PartitionId>) -> Result<LogEnds, Unreachable> {
        let (sender, answer) = oneshot::channel();
        self.wish(|wishes| {
            if wishes.asks.len() < ASKS {
                wishes.asks.push((partitions, sender));
            }
        });
        match tokio::time::timeout(ASK_TIMEOUT, answer).await {
            Ok(Ok(ends)) => Ok(ends),
            Ok(Err(_)) | Err(_) => Err(Unreachable),
        }
    }

    /// What was held back may be said now.
    pub(super) fn look_again(&self) {
        self.notify.notify_one();
    }

    /// Ends the connection, and makes a new one.
    pub(super) fn reconnect(&self) {
        lock(&self.wishes).reconnect = true;
        self.notify.notify_one();
    }

    /// Ends the connection for good.
    pub(super) fn close(&self) {
        lock(&self.wishes).closed = true;
        self.notify.notify_one();
    }

    fn wish(&self, wish: impl FnOnce(&mut Wishes)) {
        let mut wishes = lock(&self.wishes);
        if wishes.connected {
            wish(&mut wishes);
            drop(wishes);
            self.notify.notify_one();
        }
    }

    fn on_connected(&self) {
        let mut wishes = lock(&self.wishes);
        wishes.connected = true;
        wishes.reconnect = false;
        self.lost_since_ms.store(0, Ordering::Release);
    }

    fn on_lost(&self, now_ms: u64) {
        let mut wishes = lock(&self.wishes);
        *wishes = Wishes { closed: wishes.closed, ..Wishes::default() };
        self.lost_since_ms.store(now_ms.max(1), Ordering::Release);
    }

    fn is_closed(&self) -> bool {
        lock(&self.wishes).closed
    }
}

/// Keeps a connection to a node until it is closed.
pub(super) async fn run(shared: Arc<Shared>, outbound: Arc<Outbound>) {
    let mut pause = PAUSE;
    while !outbound.is_closed() {
        match connect(&shared, &outbound).await {
            Ok((stream, run)) => {
                pause = PAUSE;
                outbound.on_connected();
                if shared.run() != Some(run) {
                    // Registered anew meanwhile: the other side knows us by a run that is over.
                    outbound.on_lost(shared.now_ms());
                    continue;
                }
                tracing::debug!(node = %outbound.node, "connected for replication");
                let copies = shared.copies().into_iter();
                copies
                    .filter(|copy| copy.leader() == Some(outbound.node))
                    .for_each(|copy| copy.on_connected());
                let ended = Session::new(&shared, &outbound, stream).run().await;
                outbound.on_lost(shared.now_ms());
                let why = ended.err().map_or("closed".to_owned(), |error| error.to_string());
                tracing::debug!(node = %outbound.node, why, "a connection for replication ended");
            }
            Err(error) => tracing::trace!(node = %outbound.node, %error, "no connection for replication"),
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
            ToFollower::Hello(_) => Err(io::Error::other("another node is there")),
            _ => Err(io::Error::other("no hello")),
        }
    };
    let limit = Duration::from_millis(shared.tuning.silence_ms);
    tokio::time::timeout(limit, connect).await.unwrap_or(Err(io::ErrorKind::TimedOut.into()))
}

/// One connection's life.
struct Session<'a> {
    shared: &'a Arc<Shared>,
    outbound: &'a Outbound,
    stream: Stream,
    slots: HashMap<PartitionId, u32>,
    /// By slot. A slot is never used twice: an answer to its former partition may be on its way.
    copies: Vec<Option<Arc<Replicated>>>,
    next_call: u64,
    asked: HashMap<u64, oneshot::Sender<LogEnds>>,
    /// When wishes of copies that are being moved, above the rate for them, are looked at again.
    held_until: Option<Instant>,
}

impl<'a> Session<'a> {
    fn new(shared: &'a Arc<Shared>, outbound: &'a Outbound, stream: Stream) -> Self {
        Self {
            shared,
            outbound,
            stream,
            slots: HashMap::new(),
            copies: Vec::new(),
            next_call: 1,
            asked: HashMap::new(),
            held_until: None,
        }
    }

    async fn run(&mut self) -> io::Result<()> {
        let (shared, outbound) = (self.shared, self.outbound);
        let mut heard_ms = shared.now_ms();
        let mut beats = tokio::time::interval(Duration::from_millis(shared.tuning.beat_ms));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.stream.unsent() < UNSENT && !self.say() {
                return Ok(());
            }
            let held_until = self.held_until;
            tokio::select! {
                turn = self.stream.turn((self.stream.unsent() >= UNSENT).then_some(UNSENT)) => {
                    if let Turn::Frame(frame) = turn? {
                        heard_ms = shared.now_ms();
                        self.on_frame(ToFollower::decode(frame)?)?;
                        // What came with it is dealt with before anything is said: one write asks for all that follows.
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
                    self.asked.retain(|_, asker| !asker.is_closed());
                    ToLeader::Beat.encode(self.stream.out());
                }
            }
        }
    }

    /// Says what is wished by now. Answers whether the connection is to go on.
    fn say(&mut self) -> bool {
        let mut wishes = lock(&self.outbound.wishes);
        if wishes.closed || wishes.reconnect {
            return false;
        }
        let mut names = Vec::new();
        let forgotten: Vec<u32> = wishes.forgotten.drain(..).filter_map(|id| self.release(id)).collect();
        let wait_ms = self.shared.taking_in.wait_ms(self.shared.now_ms());
        let may = |copy: &Replicated| wait_ms == 0 || !copy.is_arriving();
        let Wishes { fetches, reports, snapshots, .. } = &mut *wishes;
        let wants: Vec<_> = fetches
            .extract_if(|_, (copy, ..)| may(copy))
            .map(|(_, (copy, id, fetch))| (self.slot_of(&copy, &mut names), id, fetch))
            .collect();
        // A report never overtakes its fetch, held back or not.
        let reports: Vec<_> = reports
            .extract_if(|id, _| !fetches.contains_key(id))
            .map(|(_, (copy, report))| (self.slot_of(&copy, &mut names), report))
            .collect();
        let snapshots: Vec<_> = snapshots
            .extract_if(|_, (copy, _)| may(copy))
            .map(|(_, (copy, fetch))| (self.slot_of(&copy, &mut names), fetch))
            .collect();
        let holds = !wishes.fetches.is_empty() || !wishes.snapshots.is_empty();
        self.held_until =
            holds.then(|| Instant::now() + Duration::from_millis(Throttle::look_in_ms(wait_ms)));
        let asks = std::mem::take(&mut wishes.asks);
        drop(wishes);
        let out = self.stream.out();
        if !forgotten.is_empty() {
            ToLeader::Forget(forgotten).encode(out);
        }
        if !names.is_empty() {
            ToLeader::Names(names).encode(out);
        }
        if !wants.is_empty() {
            ToLeader::Wants(wants).encode(out);
        }
        // Behind the fetches: a report that is still here is newer than the fetch of the same copy, which sets what the
        // leader knows, while a report only adds to it.
        if !reports.is_empty() {
            ToLeader::Reports(reports).encode(out);
        }
        for (slot, fetch) in snapshots {
            ToLeader::Snapshot(slot, fetch).encode(out);
        }
        for (partitions, asker) in asks {
            ToLeader::LogEnds(self.next_call, partitions).encode(out);
            self.asked.insert(self.next_call, asker);
            self.next_call += 1;
        }
        true
    }

    fn slot_of(&mut self, copy: &Arc<Replicated>, names: &mut Vec<(u32, PartitionId)>) -> u32 {
        let id = copy.id();
        if let Some(slot) = self.slots.get(&id) {
            self.copies[*slot as usize] = Some(Arc::clone(copy));
            return *slot;
        }
        let slot = u32::try_from(self.copies.len()).expect("fewer copies than 2^32");
        self.copies.push(Some(Arc::clone(copy)));
        self.slots.insert(id, slot);
        names.push((slot, id));
        slot
    }

    fn release(&mut self, id: PartitionId) -> Option<u32> {
        let slot = self.slots.remove(&id)?;
        self.copies[slot as usize] = None;
        Some(slot)
    }

    fn copy(&self, slot: u32) -> Option<&Arc<Replicated>> {
        self.copies.get(slot as usize)?.as_ref()
    }

    fn charge(&self, copy: &Replicated, bytes: usize) {
        if bytes > 0 && copy.is_arriving() {
            self.shared.taking_in.charge(bytes, self.shared.now_ms());
        }
    }

    fn on_frame(&mut self, said: ToFollower) -> io::Result<()> {
        match said {
            ToFollower::Hello(_) => return Err(io::Error::other("a second hello")),
            ToFollower::Beat => {}
            ToFollower::Answer { slot, id, epoch, answer, records } => {
                // An answer to a slot that was forgotten meanwhile finds nobody, or somebody who does not wait for it.
                if let Some(copy) = self.copy(slot) {
                    self.charge(copy, records.bytes.len());
                    copy.on_answer(id, epoch, answer, &records);
                }
            }
            ToFollower::HighWatermarks(risen) => {
                for (slot, epoch, high_watermark) in risen {
                    if let Some(copy) = self.copy(slot) {
                        copy.on_leader_high_watermark(epoch, high_watermark);
                    }
                }
            }
            ToFollower::Chunk(slot, epoch, chunk) => {
                if let Some(copy) = self.copy(slot) {
                    self.charge(copy, chunk.as_ref().map_or(0, |chunk| chunk.bytes.len()));
                    copy.on_chunk(epoch, chunk);
                }
            }
            ToFollower::LogEnds(call, run, ends) => {
                if let Some(asker) = self.asked.remove(&call) {
                    // Whoever asked may have given up.
                    let _ = asker.send((run, ends));
                }
            }
        }
        Ok(())
    }
}
