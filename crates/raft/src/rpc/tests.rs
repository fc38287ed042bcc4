//! Every message round-trips; malformed input is never decoded as a message.

use super::*;
use crate::types::{Entry, LogId, Payload, Proposal};

fn requests() -> Vec<Request> {
    let at = |index| LogId::new_term_index(2, index);
    let vote = Vote::new(3, 1);
    let entry = Entry { log_id: at(8), payload: Payload::Normal(Proposal(Bytes::from_static(b"put"))) };
    let append = AppendEntriesRequest {
        vote,
        prev_log_id: Some(at(7)),
        entries: vec![entry, Entry { log_id: at(9), payload: Payload::Blank }],
        leader_commit: Some(at(6)),
    };
    let mut transfer_vote = VoteRequest::new(vote, None);
    transfer_vote.leadership_transfer = true;
    let bytes = Bytes::from_static(b"piece");
    vec![
        Request::Append(append),
        Request::Vote(VoteRequest::new(vote, Some(at(9)))),
        Request::PreVote(transfer_vote),
        Request::Snapshot(SnapshotPiece { vote, transfer: 77, at: 512, last: true, bytes }),
        Request::Transfer(TransferLeaderRequest::new(vote, 2, Some(at(9)))),
        Request::ReadIndex,
    ]
}

fn replies() -> Vec<Reply> {
    let (old, new) = (Vote::new_committed(2, 1), Vote::new(3, 2));
    let at = Some(LogId::new_term_index(2, 4));
    vec![
        Reply::Failed("no".to_owned()),
        Reply::Append(AppendEntriesResponse::Success),
        Reply::Append(AppendEntriesResponse::PartialSuccess(at)),
        Reply::Append(AppendEntriesResponse::Conflict),
        Reply::Append(AppendEntriesResponse::HigherVote(new)),
        Reply::Vote(VoteResponse::new(new, at, true)),
        Reply::Snapshot(SnapshotReply::More),
        Reply::Snapshot(SnapshotReply::Restart),
        Reply::Snapshot(SnapshotReply::Done(new)),
        Reply::Transfer(Ok(())),
        Reply::Transfer(Err(TransferLeaderError::VoteChanged { expected: old, actual: new })),
        Reply::Transfer(Err(TransferLeaderError::LogNotFlushed { expected: at, actual: None })),
        Reply::ReadIndex(ReadIndexReply::At(9)),
        Reply::ReadIndex(ReadIndexReply::Refused),
    ]
}

/// Same message, same bytes; and no part of the bytes is a message.
fn check<T: std::fmt::Debug>(message: &T, encode: fn(&T) -> Bytes, decode: fn(Bytes) -> Decoded<T>) {
    let bytes = encode(message);
    let read = decode(bytes.clone()).unwrap();
    assert_eq!(format!("{read:?}"), format!("{message:?}"));
    for len in 0..bytes.len() {
        assert!(decode(bytes.slice(..len)).is_err(), "{message:?}: {len} bytes");
    }
    assert!(decode([&bytes[..], &[0]].concat().into()).is_err(), "{message:?}: a byte too many");
}

#[test]
fn every_message_reads_back_and_no_part_of_one_is_taken() {
    for request in requests() {
        check(&request, Request::encode, Request::decode);
    }
    for reply in replies() {
        check(&reply, Reply::encode, Reply::decode);
    }
}

#[test]
fn entries_that_do_not_follow_each_other_are_refused() {
    let entry = |index| Entry { log_id: LogId::new_term_index(1, index), payload: Payload::Blank };
    let append = |first, second| {
        let entries = vec![entry(first), entry(second)];
        let prev_log_id = Some(LogId::new_term_index(1, 4));
        Request::Append(AppendEntriesRequest {
            vote: Vote::new_committed(1, 1),
            prev_log_id,
            entries,
            leader_commit: None,
        })
    };
    for (first, second, sound) in [(5, 6, true), (5, 7, false), (6, 7, false), (5, 5, false)] {
        assert_eq!(Request::decode(append(first, second).encode()).is_ok(), sound, "{first} {second}");
    }
}

#[test]
fn random_bytes_never_panic() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..20_000 {
        let len = random.usize(..80);
        let mut bytes: Vec<u8> = (0..len).map(|_| random.u8(..4)).collect();
        if let Some(kind) = bytes.first_mut() {
            *kind = random.u8(..8);
        }
        let bytes = Bytes::from(bytes);
        let _ = (Request::decode(bytes.clone()), Reply::decode(bytes));
    }
}
