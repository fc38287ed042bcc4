//! A TCP proxy for the Kafka protocol that drops requests or responses according to a rule.
//!
//! The rule sees every request frame before it is forwarded. Responses are matched to requests by order, as the
//! protocol guarantees. The server must advertise the proxy's address, or clients bypass it.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

/// Maximum frame size; a test sends no larger Kafka request.
const MAX_FRAME: usize = 64 << 20;

/// The header fields of a request that a rule needs.
#[derive(Clone, Debug)]
pub struct Request {
    /// API key.
    pub api_key: i16,
    /// API version.
    pub api_version: i16,
    /// `client.id` of the sender.
    pub client_id: String,
}

/// What the proxy does with a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// Forwards it.
    Pass,
    /// Closes the connection before the server gets the request.
    CutBefore,
    /// Forwards the request, and closes the connection before the client gets the response.
    CutAfter,
    /// Freezes the connection: from here on nothing is forwarded in either direction, and it stays open.
    Freeze,
}

type Rule = dyn Fn(&Request) -> Fate + Send + Sync;

/// The proxy. Dropping it closes every connection.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    server: Mutex<String>,
    rule: Mutex<Arc<Rule>>,
    closed: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Listens on a free port. [`forward_to`](Self::forward_to) sets the target.
    pub fn listen() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("a free port")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            server: Mutex::new(String::new()),
            rule: Mutex::new(Arc::new(|_: &Request| Fate::Pass)),
            closed: AtomicBool::new(false),
            open: Mutex::new(Vec::new()),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.closed.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(client) = client else { continue };
                let serving = Arc::clone(&accepting);
                std::thread::spawn(move || {
                    let _ = serve(&serving, client); // this proxy handles a broken connection
                });
            }
        });
        Ok(Self { address, shared })
    }

    /// `HOST:PORT` for clients.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Sets the target of new connections.
    pub fn forward_to(&self, server: &str) {
        *lock(&self.shared.server) = server.to_owned();
    }

    /// Closes every connection, including frozen ones.
    pub fn cut_all(&self) {
        for stream in lock(&self.shared.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Sets the rule for requests from now on.
    pub fn set_rule(&self, rule: impl Fn(&Request) -> Fate + Send + Sync + 'static) {
        *lock(&self.shared.rule) = Arc::new(rule);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1)); // wakes the accept thread
        self.cut_all();
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The action for each response, in order. A frozen connection stops in the middle of its queue.
#[derive(Default)]
struct Flow {
    fates: Mutex<VecDeque<Fate>>,
    frozen: AtomicBool,
}

fn serve(shared: &Arc<Shared>, client: TcpStream) -> Result<()> {
    let target = lock(&shared.server).clone();
    let server = TcpStream::connect(&target).context("the server is away")?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    lock(&shared.open).extend([client.try_clone()?, server.try_clone()?]);
    let flow = Arc::new(Flow::default());

    let (back_flow, mut from_server, mut to_client) =
        (Arc::clone(&flow), server.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || {
        let _ = back(&back_flow, &mut from_server, &mut to_client);
        if !back_flow.frozen.load(Ordering::SeqCst) {
            let _ = from_server.shutdown(Shutdown::Both);
            let _ = to_client.shutdown(Shutdown::Both);
        }
    });
    let outcome = forth(shared, &flow, &client, &server);
    if !flow.frozen.load(Ordering::SeqCst) {
        let _ = client.shutdown(Shutdown::Both);
        let _ = server.shutdown(Shutdown::Both);
    }
    outcome
}

fn forth(shared: &Shared, flow: &Flow, mut client: &TcpStream, mut server: &TcpStream) -> Result<()> {
    loop {
        let frame = read_frame(&mut client)?;
        let request = parse(&frame);
        let rule = Arc::clone(&lock(&shared.rule));
        match rule(&request) {
            Fate::CutBefore => return Ok(()),
            Fate::Freeze => {
                flow.frozen.store(true, Ordering::SeqCst);
                return Ok(());
            }
            fate => {
                // A produce with acks=0 has no response; no rule cuts after those.
                if has_response(&frame, &request) {
                    lock(&flow.fates).push_back(fate);
                }
                server.write_all(&frame)?;
            }
        }
    }
}

fn back(flow: &Flow, server: &mut TcpStream, client: &mut TcpStream) -> Result<()> {
    loop {
        let frame = read_frame(server)?;
        if flow.frozen.load(Ordering::SeqCst) {
            return Ok(());
        }
        let fate = lock(&flow.fates).pop_front().unwrap_or(Fate::Pass);
        if fate == Fate::CutAfter {
            return Ok(());
        }
        client.write_all(&frame)?;
    }
}

fn read_frame(stream: &mut impl Read) -> Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    stream.read_exact(&mut frame)?;
    let len = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
    anyhow::ensure!(len <= MAX_FRAME, "a frame of {len} bytes");
    frame.resize(4 + len, 0);
    stream.read_exact(&mut frame[4..])?;
    Ok(frame)
}

