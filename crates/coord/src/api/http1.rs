//! The plain HTTP/1.1 endpoints of the etcd port: health, version, metrics.
//!
//! One request, one response, and the connection is closed. Must never: read more than [`MAX_HEAD_BYTES`], or wait for
//! a client longer than [`TIMEOUT`].

use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{Api, VERSION};
use crate::request::AlarmKind;

const MAX_HEAD_BYTES: usize = 8 * 1024;
const TIMEOUT: Duration = Duration::from_secs(10);

struct Response {
    status: &'static str,
    content_type: &'static str,
    body: String,
}

impl Response {
    fn text(status: &'static str, body: impl Into<String>) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: body.into() }
    }

    fn json(status: &'static str, body: String) -> Self {
        Self { status, content_type: "application/json", body }
    }
}

/// True if a connection starts with an HTTP/1.1 request.
pub(super) fn is_http1(first: &[u8]) -> bool {
    const METHODS: [&[u8]; 7] = [b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PATC"];
    METHODS.iter().any(|method| first.starts_with(method))
}

/// Serves one request. `head` holds the bytes already read.
pub(super) async fn serve<S>(api: &Api, mut socket: S, mut head: BytesMut, peer: SocketAddr)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let exchange = async {
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            if head.len() > MAX_HEAD_BYTES || socket.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let line = head[..].split(|byte| *byte == b'\r').next().unwrap_or_default();
        let response = respond(api, &String::from_utf8_lossy(line)).await;
        let head = format!(
            "HTTP/1.1 {}\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            response.status,
            response.content_type,
            response.body.len()
        );
        socket.write_all(head.as_bytes()).await?;
        if !line.starts_with(b"HEAD") {
            socket.write_all(response.body.as_bytes()).await?;
        }
        socket.shutdown().await
    };
    match tokio::time::timeout(TIMEOUT, exchange).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, %error, "etcd port: HTTP/1.1 connection lost"),
        Err(_) => tracing::debug!(%peer, "etcd port: HTTP/1.1 request timed out"),
    }
}

async fn respond(api: &Api, request_line: &str) -> Response {
    let mut words = request_line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if !matches!(method, "GET" | "HEAD") {
        return Response::text("405 Method Not Allowed", "only GET; the etcd API is gRPC\n");
    }
    match path {
        "/health" => health(api, query).await,
        "/version" => {
            Response::json("200 OK", format!("{{\"etcdserver\":\"{VERSION}\",\"etcdcluster\":\"3.5.0\"}}"))
        }
        "/metrics" => match &api.metrics {
            Some(metrics) => Response::text("200 OK", metrics.render()),
            None => Response::text("404 Not Found", "no metrics are kept\n"),
        },
        "/livez" => Response::text("200 OK", "ok\n"),
        "/readyz" => match unhealthy_reason(api, false).await {
            None => Response::text("200 OK", "ok\n"),
            Some(reason) => Response::text("503 Service Unavailable", format!("{reason}\n")),
        },
        _ => Response::text("404 Not Found", "404 page not found\n"),
    }
}

async fn health(api: &Api, query: &str) -> Response {
    let serializable = query.split('&').any(|pair| pair == "serializable=true");
    let excludes_alarm = query.split('&').any(|pair| pair == "exclude=NOSPACE");
    let reason = match unhealthy_reason(api, serializable).await {
        Some("ALARM NOSPACE") if excludes_alarm => None,
        reason => reason,
    };
    match reason {
        None => Response::json("200 OK", "{\"health\":\"true\",\"reason\":\"\"}".to_owned()),
        Some(reason) => Response::json(
            "503 Service Unavailable",
            format!("{{\"health\":\"false\",\"reason\":\"{reason}\"}}"),
        ),
    }
}

/// Why this node is unhealthy, in etcd's words.
async fn unhealthy_reason(api: &Api, serializable: bool) -> Option<&'static str> {
    let alarm = api.coordinator.read(|state| state.alarms().next());
    match alarm.map(|alarm| alarm.kind) {
        Some(AlarmKind::NoSpace) => return Some("ALARM NOSPACE"),
        Some(AlarmKind::Corrupt) => return Some("ALARM CORRUPT"),
        None => {}
    }
    if serializable {
        return None;
    }
    if !api.has_leader() {
        return Some("RAFT NO LEADER");
    }
    match api.coordinator.linearizable().await {
        Ok(()) => None,
        Err(_) => Some("QGET ERROR"),
    }
}
