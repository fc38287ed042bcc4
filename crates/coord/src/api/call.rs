//! One gRPC call: its messages in, its messages out, its status.
//!
//! Owns what every method shares: frames of a body, flow control, headers and trailers. Knows nothing of etcd.
//!
//! Invariants:
//! - What waits to be sent is bounded: a frame of more than [`UNCOUNTED_BYTES`] has a permit of the memory budget, which
//!   travels inside it until the socket has taken it.
//! - What waits to be received is bounded: so has the beginning of a message.
//! - A client that takes nothing of an answer for [`EtcdOptions::stall`](super::EtcdOptions::stall), or does not finish a
//!   message in that time, loses the call. A stream of many messages, a watch, holds one message and waits as long as its
//!   client likes while memory is not short.
//! - A call whose client has gone is dropped at its next await.

use std::borrow::Cow;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use moim_wire_grpc::etcd::{KeyValue, RangeResponse};
use moim_wire_grpc::frame::{PREFIX_BYTES, frame_prefix};
use moim_wire_grpc::{Code, FrameError, FrameReader, Message, Status, encode_frame, status};
use tokio::time::Instant;

use moim_base::Permit;

use super::connection::SEND_BUFFER_BYTES;
use super::memory::{Share, UNCOUNTED_BYTES};

/// The largest message a client may send, as in etcd: the largest request and room for what is around it.
pub(super) const MAX_MESSAGE_BYTES: usize = crate::MAX_REQUEST_BYTES + 512 * 1024;
/// The largest message there can be: lengths are signed in many clients.
const MAX_ANSWER_BYTES: usize = i32::MAX as usize;
/// A large answer is written in pieces of about this size.
const PIECE_BYTES: usize = 256 * 1024;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const STATUS_OK: HeaderValue = HeaderValue::from_static("0");
/// Ends a stream of many messages for want of memory. Clients of etcd begin a watch anew after it; after CANCEL they do not.
const OVERLOADED: Reason = Reason::INTERNAL_ERROR;

/// The client has gone; nobody hears an answer.
#[derive(Debug)]
pub(super) struct Gone;

/// The messages a client sends in one call.
pub(super) struct Body {
    share: Arc<Share>,
    stream: RecvStream,
    frames: FrameReader,
    /// For the beginning of a message.
    held: Option<Permit>,
    /// When the message that has begun must be whole.
    deadline: Option<Instant>,
}

impl Body {
    pub(super) fn new(share: Arc<Share>, stream: RecvStream) -> Self {
        Self { share, stream, frames: FrameReader::new(MAX_MESSAGE_BYTES), held: None, deadline: None }
    }

    /// The memory of the connection that the call came in on.
    pub(super) fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// The next message, or `None` when the client has said everything. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(frame_status)? {
                (self.held, self.deadline) = (None, None);
                return Ok(Some(frame));
            }
            let begun = self.frames.held_bytes();
            let piece = match begun {
                0 => self.stream.data().await,
                _ => {
                    self.share.hold(&mut self.held, begun)?;
                    let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + self.share.stall());
                    tokio::time::timeout_at(deadline, self.stream.data()).await.map_err(|_| {
                        Status::new(Code::Canceled, "grpc: a message was begun and not finished in time")
                    })?
                }
            };
            match piece {
                Some(Ok(piece)) => {
                    // It is copied or consumed now: the client may send as much again.
                    let _ = self.stream.flow_control().release_capacity(piece.len());
                    self.frames.push(piece);
                }
                Some(Err(error)) => return Err(Status::new(Code::Canceled, error.to_string())),
                None => return self.frames.finish().map(|()| None).map_err(frame_status),
            }
        }
    }

    /// The next message, decoded. Cancel-safe.
    pub(super) async fn next_message<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        match self.next().await? {
            Some(frame) => decode(frame).map(Some),
            None => Ok(None),
        }
    }

    /// The one message of a call that has one.
    pub(super) async fn only<M: Message + Default>(&mut self) -> Result<M, Status> {
        self.next_message()
            .await?
            .ok_or_else(|| Status::new(Code::Internal, "grpc: the call ended without a request message"))
    }
}

