//! A controller over a repository that accepts every write whose conditions hold.

use super::*;
use crate::state::InSync;
use crate::transition::Expected;
use crate::types::DirectoryId;

struct World {
    controller: Controller,
    records: BTreeMap<PartitionId, Versioned<PartitionState>>,
    members: BTreeMap<BrokerId, Member>,
    revision: i64,
    now_ms: u64,
    log_end_requests: Vec<(BrokerId, PartitionId)>,
    /// The log ends set by a test; all others are equal. `None` does not answer.
    ends: BTreeMap<BrokerId, Option<LogEnd>>,
}

const TOPIC: TopicId = TopicId(1);

fn id(index: u32) -> PartitionId {
    PartitionId { topic: TOPIC, index }
}

fn topic(partitions: u32) -> Topic {
    Topic {
        id: TOPIC,
        key: crate::keys::topic("orders"),
        name: "orders".into(),
        create_revision: 1,
        partitions,
        factor: None,
        assignment: Vec::new(),
        min_isr: None,
        durability: Durability::Fsync,
        unclean: false,
        fenced: false,
    }
}

impl World {
    fn new(nodes: i32) -> Self {
        let mut world = Self {
            controller: Controller::new(7, ControllerTuning::default()),
            records: BTreeMap::new(),
            members: BTreeMap::new(),
            revision: 1_000,
            now_ms: 0,
            log_end_requests: Vec::new(),
            ends: BTreeMap::new(),
        };
        for node in 1..=nodes {
            world.start(node, None);
        }
        world
    }

    fn start(&mut self, node: i32, intact_since: Option<i64>) {
        self.revision += 1;
        let member = Member {
            node: BrokerId(node),
            epoch: BrokerEpoch(self.revision),
            directory: DirectoryId(node as u64),
            intact_since: intact_since.map(BrokerEpoch),
            damaged: vec![],
        };
        self.join(member);
    }

    fn join(&mut self, member: Member) {
        self.members.insert(member.node, member.clone());
        self.controller.on_member(member, self.now_ms);
    }

    fn order(&mut self, node: i32, order: Order) {
        self.controller.on_node(Node { id: BrokerId(node), zone: String::new(), order });
    }

    fn kill(&mut self, node: i32) {
        self.members.remove(&BrokerId(node));
        self.controller.on_member_lost(BrokerId(node));
    }

    /// Decides and writes until nothing is left to do. Returns the number of transactions.
    fn settle(&mut self) -> usize {
        let mut transactions = 0;
        for _ in 0..1_000 {
            let plan = self.controller.decide(self.now_ms);
            let answered = self.answer(&plan.log_end_requests);
            self.log_end_requests.extend(plan.log_end_requests);
            if plan.changes.is_empty() && !answered {
                return transactions;
            }
            for batch in batch::pack(plan.changes, Some(self.controller.term())) {
                transactions += 1;
                self.revision += 1;
                for change in batch.changes {
                    self.write(change);
                }
            }
        }
        panic!("the controller never rests");
    }

    fn answer(&mut self, log_end_requests: &[(BrokerId, PartitionId)]) -> bool {
        let equal = LogEnd { epoch: LeaderEpoch(0), end: Offset(0) };
        let mut answered = false;
        for (node, partition) in log_end_requests {
            let end = self.ends.get(node).copied().unwrap_or(Some(equal));
            if let (Some(member), Some(end)) = (self.members.get(node), end) {
                self.controller.on_log_end(*partition, *node, member.epoch, end);
                answered = true;
            }
        }
        answered
    }

    fn write(&mut self, change: Change) {
        for (node, epoch) in &change.members {
            assert_eq!(self.members.get(node).map(|m| m.epoch), Some(*epoch), "a member is compared");
        }
        let found = self.records.get(&change.partition).map(|record| record.revision);
        match change.expected {
            Expected::Absent => assert_eq!(found, None),
            Expected::Revision(revision) => assert_eq!(found, Some(revision)),
        }
        let record = change.next.map(|value| Versioned { revision: self.revision, value });
        match &record {
            Some(record) => self.records.insert(change.partition, record.clone()),
            None => self.records.remove(&change.partition),
        };
        self.controller.on_record(change.partition, record);
    }

