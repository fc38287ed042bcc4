//! Tests the verifier with runs whose faults are known.

use proptest::prelude::*;

use super::*;
use crate::store::{digest_of, hash_of};

fn hash(line: u64) -> String {
    hash_of(format!("line {line}").as_bytes())
}

/// Marks the topics as read: everything sent is processed, nothing is unread.
fn settled(mut observed: Observed) -> Observed {
    observed.unread = Some(Unread::default());
    observed
}

/// A run of clients that sent these lines, all of them counted.
fn run(sent: &[Vec<u64>]) -> Observed {
    let mut observed = Observed::default();
    for (n, lines) in sent.iter().enumerate() {
        let many = lines.len() as u64;
        let digests: Vec<_> = lines.iter().map(|line| digest_of(format!("line {line}").as_bytes())).collect();
        let counts = ClientCounts {
            sent: many,
            counted: many,
            acked: many,
            relayed: many,
            last: many,
            digest: Some((many, hex(&digest_of_all(&digests)))),
            ..ClientCounts::default()
        };
        observed.clients.insert(format!("c{n}"), counts);
        observed.lines.insert(format!("c{n}"), (1..).zip(lines.iter().map(|line| hash(*line))).collect());
        for line in lines {
            *observed.messages.entry(hash(*line)).or_default() += 1;
        }
    }
    settled(observed)
}

/// `clients` clients that sent the same `lines` lines.
fn whole(clients: u64, lines: u64) -> Observed {
    run(&vec![(0..lines).collect(); clients as usize])
}

fn client<'a>(observed: &'a mut Observed, name: &str) -> &'a mut ClientCounts {
    observed.clients.get_mut(name).unwrap()
}

fn count(observed: &mut Observed, line: u64) -> &mut u64 {
    observed.messages.get_mut(&hash(line)).unwrap()
}

fn numbers(verdict: &Verdict) -> (u64, u64, u64, &str) {
    (verdict.lost, verdict.duplicated, verdict.in_flight, verdict.verdict)
}

#[test]
fn complete_run_is_ok() {
    for unread in [None, Some(Unread::default())] {
        let observed = Observed { unread, ..whole(10, 4_422) };
        let verdict = judge(&observed, None);
        assert_eq!((verdict.sent, verdict.counted), (44_220, 44_220));
        assert_eq!(numbers(&verdict), (0, 0, 0, "ok"));
        assert_eq!(verdict.messages.expected_each, Some(10));
        assert!(judge(&observed, Some(10)).is_ok());
        assert_eq!(judge(&observed, Some(9)).verdict, "failed");
    }
}

type Field = fn(&mut ClientCounts) -> &mut u64;

/// Every single change of one count of a run, with a description.
fn changes(observed: &Observed) -> Vec<(String, Observed)> {
    let mut changed = Vec::new();
    let fields: [Field; 3] = [|c| &mut c.counted, |c| &mut c.last, |c| &mut c.dead_lettered];
    let mut add = |name: &str, change: &dyn Fn(&mut Observed)| {
        let mut other = observed.clone();
        change(&mut other);
        changed.push((name.to_owned(), other));
    };
    for name in observed.clients.keys() {
        for field in fields {
            add(name, &|o| *field(o.clients.get_mut(name).unwrap()) += 1);
            add(name, &|o| {
                let count = field(o.clients.get_mut(name).unwrap());
                *count = count.saturating_sub(1);
            });
            add(name, &|o| *field(o.clients.get_mut(name).unwrap()) = 0);
        }
        for other in observed.clients.keys() {
            add(name, &|o| {
                let (mine, theirs) = (o.clients[name].counted, o.clients[other].counted);
                o.clients.get_mut(name).unwrap().counted = theirs;
                o.clients.get_mut(other).unwrap().counted = mine;
            });
        }
    }
    for text in observed.messages.keys() {
        add(text, &|o| *o.messages.get_mut(text).unwrap() += 1);
        add(text, &|o| *o.messages.get_mut(text).unwrap() -= 1);
        add(text, &|o| {
            o.messages.remove(text);
        });
        for other in observed.messages.keys() {
            add(text, &|o| {
                let (mine, theirs) = (o.messages[text], o.messages[other]);
                o.messages.insert(text.clone(), theirs);
                o.messages.insert(other.clone(), mine);
            });
        }
    }
    changed
}

