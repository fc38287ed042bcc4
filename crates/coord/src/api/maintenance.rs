//! The Maintenance service: status, alarms, hashes, snapshots, leadership transfer.

use moim_raft::VoterId;
use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::{Code, Status};

use super::backup::Backup;
use super::call::{Body, ClientGone, Responder, Sender};
use super::convert::CLIENT_SPACE;
use super::dispatch::CallOptions;
use super::{Api, VERSION};
use crate::engine::CoordError;
use crate::request::{Alarm, AlarmKind};

pub(super) async fn status(api: &Api, _: wire::StatusRequest) -> Result<wire::StatusResponse, Status> {
    let status = api.coordinator.status();
    Ok(wire::StatusResponse {
        header: Some(api.header_now()),
        version: VERSION.to_owned(),
        db_size: signed(status.db_size),
        leader: status.leader.map_or(0, |leader| leader.0),
        raft_index: status.raft_index,
        raft_term: status.term,
        raft_applied_index: status.applied,
        errors: status.errors,
        db_size_in_use: signed(status.db_size_in_use),
        is_learner: status.is_learner,
        ..Default::default()
    })
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

pub(super) async fn alarm(api: &Api, request: wire::AlarmRequest) -> Result<wire::AlarmResponse, Status> {
    use wire::{AlarmAction as Action, AlarmType as Kind};
    let kind = Kind::try_from(request.alarm).map_err(|_| unknown("alarm", request.alarm))?;
    let kind = match kind {
        Kind::None => None,
        Kind::NoSpace => Some(AlarmKind::NoSpace),
        Kind::Corrupt => Some(AlarmKind::Corrupt),
    };
    let named = kind.map(|kind| Alarm { kind, member: request.member_id });
    let action = Action::try_from(request.action).map_err(|_| unknown("alarm action", request.action))?;
    let alarms = match (action, named) {
        (Action::Get, _) => {
            let mut alarms = api.coordinator.alarms().await?;
            alarms.retain(|alarm| kind.is_none_or(|kind| kind == alarm.kind));
            alarms
        }
        (Action::Activate, Some(alarm)) => api.coordinator.alarm_on(alarm).await?,
        (Action::Deactivate, Some(alarm)) => api.coordinator.alarm_off(alarm).await?,
        (Action::Activate | Action::Deactivate, None) => Vec::new(),
    };
    let alarms = alarms.into_iter().map(|alarm| {
        let kind = match alarm.kind {
            AlarmKind::NoSpace => Kind::NoSpace,
            AlarmKind::Corrupt => Kind::Corrupt,
        };
        wire::AlarmMember { member_id: alarm.member, alarm: kind.into() }
    });
    Ok(wire::AlarmResponse { header: Some(api.header_now()), alarms: alarms.collect() })
}

fn unknown(what: &str, number: i32) -> Status {
    Status::new(Code::InvalidArgument, format!("moim: unknown {what} {number}"))
}

/// Does nothing: compacted history is reclaimed automatically and never fragments.
pub(super) async fn defragment(
    api: &Api,
    _: wire::DefragmentRequest,
) -> Result<wire::DefragmentResponse, Status> {
    Ok(wire::DefragmentResponse { header: Some(api.header_now()) })
}

pub(super) async fn hash(api: &Api, _: wire::HashRequest) -> Result<wire::HashResponse, Status> {
    let reply = api.coordinator.hash_kv(CLIENT_SPACE, 0)?;
    Ok(wire::HashResponse { header: Some(api.header(reply.revision)), hash: reply.hash })
}

pub(super) async fn hash_kv(api: &Api, request: wire::HashKvRequest) -> Result<wire::HashKvResponse, Status> {
    let reply = api.coordinator.hash_kv(CLIENT_SPACE, request.revision)?;
    Ok(wire::HashKvResponse {
        header: Some(api.header(reply.revision)),
        hash: reply.hash,
        compact_revision: reply.compact_revision,
        hash_revision: reply.hash_revision,
    })
}

/// Transfers leadership. As in etcd the request must go to the leader itself, so that a caller with a stale view of the
/// leader moves nothing.
pub(super) async fn move_leader(
    api: &Api,
    request: wire::MoveLeaderRequest,
) -> Result<wire::MoveLeaderResponse, Status> {
    let group = api.coordinator.group();
    if group.leader().map(|leader| leader.id) != Some(group.voter()) {
        return Err(CoordError::NotLeader.into());
    }
    api.coordinator.move_leader(VoterId(request.target_id)).await?;
    Ok(wire::MoveLeaderResponse { header: Some(api.header_now()) })
}

/// Always refused: no older version of this cluster speaks this protocol.
pub(super) async fn downgrade(
    _: &Api,
    request: wire::DowngradeRequest,
) -> Result<wire::DowngradeResponse, Status> {
    let is_version = |text: &str| {
        let parts: Vec<&str> = text.split('.').collect();
        (2..=3).contains(&parts.len()) && parts.iter().all(|part| part.parse::<u32>().is_ok())
    };
    Err(match wire::DowngradeAction::try_from(request.action) {
        Ok(wire::DowngradeAction::Cancel) => {
            Status::new(Code::FailedPrecondition, "etcdserver: no inflight downgrade job")
        }
        Ok(_) if !is_version(&request.version) => {
            Status::new(Code::InvalidArgument, "etcdserver: wrong downgrade target version format")
        }
        Ok(_) => Status::new(Code::InvalidArgument, "etcdserver: invalid downgrade target version"),
        Err(_) => unknown("downgrade action", request.action),
    })
}

/// The store as a snapshot file for `etcdctl snapshot save` and `moim coord snapshot restore`.
pub(super) async fn snapshot(
    api: &Api,
    call_options: CallOptions,
    mut body: Body,
    respond: Responder,
) -> Result<(), ClientGone> {
    if let Err(status) = body.only::<wire::SnapshotRequest>().await {
        return respond.fail(&status);
    }
    let mut sender = respond.start()?;
    // A snapshot pins history: a client that does not read it must not keep it.
    sender.limit_stalls();
    let mut end = std::pin::pin!(api.stream_end(call_options));
    let outcome = tokio::select! {
        status = &mut end => Err(status),
        sent = send_snapshot(api, &mut sender) => sent?,
    };
    sender.finish(outcome)
}

async fn send_snapshot(api: &Api, sender: &mut Sender) -> Result<Result<(), Status>, ClientGone> {
    let mut sent_bytes = 0;
    let mut backup = Backup::new(api.coordinator.database());
    while let Some(chunk) = backup.next() {
        let chunk = match chunk {
            Ok(chunk) => chunk,
            Err(error) => return Ok(Err(Status::new(Code::Unavailable, format!("etcdserver: {error}")))),
        };
        if chunk.bytes.is_empty() {
            tokio::task::yield_now().await;
            continue;
        }
        sent_bytes += chunk.bytes.len() as u64;
        let total_bytes = backup.database().total_bytes();
        // Some clients take 0 for the end of the file, which is the checksum.
        let remaining_bytes = if chunk.is_last { 0 } else { total_bytes.saturating_sub(sent_bytes).max(32) };
        let response = wire::SnapshotResponse {
            header: Some(api.header_now()),
            remaining_bytes,
            blob: chunk.bytes,
            version: VERSION.to_owned(),
        };
        sender.send(&response).await?;
        // Let other tasks run: a large store has many chunks.
        tokio::task::yield_now().await;
    }
    Ok(Ok(()))
}
