//! Randomized tests: clients join, sync, commit, leave, forget their ids and stop sending, over a log that is slow
//! and sometimes fails, with restarts in between. The harness checks its invariants after every step; at the end,
//! well-behaved clients must all become stable, no request may be left waiting, and a reload of the log must give the
//! coordinator's state.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;

use super::harness::{Harness, commit_topics, config, join};
use crate::groups::*;

const GROUPS: [&str; 2] = ["g", "h"];

#[derive(Clone, Default)]
struct Client {
    number: usize,
    id: Arc<str>,
    generation: i32,
    /// The members in the last JoinGroup response; empty unless this client leads.
    member_list: Vec<Arc<str>>,
    joining: Option<Token>,
    syncing: Option<Token>,
    step: Step,
    assigned: Bytes,
}

/// The next request of a well-behaved client.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
enum Step {
    #[default]
    Join,
    Sync,
    Beat,
}

impl Client {
    fn group(&self) -> &'static str {
        GROUPS[self.number % GROUPS.len()]
    }

    /// Every third client is static, every fourth uses an old version that needs no second join.
    fn instance(&self) -> Option<Arc<str>> {
        self.number.is_multiple_of(3).then(|| format!("i{}", self.number).into())
    }

    fn producer(&self) -> TxnProducer {
        TxnProducer { id: self.number as i64, epoch: 0 }
    }

    fn join(&self, flavour: u16) -> Join {
        let topics: &[&str] = if flavour % 5 == 1 { &["t", "u"] } else { &["t"] };
        let mut request = join(self.group(), &format!("c{}", self.number), &self.id, topics);
        request.instance_id = self.instance();
        request.require_known_member_id = !self.number.is_multiple_of(4) && request.instance_id.is_none();
        request.can_skip_assignment = flavour % 3 == 1;
        request.session_timeout_ms = 5_000 + i32::from(flavour % 7) * 1_000;
        request.rebalance_timeout_ms = 8_000 + i32::from(flavour % 4) * 4_000;
        let sticky = Protocol { name: "sticky".into(), metadata: request.protocols[0].metadata.clone() };
        if !flavour.is_multiple_of(3) {
            request.protocols.insert(usize::from(flavour % 2), sticky);
        }
        request
    }

    fn sync(&self) -> Sync {
        let give = |id: &Arc<str>| (id.clone(), Bytes::from(format!("{} {}", self.generation, owner(id))));
        Sync {
            group: self.group().into(),
            generation: self.generation,
            member_id: self.id.clone(),
            instance_id: self.instance(),
            protocol_type: None,
            protocol: None,
            assignments: self.member_list.iter().map(give).collect(),
        }
    }

    fn commit(&self, at: u16) -> OffsetCommit {
        OffsetCommit {
            group: self.group().into(),
            generation: self.generation,
            member_id: self.id.clone(),
            instance_id: self.instance(),
            retention_ms: None,
            topics: commit_topics(&[("t", i32::from(at % 3), i64::from(at)), ("u", 0, i64::from(at))]),
        }
    }

    fn heartbeat(&self) -> Heartbeat {
        Heartbeat {
            group: self.group().into(),
            generation: self.generation,
            member_id: self.id.clone(),
            instance_id: self.instance(),
        }
    }

    fn on_join(&mut self, response: Response) {
        let Response::Join(join) = response else { panic!("a join answered by {response:?}") };
        match join.error {
            ErrorCode::None => {
                self.id = join.member_id.clone();
                self.generation = join.generation;
                let assigns = !join.skip_assignment;
                let members = join.members.iter().filter(|_| assigns);
                self.member_list = members.map(|member| member.member_id.clone()).collect();
                self.step = Step::Sync;
            }
            ErrorCode::MemberIdRequired => self.id = join.member_id,
            ErrorCode::UnknownMemberId | ErrorCode::FencedInstanceId => self.id = Arc::default(),
            ErrorCode::RebalanceInProgress
            | ErrorCode::CoordinatorNotAvailable
            | ErrorCode::NotCoordinator
            | ErrorCode::InconsistentGroupProtocol => {}
            other => panic!("join answered by {other:?}"),
        }
    }

    fn on_sync(&mut self, response: Response) {
        let Response::Sync(sync) = response else { panic!("a sync answered by {response:?}") };
        self.step = Step::Join;
        match sync.error {
            ErrorCode::None => {
                self.assigned = sync.assignment;
                self.step = Step::Beat;
            }
            error => self.on_error(error),
        }
    }

    fn on_error(&mut self, error: ErrorCode) {
        self.step = Step::Join;
        match error {
            ErrorCode::UnknownMemberId | ErrorCode::FencedInstanceId => self.id = Arc::default(),
            ErrorCode::RebalanceInProgress
            | ErrorCode::IllegalGeneration
            | ErrorCode::NotCoordinator
            | ErrorCode::CoordinatorNotAvailable => {}
            other => panic!("unexpected member error {other:?}"),
        }
    }
}

