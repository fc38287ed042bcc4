//! Command construction and wire encoding.
//!
//! [`Cmd`] is one growing buffer: arguments are encoded into it, and the header goes into a gap left at its
//! front. [`Request`] is the complete frame, shared by all attempts, with its routing information.

use bytes::{BufMut, Bytes, BytesMut};
use moim_wire_resp::number::{Decimal, format_double, parse_i64};
use moim_wire_resp::{Slot, command};

use crate::spec::{Keys, Spec, Spread};

/// Space for `*4294967295\r\n` before the arguments.
const GAP: usize = 13;

/// A command under construction.
///
/// ```
/// use moim_slot_client::cmd;
/// let command = cmd("ZADD").arg("scores").arg((1.5, "anna")).arg((2, "bert"));
/// assert_eq!(format!("{command:?}"), r#"["ZADD", "scores", "1.5", "anna", "2", "bert"]"#);
/// ```
#[derive(Clone)]
pub struct Cmd {
    buffer: BytesMut,
    args: usize,
}

/// Starts a command; `name` may have several words (`CLUSTER NODES`).
pub fn cmd(name: &str) -> Cmd {
    let mut cmd = Cmd { buffer: BytesMut::with_capacity(128), args: 0 };
    cmd.buffer.put_bytes(0, GAP);
    for word in name.split_ascii_whitespace() {
        cmd.push(word.as_bytes());
    }
    cmd
}

impl Cmd {
    /// Adds an argument, or several: a list, a pair, an `Option`.
    #[must_use]
    pub fn arg(mut self, arg: impl Arg) -> Self {
        arg.write_to(&mut self);
        self
    }

    /// Adds one argument verbatim.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.reserve(bytes.len() + 16);
        command::argument(&mut self.buffer, bytes);
        self.args += 1;
    }

    pub(crate) fn args(&self) -> Words<'_> {
        Words { rest: &self.buffer[GAP..] }
    }

    /// Completes the command.
    pub(crate) fn finish(mut self) -> Request {
        let digits = Decimal::new(self.args as i64);
        let digits = digits.as_bytes();
        let start = GAP - digits.len() - 3;
        self.buffer[start] = b'*';
        self.buffer[start + 1..GAP - 2].copy_from_slice(digits);
        self.buffer[GAP - 2..GAP].copy_from_slice(b"\r\n");
        let spec = Spec::of(&self);
        let slot = self.first_key(spec.keys).map(Slot::of);
        let frame = self.buffer.freeze().slice(start..);
        Request { frame, replies: 1, args: self.args, slot, spec }
    }

    /// The key that determines the slot.
    fn first_key(&self, keys: Keys) -> Option<&[u8]> {
        let mut args = self.args();
        match keys {
            Keys::None => None,
            Keys::At(index) => args.nth(index.into()),
            Keys::Counted { count, first } => {
                let count = args.nth(count.into()).and_then(parse_i64)?;
                (count > 0).then(|| self.args().nth(first.into())).flatten()
            }
            Keys::Streams => {
                args.find(|arg| arg.eq_ignore_ascii_case(b"STREAMS"))?;
                args.next()
            }
        }
    }
}

impl std::fmt::Debug for Cmd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.args().map(String::from_utf8_lossy)).finish()
    }
}

/// The arguments in a frame, after its header.
#[derive(Clone)]
pub(crate) struct Words<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        // Own encoding: `$`, length, CRLF, bytes, CRLF.
        let end = self.rest.iter().position(|byte| *byte == b'\r')?;
        let len = usize::try_from(parse_i64(self.rest.get(1..end)?)?).ok()?;
        let arg = self.rest.get(end + 2..end + 2 + len)?;
        self.rest = &self.rest[end + 4 + len..];
        Some(arg)
    }
}

/// A complete command, or several that must be sent contiguously.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) frame: Bytes,
    /// Number of replies to the frame. The last one is the result, unless an earlier one is an error.
    pub(crate) replies: u32,
    /// Number of arguments, including the name. Only meaningful for a single command.
    pub(crate) args: usize,
    pub(crate) slot: Option<Slot>,
    pub(crate) spec: Spec,
}

impl Request {
    /// The arguments of a single command.
    pub(crate) fn args(&self) -> Words<'_> {
        let header = self.frame.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        Words { rest: &self.frame[header..] }
    }

    /// Several commands as one unit. They must share a slot; the first one with a slot determines it.
    pub(crate) fn unit(requests: &[Request]) -> Self {
        let mut frame = BytesMut::with_capacity(requests.iter().map(|request| request.frame.len()).sum());
        for request in requests {
            frame.put_slice(&request.frame);
        }
        Self {
            frame: frame.freeze(),
            replies: requests.iter().map(|request| request.replies).sum(),
            args: 0,
            slot: requests.iter().find_map(|request| request.slot),
            spec: Spec { spread: Spread::No, ..Spec::default() },
        }
    }

    /// The same with ASKING before it.
    pub(crate) fn asking(&self) -> Self {
        let mut frame = BytesMut::with_capacity(self.frame.len() + 16);
        command::encode(&mut frame, &["ASKING"]);
        frame.put_slice(&self.frame);
        Self { frame: frame.freeze(), replies: self.replies + 1, ..self.clone() }
    }
}

