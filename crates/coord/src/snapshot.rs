//! Snapshot of a whole [`State`] as a stream of checksummed frames, and its restore.
//!
//! A stream is a header and frames; a frame is its length, the CRC-32C of its payload, and the payload. The first frame
//! holds the counters, leases and alarms; the last holds the number of records, so a stream truncated between frames is
//! detected too. [`Restorer`] takes bytes in pieces of any size and needs no more memory than one frame beyond the
//! state itself.
//!
//! Invariants: equal states give equal bytes, and a restored state answers every request as the original does. A stream
//! is restored completely or not at all. Formats newer than [`FORMAT`] are refused.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::codec::{DecodeError, Input, put_bytes, put_i64, put_lease, put_u64};
use crate::lease::{Lease, LeaseId};
use crate::range::SpaceId;
use crate::request::{Alarm, AlarmKind, Origin};
use crate::space::Space;
use crate::space::log::{Change, Version};
use crate::spill::SpillFile;
use crate::state::State;

/// The first bytes of a stream.
const MAGIC: [u8; 8] = *b"MOIMCOOR";
/// The format that is written. Every format up to it is read.
pub const FORMAT: u16 = 1;
const HEADER_BYTES: usize = 10;
const FRAME_HEADER_BYTES: usize = 8;
/// Target payload size of a frame.
const FRAME_BYTES: usize = 64 << 10;
/// Maximum payload size: one record of the largest request, or the counters of very many leases.
const MAX_FRAME_BYTES: usize = 1 << 30;

const TAG_COUNTERS: u8 = 1;
const TAG_BASE: u8 = 2;
const TAG_CHANGE: u8 = 3;
const TAG_END: u8 = 4;

/// Why a snapshot cannot be restored, or not be taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The magic is wrong.
    #[error("not a snapshot of the coordination state")]
    Magic,
    /// Written by a newer version.
    #[error("snapshot format {0} is newer than this version reads ({FORMAT})")]
    Format(u16),
    /// The checksum of a frame is wrong.
    #[error("snapshot frame {0}: checksum mismatch")]
    Checksum(u64),
    /// The length of a frame is out of range.
    #[error("snapshot frame {0}: length out of range")]
    Length(u64),
    /// A record cannot be decoded.
    #[error("undecodable snapshot record: {0}")]
    Record(#[from] DecodeError),
    /// The records are valid and inconsistent with each other.
    #[error("inconsistent snapshot: {0}")]
    Inconsistent(&'static str),
    /// The state was replaced by a restore while its snapshot was taken.
    #[error("snapshot aborted: the state was replaced by a restore")]
    Replaced,
    /// The stream ends too early, or continues after its end record.
    #[error("incomplete snapshot")]
    Incomplete,
}

impl State {
    /// The whole state as a stream, in chunks of about 64 KiB.
    pub fn snapshot(&self) -> impl Iterator<Item = Bytes> {
        let mut cursor = self.begin_snapshot(FRAME_BYTES);
        std::iter::from_fn(move || cursor.next_chunk(self).expect("a borrowed state is not replaced"))
    }

    /// Begins a snapshot of the current state, taken in chunks of about `chunk_bytes` while commands are applied.
    /// Compacted changes are reclaimed after the cursor is dropped.
    pub fn begin_snapshot(&self, chunk_bytes: usize) -> SnapshotCursor {
        let mut header = Vec::with_capacity(256);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&FORMAT.to_be_bytes());
        frame(&mut header, |out| encode_counters(out, self));
        SnapshotCursor {
            pin: Arc::clone(&self.pin),
            chunk_bytes,
            applied: self.applied,
            log_ends: [self.user.log().next(), self.system.log().next()],
            count: 0,
            stage: Stage::Header(Bytes::from(header)),
        }
    }

    /// A state from a whole stream.
    pub fn restore(chunks: impl IntoIterator<Item = Bytes>) -> Result<Self, SnapshotError> {
        let mut restorer = Restorer::new();
        for chunk in chunks {
            restorer.push(&chunk)?;
        }
        restorer.finish()
    }
}

