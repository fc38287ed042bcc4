//! Work that takes long, away from the event loops: its client waits as one that blocks does, the others go on.
//!
//! The work runs on a thread for blocking calls. It takes the shard's lock only through turns of its own, and its
//! answer waits for the journal like any other.

use std::sync::Arc;

use bytes::Bytes;
use moim_wire_resp::Protocol;

use crate::ctx::{Ctx, OnTimeout};
use crate::session::{Block, Mailbox, Session};
use crate::shard::{Role, Shard, Turn};
use crate::shared::Shared;
use crate::tracking::Wish;

/// What the work needs.
pub(crate) struct Away {
    pub(crate) shard: Arc<Shard>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) protocol: Protocol,
    /// The shard's count of voided answers when the work was asked for.
    voided: u64,
    client: u64,
    tracking: Option<Arc<Wish>>,
    caching: Option<bool>,
    mailbox: Arc<Mailbox>,
}

/// Makes the client wait while `work` runs elsewhere. False where nobody may wait; then nothing happened.
pub(crate) fn run(ctx: &mut Ctx<'_>, work: impl FnOnce(Away) + Send + 'static) -> bool {
    let this = ctx.shared.this.get().and_then(std::sync::Weak::upgrade);
    let (Some(shared), Some(shard)) = (this, ctx.session.shard.clone()) else { return false };
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return false };
    if !ctx.may_block() || ctx.session.away {
        return false;
    }
    let away = Away {
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
        on_gone: false,
    });
    drop(runtime.spawn_blocking(move || work(away)));
    true
}

impl Away {
    /// A client that stands for the one who waits.
    pub(crate) fn session(&self) -> Session {
        let mut session =
            Session::new(self.client, String::new(), String::new(), self.shared.clock.wall_ms());
        session.protocol = self.protocol;
        session.shard = Some(Arc::clone(&self.shard));
        session.away = true;
        (session.tracking, session.caching) = (self.tracking.clone(), self.caching);
        // What it asks for has been let in already. READONLY is left out: it came to a primary.
        session.asking = true;
        session
    }

    /// Whether the lead has ended under which the work was asked for: then the keyspace may not be what it was.
    pub(crate) fn is_void(&self) -> bool {
        self.shard.voided() != self.voided
    }

    /// Takes the shard to run the whole command: what happened before does not matter to it. Says whether this node is still
    /// the primary.
    pub(crate) fn begin(&mut self) -> (Turn<'_>, bool) {
        let turn = self.shard.turn_away(&self.shared);
        // Under the lock: what ends the lead from here on makes the answer void.
        self.voided = self.shard.voided();
        let is_primary = self.shard.role() == Role::Primary;
        (turn, is_primary)
    }

    /// Takes the shard, waiting for it.
    pub(crate) fn turn(&self) -> Turn<'_> {
        self.shard.turn_away(&self.shared)
    }

    /// Answers the client when the journal is committed up to `gate`.
    pub(crate) fn answer(self, answer: Bytes, gate: i64) {
        let mut turn = self.turn();
        // Somebody else may have answered: CLIENT UNBLOCK, or the shard has another primary.
        let waits = turn.unblock(self.client);
        turn.finish();
        if waits {
            self.mailbox.answer_under(answer, gate, self.voided);
        }
    }
}
