//! The verifier is tried with runs whose faults are known.

use super::*;

/// `clients` clients that sent the same `lines` lines, all of it counted.
fn whole(clients: u64, lines: u64) -> Observed {
    let counts = ClientCounts {
        sent: lines,
        counted: lines,
        acked: lines,
        relayed: lines,
        last: lines,
        dead_lettered: 0,
    };
    Observed {
        clients: (0..clients).map(|n| (format!("c{n}"), counts.clone())).collect(),
        messages: (0..lines).map(|n| (format!("h{n}"), clients)).collect(),
    }
}

fn client<'a>(observed: &'a mut Observed, name: &str) -> &'a mut ClientCounts {
    observed.clients.get_mut(name).unwrap()
}

#[test]
fn a_whole_run_is_ok() {
    let verdict = judge(&whole(10, 4_422), None);
    assert!(verdict.is_ok());
    assert_eq!((verdict.sent, verdict.counted, verdict.lost, verdict.duplicated), (44_220, 44_220, 0, 0));
    assert_eq!(verdict.messages.expected_each, Some(10));
}

#[test]
fn one_message_lost_is_one_loss() {
    let mut observed = whole(3, 5);
    client(&mut observed, "c1").counted = 4;
    *observed.messages.get_mut("h2").unwrap() = 2;
    let verdict = judge(&observed, None);
    assert_eq!((verdict.lost, verdict.duplicated, verdict.verdict), (1, 0, "failed"));
    assert_eq!(verdict.messages.wrong.len(), 1);
}

#[test]
fn a_message_lost_after_counting_is_a_loss() {
    let mut observed = whole(3, 5);
    *observed.messages.get_mut("h2").unwrap() = 2;
    let verdict = judge(&observed, None);
    assert_eq!((verdict.lost, verdict.duplicated, verdict.verdict), (1, 0, "failed"));
}

#[test]
fn a_duplicate_does_not_hide_behind_a_loss() {
    let mut observed = whole(3, 5);
    *observed.messages.get_mut("h1").unwrap() = 4;
    *observed.messages.get_mut("h2").unwrap() = 2;
    let verdict = judge(&observed, None);
    assert_eq!((verdict.duplicated, verdict.verdict, verdict.messages.wrong.len()), (1, "failed", 2));
}

#[test]
fn a_client_counted_twice_is_a_duplicate() {
    let mut observed = whole(2, 5);
    client(&mut observed, "c0").counted = 6;
    let verdict = judge(&observed, None);
    assert_eq!((verdict.duplicated, verdict.verdict), (1, "failed"));
}

#[test]
fn dead_letters_are_neither_lost_nor_counted() {
    let mut observed = whole(1, 5);
    client(&mut observed, "c0").counted = 4;
    client(&mut observed, "c0").dead_lettered = 1;
    observed.messages.remove("h4");
    let verdict = judge(&observed, None);
    assert!(verdict.is_ok(), "{verdict:?}");
    assert_eq!((verdict.dead_lettered, verdict.messages.expected_each), (1, None));
}

#[test]
fn clients_with_lines_of_their_own_are_added_up() {
    let mut observed = whole(1, 5);
    observed.clients.insert("other".into(), ClientCounts { sent: 2, counted: 2, ..ClientCounts::default() });
    *observed.messages.get_mut("h0").unwrap() = 3;
    assert!(judge(&observed, None).is_ok());
    *observed.messages.get_mut("h0").unwrap() = 4;
    assert_eq!(judge(&observed, None).duplicated, 1);
}

#[test]
fn nothing_sent_is_fine() {
    assert!(judge(&Observed::default(), None).is_ok());
}
