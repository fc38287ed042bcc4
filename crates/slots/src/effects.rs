//! Effects: the commands that a shard appends to its journal for replication and replay.
//!
//! A *batch* is the effect of one turn, one MULTI or one script: the time of the primary, then commands that give the
//! same result wherever and whenever they are replayed (no relative time, no randomness, no rejection). Replay
//! executes the commands, so that every change has one implementation. A batch is applied atomically.
//!
//! A batch of up to [`FrameLimits::frame`] bytes is one journal frame. A larger one is a *group*: consecutive frames
//! with one piece each, of which the first starts the group and the last commits it. A group that is followed by
//! another frame before its last piece was started by a primary that lost leadership; it is discarded.
//!
//! Frame payload: version (1), time in milliseconds (8); version 1: commands; version 2: piece number from 0 (4),
//! last-piece flag (1), a piece of the commands, split at any byte. A command is the number of its arguments and, for
//! each, its length and bytes. Numbers in commands are varints: seven bits per byte, low bits first.
//!
//! Invariants: the frames queued for the journal ([`Effects::queued`]) already have their journal offsets, in order;
//! only the current batch can still grow.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use moim_wire_resp::OwnedArgs;

/// Payload version of a complete batch.
const BATCH: u8 = 1;
/// Payload version of a piece of a group.
const PIECE: u8 = 2;
const HEADER: usize = 9;
const PIECE_HEADER: usize = HEADER + 5;

/// Frame sizes of a shard. Reading has no other limits: a group has any number of pieces, and the journal reads every
/// frame that it accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLimits {
    /// Maximum bytes of effects in one frame; a larger batch becomes a group of such pieces.
    pub frame: usize,
    /// Maximum bytes of effects of one MULTI or script. The call that would exceed it fails.
    pub batch: usize,
    /// Bytes that may be queued for a busy journal before writes are throttled.
    pub queue: usize,
}

impl Default for FrameLimits {
    fn default() -> Self {
        // A batch holds the largest request that clients may send; a frame does not exceed one fetch of a follower.
        Self { frame: 8 << 20, batch: moim_wire_resp::Limits::default().request, queue: 64 << 20 }
    }
}

/// A frame queued for the journal.
pub struct Queued {
    time_ms: i64,
    /// Piece number and last-piece flag; `None` for a complete batch.
    piece: Option<(u32, bool)>,
    commands: Bytes,
}

impl Queued {
    /// Shard time of the effects.
    pub fn time_ms(&self) -> i64 {
        self.time_ms
    }

    /// The encoded payload.
    pub fn payload(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(PIECE_HEADER + self.commands.len());
        payload.put_u8(if self.piece.is_some() { PIECE } else { BATCH });
        payload.put_i64_le(self.time_ms);
        if let Some((number, is_last)) = self.piece {
            payload.put_u32_le(number);
            payload.put_u8(u8::from(is_last));
        }
        payload.put_slice(&self.commands);
        payload
    }
}

/// Effects not yet appended: the queued frames and the current batch.
#[derive(Default)]
pub struct Effects {
    buffer: BytesMut,
    commands: usize,
    /// Start of the running command's effects in the buffer; 0 or past the header.
    mark: usize,
    queue: VecDeque<Queued>,
    queued_bytes: usize,
    limits: FrameLimits,
}

impl Effects {
    /// Effects with the given limits.
    pub fn with_limits(limits: FrameLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// The frame limits.
    pub fn limits(&self) -> FrameLimits {
        self.limits
    }

    /// Appends a command to the current batch.
    pub fn push<'a>(&mut self, args: impl ExactSizeIterator<Item = &'a [u8]>) {
        if self.buffer.is_empty() {
            self.buffer.put_u8(BATCH);
            self.buffer.put_i64_le(0);
        }
        put_varint(&mut self.buffer, args.len());
        for arg in args {
            put_varint(&mut self.buffer, arg.len());
            self.buffer.put_slice(arg);
        }
        self.commands += 1;
    }

    /// Appends a command given as slices.
    pub fn push_slices(&mut self, args: &[&[u8]]) {
        self.push(args.iter().copied());
    }

    /// Number of commands in the current batch.
    pub fn commands(&self) -> usize {
        self.commands
    }

    /// True if the current batch is empty.
    pub fn is_empty(&self) -> bool {
        self.commands == 0
    }

    /// True if there is nothing to append to the journal.
    pub fn is_settled(&self) -> bool {
        self.commands == 0 && self.queue.is_empty()
    }

