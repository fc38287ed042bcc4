//! Key-value clients: puts, gets, deletions, compare-and-swaps and transactions on few keys; every value is written
//! once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use moim_coord::{
    Command, Compare as Condition, CompareResult, CompareTarget, CoordError, Coordinator, DeleteRequest,
    KeyValue, Op as CoordOp, Origin, PutRequest, RangeRequest, Reply, TxnOp, TxnOpReply, TxnRequest,
};
use moim_history::{Compare, Found, Op, Outcome, Seen, Step};

use super::{ClientPool, is_unknown, random_sleep, request_timeout};

const KEYS: u64 = 4;
/// Keys that are written in one transaction.
const PAIRS: [(&str, &str); 1] = [("p0", "q0")];

pub(super) async fn client(pool: Arc<ClientPool>, number: u64) {
    let mut last: Option<Found> = None;
    while !pool.is_over() {
        random_sleep(0..30).await;
        let op = choose(&pool, last.as_ref());
        if let Some(outcome) = run(&pool, number, op).await
            && let Some(Seen::Got(found)) = outcome.seen.into_iter().next()
        {
            last = found;
        }
    }
}

fn choose(pool: &ClientPool, last: Option<&Found>) -> Op {
    let key = format!("k{}", fastrand::u64(..KEYS));
    let value = || format!("v{}", pool.unique());
    let (a, b) = PAIRS[fastrand::usize(..PAIRS.len())];
    let put_both =
        |value: String| vec![Step::Put(a.to_owned(), value.clone()), Step::Put(b.to_owned(), value)];
    let get_both = || vec![Step::Get(a.to_owned()), Step::Get(b.to_owned())];
    match fastrand::u32(0..100) {
        0..34 => Op::put(key, value()),
        34..62 => Op::get(key),
        62..68 => Op::delete(key),
        68..80 => Op::cas(key, last.map(|found| found.value.as_str()), value()),
        80..86 => {
            let revision = last.and_then(|found| found.mod_revision).unwrap_or(0);
            let compares = vec![Compare::ModRevision(key.clone(), revision)];
            Op { compares, then: vec![Step::Put(key.clone(), value())], otherwise: vec![Step::Get(key)] }
        }
        86..93 => Op { then: put_both(value()), ..Op::default() },
        _ => Op { then: get_both(), ..Op::default() },
    }
}

/// Executes one operation and records it in the history.
async fn run(pool: &Arc<ClientPool>, client: u64, op: Op) -> Option<Outcome> {
    let id = pool.keys.invoke(client, op.clone());
    let reply =
        pool.request(request_timeout(), |coordinator| async move { execute(&coordinator, &op).await }).await;
    match reply {
        Some(Ok(outcome)) => {
            pool.answered.fetch_add(1, Ordering::Relaxed);
            pool.keys.ok(id, outcome.clone());
            Some(outcome)
        }
        Some(Err(error)) if !is_unknown(&error) => {
            pool.keys.failed(id);
            None
        }
        Some(Err(_)) | None => {
            pool.keys.unknown(id);
            None
        }
    }
}

/// Reads every key through one node, to complete the history.
pub(crate) async fn read_every_key(
    pool: Arc<ClientPool>,
    coordinator: Coordinator,
) -> Result<(), CoordError> {
    let singles = (0..KEYS).map(|key| format!("k{key}"));
    let pairs = PAIRS.iter().flat_map(|(a, b)| [(*a).to_owned(), (*b).to_owned()]);
    for key in singles.chain(pairs) {
        let op = Op::get(key);
        let id = pool.keys.invoke(999, op.clone());
        let outcome = execute(&coordinator, &op).await?;
        pool.keys.ok(id, outcome);
    }
    Ok(())
}

fn command(op: CoordOp) -> Command {
    Command { origin: Origin::Client, op }
}

async fn execute(coordinator: &Coordinator, op: &Op) -> Result<Outcome, CoordError> {
    if let ([], [step]) = (&op.compares[..], &op.then[..]) {
        return single(coordinator, step).await;
    }
    let steps = |steps: &[Step]| steps.iter().map(txn_op).collect();
    let txn = TxnRequest {
        compares: op.compares.iter().map(condition).collect(),
        success: steps(&op.then),
        failure: steps(&op.otherwise),
    };
    let reply = coordinator.txn(Origin::Client, txn, false).await?;
    let seen = reply.responses.iter().map(|response| match response {
        TxnOpReply::Range(range) => Seen::Got(found(&range.kvs)),
        TxnOpReply::Put(_) | TxnOpReply::Txn(_) => Seen::Put,
        TxnOpReply::Delete(deleted) => Seen::Deleted(Some(deleted.deleted > 0)),
    });
    Ok(Outcome::txn(reply.revision, reply.succeeded, seen.collect()))
}

async fn single(coordinator: &Coordinator, step: &Step) -> Result<Outcome, CoordError> {
    match step {
        Step::Get(key) => {
            let reply = coordinator.range(RangeRequest::key(key.clone()), false).await?;
            Ok(Outcome::read(reply.revision, found(&reply.kvs)))
        }
        Step::Put(key, value) => {
            let put = PutRequest::new(key.clone(), value.clone());
            match coordinator.execute(command(CoordOp::Put(put))).await? {
                Reply::Put(put) => Ok(Outcome::wrote(put.revision)),
                other => panic!("unexpected reply to a put: {other:?}"),
            }
        }
        Step::Delete(key) => {
            let delete = DeleteRequest::key(key.clone());
            match coordinator.execute(command(CoordOp::Delete(delete))).await? {
                Reply::Delete(reply) => Ok(Outcome::deleted(reply.revision, reply.deleted > 0)),
                other => panic!("unexpected reply to a deletion: {other:?}"),
            }
        }
    }
}

fn found(kvs: &[KeyValue]) -> Option<Found> {
    kvs.first().map(|kv| Found::at(String::from_utf8_lossy(&kv.value), kv.mod_revision))
}

fn condition(compare: &Compare) -> Condition {
    let (key, target) = match compare {
        Compare::Value(key, Some(value)) => (key, CompareTarget::Value(value.clone().into())),
        Compare::Value(key, None) => (key, CompareTarget::Version(0)),
        Compare::ModRevision(key, revision) => (key, CompareTarget::Mod(*revision)),
    };
    Condition {
        key: key.clone().into(),
        range_end: bytes::Bytes::new(),
        target,
        result: CompareResult::Equal,
    }
}

fn txn_op(step: &Step) -> TxnOp {
    match step {
        Step::Get(key) => TxnOp::Range(RangeRequest::key(key.clone())),
        Step::Put(key, value) => TxnOp::Put(PutRequest::new(key.clone(), value.clone())),
        Step::Delete(key) => TxnOp::Delete(DeleteRequest::key(key.clone())),
    }
}
