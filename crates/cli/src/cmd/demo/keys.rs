//! Single keys from a terminal. The terminal is put back as it was when this ends, however the demo ends.

use std::io::{IsTerminal as _, Read as _};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

/// Keys as they are pressed.
pub(super) struct Keys {
    pressed: mpsc::Receiver<char>,
    before: Option<Termios>,
}

impl Keys {
    /// Begins to read keys. Off a terminal there are none.
    pub(super) fn listen() -> Self {
        let (sender, pressed) = mpsc::channel(16);
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Self { pressed, before: None };
        }
        let before = tcgetattr(&stdin).ok();
        if let Some(mut raw) = before.clone() {
            raw.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            // Without it keys need an Enter; nothing else is lost.
            let _ = tcsetattr(&stdin, OptionalActions::Now, &raw);
        }
        // The thread ends with the process: nothing else can end a read from a terminal.
        std::thread::spawn(move || {
            for byte in std::io::stdin().lock().bytes() {
                let Ok(byte) = byte else { break };
                if sender.blocking_send(char::from(byte).to_ascii_lowercase()).is_err() {
                    break;
                }
            }
        });
        Self { pressed, before }
    }

    /// The next key; never, off a terminal. Cancel-safe.
    pub(super) async fn next(&mut self) -> char {
        match self.pressed.recv().await {
            Some(key) => key,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}
