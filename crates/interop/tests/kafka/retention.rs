//! Retention: records are deleted by age, by size, by DeleteRecords; readers learn the new log start offset.

use moim_interop::until;
use rdkafka::topic_partition_list::Offset;

use super::support::*;

fn fill(address: &str, topic: &str, count: usize, timestamp: Option<i64>) {
    let mut sender = Sender::new(address, &[("batch.num.messages", "10")]);
    for i in 0..count {
        let sample = Sample { timestamp, ..Sample::value(format!("{i:04} {}", "x".repeat(10_000))) };
        sender.send(topic, Some(0), &sample);
    }
    assert!(sender.reports().iter().all(Result::is_ok));
}

#[test]
fn retention_bytes_deletes_the_oldest_segments() {
    let server = server();
    let config = [("retention.bytes", "2097152"), ("segment.bytes", "1048576")];
    let topic = topic(server.kafka(), "size", 1, &config);
    fill(server.kafka(), &topic, 800, None);
    let (low, high) = until(PATIENCE, "the start to move", || {
        Some(watermarks(server.kafka(), &topic, 0)).filter(|(low, _)| *low > 400)
    });
    assert_eq!(high, 800);
    assert!(low < 800, "what fits stays");
    let seen = read_all(server.kafka(), &topic, 1, &[]);
    assert_eq!((seen[0].offset, seen.len()), (low, usize::try_from(high - low).unwrap()));
    assert_eq!(&seen[0].text()[..4], format!("{low:04}"));
    // A reader before the log start offset is reset to it.
    let late =
        reader(server.kafka(), &topic, &[(0, Offset::Offset(0))], &[("auto.offset.reset", "earliest")]);
    assert_eq!(next(&late, PATIENCE).map(|seen| seen.offset), Some(low));
}

#[test]
fn retention_ms_deletes_old_segments() {
    let server = server();
    let config = [("retention.ms", "3600000"), ("segment.bytes", "1048576")];
    let topic = topic(server.kafka(), "age", 1, &config);
    let yesterday = now_ms() - 24 * 3_600_000;
    fill(server.kafka(), &topic, 300, Some(yesterday));
    until(PATIENCE, "old segments to go", || (watermarks(server.kafka(), &topic, 0).0 >= 200).then_some(()));
    fill(server.kafka(), &topic, 10, None);
    let (_, high) = watermarks(server.kafka(), &topic, 0);
    assert_eq!(high, 310, "what is new stays");
    assert_eq!(read_all(server.kafka(), &topic, 1, &[]).last().map(|seen| seen.offset), Some(309));
}

fn now_ms() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_millis()).unwrap()
}

#[test]
fn delete_records_moves_the_log_start_offset() {
    let server = server();
    let topic = topic(server.kafka(), "delete", 1, &[]);
    deliver(server.kafka(), &topic, &["a", "b", "c", "d"]);
    let admin = admin(server.kafka());
    let delete = |to: Offset| {
        let answer = wait(admin.delete_records(&partition(&topic, 0, to), &admin_options())).unwrap();
        let elements = answer.elements();
        elements[0].error().map(|()| elements[0].offset())
    };
    assert_eq!(delete(Offset::Offset(2)).unwrap(), Offset::Offset(2));
    assert_eq!(watermarks(server.kafka(), &topic, 0), (2, 4));
    assert_eq!(values(server.kafka(), &topic, &[]), ["c", "d"]);
    assert!(delete(Offset::Offset(99)).is_err(), "past the end");
    assert_eq!(delete(Offset::End).unwrap(), Offset::Offset(4));
    assert_eq!(watermarks(server.kafka(), &topic, 0), (4, 4));
    assert_eq!(deliver(server.kafka(), &topic, &["e"]), [4], "offsets go on");
}

#[test]
fn log_start_offset_survives_a_crash() {
    let Some(mut server) = own_server() else { return };
    let topic = topic(server.kafka(), "delete-crash", 1, &[]);
    deliver(server.kafka(), &topic, &["a", "b", "c", "d"]);
    let admin = admin(server.kafka());
    wait(admin.delete_records(&partition(&topic, 0, Offset::Offset(3)), &admin_options())).unwrap();
    server.kill().unwrap();
    server.restart().unwrap();
    assert_eq!(watermarks(server.kafka(), &topic, 0), (3, 4));
    assert_eq!(values(server.kafka(), &topic, &[]), ["d"]);
}