    /// Another writer (a leader) changes a record.
    fn rewrite(&mut self, id: PartitionId, change: impl FnOnce(&mut PartitionState)) {
        self.revision += 1;
        let record = self.records.get_mut(&id).unwrap();
        change(&mut record.value);
        record.value.check().unwrap();
        record.revision = self.revision;
        self.controller.on_record(id, Some(record.clone()));
    }

    /// Every live replica is in sync, as after the leader saw it catch up.
    fn catch_up(&mut self) {
        for index in self.records.keys().copied().collect::<Vec<_>>() {
            let members = self.members.clone();
            self.rewrite(index, |state| {
                if state.leader.is_none() {
                    return;
                }
                for node in &state.replicas {
                    if let Some(member) = members.get(node).filter(|_| state.in_sync(*node).is_none()) {
                        state.isr.push(member.in_sync());
                        state.eligible.clear();
                        state.last_known.clear();
                    }
                }
            });
        }
    }

    fn state(&self, index: u32) -> &PartitionState {
        &self.records[&id(index)].value
    }

    fn leaders(&self) -> BTreeMap<Option<i32>, usize> {
        let mut counts = BTreeMap::new();
        for record in self.records.values() {
            *counts.entry(record.value.leader.map(|node| node.0)).or_default() += 1;
        }
        counts
    }

    fn nodes(members: &[InSync]) -> Vec<i32> {
        let mut nodes: Vec<i32> = members.iter().map(|member| member.node.0).collect();
        nodes.sort_unstable();
        nodes
    }
}

#[test]
fn new_topic_is_spread_over_nodes() {
    let mut world = World::new(5);
    world.controller.on_topic(topic(100));
    world.settle();
    assert_eq!(world.records.len(), 100);
    assert!(world.leaders().values().all(|count| (19..=21).contains(count)), "{:?}", world.leaders());
    assert!((1..=5).all(|node| world.controller.replicas_of(BrokerId(node)) == 60));
    assert_eq!((world.state(0).min_isr, world.state(0).leader_epoch), (2, LeaderEpoch(0)));
}

#[test]
fn lost_node_loses_leaderships_and_leaves_every_isr() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(30));
    world.settle();
    world.kill(2);
    world.settle();
    assert_eq!(world.leaders().values().sum::<usize>(), 30);
    assert_eq!(world.leaders().get(&Some(2)), None);
    for record in world.records.values() {
        assert_eq!(World::nodes(&record.value.isr), [1, 3]);
        assert_eq!(record.value.eligible, [], "two are enough");
    }
    let led = world.leaders();
    assert_eq!((led[&Some(1)], led[&Some(3)]), (15, 15), "the load is shared");
}

#[test]
fn ten_thousand_partitions_fail_over_in_a_bounded_number_of_steps() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(10_000));
    world.settle();
    let before = world.controller.records_examined();
    world.kill(1);
    let transactions = world.settle();
    // Every record names node 1. Each is examined when the node is lost, again when its candidates have answered or
    // its deferral has ended, and again when its change is seen.
    assert!(
        world.controller.records_examined() - before <= 30_000,
        "{} records examined",
        world.controller.records_examined() - before
    );
    assert!(transactions <= 82, "{transactions} transactions");
    assert_eq!(world.leaders(), [(Some(2), 5_000), (Some(3), 5_000)].into());
    // The first transactions are for partitions without a leader.
    let mut world = World::new(6);
    world.controller.on_topic(topic(600));
    world.settle();
    let before = world.controller.records_examined();
    world.kill(1);
    let plan = world.controller.decide(world.now_ms);
    assert_eq!(world.controller.records_examined() - before, 300, "only what node 1 has a part in");
    assert!(plan.changes.is_empty(), "all else waits for the elections");
    assert!(world.answer(&plan.log_end_requests));
    let plan = world.controller.decide(world.now_ms);
    let led = |change: &Change| {
        let state = change.next.as_ref().unwrap();
        world.records[&change.partition].value.leader != state.leader
    };
    assert_eq!(plan.changes.iter().filter(|change| led(change)).count(), 100);
    assert_eq!(plan.changes.len(), 100);
    assert_eq!(world.controller.decide(world.now_ms + 100).changes.len(), 200);
}