/// A snapshot in progress.
///
/// It needs no copy of the state: history does not change under it. Changes are only appended to the log, past the end
/// of the snapshot, and nothing is removed from its front until the snapshot is done.
#[derive(Debug)]
pub struct SnapshotCursor {
    /// Held, it stops the state from reclaiming; equal, it proves that this is the same state.
    pin: Arc<()>,
    chunk_bytes: usize,
    applied: u64,
    /// The end of the log of each key space when the snapshot began.
    log_ends: [u64; 2],
    count: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Header(Bytes),
    /// The bases of a key space after this key.
    Bases(SpaceId, Option<Bytes>),
    /// The log of a key space from this position on.
    Log(SpaceId, u64),
    End,
    Done,
}

impl SnapshotCursor {
    /// The log index of the last command in the snapshot.
    pub fn applied_index(&self) -> u64 {
        self.applied
    }

    /// The next chunk; `None` after the last. Fails if `state` is not the one the snapshot was begun on, as after a
    /// restore from another member: that state has another history.
    pub fn next_chunk(&mut self, state: &State) -> Result<Option<Bytes>, SnapshotError> {
        if !Arc::ptr_eq(&self.pin, &state.pin) {
            return Err(SnapshotError::Replaced);
        }
        Ok(match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Header(header) => {
                self.stage = Stage::Bases(SpaceId::User, None);
                Some(header)
            }
            Stage::Done => None,
            stage => {
                self.stage = stage;
                let mut out = Vec::with_capacity(self.chunk_bytes + 1024);
                frame(&mut out, |out| self.encode_records(out, state));
                Some(Bytes::from(out))
            }
        })
    }

    /// Fills a frame, advancing through the stages.
    fn encode_records(&mut self, out: &mut Vec<u8>, state: &State) {
        let full = out.len() + self.chunk_bytes;
        while out.len() < full {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Done) {
                Stage::Bases(id, after) => {
                    let space = state.space(id);
                    let mut last = None;
                    for base in space.bases_after(after.as_ref()) {
                        if out.len() >= full {
                            break;
                        }
                        self.encode_record(out, TAG_BASE, id, base);
                        last = Some(base.key.clone());
                    }
                    match last {
                        Some(key) => Stage::Bases(id, Some(key)),
                        None => Stage::Log(id, space.log().first()),
                    }
                }
                Stage::Log(id, at) if at < self.log_ends[usize::from(id == SpaceId::System)] => {
                    self.encode_record(out, TAG_CHANGE, id, state.space(id).log().get(at));
                    Stage::Log(id, at + 1)
                }
                Stage::Log(SpaceId::User, _) => Stage::Bases(SpaceId::System, None),
                Stage::Log(SpaceId::System, _) => Stage::End,
                Stage::End | Stage::Header(_) | Stage::Done => {
                    out.push(TAG_END);
                    put_u64(out, self.count);
                    return;
                }
            };
        }
    }

    fn encode_record(&mut self, out: &mut Vec<u8>, tag: u8, id: SpaceId, change: &Change) {
        out.extend_from_slice(&[tag, u8::from(id == SpaceId::System)]);
        encode_change(out, change);
        self.count += 1;
    }
}

fn frame(out: &mut Vec<u8>, fill: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_HEADER_BYTES]);
    fill(out);
    let payload = &out[start + FRAME_HEADER_BYTES..];
    let length = u32::try_from(payload.len()).expect("a frame is shorter than 4 GiB");
    let crc = crc32c::crc32c(payload);
    out[start..start + 4].copy_from_slice(&length.to_be_bytes());
    out[start + 4..start + 8].copy_from_slice(&crc.to_be_bytes());
}

