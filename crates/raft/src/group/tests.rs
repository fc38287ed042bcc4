//! Whole groups over the in-memory network, on real journals: every member has its own runtime, store and directory,
//! and dies with all of its threads.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;

use moim_base::clock::SystemClock;
use moim_base::task::{Scope, Shutdown};
use moim_journal::{DurableSink, OpenError as StoreError, RealDisk, Store, StoreOptions};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::*;
use crate::machine::SnapshotWriter;
use crate::transport::{LocalPeer, MemoryNetwork, PeerId, Router, TcpServer, TcpTransport, Transport};
use crate::types::GroupId;

const PATIENCE: Duration = Duration::from_secs(60);

/// While the last word begins like this, no snapshot can be written.
const UNSAVABLE: &str = "unsavable";

/// The applied words, each once, in order. Proposing one again changes nothing, so a test may repeat a proposal with
/// an unknown outcome.
#[derive(Clone, Default)]
struct Words(Arc<Mutex<Vec<String>>>);

impl Words {
    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

impl StateMachine for Words {
    fn apply(&mut self, _index: u64, entry: &Bytes) -> Bytes {
        let word = String::from_utf8(entry.to_vec()).unwrap();
        let mut words = self.0.lock().unwrap();
        let at = words.iter().position(|known| *known == word).unwrap_or_else(|| {
            words.push(word);
            words.len() - 1
        });
        at.to_string().into()
    }

    fn snapshot(&mut self) -> SnapshotWriter {
        let frozen = self.all();
        Box::new(move |out| {
            out.write_all(frozen.join("\n").as_bytes())?;
            match frozen.last() {
                Some(last) if last.starts_with(UNSAVABLE) => Err(std::io::ErrorKind::StorageFull.into()),
                Some(_) | None => Ok(()),
            }
        })
    }

    fn restore(&mut self, content: &mut dyn Read) -> std::io::Result<()> {
        let mut text = String::new();
        content.read_to_string(&mut text)?;
        *self.0.lock().unwrap() = text.lines().map(str::to_owned).collect();
        Ok(())
    }
}

/// While a test holds the lock, the disk thread hangs: nothing further becomes durable.
struct Sink(Router, Arc<Mutex<()>>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        let _works = self.1.lock().unwrap();
        self.0.on_durable(advanced);
    }
}

/// A running member.
struct Running {
    runtime: Runtime,
    group: Group,
    /// A second group beside the first, on the same store and network.
    second: Option<Group>,
    words: Words,
}

struct Node {
    member: Member,
    dir: PathBuf,
    hang: Arc<Mutex<()>>,
    running: Option<Running>,
}

