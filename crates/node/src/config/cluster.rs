//! The keys about the cluster this node is part of: its etcd and peer listeners, and how it finds the others.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{KIB, MIB, rule, split_host_port};

/// `[etcd]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EtcdConfig {
    /// Port of the etcd listener; 0 picks a free one.
    pub port: u16,
    /// `HOST:PORT` told to clients; empty means the listener's own address.
    pub advertise: String,
    /// Connections served at a time; further ones are closed at once.
    pub max_connections: u32,
    /// How large the keys and values may grow together before writes are refused.
    pub quota_bytes: u64,
    /// History older than this is forgotten; 0 keeps it until a client compacts.
    pub compaction_retention_ms: u64,
}

/// `[peer]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerConfig {
    /// Port other nodes connect to; 0 picks a free one.
    pub port: u16,
    /// `HOST:PORT` told to other nodes; empty means the listener's own address.
    pub advertise: String,
}

/// `[cluster]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterConfig {
    /// The founders: `1=HOST:PEER,2=…`, this node included. Looked at by an empty data folder only.
    pub initial: String,
    /// `HOST:PEER` of any node of the cluster to join; several with commas between.
    pub join: String,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self {
            port: 2379,
            advertise: String::new(),
            max_connections: 10_000,
            quota_bytes: 2 << 30,
            compaction_retention_ms: 60 * 60 * 1000,
        }
    }
}

impl Default for PeerConfig {
    fn default() -> Self {
        Self { port: 9645, advertise: String::new() }
    }
}

impl ClusterConfig {
    /// The founders by node id.
    pub(crate) fn founders(&self) -> Result<BTreeMap<i32, String>, String> {
        let mut founders = BTreeMap::new();
        for part in self.initial.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (id, address) = part
                .split_once('=')
                .and_then(|(id, address)| Some((id.trim().parse::<i32>().ok()?, address.trim())))
                .filter(|(id, address)| *id >= 0 && split_host_port(address).is_some())
                .ok_or_else(|| format!("must be 1=HOST:PORT,2=HOST:PORT,… and `{part}` is not"))?;
            if founders.values().any(|other| other == address) {
                return Err(format!("must name {address} once"));
            }
            if founders.insert(id, address.to_owned()).is_some() {
                return Err(format!("must name node {id} once"));
            }
        }
        Ok(founders)
    }

    /// Where to ask to be let in.
    pub(crate) fn join_addresses(&self) -> Vec<String> {
        self.join.split(',').map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
    }
}

/// The rules of these sections.
pub(super) fn check(
    etcd: &EtcdConfig,
    peer: &PeerConfig,
    cluster: &ClusterConfig,
    node_id: i32,
) -> Result<(), (&'static str, String)> {
    let address = |text: &str| text.is_empty() || split_host_port(text).is_some();
    rule(address(&etcd.advertise), "etcd.advertise", "must be HOST:PORT")?;
    rule(etcd.max_connections > 0, "etcd.max_connections", "must be more than 0")?;
    rule(etcd.quota_bytes >= 16 * MIB, "etcd.quota_bytes", "must be 16 MiB or more")?;
    rule(
        etcd.compaction_retention_ms == 0 || etcd.compaction_retention_ms >= KIB,
        "etcd.compaction_retention_ms",
        "must be 0 (never) or at least 1024 ms",
    )?;
    rule(address(&peer.advertise), "peer.advertise", "must be HOST:PORT")?;
    let founders = cluster.founders().map_err(|why| ("cluster.initial", why))?;
    rule(
        founders.is_empty() || founders.contains_key(&node_id),
        "cluster.initial",
        "must name this node (node.id) too",
    )?;
    let join = cluster.join_addresses();
    rule(join.iter().all(|one| split_host_port(one).is_some()), "cluster.join", "must be HOST:PORT,…")?;
    rule(
        founders.is_empty() || join.is_empty(),
        "cluster.join",
        "must be empty when cluster.initial is given: a node founds a cluster or joins one",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn founders_are_read_as_people_write_them() {
        let read = |initial: &str| ClusterConfig { initial: initial.into(), join: String::new() }.founders();
        assert_eq!(
            read("1=a:1, 2=b:2,3=[::1]:3").unwrap().into_iter().collect::<Vec<_>>(),
            [(1, "a:1".to_owned()), (2, "b:2".to_owned()), (3, "[::1]:3".to_owned())]
        );
        assert!(read("").unwrap().is_empty());
        for wrong in ["1", "a:1", "x=a:1", "-1=a:1", "1=a", "1=a:1,1=b:1", "1=a:1,2=a:1"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