fn decode<M: Message + Default>(frame: Bytes) -> Result<M, Status> {
    moim_wire_grpc::decode(frame)
        .map_err(|error| Status::new(Code::Internal, format!("grpc: error unmarshalling request: {error}")))
}

fn frame_status(error: FrameError) -> Status {
    let code = match error {
        FrameError::TooLarge { .. } => Code::ResourceExhausted,
        FrameError::Compressed | FrameError::Flag(_) | FrameError::Truncated => Code::Internal,
    };
    Status::new(code, error.to_string())
}

/// Where the answer of a call goes, before anything was said.
pub(super) struct Respond {
    inner: SendResponse<Bytes>,
    share: Arc<Share>,
}

impl Respond {
    pub(super) fn new(share: Arc<Share>, inner: SendResponse<Bytes>) -> Self {
        Self { inner, share }
    }

    /// Runs `work` until it is done or the client gives the call up.
    pub(super) async fn while_wanted<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Gone> {
        let mut work = std::pin::pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Ok(done));
            }
            self.inner.poll_reset(context).map(|_| Err(Gone))
        })
        .await
    }

    /// Ends the call with one message or an error.
    pub(super) async fn unary<M: Message>(self, answer: Result<M, Status>) -> Result<(), Gone> {
        let message = match answer.and_then(not_too_large) {
            Ok(message) => message,
            Err(status) => return self.fail(&status),
        };
        let bytes = PREFIX_BYTES + message.encoded_len();
        let mut sender = self.start()?;
        sender.stream.reserve_capacity(bytes);
        if bytes <= UNCOUNTED_BYTES && sender.stream.capacity() >= bytes {
            sender.stream.send_data(encode_frame(&message), false).map_err(|_| Gone)?;
            return sender.finish(Ok(()));
        }
        let room = match sender.room_for(bytes).await? {
            Ok(room) => room,
            Err(status) => return sender.finish(Err(status)),
        };
        let frame = with_permit(encode_frame(&message), room);
        drop(message);
        sender.limit_stalls();
        sender.send_frame(frame).await?;
        sender.finish(Ok(()))
    }

    /// Ends the call with the entries of a range. A large one is written piece by piece, and others have their turn in
    /// between: a client that reads everything does not make the rest wait.
    pub(super) async fn range(self, answer: Result<RangeResponse, Status>) -> Result<(), Gone> {
        let response = match answer.and_then(not_too_large) {
            Ok(response) if response.encoded_len() > PIECE_BYTES => response,
            answer => return self.unary(answer).await,
        };
        let mut sender = self.start()?;
        // One piece here, and what the HTTP/2 library holds of those before it.
        let held = PIECE_BYTES + SEND_BUFFER_BYTES + response.kvs.len() * size_of::<KeyValue>();
        let mut room = match sender.room_for(held).await? {
            Ok(room) => Some(room),
            Err(status) => return sender.finish(Err(status)),
        };
        sender.limit_stalls();
        sender.send_frame(frame_prefix(response.encoded_len())).await?;
        let mut pieces = pieces(response).peekable();
        while let Some(piece) = pieces.next() {
            let mut frame: Bytes = piece.encode_to_vec().into();
            if pieces.peek().is_none()
                && let Some(room) = room.take()
            {
                // The library sends in order: when this one has left, all have.
                frame = with_permit(frame, room);
            }
            sender.send_frame(frame).await?;
            tokio::task::yield_now().await;
        }
        sender.finish(Ok(()))
    }

    /// Begins an answer of many messages.
    pub(super) fn start(mut self) -> Result<Sender, Gone> {
        let mut response = Response::new(());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        let stream = self.inner.send_response(response, false).map_err(|_| Gone)?;
        Ok(Sender { stream, share: self.share, stall: None })
    }

    /// Ends the call with an error and no message: one block of headers.
    pub(super) fn fail(mut self, status: &Status) -> Result<(), Gone> {
        let mut response = Response::new(());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        add_status(response.headers_mut(), status);
        self.inner.send_response(response, true).map(|_| ()).map_err(|_| Gone)
    }

    /// Answers what is not gRPC.
    pub(super) fn refuse(mut self, http_status: http::StatusCode, status: &Status) -> Result<(), Gone> {
        let mut response = Response::new(());
        *response.status_mut() = http_status;
        add_status(response.headers_mut(), status);
        self.inner.send_response(response, true).map(|_| ()).map_err(|_| Gone)
    }

    /// Ends the call because of the encoding of its messages, naming the one that is spoken.
    pub(super) fn refuse_encoding(mut self, status: &Status) -> Result<(), Gone> {
        let mut response = Response::new(());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        response.headers_mut().insert("grpc-accept-encoding", HeaderValue::from_static("identity"));
        add_status(response.headers_mut(), status);
        self.inner.send_response(response, true).map(|_| ()).map_err(|_| Gone)
    }
}

