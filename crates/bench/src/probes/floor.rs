//! The smallest server that can acknowledge a produce request: read a frame, checksum it, write it, answer with
//! canned bytes.
//!
//! Owns one event loop thread and, for the shared sync, one disk thread; both are named so that their CPU time can be
//! read. It is driven by the same client as the brokers, so its result is the combined limit of client, loopback and
//! disk. It must never learn the protocol: the response is given to it, and only the correlation id is patched.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinSet, LocalSet};

use super::{RECYCLED_BYTES, ROLL_BYTES, Scratch};

/// Prefix of its thread names.
pub const THREADS: &str = "floor-";
const ALIGN: usize = 4096;
const READ_BYTES: usize = 256 << 10;

/// When a frame is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// After the checksum and the write to a growing file.
    PageCache,
    /// After its own write and fdatasync of a preallocated file.
    SyncEach,
    /// After an fdatasync of a preallocated file that it shares with all frames that arrived during the previous sync
    /// (group commit).
    SyncShared,
}

/// The running server.
pub struct Floor {
    /// Listen address.
    pub addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    commit: Arc<Commit>,
    threads: Vec<JoinHandle<()>>,
}

impl Floor {
    /// Starts the server. `answer` is a complete response frame with its length prefix; its correlation id is
    /// replaced.
    pub fn start(dir: &Path, keep: Keep, answer: Vec<u8>) -> io::Result<Floor> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let mut log = Log::create(dir, keep)?;
        let commit = Arc::new(Commit::default());
        let mut threads = Vec::new();
        let backing = if keep == Keep::SyncShared {
            let (done, synced) = watch::channel(0);
            let disk = Arc::clone(&commit);
            threads.push(named("floor-disk", move || disk.run(&mut log, &done))?);
            Backing::Shared(Arc::clone(&commit), synced)
        } else {
            Backing::Inline(RefCell::new(log))
        };
        let (stop, stopped) = oneshot::channel();
        threads.push(named("floor-loop", move || serve_until_stopped(listener, stopped, backing, &answer))?);
        Ok(Floor { addr, stop: Some(stop), commit, threads })
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        // Dropping the sender stops the event loop.
        self.stop.take();
        self.commit.lock().ended = true;
        self.commit.arrived.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn named(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(body)
}

/// The file that frames are written to.
struct Log {
    file: Scratch,
    dir: PathBuf,
    keep: Keep,
    at: u64,
}

impl Log {
    fn create(dir: &Path, keep: Keep) -> io::Result<Log> {
        let file = match keep {
            Keep::PageCache => Scratch::create(dir, "floor")?,
            Keep::SyncEach | Keep::SyncShared => Scratch::prewritten(dir, "floor", RECYCLED_BYTES)?,
        };
        Ok(Log { file, dir: dir.to_owned(), keep, at: 0 })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let growing = self.keep == Keep::PageCache;
        if self.at + bytes.len() as u64 > if growing { ROLL_BYTES } else { RECYCLED_BYTES } {
            self.at = 0;
            if growing {
                self.file = Scratch::create(&self.dir, "floor")?;
            }
        }
        self.file.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        if !growing {
            self.at = self.at.next_multiple_of(ALIGN as u64);
            self.file.file.sync_data()?;
        }
        Ok(())
    }
}

/// Queue from the event loop to the disk thread.
#[derive(Default)]
struct Commit {
    pending: Mutex<Pending>,
    arrived: Condvar,
}

#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    /// Number of the sync that will cover `bytes`.
    round: u64,
    ended: bool,
}

impl Commit {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a frame and returns the number of the sync that will cover it.
    fn add(&self, frame: &[u8]) -> u64 {
        let mut pending = self.lock();
        pending.bytes.extend_from_slice(frame);
        self.arrived.notify_one();
        pending.round + 1
    }