#[test]
fn intact_restarted_node_keeps_its_isr_entry_in_a_new_leader_epoch() {
    let mut world = World::new(1);
    world.controller.on_topic(topic(2));
    world.settle();
    world.start(1, None);
    world.settle();
    let state = world.state(0);
    assert_eq!((state.leader, state.leader_epoch), (Some(BrokerId(1)), LeaderEpoch(1)));
    assert_eq!(state.isr[0].epoch, world.members[&BrokerId(1)].epoch);
}

#[test]
fn replicated_durability_crash_loses_the_isr_entry() {
    let mut world = World::new(3);
    world.controller.on_topic(Topic { durability: Durability::Replicated, ..topic(1) });
    world.settle();
    let leader = world.state(0).leader.unwrap().0;
    world.start(leader, None);
    world.settle();
    assert_eq!(world.state(0).isr.len(), 2);
    assert_ne!(world.state(0).leader, Some(BrokerId(leader)));
    world.catch_up();
    world.settle();
    // A clean stop does not.
    let other = world.state(0).leader.unwrap().0;
    let since = world.members[&BrokerId(other)].epoch.0;
    world.start(other, Some(since));
    world.settle();
    assert_eq!(world.state(0).isr.len(), 3);
}

#[test]
fn longest_log_is_elected_once_all_crashed_replicas_are_back() {
    let mut world = World::new(3);
    world.ends = (1..=3).map(|node| (BrokerId(node), None)).collect();
    world.controller.on_topic(Topic { durability: Durability::Replicated, ..topic(1) });
    world.settle();
    for node in 1..=3 {
        world.kill(node);
    }
    world.settle();
    assert_eq!((world.state(0).leader, World::nodes(&world.state(0).eligible)), (None, vec![1, 2, 3]));
    world.start(1, None);
    world.start(3, None);
    world.settle();
    assert_eq!(World::nodes(&world.state(0).last_known), [1, 3]);
    assert_eq!(World::nodes(&world.state(0).eligible), [2], "it may be back with everything");
    world.start(2, None);
    world.settle();
    let mut asked: Vec<i32> = world.log_end_requests.drain(..).map(|(node, _)| node.0).collect();
    asked.sort_unstable();
    asked.dedup();
    assert_eq!((world.state(0).leader, asked), (None, vec![1, 2, 3]));
    for (node, epoch, end) in [(1, 5, 90), (2, 6, 70), (3, 6, 80)] {
        let run = world.members[&BrokerId(node)].epoch;
        let end = LogEnd { epoch: LeaderEpoch(epoch), end: Offset(end) };
        world.controller.on_log_end(id(0), BrokerId(node), run, end);
    }
    world.settle();
    assert_eq!(world.state(0).leader, Some(BrokerId(3)), "the newest epoch, then the longest log");
    assert_eq!(world.state(0).unclean, None);
}

#[test]
fn cold_start_elects_the_longest_log_of_the_isr() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(1));
    world.settle();
    let before = world.state(0).clone();
    // All of them are back in new runs, and each believes that it has everything: node 1 lost its last writes.
    let end = |epoch, end| Some(LogEnd { epoch: LeaderEpoch(epoch), end: Offset(end) });
    world.ends = [(BrokerId(1), end(2, 900)), (BrokerId(2), None), (BrokerId(3), end(1, 5_000))].into();
    (1..=3).for_each(|node| world.start(node, None));
    world.settle();
    assert_eq!(*world.state(0), before, "2 has not answered yet");
    world.ends.insert(BrokerId(2), end(2, 1_000));
    world.now_ms += 300;
    world.settle();
    assert_eq!(world.state(0).leader, Some(BrokerId(2)), "the newest epoch, then the longest log");
    assert_eq!(World::nodes(&world.state(0).isr), [1, 2, 3]);
    // An election does not wait forever for a node that never answers.
    world.ends = [(BrokerId(1), end(3, 7)), (BrokerId(3), None)].into();
    world.kill(2);
    world.settle();
    assert_eq!(world.state(0).leader, Some(BrokerId(2)));
    world.now_ms += 3_000;
    world.settle();
    assert_eq!(world.state(0).leader, Some(BrokerId(1)));
}

