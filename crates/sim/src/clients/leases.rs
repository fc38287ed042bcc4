//! Clients with leases: a key under a lease that is kept alive stays; one that is not kept alive goes, in the end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_coord::{Command, CoordError, Coordinator, LeaseId, Op, Origin, PutRequest, RangeRequest};
use tokio::time::Instant;

use super::{Crowd, nap, patience};
use crate::world::TICK_MS;

/// Clocks of two machines are this far apart at most, while neither stands still.
const SKEW: Duration = Duration::from_millis(3 * TICK_MS);

pub(super) async fn client(crowd: Arc<Crowd>, number: u64) {
    while !crowd.is_over() {
        nap(0..300).await;
        one_lease(&crowd, number).await;
    }
}

/// A key's lease as its owner knows it.
pub(super) struct Owned {
    pub(super) id: LeaseId,
    /// It lives at least until then: when the last renewal that was confirmed was sent, and its time on top.
    pub(super) certain: Instant,
}

/// Gets a lease; `None` when it is not certain that there is one.
pub(super) async fn grant(crowd: &Crowd, ttl_ms: i64) -> Option<Owned> {
    let sent = Instant::now();
    let grant = move |coordinator: Coordinator| async move {
        coordinator.lease_grant(Origin::Client, LeaseId(0), ttl_ms).await
    };
    let (id, ttl_ms) = crowd.ask(patience(), grant).await?.ok()?;
    crowd.leases.fetch_add(1, Ordering::Relaxed);
    Some(Owned { id, certain: sent + Duration::from_millis(u64::try_from(ttl_ms).unwrap_or(0)) })
}

/// Renews a lease if the cluster lets it; false when the cluster says that there is no such lease.
pub(super) async fn keep(crowd: &Crowd, owned: &mut Owned) -> bool {
    let (sent, id) = (Instant::now(), owned.id);
    let kept = crowd.ask(Duration::from_millis(600), move |coordinator| async move {
        coordinator.lease_keep_alive(Origin::Client, id).await
    });
    match kept.await {
        Some(Ok(0)) => false,
        Some(Ok(ttl_ms)) => {
            let until = sent + Duration::from_millis(u64::try_from(ttl_ms).unwrap_or(0));
            owned.certain = owned.certain.max(until);
            true
        }
        Some(Err(_)) | None => true,
    }
}

fn is_certain(owned: &Owned) -> bool {
    is_certain_for(owned, SKEW)
}

/// Whether it certainly lives for that long from now on.
pub(super) fn is_certain_for(owned: &Owned, time: Duration) -> bool {
    Instant::now() + time < owned.certain
}

pub(super) async fn put(coordinator: Coordinator, key: String, lease: LeaseId) -> Result<(), CoordError> {
    let put = PutRequest { lease, ..PutRequest::new(key, "leased") };
    coordinator.execute(Command { origin: Origin::Client, op: Op::Put(put) }).await.map(|_| ())
}

async fn one_lease(crowd: &Crowd, number: u64) {
    let ttl_ms = fastrand::i64(1_000..4_000);
    let Some(mut owned) = grant(crowd, ttl_ms).await else { return };
    let (id, key) = (owned.id, format!("leased-{number}-{}", crowd.unique()));
    let name = key.clone();
    let written = crowd.ask(patience(), move |coordinator| put(coordinator, name, id)).await;
    if !matches!(written, Some(Ok(()))) {
        return;
    }
    for _ in 0..fastrand::u32(2..10) {
        nap(0..500).await;
        let existed = keep(crowd, &mut owned).await;
        if !existed && is_certain(&owned) {
            crowd.shared.violation(format!("lease {id:?} ended before its time: it cannot be kept alive"));
        }
        look(crowd, &owned, &key).await;
    }
    if fastrand::bool() {
        let revoke =
            move |coordinator: Coordinator| async move { coordinator.lease_revoke(Origin::Client, id).await };
        let _ = crowd.ask(patience(), revoke).await;
    }
}

/// A key must be there while its lease certainly lives.
async fn look(crowd: &Crowd, owned: &Owned, key: &str) {
    let request = RangeRequest::key(key.to_owned());
    let found = crowd.ask(patience(), |coordinator| async move { coordinator.range(request, false).await });
    if let Some(Ok(reply)) = found.await
        && reply.kvs.is_empty()
        && is_certain(owned)
    {
        crowd.shared.violation(format!("{key} is gone before its lease {:?} ended", owned.id));
    }
}
