//! Frames of one turn: a batch larger than a frame, a batch larger than the limit, a busy log.

use std::sync::atomic::AtomicUsize;

use moim_base::ManualClock;
use moim_journal::{
    Durability, Journal, JournalId, JournalOptions, PlainFraming, SimDisk, Store, StoreOptions,
};
use moim_wire_resp::OwnedArgs;

use super::super::*;
use crate::cluster;
use crate::effects::{self, FrameLimits};
use crate::log::{self, LocalLog, LogError};

/// A log that accepts a number of frames and is busy afterwards.
struct BusyLog {
    log: LocalLog,
    takes: AtomicUsize,
}

impl ShardLog for BusyLog {
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError> {
        let takes = self.takes.load(Ordering::Relaxed);
        if takes == 0 {
            return Err(LogError::Busy);
        }
        self.takes.store(takes - 1, Ordering::Relaxed);
        self.log.append(base, epoch, time_ms, payload)
    }

    fn journal(&self) -> &Arc<Journal> {
        self.log.journal()
    }

    fn leader_epoch(&self) -> Option<i32> {
        Some(1)
    }

    fn replicas_with(&self, _end: i64) -> usize {
        0
    }
}

/// A primary on a simulated disk.
pub(crate) struct Fixture {
    pub(crate) shared: Arc<Shared>,
    pub(super) clock: Arc<ManualClock>,
    pub(crate) shard: Arc<Shard>,
    log: Arc<BusyLog>,
    pub(super) session: Session,
    _store: Store,
}

const LIMITS: FrameLimits = FrameLimits { frame: 200, batch: 5_000, queue: 2_000 };

impl Fixture {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(ManualClock::at(1_000_000));
        let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
        let store =
            Store::open(std::path::Path::new("/data"), Arc::new(SimDisk::new()), clock.clone(), options)
                .unwrap();
        let options = JournalOptions {
            folder: "slots/shard-0".to_owned(),
            framing: Arc::new(PlainFraming),
            durability: Durability::Fsync,
            segment_bytes: 64 << 20,
            tag: 0,
        };
        let journal = store.journal(JournalId { incarnation: 1, part: 0 }, options).unwrap();
        let log = Arc::new(BusyLog { log: LocalLog::new(journal), takes: AtomicUsize::new(usize::MAX) });
        let shard = Shard::new(0, "0".repeat(40), log.clone(), 1, None);
        shard.set_frame_limits(LIMITS);
        shard.set_role(Role::Primary);
        shard.lock().epoch = 1;
        let shared = Arc::new(Shared::new(clock.clone()));
        shared.view.store(Arc::new(cluster::standalone("0".repeat(40), "host".to_owned(), 1)));
        let mut session = Session::internal();
        session.authenticated = true;
        session.shard = Some(Arc::clone(&shard));
        Self { shared, clock, shard, log, session, _store: store }
    }

    /// Executes commands in one turn: replies and their commit gates.
    pub(crate) fn turn(&mut self, commands: &[&[&str]]) -> Vec<(String, i64)> {
        let mut turn = self.shard.turn(&self.shared).unwrap();
        let mut answers = Vec::new();
        for command in commands {
            let mut out = BytesMut::new();
            let args = OwnedArgs::from_slices(*command);
            let gate = turn.execute(&mut self.session, &args.args(), &mut out);
            answers.push((String::from_utf8_lossy(&out).into_owned(), gate));
        }
        turn.finish();
        answers
    }

    pub(crate) fn frames(&self) -> Vec<(i64, bytes::Bytes)> {
        let journal = self.log.journal();
        match journal.end() {
            0 => Vec::new(),
            end => log::read(journal, 0, end, usize::MAX).unwrap(),
        }
    }

    /// The state of a replica after these frames, when the primary that wrote them has failed.
    fn replayed(&self, frames: &[(i64, bytes::Bytes)]) -> State {
        let mut state = State::empty();
        for (_, payload) in frames {
            let frame = effects::parse(payload).unwrap();
            state.replay_frame(&self.shared, &mut Session::internal(), frame).unwrap();
        }
        state.groups.discard();
        state
    }
}

fn keys(state: &State) -> Vec<(String, usize)> {
    let mut keys = Vec::new();
    state.db.for_each(|key, item, _| {
        let crate::keyspace::Item::Str(value) = item else { panic!("a string") };
        keys.push((String::from_utf8_lossy(key).into_owned(), value.len()));
    });
    keys.sort();
    keys
}

#[test]
fn a_transaction_larger_than_a_frame_is_replayed_whole_or_not_at_all() {
    let mut fixture = Fixture::new();
    let value = "v".repeat(150);
    let answers = fixture.turn(&[
        &["SET", "{a}before", "1"],
        &["MULTI"],
        &["SET", "{a}1", &value],
        &["SET", "{a}2", &value],
        &["SET", "{a}3", &value],
        &["EXEC"],
        &["GET", "{b}other"],
        &["SET", "{a}after", "1"],
    ]);
    let gates: Vec<i64> = answers.iter().map(|(_, gate)| *gate).collect();
    let frames = fixture.frames();
    let end = frames.len() as i64;
    assert_eq!(gates[0], 1, "its own frame");
    assert!(end > 4, "a group of several frames");
    assert_eq!(gates[5], end - 1, "the reply waits for the last frame of the group");
    assert_eq!(gates[6], end - 1, "and so does everything that the group may have changed");
    assert_eq!(gates[7], end);
    for cut in 0..=frames.len() {
        let state = fixture.replayed(&frames[..cut]);
        let mut wanted = Vec::new();
        if cut > 0 {
            wanted.push(("{a}before".to_owned(), 1));
        }
        if cut as i64 >= gates[5] {
            wanted.extend(["{a}1", "{a}2", "{a}3"].map(|key| (key.to_owned(), 150)));
        }
        if cut as i64 >= gates[7] {
            wanted.push(("{a}after".to_owned(), 1));
        }
        wanted.sort();
        assert_eq!(keys(&state), wanted, "{cut} frames");
    }
}

