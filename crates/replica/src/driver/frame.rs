//! The frames that two nodes exchange about the partitions that one follows from the other, and their encoding.
//!
//! A frame: length of the remainder, length of its head, CRC32C of kind and head, kind, head, body. Integers are
//! big-endian. Only an answer and a snapshot chunk have a body; records carry their own checksums.
//!
//! A connection is a session: a partition is named once and then referenced by its slot. The follower requests the
//! next records, slot by slot; the leader answers when there is something to send, so that an idle partition costs
//! nothing. Reports of disk progress and high watermarks are sent beside that, many at a time.
//!
//! Input is untrusted: a count is accepted only as far as the bytes behind it reach, memory grows only with received
//! bytes, and trailing bytes are an error.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use moim_base::{BrokerId, LeaderEpoch, Offset, TopicId};

use super::replicated::{Records, Span};
use crate::controller::LogEnd;
use crate::machine::{Chunk, SnapshotFetch};
use crate::message::{Answer, Fetch, Refusal, Report, Sender};
use crate::types::{BrokerEpoch, DirectoryId, PartitionId};

const MAGIC: u32 = 0x4d52_504c; // "MRPL"
const VERSION: u16 = 4;
const FIXED: usize = 13;
/// The maximum size of a head: a few hundred thousand entries.
const MAX_HEAD: usize = 16 << 20;
/// The maximum size of a frame: the largest journal frame, and its head.
const MAX_FRAME: usize = moim_journal::PlainFraming::MAX + MAX_HEAD;

/// A received frame.
pub(super) struct Frame {
    kind: u8,
    head: Bytes,
    body: Bytes,
}

/// A message from a follower's node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ToLeader {
    Hello(Sender),
    Beat,
    /// Assigns these slots to these partitions.
    AssignSlots(Vec<(u32, PartitionId)>),
    /// Releases these slots.
    ReleaseSlots(Vec<u32>),
    /// Fetches: slot, fetch id, fetch.
    Fetches(Vec<(u32, u64, Fetch)>),
    Reports(Vec<(u32, Report)>),
    Snapshot(u32, SnapshotFetch),
    LogEnds(u64, Vec<PartitionId>),
}

