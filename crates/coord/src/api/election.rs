//! The Election service: the leader of a name is the owner of the oldest key under it.
//!
//! The keys are those of the Lock service, with the leader's value in them.

use std::sync::Arc;

use bytes::Bytes;
use moim_wire_grpc::election as wire;
use moim_wire_grpc::{Code, Status};

use super::call::{Body, Gone, Respond, Sender};
use super::convert;
use super::dispatch::Terms;
use super::lock::{created_at, enter, oldest_of, prefix_of, session, under};
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
    let place = enter(api, &request.name, lease, request.value.clone()).await?;
    let leader =
        wire::LeaderKey { name: request.name, key: place.key.clone(), rev: place.revision, lease: lease.0 };
    if place.held.as_ref().is_some_and(|held| *held != request.value) {
        // The lease had its key already: the value is a new one.
        announce(api, &leader, request.value).await?;
    }
    let entered_at = place.entered_at;
    let expired = || Status::new(Code::Unknown, "election: session expired before leadership was won");
    if place.wait(api).await?.is_none() {
        place.keep();
        return Err(expired());
    }
    place.keep();
    Ok(wire::CampaignResponse { header: Some(api.header(entered_at)), leader: Some(leader) })
}

pub(super) async fn proclaim(
    api: &Arc<Api>,
    request: wire::ProclaimRequest,
) -> Result<wire::ProclaimResponse, Status> {
    let leader = request.leader.ok_or_else(missing_leader)?;
    let revision = announce(api, &leader, request.value).await?;
    Ok(wire::ProclaimResponse { header: Some(api.header(revision)) })
}

/// Changes the value of a leader's key, as long as it is that leader's.
async fn announce(api: &Api, leader: &wire::LeaderKey, value: Bytes) -> Result<i64, Status> {
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
    let reply = api.coordinator.range(oldest_of(&prefix_of(&request.name)), false).await?;
    let header = Some(api.header(reply.revision));
    match reply.kvs.into_iter().next() {
        Some(kv) => Ok(wire::LeaderResponse { header, kv: Some(convert::key_value(kv)) }),
        None => Err(Status::new(Code::Unknown, "election: no leader")),
    }
}

fn missing_leader() -> Status {
    Status::new(Code::Unknown, "\"leader\" field must be provided")
}

/// Tells who leads, now and whenever it changes.
pub(super) async fn observe(api: &Api, terms: Terms, mut body: Body, respond: Respond) -> Result<(), Gone> {
    let request: wire::LeaderRequest = match body.only().await {
        Ok(request) => request,
        Err(status) => return respond.fail(&status),
    };
    let mut sender = respond.start()?;
    let mut observer = Observer { api, prefix: prefix_of(&request.name) };
    let status = observer.run(terms, &mut sender).await?;
    sender.finish(Err(status))
}

struct Observer<'a> {
    api: &'a Api,
    prefix: Bytes,
}

/// What an observer learns: a value of the leader, or that it has to look again.
enum News {
    Value(KeyValue),
    LookAgain,
}

impl Observer<'_> {
    async fn run(&mut self, terms: Terms, sender: &mut Sender) -> Result<Status, Gone> {
        let mut end = std::pin::pin!(self.api.stream_end(terms));
        loop {
            let first = tokio::select! {
                status = &mut end => return Ok(status),
                gone = sender.reset() => return Err(gone),
                first = self.first() => first,
            };
            let (revision, leader) = match first {
                Ok(first) => first,
                Err(status) => return Ok(status),
            };
            let mut watch = self.api.coordinator.watcher();
            let watched = match &leader {
                Some(kv) => WatchRequest { key: kv.key.clone(), ..WatchRequest::default() },
                None => {
                    let RangeRequest { key, range_end, .. } = under(&self.prefix);
                    WatchRequest { key, range_end, no_delete: true, ..WatchRequest::default() }
                }
            };
            if let Err(error) = watch.create(WatchRequest { start_revision: revision + 1, ..watched }) {
                return Ok(error.into());
            }
            let leads = leader.is_some();
            if let Some(kv) = leader {
                self.tell(sender, revision, kv).await?;
            }
            loop {
                let item = tokio::select! {
                    status = &mut end => return Ok(status),
                    gone = sender.reset() => return Err(gone),
                    item = watch.next() => item,
                };
                let Some(item) = item else { return Ok(status::stopped()) };
                let mut news = news_of(item).into_iter();
                // Whoever put the first key of an empty queue is found by looking, like after a leader has left.
                let over = loop {
                    match news.next() {
                        Some(News::Value(kv)) if leads => self.tell(sender, kv.mod_revision, kv).await?,
                        Some(_) => break true,
                        None => break false,
                    }
                };
                if over {
                    break;
                }
            }
        }
    }

    async fn first(&self) -> Result<(i64, Option<KeyValue>), Status> {
        let reply = self.api.coordinator.range(oldest_of(&self.prefix), false).await?;
        Ok((reply.revision, reply.kvs.into_iter().next()))
    }

    async fn tell(&self, sender: &mut Sender, revision: i64, kv: KeyValue) -> Result<(), Gone> {
        let header = Some(self.api.header(revision));
        sender.send(&wire::LeaderResponse { header, kv: Some(convert::key_value(kv)) }).await
    }
}

fn news_of(item: WatchItem) -> Vec<News> {
    match item {
        WatchItem::Events { batch, .. } => {
            let news =
                |event: crate::Event| if event.is_delete { News::LookAgain } else { News::Value(event.kv) };
            batch.events.into_iter().map(news).collect()
        }
        WatchItem::Canceled { .. } => vec![News::LookAgain],
        WatchItem::Progress { .. } => Vec::new(),
    }
}
