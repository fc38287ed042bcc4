//! The embedded state repository: the coordination core in the same process, without a socket in between.
//!
//! Keys are the core's keys, including the cluster's own `/moim/…`: the repository authenticates as a node,
//! so it may write them. A transaction stays inside or outside of `/moim/`; the two have separate revisions.
//! A watch misses nothing and never lags: it is a position in the history, and ends only when the history at
//! its position is compacted or the node stops.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use moim_coord::{
    self as coord, Command, CoordError, Coordinator, Origin, RangeRequest, WatchItem, WatchStream,
};

use crate::prefix_range;
use crate::repository::{
    BoxFuture, Compare, Entry, Event, Lease, LeaseId, Op, RepositoryError, StateRepository, Txn, TxnOutcome,
    Watch, WatchGap,
};

/// A state repository in this node's coordination core.
#[derive(Clone)]
pub struct CoordRepository {
    coordinator: Coordinator,
    prefix: String,
}

impl CoordRepository {
    /// A repository over all keys, without a prefix.
    pub fn new(coordinator: Coordinator) -> Self {
        Self::under(coordinator, "")
    }

    /// A repository over the keys under `prefix`; keys of callers do not include it.
    pub fn under(coordinator: Coordinator, prefix: impl Into<String>) -> Self {
        Self { coordinator, prefix: prefix.into() }
    }

    /// The coordination core.
    pub fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    fn key(&self, key: &str) -> Bytes {
        // An empty key is rejected, also with a prefix.
        if key.is_empty() { Bytes::new() } else { format!("{}{key}", self.prefix).into() }
    }

    fn range(&self, prefix: &str) -> (Bytes, Bytes) {
        let (key, range_end) = prefix_range(format!("{}{prefix}", self.prefix).as_bytes());
        (key.into(), range_end.into())
    }

    /// Keys that are not UTF-8 belong to other applications; they are skipped.
    fn entry(&self, kv: &coord::KeyValue) -> Option<Entry> {
        let key = std::str::from_utf8(&kv.key).ok()?.strip_prefix(&self.prefix)?;
        Some(Entry {
            key: key.to_owned(),
            value: kv.value.clone(),
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: (!kv.lease.is_none()).then_some(LeaseId(kv.lease.0)),
        })
    }

    fn event(&self, event: &coord::Event) -> Option<Event> {
        let entry = self.entry(&event.kv)?;
        Some(if event.is_delete {
            Event::Delete { key: entry.key, revision: entry.mod_revision }
        } else {
            Event::Put(entry)
        })
    }

    fn request(&self, txn: &Txn) -> coord::TxnRequest {
        let found = |compare: &Compare| coord::TxnOp::Range(RangeRequest::key(self.key(compare.key())));
        coord::TxnRequest {
            compares: txn.compares.iter().map(|compare| self.compare(compare)).collect(),
            success: txn.ops.iter().map(|op| self.op(op)).collect(),
            // The entry of each compared key, returned to the caller on a conflict.
            failure: txn.compares.iter().map(found).collect(),
        }
    }

    /// A missing key has revision 0, so a revision above 0 requires that the key exists.
    fn compare(&self, compare: &Compare) -> coord::Compare {
        use coord::CompareResult::{Equal, Greater, Less};
        use coord::CompareTarget::{Create, Mod, Value, Version};
        let (target, result) = match compare {
            Compare::Absent(_) => (Version(0), Equal),
            Compare::Present(_) => (Version(0), Greater),
            Compare::ModRevision(_, revision) if *revision > 0 => (Mod(*revision), Equal),
            Compare::CreateRevision(_, revision) if *revision > 0 => (Create(*revision), Equal),
            // No key has such a revision: never true.
            Compare::ModRevision(..) | Compare::CreateRevision(..) => (Version(0), Less),
            Compare::Value(_, value) => (Value(value.clone()), Equal),
        };
        coord::Compare { key: self.key(compare.key()), range_end: Bytes::new(), target, result }
    }

    fn op(&self, op: &Op) -> coord::TxnOp {
        match op {
            Op::Put { key, value, lease } => coord::TxnOp::Put(coord::PutRequest {
                lease: lease.map_or(coord::LeaseId::NONE, |lease| coord::LeaseId(lease.0)),
                ..coord::PutRequest::new(self.key(key), value.clone())
            }),
            Op::Delete { key } => coord::TxnOp::Delete(coord::DeleteRequest::key(self.key(key))),
        }
    }

    fn outcome(&self, reply: coord::TxnReply) -> TxnOutcome {
        let revision = reply.revision;
        if reply.succeeded {
            return TxnOutcome::Done { revision };
        }
        let found = |reply: coord::TxnOpReply| match reply {
            coord::TxnOpReply::Range(range) => range.kvs.first().and_then(|kv| self.entry(kv)),
            coord::TxnOpReply::Put(_) | coord::TxnOpReply::Delete(_) | coord::TxnOpReply::Txn(_) => None,
        };
        TxnOutcome::Conflict { revision, current: reply.responses.into_iter().map(found).collect() }
    }

