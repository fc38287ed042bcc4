//! The view of the cluster: slot owners and node addresses, for redirections and the CLUSTER commands.
//!
//! The view is built from the coordination core and replaced as a whole; a command sees one view. A *node* here is a
//! Redis node: one replica of one shard, with its own id and address.

use std::fmt::Write as _;

use crate::SLOTS;
use crate::error::Error;

/// The owner of an unassigned slot.
pub const UNASSIGNED: u16 = u16::MAX;

/// The slot owners, and the shards with the addresses of their replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The owner of each slot.
    pub owners: Vec<u16>,
    /// The shards, by number.
    pub shards: Vec<ShardView>,
    /// The cluster epoch; grows with every change of an owner.
    pub epoch: u64,
    /// Slots in MIGRATING or IMPORTING state: (slot, source, target).
    pub moving: Vec<(u16, u16, u16)>,
    /// The epoch of the slot map in this view.
    pub map_epoch: u64,
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ShardView {
    /// The replicas; the primary first if there is one.
    pub nodes: Vec<NodeView>,
    /// True if the first node is the primary.
    pub has_primary: bool,
    /// The configuration epoch; grows with every new primary.
    pub epoch: u64,
}

/// A Redis node: one replica of one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// The node id: forty hexadecimal digits.
    pub id: String,
    /// The advertised host.
    pub host: String,
    /// The advertised port.
    pub port: u16,
    /// True if the node is live.
    pub is_up: bool,
}

impl Default for View {
    fn default() -> Self {
        Self {
            owners: vec![UNASSIGNED; SLOTS],
            shards: Vec::new(),
            epoch: 0,
            moving: Vec::new(),
            map_epoch: 0,
        }
    }
}

impl View {
    /// The owner of a slot.
    pub fn owner(&self, slot: u16) -> Option<u16> {
        self.owners.get(usize::from(slot)).copied().filter(|shard| *shard != UNASSIGNED)
    }

    /// The primary of a shard.
    pub fn primary(&self, shard: u16) -> Option<&NodeView> {
        let shard = self.shards.get(usize::from(shard))?;
        shard.nodes.first().filter(|_| shard.has_primary)
    }

    /// The node with this id, and its shard.
    pub fn find(&self, id: &str) -> Option<(u16, &NodeView)> {
        self.nodes().find(|(_, node, _)| node.id == id).map(|(shard, node, _)| (shard, node))
    }

    /// All nodes: (shard, node, whether it is the primary).
    pub fn nodes(&self) -> impl Iterator<Item = (u16, &NodeView, bool)> {
        self.shards.iter().enumerate().flat_map(|(at, shard)| {
            shard
                .nodes
                .iter()
                .enumerate()
                .map(move |(n, node)| (at as u16, node, n == 0 && shard.has_primary))
        })
    }

