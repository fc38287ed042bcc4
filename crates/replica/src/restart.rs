//! Whether a replica keeps its in-sync or eligible entry after its node returned in a new run.
//!
//! An in-sync or eligible entry states: this run, on this data directory, has every committed record. For another run
//! this must be established again, from three facts that the node registers: its directory id, the oldest run since
//! which no data was lost, and its damaged partitions.
//!
//! | durability on record | the node returned | its entry |
//! |---|---|---|
//! | any | on another directory, or damaged below its durable end | lost: no data to be trusted |
//! | `fsync` | on the same directory | kept: counted records were on stable storage |
//! | `replicated` | without losing a written byte (clean stop, or only its lease expired) | kept |
//! | `replicated` | after a crash | doubtful: out of both sets, kept as last known |
//!
//! In every case the new run leads nothing until a record with a new leader epoch names it.

use moim_base::BrokerId;

use crate::mutant::{Mutant, Mutants};
use crate::state::InSync;
use crate::types::{BrokerEpoch, DirectoryId, Durability, PartitionId};

/// A live member, as it registered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// The node id.
    pub node: BrokerId,
    /// Its broker epoch: the create revision of its member key.
    pub epoch: BrokerEpoch,
    /// Its data directory.
    pub directory: DirectoryId,
    /// The oldest run of this directory since which no written byte was lost: preserved by clean stops and lost
    /// leases, set to the present run by a start without a clean-shutdown marker. `None` stands for the present run,
    /// whose epoch is unknown before registration.
    pub intact_since: Option<BrokerEpoch>,
    /// Partitions in which recovery or the scrub found damage below the durable end. Listed until the replica was
    /// discarded. Invariant: sorted.
    pub damaged: Vec<PartitionId>,
}

impl Member {
    /// The member as an entry of a partition record.
    pub fn in_sync(&self) -> InSync {
        InSync { node: self.node, epoch: self.epoch, directory: self.directory }
    }

    /// True if its replica of this partition is damaged.
    pub fn is_damaged(&self, partition: PartitionId) -> bool {
        self.damaged.binary_search(&partition).is_ok()
    }
}

/// The verdict on a replica's entry after a restart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The entry names the present run: nothing to decide.
    Current,
    /// Kept, with the new broker epoch.
    Kept,
    /// Data may be missing.
    Doubtful,
    /// No data can be trusted.
    Lost,
}

/// Judges a member's entry in a partition record.
pub fn judge(
    entry: &InSync,
    member: &Member,
    partition: PartitionId,
    durability: Durability,
    mutants: Mutants,
) -> Verdict {
    let trusts = mutants.has(Mutant::TrustUncleanReplica);
    // Records from before directory ids name none: at that time a partition had one node, which kept its directory.
    let moved = entry.directory != DirectoryId(0) && entry.directory != member.directory;
    if (moved && !trusts) || member.is_damaged(partition) {
        return Verdict::Lost;
    }
    if entry.epoch >= member.epoch {
        return Verdict::Current; // or newer than what we have heard of the member
    }
    let intact = member.intact_since.is_some_and(|since| since <= entry.epoch);
    match durability {
        Durability::Fsync => Verdict::Kept,
        Durability::Replicated if intact || trusts => Verdict::Kept,
        Durability::Replicated => Verdict::Doubtful,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_kept_after_restart_only_without_possible_data_loss() {
        let id = PartitionId { index: 3, ..PartitionId::default() };
        let check = |entry: (i64, u64), durability, change: fn(&mut Member), expected| {
            let entry = InSync::from((1, entry.0, entry.1));
            let mut member = Member {
                node: BrokerId(1),
                epoch: BrokerEpoch(20),
                directory: DirectoryId(7),
                intact_since: None,
                damaged: vec![],
            };
            change(&mut member);
            assert_eq!(judge(&entry, &member, id, durability, Mutants::default()), expected, "{member:?}");
        };
        use Durability::{Fsync, Replicated};
        check((20, 7), Fsync, |_| {}, Verdict::Current);
        check((20, 7), Replicated, |_| {}, Verdict::Current);
        check((10, 7), Fsync, |_| {}, Verdict::Kept);
        check((10, 7), Replicated, |_| {}, Verdict::Doubtful);
        check((10, 7), Replicated, |m| m.intact_since = Some(BrokerEpoch(10)), Verdict::Kept);
        check((10, 7), Replicated, |m| m.intact_since = Some(BrokerEpoch(5)), Verdict::Kept);
        // The clean stop was of a later run; the run that had the entry crashed.
        check((10, 7), Replicated, |m| m.intact_since = Some(BrokerEpoch(15)), Verdict::Doubtful);
        check((10, 6), Fsync, |_| {}, Verdict::Lost);
        check((10, 0), Fsync, |_| {}, Verdict::Kept);
        check((10, 6), Replicated, |m| m.intact_since = Some(BrokerEpoch(5)), Verdict::Lost);
        check(
            (10, 7),
            Fsync,
            |m| m.damaged = vec![PartitionId { index: 3, ..Default::default() }],
            Verdict::Lost,
        );
        check(
            (20, 7),
            Fsync,
            |m| m.damaged = vec![PartitionId { index: 3, ..Default::default() }],
            Verdict::Lost,
        );
        check(
            (10, 7),
            Fsync,
            |m| m.damaged = vec![PartitionId { index: 4, ..Default::default() }],
            Verdict::Kept,
        );
    }
}