/// A message from a leader's node.
#[derive(Clone, Debug)]
pub(super) enum ToFollower {
    Hello(Sender),
    Beat,
    Answer { slot: u32, id: u64, epoch: LeaderEpoch, answer: Result<Answer, Refusal>, records: Records },
    HighWatermarks(Vec<(u32, LeaderEpoch, Offset)>),
    Chunk(u32, LeaderEpoch, Option<Chunk>),
    LogEnds(u64, BrokerEpoch, Vec<(PartitionId, Option<LogEnd>)>),
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const BEAT: u8 = 2;
    pub(super) const ASSIGN_SLOTS: u8 = 3;
    pub(super) const RELEASE_SLOTS: u8 = 4;
    pub(super) const FETCHES: u8 = 5;
    pub(super) const REPORTS: u8 = 6;
    pub(super) const SNAPSHOT: u8 = 7;
    pub(super) const LOG_ENDS: u8 = 8;
    pub(super) const ANSWER: u8 = 9;
    pub(super) const HIGH_WATERMARKS: u8 = 10;
    pub(super) const NO_CHUNK: u8 = 11;
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The number of bytes missing to a complete frame, as far as known.
pub(super) fn missing(input: &[u8]) -> usize {
    let Some(mut len) = input.get(..4) else { return FIXED };
    (4 + len.get_u32() as usize).saturating_sub(input.len())
}

/// Splits the first frame off the received bytes, if it is complete.
pub(super) fn split(input: &mut BytesMut) -> io::Result<Option<Frame>> {
    let Some(mut fixed) = input.get(..FIXED) else { return Ok(None) };
    let (len, head_len) = (fixed.get_u32() as usize + 4, fixed.get_u32() as usize);
    if len > MAX_FRAME || head_len > MAX_HEAD || len < FIXED + head_len {
        return Err(bad("frame too long"));
    }
    if input.len() < len {
        return Ok(None);
    }
    let (crc, kind) = (fixed.get_u32(), fixed.get_u8());
    let mut frame = input.split_to(len).freeze();
    if crc32c::crc32c(&frame[FIXED - 1..FIXED + head_len]) != crc {
        return Err(bad("frame checksum mismatch"));
    }
    frame.advance(FIXED);
    let head = frame.split_to(head_len);
    Ok(Some(Frame { kind, head, body: frame }))
}

/// Encodes a frame; its body, if any, is sent directly after it.
fn put(out: &mut BytesMut, kind: u8, body_len: usize, head: impl FnOnce(&mut BytesMut)) {
    let start = out.len();
    out.put_slice(&[0; FIXED - 1]);
    out.put_u8(kind);
    head(out);
    let head_len = out.len() - start - FIXED;
    let crc = crc32c::crc32c(&out[start + FIXED - 1..]);
    let len = u32::try_from(FIXED - 4 + head_len + body_len).expect("a frame is under 4 GiB");
    let mut fixed = &mut out[start..start + FIXED - 1];
    fixed.put_u32(len);
    fixed.put_u32(u32::try_from(head_len).expect("a head is under 4 GiB"));
    fixed.put_u32(crc);
}

fn put_hello(out: &mut BytesMut, sender: &Sender) {
    put(out, kind::HELLO, 0, |out| {
        out.put_u32(MAGIC);
        out.put_u16(VERSION);
        out.put_i32(sender.node.0);
        out.put_i64(sender.epoch.0);
        out.put_u64(sender.directory.0);
    });
}

fn put_partition(out: &mut BytesMut, id: PartitionId) {
    out.put_u128(id.topic.0);
    out.put_u32(id.index);
}

impl ToLeader {
    pub(super) fn encode(&self, out: &mut BytesMut) {
        match self {
            Self::Hello(sender) => put_hello(out, sender),
            Self::Beat => put(out, kind::BEAT, 0, |_| {}),
            Self::AssignSlots(assigned) => put(out, kind::ASSIGN_SLOTS, 0, |out| {
                for (slot, id) in assigned {
                    out.put_u32(*slot);
                    put_partition(out, *id);
                }
            }),
            Self::ReleaseSlots(slots) => {
                put(out, kind::RELEASE_SLOTS, 0, |out| slots.iter().for_each(|slot| out.put_u32(*slot)));
            }
            Self::Fetches(due_fetches) => put(out, kind::FETCHES, 0, |out| {
                for (slot, id, fetch) in due_fetches {
                    out.put_u32(*slot);
                    out.put_u64(*id);
                    out.put_i32(fetch.leader_epoch.0);
                    out.put_i64(fetch.record);
                    out.put_i64(fetch.offset.0);
                    out.put_i32(fetch.last_epoch.map_or(-1, |epoch| epoch.0));
                    out.put_i64(fetch.written.0);
                    out.put_i64(fetch.durable.0);
                    out.put_i64(fetch.log_start.0);
                    out.put_i64(fetch.cleaned_below.0);
                }
            }),
            Self::Reports(reports) => put(out, kind::REPORTS, 0, |out| {
                for (slot, report) in reports {
                    out.put_u32(*slot);
                    out.put_i32(report.leader_epoch.0);
                    out.put_i64(report.record);
                    out.put_i64(report.written.0);
                    out.put_i64(report.durable.0);
                    out.put_i64(report.log_start.0);
                }
            }),
            Self::Snapshot(slot, fetch) => put(out, kind::SNAPSHOT, 0, |out| {
                out.put_u32(*slot);
                out.put_i32(fetch.leader_epoch.0);
                out.put_i64(fetch.snapshot.map_or(-1, |end| end.0));
                out.put_u64(fetch.position);
            }),
            Self::LogEnds(call, partitions) => put(out, kind::LOG_ENDS, 0, |out| {
                out.put_u64(*call);
                partitions.iter().for_each(|id| put_partition(out, *id));
            }),
        }
    }

