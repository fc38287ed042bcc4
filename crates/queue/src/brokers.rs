//! The brokers of the cluster as this one knows them: who runs, and where clients reach them.
//!
//! A view of the node and member records of the state repository. This broker is always in it, with the address it
//! knows itself by: without any records it is alone.

use std::collections::BTreeMap;
use std::sync::Mutex;

use moim_base::BrokerId;
use moim_cluster::Entry;
use moim_cluster::nodes::{LiveMember, MEMBERS, MemberRecord, NODES, NodeOrder, NodeRecord, ORDERS, node_of};
use moim_replica::controller::Maker;
use moim_replica::keys;

use crate::loops::lock;

/// A broker that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LiveBroker {
    pub(crate) id: BrokerId,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) rack: Option<String>,
}

#[derive(Default)]
struct Known {
    /// By node: what it says of itself.
    nodes: BTreeMap<i32, NodeRecord>,
    /// By node: its present run.
    members: BTreeMap<i32, LiveMember>,
    /// By node: what an operator wants of it.
    orders: BTreeMap<i32, NodeOrder>,
    /// Who places and elects.
    controller: Option<i32>,
}

/// All brokers.
#[derive(Default)]
pub(crate) struct Brokers {
    known: Mutex<Known>,
}

impl Brokers {
    /// Takes in a record about nodes; false when the key is none of these.
    pub(crate) fn on_put(&self, entry: &Entry) -> bool {
        let key = entry.key.as_str();
        if let Some(id) = node_of(key, NODES) {
            match NodeRecord::from_bytes(&entry.value) {
                Ok(record) => {
                    lock(&self.known).nodes.insert(id, record);
                }
                Err(error) => tracing::error!(node = id, %error, "the record of a node is passed over"),
            }
        } else if let Some(id) = node_of(key, MEMBERS) {
            match MemberRecord::from_bytes(&entry.value) {
                Ok(record) => {
                    let record = MemberRecord { node_id: id, ..record };
                    let live = LiveMember { record, broker_epoch: entry.create_revision };
                    lock(&self.known).members.insert(id, live);
                }
                Err(error) => tracing::error!(node = id, %error, "the mark of a node is passed over"),
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

    /// A record is gone.
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

    /// Starts over from a whole listing.
    pub(crate) fn reset(&self, entries: &[Entry]) {
        *lock(&self.known) = Known::default();
        for entry in entries {
            self.on_put(entry);
        }
    }

    /// Every broker that runs and serves the queue, by number; `me` among them whatever the records say.
    pub(crate) fn live(&self, me: LiveBroker) -> Vec<LiveBroker> {
        let known = lock(&self.known);
        let others = known.members.keys().filter(|id| **id != me.id.0).filter_map(|id| known.broker(*id));
        let mut live: Vec<LiveBroker> = others.collect();
        live.push(me);
        live.sort_by_key(|broker| broker.id.0);
        live
    }

    /// Whether a node is known and serves the queue, running or not.
    pub(crate) fn is_registered(&self, me: BrokerId, id: i32) -> bool {
        id == me.0 || lock(&self.known).broker(id).is_some()
    }

    /// Another broker, if it runs.
    pub(crate) fn other(&self, id: BrokerId) -> Option<LiveBroker> {
        let known = lock(&self.known);
        known.members.contains_key(&id.0).then(|| known.broker(id.0)).flatten()
    }

    /// Places new partitions on the brokers that run. It has not counted what is there. `me` serves, though its record may
    /// not say yet where.
    pub(crate) fn maker(&self, me: BrokerId) -> Maker {
        let known = lock(&self.known);
        let serves = |node: &&NodeRecord| !node.kafka.is_empty() || node.node_id == me.0;
        let nodes: Vec<NodeRecord> = known.nodes.values().filter(serves).cloned().collect();
        let members: Vec<LiveMember> = known.members.values().cloned().collect();
        Maker::new(&nodes, &members, &known.orders)
    }

    /// The present run of a node, if it runs.
    pub(crate) fn member(&self, id: BrokerId) -> Option<LiveMember> {
        lock(&self.known).members.get(&id.0).cloned()
    }

    /// The node whose controller places and elects, if it is known.
    pub(crate) fn controller(&self) -> Option<i32> {
        lock(&self.known).controller
    }
}

impl Known {
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

/// Whether a node is among those that run.
pub(crate) fn is_live(live: &[LiveBroker], node: i32) -> bool {
    live.iter().any(|broker| broker.id.0 == node)
}

#[cfg(test)]
mod tests {
    use moim_cluster::nodes::{MemberRecord, member_key, node_key};

    use super::*;

    fn entry(key: String, value: bytes::Bytes) -> Entry {
        Entry { key, value, create_revision: 5, mod_revision: 6, version: 1, lease: None }
    }

    fn me() -> LiveBroker {
        LiveBroker { id: BrokerId(2), host: "here".into(), port: 1, rack: None }
    }

    #[test]
    fn those_who_run_and_serve_are_listed_and_oneself_always() {
        let brokers = Brokers::default();
        assert_eq!(brokers.live(me()), [me()]);
        for (id, kafka) in [(1, "one:9092"), (2, "wrong:1"), (3, ""), (4, "[::1]:7")] {
            let node =
                NodeRecord { node_id: id, kafka: kafka.into(), zone: "z".into(), ..NodeRecord::default() };
            assert!(brokers.on_put(&entry(node_key(id), node.to_bytes())));
        }
        assert_eq!(brokers.live(me()), [me()], "a node that is known need not run");
        let known = |id| brokers.is_registered(BrokerId(2), id);
        assert!(known(1) && known(2) && !known(3) && known(4) && !known(5));
        for id in [1, 3, 4] {
            assert!(brokers.on_put(&entry(member_key(id), MemberRecord::default().to_bytes())));
        }
        let live = brokers.live(me());
        assert_eq!(live.iter().map(|b| b.id.0).collect::<Vec<_>>(), [1, 2, 4], "3 has no listener");
        assert_eq!((live[2].host.as_str(), live[2].port), ("::1", 7));
        assert_eq!(brokers.member(BrokerId(1)).map(|member| member.broker_epoch), Some(5));
        assert_eq!(brokers.maker(BrokerId(2)).nodes(), 2, "2 does not run, 3 has no listener");
        brokers.on_delete(&member_key(1));
        assert_eq!(brokers.other(BrokerId(1)), None);
        assert!(!brokers.on_put(&entry("/moim/topics/t".into(), bytes::Bytes::new())));
    }
}
