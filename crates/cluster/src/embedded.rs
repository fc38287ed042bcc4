//! The state repository over the node's own coordination core.
//!
//! Requests are a node's ([`Origin::Node`]), so the system keys may be written. What the repository calls a conflict
//! is the failure branch of a transaction; what it found is read in that branch, at the same revision.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use moim_coord::{
    Compare as CoordCompare, CompareResult, CompareTarget, CoordError, Coordinator, DeleteRequest,
    Error as Refusal, KeyValue, LeaseId as CoordLease, Origin, PutRequest, RangeRequest, TxnOp, TxnOpReply,
    TxnRequest, WatchItem, WatchRequest, WatchStream,
};

use crate::repository::{
    BoxFuture, Compare, Entry, Event, Lease, LeaseId, Op, RepositoryError, StateRepository, Txn, TxnOutcome,
    Watch, WatchGap,
};

/// The repository of a node with a coordination core.
#[derive(Clone)]
pub struct CoordRepository {
    coordinator: Coordinator,
}

impl CoordRepository {
    /// A repository over this core.
    pub fn new(coordinator: Coordinator) -> Self {
        Self { coordinator }
    }
}

/// What a refusal means here. `lease` is the one that was asked about.
fn failed(error: CoordError, lease: LeaseId) -> RepositoryError {
    match error {
        CoordError::Refused(Refusal::LeaseNotFound) => RepositoryError::LeaseNotFound(lease),
        CoordError::Refused(Refusal::NoSpace | Refusal::Corrupt) => {
            RepositoryError::Unavailable(error.to_string())
        }
        CoordError::Refused(refusal) => RepositoryError::Invalid(refusal.to_string()),
        CoordError::Timeout => RepositoryError::Unknown,
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
        | CoordError::Stopped => RepositoryError::Unavailable(error.to_string()),
    }
}

const NO_LEASE: LeaseId = LeaseId(0);

fn text(key: &Bytes) -> Result<String, RepositoryError> {
    String::from_utf8(key.to_vec()).map_err(|_| RepositoryError::Damaged("a key is not text".to_owned()))
}

fn entry(kv: &KeyValue) -> Result<Entry, RepositoryError> {
    Ok(Entry {
        key: text(&kv.key)?,
        value: kv.value.clone(),
        create_revision: kv.create_revision,
        mod_revision: kv.mod_revision,
        version: kv.version,
        lease: Some(LeaseId(kv.lease.0)).filter(|lease| *lease != NO_LEASE),
    })
}

/// The first key after every key that begins with `prefix`; one zero byte when there is none.
fn end_of(prefix: &str) -> Bytes {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(&[0])
}

/// The first key of a prefix: an empty one stands for every key, and no key is empty.
fn start_of(prefix: &str) -> Bytes {
    if prefix.is_empty() { Bytes::from_static(&[0]) } else { Bytes::copy_from_slice(prefix.as_bytes()) }
}

fn compare(compare: &Compare) -> CoordCompare {
    let (target, result) = match compare {
        Compare::Absent(_) => (CompareTarget::Version(0), CompareResult::Equal),
        Compare::Present(_) => (CompareTarget::Version(0), CompareResult::Greater),
        // A missing key has revision 0, so a revision that no key has must not be found there.
        Compare::ModRevision(_, revision) | Compare::CreateRevision(_, revision) if *revision <= 0 => {
            (CompareTarget::Version(0), CompareResult::Less)
        }
        Compare::ModRevision(_, revision) => (CompareTarget::Mod(*revision), CompareResult::Equal),
        Compare::CreateRevision(_, revision) => (CompareTarget::Create(*revision), CompareResult::Equal),
        Compare::Value(_, value) => (CompareTarget::Value(value.clone()), CompareResult::Equal),
    };
    let key = Bytes::copy_from_slice(compare.key().as_bytes());
    CoordCompare { key, range_end: Bytes::new(), target, result }
}

fn change(op: Op) -> TxnOp {
    match op {
        Op::Put { key, value, lease } => {
            let lease = CoordLease(lease.unwrap_or(NO_LEASE).0);
            TxnOp::Put(PutRequest { lease, ..PutRequest::new(key, value) })
        }
        Op::Delete { key } => TxnOp::Delete(DeleteRequest::key(key)),
    }
}

