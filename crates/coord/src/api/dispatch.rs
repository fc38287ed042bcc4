//! From the headers of a call to the handler of its method.
//!
//! Owns the decisions before a handler runs: whether the request is gRPC, which method it names, its timeout, and
//! whether it requires a leader.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{Request, StatusCode};
use moim_wire_grpc::{Code, Message, Status, method, timeout};

use super::call::{Body, ClientGone, Responder};
use super::memory::Share;
use super::{Api, auth, cluster, election, health, kv, lease, lock, maintenance, status, watch};
use crate::engine::CoordError;

/// Options in the headers of a call.
#[derive(Clone, Copy, Default)]
pub(super) struct CallOptions {
    /// The timeout of the call.
    pub(super) timeout: Option<Duration>,
    /// True if the call must fail without a leader.
    pub(super) needs_leader: bool,
}

/// Why a call is refused before its handler runs.
enum Refusal {
    /// Not gRPC.
    Http(StatusCode, Status),
    /// Unsupported message encoding.
    Encoding(Status),
    /// An invalid gRPC call.
    Status(Status),
}

/// Serves one call from its headers to its end; a call that was not admitted is refused.
pub(super) async fn serve_call(
    (api, share): (Arc<Api>, Arc<Share>),
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    is_admitted: bool,
) {
    let respond = Responder::new(Arc::clone(&share), respond);
    let (head, stream) = request.into_parts();
    // If the client has gone there is nothing left to do.
    let _gone = match parse_call_options(&head) {
        Ok(_) if !is_admitted => respond.fail(&CoordError::TooManyRequests.into()),
        Ok(call_options) if call_options.needs_leader && !api.has_leader() => {
            respond.fail(&status::no_leader())
        }
        Ok(call_options) => {
            route(&api, head.uri.path(), call_options, Body::new(share, stream), respond).await
        }
        Err(Refusal::Http(http_status, status)) => respond.refuse(http_status, &status),
        Err(Refusal::Encoding(status)) => respond.refuse_encoding(&status),
        Err(Refusal::Status(status)) => respond.fail(&status),
    };
}

fn parse_call_options(head: &Parts) -> Result<CallOptions, Refusal> {
    if head.method != http::Method::POST {
        let status = Status::new(Code::Internal, format!("grpc: {} is not POST", head.method));
        return Err(Refusal::Http(StatusCode::METHOD_NOT_ALLOWED, status));
    }
    let content_type = head.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if !is_grpc(content_type) {
        let shown = String::from_utf8_lossy(content_type);
        let status =
            Status::new(Code::InvalidArgument, format!("invalid gRPC request content-type \"{shown}\""));
        return Err(Refusal::Http(StatusCode::UNSUPPORTED_MEDIA_TYPE, status));
    }
    if let Some(encoding) = head.headers.get("grpc-encoding")
        && encoding != "identity"
    {
        let shown = String::from_utf8_lossy(encoding.as_bytes());
        return Err(Refusal::Encoding(Status::new(
            Code::Unimplemented,
            format!("grpc: Decompressor is not installed for grpc-encoding \"{shown}\""),
        )));
    }
    let timeout = match head.headers.get("grpc-timeout") {
        None => None,
        Some(value) => Some(timeout::parse(value.as_bytes()).ok_or_else(|| {
            let shown = String::from_utf8_lossy(value.as_bytes());
            Refusal::Status(Status::new(Code::Internal, format!("malformed grpc-timeout: {shown}")))
        })?),
    };
    let needs_leader = head.headers.get("hasleader").is_some_and(|value| value == "true");
    Ok(CallOptions { timeout, needs_leader })
}

/// `application/grpc`, also with a suffix (`+proto`) or parameters.
fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let Some((head, rest)) = content_type.split_at_checked(GRPC.len()) else { return false };
    head.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';'))
}

