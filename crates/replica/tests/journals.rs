//! Leader and follower on real journals: a minimal driver over simulated disks.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use moim_base::{BrokerId, LeaderEpoch, ManualClock, Offset, TopicId};
use moim_journal::{
    Append, Framing, Journal, JournalId, JournalOptions, PlainFraming, SimDisk, Store, StoreOptions,
};
use moim_replica::log::JournalView;
use moim_replica::message::{Answer, Fetch, Sender};
use moim_replica::{
    BrokerEpoch, DirectoryId, Durability, Effect, InSync, LogView, PartitionId, PartitionState, Replica,
    ResetPolicy, Versioned,
};

const ID: PartitionId = PartitionId { topic: TopicId(5), index: 0 };

struct Node {
    store: Store,
    journal: Arc<Journal>,
    replica: Replica,
    /// The fetch in flight: (id, fetch).
    fetch: Option<(u64, Fetch)>,
    high_watermark: i64,
}

impl Node {
    fn new(node: i32) -> Self {
        let clock = Arc::new(ManualClock::at(1_000));
        let store = Store::open(Path::new("/data"), Arc::new(SimDisk::new()), clock, StoreOptions::default())
            .unwrap();
        let options = JournalOptions {
            folder: "queue/t/Partition-0".into(),
            framing: Arc::new(PlainFraming),
            durability: moim_journal::Durability::Fsync,
            segment_bytes: 1 << 20,
            tag: 0,
        };
        let journal = store.journal(JournalId { incarnation: 5, part: 0 }, options).unwrap();
        let me = sender(node);
        let replica = Replica::new(me, ID, ResetPolicy::LogStart, Offset(0));
        Self { store, journal, replica, fetch: None, high_watermark: 0 }
    }

    /// Makes one call and carries out its effects.
    fn step(&mut self, call: impl FnOnce(&mut Replica, &dyn LogView, &mut Vec<Effect>)) {
        let mut effects = Vec::new();
        call(&mut self.replica, &view(&self.journal), &mut effects);
        let mut at = 0;
        while at < effects.len() {
            match effects[at].clone() {
                Effect::NoteEpoch { epoch, start } => self.journal.note_epoch(epoch.0, start.0),
                Effect::HighWatermark(to) => self.high_watermark = to.0,
                Effect::Fetch { id, fetch, .. } => self.fetch = Some((id, fetch)),
                Effect::Truncate { to } => {
                    self.journal.truncate(to.0).unwrap();
                    let follower = self.replica.follower().unwrap();
                    follower.on_changed(&view(&self.journal), 0, &mut effects);
                }
                Effect::SetStart { start } => self.journal.set_start(start.0).unwrap(),
                Effect::LeadershipEnded | Effect::LowWatermark | Effect::Report { .. } | Effect::Refresh => {}
                other => panic!("not expected here: {other:?}"),
            }
            at += 1;
        }
    }

    fn produce(&mut self, values: std::ops::Range<u8>) {
        for value in values {
            let (epoch, base) = (self.replica.leader().unwrap().epoch().0, self.journal.end());
            append(&self.journal, &PlainFraming::encode(base, base, epoch, 0, &[value]));
            self.replica.leader().unwrap().on_append(Offset(self.journal.end()));
        }
    }

    fn sync(&mut self) {
        while self.store.pump() {}
        self.step(|replica, log, effects| replica.on_durable(log, effects));
    }

    fn frames(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let walked =
            self.journal.for_each_frame(self.journal.start(), self.journal.end(), &mut |_, bytes| {
                frames.push(bytes.to_vec());
                true
            });
        walked.unwrap();
        frames
    }
}

fn view(journal: &Journal) -> JournalView<'_> {
    JournalView { journal, durability: Durability::Fsync }
}

fn append(journal: &Journal, frame: &[u8]) {
    let header = PlainFraming.peek(frame).unwrap();
    assert!(PlainFraming.verify(&frame[..header.len]));
    let append = Append {
        base: header.base,
        last: header.last,
        epoch: header.epoch,
        max_timestamp_ms: 0,
        prefix: &frame[..16],
        body: &bytes::Bytes::copy_from_slice(&frame[16..header.len]),
    };
    journal.append(append).unwrap();
}

fn sender(node: i32) -> Sender {
    Sender { node: BrokerId(node), epoch: BrokerEpoch(10), directory: DirectoryId(node as u64) }
}

fn record(leader: i32, epoch: i32) -> Versioned<PartitionState> {
    let members: Vec<InSync> = [1, 2].iter().map(|node| (*node, 10, *node as u64).into()).collect();
    let mut state = PartitionState::new(members, 1, Durability::Fsync);
    state.leader = Some(BrokerId(leader));
    state.leader_epoch = LeaderEpoch(epoch);
    Versioned { revision: i64::from(epoch) + 1, value: state }
}

/// Lets the follower fetch until there is nothing new, at most `rounds` times.
fn follow(leader: &mut Node, follower: &mut Node, rounds: usize) {
    for _ in 0..rounds {
        let Some((id, fetch)) = follower.fetch.take() else { return };
        let mut answer = None;
        leader.step(|replica, log, effects| {
            answer = Some(replica.on_fetch(&fetch, log, 0, effects).unwrap());
        });
        let answer = answer.unwrap();
        if matches!(answer, Answer::Records { .. }) {
            for frame in leader.frames() {
                if PlainFraming.peek(&frame).unwrap().base == follower.journal.end() {
                    append(&follower.journal, &frame);
                }
            }
        }
        follower.sync();
        follower.step(|replica, log, effects| {
            replica.follower().unwrap().on_answer(id, answer, log, 0, effects);
        });
    }
}

fn see(nodes: &mut [&mut Node], record: &Versioned<PartitionState>) {
    for node in nodes {
        node.step(|replica, log, effects| replica.on_record(record.clone(), log, 0, effects));
    }
}

#[test]
fn former_leader_truncates_records_the_new_leader_never_had() {
    let (mut one, mut two) = (Node::new(1), Node::new(2));
    see(&mut [&mut one, &mut two], &record(1, 0));
    one.produce(0..5);
    one.sync();
    follow(&mut one, &mut two, 4);
    assert_eq!((one.high_watermark, two.journal.durable_end()), (5, 5));
    // Three more, on node 1's disk alone; then node 2 is elected and diverges.
    one.produce(5..8);
    one.sync();
    assert_eq!(one.high_watermark, 5, "node 2 does not have them");
    see(&mut [&mut two], &record(2, 1));
    two.produce(50..52);
    two.sync();
    see(&mut [&mut one], &record(2, 1));
    follow(&mut two, &mut one, 8);
    assert_eq!(one.frames(), two.frames());
    assert_eq!((one.journal.end(), two.high_watermark, one.high_watermark), (7, 7, 7));
    assert_eq!(one.journal.epochs(), [(0, 0), (1, 5)]);
}

#[test]
fn election_without_a_record_does_not_cause_truncation() {
    let (mut one, mut two) = (Node::new(1), Node::new(2));
    see(&mut [&mut one, &mut two], &record(1, 0));
    one.produce(0..3);
    one.sync();
    follow(&mut one, &mut two, 4);
    // Node 1 is elected repeatedly without appending; node 2 never learns of it.
    see(&mut [&mut one], &record(1, 4));
    see(&mut [&mut two, &mut one], &record(2, 6));
    two.produce(3..4);
    two.sync();
    follow(&mut two, &mut one, 8);
    assert_eq!(one.frames(), two.frames());
    assert_eq!(two.high_watermark, 4);
}
