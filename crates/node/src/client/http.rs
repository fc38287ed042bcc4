//! One HTTP request to an admin port: small answers, one connection each.
//!
//! Invariant: a request that changes something goes to one node only; whether it arrived is not guessed at.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The largest answer that is read.
const MAX_ANSWER: u64 = 16 << 20;

/// What a server said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The HTTP status.
    pub(crate) status: u16,
    /// The body, as text.
    pub(crate) body: String,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// Nobody took the connection: nothing was done.
    Unreachable(String),
    /// The connection was made, and then nothing came back that makes sense: it may have been done.
    Lost(String),
    /// Not in time: it may have been done.
    TimedOut,
}

/// Asks `method path` of a server, `timeout` at most.
pub(crate) async fn request(
    address: &(String, u16),
    method: &str,
    path: &str,
    timeout: Duration,
) -> Result<Answer, NoAnswer> {
    let asked = async {
        let mut stream = TcpStream::connect((address.0.as_str(), address.1))
            .await
            .map_err(|error| NoAnswer::Unreachable(error.to_string()))?;
        let host = &address.0;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        let lost = |error: std::io::Error| NoAnswer::Lost(error.to_string());
        stream.write_all(head.as_bytes()).await.map_err(lost)?;
        let mut answer = Vec::new();
        stream.take(MAX_ANSWER).read_to_end(&mut answer).await.map_err(lost)?;
        parse(&answer).ok_or_else(|| NoAnswer::Lost("that is no HTTP answer".to_owned()))
    };
    tokio::time::timeout(timeout, asked).await.unwrap_or(Err(NoAnswer::TimedOut))
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(body)? } else { body.to_owned() };
    Some(Answer { status, body })
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
    fn answers_as_servers_write_them() {
        let answer = |status, body: &str| Some(Answer { status, body: body.to_owned() });
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
