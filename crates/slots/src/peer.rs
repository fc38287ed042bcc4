//! Connections between the stores of two nodes over the peer port: framing, and the requests that are served on them.
//!
//! A connection begins with [`MAGIC`]; then frames go both ways: length (4), length of the head (4), the head as JSON,
//! and the payload that the head describes. A head that this version does not know ends the connection.
//!
//! Requests are of three kinds: PUBLISH for the subscribers of this node (without a response), questions about a node
//! (its wall clock, the keys of a slot), and the slot migration protocol (`migration/protocol.rs`). The names in the
//! heads are part of the connection format.

use std::future::poll_fn;
use std::io::{self, IoSlice};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use moim_base::socket::Socket;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::migration::protocol::{MigrationRequest, MigrationResponse};

/// The first bytes of a connection between stores; the last byte is the protocol version.
pub const MAGIC: &[u8; 8] = b"MOIMSLT\x02";

/// The largest frame: one batch of effects, which holds the largest request of a client, and its overhead.
const MAX_FRAME: usize = 2 << 30;
/// Bytes that are read at a time.
const READ_BYTES: usize = 64 << 10;

/// A request to the store of another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PeerRequest {
    /// PUBLISH or SPUBLISH for the subscribers of this node; there is no response. The payload is channel and message.
    Publish {
        /// True for SPUBLISH.
        sharded: bool,
        /// The length of the channel name in the payload.
        channel: usize,
    },
    /// The reading of the wall clock.
    Clock,
    /// The number of keys that the primary of a shard has in a slot, by a slot map of at least this epoch.
    CountKeys {
        /// The shard.
        shard: u16,
        /// The slot.
        slot: u16,
        /// The epoch of the slot map of the node that asks.
        map_epoch: u64,
    },
    /// A request of the slot migration protocol; on the wire it has no tag of its own.
    #[serde(untagged)]
    Migration(MigrationRequest),
}

/// The response to a [`PeerRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PeerResponse {
    /// The wall clock, in milliseconds since 1970.
    Clock {
        /// Milliseconds since 1970.
        wall_ms: i64,
    },
    /// The number of keys.
    Count {
        /// The number of keys.
        keys: u64,
    },
    /// This node does not lead the shard, or its slot map is older.
    #[serde(rename = "NotHere")]
    NotPrimary,
    /// A response of the slot migration protocol; on the wire it has no tag of its own.
    #[serde(untagged)]
    Migration(MigrationResponse),
}

/// One end of a connection between stores.
pub(crate) struct PeerConnection {
    socket: Box<dyn Socket>,
    input: BytesMut,
}

impl PeerConnection {
    /// A connection without the exchange of [`MAGIC`].
    pub(crate) fn new(socket: Box<dyn Socket>) -> Self {
        Self { socket, input: BytesMut::new() }
    }

    /// The client end: sends [`MAGIC`].
    pub(crate) async fn open(socket: Box<dyn Socket>) -> io::Result<Self> {
        let mut connection = Self::new(socket);
        connection.write(&[MAGIC]).await?;
        Ok(connection)
    }

