//! The SDK: needs only the managers' addresses; follows the table, routes a key to its server, and retries
//! after a range migration.

use std::sync::Arc;
use std::time::Duration;

use moim_wire_grpc::Message;
use moim_wire_grpc::routing::{ChangeKind, ChangeRequest, ChangeResponse, ShowRequest, ShowResponse, method};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::link::{self, Follower, NO_LEADER, leader_redirect};
use super::table::{RouteEntry, RoutingTable};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::etcd::{Channel, EtcdError, unary};

/// Maximum number of redirects for one call.
const MAX_REDIRECTS: u32 = 16;

/// A failed call on a route.
#[derive(Debug)]
pub enum CallError<E> {
    /// The server does not own the range any more; it may name the new owner.
    Moved(Option<RouteEntry>),
    /// The server is unreachable: the route may be stale.
    Unreachable(E),
    /// Any other failure: not retried.
    Failed(E),
}

/// A failed routed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError<E> {
    /// No range contains the key, or no server owns it, within the timeout.
    #[error("no server owns the key within the timeout")]
    NoRoute,
    /// The call itself failed.
    #[error("{0}")]
    Failed(E),
}

/// A client of the managers. Cheap to clone.
#[derive(Clone)]
pub struct RoutingClient {
    namespace: Arc<str>,
    table: watch::Receiver<Arc<RoutingTable>>,
    managers: Arc<[String]>,
    context: Context,
    channel: Channel,
}

impl RoutingClient {
    /// Follows the table of a namespace through any of these managers.
    pub fn connect(context: &Context, namespace: &str, managers: &[String]) -> Self {
        let (sender, table) = watch::channel(Arc::default());
        let channel = link::channel(context, managers);
        let follower = Follower {
            context: context.clone(),
            managers: managers.to_vec(),
            channel: channel.clone(),
            namespace: namespace.to_owned(),
            node_id: String::new(),
            table: sender,
            commands: None,
            acks: None,
            drained: Box::new(Vec::new),
        };
        let stop = context.scope.shutdown().clone();
        context.scope.spawn("routing client", async move {
            let closed = follower.table.clone();
            tokio::select! {
                () = stop.stopped() => {}
                () = closed.closed() => {}
                () = follower.run() => {}
            }
        });
        Self {
            namespace: namespace.into(),
            table,
            managers: managers.into(),
            context: context.clone(),
            channel,
        }
    }

    /// The last received table.
    pub fn table(&self) -> Arc<RoutingTable> {
        self.table.borrow().clone()
    }

    /// The server of a key, by the last received table.
    pub fn route(&self, key: &str) -> Option<RouteEntry> {
        self.table.borrow().lookup(key).filter(|entry| !entry.node_id.is_empty()).cloned()
    }

    /// Returns when the table is newer than `version`. Cancel-safe.
    pub async fn newer_than(&self, version: i64) -> Arc<RoutingTable> {
        let mut table = self.table.clone();
        match table.wait_for(|table| table.version > version).await {
            Ok(table) => table.clone(),
            Err(_) => std::future::pending().await,
        }
    }

