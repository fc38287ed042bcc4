//! HTTP server of the admin port: liveness, readiness, metrics, node facts and cluster operations.
//!
//! Runs on the main thread. Invariants: `/livez` proves only that this thread makes progress, and never depends on
//! recovery (a supervisor must not kill a node that is recovering). No handler takes a lock of the hot paths.
//! [`limits`] bounds connections and time. No handler reads a body.

mod cluster;
mod limits;
mod slots;

pub use self::cluster::NOT_IN_CLUSTER;

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

/// Readiness of the node (`/readyz`).
#[derive(Clone)]
pub(crate) struct Readiness {
    state: Arc<Mutex<ReadyState>>,
}

#[derive(Default)]
struct ReadyState {
    /// Startup or shutdown stage; `None` while the node serves.
    stage: Option<String>,
    /// Failing readiness conditions, with their reasons.
    failing: BTreeMap<&'static str, String>,
}

impl Readiness {
    /// A node that is not ready, for this reason.
    pub(crate) fn not_ready_because(reason: &str) -> Self {
        let state = ReadyState { stage: Some(reason.to_owned()), failing: BTreeMap::new() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Marks the node as ready.
    pub(crate) fn ready(&self) {
        self.lock().stage = None;
    }

    /// Marks the node as not ready, for this reason.
    pub(crate) fn not_ready(&self, reason: &str) {
        self.lock().stage = Some(reason.to_owned());
    }

    /// Sets the reason why the start waits. A changed reason is logged.
    pub(crate) fn set_waiting(&self, reason: &str) {
        let mut state = self.lock();
        if state.stage.as_deref() != Some(reason) {
            tracing::info!(reason, "startup waiting");
            state.stage = Some(reason.to_owned());
        }
    }

    /// Marks a readiness condition as failing.
    pub(crate) fn set_failing(&self, condition: &'static str, reason: &str) {
        if self.lock().failing.insert(condition, reason.to_owned()).is_none() {
            tracing::warn!(condition, reason, "readiness condition failed");
        }
    }

    /// Marks a readiness condition as restored.
    pub(crate) fn clear_failing(&self, condition: &'static str) {
        if self.lock().failing.remove(condition).is_some() {
            tracing::info!(condition, "readiness condition restored");
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

/// Node part of the `/api/v1/node` response.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodeFacts {
    /// Node id.
    pub(crate) node_id: i32,
    /// Cluster id; empty before the node is in a cluster.
    pub(crate) cluster_id: String,
    /// Incarnation of the data directory.
    pub(crate) incarnation: u64,
    /// Moim version.
    pub(crate) version: String,
    /// Failure domain, or null.
    pub(crate) zone: Option<String>,
    /// Process id.
    pub(crate) pid: u32,
    /// Start time, in milliseconds since 1970.
    pub(crate) started_at_ms: i64,
}

/// Shared state of the handlers.
pub(crate) struct Admin {
    /// Readiness, set by the startup and by the health checks.
    pub(crate) readiness: Readiness,
    /// The registry behind `/metrics`.
    pub(crate) metrics: Arc<Metrics>,
    /// Facts about the node.
    pub(crate) facts: Mutex<NodeFacts>,
    /// Cluster operations, once the node is in a cluster.
    pub(crate) cluster: OnceLock<ClusterApi>,
    /// The store, once it serves.
    pub(crate) slots: OnceLock<Arc<moim_slots::service::Service>>,
    /// Listener addresses, once the listeners are bound.
    pub(crate) listeners: Mutex<Listeners>,
}

impl Admin {
    fn facts(&self) -> NodeFacts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the cluster id and the incarnation after the cluster formation.
    pub(crate) fn set_identity(&self, cluster_id: &str, incarnation: u64) {
        let mut facts = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        facts.cluster_id = cluster_id.to_owned();
        facts.incarnation = incarnation;
    }
}

/// Addresses of the bound listeners.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Listeners {
    /// Kafka protocol.
    pub(crate) kafka: Option<SocketAddr>,
    /// Redis protocol: this node's home shard.
    pub(crate) redis: Option<SocketAddr>,
    /// etcd protocol.
    pub(crate) etcd: Option<SocketAddr>,
    /// HTTP admin API.
    pub(crate) admin: Option<SocketAddr>,
    /// Peer protocol of the other nodes.
    pub(crate) peer: Option<SocketAddr>,
}

/// Serves the admin port until the shutdown of `scope`.
pub(crate) fn serve(listener: TcpListener, admin: Arc<Admin>, max_connections: u32, scope: &Scope) {
    let shutdown: Shutdown = scope.shutdown().clone();
    let app = router(admin);
    let listener = limits::LimitedListener::new(listener, max_connections);
    scope.spawn("admin-http", async move {
        tokio::select! {
            served = axum::serve(listener, app) => {
                if let Err(error) = served {
                    tracing::error!(%error, "admin listener failed");
                }
            }
            // Responses in progress are cut off: they are short and carry no data to lose.
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

/// Checks the quorum at request time: the result of the last lease renewal may be seconds old.
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
    struct NodeResponse {
        #[serde(flatten)]
        facts: NodeFacts,
        ready: bool,
        not_ready_because: Option<String>,
        listeners: Listeners,
    }
    let reason = admin.readiness.reason();
    let listeners = admin.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let facts = admin.facts();
    Json(NodeResponse { facts, ready: reason.is_none(), not_ready_because: reason, listeners })
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
