//! HTTP on the admin port: liveness, readiness, metrics, facts about the node.
//!
//! Runs on the control thread. Invariants: `/livez` says only that this thread turns, and never depends on
//! recovery (a supervisor must not kill a node that is busy recovering); nothing here takes a lock of the
//! hot paths; [`limits`] bounds connections and time, and no handler reads a body.

mod limits;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use serde::Serialize;
use tokio::net::TcpListener;

/// Whether the node serves, as `/readyz` tells it.
#[derive(Clone)]
pub(crate) struct Readiness {
    reason: Arc<Mutex<Option<String>>>,
}

impl Readiness {
    /// Not ready, for this reason.
    pub(crate) fn not_yet(reason: &str) -> Self {
        Self { reason: Arc::new(Mutex::new(Some(reason.to_owned()))) }
    }

    /// From now on the node serves.
    pub(crate) fn ready(&self) {
        *self.lock() = None;
    }

    /// From now on it does not, for this reason.
    pub(crate) fn not_ready(&self, reason: &str) {
        *self.lock() = Some(reason.to_owned());
    }

    fn reason(&self) -> Option<String> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What `/api/v1/node` answers.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodeFacts {
    /// The stable node number.
    pub(crate) node_id: i32,
    /// The cluster.
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
    pub(crate) facts: NodeFacts,
    /// The addresses clients reach, known once the listeners exist.
    pub(crate) listeners: Mutex<Listeners>,
}

/// The addresses of the listeners that exist.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Listeners {
    /// The Kafka protocol.
    pub(crate) kafka: Option<SocketAddr>,
    /// HTTP.
    pub(crate) admin: Option<SocketAddr>,
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
        .fallback(|| async { (StatusCode::NOT_FOUND, "not found\n") })
        .with_state(admin)
}

async fn readyz(State(admin): State<Arc<Admin>>) -> Response {
    match admin.readiness.reason() {
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
    Json(Answer { facts: admin.facts.clone(), ready: reason.is_none(), not_ready_because: reason, listeners })
}

async fn index(State(admin): State<Arc<Admin>>) -> Html<String> {
    let links = ["/livez", "/readyz", "/metrics", "/api/v1/node"];
    let links: String = links.iter().map(|path| format!("<li><a href=\"{path}\">{path}</a>\n")).collect();
    let facts = &admin.facts;
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
