//! Server side gRPC on HTTP/2, reduced to the needs of the manager: calls in, frames out, a status at the
//! end.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Response};
use moim_wire_grpc::{FrameReader, Message, Status, encode_frame, status};

/// Maximum request message: a hand-off and its envelope.
const MAX_MESSAGE: usize = 16 << 20;
/// Write timeout: a client that reads nothing for so long is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum bytes of one write.
const WRITE_BYTES: usize = 64 << 10;

/// The client has disconnected.
#[derive(Debug)]
pub(super) struct Disconnected;

/// Messages of a client.
pub(super) struct Incoming {
    body: RecvStream,
    frames: FrameReader,
}

impl Incoming {
    pub(super) fn new(body: RecvStream) -> Self {
        Self { body, frames: FrameReader::new(MAX_MESSAGE) }
    }

    /// The next message; `None` when the client has closed its side. Cancel-safe.
    pub(super) async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Disconnected> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(|_| Disconnected)? {
                return moim_wire_grpc::decode(frame).map(Some).map_err(|_| Disconnected);
            }
            match self.body.data().await {
                Some(Ok(piece)) => {
                    // Return the read bytes to the flow-control window.
                    let _ = self.body.flow_control().release_capacity(piece.len());
                    self.frames.push(piece);
                }
                Some(Err(_)) => return Err(Disconnected),
                None => return Ok(None),
            }
        }
    }
}

/// Response stream to a client.
pub(super) struct Outgoing {
    stream: SendStream<Bytes>,
}

impl Outgoing {
    /// Starts a streaming response.
    pub(super) fn start(mut respond: SendResponse<Bytes>) -> Result<Self, Disconnected> {
        let mut response = Response::new(());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        let stream = respond.send_response(response, false).map_err(|_| Disconnected)?;
        Ok(Self { stream })
    }

    /// Sends a frame within the client's flow-control window.
    pub(super) async fn send(&mut self, mut frame: Bytes) -> Result<(), Disconnected> {
        while !frame.is_empty() {
            self.stream.reserve_capacity(frame.len().min(WRITE_BYTES));
            let mut window = self.stream.capacity();
            if window == 0 {
                let more = poll_fn(|context| self.stream.poll_capacity(context));
                window = match tokio::time::timeout(WRITE_TIMEOUT, more).await {
                    Ok(Some(Ok(window))) => window,
                    Ok(Some(Err(_)) | None) | Err(_) => return Err(Disconnected),
                };
            }
            let piece = frame.split_to(window.min(frame.len()));
            self.stream.send_data(piece, false).map_err(|_| Disconnected)?;
        }
        Ok(())
    }

    /// Returns when the client cancels the call.
    pub(super) async fn closed(&mut self) {
        // Any outcome means that the client has disconnected.
        let _ = poll_fn(|context| self.stream.poll_reset(context)).await;
    }

    /// Completes the call with a status.
    pub(super) fn finish(mut self, result: Result<(), Status>) -> Result<(), Disconnected> {
        let mut trailers = HeaderMap::new();
        put_status(&mut trailers, result.as_ref().err());
        self.stream.send_trailers(trailers).map_err(|_| Disconnected)
    }
}

fn put_status(headers: &mut HeaderMap, failed: Option<&Status>) {
    let Some(failed) = failed else {
        headers.insert("grpc-status", HeaderValue::from_static("0"));
        return;
    };
    headers.insert("grpc-status", HeaderValue::from_static(failed.code.as_header()));
    if let Ok(message) = HeaderValue::from_str(&status::encode_message(&failed.message)) {
        headers.insert("grpc-message", message);
    }
}

/// Completes a unary call.
pub(super) async fn unary<M: Message>(
    respond: SendResponse<Bytes>,
    response: Result<M, Status>,
) -> Result<(), Disconnected> {
    match response {
        Ok(message) => {
            let mut out = Outgoing::start(respond)?;
            out.send(encode_frame(&message)).await?;
            out.finish(Ok(()))
        }
        Err(status) => fail(respond, &status),
    }
}

/// Completes a call with an error and no message.
pub(super) fn fail(mut respond: SendResponse<Bytes>, failed: &Status) -> Result<(), Disconnected> {
    let mut response = Response::new(());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    put_status(response.headers_mut(), Some(failed));
    respond.send_response(response, true).map(drop).map_err(|_| Disconnected)
}
