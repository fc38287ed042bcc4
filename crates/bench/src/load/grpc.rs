//! The gRPC client of the load tool: HTTP/2 through the `h2` crate, without a framework.
//!
//! A framework would cost more than the servers under test. Requests are pre-encoded frames; of a response only the
//! status is checked, and the bytes are returned. Calls of one [`Channel`] share its connection.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::client::SendRequest;
use http::{HeaderMap, Method, Request, Uri};
use tokio::net::TcpStream;

const WINDOW: u32 = 4 << 20;

/// One HTTP/2 connection.
#[derive(Clone)]
pub struct Channel {
    sender: SendRequest<Bytes>,
    authority: String,
}

/// A method on a channel, with its URI built once.
#[derive(Clone)]
pub struct Call {
    sender: SendRequest<Bytes>,
    uri: Uri,
}

/// A streaming call.
pub struct Stream {
    requests: h2::SendStream<Bytes>,
    answers: RecvStream,
}

impl Channel {
    /// Connects. The connection closes with its last handle.
    pub async fn open(addr: SocketAddr) -> Result<Channel> {
        let socket = TcpStream::connect(addr).await.with_context(|| format!("connecting to {addr}"))?;
        socket.set_nodelay(true)?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW)
            .initial_connection_window_size(4 * WINDOW)
            .enable_push(false)
            .handshake(socket)
            .await
            .context("HTTP/2 handshake")?;
        tokio::spawn(async move {
            let _ = connection.await; // the caller gets the error
        });
        Ok(Channel { sender, authority: addr.to_string() })
    }

    /// A method, as `/package.Service/Method`.
    pub fn method(&self, path: &str) -> Result<Call> {
        let uri = format!("http://{}{path}", self.authority).parse().context("the method's address")?;
        Ok(Call { sender: self.sender.clone(), uri })
    }
}

impl Call {
    /// A unary call; returns the response message.
    pub async fn unary(&self, frame: Bytes) -> Result<Bytes> {
        let mut stream = self.begin(frame, true).await?;
        let mut message = BytesMut::new();
        while let Some(piece) = stream.answers.data().await {
            let piece = piece.context("reading the answer")?;
            let _ = stream.answers.flow_control().release_capacity(piece.len());
            message.extend_from_slice(&piece);
        }
        let trailers = stream.answers.trailers().await.context("reading the trailers")?;
        check(trailers.as_ref())?;
        if message.len() < 5 {
            bail!("an answer without a message");
        }
        Ok(message.split_off(5).freeze())
    }

    /// Starts a stream with this request.
    pub async fn stream(&self, frame: Bytes) -> Result<Stream> {
        self.begin(frame, false).await
    }

    async fn begin(&self, frame: Bytes, only: bool) -> Result<Stream> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.uri.clone())
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())?;
        let mut sender = self.sender.clone().ready().await.context("the connection")?;
        let (response, mut requests) = sender.send_request(request, false).context("sending")?;
        requests.send_data(frame, only).context("sending")?;
        let (head, answers) = response.await.context("the answer")?.into_parts();
        if head.headers.contains_key("grpc-status") {
            check(Some(&head.headers))?;
        }
        Ok(Stream { requests, answers })
    }
}

impl Stream {
    /// Sends a further request.
    pub fn send(&mut self, frame: Bytes) -> Result<()> {
        self.requests.send_data(frame, false).context("sending")
    }

    /// The next chunk of the response stream; frames may begin and end anywhere in it.
    pub async fn piece(&mut self) -> Result<Bytes> {
        let piece =
            self.answers.data().await.context("the stream has ended")?.context("reading the stream")?;
        let _ = self.answers.flow_control().release_capacity(piece.len());
        Ok(piece)
    }
}

/// An error unless the gRPC status is OK.
fn check(trailers: Option<&HeaderMap>) -> Result<()> {
    let text = |name: &str| {
        trailers
            .and_then(|trailers| trailers.get(name))
            .map(|value| String::from_utf8_lossy(value.as_bytes()))
    };
    match text("grpc-status").as_deref() {
        Some("0") => Ok(()),
        status => bail!("gRPC status {status:?}: {}", text("grpc-message").unwrap_or_default()),
    }
}
