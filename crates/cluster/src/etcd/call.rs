//! One gRPC call over a connection: request headers and frames out, response frames and a status back.
//!
//! Invariant: a failure states whether the request can have reached the server. It has not when the stream
//! was never opened, or when the server refused the stream (REFUSED_STREAM); in every other case it may
//! have.

use std::time::Duration;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Method, Request, Version};
use moim_wire_grpc::status::decode_message;
use moim_wire_grpc::{Code, FrameReader, Message, Status, encode_frame, timeout};

use super::channel::{CallGuard, Link};
use super::error::EtcdError;

/// Maximum length of a received message. A list of a large store is one message.
const MAX_MESSAGE: usize = 1 << 30;
const USER_AGENT: &str = concat!("moim/", env!("CARGO_PKG_VERSION"));

/// A call in progress.
pub(crate) struct Stream {
    send: SendStream<Bytes>,
    receive: Receive,
    reader: FrameReader,
    _guard: CallGuard,
}

enum Receive {
    /// The response headers have not arrived yet.
    Headers(ResponseFuture),
    Body(RecvStream),
    /// The call is complete, with its status.
    Done(Result<(), Status>),
}

impl Stream {
    /// Opens a call. With a timeout, the server gets the deadline of the caller.
    pub(crate) async fn open(
        link: &Link,
        path: &'static str,
        within: Option<Duration>,
    ) -> Result<Self, EtcdError> {
        let unsent = |error: h2::Error| EtcdError::Unreachable(format!("{}: {error}", link.endpoint));
        let mut sender = link.sender.clone().ready().await.map_err(unsent)?;
        let request = request(link, path, within)?;
        let (response, send) = sender.send_request(request, false).map_err(unsent)?;
        let reader = FrameReader::new(MAX_MESSAGE);
        Ok(Self { send, receive: Receive::Headers(response), reader, _guard: link.count() })
    }

    /// Sends a message; `last` closes the sending side.
    pub(crate) fn send<M: Message>(&mut self, message: &M, last: bool) -> Result<(), EtcdError> {
        self.send.send_data(encode_frame(message), last).map_err(|error| broken(&error))
    }

    /// The next message, or `None` when the call completed with status OK. Cancel-safe.
    pub(crate) async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, EtcdError> {
        loop {
            let wrong =
                |what: &dyn std::fmt::Display| EtcdError::Unknown(format!("malformed response: {what}"));
            if let Some(frame) = self.reader.next_frame().map_err(|error| wrong(&error))? {
                return moim_wire_grpc::decode(frame).map(Some).map_err(|error| wrong(&error));
            }
            match &mut self.receive {
                Receive::Headers(response) => {
                    let response = response.await.map_err(|error| broken(&error))?;
                    let (head, body) = response.into_parts();
                    self.receive = if head.headers.contains_key("grpc-status") {
                        Receive::Done(status(&head.headers))
                    } else if head.status.is_success() {
                        Receive::Body(body)
                    } else {
                        let message = format!("server responded with HTTP status {}", head.status.as_u16());
                        Receive::Done(Err(Status::new(Code::Unknown, message)))
                    };
                }
                Receive::Body(body) => match body.data().await {
                    Some(Ok(piece)) => {
                        // Return the read bytes to the flow-control window; a stream that has ended needs
                        // none.
                        let _ = body.flow_control().release_capacity(piece.len());
                        self.reader.push(piece);
                    }
                    Some(Err(error)) => return Err(broken(&error)),
                    None => {
                        let trailers = body.trailers().await.map_err(|error| broken(&error))?;
                        let ended = match trailers {
                            Some(trailers) => status(&trailers),
                            None => {
                                return Err(EtcdError::Unknown(
                                    "response ended without a gRPC status".into(),
                                ));
                            }
                        };
                        self.receive = Receive::Done(ended);
                    }
                },
                Receive::Done(Ok(())) => return Ok(None),
                Receive::Done(Err(status)) => return Err(EtcdError::Refused(status.clone())),
            }
        }
    }
}

/// A unary call.
pub(crate) async fn unary<Q: Message, A: Message + Default>(
    link: &Link,
    path: &'static str,
    question: &Q,
    within: Duration,
) -> Result<A, EtcdError> {
    let mut stream = Stream::open(link, path, Some(within)).await?;
    stream.send(question, true)?;
    let Some(answer) = stream.next::<A>().await? else {
        return Err(EtcdError::Unknown("empty response".to_owned()));
    };
    // The status follows the response message; the response is valid only with it.
    match stream.next::<A>().await? {
        None => Ok(answer),
        Some(_) => Err(EtcdError::Unknown("two responses to a unary call".to_owned())),
    }
}

fn request(link: &Link, path: &'static str, within: Option<Duration>) -> Result<Request<()>, EtcdError> {
    let mut request = Request::builder()
        .method(Method::POST)
        .version(Version::HTTP_2)
        .uri(format!("http://{}{path}", link.endpoint))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("user-agent", USER_AGENT)
        // A member without a leader fails the call immediately instead of blocking it.
        .header("hasleader", "true")
        .body(())
        .map_err(|error| EtcdError::Unreachable(format!("{}: {error}", link.endpoint)))?;
    if let Some(within) = within
        && let Ok(value) = HeaderValue::from_str(&timeout::format(within))
    {
        request.headers_mut().insert("grpc-timeout", value);
    }
    Ok(request)
}

fn status(headers: &HeaderMap) -> Result<(), Status> {
    let code = headers.get("grpc-status").map_or(Code::Unknown, |value| Code::from_header(value.as_bytes()));
    if code == Code::Ok {
        return Ok(());
    }
    let message = headers.get("grpc-message").map(|value| decode_message(value.as_bytes()));
    Err(Status::new(code, message.unwrap_or_default()))
}

fn broken(error: &h2::Error) -> EtcdError {
    if error.is_remote() && error.reason() == Some(Reason::REFUSED_STREAM) {
        return EtcdError::Unreachable(error.to_string());
    }
    EtcdError::Unknown(error.to_string())
}