#[test]
fn empty_or_damaged_replica_is_never_elected() {
    for change in [(|member: &mut Member| member.directory = DirectoryId(99)) as fn(&mut Member), |member| {
        member.damaged = vec![id(0)]
    }] {
        let mut world = World::new(3);
        world.controller.on_topic(topic(1));
        world.settle();
        for node in 1..=3 {
            world.kill(node);
        }
        world.settle();
        let mut member = Member {
            node: BrokerId(1),
            epoch: BrokerEpoch(9_000),
            directory: DirectoryId(1),
            intact_since: None,
            damaged: vec![],
        };
        change(&mut member);
        world.revision = 9_000;
        world.join(member);
        world.settle();
        assert_eq!(world.state(0).leader, None);
        assert_eq!(World::nodes(&world.state(0).eligible), [2, 3]);
        world.start(2, None);
        world.settle();
        assert_eq!(world.state(0).leader, None, "the other one may be about to come back");
        world.now_ms += 3_000;
        world.settle();
        assert_eq!(world.state(0).leader, Some(BrokerId(2)));
    }
}

#[test]
fn unclean_election_happens_only_if_enabled() {
    for unclean in [false, true] {
        let mut world = World::new(3);
        world.controller.on_topic(Topic { unclean, min_isr: Some(1), ..topic(1) });
        world.settle();
        for node in 1..=3 {
            world.kill(node);
            world.settle();
        }
        assert_eq!(World::nodes(&world.state(0).eligible), [3], "the last one in sync");
        world.start(1, None);
        world.settle();
        assert_eq!(world.state(0).leader, unclean.then_some(BrokerId(1)));
        assert_eq!(world.state(0).unclean.is_some(), unclean);
    }
}

#[test]
fn lasting_suspicion_moves_leaders_unless_half_the_cluster_is_suspected() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(3));
    world.settle();
    world.controller.on_suspect(BrokerId(1), Some(100));
    world.now_ms = 700;
    assert_eq!(world.controller.decide(world.now_ms).wake_ms, Some(800));
    world.now_ms = 800;
    world.settle();
    assert_eq!(world.leaders().get(&Some(1)), None);
    let without = |world: &World| world.records.values().filter(|r| r.value.isr.len() == 2).count();
    assert_eq!(without(&world), 1, "leaders detect their followers themselves");
    // The leader still hears it and adds it back. It does not lead while it is suspected.
    world.catch_up();
    world.now_ms = 60_000;
    assert_eq!(world.settle(), 0);
    assert_eq!((world.leaders().get(&Some(1)), without(&world)), (None, 0));
    world.controller.on_suspect(BrokerId(1), None);
    world.settle();
    assert_eq!(world.leaders().get(&Some(1)), Some(&1));
    world.controller.on_suspect(BrokerId(1), Some(60_000));
    world.controller.on_suspect(BrokerId(2), Some(60_000));
    world.now_ms = 62_000;
    world.settle();
    assert!(world.records.values().all(|record| record.value.isr.len() == 3), "we are cut off ourselves");
}

#[test]
fn drained_node_loses_leaderships_and_regains_them_afterwards() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(30));
    world.settle();
    world.order(2, Order::Drain);
    world.settle();
    assert_eq!(world.controller.leaderships_of(BrokerId(2)), 0);
    assert!(world.records.values().all(|record| record.value.isr.len() == 3), "it goes on following");
    world.now_ms = 20_000;
    world.settle();
    world.order(2, Order::Serve);
    world.settle();
    assert_eq!(world.controller.leaderships_of(BrokerId(2)), 10);
}