    /// `from` is the sender of the hello on this connection.
    pub(super) fn decode(frame: Frame, from: Option<Sender>) -> io::Result<Self> {
        let mut head = Input(frame.head);
        if frame.kind == kind::HELLO {
            return Ok(Self::Hello(head.hello()?));
        }
        let from = from.ok_or_else(|| bad("frame before hello"))?;
        let message = match frame.kind {
            kind::BEAT => Self::Beat,
            kind::ASSIGN_SLOTS => {
                Self::AssignSlots(head.list(24, |head| Ok((head.u32()?, head.partition()?)))?)
            }
            kind::RELEASE_SLOTS => Self::ReleaseSlots(head.list(4, Input::u32)?),
            kind::FETCHES => Self::Fetches(head.list(68, |head| {
                let (slot, id) = (head.u32()?, head.u64()?);
                let (leader_epoch, record) = (head.epoch()?, head.i64()?);
                let offset = head.offset()?;
                let last_epoch = Some(head.epoch()?).filter(|epoch| epoch.0 >= 0);
                let (written, durable, log_start) = (head.offset()?, head.offset()?, head.offset()?);
                let cleaned_below = head.offset()?;
                let fetch = Fetch {
                    from,
                    leader_epoch,
                    record,
                    offset,
                    last_epoch,
                    written,
                    durable,
                    log_start,
                    cleaned_below,
                };
                Ok((slot, id, fetch))
            })?),
            kind::REPORTS => Self::Reports(head.list(40, |head| {
                let (slot, leader_epoch, record) = (head.u32()?, head.epoch()?, head.i64()?);
                let (written, durable, log_start) = (head.offset()?, head.offset()?, head.offset()?);
                Ok((slot, Report { from, leader_epoch, record, written, durable, log_start }))
            })?),
            kind::SNAPSHOT => {
                let (slot, leader_epoch) = (head.u32()?, head.epoch()?);
                let snapshot = Some(Offset(head.i64()?)).filter(|end| end.0 >= 0);
                let position = head.u64()?;
                Self::Snapshot(slot, SnapshotFetch { from, leader_epoch, snapshot, position })
            }
            kind::LOG_ENDS => {
                let call = head.u64()?;
                Self::LogEnds(call, head.list(20, Input::partition)?)
            }
            _ => return Err(bad("unknown frame kind")),
        };
        head.end(&frame.body)?;
        Ok(message)
    }
}

/// Encodes an answer. Its records, `body_len` bytes, are sent directly after it.
pub(super) fn put_answer(
    out: &mut BytesMut,
    slot: u32,
    (id, epoch): (u64, LeaderEpoch),
    answer: &Result<Answer, Refusal>,
    span: Span,
    body_len: usize,
) {
    put(out, kind::ANSWER, body_len, |out| {
        out.put_u32(slot);
        out.put_u64(id);
        out.put_i32(epoch.0);
        let (what, numbers, other) = match *answer {
            Ok(Answer::Records { high_watermark, log_start, log_end }) => {
                (0, [high_watermark.0, log_start.0, log_end.0], 0)
            }
            Ok(Answer::Diverging { epoch, end }) => (1, [end.0, 0, 0], epoch.map_or(-1, |epoch| epoch.0)),
            Ok(Answer::OutOfRange { log_start }) => (2, [log_start.0, 0, 0], 0),
            Err(Refusal::FencedEpoch(epoch)) => (3, [0; 3], epoch.0),
            Err(Refusal::UnknownEpoch(epoch)) => (4, [0; 3], epoch.0),
            Err(Refusal::NotLeader) => (5, [0; 3], 0),
            Err(Refusal::NotReplica) => (6, [0; 3], 0),
            Err(Refusal::StaleBroker) => (7, [0; 3], 0),
            Ok(Answer::Cleaned { below, log_start }) => (8, [below.0, log_start.0, 0], 0),
        };
        out.put_u8(what);
        numbers.iter().for_each(|number| out.put_i64(*number));
        out.put_i32(other);
        out.put_i64(span.from.0);
        out.put_i64(span.next.0);
        out.put_i32(span.next_epoch.0);
    });
}

/// Encodes a snapshot chunk. Its bytes are sent directly after it.
pub(super) fn put_chunk(out: &mut BytesMut, slot: u32, epoch: LeaderEpoch, chunk: &Chunk) {
    put(out, kind::SNAPSHOT, chunk.bytes.len(), |out| {
        out.put_u32(slot);
        out.put_i32(epoch.0);
        out.put_i64(chunk.end.0);
        out.put_i32(chunk.last_epoch.0);
        out.put_u64(chunk.total);
        out.put_u64(chunk.position);
    });
}

impl ToFollower {
    /// Encodes what has no body; [`put_answer`] and [`put_chunk`] are for the others.
    pub(super) fn encode(&self, out: &mut BytesMut) {
        match self {
            Self::Hello(sender) => put_hello(out, sender),
            Self::Beat => put(out, kind::BEAT, 0, |_| {}),
            Self::Answer { slot, id, epoch, answer, records } => {
                put_answer(out, *slot, (*id, *epoch), answer, records.span, records.bytes.len());
                out.put_slice(&records.bytes);
            }
            Self::HighWatermarks(advanced_watermark) => put(out, kind::HIGH_WATERMARKS, 0, |out| {
                for (slot, epoch, high_watermark) in advanced_watermark {
                    out.put_u32(*slot);
                    out.put_i32(epoch.0);
                    out.put_i64(high_watermark.0);
                }
            }),
            Self::Chunk(slot, epoch, None) => put(out, kind::NO_CHUNK, 0, |out| {
                out.put_u32(*slot);
                out.put_i32(epoch.0);
            }),
            Self::Chunk(slot, epoch, Some(chunk)) => {
                put_chunk(out, *slot, *epoch, chunk);
                out.put_slice(&chunk.bytes);
            }
            Self::LogEnds(call, run, ends) => put(out, kind::LOG_ENDS, 0, |out| {
                out.put_u64(*call);
                out.put_i64(run.0);
                for (id, end) in ends {
                    put_partition(out, *id);
                    out.put_i32(end.map_or(-1, |end| end.epoch.0));
                    out.put_i64(end.map_or(-1, |end| end.end.0));
                }
            }),
        }
    }

