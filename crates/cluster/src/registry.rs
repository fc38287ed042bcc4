//! Servers that live, as keys under a lease: `/<namespace>/nodes/<id>`.
//!
//! A [`Registration`] lasts until it is dropped or deregistered: when the lease was lost, because the store was away or
//! the process was paused, the server registers again by itself. The record of another process with the same id is
//! replaced only after its lease has expired at the store, so two processes never hold one id at the same time. [`MembershipWatcher`] turns the keys into
//! joined and left events; after any gap it reads everything and emits the difference, so none is missed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::follow;
use crate::hold;
use crate::repository::{Compare, Entry, LeaseId, RepositoryError, Txn, TxnOutcome};
use crate::session::{Session, SessionEnd};

/// A server that is registered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServerInfo {
    /// Who it is.
    pub id: String,
    /// Where it is reached, as `host:port`.
    pub address: String,
    /// The failure domain.
    pub zone: String,
    /// Whatever else.
    pub metadata: BTreeMap<String, String>,
}

impl ServerInfo {
    fn to_bytes(&self) -> Bytes {
        serde_json::to_vec(self).expect("plain fields can be written down").into()
    }
}

/// Why a server is not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The id is empty, or has a slash.
    #[error("{0:?} cannot be a server's id")]
    BadId(String),
    /// Another process is registered under this id and renews its lease.
    #[error(
        "server {id} is already registered at {address} and its lease is renewed: stop it, or use another id"
    )]
    Duplicate {
        /// The id.
        id: String,
        /// The address of the registered process.
        address: String,
    },
    /// The store gave no answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// The servers of a namespace. Cheap to clone.
#[derive(Clone)]
pub struct NodeRegistry {
    context: Context,
    prefix: Arc<str>,
    ttl: Duration,
}

/// The prefix of the servers of a namespace.
pub fn nodes_prefix(namespace: &str) -> String {
    format!("/{}/nodes/", namespace.trim_matches('/'))
}

impl NodeRegistry {
    /// The registry of a namespace; a server that is gone is known to be after `ttl`.
    pub fn new(context: &Context, namespace: &str, ttl: Duration) -> Self {
        Self { context: context.clone(), prefix: nodes_prefix(namespace).into(), ttl }
    }

    /// Registers a server. It is listed when this returns, and stays until the registration is dropped.
    pub async fn register(&self, server: ServerInfo) -> Result<Registration, RegisterError> {
        if server.id.is_empty() || server.id.contains('/') {
            return Err(RegisterError::BadId(server.id));
        }
        let key = format!("{}{}", self.prefix, server.id);
        let life = put(&self.context, &key, &server, self.ttl, None).await?;
        let (sender, receiver) = watch::channel(Some(life));
        let (context, ttl) = (self.context.clone(), self.ttl);
        let stop = context.scope.shutdown().clone();
        context.scope.clone().spawn("cluster registration", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = sender.closed() => {}
                () = keep(&context, &key, &server, ttl, &sender) => {}
            }
            sender.send_replace(None);
        });
        Ok(Registration { life: receiver })
    }

    /// Removes a server at once, whoever registered it.
    pub async fn deregister(&self, id: &str) -> Result<(), RepositoryError> {
        let key = format!("{}{id}", self.prefix);
        let Some(entry) = self.context.repository.get(&key).await? else { return Ok(()) };
        let revoked = match entry.lease {
            Some(lease) => self.context.repository.revoke(lease).await,
            None => self.context.repository.txn(Txn::new().delete(key)).await.map(drop),
        };
        match revoked {
            Err(RepositoryError::LeaseNotFound(_)) => Ok(()),
            done => done,
        }
    }

    /// The servers that live.
    pub async fn list(&self) -> Result<Vec<ServerInfo>, RepositoryError> {
        let (_, entries) = self.context.repository.list(&self.prefix).await?;
        Ok(entries.iter().filter_map(|entry| read(&self.context, entry)).collect())
    }

    /// Watches servers come and go.
    pub fn watcher(&self) -> MembershipWatcher {
        MembershipWatcher::start(&self.context, &self.prefix)
    }
}

pub(crate) fn read(context: &Context, entry: &Entry) -> Option<ServerInfo> {
    match serde_json::from_slice(&entry.value) {
        Ok(server) => Some(server),
        Err(error) => {
            let (key, reason) = (entry.key.clone(), error.to_string());
            context.events.publish(ClusterEvent::Malformed { key, reason });
            None
        }
    }
}

/// One uninterrupted registration: its lease, and the create revision of the record, which tells lives apart.
#[derive(Clone)]
struct Life {
    session: Session,
    created: i64,
}

