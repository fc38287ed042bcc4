//! Clients that wait for keys.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;
use moim_wire_resp::Protocol;

use crate::ctx::OnTimeout;
use crate::session::{Block, Mailbox};

/// Clients that wait for keys, in the order in which they came.
#[derive(Default)]
pub struct Blocked {
    pub(super) by_key: HashMap<Box<[u8]>, VecDeque<u64>>,
    pub(super) clients: HashMap<u64, Waiting>,
}

pub(super) struct Waiting {
    pub(super) block: Block,
    pub(super) protocol: Protocol,
    pub(super) mailbox: Arc<Mailbox>,
    /// Who it is, for the slow log.
    pub(super) peer: String,
}

impl Blocked {
    pub(super) fn remove(&mut self, client: u64) -> Option<Waiting> {
        let waiting = self.clients.remove(&client)?;
        for key in &waiting.block.keys {
            if let Some(line) = self.by_key.get_mut(key) {
                line.retain(|who| *who != client);
                if line.is_empty() {
                    self.by_key.remove(key);
                }
            }
        }
        Some(waiting)
    }

    /// Whether a client wants to hear that a key is gone.
    pub(super) fn minds_gone(&self, client: u64) -> bool {
        self.clients.get(&client).is_some_and(|waiting| waiting.block.on_gone)
    }

    /// What a client hears when its time runs out, if it waits.
    pub(crate) fn on_timeout(&self, client: u64) -> Option<OnTimeout> {
        self.clients.get(&client).map(|waiting| waiting.block.on_timeout)
    }
}
