//! A node and the connections to it. Nodes are found by address and kept across topologies, so that a refresh that changes
//! nothing changes no connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use moim_base::task::Scope;

use crate::address::Address;
use crate::connection::{Connection, Kind};
use crate::options::Options;
use crate::signals::Signals;

/// Connections of their own that are kept for the next caller.
const IDLE: usize = 16;

/// A node: its address and its connections, each made when first used.
pub(crate) struct Node {
    pub(crate) address: Address,
    /// For commands.
    pub(crate) main: Arc<Connection>,
    /// For reads while it is a replica.
    pub(crate) reads: Arc<Connection>,
    /// Connections of their own, waiting for a caller.
    idle: Mutex<Vec<Arc<Connection>>>,
    make: Make,
}

/// What every connection needs.
#[derive(Clone)]
pub(crate) struct Make {
    pub(crate) options: Arc<Options>,
    pub(crate) signals: Arc<Signals>,
    pub(crate) scope: Scope,
}

impl Make {
    pub(crate) fn connection(&self, address: &Address, kind: Kind) -> Arc<Connection> {
        Connection::new(address.clone(), kind, self.options.clone(), self.signals.clone(), self.scope.clone())
    }
}

impl Node {
    fn new(address: &Address, make: &Make) -> Arc<Self> {
        Arc::new(Self {
            address: address.clone(),
            main: make.connection(address, Kind::Shared),
            reads: make.connection(address, Kind::Reads),
            idle: Mutex::default(),
            make: make.clone(),
        })
    }

    /// A connection nobody else uses. Give it back with [`Node::give_back`] when nothing is under way on it.
    pub(crate) fn exclusive(&self) -> Arc<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(connection) = idle.pop() {
            if connection.is_up() {
                return connection;
            }
        }
        self.make.connection(&self.address, Kind::Exclusive)
    }

    pub(crate) fn give_back(&self, connection: Arc<Connection>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.is_up() && idle.len() < IDLE {
            idle.push(connection);
        } else {
            connection.close();
        }
    }

    /// Ends all its connections, after what is under way.
    fn close(&self) {
        self.main.close();
        self.reads.close();
        for connection in self.idle.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            connection.close();
        }
    }
}

/// All nodes by address.
pub(crate) struct Nodes {
    make: Make,
    by_address: Mutex<HashMap<Address, Arc<Node>>>,
}

impl Nodes {
    pub(crate) fn new(make: Make) -> Self {
        Self { make, by_address: Mutex::default() }
    }

    /// The node at `address`, known or new.
    pub(crate) fn get(&self, address: &Address) -> Arc<Node> {
        let mut nodes = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        match nodes.get(address) {
            Some(node) => node.clone(),
            None => nodes.entry(address.clone()).or_insert_with(|| Node::new(address, &self.make)).clone(),
        }
    }

    /// Forgets every node that is not in `keep`.
    pub(crate) fn retain(&self, keep: &[Arc<Node>]) {
        let mut nodes = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|address, node| {
            let kept = keep.iter().any(|node| node.address == *address);
            if !kept {
                node.close();
            }
            kept
        });
    }

    pub(crate) fn make(&self) -> &Make {
        &self.make
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in self.by_address.lock().unwrap_or_else(PoisonError::into_inner).values() {
            node.close();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use moim_base::task::Shutdown;

    use super::*;

    pub(crate) fn node(address: &Address) -> Arc<Node> {
        Node::new(address, &make())
    }

    fn make() -> Make {
        Make {
            options: Arc::new(Options::default()),
            signals: Arc::new(Signals::new()),
            scope: Scope::new(Shutdown::new()),
        }
    }

    #[test]
    fn nodes_keep_their_connections_until_they_are_forgotten() {
        let nodes = Nodes::new(make());
        let (a, b) = (Address::new("a", 1), Address::new("b", 1));
        let first = nodes.get(&a);
        assert!(Arc::ptr_eq(&first, &nodes.get(&a)));
        nodes.get(&b);
        nodes.retain(&[nodes.get(&b)]);
        assert!(first.main.is_down());
        assert!(!Arc::ptr_eq(&first, &nodes.get(&a)));
    }
}
