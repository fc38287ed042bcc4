//! The connected servers, and their unacknowledged commands.
//!
//! Invariant: at most one connection per server is current; a newer one replaces the older, whose commands
//! fail.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_wire_grpc::routing::{Ack, Command};
use tokio::sync::{mpsc, oneshot};

/// Maximum number of unsent commands to one server.
const QUEUE: usize = 256;

type CommandResult = Result<Bytes, String>;

#[derive(Default)]
struct State {
    servers: HashMap<String, Connected>,
    waiting: HashMap<u64, Waiting>,
    /// Generation of the last connection.
    generation: u64,
}

struct Connected {
    commands: mpsc::Sender<Command>,
    generation: u64,
}

struct Waiting {
    node: String,
    generation: u64,
    result: oneshot::Sender<CommandResult>,
}

pub(super) struct Hub {
    state: Mutex<State>,
    operations: AtomicU64,
}

/// Connection of a server.
pub(super) struct ServerConnection {
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) generation: u64,
}

impl Hub {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), operations: AtomicU64::new(1) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn connect(&self, node: &str) -> ServerConnection {
        let (sender, commands) = mpsc::channel(QUEUE);
        let mut state = self.state();
        state.generation += 1;
        let generation = state.generation;
        state.servers.insert(node.to_owned(), Connected { commands: sender, generation });
        ServerConnection { commands, generation }
    }

    pub(super) fn disconnect(&self, node: &str, generation: u64) {
        let mut state = self.state();
        let is_current = state.servers.get(node).is_some_and(|one| one.generation == generation);
        if is_current {
            state.servers.remove(node);
        }
        let failed: Vec<u64> = state
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.node == node && waiting.generation == generation)
            .map(|(operation, _)| *operation)
            .collect();
        for operation in failed {
            if let Some(waiting) = state.waiting.remove(&operation) {
                // The caller may have timed out.
                let _ = waiting.result.send(Err(format!("connection to server {node} lost")));
            }
        }
    }

    /// Closes the connections of all servers.
    pub(super) fn disconnect_all(&self) {
        let nodes: Vec<(String, u64)> = {
            let mut state = self.state();
            state.servers.drain().map(|(node, one)| (node, one.generation)).collect()
        };
        for (node, generation) in nodes {
            self.disconnect(&node, generation);
        }
    }

    pub(super) fn is_connected(&self, node: &str) -> bool {
        self.state().servers.contains_key(node)
    }

    pub(super) fn on_ack(&self, ack: Ack) {
        let waiting = self.state().waiting.remove(&ack.operation);
        if let Some(waiting) = waiting {
            let result = if ack.error.is_empty() { Ok(ack.handoff) } else { Err(ack.error) };
            // The caller may have timed out.
            let _ = waiting.result.send(result);
        }
    }

    /// Sends a command without waiting for its acknowledgement.
    pub(super) fn send(&self, node: &str, command: Command) {
        if let Some(server) = self.state().servers.get(node) {
            // A server that does not read gets the command again when it reconnects.
            let _ = server.commands.try_send(command);
        }
    }

    /// Sends a command and waits for its acknowledgement.
    pub(super) async fn request(&self, node: &str, mut command: Command, within: Duration) -> CommandResult {
        let operation = self.operations.fetch_add(1, Ordering::Relaxed);
        command.operation = operation;
        let (sender, result) = oneshot::channel();
        {
            let mut state = self.state();
            let Some(server) = state.servers.get(node) else {
                return Err(format!("server {node} is not connected"));
            };
            if server.commands.try_send(command).is_err() {
                return Err(format!("server {node} is busy"));
            }
            let generation = server.generation;
            state.waiting.insert(operation, Waiting { node: node.to_owned(), generation, result: sender });
        }
        let answered = tokio::time::timeout(within, result).await;
        self.state().waiting.remove(&operation);
        match answered {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(format!("connection to server {node} lost")),
            Err(_) => Err(format!("server {node} did not result in time")),
        }
    }
}
