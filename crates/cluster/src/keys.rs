//! Key layout of the library. Other programs read these keys; the names are part of the interface.
//!
//! | key | holds |
//! |---|---|
//! | `cluster:nodes/{node}` | a member record, under its lease |
//! | `cluster:leader/{name}` | the leader of an election, under its lease |
//! | `cluster:locks/{name}` | the holder of a lock, under its lease |
//! | `cluster:lock-queue/{name}/{lease}` | a waiter; the oldest one holds the lock |
//! | `cluster:assignments/{group}/{partition}` | the assignment record of a partition: owner and hand-off |
//! | `cluster:handoffs/{group}/{partition}/{id}/{piece}` | a chunk of a hand-off stored by reference |
//! | `cluster:raft/groups/{app}` | the Raft group of an application |
//! | `cluster:raft/metadata/{app}` | discovery data of the group |
//! | `cluster:raft/join-requests/{app}/{node}` | a join request, under a lease |
//! | `/{namespace}/nodes/{id}` | a registered server |
//! | `/{namespace}/routing` | the head of the routing table |
//! | `/{namespace}/routing/pieces/{version}/{piece}` | its chunks |

/// Members of the cluster.
pub const NODES: &str = "cluster:nodes/";
/// Elected leaders.
pub const LEADERS: &str = "cluster:leader/";
/// Held locks.
pub const LOCKS: &str = "cluster:locks/";
/// Waiters of locks.
pub const LOCK_QUEUE: &str = "cluster:lock-queue/";
/// Partitions and their owners.
pub const ASSIGNMENTS: &str = "cluster:assignments/";
/// Hand-offs stored by reference.
pub const HANDOFFS: &str = "cluster:handoffs/";
/// Raft groups of applications.
pub const RAFT_GROUPS: &str = "cluster:raft/groups/";
/// Discovery data of groups.
pub const RAFT_METADATA: &str = "cluster:raft/metadata/";
/// Join requests of groups.
pub const RAFT_JOINS: &str = "cluster:raft/join-requests/";

/// A member's key.
pub fn node(id: &str) -> String {
    format!("{NODES}{id}")
}

/// The key of an elected leader.
pub fn leader(name: &str) -> String {
    format!("{LEADERS}{name}")
}

/// The key of a held lock.
pub fn lock(name: &str) -> String {
    format!("{LOCKS}{name}")
}

/// The queue of a lock. Names may contain slashes; they are escaped into one segment, so that no queue is
/// inside another.
pub fn lock_queue(name: &str) -> String {
    format!("{LOCK_QUEUE}{}/", segment(name))
}

/// The partitions of a group.
pub fn assignments(group: &str) -> String {
    format!("{ASSIGNMENTS}{}/", segment(group))
}

/// One partition of a group.
pub fn assignment(group: &str, partition: &str) -> String {
    format!("{}{}", assignments(group), segment(partition))
}

/// The chunks of one hand-off.
pub fn handoff(group: &str, partition: &str, id: &str) -> String {
    format!("{HANDOFFS}{}/{}/{id}/", segment(group), segment(partition))
}

/// The Raft group of an application.
pub fn raft_group(app: &str) -> String {
    format!("{RAFT_GROUPS}{}", segment(app))
}

/// Discovery data of an application's group.
pub fn raft_metadata(app: &str) -> String {
    format!("{RAFT_METADATA}{}", segment(app))
}

/// The join request of a node to an application's group.
pub fn raft_join(app: &str, node: &str) -> String {
    format!("{RAFT_JOINS}{}/{}", segment(app), segment(node))
}

/// Escapes a name into one key segment.
pub fn segment(name: &str) -> String {
    if name.contains(['/', '%']) { name.replace('%', "%25").replace('/', "%2F") } else { name.to_owned() }
}

/// Reverses [`segment`].
pub fn name(segment: &str) -> String {
    segment.replace("%2F", "/").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_slashes_are_distinct_and_round_trip() {
        for text in ["a", "a/b", "a%2Fb", "50%", ""] {
            assert!(!segment(text).contains('/'));
            assert_eq!(name(&segment(text)), text);
        }
        assert!(!lock_queue("a/b").starts_with(&lock_queue("a")));
    }
}
