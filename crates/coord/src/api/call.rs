//! One gRPC call: request messages, response messages, status.
//!
//! Owns what every method shares: message frames, flow control, headers and trailers. Knows nothing of etcd.
//!
//! Invariants:
//! - Unsent data is bounded: a frame of more than [`UNCOUNTED_BYTES`] holds a permit of the memory budget, which
//!   travels inside it until the socket has taken it.
//! - Unread data is bounded: an incomplete request message holds a permit too.
//! - A client that takes nothing of a response for [`EtcdOptions::stall`](super::EtcdOptions::stall), or does not
//!   complete a request message in that time, loses the call. A stream of many messages, such as a watch, holds one
//!   message and waits as long as its client likes while memory is not short.
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

/// Maximum request message size, as in etcd: the largest request and its overhead.
pub(super) const MAX_MESSAGE_BYTES: usize = crate::MAX_REQUEST_BYTES + 512 * 1024;
/// Maximum response message size: lengths are signed in many clients.
const MAX_RESPONSE_BYTES: usize = i32::MAX as usize;
/// Chunk size of a large response.
const CHUNK_BYTES: usize = 256 * 1024;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const STATUS_OK: HeaderValue = HeaderValue::from_static("0");
/// Reset code of a stream that ends for lack of memory. etcd clients restart a watch after it; after CANCEL they do
/// not.
const OVERLOADED: Reason = Reason::INTERNAL_ERROR;

/// The client has reset the call or closed the connection; no response can be sent.
#[derive(Debug)]
pub(super) struct ClientGone;

/// The request messages of one call.
pub(super) struct Body {
    share: Arc<Share>,
    stream: RecvStream,
    frames: FrameReader,
    /// Permit for an incomplete message.
    held: Option<Permit>,
    /// When the incomplete message must be complete.
    deadline: Option<Instant>,
}

impl Body {
    pub(super) fn new(share: Arc<Share>, stream: RecvStream) -> Self {
        Self { share, stream, frames: FrameReader::new(MAX_MESSAGE_BYTES), held: None, deadline: None }
    }

