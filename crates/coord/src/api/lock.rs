//! The Lock service: the holder of a lock is the owner of the oldest key under its name, and a waiter watches the key
//! before its own.
//!
//! The keys are those of etcd's own recipe (`name/<lease in hex>`), so a client-side lock and a server-side lock
//! exclude each other. A lock alone does not stop a slow former holder: the create revision of the key is the fencing
//! token, and `header.revision` of the response is at least that.

use std::sync::Arc;

use bytes::Bytes;
use moim_wire_grpc::lock as wire;
use moim_wire_grpc::{Code, Status};

use super::{Api, status};
use crate::LeaseId;
use crate::engine::WatchItem;
use crate::reply::{RangeReply, Reply, TxnOpReply, TxnReply};
use crate::request::{
    Command, Compare, CompareResult, CompareTarget, DeleteRequest, Op, Origin, PutRequest, RangeRequest,
    SortOrder, SortTarget, TxnOp, TxnRequest,
};
use crate::watch::WatchRequest;

/// TTL of the lease that the server grants if the caller named none.
const SESSION_TTL_MS: i64 = 60_000;

pub(super) async fn lock(api: &Arc<Api>, request: wire::LockRequest) -> Result<wire::LockResponse, Status> {
    let lease = session(api, request.lease).await?;
    let entry = enqueue(api, &request.name, lease, Bytes::new()).await?;
    let key = entry.key.clone();
    let mut revision = entry.enqueued_at;
    if entry.oldest != Some(entry.revision) {
        let Some(held_at) = entry.wait(api).await? else {
            entry.keep();
            return Err(Status::new(Code::Unknown, "mutex: session is expired"));
        };
        revision = held_at;
    }
    entry.keep();
    Ok(wire::LockResponse { header: Some(api.header(revision)), key })
}

pub(super) async fn unlock(
    api: &Arc<Api>,
    request: wire::UnlockRequest,
) -> Result<wire::UnlockResponse, Status> {
    let command = Command::client(Op::Delete(DeleteRequest::key(request.key)));
    match api.coordinator.execute(command).await? {
        Reply::Delete(reply) => Ok(wire::UnlockResponse { header: Some(api.header(reply.revision)) }),
        _ => Err(status::mismatched()),
    }
}

/// The lease to use: the caller's, or a new one.
pub(super) async fn session(api: &Api, lease: i64) -> Result<LeaseId, Status> {
    if lease != 0 {
        return Ok(LeaseId(lease));
    }
    let (id, _) = api.coordinator.lease_grant(Origin::Client, LeaseId::NONE, SESSION_TTL_MS).await?;
    Ok(id)
}

/// An entry in the queue of a name. Dropping it deletes its key, unless it was kept.
pub(super) struct QueueEntry {
    api: Arc<Api>,
    pub(super) key: Bytes,
    prefix: Bytes,
    /// The create revision of the key: the order of the queue, and the fencing token.
    pub(super) revision: i64,
    /// The create revision of the first entry of the queue when this one was added.
    oldest: Option<i64>,
    /// The previous value of the key, if the lease had the key already.
    pub(super) held: Option<Bytes>,
    /// The revision of the store when the entry was added.
    pub(super) enqueued_at: i64,
    kept: bool,
}

/// Adds an entry to the queue of `name`, or finds the one of the lease.
pub(super) async fn enqueue(
    api: &Arc<Api>,
    name: &[u8],
    lease: LeaseId,
    value: Bytes,
) -> Result<QueueEntry, Status> {
    let prefix = prefix_of(name);
    let mut key = prefix.to_vec();
    key.extend_from_slice(hex(lease).as_bytes());
    let key = Bytes::from(key);
    let put = PutRequest { lease, ..PutRequest::new(key.clone(), value) };
    let txn = TxnRequest {
        compares: vec![created_at(&key, 0)],
        success: vec![TxnOp::Put(put), TxnOp::Range(oldest_key(&prefix))],
        failure: vec![TxnOp::Range(RangeRequest::key(key.clone())), TxnOp::Range(oldest_key(&prefix))],
    };
    let reply = api.coordinator.txn(Origin::Client, txn, false).await?;
    let enqueued_at = reply.revision;
    let (own, oldest) = split_reply(reply)?;
    let (revision, held) = match own.and_then(|own| own.kvs.into_iter().next()) {
        Some(kv) => (kv.create_revision, Some(kv.value)),
        None => (enqueued_at, None),
    };
    let oldest = oldest.kvs.first().map(|kv| kv.create_revision);
    Ok(QueueEntry { api: Arc::clone(api), key, prefix, revision, oldest, held, enqueued_at, kept: false })
}

