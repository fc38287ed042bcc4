//! A leader on node 1 with followers 2 and 3.

use moim_base::TopicId;

use super::*;
use crate::message::Sender;
use crate::toy::{Entry, ToyLog};
use crate::types::{BrokerEpoch, DirectoryId};

const ID: PartitionId = PartitionId { topic: TopicId(1), index: 0 };
const EPOCH: LeaderEpoch = LeaderEpoch(3);

fn sender(node: i32) -> Sender {
    Sender {
        node: BrokerId(node),
        epoch: BrokerEpoch(100 + i64::from(node)),
        directory: DirectoryId(node as u64),
    }
}

fn record(isr: &[i32], min_isr: u32) -> Versioned<PartitionState> {
    let members = [1, 2, 3].map(|node| (node, 100 + i64::from(node), node as u64).into());
    let mut state = PartitionState::new(members.to_vec(), min_isr, Durability::Fsync);
    state.isr.retain(|member| isr.contains(&member.node.0));
    state.leader_epoch = EPOCH;
    Versioned { revision: 10, value: state }
}

fn report(from: Sender, written: i64, durable: i64) -> Report {
    let (written, durable) = (Offset(written), Offset(durable));
    Report { from, leader_epoch: EPOCH, record: 10, written, durable, log_start: Offset(0) }
}

struct Led {
    leader: Leader,
    log: ToyLog,
    effects: Vec<Effect>,
}

impl Led {
    fn new(record: Versioned<PartitionState>, entries: u64) -> Self {
        let mut log = ToyLog::default();
        for value in 0..entries {
            log.append(Entry { epoch: LeaderEpoch(1), value });
        }
        log.sync(Offset(entries as i64));
        let mut effects = Vec::new();
        let leader = Leader::become_leader(BrokerId(1), ID, record, &log, Offset(0), 0, &mut effects);
        assert_eq!(effects[0], Effect::NoteEpoch { epoch: EPOCH, start: Offset(entries as i64) });
        log.note_epoch(EPOCH, Offset(entries as i64));
        effects.clear();
        Self { leader, log, effects }
    }

    fn append(&mut self, count: u64) {
        for value in 0..count {
            self.log.append(Entry { epoch: EPOCH, value });
        }
        self.leader.on_append(self.log.end());
    }

    fn sync(&mut self) {
        self.log.sync(self.log.end());
        self.leader.on_durable(self.log.written(), self.log.durable(), &mut self.effects);
    }

    fn fetch(&mut self, node: i32, offset: i64, durable: i64, now_ms: u64) -> Result<Answer, Refusal> {
        let last_epoch = self.log.get(Offset(offset - 1)).map(|entry| entry.epoch);
        self.fetch_as(
            Fetch {
                from: sender(node),
                leader_epoch: EPOCH,
                record: 10,
                offset: Offset(offset),
                last_epoch,
                written: Offset(offset),
                durable: Offset(durable),
                log_start: Offset(0),
                cleaned_below: Offset(0),
            },
            now_ms,
        )
    }

    fn fetch_as(&mut self, fetch: Fetch, now_ms: u64) -> Result<Answer, Refusal> {
        self.leader.on_fetch(&fetch, &self.log, now_ms, &mut self.effects)
    }

    fn hw(&self) -> i64 {
        self.leader.high_watermark().0
    }

    /// The proposals so far: (id, proposed in-sync nodes).
    fn proposals(&mut self) -> Vec<(u64, Vec<i32>)> {
        let effects = std::mem::take(&mut self.effects);
        let made = effects.into_iter().filter_map(|effect| match effect {
            Effect::Propose(proposal) => {
                let isr = proposal.change.next.unwrap().isr;
                Some((proposal.id, isr.iter().map(|member| member.node.0).collect()))
            }
            _ => None,
        });
        made.collect()
    }
}

#[test]
fn high_watermark_waits_for_stable_storage_of_whole_isr() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    led.append(10);
    led.fetch(2, 10, 10, 0).unwrap();
    led.fetch(3, 10, 4, 0).unwrap();
    assert_eq!(led.hw(), 0, "our own disk has nothing");
    led.sync();
    assert_eq!(led.hw(), 4);
    let report = report(sender(3), 10, 9);
    led.leader.on_report(&report, 0, &mut led.effects).unwrap();
    assert_eq!(led.hw(), 9);
    // An overtaken fetch reports less; the high watermark stays.
    led.fetch(3, 10, 4, 0).unwrap();
    assert_eq!(led.hw(), 9);
}

