//! A raw socket that speaks a minimum of Kafka, for malformed input: frames are built by hand, so that they can be
//! invalid in ways that no client library allows.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Time limit for a response, or for the end of the connection.
const PATIENCE: Duration = Duration::from_secs(15);

/// A raw connection.
pub struct Raw {
    stream: TcpStream,
}

/// The server's reaction to what was sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Reaction {
    /// A response: its correlation id and its body.
    Answer(i32, Vec<u8>),
    /// The server closed the connection.
    Closed,
    /// No reaction within the time limit.
    Silence,
}

impl Raw {
    /// Connects.
    pub fn connect(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).context("no connection")?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream })
    }

    /// Sends raw bytes. A connection that is already closed is not an error: the reaction shows it.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        match self.stream.write_all(bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Ok(())
            }
            other => other.context("not sent"),
        }
    }

    /// Waits for the server's reaction.
    pub fn reaction(&mut self) -> Result<Reaction> {
        self.reaction_within(PATIENCE)
    }

    /// Waits for the server's reaction, up to `patience`.
    pub fn reaction_within(&mut self, patience: Duration) -> Result<Reaction> {
        self.stream.set_read_timeout(Some(patience))?;
        let mut head = [0; 4];
        if let Some(reaction) = self.fill(&mut head)? {
            return Ok(reaction);
        }
        let len = u32::from_be_bytes(head) as usize;
        if !(4..=64 << 20).contains(&len) {
            bail!("a response of {len} bytes");
        }
        let mut body = vec![0; len];
        if let Some(reaction) = self.fill(&mut body)? {
            bail!("a response ended in the middle: {reaction:?}");
        }
        let correlation = i32::from_be_bytes([body[0], body[1], body[2], body[3]]);
        Ok(Reaction::Answer(correlation, body.split_off(4)))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<Option<Reaction>> {
        match self.stream.read_exact(buffer) {
            Ok(()) => Ok(None),
            Err(error) => match error.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                    Ok(Some(Reaction::Closed))
                }
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Some(Reaction::Silence)),
                _ => Err(error).context("not received"),
            },
        }
    }
}

/// A request frame with the non-flexible request header.
pub fn request(api_key: i16, api_version: i16, correlation: i32, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(32 + body.len());
    frame.extend(api_key.to_be_bytes());
    frame.extend(api_version.to_be_bytes());
    frame.extend(correlation.to_be_bytes());
    frame.extend(string("raw"));
    frame.extend(body);
    framed(&frame)
}

/// Adds the length prefix.
pub fn framed(bytes: &[u8]) -> Vec<u8> {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes()[..], bytes].concat()
}

/// A protocol string: two bytes of length, then the text.
pub fn string(text: &str) -> Vec<u8> {
    let len = i16::try_from(text.len()).unwrap_or(i16::MAX);
    [&len.to_be_bytes()[..], text.as_bytes()].concat()
}

/// A Produce v3 request with one batch for one partition.
pub fn produce(correlation: i32, topic: &str, partition: i32, acks: i16, batch: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend((-1i16).to_be_bytes()); // no transactional id
    body.extend(acks.to_be_bytes());
    body.extend(10_000i32.to_be_bytes());
    body.extend(1i32.to_be_bytes());
    body.extend(string(topic));
    body.extend(1i32.to_be_bytes());
    body.extend(partition.to_be_bytes());
    body.extend(i32::try_from(batch.len()).unwrap_or(i32::MAX).to_be_bytes());
    body.extend(batch);
    request(0, 3, correlation, &body)
}

/// The error code of a Produce v3 response with one partition.
pub fn produce_error(body: &[u8]) -> Option<i16> {
    let topic = usize::from(u16::from_be_bytes([*body.get(4)?, *body.get(5)?]));
    let at = 6 + topic + 4 + 4;
    Some(i16::from_be_bytes([*body.get(at)?, *body.get(at + 1)?]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_frame_matches_the_protocol() {
        let frame = request(18, 0, 7, &[]);
        assert_eq!(frame, [0, 0, 0, 13, 0, 18, 0, 0, 0, 0, 0, 7, 0, 3, b'r', b'a', b'w']);
    }

    #[test]
    fn produce_error_code_is_parsed() {
        let mut body = vec![0, 0, 0, 1];
        body.extend(string("abc"));
        body.extend([0, 0, 0, 1, 0, 0, 0, 0, 0, 2]);
        assert_eq!(produce_error(&body), Some(2));
    }
}
