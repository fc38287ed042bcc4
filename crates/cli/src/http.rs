//! A minimal HTTP client for admin ports: small responses, one connection per request.
//!
//! Invariant: a request is sent once and never repeated; an unknown outcome is reported as such.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The largest response that is read.
const MAX_RESPONSE_BYTES: u64 = 16 << 20;

/// The response of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    /// The HTTP status.
    pub(crate) status: u16,
    /// The body, as text.
    pub(crate) body: String,
}

/// A request without a usable response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestError {
    /// The connection was refused or failed: the request was not executed.
    Unreachable(String),
    /// The connection broke, or the response is not HTTP: the request may have been executed.
    Lost(String),
    /// No response in time: the request may have been executed.
    TimedOut,
}

/// Sends `method path` to a server and waits for the response, `timeout` at most.
pub(crate) async fn request(
    address: &(String, u16),
    method: &str,
    path: &str,
    timeout: Duration,
) -> Result<Response, RequestError> {
    let asked = async {
        let mut stream = TcpStream::connect((address.0.as_str(), address.1))
            .await
            .map_err(|error| RequestError::Unreachable(error.to_string()))?;
        let host = &address.0;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        let lost = |error: std::io::Error| RequestError::Lost(error.to_string());
        stream.write_all(head.as_bytes()).await.map_err(lost)?;
        let mut answer = Vec::new();
        stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut answer).await.map_err(lost)?;
        parse(&answer).ok_or_else(|| RequestError::Lost("that is no HTTP answer".to_owned()))
    };
    tokio::time::timeout(timeout, asked).await.unwrap_or(Err(RequestError::TimedOut))
}

fn parse(bytes: &[u8]) -> Option<Response> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(body)? } else { body.to_owned() };
    Some(Response { status, body })
}

fn unchunk(mut rest: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n")?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.push_str(after.get(..size)?);
        rest = after.get(size..)?.strip_prefix("\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_with_content_length_and_chunked_encoding() {
        let answer = |status, body: &str| Some(Response { status, body: body.to_owned() });
        for (text, wanted) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", answer(200, "hi")),
            ("HTTP/1.1 503 No\r\n\r\n", answer(503, "")),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
                answer(200, "abcde"),
            ),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", None),
            ("SSH-2.0-x", None),
            ("", None),
        ] {
            assert_eq!(parse(text.as_bytes()), wanted, "{text:?}");
        }
    }
}
