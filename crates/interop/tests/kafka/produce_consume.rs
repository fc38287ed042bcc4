//! Produce and consume: every compression codec, record shape and acks setting.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdkafka::Timestamp;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::topic_partition_list::Offset;

use super::support::*;

/// Records of every shape, compressible and not.
fn shapes() -> Vec<Sample> {
    let header = |key: &str, value: Option<&[u8]>| (key.to_owned(), value.map(<[u8]>::to_vec));
    let mut random = fastrand::Rng::with_seed(7);
    let mut samples = vec![
        Sample { key: None, value: None, ..Sample::default() },
        Sample { key: Some(vec![]), value: Some(vec![]), ..Sample::default() },
        Sample { key: Some(b"k".to_vec()), value: None, ..Sample::default() },
        Sample { key: None, value: Some(b"v".to_vec()), ..Sample::default() },
        Sample {
            value: Some(b"headers".to_vec()),
            headers: vec![
                header("twice", Some(b"first")),
                header("null", None),
                header("empty", Some(b"")),
                header("twice", Some(b"second")),
                header("키", Some("값".as_bytes())),
            ],
            ..Sample::default()
        },
    ];
    for i in 0..200 {
        let text = format!("line {i} ").repeat(random.usize(1..40));
        samples.push(Sample::keyed(format!("key {}", i % 10), text));
        samples.push(Sample::value((0..random.usize(0..300)).map(|_| random.u8(..)).collect::<Vec<_>>()));
    }
    for (i, sample) in samples.iter_mut().enumerate() {
        sample.timestamp = Some(1_600_000_000_000 + i64::try_from(i).unwrap());
    }
    samples
}

#[test]
fn every_compression_codec_round_trips() {
    let server = server();
    let samples = shapes();
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let topic = topic(server.kafka(), codec, 1, &[]);
        let settings = [("compression.type", codec), ("linger.ms", "20")];
        let offsets = Sender::new(server.kafka(), &settings).deliver(&topic, 0, &samples);
        assert_eq!(offsets, (0..i64::try_from(samples.len()).unwrap()).collect::<Vec<_>>(), "{codec}");
        let seen = read_all(server.kafka(), &topic, 1, &[("check.crcs", "true")]);
        let back: Vec<Sample> = seen.into_iter().map(|seen| seen.sample).collect();
        assert_eq!(back, samples, "{codec}");
    }
}

#[test]
fn topic_compression_type_recompresses_batches() {
    let server = server();
    let samples = shapes();
    for (topic_codec, client_codec) in [("zstd", "none"), ("uncompressed", "gzip"), ("lz4", "snappy")] {
        let topic = topic(server.kafka(), "recompress", 1, &[("compression.type", topic_codec)]);
        let settings = [("compression.type", client_codec), ("linger.ms", "20")];
        Sender::new(server.kafka(), &settings).deliver(&topic, 0, &samples);
        let seen = read_all(server.kafka(), &topic, 1, &[("check.crcs", "true")]);
        let back: Vec<Sample> = seen.into_iter().map(|seen| seen.sample).collect();
        assert_eq!(back, samples, "{client_codec} into {topic_codec}");
    }
}

#[test]
fn max_message_bytes_is_enforced() {
    let server = server();
    let topic = topic(server.kafka(), "large", 1, &[]);
    let mut random = fastrand::Rng::with_seed(1);
    let mut bytes = |len: usize| Sample::value((0..len).map(|_| random.u8(..)).collect::<Vec<_>>());
    let (fits, too_large) = (bytes(1_000_000), bytes(1_200_000));
    let mut sender = Sender::new(server.kafka(), &[("message.max.bytes", "10000000")]);
    sender.send(&topic, Some(0), &fits);
    sender.send(&topic, Some(0), &too_large);
    sender.send(&topic, Some(0), &Sample::value("after"));
    let reports = sender.reports();
    assert_eq!(reports[0], Ok((0, 0)));
    assert_eq!(reports[1], Err(RDKafkaErrorCode::MessageSizeTooLarge));
    assert_eq!(reports[2], Ok((0, 1)), "the refused one leaves no hole");
    let seen = read_all(server.kafka(), &topic, 1, &[]);
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].sample.value, fits.value);
}