    /// The memory share of the call's connection.
    pub(super) fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// The next message, or `None` when the client has half-closed. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(frame) = self.frames.next_frame().map_err(frame_status)? {
                (self.held, self.deadline) = (None, None);
                return Ok(Some(frame));
            }
            let begun = self.frames.held_bytes();
            let chunk = match begun {
                0 => self.stream.data().await,
                _ => {
                    self.share.hold(&mut self.held, begun)?;
                    let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + self.share.stall());
                    tokio::time::timeout_at(deadline, self.stream.data()).await.map_err(|_| {
                        Status::new(Code::Canceled, "grpc: request message not completed in time")
                    })?
                }
            };
            match chunk {
                Some(Ok(chunk)) => {
                    // The data is copied or consumed now: the client may send as much again.
                    let _ = self.stream.flow_control().release_capacity(chunk.len());
                    self.frames.push(chunk);
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

    /// The only message of a unary request.
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

/// The response of a call, before anything was sent.
pub(super) struct Responder {
    inner: SendResponse<Bytes>,
    share: Arc<Share>,
}

impl Responder {
    pub(super) fn new(share: Arc<Share>, inner: SendResponse<Bytes>) -> Self {
        Self { inner, share }
    }

    /// Runs `work` until it is done or the client resets the call.
    pub(super) async fn until_reset<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ClientGone> {
        let mut work = std::pin::pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Ok(done));
            }
            self.inner.poll_reset(context).map(|_| Err(ClientGone))
        })
        .await
    }

    /// Ends the call with one message or an error.
    pub(super) async fn unary<M: Message>(self, response: Result<M, Status>) -> Result<(), ClientGone> {
        let message = match response.and_then(not_too_large) {
            Ok(message) => message,
            Err(status) => return self.fail(&status),
        };
        let bytes = PREFIX_BYTES + message.encoded_len();
        let mut sender = self.start()?;
        sender.stream.reserve_capacity(bytes);
        if bytes <= UNCOUNTED_BYTES && sender.stream.capacity() >= bytes {
            sender.stream.send_data(encode_frame(&message), false).map_err(|_| ClientGone)?;
            return sender.finish(Ok(()));
        }
        let permit = match sender.reserve(bytes).await? {
            Ok(permit) => permit,
            Err(status) => return sender.finish(Err(status)),
        };
        let frame = with_permit(encode_frame(&message), permit);
        drop(message);
        sender.limit_stalls();
        sender.send_frame(frame).await?;
        sender.finish(Ok(()))
    }

    /// Ends the call with a range response. A large one is written in chunks, and other tasks run in between: a client
    /// that reads everything does not delay the rest.
    pub(super) async fn range(self, response: Result<RangeResponse, Status>) -> Result<(), ClientGone> {
        let response = match response.and_then(not_too_large) {
            Ok(response) if response.encoded_len() > CHUNK_BYTES => response,
            response => return self.unary(response).await,
        };
        let mut sender = self.start()?;
        // One chunk here, and the chunks buffered by the HTTP/2 library.
        let held = CHUNK_BYTES + SEND_BUFFER_BYTES + response.kvs.len() * size_of::<KeyValue>();
        let mut permit = match sender.reserve(held).await? {
            Ok(permit) => Some(permit),
            Err(status) => return sender.finish(Err(status)),
        };
        sender.limit_stalls();
        sender.send_frame(frame_prefix(response.encoded_len())).await?;
        let mut chunks = chunks(response).peekable();
        while let Some(chunk) = chunks.next() {
            let mut frame: Bytes = chunk.encode_to_vec().into();
            if chunks.peek().is_none()
                && let Some(permit) = permit.take()
            {
                // The library sends in order: when the last chunk has left, all have.
                frame = with_permit(frame, permit);
            }
            sender.send_frame(frame).await?;
            tokio::task::yield_now().await;
        }
        sender.finish(Ok(()))
    }

    /// Starts a response of many messages.
    pub(super) fn start(mut self) -> Result<Sender, ClientGone> {
        let mut response = Response::new(());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        let stream = self.inner.send_response(response, false).map_err(|_| ClientGone)?;
        Ok(Sender { stream, share: self.share, stall: None })
    }

    /// Ends the call with an error and no message: one header block.
    pub(super) fn fail(mut self, status: &Status) -> Result<(), ClientGone> {
        let mut response = Response::new(());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        add_status(response.headers_mut(), status);
        self.inner.send_response(response, true).map(|_| ()).map_err(|_| ClientGone)
    }

    /// Refuses a request that is not gRPC.
    pub(super) fn refuse(mut self, http_status: http::StatusCode, status: &Status) -> Result<(), ClientGone> {
        let mut response = Response::new(());
        *response.status_mut() = http_status;
        add_status(response.headers_mut(), status);
        self.inner.send_response(response, true).map(|_| ()).map_err(|_| ClientGone)
    }

    /// Refuses the message encoding of the call, naming the supported one.
    pub(super) fn refuse_encoding(mut self, status: &Status) -> Result<(), ClientGone> {
        let mut response = Response::new(());
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        response.headers_mut().insert("grpc-accept-encoding", HeaderValue::from_static("identity"));
        add_status(response.headers_mut(), status);
        self.inner.send_response(response, true).map(|_| ()).map_err(|_| ClientGone)
    }
}

/// A frame that returns its memory permit when it has been sent.
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

/// Refuses a response that no client can receive.
fn not_too_large<M: Message>(message: M) -> Result<M, Status> {
    let bytes = message.encoded_len();
    if bytes <= MAX_RESPONSE_BYTES {
        return Ok(message);
    }
    let text = format!("grpc: trying to send message larger than max ({bytes} vs. {MAX_RESPONSE_BYTES})");
    Err(Status::new(Code::ResourceExhausted, text))
}

/// A response as partial responses of about [`CHUNK_BYTES`]. Concatenated they encode the whole response: protobuf
/// merges fields.
fn chunks(response: RangeResponse) -> impl Iterator<Item = RangeResponse> {
    let RangeResponse { header, kvs, more, count } = response;
    let mut kvs = kvs.into_iter().peekable();
    let mut head = header;
    let entries = std::iter::from_fn(move || {
        kvs.peek()?;
        let mut chunk = RangeResponse { header: head.take(), ..RangeResponse::default() };
        let mut bytes = 0;
        while bytes < CHUNK_BYTES
            && let Some(kv) = kvs.next()
        {
            bytes += kv.encoded_len();
            chunk.kvs.push(kv);
        }
        Some(chunk)
    });
    entries.chain(std::iter::once(RangeResponse { more, count, ..RangeResponse::default() }))
}

