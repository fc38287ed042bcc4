//! Lease clients: a key exists while its lease is kept alive, and is deleted after the lease expires.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_coord::{Command, CoordError, Coordinator, LeaseId, Op, Origin, PutRequest, RangeRequest};
use tokio::time::Instant;

use super::{ClientPool, random_sleep, request_timeout};
use crate::world::TICK_MS;

/// Maximum clock skew between two hosts that are not paused.
const SKEW: Duration = Duration::from_millis(3 * TICK_MS);

pub(super) async fn client(pool: Arc<ClientPool>, number: u64) {
    while !pool.is_over() {
        random_sleep(0..300).await;
        use_lease(&pool, number).await;
    }
}

/// A lease as its holder knows it.
pub(super) struct Owned {
    pub(super) id: LeaseId,
    /// The lease is valid at least until then: send time of the last confirmed renewal plus the TTL.
    pub(super) valid_until: Instant,
}

/// Grants a lease; `None` without a confirmation.
pub(super) async fn grant(pool: &ClientPool, ttl_ms: i64) -> Option<Owned> {
    let sent = Instant::now();
    let grant = move |coordinator: Coordinator| async move {
        coordinator.lease_grant(Origin::Client, LeaseId(0), ttl_ms).await
    };
    let (id, ttl_ms) = pool.request(request_timeout(), grant).await?.ok()?;
    pool.leases.fetch_add(1, Ordering::Relaxed);
    Some(Owned { id, valid_until: sent + Duration::from_millis(u64::try_from(ttl_ms).unwrap_or(0)) })
}

/// Renews a lease; false if the core reports that the lease does not exist.
pub(super) async fn keep_alive(pool: &ClientPool, owned: &mut Owned) -> bool {
    let (sent, id) = (Instant::now(), owned.id);
    let renewed = pool.request(Duration::from_millis(600), move |coordinator| async move {
        coordinator.lease_keep_alive(Origin::Client, id).await
    });
    match renewed.await {
        Some(Ok(0)) => false,
        Some(Ok(ttl_ms)) => {
            let until = sent + Duration::from_millis(u64::try_from(ttl_ms).unwrap_or(0));
            owned.valid_until = owned.valid_until.max(until);
            true
        }
        Some(Err(_)) | None => true,
    }
}

fn is_valid(owned: &Owned) -> bool {
    is_valid_for(owned, SKEW)
}

/// True if the lease is certainly valid for `time` from now on.
pub(super) fn is_valid_for(owned: &Owned, time: Duration) -> bool {
    Instant::now() + time < owned.valid_until
}

pub(super) async fn put(coordinator: Coordinator, key: String, lease: LeaseId) -> Result<(), CoordError> {
    let put = PutRequest { lease, ..PutRequest::new(key, "leased") };
    coordinator.execute(Command { origin: Origin::Client, op: Op::Put(put) }).await.map(|_| ())
}

async fn use_lease(pool: &ClientPool, number: u64) {
    let ttl_ms = fastrand::i64(1_000..4_000);
    let Some(mut owned) = grant(pool, ttl_ms).await else { return };
    let (id, key) = (owned.id, format!("leased-{number}-{}", pool.unique()));
    let name = key.clone();
    let written = pool.request(request_timeout(), move |coordinator| put(coordinator, name, id)).await;
    if !matches!(written, Some(Ok(()))) {
        return;
    }
    for _ in 0..fastrand::u32(2..10) {
        random_sleep(0..500).await;
        let exists = keep_alive(pool, &mut owned).await;
        if !exists && is_valid(&owned) {
            pool.shared.violation(format!("lease {id:?} expired early: renewal rejected"));
        }
        check_key(pool, &owned, &key).await;
    }
    if fastrand::bool() {
        let revoke =
            move |coordinator: Coordinator| async move { coordinator.lease_revoke(Origin::Client, id).await };
        let _ = pool.request(request_timeout(), revoke).await;
    }
}

/// Checks that a key exists while its lease is certainly valid.
async fn check_key(pool: &ClientPool, owned: &Owned, key: &str) {
    let request = RangeRequest::key(key.to_owned());
    let range = |coordinator: Coordinator| async move { coordinator.range(request, false).await };
    let found = pool.request(request_timeout(), range);
    if let Some(Ok(reply)) = found.await
        && reply.kvs.is_empty()
        && is_valid(owned)
    {
        pool.shared.violation(format!("{key} was deleted before its lease {:?} expired", owned.id));
    }
}
