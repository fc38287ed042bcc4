//! The Lease service. Clients use seconds, the state machine milliseconds.

use futures_util::stream::{FuturesOrdered, StreamExt as _};
use moim_wire_grpc::Status;
use moim_wire_grpc::etcd as wire;

use super::Api;
use super::call::{Body, ClientGone, Responder, Sender};
use super::dispatch::CallOptions;
use crate::LeaseId;
use crate::engine::CoordError;
use crate::error::Error;
use crate::request::Origin;

/// Maximum number of keepalives of one stream in progress. Each waits for a leadership confirmation; together they wait
/// once.
const MAX_INFLIGHT_RENEWALS: usize = 256;

pub(super) async fn grant(
    api: &Api,
    request: wire::LeaseGrantRequest,
) -> Result<wire::LeaseGrantResponse, Status> {
    let ttl_ms = request.ttl.saturating_mul(1_000);
    let (id, ttl_ms) = api.coordinator.lease_grant(Origin::Client, LeaseId(request.id), ttl_ms).await?;
    let header = Some(api.header_now());
    Ok(wire::LeaseGrantResponse { header, id: id.0, ttl: whole_seconds(ttl_ms), error: String::new() })
}

pub(super) async fn revoke(
    api: &Api,
    request: wire::LeaseRevokeRequest,
) -> Result<wire::LeaseRevokeResponse, Status> {
    api.coordinator.lease_revoke(Origin::Client, LeaseId(request.id)).await?;
    Ok(wire::LeaseRevokeResponse { header: Some(api.header_now()) })
}

pub(super) async fn time_to_live(
    api: &Api,
    request: wire::LeaseTimeToLiveRequest,
) -> Result<wire::LeaseTimeToLiveResponse, Status> {
    let info = api.coordinator.lease_time_to_live(LeaseId(request.id), request.keys).await?;
    let header = Some(api.header_now());
    if info.remaining_ms < 0 {
        let response =
            wire::LeaseTimeToLiveResponse { header, id: request.id, ttl: -1, ..Default::default() };
        return Ok(response);
    }
    Ok(wire::LeaseTimeToLiveResponse {
        header,
        id: request.id,
        ttl: info.remaining_ms / 1_000,
        granted_ttl: whole_seconds(info.granted_ms),
        keys: info.keys,
    })
}

pub(super) async fn leases(
    api: &Api,
    _: wire::LeaseLeasesRequest,
) -> Result<wire::LeaseLeasesResponse, Status> {
    let ids = api.coordinator.leases().await?;
    let leases = ids.into_iter().map(|id| wire::LeaseStatus { id: id.0 }).collect();
    Ok(wire::LeaseLeasesResponse { header: Some(api.header_now()), leases })
}

/// A keepalive stream. Responses are in the order of the requests.
pub(super) async fn keep_alive(
    api: &Api,
    call_options: CallOptions,
    body: Body,
    respond: Responder,
) -> Result<(), ClientGone> {
    let mut sender = respond.start()?;
    let outcome = renew(api, call_options, body, &mut sender).await?;
    sender.finish(outcome)
}

async fn renew(
    api: &Api,
    call_options: CallOptions,
    mut body: Body,
    sender: &mut Sender,
) -> Result<Result<(), Status>, ClientGone> {
    let mut end = std::pin::pin!(api.stream_end(call_options));
    let mut renewals = FuturesOrdered::new();
    let mut half_closed = false;
    loop {
        if half_closed && renewals.is_empty() {
            return Ok(Ok(()));
        }
        tokio::select! {
            status = &mut end => return Ok(Err(status)),
            gone = sender.reset() => return Err(gone),
            Some(renewed) = renewals.next() => match renewed {
                Ok(response) => sender.send(&response).await?,
                Err(status) => return Ok(Err(status)),
            },
            request = body.next_message(), if !half_closed && renewals.len() < MAX_INFLIGHT_RENEWALS => match request {
                Ok(Some(request)) => renewals.push_back(renew_one(api, request)),
                Ok(None) => half_closed = true,
                Err(status) => return Ok(Err(status)),
            },
        }
    }
}

async fn renew_one(
    api: &Api,
    request: wire::LeaseKeepAliveRequest,
) -> Result<wire::LeaseKeepAliveResponse, Status> {
    // Taken before: its revision must not be later than the renewal.
    let header = Some(api.header_now());
    let ttl_ms = match api.coordinator.lease_keep_alive(Origin::Client, LeaseId(request.id)).await {
        Ok(ttl_ms) => ttl_ms,
        Err(CoordError::Refused(Error::LeaseNotFound)) => 0,
        Err(error) => return Err(error.into()),
    };
    Ok(wire::LeaseKeepAliveResponse { header, id: request.id, ttl: whole_seconds(ttl_ms) })
}

/// A TTL in seconds, rounded up, so that a node's lease of less than a second is not shown as expired.
fn whole_seconds(ms: i64) -> i64 {
    (ms + 999).div_euclid(1_000)
}
