//! What the owner of a journal (a partition of the queue, a shard of the store) is told about its copy.

use bytes::Bytes;
use moim_base::{BrokerId, LeaderEpoch, Offset};
use moim_journal::Frame;

use crate::machine::{InstallError, Snapshot};

/// Told what becomes of one copy.
///
/// Unless it says otherwise, a method is called under the copy's lock: it must be short, must not wait, and must not
/// call back into [`Replicated`](super::Replicated) except for what is documented not to lock. It may take the
/// owner's own lock, so nobody may hold that one while calling a method of `Replicated` that locks: first the copy,
/// then the owner.
pub trait Owner: Send + Sync + 'static {
    /// This copy leads in `epoch`; the epoch is noted in the journal. Everything below `high_watermark` is committed.
    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset);

    /// This copy follows `leader` in `epoch`. The driver appends from now on, nobody else.
    fn on_follow(&self, leader: BrokerId, epoch: LeaderEpoch);

    /// Nobody leads, or not in this run: nothing is appended.
    fn on_idle(&self);

    /// The leadership of this copy has ended: who waits for a commit gets NOT_LEADER_OR_FOLLOWER. Called before
    /// `on_follow`, `on_idle` or another `on_lead`.
    fn on_leadership_ended(&self);

    /// The in-sync set fell below the minimum: who waits gets NOT_ENOUGH_REPLICAS_AFTER_APPEND.
    fn on_under_min_isr(&self);

    /// Everything below is committed. Lower than before only after [`Owner::on_cut`].
    fn on_high_watermark(&self, high_watermark: Offset);

    /// These frames were fetched from the leader, checked and appended.
    fn on_appended(&self, frames: &[Frame], bytes: &Bytes);

    /// The log was cut and ends here now, or begins anew here: what was derived from it is to be derived again. May be
    /// slow: called on a thread for that, without the copy's lock, and nothing is appended until it returns.
    fn on_cut(&self, end: Offset);

    /// The copy is damaged and begins anew, empty: what is kept beside the journal goes, too.
    fn forget_snapshots(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// The newest state this copy can give to a follower that begins anew, for [`ResetPolicy::InstallSnapshot`]. Its end
    /// is not below the journal's start. May be slow: called like [`Owner::on_cut`].
    ///
    /// [`ResetPolicy::InstallSnapshot`]: crate::ResetPolicy::InstallSnapshot
    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    /// Puts the leader's state in the place of this copy's, durably; the journal is begun anew at its end afterwards.
    /// May be slow: called like [`Owner::on_cut`].
    fn install(&self, snapshot: Snapshot) -> Result<(), InstallError> {
        Err(InstallError(format!("nobody takes a snapshot up to {} here", snapshot.end)))
    }

    /// This node has no part in the partition any more: the copy is to be detached and deleted, later and elsewhere.
    fn on_drop(&self);
}
