//! The records inside a batch: one walker that everything else here is built on.
//!
//! Invariant: a [`RecordView`] that exists was checked to its last byte: every length lies within its record, its
//! headers parse, and nothing is left over. The walk allocates nothing; decompression goes through one buffer per thread
//! that is kept between batches while it is small. Nothing here checks a CRC.

use std::cell::Cell;
use std::ops::ControlFlow;

use super::{BatchHeader, HEADER_LEN, RecordsError, varint};
use crate::compression::{self, Compression};

/// The fewest bytes a record takes: seven fields of one byte.
pub(super) const MIN_RECORD_LEN: usize = 7;

/// A thread keeps its decompression buffer up to this size; a larger one is returned after its batch.
const SCRATCH_KEPT: usize = 1 << 20;

thread_local! {
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// One record, borrowed from its batch.
#[derive(Clone, Debug)]
pub struct RecordView<'a> {
    /// Unused by the protocol so far.
    pub attributes: i8,
    /// Adds to the base timestamp of the batch.
    pub timestamp_delta: i64,
    /// Adds to the base offset of the batch.
    pub offset_delta: i32,
    /// The key; absent is not empty.
    pub key: Option<&'a [u8]>,
    /// The value; absent marks a deletion in a compacted topic.
    pub value: Option<&'a [u8]>,
    /// The headers, in the order they were sent; a name may repeat.
    pub headers: Headers<'a>,
}

/// The headers of a record: name and value, in order.
#[derive(Clone, Debug)]
pub struct Headers<'a> {
    /// Invariant: parses as exactly `left` headers; checked when the record was.
    bytes: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Headers<'a> {
    type Item = (&'a [u8], Option<&'a [u8]>);

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        parse_header(&mut self.bytes)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Headers<'_> {}

/// Calls `f` with each record of a batch until it breaks, decompressing to at most `limit` bytes when needed.
pub fn for_each_record(
    batch: &[u8],
    limit: usize,
    f: &mut dyn FnMut(RecordView<'_>) -> ControlFlow<()>,
) -> Result<BatchHeader, RecordsError> {
    let header = BatchHeader::read(batch)?;
    with_payload(&header, batch, limit, |payload| {
        walk(payload, header.records_count, |record, _| match f(record) {
            ControlFlow::Continue(()) => Ok(ControlFlow::Continue(())),
            ControlFlow::Break(()) => Ok(ControlFlow::Break(())),
        })
    })?;
    Ok(header)
}

/// Calls `f` with every record and its bytes as they stand in `payload`, until it breaks or fails. Without a break the
/// payload must hold exactly `count` records.
#[inline(always)]
pub(super) fn walk<'a>(
    mut payload: &'a [u8],
    count: i32,
    mut f: impl FnMut(RecordView<'a>, &'a [u8]) -> Result<ControlFlow<()>, RecordsError>,
) -> Result<(), RecordsError> {
    for _ in 0..count {
        if payload.is_empty() {
            return Err(RecordsError::Count);
        }
        let before = payload;
        let record =
            parse_record(&mut payload).ok_or(RecordsError::Invalid("a record's fields overrun it"))?;
        let raw = &before[..before.len() - payload.len()];
        if f(record, raw)?.is_break() {
            return Ok(());
        }
    }
    if payload.is_empty() { Ok(()) } else { Err(RecordsError::Count) }
}

/// Hands `f` the records of a batch, uncompressed. The scratch buffer is taken, not borrowed: `f` may come back here
/// with another batch.
pub(super) fn with_payload<R>(
    header: &BatchHeader,
    batch: &[u8],
    limit: usize,
    f: impl FnOnce(&[u8]) -> Result<R, RecordsError>,
) -> Result<R, RecordsError> {
    let payload = payload_of(header, batch)?;
    let codec = header.compression()?;
    if codec == Compression::None {
        return f(payload);
    }
    let mut scratch = SCRATCH.take();
    scratch.clear();
    let result = compression::decompress_into(codec, payload, &mut scratch, limit)
        .map_err(RecordsError::from)
        .and_then(|()| f(&scratch));
    if scratch.capacity() <= SCRATCH_KEPT {
        SCRATCH.set(scratch);
    }
    result
}

/// The bytes after the header, compressed as they are.
pub(super) fn payload_of<'a>(header: &BatchHeader, batch: &'a [u8]) -> Result<&'a [u8], RecordsError> {
    batch.get(HEADER_LEN..header.total_len()).ok_or(RecordsError::TooShort)
}

#[inline(always)]
fn parse_record<'a>(input: &mut &'a [u8]) -> Option<RecordView<'a>> {
    let length = usize::try_from(varint::read_i32(input)?).ok()?;
    let (mut body, rest) = input.split_at_checked(length)?;
    *input = rest;
    let (attributes, after) = body.split_first()?;
    body = after;
    let timestamp_delta = varint::read_i64(&mut body)?;
    let offset_delta = varint::read_i32(&mut body)?;
    let key = parse_nullable(&mut body)?;
    let value = parse_nullable(&mut body)?;
    let left = usize::try_from(varint::read_i32(&mut body)?).ok()?;
    if left != 0 || !body.is_empty() {
        check_headers(body, left)?;
    }
    Some(RecordView {
        attributes: *attributes as i8,
        timestamp_delta,
        offset_delta,
        key,
        value,
        headers: Headers { bytes: body, left },
    })
}

/// A length of -1 is absent; any other negative length is an error.
#[inline(always)]
fn parse_nullable<'a>(input: &mut &'a [u8]) -> Option<Option<&'a [u8]>> {
    let length = varint::read_i32(input)?;
    if length == -1 {
        return Some(None);
    }
    let (bytes, rest) = input.split_at_checked(usize::try_from(length).ok()?)?;
    *input = rest;
    Some(Some(bytes))
}

fn parse_header<'a>(input: &mut &'a [u8]) -> Option<(&'a [u8], Option<&'a [u8]>)> {
    let name = parse_nullable(input)??;
    Some((name, parse_nullable(input)?))
}

/// Exactly `count` headers and nothing after them. A count beyond what the bytes can hold fails at the first missing one.
fn check_headers(mut bytes: &[u8], count: usize) -> Option<()> {
    for _ in 0..count {
        parse_header(&mut bytes)?;
    }
    bytes.is_empty().then_some(())
}