    pub(super) fn decode(frame: Frame) -> io::Result<Self> {
        let mut head = Input(frame.head);
        let message = match frame.kind {
            kind::HELLO => return Ok(Self::Hello(head.hello()?)),
            kind::BEAT => Self::Beat,
            kind::ANSWER => return Self::decode_answer(head, frame.body),
            kind::HIGH_WATERMARKS => {
                Self::HighWatermarks(head.list(16, |head| Ok((head.u32()?, head.epoch()?, head.offset()?)))?)
            }
            kind::NO_CHUNK => Self::Chunk(head.u32()?, head.epoch()?, None),
            kind::SNAPSHOT => {
                let (slot, epoch) = (head.u32()?, head.epoch()?);
                let (end, last_epoch) = (head.offset()?, head.epoch()?);
                let (total, position) = (head.u64()?, head.u64()?);
                let chunk = Chunk { end, last_epoch, total, position, bytes: frame.body };
                return Ok(Self::Chunk(slot, epoch, Some(chunk)));
            }
            kind::LOG_ENDS => {
                let (call, run) = (head.u64()?, BrokerEpoch(head.i64()?));
                let ends = head.list(32, |head| {
                    let (id, epoch, end) = (head.partition()?, head.epoch()?, Offset(head.i64()?));
                    Ok((id, (end.0 >= 0).then_some(LogEnd { epoch, end })))
                })?;
                Self::LogEnds(call, run, ends)
            }
            _ => return Err(bad("unknown frame kind")),
        };
        head.end(&frame.body)?;
        Ok(message)
    }

    fn decode_answer(mut head: Input, bytes: Bytes) -> io::Result<Self> {
        let (slot, id, epoch) = (head.u32()?, head.u64()?, head.epoch()?);
        let what = head.take(1)?.get_u8();
        let (one, two, three) = (head.offset()?, head.offset()?, head.offset()?);
        let other = head.epoch()?;
        let (from, next, next_epoch) = (head.offset()?, head.offset()?, head.epoch()?);
        let answer = match what {
            0 => Ok(Answer::Records { high_watermark: one, log_start: two, log_end: three }),
            1 => Ok(Answer::Diverging { epoch: Some(other).filter(|epoch| epoch.0 >= 0), end: one }),
            2 => Ok(Answer::OutOfRange { log_start: one }),
            3 => Err(Refusal::FencedEpoch(other)),
            4 => Err(Refusal::UnknownEpoch(other)),
            5 => Err(Refusal::NotLeader),
            6 => Err(Refusal::NotReplica),
            7 => Err(Refusal::StaleBroker),
            8 => Ok(Answer::Cleaned { below: one, log_start: two }),
            _ => return Err(bad("unknown answer kind")),
        };
        head.end(&[])?;
        Ok(Self::Answer {
            slot,
            id,
            epoch,
            answer,
            records: Records { bytes, span: Span { from, next, next_epoch } },
        })
    }
}

/// Input that is bounds-checked before every read.
struct Input(Bytes);

impl Input {
    fn take(&mut self, len: usize) -> io::Result<Bytes> {
        if self.0.len() < len { Err(bad("frame too short")) } else { Ok(self.0.split_to(len)) }
    }

