//! HTTP on the admin port: liveness, readiness, metrics, facts about the node.
//!
//! Runs on the main thread. Invariants: `/livez` says only that this thread turns, and never depends on
//! recovery (a supervisor must not kill a node that is busy recovering); nothing here takes a lock of the
//! hot paths; [`limits`] bounds connections and time, and no handler reads a body.

mod cluster;
mod limits;
mod slots;

pub(crate) use self::cluster::OUTSIDE;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use serde::Serialize;
use tokio::net::TcpListener;

use crate::control::report::ClusterApi;

/// Whether the node serves, as `/readyz` tells it.
#[derive(Clone)]
pub(crate) struct Readiness {
    state: Arc<Mutex<ReadyState>>,
}

#[derive(Default)]
struct ReadyState {
    /// Why the node as a whole does not serve.
    stage: Option<String>,
    /// What must hold while it serves, and does not.
    failing: BTreeMap<&'static str, String>,
}

impl Readiness {
    /// Not ready, for this reason.
    pub(crate) fn not_yet(reason: &str) -> Self {
        let state = ReadyState { stage: Some(reason.to_owned()), failing: BTreeMap::new() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// From now on the node serves.
    pub(crate) fn ready(&self) {
        self.lock().stage = None;
    }

    /// From now on it does not, for this reason.
    pub(crate) fn not_ready(&self, reason: &str) {
        self.lock().stage = Some(reason.to_owned());
    }

    /// The start waits for something. Said in the log when it is something else than before.
    pub(crate) fn waits(&self, reason: &str) {
        let mut state = self.lock();
        if state.stage.as_deref() != Some(reason) {
            tracing::info!("{reason}");
            state.stage = Some(reason.to_owned());
        }
    }

    /// Something that must hold does not.
    pub(crate) fn fails(&self, what: &'static str, reason: &str) {
        if self.lock().failing.insert(what, reason.to_owned()).is_none() {
            tracing::warn!("not ready: {reason}");
        }
    }

    /// It holds again.
    pub(crate) fn holds(&self, what: &'static str) {
        if self.lock().failing.remove(what).is_some() {
            tracing::info!(what, "holds again");
        }
    }

    fn reason(&self) -> Option<String> {
        let state = self.lock();
        state.stage.clone().or_else(|| state.failing.values().next().cloned())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ReadyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What `/api/v1/node` answers.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodeFacts {
    /// The stable node number.
    pub(crate) node_id: i32,
    /// The cluster; empty until there is one.
    pub(crate) cluster_id: String,
    /// The life of the data folder.
    pub(crate) incarnation: u64,
    /// This build.
    pub(crate) version: String,
    /// The failure domain, or null.
    pub(crate) zone: Option<String>,
    /// The process.
    pub(crate) pid: u32,
    /// Milliseconds since 1970 when it started.
    pub(crate) started_at_ms: i64,
}

/// Everything the handlers share.
pub(crate) struct Admin {
    /// Told by the serving code.
    pub(crate) readiness: Readiness,
    /// The registry behind `/metrics`.
    pub(crate) metrics: Arc<Metrics>,
    /// The node.
    pub(crate) facts: Mutex<NodeFacts>,
    /// The cluster, once the node is in one.
    pub(crate) cluster: OnceLock<ClusterApi>,
    /// The store, once it serves.
    pub(crate) slots: OnceLock<Arc<moim_slots::service::Service>>,
    /// The addresses clients reach, known once the listeners exist.
    pub(crate) listeners: Mutex<Listeners>,
}

impl Admin {
    fn facts(&self) -> NodeFacts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The node has a cluster and, perhaps, another life from now on.
    pub(crate) fn set_identity(&self, cluster_id: &str, incarnation: u64) {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        facts.cluster_id = cluster_id.to_owned();
        facts.incarnation = incarnation;
    }
}

/// The addresses of the listeners that exist.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Listeners {
    /// The Kafka protocol.
    pub(crate) kafka: Option<SocketAddr>,
    /// The Redis protocol: this node's home shard.
    pub(crate) redis: Option<SocketAddr>,
    /// The etcd protocol.
    pub(crate) etcd: Option<SocketAddr>,
    /// HTTP.
    pub(crate) admin: Option<SocketAddr>,
    /// Other nodes.
    pub(crate) peer: Option<SocketAddr>,
}

/// Starts to serve; ends when `scope` is told to stop.
pub(crate) fn serve(listener: TcpListener, admin: Arc<Admin>, max_connections: u32, scope: &Scope) {
    let shutdown: Shutdown = scope.shutdown().clone();
    let app = router(admin);
    let listener = limits::LimitedListener::new(listener, max_connections);
    scope.spawn("admin-http", async move {
        tokio::select! {
            served = axum::serve(listener, app) => {
                if let Err(error) = served {
                    tracing::error!(%error, "the admin listener failed");
                }
            }
            // The last answers are short; nobody's data is lost when they are cut.
            () = shutdown.stopped() => {}
        }
    });
}

fn router(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/api/v1/node", get(node))
        .route("/api/v1/cluster", get(cluster::report))
        .route("/api/v1/cluster/events", get(cluster::events))
        .route("/api/v1/cluster/nodes/{node_id}/drain", post(cluster::drain))
        .route("/api/v1/cluster/nodes/{node_id}/undrain", post(cluster::undrain))
        .route("/api/v1/cluster/nodes/{node_id}/empty", post(cluster::empty))
        .route("/api/v1/cluster/nodes/{node_id}/remove", post(cluster::remove))
        .route("/api/v1/cluster/nodes/{node_id}/replace", post(cluster::replace))
        .route("/api/v1/slots", get(slots::report))
        .route("/api/v1/slots/move", post(slots::begin))
        .route("/api/v1/slots/rebalance", post(slots::rebalance))
        .route("/api/v1/slots/moves/{id}/abort", post(slots::abort))
        .route("/api/v1/slots/durability", post(slots::durability))
        .fallback(|| async { (StatusCode::NOT_FOUND, "not found\n") })
        .with_state(admin)
}

/// Asks for the quorum now: what the node's own lease says of it is seconds old.
async fn readyz(State(admin): State<Arc<Admin>>) -> Response {
    let mut reason = admin.readiness.reason();
    if reason.is_none()
        && let Some(cluster) = admin.cluster.get()
        && !cluster.sees_quorum().await
    {
        reason = Some("no coordination quorum in sight".to_owned());
    }
    match reason {
        None => "ready\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")).into_response(),
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], admin.metrics.render())
}

