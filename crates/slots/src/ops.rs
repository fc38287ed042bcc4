//! What a command asks of the cluster and has to wait for: changes of the slot map, elections.
//!
//! A command hands an [`Op`] over and makes its client wait; the service carries it out on its own thread and puts the
//! answer into the client's mailbox.

use std::sync::Arc;

use bytes::BytesMut;
use moim_wire_resp::{Encoder, Protocol};

use crate::ctx::{Ctx, Mode, OnTimeout};
use crate::error::{Done, Error};
use crate::session::{Block, Mailbox};
use crate::shard::Shard;

/// A request to the service.
pub struct Op {
    /// What is asked.
    pub kind: OpKind,
    /// The shard of the node that was asked.
    pub shard: Arc<Shard>,
    /// Who asks.
    pub client: u64,
    mailbox: Arc<Mailbox>,
    protocol: Protocol,
}

/// See [`Op`].
pub enum OpKind {
    /// A change of the slot map.
    Map(MapChange),
    /// This replica is to lead its shard.
    Failover,
}

/// A change of the slot map, as the shard that was asked sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapChange {
    /// The slot comes from that shard.
    Import(u16, u16),
    /// The slot goes to that shard.
    Migrate(u16, u16),
    /// The slot belongs to that shard.
    Assign(u16, u16),
    /// The slot stays where it is.
    Stable(u16),
    /// These slots, which nobody has, are ours.
    Add(Vec<u16>),
    /// Nobody has these slots any more.
    Remove(Vec<u16>),
}

impl Op {
    /// Answers the client that waits.
    pub fn answer(&self, result: Result<(), Error>) {
        let mut out = BytesMut::new();
        let mut to = Encoder::new(&mut out, self.protocol);
        match result {
            Ok(()) => to.ok(),
            Err(error) => to.error(error.0.as_bytes()),
        }
        self.mailbox.answer(out.freeze(), 0);
    }
}

/// Hands a request over and makes the client wait for its answer.
pub(crate) fn ask(ctx: &mut Ctx<'_>, kind: OpKind) -> Done {
    // Unlike keys, the cluster is waited for on replicas, too.
    let may_wait = !ctx.nested && ctx.mode != Mode::Replay;
    let Some(shard) = ctx.session.shard.clone().filter(|_| may_wait) else {
        return Err(Error::err(
            "This command has to wait for the cluster and is not allowed in a transaction or script",
        ));
    };
    let (client, mailbox) = (ctx.session.id, Arc::clone(&ctx.session.mailbox));
    let op = Op { kind, shard, client, mailbox, protocol: ctx.session.protocol };
    let sent = ctx.shared.ops.get().is_some_and(|ops| ops.try_send(op).is_ok());
    if !sent {
        return Err(Error::CLUSTER_DOWN);
    }
    ctx.session.block = Some(Block {
        keys: Vec::new(),
        deadline: None,
        on_timeout: OnTimeout::Null,
        command: ctx.args.to_owned(),
        on_keys: false,
        on_gone: false,
    });
    Ok(())
}