    fn u32(&mut self) -> io::Result<u32> {
        Ok(self.take(4)?.get_u32())
    }

    fn u64(&mut self) -> io::Result<u64> {
        Ok(self.take(8)?.get_u64())
    }

    fn i64(&mut self) -> io::Result<i64> {
        Ok(self.take(8)?.get_i64())
    }

    fn epoch(&mut self) -> io::Result<LeaderEpoch> {
        Ok(LeaderEpoch(self.take(4)?.get_i32()))
    }

    fn offset(&mut self) -> io::Result<Offset> {
        match self.i64()? {
            negative if negative < 0 => Err(bad("negative offset")),
            offset => Ok(Offset(offset)),
        }
    }

    fn partition(&mut self) -> io::Result<PartitionId> {
        let mut bytes = self.take(20)?;
        Ok(PartitionId { topic: TopicId(bytes.get_u128()), index: bytes.get_u32() })
    }

    fn hello(&mut self) -> io::Result<Sender> {
        if self.u32()? != MAGIC {
            return Err(bad("not a replication connection"));
        }
        if self.take(2)?.get_u16() != VERSION {
            return Err(bad("unsupported replication protocol version"));
        }
        let mut bytes = self.take(20)?;
        Ok(Sender {
            node: BrokerId(bytes.get_i32()),
            epoch: BrokerEpoch(bytes.get_i64()),
            directory: DirectoryId(bytes.get_u64()),
        })
    }