/// The previous key-value if the key existed, and the first entry of the queue.
fn split_reply(reply: TxnReply) -> Result<(Option<RangeReply>, RangeReply), Status> {
    let mut responses = reply.responses.into_iter();
    match (responses.next(), responses.next()) {
        (Some(TxnOpReply::Put(_)), Some(TxnOpReply::Range(oldest))) => Ok((None, oldest)),
        (Some(TxnOpReply::Range(own)), Some(TxnOpReply::Range(oldest))) => Ok((Some(own), oldest)),
        _ => Err(status::mismatched()),
    }
}

impl QueueEntry {
    /// Waits until every earlier key is deleted. Returns a revision at which this key existed and was the oldest;
    /// `None` as soon as this key is deleted, with its lease or by another client.
    pub(super) async fn wait(&self, api: &Api) -> Result<Option<i64>, Status> {
        loop {
            let before = RangeRequest {
                limit: 1,
                sort_order: SortOrder::Descend,
                sort_target: SortTarget::Create,
                max_create_revision: self.revision - 1,
                ..prefix_range(&self.prefix)
            };
            let reply = api.coordinator.range(before, false).await?;
            match reply.kvs.into_iter().next() {
                // Keys with smaller create revisions never appear again, so this key is the oldest while it exists.
                None => return self.own(api).await,
                Some(kv) => tokio::select! {
                    deleted = wait_deleted(api, kv.key, reply.revision) => deleted?,
                    deleted = wait_deleted(api, self.key.clone(), self.enqueued_at) => {
                        deleted?;
                        if self.own(api).await?.is_none() {
                            return Ok(None);
                        }
                    }
                },
            }
        }
    }

    /// The store's revision, if this entry still exists.
    async fn own(&self, api: &Api) -> Result<Option<i64>, Status> {
        let own = api.coordinator.range(RangeRequest::key(self.key.clone()), false).await?;
        let is_there = own.kvs.first().is_some_and(|kv| kv.create_revision == self.revision);
        Ok(is_there.then_some(own.revision))
    }

    /// Keeps the key beyond the call.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        if self.kept || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (api, key, revision) = (Arc::clone(&self.api), self.key.clone(), self.revision);
        let scope = api.scope.clone();
        scope.spawn("etcd-lock-abandon", async move {
            let txn = TxnRequest {
                compares: vec![created_at(&key, revision)],
                success: vec![TxnOp::Delete(DeleteRequest::key(key))],
                failure: Vec::new(),
            };
            // If the deletion fails, the key is deleted when its lease expires.
            let _ = api.coordinator.txn(Origin::Client, txn, false).await;
        });
    }
}

/// Waits until the key is deleted, or until its history was compacted.
async fn wait_deleted(api: &Api, key: Bytes, seen_at: i64) -> Result<(), Status> {
    let mut watch = api.coordinator.watcher();
    let request = WatchRequest { key, start_revision: seen_at + 1, no_put: true, ..WatchRequest::default() };
    watch.create(request)?;
    loop {
        match watch.next().await {
            Some(WatchItem::Events { .. } | WatchItem::Canceled { .. }) => return Ok(()),
            Some(WatchItem::Progress { .. }) => {}
            None => return Err(status::stopped()),
        }
    }
}

/// The prefix of the keys of a name.
pub(super) fn prefix_of(name: &[u8]) -> Bytes {
    let mut prefix = Vec::with_capacity(name.len() + 1);
    prefix.extend_from_slice(name);
    prefix.push(b'/');
    prefix.into()
}

/// Every key under a prefix that ends with a slash.
pub(super) fn prefix_range(prefix: &Bytes) -> RangeRequest {
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1; // a slash, so there is no carry
    }
    RangeRequest::between(prefix.clone(), end)
}

/// The first entry of a queue.
pub(super) fn oldest_key(prefix: &Bytes) -> RangeRequest {
    RangeRequest {
        limit: 1,
        sort_order: SortOrder::Ascend,
        sort_target: SortTarget::Create,
        ..prefix_range(prefix)
    }
}

/// Compares the create revision of a key; 0 is a missing key.
pub(super) fn created_at(key: &Bytes, revision: i64) -> Compare {
    Compare {
        key: key.clone(),
        range_end: Bytes::new(),
        target: CompareTarget::Create(revision),
        result: CompareResult::Equal,
    }
}

/// A lease id as in the keys of etcd's recipes: hexadecimal, with a sign.
fn hex(lease: LeaseId) -> String {
    if lease.0 < 0 { format!("-{:x}", lease.0.unsigned_abs()) } else { format!("{:x}", lease.0) }
}
