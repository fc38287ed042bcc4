//! What a replica's place is worth after its node came back in a new run.
//!
//! A place in the in-sync or eligible set says: this run, on this data directory, has everything that is committed. When
//! another run shows up, that must be shown anew, from three things the node says when it registers: its directory, how
//! far back nothing was lost, and which partitions it found damaged.
//!
//! | what the record promises | the node came back | its place |
//! |---|---|---|
//! | anything | on another directory, or damaged below its durable point | lost: it has nothing to be trusted with |
//! | `fsync` | on the same directory | kept: what counted was on stable storage |
//! | `replicated` | without having lost a written byte (clean stop, or only its lease ran out) | kept |
//! | `replicated` | after a crash | doubtful: out of both sets, remembered as last known |
//!
//! Whatever its place, the new run leads nothing until a record with a new leader epoch names it.

use moim_base::BrokerId;

use crate::mutant::{Mutant, Mutants};
use crate::state::InSync;
use crate::types::{BrokerEpoch, DirectoryId, Durability, PartitionId};

/// A member that is alive, as it registered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Which node.
    pub node: BrokerId,
    /// Its run: the create revision of its member key.
    pub epoch: BrokerEpoch,
    /// Its data directory.
    pub directory: DirectoryId,
    /// The oldest run of this directory since which no written byte was lost: kept through clean stops and lost
    /// leases, set to the present run by a start that found no clean-shutdown marker. `None` stands for the present
    /// run, which is not known before registering.
    pub intact_since: Option<BrokerEpoch>,
    /// Partitions in which recovery or the scrub found damage below the durable point. Stays on record until the copy
    /// was thrown away. Invariant: sorted.
    pub damaged: Vec<PartitionId>,
}

impl Member {
    /// The member as an entry of a record.
    pub fn in_sync(&self) -> InSync {
        InSync { node: self.node, epoch: self.epoch, directory: self.directory }
    }

    /// Whether its copy of this partition is damaged.
    pub fn is_damaged(&self, partition: PartitionId) -> bool {
        self.damaged.binary_search(&partition).is_ok()
    }
}

/// What a place is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The entry names the present run: nothing to decide.
    Current,
    /// Kept, under the new run's name.
    Kept,
    /// Data may be missing.
    Doubtful,
    /// Nothing here can be trusted.
    Lost,
}

/// Judges the entry of a member in the record of a partition.
pub fn judge(
    entry: &InSync,
    member: &Member,
    partition: PartitionId,
    durability: Durability,
    mutants: Mutants,
) -> Place {
    let trusts = mutants.has(Mutant::TrustUncleanReplica);
    // Records from before there were directory ids name none: there was one node per partition, and it kept its folder.
    let moved = entry.directory != DirectoryId(0) && entry.directory != member.directory;
    if (moved && !trusts) || member.is_damaged(partition) {
        return Place::Lost;
    }
    if entry.epoch >= member.epoch {
        return Place::Current; // or newer than what we have heard of the member
    }
    let intact = member.intact_since.is_some_and(|since| since <= entry.epoch);
    match durability {
        Durability::Fsync => Place::Kept,
        Durability::Replicated if intact || trusts => Place::Kept,
        Durability::Replicated => Place::Doubtful,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_kept_only_by_what_cannot_have_been_lost() {
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
        check((20, 7), Fsync, |_| {}, Place::Current);
        check((20, 7), Replicated, |_| {}, Place::Current);
        check((10, 7), Fsync, |_| {}, Place::Kept);
        check((10, 7), Replicated, |_| {}, Place::Doubtful);
        check((10, 7), Replicated, |m| m.intact_since = Some(BrokerEpoch(10)), Place::Kept);
        check((10, 7), Replicated, |m| m.intact_since = Some(BrokerEpoch(5)), Place::Kept);
        // The clean stop was of a later run; the one that had the place crashed.
        check((10, 7), Replicated, |m| m.intact_since = Some(BrokerEpoch(15)), Place::Doubtful);
        check((10, 6), Fsync, |_| {}, Place::Lost);
        check((10, 0), Fsync, |_| {}, Place::Kept);
        check((10, 6), Replicated, |m| m.intact_since = Some(BrokerEpoch(5)), Place::Lost);
        check(
            (10, 7),
            Fsync,
            |m| m.damaged = vec![PartitionId { index: 3, ..Default::default() }],
            Place::Lost,
        );
        check(
            (20, 7),
            Fsync,
            |m| m.damaged = vec![PartitionId { index: 3, ..Default::default() }],
            Place::Lost,
        );
        check(
            (10, 7),
            Fsync,
            |m| m.damaged = vec![PartitionId { index: 4, ..Default::default() }],
            Place::Kept,
        );
    }
}