fn encode_counters(out: &mut Vec<u8>, state: &State) {
    out.push(TAG_COUNTERS);
    put_u64(out, state.applied);
    for space in [&state.user, &state.system] {
        put_i64(out, space.revision());
        put_i64(out, space.compact_revision());
    }
    put_u64(out, state.leases.by_id.len() as u64);
    for (id, lease) in &state.leases.by_id {
        put_lease(out, *id);
        put_i64(out, lease.ttl_ms);
        put_i64(out, lease.remaining_ms);
        out.push(u8::from(lease.origin == Origin::Node));
    }
    put_u64(out, state.alarms.len() as u64);
    for alarm in &state.alarms {
        out.push(u8::from(alarm.kind == AlarmKind::Corrupt));
        put_u64(out, alarm.member);
    }
}

/// The bytes of a change; also the input of the hash.
pub(crate) fn encode_change(out: &mut Vec<u8>, change: &Change) {
    let version = &change.version;
    out.push(u8::from(version.value.is_some()));
    put_bytes(out, &change.key);
    put_i64(out, version.revision);
    put_u64(out, version.sub.into());
    if let Some(value) = &version.value {
        put_bytes(out, &value.bytes());
        put_i64(out, version.create_revision);
        put_i64(out, version.version);
        put_lease(out, version.lease);
    }
}

fn decode_change(input: &mut Input) -> Result<Change, SnapshotError> {
    let is_put = flag(input)?;
    // Copied: a slice would keep its whole frame in memory.
    let key = Bytes::copy_from_slice(&input.bytes()?);
    let revision = input.i64()?;
    let sub = u32::try_from(input.u64()?)
        .map_err(|_| SnapshotError::Inconsistent("sub-number of a change out of range"))?;
    let mut version = Version::tombstone(revision, sub);
    if is_put {
        version.value = Some(Bytes::copy_from_slice(&input.bytes()?).into());
        version.create_revision = input.i64()?;
        version.version = input.i64()?;
        version.lease = input.lease()?;
    }
    Ok(Change { key, version })
}

fn flag(input: &mut Input) -> Result<bool, SnapshotError> {
    match input.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(SnapshotError::Inconsistent("flag is neither 0 nor 1")),
    }
}

/// Builds a [`State`] from the bytes of a stream, in pieces of any size.
#[derive(Debug)]
pub struct Restorer {
    buffer: BytesMut,
    state: Option<State>,
    spill: Option<SpillFile>,
    seen_header: bool,
    frames: u64,
    records: u64,
    ended: bool,
}

impl Default for Restorer {
    fn default() -> Self {
        Self::new()
    }
}

impl Restorer {
    /// A restorer without input.
    pub fn new() -> Self {
        Self::with_spill(None)
    }

    /// A restorer for a state with a spill file.
    pub fn with_spill(spill: Option<SpillFile>) -> Self {
        let buffer = BytesMut::new();
        Self { buffer, state: None, spill, seen_header: false, frames: 0, records: 0, ended: false }
    }

