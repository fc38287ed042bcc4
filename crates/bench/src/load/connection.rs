//! One Kafka connection: request frames out, response frames in.
//!
//! Owns the socket and one input buffer, which is reused as long as no received frame is held. Responses arrive in
//! request order, as the protocol guarantees, so they are not matched by correlation id.

use std::io::{self, IoSlice};
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use bytes::{Buf as _, Bytes, BytesMut};
use moim_wire_kafka::{KString, Message, RequestHeader, decode_response, encode_request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// `client.id` of the load client.
const CLIENT_ID: &str = "moim-bench";
/// Maximum accepted response size.
const MAX_FRAME: usize = 256 << 20;
const READ_BYTES: usize = 64 << 10;

/// A connection to a broker.
pub struct Connection {
    /// The write half.
    pub sender: Sender,
    /// The read half.
    pub receiver: Receiver,
}

/// Writes frames.
pub struct Sender(OwnedWriteHalf);

/// Reads frames.
pub struct Receiver {
    stream: OwnedReadHalf,
    input: BytesMut,
}

impl Connection {
    /// Connects.
    pub async fn open(addr: SocketAddr) -> Result<Connection> {
        let stream = TcpStream::connect(addr).await.with_context(|| format!("connecting to {addr}"))?;
        stream.set_nodelay(true)?;
        let (read, write) = stream.into_split();
        let receiver = Receiver { stream: read, input: BytesMut::with_capacity(READ_BYTES) };
        Ok(Connection { sender: Sender(write), receiver })
    }

    /// Sends one request and reads its response.
    pub async fn call<Q: Message, A: Message>(&mut self, version: i16, question: &Q) -> Result<A> {
        self.sender.send(&request(version, question)?, 1).await?;
        let frame = self.receiver.frame().await?;
        Ok(decode_response(frame, version).context("unreadable response")?.1)
    }
}

/// An encoded request frame, with its length prefix.
pub fn request<Q: Message>(version: i16, question: &Q) -> Result<Bytes> {
    let client_id = Some(KString::from(CLIENT_ID));
    let header = RequestHeader { api_key: Q::KEY as i16, api_version: version, correlation_id: 1, client_id };
    encode_request(&header, question).context("encoding a request")
}

impl Sender {
    /// Sends the same frame `times` times with as few system calls as the socket allows.
    pub async fn send(&mut self, frame: &[u8], times: usize) -> io::Result<()> {
        let mut slices = vec![IoSlice::new(frame); times];
        let mut left = slices.as_mut_slice();
        while !left.is_empty() {
            let written = self.0.write_vectored(left).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut left, written);
        }
        Ok(())
    }
}

impl Receiver {
    /// The next frame without its length prefix. Drop it before the next call, or the buffer cannot be reused.
    pub async fn frame(&mut self) -> Result<Bytes> {
        loop {
            if let Some(frame) = self.buffered()? {
                return Ok(frame);
            }
            let missing = self.size()?.map_or(0, |size| size + 4 - self.input.len());
            self.input.reserve(missing.max(READ_BYTES));
            ensure!(self.stream.read_buf(&mut self.input).await? > 0, "the server closed the connection");
        }
    }

    /// The next frame, if it has already arrived.
    pub fn buffered(&mut self) -> Result<Option<Bytes>> {
        match self.size()? {
            Some(size) if self.input.len() >= size + 4 => {
                self.input.advance(4);
                Ok(Some(self.input.split_to(size).freeze()))
            }
            _ => Ok(None),
        }
    }

    /// The length of the frame at the front, from its prefix.
    fn size(&self) -> Result<Option<usize>> {
        let Some(prefix) = self.input.first_chunk::<4>() else { return Ok(None) };
        let size = u32::from_be_bytes(*prefix) as usize;
        ensure!(size <= MAX_FRAME, "the server announces a response of {size} bytes");
        Ok(Some(size))
    }

    /// Reads up to `want` bytes and discards them.
    pub async fn discard(&mut self, want: u64) -> Result<u64> {
        self.input.clear();
        self.input.reserve(usize::try_from(want).unwrap_or(READ_BYTES));
        let got = self.stream.read_buf(&mut self.input).await?;
        ensure!(got > 0, "the server closed the connection");
        Ok(got as u64)
    }
}
