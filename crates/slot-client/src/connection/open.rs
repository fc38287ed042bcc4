//! Opening a connection: resolve, connect, HELLO.

use std::time::Duration;

use bytes::BytesMut;
use moim_wire_resp::{ReplyDecoder, Value, command};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Kind;
use crate::address::Address;
use crate::options::Options;

/// A socket after the handshake, with the bytes read beyond it.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    pub(crate) decoder: ReplyDecoder,
    pub(crate) buffer: BytesMut,
}

impl Wire {
    /// Sends `frames` and waits for the replies of `count` commands. For the handshake; errors are returned
    /// as replies.
    pub(crate) async fn exchange(&mut self, frames: &[u8], count: usize) -> Result<Vec<Value>, String> {
        self.stream.write_all(frames).await.map_err(|error| error.to_string())?;
        let mut values = Vec::with_capacity(count);
        while values.len() < count {
            values.push(self.next().await?);
        }
        Ok(values)
    }

    /// The next value.
    pub(crate) async fn next(&mut self) -> Result<Value, String> {
        loop {
            if let Some(value) = self.decoder.decode(&mut self.buffer).map_err(|error| error.to_string())? {
                return Ok(value);
            }
            self.buffer.reserve(4096);
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Err("closed by the server".to_owned()),
                Ok(_) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// Connects to `node` and performs the handshake.
pub(crate) async fn open(node: &Address, kind: Kind, options: &Options) -> Result<Wire, String> {
    let stream = connect(node).await?;
    prepare(&stream, options).map_err(|error| error.to_string())?;
    let mut wire = Wire { stream, decoder: ReplyDecoder::new(options.max_reply), buffer: BytesMut::new() };
    handshake(&mut wire, kind, options).await?;
    Ok(wire)
}

/// Resolves the name again: a changed address is found on the next attempt.
async fn connect(node: &Address) -> Result<TcpStream, String> {
    let found = tokio::net::lookup_host((node.host.as_str(), node.port)).await;
    let found = found.map_err(|error| format!("{node}: {error}"))?;
    let mut last = format!("{node}: the name has no address");
    for address in found {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    Err(last)
}

fn prepare(stream: &TcpStream, options: &Options) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    // Without it the kernel retransmits unacknowledged data for a quarter of an hour.
    socket.set_tcp_user_timeout(Some(options.hung_after.max(Duration::from_secs(1)) * 2))?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5)),
    )
}

/// Handshake in one round trip: HELLO 3 with credentials, and READONLY for replicas. A server without RESP3
/// needs a second one.
async fn handshake(wire: &mut Wire, kind: Kind, options: &Options) -> Result<(), String> {
    let mut frames = BytesMut::new();
    let mut hello = vec!["HELLO", "3"];
    if let Some(password) = &options.password {
        hello.extend(["AUTH", options.username.as_deref().unwrap_or("default"), password]);
    }
    if let Some(name) = &options.name {
        hello.extend(["SETNAME", name]);
    }
    command::encode(&mut frames, &hello);
    command::encode(&mut frames, &["CLIENT", "SETINFO", "LIB-NAME", "moim-slot-client"]);
    command::encode(&mut frames, &[if kind == Kind::Reads { "READONLY" } else { "PING" }]);
    let replies = wire.exchange(&frames, 3).await?;
    let [first, .., last] = replies.as_slice() else { return Err("no handshake reply".to_owned()) };
    let Value::Error(refusal) = first else { return check_ready(last) };
    if !refusal.starts_with(b"ERR unknown command") && !refusal.starts_with(b"NOPROTO") {
        return Err(String::from_utf8_lossy(refusal).into_owned());
    }
    frames.clear();
    let mut count = 1;
    if let Some(password) = &options.password {
        let mut auth = vec!["AUTH"];
        auth.extend(options.username.as_deref());
        auth.push(password);
        command::encode(&mut frames, &auth);
        count += 1;
    }
    command::encode(&mut frames, &[if kind == Kind::Reads { "READONLY" } else { "PING" }]);
    let replies = wire.exchange(&frames, count).await?;
    replies.iter().try_for_each(check_ready)
}

/// LOADING is accepted: the node is reachable, and commands will get the same error.
fn check_ready(reply: &Value) -> Result<(), String> {
    match reply {
        Value::Error(text) if text.starts_with(b"NOAUTH") || text.starts_with(b"WRONGPASS") => {
            Err(String::from_utf8_lossy(text).into_owned())
        }
        // READONLY at a node without cluster mode: it has no replicas to read from.
        _ => Ok(()),
    }
}
