//! Events of watchers: single rules first, then any interleaving against a linear model.

use proptest::prelude::*;

use super::*;
use crate::request::{Command, DeleteRequest, Op, PutRequest, TxnOp, TxnRequest};

const PLENTY: usize = 1 << 20;

struct World {
    state: State,
    hub: WatchHub,
    index: u64,
}

impl World {
    fn new() -> Self {
        let state = State::new();
        let hub = WatchHub::new(&state);
        Self { state, hub, index: 0 }
    }

    fn apply(&mut self, command: Command) {
        self.index += 1;
        self.state.apply(self.index, command);
        self.hub.on_applied(&self.state);
    }

    fn put(&mut self, key: &'static str) {
        self.apply(Command::client(Op::Put(PutRequest::new(key, "v"))));
    }

    fn put_all(&mut self, keys: &[&'static str]) {
        let success = keys.iter().map(|key| TxnOp::Put(PutRequest::new(*key, "v"))).collect();
        self.apply(Command::client(Op::Txn(TxnRequest { success, ..TxnRequest::default() })));
    }

    fn delete(&mut self, key: &'static str) {
        self.apply(Command::client(Op::Delete(DeleteRequest::key(key))));
    }

    fn compact(&mut self, revision: i64) {
        self.apply(Command::client(Op::Compact { space: SpaceId::User, revision }));
    }

    fn watch(&mut self, request: WatchRequest) -> WatcherId {
        self.hub.create(&self.state, request).unwrap()
    }

    fn batch(&mut self, id: WatcherId, max_bytes: usize) -> Batch {
        self.hub.next_batch(&self.state, id, max_bytes).unwrap()
    }

    /// All due events, as `+key@revision` and `-key@revision`.
    fn received(&mut self, id: WatcherId) -> String {
        let mut received = Vec::new();
        loop {
            match self.batch(id, PLENTY) {
                Batch::Idle => return received.join(" "),
                Batch::Yield => {}
                Batch::Events(batch) => received.extend(batch.events.iter().map(show)),
                Batch::Compacted { compact_revision } => {
                    received.push(format!("compacted@{compact_revision}"));
                    return received.join(" ");
                }
            }
        }
    }
}

fn show(event: &Event) -> String {
    let sign = if event.is_delete { '-' } else { '+' };
    format!("{sign}{}@{}", String::from_utf8_lossy(&event.kv.key), event.kv.mod_revision)
}

fn on(key: &'static str, range_end: &'static str) -> WatchRequest {
    WatchRequest { key: key.into(), range_end: range_end.into(), ..WatchRequest::default() }
}

fn from(start_revision: i64, request: WatchRequest) -> WatchRequest {
    WatchRequest { start_revision, ..request }
}

#[test]
fn watcher_receives_events_from_its_start_revision() {
    let mut world = World::new();
    world.put("a"); // 2
    world.put("b"); // 3
    world.put("a"); // 4
    let cases = [
        ("now, one key", on("a", ""), "+a@5 -a@6"),
        ("now, range", on("a", "c"), "+a@5 -a@6 +b@7"),
        ("past, one key", from(3, on("a", "")), "+a@4 +a@5 -a@6"),
        ("past, range", from(3, on("a", "c")), "+b@3 +a@4 +a@5 -a@6 +b@7"),
        ("from key", from(1, on("b", "\0")), "+b@3 +b@7 +c@8"),
        ("everything", from(1, on("", "\0")), "+a@2 +b@3 +a@4 +a@5 -a@6 +b@7 +c@8"),
        ("the future", from(7, on("", "\0")), "+b@7 +c@8"),
        ("no puts", WatchRequest { no_put: true, ..from(1, on("a", "z")) }, "-a@6"),
        ("no deletions", WatchRequest { no_delete: true, ..from(4, on("a", "")) }, "+a@4 +a@5"),
        ("other keys", from(1, on("x", "")), ""),
    ];
    let ids: Vec<_> = cases.iter().map(|(_, request, _)| world.watch(request.clone())).collect();
    world.put("a"); // 5
    world.delete("a"); // 6
    world.put("b"); // 7
    world.put("c"); // 8
    for ((name, _, expected), id) in cases.iter().zip(ids) {
        assert_eq!(world.received(id), *expected, "{name}");
        assert_eq!(world.batch(id, PLENTY), Batch::Idle, "{name}: each event once");
    }
}

#[test]
fn only_matching_watchers_become_ready_and_once() {
    let mut world = World::new();
    let one = world.watch(on("a", ""));
    let range = world.watch(on("a", "c"));
    let other = world.watch(on("x", ""));
    let future = world.watch(from(100, on("a", "")));
    world.put("a");
    world.put("a");
    assert_eq!(world.hub.take_ready(), [one, range]);
    assert_eq!(world.hub.take_ready(), []);
    assert_eq!(world.received(range), "+a@2 +a@3");
    world.put("b");
    assert_eq!(world.hub.take_ready(), [range]);
    world.put("x");
    world.hub.cancel(other);
    assert_eq!(world.hub.take_ready(), [], "a watch that was cancelled");
    assert_eq!(world.received(future), "");
    assert!(!world.hub.cancel(other));
    assert_eq!(world.hub.next_batch(&world.state, other, PLENTY), None);
    assert_eq!(world.hub.len(), 3);
}

#[test]
fn invalid_watch_request_is_refused() {
    let mut world = World::new();
    world.put("a");
    let refused = |world: &mut World, request| world.hub.create(&world.state, request).unwrap_err();
    assert_eq!(refused(&mut world, on("b", "a")), Error::EmptyWatchRange);
    assert_eq!(refused(&mut world, on("b", "b")), Error::EmptyWatchRange);
    assert_eq!(refused(&mut world, from(-1, on("b", ""))), Error::Compacted);
    assert!(world.hub.is_empty());
}

#[test]
fn compaction_cancels_watchers_that_are_behind_only() {
    let mut world = World::new();
    world.put("a"); // 2
    world.put("b"); // 3
    world.delete("b"); // 4
    world.put("a"); // 5
    let slow = world.watch(from(2, on("a", "")));
    let synced = world.watch(on("a", ""));
    world.compact(4);
    let below = world.watch(from(3, on("", "\0")));
    let at = world.watch(WatchRequest { prev_kv: true, ..from(4, on("", "\0")) });
    assert_eq!(world.received(below), "compacted@4");
    assert_eq!(world.received(slow), "compacted@4");
    assert_eq!(world.hub.next_batch(&world.state, slow, PLENTY), None, "the watcher was removed");
    let Batch::Events(batch) = world.batch(at, PLENTY) else { panic!() };
    assert_eq!(
        batch.events.iter().map(show).collect::<Vec<_>>(),
        ["-b@4", "+a@5"],
        "the deletion of 4 is kept"
    );
    assert_eq!(batch.events[0].prev_kv, None, "the version before 4 is compacted");
    assert_eq!(batch.events[1].prev_kv.as_ref().unwrap().mod_revision, 2);
    world.put("a"); // 6
    world.compact(6);
    assert_eq!(world.received(synced), "+a@6", "it was in sync at the compaction");
}

#[test]
fn prev_kv_is_sent_when_requested() {
    let mut world = World::new();
    let with = world.watch(WatchRequest { prev_kv: true, ..on("", "\0") });
    let without = world.watch(on("", "\0"));
    world.put("a"); // 2
    world.put("a"); // 3
    world.delete("a"); // 4
    world.put("a"); // 5
    let prev = |batch: Batch| match batch {
        Batch::Events(batch) => {
            batch.events.into_iter().map(|event| event.prev_kv.map(|kv| kv.mod_revision)).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(prev(world.batch(with, PLENTY)), [None, Some(2), Some(3), None]);
    assert_eq!(prev(world.batch(without, PLENTY)), [None; 4]);
}

#[test]
fn revision_is_sent_whole_unless_fragments_are_requested() {
    let mut world = World::new();
    let whole = world.watch(on("", "\0"));
    let pieces = world.watch(WatchRequest { fragment: true, ..on("", "\0") });
    world.put("a"); // 2
    world.put_all(&["b", "c", "d"]); // 3
    world.put("e"); // 4
    let two = 2 * (EVENT_OVERHEAD_BYTES + 2);
    let mut batches = |id| {
        let mut all = Vec::new();
        loop {
            match world.batch(id, two) {
                Batch::Events(batch) => {
                    all.push((batch.events.iter().map(show).collect::<Vec<_>>().join(" "), batch.fragment));
                    assert_eq!(batch.revision, 4);
                }
                _ => return all,
            }
        }
    };
    let expect =
        |list: &[(&str, bool)]| list.iter().map(|(text, b)| ((*text).to_owned(), *b)).collect::<Vec<_>>();
    assert_eq!(batches(whole), expect(&[("+a@2", false), ("+b@3 +c@3 +d@3", false), ("+e@4", false)]));
    let fragments = [("+a@2", false), ("+b@3 +c@3", true), ("+d@3 +e@4", false)];
    assert_eq!(batches(pieces), expect(&fragments));
}

#[test]
fn watcher_far_behind_in_other_keys_yields() {
    let mut world = World::new();
    let id = world.watch(from(1, on("a", "b")));
    let key = world.watch(from(1, on("a", "")));
    for _ in 0..SCAN_PER_BATCH + 10 {
        world.put("x");
    }
    world.put("a");
    assert_eq!(world.batch(id, PLENTY), Batch::Yield);
    assert!(matches!(world.batch(id, PLENTY), Batch::Events(_)));
    assert!(matches!(world.batch(key, PLENTY), Batch::Events(_)), "one key needs no search");
}

#[test]
fn progress_is_sent_when_all_events_are() {
    let mut world = World::new();
    let quiet = world.watch(WatchRequest { progress_notify: true, ..on("q", "") });
    let busy = world.watch(WatchRequest { progress_notify: true, ..on("a", "") });
    let silent = world.watch(on("s", ""));
    world.put("a");
    assert_eq!(world.hub.progress(&world.state, &[quiet, silent]), Some(2));
    assert_eq!(world.hub.progress(&world.state, &[quiet, busy]), None);
    assert_eq!(world.hub.progress_due(&world.state), [(quiet, 2)]);
    assert_eq!(world.received(busy), "+a@2");
    assert_eq!(world.hub.progress(&world.state, &[quiet, busy]), Some(2));
    assert_eq!(
        world.hub.progress_due(&world.state),
        [(quiet, 2)],
        "an event suppresses a progress notification"
    );
    assert_eq!(world.hub.progress_due(&world.state), [(quiet, 2), (busy, 2)]);
    let system = world.watch(on("/moim/a", ""));
    assert_eq!(world.hub.progress(&world.state, &[quiet, system]), None, "they share no revision");
    assert_eq!(world.hub.progress(&world.state, &[system]), Some(1));
}

#[test]
fn system_keys_are_watched_separately() {
    let mut world = World::new();
    let all = world.watch(from(1, on("", "\0")));
    let system = world.watch(on("/moim/", "/moim0"));
    world.put("/a");
    world.apply(Command::node(Op::Put(PutRequest::new("/moim/m", "v"))));
    assert_eq!(world.received(all), "+/a@2");
    assert_eq!(world.received(system), "+/moim/m@2");
}

#[test]
fn hub_that_missed_compacted_changes_cancels_watchers() {
    let mut world = World::new();
    let id = world.watch(on("a", ""));
    for n in 0..40 {
        world.state.apply(n + 1, Command::client(Op::Put(PutRequest::new("a", "v")))); // 2..=41
    }
    world.state.apply(50, Command::client(Op::Compact { space: SpaceId::User, revision: 40 }));
    while world.state.reclaim(100) {}
    world.hub.on_applied(&world.state);
    assert_eq!(world.received(id), "compacted@40");
}

#[test]
fn events_read_before_on_applied_are_not_sent_again() {
    let mut world = World::new();
    let id = world.watch(on("a", ""));
    world.put("a"); // 2
    world.state.apply(9, Command::client(Op::Put(PutRequest::new("a", "v")))); // 3, not seen by the hub yet
    assert_eq!(world.received(id), "+a@2 +a@3");
    world.hub.on_applied(&world.state);
    assert_eq!(world.received(id), "");
}

#[test]
fn watchers_continue_after_snapshot_restore() {
    for (compact, expected) in [(None, "+a@3 -a@4"), (Some(3), "+a@3 -a@4"), (Some(4), "compacted@4")] {
        let mut world = World::new();
        let id = world.watch(on("a", ""));
        let other = world.watch(from(9, on("a", "c")));
        world.put("a"); // 2
        assert_eq!(world.received(id), "+a@2");
        let mut leader = World::new();
        leader.put("a"); // 2
        leader.put("a"); // 3
        leader.delete("a"); // 4
        if let Some(revision) = compact {
            leader.compact(revision);
        }
        world.state = State::restore(leader.state.snapshot()).unwrap();
        world.index = leader.index;
        world.hub.on_restored(&world.state);
        assert_eq!(world.received(id), expected, "compacted at {compact:?}");
        assert_eq!(world.received(other), "", "it starts later");
        (0..5).for_each(|_| world.put("b")); // 5 to 9
        assert_eq!(world.received(other), "+b@9", "it starts where it said, not where the new state was");
    }
}

/// Steps of any interleaving.
#[derive(Clone, Debug)]
enum Step {
    Put(Vec<u8>),
    Delete(u8, u8),
    Compact(i64),
    Create { start: u8, end: u8, back: i64, prev_kv: bool, fragment: bool },
    Cancel(usize),
    Pull(usize, usize),
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => proptest::collection::btree_set(0..6_u8, 1..4).prop_map(|keys| Step::Put(keys.into_iter().collect())),
        2 => (0..6_u8, 0..7_u8).prop_map(|(start, end)| Step::Delete(start, end)),
        1 => (0..6_i64).prop_map(Step::Compact),
        3 => (0..6_u8, 0..8_u8, -2..8_i64, any::<bool>(), any::<bool>())
            .prop_map(|(start, end, back, prev_kv, fragment)| Step::Create { start, end, back, prev_kv, fragment }),
        1 => (0..8_usize).prop_map(Step::Cancel),
        6 => (0..8_usize, 0..300_usize).prop_map(|(at, max)| Step::Pull(at, max)),
        1 => Just(Step::Restore),
    ]
}

fn name(n: u8) -> Bytes {
    Bytes::from(vec![b'a' + n])
}

/// 0 is a single key, 7 is unbounded.
fn end_name(n: u8) -> Bytes {
    match n {
        0 => Bytes::new(),
        7 => Bytes::from_static(b"\0"),
        n => name(n),
    }
}

/// The events one watcher should receive: a linear model over a list of every change.
struct Expected {
    id: WatcherId,
    range: KeyRange,
    next: i64,
    prev_kv: bool,
    fragment: bool,
    /// Events so far of a revision that is sent in fragments.
    partial: usize,
}

type History = Vec<(i64, Bytes, bool)>;

fn record(world: &World, history: &mut History) {
    let from = history.last().map_or(1, |(revision, ..)| *revision);
    let new = world.state.user.log().iter().filter(|change| change.version.revision > from);
    history.extend(new.map(|change| (change.version.revision, change.key.clone(), !change.is_put())));
}

fn check_pull(world: &mut World, expected: &mut Expected, history: &History, max: usize) -> bool {
    let now = world.state.revision(SpaceId::User);
    let due: Vec<_> = history
        .iter()
        .filter(|(revision, key, _)| *revision >= expected.next && expected.range.contains(key))
        .skip(expected.partial)
        .collect();
    match world.batch(expected.id, max) {
        Batch::Idle | Batch::Yield => {
            assert!(due.is_empty(), "events were due");
            expected.next = expected.next.max(now + 1);
        }
        Batch::Compacted { compact_revision } => {
            assert_eq!(compact_revision, world.state.compact_revision(SpaceId::User));
            assert!(expected.next < compact_revision, "no revision it needs was compacted");
            return false;
        }
        Batch::Events(batch) => {
            for (event, (revision, key, is_delete)) in batch.events.iter().zip(&due) {
                let found = (event.kv.mod_revision, &event.kv.key, event.is_delete);
                assert_eq!(found, (*revision, key, *is_delete));
                let live = RangeAt(&world.state).get(key, revision - 1);
                assert_eq!(event.prev_kv, live.filter(|_| expected.prev_kv), "{}", show(event));
            }
            let received = batch.events.len();
            assert!(received <= due.len(), "more than there is");
            let last = due[received - 1].0;
            let of_last = due[..received].iter().filter(|(revision, ..)| *revision == last).count();
            let carried = if due[0].0 == last { expected.partial } else { 0 };
            let is_whole = due.get(received).is_none_or(|(revision, ..)| *revision != last);
            assert!(is_whole || expected.fragment, "a revision was split");
            assert_eq!(batch.fragment, !is_whole);
            (expected.next, expected.partial) =
                if is_whole { (last + 1, 0) } else { (last, carried + of_last) };
        }
    }
    true
}

struct RangeAt<'a>(&'a State);

impl RangeAt<'_> {
    fn get(&self, key: &Bytes, revision: i64) -> Option<KeyValue> {
        let request = crate::RangeRequest { revision, ..crate::RangeRequest::key(key.clone()) };
        if revision <= 0 {
            return None;
        }
        self.0.range(&request).ok()?.kvs.pop()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_sends_exactly_the_model_events(steps in proptest::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        let mut history = History::new();
        let mut watchers: Vec<Expected> = Vec::new();
        for step in steps {
            match step {
                Step::Put(keys) => {
                    let success = keys.iter().map(|key| TxnOp::Put(PutRequest::new(name(*key), "v"))).collect();
                    world.apply(Command::client(Op::Txn(TxnRequest { success, ..TxnRequest::default() })));
                }
                Step::Delete(start, end) => {
                    let delete = DeleteRequest { key: name(start), range_end: end_name(end), prev_kv: false };
                    world.apply(Command::client(Op::Delete(delete)));
                }
                Step::Compact(back) => {
                    let revision = world.state.revision(SpaceId::User) - back;
                    world.compact(revision);
                }
                Step::Create { start, end, back, prev_kv, fragment } => {
                    let start_revision = (world.state.revision(SpaceId::User) - back).max(0);
                    let request = WatchRequest {
                        key: name(start), range_end: end_name(end), start_revision, prev_kv, fragment,
                        ..WatchRequest::default()
                    };
                    let range = KeyRange::new(name(start), end_name(end));
                    let created = world.hub.create(&world.state, request);
                    prop_assert_eq!(created.is_err(), range.is_empty());
                    let now = world.state.revision(SpaceId::User);
                    let next = if start_revision == 0 { now + 1 } else { start_revision };
                    watchers.extend(created.ok().map(|id| Expected { id, range, next, prev_kv, fragment, partial: 0 }));
                }
                Step::Cancel(at) if at < watchers.len() => {
                    let gone = watchers.swap_remove(at);
                    prop_assert!(world.hub.cancel(gone.id));
                }
                Step::Pull(at, max) if at < watchers.len() => {
                    if !check_pull(&mut world, &mut watchers[at], &history, max) {
                        watchers.swap_remove(at);
                    }
                }
                Step::Restore => {
                    world.state = State::restore(world.state.snapshot()).unwrap();
                    world.hub.on_restored(&world.state);
                }
                Step::Cancel(_) | Step::Pull(..) => {}
            }
            record(&world, &mut history);
        }
        for mut watcher in watchers {
            while check_pull(&mut world, &mut watcher, &history, PLENTY) {
                if world.batch(watcher.id, PLENTY) == Batch::Idle {
                    break;
                }
            }
        }
    }
}
