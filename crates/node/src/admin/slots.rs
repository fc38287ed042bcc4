//! `/api/v1/slots`: who owns which slot, moves of slots, what the store's answers promise.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use moim_cluster::RepositoryError;
use moim_slots::service::{Refused, Selection, Service};
use moim_slots::slot_set::SlotSet;
use serde::{Deserialize, Serialize};

use super::Admin;

fn refuse(status: StatusCode, error: impl ToString) -> Response {
    (status, Json(serde_json::json!({ "error": error.to_string() }))).into_response()
}

fn refused(refused: &Refused) -> Response {
    let status = match refused {
        Refused::NotFound(_) => StatusCode::NOT_FOUND,
        Refused::Conflict(_) => StatusCode::CONFLICT,
        Refused::Store(RepositoryError::Unknown) => StatusCode::GATEWAY_TIMEOUT,
        Refused::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    refuse(status, refused)
}

fn store(admin: &Admin) -> Result<&Arc<Service>, Box<Response>> {
    let why = || Box::new(refuse(StatusCode::SERVICE_UNAVAILABLE, "this node serves no slots yet"));
    admin.slots.get().ok_or_else(why)
}

fn answer<T: Serialize>(done: Result<T, Refused>) -> Response {
    match done {
        Ok(answer) => Json(answer).into_response(),
        Err(why) => refused(&why),
    }
}

/// The map, the shards and the moves.
pub(super) async fn report(admin: State<Arc<Admin>>) -> Response {
    match store(&admin) {
        Ok(store) => answer(store.report().await),
        Err(response) => *response,
    }
}

#[derive(Deserialize)]
pub(super) struct Wanted {
    from: String,
    to: String,
    count: Option<usize>,
    slots: Option<String>,
}

#[derive(Serialize)]
struct Begun {
    moves: Vec<u64>,
}

/// Slots shall go from a shard to another.
pub(super) async fn begin(admin: State<Arc<Admin>>, Query(wanted): Query<Wanted>) -> Response {
    let selection = match (wanted.count, wanted.slots.as_deref().map(SlotSet::parse)) {
        (Some(count), None) => Selection::Count(count),
        (None, Some(Ok(slots))) => Selection::Slots(slots),
        (None, Some(Err(error))) => return refuse(StatusCode::BAD_REQUEST, error),
        (Some(_), Some(_)) | (None, None) => {
            return refuse(StatusCode::BAD_REQUEST, "give either count or slots");
        }
    };
    match store(&admin) {
        Ok(store) => {
            let begun = store.begin_move(&wanted.from, &wanted.to, &selection).await;
            answer(begun.map(|moves| Begun { moves }))
        }
        Err(response) => *response,
    }
}

/// Every shard shall have as many slots.
pub(super) async fn rebalance(admin: State<Arc<Admin>>) -> Response {
    match store(&admin) {
        Ok(store) => answer(store.rebalance().await.map(|moves| Begun { moves })),
        Err(response) => *response,
    }
}

/// A move is given up.
pub(super) async fn abort(admin: State<Arc<Admin>>, Path(id): Path<u64>) -> Response {
    match store(&admin) {
        Ok(store) => answer(store.abort_move(id).await.map(|()| serde_json::json!({}))),
        Err(response) => *response,
    }
}

#[derive(Deserialize)]
pub(super) struct Promise {
    shard: Option<String>,
    durability: String,
}

/// What answers promise.
pub(super) async fn durability(admin: State<Arc<Admin>>, Query(promise): Query<Promise>) -> Response {
    match store(&admin) {
        Ok(store) => {
            let set = store.set_durability(promise.shard.as_deref(), &promise.durability).await;
            answer(set.map(|()| serde_json::json!({})))
        }
        Err(response) => *response,
    }
}
