//! The ports of the nodes of a development cluster. Pure, except for the check whether a port is free.

use std::net::{Ipv4Addr, TcpListener};

use serde::{Deserialize, Serialize};

use super::wires;
use crate::exit::{Failure, Outcome, Status};

/// Ports of one node, from base + 100 * node.
const KAFKA: u16 = 0;
const REDIS: u16 = 1;
const ETCD: u16 = 2;
const ADMIN: u16 = 3;
const PEER: u16 = 4;
const LISTENERS: [u16; 5] = [KAFKA, REDIS, ETCD, ADMIN, PEER];
/// The usual start of the ephemeral port range: a port above that is free now may be taken later.
const OUTGOING: u16 = 32_768;
/// The distance of the ports of two nodes.
const STRIDE: u16 = 100;

/// Where the nodes of a cluster listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// How many nodes there are.
    pub(super) nodes: u16,
    /// The first port.
    pub(super) base: u16,
    /// Whether every node has a network of its own, with an address of its own.
    pub(super) apart: bool,
}

/// The addresses of one node, as cluster.json has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    /// The node.
    pub(crate) id: i32,
    /// Its process, while it runs.
    pub(crate) pid: Option<u32>,
    /// The queue.
    pub(crate) kafka: String,
    /// The store: the home shard.
    pub(crate) redis: Option<String>,
    /// The coordination core.
    pub(crate) etcd: String,
    /// Health, metrics, the admin API.
    pub(crate) admin: String,
    /// Other nodes.
    pub(crate) peer: String,
}

impl Plan {
    /// A plan whose ports are valid.
    pub(super) fn new(nodes: u16, base: u16) -> Outcome<Self> {
        let last = u32::from(base) + u32::from(nodes) * u32::from(STRIDE) + u32::from(PEER);
        if last > u32::from(u16::MAX) {
            return Err(Failure::usage(format!("--base-port {base}: the last port would be {last}"))
                .hint("choose a lower one, or 0 for any that is free"));
        }
        Ok(Self { nodes, base, apart: false })
    }

    /// A plan with ports that are free now.
    pub(super) fn anywhere_free(nodes: u16) -> Outcome<Self> {
        let room = nodes.saturating_mul(STRIDE).saturating_add(STRIDE);
        for _ in 0..200 {
            let plan = Self::new(nodes, fastrand::u16(10_000..OUTGOING.saturating_sub(room)))?;
            if plan.taken().is_none() {
                return Ok(plan);
            }
        }
        Err(Failure::new(Status::Conflict, "no free range of ports was found"))
    }

    /// A plan in which every node has the namespace that [`wires::node`] says.
    pub(super) fn apart(nodes: u16, base: u16) -> Outcome<Self> {
        Ok(Self { apart: true, ..Self::new(nodes, base)? })
    }

    /// Fails if one of the ports is in use.
    pub(super) fn check_free(&self) -> Outcome {
        match self.taken() {
            None => Ok(()),
            Some(port) => Err(Failure::new(Status::Conflict, format!("port {port} is in use"))
                .hint("another cluster may run here; choose other ports with --base-port, or 0 for any that is free")),
        }
    }

    fn taken(&self) -> Option<u16> {
        let ports = (1..=self.nodes).flat_map(|node| LISTENERS.map(|listener| self.port(node, listener)));
        ports.into_iter().find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_err())
    }

    fn port(&self, node: u16, listener: u16) -> u16 {
        self.base + node * STRIDE + listener
    }

    /// Every node with its addresses, none of them running.
    pub(super) fn members(&self) -> Vec<Member> {
        let host = |node: u16| if self.apart { wires::node(i32::from(node)).1 } else { Ipv4Addr::LOCALHOST };
        let at = |node, listener| format!("{}:{}", host(node), self.port(node, listener));
        let member = |node: u16| Member {
            id: i32::from(node),
            pid: None,
            kafka: at(node, KAFKA),
            redis: Some(at(node, REDIS)),
            etcd: at(node, ETCD),
            admin: at(node, ADMIN),
            peer: at(node, PEER),
        };
        (1..=self.nodes).map(member).collect()
    }
}

/// The value of `--initial-cluster`: every node and its peer address.
pub(super) fn initial_cluster(members: &[Member]) -> String {
    let one = |member: &Member| format!("{}={}", member.id, member.peer);
    members.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_where_the_contract_says() {
        let members = Plan::new(3, 20_000).unwrap().members();
        assert_eq!(members.len(), 3);
        let second = &members[1];
        assert_eq!(
            (second.id, second.kafka.as_str(), second.etcd.as_str()),
            (2, "127.0.0.1:20200", "127.0.0.1:20202")
        );
        assert_eq!((second.admin.as_str(), second.peer.as_str()), ("127.0.0.1:20203", "127.0.0.1:20204"));
        assert_eq!(initial_cluster(&members), "1=127.0.0.1:20104,2=127.0.0.1:20204,3=127.0.0.1:20304");
    }

    #[test]
    fn ports_past_the_last_one_are_refused() {
        assert!(Plan::new(3, 65_231).is_ok());
        let refused = Plan::new(3, 65_232).unwrap_err();
        assert_eq!((refused.status, refused.message.contains("65536")), (Status::Usage, true), "{refused}");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let plan = Plan::anywhere_free(2).unwrap();
        plan.check_free().unwrap();
        let port = plan.port(2, ADMIN);
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        let refused = plan.check_free().unwrap_err();
        assert_eq!((refused.status, refused.message), (Status::Conflict, format!("port {port} is in use")));
    }
}
