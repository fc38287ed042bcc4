//! The gRPC health service: SERVING means that this node sees a leader.

use moim_wire_grpc::health as wire;
use moim_wire_grpc::{Code, Status};

use super::Api;
use super::call::{Body, ClientGone, Responder};
use super::dispatch::CallOptions;

pub(super) async fn check(
    api: &Api,
    request: wire::HealthCheckRequest,
) -> Result<wire::HealthCheckResponse, Status> {
    if !request.service.is_empty() {
        return Err(Status::new(Code::NotFound, "unknown service"));
    }
    Ok(now(api.has_leader()))
}

fn now(has_leader: bool) -> wire::HealthCheckResponse {
    let status = if has_leader { wire::ServingStatus::Serving } else { wire::ServingStatus::NotServing };
    wire::HealthCheckResponse { status: status.into() }
}

/// Streams the health status, now and on each change.
pub(super) async fn watch(
    api: &Api,
    call_options: CallOptions,
    mut body: Body,
    respond: Responder,
) -> Result<(), ClientGone> {
    let request: wire::HealthCheckRequest = match body.only().await {
        Ok(request) => request,
        Err(status) => return respond.fail(&status),
    };
    let mut sender = respond.start()?;
    if !request.service.is_empty() {
        let status = wire::ServingStatus::ServiceUnknown.into();
        sender.send(&wire::HealthCheckResponse { status }).await?;
    }
    let mut quorum = api.quorum.subscribe();
    let mut end = std::pin::pin!(api.stream_end(call_options));
    let mut has_leader = api.has_leader();
    let status = loop {
        if request.service.is_empty() {
            sender.send(&now(has_leader)).await?;
        }
        tokio::select! {
            status = &mut end => break status,
            gone = sender.reset() => return Err(gone),
            is_lost = quorum.changed() => has_leader = !is_lost,
        }
    };
    sender.finish(Err(status))
}
