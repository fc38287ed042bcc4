//! From the headers of a call to the handler of its method.
//!
//! Owns what is decided before a handler sees anything: whether this is gRPC at all, which method it names, how
//! long it may take, and whether it wants a leader to exist.

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

use super::call::{Body, Gone, Respond};
use super::memory::Share;
use super::{Api, auth, cluster, election, health, kv, lease, lock, maintenance, status, watch};
use crate::engine::CoordError;

/// What the headers of a call say beside the method.
#[derive(Clone, Copy, Default)]
pub(super) struct Terms {
    /// How long the call may take.
    pub(super) timeout: Option<Duration>,
    /// Whether the call is to fail when there is no leader.
    pub(super) needs_leader: bool,
}

/// Why a call is refused before a handler sees it.
enum Refusal {
    /// It is not gRPC.
    Http(StatusCode, Status),
    /// Its messages are in an encoding that is not spoken here.
    Encoding(Status),
    /// It is gRPC, and wrong.
    Status(Status),
}

/// Serves one call from its headers to its end; one that was not admitted is refused.
pub(super) async fn serve_call(
    (api, share): (Arc<Api>, Arc<Share>),
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    is_admitted: bool,
) {
    let respond = Respond::new(Arc::clone(&share), respond);
    let (head, stream) = request.into_parts();
    // A client that has gone hears nothing, and that is all there is to do about it.
    let _gone = match read_terms(&head) {
        Ok(_) if !is_admitted => respond.fail(&CoordError::TooManyRequests.into()),
        Ok(terms) if terms.needs_leader && !api.has_leader() => respond.fail(&status::no_leader()),
        Ok(terms) => route(&api, head.uri.path(), terms, Body::new(share, stream), respond).await,
        Err(Refusal::Http(http_status, status)) => respond.refuse(http_status, &status),
        Err(Refusal::Encoding(status)) => respond.refuse_encoding(&status),
        Err(Refusal::Status(status)) => respond.fail(&status),
    };
}

fn read_terms(head: &Parts) -> Result<Terms, Refusal> {
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
    Ok(Terms { timeout, needs_leader })
}

/// `application/grpc`, also with a suffix (`+proto`) or parameters.
fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let Some((head, rest)) = content_type.split_at_checked(GRPC.len()) else { return false };
    head.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';'))
}

/// Runs the handler of the method that `path` names.
async fn route(
    api: &Arc<Api>,
    path: &str,
    terms: Terms,
    mut body: Body,
    respond: Respond,
) -> Result<(), Gone> {
    /// Reads the one message of a call, handles it, answers.
    macro_rules! unary {
        ($handler:path) => {{
            // Handed on by reference: a future that is moved into another is there twice.
            let work = pin!(async { $handler(api, body.only().await?).await });
            unary(api, terms, respond, work).await
        }};
    }
    /// The same for what is rare or waits long: its future is not part of every call's.
    macro_rules! rare {
        ($handler:path) => {{
            let mut work = Box::pin(async { $handler(api, body.only().await?).await });
            unary(api, terms, respond, work.as_mut()).await
        }};
    }
    /// The same for what etcd does with a client of its own.
    macro_rules! recipe {
        ($handler:path) => {{
            let mut work =
                Box::pin(async { $handler(api, body.only().await?).await.map_err(status::of_recipe) });
            unary(api, terms, respond, work.as_mut()).await
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
            let answer = in_time(api, terms, &mut respond, work).await?;
            respond.range(answer).await
        }
        method::kv::PUT => unary!(kv::put),
        method::kv::TXN => unary!(kv::txn),
        method::kv::DELETE_RANGE => unary!(kv::delete_range),
        method::kv::COMPACT => rare!(kv::compact),
        method::watch::WATCH => Box::pin(watch::serve(api, terms, body, respond)).await,
        method::lease::KEEP_ALIVE => Box::pin(lease::keep_alive(api, terms, body, respond)).await,
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
        method::maintenance::SNAPSHOT => Box::pin(maintenance::snapshot(api, terms, body, respond)).await,
        method::lock::LOCK => recipe!(lock::lock),
        method::lock::UNLOCK => recipe!(lock::unlock),
        method::election::CAMPAIGN => recipe!(election::campaign),
        method::election::PROCLAIM => recipe!(election::proclaim),
        method::election::LEADER => recipe!(election::leader),
        method::election::RESIGN => recipe!(election::resign),
        method::election::OBSERVE => Box::pin(election::observe(api, terms, body, respond)).await,
        method::health::CHECK => rare!(health::check),
        method::health::WATCH => Box::pin(health::watch(api, terms, body, respond)).await,
        method::auth::STATUS => rare!(auth::status),
        path if path.starts_with(method::auth::PREFIX) => match auth::answer(api, path) {
            Some(answer) => respond.unary(answer).await,
            None => respond.fail(&unknown_method(path)),
        },
        path => respond.fail(&unknown_method(path)),
    }
}

/// Answers with what `work` comes to, in the time the caller gives.
async fn unary<M: Message>(
    api: &Api,
    terms: Terms,
    mut respond: Respond,
    work: Pin<&mut impl Future<Output = Result<M, Status>>>,
) -> Result<(), Gone> {
    let answer = in_time(api, terms, &mut respond, work).await?;
    respond.unary(answer).await
}

/// What `work` comes to, in the time the caller gives.
async fn in_time<M>(
    api: &Api,
    terms: Terms,
    respond: &mut Respond,
    work: Pin<&mut impl Future<Output = Result<M, Status>>>,
) -> Result<Result<M, Status>, Gone> {
    let answer = match terms.timeout {
        None => respond.while_wanted(work).await?,
        // Too late before it began: the timer might not notice.
        Some(Duration::ZERO) => Err(status::deadline_exceeded()),
        Some(timeout) => {
            let work = tokio::time::timeout(timeout, work);
            respond.while_wanted(work).await?.unwrap_or_else(|_| Err(status::deadline_exceeded()))
        }
    };
    if answer.is_err() {
        api.counters.failed_calls.inc();
    }
    Ok(answer)
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
