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
use super::http2::{self, Gone, Incoming, Outgoing};
use super::hub::Seat;
use crate::routing::link::{LEADER_IS, NO_LEADER};

/// Connections at a time.
const MAX_CONNECTIONS: usize = 16_384;
/// How long a client may take to say hello.
const HELLO: Duration = Duration::from_secs(10);
/// How long to wait when no connection can be taken.
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
    // Small messages go out at once, and a client whose machine has gone is noticed.
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
                // A client that is gone needs no answer.
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
) -> Result<(), Gone> {
    let (head, body) = request.into_parts();
    let mut incoming = Incoming::new(body);
    match head.uri.path() {
        method::FOLLOW => follow(shared, incoming, respond).await,
        method::CHANGE => {
            let Some(request) = incoming.next::<ChangeRequest>().await? else { return Err(Gone) };
            let answer = match leading(shared, &request.namespace) {
                Ok(lead) => lead.change(request).await,
                Err(status) => Err(status),
            };
            http2::unary(respond, answer).await
        }
        method::SHOW => {
            let Some(request) = incoming.next::<ShowRequest>().await? else { return Err(Gone) };
            let answer = leading(shared, &request.namespace).map(|lead| lead.show());
            http2::unary(respond, answer).await
        }
        path => http2::fail(respond, &Status::new(Code::Unimplemented, format!("there is no method {path}"))),
    }
}

fn known(shared: &Shared, namespace: &str) -> Result<(), Status> {
    if namespace.trim_matches('/') == shared.options.namespace.trim_matches('/') {
        return Ok(());
    }
    Err(Status::new(Code::NotFound, format!("this manager has no namespace {namespace}")))
}

fn leading(shared: &Shared, namespace: &str) -> Result<Arc<super::lead::Lead>, Status> {
    known(shared, namespace)?;
    if let Some(lead) = shared.lead().filter(|lead| lead.is_valid()) {
        return Ok(lead);
    }
    Err(match shared.leader.current().filter(|leader| *leader.node_id != *shared.context.node_id) {
        Some(leader) => Status::new(Code::FailedPrecondition, format!("{LEADER_IS}{}", leader.node_id)),
        None => Status::new(Code::Unavailable, NO_LEADER),
    })
}

/// Counts a subscriber for as long as it lives.
struct Subscribed<'a>(&'a Shared);

impl Drop for Subscribed<'_> {
    fn drop(&mut self) {
        self.0.feed.on_gone(&self.0.context.metrics);
    }
}

/// Frees a server's seat.
struct Seated<'a> {
    shared: &'a Shared,
    node: String,
    seat: Seat,
}

impl Drop for Seated<'_> {
    fn drop(&mut self) {
        self.shared.hub.disconnect(&self.node, self.seat.generation);
    }
}

async fn follow(
    shared: &Arc<Shared>,
    mut incoming: Incoming,
    respond: SendResponse<Bytes>,
) -> Result<(), Gone> {
    let hello = tokio::time::timeout(HELLO, incoming.next::<FollowRequest>()).await.map_err(|_| Gone)??;
    let Some(FollowRequest { kind: Some(FollowRequestKind::Hello(hello)) }) = hello else {
        return http2::fail(respond, &Status::new(Code::InvalidArgument, "a stream begins with a hello"));
    };
    let checked = known(shared, &hello.namespace).and_then(|()| match hello.node_id.is_empty() {
        true => Ok(None),
        // Servers do what the leader says, so they talk to the leader.
        false => leading(shared, &hello.namespace).map(Some),
    });
    let lead = match checked {
        Ok(lead) => lead,
        Err(status) => return http2::fail(respond, &status),
    };
    let mut out = Outgoing::start(respond)?;
    shared.feed.on_subscribed(&shared.context.metrics);
    let _subscribed = Subscribed(shared);
    let mut seated = None;
    if let Some(lead) = lead {
        let seat = shared.hub.connect(&hello.node_id);
        seated = Some(Seated { shared, node: hello.node_id.clone(), seat });
        lead.on_connected(&hello);
    }
    let ended = stream(shared, &hello, &mut incoming, &mut out, seated.as_mut()).await;
    match ended {
        Ok(()) => out.finish(Ok(())),
        Err(gone) => Err(gone),
    }
}

async fn stream(
    shared: &Shared,
    hello: &Hello,
    incoming: &mut Incoming,
    out: &mut Outgoing,
    mut seated: Option<&mut Seated<'_>>,
) -> Result<(), Gone> {
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
            match &mut seated {
                Some(seated) => seated.seat.commands.recv().await,
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
                // Replaced by a newer connection, or this manager leads no more.
                None => return Ok(()),
            },
            () = out.closed() => return Err(Gone),
            message = incoming.next::<FollowRequest>(), if !is_silent => match message? {
                Some(FollowRequest { kind: Some(FollowRequestKind::Ack(ack)) }) => shared.hub.on_ack(ack),
                Some(_) => {}
                // It has nothing more to say, but still listens.
                None => is_silent = true,
            },
        }
    }
}
