//! Small histories with a known verdict, and random ones made by a real order.

use super::*;
use crate::record::{Compare, Found, Op, Outcome, Seen, Step};

/// An operation with its times; without a return its outcome is unknown.
fn entry(invoked: u64, returned: Option<u64>, op: Op, outcome: Outcome) -> Entry {
    let fate = returned.map_or(Fate::Unknown, |at| Fate::Ok { at, outcome });
    Entry { client: 1, invoked, op, fate }
}

fn blind(outcome: Outcome) -> Outcome {
    let seen = outcome.seen.into_iter().map(|seen| match seen {
        Seen::Got(Some(found)) => Seen::Got(Some(Found { mod_revision: None, ..found })),
        other => other,
    });
    Outcome { revision: None, seen: seen.collect(), ..outcome }
}

/// Checks with revisions and, where the error does not hang on them, without.
fn verdict(mut entries: Vec<Entry>) -> Result<(), Counterexample> {
    entries.sort_by_key(|entry| entry.invoked);
    check(&History { entries })
}

fn without_revisions(entries: Vec<Entry>) -> Vec<Entry> {
    let strip = |mut entry: Entry| {
        if let Fate::Ok { outcome, .. } = &mut entry.fate {
            *outcome = blind(outcome.clone());
        }
        entry
    };
    entries.into_iter().map(strip).collect()
}

fn put(invoked: u64, returned: Option<u64>, value: &str, revision: i64) -> Entry {
    entry(invoked, returned, Op::put("k", value), Outcome::wrote(revision))
}

fn get(invoked: u64, returned: u64, found: Option<(&str, i64)>, revision: i64) -> Entry {
    let found = found.map(|(value, at)| Found::at(value, at));
    entry(invoked, Some(returned), Op::get("k"), Outcome::read(revision, found))
}

#[test]
fn a_read_sees_a_put_that_overlaps_it_or_not() {
    for (found, revision) in [(Some(("a", 2)), 2), (None, 1)] {
        let history = vec![put(1, Some(4), "a", 2), get(2, 3, found, revision)];
        verdict(history.clone()).unwrap();
        verdict(without_revisions(history)).unwrap();
    }
}

#[test]
fn a_stale_read_is_found_by_the_search_alone() {
    let history = vec![put(1, Some(2), "a", 2), put(3, Some(4), "b", 3), get(5, 6, Some(("a", 2)), 3)];
    assert!(verdict(history.clone()).unwrap_err().what.contains("missed the change of 3"));
    let error = verdict(without_revisions(history)).unwrap_err();
    assert!(error.what.contains("no order"), "{error}");
    assert!(error.to_string().contains("here: k=b"), "{error}");
}

#[test]
fn a_value_once_seen_does_not_unhappen() {
    let history = vec![
        put(1, Some(2), "a", 2),
        put(3, None, "b", 3),
        get(4, 5, Some(("b", 3)), 3),
        get(6, 7, Some(("a", 2)), 2),
    ];
    assert!(verdict(history.clone()).unwrap_err().what.contains("revision 3 was known"));
    assert!(verdict(without_revisions(history)).is_err());
}

#[test]
fn an_unknown_put_may_happen_late_or_never() {
    let late =
        vec![put(1, None, "a", 0), get(2, 3, None, 1), put(4, Some(5), "b", 2), get(6, 7, Some(("a", 3)), 3)];
    verdict(late.clone()).unwrap();
    verdict(without_revisions(late)).unwrap();
    let never = vec![put(1, None, "a", 0), get(2, 3, None, 1), get(4, 5, None, 1)];
    verdict(without_revisions(never)).unwrap();
    let twice = vec![
        put(1, None, "a", 0),
        get(2, 3, Some(("a", 2)), 2),
        put(4, Some(5), "b", 3),
        get(6, 7, Some(("a", 4)), 4),
    ];
    assert!(verdict(without_revisions(twice)).is_err(), "one put, seen again after another");
}

#[test]
fn a_failed_put_must_not_be_seen() {
    let mut failed = put(1, None, "a", 0);
    failed.fate = Fate::Failed;
    assert!(verdict(vec![failed, get(2, 3, Some(("a", 2)), 2)]).is_err());
}

#[test]
fn only_one_of_two_equal_swaps_wins() {
    let swap = |invoked, returned, value: &str, succeeded, revision| {
        let op = Op::cas("k", Some("a"), value);
        entry(invoked, Some(returned), op, Outcome::txn(revision, succeeded, Vec::new()))
    };
    let start = put(1, Some(2), "a", 2);
    let fine = vec![start.clone(), swap(3, 6, "b", true, 3), swap(4, 5, "c", false, 3)];
    verdict(fine.clone()).unwrap();
    verdict(without_revisions(fine)).unwrap();
    let both = vec![start, swap(3, 6, "b", true, 3), swap(4, 5, "c", true, 4)];
    assert!(verdict(both.clone()).unwrap_err().what.contains("no order"));
    assert!(verdict(without_revisions(both)).is_err());
}

#[test]
fn a_delete_says_whether_there_was_something() {
    let delete = |there| entry(3, Some(4), Op::delete("k"), Outcome::deleted(3, there));
    verdict(vec![put(1, Some(2), "a", 2), delete(true), get(5, 6, None, 3)]).unwrap();
    assert!(verdict(vec![put(1, Some(2), "a", 2), delete(false)]).is_err());
    assert!(verdict(vec![delete(true)]).is_err());
}

