//! The brokers of the cluster: which are live, and their advertised addresses.
//!
//! A view of the node and member records of the state repository. This broker is always included, with the address it
//! knows of itself: without any records it is the whole cluster.

use std::collections::BTreeMap;
use std::sync::Mutex;

use moim_base::BrokerId;
use moim_replica::controller::Maker;
use moim_replica::keys;
use moim_state::Entry;
use moim_state::nodes::{LiveMember, MEMBERS, MemberRecord, NODES, NodeOrder, NodeRecord, ORDERS, node_of};

use crate::loops::lock;

/// A live broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LiveBroker {
    pub(crate) id: BrokerId,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) rack: Option<String>,
}

#[derive(Default)]
struct ClusterRecords {
    /// Node records by node id.
    nodes: BTreeMap<i32, NodeRecord>,
    /// Live members by node id.
    members: BTreeMap<i32, LiveMember>,
    /// Operator orders by node id.
    orders: BTreeMap<i32, NodeOrder>,
    /// The node id of the controller.
    controller: Option<i32>,
}

/// All brokers.
#[derive(Default)]
pub(crate) struct Brokers {
    known: Mutex<ClusterRecords>,
}

impl Brokers {
    /// Applies a node, member, order or controller record; false for any other key.
    pub(crate) fn on_put(&self, entry: &Entry) -> bool {
        let key = entry.key.as_str();
        if let Some(id) = node_of(key, NODES) {
            match NodeRecord::from_bytes(&entry.value) {
                Ok(record) => {
                    lock(&self.known).nodes.insert(id, record);
                }
                Err(error) => tracing::error!(node = id, %error, "undecodable node record ignored"),
            }
        } else if let Some(id) = node_of(key, MEMBERS) {
            match MemberRecord::from_bytes(&entry.value) {
                Ok(record) => {
                    let record = MemberRecord { node_id: id, ..record };
                    let live = LiveMember { record, broker_epoch: entry.create_revision };
                    lock(&self.known).members.insert(id, live);
                }
                Err(error) => tracing::error!(node = id, %error, "undecodable member record ignored"),
            }
        } else if let Some(id) = node_of(key, ORDERS) {
            let mut known = lock(&self.known);
            match NodeOrder::parse(&entry.value) {
                Some(order) => known.orders.insert(id, order),
                None => known.orders.remove(&id),
            };
        } else if key == keys::CONTROLLER {
            let value: Option<serde_json::Value> = serde_json::from_slice(&entry.value).ok();
            let id = value.and_then(|value| i32::try_from(value.get("node_id")?.as_i64()?).ok());
            lock(&self.known).controller = id;
        } else {
            return false;
        }
        true
    }

    /// Applies the deletion of a record.
    pub(crate) fn on_delete(&self, key: &str) {
        let mut known = lock(&self.known);
        if let Some(id) = node_of(key, NODES) {
            known.nodes.remove(&id);
        } else if let Some(id) = node_of(key, MEMBERS) {
            known.members.remove(&id);
        } else if let Some(id) = node_of(key, ORDERS) {
            known.orders.remove(&id);
        } else if key == keys::CONTROLLER {
            known.controller = None;
        }
    }

    /// Replaces the view by a full listing.
    pub(crate) fn reset(&self, entries: &[Entry]) {
        *lock(&self.known) = ClusterRecords::default();
        for entry in entries {
            self.on_put(entry);
        }
    }

    /// All live brokers that serve the queue, by broker id; `me` is always included, whatever the records say.
    pub(crate) fn live(&self, me: LiveBroker) -> Vec<LiveBroker> {
        let known = lock(&self.known);
        let others = known.members.keys().filter(|id| **id != me.id.0).filter_map(|id| known.broker(*id));
        let mut live: Vec<LiveBroker> = others.collect();
        live.push(me);
        live.sort_by_key(|broker| broker.id.0);
        live
    }

    /// True if a node is registered and serves the queue, live or not.
    pub(crate) fn is_registered(&self, me: BrokerId, id: i32) -> bool {
        id == me.0 || lock(&self.known).broker(id).is_some()
    }