#[test]
fn preferred_leaders_return_after_the_return_delay() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(30));
    world.settle();
    world.kill(2);
    world.settle();
    world.start(2, None);
    world.settle();
    world.catch_up();
    world.settle();
    assert_eq!(world.controller.leaderships_of(BrokerId(2)), 0);
    let wake = world.controller.decide(world.now_ms).wake_ms.unwrap();
    assert!(wake <= ControllerTuning::default().return_ms);
    world.now_ms = wake;
    world.settle();
    assert_eq!(world.controller.leaderships_of(BrokerId(2)), 10);
}

#[test]
fn growth_from_one_to_three_nodes_raises_existing_replication_factors() {
    let mut world = World::new(1);
    world.controller.on_topic(topic(100));
    world.settle();
    assert_eq!((world.state(0).replicas.len(), world.state(0).min_isr), (1, 1));
    world.start(2, None);
    world.start(3, None);
    world.now_ms = 20_000;
    let mut rounds = 0;
    while world.records.values().any(|record| record.value.replicas.len() < 3 || record.value.is_moving()) {
        world.settle();
        let moving = world.records.values().filter(|record| record.value.is_moving()).count();
        assert!(moving <= 64, "{moving} moves at once");
        world.catch_up();
        rounds += 1;
        assert!(rounds < 20, "growth does not end");
    }
    world.settle();
    assert!(world.records.values().all(|record| record.value.isr.len() == 3 && record.value.min_isr == 2));
    let led = world.leaders();
    assert!(led.values().all(|count| (33..=34).contains(count)), "{led:?}");
    // The first node may be lost now.
    world.kill(1);
    world.settle();
    assert_eq!(world.leaders().get(&None), None);
}

#[test]
fn removed_node_loses_its_replicas_while_serving() {
    let mut world = World::new(4);
    world.controller.on_topic(topic(40));
    world.settle();
    world.now_ms = 20_000;
    world.order(1, Order::Remove);
    for _ in 0..10 {
        world.settle();
        assert_eq!(world.leaders().get(&None), None);
        world.catch_up();
    }
    world.settle();
    assert_eq!(world.controller.replicas_of(BrokerId(1)), 0);
    assert!(world.records.values().all(|record| record.value.replicas.len() == 3));
    // An offline node is waited for; no partition loses a replica for that.
    world.kill(4);
    world.settle();
    world.order(2, Order::Remove);
    world.order(1, Order::Serve);
    world.kill(1);
    world.settle();
    assert!(world.records.values().all(|record| record.value.replicas.len() == 3));
    world.start(4, None);
    world.settle();
    world.catch_up();
    // Two remaining nodes are too few for three replicas, for good.
    world.order(1, Order::Remove);
    for _ in 0..10 {
        world.settle();
        world.catch_up();
    }
    world.settle();
    assert_eq!(world.controller.replicas_of(BrokerId(2)), 0);
    assert!(
        world.records.values().all(|record| record.value.replicas.len() == 2 && record.value.min_isr == 1)
    );
}

#[test]
fn restored_suspected_node_gets_replicas_once_trusted() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(3));
    world.settle();
    let replicas = |world: &World| -> Vec<usize> {
        world.records.values().map(|record| record.value.replicas.len()).collect()
    };
    let rounds = |world: &mut World| {
        for _ in 0..5 {
            world.settle();
            world.catch_up();
        }
        world.settle();
    };
    world.now_ms = 20_000;
    world.order(3, Order::Remove);
    rounds(&mut world);
    assert_eq!(replicas(&world), [2, 2, 2]);
    world.controller.on_suspect(BrokerId(3), Some(10_000));
    world.now_ms = 21_000;
    world.settle();
    world.order(3, Order::Serve);
    rounds(&mut world);
    assert_eq!(replicas(&world), [2, 2, 2], "a suspected node gets no replica");
    world.controller.on_suspect(BrokerId(3), None);
    rounds(&mut world);
    assert_eq!(replicas(&world), [3, 3, 3]);
}