/// A value that encodes to one or more arguments.
pub trait Arg {
    /// Appends the arguments.
    fn write_to(&self, cmd: &mut Cmd);
}

macro_rules! arg_bytes {
    ($($type:ty),*) => {$(
        impl Arg for $type {
            fn write_to(&self, cmd: &mut Cmd) {
                cmd.push(AsRef::<[u8]>::as_ref(self));
            }
        }
    )*};
}
arg_bytes!(str, String, [u8], Vec<u8>, Bytes, BytesMut);

macro_rules! arg_integer {
    ($($type:ty),*) => {$(
        impl Arg for $type {
            fn write_to(&self, cmd: &mut Cmd) {
                match i64::try_from(*self) {
                    Ok(value) => cmd.push(Decimal::new(value).as_bytes()),
                    Err(_) => cmd.push(self.to_string().as_bytes()),
                }
            }
        }
    )*};
}
arg_integer!(i16, u16, i32, u32, i64, u64, isize, usize);

impl Arg for f64 {
    fn write_to(&self, cmd: &mut Cmd) {
        cmd.push(format_double(*self).as_bytes());
    }
}

impl<T: Arg + ?Sized> Arg for &T {
    fn write_to(&self, cmd: &mut Cmd) {
        (**self).write_to(cmd);
    }
}

/// Encodes to no argument when `None`.
impl<T: Arg> Arg for Option<T> {
    fn write_to(&self, cmd: &mut Cmd) {
        if let Some(value) = self {
            value.write_to(cmd);
        }
    }
}

impl<T: Arg> Arg for [T] {
    fn write_to(&self, cmd: &mut Cmd) {
        self.iter().for_each(|value| value.write_to(cmd));
    }
}

impl<T: Arg> Arg for Vec<T> {
    fn write_to(&self, cmd: &mut Cmd) {
        self.as_slice().write_to(cmd);
    }
}

impl<T: Arg, const N: usize> Arg for [T; N] {
    fn write_to(&self, cmd: &mut Cmd) {
        self.as_slice().write_to(cmd);
    }
}

impl<const N: usize> Arg for [u8; N] {
    fn write_to(&self, cmd: &mut Cmd) {
        cmd.push(self);
    }
}

impl<A: Arg, B: Arg> Arg for (A, B) {
    fn write_to(&self, cmd: &mut Cmd) {
        self.0.write_to(cmd);
        self.1.write_to(cmd);
    }
}

impl<A: Arg, B: Arg, C: Arg> Arg for (A, B, C) {
    fn write_to(&self, cmd: &mut Cmd) {
        self.0.write_to(cmd);
        self.1.write_to(cmd);
        self.2.write_to(cmd);
    }
}

/// Encodes to no argument.
impl Arg for () {
    fn write_to(&self, _cmd: &mut Cmd) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot_of(cmd: Cmd) -> Option<u16> {
        cmd.finish().slot.map(Slot::get)
    }

    #[test]
    fn command_is_encoded_as_its_frame() {
        let request = cmd("SET").arg("k").arg(-5).finish();
        assert_eq!(request.frame, &b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n-5\r\n"[..]);
        assert_eq!(request.args().collect::<Vec<_>>(), [&b"SET"[..], b"k", b"-5"]);
        let many = cmd("DEL").arg(vec!["k"; 12]).finish();
        assert!(many.frame.starts_with(b"*13\r\n$3\r\nDEL\r\n"));
        assert_eq!(many.args().count(), 13);
        let asking = request.asking();
        assert!(asking.frame.starts_with(b"*1\r\n$6\r\nASKING\r\n*3\r\n"));
        assert_eq!((asking.replies, asking.slot), (2, request.slot));
    }

    #[test]
    fn argument_types_are_encoded() {
        let command = cmd("X")
            .arg(("a", 1, 2.5))
            .arg(Some("b"))
            .arg(None::<&str>)
            .arg(u64::MAX)
            .arg(vec![("k", 1u16)])
            .arg(b"raw".to_vec())
            .arg(());
        assert_eq!(
            format!("{command:?}"),
            r#"["X", "a", "1", "2.5", "b", "18446744073709551615", "k", "1", "raw"]"#
        );
    }

    #[test]
    fn first_key_determines_the_slot() {
        let foo = Some(12182);
        for command in [
            cmd("GET").arg("foo"),
            cmd("get").arg("{foo}x"),
            cmd("EVAL").arg("return 1").arg(1).arg("foo").arg("bar"),
            cmd("BITOP").arg(("AND", "foo", "bar")),
            cmd("XREAD").arg(("COUNT", 1)).arg(("streams", "foo", "0")),
            cmd("OBJECT").arg(("ENCODING", "foo")),
            cmd("ZUNION").arg((2, "foo", "bar")),
            cmd("BLMPOP").arg((0, 1, "foo")).arg("LEFT"),
            cmd("NEVERHEARDOF").arg("foo"),
        ] {
            assert_eq!(slot_of(command.clone()), foo, "{command:?}");
        }
        for command in [
            cmd("PING"),
            cmd("EVAL").arg(("return 1", 0)),
            cmd("CLUSTER NODES"),
            cmd("PUBLISH").arg(("foo", "x")),
        ] {
            assert_eq!(slot_of(command.clone()), None, "{command:?}");
        }
    }
}
