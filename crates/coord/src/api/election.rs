//! The Election service: the leader of a name is the owner of the oldest key under it.
//!
//! The keys are those of the Lock service, with the leader's value in them.

use std::sync::Arc;

use bytes::Bytes;
use moim_wire_grpc::election as wire;
use moim_wire_grpc::{Code, Status};

use super::call::{Body, ClientGone, Responder, Sender};
use super::convert;
use super::dispatch::CallOptions;
use super::lock::{created_at, enqueue, oldest_key, prefix_of, prefix_range, session};
use super::{Api, status};
use crate::LeaseId;
use crate::engine::WatchItem;
use crate::reply::KeyValue;
use crate::request::{DeleteRequest, Origin, PutRequest, RangeRequest, TxnOp, TxnRequest};
use crate::watch::WatchRequest;

pub(super) async fn campaign(
    api: &Arc<Api>,
    request: wire::CampaignRequest,
) -> Result<wire::CampaignResponse, Status> {
    let lease = session(api, request.lease).await?;
    let candidate = enqueue(api, &request.name, lease, request.value.clone()).await?;
    let leader = wire::LeaderKey {
        name: request.name,
        key: candidate.key.clone(),
        rev: candidate.revision,
        lease: lease.0,
    };
    if candidate.held.as_ref().is_some_and(|held| *held != request.value) {
        // The lease had its key already: update the value.
        update_value(api, &leader, request.value).await?;
    }
    let enqueued_at = candidate.enqueued_at;
    let expired = || Status::new(Code::Unknown, "election: session expired before leadership was won");
    if candidate.wait(api).await?.is_none() {
        candidate.keep();
        return Err(expired());
    }
    candidate.keep();
    Ok(wire::CampaignResponse { header: Some(api.header(enqueued_at)), leader: Some(leader) })
}

pub(super) async fn proclaim(
    api: &Arc<Api>,
    request: wire::ProclaimRequest,
) -> Result<wire::ProclaimResponse, Status> {
    let leader = request.leader.ok_or_else(missing_leader)?;
    let revision = update_value(api, &leader, request.value).await?;
    Ok(wire::ProclaimResponse { header: Some(api.header(revision)) })
}

/// Changes the value of a leader's key, as long as it is still that leader's.
async fn update_value(api: &Api, leader: &wire::LeaderKey, value: Bytes) -> Result<i64, Status> {
    let put = PutRequest { lease: LeaseId(leader.lease), ..PutRequest::new(leader.key.clone(), value) };
    let txn = TxnRequest {
        compares: vec![created_at(&leader.key, leader.rev)],
        success: vec![TxnOp::Put(put)],
        failure: Vec::new(),
    };
    let reply = api.coordinator.txn(Origin::Client, txn, false).await?;
    if reply.succeeded { Ok(reply.revision) } else { Err(Status::new(Code::Unknown, "election: not leader")) }
}

pub(super) async fn resign(
    api: &Arc<Api>,
    request: wire::ResignRequest,
) -> Result<wire::ResignResponse, Status> {
    let leader = request.leader.ok_or_else(missing_leader)?;
    let txn = TxnRequest {
        compares: vec![created_at(&leader.key, leader.rev)],
        success: vec![TxnOp::Delete(DeleteRequest::key(leader.key))],
        failure: Vec::new(),
    };
    let reply = api.coordinator.txn(Origin::Client, txn, false).await?;
    Ok(wire::ResignResponse { header: Some(api.header(reply.revision)) })
}

pub(super) async fn leader(
    api: &Arc<Api>,
    request: wire::LeaderRequest,
) -> Result<wire::LeaderResponse, Status> {
    let reply = api.coordinator.range(oldest_key(&prefix_of(&request.name)), false).await?;
    let header = Some(api.header(reply.revision));
    match reply.kvs.into_iter().next() {
        Some(kv) => Ok(wire::LeaderResponse { header, kv: Some(convert::key_value(kv)) }),
        None => Err(Status::new(Code::Unknown, "election: no leader")),
    }
}