    /// The remainder as items of `size` bytes each.
    fn list<T>(
        &mut self,
        size: usize,
        mut item: impl FnMut(&mut Self) -> io::Result<T>,
    ) -> io::Result<Vec<T>> {
        let count = self.0.len() / size;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn end(&self, body: &[u8]) -> io::Result<()> {
        if self.0.is_empty() && body.is_empty() { Ok(()) } else { Err(bad("frame too long")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender() -> Sender {
        Sender { node: BrokerId(3), epoch: BrokerEpoch(77), directory: DirectoryId(9) }
    }

    fn id(index: u32) -> PartitionId {
        PartitionId { topic: TopicId(5), index }
    }

    fn arrive(bytes: &BytesMut) -> Frame {
        let mut input = bytes.clone();
        let frame = split(&mut input).unwrap().unwrap();
        assert!(input.is_empty());
        frame
    }

    #[test]
    fn follower_messages_round_trip() {
        let from = sender();
        let fetch = Fetch {
            from,
            leader_epoch: LeaderEpoch(4),
            record: 1 << 40,
            offset: Offset(100),
            last_epoch: Some(LeaderEpoch(3)),
            written: Offset(99),
            durable: Offset(98),
            log_start: Offset(7),
            cleaned_below: Offset(6),
        };
        let (written, durable, log_start) = (Offset(9), Offset(8), Offset(3));
        let report = Report { from, leader_epoch: LeaderEpoch(4), record: 7, written, durable, log_start };
        let snapshot = SnapshotFetch { from, leader_epoch: LeaderEpoch(4), snapshot: None, position: 17 };
        let all = [
            ToLeader::Hello(from),
            ToLeader::Beat,
            ToLeader::AssignSlots(vec![(0, id(0)), (1, id(7))]),
            ToLeader::ReleaseSlots(vec![1, 2]),
            ToLeader::Fetches(vec![(0, 5, fetch), (1, 6, Fetch { last_epoch: None, ..fetch })]),
            ToLeader::Reports(vec![(0, report)]),
            ToLeader::Snapshot(2, snapshot),
            ToLeader::Snapshot(2, SnapshotFetch { snapshot: Some(Offset(6)), ..snapshot }),
            ToLeader::LogEnds(8, vec![id(1), id(2)]),
        ];
        for message in all {
            let mut bytes = BytesMut::new();
            message.encode(&mut bytes);
            assert_eq!(ToLeader::decode(arrive(&bytes), Some(from)).unwrap(), message);
        }
    }

    #[test]
    fn leader_messages_round_trip() {
        let span = Span { from: Offset(7), next: Offset(9), next_epoch: LeaderEpoch(2) };
        let none = Records { bytes: Bytes::new(), span };
        let some = Records { bytes: Bytes::from_static(b"abc"), span };
        let records = Answer::Records { high_watermark: Offset(1), log_start: Offset(0), log_end: Offset(2) };
        let answers = [
            (Ok(records), some),
            (Ok(Answer::Diverging { epoch: Some(LeaderEpoch(2)), end: Offset(5) }), none.clone()),
            (Ok(Answer::Diverging { epoch: None, end: Offset(5) }), none.clone()),
            (Ok(Answer::OutOfRange { log_start: Offset(5) }), none.clone()),
            (Ok(Answer::Cleaned { below: Offset(5), log_start: Offset(3) }), none.clone()),
            (Err(Refusal::FencedEpoch(LeaderEpoch(8))), none.clone()),
            (Err(Refusal::UnknownEpoch(LeaderEpoch(8))), none.clone()),
            (Err(Refusal::NotLeader), none.clone()),
            (Err(Refusal::NotReplica), none.clone()),
            (Err(Refusal::StaleBroker), none),
        ];
        let epoch = LeaderEpoch(4);
        let mut all: Vec<ToFollower> = answers
            .into_iter()
            .map(|(answer, records)| ToFollower::Answer { slot: 1, id: 2, epoch, answer, records })
            .collect();
        let chunk = Chunk {
            end: Offset(10),
            last_epoch: LeaderEpoch(3),
            total: 3,
            position: 0,
            bytes: Bytes::from_static(b"xyz"),
        };
        let end = LogEnd { epoch: LeaderEpoch(2), end: Offset(5) };
        all.extend([
            ToFollower::Hello(sender()),
            ToFollower::Beat,
            ToFollower::HighWatermarks(vec![(1, epoch, Offset(6)), (2, epoch, Offset(7))]),
            ToFollower::Chunk(1, epoch, None),
            ToFollower::Chunk(1, epoch, Some(chunk)),
            ToFollower::LogEnds(4, BrokerEpoch(5), vec![(id(1), Some(end)), (id(2), None)]),
        ]);
        for message in all {
            let mut bytes = BytesMut::new();
            message.encode(&mut bytes);
            let back = ToFollower::decode(arrive(&bytes)).unwrap();
            assert_eq!(format!("{back:?}"), format!("{message:?}"));
        }
    }

    #[test]
    fn flipped_bit_in_frame_head_is_detected_and_partial_frame_waits() {
        let mut bytes = BytesMut::new();
        ToLeader::AssignSlots(vec![(0, id(0))]).encode(&mut bytes);
        for len in 0..bytes.len() {
            let mut part = BytesMut::from(&bytes[..len]);
            assert!(split(&mut part).unwrap().is_none());
            assert!(len < 4 || missing(&part) == bytes.len() - len);
        }
        for bit in 8 * 8..bytes.len() * 8 {
            let mut broken = bytes.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(split(&mut broken).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn malformed_frames_are_refused() {
        for text in [[0xff; 32], [0; 32]] {
            assert!(split(&mut BytesMut::from(&text[..])).is_err());
        }
        let mut bytes = BytesMut::new();
        ToLeader::Beat.encode(&mut bytes);
        assert!(ToLeader::decode(arrive(&bytes), None).is_err(), "before hello");
        let mut bytes = BytesMut::new();
        put(&mut bytes, kind::FETCHES, 0, |out| out.put_slice(&[1; 45]));
        assert!(ToLeader::decode(arrive(&bytes), Some(sender())).is_err(), "bytes left over");
    }
}
