//! The state repository over the etcd protocol: all keys under one prefix, so that one etcd can serve
//! several clusters and other applications.
//!
//! Keys under the prefix that are not UTF-8 belong to other applications and are skipped. Revisions are
//! those of the whole store: they also advance with writes of other applications.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use moim_wire_grpc::Code;
use moim_wire_grpc::etcd::{
    self as wire, CompareResult, CompareTarget, CompareValue, DeleteRangeRequest, EventType, KeyValue,
    PutRequest, RangeRequest, RequestOp, RequestOpKind, ResponseOpKind, TxnRequest, TxnResponse,
};

use super::client::EtcdClient;
use super::error::EtcdError;
use super::watch::{EtcdWatch, WatchError, WatchOptions};
use super::{prefix_end, prefix_range};
use crate::repository::{
    BoxFuture, Compare, Entry, Event, Lease, LeaseId, MAX_TXN_BYTES, MAX_TXN_OPS, Op, RepositoryError,
    StateRepository, Txn, TxnOutcome, Watch, WatchGap,
};

/// A state repository on an etcd or a Moim server.
#[derive(Clone)]
pub struct EtcdRepository {
    client: EtcdClient,
    prefix: String,
}

impl EtcdRepository {
    /// A repository over the keys under `prefix`; keys of callers do not include it.
    pub fn new(client: EtcdClient, prefix: impl Into<String>) -> Self {
        Self { client, prefix: prefix.into() }
    }

    /// The etcd client.
    pub fn client(&self) -> &EtcdClient {
        &self.client
    }

    fn key(&self, key: &str) -> Bytes {
        format!("{}{key}", self.prefix).into()
    }

    fn entry(&self, kv: &KeyValue) -> Option<Entry> {
        let key = std::str::from_utf8(&kv.key).ok()?.strip_prefix(&self.prefix)?;
        Some(Entry {
            key: key.to_owned(),
            value: kv.value.clone(),
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: (kv.lease != 0).then_some(LeaseId(kv.lease)),
        })
    }

    fn request(&self, txn: &Txn) -> TxnRequest {
        let read = |compare: &Compare| RangeRequest { key: self.key(compare.key()), ..Default::default() };
        TxnRequest {
            compare: txn.compares.iter().map(|compare| self.compare(compare)).collect(),
            success: txn.ops.iter().map(|op| step(self.op(op))).collect(),
            // The entry of each compared key, returned to the caller on a conflict.
            failure: txn.compares.iter().map(|compare| step(RequestOpKind::Range(read(compare)))).collect(),
        }
    }

    /// A missing key has revision 0, so a revision above 0 requires that the key exists.
    fn compare(&self, compare: &Compare) -> wire::Compare {
        use CompareResult::{Equal, Greater, Less};
        use CompareTarget::{Create, Mod, Value, Version};
        let (target, result, value) = match compare {
            Compare::Absent(_) => (Version, Equal, CompareValue::Version(0)),
            Compare::Present(_) => (Version, Greater, CompareValue::Version(0)),
            Compare::ModRevision(_, revision) if *revision > 0 => {
                (Mod, Equal, CompareValue::ModRevision(*revision))
            }
            Compare::CreateRevision(_, revision) if *revision > 0 => {
                (Create, Equal, CompareValue::CreateRevision(*revision))
            }
            // No key has such a revision: never true.
            Compare::ModRevision(..) | Compare::CreateRevision(..) => {
                (Version, Less, CompareValue::Version(0))
            }
            Compare::Value(_, value) => (Value, Equal, CompareValue::Value(value.clone())),
        };
        wire::Compare {
            result: result as i32,
            target: target as i32,
            key: self.key(compare.key()),
            value: Some(value),
            range_end: Bytes::new(),
        }
    }

    fn op(&self, op: &Op) -> RequestOpKind {
        match op {
            Op::Put { key, value, lease } => RequestOpKind::Put(PutRequest {
                key: self.key(key),
                value: value.clone(),
                lease: lease.map_or(0, |lease| lease.0),
                ..Default::default()
            }),
            Op::Delete { key } => {
                RequestOpKind::DeleteRange(DeleteRangeRequest { key: self.key(key), ..Default::default() })
            }
        }
    }

