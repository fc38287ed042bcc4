//! `/api/v1/cluster`: the cluster as this node sees it, and what operators change.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

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

fn outside(admin: &Admin) -> Response {
    let why = admin.readiness.reason().unwrap_or_default();
    refuse(StatusCode::SERVICE_UNAVAILABLE, format!("this node is in no cluster yet: {why}"))
}

pub(super) async fn report(State(admin): State<Arc<Admin>>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => Json(cluster.report().await).into_response(),
        None => outside(&admin),
    }
}

pub(super) async fn remove(State(admin): State<Arc<Admin>>, Path(node_id): Path<i32>) -> Response {
    match admin.cluster.get() {
        Some(cluster) => answer(cluster.remove(node_id).await),
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
        | RecordError::OtherFolder(_)
        | RecordError::Raced => StatusCode::CONFLICT,
        RecordError::Store(moim_cluster::RepositoryError::Unknown) => StatusCode::GATEWAY_TIMEOUT,
        RecordError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    refuse(status, error.to_string())
}
