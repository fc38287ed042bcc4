//! A node and its connections. Nodes are keyed by address and kept across topologies, so that a refresh
//! without a change keeps all connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use moim_base::task::Scope;

use crate::address::Address;
use crate::connection::{Connection, Kind};
use crate::options::Options;
use crate::signals::Signals;

/// Maximum number of pooled exclusive connections.
const MAX_IDLE: usize = 16;

/// A node: its address and its connections, each opened on first use.
pub(crate) struct Node {
    pub(crate) address: Address,
    /// For commands.
    pub(crate) main: Arc<Connection>,
    /// For reads while it is a replica.
    pub(crate) reads: Arc<Connection>,
    /// Idle exclusive connections.
    idle: Mutex<Vec<Arc<Connection>>>,
    factory: ConnectionFactory,
}

/// Parameters of every connection.
#[derive(Clone)]
pub(crate) struct ConnectionFactory {
    pub(crate) options: Arc<Options>,
    pub(crate) signals: Arc<Signals>,
    pub(crate) scope: Scope,
}

impl ConnectionFactory {
    pub(crate) fn connection(&self, address: &Address, kind: Kind) -> Arc<Connection> {
        Connection::new(address.clone(), kind, self.options.clone(), self.signals.clone(), self.scope.clone())
    }
}

impl Node {
    fn new(address: &Address, factory: &ConnectionFactory) -> Arc<Self> {
        Arc::new(Self {
            address: address.clone(),
            main: factory.connection(address, Kind::Shared),
            reads: factory.connection(address, Kind::Reads),
            idle: Mutex::default(),
            factory: factory.clone(),
        })
    }

    /// An exclusive connection. Return it with [`Node::release`] when no command is in flight on it.
    pub(crate) fn exclusive(&self) -> Arc<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(connection) = idle.pop() {
            if connection.is_up() {
                return connection;
            }
        }
        self.factory.connection(&self.address, Kind::Exclusive)
    }

    pub(crate) fn release(&self, connection: Arc<Connection>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.is_up() && idle.len() < MAX_IDLE {
            idle.push(connection);
        } else {
            connection.close();
        }
    }

    /// Closes all its connections, after the commands in flight.
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
    factory: ConnectionFactory,
    by_address: Mutex<HashMap<Address, Arc<Node>>>,
}

impl Nodes {
    pub(crate) fn new(factory: ConnectionFactory) -> Self {
        Self { factory, by_address: Mutex::default() }
    }

    /// The node at `address`, existing or new.
    pub(crate) fn get(&self, address: &Address) -> Arc<Node> {
        let mut nodes = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        match nodes.get(address) {
            Some(node) => node.clone(),
            None => nodes.entry(address.clone()).or_insert_with(|| Node::new(address, &self.factory)).clone(),
        }
    }

    /// Removes every node that is not in `keep`.
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

    pub(crate) fn factory(&self) -> &ConnectionFactory {
        &self.factory
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
        Node::new(address, &factory())
    }

    fn factory() -> ConnectionFactory {
        ConnectionFactory {
            options: Arc::new(Options::default()),
            signals: Arc::new(Signals::new()),
            scope: Scope::new(Shutdown::new()),
        }
    }

    #[test]
    fn nodes_keep_their_connections_until_removed() {
        let nodes = Nodes::new(factory());
        let (a, b) = (Address::new("a", 1), Address::new("b", 1));
        let first = nodes.get(&a);
        assert!(Arc::ptr_eq(&first, &nodes.get(&a)));
        nodes.get(&b);
        nodes.retain(&[nodes.get(&b)]);
        assert!(first.main.is_down());
        assert!(!Arc::ptr_eq(&first, &nodes.get(&a)));
    }
}
