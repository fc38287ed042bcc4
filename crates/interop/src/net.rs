//! A network between nodes that can be partitioned: one TCP proxy in front of each node's peer listener.
//!
//! A node must advertise its proxy. The connecting node is identified by process: the kernel reports the socket at
//! the other end and the process that owns it. So any pair of nodes can be cut, in one direction or both, without
//! privileges. A cut link loses nothing by itself: bytes are held back, as in a network that drops packets, and
//! delivered when it heals, unless the healing also resets the connection.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// How long the process of a new connection may stay unidentified: it may have just started.
const IDENTIFY_TIMEOUT: Duration = Duration::from_secs(2);

/// The network. Dropping it closes every connection.
pub struct Net {
    addresses: Vec<SocketAddr>,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    closed: AtomicBool,
}

struct State {
    /// Listener address of each node.
    targets: Vec<String>,
    /// Process id of each node.
    pids: Vec<Option<u32>>,
    /// Processes that are not nodes of this network: their connections are never cut.
    excluded: Vec<u32>,
    /// `cut[from][to]`: bytes in that direction are held back.
    cut: Vec<Vec<bool>>,
    /// Open connections between two nodes.
    open: HashMap<u64, Connection>,
    next: u64,
}

struct Connection {
    from: Option<usize>,
    to: usize,
    ends: [TcpStream; 2],
}

impl Net {
    /// Proxies for this many nodes, on free ports.
    pub fn between(nodes: usize) -> Result<Self> {
        let state = State {
            targets: vec![String::new(); nodes],
            pids: vec![None; nodes],
            excluded: Vec::new(),
            cut: vec![vec![false; nodes]; nodes],
            open: HashMap::new(),
            next: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        });
        let mut addresses = Vec::new();
        for node in 0..nodes {
            let listener = TcpListener::bind("127.0.0.1:0").context("a free port")?;
            addresses.push(listener.local_addr()?);
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || accept(&shared, &listener, node));
        }
        Ok(Self { addresses, shared })
    }

    /// `HOST:PORT` at which other nodes reach a node.
    pub fn address(&self, node: usize) -> String {
        self.addresses[node].to_string()
    }

    /// Sets the address at which a node listens.
    pub fn forward(&self, node: usize, target: &str) {
        self.shared.lock().targets[node] = target.to_owned();
    }

    /// A callback that registers the process id of a node.
    pub fn identify(&self, node: usize) -> impl FnOnce(u32) + Send + use<> {
        let shared = Arc::clone(&self.shared);
        move |pid| shared.lock().pids[node] = Some(pid)
    }

    /// Registers a connecting process that is not a node, so that it is not searched for.
    pub fn exclude_process(&self, pid: u32) {
        self.shared.lock().excluded.push(pid);
    }

    /// Cuts one direction between two nodes.
    pub fn cut(&self, from: usize, to: usize) {
        self.shared.lock().cut[from][to] = true;
    }

    /// Isolates a node from all others, in both directions.
    pub fn isolate(&self, node: usize) {
        let mut state = self.shared.lock();
        for other in 0..state.pids.len() {
            if other != node {
                state.cut[node][other] = true;
                state.cut[other][node] = true;
            }
        }
    }

    /// Heals all links. With `reset`, connections that were cut break; otherwise the held-back bytes arrive.
    pub fn heal(&self, reset: bool) {
        let mut state = self.shared.lock();
        if reset {
            for connection in state.open.values() {
                let Some(from) = connection.from else { continue };
                if state.cut[from][connection.to] || state.cut[connection.to][from] {
                    connection.close();
                }
            }
        }
        state.cut.iter_mut().flatten().for_each(|cut| *cut = false);
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        for address in &self.addresses {
            let _ = TcpStream::connect_timeout(address, Duration::from_secs(1)); // wakes the accept thread
        }
        for (_, connection) in self.shared.lock().open.drain() {
            connection.close();
        }
        self.shared.changed.notify_all();
    }
}

