//! The table feed: the current routing table, and the deltas of the last versions.
//!
//! Every message is encoded once and shared by all subscribers. A subscriber has no queue: it has a position
//! and requests the messages after it; a subscriber that lags too far gets a snapshot.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use moim_wire_grpc::encode_frame;
use moim_wire_grpc::routing::{FollowResponse, FollowResponseKind, Snapshot};
use tokio::sync::watch;

use crate::metrics::ClusterMetrics;
use crate::routing::table::RoutingTable;

/// Maximum number of retained deltas, and their bytes.
const MAX_DELTAS: usize = 512;
const MAX_DELTA_BYTES: usize = 16 << 20;
/// Entries in one part of a snapshot: a message that fits a client's flow-control window.
const SNAPSHOT_PART_ENTRIES: usize = 2_000;

/// The encoded delta from one version to the next.
struct EncodedDelta {
    from: i64,
    to: i64,
    frame: Bytes,
}

/// The pushed table with its deltas and its encoded snapshot.
pub(super) struct Published {
    pub(super) table: Arc<RoutingTable>,
    deltas: VecDeque<Arc<EncodedDelta>>,
    snapshot: OnceLock<Vec<Bytes>>,
}

impl Published {
    fn snapshot(&self) -> &[Bytes] {
        self.snapshot.get_or_init(|| {
            let entries = self.table.entries();
            let count = entries.len().div_ceil(SNAPSHOT_PART_ENTRIES).max(1);
            let part = |index: usize| {
                let some = entries.iter().skip(index * SNAPSHOT_PART_ENTRIES).take(SNAPSHOT_PART_ENTRIES);
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

/// The table version of a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) incarnation: i64,
    pub(super) version: i64,
}

/// Publishes tables to subscribers.
pub(super) struct Feed {
    published: watch::Sender<Arc<Published>>,
    subscribers: AtomicUsize,
}

impl Feed {
    pub(super) fn new() -> Self {
        let empty = Published { table: Arc::default(), deltas: VecDeque::new(), snapshot: OnceLock::new() };
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

    pub(super) fn on_unsubscribed(&self, metrics: &ClusterMetrics) {
        self.subscribers.fetch_sub(1, Ordering::Relaxed);
        metrics.routing_subscribers.dec();
    }

    /// Publishes a table, unless an equal or newer one was published already.
    pub(super) fn publish(&self, table: Arc<RoutingTable>, metrics: &ClusterMetrics) {
        self.published.send_if_modified(|published| {
            let old = &published.table;
            let is_same_incarnation = old.incarnation == table.incarnation;
            if is_same_incarnation && table.version <= old.version {
                return false;
            }
            let mut deltas = VecDeque::new();
            if is_same_incarnation && old.version > 0 {
                deltas.clone_from(&published.deltas);
                let delta = old.delta(&table);
                let (from, to) = (delta.from, delta.to);
                let frame = encode_frame(&FollowResponse { kind: Some(FollowResponseKind::Delta(delta)) });
                deltas.push_back(Arc::new(EncodedDelta { from, to, frame }));
                let mut bytes: usize = deltas.iter().map(|delta| delta.frame.len()).sum();
                while deltas.len() > MAX_DELTAS || (bytes > MAX_DELTA_BYTES && deltas.len() > 1) {
                    bytes -= deltas.pop_front().map_or(0, |delta| delta.frame.len());
                }
            }
            metrics.routing_version.set(table.version);
            metrics.routing_pushes.inc();
            *published = Arc::new(Published { table, deltas, snapshot: OnceLock::new() });
            true
        });
    }
}

/// The messages for a subscriber at `position`, and its next position; `None` when it is up to date.
pub(super) fn next(published: &Published, position: Position) -> Option<(Vec<Bytes>, Position)> {
    let now = Position { incarnation: published.table.incarnation, version: published.table.version };
    if now.version == 0 || (position.incarnation == now.incarnation && position.version >= now.version) {
        return None;
    }
    if position.incarnation == now.incarnation {
        let first = published.deltas.iter().position(|delta| delta.from == position.version);
        if let Some(first) = first {
            let mut at = position.version;
            let mut frames = Vec::new();
            for delta in published.deltas.iter().skip(first).take_while(|delta| delta.from <= now.version) {
                debug_assert_eq!(delta.from, at, "deltas are contiguous");
                frames.push(delta.frame.clone());
                at = delta.to;
            }
            return Some((frames, Position { version: at, ..now }));
        }
    }
    Some((published.snapshot().to_vec(), now))
}
