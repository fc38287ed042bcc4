//! The small messages of replication as bytes, for the peer transport's service 3: reports, questions about a log's end,
//! parts of snapshots. Records do not travel here (docs/decisions/0010-replication-over-fetch.md).
//!
//! Big-endian, one byte of kind and one of version first. Bytes come from outside: a count is believed only as far as
//! the bytes behind it reach, and what is left over is an error.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use moim_base::{BrokerId, LeaderEpoch, Offset, TopicId};

use crate::controller::LogEnd;
use crate::machine::{Chunk, SnapshotFetch};
use crate::message::{Report, Sender};
use crate::types::{BrokerEpoch, DirectoryId, PartitionId};

const VERSION: u8 = 1;

/// What a node asks or tells another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerRequest {
    /// How far the sender's disk is, for partitions the receiver leads. The reports of one message are of one sender.
    Reports {
        /// Who reports.
        from: Sender,
        /// Partition by partition.
        reports: Vec<(PartitionId, Report)>,
    },
    /// How far the receiver's logs go.
    LogEnds(Vec<PartitionId>),
    /// The next part of a snapshot.
    Snapshot(PartitionId, SnapshotFetch),
}

/// What it is answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerReply {
    /// Reports were taken, or are of no use.
    Taken,
    /// How far the logs go, in this run; none for a partition that is not there.
    LogEnds {
        /// The run that answers.
        run: BrokerEpoch,
        /// Partition by partition.
        ends: Vec<(PartitionId, Option<LogEnd>)>,
    },
    /// A part of a snapshot; none when there is no snapshot here, or not in that leadership.
    Chunk(Option<Chunk>),
}

/// Bytes that are no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a message of replication, or of a newer version")]
pub struct WireError;

impl PeerRequest {
    /// As bytes.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Self::Reports { from, reports } => {
                begin(&mut out, 1);
                put_sender(&mut out, from);
                put_count(&mut out, reports.len());
                for (partition, report) in reports {
                    put_partition(&mut out, *partition);
                    out.put_i32(report.leader_epoch.0);
                    out.put_i64(report.written.0);
                    out.put_i64(report.durable.0);
                }
            }
            Self::LogEnds(partitions) => {
                begin(&mut out, 2);
                put_count(&mut out, partitions.len());
                partitions.iter().for_each(|partition| put_partition(&mut out, *partition));
            }
            Self::Snapshot(partition, fetch) => {
                begin(&mut out, 3);
                put_partition(&mut out, *partition);
                put_sender(&mut out, &fetch.from);
                out.put_i32(fetch.leader_epoch.0);
                out.put_i64(fetch.snapshot.map_or(-1, |end| end.0));
                out.put_u64(fetch.position);
            }
        }
        out.freeze()
    }

    /// From bytes.
    pub fn decode(bytes: Bytes) -> Result<Self, WireError> {
        let mut input = Input(bytes);
        let request = match input.begin()? {
            1 => {
                let from = input.sender()?;
                let reports = input.list(40, |input| {
                    let partition = input.partition()?;
                    let leader_epoch = LeaderEpoch(input.take(4)?.get_i32());
                    let (written, durable) = (input.offset()?, input.offset()?);
                    Ok((partition, Report { from, leader_epoch, written, durable }))
                })?;
                Self::Reports { from, reports }
            }
            2 => Self::LogEnds(input.list(20, Input::partition)?),
            3 => {
                let partition = input.partition()?;
                let from = input.sender()?;
                let leader_epoch = LeaderEpoch(input.take(4)?.get_i32());
                let snapshot = Some(input.offset()?).filter(|end| end.0 >= 0);
                let position = input.take(8)?.get_u64();
                Self::Snapshot(partition, SnapshotFetch { from, leader_epoch, snapshot, position })
            }
            _ => return Err(WireError),
        };
        input.end(request)
    }
}

impl PeerReply {
    /// As bytes.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Self::Taken => begin(&mut out, 1),
            Self::LogEnds { run, ends } => {
                begin(&mut out, 2);
                out.put_i64(run.0);
                put_count(&mut out, ends.len());
                for (partition, end) in ends {
                    put_partition(&mut out, *partition);
                    out.put_i32(end.map_or(-1, |end| end.epoch.0));
                    out.put_i64(end.map_or(-1, |end| end.end.0));
                }
            }
            Self::Chunk(None) => begin(&mut out, 3),
            Self::Chunk(Some(chunk)) => {
                begin(&mut out, 4);
                out.put_i64(chunk.end.0);
                out.put_i32(chunk.last_epoch.0);
                out.put_u64(chunk.total);
                out.put_u64(chunk.position);
                out.put_slice(&chunk.bytes);
            }
        }
        out.freeze()
    }

    /// From bytes.
    pub fn decode(bytes: Bytes) -> Result<Self, WireError> {
        let mut input = Input(bytes);
        let reply = match input.begin()? {
            1 => Self::Taken,
            2 => {
                let run = BrokerEpoch(input.take(8)?.get_i64());
                let ends = input.list(32, |input| {
                    let partition = input.partition()?;
                    let epoch = LeaderEpoch(input.take(4)?.get_i32());
                    let end = input.offset()?;
                    Ok((partition, (end.0 >= 0).then_some(LogEnd { epoch, end })))
                })?;
                Self::LogEnds { run, ends }
            }
            3 => Self::Chunk(None),
            4 => {
                let end = input.offset()?;
                let last_epoch = LeaderEpoch(input.take(4)?.get_i32());
                let (total, position) = (input.take(8)?.get_u64(), input.take(8)?.get_u64());
                let bytes = input.0.split_off(0);
                Self::Chunk(Some(Chunk { end, last_epoch, total, position, bytes }))
            }
            _ => return Err(WireError),
        };
        input.end(reply)
    }
}