impl Connection {
    fn close(&self) {
        for end in &self.ends {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the direction is cut.
    fn pass(&self, from: Option<usize>, to: Option<usize>) {
        let (Some(from), Some(to)) = (from, to) else { return };
        let mut state = self.lock();
        while state.cut[from][to] && !self.closed.load(Ordering::SeqCst) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener, node: usize) {
    for client in listener.incoming() {
        if shared.closed.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        let shared = Arc::clone(shared);
        std::thread::spawn(move || {
            let _ = serve(&shared, client, node); // the nodes handle a broken connection
        });
    }
}

fn serve(shared: &Arc<Shared>, client: TcpStream, to: usize) -> Result<()> {
    let from = identify_peer(shared, &client);
    shared.pass(from, Some(to));
    shared.pass(Some(to), from);
    let target = shared.lock().targets[to].clone();
    let server = TcpStream::connect(&target).context("the node is away")?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let id = {
        let mut state = shared.lock();
        let id = state.next;
        state.next += 1;
        state.open.insert(id, Connection { from, to, ends: [client.try_clone()?, server.try_clone()?] });
        id
    };
    let (back, mut from_server, mut to_client) =
        (Arc::clone(shared), server.try_clone()?, client.try_clone()?);
    let answers = std::thread::spawn(move || pump(&back, &mut from_server, &mut to_client, Some(to), from));
    let (mut from_client, mut to_server) = (client, server);
    pump(shared, &mut from_client, &mut to_server, from, Some(to));
    let _ = answers.join();
    shared.lock().open.remove(&id);
    Ok(())
}

/// Copies bytes in one direction until its end, and propagates the end to the other side.
fn pump(
    shared: &Shared,
    source: &mut TcpStream,
    sink: &mut TcpStream,
    from: Option<usize>,
    to: Option<usize>,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = source.read(&mut buffer) {
        shared.pass(from, to);
        if sink.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    shared.pass(from, to);
    let _ = source.shutdown(Shutdown::Both);
    let _ = sink.shutdown(Shutdown::Both);
}

/// True if a process listens on a port of this machine.
pub fn listens(pid: u32, port: u16) -> bool {
    let Ok(table) = std::fs::read_to_string("/proc/net/tcp") else { return false };
    let suffix = format!(":{port:04X}");
    // A listening socket is in state 0A.
    let sockets = table.lines().skip(1).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1)?.ends_with(&suffix) && *words.get(3)? == "0A";
        is_it.then(|| format!("socket:[{}]", words.get(9).unwrap_or(&"")))
    });
    sockets.into_iter().any(|socket| has_file(pid, &socket))
}

/// The node whose process owns the other end of this connection.
fn identify_peer(shared: &Shared, client: &TcpStream) -> Option<usize> {
    let (theirs, ours) = (client.peer_addr().ok()?, client.local_addr().ok()?);
    let (deadline, own) = (Instant::now() + IDENTIFY_TIMEOUT, std::process::id());
    while Instant::now() < deadline {
        let (pids, excluded) = {
            let state = shared.lock();
            (state.pids.clone(), state.excluded.clone())
        };
        if let Some(inode) = socket_inode(theirs, ours) {
            let socket = format!("socket:[{inode}]");
            if excluded.iter().any(|pid| has_file(*pid, &socket)) {
                return None;
            }
            let found = pids.iter().position(|pid| pid.is_some_and(|pid| has_file(pid, &socket)));
            // A client in this process is not a node; other processes may be nodes that just started.
            if found.is_some() || (!pids.contains(&Some(own)) && has_file(own, &socket)) {
                return found;
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}

/// The inode of the socket that is bound to `local` and connected to `remote`.
fn socket_inode(local: SocketAddr, remote: SocketAddr) -> Option<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    table.lines().skip(1).find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let port = |word: &str| u16::from_str_radix(word.rsplit(':').next()?, 16).ok();
        let matches = port(words.get(1)?)? == local.port() && port(words.get(2)?)? == remote.port();
        (matches && *words.get(9)? != "0").then(|| words[9].to_owned())
    })
}

fn has_file(pid: u32, name: &str) -> bool {
    let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    files
        .filter_map(Result::ok)
        .any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target.to_str() == Some(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes that are both this process: node 0 connects to node 1, which echoes.
    fn echo(net: &Net) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        net.forward(1, &listener.local_addr().unwrap().to_string());
        net.identify(0)(std::process::id());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
                });
            }
        });
        let stream = TcpStream::connect(net.address(1)).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        stream
    }

    fn silent(stream: &mut TcpStream) -> bool {
        stream.read_exact(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    #[test]
    fn held_back_bytes_arrive_after_heal() {
        for (from, to) in [(0, 1), (1, 0)] {
            let net = Net::between(2).unwrap();
            let mut stream = echo(&net);
            let mut byte = [0];
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream.write_all(b"a").unwrap();
            stream.read_exact(&mut byte).unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            net.cut(from, to);
            stream.write_all(b"b").unwrap();
            assert!(silent(&mut stream), "{from} to {to}");
            net.heal(false);
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream.read_exact(&mut byte).unwrap();
            assert_eq!(&byte, b"b");
        }
    }

    #[test]
    fn heal_with_reset_breaks_cut_connections() {
        let net = Net::between(2).unwrap();
        let mut stream = echo(&net);
        stream.write_all(b"a").unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.read_exact(&mut [0]).unwrap();
        net.isolate(0);
        stream.write_all(b"b").unwrap();
        net.heal(true);
        assert!(stream.read_exact(&mut [0]).is_err());
    }
}