    /// The server end: checks [`MAGIC`].
    pub(crate) async fn accept(socket: Box<dyn Socket>) -> io::Result<Self> {
        let mut connection = Self::new(socket);
        if !connection.fill(MAGIC.len()).await? || connection.input.split_to(MAGIC.len())[..] != MAGIC[..] {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(connection)
    }

    /// Sends one frame.
    pub(crate) async fn send(&mut self, head: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
        let head = serde_json::to_vec(head).map_err(io::Error::other)?;
        let mut prefix = BytesMut::with_capacity(8 + head.len());
        prefix.put_u32_le((4 + head.len() + bytes.len()) as u32);
        prefix.put_u32_le(head.len() as u32);
        prefix.put_slice(&head);
        self.write(&[&prefix, bytes]).await
    }

    async fn write(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                match self.socket.try_write(&[IoSlice::new(rest)]) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(sent) => rest = &rest[sent..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        poll_fn(|cx| self.socket.poll_write_ready(cx)).await?;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Reads until `wanted` bytes are buffered; false if the peer closed the connection between two frames.
    async fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        while self.input.len() < wanted {
            self.input.reserve((wanted - self.input.len()).clamp(READ_BYTES, 4 << 20));
            if poll_fn(|cx| self.socket.poll_read(cx, &mut self.input)).await? == 0 {
                return if self.input.is_empty() {
                    Ok(false)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
        Ok(true)
    }

    /// Receives the next frame; `None` if the peer closed the connection.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<(T, Bytes)>> {
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        if !self.fill(4).await? {
            return Ok(None);
        }
        let len = (&self.input[..4]).get_u32_le() as usize;
        if !(4..=MAX_FRAME).contains(&len) {
            return Err(bad());
        }
        self.fill(4 + len).await?;
        let mut frame = self.input.split_to(4 + len).freeze();
        frame.advance(4);
        let head = frame.get_u32_le() as usize;
        if head > frame.len() {
            return Err(bad());
        }
        let head = frame.split_to(head);
        let head = serde_json::from_slice(&head).map_err(io::Error::other)?;
        Ok(Some((head, frame)))
    }
}

#[cfg(test)]
mod tests {
    use moim_base::socket::MemorySocket;

    use super::*;

    #[test]
    fn frames_are_received_as_they_were_sent() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (one, two) = MemorySocket::pair();
            let large = vec![7; 3 << 20];
            let send = async {
                let mut connection = PeerConnection::open(Box::new(one)).await.unwrap();
                connection.send(&"first", b"").await.unwrap();
                connection.send(&"second", &large).await.unwrap();
            };
            let receive = async {
                let mut connection = PeerConnection::accept(Box::new(two)).await.unwrap();
                let (head, bytes) = connection.receive::<String>().await.unwrap().unwrap();
                assert_eq!((head.as_str(), bytes.len()), ("first", 0));
                let (head, bytes) = connection.receive::<String>().await.unwrap().unwrap();
                assert_eq!((head.as_str(), &bytes[..]), ("second", &large[..]));
                connection
            };
            let ((), mut connection) = tokio::join!(send, receive);
            assert!(
                connection.receive::<String>().await.unwrap().is_none(),
                "the peer has closed the connection"
            );
        });
    }

    #[test]
    fn connections_with_a_wrong_magic_or_frame_are_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for bytes in [&b"GET / HTTP/1.1"[..], b"MOIMSLT\x09....", b"MOIMSLT\x02\xff\xff\xff\xff...."] {
                let (mut one, two) = MemorySocket::pair();
                one.try_write(&[IoSlice::new(bytes)]).unwrap();
                let received =
                    async { PeerConnection::accept(Box::new(two)).await?.receive::<String>().await };
                assert!(received.await.is_err(), "{bytes:?}");
            }
        });
    }

    #[test]
    fn migration_requests_share_the_wire_with_other_requests() {
        let cases = [
            (
                PeerRequest::Publish { sharded: false, channel: 3 },
                r#"{"Publish":{"sharded":false,"channel":3}}"#,
            ),
            (PeerRequest::Clock, r#""Clock""#),
            (
                PeerRequest::CountKeys { shard: 1, slot: 5, map_epoch: 9 },
                r#"{"CountKeys":{"shard":1,"slot":5,"map_epoch":9}}"#,
            ),
            (PeerRequest::Migration(MigrationRequest::NextKeys { id: 7 }), r#"{"More":{"id":7}}"#),
            (
                PeerRequest::Migration(MigrationRequest::Tail { id: 7, from: 3 }),
                r#"{"Tail":{"id":7,"from":3}}"#,
            ),
        ];
        for (request, json) in cases {
            assert_eq!(serde_json::to_string(&request).unwrap(), json);
            assert_eq!(serde_json::from_str::<PeerRequest>(json).unwrap(), request);
        }
        let cases = [
            (PeerResponse::Clock { wall_ms: 5 }, r#"{"Clock":{"wall_ms":5}}"#),
            (PeerResponse::Count { keys: 5 }, r#"{"Count":{"keys":5}}"#),
            (PeerResponse::NotPrimary, r#""NotHere""#),
            (PeerResponse::Migration(MigrationResponse::Restart), r#""Gone""#),
            (
                PeerResponse::Migration(MigrationResponse::SnapshotStarted { position: 3 }),
                r#"{"Begun":{"position":3}}"#,
            ),
        ];
        for (response, json) in cases {
            assert_eq!(serde_json::to_string(&response).unwrap(), json);
            assert_eq!(serde_json::from_str::<PeerResponse>(json).unwrap(), response);
        }
        assert!(serde_json::from_str::<PeerRequest>(r#"{"Unknown":{}}"#).is_err());
    }
}
