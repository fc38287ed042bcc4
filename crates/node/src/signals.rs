//! SIGINT and SIGTERM: the first signal requests a graceful shutdown, a later one an immediate exit.
//!
//! Wrappers such as `timeout` signal a process and then its process group, so one request can arrive twice within
//! microseconds. A signal within [`DUPLICATE_WINDOW`] of the first one is a duplicate.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::exit::Outcome;

const DUPLICATE_WINDOW: Duration = Duration::from_millis(500);

/// The two signals that mean "stop".
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    first: Option<Instant>,
}

impl Signals {
    /// From now on the process decides itself what these signals do.
    pub fn listen() -> Outcome<Self> {
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { interrupt, terminate, first: None })
    }

    /// The name of the next signal that says something new. Cancel-safe.
    pub async fn next(&mut self) -> &'static str {
        loop {
            let name = tokio::select! {
                _ = self.interrupt.recv() => "SIGINT",
                _ = self.terminate.recv() => "SIGTERM",
            };
            match self.first {
                Some(first) if first.elapsed() < DUPLICATE_WINDOW => {}
                _ => {
                    self.first.get_or_insert_with(Instant::now);
                    return name;
                }
            }
        }
    }
}
