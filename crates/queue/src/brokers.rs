//! The brokers of the cluster as this one knows them: who runs, and where clients reach them.
//!
//! A view of the node and member records of the state repository. This broker is always in it, with the address it
//! knows itself by: without any records it is alone.

use std::collections::BTreeMap;
use std::sync::Mutex;

use moim_base::BrokerId;
use moim_cluster::Entry;
use moim_cluster::nodes::{MEMBERS, NODES, NodeRecord};

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
    /// By node: what it says of itself, and when it said so.
    nodes: BTreeMap<i32, (NodeRecord, i64)>,
    /// By node: its broker epoch.
    members: BTreeMap<i32, i64>,
}

/// All brokers.
#[derive(Default)]
pub(crate) struct Brokers {
    known: Mutex<Known>,
}

impl Brokers {
    /// Takes in a node or member record; false when the key is neither.
    pub(crate) fn on_put(&self, entry: &Entry) -> bool {
        if let Some(id) = number(&entry.key, NODES) {
            match NodeRecord::from_bytes(&entry.value) {
                Ok(record) => {
                    lock(&self.known).nodes.insert(id, (record, entry.mod_revision));
                }
                Err(error) => tracing::error!(node = id, %error, "the record of a node is passed over"),
            }
            return true;
        }
        if let Some(id) = number(&entry.key, MEMBERS) {
            lock(&self.known).members.insert(id, entry.create_revision);
            return true;
        }
        false
    }

    /// A record is gone.
    pub(crate) fn on_delete(&self, key: &str) {
        if let Some(id) = number(key, NODES) {
            lock(&self.known).nodes.remove(&id);
        }
        if let Some(id) = number(key, MEMBERS) {
            lock(&self.known).members.remove(&id);
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

    /// Another broker, if it runs.
    pub(crate) fn other(&self, id: BrokerId) -> Option<LiveBroker> {
        let known = lock(&self.known);
        known.members.contains_key(&id.0).then(|| known.broker(id.0)).flatten()
    }

    /// Which life of a node this is; 0 when it has no mark.
    pub(crate) fn epoch_of(&self, id: BrokerId) -> i64 {
        lock(&self.known).members.get(&id.0).copied().unwrap_or(0)
    }
}

impl Known {
    fn broker(&self, id: i32) -> Option<LiveBroker> {
        let (record, _) = self.nodes.get(&id)?;
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

fn number(key: &str, prefix: &str) -> Option<i32> {
    key.strip_prefix(prefix)?.parse().ok()
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
        for id in [1, 3, 4] {
            assert!(brokers.on_put(&entry(member_key(id), MemberRecord::default().to_bytes())));
        }
        let live = brokers.live(me());
        assert_eq!(live.iter().map(|b| b.id.0).collect::<Vec<_>>(), [1, 2, 4], "3 has no listener");
        assert_eq!((live[2].host.as_str(), live[2].port), ("::1", 7));
        assert_eq!(brokers.epoch_of(BrokerId(1)), 5);
        brokers.on_delete(&member_key(1));
        assert_eq!(brokers.other(BrokerId(1)), None);
        assert!(!brokers.on_put(&entry("/moim/topics/t".into(), bytes::Bytes::new())));
    }
}
