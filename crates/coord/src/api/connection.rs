//! One HTTP/2 connection: accepts calls and runs them, all in one task.
//!
//! A call is not a task of its own. Its future lives in the connection's set and is polled on the connection's task,
//! which saves a spawn, a wake-up and a thread hop for each call.
//!
//! Invariant: the set is no larger than the number of streams the client may open, since a call ends when its stream is
//! reset.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::RecvStream;
use h2::server::{Builder, Connection, SendResponse};
use http::Request;
use moim_base::task::Shutdown;
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::Api;
use super::dispatch::serve_call;
use super::memory::{OpenCalls, Share};
use super::socket::{Outbox, Socket};

/// Maximum number of open calls on a connection. Clients open a stream for each watch.
const MAX_STREAMS: u32 = 8_192;
/// Receive windows of one call, and of all calls of a connection.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// Maximum header size of one call.
const MAX_HEADER_BYTES: u32 = 32 * 1024;
/// Maximum unsent bytes buffered in the connection.
pub(super) const SEND_BUFFER_BYTES: usize = 512 * 1024;
/// Maximum bytes of small body chunks that wait to be read. They are read before the next socket read.
const SMALL_CHUNKS_BYTES: usize = 4 * 1024 * 1024;
/// Streams reset before they were accepted; more in one read is an attack.
const MAX_RESET_BEFORE_ACCEPT: usize = 1_024;
/// Timeout of the HTTP/2 handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the final flush, which carries the reason of the close.
const FINAL_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long open calls may take to end when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

type Accepted = (Request<RecvStream>, SendResponse<Bytes>);

/// Serves a connection until either side closes it.
pub(super) async fn serve(
    api: Arc<Api>,
    first: BytesMut,
    socket: TcpStream,
    peer: SocketAddr,
    shutdown: Shutdown,
) {
    let (socket, out) = Socket::new(first, socket);
    let handshake = builder().handshake::<_, Bytes>(socket);
    let mut connection = match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => {
            api.counters.bad_connections.inc();
            tracing::info!(%peer, %error, "etcd port: HTTP/2 handshake failed");
            return;
        }
        Err(_) => {
            tracing::info!(%peer, "etcd port: HTTP/2 handshake timed out");
            return;
        }
    };
    out.collect();
    let mut calls = FuturesUnordered::new();
    let share = Share::new(&api.budget);
    let mut open = OpenCalls::new(Arc::clone(&share));
    let mut accept_call = |(request, respond), is_admitted| {
        serve_call((Arc::clone(&api), Arc::clone(&share)), request, respond, is_admitted)
    };
    let mut stall_detector = StallDetector { share: Arc::clone(&share), taken_bytes: 0, timer: None };
    let stopped = {
        let mut stopped = pin!(shutdown.stopped());
        poll_fn(|context| {
            if stopped.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(true));
            }
            let polled =
                poll_connection(&mut connection, &out, (&mut calls, &mut open), &mut accept_call, context);
            if polled.is_pending() && stall_detector.poll(&out, context).is_ready() {
                tracing::info!(%peer, "etcd port: connection closed: responses unread while memory is short");
                return Poll::Ready(Ok(false));
            }
            polled.map_ok(|()| false)
        })
        .await
    };
    let outcome = match stopped {
        Ok(false) => Ok(()),
        Ok(true) => {
            connection.graceful_shutdown();
            let drain = poll_fn(|context| {
                poll_connection(&mut connection, &out, (&mut calls, &mut open), &mut accept_call, context)
            });
            tokio::time::timeout(DRAIN_TIMEOUT, drain).await.unwrap_or(Ok(()))
        }
        Err(error) => Err(error),
    };
    // The last frames, such as the reason of the close, should still reach the client.
    let _ = tokio::time::timeout(FINAL_FLUSH_TIMEOUT, poll_fn(|context| out.poll_flush(context))).await;
    if let Err(error) = outcome
        && !error.is_io()
    {
        api.counters.bad_connections.inc();
        tracing::info!(%peer, %error, "etcd port: connection failed");
    }
}

/// Detects a client that does not read its responses.
struct StallDetector {
    share: Arc<Share>,
    /// Bytes the socket had taken at the last check.
    taken_bytes: u64,
    /// The time of the next check. Set while the socket takes nothing.
    timer: Option<Pin<Box<Sleep>>>,
}

impl StallDetector {
    /// Ready when the socket has taken nothing for the stall timeout, while responses of the connection hold memory
    /// that others may need.
    fn poll(&mut self, out: &Outbox, context: &mut Context<'_>) -> Poll<()> {
        let Some(taken_bytes) = out.blocked_at() else {
            self.timer = None;
            return Poll::Pending;
        };
        if std::mem::replace(&mut self.taken_bytes, taken_bytes) != taken_bytes {
            self.timer = None;
        }
        loop {
            let stall = self.share.stall();
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
            ready!(timer.as_mut().poll(context));
            if self.share.holds_messages() && self.share.is_short() {
                return Poll::Ready(());
            }
            self.timer = None;
        }
    }
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder
        .max_concurrent_streams(MAX_STREAMS)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_HEADER_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .data_frame_budget(SMALL_CHUNKS_BYTES)
        .max_pending_accept_reset_streams(MAX_RESET_BEFORE_ACCEPT);
    builder
}

/// Advances the connection as far as possible: accepts calls, polls the woken ones, writes their output.
///
/// Ready when the connection is closed.
fn poll_connection<F: Future<Output = ()>>(
    connection: &mut Connection<Socket, Bytes>,
    out: &Outbox,
    (calls, open): (&mut FuturesUnordered<F>, &mut OpenCalls),
    accept_call: &mut impl FnMut(Accepted, bool) -> F,
    context: &mut Context<'_>,
) -> Poll<Result<(), h2::Error>> {
    loop {
        // Read, and write the output of earlier rounds.
        while let Poll::Ready(accepted) = connection.poll_accept(context) {
            match accepted {
                Some(Ok(accepted)) => {
                    let is_admitted = open.admit(calls.len());
                    calls.push(accept_call(accepted, is_admitted));
                }
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Ok(())),
            }
        }
        let mut some_ended = false;
        while let Poll::Ready(Some(())) = calls.poll_next_unpin(context) {
            some_ended = true;
        }
        open.on_ended(calls.len());
        if !some_ended {
            // A write error here is also a read error, and the read path handles the end of a connection.
            let _ = out.poll_flush(context);
            return Poll::Pending;
        }
        // A response is in the connection's buffer: another round writes it to the socket.
    }
}