/// A response of many messages, in progress.
pub(super) struct Sender {
    stream: SendStream<Bytes>,
    share: Arc<Share>,
    /// How long the client may take nothing, if limited.
    stall: Option<Duration>,
}

impl Sender {
    /// From now on a client that takes nothing for the stall timeout loses the call.
    pub(super) fn limit_stalls(&mut self) {
        self.stall = Some(self.share.stall());
    }

    /// Waits for memory for a message of this size.
    async fn reserve(&mut self, bytes: usize) -> Result<Result<Permit, Status>, ClientGone> {
        let share = Arc::clone(&self.share);
        self.until_reset(share.reserve(bytes)).await
    }

    /// Sends a message, waiting for the flow-control window, and for memory if it is large.
    pub(super) async fn send<M: Message>(&mut self, message: &M) -> Result<(), ClientGone> {
        let bytes = PREFIX_BYTES + message.encoded_len();
        if bytes <= UNCOUNTED_BYTES {
            return self.send_frame(encode_frame(message)).await;
        }
        match self.reserve(bytes).await? {
            Ok(permit) => self.send_frame(with_permit(encode_frame(message), permit)).await,
            Err(_) => {
                self.stream.send_reset(OVERLOADED);
                Err(ClientGone)
            }
        }
    }

    /// Sends a frame, waiting for the flow-control window.
    async fn send_frame(&mut self, mut frame: Bytes) -> Result<(), ClientGone> {
        while !frame.is_empty() {
            self.stream.reserve_capacity(frame.len());
            let mut capacity = self.stream.capacity();
            if capacity == 0 {
                capacity = self.wait_capacity(frame.len()).await?;
            }
            let chunk = frame.split_to(capacity.min(frame.len()));
            self.stream.send_data(chunk, false).map_err(|_| ClientGone)?;
        }
        Ok(())
    }

    async fn wait_capacity(&mut self, unsent: usize) -> Result<usize, ClientGone> {
        if let Some(stall) = self.stall {
            return tokio::time::timeout(stall, self.next_capacity()).await.unwrap_or_else(|_| {
                self.stream.send_reset(Reason::CANCEL);
                Err(ClientGone)
            });
        }
        if unsent <= UNCOUNTED_BYTES {
            return self.next_capacity().await;
        }
        loop {
            if let Ok(capacity) = tokio::time::timeout(self.share.stall(), self.next_capacity()).await {
                return capacity;
            }
            if self.share.is_short() {
                self.stream.send_reset(OVERLOADED);
                return Err(ClientGone);
            }
        }
    }

    async fn next_capacity(&mut self) -> Result<usize, ClientGone> {
        loop {
            match poll_fn(|context| self.stream.poll_capacity(context)).await {
                Some(Ok(0)) => {}
                Some(Ok(capacity)) => return Ok(capacity),
                Some(Err(_)) | None => return Err(ClientGone),
            }
        }
    }

    /// Waits until the client resets the call.
    pub(super) async fn reset(&mut self) -> ClientGone {
        // Also when the connection is lost; the reason does not matter.
        let _ = poll_fn(|context| self.stream.poll_reset(context)).await;
        ClientGone
    }

    async fn until_reset<T>(&mut self, work: impl Future<Output = T>) -> Result<T, ClientGone> {
        let mut work = std::pin::pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Ok(done));
            }
            self.stream.poll_reset(context).map(|_| Err(ClientGone))
        })
        .await
    }

    /// Ends the call.
    pub(super) fn finish(mut self, outcome: Result<(), Status>) -> Result<(), ClientGone> {
        let trailers = match outcome {
            Ok(()) => ok_trailers(),
            Err(status) => {
                let mut trailers = HeaderMap::with_capacity(2);
                add_status(&mut trailers, &status);
                trailers
            }
        };
        self.stream.send_trailers(trailers).map_err(|_| ClientGone)
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
    // The encoding leaves only printable ASCII, so this cannot fail.
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(GRPC_MESSAGE, value);
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_grpc::etcd::ResponseHeader;

    use super::*;

    #[test]
    fn chunks_of_a_response_concatenate_to_it() {
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
            let joined: Vec<u8> = chunks(response).flat_map(|chunk| chunk.encode_to_vec()).collect();
            // The header alone has no chunk, and such a response is never split.
            if count > 0 {
                assert!(whole == joined, "{count} entries of {value_bytes} bytes");
            }
        }
    }
}
