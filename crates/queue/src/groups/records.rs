//! The records of `__consumer_offsets`, byte for byte as Kafka's own tools read and write them.
//!
//! A key begins with its version: 0 and 1 name an offset (group, topic, partition), 2 names a group. A value begins
//! with its own version; no value is a tombstone. Written: offsets as value version 3 (1 if the client set its own
//! retention, the only version that has it), groups as version 3. Read: 0 to 3. Bytes from the log are validated,
//! never trusted.

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};

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
}

/// The key of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Key {
    /// A committed offset.
    Offset {
        /// The group id.
        group: Arc<str>,
        /// The topic name.
        topic: Arc<str>,
        /// The partition index.
        partition: i32,
    },
    /// The metadata of a group: its generation and members.
    Group {
        /// The group id.
        group: Arc<str>,
    },
    /// A key version that a newer version wrote; to be skipped.
    Unknown(i16),
}

/// The value of an offset record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OffsetValue {
    /// The next offset to consume.
    pub offset: i64,
    /// The leader epoch of the last record consumed, or -1.
    pub leader_epoch: i32,
    /// The client's metadata.
    pub metadata: String,
    /// Wall time of the commit.
    pub commit_timestamp_ms: i64,
    /// The expiry of the offset, if the client set a retention.
    pub expire_timestamp_ms: Option<i64>,
}

/// The value of a group record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupValue {
    /// `consumer` for consumers; empty for a group that never had members.
    pub protocol_type: Arc<str>,
    /// The generation.
    pub generation: i32,
    /// The selected assignor.
    pub protocol: Option<Arc<str>>,
    /// The member id of the leader.
    pub leader: Option<Arc<str>>,
    /// Wall time of the last change of state, or -1.
    pub state_timestamp_ms: i64,
    /// The members.
    pub members: Vec<MemberValue>,
}

/// A member in the value of a group record.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the fields are those of a member
pub struct MemberValue {
    pub member_id: Arc<str>,
    pub instance_id: Option<Arc<str>>,
    pub client_id: Arc<str>,
    pub client_host: Arc<str>,
    pub rebalance_timeout_ms: i32,
    pub session_timeout_ms: i32,
    pub subscription: Bytes,
    pub assignment: Bytes,
}

/// Encodes the key of an offset.
pub fn offset_key(group: &str, topic: &str, partition: i32) -> Bytes {
    let mut out = BytesMut::with_capacity(10 + group.len() + topic.len());
    out.put_i16(1);
    put_str(&mut out, group);
    put_str(&mut out, topic);
    out.put_i32(partition);
    out.freeze()
}

/// Encodes the key of a group.
pub fn group_key(group: &str) -> Bytes {
    let mut out = BytesMut::with_capacity(4 + group.len());
    out.put_i16(2);
    put_str(&mut out, group);
    out.freeze()
}

/// Encodes the value of an offset.
pub fn offset_value(value: &OffsetValue) -> Bytes {
    let mut out = BytesMut::with_capacity(28 + value.metadata.len());
    match value.expire_timestamp_ms {
        None => {
            out.put_i16(3);
            out.put_i64(value.offset);
            out.put_i32(value.leader_epoch);
            put_str(&mut out, &value.metadata);
            out.put_i64(value.commit_timestamp_ms);
        }
        Some(expire) => {
            out.put_i16(1);
            out.put_i64(value.offset);
            put_str(&mut out, &value.metadata);
            out.put_i64(value.commit_timestamp_ms);
            out.put_i64(expire);
        }
    }
    out.freeze()
}

/// Encodes the value of a group.
pub fn group_value(value: &GroupValue) -> Bytes {
    let mut out = BytesMut::with_capacity(64 + value.members.len() * 256);
    out.put_i16(3);
    put_str(&mut out, &value.protocol_type);
    out.put_i32(value.generation);
    put_opt_str(&mut out, value.protocol.as_deref());
    put_opt_str(&mut out, value.leader.as_deref());
    out.put_i64(value.state_timestamp_ms);
    put_len(&mut out, value.members.len());
    for member in &value.members {
        put_str(&mut out, &member.member_id);
        put_opt_str(&mut out, member.instance_id.as_deref());
        put_str(&mut out, &member.client_id);
        put_str(&mut out, &member.client_host);
        out.put_i32(member.rebalance_timeout_ms);
        out.put_i32(member.session_timeout_ms);
        put_bytes(&mut out, &member.subscription);
        put_bytes(&mut out, &member.assignment);
    }
    out.freeze()
}

/// Decodes a key.
pub fn read_key(mut bytes: Bytes) -> Result<Key, RecordError> {
    let input = &mut bytes;
    match get_i16(input)? {
        0 | 1 => {
            let group = get_str(input)?;
            let topic = get_str(input)?;
            Ok(Key::Offset { group, topic, partition: get_i32(input)? })
        }
        2 => Ok(Key::Group { group: get_str(input)? }),
        other => Ok(Key::Unknown(other)),
    }
}

