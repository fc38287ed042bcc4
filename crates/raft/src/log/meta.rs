//! The log metadata that must outlive the entries: the owning voter, the vote, the last purged log id.
//!
//! It lives in a journal of its own beside the log's, in the same commit log. Every record holds all of it, so the
//! newest complete record is the state, and older ones are trimmed.
//!
//! Invariant: a `write` is on stable storage when it returns. The caller has no other write of its group in flight
//! meanwhile, which keeps votes and appends in order.

use std::io;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use moim_journal::{Append, AppendError, Journal, PlainFraming, ReadError};

use crate::codec::{self, Input, Malformed};
use crate::types::{LogId, Vote, VoterId};

const VERSION: u8 = 1;
/// Old records are trimmed once there are this many.
const TRIM_AFTER: i64 = 256;

/// The metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) voter: VoterId,
    pub(super) vote: Option<Vote>,
    /// The last purged log id.
    pub(super) purged: Option<LogId>,
}

fn encode(facts: &Facts) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u8(VERSION);
    out.put_u64_le(facts.voter.0);
    codec::put_option(&mut out, facts.vote.as_ref(), codec::put_vote);
    codec::put_option(&mut out, facts.purged.as_ref(), codec::put_log_id);
    out.freeze()
}

fn decode(bytes: Bytes) -> Result<Facts, Malformed> {
    let mut input = Input::new(bytes);
    if input.u8()? != VERSION {
        return Err(Malformed);
    }
    let voter = VoterId(input.u64()?);
    let vote = codec::option(&mut input, codec::vote)?;
    let purged = codec::option(&mut input, codec::log_id)?;
    input.end()?;
    Ok(Facts { voter, vote, purged })
}

/// The newest record; `None` in a journal that was never written. Every record is verified: damage that is found only later
/// would stop the core when it writes its next vote.
pub(super) fn read(journal: &Journal) -> Result<Option<Facts>, String> {
    let end = journal.end();
    if end == journal.start() {
        return if end == 0 { Ok(None) } else { Err("the vote is gone".to_owned()) };
    }
    let mut newest = None;
    journal
        .for_each_frame(journal.start(), end, &mut |_, frame| {
            newest = Some(decode(Bytes::copy_from_slice(PlainFraming::payload(frame))));
            true
        })
        .map_err(|error: ReadError| error.to_string())?;
    match newest {
        Some(Ok(facts)) => Ok(Some(facts)),
        Some(Err(error)) => Err(format!("the vote: {error}")),
        None => Err("the vote is gone".to_owned()),
    }
}

/// Appends a record; durable once the journal's durable end has passed the returned offset.
pub(super) fn append(journal: &Journal, facts: &Facts) -> Result<i64, AppendError> {
    let offset = journal.end();
    let frame = PlainFraming::encode(offset, offset, 0, 0, &encode(facts));
    let append =
        Append { base: offset, last: offset, epoch: 0, max_timestamp_ms: 0, prefix: &[], body: &frame };
    journal.append(append)?;
    Ok(offset + 1)
}

/// Trims records that newer durable ones replace. Blocks for a sync if there is something to trim.
pub(super) fn maybe_trim(journal: &Arc<Journal>) -> io::Result<()> {
    let keep = journal.durable_end() - 1;
    if keep - journal.start() < TRIM_AFTER {
        return Ok(());
    }
    journal.set_start(keep).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_facts_have_not_changed_on_disk() {
        let facts = Facts {
            voter: VoterId(5),
            vote: Some(Vote::new_committed(2, 3)),
            purged: Some(LogId::new_term_index(1, 9)),
        };
        let bytes = encode(&facts);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let vote = "010200000000000000030000000000000001";
        assert_eq!(hex, format!("010500000000000000{vote}0101000000000000000900000000000000"));
        assert_eq!(decode(bytes.clone()), Ok(facts));
        for len in 0..bytes.len() {
            assert!(decode(bytes.slice(..len)).is_err(), "{len} bytes");
        }
    }
}
