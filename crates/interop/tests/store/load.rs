//! Clients of registers and counters: every request and every reply is recorded in the history. Half of them use our
//! client, half the `redis` crate; no client retries a command, because an unknown outcome must remain one event.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_history::{Found, Op, Outcome, Seen, Step};
use moim_slot_client::{Client, Delivery, FromValue, cmd};
use redis::FromRedisValue;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;

use super::{PAUSE_MS, World};

const WORKERS: u64 = 8;
/// Registers per round; each in its own slot.
const REGISTERS: usize = 8;
const COUNTERS: usize = 3;
/// Request timeout of a client. After it the outcome is unknown.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Request timeout of the final reads.
const FINAL_TIMEOUT: Duration = Duration::from_secs(30);

/// Sends one command to one node; returns the reply as text.
pub(super) fn ask(address: &str, words: &[&str]) -> Option<String> {
    let client = redis::Client::open(format!("redis://{address}/")).ok()?;
    let mut connection = client.get_connection_with_timeout(PATIENCE).ok()?;
    connection.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut question = redis::cmd(words[0]);
    for word in &words[1..] {
        question.arg(word);
    }
    question.query(&mut connection).ok()
}

/// Outcome of a command without a reply.
enum Lost {
    /// The command certainly had no effect.
    Refused,
    /// The outcome is unknown.
    Unknown,
}

/// A client of either kind.
enum Worker {
    Ours(Client),
    Theirs(Box<ClusterConnection>),
}

impl Worker {
    async fn send<T: FromValue + FromRedisValue>(&mut self, words: &[&str]) -> Result<T, Lost> {
        match self {
            Self::Ours(client) => {
                let mut command = cmd(words[0]);
                for word in &words[1..] {
                    command = command.arg(*word);
                }
                let lost = |error: moim_slot_client::Error| {
                    if error.happened_not() { Lost::Refused } else { Lost::Unknown }
                };
                client.run(command).await.map_err(lost)
            }
            Self::Theirs(connection) => {
                let mut command = redis::cmd(words[0]);
                for word in &words[1..] {
                    command.arg(word);
                }
                let sent = tokio::time::timeout(2 * PATIENCE, command.query_async(&mut **connection)).await;
                sent.unwrap_or_else(|_| Err(std::io::Error::other("no answer").into())).map_err(
                    |error: redis::RedisError| match error.code() {
                        Some(
                            "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "READONLY" | "LOADING"
                            | "MASTERDOWN",
                        ) => Lost::Refused,
                        _ => Lost::Unknown,
                    },
                )
            }
        }
    }
}

async fn ours(world: &World, timeout: Duration, delivery: Delivery) -> Result<Client, String> {
    let client = Client::builder(&world.seeds.join(","))
        .timeout(timeout)
        .hung_after(PATIENCE / 2)
        .delivery(delivery)
        .connect();
    client.await.map_err(|error| format!("no client: {error}"))
}

async fn theirs(world: &World) -> Option<Box<ClusterConnection>> {
    let seeds = world.seeds.iter().map(|seed| format!("redis://{seed}/"));
    let client = ClusterClientBuilder::new(seeds)
        .retries(0)
        .connection_timeout(PATIENCE)
        .response_timeout(PATIENCE)
        .build()
        .ok()?;
    let connection = tokio::time::timeout(2 * PATIENCE, client.get_async_connection()).await;
    connection.ok()?.ok().map(Box::new)
}

/// Runs all clients until the faults are over; then reads everything once more.
pub(super) async fn run(world: &Arc<World>, seed: u64) -> Result<(), String> {
    let shared = ours(world, PATIENCE, Delivery::AtMostOnce).await?;
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..WORKERS {
        let client = (number % 2 == 0).then(|| shared.clone());
        tasks.spawn(work(Arc::clone(world), number, seed, client));
    }
    while let Some(task) = tasks.join_next().await {
        task.map_err(|error| error.to_string())?;
    }
    read_everything(world).await
}

