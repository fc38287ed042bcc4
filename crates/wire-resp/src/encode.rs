//! Server replies, in the protocol version of the client.
//!
//! A command states the type of its reply (a map, a double); the encoder writes it as RESP3, or as the RESP2
//! equivalent that Redis sends (an array, a bulk string). A command must never branch on the protocol version, except
//! where Redis's own replies differ in shape.

use bytes::{BufMut, BytesMut};

use crate::number::{Decimal, put_double, put_i64};

/// The version of the protocol a connection speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// The protocol of every new connection.
    #[default]
    Resp2,
    /// After `HELLO 3`.
    Resp3,
}

/// Writes replies into a buffer.
///
/// ```
/// use bytes::BytesMut;
/// use moim_wire_resp::{Encoder, Protocol};
/// let mut out = BytesMut::new();
/// let mut to = Encoder::new(&mut out, Protocol::Resp2);
/// to.map(1);
/// to.bulk(b"k");
/// to.double(1.5);
/// assert_eq!(out, &b"*2\r\n$1\r\nk\r\n$3\r\n1.5\r\n"[..]);
/// ```
#[derive(Debug)]
pub struct Encoder<'a> {
    out: &'a mut BytesMut,
    protocol: Protocol,
}

/// The start of a reply of unknown length: to be passed to [`Encoder::finish`].
#[derive(Debug)]
#[must_use = "the header is missing until finish"]
pub struct Deferred {
    at: usize,
    kind: Kind,
}

/// The aggregate types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ordered values.
    Array,
    /// Pairs; lengths count pairs.
    Map,
    /// Unordered values.
    Set,
    /// An out-of-band push message.
    Push,
}

impl<'a> Encoder<'a> {
    /// Appends to `out`.
    pub fn new(out: &'a mut BytesMut, protocol: Protocol) -> Self {
        Self { out, protocol }
    }

    /// The protocol of the connection.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Switches the protocol version: the reply to HELLO is the first in it.
    pub fn set_protocol(&mut self, protocol: Protocol) {
        self.protocol = protocol;
    }

    /// The output buffer: for bytes that are already encoded.
    pub fn buffer(&mut self) -> &mut BytesMut {
        self.out
    }

    /// `+OK`.
    pub fn ok(&mut self) {
        self.out.put_slice(b"+OK\r\n");
    }

    /// A status: one line.
    pub fn simple(&mut self, text: impl AsRef<[u8]>) {
        self.out.put_u8(b'+');
        self.put_line(text.as_ref());
    }

    /// An error, its code included: `ERR syntax error`. Line ends in it become spaces.
    pub fn error(&mut self, text: impl AsRef<[u8]>) {
        self.out.put_u8(b'-');
        self.put_line(text.as_ref());
    }

    /// An integer.
    pub fn integer(&mut self, value: i64) {
        match value {
            0 => self.out.put_slice(b":0\r\n"),
            1 => self.out.put_slice(b":1\r\n"),
            _ => self.header(b':', value),
        }
    }

    /// Bytes.
    pub fn bulk(&mut self, bytes: &[u8]) {
        self.out.reserve(bytes.len() + 32);
        self.header(b'$', bytes.len() as i64);
        self.out.put_slice(bytes);
        self.out.put_slice(b"\r\n");
    }

    /// An integer as bytes: `$2` and `42`.
    pub fn bulk_integer(&mut self, value: i64) {
        self.bulk(Decimal::new(value).as_bytes());
    }

    /// No value (RESP2: the null bulk string).
    pub fn null(&mut self) {
        match self.protocol {
            Protocol::Resp2 => self.out.put_slice(b"$-1\r\n"),
            Protocol::Resp3 => self.out.put_slice(b"_\r\n"),
        }
    }

    /// The null array: an aborted transaction, a blocking pop that timed out.
    pub fn null_array(&mut self) {
        match self.protocol {
            Protocol::Resp2 => self.out.put_slice(b"*-1\r\n"),
            Protocol::Resp3 => self.out.put_slice(b"_\r\n"),
        }
    }

    /// Begins an array of `len` values, which must follow.
    pub fn array(&mut self, len: usize) {
        self.begin(Kind::Array, len);
    }

    /// Begins a map of `pairs` pairs, which must follow.
    pub fn map(&mut self, pairs: usize) {
        self.begin(Kind::Map, pairs);
    }

    /// Begins a set of `len` values, which must follow.
    pub fn set(&mut self, len: usize) {
        self.begin(Kind::Set, len);
    }

    /// Begins a push of `len` values, which must follow.
    pub fn push(&mut self, len: usize) {
        self.begin(Kind::Push, len);
    }

    /// Begins an aggregate of `len` elements (pairs of a map), which must follow.
    pub fn begin(&mut self, kind: Kind, len: usize) {
        let (mark, count) = self.mark(kind, len);
        self.header(mark, count);
    }

    /// Begins an aggregate whose length is known only after its elements are written.
    pub fn defer(&mut self, kind: Kind) -> Deferred {
        Deferred { at: self.out.len(), kind }
    }

    /// Inserts the header before the `len` elements written since [`Encoder::defer`]. Moves them by the header's
    /// length: only for replies whose length cannot be known before.
    pub fn finish(&mut self, deferred: Deferred, len: usize) {
        let (mark, count) = self.mark(deferred.kind, len);
        let end = self.out.len();
        self.header(mark, count);
        let header = self.out.len() - end;
        self.out[deferred.at..].rotate_right(header);
    }