/// Decodes the value of an offset.
pub fn read_offset_value(mut bytes: Bytes) -> Result<OffsetValue, RecordError> {
    let input = &mut bytes;
    let version = get_i16(input)?;
    if !(0..=3).contains(&version) {
        return Err(RecordError::ValueVersion(version));
    }
    let offset = get_i64(input)?;
    let leader_epoch = if version >= 3 { get_i32(input)? } else { -1 };
    let metadata = get_str(input)?.as_ref().to_owned();
    let commit_timestamp_ms = get_i64(input)?;
    let expire = if version == 1 { get_i64(input)? } else { -1 };
    let expire_timestamp_ms = (expire >= 0).then_some(expire);
    Ok(OffsetValue { offset, leader_epoch, metadata, commit_timestamp_ms, expire_timestamp_ms })
}

/// Decodes the value of a group.
pub fn read_group_value(mut bytes: Bytes) -> Result<GroupValue, RecordError> {
    let input = &mut bytes;
    let version = get_i16(input)?;
    if !(0..=3).contains(&version) {
        return Err(RecordError::ValueVersion(version));
    }
    let protocol_type = get_str(input)?;
    let generation = get_i32(input)?;
    let protocol = get_opt_str(input)?;
    let leader = get_opt_str(input)?;
    let state_timestamp_ms = if version >= 2 { get_i64(input)? } else { -1 };
    let count = usize::try_from(get_i32(input)?).map_err(|_| RecordError::Malformed)?;
    // A member takes more bytes than this, so the count cannot allocate more than the record could hold.
    let mut members = Vec::with_capacity(count.min(input.remaining() / 16));
    for _ in 0..count {
        let member_id = get_str(input)?;
        let instance_id = if version >= 3 { get_opt_str(input)? } else { None };
        let client_id = get_str(input)?;
        let client_host = get_str(input)?;
        let rebalance = if version >= 1 { Some(get_i32(input)?) } else { None };
        let session_timeout_ms = get_i32(input)?;
        members.push(MemberValue {
            member_id,
            instance_id,
            client_id,
            client_host,
            rebalance_timeout_ms: rebalance.unwrap_or(session_timeout_ms),
            session_timeout_ms,
            subscription: get_bytes(input)?,
            assignment: get_bytes(input)?,
        });
    }
    Ok(GroupValue { protocol_type, generation, protocol, leader, state_timestamp_ms, members })
}

/// Strings are validated against this limit where they enter the coordinator.
pub(super) const MAX_STR: usize = i16::MAX as usize;

fn put_str(out: &mut BytesMut, text: &str) {
    assert!(text.len() <= MAX_STR, "string of {} bytes in a record", text.len());
    out.put_u16(text.len() as u16);
    out.put_slice(text.as_bytes());
}

fn put_opt_str(out: &mut BytesMut, text: Option<&str>) {
    match text {
        Some(text) => put_str(out, text),
        None => out.put_i16(-1),
    }
}

fn put_len(out: &mut BytesMut, len: usize) {
    assert!(len <= i32::MAX as usize, "length {len} in a record");
    out.put_u32(len as u32);
}

fn put_bytes(out: &mut BytesMut, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.put_slice(bytes);
}

fn get_i16(input: &mut Bytes) -> Result<i16, RecordError> {
    input.try_get_i16().map_err(|_| RecordError::Short)
}

fn get_i32(input: &mut Bytes) -> Result<i32, RecordError> {
    input.try_get_i32().map_err(|_| RecordError::Short)
}

fn get_i64(input: &mut Bytes) -> Result<i64, RecordError> {
    input.try_get_i64().map_err(|_| RecordError::Short)
}

fn get_opt_str(input: &mut Bytes) -> Result<Option<Arc<str>>, RecordError> {
    let len = get_i16(input)?;
    if len == -1 {
        return Ok(None);
    }
    let len = usize::try_from(len).map_err(|_| RecordError::Malformed)?;
    if input.remaining() < len {
        return Err(RecordError::Short);
    }
    let text = input.split_to(len);
    std::str::from_utf8(&text).map(|text| Some(Arc::from(text))).map_err(|_| RecordError::Malformed)
}

fn get_str(input: &mut Bytes) -> Result<Arc<str>, RecordError> {
    get_opt_str(input)?.ok_or(RecordError::Malformed)
}

/// Copies: a slice would pin the whole batch of the log in memory for as long as the group lives.
fn get_bytes(input: &mut Bytes) -> Result<Bytes, RecordError> {
    let len = usize::try_from(get_i32(input)?).map_err(|_| RecordError::Malformed)?;
    if input.remaining() < len {
        return Err(RecordError::Short);
    }
    Ok(Bytes::copy_from_slice(&input.split_to(len)))
}

#[cfg(test)]
mod tests;
