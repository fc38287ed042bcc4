//! What nodes ask of each other beside Raft: services by number, each with bytes of its own.
//!
//! On the wire a service is a group of the upper half of the numbers, and its reply has a byte in front that says
//! whether the service was there and had room. A refusal by that byte means that nothing was done.

use bytes::{BufMut, Bytes, BytesMut};

use super::{BoxFuture, TransportError};
use crate::types::{GroupId, VoterId};

const SERVICES: u64 = 1 << 63;
const DONE: u8 = 1;
const NOT_HERE: u8 = 2;
const BUSY: u8 = 3;

/// Which service of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct ServiceId(pub u16);

impl ServiceId {
    /// The coordination core: forwarded commands, leases, members.
    pub const COORDINATOR: Self = Self(1);
    /// The node itself: formation, joining, status.
    pub const NODE: Self = Self(2);
    /// Replicated journals.
    pub const REPLICATION: Self = Self(3);

    /// Whether the node is well: its disk.
    pub const HEALTH: Self = Self(4);

    pub(super) fn as_group(self) -> GroupId {
        GroupId(SERVICES | u64::from(self.0))
    }

    pub(super) fn of_group(group: GroupId) -> Option<Self> {
        let number = group.0.checked_sub(SERVICES)?;
        u16::try_from(number).ok().map(Self)
    }
}

/// Answers what other nodes ask.
pub trait Service: Send + Sync + 'static {
    /// Answers a request. The bytes are a peer's: they are checked, never trusted.
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes>;

    /// Answers a request of a member that proved which voter it is; of a visitor for `None`.
    fn handle_from(&self, peer: Option<VoterId>, request: Bytes) -> BoxFuture<'_, Bytes> {
        let _ = peer;
        self.handle(request)
    }
}

/// Why a service gave no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// The node does not have it, or not yet. Nothing was done.
    #[error("the service is not there")]
    NotHere,
    /// The node has too much to do. Nothing was done.
    #[error("the service is busy")]
    Busy,
    /// No answer: it may or may not have been done.
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
