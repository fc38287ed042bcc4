//! Between the stores of two nodes: frames over a connection of the peer port.
//!
//! A connection begins with [`MAGIC`]; then frames go both ways: length (4), length of the head (4), the head as JSON, and
//! bytes that the head speaks of. Heads of a newer program that are not understood end the connection.

use std::future::poll_fn;
use std::io::{self, IoSlice};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use moim_base::socket::Socket;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What a connection between stores begins with; its last byte is the version.
pub const MAGIC: &[u8; 8] = b"MOIMSLT\x02";

/// The largest frame: one batch of effects, which holds the largest request that clients may send, and some room.
const MAX_FRAME: usize = 2 << 30;
/// What is read at a time.
const READ_BYTES: usize = 64 << 10;

/// One end.
pub(crate) struct Wire {
    socket: Box<dyn Socket>,
    input: BytesMut,
}

impl Wire {
    /// A connection that was accepted; its magic is read already.
    pub(crate) fn new(socket: Box<dyn Socket>) -> Self {
        Self { socket, input: BytesMut::new() }
    }

    /// A connection that was made.
    pub(crate) async fn open(socket: Box<dyn Socket>) -> io::Result<Self> {
        let mut wire = Self::new(socket);
        wire.write(&[MAGIC]).await?;
        Ok(wire)
    }

    /// A connection that was accepted, from its very beginning.
    pub(crate) async fn accept(socket: Box<dyn Socket>) -> io::Result<Self> {
        let mut wire = Self::new(socket);
        if !wire.fill(MAGIC.len()).await? || wire.input.split_to(MAGIC.len())[..] != MAGIC[..] {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(wire)
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

    /// Reads until there are so many bytes; false when the other end closed between two frames.
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

    /// The next frame; `None` at the end.
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
    fn frames_arrive_as_they_were_sent() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (one, two) = MemorySocket::pair();
            let large = vec![7; 3 << 20];
            let send = async {
                let mut wire = Wire::open(Box::new(one)).await.unwrap();
                wire.send(&"first", b"").await.unwrap();
                wire.send(&"second", &large).await.unwrap();
            };
            let receive = async {
                let mut wire = Wire::accept(Box::new(two)).await.unwrap();
                let (head, bytes) = wire.receive::<String>().await.unwrap().unwrap();
                assert_eq!((head.as_str(), bytes.len()), ("first", 0));
                let (head, bytes) = wire.receive::<String>().await.unwrap().unwrap();
                assert_eq!((head.as_str(), &bytes[..]), ("second", &large[..]));
                wire
            };
            let ((), mut wire) = tokio::join!(send, receive);
            assert!(wire.receive::<String>().await.unwrap().is_none(), "the end");
        });
    }

    #[test]
    fn strangers_are_not_listened_to() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for bytes in [&b"GET / HTTP/1.1"[..], b"MOIMSLT\x09....", b"MOIMSLT\x02\xff\xff\xff\xff...."] {
                let (mut one, two) = MemorySocket::pair();
                one.try_write(&[IoSlice::new(bytes)]).unwrap();
                let heard = async { Wire::accept(Box::new(two)).await?.receive::<String>().await };
                assert!(heard.await.is_err(), "{bytes:?}");
            }
        });
    }
}
