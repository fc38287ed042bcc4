//! The encoding of everything this crate writes to disk or sends to a peer.
//!
//! Little-endian, length-prefixed. [`Input`] never trusts a length: a value that does not fit is [`Malformed`], and
//! nothing is allocated for it. On-disk formats are pinned by tests; a change needs a new version or a new kind.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use openraft::BasicNode;

use crate::types::{Entry, LogId, Membership, Payload, Proposal, SnapshotMeta, StoredMembership, Vote};

/// Bytes that cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed bytes")]
pub(crate) struct Malformed;

impl From<Malformed> for std::io::Error {
    fn from(error: Malformed) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, error)
    }
}

pub(crate) type Decoded<T> = Result<T, Malformed>;

/// Decodes values from the front of a buffer.
pub(crate) struct Input {
    bytes: Bytes,
}

impl Input {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    fn need(&self, len: usize) -> Decoded<()> {
        if self.bytes.len() < len { Err(Malformed) } else { Ok(()) }
    }

    pub(crate) fn u8(&mut self) -> Decoded<u8> {
        self.need(1)?;
        Ok(self.bytes.get_u8())
    }

    pub(crate) fn flag(&mut self) -> Decoded<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    pub(crate) fn u32(&mut self) -> Decoded<u32> {
        self.need(4)?;
        Ok(self.bytes.get_u32_le())
    }

    pub(crate) fn u64(&mut self) -> Decoded<u64> {
        self.need(8)?;
        Ok(self.bytes.get_u64_le())
    }

    /// A count of items of at least `each` bytes.
    fn count(&mut self, each: usize) -> Decoded<usize> {
        let count = usize::try_from(self.u32()?).map_err(|_| Malformed)?;
        self.need(count.checked_mul(each).ok_or(Malformed)?)?;
        Ok(count)
    }

    pub(crate) fn bytes(&mut self) -> Decoded<Bytes> {
        let len = self.count(1)?;
        Ok(self.bytes.split_to(len))
    }

    pub(crate) fn string(&mut self) -> Decoded<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| Malformed)
    }

    pub(crate) fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.bytes)
    }

    /// Fails if bytes are left.
    pub(crate) fn end(self) -> Decoded<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

pub(crate) fn put_bytes(out: &mut BytesMut, bytes: &[u8]) {
    out.put_u32_le(u32::try_from(bytes.len()).expect("what is written is under 4 GiB"));
    out.put_slice(bytes);
}

fn put_count(out: &mut BytesMut, count: usize) {
    out.put_u32_le(u32::try_from(count).expect("members and entries are counted in 32 bits"));
}

pub(crate) fn put_vote(out: &mut BytesMut, vote: &Vote) {
    out.put_u64_le(vote.leader_id.term);
    out.put_u64_le(vote.leader_id.voted_for);
    out.put_u8(u8::from(vote.committed));
}

pub(crate) fn vote(input: &mut Input) -> Decoded<Vote> {
    let (term, voter, committed) = (input.u64()?, input.u64()?, input.flag()?);
    Ok(if committed { Vote::new_committed(term, voter) } else { Vote::new(term, voter) })
}

pub(crate) fn put_log_id(out: &mut BytesMut, id: &LogId) {
    out.put_u64_le(**id.committed_leader_id());
    out.put_u64_le(id.index);
}

pub(crate) fn log_id(input: &mut Input) -> Decoded<LogId> {
    let (term, index) = (input.u64()?, input.u64()?);
    Ok(LogId::new_term_index(term, index))
}

pub(crate) fn put_option<T>(out: &mut BytesMut, value: Option<&T>, put: fn(&mut BytesMut, &T)) {
    out.put_u8(u8::from(value.is_some()));
    if let Some(value) = value {
        put(out, value);
    }
}

pub(crate) fn option<T>(input: &mut Input, get: fn(&mut Input) -> Decoded<T>) -> Decoded<Option<T>> {
    if input.flag()? { get(input).map(Some) } else { Ok(None) }
}

fn put_membership(out: &mut BytesMut, membership: &Membership) {
    let configs = membership.get_joint_config();
    put_count(out, configs.len());
    for config in configs {
        put_count(out, config.len());
        for id in config {
            out.put_u64_le(*id);
        }
    }
    let nodes: Vec<_> = membership.nodes().collect();
    put_count(out, nodes.len());
    for (id, node) in nodes {
        out.put_u64_le(*id);
        put_bytes(out, node.addr.as_bytes());
    }
}

fn membership(input: &mut Input) -> Decoded<Membership> {
    let configs = input.count(4)?;
    let mut joint = Vec::with_capacity(configs);
    for _ in 0..configs {
        let ids = input.count(8)?;
        let config: BTreeSet<u64> = (0..ids).map(|_| input.u64()).collect::<Decoded<_>>()?;
        joint.push(config);
    }
    let count = input.count(12)?;
    let mut nodes = BTreeMap::new();
    for _ in 0..count {
        let (id, addr) = (input.u64()?, input.string()?);
        nodes.insert(id, BasicNode { addr });
    }
    if joint.is_empty() && nodes.is_empty() {
        return Ok(Membership::default());
    }
    Membership::new(joint, nodes).map_err(|_| Malformed)
}

