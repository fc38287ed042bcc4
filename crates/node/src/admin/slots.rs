//! `/api/v1/slots`: slot ownership, slot migrations, and the durability of the store's replies.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use moim_slots::service::{Refused, Selection, Service};
use moim_slots::slot_set::SlotSet;
use moim_state::RepositoryError;
use serde::{Deserialize, Serialize};

use super::Admin;

fn reject(status: StatusCode, error: impl ToString) -> Response {
    (status, Json(serde_json::json!({ "error": error.to_string() }))).into_response()
}

fn rejection(refused: &Refused) -> Response {
    let status = match refused {
        Refused::NotFound(_) => StatusCode::NOT_FOUND,
        Refused::Conflict(_) => StatusCode::CONFLICT,
        Refused::Store(RepositoryError::Unknown) => StatusCode::GATEWAY_TIMEOUT,
        Refused::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    reject(status, refused)
}

fn store(admin: &Admin) -> Result<&Arc<Service>, Box<Response>> {
    let why = || Box::new(reject(StatusCode::SERVICE_UNAVAILABLE, "this node serves no slots yet"));
    admin.slots.get().ok_or_else(why)
}

fn respond<T: Serialize>(done: Result<T, Refused>) -> Response {
    match done {
        Ok(answer) => Json(answer).into_response(),
        Err(why) => rejection(&why),
    }
}

/// The slot map, the shards and the migrations.
pub(super) async fn report(admin: State<Arc<Admin>>) -> Response {
    match store(&admin) {
        Ok(store) => respond(store.report().await),
        Err(response) => *response,
    }
}

#[derive(Deserialize)]
pub(super) struct MoveRequest {
    from: String,
    to: String,
    count: Option<usize>,
    slots: Option<String>,
}

#[derive(Serialize)]
struct StartedMoves {
    moves: Vec<u64>,
}

/// Starts the migration of slots from one shard to another.
pub(super) async fn begin(admin: State<Arc<Admin>>, Query(request): Query<MoveRequest>) -> Response {
    let selection = match (request.count, request.slots.as_deref().map(SlotSet::parse)) {
        (Some(count), None) => Selection::Count(count),
        (None, Some(Ok(slots))) => Selection::Slots(slots),
        (None, Some(Err(error))) => return reject(StatusCode::BAD_REQUEST, error),
        (Some(_), Some(_)) | (None, None) => {
            return reject(StatusCode::BAD_REQUEST, "give either count or slots");
        }
    };
    match store(&admin) {
        Ok(store) => {
            let begun = store.begin_move(&request.from, &request.to, &selection).await;
            respond(begun.map(|moves| StartedMoves { moves }))
        }
        Err(response) => *response,
    }
}

/// Starts the migrations that give every shard the same number of slots.
pub(super) async fn rebalance(admin: State<Arc<Admin>>) -> Response {
    match store(&admin) {
        Ok(store) => respond(store.rebalance().await.map(|moves| StartedMoves { moves })),
        Err(response) => *response,
    }
}

/// Aborts a migration.
pub(super) async fn abort(admin: State<Arc<Admin>>, Path(id): Path<u64>) -> Response {
    match store(&admin) {
        Ok(store) => respond(store.abort_move(id).await.map(|()| serde_json::json!({}))),
        Err(response) => *response,
    }
}

#[derive(Deserialize)]
pub(super) struct DurabilityRequest {
    shard: Option<String>,
    durability: String,
}

/// Sets the durability of replies, of one shard or of all.
pub(super) async fn durability(
    admin: State<Arc<Admin>>,
    Query(request): Query<DurabilityRequest>,
) -> Response {
    match store(&admin) {
        Ok(store) => {
            let set = store.set_durability(request.shard.as_deref(), &request.durability).await;
            respond(set.map(|()| serde_json::json!({})))
        }
        Err(response) => *response,
    }
}
