//! Servers that say what a test wants them to say, and remember what they were told.

use std::io::ErrorKind;
use std::net::TcpListener as StdListener;
use std::sync::{Arc, Mutex};

use bytes::{Buf, BytesMut};
use moim_base::task::{Scope, Shutdown};
use moim_slot_client::Slot;
use moim_wire_resp::{Decoded, Decoder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a node does with a command.
pub(crate) enum Act {
    /// Sends these bytes.
    Say(String),
    /// Sends these bytes and closes the connection.
    SayLast(String),
    /// Closes the connection without an answer.
    Close,
    /// Never answers on this connection again.
    Hang,
}

/// Says an error.
pub(crate) fn error(text: impl std::fmt::Display) -> Option<Act> {
    Some(Act::Say(format!("-{text}\r\n")))
}

/// Says an integer.
pub(crate) fn integer(value: i64) -> Option<Act> {
    Some(Act::Say(format!(":{value}\r\n")))
}

type Script = Box<dyn FnMut(usize, &[String]) -> Option<Act> + Send>;

struct State {
    views: Vec<String>,
    script: Script,
    /// Every command after the greeting, with the node that got it.
    log: Vec<(usize, Vec<String>)>,
}

/// A cluster that exists in the imagination of a test.
pub(crate) struct Fake {
    pub ports: Vec<u16>,
    state: Arc<Mutex<State>>,
    scope: Scope,
}

impl Fake {
    /// `owners` gives each primary's slots; nodes without are replicas of the first. The script answers first; what it leaves is
    /// answered with `+OK`.
    pub(crate) async fn start(
        owners: &[Option<(u16, u16)>],
        script: impl FnMut(usize, &[String]) -> Option<Act> + Send + 'static,
    ) -> Self {
        let listeners = owners.iter().map(|_| StdListener::bind("127.0.0.1:0").unwrap()).collect();
        Self::on(listeners, owners, script)
    }

    /// The same on listeners that exist.
    pub(crate) fn on(
        listeners: Vec<StdListener>,
        owners: &[Option<(u16, u16)>],
        script: impl FnMut(usize, &[String]) -> Option<Act> + Send + 'static,
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

    /// Every node tells this from now on.
    pub(crate) fn set_owners(&self, owners: &[Option<(u16, u16)>]) {
        let mut text = String::new();
        for (node, owner) in owners.iter().enumerate() {
            let role = match owner {
                Some((first, last)) => format!("master - 0 0 {} connected {first}-{last}", node + 1),
                None => "slave id0 0 0 1 connected".to_owned(),
            };
            text += &format!("id{node} 127.0.0.1:{}@1 {role}\n", self.ports[node]);
        }
        self.tell(&text);
    }

    /// Every node answers CLUSTER NODES with this from now on.
    pub(crate) fn tell(&self, view: &str) {
        self.state.lock().unwrap().views = vec![view.to_owned(); self.ports.len()];
    }

    pub(crate) fn seed(&self, node: usize) -> String {
        format!("127.0.0.1:{}", self.ports[node])
    }

    /// What nodes were told, without the questions about the topology.
    pub(crate) fn log(&self) -> Vec<(usize, String)> {
        let state = self.state.lock().unwrap();
        let told = state.log.iter().filter(|(_, args)| args[0] != "CLUSTER");
        told.map(|(node, args)| (*node, args.join(" "))).collect()
    }

    /// How often the topology was asked for, at all nodes together.
    pub(crate) fn questions(&self) -> usize {
        self.state.lock().unwrap().log.iter().filter(|(_, args)| args[0] == "CLUSTER").count()
    }

    pub(crate) fn forget(&self) {
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
            let act = answer(node, &args, &mut state.lock().unwrap());
            match act {
                Act::Say(text) => out += &text,
                Act::SayLast(text) => {
                    out += &text;
                    // The client may be gone; then nobody misses it.
                    let _ = stream.write_all(out.as_bytes()).await;
                    return;
                }
                Act::Close => return,
                Act::Hang => {
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

fn answer(node: usize, args: &[String], state: &mut State) -> Act {
    match args[0].as_str() {
        "HELLO" => return Act::Say("%1\r\n+proto\r\n:3\r\n".to_owned()),
        "CLIENT" | "PING" => return Act::Say("+OK\r\n".to_owned()),
        _ => {}
    }
    state.log.push((node, args.to_vec()));
    if let Some(act) = (state.script)(node, args) {
        return act;
    }
    match args[0].as_str() {
        "CLUSTER" => {
            let view = &state.views[node];
            Act::Say(format!("${}\r\n{view}\r\n", view.len()))
        }
        _ => Act::Say("+OK\r\n".to_owned()),
    }
}

/// A key of `slot`, made from `tag`.
pub(crate) fn key_in(first: u16, last: u16) -> String {
    (0..)
        .map(|n| format!("key{n}"))
        .find(|key| (first..=last).contains(&Slot::of(key.as_bytes()).get()))
        .unwrap()
}