impl StateRepository for CoordRepository {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(async move {
            let request = RangeRequest::key(Bytes::copy_from_slice(key.as_bytes()));
            let found = self.coordinator.range(request, false).await.map_err(|e| failed(e, NO_LEASE))?;
            found.kvs.first().map(entry).transpose()
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(async move {
            let request = RangeRequest::between(start_of(prefix), end_of(prefix));
            let found = self.coordinator.range(request, false).await.map_err(|e| failed(e, NO_LEASE))?;
            let entries = found.kvs.iter().map(entry).collect::<Result<_, _>>()?;
            Ok((found.revision, entries))
        })
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(async move {
            let lease = txn.ops.iter().find_map(|op| match op {
                Op::Put { lease, .. } => *lease,
                Op::Delete { .. } => None,
            });
            let look = |compare: &Compare| {
                TxnOp::Range(RangeRequest::key(Bytes::copy_from_slice(compare.key().as_bytes())))
            };
            let request = TxnRequest {
                failure: txn.compares.iter().map(look).collect(),
                compares: txn.compares.iter().map(compare).collect(),
                success: txn.ops.into_iter().map(change).collect(),
            };
            let reply = self.coordinator.txn(Origin::Node, request, false).await;
            let reply = reply.map_err(|error| failed(error, lease.unwrap_or(NO_LEASE)))?;
            if reply.succeeded {
                return Ok(TxnOutcome::Done { revision: reply.revision });
            }
            let current = reply.responses.iter().map(|response| match response {
                TxnOpReply::Range(range) => range.kvs.first().map(entry).transpose(),
                _ => Err(RepositoryError::Damaged("a read was not answered as one".to_owned())),
            });
            let current = current.collect::<Result<_, _>>()?;
            Ok(TxnOutcome::Conflict { revision: reply.revision, current })
        })
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(async move {
            let ttl_ms = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
            let granted = self.coordinator.lease_grant(Origin::Node, CoordLease(0), ttl_ms).await;
            let (id, ttl_ms) = granted.map_err(|error| failed(error, NO_LEASE))?;
            Ok(Lease { id: LeaseId(id.0), ttl: millis(ttl_ms) })
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(async move {
            match self.coordinator.lease_keep_alive(CoordLease(lease.0)).await {
                Ok(0) => Err(RepositoryError::LeaseNotFound(lease)),
                Ok(ttl_ms) => Ok(millis(ttl_ms)),
                Err(error) => Err(failed(error, lease)),
            }
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(async move {
            let revoked = self.coordinator.lease_revoke(Origin::Node, CoordLease(lease.0)).await;
            revoked.map_err(|error| failed(error, lease))
        })
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            // "After this call" is counted from what everybody else can know, not from what this node has heard.
            self.coordinator.linearizable().await.map_err(|error| failed(error, NO_LEASE))?;
            let mut stream = self.coordinator.watcher();
            let request = WatchRequest {
                key: start_of(prefix),
                range_end: end_of(prefix),
                start_revision: from_revision,
                ..WatchRequest::default()
            };
            stream.create(request).map_err(|error| failed(error.into(), NO_LEASE))?;
            let feed = Feed { stream, due: VecDeque::new(), ended: false };
            Ok(Watch::new(stream::unfold(feed, Feed::next)))
        })
    }
}

fn millis(ttl_ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ttl_ms).unwrap_or(0))
}

/// One watch, event by event.
struct Feed {
    stream: WatchStream,
    due: VecDeque<Event>,
    ended: bool,
}

impl Feed {
    async fn next(mut self) -> Option<(Result<Event, WatchGap>, Self)> {
        loop {
            if let Some(event) = self.due.pop_front() {
                return Some((Ok(event), self));
            }
            if self.ended {
                return None;
            }
            match self.stream.next().await? {
                WatchItem::Events { batch, .. } => {
                    // A key that is not text cannot be one of ours: nobody asked for it.
                    self.due.extend(batch.events.iter().filter_map(|event| to_event(event).ok()));
                }
                WatchItem::Canceled { compact_revision, .. } => {
                    self.ended = true;
                    return Some((Err(WatchGap::Compacted { oldest: compact_revision }), self));
                }
                WatchItem::Progress { .. } => {}
            }
        }
    }
}

fn to_event(event: &moim_coord::Event) -> Result<Event, RepositoryError> {
    if event.is_delete {
        return Ok(Event::Delete { key: text(&event.kv.key)?, revision: event.kv.mod_revision });
    }
    entry(&event.kv).map(Event::Put)
}

#[cfg(test)]
mod tests;
