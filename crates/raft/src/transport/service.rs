//! Requests between nodes beside Raft: numbered services, each with its own encoding.
//!
//! On the wire a service is a group in the upper half of the numbers, and its reply is prefixed by a status byte:
//! served, not here, or busy. A refusal by that byte means that nothing was executed.

use bytes::{BufMut, Bytes, BytesMut};

use super::{BoxFuture, TransportError};
use crate::types::{GroupId, VoterId};

const SERVICES: u64 = 1 << 63;
const DONE: u8 = 1;
const NOT_HERE: u8 = 2;
const BUSY: u8 = 3;

/// The id of a service of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct ServiceId(pub u16);

impl ServiceId {
    /// The coordination core: forwarded commands, leases, members.
    pub const COORDINATOR: Self = Self(1);
    /// The node itself: formation, joining, status.
    pub const NODE: Self = Self(2);
    /// Replicated journals.
    pub const REPLICATION: Self = Self(3);

    /// The health of the node: its disk.
    pub const HEALTH: Self = Self(4);

    pub(super) fn as_group(self) -> GroupId {
        GroupId(SERVICES | u64::from(self.0))
    }

    pub(super) fn of_group(group: GroupId) -> Option<Self> {
        let number = group.0.checked_sub(SERVICES)?;
        u16::try_from(number).ok().map(Self)
    }
}

/// Serves the requests of other nodes.
pub trait Service: Send + Sync + 'static {
    /// Serves a request. The bytes come from a peer: they are validated, never trusted.
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes>;

    /// Serves a request of a member that proved its voter id; `None` is a visitor.
    fn handle_from(&self, peer: Option<VoterId>, request: Bytes) -> BoxFuture<'_, Bytes> {
        let _ = peer;
        self.handle(request)
    }
}

/// Why a service call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// The node does not have the service, or not yet. Nothing was executed.
    #[error("the service is not there")]
    NotHere,
    /// The node is overloaded. Nothing was executed.
    #[error("the service is busy")]
    Busy,
    /// No answer: the request may or may not have been executed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

pub(super) fn reply(answer: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(answer.len() + 1);
    out.put_u8(DONE);
    out.put_slice(answer);
    out.freeze()
}

pub(super) fn not_here() -> Bytes {
    Bytes::from_static(&[NOT_HERE])
}

pub(super) fn busy() -> Bytes {
    Bytes::from_static(&[BUSY])
}

pub(super) fn open_reply(mut reply: Bytes) -> Result<Bytes, ServiceError> {
    if reply.is_empty() {
        return Err(TransportError::Broken("an empty reply".to_owned()).into());
    }
    let status = reply.split_to(1);
    match status[0] {
        DONE => Ok(reply),
        NOT_HERE => Err(ServiceError::NotHere),
        BUSY => Err(ServiceError::Busy),
        other => Err(TransportError::Broken(format!("a reply of kind {other}")).into()),
    }
}
