//! One HTTP/2 connection: takes calls and runs them, all in one task.
//!
//! A call is not a task of its own. Its future lives in the connection's set and is polled where the bytes are,
//! which saves a spawn, a wake and a thread hop for each call.
//!
//! Invariant: the set is no larger than the number of streams the client may have open, since a call ends when its
//! stream is reset.

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

/// How many calls a client may have open on a connection. Clients open a stream for each watch.
const MAX_STREAMS: u32 = 8_192;
/// How much of one call, and of all calls of a connection, a client may send before it is taken.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
/// The headers of one call.
const MAX_HEADER_BYTES: u32 = 32 * 1024;
/// What may wait in the connection for the socket.
pub(super) const SEND_BUFFER_BYTES: usize = 512 * 1024;
/// Small pieces of bodies that may wait to be taken. They are taken before the next read of the socket.
const SMALL_PIECES_BYTES: usize = 4 * 1024 * 1024;
/// Calls that were given up before they were looked at; more in one read is an attack.
const MAX_RESET_BEFORE_ACCEPT: usize = 1_024;
/// How long a client may take for its greeting.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take to hear why it is left.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long calls may take to end when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

type Accepted = (Request<RecvStream>, SendResponse<Bytes>);

/// Serves a connection until either side ends it.
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
            tracing::info!(%peer, %error, "etcd port: no HTTP/2 connection came about");
            return;
        }
        Err(_) => {
            tracing::info!(%peer, "etcd port: a client did not finish its greeting");
            return;
        }
    };
    out.collect();
    let mut calls = FuturesUnordered::new();
    let share = Share::new(&api.budget);
    let mut open = OpenCalls::new(Arc::clone(&share));
    let mut take = |(request, respond), is_admitted| {
        serve_call((Arc::clone(&api), Arc::clone(&share)), request, respond, is_admitted)
    };
    let mut unread = Unread { share: Arc::clone(&share), taken_bytes: 0, look: None };
    let stopped = {
        let mut stopped = pin!(shutdown.stopped());
        poll_fn(|context| {
            if stopped.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(true));
            }
            let polled = poll_connection(&mut connection, &out, (&mut calls, &mut open), &mut take, context);
            if polled.is_pending() && unread.poll(&out, context).is_ready() {
                tracing::info!(%peer, "etcd port: a client does not read its answers and memory is short, closed");
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
                poll_connection(&mut connection, &out, (&mut calls, &mut open), &mut take, context)
            });
            tokio::time::timeout(DRAIN_TIMEOUT, drain).await.unwrap_or(Ok(()))
        }
        Err(error) => Err(error),
    };
    // What was said last, the reason for the end for example, should still be heard.
    let _ = tokio::time::timeout(LAST_WORDS_TIMEOUT, poll_fn(|context| out.poll_flush(context))).await;
    if let Err(error) = outcome
        && !error.is_io()
    {
        api.counters.bad_connections.inc();
        tracing::info!(%peer, %error, "etcd port: a connection was ended");
    }
}

/// Watches a client that does not read what was sent to it.
struct Unread {
    share: Arc<Share>,
    /// What the socket had taken when it was last looked at.
    taken_bytes: u64,
    /// When to look again. Set while the socket takes nothing.
    look: Option<Pin<Box<Sleep>>>,
}

impl Unread {
    /// Ready when the socket has taken nothing for as long as a client may stall, while answers of the connection hold
    /// memory that others may need.
    fn poll(&mut self, out: &Outbox, context: &mut Context<'_>) -> Poll<()> {
        let Some(taken_bytes) = out.blocked_at() else {
            self.look = None;
            return Poll::Pending;
        };
        if std::mem::replace(&mut self.taken_bytes, taken_bytes) != taken_bytes {
            self.look = None;
        }
        loop {
            let stall = self.share.stall();
            let look = self.look.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
            ready!(look.as_mut().poll(context));
            if self.share.holds_messages() && self.share.is_short() {
                return Poll::Ready(());
            }
            self.look = None;
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
        .data_frame_budget(SMALL_PIECES_BYTES)
        .max_pending_accept_reset_streams(MAX_RESET_BEFORE_ACCEPT);
    builder
}

/// Moves everything on as far as it goes: takes calls, polls those that were woken, writes what they said.
///
/// Ready when the connection is closed.
fn poll_connection<F: Future<Output = ()>>(
    connection: &mut Connection<Socket, Bytes>,
    out: &Outbox,
    (calls, open): (&mut FuturesUnordered<F>, &mut OpenCalls),
    take: &mut impl FnMut(Accepted, bool) -> F,
    context: &mut Context<'_>,
) -> Poll<Result<(), h2::Error>> {
    loop {
        // Reading, and writing what earlier rounds left.
        while let Poll::Ready(accepted) = connection.poll_accept(context) {
            match accepted {
                Some(Ok(accepted)) => {
                    let is_admitted = open.admit(calls.len());
                    calls.push(take(accepted, is_admitted));
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
            // A socket that fails here fails to be read as well, which is where the end of a connection is seen.
            let _ = out.poll_flush(context);
            return Poll::Pending;
        }
        // An answer is in the connection's buffer: another turn hands it to the socket.
    }
}
