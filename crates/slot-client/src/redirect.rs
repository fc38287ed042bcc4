//! Routing decision for a reply: done, redirect, or retry later.

use bytes::Bytes;
use moim_wire_resp::{Slot, Value};

use crate::address::Address;

/// Routing decision for a reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It is the final reply, also if it is an error.
    Done,
    /// MOVED: the slot belongs to another node.
    Moved(Slot, Address),
    /// ASK: the slot is migrating; ask the other node once.
    Ask(Slot, Address),
    /// The node cannot serve now. `refresh` when the topology may be stale.
    Later { refresh: bool },
}

/// Classifies a reply of a node that was reached at `host`.
pub(crate) fn classify(value: &Value, host: &str) -> Decision {
    let Value::Error(text) = value else { return Decision::Done };
    match code(text) {
        b"MOVED" => target(text, host).map_or(Decision::Done, |(slot, to)| Decision::Moved(slot, to)),
        b"ASK" => target(text, host).map_or(Decision::Done, |(slot, to)| Decision::Ask(slot, to)),
        b"TRYAGAIN" | b"LOADING" => Decision::Later { refresh: false },
        b"CLUSTERDOWN" | b"READONLY" | b"MASTERDOWN" => Decision::Later { refresh: true },
        _ => Decision::Done,
    }
}

fn code(text: &Bytes) -> &[u8] {
    text.split(|byte| *byte == b' ').next().unwrap_or_default()
}

/// `MOVED 3999 127.0.0.1:6381`; an empty host is the host of the replying node.
fn target(text: &[u8], host: &str) -> Option<(Slot, Address)> {
    let text = std::str::from_utf8(text).ok()?;
    let mut words = text.split(' ').skip(1);
    let slot = Slot::new(words.next()?.parse().ok()?)?;
    Some((slot, Address::parse(words.next()?)?.or_host(host)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_classified() {
        let slot = Slot::new(3999).unwrap();
        let classify = |text: &'static str| classify(&Value::Error(text.into()), "here");
        assert_eq!(
            classify("MOVED 3999 127.0.0.1:6381"),
            Decision::Moved(slot, Address::new("127.0.0.1", 6381))
        );
        assert_eq!(classify("MOVED 3999 :6381"), Decision::Moved(slot, Address::new("here", 6381)));
        assert_eq!(classify("ASK 3999 ::1:7000"), Decision::Ask(slot, Address::new("::1", 7000)));
        assert_eq!(
            classify("TRYAGAIN Multiple keys request during rehashing of slot"),
            Decision::Later { refresh: false }
        );
        assert_eq!(classify("CLUSTERDOWN Hash slot not served"), Decision::Later { refresh: true });
        for reply in ["MOVED x y", "MOVED 99999 a:1", "MOVEDX 1 a:1", "ERR no", "WRONGTYPE x"] {
            assert_eq!(classify(reply), Decision::Done, "{reply}");
        }
        assert_eq!(super::classify(&Value::bulk("MOVED 1 a:1"), "here"), Decision::Done);
    }
}