#[test]
fn every_change_of_one_count_is_located() {
    let observed = run(&[vec![0, 1, 2, 3, 3], vec![0, 1, 3], vec![0], vec![4, 0, 1, 2, 3, 4, 4]]);
    assert!(judge(&observed, None).is_ok());
    let mut tried = 0;
    for (place, changed) in changes(&observed) {
        if changed.messages == observed.messages && changed.clients == observed.clients {
            continue;
        }
        tried += 1;
        let verdict = judge(&changed, None);
        let names = verdict.wrong_clients.iter().map(|wrong| &wrong.client);
        let named = names.chain(verdict.messages.wrong.iter().map(|wrong| &wrong.hash)).any(|n| *n == place);
        assert!(verdict.verdict == "failed" && named, "{place}: {verdict:?}");
        assert!(verdict.lost + verdict.duplicated > 0, "{place}: {verdict:?}");
    }
    assert!(tried > 70, "{tried}");
}

#[test]
fn ten_lost_and_ten_duplicated_do_not_cancel_out() {
    let mut observed = whole(10, 100);
    observed.messages.remove(&hash(7));
    *count(&mut observed, 8) = 20;
    let verdict = judge(&observed, None);
    assert_eq!(numbers(&verdict), (10, 10, 0, "failed"));
    let wrong: Vec<_> =
        verdict.messages.wrong.iter().map(|w| (w.hash.clone(), w.count, w.expected)).collect();
    let mut expected = vec![(hash(7), 0, 10), (hash(8), 20, 10)];
    expected.sort();
    assert_eq!(wrong, expected);
}

#[test]
fn one_message_lost_is_one_loss() {
    let mut observed = whole(3, 5);
    client(&mut observed, "c1").counted = 4;
    client(&mut observed, "c1").last = 4;
    *count(&mut observed, 4) = 2;
    let verdict = judge(&observed, None);
    assert_eq!(numbers(&verdict), (1, 0, 0, "failed"));
    assert_eq!((verdict.messages.wrong.len(), verdict.wrong_clients[0].client.as_str()), (1, "c1"));
}

#[test]
fn a_message_lost_after_counting_is_a_loss() {
    let mut observed = whole(3, 5);
    *count(&mut observed, 2) = 2;
    assert_eq!(numbers(&judge(&observed, None)), (1, 0, 0, "failed"));
    // It may be in flight, as long as the topics have not been read.
    observed.unread = None;
    assert_eq!(numbers(&judge(&observed, None)), (0, 0, 1, "pending"));
}

#[test]
fn messages_in_flight_at_any_stage_are_pending() {
    // Of 10: 1 to 3 are processed, 4 is counted and not aggregated, 5 and 6 are in the topic, 7 and 8 at the relay, 9
    // and 10 at the client.
    let mut observed = run(&[(0..10).collect()]);
    let counts = client(&mut observed, "c0");
    (counts.acked, counts.relayed, counts.last, counts.counted) = (8, 6, 4, 4);
    observed.lines.get_mut("c0").unwrap().retain(|sn, _| *sn <= 8);
    observed.messages.retain(|text, _| (0..3).any(|line| *text == hash(line)));
    let unread = observed.unread.as_mut().unwrap();
    unread.clients = [5u64, 6].map(|sn| ("c0".to_owned(), sn, hash(sn - 1))).to_vec();
    unread.texts.insert(hash(3), 1);
    assert_eq!(numbers(&judge(&observed, None)), (0, 0, 6, "pending"));
    // If one of them is not at its stage, it is lost.
    let mut lost = observed.clone();
    lost.unread.as_mut().unwrap().texts.clear();
    assert_eq!(numbers(&judge(&lost, None)), (1, 0, 6, "failed"));
    let mut lost = observed.clone();
    lost.unread.as_mut().unwrap().clients.pop();
    assert_eq!(numbers(&judge(&lost, None)), (1, 0, 5, "failed"));
    assert_eq!(judge(&lost, None).wrong_clients[0].client, "c0");
}