/// A frame that gives its memory back when the last of it has left.
fn with_permit(frame: Bytes, permit: Permit) -> Bytes {
    struct Counted {
        frame: Bytes,
        _permit: Permit,
    }
    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.frame
        }
    }
    Bytes::from_owner(Counted { frame, _permit: permit })
}

/// Refuses an answer that no client could take.
fn not_too_large<M: Message>(message: M) -> Result<M, Status> {
    let bytes = message.encoded_len();
    if bytes <= MAX_ANSWER_BYTES {
        return Ok(message);
    }
    let text = format!("grpc: trying to send message larger than max ({bytes} vs. {MAX_ANSWER_BYTES})");
    Err(Status::new(Code::ResourceExhausted, text))
}

/// A response as responses of about [`PIECE_BYTES`]. Written one after the other they are the whole: that is how the
/// encoding adds up.
fn pieces(response: RangeResponse) -> impl Iterator<Item = RangeResponse> {
    let RangeResponse { header, kvs, more, count } = response;
    let mut kvs = kvs.into_iter().peekable();
    let mut head = header;
    let entries = std::iter::from_fn(move || {
        kvs.peek()?;
        let mut piece = RangeResponse { header: head.take(), ..RangeResponse::default() };
        let mut bytes = 0;
        while bytes < PIECE_BYTES
            && let Some(kv) = kvs.next()
        {
            bytes += kv.encoded_len();
            piece.kvs.push(kv);
        }
        Some(piece)
    });
    entries.chain(std::iter::once(RangeResponse { more, count, ..RangeResponse::default() }))
}

/// An answer of many messages, under way.
pub(super) struct Sender {
    stream: SendStream<Bytes>,
    share: Arc<Share>,
    /// How long the client may take nothing, if there is a limit.
    stall: Option<Duration>,
}

impl Sender {
    /// From now on a client that takes nothing for a while loses the call.
    pub(super) fn limit_stalls(&mut self) {
        self.stall = Some(self.share.stall());
    }

    /// Waits for memory for a message of so many bytes.
    async fn room_for(&mut self, bytes: usize) -> Result<Result<Permit, Status>, Gone> {
        let share = Arc::clone(&self.share);
        self.while_wanted(share.room(bytes)).await
    }

    /// Sends a message, waiting for the client's window, and for memory where it is large.
    pub(super) async fn send<M: Message>(&mut self, message: &M) -> Result<(), Gone> {
        let bytes = PREFIX_BYTES + message.encoded_len();
        if bytes <= UNCOUNTED_BYTES {
            return self.send_frame(encode_frame(message)).await;
        }
        match self.room_for(bytes).await? {
            Ok(room) => self.send_frame(with_permit(encode_frame(message), room)).await,
            Err(_) => {
                self.stream.send_reset(OVERLOADED);
                Err(Gone)
            }
        }
    }

