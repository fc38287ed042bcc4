//! Lock clients: a lock is a key under a lease, held by its creator, with the create revision as fencing token.

use std::sync::Arc;
use std::time::Duration;

use moim_coord::{
    Compare, CompareResult, CompareTarget, CoordError, Coordinator, DeleteRequest, LeaseId, Origin,
    PutRequest, TxnOp, TxnRequest,
};

use super::leases::{grant, is_valid_for, keep_alive};
use super::{ClientPool, random_sleep, request_timeout};

/// Maximum interval between two checks of the clock; a holder gives up if its lease is valid for no longer than this.
const MARGIN: Duration = Duration::from_millis(150);

pub(super) async fn client(pool: Arc<ClientPool>, number: u64) {
    while !pool.is_over() {
        random_sleep(0..200).await;
        use_lock(&pool, number).await;
    }
}

fn absent(key: &str) -> Compare {
    Compare {
        key: key.to_owned().into(),
        range_end: bytes::Bytes::new(),
        target: CompareTarget::Create(0),
        result: CompareResult::Equal,
    }
}

/// Acquires the lock if it is free; returns the token.
async fn acquire(
    coordinator: Coordinator,
    key: String,
    owner: u64,
    lease: LeaseId,
) -> Result<Option<i64>, CoordError> {
    let put = PutRequest { lease, ..PutRequest::new(key.clone(), owner.to_string()) };
    let txn =
        TxnRequest { compares: vec![absent(&key)], success: vec![TxnOp::Put(put)], failure: Vec::new() };
    let reply = coordinator.txn(Origin::Client, txn, false).await?;
    Ok(reply.succeeded.then_some(reply.revision))
}

/// Releases the lock if it still has this token.
async fn release(coordinator: Coordinator, key: String, token: i64) -> Result<(), CoordError> {
    let mine = Compare { target: CompareTarget::Create(token), ..absent(&key) };
    let delete = TxnOp::Delete(DeleteRequest::key(key));
    let txn = TxnRequest { compares: vec![mine], success: vec![delete], failure: Vec::new() };
    coordinator.txn(Origin::Client, txn, false).await.map(|_| ())
}

async fn use_lock(pool: &ClientPool, number: u64) {
    let lock = format!("lock-{}", fastrand::u64(..2));
    let Some(mut owned) = grant(pool, fastrand::i64(1_000..2_500)).await else { return };
    let asked = pool.locks.ask();
    let (key, id) = (lock.clone(), owned.id);
    let acquire = move |coordinator: Coordinator| acquire(coordinator, key, number, id);
    let acquired = pool.request(request_timeout(), acquire).await;
    let Some(Ok(Some(token))) = acquired else { return };
    if !is_valid_for(&owned, MARGIN) {
        return;
    }
    let hold = pool.locks.held(&lock, number, token, asked);
    pool.locks.accepted(&lock, token);
    for _ in 0..fastrand::u32(0..5) {
        // The holder detects the possible loss of the lock in time, because it checks its own clock.
        random_sleep(0..50).await;
        if !is_valid_for(&owned, MARGIN) {
            break;
        }
        let left = owned.valid_until - tokio::time::Instant::now();
        let renewed = tokio::time::timeout(left.mul_f32(0.5), keep_alive(pool, &mut owned)).await;
        if renewed == Ok(false) {
            if is_valid_for(&owned, MARGIN) {
                pool.shared.violation(format!("lease of the holder of {lock} expired early"));
            }
            break;
        }
    }
    pool.locks.uncertain(hold);
    if fastrand::u8(0..3) > 0 {
        let _ = pool.request(request_timeout(), move |coordinator| release(coordinator, lock, token)).await;
    }
}