#[test]
fn orphan_records_are_deleted_only_after_a_delay() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(4));
    world.settle();
    let term = Controller::new(8, ControllerTuning::default());
    let mut next = World { controller: term, ..world };
    for member in next.members.values() {
        next.controller.on_member(member.clone(), 0);
    }
    for (id, record) in &next.records {
        next.controller.on_record(*id, Some(record.clone()));
    }
    let plan = next.controller.decide(1_000);
    assert_eq!((plan.changes.len(), plan.wake_ms.is_some()), (0, true));
    next.controller.on_topic(topic(2));
    assert!(next.controller.decide(40_000).changes.iter().all(|change| change.next.is_some()));
    let mut fresh = World { controller: Controller::new(9, ControllerTuning::default()), ..next };
    for (id, record) in &fresh.records {
        fresh.controller.on_record(*id, Some(record.clone()));
    }
    fresh.controller.decide(1_000);
    let deleted = fresh.controller.decide(31_000).changes;
    assert!(deleted.len() == 4 && deleted.iter().all(|change| change.next.is_none()));
}

#[test]
fn reassignment_completes_and_can_be_cancelled() {
    let mut world = World::new(4);
    world.controller.on_topic(Topic {
        factor: Some(2),
        assignment: vec![vec![BrokerId(1), BrokerId(2)]],
        ..topic(1)
    });
    world.settle();
    let target = [BrokerId(4), BrokerId(3)];
    let change = world.controller.reassign(id(0), Some(&target)).unwrap().unwrap();
    assert_eq!(world.controller.reassign(id(0), Some(&target)), Err(MoveError::Busy));
    world.revision += 1;
    world.write(change);
    world.settle();
    assert_eq!(world.state(0).replicas, [4, 3, 1, 2].map(BrokerId));
    let change = world.controller.reassign(id(0), None).unwrap().unwrap();
    world.revision += 1;
    world.write(change);
    world.settle();
    assert_eq!(world.state(0).replicas, [1, 2].map(BrokerId));
    assert_eq!(world.controller.reassign(id(0), None), Err(MoveError::NoneInProgress));
    assert_eq!(world.controller.reassign(id(0), Some(&[BrokerId(9)])), Err(MoveError::InvalidReplicas));
    assert_eq!(world.controller.reassign(id(5), Some(&target)), Err(MoveError::UnknownPartition));
    let change = world.controller.reassign(id(0), Some(&target)).unwrap().unwrap();
    world.revision += 1;
    world.write(change);
    world.catch_up();
    world.settle();
    let state = world.state(0);
    assert_eq!((state.replicas.as_slice(), state.leader), (&target[..], Some(BrokerId(4))));
    assert_eq!(World::nodes(&state.isr), [3, 4]);
}

#[test]
fn deleted_topic_deletes_its_partition_records() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(300));
    world.settle();
    world.controller.on_topic_deleted(TOPIC);
    assert!(world.settle() <= 3);
    assert_eq!(world.records.len(), 0);
    assert_eq!(world.controller.replicas_of(BrokerId(1)), 0);
}

#[test]
fn grown_topic_gets_its_new_partitions() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(3));
    world.settle();
    world.controller.on_topic(topic(6));
    world.settle();
    assert_eq!(world.records.len(), 6);
    assert_eq!(world.leaders(), [(Some(1), 2), (Some(2), 2), (Some(3), 2)].into());
}

#[test]
fn failed_change_is_decided_again() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(1));
    let plan = world.controller.decide(0);
    assert_eq!(plan.changes.len(), 1);
    assert_eq!(world.controller.decide(0).changes.len(), 0, "under way");
    world.controller.on_failed(id(0));
    assert_eq!(world.controller.decide(0).changes, plan.changes.clone());
    world.controller.on_failed(id(0));
    world.settle();
    world.kill(world.state(0).leader.unwrap().0);
    let asked = world.controller.decide(0);
    assert!(asked.changes.is_empty() && world.answer(&asked.log_end_requests));
    let lost = world.controller.decide(0);
    assert_eq!((lost.changes.len(), world.controller.decide(0).changes.len()), (1, 0));
    world.controller.on_failed(id(0));
    assert_eq!(world.controller.decide(0).changes, lost.changes);
}

