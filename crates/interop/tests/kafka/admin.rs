//! Topics and configurations: create, alter, describe, delete, and errors with the right code.

use moim_interop::until;
use rdkafka::admin::{
    AlterConfig, ConfigSource, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::metadata::MetadataBroker;

use super::support::*;

fn partitions(address: &str, topic: &str) -> Option<usize> {
    let probe: BaseConsumer = client(address, &[("allow.auto.create.topics", "false")]).create().unwrap();
    let metadata = probe.fetch_metadata(None, PATIENCE).unwrap();
    metadata.topics().iter().find(|found| found.name() == topic).map(|found| found.partitions().len())
}

fn config(address: &str, topic: &str, key: &str) -> (Option<String>, ConfigSource) {
    let answer =
        wait(admin(address).describe_configs(&[ResourceSpecifier::Topic(topic)], &admin_options())).unwrap();
    let mut resource = answer.into_iter().next().unwrap().unwrap();
    let at =
        resource.entries.iter().position(|entry| entry.name == key).unwrap_or_else(|| panic!("no {key}"));
    let entry = resource.entries.swap_remove(at);
    (entry.value, entry.source)
}

#[test]
fn topic_is_created_described_extended_and_deleted() {
    let server = server();
    let name = topic(server.kafka(), "life", 2, &[("retention.ms", "1234567")]);
    assert_eq!(partitions(server.kafka(), &name), Some(2));
    let (value, source) = config(server.kafka(), &name, "retention.ms");
    assert_eq!((value.as_deref(), source), (Some("1234567"), ConfigSource::DynamicTopic));
    let admin = admin(server.kafka());
    let grown = wait(admin.create_partitions(&[NewPartitions::new(&name, 5)], &admin_options())).unwrap();
    assert_eq!(grown, [Ok(name.clone())]);
    assert_eq!(partitions(server.kafka(), &name), Some(5));
    for count in [5, 3] {
        let refused =
            wait(admin.create_partitions(&[NewPartitions::new(&name, count)], &admin_options())).unwrap();
        assert_eq!(refused, [Err((name.clone(), RDKafkaErrorCode::InvalidPartitions))], "{count}");
    }
    let gone = wait(admin.delete_topics(&[&name], &admin_options())).unwrap();
    assert_eq!(gone, [Ok(name.clone())]);
    until(PATIENCE, "the topic to go", || partitions(server.kafka(), &name).is_none().then_some(()));
    let again = wait(admin.delete_topics(&[&name], &admin_options())).unwrap();
    assert_eq!(again, [Err((name, RDKafkaErrorCode::UnknownTopicOrPartition))]);
}

#[test]
fn recreated_topic_is_empty() {
    let server = server();
    let name = topic(server.kafka(), "again", 1, &[]);
    deliver(server.kafka(), &name, &["old", "old"]);
    wait(admin(server.kafka()).delete_topics(&[&name], &admin_options())).unwrap();
    until(PATIENCE, "the topic to go", || partitions(server.kafka(), &name).is_none().then_some(()));
    create(server.kafka(), &name, 1, &[]);
    until(PATIENCE, "the new topic", || (partitions(server.kafka(), &name) == Some(1)).then_some(()));
    assert_eq!(deliver(server.kafka(), &name, &["new"]), [0]);
    assert_eq!(values(server.kafka(), &name, &[]), ["new"]);
}

#[test]
fn invalid_topics_are_refused_with_their_error_code() {
    let server = server();
    let taken = topic(server.kafka(), "taken", 1, &[]);
    let long = "x".repeat(250);
    let replicated =
        |name, partitions, factor| NewTopic::new(name, partitions, TopicReplication::Fixed(factor));
    let fresh = unique("fresh");
    let cases = [
        (replicated(&taken, 1, 1), RDKafkaErrorCode::TopicAlreadyExists),
        (replicated("with space", 1, 1), RDKafkaErrorCode::InvalidTopic),
        (replicated("../escape", 1, 1), RDKafkaErrorCode::InvalidTopic),
        (replicated("..", 1, 1), RDKafkaErrorCode::InvalidTopic),
        (replicated(&long, 1, 1), RDKafkaErrorCode::InvalidTopic),
        (replicated(&fresh, 1, nodes() as i32 + 1), RDKafkaErrorCode::InvalidReplicationFactor),
        (replicated(&fresh, 1, 1).set("no.such.key", "1"), RDKafkaErrorCode::InvalidConfig),
        (replicated(&fresh, 1, 1).set("retention.ms", "soon"), RDKafkaErrorCode::InvalidConfig),
        (replicated(&fresh, 1, 1).set("cleanup.policy", "burn"), RDKafkaErrorCode::InvalidConfig),
    ];
    let admin = admin(server.kafka());
    for (topic, expected) in cases {
        let answer = wait(admin.create_topics([&topic], &admin_options())).unwrap();
        let Err((name, code)) = &answer[0] else { panic!("{} was made", topic.name) };
        assert_eq!((name.as_str(), *code), (topic.name, expected));
    }
    assert_eq!(partitions(server.kafka(), &fresh), None);
}

#[test]
fn validate_only_creates_nothing() {
    let server = server();
    let name = unique("rehearsal");
    let topic = NewTopic::new(&name, 1, TopicReplication::Fixed(1));
    let options = admin_options().validate_only(true);
    let answer = wait(admin(server.kafka()).create_topics([&topic], &options)).unwrap();
    assert_eq!(answer, [Ok(name.clone())]);
    assert_eq!(partitions(server.kafka(), &name), None);
}

#[test]
fn every_topic_setting_has_a_value() {
    let server = server();
    let name = unique("defaults");
    deliver(server.kafka(), &name, &["made by being used"]);
    let expected = [
        ("cleanup.policy", "delete"),
        ("compression.type", "producer"),
        ("delete.retention.ms", "86400000"),
        ("max.message.bytes", "1048588"),
        ("message.timestamp.type", "CreateTime"),
        ("min.insync.replicas", if nodes() < 3 { "1" } else { "2" }),
        ("retention.bytes", "-1"),
        ("retention.ms", "604800000"),
        ("segment.bytes", "1073741824"),
    ];
    for (key, value) in expected {
        let (found, source) = config(server.kafka(), &name, key);
        assert_eq!(found.as_deref(), Some(value), "{key}");
        assert_ne!(source, ConfigSource::DynamicTopic, "{key}");
    }
}

#[test]
fn altered_config_takes_effect_at_once() {
    let server = server();
    let name = topic(server.kafka(), "alter", 1, &[("retention.ms", "1000000")]);
    let change = AlterConfig::new(ResourceSpecifier::Topic(&name)).set("max.message.bytes", "2000");
    let answer = wait(admin(server.kafka()).alter_configs(&[change], &admin_options())).unwrap();
    assert!(answer[0].is_ok(), "{answer:?}");
    assert_eq!(config(server.kafka(), &name, "max.message.bytes").0.as_deref(), Some("2000"));
    assert_eq!(
        config(server.kafka(), &name, "retention.ms").0.as_deref(),
        Some("604800000"),
        "the rest is reset"
    );
    let mut sender = Sender::new(server.kafka(), &[]);
    let refused = until(PATIENCE, "the limit to act", || {
        let number = sender.send(&name, Some(0), &Sample::value(vec![b'x'; 5_000]));
        sender.reports()[number].err()
    });
    assert_eq!(refused, RDKafkaErrorCode::MessageSizeTooLarge);
    let wrong = AlterConfig::new(ResourceSpecifier::Topic(&name)).set("max.message.bytes", "many");
    let _ = wait(admin(server.kafka()).alter_configs(&[wrong], &admin_options()));
    assert_eq!(
        config(server.kafka(), &name, "max.message.bytes").0.as_deref(),
        Some("2000"),
        "nonsense is refused"
    );
}

#[test]
fn broker_configs_are_described() {
    let server = server();
    let probe: BaseConsumer = client(server.kafka(), &[]).create().unwrap();
    let metadata = probe.fetch_metadata(None, PATIENCE).unwrap();
    let is_first =
        |broker: &&MetadataBroker| format!("{}:{}", broker.host(), broker.port()) == server.kafka();
    let broker = metadata.brokers().iter().find(is_first).expect("the one that was asked");
    assert_eq!(metadata.brokers().len(), nodes());
    let id = probe.client().fetch_cluster_id(PATIENCE).expect("a cluster id");
    assert!(!id.is_empty());
    let answer = wait(
        admin(server.kafka()).describe_configs(&[ResourceSpecifier::Broker(broker.id())], &admin_options()),
    );
    let answer = answer.unwrap();
    let entries = &answer[0].as_ref().unwrap().entries;
    for name in BROKER_SETTINGS {
        assert!(entries.iter().any(|entry| entry.name == *name), "{name} is not described");
    }
}

/// Static and dynamic settings of a broker that tools read.
const BROKER_SETTINGS: &[&str] = &[
    "advertised.listeners",
    "auto.create.topics.enable",
    "compression.type",
    "connections.max.idle.ms",
    "default.replication.factor",
    "group.max.session.timeout.ms",
    "group.min.session.timeout.ms",
    "listeners",
    "log.cleanup.policy",
    "log.dirs",
    "log.retention.bytes",
    "log.retention.ms",
    "log.segment.bytes",
    "message.max.bytes",
    "min.insync.replicas",
    "node.id",
    "num.partitions",
    "offsets.retention.minutes",
    "offsets.topic.num.partitions",
    "process.roles",
    "replica.lag.time.max.ms",
    "socket.request.max.bytes",
    "transaction.max.timeout.ms",
    "transaction.state.log.num.partitions",
];

#[test]
fn topics_and_configs_survive_a_crash() {
    let Some(mut server) = own_server() else { return };
    let kept = topic(server.kafka(), "kept", 3, &[("retention.ms", "123456789")]);
    let deleted = topic(server.kafka(), "deleted", 1, &[]);
    deliver(server.kafka(), &deleted, &["x"]);
    wait(admin(server.kafka()).delete_topics(&[&deleted], &admin_options())).unwrap();
    server.kill().unwrap();
    server.restart().unwrap();
    assert_eq!(partitions(server.kafka(), &kept), Some(3));
    assert_eq!(config(server.kafka(), &kept, "retention.ms").0.as_deref(), Some("123456789"));
    assert_eq!(partitions(server.kafka(), &deleted), None);
}