    fn outcome(&self, response: TxnResponse) -> TxnOutcome {
        let revision = response.header.map_or(0, |header| header.revision);
        if response.succeeded {
            return TxnOutcome::Done { revision };
        }
        let found = |op: wire::ResponseOp| match op.op {
            Some(ResponseOpKind::Range(range)) => range.kvs.first().and_then(|kv| self.entry(kv)),
            _ => None,
        };
        TxnOutcome::Conflict { revision, current: response.responses.into_iter().map(found).collect() }
    }

    /// The lease of a rejected transaction that does not exist.
    async fn missing_lease(&self, txn: &Txn) -> Option<LeaseId> {
        let mut leases: Vec<LeaseId> = txn.ops.iter().filter_map(lease_of).collect();
        leases.sort_unstable();
        leases.dedup();
        if let [only] = leases[..] {
            return Some(only);
        }
        for lease in &leases {
            let left = self.client.lease_time_to_live(lease.0, false).await;
            if left.is_ok_and(|left| left.ttl <= 0) {
                return Some(*lease);
            }
        }
        leases.first().copied()
    }
}

fn lease_of(op: &Op) -> Option<LeaseId> {
    match op {
        Op::Put { lease, .. } => *lease,
        Op::Delete { .. } => None,
    }
}

fn step(kind: RequestOpKind) -> RequestOp {
    RequestOp { op: Some(kind) }
}

/// Validated here so that every backend rejects the same transactions.
fn check(txn: &Txn) -> Result<(), RepositoryError> {
    let invalid = |why: &str| Err(RepositoryError::Invalid(why.to_owned()));
    if txn.compares.len() > MAX_TXN_OPS || txn.ops.len() > MAX_TXN_OPS {
        return invalid("too many operations");
    }
    let keys = txn.compares.iter().map(Compare::key).chain(txn.ops.iter().map(Op::key));
    if keys.clone().any(str::is_empty) {
        return invalid("a key is empty");
    }
    let values = txn.ops.iter().map(|op| match op {
        Op::Put { value, .. } => value.len(),
        Op::Delete { .. } => 0,
    });
    let compared = txn.compares.iter().map(|compare| match compare {
        Compare::Value(_, value) => value.len(),
        _ => 0,
    });
    if keys.map(str::len).chain(values).chain(compared).sum::<usize>() > MAX_TXN_BYTES {
        return invalid("the transaction is too large");
    }
    Ok(())
}

/// A failed read changed nothing.
fn read_error(error: EtcdError) -> RepositoryError {
    match error.code() {
        Some(Code::InvalidArgument | Code::OutOfRange | Code::PermissionDenied | Code::Unauthenticated) => {
            RepositoryError::Invalid(error.to_string())
        }
        Some(Code::DataLoss) => RepositoryError::Damaged(error.to_string()),
        _ => RepositoryError::Unavailable(error.to_string()),
    }
}

/// A failed write may have been applied, unless the server's error excludes it.
fn write_error(error: EtcdError) -> RepositoryError {
    if error.may_have_happened() {
        return RepositoryError::Unknown;
    }
    match error.code() {
        None | Some(Code::Unavailable | Code::ResourceExhausted) => {
            RepositoryError::Unavailable(error.to_string())
        }
        Some(_) => RepositoryError::Invalid(error.to_string()),
    }
}

fn lease_error(error: EtcdError, lease: LeaseId) -> RepositoryError {
    match error.code() {
        Some(Code::NotFound) => RepositoryError::LeaseNotFound(lease),
        _ => write_error(error),
    }
}

