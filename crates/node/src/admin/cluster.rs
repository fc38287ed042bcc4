//! `/api/v1/cluster`: the cluster as this node sees it, and what operators change.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use moim_cluster::nodes::NodeOrder;
use serde::{Deserialize, Serialize};

use super::Admin;
use crate::control::records::RecordError;

/// Why a request was refused, for programs.
#[derive(Serialize)]
struct Refusal {
    error: String,
}

fn refuse(status: StatusCode, error: impl Into<String>) -> Response {
    (status, Json(Refusal { error: error.into() })).into_response()
}

/// How the refusal of a node begins that is in no cluster yet. It has done nothing.
pub(crate) const OUTSIDE: &str = "this node is in no cluster yet";

fn outside(admin: &Admin) -> Response {
    let why = admin.readiness.reason().unwrap_or_default();
    refuse(StatusCode::SERVICE_UNAVAILABLE, format!("{OUTSIDE}: {why}"))
}

pub(super) async fn report(State(admin): State<Arc<Admin>>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => Json(cluster.report().await).into_response(),
        None => outside(&admin),
    }
}

#[derive(Deserialize)]
pub(super) struct After {
    #[serde(default)]
    after: u64,
}

/// What this node has seen happen, after the event of this number.
pub(super) async fn events(State(admin): State<Arc<Admin>>, Query(query): Query<After>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => {
            let events = cluster.events.after(query.after);
            Json(serde_json::json!({ "node_id": cluster.node_id, "events": events })).into_response()
        }
        None => outside(&admin),
    }
}

/// A node shall lead nothing.
pub(super) async fn drain(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    order(&admin, node_id, Some(NodeOrder::Drain)).await
}

/// A node may lead again, and hold replicas.
pub(super) async fn undrain(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    order(&admin, node_id, None).await
}

/// A node shall hold nothing: what comes before it is removed.
pub(super) async fn empty(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    order(&admin, node_id, Some(NodeOrder::Remove)).await
}

async fn order(admin: &Admin, node_id: i32, order: Option<NodeOrder>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => answer(cluster.order(node_id, order).await),
        None => outside(admin),
    }
}

#[derive(Deserialize)]
pub(super) struct Force {
    #[serde(default)]
    force: bool,
}

pub(super) async fn remove(
    State(admin): State<Arc<Admin>>,
    Path(node_id): Path<i32>,
    Query(query): Query<Force>,
) -> Response {
    match admin.cluster.get() {
        Some(cluster) => answer(cluster.remove(node_id, query.force).await),
        None => outside(&admin),
    }
}

pub(super) async fn replace(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => answer(cluster.replace(node_id).await),
        None => outside(&admin),
    }
}

fn answer(changed: Result<(), RecordError>) -> Response {
    let error = match changed {
        Ok(()) => return Json(serde_json::json!({})).into_response(),
        Err(error) => error,
    };
    let status = match &error {
        RecordError::NoSuchNode(_) => StatusCode::NOT_FOUND,
        RecordError::LastNode(_)
        | RecordError::Running(_)
        | RecordError::Holds(..)
        | RecordError::OtherFolder(_)
        | RecordError::Raced => StatusCode::CONFLICT,
        RecordError::Store(moim_cluster::RepositoryError::Unknown) => StatusCode::GATEWAY_TIMEOUT,
        RecordError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    refuse(status, error.to_string())
}
