//! Clients that go on whatever happens: one that writes and remembers what was acknowledged, one that copies in
//! transactions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::{ClientContext, Statistics};

use super::{COPY, ORIGINAL, PARTITIONS};

/// For one call of a client.
const CALL: Duration = Duration::from_secs(20);
/// For the clients to get somewhere after a fault has ended.
const PROGRESS: Duration = Duration::from_secs(30);

/// What every client has: patience that is shorter than the faults are long.
pub(super) fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("socket.timeout.ms", "4000")
        .set("socket.connection.setup.timeout.ms", "2000")
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "500")
        .set("retry.backoff.ms", "50")
        .set("topic.metadata.refresh.fast.interval.ms", "100");
    config
}

/// Makes a topic, however often that has to be tried.
pub(super) fn topic(brokers: &str, name: &str, partitions: i32) {
    let admin: AdminClient<DefaultClientContext> = client(brokers).create().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let new = NewTopic::new(name, partitions, TopicReplication::Fixed(-1));
    let made = runtime.block_on(admin.create_topics([&new], &AdminOptions::new())).unwrap();
    assert!(matches!(&made[0], Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists))), "{made:?}");
}

/// What became of every record.
#[derive(Default)]
pub(super) struct Written {
    /// By partition and number: the offset it was acknowledged with.
    pub(super) acked: BTreeMap<(i32, u64), i64>,
    /// Nobody knows whether these are there.
    pub(super) unknown: Vec<(i32, u64)>,
    /// Errors a client cannot live with.
    pub(super) fatal: Vec<String>,
}

/// The clients.
pub(super) struct Load {
    written: Arc<Mutex<Written>>,
    writer: JoinHandle<()>,
    copier: JoinHandle<()>,
    copier_stop: Arc<AtomicBool>,
    brokers: String,
}

impl Load {
    pub(super) fn start(brokers: &str, stop: &Arc<AtomicBool>) -> Self {
        let written = Arc::new(Mutex::new(Written::default()));
        let copier_stop = Arc::new(AtomicBool::new(false));
        let (brokers_of_writer, stop, reports) = (brokers.to_owned(), Arc::clone(stop), Arc::clone(&written));
        let writer = std::thread::spawn(move || write(&brokers_of_writer, &stop, reports));
        let (brokers_of_copier, ends) = (brokers.to_owned(), Arc::clone(&copier_stop));
        let copier = std::thread::spawn(move || copy(&brokers_of_copier, &ends));
        Self { written, writer, copier, copier_stop, brokers: brokers.to_owned() }
    }

    pub(super) fn acked(&self) -> usize {
        self.written.lock().unwrap().acked.len()
    }

    /// Waits until something was acknowledged after `before`.
    pub(super) fn await_progress(&self, before: usize, cluster: &Cluster) -> usize {
        let began = Instant::now();
        loop {
            let acked = self.acked();
            if acked > before {
                return acked;
            }
            let late = began.elapsed() > PROGRESS;
            assert!(!late, "nothing is acknowledged any more\n{}", cluster.log_tails());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the clients when all is written and copied.
    pub(super) fn finish(self, cluster: &Cluster) -> Written {
        self.writer.join().unwrap();
        let began = Instant::now();
        while super::verify::lag(&self.brokers) > 0 {
            let late = began.elapsed() > 2 * PROGRESS;
            assert!(!late, "the copy does not get done\n{}", cluster.log_tails());
            std::thread::sleep(Duration::from_millis(200));
        }
        self.copier_stop.store(true, Ordering::SeqCst);
        self.copier.join().unwrap();
        std::mem::take(&mut *self.written.lock().unwrap())
    }
}

struct Reports(Arc<Mutex<Written>>);

impl ClientContext for Reports {
    fn stats(&self, _: Statistics) {}

    fn error(&self, error: KafkaError, reason: &str) {
        if matches!(error.rdkafka_error_code(), Some(RDKafkaErrorCode::Fatal)) {
            self.0.lock().unwrap().fatal.push(format!("{error}: {reason}"));
        }
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = Box<(i32, u64)>;

    fn delivery(&self, result: &DeliveryResult<'_>, id: Self::DeliveryOpaque) {
        let mut written = self.0.lock().unwrap();
        match result {
            Ok(message) => drop(written.acked.insert(*id, message.offset())),
            Err(_) => written.unknown.push(*id),
        }
    }
}

/// Writes numbers to every partition, in order, until told to stop.
fn write(brokers: &str, stop: &AtomicBool, reports: Arc<Mutex<Written>>) {
    let producer: BaseProducer<Reports> = client(brokers)
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("linger.ms", "2")
        .set("message.timeout.ms", "120000")
        .create_with_context(Reports(reports))
        .unwrap();
    let mut number = 0;
    while !stop.load(Ordering::SeqCst) {
        for partition in 0..PARTITIONS {
            let value = number.to_string();
            let record = BaseRecord::with_opaque_to(ORIGINAL, Box::new((partition, number)))
                .partition(partition)
                .key(&value)
                .payload(&value);
            let mut refused = producer.send(record).err();
            while let Some((_, record)) = refused {
                // The queue is full: somebody is away.
                producer.poll(Duration::from_millis(20));
                refused = producer.send(record).err();
            }
        }
        number += 1;
        producer.poll(Duration::from_millis(4));
    }
    producer.flush(Duration::from_secs(120)).unwrap();
}

/// Copies the original, a transaction at a time. Whatever goes wrong, everything begins anew under the same name, which
/// ends the transaction that was open.
fn copy(brokers: &str, stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        if let Err(error) = copy_until_it_fails(brokers, stop) {
            if std::env::var_os("MOIM_CHAOS_VERBOSE").is_some() {
                println!("the copier begins anew: {error}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn copy_until_it_fails(brokers: &str, stop: &AtomicBool) -> KafkaResult<()> {
    let producer: BaseProducer = client(brokers)
        .set("transactional.id", "copier")
        .set("transaction.timeout.ms", "20000")
        .set("linger.ms", "2")
        .create()?;
    producer.init_transactions(CALL)?;
    let consumer: BaseConsumer = client(brokers)
        .set("group.id", "copier")
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .set("session.timeout.ms", "6000")
        .create()?;
    consumer.subscribe(&[ORIGINAL])?;
    while !stop.load(Ordering::SeqCst) {
        let Some(first) = consumer.poll(Duration::from_millis(100)) else { continue };
        producer.begin_transaction()?;
        let mut next = BTreeMap::new();
        let mut message = first?;
        // Whatever was polled is in the transaction: the next one begins after it.
        for left in (0..500).rev() {
            send(&producer, &message)?;
            next.insert(message.partition(), message.offset() + 1);
            let another = if left > 0 { consumer.poll(Duration::ZERO) } else { None };
            match another {
                Some(another) => message = another?,
                None => break,
            }
        }
        let mut offsets = TopicPartitionList::new();
        for (partition, offset) in next {
            offsets.add_partition_offset(ORIGINAL, partition, Offset::Offset(offset))?;
        }
        let group = consumer.group_metadata().expect("it is subscribed");
        producer.send_offsets_to_transaction(&offsets, &group, CALL)?;
        producer.commit_transaction(CALL)?;
    }
    Ok(())
}

fn send(producer: &BaseProducer, message: &BorrowedMessage<'_>) -> KafkaResult<()> {
    let (key, value) = (message.key().unwrap_or_default(), message.payload().unwrap_or_default());
    let record = BaseRecord::to(COPY).partition(message.partition()).key(key).payload(value);
    let sent = producer.send(record).map_err(|(error, _)| error);
    producer.poll(Duration::ZERO);
    sent
}