/// The owner of a member id. A static member keeps its assignment under a new id, so assignments name the owner.
fn owner(id: &str) -> &str {
    id.split('-').next().unwrap_or_default()
}

struct RandomRun {
    harness: Harness,
    clients: Vec<Client>,
}

impl RandomRun {
    fn new(clients: usize, delay: u64) -> Self {
        let config = Config { initial_rebalance_delay_ms: delay, ..config() };
        let clients = (0..clients).map(|number| Client { number, ..Client::default() }).collect();
        Self { harness: Harness::new(config), clients }
    }

    fn collect(&mut self) {
        for client in &mut self.clients {
            if let Some(response) = client.joining.and_then(|token| self.harness.take(token)) {
                client.joining = None;
                client.on_join(response);
            }
            if let Some(response) = client.syncing.and_then(|token| self.harness.take(token)) {
                client.syncing = None;
                client.on_sync(response);
            }
        }
    }

    /// One random step.
    fn random_step(&mut self, who: usize, what: u8, how: u16) {
        let harness = &mut self.harness;
        let client = &mut self.clients[who];
        match what {
            0..=3 => client.joining = Some(harness.ask(|token| Input::Join(token, client.join(how)))),
            4 => {
                client.id = Arc::default();
                client.joining = Some(harness.ask(|token| Input::Join(token, client.join(how))));
            }
            5..=7 => client.syncing = Some(harness.ask(|token| Input::Sync(token, client.sync()))),
            8 => drop(harness.ask(|token| Input::Heartbeat(token, client.heartbeat()))),
            9 => {
                let (member_id, instance_id) = (client.id.clone(), client.instance());
                let by_admin = how.is_multiple_of(2) && instance_id.is_some();
                let member_id = if by_admin { Arc::default() } else { member_id };
                let members = vec![LeavingMember { member_id, instance_id, reason: None }];
                harness.ask(|token| Input::Leave(token, Leave { group: client.group().into(), members }));
            }
            10 => drop(harness.ask(|token| Input::OffsetCommit(token, client.commit(how)))),
            11 if harness.is_ending(client.producer()) => {}
            11 => {
                let OffsetCommit { group, topics, .. } = client.commit(how);
                let (producer, member_id) = (client.producer(), Arc::default());
                let request =
                    TxnOffsetCommit { producer, group, generation: -1, member_id, instance_id: None, topics };
                harness.ask(|token| Input::TxnOffsetCommit(token, request));
            }
            12 => harness.marker(client.producer(), how.is_multiple_of(2)),
            13 => drop(harness.ask(|token| Input::DeleteGroups(token, vec![client.group().into()]))),
            14 => {
                let topics = vec![("t".into(), vec![i32::from(how % 3)]), ("u".into(), vec![0])];
                harness.ask(|token| {
                    Input::OffsetDelete(token, OffsetDelete { group: client.group().into(), topics })
                });
            }
            15 => harness.topic_deleted("u"),
            16..=20 => drop(harness.write_one(Ok(()))),
            21 => harness.refuse_one(),
            22 => harness.advance(u64::from(how % 9_000)),
            _ => self.restart(how),
        }
        self.collect();
    }