struct Cluster {
    nodes: Vec<Node>,
    network: MemoryNetwork,
    driver: Runtime,
    tune: fn(&mut GroupOptions),
    two_groups: bool,
    /// Over sockets instead of the in-memory network.
    tcp: bool,
    /// Last: the directories are removed after everything in them.
    _dir: TempDir,
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    #[allow(clippy::disallowed_methods)] // a test's patience
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        #[allow(clippy::disallowed_methods)]
        let now = Instant::now();
        assert!(now < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn words(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|number| format!("word {number}")).collect()
}

impl Cluster {
    fn new(count: u64, tune: fn(&mut GroupOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let nodes = (1..=count).map(|id| Node {
            member: Member { id: VoterId(id), address: format!("node-{id}") },
            dir: dir.path().join(id.to_string()),
            hang: Arc::default(),
            running: None,
        });
        let driver = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let nodes = nodes.collect();
        Self { nodes, network: MemoryNetwork::new(), driver, tune, two_groups: false, tcp: false, _dir: dir }
    }

    /// Starts the first `founders` nodes as a new group.
    fn found(count: u64, founders: usize, tune: fn(&mut GroupOptions)) -> Self {
        Self::new(count, tune).with_founders(founders)
    }

    fn with_founders(self, founders: usize) -> Self {
        let mut cluster = self;
        for at in 0..founders {
            cluster.start(at);
        }
        let members: Vec<_> = cluster.nodes[..founders].iter().map(|node| node.member.clone()).collect();
        for at in 0..founders {
            cluster.driver.block_on(cluster.group(at).initialize(&members)).unwrap();
        }
        cluster
    }

    fn start(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        std::fs::create_dir_all(&node.dir).unwrap();
        let store = until("the folder is free", || {
            let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
            match Store::open(&node.dir, Arc::new(RealDisk), Arc::new(SystemClock::new()), options) {
                Ok(store) => Some(store),
                Err(StoreError::Locked) => None,
                Err(error) => panic!("{error}"),
            }
        });
        let router = Router::new();
        store.set_sink(Arc::new(Sink(router.clone(), Arc::clone(&node.hang))));
        store.start();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let transport: Arc<dyn Transport> = if self.tcp {
            let (address, scope) = (node.member.address.parse().unwrap(), Scope::new(Shutdown::new()));
            let _home = runtime.enter();
            let local = LocalPeer::member(PeerId { cluster: 5, voter: node.member.id, secret: 9 });
            let server = TcpServer::bind(address, local.clone(), router.clone(), &scope);
            runtime.block_on(server).unwrap();
            Arc::new(TcpTransport::new(local, scope))
        } else {
            self.network.join(&node.member.address, router.clone())
        };
        let host = Host { store, disk: Arc::new(RealDisk), root: node.dir.clone(), router, transport };
        let open = |group: u64, machine: Words| {
            let mut options = GroupOptions::new(GroupId(group), node.member.id, group * 2);
            options.proposal_timeout = Duration::from_secs(2);
            (self.tune)(&mut options);
            runtime.block_on(Group::open(&host, options, Box::new(machine))).unwrap()
        };
        let words = Words::default();
        let group = open(1, words.clone());
        let second = self.two_groups.then(|| open(2, Words::default()));
        for resting in [Some(group.clone()), second.clone()].into_iter().flatten() {
            let leading = resting.clone();
            runtime.spawn(async move { resting.rest_while_alone().await });
            runtime.spawn(async move { leading.yield_without_quorum().await });
        }
        node.running = Some(Running { runtime, group, second, words });
    }

    /// Like `kill -9`: nothing is flushed, no peer is notified.
    fn kill(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        self.network.leave(&node.member.address);
        let running = node.running.take().expect("it runs");
        running.runtime.shutdown_timeout(PATIENCE);
    }

    fn running(&self, at: usize) -> &Running {
        self.nodes[at].running.as_ref().expect("it runs")
    }

    fn group(&self, at: usize) -> Group {
        self.running(at).group.clone()
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|at| self.nodes[*at].running.is_some()).collect()
    }

    /// A member among these that a quorum confirms as leader.
    fn leader_among(&self, some: &[usize]) -> usize {
        until("a leader", || {
            some.iter().copied().find(|at| self.driver.block_on(self.group(*at).read_index()).is_ok())
        })
    }

    fn leader(&self) -> usize {
        self.leader_among(&self.alive())
    }

    fn follower(&self) -> usize {
        let leader = self.leader();
        self.alive().into_iter().find(|at| *at != leader).expect("there is a follower")
    }

