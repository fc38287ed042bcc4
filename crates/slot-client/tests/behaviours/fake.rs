//! Fake servers with scripted replies that record the received commands.

use std::io::ErrorKind;
use std::net::TcpListener as StdListener;
use std::sync::{Arc, Mutex};

use bytes::{Buf, BytesMut};
use moim_base::task::{Scope, Shutdown};
use moim_slot_client::Slot;
use moim_wire_resp::{Decoded, Decoder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Reaction of a node to a command.
pub(crate) enum Action {
    /// Sends these bytes.
    Reply(String),
    /// Sends these bytes and closes the connection.
    ReplyAndClose(String),
    /// Closes the connection without a reply.
    Close,
    /// Never replies on this connection again.
    Hang,
}

/// An error reply.
pub(crate) fn error(text: impl std::fmt::Display) -> Option<Action> {
    Some(Action::Reply(format!("-{text}\r\n")))
}

/// An integer reply.
pub(crate) fn integer(value: i64) -> Option<Action> {
    Some(Action::Reply(format!(":{value}\r\n")))
}

type Script = Box<dyn FnMut(usize, &[String]) -> Option<Action> + Send>;

struct State {
    views: Vec<String>,
    script: Script,
    /// Every command after the handshake, with the node that received it.
    log: Vec<(usize, Vec<String>)>,
}

/// A fake cluster.
pub(crate) struct Fake {
    pub ports: Vec<u16>,
    state: Arc<Mutex<State>>,
    scope: Scope,
}

impl Fake {
    /// `owners` gives each primary's slots; nodes without are replicas of the first. The script replies
    /// first; the default reply is `+OK`.
    pub(crate) async fn start(
        owners: &[Option<(u16, u16)>],
        script: impl FnMut(usize, &[String]) -> Option<Action> + Send + 'static,
    ) -> Self {
        let listeners = owners.iter().map(|_| StdListener::bind("127.0.0.1:0").unwrap()).collect();
        Self::on(listeners, owners, script)
    }

    /// The same on existing listeners.
    pub(crate) fn on(
        listeners: Vec<StdListener>,
        owners: &[Option<(u16, u16)>],
        script: impl FnMut(usize, &[String]) -> Option<Action> + Send + 'static,
    ) -> Self {
        let ports: Vec<u16> =
            listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        let state =
            State { views: vec![String::new(); ports.len()], script: Box::new(script), log: Vec::new() };
        let fake = Self { ports, state: Arc::new(Mutex::new(state)), scope: Scope::new(Shutdown::new()) };
        fake.set_owners(owners);
        for (node, listener) in listeners.into_iter().enumerate() {
            fake.serve(node, listener);
        }
        fake
    }

    fn serve(&self, node: usize, listener: StdListener) {
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        let (state, scope) = (self.state.clone(), self.scope.clone());
        self.scope.spawn("fake node", async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                scope.spawn("fake connection", connection(node, stream, state.clone()));
            }
        });
    }

    /// Changes the topology that all nodes report.
    pub(crate) fn set_owners(&self, owners: &[Option<(u16, u16)>]) {
        let mut text = String::new();
        for (node, owner) in owners.iter().enumerate() {
            let role = match owner {
                Some((first, last)) => format!("master - 0 0 {} connected {first}-{last}", node + 1),
                None => "slave id0 0 0 1 connected".to_owned(),
            };
            text += &format!("id{node} 127.0.0.1:{}@1 {role}\n", self.ports[node]);
        }
        self.set_view(&text);
    }

    /// Sets the CLUSTER NODES reply of all nodes.
    pub(crate) fn set_view(&self, view: &str) {
        self.state.lock().unwrap().views = vec![view.to_owned(); self.ports.len()];
    }

    pub(crate) fn seed(&self, node: usize) -> String {
        format!("127.0.0.1:{}", self.ports[node])
    }

    /// The received commands, without topology queries.
    pub(crate) fn log(&self) -> Vec<(usize, String)> {
        let state = self.state.lock().unwrap();
        let received = state.log.iter().filter(|(_, args)| args[0] != "CLUSTER");
        received.map(|(node, args)| (*node, args.join(" "))).collect()
    }

    /// Number of topology queries, of all nodes together.
    pub(crate) fn topology_queries(&self) -> usize {
        self.state.lock().unwrap().log.iter().filter(|(_, args)| args[0] == "CLUSTER").count()
    }

    pub(crate) fn clear_log(&self) {
        self.state.lock().unwrap().log.clear();
    }
}

async fn connection(node: usize, mut stream: TcpStream, state: Arc<Mutex<State>>) {
    let (mut buffer, mut decoder) = (BytesMut::new(), Decoder::default());
    loop {
        let mut out = String::new();
        loop {
            let (args, consumed) = match decoder.decode(&buffer).unwrap() {
                Decoded::Request { args, consumed } => {
                    let text = |arg: &[u8]| String::from_utf8_lossy(arg).into_owned();
                    (args.iter().map(text).collect::<Vec<_>>(), consumed)
                }
                Decoded::Empty { consumed } => (Vec::new(), consumed),
                Decoded::Incomplete { .. } => break,
            };
            buffer.advance(consumed);
            let act = reply(node, &args, &mut state.lock().unwrap());
            match act {
                Action::Reply(text) => out += &text,
                Action::ReplyAndClose(text) => {
                    out += &text;
                    // The client may have disconnected.
                    let _ = stream.write_all(out.as_bytes()).await;
                    return;
                }
                Action::Close => return,
                Action::Hang => {
                    decoder = Decoder::default();
                    buffer.clear();
                    std::future::pending::<()>().await;
                }
            }
        }
        if stream.write_all(out.as_bytes()).await.is_err() {
            return;
        }
        match stream.read_buf(&mut buffer).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => panic!("{error}"),
        }
    }
}

fn reply(node: usize, args: &[String], state: &mut State) -> Action {
    match args[0].as_str() {
        "HELLO" => return Action::Reply("%1\r\n+proto\r\n:3\r\n".to_owned()),
        "CLIENT" | "PING" => return Action::Reply("+OK\r\n".to_owned()),
        _ => {}
    }
    state.log.push((node, args.to_vec()));
    if let Some(act) = (state.script)(node, args) {
        return act;
    }
    match args[0].as_str() {
        "CLUSTER" => {
            let view = &state.views[node];
            Action::Reply(format!("${}\r\n{view}\r\n", view.len()))
        }
        _ => Action::Reply("+OK\r\n".to_owned()),
    }
}

/// A key whose slot is in the range.
pub(crate) fn key_in(first: u16, last: u16) -> String {
    (0..)
        .map(|n| format!("key{n}"))
        .find(|key| (first..=last).contains(&Slot::of(key.as_bytes()).get()))
        .unwrap()
}