async fn work(world: Arc<World>, number: u64, seed: u64, client: Option<Client>) {
    let mut random = fastrand::Rng::with_seed(seed ^ (number + 1));
    let mut worker = client.map(Worker::Ours);
    let mut count = 0;
    while !world.is_over() {
        if worker.is_none() {
            worker = theirs(&world).await.map(Worker::Theirs);
        }
        let pause = match &mut worker {
            Some(worker) => {
                count += 1;
                let value = format!("{number}-{count}");
                if step(&world, worker, number, &mut random, value).await {
                    world.done.fetch_add(1, Ordering::SeqCst);
                    random.u64(PAUSE_MS)
                } else {
                    50
                }
            }
            None => 50,
        };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

/// Runs one operation; true if it succeeded.
async fn step(
    world: &World,
    worker: &mut Worker,
    number: u64,
    random: &mut fastrand::Rng,
    value: String,
) -> bool {
    let round = world.round.load(Ordering::SeqCst);
    let kind = random.u8(..100);
    if kind < 25 {
        let counter = format!("round-{round}:counter-{}", random.usize(..COUNTERS));
        return count(world, worker, number, &counter, kind < 18).await;
    }
    let key = format!("round-{round}:register-{}", random.usize(..REGISTERS));
    let op = match kind {
        25..60 => Op::get(key),
        60..70 => Op::delete(key),
        70..85 => Op::put(key, value),
        _ => Op { then: vec![Step::Get(key.clone()), Step::Put(key, value)], ..Op::default() },
    };
    register(world, worker, number, op).await
}

/// Runs an operation on a register.
async fn register(world: &World, worker: &mut Worker, number: u64, op: Op) -> bool {
    let id = world.registers.invoke(number, op.clone());
    let got = |found: Option<String>| Seen::Got(found.map(|value| Found { value, mod_revision: None }));
    let seen = match op.then.as_slice() {
        [Step::Get(key)] => worker.send(&["GET", key]).await.map(|found| vec![got(found)]),
        [Step::Delete(key)] => {
            worker.send(&["DEL", key]).await.map(|count: i64| vec![Seen::Deleted(Some(count == 1))])
        }
        [Step::Put(key, value)] => worker.send::<String>(&["SET", key, value]).await.map(|_| vec![Seen::Put]),
        [Step::Get(key), Step::Put(_, value)] => {
            worker.send(&["SET", key, value, "GET"]).await.map(|found| vec![got(found), Seen::Put])
        }
        _ => unreachable!("no such operation"),
    };
    match seen {
        Ok(seen) => {
            world.registers.ok(id, Outcome { succeeded: true, revision: None, seen });
            true
        }
        Err(Lost::Refused) => {
            world.registers.failed(id);
            false
        }
        Err(Lost::Unknown) => false,
    }
}

/// Increments or reads a counter.
async fn count(world: &World, worker: &mut Worker, number: u64, counter: &str, add: bool) -> bool {
    let (id, answer) = if add {
        let id = world.counters.increment(number, counter);
        (id, worker.send::<u64>(&["INCR", counter]).await)
    } else {
        let id = world.counters.read(number, counter);
        let read = worker.send::<Option<u64>>(&["GET", counter]).await;
        (id, read.map(Option::unwrap_or_default))
    };
    match answer {
        Ok(value) => {
            world.counters.told(id, value);
            true
        }
        Err(Lost::Refused) => {
            world.counters.failed(id);
            false
        }
        Err(Lost::Unknown) => false,
    }
}

/// Every acknowledged value that was not overwritten is still there.
async fn read_everything(world: &World) -> Result<(), String> {
    let mut worker = Worker::Ours(ours(world, FINAL_TIMEOUT, Delivery::AtLeastOnce).await?);
    for round in 0..=world.round.load(Ordering::SeqCst) {
        for number in 0..REGISTERS {
            let op = Op::get(format!("round-{round}:register-{number}"));
            let is_read = register(world, &mut worker, WORKERS, op.clone()).await;
            is_read.then_some(()).ok_or_else(|| format!("a healed cluster does not answer: {op}"))?;
        }
        for number in 0..COUNTERS {
            let counter = format!("round-{round}:counter-{number}");
            let is_read = count(world, &mut worker, WORKERS, &counter, false).await;
            is_read.then_some(()).ok_or_else(|| format!("a healed cluster does not answer: {counter}"))?;
        }
    }
    Ok(())
}
