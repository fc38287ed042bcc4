//! Clients that continue through every fault: a producer that records acknowledgements, and a transactional copier.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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

use super::{COPY, ORIGINAL, PARTITIONS, WRITER_PAUSE};

/// Timeout of one client call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for clients to make progress after a fault has ended.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(30);
/// A copier without progress for this long hangs: longer than any of its calls may take.
const HANG_TIMEOUT: Duration = Duration::from_secs(35);

/// Settings of every client: timeouts that are shorter than the faults.
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

/// Creates a topic with this replication factor; -1 is the cluster's default.
pub(super) fn topic(brokers: &str, name: &str, partitions: i32, replicas: i32) {
    let admin: AdminClient<DefaultClientContext> = client(brokers).create().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let new = NewTopic::new(name, partitions, TopicReplication::Fixed(replicas));
    let made = runtime.block_on(admin.create_topics([&new], &AdminOptions::new())).unwrap();
    assert!(matches!(&made[0], Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists))), "{made:?}");
}

/// Outcome of every record.
#[derive(Default)]
pub(super) struct Written {
    /// Offset of each acknowledged record, by partition and number.
    pub(super) acked: BTreeMap<(i32, u64), i64>,
    /// Records whose outcome is unknown.
    pub(super) unknown: Vec<(i32, u64)>,
    /// Fatal client errors.
    pub(super) fatal: Vec<String>,
    /// Errors that made the copier restart.
    pub(super) copier_failures: Vec<String>,
    /// How often the copier hung and was replaced.
    pub(super) copier_hung: u32,
}

/// The running clients.
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
        let failures = Arc::clone(&written);
        let copier = std::thread::spawn(move || supervise_copier(&brokers_of_copier, &ends, &failures));
        Self { written, writer, copier, copier_stop, brokers: brokers.to_owned() }
    }

    pub(super) fn acked(&self) -> usize {
        self.written.lock().unwrap().acked.len()
    }

    /// Waits until records were acknowledged after `before`.
    pub(super) fn await_progress(&self, before: usize, cluster: &Cluster) -> usize {
        let began = Instant::now();
        loop {
            let acked = self.acked();
            if acked > before {
                return acked;
            }
            let late = began.elapsed() > PROGRESS_TIMEOUT;
            assert!(!late, "nothing is acknowledged any more\n{}", cluster.log_tails());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the copier has committed a transaction.
    pub(super) fn await_copied(&self, cluster: &Cluster) {
        let began = Instant::now();
        while super::verify::copied(&self.brokers) == 0 {
            assert!(began.elapsed() < PROGRESS_TIMEOUT, "nothing is copied\n{}", cluster.log_tails());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Stops the clients once everything is produced and copied.
    pub(super) fn finish(self, cluster: &Cluster) -> Written {
        self.writer.join().unwrap();
        let began = Instant::now();
        while super::verify::lag(&self.brokers) > 0 {
            let late = began.elapsed() > HANG_TIMEOUT + 2 * PROGRESS_TIMEOUT;
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

/// Produces numbers to every partition, in order, until the stop flag is set.
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
                // The producer's queue is full: a leader is unavailable.
                producer.poll(Duration::from_millis(20));
                refused = producer.send(record).err();
            }
        }
        number += 1;
        producer.poll(WRITER_PAUSE);
    }
    producer.flush(Duration::from_secs(120)).unwrap();
}

/// Supervises the copier. A call of librdkafka may never return: a FindCoordinator request waits for a connection to
/// a broker object that was dropped when its node was missing from the metadata, whatever the timeout of the call.
/// Then another copier starts with the same transactional id. That fences the hung one, as it would a paused process:
/// if it resumes, its transaction is rejected.
fn supervise_copier(brokers: &str, stop: &AtomicBool, written: &Arc<Mutex<Written>>) {
    while !stop.load(Ordering::SeqCst) {
        let copier = Arc::new(Copier::default());
        let (working, brokers, reports) = (Arc::clone(&copier), brokers.to_owned(), Arc::clone(written));
        let thread = std::thread::spawn(move || working.run(&brokers, &reports));
        let (mut steps, mut since) = (0, Instant::now());
        while !stop.load(Ordering::SeqCst) && since.elapsed() < HANG_TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
            let now = copier.steps.load(Ordering::SeqCst);
            if now != steps {
                (steps, since) = (now, Instant::now());
            }
        }
        copier.stop.store(true, Ordering::SeqCst);
        if since.elapsed() < HANG_TIMEOUT {
            thread.join().unwrap();
        } else {
            println!("the copier hangs; another takes its place");
            written.lock().unwrap().copier_hung += 1;
        }
    }
}

/// Copies the source, one transaction at a time. After any error the copier restarts with the same transactional id,
/// which aborts the open transaction.
#[derive(Default)]
struct Copier {
    stop: AtomicBool,
    /// Progress counter.
    steps: AtomicU64,
}

impl Copier {
    fn run(&self, brokers: &str, written: &Mutex<Written>) {
        while !self.stop.load(Ordering::SeqCst) {
            if let Err(error) = self.run_copier(brokers) {
                if std::env::var_os("MOIM_CHAOS_VERBOSE").is_some() {
                    println!("the copier begins anew: {error}");
                }
                written.lock().unwrap().copier_failures.push(error.to_string());
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    fn step(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
    }

    fn run_copier(&self, brokers: &str) -> KafkaResult<()> {
        let producer: BaseProducer = client(brokers)
            .set("transactional.id", "copier")
            .set("transaction.timeout.ms", "20000")
            .set("linger.ms", "2")
            .create()?;
        self.step();
        producer.init_transactions(CALL_TIMEOUT)?;
        self.step();
        let consumer: BaseConsumer = client(brokers)
            .set("group.id", "copier")
            .set("isolation.level", "read_committed")
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .set("session.timeout.ms", "6000")
            // A hung member loses its partitions after this time.
            .set("max.poll.interval.ms", "30000")
            .create()?;
        consumer.subscribe(&[ORIGINAL])?;
        while !self.stop.load(Ordering::SeqCst) {
            self.step();
            let Some(first) = consumer.poll(Duration::from_millis(100)) else { continue };
            producer.begin_transaction()?;
            let mut next = BTreeMap::new();
            let mut message = first?;
            // Every polled record is in the transaction: the next one starts after it.
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
            producer.send_offsets_to_transaction(&offsets, &group, CALL_TIMEOUT)?;
            self.step();
            producer.commit_transaction(CALL_TIMEOUT)?;
        }
        Ok(())
    }
}

fn send(producer: &BaseProducer, message: &BorrowedMessage<'_>) -> KafkaResult<()> {
    let (key, value) = (message.key().unwrap_or_default(), message.payload().unwrap_or_default());
    let record = BaseRecord::to(COPY).partition(message.partition()).key(key).payload(value);
    let sent = producer.send(record).map_err(|(error, _)| error);
    producer.poll(Duration::ZERO);
    sent
}
