//! Fan-out: commands for several slots or nodes are split, sent concurrently, and merged.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::join_all;
use moim_wire_resp::{Slot, Value};
use tokio::time::Instant;

use crate::client::{Call, Core};
use crate::command::{Cmd, Request, cmd};
use crate::convert::convert;
use crate::error::{Error, ServerError};
use crate::node::Node;
use crate::spec::{Join, Spread};

impl Core {
    /// Runs a command whose reply is merged from several nodes.
    pub(crate) async fn spread(&self, request: &Request, call: Call) -> Result<Value, Error> {
        match request.spec.spread {
            Spread::No => self.execute(request, call).await,
            Spread::Keys { step, join } => self.split(request, call, step, join).await,
            Spread::Primaries(kind) => {
                let replies = self.at_all(self.topology.load().members(false), request, call).await;
                join(kind, all_or_error(request, replies)?)
            }
            Spread::AllNodes(kind) => {
                let topology = self.topology.load_full();
                let (primaries, all) = (topology.members(false), topology.members(true));
                let is_primary = |node: &Arc<Node>| primaries.iter().any(|other| Arc::ptr_eq(other, node));
                let replicas = all.iter().filter(|node| !is_primary(node)).cloned().collect();
                let (at_primaries, _) = tokio::join!(
                    self.at_all(primaries.clone(), request, call),
                    self.at_all(replicas, request, call)
                );
                // An unreachable replica gets it from its primary.
                join(kind, all_or_error(request, at_primaries)?)
            }
        }
    }

    async fn at_all(
        &self,
        nodes: Vec<Arc<Node>>,
        request: &Request,
        call: Call,
    ) -> Vec<Result<Value, Error>> {
        join_all(nodes.iter().map(|node| self.execute_at(node, request, call))).await
    }

    /// One command per slot.
    async fn split(&self, request: &Request, call: Call, step: usize, kind: Join) -> Result<Value, Error> {
        let name = String::from_utf8_lossy(request.args().next().unwrap_or_default()).into_owned();
        let args: Vec<&[u8]> = request.args().skip(1).collect();
        let mut slots: Vec<(Cmd, Vec<usize>)> = Vec::new();
        let mut places: HashMap<Slot, usize> = HashMap::new();
        for (position, group) in args.chunks(step).enumerate() {
            let place = *places.entry(Slot::of(group[0])).or_insert_with(|| {
                slots.push((cmd(&name), Vec::new()));
                slots.len() - 1
            });
            let (command, positions) = &mut slots[place];
            group.iter().for_each(|arg| command.push(arg));
            positions.push(position);
        }
        // One slot, or arguments that the server rejects.
        if slots.len() < 2 || !args.len().is_multiple_of(step) {
            return self.execute(request, call).await;
        }
        let parts: Vec<(Request, Vec<usize>)> =
            slots.into_iter().map(|(command, positions)| (command.finish(), positions)).collect();
        let deadline = Instant::now() + call.timeout;
        let started: Vec<_> = parts.iter().map(|(part, _)| self.start(part, call)).collect();
        let waiting =
            parts.iter().zip(started).map(|((part, _), sent)| self.finish(part, call, sent, deadline));
        let replies = all_or_error(request, join_all(waiting).await)?;
        if kind != Join::InOrder {
            return join(kind, replies);
        }
        let mut all = vec![Value::Null; args.len() / step];
        for (reply, (_, positions)) in replies.into_iter().zip(&parts) {
            match reply {
                Value::Array(values) => {
                    for (value, position) in values.into_iter().zip(positions) {
                        all[*position] = value;
                    }
                }
                other => return Ok(other),
            }
        }
        Ok(Value::Array(all))
    }
}

/// All replies, or the error of the whole command. A rejected part means that the whole was not executed
/// only if no part was.
fn all_or_error(request: &Request, replies: Vec<Result<Value, Error>>) -> Result<Vec<Value>, Error> {
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for reply in replies {
        match reply.and_then(convert::<Value>) {
            Ok(value) => values.push(value),
            Err(error) => errors.push(error),
        }
    }
    // The most significant one: a part with unknown outcome.
    let at = errors.iter().position(|error| !error.happened_not()).unwrap_or(0);
    if errors.is_empty() {
        return Ok(values);
    }
    let error = errors.swap_remove(at);
    let in_part = !values.is_empty() && !request.spec.repeatable && error.happened_not();
    Err(if in_part { Error::Partly(Box::new(error)) } else { error })
}

/// Merges replies; an error among them is the result.
fn join(kind: Join, replies: Vec<Value>) -> Result<Value, Error> {
    if let Some(Value::Error(text)) = replies.iter().find(|reply| matches!(reply, Value::Error(_))) {
        return Err(ServerError::new(text).into());
    }
    Ok(match kind {
        Join::Sum => {
            let numbers =
                replies.iter().map(|reply| if let Value::Integer(value) = reply { *value } else { 0 });
            Value::Integer(numbers.sum())
        }
        Join::Concat | Join::InOrder => {
            let mut all = Vec::new();
            for reply in replies {
                match reply {
                    Value::Array(values) | Value::Set(values) => all.extend(values),
                    other => all.push(other),
                }
            }
            Value::Array(all)
        }
        Join::Same => replies.into_iter().next().unwrap_or(Value::Null),
        Join::All => {
            let mut lists = replies.into_iter().filter_map(|reply| reply.as_array().map(<[Value]>::to_vec));
            let mut all = lists.next().unwrap_or_default();
            for list in lists {
                for (one, other) in all.iter_mut().zip(list) {
                    if other == Value::Integer(0) {
                        *one = other;
                    }
                }
            }
            Value::Array(all)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_merged() {
        let numbers =
            |values: &[i64]| Value::Array(values.iter().map(|value| Value::Integer(*value)).collect());
        assert_eq!(join(Join::Sum, vec![Value::Integer(2), Value::Integer(3)]).unwrap(), Value::Integer(5));
        assert_eq!(join(Join::Concat, vec![numbers(&[1]), numbers(&[2, 3])]).unwrap(), numbers(&[1, 2, 3]));
        assert_eq!(
            join(Join::All, vec![numbers(&[1, 1, 0]), numbers(&[1, 0, 1])]).unwrap(),
            numbers(&[1, 0, 0])
        );
        assert_eq!(join(Join::Same, vec![Value::ok(), Value::ok()]).unwrap(), Value::ok());
        let failed = join(Join::Same, vec![Value::ok(), Value::Error("NOPERM x".into())]);
        assert_eq!(failed.unwrap_err().code(), Some("NOPERM"));
    }
}