#[test]
fn factor_shrunk_by_a_removal_is_restored_even_if_explicit() {
    let mut world = World::new(3);
    world.controller.on_topic(Topic { factor: Some(3), ..topic(4) });
    world.settle();
    world.now_ms = 20_000;
    world.order(3, Order::Remove);
    for _ in 0..4 {
        world.settle();
        world.catch_up();
    }
    world.settle();
    let sizes = |world: &World| {
        let sizes = world.records.values().map(|record| (record.value.replicas.len(), record.value.wanted));
        sizes.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(sizes(&world), [(2, Some(3))].into());
    // An explicit request: two replicas from now on.
    let change = world.controller.reassign(id(0), Some(&[BrokerId(2), BrokerId(1)])).unwrap().unwrap();
    world.revision += 1;
    world.write(change);
    world.settle();
    // Another node joins: the other partitions grow onto it.
    world.start(4, None);
    for _ in 0..4 {
        world.settle();
        world.catch_up();
    }
    world.settle();
    assert_eq!((world.state(0).replicas.len(), world.state(0).wanted), (2, None));
    for index in 1..4 {
        let state = world.state(index);
        assert_eq!((state.replicas.len(), state.isr.len(), state.wanted), (3, 3, None), "{index}");
        assert!(state.replicas.contains(&BrokerId(4)));
    }
}

#[test]
fn damage_removes_the_isr_entry_except_the_last_one() {
    let mut world = World::new(3);
    world.controller.on_topic(Topic { min_isr: Some(1), ..topic(3) });
    world.settle();
    let leads = |world: &World| (0..3).find(|at| world.state(*at).leader == Some(BrokerId(1))).unwrap();
    let damaged = leads(&world);
    let member = world.members[&BrokerId(1)].clone();
    world.controller.on_member(Member { damaged: vec![id(damaged)], ..member.clone() }, 0);
    world.settle();
    let state = world.state(damaged);
    assert_ne!(state.leader, Some(BrokerId(1)));
    assert_eq!(state.in_sync(BrokerId(1)), None);
    assert!((0..3).filter(|at| *at != damaged).all(|at| world.state(at).isr.len() == 3));
    // The others are lost, and the last in-sync replica is damaged too: it keeps leading, for what can still be read.
    for node in [2, 3] {
        let before = world.state(damaged).isr.len();
        if before > 1 {
            world.kill(node);
            world.settle();
        }
    }
    let last = world.state(damaged).isr[0].node;
    let member = world.members[&last].clone();
    world.controller.on_member(Member { damaged: vec![id(damaged)], ..member }, 0);
    world.settle();
    assert_eq!(world.state(damaged).leader, Some(last));
}

#[test]
fn impaired_node_leads_only_where_no_other_isr_member_can() {
    let mut world = World::new(3);
    world.controller.on_topic(topic(6));
    world.settle();
    world.rewrite(id(5), |state| {
        // Only the leader is in sync.
        let leader = state.leader;
        state.isr.retain(|member| Some(member.node) == leader);
    });
    let sole = world.records[&id(5)].value.leader.unwrap();
    world.controller.on_impaired(sole, true);
    world.settle();
    for index in 0..5 {
        let state = &world.records[&id(index)].value;
        assert_ne!(state.leader, Some(sole), "partition {index}");
        assert!(state.leader.is_some(), "partition {index}");
    }
    assert_eq!(world.records[&id(5)].value.leader, Some(sole), "the last in-sync replica leads on");
    // A stall of storage that all nodes share moves nothing.
    let before = world.records.clone();
    for node in 1..=3 {
        world.controller.on_impaired(BrokerId(node), true);
    }
    world.settle();
    assert_eq!(world.records, before);
    // Healthy again: its preferred leaderships return.
    for node in 1..=3 {
        world.controller.on_impaired(BrokerId(node), false);
    }
    world.catch_up();
    world.now_ms += 20_000;
    world.settle();
    assert_eq!(world.controller.leaderships_of(sole), 2);
}