    /// Another broker, if it is live.
    pub(crate) fn other(&self, id: BrokerId) -> Option<LiveBroker> {
        let known = lock(&self.known);
        known.members.contains_key(&id.0).then(|| known.broker(id.0)).flatten()
    }

    /// A replica placement over the live brokers. It has not counted the existing partitions. `me` counts as serving,
    /// even if its record does not have its address yet.
    pub(crate) fn maker(&self, me: BrokerId) -> Maker {
        let known = lock(&self.known);
        let serves = |node: &&NodeRecord| !node.kafka.is_empty() || node.node_id == me.0;
        let nodes: Vec<NodeRecord> = known.nodes.values().filter(serves).cloned().collect();
        let members: Vec<LiveMember> = known.members.values().cloned().collect();
        Maker::new(&nodes, &members, &known.orders)
    }

    /// The current member record of a node, if it is live.
    pub(crate) fn member(&self, id: BrokerId) -> Option<LiveMember> {
        lock(&self.known).members.get(&id.0).cloned()
    }

    /// The node id of the controller, if known.
    pub(crate) fn controller(&self) -> Option<i32> {
        lock(&self.known).controller
    }
}

impl ClusterRecords {
    fn broker(&self, id: i32) -> Option<LiveBroker> {
        let record = self.nodes.get(&id)?;
        let (host, port) = record.kafka.rsplit_once(':')?;
        Some(LiveBroker {
            id: BrokerId(id),
            host: host.trim_matches(['[', ']']).to_owned(),
            port: port.parse().ok()?,
            rack: Some(record.zone.clone()).filter(|zone| !zone.is_empty()),
        })
    }
}

/// True if a node is among the live brokers.
pub(crate) fn is_live(live: &[LiveBroker], node: i32) -> bool {
    live.iter().any(|broker| broker.id.0 == node)
}

#[cfg(test)]
mod tests {
    use moim_state::nodes::{MemberRecord, member_key, node_key};

    use super::*;

    fn entry(key: String, value: bytes::Bytes) -> Entry {
        Entry { key, value, create_revision: 5, mod_revision: 6, version: 1, lease: None }
    }

    fn me() -> LiveBroker {
        LiveBroker { id: BrokerId(2), host: "here".into(), port: 1, rack: None }
    }

    #[test]
    fn live_brokers_with_a_listener_and_this_broker_are_listed() {
        let brokers = Brokers::default();
        assert_eq!(brokers.live(me()), [me()]);
        for (id, kafka) in [(1, "one:9092"), (2, "wrong:1"), (3, ""), (4, "[::1]:7")] {
            let node =
                NodeRecord { node_id: id, kafka: kafka.into(), zone: "z".into(), ..NodeRecord::default() };
            assert!(brokers.on_put(&entry(node_key(id), node.to_bytes())));
        }
        assert_eq!(brokers.live(me()), [me()], "a registered node need not be live");
        let known = |id| brokers.is_registered(BrokerId(2), id);
        assert!(known(1) && known(2) && !known(3) && known(4) && !known(5));
        for id in [1, 3, 4] {
            assert!(brokers.on_put(&entry(member_key(id), MemberRecord::default().to_bytes())));
        }
        let live = brokers.live(me());
        assert_eq!(live.iter().map(|b| b.id.0).collect::<Vec<_>>(), [1, 2, 4], "3 has no listener");
        assert_eq!((live[2].host.as_str(), live[2].port), ("::1", 7));
        assert_eq!(brokers.member(BrokerId(1)).map(|member| member.broker_epoch), Some(5));
        assert_eq!(brokers.maker(BrokerId(2)).nodes(), 2, "2 is not live, 3 has no listener");
        brokers.on_delete(&member_key(1));
        assert_eq!(brokers.other(BrokerId(1)), None);
        assert!(!brokers.on_put(&entry("/moim/topics/t".into(), bytes::Bytes::new())));
    }
}