#[test]
fn record_larger_than_the_fetch_limit_is_returned() {
    let server = server();
    let topic = topic(server.kafka(), "small-fetch", 1, &[]);
    let big = Sample::value(vec![b'x'; 500_000]);
    Sender::new(server.kafka(), &[]).deliver(&topic, 0, &[big.clone(), Sample::value("next")]);
    let settings = [
        ("fetch.message.max.bytes", "1000"),
        ("fetch.max.bytes", "1000"),
        ("receive.message.max.bytes", "1000000"),
    ];
    let mut config = settings.to_vec();
    config.push(("message.max.bytes", "1000"));
    let reader = reader(server.kafka(), &topic, &[(0, Offset::Beginning)], &config);
    let seen = take(&reader, 2);
    assert_eq!((seen[0].sample.value.as_ref(), seen[1].text().as_str()), (big.value.as_ref(), "next"));
}

#[test]
fn every_acks_setting_works() {
    let server = server();
    for acks in ["0", "1", "all"] {
        let topic = topic(server.kafka(), "acks", 1, &[]);
        let mut sender = Sender::new(server.kafka(), &[("acks", acks)]);
        let samples: Vec<Sample> = (0..100).map(|i| Sample::value(format!("{i}"))).collect();
        sender.deliver(&topic, 0, &samples);
        let reader = reader(server.kafka(), &topic, &[(0, Offset::Beginning)], &[]);
        let texts: Vec<String> = take(&reader, 100).iter().map(Seen::text).collect();
        assert_eq!(texts, (0..100).map(|i| i.to_string()).collect::<Vec<_>>(), "acks={acks}");
    }
}

#[test]
fn order_and_offsets_across_many_batches() {
    const COUNT: usize = 20_000;
    let server = server();
    let topic = topic(server.kafka(), "order", 1, &[]);
    let mut sender = Sender::new(server.kafka(), &[("linger.ms", "1"), ("batch.num.messages", "97")]);
    for i in 0..COUNT {
        sender.send(&topic, Some(0), &Sample::value(format!("{i}")));
    }
    let offsets: Vec<i64> = sender.reports().into_iter().map(|report| report.unwrap().1).collect();
    assert_eq!(offsets, (0..i64::try_from(COUNT).unwrap()).collect::<Vec<_>>());
    let seen = read_all(server.kafka(), &topic, 1, &[]);
    assert_eq!(seen.len(), COUNT);
    for (i, seen) in seen.iter().enumerate() {
        assert_eq!((seen.offset, seen.text()), (i64::try_from(i).unwrap(), i.to_string()));
    }
    assert_eq!(watermarks(server.kafka(), &topic, 0), (0, i64::try_from(COUNT).unwrap()));
}

#[test]
fn fetch_starts_in_the_middle_of_a_batch() {
    let server = server();
    let topic = topic(server.kafka(), "middle", 1, &[]);
    for codec in ["none", "zstd"] {
        let samples: Vec<Sample> = (0..100).map(|i| Sample::value(format!("{codec} {i}"))).collect();
        let settings = [("linger.ms", "500"), ("batch.num.messages", "100"), ("compression.type", codec)];
        let offsets = Sender::new(server.kafka(), &settings).deliver(&topic, 0, &samples);
        let reader = reader(server.kafka(), &topic, &[(0, Offset::Offset(offsets[57]))], &[]);
        let seen = take(&reader, 43);
        assert_eq!((seen[0].offset, seen[0].text()), (offsets[57], format!("{codec} 57")));
        assert_eq!(seen[42].text(), format!("{codec} 99"));
    }
}

#[test]
fn same_key_goes_to_the_same_partition() {
    let server = server();
    let topic = topic(server.kafka(), "keys", 7, &[]);
    let mut sender = Sender::new(server.kafka(), &[("partitioner", "murmur2_random")]);
    for i in 0..700 {
        sender.send(&topic, None, &Sample::keyed(format!("key {}", i % 50), format!("{i}")));
    }
    assert!(sender.reports().iter().all(Result::is_ok));
    let mut homes: HashMap<Vec<u8>, i32> = HashMap::new();
    let seen = read_all(server.kafka(), &topic, 7, &[]);
    assert_eq!(seen.len(), 700);
    for seen in seen {
        let home = homes.entry(seen.sample.key.unwrap()).or_insert(seen.partition);
        assert_eq!(*home, seen.partition);
    }
    let used: std::collections::BTreeSet<i32> = homes.values().copied().collect();
    assert!(used.len() > 3, "keys spread over {used:?}");
}

