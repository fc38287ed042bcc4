//! The RPCs between members of a group, and their encoding.
//!
//! A request is a kind and its fields. A reply is a status and, if the status is "done", the fields of that reply
//! kind; the caller knows which kind it expects. Any other input from a peer is [`Malformed`], never a panic.

use bytes::{BufMut, Bytes, BytesMut};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderError, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};

use crate::codec::{self, Decoded, Input, Malformed};
use crate::types::{Types, Vote};

const APPEND: u8 = 1;
const VOTE: u8 = 2;
const PRE_VOTE: u8 = 3;
const SNAPSHOT: u8 = 4;
const TRANSFER: u8 = 5;
const READ_INDEX: u8 = 6;

/// A chunk of a snapshot file in transfer to a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotPiece {
    pub(crate) vote: Vote,
    /// The transfer id: chunks of two transfers never mix.
    pub(crate) transfer: u64,
    /// The position in the file.
    pub(crate) at: u64,
    /// True for the last chunk.
    pub(crate) last: bool,
    pub(crate) bytes: Bytes,
}

/// A request.
#[derive(Debug)]
pub(crate) enum Request {
    Append(AppendEntriesRequest<Types>),
    Vote(VoteRequest<Types>),
    PreVote(VoteRequest<Types>),
    Snapshot(SnapshotPiece),
    Transfer(TransferLeaderRequest<Types>),
    ReadIndex,
}

impl Request {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Self::Append(append) => {
                out.put_u8(APPEND);
                codec::put_vote(&mut out, &append.vote);
                codec::put_option(&mut out, append.prev_log_id.as_ref(), codec::put_log_id);
                codec::put_option(&mut out, append.leader_commit.as_ref(), codec::put_log_id);
                codec::put_entries(&mut out, &append.entries);
            }
            Self::Vote(vote) => put_vote_request(&mut out, VOTE, vote),
            Self::PreVote(vote) => put_vote_request(&mut out, PRE_VOTE, vote),
            Self::Snapshot(piece) => {
                out.reserve(piece.bytes.len() + 64);
                out.put_u8(SNAPSHOT);
                codec::put_vote(&mut out, &piece.vote);
                out.put_u64_le(piece.transfer);
                out.put_u64_le(piece.at);
                out.put_u8(u8::from(piece.last));
                codec::put_bytes(&mut out, &piece.bytes);
            }
            Self::Transfer(transfer) => {
                out.put_u8(TRANSFER);
                codec::put_vote(&mut out, transfer.from_leader());
                out.put_u64_le(*transfer.to_node_id());
                codec::put_option(&mut out, transfer.last_log_id(), codec::put_log_id);
            }
            Self::ReadIndex => out.put_u8(READ_INDEX),
        }
        out.freeze()
    }

    pub(crate) fn decode(bytes: Bytes) -> Decoded<Self> {
        let mut input = Input::new(bytes);
        let request = match input.u8()? {
            APPEND => {
                let vote = codec::vote(&mut input)?;
                let prev_log_id = codec::option(&mut input, codec::log_id)?;
                let leader_commit = codec::option(&mut input, codec::log_id)?;
                let entries = codec::entries(&mut input)?;
                let first = prev_log_id.map_or(0, |prev| prev.index.saturating_add(1));
                if entries.iter().zip(first..).any(|(entry, index)| entry.log_id.index != index) {
                    return Err(Malformed);
                }
                Self::Append(AppendEntriesRequest { vote, prev_log_id, leader_commit, entries })
            }
            VOTE => Self::Vote(vote_request(&mut input)?),
            PRE_VOTE => Self::PreVote(vote_request(&mut input)?),
            SNAPSHOT => {
                let vote = codec::vote(&mut input)?;
                let (transfer, at, last) = (input.u64()?, input.u64()?, input.flag()?);
                Self::Snapshot(SnapshotPiece { vote, transfer, at, last, bytes: input.bytes()? })
            }
            TRANSFER => {
                let (from, to) = (codec::vote(&mut input)?, input.u64()?);
                let last = codec::option(&mut input, codec::log_id)?;
                Self::Transfer(TransferLeaderRequest::new(from, to, last))
            }
            READ_INDEX => Self::ReadIndex,
            _ => return Err(Malformed),
        };
        input.end()?;
        Ok(request)
    }
}

fn put_vote_request(out: &mut BytesMut, kind: u8, request: &VoteRequest<Types>) {
    out.put_u8(kind);
    codec::put_vote(out, &request.vote);
    codec::put_option(out, request.last_log_id.as_ref(), codec::put_log_id);
    out.put_u8(u8::from(request.leadership_transfer));
}

fn vote_request(input: &mut Input) -> Decoded<VoteRequest<Types>> {
    let mut request = VoteRequest::new(codec::vote(input)?, codec::option(input, codec::log_id)?);
    request.leadership_transfer = input.flag()?;
    Ok(request)
}

/// The progress of a snapshot transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SnapshotReply {
    /// The chunk was accepted.
    More,
    /// The chunk does not continue the received part.
    Restart,
    /// Installed, or not needed.
    Done(Vote),
}