    /// Rare, because a restart resets the interesting state.
    fn restart(&mut self, how: u16) {
        if how.is_multiple_of(4) {
            self.harness.restart();
            for client in &mut self.clients {
                (client.joining, client.syncing) = (None, None);
            }
        }
    }

    /// The remaining clients behave well. Returns when all of them are stable.
    fn quiesce(&mut self, survivors: usize) {
        for client in 0..self.clients.len() {
            self.harness.marker(self.clients[client].producer(), client % 2 == 0);
        }
        self.clients.truncate(survivors);
        for client in &mut self.clients {
            client.step = Step::Join;
        }
        for _round in 0..200 {
            self.harness.write_all();
            self.collect();
            if self.is_quiescent() {
                return;
            }
            self.round();
            self.harness.advance(1_000);
        }
        let steps: Vec<_> = self.clients.iter().map(|c| (c.number, c.step, c.joining, c.syncing)).collect();
        panic!("not quiescent: {steps:?}\n{:#?}", self.harness.groups.groups);
    }

    fn round(&mut self) {
        for client in &mut self.clients {
            if client.joining.is_some() || client.syncing.is_some() {
                continue;
            }
            let harness = &mut self.harness;
            match client.step {
                Step::Join => client.joining = Some(harness.ask(|token| Input::Join(token, client.join(0)))),
                Step::Sync => client.syncing = Some(harness.ask(|token| Input::Sync(token, client.sync()))),
                Step::Beat => {
                    let token = harness.ask(|token| Input::Heartbeat(token, client.heartbeat()));
                    match harness.take(token) {
                        Some(Response::Heartbeat(ErrorCode::None)) => {}
                        Some(Response::Heartbeat(error)) => client.on_error(error),
                        other => panic!("a heartbeat answered by {other:?}"),
                    }
                }
            }
        }
    }

    /// True if every client heartbeats in the current generation of a stable group that has no other members.
    fn is_quiescent(&self) -> bool {
        let groups = &self.harness.groups.groups;
        let rests = |client: &Client| {
            client.step == Step::Beat
                && groups.get(client.group()).is_some_and(|group| {
                    group.state() == State::Stable
                        && group.generation == client.generation
                        && group.members.contains_key(&client.id)
                })
        };
        let members: usize = groups.values().map(|group| group.members.len()).sum();
        let pending: usize = groups.values().map(|group| group.pending.len()).sum();
        members == self.clients.len() && pending == 0 && self.clients.iter().all(rests)
    }

    fn check_quiescent(&mut self) {
        assert_eq!(self.harness.unanswered(), 0, "a request waits in a quiescent group");
        for client in &self.clients {
            let assigned = String::from_utf8_lossy(&client.assigned);
            assert_eq!(
                assigned,
                format!("{} {}", client.generation, owner(&client.id)),
                "client {}",
                client.number
            );
        }
        assert_eq!(self.harness.reload().image(), self.harness.groups.image());
        assert!(self.harness.groups.txns.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn groups_become_stable_after_random_requests(
        events in proptest::collection::vec((0usize..7, 0u8..24, any::<u16>()), 0..250),
        survivors in 0usize..=7,
        delay in prop_oneof![Just(0u64), Just(1_500)],
    ) {
        let run = || {
            let mut storm = RandomRun::new(7, delay);
            for (who, what, how) in &events {
                storm.random_step(*who, *what, *how);
            }
            storm.quiesce(survivors);
            storm.check_quiescent();
            storm.harness
        };
        let (once, again) = (run(), run());
        assert_eq!(once.log, again.log, "the same inputs gave other writes");
        assert_eq!(once.groups.image(), again.groups.image());
    }
}