async fn node(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    #[derive(Serialize)]
    struct Answer {
        #[serde(flatten)]
        facts: NodeFacts,
        ready: bool,
        not_ready_because: Option<String>,
        listeners: Listeners,
    }
    let reason = admin.readiness.reason();
    let listeners = admin.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let facts = admin.facts();
    Json(Answer { facts, ready: reason.is_none(), not_ready_because: reason, listeners })
}

async fn index(State(admin): State<Arc<Admin>>) -> Html<String> {
    let links = ["/livez", "/readyz", "/metrics", "/api/v1/node", "/api/v1/cluster", "/api/v1/slots"];
    let links: String = links.iter().map(|path| format!("<li><a href=\"{path}\">{path}</a>\n")).collect();
    let facts = admin.facts();
    Html(format!(
        "<!doctype html>\n<meta charset=\"utf-8\">\n<title>moim node {id}</title>\n\
         <style>body{{font:16px/1.5 system-ui;margin:3em auto;max-width:40em;padding:0 1em}}</style>\n\
         <h1>moim</h1>\n<p>Node {id} of cluster <code>{cluster}</code>, version {version}.\n<ul>\n{links}</ul>\n",
        id = facts.node_id,
        cluster = facts.cluster_id,
        version = facts.version,
    ))
}

#[cfg(test)]
mod tests;
