//! Consumer groups: join, leave, crash, and the assignment meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_interop::proxy::Fate;
use moim_interop::{Deadline, until};
use rdkafka::ClientContext;
use rdkafka::admin::NewPartitions;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::topic_partition_list::Offset;

use super::support::*;

/// Records the rebalances of a member.
#[derive(Default)]
struct Watcher {
    assigned: AtomicUsize,
    /// Revoked partitions, one set per rebalance.
    revoked: Mutex<Vec<BTreeSet<i32>>>,
}

impl ClientContext for Watcher {}

impl ConsumerContext for Watcher {
    fn pre_rebalance(&self, _consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(_) => {
                self.assigned.fetch_add(1, Ordering::SeqCst);
            }
            Rebalance::Revoke(list) => {
                let taken = list.elements().iter().map(|element| element.partition()).collect();
                self.revoked.lock().unwrap_or_else(PoisonError::into_inner).push(taken);
            }
            Rebalance::Error(error) => panic!("rebalance: {error}"),
        }
    }
}

/// A consumer on its own thread: polls, collects what it reads, and leaves on request.
struct Member {
    consumer: Arc<BaseConsumer<Watcher>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    errors: Arc<Mutex<Vec<RDKafkaErrorCode>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Member {
    fn join(address: &str, group: &str, topics: &[&str], settings: &[(&str, &str)]) -> Self {
        let mut config = client(
            address,
            &[
                ("group.id", group),
                ("auto.offset.reset", "earliest"),
                ("session.timeout.ms", "6000"),
                ("heartbeat.interval.ms", "200"),
                ("topic.metadata.refresh.interval.ms", "500"),
                ("auto.commit.interval.ms", "100"),
            ],
        );
        for (key, value) in settings {
            config.set(*key, *value);
        }
        let consumer: BaseConsumer<Watcher> = config.create_with_context(Watcher::default()).unwrap();
        consumer.subscribe(topics).unwrap();
        let (consumer, stop) = (Arc::new(consumer), Arc::new(AtomicBool::new(false)));
        let (seen, errors) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let thread = std::thread::spawn({
            let (consumer, stop, seen, errors) =
                (consumer.clone(), stop.clone(), seen.clone(), errors.clone());
            move || {
                while !stop.load(Ordering::SeqCst) {
                    match consumer.poll(Duration::from_millis(50)) {
                        Some(Ok(message)) => seen.lock().unwrap().push(Seen::of(&message)),
                        Some(Err(error)) => errors.lock().unwrap().extend(error.rdkafka_error_code()),
                        None => {}
                    }
                }
            }
        });
        Self { consumer, seen, errors, stop, thread: Some(thread) }
    }

    /// The assigned partitions, of all its topics.
    fn partitions(&self) -> BTreeSet<i32> {
        let list = self.consumer.assignment().unwrap();
        list.elements().iter().map(|element| element.partition()).collect()
    }

    fn texts(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(Seen::text).collect()
    }

    fn revoked(&self) -> Vec<BTreeSet<i32>> {
        self.consumer.context().revoked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn assignments(&self) -> usize {
        self.consumer.context().assigned.load(Ordering::SeqCst)
    }

    fn had_error(&self, code: RDKafkaErrorCode) -> bool {
        self.errors.lock().unwrap().contains(&code)
    }

    /// Leaves the group cleanly; returns what it read.
    fn leave(mut self) -> Vec<Seen> {
        self.stop();
        let seen = self.seen.lock().unwrap().clone();
        drop(self); // closes the consumer, which leaves the group
        seen
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop();
        // The client's close can block without limit; a hanging test gives no information.
        if self.consumer.close_queue().is_ok() {
            let deadline = Deadline::after(PATIENCE);
            while !self.consumer.closed() {
                self.consumer.poll(Duration::from_millis(50));
                if deadline.is_over() {
                    eprintln!("consumer close timed out after {PATIENCE:?}; consumer leaked");
                    std::mem::forget(Arc::clone(&self.consumer));
                    return;
                }
            }
        }
    }
}

/// Waits until the members have these numbers of partitions, all of them together and none twice.
fn settle(members: &[&Member], counts: &[usize]) -> Vec<BTreeSet<i32>> {
    let total: usize = counts.iter().sum();
    until(PATIENCE, &format!("an assignment of {counts:?}"), || {
        let sets: Vec<BTreeSet<i32>> = members.iter().map(|member| member.partitions()).collect();
        let union: BTreeSet<i32> = sets.iter().flatten().copied().collect();
        let mut lens: Vec<usize> = sets.iter().map(BTreeSet::len).collect();
        lens.sort_unstable();
        let mut wanted = counts.to_vec();
        wanted.sort_unstable();
        (lens == wanted && union.len() == total).then_some(sets)
    })
}

fn send(address: &str, topic: &str, partitions: i32, texts: std::ops::Range<usize>) {
    let mut sender = Sender::new(address, &[]);
    for i in texts {
        let partition = i32::try_from(i).unwrap() % partitions;
        sender.send(topic, Some(partition), &Sample::value(format!("{i:05}")));
    }
    assert!(sender.reports().iter().all(Result::is_ok));
}

fn numbers(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|i| format!("{i:05}")).collect()
}

fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort();
    texts
}