    /// Consumes the next bytes. After an error the stream is unusable.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.buffer.extend_from_slice(bytes);
        if !self.seen_header {
            if self.buffer.len() < HEADER_BYTES {
                return Ok(());
            }
            let header = self.buffer.split_to(HEADER_BYTES);
            if header[..8] != MAGIC {
                return Err(SnapshotError::Magic);
            }
            let format = u16::from_be_bytes([header[8], header[9]]);
            if format != FORMAT {
                return Err(SnapshotError::Format(format));
            }
            self.seen_header = true;
        }
        while let Some(frame) = self.next_frame()? {
            self.on_frame(frame)?;
        }
        Ok(())
    }

    /// The state, if the stream was complete.
    pub fn finish(self) -> Result<State, SnapshotError> {
        match self.state {
            Some(state) if self.ended && self.buffer.is_empty() => Ok(state),
            _ => Err(SnapshotError::Incomplete),
        }
    }

    fn next_frame(&mut self) -> Result<Option<Bytes>, SnapshotError> {
        let Some(header) = self.buffer.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
        let [a, b, c, d, e, f, g, h] = *header;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length == 0 || length > MAX_FRAME_BYTES {
            return Err(SnapshotError::Length(self.frames));
        }
        if self.buffer.len() < FRAME_HEADER_BYTES + length {
            return Ok(None);
        }
        let frame = self.buffer.split_to(FRAME_HEADER_BYTES + length).freeze().slice(FRAME_HEADER_BYTES..);
        if crc32c::crc32c(&frame) != u32::from_be_bytes([e, f, g, h]) {
            return Err(SnapshotError::Checksum(self.frames));
        }
        self.frames += 1;
        Ok(Some(frame))
    }

    fn on_frame(&mut self, frame: Bytes) -> Result<(), SnapshotError> {
        let mut input = Input { bytes: frame };
        while !input.bytes.is_empty() {
            if self.ended {
                return Err(SnapshotError::Incomplete);
            }
            let tag = input.u8()?;
            match (&mut self.state, tag) {
                (state @ None, TAG_COUNTERS) => {
                    *state = Some(decode_counters(&mut input, self.spill.as_ref())?)
                }
                (Some(state), TAG_BASE | TAG_CHANGE) => {
                    let system = flag(&mut input)?;
                    restore_change(state, tag, system, decode_change(&mut input)?)?;
                    self.records += 1;
                }
                (Some(_), TAG_END) => {
                    if input.u64()? != self.records {
                        return Err(SnapshotError::Incomplete);
                    }
                    self.ended = true;
                }
                _ => return Err(SnapshotError::Inconsistent("unexpected record tag")),
            }
        }
        if self.ended {
            self.attach_keys_to_leases()?;
        }
        Ok(())
    }

    /// The keys of a lease follow from the keys, so the stream does not store them twice.
    fn attach_keys_to_leases(&mut self) -> Result<(), SnapshotError> {
        let Some(state) = &mut self.state else { return Ok(()) };
        for (id, space) in [(SpaceId::User, &state.user), (SpaceId::System, &state.system)] {
            for change in space.live().filter(|change| !change.version.lease.is_none()) {
                let lease = state.leases.by_id.get_mut(&change.version.lease);
                let lease = lease.ok_or(SnapshotError::Inconsistent("key attached to an unknown lease"))?;
                lease.keys.insert((id, change.key.clone()));
            }
        }
        Ok(())
    }
}

fn restore_change(state: &mut State, tag: u8, system: bool, change: Change) -> Result<(), SnapshotError> {
    if (SpaceId::of(&change.key) == SpaceId::System) != system {
        return Err(SnapshotError::Inconsistent("key in the wrong key space"));
    }
    let space = if system { &mut state.system } else { &mut state.user };
    let fits = if tag == TAG_BASE { space.restore_base(change) } else { space.restore_change(change) };
    if fits { Ok(()) } else { Err(SnapshotError::Inconsistent("change out of order")) }
}

fn decode_counters(input: &mut Input, spill: Option<&SpillFile>) -> Result<State, SnapshotError> {
    let mut state = State::new();
    state.applied = input.u64()?;
    for space in [&mut state.user, &mut state.system] {
        let (revision, compact_revision) = (input.i64()?, input.i64()?);
        if revision < 1 || compact_revision < -1 || compact_revision > revision {
            return Err(SnapshotError::Inconsistent("revision out of range"));
        }
        *space = Space::restored(revision, compact_revision, spill.cloned());
    }
    for _ in 0..input.u64()? {
        let id = input.lease()?;
        let (ttl_ms, remaining_ms) = (input.i64()?, input.i64()?);
        let origin = if flag(input)? { Origin::Node } else { Origin::Client };
        let lease = Lease { ttl_ms, remaining_ms, origin, keys: BTreeSet::new() };
        if id == LeaseId::NONE || state.leases.by_id.insert(id, lease).is_some() {
            return Err(SnapshotError::Inconsistent("duplicate lease"));
        }
    }
    for _ in 0..input.u64()? {
        let kind = if flag(input)? { AlarmKind::Corrupt } else { AlarmKind::NoSpace };
        state.alarms.insert(Alarm { kind, member: input.u64()? });
    }
    Ok(state)
}

#[cfg(test)]
mod tests;