#[test]
fn a_duplicate_does_not_hide_behind_a_loss() {
    let mut observed = whole(3, 5);
    *count(&mut observed, 1) = 4;
    *count(&mut observed, 2) = 2;
    let verdict = judge(&observed, None);
    assert_eq!((numbers(&verdict), verdict.messages.wrong.len()), ((1, 1, 0, "failed"), 2));
}

#[test]
fn a_client_counted_twice_is_a_duplicate() {
    let mut observed = whole(2, 5);
    client(&mut observed, "c0").counted = 6;
    assert_eq!(numbers(&judge(&observed, None)), (0, 1, 0, "failed"));
}

#[test]
fn dead_letters_are_neither_lost_nor_counted() {
    let mut observed = whole(1, 5);
    client(&mut observed, "c0").counted = 4;
    client(&mut observed, "c0").dead_lettered = 1;
    observed.messages.remove(&hash(4));
    // Until the dead-letter topic is read, it may be any of them.
    let unseen = Observed { unread: None, ..observed.clone() };
    assert_eq!(judge(&unseen, None).verdict, "pending");
    observed.unread.as_mut().unwrap().dead.insert("c0".into(), [5].into());
    let verdict = judge(&observed, None);
    assert_eq!((numbers(&verdict), verdict.dead_lettered), ((0, 0, 0, "ok"), 1));
    // It was a different one.
    observed.unread.as_mut().unwrap().dead.insert("c0".into(), [4].into());
    assert_eq!(numbers(&judge(&observed, None)), (1, 1, 0, "failed"));
    observed.unread.as_mut().unwrap().dead.clear();
    assert_eq!(judge(&observed, None).verdict, "failed", "the dead letter is gone");
}

#[test]
fn digest_mismatch_between_client_and_gateway_fails() {
    let mut observed = run(&[(0..5).collect(), (5..9).collect()]);
    let other = client(&mut observed, "c1").digest.clone().map(|(_, digest)| (5, digest));
    client(&mut observed, "c0").digest = other;
    let verdict = judge(&observed, None);
    assert_eq!((verdict.verdict, verdict.wrong_clients[0].client.as_str()), ("failed", "c0"));
}

#[test]
fn lines_missing_in_the_store_are_taken_from_the_topic() {
    let mut observed = run(&[(0..5).collect(), (2..9).collect()]);
    let lines = observed.lines.remove("c0").unwrap();
    assert_eq!(observed.unknown(), ["c0".to_owned()].into());
    observed.unread.as_mut().unwrap().lines.insert("c0".into(), lines);
    assert!(judge(&observed, None).is_ok());
    *count(&mut observed, 1) += 1;
    assert_eq!(numbers(&judge(&observed, None)), (0, 1, 0, "failed"));
    // In neither place: single texts cannot be judged, but too high a count is still a duplicate.
    observed.unread.as_mut().unwrap().lines.clear();
    assert_eq!(numbers(&judge(&observed, None)), (0, 1, 0, "failed"));
}

#[test]
fn empty_run_is_ok() {
    assert!(judge(&Observed::default(), None).is_ok());
    assert!(judge(&settled(Observed::default()), None).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_run_is_ok_and_any_change_of_it_is_found(
        sent in prop::collection::vec(prop::collection::vec(0u64..12, 0..15), 1..5),
    ) {
        let observed = run(&sent);
        prop_assert!(judge(&observed, None).is_ok());
        for (place, changed) in changes(&observed) {
            if changed.messages != observed.messages || changed.clients != observed.clients {
                let verdict = judge(&changed, None);
                prop_assert!(verdict.verdict == "failed", "{}: {:?}", place, verdict);
            }
        }
    }
}
