//! What a command asks of the cluster and has to wait for: changes of the slot map, elections.
//!
//! A command hands an [`Op`] over and makes its client wait; the service carries it out on its own thread and puts the
//! answer into the client's mailbox.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use moim_wire_resp::{Encoder, OwnedArgs, Protocol};

use crate::cmd::Spec;
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
    /// What a transaction of CLUSTER commands asks for, in order.
    Several(Vec<Step>),
}

/// One command of such a transaction.
pub enum Step {
    /// It has been answered.
    Said(Bytes),
    /// A change of the slot map.
    Change(MapChange),
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

impl MapChange {
    /// The slots it is about.
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
    /// Answers the client that waits.
    pub fn answer(&self, result: Result<(), Error>) {
        self.reply(|to| write(to, result));
    }

    /// Answers a transaction: what was said, and what became of the changes, in order.
    pub(crate) fn answer_several(&self, steps: &[Step], results: Vec<Result<(), Error>>) {
        let mut results = results.into_iter();
        self.reply(|to| {
            to.array(steps.len());
            for step in steps {
                match step {
                    Step::Said(bytes) => to.buffer().extend_from_slice(bytes),
                    Step::Change(_) => write(to, results.next().unwrap_or(Err(Error::CLUSTER_DOWN))),
                }
            }
        });
    }

    fn reply(&self, write: impl FnOnce(&mut Encoder<'_>)) {
        let mut out = BytesMut::new();
        write(&mut Encoder::new(&mut out, self.protocol));
        self.mailbox.answer(out.freeze(), 0);
    }
}

fn write(to: &mut Encoder<'_>, result: Result<(), Error>) {
    match result {
        Ok(()) => to.ok(),
        Err(error) => to.error(error.0.as_bytes()),
    }
}

/// Hands a request over and makes the client wait for its answer.
pub(crate) fn ask(ctx: &mut Ctx<'_>, kind: OpKind) -> Done {
    if let (Some(planned), OpKind::Map(change)) = (&mut ctx.session.planned, &kind) {
        planned.push(change.clone());
        return Ok(());
    }
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
        replicas: None,
        on_gone: false,
    });
    Ok(())
}

/// Whether a transaction is of CLUSTER commands only: tools change slots that way.
pub(crate) fn is_about_the_cluster(commands: &[(&'static Spec, OwnedArgs)]) -> bool {
    !commands.is_empty() && commands.iter().all(|(spec, _)| spec.name.starts_with("cluster|"))
}

/// EXEC of CLUSTER commands: those that change slots are carried out one after the other, and the client waits.
pub(crate) fn ask_several(ctx: &mut Ctx<'_>, commands: &[(&'static Spec, OwnedArgs)]) -> Done {
    let mut steps = Vec::new();
    ctx.session.planned = Some(Vec::new());
    for (spec, command) in commands {
        let start = ctx.out.buffer().len();
        ctx.call(spec, command);
        let said = ctx.out.buffer().split_off(start).freeze();
        let planned = ctx.session.planned.as_mut().and_then(Vec::pop);
        steps.push(planned.map_or(Step::Said(said), Step::Change));
    }
    ctx.session.planned = None;
    ask(ctx, OpKind::Several(steps))
}
