//! The encoder of the release that wrote version 1, for tests.

use super::super::{RECORD_MAGIC as CURRENT_MAGIC, Record, Stamp, encode_record, log};
use super::{BLOCK, Bytes, Kind, LogPoint, RECORD_MAGIC, SegmentImage, Swap, VERSION};
use crate::checkpoint::JournalImage;
use crate::codec::Output;
use crate::types::{Durability, JournalId};

pub(crate) fn record(record: &Record, generation: u64, lsn: u64, payload: &[u8]) -> Vec<u8> {
    let payload = match record.kind {
        Kind::Swap => swap(payload),
        _ => Bytes::copy_from_slice(payload),
    };
    let mut out = Vec::new();
    // The bytes of the group's position were zero, and the checksum did not cover the magic.
    let stamp = Stamp { generation, lsn, group: 0 };
    encode_record(&mut out, record, stamp, payload.len(), crc32c::crc32c(&payload));
    assert_eq!(out[..4], CURRENT_MAGIC.to_le_bytes());
    out[..4].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
    out.put(&payload);
    out
}

fn swap(payload: &[u8]) -> Bytes {
    let swap = Swap::decode(payload).unwrap();
    let mut out = swap.encode();
    out.pop().unwrap(); // `compacted` is the last byte
    out.into()
}

pub(crate) fn file_header(version: u32, generation: u64, size: u64) -> Vec<u8> {
    let mut out = Vec::new();
    out.put(log::MAGIC);
    out.put_u32(version);
    out.put_u32(0);
    out.put_u64(generation);
    out.put_u64(size);
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out.resize(BLOCK as usize, 0);
    out
}

fn segment_image(out: &mut Vec<u8>, image: &SegmentImage) {
    out.put_i64(image.base);
    out.put_i64(image.end);
    out.put_u64(image.len);
    out.put_i64(image.max_timestamp_ms);
    out.put_i64(image.max_timestamp_base);
}

pub(crate) fn checkpoint<'a>(
    version: u32,
    floor: LogPoint,
    images: impl ExactSizeIterator<Item = &'a JournalImage>,
) -> Vec<u8> {
    let mut out = Vec::new();
    out.put(b"MOIMCKP\n");
    out.put_u32(version);
    out.put_u32(0);
    out.put_u64(floor.generation);
    out.put_u64(floor.position);
    out.put_u64(floor.next_lsn);
    out.put_count(images.len());
    for image in images {
        out.put_id(image.id);
        out.put_blob(image.folder.as_bytes());
        out.put_u8(u8::from(image.durability == Durability::Replicated));
        out.put_i64(image.start);
        out.put_count(image.epochs.len());
        for (epoch, start) in &image.epochs {
            out.put_i32(*epoch);
            out.put_i64(*start);
        }
        out.put_count(image.segments.len());
        image.segments.iter().for_each(|segment| segment_image(&mut out, segment));
        match &image.snapshot {
            None => out.put_u8(0),
            Some((offset, bytes)) => {
                out.put_u8(1);
                out.put_i64(*offset);
                out.put_blob(bytes);
            }
        }
    }
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The expected bytes are those of the tests of commit 7e7edbf, the last one that wrote version 1.
#[test]
fn golden_bytes_of_version_1() {
    let id = JournalId { incarnation: 1, part: 2 };
    let record = Record {
        kind: Kind::Frame,
        id,
        base: 3,
        last: 4,
        epoch: 5,
        max_timestamp_ms: 6,
        segment: 7,
        position: 8,
        len: 4,
    };
    assert_eq!(
        hex(&self::record(&record, 9, 10, b"moim")[..96]),
        concat!(
            "4d4d4352f178ab12010000000400000009000000000000000a000000000000000100000000000000",
            "00000000000000000200000005000000030000000000000004000000000000000600000000000000",
            "07000000000000000800000004000000",
        )
    );
    assert_eq!(
        hex(&file_header(VERSION, 3, 4096)[..40]),
        "4d4f494d4c4f470a0100000000000000030000000000000000100000000000003d850bd600000000"
    );
    let mut image = JournalImage::new(id, "queue/a/Partition-2".into(), Durability::Replicated);
    image.start = 3;
    image.epochs = vec![(1, 0), (4, 9)];
    image.segments = vec![SegmentImage {
        base: 0,
        end: 9,
        len: 100,
        max_timestamp_ms: 5,
        max_timestamp_base: 4,
        compacted: true,
    }];
    image.snapshot = Some((7, Bytes::from_static(b"snap")));
    let floor = LogPoint { generation: 8, position: 4096, next_lsn: 77 };
    assert_eq!(
        hex(&checkpoint(VERSION, floor, [&image].into_iter())),
        concat!(
            "4d4f494d434b500a0100000000000000080000000000000000100000000000004d00000000000000",
            "0100000001000000000000000000000000000000020000001300000071756575652f612f50617274",
            "6974696f6e2d32010300000000000000020000000100000000000000000000000400000009000000",
            "00000000010000000000000000000000090000000000000064000000000000000500000000000000",
            "040000000000000001070000000000000004000000736e61708ee86ce7",
        )
    );
}