#[test]
fn topic_is_auto_created_on_first_use() {
    let server = server();
    let name = unique("auto");
    assert_eq!(deliver(server.kafka(), &name, &["first"]), [0]);
    assert_eq!(values(server.kafka(), &name, &[]), ["first"]);
}

#[test]
fn long_poll_returns_a_new_record_at_once() {
    let server = server();
    let topic = topic(server.kafka(), "long-poll", 1, &[]);
    // A fetch may wait a minute for data; here it must return at once.
    let settings = [("fetch.wait.max.ms", "60000"), ("socket.timeout.ms", "70000")];
    let reader = reader(server.kafka(), &topic, &[(0, Offset::Beginning)], &settings);
    assert_eq!(next(&reader, Duration::from_millis(500)), None);
    let mut sender = Sender::new(server.kafka(), &[("linger.ms", "0")]);
    for i in 0..5 {
        let start = Instant::now();
        sender.deliver(&topic, 0, &[Sample::value(format!("{i}"))]);
        assert_eq!(next(&reader, PATIENCE).map(|seen| seen.text()), Some(i.to_string()));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}

#[test]
fn consumer_reads_all_of_many_partitions() {
    let server = server();
    let topic = topic(server.kafka(), "many", 50, &[]);
    let from: Vec<(i32, Offset)> = (0..50).map(|partition| (partition, Offset::Beginning)).collect();
    let reader = reader(server.kafka(), &topic, &from, &[]);
    let mut sender = Sender::new(server.kafka(), &[]);
    for round in 0..5 {
        for partition in 0..50 {
            sender.send(&topic, Some(partition), &Sample::value(format!("{round}")));
        }
        sender.reports();
        let mut seen: Vec<(i32, String)> =
            take(&reader, 50).iter().map(|seen| (seen.partition, seen.text())).collect();
        seen.sort();
        let expected: Vec<(i32, String)> = (0..50).map(|partition| (partition, round.to_string())).collect();
        assert_eq!(seen, expected);
    }
}

#[test]
fn create_time_and_log_append_time_timestamps() {
    let server = server();
    let created = topic(server.kafka(), "create-time", 1, &[]);
    let appended = topic(server.kafka(), "append-time", 1, &[("message.timestamp.type", "LogAppendTime")]);
    let sample = Sample { timestamp: Some(1_234_567_890_123), ..Sample::value("x") };
    for codec in ["none", "lz4"] {
        for topic in [&created, &appended] {
            Sender::new(server.kafka(), &[("compression.type", codec)]).deliver(
                topic,
                0,
                std::slice::from_ref(&sample),
            );
        }
    }
    for seen in read_all(server.kafka(), &created, 1, &[("check.crcs", "true")]) {
        assert_eq!(seen.timestamp, Timestamp::CreateTime(1_234_567_890_123));
    }
    let seen = read_all(server.kafka(), &appended, 1, &[("check.crcs", "true")]);
    assert_eq!(seen.len(), 2);
    for seen in seen {
        let Timestamp::LogAppendTime(ms) = seen.timestamp else { panic!("{:?}", seen.timestamp) };
        assert!(ms > 1_700_000_000_000, "{ms}");
    }
}

#[test]
fn records_survive_a_graceful_shutdown() {
    let Some(mut server) = own_server() else { return };
    let topic = topic(server.kafka(), "stop", 3, &[]);
    let mut sender = Sender::new(server.kafka(), &[]);
    for i in 0..300 {
        sender.send(&topic, Some(i % 3), &Sample::value(format!("{i}")));
    }
    sender.reports();
    let before = read_all(server.kafka(), &topic, 3, &[]);
    let address = server.kafka().to_owned();
    let status = server.terminate().unwrap();
    assert_eq!(status.code(), Some(0), "{}", server.log_tail());
    server.restart().unwrap();
    assert_eq!(server.kafka(), address);
    let mut after = read_all(server.kafka(), &topic, 3, &[]);
    let order = |seen: &Seen| (seen.partition, seen.offset);
    let mut before = before;
    before.sort_by_key(order);
    after.sort_by_key(order);
    assert_eq!((before.len(), &after), (300, &before));
}
