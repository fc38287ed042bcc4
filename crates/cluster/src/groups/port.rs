//! The group port of a process: one listener for the groups of all its applications.
//!
//! Members of a group name the group when they connect ([`moim_raft::Doors`]). Founders and joining nodes
//! are not members yet; they name the application in their call, and the [`JoinRouter`] forwards it to that
//! application's join service.
//!
//! Invariant: a call about one application is never answered by another application's service.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use moim_base::task::{Scope, Shutdown};
use moim_raft::{BoxFuture, Doors, Router, Service, ServiceId, TcpServer};
use serde::Deserialize;

use super::join::JoinReply;

/// The listener for members and joining nodes of this process's groups. Cheap to clone; it closes when the
/// last group on it and the last clone are dropped, or by [`close`](Self::close).
#[derive(Clone)]
pub struct GroupPort {
    inner: Arc<Inner>,
}

struct Inner {
    doors: Doors,
    join_router: Arc<JoinRouter>,
    address: String,
    scope: Scope,
}

impl GroupPort {
    /// Binds the listener. The advertised address is `advertise`, or the listen address if that is empty.
    pub async fn bind(listen: SocketAddr, advertise: &str) -> io::Result<Self> {
        let (router, join_router) = (Router::new(), Arc::new(JoinRouter::default()));
        router.serve(ServiceId::NODE, join_router.clone());
        let (doors, scope) = (Doors::new(router), Scope::new(Shutdown::new()));
        let server = TcpServer::bind_shared(listen, doors.clone(), &scope).await?;
        let address = if advertise.is_empty() { server.address().to_string() } else { advertise.to_owned() };
        Ok(Self { inner: Arc::new(Inner { doors, join_router, address, scope }) })
    }

    /// The advertised address.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// Stops accepting connections and closes the existing ones.
    pub fn close(&self) {
        self.inner.scope.shutdown().stop();
    }

    pub(super) fn doors(&self) -> &Doors {
        &self.inner.doors
    }

    /// Routes join calls of an application to this service.
    pub(super) fn register_join_service(&self, app: &str, service: Arc<dyn Service>) {
        let mut services = self.inner.join_router.0.write().unwrap_or_else(PoisonError::into_inner);
        services.insert(app.to_owned(), service);
    }

    /// Stops routing join calls of an application.
    pub(super) fn unregister_join_service(&self, app: &str) {
        self.inner.join_router.0.write().unwrap_or_else(PoisonError::into_inner).remove(app);
    }
}

impl std::fmt::Debug for GroupPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GroupPort({})", self.inner.address)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.scope.shutdown().stop();
    }
}

/// Routes join calls to services, by application.
#[derive(Default)]
struct JoinRouter(RwLock<HashMap<String, Arc<dyn Service>>>);

/// The part of a join call that names its application.
#[derive(Deserialize)]
struct CallTarget {
    #[serde(default)]
    app: String,
    ticket: Option<Ticket>,
}

#[derive(Deserialize)]
struct Ticket {
    #[serde(default)]
    app: String,
}

impl Service for JoinRouter {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            let about = serde_json::from_slice::<CallTarget>(&request);
            let app = about.map(|about| about.ticket.map_or(about.app, |ticket| ticket.app));
            let service = match &app {
                Ok(app) => self.0.read().unwrap_or_else(PoisonError::into_inner).get(app).cloned(),
                Err(_) => None,
            };
            let reason = match (service, app) {
                (Some(service), _) => return service.handle(request).await,
                (None, Ok(app)) => format!("there is no group of {app} here"),
                (None, Err(error)) => format!("malformed join request: {error}"),
            };
            serde_json::to_vec(&JoinReply::Rejected { reason }).expect("plain data encodes as JSON").into()
        })
    }
}