#[test]
fn replicated_durability_commits_written_records() {
    let mut state = record(&[1, 2, 3], 2);
    state.value.durability = Durability::Replicated;
    let mut led = Led::new(state, 0);
    led.append(10);
    led.log.write(Offset(10));
    led.leader.on_durable(Offset(10), Offset(0), &mut led.effects);
    led.fetch(2, 10, 0, 0).unwrap();
    led.fetch(3, 7, 0, 0).unwrap();
    assert_eq!(led.hw(), 7);
}

#[test]
fn follower_counts_only_after_a_matching_fetch() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 5);
    led.sync();
    let report = report(sender(2), 5, 5);
    led.leader.on_report(&report, 0, &mut led.effects).unwrap();
    led.fetch(3, 5, 5, 0).unwrap();
    assert_eq!(led.hw(), 0, "node 2 has only said so");
    assert!(!led.leader.has_committed_in_epoch());
    led.fetch(2, 5, 5, 0).unwrap();
    assert_eq!(led.hw(), 5);
    assert!(led.leader.has_committed_in_epoch());
}

#[test]
fn fetch_with_another_leader_epoch_is_refused() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 5);
    let fetch = |epoch| Fetch {
        from: sender(2),
        leader_epoch: LeaderEpoch(epoch),
        record: 10,
        offset: Offset(5),
        last_epoch: Some(LeaderEpoch(1)),
        written: Offset(5),
        durable: Offset(5),
        log_start: Offset(0),
        cleaned_below: Offset(0),
    };
    assert_eq!(led.fetch_as(fetch(2), 0), Err(Refusal::FencedEpoch(EPOCH)));
    assert_eq!(led.fetch_as(fetch(4), 0), Err(Refusal::UnknownEpoch(EPOCH)));
    assert_eq!(led.effects, [Effect::Refresh], "another node knows a newer leader epoch");
    let stranger = Fetch { from: sender(9), ..fetch(3) };
    assert_eq!(led.fetch_as(stranger, 0), Err(Refusal::NotReplica));
    let ghost = Sender { epoch: BrokerEpoch(1), ..sender(2) };
    led.fetch_as(fetch(3), 0).unwrap();
    assert_eq!(led.fetch_as(Fetch { from: ghost, ..fetch(3) }, 0), Err(Refusal::StaleBroker));
}

#[test]
fn diverging_follower_log_gets_epoch_end_offset() {
    // Ours: epoch 1 at 0..5, epoch 3 from 5.
    let mut led = Led::new(record(&[1, 2, 3], 2), 5);
    led.append(3);
    let mut check = |offset, last_epoch: Option<i32>, expected| {
        let fetch = Fetch {
            from: sender(2),
            leader_epoch: EPOCH,
            record: 10,
            offset: Offset(offset),
            last_epoch: last_epoch.map(LeaderEpoch),
            written: Offset(offset),
            durable: Offset(offset),
            log_start: Offset(0),
            cleaned_below: Offset(0),
        };
        assert_eq!(led.fetch_as(fetch, 0), Ok(expected), "{offset} in {last_epoch:?}");
    };
    let parts = |epoch, end| Answer::Diverging { epoch: Some(LeaderEpoch(epoch)), end: Offset(end) };
    let records = Answer::Records { high_watermark: Offset(0), log_start: Offset(0), log_end: Offset(8) };
    check(7, Some(1), parts(1, 5));
    check(6, Some(2), parts(1, 5));
    check(9, Some(3), parts(3, 8));
    check(5, Some(1), records);
    check(8, Some(3), records);
    check(0, None, records);
    check(1, Some(0), Answer::Diverging { epoch: None, end: Offset(0) });
}

#[test]
fn fetch_below_log_start_is_out_of_range() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 5);
    led.log.set_start(Offset(3));
    assert_eq!(led.fetch(2, 2, 2, 0), Ok(Answer::OutOfRange { log_start: Offset(3) }));
    assert!(matches!(led.fetch(2, 3, 3, 0), Ok(Answer::Records { .. })));
}

