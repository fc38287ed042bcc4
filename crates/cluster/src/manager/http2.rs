//! gRPC on HTTP/2, as much of it as the manager needs: calls in, frames out, a status at the end.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Response};
use moim_wire_grpc::{FrameReader, Message, Status, encode_frame, status};

/// The largest message a client may send: a hand-off, and what is around it.
const MAX_MESSAGE: usize = 16 << 20;
/// A client that takes nothing for so long is given up.
const STALL: Duration = Duration::from_secs(30);
/// As much is written at once.
const PIECE: usize = 64 << 10;

/// The client is gone.
#[derive(Debug)]
pub(super) struct Gone;

/// The messages a client sends.
pub(super) struct Incoming {
    body: RecvStream,
    frames: FrameReader,
}

impl Incoming {
    pub(super) fn new(body: RecvStream) -> Self {
        Self { body, frames: FrameReader::new(MAX_MESSAGE) }
    }

    /// The next message; `None` when the client has said everything. Cancel-safe.
    pub(super) async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Gone> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(|_| Gone)? {
                return moim_wire_grpc::decode(frame).map(Some).map_err(|_| Gone);
            }
            match self.body.data().await {
                Some(Ok(piece)) => {
                    // What was read may be sent again.
                    let _ = self.body.flow_control().release_capacity(piece.len());
                    self.frames.push(piece);
                }
                Some(Err(_)) => return Err(Gone),
                None => return Ok(None),
            }
        }
    }
}

/// Where the answers go.
pub(super) struct Outgoing {
    stream: SendStream<Bytes>,
}

impl Outgoing {
    /// Begins an answer of many messages.
    pub(super) fn start(mut respond: SendResponse<Bytes>) -> Result<Self, Gone> {
        let mut response = Response::new(());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        let stream = respond.send_response(response, false).map_err(|_| Gone)?;
        Ok(Self { stream })
    }

    /// Sends a frame as the client takes it.
    pub(super) async fn send(&mut self, mut frame: Bytes) -> Result<(), Gone> {
        while !frame.is_empty() {
            self.stream.reserve_capacity(frame.len().min(PIECE));
            let mut room = self.stream.capacity();
            if room == 0 {
                let more = poll_fn(|context| self.stream.poll_capacity(context));
                room = match tokio::time::timeout(STALL, more).await {
                    Ok(Some(Ok(room))) => room,
                    Ok(Some(Err(_)) | None) | Err(_) => return Err(Gone),
                };
            }
            let piece = frame.split_to(room.min(frame.len()));
            self.stream.send_data(piece, false).map_err(|_| Gone)?;
        }
        Ok(())
    }

    /// Returns when the client gives the call up.
    pub(super) async fn closed(&mut self) {
        // However it ends, the client is gone.
        let _ = poll_fn(|context| self.stream.poll_reset(context)).await;
    }

    /// Ends the call.
    pub(super) fn finish(mut self, result: Result<(), Status>) -> Result<(), Gone> {
        let mut trailers = HeaderMap::new();
        put_status(&mut trailers, result.as_ref().err());
        self.stream.send_trailers(trailers).map_err(|_| Gone)
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

/// Ends a call of one answer.
pub(super) async fn unary<M: Message>(
    respond: SendResponse<Bytes>,
    answer: Result<M, Status>,
) -> Result<(), Gone> {
    match answer {
        Ok(message) => {
            let mut out = Outgoing::start(respond)?;
            out.send(encode_frame(&message)).await?;
            out.finish(Ok(()))
        }
        Err(status) => fail(respond, &status),
    }
}

/// Ends a call with an error and no message.
pub(super) fn fail(mut respond: SendResponse<Bytes>, failed: &Status) -> Result<(), Gone> {
    let mut response = Response::new(());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    put_status(response.headers_mut(), Some(failed));
    respond.send_response(response, true).map(drop).map_err(|_| Gone)
}