#[test]
fn a_value_on_either_side_of_the_frame_limit_is_read_back() {
    let mut fixture = Fixture::new();
    for size in 150..=450 {
        let before = fixture.log.journal().end() as usize;
        let answers = fixture.turn(&[&["SET", "k", &"v".repeat(size)]]);
        assert_eq!(answers[0], ("+OK\r\n".to_owned(), fixture.log.journal().end()));
        let frames = fixture.frames().split_off(before);
        assert!(frames.iter().all(|(_, payload)| payload.len() <= LIMITS.frame + 5), "{size}");
        assert_eq!(keys(&fixture.replayed(&frames)), [("k".to_owned(), size)]);
        assert!(frames.len() == 1 || keys(&fixture.replayed(&frames[..frames.len() - 1])).is_empty());
    }
}

#[test]
fn the_call_that_exceeds_the_batch_limit_fails_and_nothing_of_it_is_recorded() {
    let mut fixture = Fixture::new();
    let script = "for n = 1, 9 do redis.call('SET', KEYS[1] .. n, string.rep('v', 1000)) end";
    let answers = fixture.turn(&[&["EVAL", script, "1", "{a}"]]);
    assert!(answers[0].0.contains("exceed 5000 bytes"), "{answers:?}");
    assert_eq!(answers[0].1, fixture.log.journal().end(), "the error reply waits for the effects before it");
    let fill = "return redis.call('SET', KEYS[1], string.rep('v', 3000))";
    let answers =
        fixture.turn(&[&["MULTI"], &["EVAL", fill, "1", "{b}1"], &["EVAL", fill, "1", "{b}2"], &["EXEC"]]);
    assert!(answers[3].0.starts_with("*2\r\n+OK\r\n-ERR the changes of one"), "{answers:?}");
    let large = "v".repeat(3_000);
    let answers = fixture.turn(&[&["MULTI"], &["SET", "{c}1", &large], &["SET", "{c}2", &large], &["EXEC"]]);
    assert!(answers[3].0.starts_with("-EXECABORT"), "{answers:?}");
    let wanted = ["{a}1", "{a}2", "{a}3", "{a}4"].map(|key| (key.to_owned(), 1_000));
    let wanted: Vec<_> = wanted.into_iter().chain([("{b}1".to_owned(), 3_000)]).collect();
    assert_eq!(keys(&fixture.replayed(&fixture.frames())), wanted);
    assert_eq!(keys(&fixture.shard.lock()), wanted, "the primary has no other keys");
}

#[test]
fn effects_queued_for_a_busy_journal_keep_their_offset_and_their_time() {
    let mut fixture = Fixture::new();
    fixture.log.takes.store(2, Ordering::Relaxed);
    let large = "v".repeat(500);
    let first = fixture.turn(&[&["SET", "a", &large], &["SET", "b", "1", "PXAT", "1000010"]]);
    // Past the expiry of the queued effects: replay must not treat the key as expired.
    fixture.clock.advance_ms(100);
    let second = fixture.turn(&[&["PEXPIREAT", "c", "1"], &["SET", "c", "1"]]);
    assert_eq!(fixture.log.journal().end(), 2, "the group is incomplete");
    assert!(keys(&fixture.replayed(&fixture.frames())).is_empty());
    let gates: Vec<i64> = first.iter().chain(&second).map(|(_, gate)| *gate).collect();
    assert_eq!(gates[..2], [3, 4]);
    assert_eq!(gates[3], 5);
    assert_eq!(fixture.shard.lock().end(), 5);
    fixture.log.takes.store(usize::MAX, Ordering::Relaxed);
    fixture.turn(&[]);
    let frames = fixture.frames();
    assert_eq!(frames.len(), 5);
    let state = fixture.replayed(&frames[..4]);
    assert_eq!(keys(&state), [("a".to_owned(), 500), ("b".to_owned(), 1)]);
    assert_eq!(fixture.shard.lock().fx.queued(), 0);
}

#[test]
fn writes_are_held_while_the_append_queue_is_long() {
    let mut fixture = Fixture::new();
    fixture.log.takes.store(0, Ordering::Relaxed);
    fixture.turn(&[&["SET", "a", &"v".repeat(1_000)]]);
    assert!(!fixture.session.held);
    fixture.turn(&[&["SET", "b", &"v".repeat(1_500)]]);
    assert!(!fixture.session.held, "the write that exceeds the limit is accepted");
    fixture.turn(&[&["SET", "c", "1"]]);
    assert!(fixture.session.held);
    let read = fixture.turn(&[&["GET", "other"]]);
    assert!(!fixture.session.held && read[0].0 == "$-1\r\n");
    fixture.log.takes.store(usize::MAX, Ordering::Relaxed);
    fixture.turn(&[]);
    fixture.turn(&[&["SET", "c", "1"]]);
    assert!(!fixture.session.held);
    let wanted = [("a", 1_000), ("b", 1_500), ("c", 1)].map(|(key, len)| (key.to_owned(), len));
    assert_eq!(keys(&fixture.replayed(&fixture.frames())), wanted);
}