#[test]
fn a_transaction_is_one_moment_for_all_its_keys() {
    let both = Op {
        then: vec![Step::Put("k".to_owned(), "1".to_owned()), Step::Put("l".to_owned(), "1".to_owned())],
        ..Op::default()
    };
    let look = Op { then: vec![Step::Get("k".to_owned()), Step::Get("l".to_owned())], ..Op::default() };
    let seen = |k: Option<&str>, l: Option<&str>| {
        let got = |value: Option<&str>| {
            Seen::Got(value.map(|value| Found { value: value.to_owned(), mod_revision: None }))
        };
        Outcome { succeeded: true, revision: None, seen: vec![got(k), got(l)] }
    };
    let history = |outcome| {
        vec![entry(1, Some(4), both.clone(), Outcome::wrote(2)), entry(2, Some(3), look.clone(), outcome)]
    };
    verdict(history(seen(Some("1"), Some("1")))).unwrap();
    verdict(history(seen(None, None))).unwrap();
    assert!(verdict(history(seen(Some("1"), None))).is_err());
}

#[test]
fn condition_on_an_unknown_revision_determines_it() {
    let compares = vec![Compare::ModRevision("k".to_owned(), 2)];
    let then = vec![Step::Put("k".to_owned(), "b".to_owned())];
    let swap = Op { compares, then, otherwise: Vec::new() };
    let history = |succeeded| {
        vec![put(1, None, "a", 0), entry(2, Some(3), swap.clone(), Outcome::txn(3, succeeded, Vec::new()))]
    };
    verdict(history(true)).unwrap();
    verdict(history(false)).unwrap();
}

#[test]
fn two_changes_with_one_revision_are_found_across_keys() {
    let other = entry(3, Some(4), Op::put("other", "x"), Outcome::wrote(2));
    assert!(verdict(vec![put(1, Some(2), "a", 2), other]).unwrap_err().what.contains("two changes"));
}

/// A history of a real store: each operation happens at a moment between its ends; some answers get lost.
fn real(random: &mut fastrand::Rng, count: u64, lost: f64, overlap: u64) -> Vec<Entry> {
    let (mut held, mut revision) = (None::<(String, i64)>, 1);
    let mut entries = Vec::new();
    for number in 0..count {
        let moment = number * 10;
        let invoked = moment.saturating_sub(random.u64(0..overlap)) * 2;
        let returned = (moment + random.u64(1..overlap)) * 2 + 1;
        let (op, outcome) = match random.u8(0..10) {
            0..4 => {
                let found = held.clone().map(|(value, at)| Found::at(value, at));
                (Op::get("k"), Outcome::read(revision, found))
            }
            4..8 => {
                revision += 1;
                held = Some((number.to_string(), revision));
                (Op::put("k", number.to_string()), Outcome::wrote(revision))
            }
            8 => {
                let there = held.take().is_some();
                revision += i64::from(there);
                (Op::delete("k"), Outcome::deleted(revision, there))
            }
            _ => {
                let expected = random.bool().then(|| held.clone().map(|held| held.0)).flatten();
                let holds = held.as_ref().map(|held| &held.0) == expected.as_ref();
                let op = Op::cas("k", expected.as_deref(), number.to_string());
                if holds {
                    revision += 1;
                    held = Some((number.to_string(), revision));
                }
                (op, Outcome::txn(revision, holds, Vec::new()))
            }
        };
        let returned = (random.f64() >= lost).then_some(returned);
        entries.push(entry(invoked, returned, op, outcome));
    }
    entries
}

#[test]
fn what_a_real_store_shows_is_accepted_and_a_changed_answer_is_not() {
    let mut random = fastrand::Rng::with_seed(11);
    let mut caught = 0;
    for round in 0..60 {
        let lost = if round % 2 == 0 { 0.0 } else { 0.1 };
        let history = real(&mut random, 150, lost, 25);
        verdict(history.clone()).unwrap_or_else(|error| panic!("round {round}: {error}"));
        verdict(without_revisions(history.clone())).unwrap_or_else(|error| panic!("round {round}: {error}"));
        // A read of something written much earlier.
        let mut wrong = without_revisions(history);
        let last = wrong.len() - 1;
        wrong[last] = entry(4_000, Some(4_001), Op::get("k"), Outcome::read(0, Some(Found::at("never", 0))));
        wrong[last] = without_revisions(vec![wrong[last].clone()]).remove(0);
        caught += u32::from(verdict(wrong).is_err());
    }
    assert_eq!(caught, 60);
}

#[test]
fn many_lost_answers_on_one_key_stay_cheap() {
    let mut random = fastrand::Rng::with_seed(3);
    let history = real(&mut random, 1_000, 0.15, 60);
    verdict(history).unwrap();
}

#[test]
fn a_search_that_would_not_end_is_an_error() {
    let mut entries: Vec<Entry> = (0..24).map(|at| put(at, Some(90 + at), &format!("v{at}"), 0)).collect();
    entries.push(get(200, 201, Some(("nothing anybody wrote", 0)), 0));
    let entries = without_revisions(entries);
    let error = check_bounded(&History { entries }, 1_000).unwrap_err();
    assert!(error.what.contains("gave up"), "{error}");
}
