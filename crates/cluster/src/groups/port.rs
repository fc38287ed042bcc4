//! The port of a process: one listener for the groups of all its applications.
//!
//! Members of a group name the group when they connect ([`moim_raft::Doors`]); whoever is not a member yet, founders and
//! newcomers, names the application in its question, and the [`Reception`] gives it to that application's desk.
//!
//! Invariant: a question about one application is never answered by another's desk.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use moim_base::task::{Scope, Shutdown};
use moim_raft::{BoxFuture, Doors, Router, Service, ServiceId, TcpServer};
use serde::Deserialize;

use super::join::Answer;

/// Where members and newcomers reach the groups of this process. Cheap to clone; it is closed when the last group on it and
/// the last clone are gone, or by [`close`](Self::close).
#[derive(Clone)]
pub struct GroupPort {
    inner: Arc<Inner>,
}

struct Inner {
    doors: Doors,
    desks: Arc<Reception>,
    address: String,
    scope: Scope,
}

impl GroupPort {
    /// Listens. Others are told `advertise`, or where it listens if that is empty.
    pub async fn bind(listen: SocketAddr, advertise: &str) -> io::Result<Self> {
        let (router, desks) = (Router::new(), Arc::new(Reception::default()));
        router.serve(ServiceId::NODE, desks.clone());
        let (doors, scope) = (Doors::new(router), Scope::new(Shutdown::new()));
        let server = TcpServer::bind_shared(listen, doors.clone(), &scope).await?;
        let address = if advertise.is_empty() { server.address().to_string() } else { advertise.to_owned() };
        Ok(Self { inner: Arc::new(Inner { doors, desks, address, scope }) })
    }

    /// What others are told.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// Nobody is let in any more, and whoever is there is left.
    pub fn close(&self) {
        self.inner.scope.shutdown().stop();
    }

    pub(super) fn doors(&self) -> &Doors {
        &self.inner.doors
    }

    /// Questions about an application go to this desk from now on.
    pub(super) fn seat(&self, app: &str, desk: Arc<dyn Service>) {
        let mut desks = self.inner.desks.0.write().unwrap_or_else(PoisonError::into_inner);
        desks.insert(app.to_owned(), desk);
    }

    /// And now to nobody.
    pub(super) fn unseat(&self, app: &str) {
        self.inner.desks.0.write().unwrap_or_else(PoisonError::into_inner).remove(app);
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

/// Gives questions to desks, by application.
#[derive(Default)]
struct Reception(RwLock<HashMap<String, Arc<dyn Service>>>);

/// As much of a question as says whom it is for.
#[derive(Deserialize)]
struct About {
    #[serde(default)]
    app: String,
    ticket: Option<Ticket>,
}

#[derive(Deserialize)]
struct Ticket {
    #[serde(default)]
    app: String,
}

impl Service for Reception {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            let about = serde_json::from_slice::<About>(&request);
            let app = about.map(|about| about.ticket.map_or(about.app, |ticket| ticket.app));
            let desk = match &app {
                Ok(app) => self.0.read().unwrap_or_else(PoisonError::into_inner).get(app).cloned(),
                Err(_) => None,
            };
            let reason = match (desk, app) {
                (Some(desk), _) => return desk.handle(request).await,
                (None, Ok(app)) => format!("there is no group of {app} here"),
                (None, Err(error)) => format!("a question that makes no sense: {error}"),
            };
            serde_json::to_vec(&Answer::Rejected { reason }).unwrap_or_default().into()
        })
    }
}