const BLANK: u8 = 0;
const NORMAL: u8 = 1;
const MEMBERSHIP: u8 = 2;

/// Encodes kind, term, index, content.
pub(crate) fn put_entry(out: &mut BytesMut, entry: &Entry) {
    match &entry.payload {
        Payload::Blank => {
            out.put_u8(BLANK);
            put_log_id(out, &entry.log_id);
        }
        Payload::Normal(proposal) => {
            out.put_u8(NORMAL);
            put_log_id(out, &entry.log_id);
            out.put_slice(&proposal.0);
        }
        Payload::Membership(members) => {
            out.put_u8(MEMBERSHIP);
            put_log_id(out, &entry.log_id);
            put_membership(out, members);
        }
    }
}

pub(crate) fn entry(bytes: Bytes) -> Decoded<Entry> {
    let mut input = Input::new(bytes);
    let kind = input.u8()?;
    let log_id = log_id(&mut input)?;
    let payload = match kind {
        BLANK => Payload::Blank,
        NORMAL => Payload::Normal(Proposal(input.rest())),
        MEMBERSHIP => Payload::Membership(membership(&mut input)?),
        _ => return Err(Malformed),
    };
    input.end()?;
    Ok(Entry { log_id, payload })
}

/// The approximate size of an entry, for budgets.
pub(crate) fn entry_len(entry: &Entry) -> usize {
    const HEADER: usize = 17;
    match &entry.payload {
        Payload::Blank => HEADER,
        Payload::Normal(proposal) => HEADER + proposal.0.len(),
        Payload::Membership(_) => HEADER + 512,
    }
}

pub(crate) fn put_entries(out: &mut BytesMut, entries: &[Entry]) {
    put_count(out, entries.len());
    for entry in entries {
        let at = out.len();
        out.put_u32_le(0);
        put_entry(out, entry);
        let len = u32::try_from(out.len() - at - 4).expect("an entry is under 4 GiB");
        out[at..at + 4].copy_from_slice(&len.to_le_bytes());
    }
}

pub(crate) fn entries(input: &mut Input) -> Decoded<Vec<Entry>> {
    let count = input.count(21)?;
    (0..count).map(|_| entry(input.bytes()?)).collect()
}

pub(crate) fn put_meta(out: &mut BytesMut, meta: &SnapshotMeta) {
    put_option(out, meta.last_log_id.as_ref(), put_log_id);
    put_option(out, meta.last_membership.log_id().as_ref(), put_log_id);
    put_membership(out, meta.last_membership.membership());
}

pub(crate) fn meta(input: &mut Input) -> Decoded<SnapshotMeta> {
    let last_log_id = option(input, log_id)?;
    let at = option(input, log_id)?;
    let last_membership = StoredMembership::new(at, membership(input)?);
    Ok(SnapshotMeta { last_log_id, last_membership })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Entry> {
        let at = LogId::new_term_index;
        let nodes = BTreeMap::from([(1, BasicNode::new("a:1")), (2, BasicNode::new("b:2"))]);
        let members = Membership::new(vec![BTreeSet::from([1]), BTreeSet::from([1, 2])], nodes).unwrap();
        vec![
            Entry { log_id: at(1, 7), payload: Payload::Blank },
            Entry { log_id: at(2, 8), payload: Payload::Normal(Proposal(Bytes::from_static(b"put"))) },
            Entry { log_id: at(3, 9), payload: Payload::Membership(members) },
        ]
    }

    #[test]
    fn entries_read_back_and_no_prefix_of_them_is_taken() {
        let mut out = BytesMut::new();
        put_entries(&mut out, &samples());
        let whole = out.freeze();
        let mut input = Input::new(whole.clone());
        assert_eq!(entries(&mut input).unwrap(), samples());
        input.end().unwrap();
        for len in 0..whole.len() {
            assert!(entries(&mut Input::new(whole.slice(..len))).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_count_larger_than_its_bytes_is_refused_before_anything_is_allocated() {
        let mut out = BytesMut::new();
        out.put_u32_le(u32::MAX);
        assert!(entries(&mut Input::new(out.freeze())).is_err());
    }

    #[test]
    fn an_entry_has_not_changed_on_disk() {
        let hex = |entry: &Entry| {
            let mut out = BytesMut::new();
            put_entry(&mut out, entry);
            out.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let [blank, normal, members] = &samples()[..] else { panic!("three samples") };
        assert_eq!(hex(blank), "0001000000000000000700000000000000");
        assert_eq!(hex(normal), "0102000000000000000800000000000000707574");
        let ids = "010000000100000000000000".to_owned() + "0200000001000000000000000200000000000000";
        let nodes = "010000000000000003000000613a31".to_owned() + "020000000000000003000000623a32";
        assert_eq!(
            hex(members),
            format!("0203000000000000000900000000000000{}{ids}{}{nodes}", "02000000", "02000000")
        );
    }
}
