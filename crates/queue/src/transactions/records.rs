//! The records of `__transaction_state`, as Kafka's own tools read and write them.
//!
//! A key is its version (0) and the transactional id. A value is its version and the fields of [`Transaction`]; no
//! value is a tombstone. Written: version 1. Read: 0 and 1. One field is ours: the tag [`TAG_LAST_EPOCH`], far from
//! Kafka's, which readers that do not know it skip; without it a producer whose InitProducerId response was lost in a
//! crash would be fenced by its own retry. Bytes from the log are validated, never trusted, and nothing is allocated
//! by a length that the bytes do not hold.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::api::TopicPartition;
use super::state::{NONE, State, Transaction, by_topic};

const KEY_VERSION: i16 = 0;
const VALUE_VERSION: i16 = 1;
const TAG_PREVIOUS_ID: u32 = 0;
const TAG_NEXT_ID: u32 = 1;
const TAG_VERSION: u32 = 2;
const TAG_LAST_EPOCH: u32 = 10_000;
/// The transaction version in which every transaction has its own epoch.
const EPOCH_PER_TRANSACTION: i16 = 2;

/// An undecodable record.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The bytes end before the record does.
    #[error("record truncated")]
    Short,
    /// A length or a string is invalid.
    #[error("record with an invalid length or string")]
    Malformed,
    /// An unknown value version.
    #[error("unknown value version {0}")]
    ValueVersion(i16),
    /// A state that is never written.
    #[error("invalid transaction state {0} in a record")]
    State(i8),
}

/// Encodes the key of a transactional id.
pub fn encode_key(transactional_id: &str) -> Bytes {
    let mut out = BytesMut::with_capacity(4 + transactional_id.len());
    out.put_i16(KEY_VERSION);
    // Ids come from requests, whose strings are no longer than this.
    out.put_u16(u16::try_from(transactional_id.len()).unwrap_or(u16::MAX));
    out.put_slice(transactional_id.as_bytes());
    out.freeze()
}

/// The transactional id of a key; `None` for a key version that a newer version wrote.
pub fn decode_key(mut key: &[u8]) -> Result<Option<Arc<str>>, RecordError> {
    let version = key.try_get_i16().map_err(|_| RecordError::Short)?;
    if version != KEY_VERSION {
        return Ok(None);
    }
    let len = key.try_get_i16().map_err(|_| RecordError::Short)?;
    let len = usize::try_from(len).map_err(|_| RecordError::Malformed)?;
    Ok(Some(text(&mut key, len)?))
}

/// Encodes the value of a transactional id.
pub fn encode_value(txn: &Transaction) -> Bytes {
    let mut out = BytesMut::with_capacity(64 + txn.partitions.len() * 8);
    out.put_i16(VALUE_VERSION);
    out.put_i64(txn.producer_id);
    out.put_i16(txn.epoch);
    out.put_i32(txn.timeout_ms);
    out.put_i8(txn.state as i8);
    if txn.state == State::Empty {
        put_varint(&mut out, 0); // null, as Kafka writes it
    } else {
        let topics = by_topic(&txn.partitions);
        put_length(&mut out, topics.len());
        for (topic, partitions) in topics {
            put_length(&mut out, topic.len());
            out.put_slice(topic.as_bytes());
            put_length(&mut out, partitions.len());
            partitions.iter().for_each(|p| out.put_i32(*p));
            put_varint(&mut out, 0);
        }
    }
    out.put_i64(txn.updated_ms);
    out.put_i64(txn.start_ms);
    let ids = [(TAG_PREVIOUS_ID, txn.previous_id), (TAG_NEXT_ID, txn.next_id)];
    let ids = ids.into_iter().filter(|(_, id)| *id != -1);
    let version = if txn.epoch_per_transaction { EPOCH_PER_TRANSACTION } else { 0 };
    let shorts = [(TAG_VERSION, version, 0), (TAG_LAST_EPOCH, txn.last_epoch, NONE)];
    let shorts = shorts.into_iter().filter(|(_, value, default)| value != default);
    put_varint(&mut out, u32::try_from(ids.clone().count() + shorts.clone().count()).unwrap_or(0));
    for (tag, id) in ids {
        put_varint(&mut out, tag);
        put_varint(&mut out, 8);
        out.put_i64(id);
    }
    for (tag, value, _) in shorts {
        put_varint(&mut out, tag);
        put_varint(&mut out, 2);
        out.put_i16(value);
    }
    out.freeze()
}