fn parse(frame: &[u8]) -> Request {
    let short = |at: usize| frame.get(at..at + 2).map_or(-1, |two| i16::from_be_bytes([two[0], two[1]]));
    let client_len = usize::try_from(short(12)).unwrap_or(0);
    let client_id =
        frame.get(14..14 + client_len).map(String::from_utf8_lossy).unwrap_or_default().into_owned();
    Request { api_key: short(4), api_version: short(6), client_id }
}

/// False for a produce with acks=0, the only request without a response: acks follow the transactional id in the
/// body.
fn has_response(frame: &[u8], request: &Request) -> bool {
    if request.api_key != 0 || request.api_version < 3 {
        return true;
    }
    let mut at = 14 + request.client_id.len();
    if request.api_version >= 9 {
        at += 1; // the header's tagged fields, always empty here
        match frame.get(at) {
            Some(0) => at += 1,
            Some(len) => at += usize::from(*len),
            None => return true,
        }
    } else {
        let len = frame.get(at..at + 2).map_or(-1, |two| i16::from_be_bytes([two[0], two[1]]));
        at += 2 + usize::try_from(len).unwrap_or(0);
    }
    frame.get(at..at + 2).is_none_or(|acks| acks != [0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(api_key: i16, client: &str, body: &[u8]) -> Vec<u8> {
        let mut frame = vec![0, 0, 0, 0];
        frame.extend(api_key.to_be_bytes());
        frame.extend(3i16.to_be_bytes());
        frame.extend(9i32.to_be_bytes());
        frame.extend(i16::try_from(client.len()).unwrap().to_be_bytes());
        frame.extend(client.as_bytes());
        frame.extend(body);
        let len = u32::try_from(frame.len() - 4).unwrap();
        frame[..4].copy_from_slice(&len.to_be_bytes());
        frame
    }

    /// A server that echoes every frame.
    fn echo() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    while let Ok(frame) = read_frame(&mut stream) {
                        stream.write_all(&frame).unwrap();
                    }
                });
            }
        });
        address
    }

    #[test]
    fn rule_is_applied_to_each_request() {
        let proxy = Proxy::listen().unwrap();
        proxy.forward_to(&echo());
        proxy.set_rule(|request| match (request.api_key, request.client_id.as_str()) {
            (1, "me") => Fate::CutBefore,
            (2, _) => Fate::CutAfter,
            (3, _) => Fate::Freeze,
            _ => Fate::Pass,
        });
        let connect = || TcpStream::connect(proxy.address()).unwrap();
        let mut one = connect();
        for frame in [request(0, "me", b"hello"), request(1, "you", b"")] {
            one.write_all(&frame).unwrap();
            assert_eq!(read_frame(&mut one).unwrap(), frame);
        }
        for key in [1, 2] {
            let mut broken = connect();
            broken.write_all(&request(key, "me", b"")).unwrap();
            assert!(read_frame(&mut broken).is_err(), "key {key}");
        }
        let mut frozen = connect();
        frozen.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        frozen.write_all(&request(3, "me", b"")).unwrap();
        let error = read_frame(&mut frozen).unwrap_err();
        assert_eq!(error.downcast::<std::io::Error>().unwrap().kind(), std::io::ErrorKind::WouldBlock);
        proxy.cut_all();
        let error = read_frame(&mut frozen).unwrap_err();
        assert_ne!(error.downcast::<std::io::Error>().unwrap().kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn produce_with_acks_0_has_no_response() {
        let old = |acks: i16| request(0, "me", &[&(-1i16).to_be_bytes()[..], &acks.to_be_bytes()].concat());
        assert!(!has_response(&old(0), &parse(&old(0))));
        assert!(has_response(&old(-1), &parse(&old(-1))));
    }
}