    /// The slot ranges of a shard: (first, last).
    pub fn ranges(&self, shard: u16) -> Vec<(u16, u16)> {
        let mut ranges: Vec<(u16, u16)> = Vec::new();
        for slot in (0..SLOTS as u16).filter(|slot| self.owners[usize::from(*slot)] == shard) {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot)),
            }
        }
        ranges
    }

    /// The number of slots with an owner.
    pub fn assigned(&self) -> usize {
        self.owners.iter().filter(|owner| **owner != UNASSIGNED).count()
    }

    /// The number of slots whose owner has a primary.
    pub fn served(&self) -> usize {
        let served: Vec<bool> = (0..self.shards.len()).map(|at| self.primary(at as u16).is_some()).collect();
        self.owners.iter().filter(|owner| served.get(usize::from(**owner)).copied().unwrap_or(false)).count()
    }

    /// The lines of CLUSTER NODES, from the point of view of the node `me`.
    pub fn nodes_text(&self, me: &str) -> String {
        let mut text = String::new();
        for (shard, node, is_primary) in self.nodes() {
            let state = &self.shards[usize::from(shard)];
            let role = match (is_primary, node.id == me) {
                (true, true) => "myself,master",
                (true, false) => "master",
                (false, true) => "myself,slave",
                (false, false) => "slave",
            };
            let failed = if node.is_up { "" } else { ",fail" };
            let of = match is_primary {
                true => "-",
                false => self.primary(shard).map_or("-", |primary| primary.id.as_str()),
            };
            let link = if node.is_up { "connected" } else { "disconnected" };
            let _ = write!(
                text,
                "{} {}:{}@{} {role}{failed} {of} 0 0 {} {link}",
                node.id,
                node.host,
                node.port,
                u32::from(node.port) + 10_000,
                state.epoch.max(1),
            );
            if is_primary {
                for (first, last) in self.ranges(shard) {
                    let _ = if first == last {
                        write!(text, " {first}")
                    } else {
                        write!(text, " {first}-{last}")
                    };
                }
                if node.id == me {
                    self.write_moving(shard, &mut text);
                }
            }
            text.push('\n');
        }
        text
    }

    fn write_moving(&self, shard: u16, text: &mut String) {
        for (slot, from, to) in &self.moving {
            if *from == shard {
                let target = self.primary(*to).map_or("?", |node| node.id.as_str());
                let _ = write!(text, " [{slot}->-{target}]");
            } else if *to == shard {
                let source = self.primary(*from).map_or("?", |node| node.id.as_str());
                let _ = write!(text, " [{slot}-<-{source}]");
            }
        }
    }
}

/// The view of a standalone node: one shard with all slots.
pub fn standalone(id: String, host: String, port: u16) -> View {
    View {
        owners: vec![0; SLOTS],
        shards: vec![ShardView {
            nodes: vec![NodeView { id, host, port, is_up: true }],
            has_primary: true,
            epoch: 1,
        }],
        epoch: 1,
        moving: Vec::new(),
        map_epoch: 1,
    }
}

/// The routing decision for a command with keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// This node serves the command.
    Here,
    /// `MOVED slot host:port`
    Moved(u16, String),
    /// `ASK slot host:port`
    Ask(u16, String),
    /// `TRYAGAIN`: some of the keys have migrated.
    TryAgain,
    /// `CLUSTERDOWN Hash slot not served`: the slot is unassigned.
    NotServed,
}

impl Route {
    /// The error reply, unless this node serves the command.
    pub(crate) fn check(self) -> Result<(), Error> {
        match self {
            Self::Here => Ok(()),
            Self::Moved(slot, to) => Err(Error::coded(format!("MOVED {slot} {to}"))),
            Self::Ask(slot, to) => Err(Error::coded(format!("ASK {slot} {to}"))),
            Self::TryAgain => Err(Error::coded("TRYAGAIN Multiple keys request during rehashing of slot")),
            Self::NotServed => Err(Error::SLOT_DOWN),
        }
    }
}

/// The properties of a command and its client that routing depends on.
#[derive(Clone, Copy)]
pub struct RouteRequest {
    /// The slot of the keys.
    pub slot: u16,
    /// The shard of this node.
    pub shard: u16,
    /// True if this node is its primary.
    pub is_primary: bool,
    /// ASKING preceded the command, or the command implies it.
    pub asking: bool,
    /// The client is in READONLY mode and the command does not write.
    pub reads_replica: bool,
    /// The number of keys.
    pub keys: usize,
    /// The number of keys that do not exist here.
    pub missing: usize,
}

