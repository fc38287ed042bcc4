//! The system under test: three Moim nodes, or the six processes of a Redis Cluster.

use moim_interop::cluster::Cluster;
use moim_interop::net::listens;
use moim_interop::redis::RedisCluster;

pub(super) enum Subject {
    Moim(Cluster),
    Redis(RedisCluster),
}

impl Subject {
    /// Seed addresses for clients.
    pub(super) fn seeds(&self) -> Vec<String> {
        match self {
            Self::Moim(cluster) => {
                (0..cluster.len()).map(|node| cluster.server(node).unwrap().redis().to_owned()).collect()
            }
            Self::Redis(cluster) => {
                (0..moim_interop::redis::NODES).map(|node| cluster.address(node)).collect()
            }
        }
    }

    /// The primary of a random slot.
    pub(super) fn any_primary(&self, random: &mut fastrand::Rng) -> usize {
        let ports: Vec<u16> = self.seeds().iter().find_map(|seed| primaries(seed)).unwrap_or_default();
        let port = *ports.get(random.usize(..ports.len().max(1))).expect("there are primaries");
        let found = match self {
            Self::Moim(cluster) => cluster.pids().iter().position(|pid| listens(*pid, port)),
            Self::Redis(cluster) => cluster.node_at(port),
        };
        found.expect("a node listens on the primary's port")
    }

    pub(super) fn kill(&mut self, node: usize) {
        match self {
            Self::Moim(cluster) => cluster.kill(node),
            Self::Redis(cluster) => cluster.kill(node),
        }
        .unwrap();
    }

    pub(super) fn restart(&mut self, node: usize) {
        match self {
            Self::Moim(cluster) => cluster.restart(node),
            Self::Redis(cluster) => cluster.restart(node),
        }
        .unwrap_or_else(|error| panic!("node {}: {error:#}", node + 1));
    }

    pub(super) fn pause(&self, node: usize) {
        match self {
            Self::Moim(cluster) => cluster.pause(node),
            Self::Redis(cluster) => cluster.pause(node),
        }
        .unwrap();
    }

    pub(super) fn resume(&self, node: usize) {
        match self {
            Self::Moim(cluster) => cluster.resume(node),
            Self::Redis(cluster) => cluster.resume(node),
        }
        .unwrap();
    }

    /// Isolates a node from the others in both directions; clients reach it.
    pub(super) fn isolate(&self, node: usize) {
        match self {
            Self::Moim(cluster) => cluster.net().unwrap().isolate(node),
            Self::Redis(cluster) => cluster.isolate(node),
        }
    }

    pub(super) fn heal(&self, reset: bool) {
        match self {
            Self::Moim(cluster) => cluster.net().unwrap().heal(reset),
            Self::Redis(cluster) => cluster.heal(reset),
        }
    }

    pub(super) fn log_tails(&self) -> String {
        match self {
            Self::Moim(cluster) => cluster.log_tails(),
            Self::Redis(cluster) => cluster.log_tails(),
        }
    }
}

/// The ports of the primaries, according to one node.
fn primaries(address: &str) -> Option<Vec<u16>> {
    let nodes = crate::load::ask(address, &["CLUSTER", "NODES"])?;
    let port = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let (address, flags) = (words.get(1)?, words.get(2)?);
        let is_primary = flags.contains("master") && !flags.contains("fail") && words.len() > 8;
        let port = address.split('@').next()?.rsplit(':').next()?.parse().ok()?;
        is_primary.then_some(port)
    };
    let ports: Vec<u16> = nodes.lines().filter_map(port).collect();
    (!ports.is_empty()).then_some(ports)
}
