//! Idempotent producer: retries write no duplicates behind a network that drops requests and responses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use moim_interop::proxy::{Fate, Request};

use super::support::*;

const PRODUCE: i16 = 0;

/// Sends `count` records while `fate` decides about each produce request by its number; every record must be there
/// once, in order. Returns the number of requests.
fn check(what: &str, count: usize, settings: &[(&str, &str)], fate: fn(usize) -> Fate) -> usize {
    let Some((server, proxy)) = proxied() else { return usize::MAX };
    let address = proxy.address();
    let topic = topic(&address, "idempotence", 1, &[]);
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    proxy.set_rule(move |request: &Request| match request.api_key {
        PRODUCE => fate(counted.fetch_add(1, Ordering::SeqCst)),
        _ => Fate::Pass,
    });
    let mut all = vec![
        ("enable.idempotence", "true"),
        ("linger.ms", "1"),
        ("batch.num.messages", "10"),
        ("retry.backoff.ms", "10"),
        ("message.timeout.ms", "60000"),
    ];
    all.extend(settings);
    let mut sender = Sender::new(&address, &all);
    for i in 0..count {
        sender.send(&topic, Some(0), &Sample::value(format!("{i}")));
    }
    let offsets: Vec<i64> = sender.reports().into_iter().map(|report| report.expect("delivered").1).collect();
    proxy.set_rule(|_| Fate::Pass);
    let texts = values(server.kafka(), &topic, &[]);
    assert_eq!(texts, (0..count).map(|i| i.to_string()).collect::<Vec<_>>(), "{what}");
    // A client that learns of a success only from a duplicate response may not know the offset.
    let known = offsets.iter().enumerate().filter(|(_, offset)| **offset >= 0);
    for (i, offset) in known {
        assert_eq!(*offset, i64::try_from(i).unwrap(), "{what}");
    }
    requests.load(Ordering::SeqCst)
}

#[test]
fn lost_response_causes_no_duplicate() {
    let requests = check("answers", 2_000, &[], |n| if n % 7 == 3 { Fate::CutAfter } else { Fate::Pass });
    assert!(requests > 30, "only {requests} requests, so hardly any was lost");
}

#[test]
fn lost_request_is_retried_in_order() {
    let requests = check("requests", 2_000, &[], |n| if n % 7 == 3 { Fate::CutBefore } else { Fate::Pass });
    assert!(requests > 30, "only {requests} requests, so hardly any was lost");
}

#[test]
fn max_in_flight_1_causes_no_duplicate() {
    let settings = [("max.in.flight", "1")];
    check("one at a time", 1_000, &settings, |n| match n % 5 {
        1 => Fate::CutBefore,
        3 => Fate::CutAfter,
        _ => Fate::Pass,
    });
}

#[test]
fn duplicate_compressed_batches_are_detected() {
    check("compressed", 1_000, &[("compression.type", "lz4")], |n| {
        if n % 4 == 1 { Fate::CutAfter } else { Fate::Pass }
    });
}

/// Validates the proxy: without idempotence the same losses do cause duplicates.
#[test]
fn lost_response_without_idempotence_causes_a_duplicate() {
    let Some((server, proxy)) = proxied() else { return };
    let address = proxy.address();
    let topic = topic(&address, "plain", 1, &[]);
    let requests = AtomicUsize::new(0);
    proxy.set_rule(move |request| match request.api_key {
        PRODUCE if requests.fetch_add(1, Ordering::SeqCst) == 0 => Fate::CutAfter,
        _ => Fate::Pass,
    });
    let mut sender = Sender::new(&address, &[("enable.idempotence", "false"), ("retry.backoff.ms", "10")]);
    sender.deliver(&topic, 0, &[Sample::value("x")]);
    assert_eq!(values(server.kafka(), &topic, &[]), ["x", "x"]);
}

#[test]
fn producer_sequences_survive_a_server_restart() {
    let Some((mut server, proxy)) = proxied() else { return };
    let address = proxy.address();
    let topic = topic(&address, "restart", 1, &[]);
    let settings =
        [("enable.idempotence", "true"), ("retry.backoff.ms", "10"), ("message.timeout.ms", "60000")];
    let mut sender = Sender::new(&address, &settings);
    for round in 0..4 {
        sender.deliver(&topic, 0, &[Sample::value(format!("{round} before"))]);
        // The server stores the next batch, but its response is lost and the server crashes before the retry.
        proxy.set_rule(|request| if request.api_key == PRODUCE { Fate::CutAfter } else { Fate::Pass });
        sender.send(&topic, Some(0), &Sample::value(format!("{round} during")));
        let end = 2 * (round + 1);
        moim_interop::until(PATIENCE, "the lost batch to be written", || {
            sender.inner.poll(std::time::Duration::from_millis(5));
            (watermarks(server.kafka(), &topic, 0).1 >= end).then_some(())
        });
        if round % 2 == 0 {
            server.kill().unwrap();
        } else {
            server.terminate().unwrap();
        }
        server.restart().unwrap();
        proxy.set_rule(|_| Fate::Pass);
        assert!(sender.reports().iter().all(Result::is_ok));
    }
    let expected: Vec<String> =
        (0..4).flat_map(|round| [format!("{round} before"), format!("{round} during")]).collect();
    assert_eq!(values(server.kafka(), &topic, &[]), expected);
}
