//! What commands did, as it goes into the journal.
//!
//! A frame of the journal holds a batch: the time of the primary, then commands that give the same result wherever and
//! whenever they are replayed (no relative time, no randomness, no refusal). A MULTI or a script is never spread over two
//! frames. Replaying is running the commands, so that there is one implementation of each change.
//!
//! Payload: version (1), time in milliseconds (8), then per command the number of its arguments and, for each, its length
//! and bytes. Numbers are varints: seven bits a byte, low ones first.

use bytes::{BufMut, BytesMut};

use moim_wire_resp::OwnedArgs;

/// The version that is written.
const VERSION: u8 = 1;
const HEADER: usize = 9;

/// The effects that have not been appended yet.
#[derive(Default)]
pub struct Effects {
    buffer: BytesMut,
    commands: usize,
}

impl Effects {
    /// Adds a command.
    pub fn push<'a>(&mut self, args: impl ExactSizeIterator<Item = &'a [u8]>) {
        if self.buffer.is_empty() {
            self.buffer.put_u8(VERSION);
            self.buffer.put_i64_le(0);
        }
        put_varint(&mut self.buffer, args.len());
        for arg in args {
            put_varint(&mut self.buffer, arg.len());
            self.buffer.put_slice(arg);
        }
        self.commands += 1;
    }

    /// Adds a command given as slices.
    pub fn push_slices(&mut self, args: &[&[u8]]) {
        self.push(args.iter().copied());
    }

    /// Commands added since the last [`Effects::take`].
    pub fn commands(&self) -> usize {
        self.commands
    }

    /// Whether there is nothing to append.
    pub fn is_empty(&self) -> bool {
        self.commands == 0
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// The payload of a frame, stamped with the time; and begins a new one with [`Effects::clear`].
    pub fn payload(&mut self, time_ms: i64) -> &[u8] {
        if self.buffer.len() >= HEADER {
            self.buffer[1..HEADER].copy_from_slice(&time_ms.to_le_bytes());
        }
        &self.buffer
    }

    /// Forgets what was appended. The memory is kept unless it was unusually much.
    pub fn clear(&mut self) {
        const KEEP: usize = 1 << 20;
        self.commands = 0;
        if self.buffer.capacity() > KEEP { self.buffer = BytesMut::new() } else { self.buffer.clear() }
    }
}

/// Why a payload cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadEffects {
    /// Written by a newer program.
    #[error("effects of version {0}; this program knows {VERSION}")]
    Version(u8),
    /// Not what was written, although its checksum is right: a bug.
    #[error("effects that end in the middle of a command")]
    Truncated,
}

/// Reads a payload: the time, and the commands in order.
pub fn read(payload: &[u8]) -> Result<(i64, Vec<OwnedArgs>), BadEffects> {
    let (header, mut rest) = payload.split_at_checked(HEADER).ok_or(BadEffects::Truncated)?;
    if header[0] != VERSION {
        return Err(BadEffects::Version(header[0]));
    }
    let time = i64::from_le_bytes(header[1..].try_into().map_err(|_| BadEffects::Truncated)?);
    let mut commands = Vec::new();
    let mut args: Vec<&[u8]> = Vec::new();
    while !rest.is_empty() {
        args.clear();
        for _ in 0..get_varint(&mut rest)? {
            let len = get_varint(&mut rest)?;
            let (arg, tail) = rest.split_at_checked(len).ok_or(BadEffects::Truncated)?;
            args.push(arg);
            rest = tail;
        }
        commands.push(OwnedArgs::from_slices(&args));
    }
    Ok((time, commands))
}

fn put_varint(into: &mut BytesMut, mut number: usize) {
    while number >= 128 {
        into.put_u8(number as u8 | 128);
        number >>= 7;
    }
    into.put_u8(number as u8);
}

fn get_varint(from: &mut &[u8]) -> Result<usize, BadEffects> {
    let mut number = 0usize;
    for shift in (0..63).step_by(7) {
        let (first, rest) = from.split_first().ok_or(BadEffects::Truncated)?;
        *from = rest;
        number |= usize::from(first & 127) << shift;
        if first & 128 == 0 {
            return Ok(number);
        }
    }
    Err(BadEffects::Truncated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_read_back_and_every_cut_is_seen() {
        let mut effects = Effects::default();
        let long = vec![7; 300];
        effects.push_slices(&[b"SET", b"k", &long]);
        effects.push_slices(&[b"DEL", b""]);
        assert_eq!(effects.commands(), 2);
        let payload = effects.payload(1_234).to_vec();
        let (time, commands) = read(&payload).unwrap();
        assert_eq!(time, 1_234);
        assert_eq!(commands[0], OwnedArgs::from_slices([&b"SET"[..], b"k", &long]));
        assert_eq!(commands[1], OwnedArgs::from_slices(["DEL", ""]));
        let whole = [HEADER, payload.len() - 6];
        for cut in 0..payload.len() {
            let cut_read = read(&payload[..cut]);
            if !whole.contains(&cut) && cut != 9 {
                assert!(cut_read.is_err(), "cut at {cut}");
            }
        }
        effects.clear();
        assert!(effects.is_empty());
        assert_eq!(read(&[9; 20]), Err(BadEffects::Version(9)));
    }
}
