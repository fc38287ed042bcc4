//! What an answer means for the router: done, go elsewhere, or try again later.

use bytes::Bytes;
use moim_wire_resp::{Slot, Value};

use crate::address::Address;

/// What to do after an answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the answer, be it an error.
    Answer,
    /// The slot is at another node, for good.
    Moved(Slot, Address),
    /// The slot is on its way: this once, ask the other node.
    Ask(Slot, Address),
    /// The node cannot answer now. `refresh` when the topology may be the reason.
    Later { refresh: bool },
}

/// Judges an answer of a node that was reached at `host`.
pub(crate) fn judge(value: &Value, host: &str) -> Verdict {
    let Value::Error(text) = value else { return Verdict::Answer };
    match code(text) {
        b"MOVED" => target(text, host).map_or(Verdict::Answer, |(slot, to)| Verdict::Moved(slot, to)),
        b"ASK" => target(text, host).map_or(Verdict::Answer, |(slot, to)| Verdict::Ask(slot, to)),
        b"TRYAGAIN" | b"LOADING" => Verdict::Later { refresh: false },
        b"CLUSTERDOWN" | b"READONLY" | b"MASTERDOWN" => Verdict::Later { refresh: true },
        _ => Verdict::Answer,
    }
}

fn code(text: &Bytes) -> &[u8] {
    text.split(|byte| *byte == b' ').next().unwrap_or_default()
}

/// `MOVED 3999 127.0.0.1:6381`; an empty host is the one that answered.
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
    fn answers_are_judged() {
        let slot = Slot::new(3999).unwrap();
        let judge = |text: &'static str| judge(&Value::Error(text.into()), "here");
        assert_eq!(judge("MOVED 3999 127.0.0.1:6381"), Verdict::Moved(slot, Address::new("127.0.0.1", 6381)));
        assert_eq!(judge("MOVED 3999 :6381"), Verdict::Moved(slot, Address::new("here", 6381)));
        assert_eq!(judge("ASK 3999 ::1:7000"), Verdict::Ask(slot, Address::new("::1", 7000)));
        assert_eq!(
            judge("TRYAGAIN Multiple keys request during rehashing of slot"),
            Verdict::Later { refresh: false }
        );
        assert_eq!(judge("CLUSTERDOWN Hash slot not served"), Verdict::Later { refresh: true });
        for answer in ["MOVED x y", "MOVED 99999 a:1", "MOVEDX 1 a:1", "ERR no", "WRONGTYPE x"] {
            assert_eq!(judge(answer), Verdict::Answer, "{answer}");
        }
        assert_eq!(super::judge(&Value::bulk("MOVED 1 a:1"), "here"), Verdict::Answer);
    }
}
