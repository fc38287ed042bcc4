//! SCAN over the cluster, page by page, one primary after the other.

use std::sync::Arc;

use bytes::Bytes;

use crate::client::Client;
use crate::command::cmd;
use crate::convert::convert;
use crate::error::Error;
use crate::node::Node;

/// An iteration over the keys of all primaries. As with SCAN, a key that exists during the whole iteration
/// is returned at least once; keys of slots that migrate meanwhile may be returned twice or not at all.
#[derive(Debug)]
pub struct Scan {
    client: Client,
    pattern: Option<Bytes>,
    count: u32,
    todo: Vec<Todo>,
    cursor: String,
}

struct Todo(Arc<Node>);

impl std::fmt::Debug for Todo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.address.fmt(f)
    }
}

impl Client {
    /// Iterates over the keys that match `pattern` (all without one).
    ///
    /// ```no_run
    /// # async fn example(client: moim_slot_client::Client) -> Result<(), moim_slot_client::Error> {
    /// let mut scan = client.scan(Some("user:*"));
    /// while let Some(keys) = scan.next().await? {
    ///     println!("{} keys", keys.len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn scan(&self, pattern: Option<&str>) -> Scan {
        Scan {
            client: self.clone(),
            pattern: pattern.map(|pattern| Bytes::copy_from_slice(pattern.as_bytes())),
            count: 500,
            todo: self.core.topology.load().members(false).into_iter().map(Todo).collect(),
            cursor: "0".to_owned(),
        }
    }
}

impl Scan {
    /// Approximate page size (500).
    #[must_use]
    pub fn count(mut self, count: u32) -> Self {
        self.count = count;
        self
    }

    /// The next page, which may be empty; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<Bytes>>, Error> {
        let Some(Todo(node)) = self.todo.last() else { return Ok(None) };
        let mut command = cmd("SCAN").arg(&self.cursor);
        if let Some(pattern) = &self.pattern {
            command = command.arg(("MATCH", pattern));
        }
        let request = command.arg(("COUNT", self.count)).finish();
        let reply = self.client.core.execute_at(node, &request, self.client.call).await?;
        let (cursor, keys): (String, Vec<Bytes>) = convert(reply)?;
        if cursor == "0" {
            self.todo.pop();
        }
        self.cursor = cursor;
        Ok(Some(keys))
    }
}
