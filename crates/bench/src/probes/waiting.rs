//! The smallest server for long polls: read a request, answer with canned bytes when the wait is over.
//!
//! Owns one thread with one epoll; responses are sent together, on a timer grid as coarse as a broker's. It validates
//! and stores nothing, so its cost is that of one read and one write system call per connection.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// Prefix of its thread names.
pub const THREADS: &str = "wait-floor";
/// Timer resolution: responses are sent at multiples of this.
const GRID: Duration = Duration::from_millis(64);
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// The running server.
pub struct Waiting {
    /// Listen address.
    pub addr: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Waiting {
    /// Starts the server. `answer` is a complete response without its length prefix; its correlation id is replaced.
    pub fn start(wait: Duration, answer: &[u8]) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let addr = listener.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::empty())?);
        let mut framed = u32::try_from(answer.len()).map_err(io::Error::other)?.to_be_bytes().to_vec();
        framed.extend_from_slice(answer);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(THREADS.into())
            .spawn(move || serve(&listener, &stopped, wait, framed))?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, stop: &OwnedFd, wait: Duration, mut answer: Vec<u8>) -> io::Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let readable = epoll::EventFlags::IN;
    epoll::add(&epoll, listener, epoll::EventData::new_u64(LISTENER), readable)?;
    epoll::add(&epoll, stop, epoll::EventData::new_u64(STOP), readable)?;
    let mut connections: HashMap<u64, TcpStream> = HashMap::new();
    // Due responses by timer tick: connection and correlation id.
    let mut due: BTreeMap<u128, Vec<(u64, [u8; 4])>> = BTreeMap::new();
    let (began, mut input) = (Instant::now(), [0; 4096]);
    let mut events = Vec::with_capacity(1024);
    loop {
        let pause = due.first_key_value().map(|(at, _)| {
            let at = began + GRID * u32::try_from(*at).unwrap_or(u32::MAX);
            at.saturating_duration_since(Instant::now())
        });
        let pause = pause.and_then(|pause| Timespec::try_from(pause).ok());
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), pause.as_ref())?;
        for event in &events {
            match event.data.u64() {
                STOP => return Ok(()),
                LISTENER => {
                    let (stream, _) = listener.accept()?;
                    stream.set_nodelay(true)?;
                    let number = connections.len() as u64;
                    epoll::add(&epoll, &stream, epoll::EventData::new_u64(number), readable)?;
                    connections.insert(number, stream);
                }
                number => {
                    let Some(stream) = connections.get_mut(&number) else { continue };
                    if stream.read(&mut input)? < 12 {
                        // The connection is closed; its number is not reused.
                        epoll::delete(&epoll, &*stream)?;
                        continue;
                    }
                    let at = (began.elapsed() + wait).as_millis().div_ceil(GRID.as_millis());
                    due.entry(at).or_default().push((number, [input[8], input[9], input[10], input[11]]));
                }
            }
        }
        let now = began.elapsed().as_millis() / GRID.as_millis();
        while let Some(entry) = due.first_entry().filter(|entry| *entry.key() <= now) {
            for (number, correlation) in entry.remove() {
                let Some(stream) = connections.get_mut(&number) else { continue };
                answer[4..8].copy_from_slice(&correlation);
                // A closed connection is detected by the read.
                let _ = stream.write(&answer);
            }
        }
    }
}
