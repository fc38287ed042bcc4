//! Clients of the key-value store: every request and every response is recorded in the history.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, Error, GetResponse, Txn, TxnOp, TxnOpResponse};
use moim_history::{Compare, Found, Op, Outcome, Seen, Step};

use super::{PAUSE, World};
use crate::support::{connect, revision};

/// Keys per round.
const KEYS: usize = 5;
/// Request timeout of a client. After it the outcome is unknown.
pub(super) const PATIENCE: Duration = Duration::from_millis(1500);

/// A client of one node with timeouts.
pub(super) async fn client_of(endpoint: &str) -> Option<Client> {
    let options = ConnectOptions::new().with_connect_timeout(PATIENCE).with_timeout(PATIENCE);
    Client::connect([endpoint], Some(options)).await.ok()
}

/// Sends requests without pause; switches to the next node when one does not answer.
pub(super) async fn run(world: Arc<World>, client: usize, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed ^ (client as u64 + 1));
    let mut node = client;
    let mut count = 0;
    while !world.is_over() {
        let endpoint = &world.endpoints[node % world.endpoints.len()];
        node += 1;
        let Some(mut connection) = client_of(endpoint).await else { continue };
        while !world.is_over() {
            count += 1;
            let op = choose(&world, &mut random, &format!("{client}-{count}"));
            if !ask(&world, &mut connection, client, op).await {
                tokio::time::sleep(Duration::from_millis(50)).await;
                break;
            }
            if !PAUSE.is_zero() {
                tokio::time::sleep(PAUSE).await;
            }
            if random.u8(..50) == 0 {
                break; // switch to another node
            }
        }
    }
}

/// A random operation. Every value is written only once.
fn choose(world: &World, random: &mut fastrand::Rng, value: &str) -> Op {
    let round = world.round.load(Ordering::SeqCst);
    let mut key = || format!("round-{round}/{}", random.usize(..KEYS));
    let (one, other) = (key(), key());
    match random.u8(..100) {
        0..40 => Op::get(one),
        40..70 => Op::put(one, value),
        70..75 => Op::delete(one),
        75..85 => Op {
            compares: vec![Compare::Value(one.clone(), None)],
            then: vec![Step::Put(one.clone(), value.to_owned())],
            otherwise: vec![Step::Get(one)],
        },
        _ if one == other => Op::get(one),
        85..93 => Op { then: vec![Step::Get(one), Step::Get(other)], ..Op::default() },
        _ => Op {
            then: vec![Step::Put(one, value.to_owned()), Step::Put(other, value.to_owned())],
            ..Op::default()
        },
    }
}

/// Sends an operation and records the response. False if there was no response.
async fn ask(world: &World, connection: &mut Client, client: usize, op: Op) -> bool {
    let id = world.recorder.invoke(client as u64, op.clone());
    let answer = tokio::time::timeout(2 * PATIENCE, send(connection, &op)).await;
    match answer {
        Ok(Ok(outcome)) => {
            world.recorder.ok(id, outcome);
            world.done.fetch_add(1, Ordering::SeqCst);
            true
        }
        // A failed read has no effect; the outcome of any other failed operation is unknown.
        Ok(Err(_)) | Err(_) if !op.can_write() => {
            world.recorder.failed(id);
            false
        }
        Ok(Err(_)) | Err(_) => {
            world.recorder.unknown(id);
            false
        }
    }
}

async fn send(connection: &mut Client, op: &Op) -> Result<Outcome, Error> {
    match op.then.as_slice() {
        [Step::Get(key)] if op.compares.is_empty() => {
            let answer = connection.get(key.as_str(), None).await?;
            Ok(Outcome::read(revision(answer.header()), found(&answer)))
        }
        [Step::Put(key, value)] if op.compares.is_empty() => {
            let answer = connection.put(key.as_str(), value.as_str(), None).await?;
            Ok(Outcome::wrote(revision(answer.header())))
        }
        [Step::Delete(key)] if op.compares.is_empty() => {
            let answer = connection.delete(key.as_str(), None).await?;
            Ok(Outcome::deleted(revision(answer.header()), answer.deleted() == 1))
        }
        _ => {
            let steps = |steps: &[Step]| -> Vec<TxnOp> { steps.iter().map(step).collect() };
            let compares: Vec<etcd_client::Compare> = op.compares.iter().map(compare).collect();
            let txn = Txn::new().when(compares).and_then(steps(&op.then)).or_else(steps(&op.otherwise));
            let answer = connection.txn(txn).await?;
            let seen = answer.op_responses().iter().map(seen).collect();
            Ok(Outcome::txn(revision(answer.header()), answer.succeeded(), seen))
        }
    }
}

fn found(answer: &GetResponse) -> Option<Found> {
    answer.kvs().first().map(|kv| Found::at(kv.value_str().unwrap(), kv.mod_revision()))
}

fn step(step: &Step) -> TxnOp {
    match step {
        Step::Get(key) => TxnOp::get(key.as_str(), None),
        Step::Put(key, value) => TxnOp::put(key.as_str(), value.as_str(), None),
        Step::Delete(key) => TxnOp::delete(key.as_str(), None),
    }
}

fn compare(compare: &Compare) -> etcd_client::Compare {
    use etcd_client::{Compare as Condition, CompareOp};
    match compare {
        Compare::Value(key, Some(value)) => Condition::value(key.as_str(), CompareOp::Equal, value.as_str()),
        Compare::Value(key, None) => Condition::version(key.as_str(), CompareOp::Equal, 0),
        Compare::ModRevision(key, revision) => {
            Condition::mod_revision(key.as_str(), CompareOp::Equal, *revision)
        }
    }
}

fn seen(response: &TxnOpResponse) -> Seen {
    match response {
        TxnOpResponse::Get(answer) => Seen::Got(found(answer)),
        TxnOpResponse::Delete(answer) => Seen::Deleted(Some(answer.deleted() == 1)),
        TxnOpResponse::Put(_) | TxnOpResponse::Txn(_) => Seen::Put,
    }
}

/// Reads every key of every round on every node: acknowledged values that were not overwritten are still there.
pub(super) async fn read_everything(world: &World) {
    for endpoint in &world.endpoints {
        let mut connection = connect(std::slice::from_ref(endpoint)).await;
        for round in 0..=world.round.load(Ordering::SeqCst) {
            for key in 0..KEYS {
                let op = Op::get(format!("round-{round}/{key}"));
                let asked = ask(world, &mut connection, 1000, op).await;
                assert!(asked, "a healed cluster answers");
            }
        }
    }
}
