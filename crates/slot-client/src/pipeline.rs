//! Pipelines, for throughput only, and transactions, which are atomic.

use moim_wire_resp::Value;
use tokio::time::Instant;

use crate::client::Client;
use crate::command::{Cmd, Request, cmd};
use crate::convert::{FromValue, convert};
use crate::error::Error;
use crate::spec::{Block, Spread};

/// Commands that are sent together. Each has its own reply and its own redirections: during a slot
/// migration, commands of that slot may be reordered.
#[derive(Debug)]
pub struct Pipeline {
    client: Client,
    commands: Vec<Cmd>,
}

impl Client {
    /// Starts a pipeline.
    pub fn pipeline(&self) -> Pipeline {
        Pipeline { client: self.clone(), commands: Vec::new() }
    }

    /// Starts a transaction (MULTI … EXEC).
    pub fn transaction(&self) -> Transaction {
        Transaction { client: self.clone(), commands: Vec::new() }
    }
}

impl Pipeline {
    /// Adds a command.
    pub fn add(&mut self, cmd: Cmd) -> &mut Self {
        self.commands.push(cmd);
        self
    }

    /// Number of commands.
    pub fn len(&self) -> usize {
        self.commands.len()
    }

    /// True if there are no commands.
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Sends all commands and waits for all replies: a reply or an error for each, in order. The pipeline is
    /// empty afterwards.
    pub async fn run(&mut self) -> Vec<Result<Value, Error>> {
        let requests: Vec<Request> = self.commands.drain(..).map(Cmd::finish).collect();
        let (core, call) = (&self.client.core, self.client.call);
        let mut replies = Vec::with_capacity(requests.len());
        let mut rest = requests.as_slice();
        while let Some((first, others)) = rest.split_first() {
            let deadline = Instant::now() + call.timeout;
            // As many as can be queued without waiting; a command that must wait is sent alone, so that no
            // later command overtakes it.
            let mut started = Vec::new();
            for request in rest {
                if request.spec.spread != Spread::No || request.spec.blocks != Block::No {
                    break;
                }
                match core.start(request, call) {
                    Some(sent) => started.push(sent),
                    None => break,
                }
            }
            if started.is_empty() {
                let reply = match first.spec.spread {
                    Spread::No if first.spec.blocks == Block::No => {
                        core.finish(first, call, None, deadline).await
                    }
                    _ => Box::pin(core.spread(first, call)).await,
                };
                replies.push(reply.and_then(convert));
                rest = others;
                continue;
            }
            let (now, later) = rest.split_at(started.len());
            for (request, sent) in now.iter().zip(started) {
                replies.push(core.finish(request, call, Some(sent), deadline).await.and_then(convert));
            }
            rest = later;
        }
        replies
    }

    /// Sends all commands and converts the replies; fails on the first error.
    pub async fn run_as<T: FromValue>(&mut self) -> Result<T, Error> {
        let replies = self.run().await.into_iter().collect::<Result<Vec<_>, _>>()?;
        convert(Value::Array(replies))
    }
}

/// Commands that are executed atomically, in one slot.
#[derive(Debug)]
#[must_use = "a transaction happens in run()"]
pub struct Transaction {
    client: Client,
    commands: Vec<Cmd>,
}

impl Transaction {
    /// Adds a command.
    pub fn then(mut self, cmd: Cmd) -> Self {
        self.commands.push(cmd);
        self
    }

    /// Runs the transaction. The replies convert to `T`: a tuple, a list. An error before EXEC, as of an
    /// unknown command, means that nothing was executed; an error of one command inside does not undo the
    /// others.
    pub async fn run<T: FromValue>(self) -> Result<T, Error> {
        let request = unit(self.commands)?;
        self.client.core.execute(&request, self.client.call).await.and_then(convert)
    }
}

fn unit(commands: Vec<Cmd>) -> Result<Request, Error> {
    let mut requests = vec![cmd("MULTI").finish()];
    requests.extend(commands.into_iter().map(Cmd::finish));
    requests.push(cmd("EXEC").finish());
    let mut slots = requests.iter().filter_map(|request| request.slot);
    let first = slots.next();
    if slots.any(|slot| Some(slot) != first) {
        return Err(Error::CrossSlot);
    }
    Ok(Request::unit(&requests))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transaction_is_one_unit_in_one_slot() {
        let request = unit(vec![cmd("INCR").arg("{a}1"), cmd("GET").arg("{a}2")]).unwrap();
        assert_eq!((request.replies, request.slot.map(moim_wire_resp::Slot::get)), (4, Some(15495)));
        assert!(request.frame.starts_with(b"*1\r\n$5\r\nMULTI\r\n*2\r\n$4\r\nINCR\r\n"));
        assert!(!request.spec.repeatable);
        assert!(matches!(unit(vec![cmd("GET").arg("a"), cmd("GET").arg("b")]), Err(Error::CrossSlot)));
    }
}
