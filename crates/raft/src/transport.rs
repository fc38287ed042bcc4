//! The transport between members: it carries opaque requests to an address; a router dispatches them to a group or a
//! service.
//!
//! One transport serves every group of a process; each request carries its group id. A request without an answer may
//! or may not have been executed: Raft makes repeating it harmless.
//!
//! Requests between nodes beside Raft (a forwarded command, joining) go to a [`Service`] over the same connections.
//! Services use the upper half of the group numbers and their own call slots on a connection, so that a slow service
//! never delays an append or a vote. The caller decides whether such a request may be repeated.

mod memory;
mod service;
mod tcp;

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use bytes::Bytes;

pub use self::memory::{MemoryNetwork, MemoryTransport};
pub use self::service::{Service, ServiceError, ServiceId};
pub use self::tcp::{Doors, LocalPeer, PeerId, TcpServer, TcpTransport, open_stream, visit};
use crate::group::Core;
use crate::log::Logs;
use crate::rpc::Reply;
use crate::types::{GroupId, Member, VoterId};

/// A boxed future.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Why there was no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The peer is unreachable, and nothing was sent; pause before the next attempt.
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// The connection broke; retry at once.
    #[error("broken: {0}")]
    Broken(String),
    /// No answer in time.
    #[error("timed out")]
    TimedOut,
}

/// Carries requests to other members.
pub trait Transport: Send + Sync + 'static {
    /// Sends `request` for `group` to a member and waits for its reply, `timeout` at most. Implementations bound
    /// their queue per peer; requests to one peer may be reordered.
    fn call<'a>(
        &'a self,
        to: &'a Member,
        group: GroupId,
        request: Bytes,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Bytes, TransportError>>;

    /// Calls a service of a node and waits for its answer, `timeout` at most.
    fn ask<'a>(
        &'a self,
        to: &'a Member,
        service: ServiceId,
        request: Bytes,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Bytes, ServiceError>> {
        Box::pin(async move {
            let answer = self.call(to, service.as_group(), request, timeout).await?;
            service::open_reply(answer)
        })
    }
}

/// The receiving side: dispatches requests to the groups of this process.
#[derive(Clone, Default)]
pub struct Router {
    groups: Arc<RwLock<HashMap<GroupId, Weak<Core>>>>,
    services: Arc<RwLock<HashMap<ServiceId, Arc<dyn Service>>>>,
    streams: Arc<RwLock<Option<TakeStream>>>,
    logs: Logs,
}

/// Accepts raw streams of members.
type TakeStream = Arc<dyn Fn(std::net::TcpStream) + Send + Sync>;

impl Router {
    /// A router without groups.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn add(&self, group: GroupId, core: &Arc<Core>) {
        self.groups.write().unwrap_or_else(PoisonError::into_inner).insert(group, Arc::downgrade(core));
    }

    pub(crate) fn remove(&self, group: GroupId) {
        self.groups.write().unwrap_or_else(PoisonError::into_inner).remove(&group);
    }

    /// Registers `service` under `id`.
    pub fn serve(&self, id: ServiceId, service: Arc<dyn Service>) {
        self.services.write().unwrap_or_else(PoisonError::into_inner).insert(id, service);
    }

    /// Registers the handler of raw streams that members request. They are non-blocking. The handler must be quick.
    pub fn serve_streams(&self, take: impl Fn(std::net::TcpStream) + Send + Sync + 'static) {
        *self.streams.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(take));
    }

    pub(crate) fn take_stream(&self, stream: std::net::TcpStream) -> io::Result<()> {
        let take = self.streams.read().unwrap_or_else(PoisonError::into_inner).clone();
        take.ok_or(io::ErrorKind::NotConnected)?(stream);
        Ok(())
    }

    /// Unregisters a service: peers get "not here" from now on.
    pub fn unserve(&self, id: ServiceId) {
        self.services.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// Serves a peer's request. Any input gets an answer.
    pub async fn handle(&self, group: GroupId, request: Bytes) -> Bytes {
        self.answer(None, group, request).await
    }

    /// The same for a peer that proved its voter id, and so acts for itself only; 0 is a visitor.
    pub async fn handle_from(&self, peer: VoterId, group: GroupId, request: Bytes) -> Bytes {
        self.answer(Some(peer).filter(|peer| peer.0 != 0), group, request).await
    }

    async fn answer(&self, peer: Option<VoterId>, group: GroupId, request: Bytes) -> Bytes {
        if let Some(id) = ServiceId::of_group(group) {
            let service = {
                let services = self.services.read().unwrap_or_else(PoisonError::into_inner);
                services.get(&id).cloned()
            };
            return match service {
                Some(service) => service::reply(&service.handle_from(peer, request).await),
                None => service::not_here(),
            };
        }
        let core = {
            let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
            groups.get(&group).and_then(Weak::upgrade)
        };
        match core {
            Some(core) => core.handle(peer, request).await.encode(),
            None => Reply::Failed(format!("group {group} is not here")).encode(),
        }
    }

    /// Passes on the report of the store's durable sink; each group picks its own tags. Called on the disk thread.
    pub fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.logs.on_durable(advanced);
    }

    pub(crate) fn logs(&self) -> &Logs {
        &self.logs
    }
}
