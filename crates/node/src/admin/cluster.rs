//! `/api/v1/cluster`: the cluster report of this node, and the node operations of operators.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use moim_state::nodes::NodeOrder;
use serde::{Deserialize, Serialize};

use super::Admin;
use crate::control::records::RecordError;

/// Error response.
#[derive(Serialize)]
struct Rejection {
    error: String,
}

fn reject(status: StatusCode, error: impl Into<String>) -> Response {
    (status, Json(Rejection { error: error.into() })).into_response()
}

/// How the refusal of a node begins that is in no cluster yet. It has done nothing.
pub const NOT_IN_CLUSTER: &str = "this node is in no cluster yet";

fn not_in_cluster(admin: &Admin) -> Response {
    let why = admin.readiness.reason().unwrap_or_default();
    reject(StatusCode::SERVICE_UNAVAILABLE, format!("{NOT_IN_CLUSTER}: {why}"))
}

pub(super) async fn report(State(admin): State<Arc<Admin>>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => Json(cluster.report().await).into_response(),
        None => not_in_cluster(&admin),
    }
}

#[derive(Deserialize)]
pub(super) struct After {
    #[serde(default)]
    after: u64,
}

/// Cluster events of this node after a sequence number.
pub(super) async fn events(State(admin): State<Arc<Admin>>, Query(query): Query<After>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => {
            let events = cluster.events.after(query.after);
            Json(serde_json::json!({ "node_id": cluster.node_id, "events": events })).into_response()
        }
        None => not_in_cluster(&admin),
    }
}

/// Orders a node to lead no partition.
pub(super) async fn drain(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    order(&admin, node_id, Some(NodeOrder::Drain)).await
}

/// Deletes the order of a node: it may lead and hold replicas again.
pub(super) async fn undrain(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    order(&admin, node_id, None).await
}

/// Orders a node to hold no replica, before its removal.
pub(super) async fn empty(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    order(&admin, node_id, Some(NodeOrder::Remove)).await
}

async fn order(admin: &Admin, node_id: i32, order: Option<NodeOrder>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => answer(cluster.order(node_id, order).await),
        None => not_in_cluster(admin),
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
        None => not_in_cluster(&admin),
    }
}

pub(super) async fn replace(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => answer(cluster.replace(node_id).await),
        None => not_in_cluster(&admin),
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
        | RecordError::HasReplicas(..)
        | RecordError::OtherDirectory(_)
        | RecordError::Conflict => StatusCode::CONFLICT,
        RecordError::Store(moim_state::RepositoryError::Unknown) => StatusCode::GATEWAY_TIMEOUT,
        RecordError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    reject(status, error.to_string())
}
