//! Server registry: live servers as keys under a lease, `/<namespace>/nodes/<id>`.
//!
//! A [`Registration`] lasts until it is dropped or deregistered: after a lease loss, because the store was
//! unavailable or the process was paused, the server registers again automatically. The record of another
//! process with the same id is replaced only after its lease has expired at the store, so two processes
//! never hold one id at the same time. [`MembershipWatcher`] turns the keys into joined and left events;
//! after a watch gap it lists again and emits the difference, so none is missed.

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
use crate::held_key;
use crate::repository::{Compare, Entry, LeaseId, RepositoryError, Txn, TxnOutcome};
use crate::session::{Session, SessionEnd};

/// A registered server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServerInfo {
    /// Server id.
    pub id: String,
    /// Address, as `host:port`.
    pub address: String,
    /// Zone (failure domain).
    pub zone: String,
    /// Additional metadata.
    pub metadata: BTreeMap<String, String>,
}

impl ServerInfo {
    fn to_bytes(&self) -> Bytes {
        serde_json::to_vec(self).expect("plain fields serialize to JSON").into()
    }
}

/// A failed registration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The id is empty or contains a slash.
    #[error("{0:?} cannot be a server's id")]
    BadId(String),
    /// Another process is registered under this id and renews its lease.
    #[error(
        "server {id} is already registered at {address} and its lease is renewed: stop it, or use another id"
    )]
    Duplicate {
        /// Server id.
        id: String,
        /// The address of the registered process.
        address: String,
    },
    /// The store failed or did not answer.
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
    /// The registry of a namespace; a failed server is removed after `ttl`.
    pub fn new(context: &Context, namespace: &str, ttl: Duration) -> Self {
        Self { context: context.clone(), prefix: nodes_prefix(namespace).into(), ttl }
    }

    /// Registers a server. It is listed when this returns, until the registration is dropped.
    pub async fn register(&self, server: ServerInfo) -> Result<Registration, RegisterError> {
        if server.id.is_empty() || server.id.contains('/') {
            return Err(RegisterError::BadId(server.id));
        }
        let key = format!("{}{}", self.prefix, server.id);
        let incarnation = put(&self.context, &key, &server, self.ttl, None).await?;
        let (sender, receiver) = watch::channel(Some(incarnation));
        let (context, ttl) = (self.context.clone(), self.ttl);
        let stop = context.scope.shutdown().clone();
        context.scope.clone().spawn("cluster registration", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = sender.closed() => {}
                () = keep_registered(&context, &key, &server, ttl, &sender) => {}
            }
            sender.send_replace(None);
        });
        Ok(Registration { incarnation: receiver })
    }

    /// Removes a server immediately, independent of the process that registered it.
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

    /// Lists the live servers.
    pub async fn list(&self) -> Result<Vec<ServerInfo>, RepositoryError> {
        let (_, entries) = self.context.repository.list(&self.prefix).await?;
        Ok(entries.iter().filter_map(|entry| read(&self.context, entry)).collect())
    }

    /// Watches server registrations.
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

/// One uninterrupted registration: its lease, and the create revision of the record, which identifies the
/// incarnation.
#[derive(Clone)]
struct Incarnation {
    session: Session,
    created: i64,
}

/// Writes the record under a new lease. `previous` is the lease of this process's own earlier registration,
/// which has ended here: its record is deleted immediately. Any other record must expire with its lease
/// first.
async fn put(
    context: &Context,
    key: &str,
    server: &ServerInfo,
    ttl: Duration,
    previous: Option<LeaseId>,
) -> Result<Incarnation, RegisterError> {
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
            Ok(TxnOutcome::Done { revision }) => return Ok(monitor(context, key, session, revision)),
            Ok(TxnOutcome::Conflict { mut current, .. }) => match current.pop().flatten() {
                Some(found) if found.lease == Some(session.lease()) => {
                    return Ok(monitor(context, key, session, found.create_revision));
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

/// Ends the session when the record is deleted or replaced, although the lease may be valid.
fn monitor(context: &Context, key: &str, session: Session, created: i64) -> Incarnation {
    let server = key.to_owned();
    held_key::monitor(context, &session, key.to_owned(), created, move |reason| {
        tracing::debug!(server, reason, "server registration ended");
    });
    Incarnation { session, created }
}

/// Registers again after every lease loss.
async fn keep_registered(
    context: &Context,
    key: &str,
    server: &ServerInfo,
    ttl: Duration,
    sender: &watch::Sender<Option<Incarnation>>,
) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    let mut previous = None;
    loop {
        let incarnation = sender.borrow().clone();
        if let Some(incarnation) = incarnation {
            let end = incarnation.session.lost().await;
            if end == SessionEnd::Closed {
                return; // deregistered
            }
            previous = Some(incarnation.session.lease());
            tracing::warn!(server = server.id, %end, "server registration lost; registering again");
            sender.send_replace(None);
        }
        match put(context, key, server, ttl, previous).await {
            Ok(incarnation) => {
                backoff.reset();
                sender.send_replace(Some(incarnation));
            }
            Err(error) => {
                tracing::debug!(%error, server = server.id, "server registration failed");
                backoff.pause().await;
            }
        }
    }
}

/// A server's registration. Dropping it deregisters immediately.
#[derive(Clone)]
pub struct Registration {
    incarnation: watch::Receiver<Option<Incarnation>>,
}

impl Registration {
    /// True while the registration is valid, by this process's clock. A server that owns ranges checks it
    /// before each use.
    pub fn is_valid(&self) -> bool {
        self.incarnation.borrow().as_ref().is_some_and(|incarnation| incarnation.session.is_valid())
    }

    /// The create revision of the record, while the registration is valid. It changes with a new
    /// registration: ranges owned before may have had other owners since.
    pub fn created(&self) -> Option<i64> {
        self.incarnation
            .borrow()
            .as_ref()
            .filter(|incarnation| incarnation.session.is_valid())
            .map(|incarnation| incarnation.created)
    }

    /// Returns when the server has registered again or has lost its registration. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.incarnation.changed().await.is_err() {
            // The process stops.
            std::future::pending::<()>().await;
        }
    }

    /// Deregisters and waits for the store's reply.
    pub async fn deregister(self) -> Result<(), RepositoryError> {
        let incarnation = self.incarnation.borrow().clone();
        match incarnation {
            Some(incarnation) => incarnation.session.close().await,
            None => Ok(()),
        }
    }
}

/// A server registration event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEvent {
    /// The server registered.
    Joined(ServerInfo),
    /// Its lease expired, or it deregistered.
    Left(ServerInfo),
}

/// Stream of registration events. Dropping it ends the watch.
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
                            // A new incarnation of the same server, or new metadata: the server has not
                            // left.
                            Some(_) => continue,
                            None => NodeEvent::Joined(server),
                        }
                    }
                    follow::Change::Deleted(key) => match known.remove(&key) {
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

    /// The next event: first the registered servers, then every change. Cancel-safe.
    pub async fn next(&mut self) -> Option<NodeEvent> {
        self.events.recv().await
    }
}

#[cfg(test)]
mod tests;
