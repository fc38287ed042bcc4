//! The servers that are connected, and the commands they have not answered yet.
//!
//! Invariant: at most one connection per server counts; a newer one replaces the older, whose commands fail.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_wire_grpc::routing::{Ack, Command};
use tokio::sync::{mpsc, oneshot};

/// Commands that wait to be sent to one server.
const QUEUE: usize = 256;

type Answer = Result<Bytes, String>;

#[derive(Default)]
struct State {
    servers: HashMap<String, Connected>,
    waiting: HashMap<u64, Waiting>,
    /// Connections so far.
    generation: u64,
}

struct Connected {
    commands: mpsc::Sender<Command>,
    generation: u64,
}

struct Waiting {
    node: String,
    generation: u64,
    answer: oneshot::Sender<Answer>,
}

pub(super) struct Hub {
    state: Mutex<State>,
    operations: AtomicU64,
}

/// A server's connection.
pub(super) struct Seat {
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

    pub(super) fn connect(&self, node: &str) -> Seat {
        let (sender, commands) = mpsc::channel(QUEUE);
        let mut state = self.state();
        state.generation += 1;
        let generation = state.generation;
        state.servers.insert(node.to_owned(), Connected { commands: sender, generation });
        Seat { commands, generation }
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
                // Whoever waited may have given up.
                let _ = waiting.answer.send(Err(format!("the connection to {node} broke")));
            }
        }
    }

    /// Ends every server's connection.
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
            let answer = if ack.error.is_empty() { Ok(ack.handoff) } else { Err(ack.error) };
            // Whoever waited may have given up.
            let _ = waiting.answer.send(answer);
        }
    }

    /// Sends a command that nobody waits for.
    pub(super) fn tell(&self, node: &str, command: Command) {
        if let Some(server) = self.state().servers.get(node) {
            // A server that does not read is told again when it connects anew.
            let _ = server.commands.try_send(command);
        }
    }

    /// Sends a command and waits for its answer.
    pub(super) async fn ask(&self, node: &str, mut command: Command, within: Duration) -> Answer {
        let operation = self.operations.fetch_add(1, Ordering::Relaxed);
        command.operation = operation;
        let (sender, answer) = oneshot::channel();
        {
            let mut state = self.state();
            let Some(server) = state.servers.get(node) else {
                return Err(format!("server {node} is not connected"));
            };
            if server.commands.try_send(command).is_err() {
                return Err(format!("server {node} is busy"));
            }
            let generation = server.generation;
            state.waiting.insert(operation, Waiting { node: node.to_owned(), generation, answer: sender });
        }
        let answered = tokio::time::timeout(within, answer).await;
        self.state().waiting.remove(&operation);
        match answered {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(format!("the connection to {node} broke")),
            Err(_) => Err(format!("server {node} did not answer in time")),
        }
    }
}
