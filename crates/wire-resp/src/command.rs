//! Requests as a client writes them: an array of bulk strings.

use bytes::{BufMut, BytesMut};

use crate::number::put_i64;

/// Appends the command `args` (its name first).
pub fn encode<A: AsRef<[u8]>>(out: &mut BytesMut, args: &[A]) {
    let bytes: usize = args.iter().map(|arg| arg.as_ref().len() + 16).sum();
    out.reserve(bytes + 16);
    header(out, args.len());
    for arg in args {
        argument(out, arg.as_ref());
    }
}

/// Begins a command of `count` arguments, the name included.
pub fn header(out: &mut BytesMut, count: usize) {
    out.put_u8(b'*');
    put_i64(out, count as i64);
    out.put_slice(b"\r\n");
}

/// Appends one argument after a [`header`].
pub fn argument(out: &mut BytesMut, arg: &[u8]) {
    out.put_u8(b'$');
    put_i64(out, arg.len() as i64);
    out.put_slice(b"\r\n");
    out.put_slice(arg);
    out.put_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_an_array_of_bulk_strings() {
        let mut out = BytesMut::new();
        encode(&mut out, &["SET", "k", ""]);
        assert_eq!(out, &b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n"[..]);
    }
}