    /// A double.
    pub fn double(&mut self, value: f64) {
        match self.protocol {
            Protocol::Resp3 => {
                self.out.put_u8(b',');
                put_double(self.out, value);
                self.out.put_slice(b"\r\n");
            }
            Protocol::Resp2 => {
                let mut text = BytesMut::new();
                put_double(&mut text, value);
                self.bulk(&text);
            }
        }
    }

    /// A boolean.
    pub fn boolean(&mut self, value: bool) {
        match (self.protocol, value) {
            (Protocol::Resp2, value) => self.integer(value.into()),
            (Protocol::Resp3, true) => self.out.put_slice(b"#t\r\n"),
            (Protocol::Resp3, false) => self.out.put_slice(b"#f\r\n"),
        }
    }

    /// A text of a kind (`txt`, `mkd`).
    pub fn verbatim(&mut self, kind: &[u8; 3], text: &[u8]) {
        match self.protocol {
            Protocol::Resp2 => self.bulk(text),
            Protocol::Resp3 => {
                self.header(b'=', text.len() as i64 + 4);
                self.out.put_slice(kind);
                self.out.put_u8(b':');
                self.out.put_slice(text);
                self.out.put_slice(b"\r\n");
            }
        }
    }

    /// An integer of any length, in decimal.
    pub fn big_number(&mut self, digits: &[u8]) {
        match self.protocol {
            Protocol::Resp2 => self.bulk(digits),
            Protocol::Resp3 => {
                self.out.put_u8(b'(');
                self.put_line(digits);
            }
        }
    }

    fn mark(&self, kind: Kind, len: usize) -> (u8, i64) {
        let len = len as i64;
        match (kind, self.protocol) {
            (Kind::Array, _) | (Kind::Set | Kind::Push, Protocol::Resp2) => (b'*', len),
            (Kind::Map, Protocol::Resp2) => (b'*', 2 * len),
            (Kind::Map, Protocol::Resp3) => (b'%', len),
            (Kind::Set, Protocol::Resp3) => (b'~', len),
            (Kind::Push, Protocol::Resp3) => (b'>', len),
        }
    }

    fn header(&mut self, mark: u8, value: i64) {
        self.out.put_u8(mark);
        put_i64(self.out, value);
        self.out.put_slice(b"\r\n");
    }

    /// The rest of a line. A line end inside would start another reply: it becomes a space.
    fn put_line(&mut self, text: &[u8]) {
        let start = self.out.len();
        self.out.put_slice(text);
        for byte in &mut self.out[start..] {
            if matches!(byte, b'\r' | b'\n') {
                *byte = b' ';
            }
        }
        self.out.put_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(write: impl Fn(&mut Encoder<'_>), resp2: &str, resp3: &str) {
        for (protocol, expected) in [(Protocol::Resp2, resp2), (Protocol::Resp3, resp3)] {
            let mut out = BytesMut::from("x");
            write(&mut Encoder::new(&mut out, protocol));
            assert_eq!(String::from_utf8_lossy(&out[1..]), expected, "{protocol:?}");
        }
    }

    #[test]
    fn answers_are_those_of_redis_in_both_protocols() {
        check(|to| to.ok(), "+OK\r\n", "+OK\r\n");
        check(|to| to.simple("a\r\nb"), "+a  b\r\n", "+a  b\r\n");
        check(|to| to.error("ERR a\nb"), "-ERR a b\r\n", "-ERR a b\r\n");
        check(|to| to.integer(-42), ":-42\r\n", ":-42\r\n");
        check(|to| to.integer(1), ":1\r\n", ":1\r\n");
        check(|to| to.bulk(b"a\r\n"), "$3\r\na\r\n\r\n", "$3\r\na\r\n\r\n");
        check(|to| to.bulk_integer(123), "$3\r\n123\r\n", "$3\r\n123\r\n");
        check(|to| to.null(), "$-1\r\n", "_\r\n");
        check(|to| to.null_array(), "*-1\r\n", "_\r\n");
        check(|to| to.array(12), "*12\r\n", "*12\r\n");
        check(|to| to.map(6), "*12\r\n", "%6\r\n");
        check(|to| to.set(2), "*2\r\n", "~2\r\n");
        check(|to| to.push(3), "*3\r\n", ">3\r\n");
        check(|to| to.double(1.5), "$3\r\n1.5\r\n", ",1.5\r\n");
        check(|to| to.double(f64::NEG_INFINITY), "$4\r\n-inf\r\n", ",-inf\r\n");
        check(|to| to.boolean(true), ":1\r\n", "#t\r\n");
        check(|to| to.boolean(false), ":0\r\n", "#f\r\n");
        check(|to| to.verbatim(b"txt", b"hi"), "$2\r\nhi\r\n", "=6\r\ntxt:hi\r\n");
        check(|to| to.big_number(b"123"), "$3\r\n123\r\n", "(123\r\n");
    }

    #[test]
    fn a_length_can_come_after_its_parts() {
        let write = |to: &mut Encoder<'_>| {
            let outer = to.defer(Kind::Array);
            to.integer(7);
            let inner = to.defer(Kind::Map);
            to.bulk(b"k");
            to.null();
            to.finish(inner, 1);
            to.finish(outer, 2);
        };
        check(write, "*2\r\n:7\r\n*2\r\n$1\r\nk\r\n$-1\r\n", "*2\r\n:7\r\n%1\r\n$1\r\nk\r\n_\r\n");
        check(
            |to| {
                let empty = to.defer(Kind::Set);
                to.finish(empty, 0);
            },
            "*0\r\n",
            "~0\r\n",
        );
    }
}