fn missing_leader() -> Status {
    Status::new(Code::Unknown, "\"leader\" field must be provided")
}

/// Streams the leader, now and on each change.
pub(super) async fn observe(
    api: &Api,
    call_options: CallOptions,
    mut body: Body,
    respond: Responder,
) -> Result<(), ClientGone> {
    let request: wire::LeaderRequest = match body.only().await {
        Ok(request) => request,
        Err(status) => return respond.fail(&status),
    };
    let mut sender = respond.start()?;
    let mut observer = Observer { api, prefix: prefix_of(&request.name) };
    let status = observer.run(call_options, &mut sender).await?;
    sender.finish(Err(status))
}

struct Observer<'a> {
    api: &'a Api,
    prefix: Bytes,
}

/// What an observer receives: a value of the leader, or the need to read the leader again.
enum LeaderEvent {
    Value(KeyValue),
    Reread,
}

impl Observer<'_> {
    async fn run(&mut self, call_options: CallOptions, sender: &mut Sender) -> Result<Status, ClientGone> {
        let mut end = std::pin::pin!(self.api.stream_end(call_options));
        loop {
            let first = tokio::select! {
                status = &mut end => return Ok(status),
                gone = sender.reset() => return Err(gone),
                first = self.read_leader() => first,
            };
            let (revision, leader) = match first {
                Ok(first) => first,
                Err(status) => return Ok(status),
            };
            let mut watch = self.api.coordinator.watcher();
            let watched = match &leader {
                Some(kv) => WatchRequest { key: kv.key.clone(), ..WatchRequest::default() },
                None => {
                    let RangeRequest { key, range_end, .. } = prefix_range(&self.prefix);
                    WatchRequest { key, range_end, no_delete: true, ..WatchRequest::default() }
                }
            };
            if let Err(error) = watch.create(WatchRequest { start_revision: revision + 1, ..watched }) {
                return Ok(error.into());
            }
            let has_leader = leader.is_some();
            if let Some(kv) = leader {
                self.send_leader(sender, revision, kv).await?;
            }
            loop {
                let item = tokio::select! {
                    status = &mut end => return Ok(status),
                    gone = sender.reset() => return Err(gone),
                    item = watch.next() => item,
                };
                let Some(item) = item else { return Ok(status::stopped()) };
                let mut events = leader_events(item).into_iter();
                // A new first key of an empty queue, and the successor of a leader, are found by reading again.
                let reread = loop {
                    match events.next() {
                        Some(LeaderEvent::Value(kv)) if has_leader => {
                            self.send_leader(sender, kv.mod_revision, kv).await?
                        }
                        Some(_) => break true,
                        None => break false,
                    }
                };
                if reread {
                    break;
                }
            }
        }
    }

    async fn read_leader(&self) -> Result<(i64, Option<KeyValue>), Status> {
        let reply = self.api.coordinator.range(oldest_key(&self.prefix), false).await?;
        Ok((reply.revision, reply.kvs.into_iter().next()))
    }

    async fn send_leader(&self, sender: &mut Sender, revision: i64, kv: KeyValue) -> Result<(), ClientGone> {
        let header = Some(self.api.header(revision));
        sender.send(&wire::LeaderResponse { header, kv: Some(convert::key_value(kv)) }).await
    }
}

fn leader_events(item: WatchItem) -> Vec<LeaderEvent> {
    match item {
        WatchItem::Events { batch, .. } => {
            let to_event = |event: crate::Event| {
                if event.is_delete { LeaderEvent::Reread } else { LeaderEvent::Value(event.kv) }
            };
            batch.events.into_iter().map(to_event).collect()
        }
        WatchItem::Canceled { .. } => vec![LeaderEvent::Reread],
        WatchItem::Progress { .. } => Vec::new(),
    }
}