#[test]
fn follower_log_of_forgotten_epochs_is_reset() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 5);
    led.append(3);
    led.log.set_start(Offset(5));
    let fetch = Fetch {
        from: sender(2),
        leader_epoch: EPOCH,
        record: 10,
        offset: Offset(5),
        last_epoch: Some(LeaderEpoch(1)),
        written: Offset(5),
        durable: Offset(5),
        log_start: Offset(0),
        cleaned_below: Offset(0),
    };
    assert_eq!(led.fetch_as(fetch, 0), Ok(Answer::OutOfRange { log_start: Offset(5) }));
    let empty = Fetch { last_epoch: None, ..fetch };
    assert!(matches!(led.fetch_as(empty, 0), Ok(Answer::Records { .. })));
    let ahead = Fetch { offset: Offset(6), ..fetch };
    assert_eq!(led.fetch_as(ahead, 0), Ok(Answer::Diverging { epoch: None, end: Offset(5) }));
}

#[test]
fn caught_up_follower_is_proposed_for_isr_and_counts_at_once() {
    let mut led = Led::new(record(&[1, 2], 1), 5);
    led.append(5);
    led.sync();
    led.fetch(2, 10, 10, 0).unwrap();
    assert_eq!(led.hw(), 10);
    led.fetch(3, 9, 9, 0).unwrap();
    assert_eq!(led.proposals(), [], "behind the high watermark");
    led.fetch(3, 10, 10, 0).unwrap();
    assert_eq!(led.proposals(), [(1, vec![1, 2, 3])]);
    led.append(1);
    led.sync();
    led.fetch(2, 11, 11, 0).unwrap();
    assert_eq!(led.hw(), 10, "node 3 may be in sync already");
    led.leader.on_outcome(1, Outcome::Done { revision: 11 }, 0, &mut led.effects);
    led.fetch(3, 11, 11, 0).unwrap();
    assert_eq!(led.hw(), 11);
}

#[test]
fn refused_isr_expansion_is_not_waited_for() {
    let mut led = Led::new(record(&[1, 2], 1), 0);
    led.fetch(3, 0, 0, 0).unwrap();
    assert_eq!(led.proposals().len(), 1);
    led.append(1);
    led.sync();
    led.fetch(2, 1, 1, 0).unwrap();
    assert_eq!(led.hw(), 0);
    led.leader.on_outcome(1, Outcome::Conflict, 0, &mut led.effects);
    assert_eq!(led.hw(), 1);
    assert!(led.effects.contains(&Effect::Refresh));
    led.fetch(3, 1, 1, 10).unwrap();
    assert_eq!(led.proposals(), [], "not at once");
    led.fetch(3, 1, 1, 300).unwrap();
    assert_eq!(led.proposals(), [(2, vec![1, 2, 3])]);
}

#[test]
fn unknown_outcome_keeps_maximal_isr_until_next_record_revision() {
    let mut led = Led::new(record(&[1, 2], 1), 0);
    led.fetch(3, 0, 0, 0).unwrap();
    assert_eq!(led.proposals().len(), 1);
    led.leader.on_outcome(1, Outcome::Unknown, 0, &mut led.effects);
    led.append(1);
    led.sync();
    led.fetch(2, 1, 1, 0).unwrap();
    // The old record, read again: the proposal may still be in flight.
    led.leader.on_record(record(&[1, 2], 1), 0, &mut led.effects);
    assert_eq!(led.hw(), 0);
    // Node 3 is gone meanwhile. Rewriting the record settles it.
    led.leader.on_disconnected(BrokerId(3), 0);
    led.leader.on_tick(1_000, &mut led.effects);
    assert_eq!(led.proposals(), [(2, vec![1, 2])]);
    assert_eq!(led.hw(), 0);
    led.leader.on_outcome(2, Outcome::Done { revision: 12 }, 1_000, &mut led.effects);
    assert_eq!(led.hw(), 1);
}

#[test]
fn slow_follower_leaves_isr_and_commits_continue() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    led.append(10);
    led.sync();
    led.fetch(2, 10, 10, 0).unwrap();
    led.fetch(3, 5, 5, 0).unwrap();
    led.leader.on_tick(10_000, &mut led.effects);
    assert_eq!(led.proposals(), [], "not yet");
    led.leader.on_tick(10_001, &mut led.effects);
    assert_eq!(led.proposals(), [(1, vec![1, 2])]);
    assert_eq!(led.hw(), 5, "only a proposal");
    led.leader.on_outcome(1, Outcome::Done { revision: 11 }, 10_001, &mut led.effects);
    assert_eq!(led.hw(), 10);
}

#[test]
fn follower_under_steady_load_stays_in_sync() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    for now in 1..200u64 {
        led.append(1);
        led.sync();
        let behind = (now as i64 - 3).max(0);
        led.fetch(2, behind, behind, now * 100).unwrap();
        led.fetch(3, behind, behind, now * 100).unwrap();
    }
    assert_eq!(led.proposals(), []);
    assert_eq!(led.hw(), 196);
}

