//! A fleet of workers in Kafka mode: the consumer group assigns the partitions, and the state of the
//! equipment moves with them, also when a worker is killed.
//!
//! ```text
//! moim serve &
//! moim topic create strokes -p 6
//! cargo run -p moim-cluster --features kafka --example fleet_kafka -- 127.0.0.1:9092 127.0.0.1:2379 worker-1
//! ```
//!
//! Every message's key is a press; the state of a partition is how many strokes each of its presses has made.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_cluster::assignment::{HandedOver, Handoff};
use moim_cluster::etcd::EtcdOptions;
use moim_cluster::kafka::{KafkaHandler, KafkaMessage, KafkaOptions, KafkaWorker};
use moim_cluster::{Context, EtcdClient, EtcdRepository};

/// Strokes by press, of each partition this worker owns.
pub(crate) type Strokes = Arc<Mutex<BTreeMap<String, BTreeMap<String, u64>>>>;

/// Counts strokes.
#[derive(Clone, Default)]
pub(crate) struct Counter {
    /// Counts of the owned partitions.
    pub(crate) strokes: Strokes,
}

impl KafkaHandler for Counter {
    fn on_assigned(
        &mut self,
        partition: &str,
        _equipment: &[String],
        _token: i64,
        handed_over: Option<HandedOver>,
    ) {
        let state = handed_over
            .and_then(|state| serde_json::from_slice(&state.handoff.checkpoint).ok())
            .unwrap_or_default();
        self.strokes.lock().unwrap_or_else(PoisonError::into_inner).insert(partition.to_owned(), state);
    }

    fn on_message(&mut self, message: KafkaMessage<'_>) -> Result<(), String> {
        let press = String::from_utf8_lossy(message.key.unwrap_or_default()).into_owned();
        let mut strokes = self.strokes.lock().unwrap_or_else(PoisonError::into_inner);
        *strokes.entry(message.partition.to_owned()).or_default().entry(press).or_default() += 1;
        Ok(())
    }

    fn checkpoint(&mut self, partition: &str) -> Handoff {
        let strokes = self.strokes.lock().unwrap_or_else(PoisonError::into_inner);
        let state = strokes.get(partition).cloned().unwrap_or_default();
        let checkpoint = serde_json::to_vec(&state).unwrap_or_default().into();
        Handoff { checkpoint, stage_state: "pressing".to_owned(), ..Handoff::default() }
    }

    fn on_released(&mut self, partition: &str) {
        self.strokes.lock().unwrap_or_else(PoisonError::into_inner).remove(partition);
    }
}

/// Starts a worker on a Kafka (or a Moim) and an etcd store.
pub(crate) fn start(
    kafka: &str,
    etcd: &str,
    name: &str,
    counter: Counter,
    scope: &Scope,
) -> Result<KafkaWorker, Box<dyn Error>> {
    let client = EtcdClient::new(EtcdOptions::new([etcd]), scope);
    let context = Context::new(name, Arc::new(EtcdRepository::new(client, "")), scope);
    let mut options = KafkaOptions::new(kafka, "presses", &["strokes"]);
    options.session_timeout = Duration::from_secs(6);
    options.checkpoint_every = Duration::from_millis(200);
    // A hanging worker counts as failed.
    options.settings.insert("max.poll.interval.ms".to_owned(), "6000".to_owned());
    Ok(KafkaWorker::start(&context, options, Box::new(counter))?)
}

#[allow(dead_code, clippy::print_stdout)] // the tests call `start`
#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let mut word =
        |what: &str| words.next().ok_or(format!("usage: fleet_kafka KAFKA ETCD NAME; {what} is missing"));
    let (kafka, etcd, name) = (word("KAFKA")?, word("ETCD")?, word("NAME")?);
    let scope = Scope::new(Shutdown::new());
    let counter = Counter::default();
    let worker = start(&kafka, &etcd, &name, counter.clone(), &scope)?;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let strokes = counter.strokes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        println!("{name}: {strokes:?}");
    }
    worker.stop().await;
    Ok(())
}
