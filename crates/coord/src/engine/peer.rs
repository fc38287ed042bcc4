//! Requests between the coordination services of the nodes, as bytes: always to the leader.
//!
//! A message is a format byte, a kind and its fields, in the codec of commands. Bytes from a peer are validated; a
//! forwarded batch is decoded before it enters the log, because an entry cannot be refused at apply.

use std::sync::Weak;

use bytes::Bytes;
use moim_raft::{BoxFuture, Member, Service, VoterId};

use super::Inner;
use super::entry::Batch;
use super::error::CoordError;
use super::leases::KeepAliveOutcome;
use crate::codec::{DecodeError, Input, put_bytes, put_i64, put_lease, put_u64};
use crate::error::Error;
use crate::lease::LeaseId;
use crate::request::Origin;

const FORMAT: u8 = 1;

/// A request to the leader.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PeerRequest {
    /// Propose this entry if the receiver leads in this term. Answered when it is committed; the sender gets the
    /// command replies when it applies the entry.
    Propose { term: u64, entry: Bytes },
    /// Renew these leases.
    KeepAlive(Vec<(Origin, LeaseId)>),
    /// Report the remaining TTL of these leases.
    Remaining(Vec<LeaseId>),
    /// Change the membership.
    Change(MemberChange),
}

/// A membership change of the Raft group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum MemberChange {
    AddLearner(Member),
    Promote(VoterId),
    Remove(VoterId),
    UpdateAddress(Member),
    Transfer(VoterId),
}

/// The leader's reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PeerReply {
    Done,
    Refused(CoordError),
    /// Reply to [`PeerRequest::KeepAlive`], in the order of the request.
    KeepAlive(Vec<KeepAliveOutcome>),
    /// Reply to [`PeerRequest::Remaining`], in the order of the request; -1 is an unknown lease.
    Remaining(Vec<i64>),
}

fn put_member(out: &mut Vec<u8>, member: &Member) {
    put_u64(out, member.id.0);
    put_bytes(out, member.address.as_bytes());
}

fn member(input: &mut Input) -> Result<Member, DecodeError> {
    let (id, address) = (VoterId(input.u64()?), input.bytes()?);
    let address = String::from_utf8(address.to_vec());
    Ok(Member { id, address: address.map_err(|_| unknown("member address", 0))? })
}

fn put_leases(out: &mut Vec<u8>, leases: &[LeaseId]) {
    put_u64(out, leases.len() as u64);
    leases.iter().for_each(|lease| put_lease(out, *lease));
}

fn list<T>(
    input: &mut Input,
    mut read: impl FnMut(&mut Input) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    (0..input.u64()?).map(|_| read(input)).collect()
}

fn unknown(what: &'static str, found: u8) -> DecodeError {
    DecodeError::Unknown { what, found: found.into() }
}

fn open(bytes: Bytes) -> Result<Input, DecodeError> {
    let mut input = Input { bytes };
    match input.u8()? {
        FORMAT => Ok(input),
        other => Err(DecodeError::Format(other)),
    }
}

fn close<T>(input: &Input, message: T) -> Result<T, DecodeError> {
    match input.bytes.len() {
        0 => Ok(message),
        left => Err(DecodeError::Trailing(left)),
    }
}

impl PeerRequest {
    pub(super) fn encode(&self) -> Bytes {
        let mut out = vec![FORMAT];
        match self {
            Self::Propose { term, entry } => {
                out.reserve(entry.len() + 32);
                out.push(1);
                put_u64(&mut out, *term);
                put_bytes(&mut out, entry);
            }
            Self::KeepAlive(leases) => {
                out.push(2);
                put_u64(&mut out, leases.len() as u64);
                for (origin, lease) in leases {
                    out.push(u8::from(*origin == Origin::Node));
                    put_lease(&mut out, *lease);
                }
            }
            Self::Remaining(leases) => {
                out.push(3);
                put_leases(&mut out, leases);
            }
            Self::Change(change) => {
                out.push(4);
                match change {
                    MemberChange::AddLearner(member) => {
                        out.push(1);
                        put_member(&mut out, member);
                    }
                    MemberChange::Promote(id) => {
                        out.push(2);
                        put_u64(&mut out, id.0);
                    }
                    MemberChange::Remove(id) => {
                        out.push(3);
                        put_u64(&mut out, id.0);
                    }
                    MemberChange::UpdateAddress(member) => {
                        out.push(4);
                        put_member(&mut out, member);
                    }
                    MemberChange::Transfer(id) => {
                        out.push(5);
                        put_u64(&mut out, id.0);
                    }
                }
            }
        }
        out.into()
    }

    fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        let mut input = open(bytes)?;
        let request = match input.u8()? {
            1 => Self::Propose { term: input.u64()?, entry: input.bytes()? },
            2 => Self::KeepAlive(list(&mut input, |input| {
                let origin = match input.u8()? {
                    0 => Origin::Client,
                    1 => Origin::Node,
                    other => return Err(unknown("command origin", other)),
                };
                Ok((origin, input.lease()?))
            })?),
            3 => Self::Remaining(list(&mut input, Input::lease)?),
            4 => Self::Change(match input.u8()? {
                1 => MemberChange::AddLearner(member(&mut input)?),
                2 => MemberChange::Promote(VoterId(input.u64()?)),
                3 => MemberChange::Remove(VoterId(input.u64()?)),
                4 => MemberChange::UpdateAddress(member(&mut input)?),
                5 => MemberChange::Transfer(VoterId(input.u64()?)),
                other => return Err(unknown("membership change", other)),
            }),
            other => return Err(unknown("peer request", other)),
        };
        close(&input, request)
    }
}

/// The numbers of errors on the wire never change; [`CoordError::Refused`] has its own.
const ERRORS: [CoordError; 13] = [
    CoordError::NoLeader,
    CoordError::Timeout,
    CoordError::LeaderChanged,
    CoordError::TooManyRequests,
    CoordError::NotLeader,
    CoordError::BadLeaderTransferee,
    CoordError::MemberNotFound,
    CoordError::MemberExists,
    CoordError::NotLearner,
    CoordError::LearnerNotReady,
    CoordError::UnhealthyCluster,
    CoordError::Stopped,
    CoordError::NotEnoughMembers,
];

fn put_error(out: &mut Vec<u8>, error: &CoordError) {
    match error {
        CoordError::Refused(error) => out.extend_from_slice(&[0, *error as u8]),
        error => {
            let at =
                ERRORS.iter().position(|known| known == error).expect("ERRORS lists every other variant");
            out.extend_from_slice(&[1, at as u8]);
        }
    }
}

fn error(input: &mut Input) -> Result<CoordError, DecodeError> {
    let (of, number) = (input.u8()?, input.u8()?);
    let found = match of {
        0 => Error::ALL.get(usize::from(number).wrapping_sub(1)).copied().map(CoordError::Refused),
        1 => ERRORS.get(usize::from(number)).cloned(),
        _ => None,
    };
    found.ok_or(unknown("error number", number))
}

impl PeerReply {
    fn encode(&self) -> Bytes {
        let mut out = vec![FORMAT];
        match self {
            Self::Done => out.push(1),
            Self::Refused(error) => {
                out.push(2);
                put_error(&mut out, error);
            }
            Self::KeepAlive(outcomes) => {
                out.push(3);
                put_u64(&mut out, outcomes.len() as u64);
                for outcome in outcomes {
                    match outcome {
                        KeepAliveOutcome::Renewed { ttl_ms } => {
                            out.push(1);
                            put_i64(&mut out, *ttl_ms);
                        }
                        KeepAliveOutcome::Expiring => out.push(2),
                        KeepAliveOutcome::NotFound => out.push(3),
                        KeepAliveOutcome::Denied => out.push(4),
                    }
                }
            }
            Self::Remaining(left) => {
                out.push(4);
                put_u64(&mut out, left.len() as u64);
                left.iter().for_each(|left_ms| put_i64(&mut out, *left_ms));
            }
        }
        out.into()
    }