#[test]
fn broken_connection_shortens_the_lag_timeout() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    led.append(1);
    led.sync();
    led.fetch(2, 1, 1, 0).unwrap();
    led.fetch(3, 0, 0, 0).unwrap();
    led.leader.on_disconnected(BrokerId(3), 100);
    led.leader.on_tick(500, &mut led.effects);
    assert_eq!(led.proposals(), []);
    led.leader.on_tick(601, &mut led.effects);
    assert_eq!(led.proposals(), [(1, vec![1, 2])]);
}

#[test]
fn below_min_isr_nothing_commits_and_appends_are_refused() {
    let mut led = Led::new(record(&[1, 2], 2), 0);
    assert_eq!(led.leader.admit(), Ok(()));
    led.append(1);
    led.sync();
    let mut alone = record(&[1], 2);
    alone.revision = 11;
    led.leader.on_record(alone, 0, &mut led.effects);
    assert_eq!(led.effects, [Effect::UnderMinIsr, Effect::LowWatermark]);
    assert_eq!(led.hw(), 0);
    assert_eq!(led.leader.admit(), Err(AckError::NotEnoughReplicas));
}

#[test]
fn dropped_and_re_added_replica_is_not_confused_with_its_former_log() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    led.append(2);
    led.sync();
    let late = Fetch {
        from: sender(3),
        leader_epoch: EPOCH,
        record: 10,
        offset: Offset(2),
        last_epoch: Some(EPOCH),
        written: Offset(2),
        durable: Offset(2),
        log_start: Offset(0),
        cleaned_below: Offset(0),
    };
    let mut without = record(&[1, 2], 2);
    without.revision = 11;
    without.value.replicas.retain(|node| node.0 != 3);
    led.leader.on_record(without, 0, &mut led.effects);
    assert_eq!(led.fetch_as(late, 0), Err(Refusal::NotReplica));
    let mut again = record(&[1, 2], 2);
    again.revision = 12;
    led.leader.on_record(again, 0, &mut led.effects);
    // Its log was deleted; this fetch was already in flight.
    assert_eq!(led.fetch_as(late, 0), Err(Refusal::NotReplica));
    let report = report(sender(3), 2, 2);
    assert_eq!(led.leader.on_report(&report, 0, &mut led.effects), Err(Refusal::NotReplica));
    assert_eq!(led.leader.progress_of(BrokerId(3)), None);
    let new = Fetch {
        record: 12,
        offset: Offset(0),
        last_epoch: None,
        written: Offset(0),
        durable: Offset(0),
        log_start: Offset(0),
        cleaned_below: Offset(0),
        ..late
    };
    assert!(matches!(led.fetch_as(new, 0), Ok(Answer::Records { .. })));
}

#[test]
fn follower_progress_is_reset_by_a_new_broker_epoch() {
    let mut led = Led::new(record(&[1, 2], 2), 0);
    led.append(2);
    led.sync();
    led.fetch(2, 1, 1, 0).unwrap();
    assert_eq!(led.hw(), 1);
    let again = Sender { epoch: BrokerEpoch(500), ..sender(2) };
    let report = report(again, 2, 2);
    led.leader.on_report(&report, 0, &mut led.effects).unwrap();
    assert_eq!(led.hw(), 1, "its log is not known to be ours");
    let fetch = Fetch {
        from: again,
        leader_epoch: EPOCH,
        record: 10,
        offset: Offset(1),
        last_epoch: Some(EPOCH),
        written: Offset(1),
        durable: Offset(1),
        log_start: Offset(0),
        cleaned_below: Offset(0),
    };
    led.fetch_as(fetch, 0).unwrap();
    assert_eq!(led.proposals(), [(1, vec![1, 2])], "the entry is to name the new run");
}

#[test]
fn fsync_durability_is_recorded_only_once_committed_records_are_durable() {
    let mut state = record(&[1, 2], 2);
    state.value.durability = Durability::Replicated;
    let mut led = Led::new(state, 0);
    led.append(4);
    led.log.write(Offset(4));
    led.leader.on_durable(Offset(4), Offset(0), &mut led.effects);
    led.fetch(2, 4, 0, 0).unwrap();
    assert_eq!(led.hw(), 4);
    led.leader.want_durability(Durability::Fsync, 0, &mut led.effects);
    assert_eq!(led.proposals(), []);
    led.sync();
    led.append(1);
    led.log.write(Offset(5));
    led.leader.on_durable(Offset(5), Offset(4), &mut led.effects);
    led.fetch(2, 5, 3, 0).unwrap();
    assert_eq!((led.hw(), led.proposals()), (4, vec![]), "node 2 has not synced what is committed");
    led.fetch(2, 5, 4, 0).unwrap();
    assert_eq!(led.proposals(), [(1, vec![1, 2])]);
}

