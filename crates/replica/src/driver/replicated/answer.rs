//! The parts of fetch and snapshot answers that replicas and connections exchange. Plain data: nothing here acts on it.

use bytes::Bytes;
use moim_base::{LeaderEpoch, Offset};

use crate::machine::Chunk;

/// The record bytes of an answer.
#[derive(Clone, Debug)]
pub(in crate::driver) struct Records {
    pub(in crate::driver) bytes: Bytes,
    pub(in crate::driver) span: Span,
}

/// The range of the leader's log that an answer covers.
#[derive(Clone, Copy, Debug)]
pub(in crate::driver) struct Span {
    /// The fetch offset.
    pub(in crate::driver) from: Offset,
    /// Every offset from there up to here is either in the bytes or removed from the leader's log.
    pub(in crate::driver) next: Offset,
    /// The epoch in force before `next`.
    pub(in crate::driver) next_epoch: LeaderEpoch,
}

/// The leader's reply to a snapshot request.
pub(in crate::driver) enum ChunkAnswer {
    /// A chunk.
    Part(Chunk),
    /// No snapshot yet: take one and ask again.
    Take,
    /// No snapshot, and no reason to take one.
    None,
}
