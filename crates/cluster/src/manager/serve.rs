//! The gRPC port: connections, calls, and the stream of one subscriber.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use http::Request;
use moim_wire_grpc::routing::{
    ChangeRequest, FollowRequest, FollowRequestKind, FollowResponse, FollowResponseKind, Hello, ShowRequest,
    method,
};
use moim_wire_grpc::{Code, Status, encode_frame};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};

use super::Shared;
use super::feed::{self, Position};
use super::http2::{self, Disconnected, Incoming, Outgoing};
use super::hub::ServerConnection;
use crate::routing::link::{LEADER_IS, NO_LEADER};

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 16_384;
/// Timeout of the client's hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(super) fn spawn(shared: &Arc<Shared>, listener: TcpListener) {
    let shared = Arc::clone(shared);
    let scope = shared.context.scope.clone();
    scope.clone().spawn("manager listener", async move {
        let open = Arc::new(AtomicUsize::new(0));
        let stop = scope.shutdown().clone();
        loop {
            let accepted = tokio::select! {
                () = stop.stopped() => return,
                accepted = listener.accept() => accepted,
            };
            let Ok((socket, _)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            if open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                open.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (shared, open) = (Arc::clone(&shared), Arc::clone(&open));
            let stop = stop.clone();
            scope.spawn("manager connection", async move {
                tokio::select! {
                    () = stop.stopped() => {}
                    _ = connection(&shared, socket) => {}
                }
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
}

async fn connection(shared: &Arc<Shared>, socket: TcpStream) -> Result<(), h2::Error> {
    // Send small messages without delay, and detect dead peers.
    let _ = socket.set_nodelay(true);
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    let _ = SockRef::from(&socket).set_tcp_keepalive(&keepalive);
    let mut connection = h2::server::Builder::new()
        .max_concurrent_streams(64)
        .max_send_buffer_size(128 << 10)
        .handshake(socket)
        .await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        let shared = Arc::clone(shared);
        let scope = shared.context.scope.clone();
        scope.spawn("manager call", async move {
            let stop = shared.context.scope.shutdown().clone();
            tokio::select! {
                () = stop.stopped() => {}
                // A disconnected client needs no response.
                _ = call(&shared, request, respond) => {}
            }
        });
    }
    Ok(())
}

async fn call(
    shared: &Arc<Shared>,
    request: Request<h2::RecvStream>,
    respond: SendResponse<Bytes>,
) -> Result<(), Disconnected> {
    let (head, body) = request.into_parts();
    let mut incoming = Incoming::new(body);
    match head.uri.path() {
        method::FOLLOW => follow(shared, incoming, respond).await,
        method::CHANGE => {
            let Some(request) = incoming.next::<ChangeRequest>().await? else { return Err(Disconnected) };
            let response = match require_leader(shared, &request.namespace) {
                Ok(state) => state.change(request).await,
                Err(status) => Err(status),
            };
            http2::unary(respond, response).await
        }
        method::SHOW => {
            let Some(request) = incoming.next::<ShowRequest>().await? else { return Err(Disconnected) };
            let response = require_leader(shared, &request.namespace).map(|state| state.show());
            http2::unary(respond, response).await
        }
        path => http2::fail(respond, &Status::new(Code::Unimplemented, format!("there is no method {path}"))),
    }
}

fn check_namespace(shared: &Shared, namespace: &str) -> Result<(), Status> {
    if namespace.trim_matches('/') == shared.options.namespace.trim_matches('/') {
        return Ok(());
    }
    Err(Status::new(Code::NotFound, format!("this manager has no namespace {namespace}")))
}

fn require_leader(shared: &Shared, namespace: &str) -> Result<Arc<super::leader::LeaderState>, Status> {
    check_namespace(shared, namespace)?;
    if let Some(state) = shared.leader_state().filter(|state| state.is_valid()) {
        return Ok(state);
    }
    Err(match shared.leader.current().filter(|leader| *leader.node_id != *shared.context.node_id) {
        Some(leader) => Status::new(Code::FailedPrecondition, format!("{LEADER_IS}{}", leader.node_id)),
        None => Status::new(Code::Unavailable, NO_LEADER),
    })
}

/// Counts a subscriber while it is connected.
struct Subscribed<'a>(&'a Shared);

impl Drop for Subscribed<'_> {
    fn drop(&mut self) {
        self.0.feed.on_unsubscribed(&self.0.context.metrics);
    }
}

/// Unregisters a server's connection.
struct ConnectionGuard<'a> {
    shared: &'a Shared,
    node: String,
    connection: ServerConnection,
}

impl Drop for ConnectionGuard<'_> {
    fn drop(&mut self) {
        self.shared.hub.disconnect(&self.node, self.connection.generation);
    }
}