    /// Sends a frame, waiting for the client's window.
    async fn send_frame(&mut self, mut frame: Bytes) -> Result<(), Gone> {
        while !frame.is_empty() {
            self.stream.reserve_capacity(frame.len());
            let mut room = self.stream.capacity();
            if room == 0 {
                room = self.wait_for_room(frame.len()).await?;
            }
            let piece = frame.split_to(room.min(frame.len()));
            self.stream.send_data(piece, false).map_err(|_| Gone)?;
        }
        Ok(())
    }

    async fn wait_for_room(&mut self, unsent: usize) -> Result<usize, Gone> {
        if let Some(stall) = self.stall {
            return tokio::time::timeout(stall, self.room()).await.unwrap_or_else(|_| {
                self.stream.send_reset(Reason::CANCEL);
                Err(Gone)
            });
        }
        if unsent <= UNCOUNTED_BYTES {
            return self.room().await;
        }
        loop {
            if let Ok(room) = tokio::time::timeout(self.share.stall(), self.room()).await {
                return room;
            }
            if self.share.is_short() {
                self.stream.send_reset(OVERLOADED);
                return Err(Gone);
            }
        }
    }

    async fn room(&mut self) -> Result<usize, Gone> {
        loop {
            match poll_fn(|context| self.stream.poll_capacity(context)).await {
                Some(Ok(0)) => {}
                Some(Ok(room)) => return Ok(room),
                Some(Err(_)) | None => return Err(Gone),
            }
        }
    }

    /// Returns when the client gives the call up.
    pub(super) async fn reset(&mut self) -> Gone {
        // Whatever the reason, and when the connection is lost, too.
        let _ = poll_fn(|context| self.stream.poll_reset(context)).await;
        Gone
    }

    async fn while_wanted<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Gone> {
        let mut work = std::pin::pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Ok(done));
            }
            self.stream.poll_reset(context).map(|_| Err(Gone))
        })
        .await
    }

    /// Ends the call.
    pub(super) fn finish(mut self, outcome: Result<(), Status>) -> Result<(), Gone> {
        let trailers = match outcome {
            Ok(()) => ok_trailers(),
            Err(status) => {
                let mut trailers = HeaderMap::with_capacity(2);
                add_status(&mut trailers, &status);
                trailers
            }
        };
        self.stream.send_trailers(trailers).map_err(|_| Gone)
    }
}

fn ok_trailers() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(GRPC_STATUS, STATUS_OK);
    trailers
}

fn add_status(headers: &mut HeaderMap, outcome: &Status) {
    headers.insert(GRPC_STATUS, HeaderValue::from_static(outcome.code.as_header()));
    let text: Cow<'_, str> = status::encode_message(&outcome.message);
    // The encoding leaves printable ASCII only, so this cannot fail.
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(GRPC_MESSAGE, value);
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_grpc::etcd::ResponseHeader;

    use super::*;

    #[test]
    fn the_pieces_of_a_response_are_the_response() {
        for (count, value_bytes) in [(0, 0), (1, 10), (1, 1 << 20), (3, 400_000), (5_000, 200)] {
            let kv = |number: usize| KeyValue {
                key: format!("{number:06}").into(),
                value: vec![b'v'; value_bytes].into(),
                version: 1,
                ..KeyValue::default()
            };
            let response = RangeResponse {
                header: Some(ResponseHeader { revision: 7, ..ResponseHeader::default() }),
                kvs: (0..count).map(kv).collect(),
                more: count > 1,
                count: count as i64,
            };
            let whole = response.encode_to_vec();
            let joined: Vec<u8> = pieces(response).flat_map(|piece| piece.encode_to_vec()).collect();
            // The header alone has no piece of its own, and such a response is never cut.
            if count > 0 {
                assert!(whole == joined, "{count} entries of {value_bytes} bytes");
            }
        }
    }
}
