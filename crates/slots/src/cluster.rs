//! Who owns which slot: the view that redirections and the CLUSTER commands answer from.
//!
//! The view is made from the coordination core and swapped whole; a command sees one view. A *node* here is a Redis node:
//! one replica of one shard, with its own id and address.

use std::fmt::Write as _;

use crate::SLOTS;
use crate::error::Error;

/// No shard.
pub const NOBODY: u16 = u16::MAX;

/// The slots, the shards and where their replicas are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The shard of each slot.
    pub owners: Vec<u16>,
    /// By number.
    pub shards: Vec<ShardView>,
    /// Grows with every change of owners.
    pub epoch: u64,
    /// Slots on their way: (slot, from, to).
    pub moving: Vec<(u16, u16, u16)>,
    /// The epoch of the slot map that it shows.
    pub map_epoch: u64,
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ShardView {
    /// Its replicas; the primary first when there is one.
    pub nodes: Vec<NodeView>,
    /// Whether the first is the primary.
    pub has_primary: bool,
    /// Grows with every new primary.
    pub epoch: u64,
}

/// One replica of one shard, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Forty hexadecimal digits.
    pub id: String,
    /// Where clients reach it.
    pub host: String,
    /// And on which port.
    pub port: u16,
    /// Whether it is there.
    pub is_up: bool,
}

impl Default for View {
    fn default() -> Self {
        Self { owners: vec![NOBODY; SLOTS], shards: Vec::new(), epoch: 0, moving: Vec::new(), map_epoch: 0 }
    }
}

impl View {
    /// The shard that owns a slot.
    pub fn owner(&self, slot: u16) -> Option<u16> {
        self.owners.get(usize::from(slot)).copied().filter(|shard| *shard != NOBODY)
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

    /// The runs of slots of a shard: first and last.
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

    /// How many slots have an owner.
    pub fn assigned(&self) -> usize {
        self.owners.iter().filter(|owner| **owner != NOBODY).count()
    }

    /// How many slots have an owner that has a primary.
    pub fn served(&self) -> usize {
        let served: Vec<bool> = (0..self.shards.len()).map(|at| self.primary(at as u16).is_some()).collect();
        self.owners.iter().filter(|owner| served.get(usize::from(**owner)).copied().unwrap_or(false)).count()
    }

    /// The lines of CLUSTER NODES, as the node `me` sees them.
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

/// The view of a node alone: one shard with all slots.
pub fn alone(id: String, host: String, port: u16) -> View {
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

/// Where a command with keys has to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// It is served here.
    Here,
    /// `MOVED slot host:port`
    Moved(u16, String),
    /// `ASK slot host:port`
    Ask(u16, String),
    /// Some keys are here, some are gone.
    TryAgain,
    /// Nobody owns the slot.
    NotServed,
}

impl Route {
    /// What the client hears, unless the command is served here.
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

/// What routing needs to know of a command and its client.
#[derive(Clone, Copy)]
pub struct Asked {
    /// The slot of its keys.
    pub slot: u16,
    /// Our shard.
    pub shard: u16,
    /// Whether we are its primary.
    pub is_primary: bool,
    /// ASKING came just before, or the command implies it.
    pub asking: bool,
    /// READONLY is on and the command does not write.
    pub reads_replica: bool,
    /// Keys it names.
    pub keys: usize,
    /// How many of them are not here.
    pub missing: usize,
}

/// The order of checks of a Redis Cluster node for a command with keys of one slot.
pub fn route(view: &View, asked: Asked) -> Route {
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

    fn two() -> View {
        let node = |id: char, port| NodeView {
            id: id.to_string().repeat(40),
            host: "127.0.0.1".into(),
            port,
            is_up: true,
        };
        let shard = |nodes| ShardView { nodes, has_primary: true, epoch: 3 };
        let mut owners = vec![0; SLOTS];
        owners[8192..].fill(1);
        owners[100] = NOBODY;
        View {
            owners,
            shards: vec![shard(vec![node('a', 1), node('b', 2)]), shard(vec![node('c', 3)])],
            epoch: 5,
            moving: vec![(7, 0, 1)],
            map_epoch: 5,
        }
    }

    #[test]
    fn commands_are_sent_where_they_belong() {
        let asked = |slot, shard, is_primary| Asked {
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
            ("nobody's slot", asked(100, 0, true), Route::NotServed),
            ("replica without READONLY", asked(1, 0, false), moved(1, 1)),
            ("replica with READONLY", Asked { reads_replica: true, ..asked(1, 0, false) }, Route::Here),
            ("replica, other slot", Asked { reads_replica: true, ..asked(9000, 0, false) }, moved(9000, 3)),
            ("migrating, key here", asked(7, 0, true), Route::Here),
            ("migrating, key gone", Asked { missing: 1, ..asked(7, 0, true) }, ask.clone()),
            ("migrating, some gone", Asked { keys: 2, missing: 1, ..asked(7, 0, true) }, Route::TryAgain),
            ("migrating, all gone", Asked { keys: 2, missing: 2, ..asked(7, 0, true) }, ask),
            ("importing without ASKING", asked(7, 1, true), moved(7, 1)),
            ("importing with ASKING", Asked { asking: true, missing: 1, ..asked(7, 1, true) }, Route::Here),
            (
                "importing, several, one missing",
                Asked { asking: true, keys: 2, missing: 1, ..asked(7, 1, true) },
                Route::TryAgain,
            ),
            ("ASKING for a slot that stays", Asked { asking: true, ..asked(1, 1, true) }, moved(1, 1)),
        ] {
            assert_eq!(route(&two(), asked), wanted, "{name}");
        }
    }

    #[test]
    fn nodes_are_written_as_redis_writes_them() {
        let text = two().nodes_text(&"a".repeat(40));
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
