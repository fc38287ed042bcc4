//! A server that sends one file repeatedly with `sendfile` to every connection: the upper limit of a fetch.
//!
//! Owns one thread, named so that its CPU time can be read. It never reads what it receives; a connection ends when
//! the peer closes it, the thread when the probe is dropped.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::{Scratch, random_bytes};

/// Name of the thread, for reading its CPU time.
pub const THREAD: &str = "blast-sendfile";

/// The running probe.
pub struct Blast {
    /// Listen address.
    pub addr: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Blast {
    /// Starts the probe over a hot file of `file_bytes`, sent in chunks of `piece` bytes.
    pub fn start(dir: &Path, file_bytes: u64, piece: usize) -> io::Result<Blast> {
        let scratch = Scratch::prewritten(dir, "blast", file_bytes)?;
        // Identical pages are fine for a loopback; the random head only prevents a file of a single pattern.
        scratch.file.write_all_at(&random_bytes(1 << 16), 0)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let addr = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(THREAD.into()).spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                send_until_closed(&stream, &scratch, file_bytes, piece);
            }
        })?;
        Ok(Blast { addr, stop, thread: Some(thread) })
    }
}

fn send_until_closed(stream: &TcpStream, scratch: &Scratch, file_bytes: u64, piece: usize) {
    let mut at = 0;
    loop {
        if at >= file_bytes {
            at = 0;
        }
        let want = piece.min(usize::try_from(file_bytes - at).unwrap_or(piece));
        match rustix::fs::sendfile(stream, &scratch.file, Some(&mut at), want) {
            Ok(sent) if sent > 0 => {}
            // The only error of a sendfile from an existing file is a closed connection.
            _ => return,
        }
    }
}

impl Drop for Blast {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the accept; if this fails, the listener and its thread are gone.
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn sends_the_file_repeatedly_and_stops_with_the_probe() {
        let dir = std::env::temp_dir().join(format!("moim-bench-blast-{}", std::process::id()));
        let blast = Blast::start(&dir, 1 << 20, 300_000).unwrap();
        let mut got = vec![0; 3 << 20];
        TcpStream::connect(blast.addr).unwrap().read_exact(&mut got).unwrap();
        assert_eq!(got[..1 << 20], got[1 << 20..2 << 20]);
        assert_eq!(got[..1 << 16], random_bytes(1 << 16));
        drop(blast);
        std::fs::remove_dir(&dir).unwrap();
    }
}