const STRATEGIES: [&str; 3] = ["range", "roundrobin", "cooperative-sticky"];

/// First scenario of the queue document: A has all four partitions, B joins, each has two.
#[test]
fn joining_consumer_gets_its_share() {
    let server = server();
    for strategy in STRATEGIES {
        let (topic, group) = (topic(server.kafka(), "join", 4, &[]), unique("join"));
        let settings = [("partition.assignment.strategy", strategy)];
        let a = Member::join(server.kafka(), &group, &[&topic], &settings);
        settle(&[&a], &[4]);
        send(server.kafka(), &topic, 4, 0..40);
        until(PATIENCE, "A to read all", || (a.texts().len() == 40).then_some(()));
        let b = Member::join(server.kafka(), &group, &[&topic], &settings);
        let sets = settle(&[&a, &b], &[2, 2]);
        send(server.kafka(), &topic, 4, 40..80);
        until(PATIENCE, "both to read", || (a.texts().len() + b.texts().len() >= 80).then_some(()));
        assert_eq!(b.texts().len(), 20, "{strategy}");
        assert!(b.seen.lock().unwrap().iter().all(|seen| sets[1].contains(&seen.partition)), "{strategy}");
    }
}

/// Second scenario: A leaves cleanly, B gets all partitions and continues at A's committed offsets.
#[test]
fn leaving_consumer_hands_over_its_partitions() {
    let server = server();
    for strategy in STRATEGIES {
        let (topic, group) = (topic(server.kafka(), "leave", 4, &[]), unique("leave"));
        let settings = [("partition.assignment.strategy", strategy)];
        let a = Member::join(server.kafka(), &group, &[&topic], &settings);
        let b = Member::join(server.kafka(), &group, &[&topic], &settings);
        settle(&[&a, &b], &[2, 2]);
        send(server.kafka(), &topic, 4, 0..40);
        until(PATIENCE, "both to read", || (a.texts().len() + b.texts().len() >= 40).then_some(()));
        let from_a: Vec<String> = a.leave().iter().map(Seen::text).collect();
        // Far less than the session timeout: the leave triggers the rebalance, not the session expiry.
        until(Duration::from_secs(5), "B to have all", || (b.partitions().len() == 4).then_some(()));
        send(server.kafka(), &topic, 4, 40..80);
        until(PATIENCE, "B to read on", || (from_a.len() + b.texts().len() >= 80).then_some(()));
        let all = sorted([from_a, b.texts()].concat());
        assert_eq!(all, numbers(0..80), "{strategy}: nothing twice, nothing missing");
    }
}

/// Third scenario: A stops answering, its session expires, B gets all partitions.
#[test]
fn crashed_consumer_is_removed_after_session_timeout() {
    let Some((server, proxy)) = proxied() else { return };
    let address = proxy.address();
    let (topic, group) = (topic(&address, "crash", 4, &[]), unique("crash"));
    let session = ("session.timeout.ms", "1500");
    let a = Member::join(&address, &group, &[&topic], &[("client.id", "doomed"), session]);
    let b = Member::join(&address, &group, &[&topic], &[("client.id", "survivor"), session]);
    settle(&[&a, &b], &[2, 2]);
    proxy.set_rule(|request| if request.client_id == "doomed" { Fate::Freeze } else { Fate::Pass });
    until(PATIENCE, "B to have all", || (b.partitions().len() == 4).then_some(()));
    send(&address, &topic, 4, 0..40);
    until(PATIENCE, "B to read all", || (b.texts().len() >= 40).then_some(()));
    assert_eq!(sorted(b.texts()), numbers(0..40));
    // A is resumed, to be closed while the server runs: a consumer that cannot commit its last offsets never closes.
    proxy.set_rule(|_| Fate::Pass);
    proxy.cut_all();
    drop((a, b));
    drop(server);
}

#[test]
fn cooperative_rebalance_keeps_unmoved_partitions() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "sticky", 4, &[]), unique("sticky"));
    let settings = [("partition.assignment.strategy", "cooperative-sticky")];
    let a = Member::join(server.kafka(), &group, &[&topic], &settings);
    settle(&[&a], &[4]);
    let b = Member::join(server.kafka(), &group, &[&topic], &settings);
    let sets = settle(&[&a, &b], &[2, 2]);
    let taken: BTreeSet<i32> = a.revoked().into_iter().flatten().collect();
    assert_eq!(taken, sets[1], "A lost only what B got");
}

