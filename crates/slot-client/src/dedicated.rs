//! Dedicated connections, for connection state that cannot be shared: WATCH and its transaction.

use std::sync::Arc;

use moim_wire_resp::Slot;

use crate::client::Client;
use crate::command::Cmd;
use crate::connection::Connection;
use crate::convert::{FromValue, convert};
use crate::error::Error;
use crate::signals::Trigger;

/// A connection to the primary of one slot. It follows no redirection and does not reconnect: when a command
/// fails, get another one and start again, as usual with WATCH.
pub struct Dedicated {
    client: Client,
    connection: Arc<Connection>,
}

impl std::fmt::Debug for Dedicated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dedicated").field("node", &self.connection.node).finish_non_exhaustive()
    }
}

impl Client {
    /// An exclusive connection to the primary of `key`'s slot.
    ///
    /// ```no_run
    /// # async fn example(client: moim_slot_client::Client) -> Result<(), moim_slot_client::Error> {
    /// use moim_slot_client::{Value, cmd};
    /// let own = client.dedicated("stock")?;
    /// let _: () = own.run(cmd("WATCH").arg("stock")).await?;
    /// let left: i64 = own.run(cmd("GET").arg("stock")).await?;
    /// let _: () = own.run(cmd("MULTI")).await?;
    /// let _: () = own.run(cmd("SET").arg(("stock", left - 1))).await?;
    /// let done: Option<Value> = own.run(cmd("EXEC")).await?;
    /// println!("{}", if done.is_some() { "sold" } else { "conflict" });
    /// # Ok(())
    /// # }
    /// ```
    pub fn dedicated(&self, key: impl AsRef<[u8]>) -> Result<Dedicated, Error> {
        let topology = self.core.topology.load();
        let Some(node) = topology.primary(Slot::of(key.as_ref())) else {
            self.core.signals.trigger(Trigger::UncoveredSlot);
            return Err(Error::Unavailable {
                reason: "no node has the slot".to_owned(),
                after: self.call.timeout,
            });
        };
        let connection =
            self.core.nodes.factory().connection(&node.address, crate::connection::Kind::Exclusive);
        Ok(Dedicated { client: self.clone(), connection })
    }
}

impl Dedicated {
    /// Runs a command on this connection.
    pub async fn run<T: FromValue>(&self, cmd: Cmd) -> Result<T, Error> {
        let (node, timeout) = (self.connection.node.to_string(), self.client.call.timeout);
        let reply = match self.connection.send(&cmd.finish()) {
            Ok(reply) => reply,
            Err(refused) => {
                return Err(Error::Unavailable { reason: format!("{node}: {refused:?}"), after: timeout });
            }
        };
        match tokio::time::timeout(timeout, reply).await {
            Err(_) => Err(Error::Timeout { node, after: timeout }),
            Ok(Ok(value)) => convert(value),
            Ok(Err(lost)) if lost.sent => Err(Error::Interrupted { node, reason: lost.reason.to_string() }),
            Ok(Err(lost)) => {
                Err(Error::Unavailable { reason: format!("{node}: {}", lost.reason), after: timeout })
            }
        }
    }
}

impl Drop for Dedicated {
    fn drop(&mut self) {
        self.connection.close();
    }
}