    /// The disk thread: everything that arrives during one sync goes into the next (group commit).
    fn run(&self, log: &mut Log, done: &watch::Sender<u64>) {
        let mut taken = Vec::new();
        loop {
            let mut pending = self.lock();
            while pending.bytes.is_empty() && !pending.ended {
                pending = self.arrived.wait(pending).unwrap_or_else(PoisonError::into_inner);
            }
            if pending.ended {
                return;
            }
            std::mem::swap(&mut taken, &mut pending.bytes);
            pending.round += 1;
            let round = pending.round;
            drop(pending);
            if log.append(&taken).is_err() || done.send(round).is_err() {
                return;
            }
            taken.clear();
        }
    }
}

/// How the event loop persists a frame.
enum Backing {
    Inline(RefCell<Log>),
    Shared(Arc<Commit>, watch::Receiver<u64>),
}

fn serve_until_stopped(
    listener: std::net::TcpListener,
    stopped: oneshot::Receiver<()>,
    backing: Backing,
    answer: &[u8],
) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    let answer: Rc<[u8]> = answer.into();
    let backing = Rc::new(backing);
    LocalSet::new().block_on(&runtime, async move {
        let Ok(listener) = TcpListener::from_std(listener) else { return };
        let mut connections = JoinSet::new();
        let accept = async {
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn_local(serve(stream, Rc::clone(&backing), Rc::clone(&answer)));
            }
        };
        tokio::select! {
            () = accept => {}
            _ = stopped => {}
        }
    });
}

/// Serves one connection: persists every complete frame that has arrived, then answers them together.
async fn serve(mut stream: TcpStream, backing: Rc<Backing>, answer: Rc<[u8]>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut synced = match &*backing {
        Backing::Inline(_) => None,
        Backing::Shared(_, synced) => Some(synced.clone()),
    };
    let mut input = BytesMut::with_capacity(READ_BYTES);
    let mut output = Vec::new();
    loop {
        input.reserve(READ_BYTES);
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
        let mut round = 0;
        while let Some(length) = whole_frame(&input) {
            let frame = &input[..length];
            std::hint::black_box(crc32c::crc32c(frame));
            match &*backing {
                Backing::Inline(log) => log.borrow_mut().append(frame)?,
                Backing::Shared(commit, _) => round = commit.add(frame),
            }
            output.extend_from_slice(&answer[..4]);
            output.extend_from_slice(&frame[8..12]);
            output.extend_from_slice(&answer[8..]);
            input.advance(length);
        }
        if let Some(synced) = &mut synced
            && synced.wait_for(|done| *done >= round).await.is_err()
        {
            return Ok(());
        }
        stream.write_all(&output).await?;
        output.clear();
    }
}

/// Length of the frame at the front, if it is complete. Not validated: only the load client connects.
fn whole_frame(input: &[u8]) -> Option<usize> {
    let size = u32::from_be_bytes(input.get(..4)?.try_into().ok()?) as usize + 4;
    (size >= 12 && input.len() >= size).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};

    #[test]
    fn every_mode_answers_each_frame_with_its_correlation_id() {
        let dir = std::env::temp_dir().join(format!("moim-bench-floor-{}", std::process::id()));
        for keep in [Keep::PageCache, Keep::SyncEach, Keep::SyncShared] {
            let floor = Floor::start(&dir, keep, vec![0, 0, 0, 6, 9, 9, 9, 9, 1, 2]).unwrap();
            let mut stream = std::net::TcpStream::connect(floor.addr).unwrap();
            for id in 0..20_u8 {
                let mut frame = vec![0, 0, 0, 12, 0, 0, 0, 9, 0, 0, 0, id, 7, 7, 7, 7];
                frame.extend_from_slice(&[0, 0, 0, 12, 0, 0, 0, 9, 0, 0, 1, id, 7, 7, 7, 7]);
                stream.write_all(&frame).unwrap();
                let mut got = [0; 20];
                stream.read_exact(&mut got).unwrap();
                assert_eq!(got, [0, 0, 0, 6, 0, 0, 0, id, 1, 2, 0, 0, 0, 6, 0, 0, 1, id, 1, 2], "{keep:?}");
            }
        }
        std::fs::remove_dir(&dir).unwrap();
    }
}