    /// Calls the server of a key; after a range migration it retries on the server named in the redirect or
    /// in the next table, within `patience`.
    pub async fn call<T, E, F>(
        &self,
        key: &str,
        patience: Duration,
        mut ask: impl FnMut(RouteEntry) -> F,
    ) -> Result<T, RouteError<E>>
    where
        F: Future<Output = Result<T, CallError<E>>>,
    {
        let deadline = Instant::now() + patience;
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        let mut hint: Option<RouteEntry> = None;
        let mut redirects = 0;
        loop {
            let version = self.table.borrow().version;
            let Some(route) = hint.take().or_else(|| self.route(key)) else {
                if timeout_at(deadline, self.newer_than(version)).await.is_err() {
                    return Err(RouteError::NoRoute);
                }
                continue;
            };
            match timeout_at(deadline, ask(route)).await {
                Err(_) => return Err(RouteError::NoRoute),
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(CallError::Failed(error))) => return Err(RouteError::Failed(error)),
                Ok(Err(CallError::Moved(Some(newer))))
                    if redirects < MAX_REDIRECTS && newer.contains(key) =>
                {
                    redirects += 1;
                    hint = Some(newer);
                    // Two servers that redirect to each other get time to agree.
                    if redirects > 2 {
                        tokio::time::sleep(backoff.next_pause()).await;
                    }
                }
                Ok(Err(CallError::Moved(_))) => self.wait(version, deadline, &mut backoff).await,
                Ok(Err(CallError::Unreachable(error))) => {
                    self.wait(version, deadline, &mut backoff).await;
                    if Instant::now() >= deadline {
                        return Err(RouteError::Failed(error));
                    }
                }
            }
            if Instant::now() >= deadline {
                return Err(RouteError::NoRoute);
            }
        }
    }

    /// Waits for a newer table, or for the backoff pause.
    async fn wait(&self, version: i64, deadline: Instant, backoff: &mut Backoff) {
        let until = deadline.min(Instant::now() + backoff.next_pause());
        // On either, the next lookup decides.
        let _ = timeout_at(until, self.newer_than(version)).await;
    }

    /// Splits a partition at a key; returns the id of the upper part.
    pub async fn split(&self, partition: &str, at: &str, patience: Duration) -> Result<String, EtcdError> {
        Ok(self.change(ChangeKind::Split, partition, at, "", patience).await?.partition_id)
    }

    /// Merges the next higher partition into this one.
    pub async fn merge(&self, partition: &str, above: &str, patience: Duration) -> Result<i64, EtcdError> {
        Ok(self.change(ChangeKind::Merge, partition, above, "", patience).await?.version)
    }

    /// Migrates a partition to a server.
    pub async fn migrate(&self, partition: &str, to: &str, patience: Duration) -> Result<i64, EtcdError> {
        Ok(self.change(ChangeKind::Migrate, partition, "", to, patience).await?.version)
    }

    /// Migrates all ranges away from a server and assigns it no more; `undo` reverts that.
    pub async fn drain(&self, node: &str, undo: bool, patience: Duration) -> Result<i64, EtcdError> {
        let kind = if undo { ChangeKind::Undrain } else { ChangeKind::Drain };
        Ok(self.change(kind, "", "", node, patience).await?.version)
    }

    async fn change(
        &self,
        kind: ChangeKind,
        partition: &str,
        argument: &str,
        node: &str,
        patience: Duration,
    ) -> Result<ChangeResponse, EtcdError> {
        let request = ChangeRequest {
            namespace: self.namespace.to_string(),
            kind: kind as i32,
            partition_id: partition.to_owned(),
            argument: argument.to_owned(),
            node_id: node.to_owned(),
        };
        self.call_leader(method::CHANGE, &request, patience).await
    }

    /// The state of the namespace on the leading manager.
    pub async fn show(&self, patience: Duration) -> Result<ShowResponse, EtcdError> {
        let request = ShowRequest { namespace: self.namespace.to_string() };
        self.call_leader(method::SHOW, &request, patience).await
    }

    /// Calls any manager and follows the redirect to the leader.
    async fn call_leader<Q: Message, A: Message + Default>(
        &self,
        path: &'static str,
        request: &Q,
        patience: Duration,
    ) -> Result<A, EtcdError> {
        let deadline = Instant::now() + patience;
        let mut channel = self.channel.clone();
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));
        loop {
            let reply = async {
                let link = channel.link(deadline, false).await?;
                let left = deadline.saturating_duration_since(Instant::now());
                let reply = unary::<Q, A>(&link, path, request, left).await;
                if reply.is_err() {
                    channel.leave(&link);
                }
                reply
            };
            let error = match timeout_at(deadline, reply).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) => error,
                Err(_) => return Err(EtcdError::Unknown("no reply within the timeout".to_owned())),
            };
            match leader_redirect(&error) {
                Some(leader) => channel = link::channel(&self.context, &[leader]),
                // A call that no leader started may be retried; a leader's rejection is final.
                None if matches!(error, EtcdError::Unreachable(_)) || is_leaderless(&error) => {
                    channel = link::channel(&self.context, &self.managers);
                }
                None => return Err(error),
            }
            if Instant::now() >= deadline {
                return Err(error);
            }
            backoff.pause().await;
        }
    }
}

fn is_leaderless(error: &EtcdError) -> bool {
    matches!(error, EtcdError::Refused(status) if status.message == NO_LEADER)
}
