//! The store's commands through the cluster-aware client: Moim's store, or any Redis Cluster.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moim_slot_client::{Client, Cmd, Error, Value, cmd};

use super::{BoxFuture, Commands, Reply, Store, StoreError};

/// Deadline of a command; after it the caller retries.
const DEADLINE: Duration = Duration::from_secs(5);

/// Connects to any of these nodes (`host:port,…`) and discovers the others.
pub async fn connect(nodes: &str) -> Result<Store, StoreError> {
    let client = Client::connect(nodes).await.map_err(refuse)?.timeout(DEADLINE);
    Ok(Store::new(Arc::new(client)))
}

impl Commands for Client {
    fn call<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Reply, StoreError>> {
        let written = written(command);
        Box::pin(async move { self.run::<Value>(written).await.map_err(refuse).and_then(reply) })
    }

    fn call_all<'a>(&'a self, command: &[&[u8]]) -> BoxFuture<'a, Result<Vec<Reply>, StoreError>> {
        // The client knows which commands run on all nodes, and merges their replies.
        let called = self.call(command);
        Box::pin(async move { Ok(vec![called.await?]) })
    }

    fn keys<'a>(&'a self, pattern: &'a str) -> BoxFuture<'a, Result<Vec<Bytes>, StoreError>> {
        let called = self.call(&[b"KEYS", pattern.as_bytes()]);
        Box::pin(
            async move { Ok(called.await?.list().iter().filter_map(|key| key.bytes().cloned()).collect()) },
        )
    }
}

fn written(command: &[&[u8]]) -> Cmd {
    let mut written = cmd("");
    command.iter().for_each(|word| written.push(word));
    written
}

fn reply(value: Value) -> Result<Reply, StoreError> {
    Ok(match value {
        Value::Null => Reply::Nil,
        Value::Integer(n) => Reply::Int(n),
        Value::Boolean(yes) => Reply::Int(i64::from(yes)),
        // Scores are sequence numbers.
        Value::Double(score) if score == score.trunc() && score.abs() < 9e15 => Reply::Int(score as i64),
        Value::Array(list) | Value::Set(list) => {
            Reply::Array(list.into_iter().map(reply).collect::<Result<_, _>>()?)
        }
        Value::Map(pairs) => {
            let flat = pairs.into_iter().flat_map(|(key, value)| [key, value]);
            Reply::Array(flat.map(reply).collect::<Result<_, _>>()?)
        }
        other => match other.as_bytes() {
            Some(bytes) => Reply::Bytes(bytes.clone()),
            None => return Err(StoreError::UnexpectedReply(format!("{other:?}"))),
        },
    })
}

fn refuse(error: Error) -> StoreError {
    match error {
        Error::Server(error) => StoreError::Refused(error.text().to_owned()),
        Error::Config(_) | Error::CrossSlot | Error::Unexpected { .. } | Error::Protocol(_) => {
            StoreError::UnexpectedReply(error.to_string())
        }
        Error::Timeout { .. }
        | Error::Interrupted { .. }
        | Error::Partly(_)
        | Error::Unavailable { .. }
        | Error::TooManyRedirects(..)
        | Error::Closed => StoreError::Unavailable(error.to_string()),
    }
}
