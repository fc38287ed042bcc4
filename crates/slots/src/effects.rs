//! What commands did, as it goes into the journal.
//!
//! A *batch* is what one turn did, or one MULTI or script: the time of the primary, then commands that give the same result
//! wherever and whenever they are replayed (no relative time, no randomness, no refusal). Replaying is running the commands,
//! so that there is one implementation of each change. A batch is applied whole or not at all.
//!
//! A batch of up to [`FrameLimits::frame`] bytes is one frame of the journal. A larger one is a *group*: consecutive frames
//! with a piece each, of which the first begins the group and the last commits it. A group that another frame follows
//! before its last piece was begun by a primary that lost its lead, and is discarded.
//!
//! Payload of a frame: version (1), time in milliseconds (8); version 1: commands; version 2: number of the piece from 0 on
//! (4), whether it is the last (1), a piece of the commands, cut anywhere. A command is the number of its arguments and, for
//! each, its length and bytes. Numbers in commands are varints: seven bits a byte, low ones first.
//!
//! Invariants: the frames that wait for the journal ([`Effects::queued`]) have their journal positions already, in their order;
//! only the batch in the making can still grow.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use moim_wire_resp::OwnedArgs;

/// A whole batch.
const BATCH: u8 = 1;
/// A piece of a group.
const PIECE: u8 = 2;
const HEADER: usize = 9;
const PIECE_HEADER: usize = HEADER + 5;

/// How large the frames of a shard are. There is no limit on reading that is not one of these: a group has any number of
/// pieces, and the journal itself reads every frame that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLimits {
    /// The most bytes of effects in one frame; a larger batch becomes a group of such pieces.
    pub frame: usize,
    /// The most bytes that the commands of one MULTI or script may record. The call that would exceed it fails.
    pub batch: usize,
    /// Bytes that may wait for a busy journal before writes are held back.
    pub queue: usize,
}

impl Default for FrameLimits {
    fn default() -> Self {
        // One batch holds the largest request that clients may send; a frame is no more than a follower fetches at once.
        Self { frame: 8 << 20, batch: moim_wire_resp::Limits::default().request, queue: 64 << 20 }
    }
}

/// A frame that waits for the journal.
pub struct Queued {
    time_ms: i64,
    /// The number of the piece and whether it is the last; `None` for a whole batch.
    piece: Option<(u32, bool)>,
    commands: Bytes,
}

impl Queued {
    /// The time it was done.
    pub fn time_ms(&self) -> i64 {
        self.time_ms
    }

    /// What goes into the journal.
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

/// The effects that have not been appended yet: frames that wait, and the batch in the making.
#[derive(Default)]
pub struct Effects {
    buffer: BytesMut,
    commands: usize,
    /// Where the effects of the running command begin in the buffer; 0 or past the header.
    mark: usize,
    queue: VecDeque<Queued>,
    queued_bytes: usize,
    limits: FrameLimits,
}

impl Effects {
    /// Effects with limits of their own.
    pub fn with_limits(limits: FrameLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// The limits.
    pub fn limits(&self) -> FrameLimits {
        self.limits
    }

    /// Adds a command.
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

    /// Adds a command given as slices.
    pub fn push_slices(&mut self, args: &[&[u8]]) {
        self.push(args.iter().copied());
    }

    /// Commands in the batch in the making.
    pub fn commands(&self) -> usize {
        self.commands
    }

    /// Whether the batch in the making is empty.
    pub fn is_empty(&self) -> bool {
        self.commands == 0
    }

    /// Whether there is nothing to append.
    pub fn is_settled(&self) -> bool {
        self.commands == 0 && self.queue.is_empty()
    }

    /// Bytes of the batch in the making.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// A command begins: what is recorded from here on belongs together.
    #[inline]
    pub fn mark(&mut self) {
        self.mark = self.buffer.len();
    }

    /// Bytes that were recorded since [`Effects::mark`].
    pub fn marked_len(&self) -> usize {
        self.buffer.len() - self.mark
    }

    /// Whether the batch in the making does not fit one frame.
    #[inline]
    pub fn is_large(&self) -> bool {
        self.buffer.len() > self.limits.frame
    }

    /// Whether so much waits for the journal that writes have to wait, too.
    #[inline]
    pub fn is_congested(&self) -> bool {
        self.queued_bytes > self.limits.queue
    }

    /// The payload of a frame, stamped with the time; and begins a new one with [`Effects::clear_batch`].
    pub fn payload(&mut self, time_ms: i64) -> &[u8] {
        if self.buffer.len() >= HEADER {
            self.buffer[1..HEADER].copy_from_slice(&time_ms.to_le_bytes());
        }
        &self.buffer
    }

    /// Forgets the batch in the making. The memory is kept unless it was unusually much.
    pub fn clear_batch(&mut self) {
        const KEEP: usize = 1 << 20;
        (self.commands, self.mark) = (0, 0);
        if self.buffer.capacity() > KEEP { self.buffer = BytesMut::new() } else { self.buffer.clear() }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.clear_batch();
        self.queue.clear();
        self.queued_bytes = 0;
    }

    /// Ends the batch in the making: its frames wait for the journal. Commands before the mark have a frame of their own if
    /// the batch is large, because their answers wait for no more than that frame. Gives whether a group was begun.
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

    /// Frames that wait for the journal.
    pub fn queued(&self) -> i64 {
        self.queue.len() as i64
    }

    /// The frame that goes next.
    pub fn front(&self) -> Option<&Queued> {
        self.queue.front()
    }

    /// The journal has taken the frame that was next.
    pub fn on_taken(&mut self) {
        if let Some(taken) = self.queue.pop_front() {
            self.queued_bytes -= taken.commands.len();
        }
    }
}

/// Why a payload cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadEffects {
    /// Written by a newer program.
    #[error("effects of version {0}; this program knows {BATCH} and {PIECE}")]
    Version(u8),
    /// Not what was written, although its checksum is right: a bug.
    #[error("effects that end in the middle of a command")]
    Truncated,
    /// A piece that does not follow the one before it.
    #[error("piece {0} of a group without the piece before it")]
    Piece(u32),
}

/// A payload that was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A whole batch: its time, and its commands in order.
    Batch(i64, Vec<OwnedArgs>),
    /// A piece of a group.
    Piece(Piece<'a>),
}

/// See [`Frame`].
#[derive(Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    time_ms: i64,
    number: u32,
    is_last: bool,
    commands: &'a [u8],
}

/// Reads a payload.
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

/// Reads the payload of a whole batch: the time, and the commands in order.
pub fn read(payload: &[u8]) -> Result<(i64, Vec<OwnedArgs>), BadEffects> {
    match parse(payload)? {
        Frame::Batch(time_ms, commands) => Ok((time_ms, commands)),
        Frame::Piece(piece) => Err(BadEffects::Piece(piece.number)),
    }
}

/// Puts groups together, frame by frame.
#[derive(Default)]
pub struct Groups {
    open: Option<Open>,
}

/// A group that was begun.
struct Open {
    /// The next piece.
    next: u32,
    /// The commands that are whole.
    commands: Vec<OwnedArgs>,
    /// The beginning of the one that is not.
    rest: BytesMut,
}

impl Groups {
    /// Whether a group was begun and not ended.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// No more pieces will come: what was begun never happened.
    pub fn discard(&mut self) {
        self.open = None;
    }

    /// Takes the next frame of the journal; gives a batch that is whole with it. `None` inside of a group.
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

/// Takes the first command off the bytes; `None`, and nothing taken, when they end before it does.
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

/// A number; `None` when the bytes end before it does.
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
