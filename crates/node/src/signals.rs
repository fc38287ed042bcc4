//! SIGINT and SIGTERM: the first asks to stop in order, a later one insists.
//!
//! Wrappers such as `timeout` signal a process and then its group, so one wish can arrive twice within
//! microseconds. A signal this close to the first is the same wish.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::exit::Outcome;

const SAME_WISH: Duration = Duration::from_millis(500);

/// The two signals that mean "stop".
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    first: Option<Instant>,
}

impl Signals {
    /// From now on the process decides itself what these signals do.
    pub(crate) fn listen() -> Outcome<Self> {
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { interrupt, terminate, first: None })
    }

    /// The name of the next signal that says something new. Cancel-safe.
    pub(crate) async fn next(&mut self) -> &'static str {
        loop {
            let name = tokio::select! {
                _ = self.interrupt.recv() => "SIGINT",
                _ = self.terminate.recv() => "SIGTERM",
            };
            match self.first {
                Some(first) if first.elapsed() < SAME_WISH => {}
                _ => {
                    self.first.get_or_insert_with(Instant::now);
                    return name;
                }
            }
        }
    }
}
