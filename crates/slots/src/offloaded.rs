//! Commands that run off the event loops (scripts, MIGRATE): the client waits as if it were blocked, and the loop
//! serves the others.
//!
//! The work runs on a thread for blocking calls. It takes the shard lock only through its own turns, and its reply
//! waits for the commit gate like any other.

use std::sync::Arc;

use bytes::Bytes;
use moim_wire_resp::Protocol;

use crate::ctx::{Ctx, OnTimeout};
use crate::session::{Block, Mailbox, Session};
use crate::shard::{Role, Shard, Turn};
use crate::shared::Shared;
use crate::tracking::TrackingOptions;

/// The context of an offloaded command.
pub(crate) struct Offloaded {
    pub(crate) shard: Arc<Shard>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) protocol: Protocol,
    /// The shard's count of voided replies when the command was submitted.
    voided: u64,
    client: u64,
    tracking: Option<Arc<TrackingOptions>>,
    caching: Option<bool>,
    mailbox: Arc<Mailbox>,
}

/// Blocks the client while `work` runs on another thread. Returns false, and does nothing, if the client must not
/// block.
pub(crate) fn run(ctx: &mut Ctx<'_>, work: impl FnOnce(Offloaded) + Send + 'static) -> bool {
    let this = ctx.shared.this.get().and_then(std::sync::Weak::upgrade);
    let (Some(shared), Some(shard)) = (this, ctx.session.shard.clone()) else { return false };
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return false };
    if !ctx.may_block() || ctx.session.away {
        return false;
    }
    let offloaded = Offloaded {
        voided: shard.voided(),
        shard,
        shared,
        protocol: ctx.session.protocol,
        client: ctx.session.id,
        tracking: ctx.session.tracking.clone(),
        caching: ctx.session.caching,
        mailbox: Arc::clone(&ctx.session.mailbox),
    };
    ctx.session.block = Some(Block {
        keys: Vec::new(),
        deadline: None,
        on_timeout: OnTimeout::Null,
        command: ctx.args.to_owned(),
        on_keys: false,
        replicas: None,
        wake_on_delete: false,
    });
    drop(runtime.spawn_blocking(move || work(offloaded)));
    true
}

impl Offloaded {
    /// A session that acts for the blocked client.
    pub(crate) fn session(&self) -> Session {
        let mut session =
            Session::new(self.client, String::new(), String::new(), self.shared.clock.wall_ms());
        session.protocol = self.protocol;
        session.shard = Some(Arc::clone(&self.shard));
        session.away = true;
        (session.tracking, session.caching) = (self.tracking.clone(), self.caching);
        // The command was admitted already. READONLY is not copied: the command was sent to a primary.
        session.asking = true;
        session
    }

    /// True if leadership has ended since the command was submitted: the keyspace may be another one.
    pub(crate) fn is_void(&self) -> bool {
        self.shard.voided() != self.voided
    }

    /// Takes the lock to execute the whole command: what happened before does not matter to it. Also returns whether
    /// this node is still the primary.
    pub(crate) fn begin(&mut self) -> (Turn<'_>, bool) {
        let turn = self.shard.turn_blocking(&self.shared);
        // Under the lock: if leadership ends from here on, the reply is voided.
        self.voided = self.shard.voided();
        let is_primary = self.shard.role() == Role::Primary;
        (turn, is_primary)
    }

    /// Takes the lock for a turn; blocks.
    pub(crate) fn turn(&self) -> Turn<'_> {
        self.shard.turn_blocking(&self.shared)
    }

    /// Sends the reply when the journal is committed up to `gate`.
    pub(crate) fn answer(self, answer: Bytes, gate: i64) {
        let mut turn = self.turn();
        // The client may be unblocked already: by CLIENT UNBLOCK, or by a change of the primary.
        let waits = turn.unblock(self.client);
        turn.finish();
        if waits {
            self.mailbox.deliver_reply_under(answer, gate, self.voided);
        }
    }
}