    /// The lease of a rejected transaction that does not exist.
    fn missing_lease(&self, txn: &Txn) -> LeaseId {
        let named = txn.ops.iter().filter_map(|op| match op {
            Op::Put { lease, .. } => *lease,
            Op::Delete { .. } => None,
        });
        let is_missing =
            |lease: &LeaseId| self.coordinator.read(|state| state.lease(coord::LeaseId(lease.0)).is_none());
        let mut named = named.collect::<Vec<_>>().into_iter();
        // A lease that expired and was granted again meanwhile is no longer missing; any of the named leases
        // is returned then.
        let last = named.clone().next_back();
        named.find(is_missing).or(last).unwrap_or(LeaseId(0))
    }
}

/// Maps an error of the core; `lease` is the lease of the request.
fn failed(error: CoordError, lease: impl FnOnce() -> LeaseId) -> RepositoryError {
    use coord::Error;
    match error {
        CoordError::Timeout => RepositoryError::Unknown,
        CoordError::Refused(Error::LeaseNotFound) => RepositoryError::LeaseNotFound(lease()),
        CoordError::Refused(Error::Corrupt) => RepositoryError::Damaged(error.to_string()),
        CoordError::Refused(Error::NoSpace) => RepositoryError::Unavailable(error.to_string()),
        CoordError::Refused(_) => RepositoryError::Invalid(error.to_string()),
        CoordError::NoLeader
        | CoordError::LeaderChanged
        | CoordError::TooManyRequests
        | CoordError::NotLeader
        | CoordError::BadLeaderTransferee
        | CoordError::MemberNotFound
        | CoordError::MemberExists
        | CoordError::NotLearner
        | CoordError::LearnerNotReady
        | CoordError::UnhealthyCluster
        | CoordError::NotEnoughMembers
        | CoordError::Stopped => RepositoryError::Unavailable(error.to_string()),
    }
}

/// Maps an error of a read: a read changes nothing, so its outcome is never unknown.
fn read_failed(error: CoordError) -> RepositoryError {
    match failed(error, || LeaseId(0)) {
        RepositoryError::Unknown => RepositoryError::Unavailable(CoordError::Timeout.to_string()),
        other => other,
    }
}

fn duration(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

impl StateRepository for CoordRepository {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(async move {
            let request = RangeRequest::key(self.key(key));
            let reply = self.coordinator.range(request, false).await.map_err(read_failed)?;
            Ok(reply.kvs.first().and_then(|kv| self.entry(kv)))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(async move {
            let (key, range_end) = self.range(prefix);
            let request = RangeRequest::between(key, range_end);
            let reply = self.coordinator.range(request, false).await.map_err(read_failed)?;
            Ok((reply.revision, reply.kvs.iter().filter_map(|kv| self.entry(kv)).collect()))
        })
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(async move {
            let done = self.coordinator.txn(Origin::Node, self.request(&txn), false).await;
            done.map(|reply| self.outcome(reply)).map_err(|error| failed(error, || self.missing_lease(&txn)))
        })
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(async move {
            let ttl_ms = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
            let granted = self.coordinator.lease_grant(Origin::Node, coord::LeaseId::NONE, ttl_ms).await;
            let (id, ttl_ms) = granted.map_err(|error| failed(error, || LeaseId(0)))?;
            Ok(Lease { id: LeaseId(id.0), ttl: duration(ttl_ms) })
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(async move {
            match self.coordinator.lease_keep_alive(Origin::Node, coord::LeaseId(lease.0)).await {
                Ok(0) => Err(RepositoryError::LeaseNotFound(lease)),
                Ok(ttl_ms) => Ok(duration(ttl_ms)),
                Err(error) => Err(failed(error, || lease)),
            }
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(async move {
            let revoke = Command::node(coord::Op::LeaseRevoke { id: coord::LeaseId(lease.0) });
            self.coordinator.execute(revoke).await.map(drop).map_err(|error| failed(error, || lease))
        })
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            if from_revision == 0 {
                // "After this call" means after every write acknowledged before it, on any node.
                self.coordinator.linearizable().await.map_err(read_failed)?;
            }
            let (key, range_end) = self.range(prefix);
            let mut stream = self.coordinator.watcher();
            let request =
                coord::WatchRequest { key, range_end, start_revision: from_revision, ..Default::default() };
            stream.create(request).map_err(|error| read_failed(error.into()))?;
            let delivery = Delivery { stream, ready: Vec::new().into_iter(), repository: self.clone() };
            Ok(Watch::new(stream::unfold(Some(delivery), |delivery| async {
                let mut delivery = delivery?;
                match delivery.next().await? {
                    Ok(event) => Some((Ok(event), Some(delivery))),
                    Err(gap) => Some((Err(gap), None)),
                }
            })))
        })
    }
}

/// A watch, and the events it has received and not delivered yet.
struct Delivery {
    stream: WatchStream,
    ready: std::vec::IntoIter<coord::Event>,
    repository: CoordRepository,
}

impl Delivery {
    async fn next(&mut self) -> Option<Result<Event, WatchGap>> {
        loop {
            for event in self.ready.by_ref() {
                if let Some(event) = self.repository.event(&event) {
                    return Some(Ok(event));
                }
            }
            match self.stream.next().await? {
                WatchItem::Events { batch, .. } => self.ready = batch.events.into_iter(),
                WatchItem::Canceled { compact_revision, .. } => {
                    return Some(Err(WatchGap::Compacted { oldest: compact_revision }));
                }
                WatchItem::Progress { .. } => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
