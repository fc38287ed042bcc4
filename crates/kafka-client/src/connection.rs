//! One TCP connection to a broker: connect, negotiate API versions, send requests, read responses.
//!
//! Invariants: responses arrive in the order of their requests, and an unexpected correlation id is an error; the length
//! of a frame is checked before memory is allocated for it; after any error the owner drops the connection, because part
//! of a response may still arrive.

use std::collections::HashMap;
use std::io;

use bytes::Bytes;
use moim_wire_kafka::messages::{ApiVersionsRequest, ApiVersionsResponse};
use moim_wire_kafka::{ErrorCode, KString, Message, RequestHeader, decode_response, encode_request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::error::{Error, ErrorKind, Result, check};
use crate::exchange::Exchange;

const CLIENT_ID: &str = "moim";
/// No response comes near this; a larger length means that the server does not speak Kafka.
const MAX_FRAME: usize = 256 << 20;

/// A connection with negotiated API versions.
pub(crate) struct Connection {
    stream: TcpStream,
    peer: String,
    /// The smallest and the largest version of each API key that the broker speaks.
    versions: HashMap<i16, (i16, i16)>,
    last_correlation_id: i32,
}

impl Connection {
    /// Connects and negotiates the API versions.
    pub(crate) async fn open(host: &str, port: u16, deadline: Instant) -> Result<Self> {
        let peer = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let connecting = timeout_at(deadline, TcpStream::connect((host, port)));
        let stream = match connecting.await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(unreachable(&peer, &error)),
            Err(_) => {
                return Err(Error::new(
                    ErrorKind::Unreachable,
                    format!("cannot reach {peer}: no answer in time"),
                ));
            }
        };
        // A request is one frame in one write: Nagle's algorithm would only add delay.
        let _ = stream.set_nodelay(true);
        let mut connection = Self { stream, peer, versions: HashMap::new(), last_correlation_id: 0 };
        connection.negotiate(deadline).await?;
        Ok(connection)
    }

    /// Sends a request and waits for its response.
    pub(crate) async fn call<R: Exchange>(&mut self, request: &R, deadline: Instant) -> Result<R::Response> {
        self.send(request, deadline).await?;
        self.receive::<R>(deadline).await
    }

    /// Sends a request without waiting. Each `send` needs its `receive`, in order.
    pub(crate) async fn send<R: Exchange>(&mut self, request: &R, deadline: Instant) -> Result {
        let version = self.version::<R>()?;
        self.send_as(request, version, deadline).await
    }

    /// The response to the oldest request without one.
    pub(crate) async fn receive<R: Exchange>(&mut self, deadline: Instant) -> Result<R::Response> {
        let version = self.version::<R>()?;
        let frame = self.read_frame(deadline).await?;
        self.decode(frame, version)
    }

    /// The newest version that both sides speak.
    fn version<R: Exchange>(&self) -> Result<i16> {
        let ours = R::KEY.versions();
        let newest = R::NEWEST.min(*ours.end());
        let unsupported = || {
            Error::other(format!(
                "{} does not serve {} in a version this moim speaks",
                self.peer,
                R::KEY.name()
            ))
        };
        let (min, max) = *self.versions.get(&(R::KEY as i16)).ok_or_else(unsupported)?;
        let version = newest.min(max);
        if version >= min && version >= *ours.start() { Ok(version) } else { Err(unsupported()) }
    }

    async fn negotiate(&mut self, deadline: Instant) -> Result {
        let request = ApiVersionsRequest {
            client_software_name: KString::from_static("moim"),
            client_software_version: KString::from_static(env!("CARGO_PKG_VERSION")),
        };
        // Every current server speaks version 3; an older one responds in version 0.
        let version = 3;
        self.send_as(&request, version, deadline).await?;
        let frame = self.read_frame(deadline).await?;
        let mut answer: ApiVersionsResponse = match self.decode(frame.clone(), version) {
            Ok(answer) => answer,
            Err(_) => self.decode(frame, 0)?,
        };
        if answer.error_code == ErrorCode::UnsupportedVersion.code() {
            self.send_as(&request, 0, deadline).await?;
            let frame = self.read_frame(deadline).await?;
            answer = self.decode(frame, 0)?;
        }
        check(answer.error_code, None)?;
        let versions = answer.api_keys.iter().map(|api| (api.api_key, (api.min_version, api.max_version)));
        self.versions = versions.collect();
        Ok(())
    }

    async fn send_as<M: Message>(&mut self, request: &M, version: i16, deadline: Instant) -> Result {
        self.last_correlation_id = self.last_correlation_id.wrapping_add(1);
        let header = RequestHeader {
            api_key: M::KEY as i16,
            api_version: version,
            correlation_id: self.last_correlation_id,
            client_id: Some(KString::from_static(CLIENT_ID)),
        };
        let frame = encode_request(&header, request)
            .map_err(|error| Error::other(format!("{} {}: {error}", M::KEY.name(), self.peer)))?;
        match timeout_at(deadline, self.stream.write_all(&frame)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.broken(&error)),
            Err(_) => Err(self.late()),
        }
    }

    async fn read_frame(&mut self, deadline: Instant) -> Result<Bytes> {
        match timeout_at(deadline, read_frame(&mut self.stream)).await {
            Ok(Ok(frame)) => Ok(frame),
            Ok(Err(error)) => Err(self.broken(&error)),
            Err(_) => Err(self.late()),
        }
    }

    fn decode<M: Message>(&self, frame: Bytes, version: i16) -> Result<M> {
        let garbled = |why: String| {
            Error::other(format!(
                "{} does not answer like a Kafka server: {} {why}",
                self.peer,
                M::KEY.name()
            ))
        };
        let (header, answer) = decode_response(frame, version).map_err(|error| garbled(error.to_string()))?;
        if header.correlation_id != self.last_correlation_id {
            return Err(garbled("answers another request".to_owned()));
        }
        Ok(answer)
    }

    fn broken(&self, error: &io::Error) -> Error {
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
            _ => error.to_string(),
        };
        Error::new(ErrorKind::Unreachable, format!("lost {}: {why}", self.peer))
    }

    fn late(&self) -> Error {
        Error::new(ErrorKind::Timeout, format!("no answer from {} in time", self.peer))
            .hint("what was asked may have happened all the same; wait longer with --timeout")
    }
}

async fn read_frame(stream: &mut TcpStream) -> io::Result<Bytes> {
    let len = usize::try_from(stream.read_i32().await?).unwrap_or(usize::MAX);
    if len > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it sent a frame of absurd length"));
    }
    let mut frame = Vec::new();
    let read = stream.take(len as u64).read_to_end(&mut frame).await?;
    if read < len { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(Bytes::from(frame)) }
}

fn unreachable(peer: &str, error: &io::Error) -> Error {
    let why = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        _ => error.to_string(),
    };
    Error::new(ErrorKind::Unreachable, format!("cannot reach {peer}: {why}"))
}