    /// Bytes of the current batch.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Marks the start of a command: effects from here on belong together.
    #[inline]
    pub fn mark(&mut self) {
        self.mark = self.buffer.len();
    }

    /// Bytes of effects since [`Effects::mark`].
    pub fn marked_len(&self) -> usize {
        self.buffer.len() - self.mark
    }

    /// True if the current batch exceeds one frame.
    #[inline]
    pub fn is_large(&self) -> bool {
        self.buffer.len() > self.limits.frame
    }

    /// True if so many bytes are queued for the journal that writes must wait.
    #[inline]
    pub fn is_congested(&self) -> bool {
        self.queued_bytes > self.limits.queue
    }

    /// The frame payload of the current batch, stamped with the time. [`Effects::clear_batch`] starts a new batch.
    pub fn payload(&mut self, time_ms: i64) -> &[u8] {
        if self.buffer.len() >= HEADER {
            self.buffer[1..HEADER].copy_from_slice(&time_ms.to_le_bytes());
        }
        &self.buffer
    }

    /// Clears the current batch. The buffer is kept unless it is unusually large.
    pub fn clear_batch(&mut self) {
        const KEEP: usize = 1 << 20;
        (self.commands, self.mark) = (0, 0);
        if self.buffer.capacity() > KEEP { self.buffer = BytesMut::new() } else { self.buffer.clear() }
    }

    /// Clears the current batch and the queued frames.
    pub fn clear(&mut self) {
        self.clear_batch();
        self.queue.clear();
        self.queued_bytes = 0;
    }

    /// Seals the current batch: its frames are queued for the journal. If the batch is large, commands before the
    /// mark get a frame of their own, because their replies wait for no more than that frame. Returns true if a group
    /// was started.
    pub fn seal(&mut self, time_ms: i64) -> bool {
        let mut batch = std::mem::take(&mut self.buffer);
        let mark = std::mem::take(&mut self.mark);
        if std::mem::take(&mut self.commands) == 0 {
            self.buffer = batch;
            return false;
        }
        let is_large = batch.len() > self.limits.frame;
        if is_large && mark > HEADER {
            let mut before = batch.split_to(mark);
            before.advance(HEADER);
            self.enqueue(time_ms, None, before.freeze());
        } else {
            batch.advance(HEADER);
        }
        if batch.len() + HEADER <= self.limits.frame {
            self.enqueue(time_ms, None, batch.freeze());
            return false;
        }
        let mut number = 0;
        let step = (self.limits.frame - HEADER).max(1);
        while !batch.is_empty() {
            let piece = batch.split_to(step.min(batch.len())).freeze();
            self.enqueue(time_ms, Some((number, batch.is_empty())), piece);
            number += 1;
        }
        true
    }

    fn enqueue(&mut self, time_ms: i64, piece: Option<(u32, bool)>, commands: Bytes) {
        self.queued_bytes += commands.len();
        self.queue.push_back(Queued { time_ms, piece, commands });
    }

    /// Number of frames queued for the journal.
    pub fn queued(&self) -> i64 {
        self.queue.len() as i64
    }

    /// The next frame to append.
    pub fn front(&self) -> Option<&Queued> {
        self.queue.front()
    }

    /// Removes the next frame: the journal has accepted it.
    pub fn on_appended(&mut self) {
        if let Some(taken) = self.queue.pop_front() {
            self.queued_bytes -= taken.commands.len();
        }
    }
}

/// Why a payload cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadEffects {
    /// Unknown payload version, written by a newer program.
    #[error("effects of version {0}; this program knows {BATCH} and {PIECE}")]
    Version(u8),
    /// Truncated payload with a valid checksum: a bug in the writer.
    #[error("effects that end in the middle of a command")]
    Truncated,
    /// A piece does not follow its predecessor.
    #[error("piece {0} of a group without the piece before it")]
    Piece(u32),
}

/// A decoded payload.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A complete batch: its time and its commands in order.
    Batch(i64, Vec<OwnedArgs>),
    /// A piece of a group.
    Piece(Piece<'a>),
}

/// A piece of a group, see [`Frame`].
#[derive(Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    time_ms: i64,
    number: u32,
    is_last: bool,
    commands: &'a [u8],
}

