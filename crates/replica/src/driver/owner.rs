//! The callbacks to the owner of a journal (a partition of the queue, a shard of the store) about its replica.

use bytes::Bytes;
use moim_base::{BrokerId, LeaderEpoch, Offset};
use moim_journal::Frame;

use crate::machine::{InstallError, Snapshot};

/// Receives the role changes and log changes of one replica.
///
/// Unless documented otherwise, a method is called under the replica's lock: it must be short, must not block, and
/// must not call back into [`Replicated`](super::Replicated) except for methods documented not to lock. It may take
/// the owner's own lock. Lock order: the replica, then the owner; a thread that holds the owner's lock must not call
/// a method of `Replicated` that locks.
pub trait Owner: Send + Sync + 'static {
    /// This replica leads in `epoch`; the epoch is noted in the journal. Everything below `high_watermark` is
    /// committed.
    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset);

    /// This replica follows `leader` in `epoch`. From now on only the driver appends.
    fn on_follow(&self, leader: BrokerId, epoch: LeaderEpoch);

    /// No replica leads, or not in this run: nothing is appended.
    fn on_idle(&self);

    /// The leadership of this replica has ended: waiters for a commit get NOT_LEADER_OR_FOLLOWER. Called before
    /// `on_follow`, `on_idle` or another `on_lead`.
    fn on_leadership_ended(&self);

    /// The in-sync set fell below the minimum: waiters get NOT_ENOUGH_REPLICAS_AFTER_APPEND.
    fn on_under_min_isr(&self);

    /// The high watermark: everything below is committed. Lower than before only after [`Owner::on_cut`].
    fn on_high_watermark(&self, high_watermark: Offset);

    /// These frames were fetched from the leader, validated and appended.
    fn on_appended(&self, frames: &[Frame], bytes: &Bytes);

    /// The log was truncated to `end`, or reset to it: derived state must be rebuilt. May be slow: called on a
    /// blocking thread, without the replica's lock, and nothing is appended until it returns.
    fn on_cut(&self, end: Offset);

    /// The replica is damaged and is reset to an empty log: snapshots kept beside the journal must be deleted too.
    fn forget_snapshots(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// The newest snapshot for a follower that was reset, for [`ResetPolicy::InstallSnapshot`]. Its end is not below
    /// the journal's start. May be slow: called like [`Owner::on_cut`].
    ///
    /// [`ResetPolicy::InstallSnapshot`]: crate::ResetPolicy::InstallSnapshot
    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    /// Replaces this replica's state by the leader's snapshot, durably; the journal is reset to its end afterwards.
    /// May be slow: called like [`Owner::on_cut`].
    fn install(&self, snapshot: Snapshot) -> Result<(), InstallError> {
        Err(InstallError(format!("this journal does not install snapshots (end offset {})", snapshot.end)))
    }

    /// This node no longer has a replica of the partition: the journal must be detached and deleted, later and
    /// elsewhere.
    fn on_drop(&self);
}