fn begin(out: &mut BytesMut, kind: u8) {
    out.put_u8(kind);
    out.put_u8(VERSION);
}

fn put_count(out: &mut BytesMut, count: usize) {
    out.put_u32(u32::try_from(count).expect("fewer partitions than 2^32"));
}

fn put_partition(out: &mut BytesMut, id: PartitionId) {
    out.put_slice(&id.topic.to_bytes());
    out.put_u32(id.index);
}

fn put_sender(out: &mut BytesMut, sender: &Sender) {
    out.put_i32(sender.node.0);
    out.put_i64(sender.epoch.0);
    out.put_u64(sender.directory.0);
}

/// Bytes that are checked before they are read.
struct Input(Bytes);

impl Input {
    fn begin(&mut self) -> Result<u8, WireError> {
        let mut head = self.take(2)?;
        let kind = head.get_u8();
        if head.get_u8() == VERSION { Ok(kind) } else { Err(WireError) }
    }

    fn take(&mut self, len: usize) -> Result<Bytes, WireError> {
        if self.0.len() < len { Err(WireError) } else { Ok(self.0.split_to(len)) }
    }

    fn offset(&mut self) -> Result<Offset, WireError> {
        Ok(Offset(self.take(8)?.get_i64()))
    }

    fn partition(&mut self) -> Result<PartitionId, WireError> {
        let mut bytes = self.take(20)?;
        Ok(PartitionId { topic: TopicId(bytes.get_u128()), index: bytes.get_u32() })
    }

    fn sender(&mut self) -> Result<Sender, WireError> {
        let mut bytes = self.take(20)?;
        Ok(Sender {
            node: BrokerId(bytes.get_i32()),
            epoch: BrokerEpoch(bytes.get_i64()),
            directory: DirectoryId(bytes.get_u64()),
        })
    }

    /// A list whose items have `size` bytes each.
    fn list<T>(
        &mut self,
        size: usize,
        item: impl Fn(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.take(4)?.get_u32() as usize;
        if count > self.0.len() / size {
            return Err(WireError);
        }
        (0..count).map(|_| item(self)).collect()
    }

    fn end<T>(self, value: T) -> Result<T, WireError> {
        if self.0.is_empty() { Ok(value) } else { Err(WireError) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> (Vec<PeerRequest>, Vec<PeerReply>) {
        let id = |index| PartitionId { topic: TopicId(7), index };
        let from = Sender { node: BrokerId(2), epoch: BrokerEpoch(99), directory: DirectoryId(4) };
        let leader_epoch = LeaderEpoch(3);
        let report = Report { from, leader_epoch, written: Offset(20), durable: Offset(15) };
        let fetch = |snapshot| SnapshotFetch { from, leader_epoch, snapshot, position: 12 };
        let end = LogEnd { epoch: LeaderEpoch(2), end: Offset(40) };
        let chunk = Chunk {
            end: Offset(50),
            last_epoch: LeaderEpoch(3),
            total: 100,
            position: 10,
            bytes: Bytes::from_static(b"part"),
        };
        let requests = vec![
            PeerRequest::Reports { from, reports: vec![(id(0), report), (id(9), report)] },
            PeerRequest::Reports { from, reports: vec![] },
            PeerRequest::LogEnds(vec![id(1), id(2)]),
            PeerRequest::Snapshot(id(1), fetch(None)),
            PeerRequest::Snapshot(id(1), fetch(Some(Offset(50)))),
        ];
        let replies = vec![
            PeerReply::Taken,
            PeerReply::LogEnds { run: BrokerEpoch(9), ends: vec![(id(1), Some(end)), (id(2), None)] },
            PeerReply::Chunk(None),
            PeerReply::Chunk(Some(chunk)),
        ];
        (requests, replies)
    }

    #[test]
    fn messages_survive_the_way_there_and_back() {
        let (requests, replies) = samples();
        for request in requests {
            assert_eq!(PeerRequest::decode(request.encode()), Ok(request));
        }
        for reply in replies {
            assert_eq!(PeerReply::decode(reply.encode()), Ok(reply));
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        let (requests, _) = samples();
        for request in requests {
            let bytes = request.encode();
            for len in 0..bytes.len() {
                assert_eq!(
                    PeerRequest::decode(bytes.slice(..len)),
                    Err(WireError),
                    "{request:?} cut at {len}"
                );
            }
            let longer = Bytes::from([&bytes[..], &[0]].concat());
            assert_eq!(PeerRequest::decode(longer), Err(WireError));
        }
        let huge = Bytes::from_static(&[2, 1, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(PeerRequest::decode(huge), Err(WireError), "nothing is allocated for it");
        assert_eq!(PeerReply::decode(Bytes::from_static(&[1, 2])), Err(WireError), "a newer version");
    }
}