/// Decodes a payload.
pub fn parse(payload: &[u8]) -> Result<Frame<'_>, BadEffects> {
    let (header, mut rest) = payload.split_at_checked(HEADER).ok_or(BadEffects::Truncated)?;
    let time_ms = i64::from_le_bytes(header[1..].try_into().map_err(|_| BadEffects::Truncated)?);
    match header[0] {
        BATCH => {
            let mut commands = Vec::new();
            while !rest.is_empty() {
                commands.push(take_command(&mut rest)?.ok_or(BadEffects::Truncated)?);
            }
            Ok(Frame::Batch(time_ms, commands))
        }
        PIECE => {
            let number = rest.try_get_u32_le().map_err(|_| BadEffects::Truncated)?;
            let is_last = rest.try_get_u8().map_err(|_| BadEffects::Truncated)? != 0;
            Ok(Frame::Piece(Piece { time_ms, number, is_last, commands: rest }))
        }
        version => Err(BadEffects::Version(version)),
    }
}

/// Decodes the payload of a complete batch: the time and the commands in order.
pub fn read(payload: &[u8]) -> Result<(i64, Vec<OwnedArgs>), BadEffects> {
    match parse(payload)? {
        Frame::Batch(time_ms, commands) => Ok((time_ms, commands)),
        Frame::Piece(piece) => Err(BadEffects::Piece(piece.number)),
    }
}

/// Reassembles groups, frame by frame.
#[derive(Default)]
pub struct Groups {
    open: Option<Open>,
}

/// An incomplete group.
struct Open {
    /// Number of the next piece.
    next: u32,
    /// The complete commands so far.
    commands: Vec<OwnedArgs>,
    /// The start of the incomplete command.
    rest: BytesMut,
}

impl Groups {
    /// True if a group is incomplete.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Discards an incomplete group: no more pieces will follow, so it was never committed.
    pub fn discard(&mut self) {
        self.open = None;
    }

    /// Processes the next journal frame; returns the batch that it completes. `None` inside a group.
    pub fn take(&mut self, frame: Frame<'_>) -> Result<Option<(i64, Vec<OwnedArgs>)>, BadEffects> {
        let piece = match frame {
            Frame::Batch(time_ms, commands) => {
                self.open = None;
                return Ok(Some((time_ms, commands)));
            }
            Frame::Piece(piece) => piece,
        };
        let before = self.open.take().filter(|_| piece.number > 0);
        let mut open = before.unwrap_or(Open { next: 0, commands: Vec::new(), rest: BytesMut::new() });
        if open.next != piece.number {
            return Err(BadEffects::Piece(piece.number));
        }
        open.next += 1;
        open.rest.put_slice(piece.commands);
        let mut rest = &open.rest[..];
        while let Some(command) = take_command(&mut rest)? {
            open.commands.push(command);
        }
        let used = open.rest.len() - rest.len();
        open.rest.advance(used);
        if !piece.is_last {
            self.open = Some(open);
            return Ok(None);
        }
        if !open.rest.is_empty() {
            return Err(BadEffects::Truncated);
        }
        Ok(Some((piece.time_ms, open.commands)))
    }
}

/// Decodes the first command and consumes it; `None`, consuming nothing, if it is incomplete.
fn take_command(from: &mut &[u8]) -> Result<Option<OwnedArgs>, BadEffects> {
    let mut rest = *from;
    let mut args: Vec<&[u8]> = Vec::new();
    let Some(count) = get_varint(&mut rest)? else { return Ok(None) };
    for _ in 0..count {
        let Some(len) = get_varint(&mut rest)? else { return Ok(None) };
        let Some((arg, tail)) = rest.split_at_checked(len) else { return Ok(None) };
        args.push(arg);
        rest = tail;
    }
    *from = rest;
    Ok(Some(OwnedArgs::from_slices(&args)))
}

fn put_varint(into: &mut BytesMut, mut number: usize) {
    while number >= 128 {
        into.put_u8(number as u8 | 128);
        number >>= 7;
    }
    into.put_u8(number as u8);
}

/// Decodes a varint; `None` if it is incomplete.
fn get_varint(from: &mut &[u8]) -> Result<Option<usize>, BadEffects> {
    let mut number = 0usize;
    for shift in (0..63).step_by(7) {
        let Some((first, rest)) = from.split_first() else { return Ok(None) };
        *from = rest;
        number |= usize::from(first & 127) << shift;
        if first & 128 == 0 {
            return Ok(Some(number));
        }
    }
    Err(BadEffects::Truncated)
}

#[cfg(test)]
mod tests;
