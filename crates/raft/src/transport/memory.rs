//! An in-process network for tests: members by address, links that can be cut.
//!
//! Requests are encoded as on the wire.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::{BoxFuture, Router, Transport, TransportError};
use crate::types::{GroupId, Member};

#[derive(Default)]
struct Wires {
    members: HashMap<String, Router>,
    /// From, to.
    cut: HashSet<(String, String)>,
    /// Requests by sender, delivered or not.
    sent: HashMap<String, u64>,
}

/// The network.
#[derive(Clone, Default)]
pub struct MemoryNetwork {
    wires: Arc<Mutex<Wires>>,
}

impl MemoryNetwork {
    /// A network without members.
    pub fn new() -> Self {
        Self::default()
    }

    fn wires(&self) -> MutexGuard<'_, Wires> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects a member; returns its transport.
    pub fn join(&self, address: &str, router: Router) -> Arc<MemoryTransport> {
        self.wires().members.insert(address.to_owned(), router);
        Arc::new(MemoryTransport { network: self.clone(), address: address.to_owned() })
    }

    /// Disconnects a member.
    pub fn leave(&self, address: &str) {
        self.wires().members.remove(address);
    }

    /// Cuts every link between `address` and the others, in both directions.
    pub fn isolate(&self, address: &str) {
        let mut wires = self.wires();
        let others: Vec<String> = wires.members.keys().filter(|other| *other != address).cloned().collect();
        for other in others {
            wires.cut.insert((address.to_owned(), other.clone()));
            wires.cut.insert((other, address.to_owned()));
        }
    }

    /// Cuts every link from the others to `address`: it can send and receives nothing.
    pub fn deafen(&self, address: &str) {
        let mut wires = self.wires();
        let others: Vec<String> = wires.members.keys().filter(|other| *other != address).cloned().collect();
        wires.cut.extend(others.into_iter().map(|other| (other, address.to_owned())));
    }

    /// Restores every link.
    pub fn heal(&self) {
        self.wires().cut.clear();
    }

    /// The number of requests that a member has tried to send.
    pub fn sent_by(&self, address: &str) -> u64 {
        self.wires().sent.get(address).copied().unwrap_or(0)
    }

    fn route(&self, from: &str, to: &str) -> Option<Router> {
        let wires = self.wires();
        let cut = wires.cut.contains(&(from.to_owned(), to.to_owned()));
        if cut { None } else { wires.members.get(to).cloned() }
    }
}

/// One member's transport in a [`MemoryNetwork`].
pub struct MemoryTransport {
    network: MemoryNetwork,
    address: String,
}

impl Transport for MemoryTransport {
    fn call<'a>(
        &'a self,
        to: &'a Member,
        group: GroupId,
        request: Bytes,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Bytes, TransportError>> {
        Box::pin(async move {
            *self.network.wires().sent.entry(self.address.clone()).or_default() += 1;
            let unreachable = || TransportError::Unreachable(to.address.clone());
            let router = self.network.route(&self.address, &to.address).ok_or_else(unreachable)?;
            let reply = tokio::time::timeout(timeout, router.handle(group, request)).await;
            let reply = reply.map_err(|_| TransportError::TimedOut)?;
            // The return path may have been cut meanwhile.
            let back = self.network.route(&to.address, &self.address);
            back.ok_or_else(|| TransportError::Broken(to.address.clone()))?;
            Ok(reply)
        })
    }
}
