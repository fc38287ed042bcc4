//! MONITOR: clients that receive every command processed by this node.
//!
//! Commands are sent as executed, with passwords redacted and without their results, so no commit is awaited. While
//! no client monitors, the cost is one atomic load per command.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use moim_wire_resp::Args;

use crate::session::Mailbox;
use crate::shared::lock;

/// The clients in MONITOR mode.
#[derive(Default)]
pub struct Monitors {
    count: AtomicUsize,
    clients: Mutex<BTreeMap<u64, Arc<Mailbox>>>,
}

impl Monitors {
    /// True if any client monitors.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Adds a client to MONITOR mode.
    pub fn add(&self, client: u64, mailbox: &Arc<Mailbox>) {
        let mut clients = lock(&self.clients);
        clients.insert(client, Arc::clone(mailbox));
        self.count.store(clients.len(), Ordering::Relaxed);
    }

    /// Removes a client from MONITOR mode.
    pub fn remove(&self, client: u64) {
        let mut clients = lock(&self.clients);
        clients.remove(&client);
        self.count.store(clients.len(), Ordering::Relaxed);
    }

    /// Sends a command to all monitors; `who` is the address of its client.
    pub fn show(&self, at_us: i64, who: &str, args: &Args<'_>) {
        let mut line = format!("+{}.{:06} [0 {who}]", at_us / 1_000_000, at_us % 1_000_000);
        let hidden = secrets(args);
        for (at, arg) in args.iter().enumerate() {
            line.push(' ');
            if hidden.contains(&at) {
                line.push_str("\"(redacted)\"");
            } else {
                quote(&mut line, arg);
            }
        }
        line.push_str("\r\n");
        let line = Bytes::from(line);
        lock(&self.clients).values().for_each(|mailbox| mailbox.push(line.clone()));
    }
}

/// The arguments to redact (passwords).
fn secrets(args: &Args<'_>) -> std::ops::Range<usize> {
    let is =
        |at: usize, word: &str| args.get(at).is_some_and(|arg| arg.eq_ignore_ascii_case(word.as_bytes()));
    if is(0, "auth") {
        return 1..args.len();
    }
    if !is(0, "hello") && !is(0, "migrate") {
        return 0..0;
    }
    // The AUTH option with its password ends at the next option, and both usually come last: everything after them is
    // redacted, too.
    let option = (1..args.len()).find(|at| is(*at, "auth") || is(*at, "auth2"));
    option.map_or(0..0, |at| at + 1..args.len().min(at + 3))
}

fn quote(line: &mut String, arg: &[u8]) {
    line.push('"');
    for &byte in arg {
        match byte {
            b'\\' | b'"' => line.extend(['\\', char::from(byte)]),
            b'\n' => line.push_str("\\n"),
            b'\r' => line.push_str("\\r"),
            b'\t' => line.push_str("\\t"),
            7 => line.push_str("\\a"),
            8 => line.push_str("\\b"),
            b' '..=b'~' => line.push(char::from(byte)),
            // `write!` to a String cannot fail.
            _ => drop(write!(line, "\\x{byte:02x}")),
        }
    }
    line.push('"');
}

#[cfg(test)]
mod tests {
    use moim_wire_resp::OwnedArgs;

    use super::*;
    use crate::session::Session;

    #[test]
    fn monitor_redacts_passwords() {
        let (monitors, session) = (Monitors::default(), Session::internal());
        monitors.add(1, &session.mailbox);
        let shown = |words: &[&str]| {
            monitors.show(12_000_034, "1.2.3.4:5", &OwnedArgs::from_slices(words).args());
            let pushes = session.mailbox.take().pushes;
            String::from_utf8_lossy(&pushes[0].bytes).into_owned()
        };
        assert_eq!(
            shown(&["set", "a\"\n", "\u{7}"]),
            "+12.000034 [0 1.2.3.4:5] \"set\" \"a\\\"\\n\" \"\\a\"\r\n"
        );
        assert!(shown(&["AUTH", "me", "secret"]).ends_with("\"AUTH\" \"(redacted)\" \"(redacted)\"\r\n"));
        let hello = shown(&["hello", "3", "auth", "me", "secret", "setname", "x"]);
        assert!(
            hello.ends_with("\"3\" \"auth\" \"(redacted)\" \"(redacted)\" \"setname\" \"x\"\r\n"),
            "{hello}"
        );
        let migrate = shown(&["migrate", "h", "1", "k", "0", "9", "AUTH", "secret"]);
        assert!(migrate.ends_with("\"AUTH\" \"(redacted)\"\r\n"), "{migrate}");
        monitors.remove(1);
        assert!(!monitors.any());
    }
}
