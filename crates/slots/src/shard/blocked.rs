//! Clients blocked on keys (BLPOP, XREAD BLOCK and the like), in the order of their arrival.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;
use moim_wire_resp::Protocol;

use crate::ctx::OnTimeout;
use crate::session::{Block, Mailbox};

/// The blocked clients of a shard; per key in the order of their arrival.
#[derive(Default)]
pub struct Blocked {
    pub(super) by_key: HashMap<Box<[u8]>, VecDeque<u64>>,
    pub(super) clients: HashMap<u64, BlockedClient>,
}

/// A client blocked on keys and the command that is executed again when one is ready.
pub(super) struct BlockedClient {
    pub(super) block: Block,
    pub(super) protocol: Protocol,
    pub(super) mailbox: Arc<Mailbox>,
    /// The address of the client, for the slow log.
    pub(super) peer: String,
}

impl Blocked {
    pub(super) fn remove(&mut self, client: u64) -> Option<BlockedClient> {
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

    /// True if a blocked client is also woken by the deletion of its key.
    pub(super) fn wakes_on_delete(&self, client: u64) -> bool {
        self.clients.get(&client).is_some_and(|waiting| waiting.block.wake_on_delete)
    }

    /// What the client receives on timeout; `None` if it is not blocked.
    pub(crate) fn on_timeout(&self, client: u64) -> Option<OnTimeout> {
        self.clients.get(&client).map(|waiting| waiting.block.on_timeout)
    }
}
