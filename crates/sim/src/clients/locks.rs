//! Clients that lock: a key that only its creator may hold, under a lease, with the revision of its creation as token.

use std::sync::Arc;
use std::time::Duration;

use moim_coord::{
    Compare, CompareResult, CompareTarget, CoordError, Coordinator, DeleteRequest, LeaseId, Origin,
    PutRequest, TxnOp, TxnRequest,
};

use super::leases::{grant, is_certain_for, keep};
use super::{Crowd, nap, patience};

/// A holder looks at its clock at least this often, and gives up when no more than this is left.
const MARGIN: Duration = Duration::from_millis(150);

pub(super) async fn client(crowd: Arc<Crowd>, number: u64) {
    while !crowd.is_over() {
        nap(0..200).await;
        one_turn(&crowd, number).await;
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

/// Takes the lock if it is free; answers the token.
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

/// Gives it back, if it still is the one with this token.
async fn release(coordinator: Coordinator, key: String, token: i64) -> Result<(), CoordError> {
    let mine = Compare { target: CompareTarget::Create(token), ..absent(&key) };
    let delete = TxnOp::Delete(DeleteRequest::key(key));
    let txn = TxnRequest { compares: vec![mine], success: vec![delete], failure: Vec::new() };
    coordinator.txn(Origin::Client, txn, false).await.map(|_| ())
}

async fn one_turn(crowd: &Crowd, number: u64) {
    let lock = format!("lock-{}", fastrand::u64(..2));
    let Some(mut owned) = grant(crowd, fastrand::i64(1_000..2_500)).await else { return };
    let asked = crowd.locks.ask();
    let (key, id) = (lock.clone(), owned.id);
    let taken = crowd.ask(patience(), move |coordinator| acquire(coordinator, key, number, id)).await;
    let Some(Ok(Some(token))) = taken else { return };
    if !is_certain_for(&owned, MARGIN) {
        return;
    }
    let hold = crowd.locks.held(&lock, number, token, asked);
    crowd.locks.accepted(&lock, token);
    for _ in 0..fastrand::u32(0..5) {
        // It is told in time that it may have lost the lock, because it looks at its own clock.
        nap(0..50).await;
        if !is_certain_for(&owned, MARGIN) {
            break;
        }
        let left = owned.certain - tokio::time::Instant::now();
        let kept = tokio::time::timeout(left.mul_f32(0.5), keep(crowd, &mut owned)).await;
        if kept == Ok(false) {
            if is_certain_for(&owned, MARGIN) {
                crowd.shared.violation(format!("the lease of {lock}'s holder ended before its time"));
            }
            break;
        }
    }
    crowd.locks.uncertain(hold);
    if fastrand::u8(0..3) > 0 {
        let _ = crowd.ask(patience(), move |coordinator| release(coordinator, lock, token)).await;
    }
}