#[test]
fn low_watermark_follows_the_least_log_start_of_the_isr() {
    let mut led = Led::new(record(&[1, 2], 1), 5);
    led.sync();
    for node in [2, 3] {
        led.fetch(node, 5, 5, 0).unwrap();
    }
    led.effects.clear();
    assert_eq!(led.leader.low_watermark(Offset(3)), Offset(0));
    // A replica outside the in-sync set does not count.
    let gone = |node| Report { log_start: Offset(3), ..report(sender(node), 5, 5) };
    led.leader.on_report(&gone(2), 0, &mut led.effects).unwrap();
    assert!(led.effects.contains(&Effect::LowWatermark));
    assert_eq!(led.leader.low_watermark(Offset(3)), Offset(3));
    // A follower that was reset may be behind again.
    led.fetch(2, 5, 5, 0).unwrap();
    assert_eq!(led.leader.low_watermark(Offset(3)), Offset(0));
}

#[test]
fn stalled_followers_leave_isr_one_at_a_time_and_only_above_min_isr() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    led.append(4);
    let fetch = |led: &mut Led, node: i32, offset: i64, durable: i64, now_ms: u64| {
        let fetch = Fetch {
            from: sender(node),
            leader_epoch: EPOCH,
            record: 10,
            offset: Offset(offset),
            last_epoch: (offset > 0).then_some(EPOCH),
            written: Offset(durable),
            durable: Offset(durable),
            log_start: Offset(0),
            cleaned_below: Offset(0),
        };
        led.leader.on_fetch(&fetch, &led.log, now_ms, &mut led.effects).unwrap();
    };
    let proposed = |led: &mut Led| {
        let proposals = led.effects.drain(..).filter_map(|effect| match effect {
            Effect::Propose(proposal) => proposal.change.next,
            _ => None,
        });
        proposals.map(|next| next.isr.iter().map(|member| member.node.0).collect()).collect::<Vec<Vec<i32>>>()
    };
    for now_ms in (200..1_000).step_by(200) {
        led.leader.on_tick(now_ms, &mut led.effects);
    }
    // Both have received everything; neither disk makes progress.
    for node in [2, 3] {
        fetch(&mut led, node, 4, 0, 1_000);
    }
    for now_ms in (1_200..=2_400).step_by(200) {
        led.leader.on_tick(now_ms, &mut led.effects);
        assert_eq!(proposed(&mut led), Vec::<Vec<i32>>::new(), "{now_ms}");
    }
    // Any progress of a follower, however small, restarts its timer.
    led.leader.on_report(&report(sender(3), 1, 1), 2_400, &mut led.effects).unwrap();
    led.leader.on_tick(2_600, &mut led.effects);
    assert_eq!(proposed(&mut led), [[1, 3]]);
    // The other follower is the last above the minimum: it stays in the in-sync set.
    led.leader.on_outcome(1, Outcome::Done { revision: 11 }, 2_610, &mut led.effects);
    for now_ms in (2_800..6_000).step_by(200) {
        led.leader.on_tick(now_ms, &mut led.effects);
    }
    assert_eq!(proposed(&mut led), Vec::<Vec<i32>>::new());
}

#[test]
fn paused_leader_does_not_count_its_pause_as_follower_lag() {
    let mut led = Led::new(record(&[1, 2, 3], 2), 0);
    led.append(4);
    for node in [2, 3] {
        let fetch = Fetch {
            from: sender(node),
            leader_epoch: EPOCH,
            record: 10,
            offset: Offset(4),
            last_epoch: Some(EPOCH),
            written: Offset(0),
            durable: Offset(0),
            log_start: Offset(0),
            cleaned_below: Offset(0),
        };
        led.leader.on_fetch(&fetch, &led.log, 100, &mut led.effects).unwrap();
    }
    led.leader.on_tick(200, &mut led.effects);
    led.leader.on_tick(5_000, &mut led.effects);
    led.leader.on_tick(5_200, &mut led.effects);
    assert!(!led.effects.iter().any(|effect| matches!(effect, Effect::Propose(_))), "{:?}", led.effects);
}