/// Routes a command with keys of one slot, with the checks of a Redis Cluster node in their order.
pub fn route(view: &View, asked: RouteRequest) -> Route {
    let Some(owner) = view.owner(asked.slot) else { return Route::NotServed };
    let address = |shard: u16| view.primary(shard).map(|node| format!("{}:{}", node.host, node.port));
    let moving = view.moving.iter().find(|(slot, ..)| *slot == asked.slot);
    if owner == asked.shard && asked.is_primary {
        if let Some((_, _, to)) = moving
            && asked.missing > 0
        {
            if asked.missing < asked.keys {
                return Route::TryAgain;
            }
            return address(*to).map_or(Route::NotServed, |to| Route::Ask(asked.slot, to));
        }
        return Route::Here;
    }
    if let Some((_, _, to)) = moving
        && *to == asked.shard
        && asked.is_primary
        && asked.asking
    {
        return if asked.keys > 1 && asked.missing > 0 { Route::TryAgain } else { Route::Here };
    }
    if owner == asked.shard && !asked.is_primary && asked.reads_replica {
        return Route::Here;
    }
    address(owner).map_or(Route::NotServed, |to| Route::Moved(asked.slot, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_shards() -> View {
        let node = |id: char, port| NodeView {
            id: id.to_string().repeat(40),
            host: "127.0.0.1".into(),
            port,
            is_up: true,
        };
        let shard = |nodes| ShardView { nodes, has_primary: true, epoch: 3 };
        let mut owners = vec![0; SLOTS];
        owners[8192..].fill(1);
        owners[100] = UNASSIGNED;
        View {
            owners,
            shards: vec![shard(vec![node('a', 1), node('b', 2)]), shard(vec![node('c', 3)])],
            epoch: 5,
            moving: vec![(7, 0, 1)],
            map_epoch: 5,
        }
    }

    #[test]
    fn commands_are_routed_as_in_redis_cluster() {
        let asked = |slot, shard, is_primary| RouteRequest {
            slot,
            shard,
            is_primary,
            asking: false,
            reads_replica: false,
            keys: 1,
            missing: 0,
        };
        let moved = |slot, port: u16| Route::Moved(slot, format!("127.0.0.1:{port}"));
        let ask = Route::Ask(7, "127.0.0.1:3".into());
        for (name, asked, wanted) in [
            ("own slot", asked(1, 0, true), Route::Here),
            ("other slot", asked(9000, 0, true), moved(9000, 3)),
            ("unassigned slot", asked(100, 0, true), Route::NotServed),
            ("replica without READONLY", asked(1, 0, false), moved(1, 1)),
            (
                "replica with READONLY",
                RouteRequest { reads_replica: true, ..asked(1, 0, false) },
                Route::Here,
            ),
            (
                "replica, other slot",
                RouteRequest { reads_replica: true, ..asked(9000, 0, false) },
                moved(9000, 3),
            ),
            ("migrating, key here", asked(7, 0, true), Route::Here),
            ("migrating, key gone", RouteRequest { missing: 1, ..asked(7, 0, true) }, ask.clone()),
            (
                "migrating, some gone",
                RouteRequest { keys: 2, missing: 1, ..asked(7, 0, true) },
                Route::TryAgain,
            ),
            ("migrating, all gone", RouteRequest { keys: 2, missing: 2, ..asked(7, 0, true) }, ask),
            ("importing without ASKING", asked(7, 1, true), moved(7, 1)),
            (
                "importing with ASKING",
                RouteRequest { asking: true, missing: 1, ..asked(7, 1, true) },
                Route::Here,
            ),
            (
                "importing, several, one missing",
                RouteRequest { asking: true, keys: 2, missing: 1, ..asked(7, 1, true) },
                Route::TryAgain,
            ),
            ("ASKING for a slot that stays", RouteRequest { asking: true, ..asked(1, 1, true) }, moved(1, 1)),
        ] {
            assert_eq!(route(&two_shards(), asked), wanted, "{name}");
        }
    }

    #[test]
    fn cluster_nodes_has_the_format_of_redis() {
        let text = two_shards().nodes_text(&"a".repeat(40));
        let lines: Vec<_> = text.lines().collect();
        let (a, b, c) = ("a".repeat(40), "b".repeat(40), "c".repeat(40));
        assert_eq!(
            lines[0],
            format!("{a} 127.0.0.1:1@10001 myself,master - 0 0 3 connected 0-99 101-8191 [7->-{c}]")
        );
        assert_eq!(lines[1], format!("{b} 127.0.0.1:2@10002 slave {a} 0 0 3 connected"));
        assert_eq!(lines[2], format!("{c} 127.0.0.1:3@10003 master - 0 0 3 connected 8192-16383"));
    }
}