#[test]
fn static_member_keeps_its_assignment_across_a_restart() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "static", 4, &[]), unique("static"));
    let settings = |id| [("group.instance.id", id), ("session.timeout.ms", "30000")];
    let a = Member::join(server.kafka(), &group, &[&topic], &settings("a"));
    let b = Member::join(server.kafka(), &group, &[&topic], &settings("b"));
    let before = settle(&[&a, &b], &[2, 2]);
    let rebalances = b.assignments();
    drop(a.leave());
    let a = Member::join(server.kafka(), &group, &[&topic], &settings("a"));
    until(PATIENCE, "A to be back", || (a.partitions() == before[0]).then_some(()));
    send(server.kafka(), &topic, 4, 0..40);
    until(PATIENCE, "both to read", || (a.texts().len() + b.texts().len() >= 40).then_some(()));
    assert_eq!(b.assignments(), rebalances, "B did not notice");
}

#[test]
fn duplicate_group_instance_id_fences_the_first_member() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "fence", 2, &[]), unique("fence"));
    let settings = [("group.instance.id", "only"), ("session.timeout.ms", "30000")];
    let first = Member::join(server.kafka(), &group, &[&topic], &settings);
    settle(&[&first], &[2]);
    let second = Member::join(server.kafka(), &group, &[&topic], &settings);
    until(PATIENCE, "the first to be fenced", || {
        let fatal = first
            .consumer
            .client()
            .fatal_error()
            .is_some_and(|(code, _)| code == RDKafkaErrorCode::FencedInstanceId);
        (fatal || first.had_error(RDKafkaErrorCode::FencedInstanceId)).then_some(())
    });
    until(PATIENCE, "the second to have all", || (second.partitions().len() == 2).then_some(()));
}

#[test]
fn group_resumes_at_its_committed_offsets() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "resume", 2, &[]), unique("resume"));
    send(server.kafka(), &topic, 2, 0..20);
    let a = Member::join(server.kafka(), &group, &[&topic], &[]);
    until(PATIENCE, "A to read", || (a.texts().len() == 20).then_some(()));
    drop(a.leave());
    send(server.kafka(), &topic, 2, 20..40);
    let b = Member::join(server.kafka(), &group, &[&topic], &[]);
    until(PATIENCE, "B to read", || (b.texts().len() >= 20).then_some(()));
    assert_eq!(sorted(b.texts()), numbers(20..40));
}

#[test]
fn every_group_reads_everything_and_a_member_its_assignment() {
    let server = server();
    let (one, two) = (topic(server.kafka(), "both", 3, &[]), topic(server.kafka(), "both", 1, &[]));
    send(server.kafka(), &one, 3, 0..30);
    send(server.kafka(), &two, 1, 30..40);
    let topics = [one.as_str(), two.as_str()];
    let groups = [unique("group"), unique("group")];
    let members: Vec<Member> = groups
        .iter()
        .flat_map(|group| [0, 1].map(|_| Member::join(server.kafka(), group, &topics, &[])))
        .collect();
    for pair in members.chunks(2) {
        until(PATIENCE, "a group to read all", || {
            (pair[0].texts().len() + pair[1].texts().len() >= 40).then_some(())
        });
        let all: BTreeSet<String> = pair.iter().flat_map(Member::texts).collect();
        assert_eq!(all, numbers(0..40).into_iter().collect());
    }
}

#[test]
fn many_members_have_disjoint_assignments() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "crowd", 12, &[]), unique("crowd"));
    let members: Vec<Member> = (0..6).map(|_| Member::join(server.kafka(), &group, &[&topic], &[])).collect();
    let all: Vec<&Member> = members.iter().collect();
    settle(&all, &[2; 6]);
    drop(members);
}

#[test]
fn added_partitions_are_assigned() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "grow", 1, &[]), unique("grow"));
    let member = Member::join(server.kafka(), &group, &[&topic], &[]);
    settle(&[&member], &[1]);
    let grown =
        wait(admin(server.kafka()).create_partitions(&[NewPartitions::new(&topic, 3)], &admin_options()));
    assert_eq!(grown.unwrap(), [Ok(topic.clone())]);
    settle(&[&member], &[3]);
    send(server.kafka(), &topic, 3, 0..9);
    until(PATIENCE, "all to be read", || (member.texts().len() == 9).then_some(()));
}

