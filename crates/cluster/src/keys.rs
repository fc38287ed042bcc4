//! Where the library keeps what. Other programs read these keys; the names are part of the interface.
//!
//! | key | holds |
//! |---|---|
//! | `cluster:nodes/{node}` | a member, under its lease |
//! | `cluster:leader/{name}` | who leads work that nothing else coordinates, under its lease |
//! | `cluster:locks/{name}` | who holds a lock, under its lease |
//! | `cluster:lock-queue/{name}/{lease}` | who waits for it; the oldest holds it |
//! | `cluster:assignments/{group}/{partition}` | who owns a partition, and what it handed over |
//! | `cluster:handoffs/{group}/{partition}/{id}/{piece}` | a hand-off too large for its record |
//! | `cluster:raft/groups/{app}` | the Raft group of an application |
//! | `cluster:raft/metadata/{app}` | how the group is found |
//! | `cluster:raft/join-requests/{app}/{node}` | who wants to join it, under a lease |
//! | `/{namespace}/nodes/{id}` | a registered server |
//! | `/{namespace}/routing` | the head of the routing table |
//! | `/{namespace}/routing/pieces/{version}/{piece}` | its pieces |

/// Members of the cluster.
pub const NODES: &str = "cluster:nodes/";
/// Elected leaders.
pub const LEADERS: &str = "cluster:leader/";
/// Locks that are held.
pub const LOCKS: &str = "cluster:locks/";
/// Those who wait for locks.
pub const LOCK_QUEUE: &str = "cluster:lock-queue/";
/// Partitions and their owners.
pub const ASSIGNMENTS: &str = "cluster:assignments/";
/// Hand-offs that are too large for a record.
pub const HANDOFFS: &str = "cluster:handoffs/";
/// Raft groups of applications.
pub const RAFT_GROUPS: &str = "cluster:raft/groups/";
/// How a group is found.
pub const RAFT_METADATA: &str = "cluster:raft/metadata/";
/// Who wants to join a group.
pub const RAFT_JOINS: &str = "cluster:raft/join-requests/";

/// A member's key.
pub fn node(id: &str) -> String {
    format!("{NODES}{id}")
}

/// The key of an elected leader.
pub fn leader(name: &str) -> String {
    format!("{LEADERS}{name}")
}

/// The key of a lock that is held.
pub fn lock(name: &str) -> String {
    format!("{LOCKS}{name}")
}

/// The queue of a lock. Names may hold slashes; as one segment they do not, so that no queue is inside another.
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

/// The pieces of one hand-off.
pub fn handoff(group: &str, partition: &str, id: &str) -> String {
    format!("{HANDOFFS}{}/{}/{id}/", segment(group), segment(partition))
}

/// The Raft group of an application.
pub fn raft_group(app: &str) -> String {
    format!("{RAFT_GROUPS}{}", segment(app))
}

/// How the group of an application is found.
pub fn raft_metadata(app: &str) -> String {
    format!("{RAFT_METADATA}{}", segment(app))
}

/// A node that wants to join the group of an application.
pub fn raft_join(app: &str, node: &str) -> String {
    format!("{RAFT_JOINS}{}/{}", segment(app), segment(node))
}

/// A name as one segment of a key.
pub fn segment(name: &str) -> String {
    if name.contains(['/', '%']) { name.replace('%', "%25").replace('/', "%2F") } else { name.to_owned() }
}

/// The name that [`segment`] was given.
pub fn name(segment: &str) -> String {
    segment.replace("%2F", "/").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_slashes_stay_apart_and_come_back() {
        for text in ["a", "a/b", "a%2Fb", "50%", ""] {
            assert!(!segment(text).contains('/'));
            assert_eq!(name(&segment(text)), text);
        }
        assert!(!lock_queue("a/b").starts_with(&lock_queue("a")));
    }
}