/// Runs the handler of the method in `path`.
async fn route(
    api: &Arc<Api>,
    path: &str,
    call_options: CallOptions,
    mut body: Body,
    respond: Responder,
) -> Result<(), ClientGone> {
    /// Reads the request message of a unary call, runs the handler, responds.
    macro_rules! unary {
        ($handler:path) => {{
            // Passed by reference: a future moved into another is stored twice.
            let work = pin!(async { $handler(api, body.only().await?).await });
            unary(api, call_options, respond, work).await
        }};
    }
    /// Like `unary!` for rare or long calls: boxed, so that the future of every call stays small.
    macro_rules! rare {
        ($handler:path) => {{
            let mut work = Box::pin(async { $handler(api, body.only().await?).await });
            unary(api, call_options, respond, work.as_mut()).await
        }};
    }
    /// Like `rare!` for services that etcd implements with an internal client.
    macro_rules! recipe {
        ($handler:path) => {{
            let mut work =
                Box::pin(async { $handler(api, body.only().await?).await.map_err(status::of_recipe) });
            unary(api, call_options, respond, work.as_mut()).await
        }};
    }
    let calls = &api.counters;
    match path {
        method::kv::RANGE => calls.ranges.inc(),
        method::kv::PUT => calls.puts.inc(),
        method::kv::TXN => calls.txns.inc(),
        method::kv::DELETE_RANGE => calls.deletes.inc(),
        _ => calls.other_calls.inc(),
    };
    match path {
        method::kv::RANGE => {
            let mut respond = respond;
            let work = pin!(async { kv::range(api, body.only().await?).await });
            let response = with_timeout(api, call_options, &mut respond, work).await?;
            respond.range(response).await
        }
        method::kv::PUT => unary!(kv::put),
        method::kv::TXN => unary!(kv::txn),
        method::kv::DELETE_RANGE => unary!(kv::delete_range),
        method::kv::COMPACT => rare!(kv::compact),
        method::watch::WATCH => Box::pin(watch::serve(api, call_options, body, respond)).await,
        method::lease::KEEP_ALIVE => Box::pin(lease::keep_alive(api, call_options, body, respond)).await,
        method::lease::GRANT => rare!(lease::grant),
        method::lease::REVOKE => rare!(lease::revoke),
        method::lease::TIME_TO_LIVE => rare!(lease::time_to_live),
        method::lease::LEASES => rare!(lease::leases),
        method::cluster::MEMBER_LIST => rare!(cluster::list),
        method::cluster::MEMBER_ADD => rare!(cluster::add),
        method::cluster::MEMBER_REMOVE => rare!(cluster::remove),
        method::cluster::MEMBER_UPDATE => rare!(cluster::update),
        method::cluster::MEMBER_PROMOTE => rare!(cluster::promote),
        method::maintenance::STATUS => rare!(maintenance::status),
        method::maintenance::ALARM => rare!(maintenance::alarm),
        method::maintenance::DEFRAGMENT => rare!(maintenance::defragment),
        method::maintenance::HASH => rare!(maintenance::hash),
        method::maintenance::HASH_KV => rare!(maintenance::hash_kv),
        method::maintenance::MOVE_LEADER => rare!(maintenance::move_leader),
        method::maintenance::DOWNGRADE => rare!(maintenance::downgrade),
        method::maintenance::SNAPSHOT => {
            Box::pin(maintenance::snapshot(api, call_options, body, respond)).await
        }
        method::lock::LOCK => recipe!(lock::lock),
        method::lock::UNLOCK => recipe!(lock::unlock),
        method::election::CAMPAIGN => recipe!(election::campaign),
        method::election::PROCLAIM => recipe!(election::proclaim),
        method::election::LEADER => recipe!(election::leader),
        method::election::RESIGN => recipe!(election::resign),
        method::election::OBSERVE => Box::pin(election::observe(api, call_options, body, respond)).await,
        method::health::CHECK => rare!(health::check),
        method::health::WATCH => Box::pin(health::watch(api, call_options, body, respond)).await,
        method::auth::STATUS => rare!(auth::status),
        path if path.starts_with(method::auth::PREFIX) => match auth::respond(api, path) {
            Some(response) => respond.unary(response).await,
            None => respond.fail(&unknown_method(path)),
        },
        path => respond.fail(&unknown_method(path)),
    }
}

/// Responds with the result of `work`, within the call's timeout.
async fn unary<M: Message>(
    api: &Api,
    call_options: CallOptions,
    mut respond: Responder,
    work: Pin<&mut impl Future<Output = Result<M, Status>>>,
) -> Result<(), ClientGone> {
    let response = with_timeout(api, call_options, &mut respond, work).await?;
    respond.unary(response).await
}

/// The result of `work`, within the call's timeout.
async fn with_timeout<M>(
    api: &Api,
    call_options: CallOptions,
    respond: &mut Responder,
    work: Pin<&mut impl Future<Output = Result<M, Status>>>,
) -> Result<Result<M, Status>, ClientGone> {
    let response = match call_options.timeout {
        None => respond.until_reset(work).await?,
        // The deadline has passed already: the timer might not fire.
        Some(Duration::ZERO) => Err(status::deadline_exceeded()),
        Some(timeout) => {
            let work = tokio::time::timeout(timeout, work);
            respond.until_reset(work).await?.unwrap_or_else(|_| Err(status::deadline_exceeded()))
        }
    };
    if response.is_err() {
        api.counters.failed_calls.inc();
    }
    Ok(response)
}

fn unknown_method(path: &str) -> Status {
    const SERVICES: [&str; 9] = [
        "etcdserverpb.KV",
        "etcdserverpb.Watch",
        "etcdserverpb.Lease",
        "etcdserverpb.Cluster",
        "etcdserverpb.Maintenance",
        "etcdserverpb.Auth",
        "v3lockpb.Lock",
        "v3electionpb.Election",
        "grpc.health.v1.Health",
    ];
    let text = match path.strip_prefix('/').and_then(|path| path.rsplit_once('/')) {
        Some((service, name)) if SERVICES.contains(&service) => {
            format!("unknown method {name} for service {service}")
        }
        Some((service, _)) => format!("unknown service {service}"),
        None => format!("malformed method name: \"{path}\""),
    };
    Status::new(Code::Unimplemented, text)
}
