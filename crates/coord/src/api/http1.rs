//! The few things that are asked of the etcd port in plain HTTP/1.1: health, version, metrics.
//!
//! One request, one answer, and the connection is closed. Must never: read more than [`MAX_HEAD_BYTES`], or wait for
//! a client longer than [`TIMEOUT`].

use std::net::SocketAddr;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{Api, VERSION};
use crate::request::AlarmKind;

const MAX_HEAD_BYTES: usize = 8 * 1024;
const TIMEOUT: Duration = Duration::from_secs(10);

struct Answer {
    status: &'static str,
    content_type: &'static str,
    body: String,
}

impl Answer {
    fn text(status: &'static str, body: impl Into<String>) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: body.into() }
    }

    fn json(status: &'static str, body: String) -> Self {
        Self { status, content_type: "application/json", body }
    }
}

/// Whether a connection begins like a request of HTTP/1.1.
pub(super) fn is_http1(first: &[u8]) -> bool {
    const METHODS: [&[u8]; 7] = [b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PATC"];
    METHODS.iter().any(|method| first.starts_with(method))
}

/// Answers one request. `head` is what was read of it already.
pub(super) async fn serve<S>(api: &Api, mut socket: S, mut head: BytesMut, peer: SocketAddr)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let talk = async {
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            if head.len() > MAX_HEAD_BYTES || socket.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let line = head[..].split(|byte| *byte == b'\r').next().unwrap_or_default();
        let answer = answer(api, &String::from_utf8_lossy(line)).await;
        let head = format!(
            "HTTP/1.1 {}\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            answer.status,
            answer.content_type,
            answer.body.len()
        );
        socket.write_all(head.as_bytes()).await?;
        if !line.starts_with(b"HEAD") {
            socket.write_all(answer.body.as_bytes()).await?;
        }
        socket.shutdown().await
    };
    match tokio::time::timeout(TIMEOUT, talk).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, %error, "etcd port: an HTTP/1.1 client went away"),
        Err(_) => tracing::debug!(%peer, "etcd port: an HTTP/1.1 client was too slow"),
    }
}

async fn answer(api: &Api, request_line: &str) -> Answer {
    let mut words = request_line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    if !matches!(method, "GET" | "HEAD") {
        return Answer::text("405 Method Not Allowed", "only GET; the etcd API is gRPC\n");
    }
    match path {
        "/health" => health(api, query).await,
        "/version" => {
            Answer::json("200 OK", format!("{{\"etcdserver\":\"{VERSION}\",\"etcdcluster\":\"3.5.0\"}}"))
        }
        "/metrics" => match &api.metrics {
            Some(metrics) => Answer::text("200 OK", metrics.render()),
            None => Answer::text("404 Not Found", "no metrics are kept\n"),
        },
        "/livez" => Answer::text("200 OK", "ok\n"),
        "/readyz" => match trouble(api, false).await {
            None => Answer::text("200 OK", "ok\n"),
            Some(reason) => Answer::text("503 Service Unavailable", format!("{reason}\n")),
        },
        _ => Answer::text("404 Not Found", "404 page not found\n"),
    }
}

async fn health(api: &Api, query: &str) -> Answer {
    let serializable = query.split('&').any(|pair| pair == "serializable=true");
    let excludes_alarm = query.split('&').any(|pair| pair == "exclude=NOSPACE");
    let reason = match trouble(api, serializable).await {
        Some("ALARM NOSPACE") if excludes_alarm => None,
        reason => reason,
    };
    match reason {
        None => Answer::json("200 OK", "{\"health\":\"true\",\"reason\":\"\"}".to_owned()),
        Some(reason) => Answer::json(
            "503 Service Unavailable",
            format!("{{\"health\":\"false\",\"reason\":\"{reason}\"}}"),
        ),
    }
}

/// What keeps this node from serving everything.
async fn trouble(api: &Api, serializable: bool) -> Option<&'static str> {
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
