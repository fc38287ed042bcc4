//! The tables that are pushed: the current one, and how to get there from the last few.
//!
//! Everything is encoded once and shared by all subscribers. A subscriber has no queue: it knows which version it has,
//! and asks for what comes after it; one that is too far behind gets the whole table.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use moim_wire_grpc::encode_frame;
use moim_wire_grpc::routing::{FollowResponse, FollowResponseKind, Snapshot};
use tokio::sync::watch;

use crate::metrics::ClusterMetrics;
use crate::routing::table::RoutingTable;

/// Steps that are kept, and their bytes.
const STEPS: usize = 512;
const STEP_BYTES: usize = 16 << 20;
/// Entries in one part of a snapshot: a message that a client's window takes.
const PART: usize = 2_000;

/// From one version to the next, ready to be sent.
struct Step {
    from: i64,
    to: i64,
    frame: Bytes,
}

/// What is pushed.
pub(super) struct Published {
    pub(super) table: Arc<RoutingTable>,
    steps: VecDeque<Arc<Step>>,
    snapshot: OnceLock<Vec<Bytes>>,
}

impl Published {
    fn snapshot(&self) -> &[Bytes] {
        self.snapshot.get_or_init(|| {
            let entries = self.table.entries();
            let count = entries.len().div_ceil(PART).max(1);
            let part = |index: usize| {
                let some = entries.iter().skip(index * PART).take(PART);
                let snapshot = Snapshot {
                    incarnation: self.table.incarnation,
                    version: self.table.version,
                    index: u32::try_from(index).unwrap_or(u32::MAX),
                    count: u32::try_from(count).unwrap_or(u32::MAX),
                    routes: some.map(|entry| entry.to_wire()).collect(),
                };
                encode_frame(&FollowResponse { kind: Some(FollowResponseKind::Snapshot(snapshot)) })
            };
            (0..count).map(part).collect()
        })
    }
}

/// What a subscriber has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) incarnation: i64,
    pub(super) version: i64,
}

/// Pushes tables.
pub(super) struct Feed {
    published: watch::Sender<Arc<Published>>,
    subscribers: AtomicUsize,
}

impl Feed {
    pub(super) fn new() -> Self {
        let empty = Published { table: Arc::default(), steps: VecDeque::new(), snapshot: OnceLock::new() };
        Self { published: watch::channel(Arc::new(empty)).0, subscribers: AtomicUsize::new(0) }
    }

    pub(super) fn current(&self) -> Arc<Published> {
        self.published.borrow().clone()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<Published>> {
        self.published.subscribe()
    }

    pub(super) fn subscribers(&self) -> usize {
        self.subscribers.load(Ordering::Relaxed)
    }

    pub(super) fn on_subscribed(&self, metrics: &ClusterMetrics) {
        self.subscribers.fetch_add(1, Ordering::Relaxed);
        metrics.routing_subscribers.inc();
    }

    pub(super) fn on_gone(&self, metrics: &ClusterMetrics) {
        self.subscribers.fetch_sub(1, Ordering::Relaxed);
        metrics.routing_subscribers.dec();
    }

    /// Pushes a table, unless one as new was pushed already.
    pub(super) fn publish(&self, table: Arc<RoutingTable>, metrics: &ClusterMetrics) {
        self.published.send_if_modified(|published| {
            let old = &published.table;
            let is_same_place = old.incarnation == table.incarnation;
            if is_same_place && table.version <= old.version {
                return false;
            }
            let mut steps = VecDeque::new();
            if is_same_place && old.version > 0 {
                steps.clone_from(&published.steps);
                let delta = old.delta(&table);
                let (from, to) = (delta.from, delta.to);
                let frame = encode_frame(&FollowResponse { kind: Some(FollowResponseKind::Delta(delta)) });
                steps.push_back(Arc::new(Step { from, to, frame }));
                let mut bytes: usize = steps.iter().map(|step| step.frame.len()).sum();
                while steps.len() > STEPS || (bytes > STEP_BYTES && steps.len() > 1) {
                    bytes -= steps.pop_front().map_or(0, |step| step.frame.len());
                }
            }
            metrics.routing_version.set(table.version);
            metrics.routing_pushes.inc();
            *published = Arc::new(Published { table, steps, snapshot: OnceLock::new() });
            true
        });
    }
}

/// What to send to one who is at `position`, and where it is then; nothing when it is up to date.
pub(super) fn next(published: &Published, position: Position) -> Option<(Vec<Bytes>, Position)> {
    let now = Position { incarnation: published.table.incarnation, version: published.table.version };
    if now.version == 0 || (position.incarnation == now.incarnation && position.version >= now.version) {
        return None;
    }
    if position.incarnation == now.incarnation {
        let first = published.steps.iter().position(|step| step.from == position.version);
        if let Some(first) = first {
            let mut at = position.version;
            let mut frames = Vec::new();
            for step in published.steps.iter().skip(first).take_while(|step| step.from <= now.version) {
                debug_assert_eq!(step.from, at, "steps follow each other");
                frames.push(step.frame.clone());
                at = step.to;
            }
            return Some((frames, Position { version: at, ..now }));
        }
    }
    Some((published.snapshot().to_vec(), now))
}