    pub(super) fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        let mut input = open(bytes)?;
        let reply = match input.u8()? {
            1 => Self::Done,
            2 => Self::Refused(error(&mut input)?),
            3 => Self::KeepAlive(list(&mut input, |input| match input.u8()? {
                1 => Ok(KeepAliveOutcome::Renewed { ttl_ms: input.i64()? }),
                2 => Ok(KeepAliveOutcome::Expiring),
                3 => Ok(KeepAliveOutcome::NotFound),
                4 => Ok(KeepAliveOutcome::Denied),
                other => Err(unknown("keepalive outcome", other)),
            })?),
            4 => Self::Remaining(list(&mut input, Input::i64)?),
            other => return Err(unknown("peer reply", other)),
        };
        close(&input, reply)
    }
}

/// Serves requests of other nodes.
pub(super) struct PeerService(pub(super) Weak<Inner>);

impl Service for PeerService {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            let Some(inner) = self.0.upgrade() else {
                return PeerReply::Refused(CoordError::NotLeader).encode();
            };
            let reply = match PeerRequest::decode(request) {
                Ok(request) => inner.serve(request).await,
                Err(error) => {
                    tracing::warn!(%error, "undecodable peer request");
                    PeerReply::Refused(CoordError::UnhealthyCluster)
                }
            };
            reply.encode()
        })
    }
}

impl Inner {
    async fn serve(&self, request: PeerRequest) -> PeerReply {
        match request {
            PeerRequest::Propose { term, entry } => {
                if let Err(error) = Batch::check(&entry) {
                    tracing::warn!(%error, "undecodable batch forwarded by peer");
                    return PeerReply::Refused(CoordError::UnhealthyCluster);
                }
                match self.group.propose_in_term(term, entry).await {
                    Ok(_) => PeerReply::Done,
                    Err(error) => PeerReply::Refused(CoordError::of_group(error)),
                }
            }
            PeerRequest::KeepAlive(leases) => match self.keep_alive_on_leader(&leases).await {
                Ok(outcomes) => PeerReply::KeepAlive(outcomes),
                Err(error) => PeerReply::Refused(error),
            },
            PeerRequest::Remaining(leases) => match self.remaining_on_leader(&leases).await {
                Ok(left) => PeerReply::Remaining(left),
                Err(error) => PeerReply::Refused(error),
            },
            PeerRequest::Change(change) => match self.change_members_on_leader(change).await {
                Ok(()) => PeerReply::Done,
                Err(error) => PeerReply::Refused(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_truncated_ones_are_refused() {
        let someone = Member { id: VoterId(3), address: "host:1".to_owned() };
        let requests = [
            PeerRequest::Propose { term: 300, entry: Bytes::from_static(b"entry") },
            PeerRequest::KeepAlive(vec![(Origin::Client, LeaseId(1)), (Origin::Node, LeaseId(-5))]),
            PeerRequest::Remaining(vec![LeaseId(i64::MAX)]),
            PeerRequest::Change(MemberChange::AddLearner(someone.clone())),
            PeerRequest::Change(MemberChange::Promote(VoterId(4))),
            PeerRequest::Change(MemberChange::Remove(VoterId(4))),
            PeerRequest::Change(MemberChange::UpdateAddress(someone)),
            PeerRequest::Change(MemberChange::Transfer(VoterId(4))),
        ];
        for request in requests {
            let bytes = request.encode();
            for end in 0..bytes.len() {
                assert!(PeerRequest::decode(bytes.slice(..end)).is_err(), "{request:?} truncated at {end}");
            }
            assert_eq!(PeerRequest::decode(bytes), Ok(request));
        }
        let refusals = ERRORS.into_iter().chain(Error::ALL.map(CoordError::Refused)).map(PeerReply::Refused);
        let outcomes = PeerReply::KeepAlive(vec![
            KeepAliveOutcome::Renewed { ttl_ms: 7 },
            KeepAliveOutcome::Expiring,
            KeepAliveOutcome::NotFound,
            KeepAliveOutcome::Denied,
        ]);
        for reply in
            [PeerReply::Done, outcomes, PeerReply::Remaining(vec![-1, 9])].into_iter().chain(refusals)
        {
            let bytes = reply.encode();
            for end in 0..bytes.len() {
                assert!(PeerReply::decode(bytes.slice(..end)).is_err(), "{reply:?} truncated at {end}");
            }
            assert_eq!(PeerReply::decode(bytes), Ok(reply));
        }
    }
}