/// Decodes a value.
pub fn decode_value(value: &[u8]) -> Result<Transaction, RecordError> {
    let mut reader = Reader { left: value, flexible: false };
    let version = reader.i16()?;
    if !(0..=VALUE_VERSION).contains(&version) {
        return Err(RecordError::ValueVersion(version));
    }
    reader.flexible = version >= 1;
    let mut txn = Transaction::new(reader.i64()?, 0, 0);
    txn.epoch = reader.i16()?;
    txn.timeout_ms = reader.i32()?;
    let state = reader.left.try_get_i8().map_err(|_| RecordError::Short)?;
    let written = |s: &State| *s as i8 == state && !matches!(s, State::Dead | State::PrepareEpochFence);
    txn.state = State::ALL.into_iter().find(written).ok_or(RecordError::State(state))?;
    txn.partitions = reader.partitions()?;
    txn.updated_ms = reader.i64()?;
    txn.start_ms = reader.i64()?;
    reader.tags(|tag, mut bytes| {
        match tag {
            TAG_PREVIOUS_ID => txn.previous_id = bytes.try_get_i64().map_err(|_| RecordError::Short)?,
            TAG_NEXT_ID => txn.next_id = bytes.try_get_i64().map_err(|_| RecordError::Short)?,
            TAG_VERSION => {
                let version = bytes.try_get_i16().map_err(|_| RecordError::Short)?;
                txn.epoch_per_transaction = version >= EPOCH_PER_TRANSACTION;
            }
            TAG_LAST_EPOCH => txn.last_epoch = bytes.try_get_i16().map_err(|_| RecordError::Short)?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(txn)
}

struct Reader<'a> {
    left: &'a [u8],
    flexible: bool,
}

impl<'a> Reader<'a> {
    fn i16(&mut self) -> Result<i16, RecordError> {
        self.left.try_get_i16().map_err(|_| RecordError::Short)
    }

    fn i32(&mut self) -> Result<i32, RecordError> {
        self.left.try_get_i32().map_err(|_| RecordError::Short)
    }

    fn i64(&mut self) -> Result<i64, RecordError> {
        self.left.try_get_i64().map_err(|_| RecordError::Short)
    }

    fn varint(&mut self) -> Result<u32, RecordError> {
        let mut value = 0u32;
        for shift in (0..35).step_by(7) {
            let byte = self.left.try_get_u8().map_err(|_| RecordError::Short)?;
            let bits = u32::from(byte & 0x7f);
            if shift == 28 && bits > 0x0f {
                return Err(RecordError::Malformed);
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(RecordError::Malformed)
    }

    /// The length of an array, or `None` for null.
    fn array(&mut self) -> Result<Option<usize>, RecordError> {
        if self.flexible {
            return Ok(self.varint()?.checked_sub(1).map(|n| n as usize));
        }
        match self.i32()? {
            -1 => Ok(None),
            len => usize::try_from(len).map(Some).map_err(|_| RecordError::Malformed),
        }
    }

    fn string(&mut self) -> Result<Arc<str>, RecordError> {
        let len = if self.flexible {
            self.varint()?.checked_sub(1).map(|n| n as usize)
        } else {
            usize::try_from(self.i16()?).ok()
        };
        text(&mut self.left, len.ok_or(RecordError::Malformed)?)
    }

    fn partitions(&mut self) -> Result<BTreeSet<TopicPartition>, RecordError> {
        let mut all = BTreeSet::new();
        for _ in 0..self.array()?.unwrap_or(0) {
            let topic = self.string()?;
            for _ in 0..self.array()?.ok_or(RecordError::Malformed)? {
                all.insert(TopicPartition { topic: topic.clone(), partition: self.i32()? });
            }
            self.tags(|_, _| Ok(()))?;
        }
        Ok(all)
    }

    fn tags(
        &mut self,
        mut each: impl FnMut(u32, &'a [u8]) -> Result<(), RecordError>,
    ) -> Result<(), RecordError> {
        if !self.flexible {
            return Ok(());
        }
        for _ in 0..self.varint()? {
            let (tag, len) = (self.varint()?, self.varint()? as usize);
            let (bytes, rest) = self.left.split_at_checked(len).ok_or(RecordError::Short)?;
            self.left = rest;
            each(tag, bytes)?;
        }
        Ok(())
    }
}

fn text(left: &mut &[u8], len: usize) -> Result<Arc<str>, RecordError> {
    let (bytes, rest) = left.split_at_checked(len).ok_or(RecordError::Short)?;
    *left = rest;
    std::str::from_utf8(bytes).map(Arc::from).map_err(|_| RecordError::Malformed)
}

fn put_varint(out: &mut BytesMut, mut value: u32) {
    while value >= 0x80 {
        out.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

/// Lengths are encoded as one more than they are, so that 0 means null.
fn put_length(out: &mut BytesMut, len: usize) {
    put_varint(out, u32::try_from(len + 1).unwrap_or(u32::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Transaction {
        let mut txn = Transaction::new(0x0102, 60_000, 0x20);
        txn.epoch = 3;
        txn.state = State::Ongoing;
        txn.partitions = [("a", 0), ("a", 7), ("b", 1)].map(|(t, p)| TopicPartition::new(t, p)).into();
        txn.start_ms = 0x10;
        txn
    }

    #[test]
    fn records_are_kafkas_bytes() {
        assert_eq!(encode_key("tx").as_ref(), b"\0\0\0\x02tx");
        let value = encode_value(&sample());
        let expected = [
            &[0, 1][..],
            &0x0102i64.to_be_bytes(),
            &[0, 3],
            &60_000i32.to_be_bytes(),
            &[1],
            &[3, 2, b'a', 3, 0, 0, 0, 0, 0, 0, 0, 7, 0, 2, b'b', 2, 0, 0, 0, 1, 0],
            &0x20i64.to_be_bytes(),
            &0x10i64.to_be_bytes(),
            &[0],
        ]
        .concat();
        assert_eq!(value.as_ref(), expected);
    }

    #[test]
    fn version_0_is_read() {
        let bytes = [
            &[0, 0][..],
            &0x0102i64.to_be_bytes(),
            &[0, 3],
            &60_000i32.to_be_bytes(),
            &[1],
            &[0, 0, 0, 2],
            &[0, 1, b'a', 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7],
            &[0, 1, b'b', 0, 0, 0, 1, 0, 0, 0, 1],
            &0x20i64.to_be_bytes(),
            &0x10i64.to_be_bytes(),
        ]
        .concat();
        assert_eq!(decode_value(&bytes), Ok(sample()));
    }

    #[test]
    fn round_trip_keeps_tags_and_every_state() {
        for state in State::ALL {
            let mut txn = sample();
            txn.state = state;
            if !state.is_running() {
                txn.partitions.clear();
            }
            txn.previous_id = 77;
            txn.next_id = 78;
            txn.epoch_per_transaction = true;
            txn.last_epoch = 2;
            let read = decode_value(&encode_value(&txn));
            match state {
                State::Dead | State::PrepareEpochFence => {
                    assert_eq!(read, Err(RecordError::State(state as i8)));
                }
                _ => assert_eq!(read, Ok(txn)),
            }
        }
        assert_eq!(decode_key(&encode_key("täx")), Ok(Some("täx".into())));
        assert_eq!(decode_key(&[0, 9]), Ok(None));
        assert_eq!(decode_value(&[0, 2]), Err(RecordError::ValueVersion(2)));
    }

    #[test]
    fn truncated_or_corrupted_values_never_panic() {
        let mut txn = sample();
        txn.previous_id = 1;
        let value = encode_value(&txn);
        for cut in 0..value.len() {
            assert!(decode_value(&value[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..value.len() {
            for bit in 0..8 {
                let mut bytes = value.to_vec();
                bytes[at] ^= 1 << bit;
                let _ = decode_value(&bytes);
            }
        }
        let huge = [&value[..17], &[0xff, 0xff, 0xff, 0xff, 0x0f]].concat();
        assert_eq!(decode_value(&huge), Err(RecordError::Short));
    }
}