impl StateRepository for EtcdRepository {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, RepositoryError>> {
        Box::pin(async move {
            let request = RangeRequest { key: self.key(key), ..Default::default() };
            let response = self.client.range(&request).await.map_err(read_error)?;
            Ok(response.kvs.first().and_then(|kv| self.entry(kv)))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<(i64, Vec<Entry>), RepositoryError>> {
        Box::pin(async move {
            let (key, range_end) = prefix_range(&self.key(prefix));
            let request = RangeRequest { key: key.into(), range_end: range_end.into(), ..Default::default() };
            let response = self.client.range(&request).await.map_err(read_error)?;
            let entries = response.kvs.iter().filter_map(|kv| self.entry(kv)).collect();
            Ok((response.header.map_or(0, |header| header.revision), entries))
        })
    }

    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, RepositoryError>> {
        Box::pin(async move {
            check(&txn)?;
            match self.client.txn(&self.request(&txn)).await {
                Ok(response) => Ok(self.outcome(response)),
                Err(error) if error.code() == Some(Code::NotFound) => match self.missing_lease(&txn).await {
                    Some(lease) => Err(RepositoryError::LeaseNotFound(lease)),
                    None => Err(write_error(error)),
                },
                Err(error) => Err(write_error(error)),
            }
        })
    }

    fn grant(&self, ttl: Duration) -> BoxFuture<'_, Result<Lease, RepositoryError>> {
        Box::pin(async move {
            let seconds = i64::try_from(ttl.as_millis().div_ceil(1_000)).unwrap_or(i64::MAX).max(1);
            let granted = self.client.lease_grant(seconds, 0).await.map_err(write_error)?;
            Ok(Lease { id: LeaseId(granted.id), ttl: seconds_of(granted.ttl) })
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> BoxFuture<'_, Result<Duration, RepositoryError>> {
        Box::pin(async move {
            let renewed =
                self.client.lease_keep_alive(lease.0).await.map_err(|error| lease_error(error, lease))?;
            if renewed.ttl <= 0 {
                return Err(RepositoryError::LeaseNotFound(lease));
            }
            Ok(seconds_of(renewed.ttl))
        })
    }

    fn revoke(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), RepositoryError>> {
        Box::pin(async move {
            let revoked = self.client.lease_revoke(lease.0).await;
            revoked.map(drop).map_err(|error| lease_error(error, lease))
        })
    }

    fn watch<'a>(
        &'a self,
        prefix: &'a str,
        from_revision: i64,
    ) -> BoxFuture<'a, Result<Watch, RepositoryError>> {
        Box::pin(async move {
            let prefix = self.key(prefix);
            let (key, range_end) = prefix_range(&prefix);
            debug_assert_eq!(range_end, prefix_end(&prefix));
            let options = WatchOptions {
                key: key.into(),
                range_end: range_end.into(),
                start_revision: from_revision,
                ..Default::default()
            };
            match self.client.watch(options).await {
                Ok(watch) => Ok(self.deliver(watch)),
                Err(WatchError::Compacted { oldest }) => {
                    Ok(Watch::new(stream::iter([Err(WatchGap::Compacted { oldest })])))
                }
                Err(WatchError::Refused(why)) => Err(RepositoryError::Invalid(why)),
                Err(WatchError::Failed(error)) => Err(read_error(error)),
            }
        })
    }
}

/// A watch, and the events it has received and not delivered yet.
struct Delivery {
    watch: EtcdWatch,
    ready: std::vec::IntoIter<wire::Event>,
    repository: EtcdRepository,
}

impl EtcdRepository {
    fn deliver(&self, watch: EtcdWatch) -> Watch {
        let delivery = Delivery { watch, ready: Vec::new().into_iter(), repository: self.clone() };
        Watch::new(stream::unfold(Some(delivery), |delivery| async {
            let mut delivery = delivery?;
            match delivery.next().await {
                Ok(event) => Some((Ok(event), Some(delivery))),
                Err(Some(gap)) => Some((Err(gap), None)),
                Err(None) => None,
            }
        }))
    }
}

impl Delivery {
    /// The next event; a gap or `None` when the watch has ended.
    async fn next(&mut self) -> Result<Event, Option<WatchGap>> {
        loop {
            for event in self.ready.by_ref() {
                if let Some(event) = self.repository.event(&event) {
                    return Ok(event);
                }
            }
            match self.watch.next().await {
                Ok(batch) => self.ready = batch.events.into_iter(),
                Err(WatchError::Compacted { oldest }) => return Err(Some(WatchGap::Compacted { oldest })),
                Err(error) => {
                    tracing::warn!(%error, "etcd watch ended");
                    return Err(None);
                }
            }
        }
    }
}

impl EtcdRepository {
    fn event(&self, event: &wire::Event) -> Option<Event> {
        let kv = event.kv.as_ref()?;
        let entry = self.entry(kv)?;
        Some(if event.kind == EventType::Delete as i32 {
            Event::Delete { key: entry.key, revision: kv.mod_revision }
        } else {
            Event::Put(entry)
        })
    }
}

fn seconds_of(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or(0))
}