#[test]
fn pattern_subscription_finds_new_topics() {
    let server = server();
    let prefix = unique("pattern");
    let member = Member::join(server.kafka(), &unique("group"), &[&format!("^{prefix}.*")], &[]);
    for (i, suffix) in ["a", "b"].iter().enumerate() {
        let name = format!("{prefix}-{suffix}");
        create(server.kafka(), &name, 1, &[]);
        send(server.kafka(), &name, 1, i..i + 1);
        until(PATIENCE, "the new topic to be read", || (member.texts().len() == i + 1).then_some(()));
    }
}

#[test]
fn commit_with_an_old_generation_is_refused() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "old", 2, &[]), unique("old"));
    // A member that stops polling leaves the group after `max.poll.interval.ms`, and may not commit.
    let settings =
        [("max.poll.interval.ms", "1500"), ("session.timeout.ms", "1500"), ("enable.auto.commit", "false")];
    let mut a = Member::join(server.kafka(), &group, &[&topic], &settings);
    settle(&[&a], &[2]);
    a.stop();
    let b = Member::join(server.kafka(), &group, &[&topic], &settings);
    until(PATIENCE, "B to have all", || (b.partitions().len() == 2).then_some(()));
    let refused = a.consumer.commit(&partition(&topic, 0, Offset::Offset(1)), CommitMode::Sync);
    let code = refused.expect_err("A is out").rdkafka_error_code().unwrap();
    assert!(
        matches!(
            code,
            RDKafkaErrorCode::UnknownMemberId
                | RDKafkaErrorCode::IllegalGeneration
                | RDKafkaErrorCode::RebalanceInProgress
        ),
        "{code:?}"
    );
    assert_eq!(committed(server.kafka(), &group, &topic, 0), None);
}

#[test]
fn groups_are_listed_described_and_deleted() {
    let server = server();
    let (topic, group) = (topic(server.kafka(), "list", 2, &[]), unique("list"));
    let member = Member::join(server.kafka(), &group, &[&topic], &[("client.id", "the member")]);
    settle(&[&member], &[2]);
    let probe: BaseConsumer = client(server.kafka(), &[]).create().unwrap();
    let groups = probe.fetch_group_list(None, PATIENCE).unwrap();
    assert!(groups.groups().iter().any(|found| found.name() == group));
    let found = until(PATIENCE, "a stable group", || {
        let groups = probe.fetch_group_list(Some(&group), PATIENCE).unwrap();
        let group = groups.groups().iter().find(|found| found.state() == "Stable")?;
        Some((
            group.protocol_type().to_owned(),
            group.members().iter().map(|m| m.client_id().to_owned()).collect::<Vec<_>>(),
        ))
    });
    assert_eq!(found, ("consumer".to_owned(), vec!["the member".to_owned()]));
    let admin = admin(server.kafka());
    let busy = wait(admin.delete_groups(&[&group], &admin_options())).unwrap();
    assert_eq!(busy, [Err((group.clone(), RDKafkaErrorCode::NonEmptyGroup))]);
    drop(member.leave());
    until(PATIENCE, "the group to be empty and deleted", || {
        let gone = wait(admin.delete_groups(&[&group], &admin_options())).unwrap();
        (gone == [Ok(group.clone())]).then_some(())
    });
    let unknown = wait(admin.delete_groups(&[&group], &admin_options())).unwrap();
    assert_eq!(unknown, [Err((group.clone(), RDKafkaErrorCode::GroupIdNotFound))]);
}

#[test]
fn members_rejoin_after_a_server_crash() {
    let Some(mut server) = own_server() else { return };
    let address = server.kafka().to_owned();
    let (topic, group) = (topic(&address, "server-crash", 4, &[]), unique("server-crash"));
    let members = [0, 1].map(|_| Member::join(&address, &group, &[&topic], &[]));
    settle(&[&members[0], &members[1]], &[2, 2]);
    send(&address, &topic, 4, 0..40);
    let read = || members.iter().flat_map(Member::texts).collect::<Vec<_>>();
    until(PATIENCE, "all to be read", || (read().len() >= 40).then_some(()));
    server.kill().unwrap();
    server.restart().unwrap();
    send(&address, &topic, 4, 40..80);
    until(2 * PATIENCE, "all to be read", || {
        let all: BTreeSet<String> = read().into_iter().collect();
        (all == numbers(0..80).into_iter().collect()).then_some(())
    });
    let mut per_partition: BTreeMap<i32, i64> = BTreeMap::new();
    for member in &members {
        for seen in member.seen.lock().unwrap().iter() {
            let end = per_partition.entry(seen.partition).or_default();
            *end = (*end).max(seen.offset + 1);
        }
    }
    assert_eq!(per_partition.values().copied().collect::<Vec<_>>(), [20; 4], "nothing was written twice");
}