/// Writes the record under a new lease. `previous` is the lease of this process's own earlier registration, which has
/// ended here: its record is deleted at once. Any other record is waited for until its lease expires.
async fn put(
    context: &Context,
    key: &str,
    server: &ServerInfo,
    ttl: Duration,
    previous: Option<LeaseId>,
) -> Result<Life, RegisterError> {
    let mut backoff = Backoff::default();
    let began = context.clock.monotonic_ns();
    let patience = (ttl * 2).max(Duration::from_secs(5));
    let mut session = Session::open(context, ttl).await?;
    loop {
        if !session.is_valid() {
            session = Session::open(context, ttl).await?;
        }
        let txn = Txn::new().when(Compare::Absent(key.to_owned())).put_leased(
            key,
            server.to_bytes(),
            session.lease(),
        );
        match context.repository.txn(txn).await {
            Ok(TxnOutcome::Done { revision }) => return Ok(hold(context, key, session, revision)),
            Ok(TxnOutcome::Conflict { mut current, .. }) => match current.pop().flatten() {
                Some(found) if found.lease == Some(session.lease()) => {
                    return Ok(hold(context, key, session, found.create_revision));
                }
                // A record without a lease never expires.
                Some(found) if found.lease.is_none() || found.lease == previous => {
                    let same = Compare::ModRevision(key.to_owned(), found.mod_revision);
                    context.repository.txn(Txn::new().when(same).delete(key)).await?;
                }
                Some(found) => {
                    let waited = context.clock.monotonic_ns().saturating_sub(began);
                    if Duration::from_nanos(waited) >= patience {
                        let found: ServerInfo = serde_json::from_slice(&found.value).unwrap_or_default();
                        let (id, address) = (server.id.clone(), found.address);
                        return Err(RegisterError::Duplicate { id, address });
                    }
                    tokio::time::sleep((ttl / 20).min(Duration::from_millis(250))).await;
                }
                None => {}
            },
            Err(error) if error.is_retryable() && session.is_valid() => backoff.pause().await,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Ends the session when the record is deleted or replaced, although the lease may live.
fn hold(context: &Context, key: &str, session: Session, created: i64) -> Life {
    let server = key.to_owned();
    hold::watch_over(context, &session, key.to_owned(), created, move |reason| {
        tracing::debug!(server, reason, "server registration ended");
    });
    Life { session, created }
}

/// Registers again whenever the lease was lost.
async fn keep(
    context: &Context,
    key: &str,
    server: &ServerInfo,
    ttl: Duration,
    sender: &watch::Sender<Option<Life>>,
) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    let mut previous = None;
    loop {
        let life = sender.borrow().clone();
        if let Some(life) = life {
            let end = life.session.lost().await;
            if end == SessionEnd::Closed {
                return; // deregistered
            }
            previous = Some(life.session.lease());
            tracing::warn!(server = server.id, %end, "server registration lost; registering again");
            sender.send_replace(None);
        }
        match put(context, key, server, ttl, previous).await {
            Ok(life) => {
                backoff.reset();
                sender.send_replace(Some(life));
            }
            Err(error) => {
                tracing::debug!(%error, server = server.id, "server registration failed");
                backoff.pause().await;
            }
        }
    }
}

/// A server's registration. Dropping it ends it at once.
#[derive(Clone)]
pub struct Registration {
    life: watch::Receiver<Option<Life>>,
}

impl Registration {
    /// Whether the registration stands at this moment, by this process's clock. A server that owns something looks before
    /// each use.
    pub fn is_valid(&self) -> bool {
        self.life.borrow().as_ref().is_some_and(|life| life.session.is_valid())
    }

    /// The create revision of the record, while the registration stands. It changes when the server had to register again:
    /// what it owned before may have had other owners since.
    pub fn created(&self) -> Option<i64> {
        self.life.borrow().as_ref().filter(|life| life.session.is_valid()).map(|life| life.created)
    }

    /// Returns when the server has registered again or has lost its registration. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.life.changed().await.is_err() {
            // The process stops.
            std::future::pending::<()>().await;
        }
    }

    /// Ends the registration and waits for the store to say so.
    pub async fn deregister(self) -> Result<(), RepositoryError> {
        let life = self.life.borrow().clone();
        match life {
            Some(life) => life.session.close().await,
            None => Ok(()),
        }
    }
}

/// A server came or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEvent {
    /// It registered.
    Joined(ServerInfo),
    /// Its lease ended, or it deregistered.
    Left(ServerInfo),
}

/// Tells who comes and goes. Dropping it ends the watch.
pub struct MembershipWatcher {
    events: mpsc::Receiver<NodeEvent>,
}

impl MembershipWatcher {
    fn start(context: &Context, prefix: &str) -> Self {
        let (sender, events) = mpsc::channel(256);
        let mut follower = follow::Follower::start(context, prefix.to_owned());
        let context = context.clone();
        context.scope.clone().spawn("cluster membership watcher", async move {
            let mut known: BTreeMap<String, ServerInfo> = BTreeMap::new();
            loop {
                let change = tokio::select! {
                    biased;
                    () = sender.closed() => return,
                    change = follower.next() => change,
                };
                let Some(change) = change else { return };
                let event = match change {
                    follow::Change::Put(entry) => {
                        let Some(server) = read(&context, &entry) else { continue };
                        match known.insert(entry.key, server.clone()) {
                            // A new life of the same server, or new metadata: it has not gone.
                            Some(_) => continue,
                            None => NodeEvent::Joined(server),
                        }
                    }
                    follow::Change::Gone(key) => match known.remove(&key) {
                        Some(server) => NodeEvent::Left(server),
                        None => continue,
                    },
                    follow::Change::Listed => continue,
                };
                if sender.send(event).await.is_err() {
                    return;
                }
            }
        });
        Self { events }
    }

    /// The next event: first everybody who is there, then every change. Cancel-safe.
    pub async fn next(&mut self) -> Option<NodeEvent> {
        self.events.recv().await
    }
}

#[cfg(test)]
mod tests;
