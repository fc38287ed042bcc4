//! Cluster operations of commands: changes of the slot map, elections.
//!
//! A command submits an [`Op`] and blocks its client; the service executes it on its own thread and puts the reply into
//! the client's mailbox.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use moim_wire_resp::{Encoder, OwnedArgs, Protocol};

use crate::cmd::Spec;
use crate::ctx::{Ctx, Mode, OnTimeout};
use crate::error::{Done, Error};
use crate::session::{Block, Mailbox};
use crate::shard::Shard;

/// A cluster operation, submitted to the service.
pub struct Op {
    /// The operation.
    pub kind: OpKind,
    /// The shard of the Redis node that received the command.
    pub shard: Arc<Shard>,
    /// The id of the client that waits.
    pub client: u64,
    mailbox: Arc<Mailbox>,
    protocol: Protocol,
}

/// The kind of an [`Op`].
pub enum OpKind {
    /// A change of the slot map.
    Map(MapChange),
    /// CLUSTER FAILOVER: this replica becomes the primary of its shard.
    Failover,
    /// The CLUSTER commands of one transaction, in order.
    Transaction(Vec<Step>),
}

/// One command of a transaction of CLUSTER commands.
pub enum Step {
    /// A command that was answered already.
    Answered(Bytes),
    /// A command that changes the slot map.
    Change(MapChange),
}

/// A change of the slot map, from the point of view of the shard that received the command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapChange {
    /// SETSLOT IMPORTING: (slot, source shard).
    Import(u16, u16),
    /// SETSLOT MIGRATING: (slot, target shard).
    Migrate(u16, u16),
    /// SETSLOT NODE: (slot, new owner).
    Assign(u16, u16),
    /// SETSLOT STABLE: ends importing and migrating.
    Stable(u16),
    /// ADDSLOTS: assigns unassigned slots to this shard.
    Add(Vec<u16>),
    /// DELSLOTS: unassigns slots.
    Remove(Vec<u16>),
}

impl MapChange {
    /// The slots that the change is about.
    pub(crate) fn slots(&self) -> Vec<u16> {
        match self {
            Self::Import(slot, _) | Self::Migrate(slot, _) | Self::Assign(slot, _) | Self::Stable(slot) => {
                vec![*slot]
            }
            Self::Add(slots) | Self::Remove(slots) => slots.clone(),
        }
    }
}

impl Op {
    /// Sends the reply to the blocked client.
    pub fn answer(&self, result: Result<(), Error>) {
        self.reply(|to| write(to, result));
    }

    /// Sends the reply to a transaction: stored replies and results of the changes, in order.
    pub(crate) fn answer_transaction(&self, steps: &[Step], results: Vec<Result<(), Error>>) {
        let mut results = results.into_iter();
        self.reply(|to| {
            to.array(steps.len());
            for step in steps {
                match step {
                    Step::Answered(bytes) => to.buffer().extend_from_slice(bytes),
                    Step::Change(_) => write(to, results.next().unwrap_or(Err(Error::CLUSTER_DOWN))),
                }
            }
        });
    }

    fn reply(&self, write: impl FnOnce(&mut Encoder<'_>)) {
        let mut out = BytesMut::new();
        write(&mut Encoder::new(&mut out, self.protocol));
        self.mailbox.deliver_reply(out.freeze(), 0);
    }
}

fn write(to: &mut Encoder<'_>, result: Result<(), Error>) {
    match result {
        Ok(()) => to.ok(),
        Err(error) => to.error(error.0.as_bytes()),
    }
}

/// Submits an operation and blocks the client until its reply.
pub(crate) fn submit(ctx: &mut Ctx<'_>, kind: OpKind) -> Done {
    if let (Some(planned), OpKind::Map(change)) = (&mut ctx.session.planned, &kind) {
        planned.push(change.clone());
        return Ok(());
    }
    // Unlike blocking on keys, this is possible on replicas, too.
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
        replicas: None,
        wake_on_delete: false,
    });
    Ok(())
}

/// True for a transaction of CLUSTER commands only: `redis-cli` changes slots that way.
pub(crate) fn is_cluster_transaction(commands: &[(&'static Spec, OwnedArgs)]) -> bool {
    !commands.is_empty() && commands.iter().all(|(spec, _)| spec.name.starts_with("cluster|"))
}

/// EXEC of CLUSTER commands: changes of the slot map are executed one after the other while the client is blocked.
pub(crate) fn submit_transaction(ctx: &mut Ctx<'_>, commands: &[(&'static Spec, OwnedArgs)]) -> Done {
    let mut steps = Vec::new();
    ctx.session.planned = Some(Vec::new());
    for (spec, command) in commands {
        let start = ctx.out.buffer().len();
        ctx.call(spec, command);
        let said = ctx.out.buffer().split_off(start).freeze();
        let planned = ctx.session.planned.as_mut().and_then(Vec::pop);
        steps.push(planned.map_or(Step::Answered(said), Step::Change));
    }
    ctx.session.planned = None;
    submit(ctx, OpKind::Transaction(steps))
}