    fn say_among(&self, some: &[usize], word: &str) -> Applied {
        until("a proposal goes through", || {
            let leader = self.group(self.leader_among(some));
            match self.driver.block_on(leader.propose(word.to_owned().into())) {
                Ok(applied) => Some(applied),
                Err(GroupError::NotLeader { .. } | GroupError::Unknown) => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    fn say(&self, range: std::ops::Range<u32>) {
        for word in words(range) {
            self.say_among(&self.alive(), &word);
        }
    }

    /// Waits until every running member has applied exactly these words.
    fn expect(&self, range: std::ops::Range<u32>) {
        for at in self.alive() {
            until(&format!("node {at} has all words"), || {
                (self.running(at).words.all() == words(range.clone())).then_some(())
            });
        }
    }
}

fn usual(_: &mut GroupOptions) {}

fn short_log(options: &mut GroupOptions) {
    options.snapshot_after = 20;
    options.keep_entries = 5;
}

#[test]
fn three_members_elect_replicate_and_read_their_own_writes_anywhere() {
    let cluster = Cluster::found(3, 3, usual);
    for number in 0..20 {
        let word = format!("word {number}");
        let applied = cluster.say_among(&[0, 1, 2], &word);
        assert_eq!(applied.reply, number.to_string());
        for at in 0..3 {
            let reached = until("a read goes through", || {
                cluster.driver.block_on(cluster.group(at).linearizable()).ok()
            });
            assert!(reached >= applied.index);
            assert!(cluster.running(at).words.all().contains(&word), "node {at} missed {word}");
        }
    }
    cluster.expect(0..20);
    let (leader, follower) = (cluster.leader(), cluster.follower());
    let refused = cluster.driver.block_on(cluster.group(follower).propose("no".into())).unwrap_err();
    assert_eq!(refused, GroupError::NotLeader { leader: Some(cluster.nodes[leader].member.clone()) });
    let large = vec![0; MAX_ENTRY_BYTES + 1].into();
    let refused = cluster.driver.block_on(cluster.group(leader).propose(large)).unwrap_err();
    assert!(matches!(refused, GroupError::TooLarge { .. }));
}

#[test]
fn a_killed_leader_is_replaced_and_comes_back_from_disk() {
    let mut cluster = Cluster::found(3, 3, usual);
    cluster.say(0..30);
    let old = cluster.leader();
    let watch = cluster.group(cluster.follower());
    let mut changes = watch.leader_changes();
    let before = changes.current();
    cluster.kill(old);
    let new = cluster.leader();
    let after = cluster.driver.block_on(async {
        loop {
            let next = changes.changed().await.expect("the group runs");
            if next.term > before.term && next.leader.is_some() {
                return next;
            }
        }
    });
    assert!(after.leader.is_some_and(|leader| leader != before.leader.unwrap()));
    drop(watch);
    cluster.say(30..60);
    cluster.expect(0..60);
    assert_ne!(new, old);
    cluster.start(old);
    cluster.expect(0..60);
    cluster.say(60..70);
    cluster.expect(0..70);
}

#[test]
fn killing_all_members_loses_nothing() {
    let mut cluster = Cluster::found(3, 3, short_log);
    cluster.say(0..70);
    for round in 1..=2 {
        for at in 0..3 {
            cluster.kill(at);
        }
        for at in 0..3 {
            cluster.start(at);
        }
        cluster.leader();
        cluster.expect(0..60 + round * 10);
        cluster.say(60 + round * 10..70 + round * 10);
    }
    cluster.expect(0..90);
}

#[test]
fn isolated_leader_acknowledges_nothing_and_follows_on_return() {
    let cluster = Cluster::found(3, 3, usual);
    cluster.say(0..5);
    let old = cluster.leader();
    cluster.network.isolate(&cluster.nodes[old].member.address);
    let lonely = cluster.group(old);
    let said = cluster.driver.block_on(lonely.propose("never".into())).unwrap_err();
    assert!(matches!(said, GroupError::Unknown | GroupError::NotLeader { .. }), "{said:?}");
    let read = cluster.driver.block_on(lonely.linearizable()).unwrap_err();
    assert!(matches!(read, GroupError::NoQuorum(_) | GroupError::NotLeader { .. }), "{read:?}");

    let others: Vec<usize> = (0..3).filter(|at| *at != old).collect();
    for word in words(5..15) {
        cluster.say_among(&others, &word);
    }
    assert_eq!(cluster.running(old).words.all(), words(0..5));
    cluster.network.heal();
    cluster.expect(0..15);
    cluster.say(15..20);
    cluster.expect(0..20);
}

#[test]
fn isolated_follower_does_not_depose_the_leader_on_return() {
    let cluster = Cluster::found(3, 3, usual);
    cluster.say(0..5);
    let (leader, lost) = (cluster.leader(), cluster.follower());
    let before = cluster.group(leader).metrics().leadership;
    let address = cluster.nodes[lost].member.address.clone();
    cluster.network.isolate(&address);
    let sent = cluster.network.sent_by(&address);
    // Two requests are one round of pre-votes: its election timeout has passed several times.
    until("several rounds of pre-votes", || (cluster.network.sent_by(&address) >= sent + 8).then_some(()));
    cluster.say(5..10);
    cluster.network.heal();
    cluster.expect(0..10);
    assert_eq!(cluster.group(leader).metrics().leadership, before, "the same leader in the same term");
    assert_eq!(cluster.group(lost).metrics().leadership, before);
}

#[test]
fn one_member_grows_to_three_and_the_first_may_die() {
    let mut cluster = Cluster::found(4, 1, usual);
    cluster.say(0..10);
    for at in [1, 2] {
        cluster.start(at);
        let (first, member) = (cluster.group(0), cluster.nodes[at].member.clone());
        cluster.driver.block_on(first.add_learner(&member)).unwrap();
        // Refused until it has caught up.
        until("it may be promoted", || match cluster.driver.block_on(first.promote(&[member.id])) {
            Ok(()) => Some(()),
            Err(GroupError::Refused(_)) => None,
            Err(error) => panic!("{error}"),
        });
    }
    let ids = |group: Group| group.metrics().voters.iter().map(|voter| voter.id.0).collect::<BTreeSet<_>>();
    assert_eq!(ids(cluster.group(0)), BTreeSet::from([1, 2, 3]));
    cluster.say(10..20);
    // No longer alone, the first member sends heartbeats: no member starts an election while nothing happens.
    let term = cluster.group(1).metrics().leadership.term;
    std::thread::sleep(Duration::from_millis(3 * Timers::default().election_max_ms));
    assert_eq!(cluster.group(1).metrics().leadership, Leadership { term, leader: Some(VoterId(1)) });
    cluster.kill(0);
    cluster.say(20..30);
    cluster.expect(0..30);

    // The dead member is replaced under a new id.
    cluster.start(3);
    let (leader, member) = (cluster.group(cluster.leader()), cluster.nodes[3].member.clone());
    cluster.driver.block_on(leader.add_learner(&member)).unwrap();
    until("it may be promoted", || cluster.driver.block_on(leader.promote(&[member.id])).ok());
    cluster.driver.block_on(leader.remove(VoterId(1))).unwrap();
    assert_eq!(ids(leader), BTreeSet::from([2, 3, 4]));
    cluster.say(30..40);
    cluster.expect(0..40);
}

#[test]
fn interrupted_joint_consensus_is_finished_by_the_next_leader() {
    let mut cluster = Cluster::found(5, 3, usual);
    cluster.say(0..10);
    let leader = cluster.leader();
    let group = cluster.group(leader);
    for at in [3, 4] {
        cluster.start(at);
        cluster.driver.block_on(group.add_learner(&cluster.nodes[at].member.clone())).unwrap();
    }
    cluster.expect(0..10);
    // Killed after the first step: the joint configuration is in the log, and no caller requests the second step.
    let goal = BTreeSet::from([group.voter(), VoterId(4), VoterId(5)]);
    cluster.driver.block_on(async {
        tokio::select! {
            biased;
            cut = group.wait_for(PATIENCE, |now| now.unfinished.is_some()) => drop(cut.unwrap()),
            done = group.set_voters(&goal) => panic!("it was not cut: {done:?}"),
        }
    });
    drop(group);
    until("the others have the first step", || {
        let has_it = |at: usize| cluster.group(at).metrics().unfinished.is_some();
        cluster.alive().into_iter().all(has_it).then_some(())
    });
    cluster.kill(leader);

    // Both sides have a majority left, and both must agree.
    let next = cluster.group(cluster.leader());
    assert_eq!(next.metrics().unfinished, Some(goal.iter().copied().collect()));
    cluster.say(10..20);
    until("the change is finished", || match cluster.driver.block_on(next.set_voters(&goal)) {
        Ok(()) => Some(()),
        Err(GroupError::NotLeader { .. } | GroupError::Unknown | GroupError::Refused(_)) => None,
        Err(error) => panic!("{error}"),
    });
    drop(next);
    let voters = || cluster.group(3).metrics();
    until("the new ones know", || voters().unfinished.is_none().then_some(()));
    assert_eq!(voters().voters.iter().map(|voter| voter.id).collect::<BTreeSet<_>>(), goal);
    cluster.start(leader);
    // The leader that finished the change may lead on without a vote: only when the old voters are gone does it show
    // that the new ones can elect.
    for at in (0..3).filter(|at| *at != leader) {
        cluster.kill(at);
    }
    cluster.say_among(&[leader, 3, 4], "word 20");
}

#[test]
fn timers_are_suspended_only_while_the_leader_is_the_only_member() {
    let mut cluster = Cluster::found(2, 1, usual);
    cluster.say(0..1);
    let first = cluster.group(0);
    let rests = || first.core.resting.load(Ordering::Relaxed);
    until("it rests", || rests().then_some(()));
    cluster.start(1);
    let member = cluster.nodes[1].member.clone();
    cluster.driver.block_on(first.add_learner(&member)).unwrap();
    until("it tells the learner that it lives", || (!rests()).then_some(()));
    cluster.driver.block_on(first.remove(member.id)).unwrap();
    until("it rests again", || rests().then_some(()));
    cluster.say(1..10);
    drop(first);
    cluster.kill(0);
    cluster.start(0);
    cluster.say(10..20);
}

#[test]
fn late_learner_installs_the_snapshot_and_restarts_from_it() {
    let mut cluster = Cluster::found(4, 3, short_log);
    cluster.say(0..80);
    let leader = cluster.group(cluster.leader());
    let purged = cluster.driver.block_on(leader.wait_for(PATIENCE, |now| now.purged > Some(20))).unwrap();
    assert!(purged.snapshot.is_some());
    cluster.start(3);
    cluster.driver.block_on(leader.add_learner(&cluster.nodes[3].member.clone())).unwrap();
    cluster.expect(0..80);
    let joiner = cluster.group(3).metrics();
    assert!(joiner.purged.is_some(), "its log begins after a snapshot: {joiner:?}");
    assert_eq!(joiner.role, Role::Learner);
    drop(leader);

    cluster.kill(3);
    cluster.say(80..85);
    cluster.start(3);
    cluster.expect(0..85);
}

#[test]
fn failed_snapshot_write_does_not_stop_the_group() {
    let cluster = Cluster::found(1, 1, short_log);
    let group = cluster.group(0);
    let fail = |time: u32| {
        cluster.say_among(&[0], &format!("{UNSAVABLE} {time}"));
        cluster.driver.block_on(group.snapshot()).unwrap();
        until("the failure is known", || group.snapshot_failed().then_some(()));
    };
    // Once without an older one, once with it.
    fail(1);
    cluster.say(0..80);
    cluster.driver.block_on(group.wait_for(PATIENCE, |now| now.purged > Some(20))).unwrap();
    assert!(!group.snapshot_failed(), "the last one was written");
    fail(2);
    cluster.say(80..160);
    cluster.driver.block_on(group.wait_for(PATIENCE, |now| now.purged > Some(100))).unwrap();
    let leftovers = || {
        let folder = std::fs::read_dir(cluster.nodes[0].dir.join("raft/1/snapshots")).unwrap();
        folder.filter(|file| file.as_ref().unwrap().path().extension().unwrap() != "snap").count()
    };
    until("drafts are removed", || (leftovers() == 0).then_some(()));
}

#[test]
fn a_group_over_sockets_loses_its_leader_and_sends_a_snapshot() {
    let mut cluster = Cluster::new(4, short_log);
    cluster.tcp = true;
    let ports: Vec<_> = (0..4).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    for (node, port) in cluster.nodes.iter_mut().zip(ports) {
        node.member.address = port.local_addr().unwrap().to_string();
    }
    let mut cluster = cluster.with_founders(3);
    cluster.say(0..60);
    let old = cluster.leader();
    cluster.kill(old);
    cluster.say(60..70);
    cluster.start(old);
    cluster.start(3);
    let leader = cluster.group(cluster.leader());
    cluster.driver.block_on(leader.add_learner(&cluster.nodes[3].member.clone())).unwrap();
    cluster.expect(0..70);
    assert!(cluster.group(3).metrics().purged.is_some(), "it came by snapshot");
    let reached =
        until("a read through a follower", || cluster.driver.block_on(cluster.group(3).linearizable()).ok());
    assert!(reached >= 70);
}

#[test]
fn leadership_transfer_moves_the_leader() {
    let cluster = Cluster::found(3, 3, usual);
    cluster.say(0..5);
    let (old, new) = (cluster.leader(), cluster.follower());
    let to = cluster.nodes[new].member.id;
    let refused = cluster.driver.block_on(cluster.group(new).transfer_leadership(to)).unwrap_err();
    assert!(matches!(refused, GroupError::NotLeader { .. }));
    let refused = cluster.driver.block_on(cluster.group(old).transfer_leadership(VoterId(9))).unwrap_err();
    assert!(matches!(refused, GroupError::Refused(_)));
    cluster.driver.block_on(cluster.group(old).transfer_leadership(to)).unwrap();
    assert_eq!(cluster.leader(), new);
    cluster.say(5..10);
    cluster.expect(0..10);
}

#[test]
fn two_groups_share_a_store_and_a_network_and_nothing_else() {
    let mut cluster = Cluster::new(3, usual);
    cluster.two_groups = true;
    for at in 0..3 {
        cluster.start(at);
    }
    let members: Vec<_> = cluster.nodes.iter().map(|node| node.member.clone()).collect();
    for at in 0..3 {
        let second = cluster.running(at).second.clone().unwrap();
        cluster.driver.block_on(cluster.group(at).initialize(&members)).unwrap();
        cluster.driver.block_on(second.initialize(&members)).unwrap();
    }
    cluster.say(0..5);
    let seconds: Vec<Group> = (0..3).map(|at| cluster.running(at).second.clone().unwrap()).collect();
    let applied = until("the second group takes a word", || {
        seconds.iter().find_map(|second| cluster.driver.block_on(second.propose("other".into())).ok())
    });
    assert_eq!(applied.reply, "0");
    cluster.expect(0..5);
}

#[test]
fn member_without_a_log_grants_no_vote() {
    let mut cluster = Cluster::new(2, usual);
    cluster.start(0);
    cluster.start(1);
    let members: Vec<_> = cluster.nodes.iter().map(|node| node.member.clone()).collect();
    cluster.driver.block_on(cluster.group(0).initialize(&members)).unwrap();
    let address = cluster.nodes[0].member.address.clone();
    until("it has asked several times", || (cluster.network.sent_by(&address) >= 4).then_some(()));
    assert!(!cluster.group(1).is_initialized());
    assert_eq!(cluster.group(0).leader(), None);
    cluster.driver.block_on(cluster.group(1).initialize(&members)).unwrap();
    cluster.say(0..3);
    cluster.expect(0..3);
}

#[test]
fn a_member_that_stops_says_so() {
    let cluster = Cluster::found(1, 1, usual);
    cluster.say(0..3);
    let group = cluster.group(0);
    let waiting = group.clone();
    #[allow(clippy::disallowed_methods)] // a test's task
    let stopped = cluster.running(0).runtime.spawn(async move { waiting.stopped().await });
    cluster.driver.block_on(group.stop());
    cluster.driver.block_on(stopped).unwrap();
    let refused = cluster.driver.block_on(group.propose("late".into())).unwrap_err();
    assert_eq!(refused, GroupError::Unknown);
    assert!(matches!(cluster.driver.block_on(group.read_index()), Err(GroupError::Stopped(_))));
}

#[test]
fn impossible_term_and_vote_under_another_voter_id_are_refused() {
    use crate::rpc::{Reply, Request};
    use crate::types::{LogId, Vote};
    use openraft::raft::{AppendEntriesRequest, VoteRequest};

    let cluster = Cluster::found(3, 3, usual);
    cluster.say(0..3);
    let newest = Some(LogId::new_term_index(1 << 40, 1 << 40));
    let vote = |term, voter| Request::Vote(VoteRequest::new(Vote::new(term, voter), newest));
    let append = |term, voter| {
        let (vote, entries) = (Vote::new_committed(term, voter), Vec::new());
        Request::Append(AppendEntriesRequest { vote, prev_log_id: None, leader_commit: None, entries })
    };
    let before = cluster.group(0).metrics().leadership.term;
    for (peer, request) in [
        (None, vote(u64::MAX, 2)),
        (None, vote((1 << 33) + before, 2)),
        (None, append(u64::MAX, 2)),
        (Some(VoterId(3)), vote(before + 1, 2)),
        (Some(VoterId(99)), append(before + 1, 2)),
    ] {
        for at in 0..3 {
            let core = Arc::clone(&cluster.group(at).core);
            let reply = cluster.driver.block_on(core.handle(peer, request.encode()));
            assert!(matches!(reply, Reply::Failed(_)), "{reply:?}");
        }
    }
    cluster.say(3..5);
    assert!(cluster.group(0).metrics().leadership.term < before + 100, "no member took the term over");
}

#[test]
fn unconfirmed_member_grants_no_vote_acknowledges_nothing_and_starts_no_election() {
    let cluster = Cluster::found(3, 3, |options| options.unconfirmed = true);
    let address = |at: usize| cluster.nodes[at].member.address.clone();
    cluster.group(0).confirm();
    let asked = |least: u64| {
        until("it has asked several times", || (cluster.network.sent_by(&address(0)) >= least).then_some(()));
        cluster.network.sent_by(&address(1)) + cluster.network.sent_by(&address(2))
    };
    // Initialising a group makes each of them ask once; later only the first one starts elections.
    let others = asked(6);
    assert_eq!(asked(14), others);
    assert_eq!(cluster.group(0).leader(), None, "no member voted for it");
    cluster.group(1).confirm();
    for word in words(0..3) {
        cluster.say_among(&[0, 1], &word);
    }
    assert_eq!(cluster.running(2).words.all(), Vec::<String>::new());
    let settled = until("it is settled", || cluster.group(0).settled_index().filter(|index| *index >= 3));
    assert!(cluster.group(0).last_index() >= Some(settled));
    cluster.group(2).confirm();
    cluster.expect(0..3);
}

#[test]
fn leader_with_hung_disk_steps_down_without_a_sync() {
    let cluster = Cluster::found(3, 3, usual);
    cluster.say(0..5);
    let (old, new) = (cluster.leader(), cluster.follower());
    let others: Vec<usize> = (0..3).filter(|at| *at != old).collect();
    let hang = Arc::clone(&cluster.nodes[old].hang);
    let hung = hang.lock().unwrap();
    // The others have the entries that it cannot sync: a leader continues until it hands over.
    cluster.say_among(&[old], "word 5");
    cluster.say_among(&[old], "word 6");
    let to = cluster.nodes[new].member.id;
    cluster.driver.block_on(cluster.group(old).step_down(to, Duration::from_millis(300)));
    cluster.leader_among(&others);
    for word in words(7..10) {
        cluster.say_among(&others, &word);
    }
    drop(hung);
    cluster.group(old).set_electable(true);
    cluster.expect(0..10);
}

#[test]
fn leader_without_successor_withholds_heartbeats_and_another_is_elected() {
    let cluster = Cluster::found(5, 5, usual);
    cluster.say(0..5);
    let (old, deaf) = (cluster.leader(), cluster.follower());
    cluster.network.isolate(&cluster.nodes[deaf].member.address);
    let others: Vec<usize> = (0..5).filter(|at| *at != old && *at != deaf).collect();
    let to = cluster.nodes[deaf].member.id;
    cluster.driver.block_on(cluster.group(old).step_down(to, Duration::from_millis(300)));
    cluster.leader_among(&others);
    for word in words(5..8) {
        cluster.say_among(&others, &word);
    }
    // It follows meanwhile, and may lead again once it is electable.
    until("the old leader has heard", || (cluster.running(old).words.all() == words(0..8)).then_some(()));
    cluster.network.heal();
    cluster.group(old).set_electable(true);
    let leader = cluster.leader();
    let back = cluster.nodes[old].member.id;
    until("leadership goes back", || {
        let moved = cluster.driver.block_on(cluster.group(leader).transfer_leadership(back));
        (moved.is_ok() || cluster.leader() == old).then_some(())
    });
    cluster.say(8..9);
    cluster.expect(0..9);
}

#[test]
fn leader_without_quorum_withholds_heartbeats_and_is_replaced() {
    let cluster = Cluster::found(3, 3, usual);
    cluster.say(0..5);
    let old = cluster.leader();
    let others: Vec<usize> = (0..3).filter(|at| *at != old).collect();
    cluster.network.deafen(&cluster.nodes[old].member.address);
    // Its heartbeats still reach them.
    cluster.leader_among(&others);
    for word in words(5..8) {
        cluster.say_among(&others, &word);
    }
    cluster.network.heal();
    cluster.expect(0..8);
    cluster.say(8..10);
    cluster.expect(0..10);
}
