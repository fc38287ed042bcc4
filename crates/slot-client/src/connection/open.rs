//! Making a connection: resolve, connect, say who we are.

use std::time::Duration;

use bytes::BytesMut;
use moim_wire_resp::{ReplyDecoder, Value, command};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Kind;
use crate::address::Address;
use crate::options::Options;

/// A socket after the greeting, with what was read beyond it.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    pub(crate) decoder: ReplyDecoder,
    pub(crate) buffer: BytesMut,
}

impl Wire {
    /// Sends `frames` and waits for the answers of `count` commands. For greetings; errors are answers here.
    pub(crate) async fn exchange(&mut self, frames: &[u8], count: usize) -> Result<Vec<Value>, String> {
        self.stream.write_all(frames).await.map_err(|error| error.to_string())?;
        let mut values = Vec::with_capacity(count);
        while values.len() < count {
            values.push(self.next().await?);
        }
        Ok(values)
    }

    /// The next value that arrives.
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

/// Connects to `node` and greets it.
pub(crate) async fn open(node: &Address, kind: Kind, options: &Options) -> Result<Wire, String> {
    let stream = connect(node).await?;
    prepare(&stream, options).map_err(|error| error.to_string())?;
    let mut wire = Wire { stream, decoder: ReplyDecoder::new(options.max_reply), buffer: BytesMut::new() };
    greet(&mut wire, kind, options).await?;
    Ok(wire)
}

/// Looks the name up anew: an address that changed is found at the next try.
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
    // Without it the kernel repeats what nobody acknowledges for a quarter of an hour.
    socket.set_tcp_user_timeout(Some(options.hung_after.max(Duration::from_secs(1)) * 2))?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5)),
    )
}

/// One round trip: HELLO 3 with who we are, and for replicas READONLY. A server without RESP3 gets a second.
async fn greet(wire: &mut Wire, kind: Kind, options: &Options) -> Result<(), String> {
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
    let answers = wire.exchange(&frames, 3).await?;
    let [first, .., last] = answers.as_slice() else { return Err("no greeting".to_owned()) };
    let Value::Error(refusal) = first else { return ready(last) };
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
    let answers = wire.exchange(&frames, count).await?;
    answers.iter().try_for_each(ready)
}

/// LOADING is an answer too: the node is there, and commands will be told the same.
fn ready(answer: &Value) -> Result<(), String> {
    match answer {
        Value::Error(text) if text.starts_with(b"NOAUTH") || text.starts_with(b"WRONGPASS") => {
            Err(String::from_utf8_lossy(text).into_owned())
        }
        // READONLY at a node that is no cluster: there are no replicas to read from then.
        _ => Ok(()),
    }
}
