//! The smallest server that could keep consumers waiting: read a question, answer with canned bytes when the wait is over.
//!
//! Owns one thread with one epoll; answers leave together, on a grid as coarse as a broker's. It looks at nothing and keeps
//! nothing, so what it costs is what the kernel takes for one read and one write on each of so many connections.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// The names of its threads begin with this.
pub const THREADS: &str = "wait-floor";
/// Answers leave at multiples of this.
const GRID: Duration = Duration::from_millis(64);
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// The running server.
pub struct Waiting {
    /// Where it listens.
    pub addr: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Waiting {
    /// Starts it. `answer` is a whole response without its size; its correlation id is replaced.
    pub fn start(wait: Duration, answer: &[u8]) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let addr = listener.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::empty())?);
        let mut framed = u32::try_from(answer.len()).map_err(io::Error::other)?.to_be_bytes().to_vec();
        framed.extend_from_slice(answer);
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(THREADS.into())
            .spawn(move || serve(&listener, &told, wait, framed))?;
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
    // By the grid's number of the moment at which they are answered: connection and correlation id.
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
                        // Gone; nobody else takes its number.
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
                // A client that has left shows in its reading.
                let _ = stream.write(&answer);
            }
        }
    }
}