async fn follow(
    shared: &Arc<Shared>,
    mut incoming: Incoming,
    respond: SendResponse<Bytes>,
) -> Result<(), Disconnected> {
    let hello = tokio::time::timeout(HELLO_TIMEOUT, incoming.next::<FollowRequest>())
        .await
        .map_err(|_| Disconnected)??;
    let Some(FollowRequest { kind: Some(FollowRequestKind::Hello(hello)) }) = hello else {
        return http2::fail(
            respond,
            &Status::new(Code::InvalidArgument, "the first message of a stream must be a hello"),
        );
    };
    let checked = check_namespace(shared, &hello.namespace).and_then(|()| match hello.node_id.is_empty() {
        true => Ok(None),
        // Servers execute the leader's commands, so they connect to the leader.
        false => require_leader(shared, &hello.namespace).map(Some),
    });
    let state = match checked {
        Ok(state) => state,
        Err(status) => return http2::fail(respond, &status),
    };
    let mut out = Outgoing::start(respond)?;
    shared.feed.on_subscribed(&shared.context.metrics);
    let _subscribed = Subscribed(shared);
    let mut guard = None;
    if let Some(state) = state {
        let connection = shared.hub.connect(&hello.node_id);
        guard = Some(ConnectionGuard { shared, node: hello.node_id.clone(), connection });
        state.on_connected(&hello);
    }
    let ended = stream(shared, &hello, &mut incoming, &mut out, guard.as_mut()).await;
    match ended {
        Ok(()) => out.finish(Ok(())),
        Err(disconnected) => Err(disconnected),
    }
}

async fn stream(
    shared: &Shared,
    hello: &Hello,
    incoming: &mut Incoming,
    out: &mut Outgoing,
    mut guard: Option<&mut ConnectionGuard<'_>>,
) -> Result<(), Disconnected> {
    let mut published = shared.feed.subscribe();
    let mut position = Position { incarnation: hello.incarnation, version: hello.have_version };
    let mut is_silent = false;
    loop {
        let current = published.borrow_and_update().clone();
        while let Some((frames, then)) = feed::next(&current, position) {
            for frame in frames {
                out.send(frame).await?;
            }
            position = then;
        }
        drop(current);
        let command = async {
            match &mut guard {
                Some(guard) => guard.connection.commands.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = published.changed() => if changed.is_err() { return Ok(()) },
            command = command => match command {
                Some(command) => {
                    let kind = Some(FollowResponseKind::Command(command));
                    out.send(encode_frame(&FollowResponse { kind })).await?;
                }
                // Replaced by a newer connection, or this manager lost its leadership.
                None => return Ok(()),
            },
            () = out.closed() => return Err(Disconnected),
            message = incoming.next::<FollowRequest>(), if !is_silent => match message? {
                Some(FollowRequest { kind: Some(FollowRequestKind::Ack(ack)) }) => shared.hub.on_ack(ack),
                Some(_) => {}
                // The client has closed its side, but still receives.
                None => is_silent = true,
            },
        }
    }
}