/// The reply to a read index request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadIndexReply {
    /// Apply up to this index, then read.
    At(u64),
    /// Not the leader, or not confirmed.
    Refused,
}

/// A reply. One with an error text means that the request was not executed.
#[derive(Debug)]
pub(crate) enum Reply {
    Append(AppendEntriesResponse<Types>),
    Vote(VoteResponse<Types>),
    Snapshot(SnapshotReply),
    Transfer(TransferLeaderResponse<Types>),
    ReadIndex(ReadIndexReply),
    Failed(String),
}

const FAILED: u8 = 0;

impl Reply {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Self::Failed(why) => {
                out.put_u8(FAILED);
                codec::put_bytes(&mut out, why.as_bytes());
            }
            Self::Append(append) => {
                out.put_u8(APPEND);
                match append {
                    AppendEntriesResponse::Success => out.put_u8(0),
                    AppendEntriesResponse::PartialSuccess(up_to) => {
                        out.put_u8(1);
                        codec::put_option(&mut out, up_to.as_ref(), codec::put_log_id);
                    }
                    AppendEntriesResponse::Conflict => out.put_u8(2),
                    AppendEntriesResponse::HigherVote(vote) => {
                        out.put_u8(3);
                        codec::put_vote(&mut out, vote);
                    }
                }
            }
            Self::Vote(vote) => {
                out.put_u8(VOTE);
                codec::put_vote(&mut out, &vote.vote);
                out.put_u8(u8::from(vote.vote_granted));
                codec::put_option(&mut out, vote.last_log_id.as_ref(), codec::put_log_id);
            }
            Self::Snapshot(reply) => {
                out.put_u8(SNAPSHOT);
                match reply {
                    SnapshotReply::More => out.put_u8(0),
                    SnapshotReply::Restart => out.put_u8(1),
                    SnapshotReply::Done(vote) => {
                        out.put_u8(2);
                        codec::put_vote(&mut out, vote);
                    }
                }
            }
            Self::Transfer(done) => put_transfer_reply(&mut out, done),
            Self::ReadIndex(reply) => {
                out.put_u8(READ_INDEX);
                match reply {
                    ReadIndexReply::Refused => out.put_u8(0),
                    ReadIndexReply::At(index) => {
                        out.put_u8(1);
                        out.put_u64_le(*index);
                    }
                }
            }
        }
        out.freeze()
    }

    pub(crate) fn decode(bytes: Bytes) -> Decoded<Self> {
        let mut input = Input::new(bytes);
        let reply = match input.u8()? {
            FAILED => Self::Failed(input.string()?),
            APPEND => Self::Append(match input.u8()? {
                0 => AppendEntriesResponse::Success,
                1 => AppendEntriesResponse::PartialSuccess(codec::option(&mut input, codec::log_id)?),
                2 => AppendEntriesResponse::Conflict,
                3 => AppendEntriesResponse::HigherVote(codec::vote(&mut input)?),
                _ => return Err(Malformed),
            }),
            VOTE => {
                let (vote, granted) = (codec::vote(&mut input)?, input.flag()?);
                let last = codec::option(&mut input, codec::log_id)?;
                Self::Vote(VoteResponse::new(vote, last, granted))
            }
            SNAPSHOT => Self::Snapshot(match input.u8()? {
                0 => SnapshotReply::More,
                1 => SnapshotReply::Restart,
                2 => SnapshotReply::Done(codec::vote(&mut input)?),
                _ => return Err(Malformed),
            }),
            TRANSFER => Self::Transfer(transfer_reply(&mut input)?),
            READ_INDEX => Self::ReadIndex(match input.u8()? {
                0 => ReadIndexReply::Refused,
                1 => ReadIndexReply::At(input.u64()?),
                _ => return Err(Malformed),
            }),
            _ => return Err(Malformed),
        };
        input.end()?;
        Ok(reply)
    }
}

fn put_transfer_reply(out: &mut BytesMut, done: &TransferLeaderResponse<Types>) {
    out.put_u8(TRANSFER);
    match done {
        Ok(()) => out.put_u8(0),
        Err(TransferLeaderError::VoteChanged { expected, actual }) => {
            out.put_u8(1);
            codec::put_vote(out, expected);
            codec::put_vote(out, actual);
        }
        Err(TransferLeaderError::LogNotFlushed { expected, actual }) => {
            out.put_u8(2);
            codec::put_option(out, expected.as_ref(), codec::put_log_id);
            codec::put_option(out, actual.as_ref(), codec::put_log_id);
        }
    }
}

fn transfer_reply(input: &mut Input) -> Decoded<TransferLeaderResponse<Types>> {
    match input.u8()? {
        0 => Ok(Ok(())),
        1 => {
            let (expected, actual) = (codec::vote(input)?, codec::vote(input)?);
            Ok(Err(TransferLeaderError::VoteChanged { expected, actual }))
        }
        2 => {
            let expected = codec::option(input, codec::log_id)?;
            let actual = codec::option(input, codec::log_id)?;
            Ok(Err(TransferLeaderError::LogNotFlushed { expected, actual }))
        }
        _ => Err(Malformed),
    }
}

#[cfg(test)]
mod tests;
