//! Storms: random clients that join, sync, commit, leave, forget their ids and fall silent, over a log that
//! is slow and sometimes refuses, with restarts in between. The world checks its invariants after every
//! step; when the storm is over, clients that behave must all come to rest, nobody may be left waiting, and
//! a reload of the log must find what the machine has.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;

use super::world::{World, commit_topics, config, join};
use crate::groups::*;

const GROUPS: [&str; 2] = ["g", "h"];

#[derive(Clone, Default)]
struct Client {
    number: usize,
    id: Arc<str>,
    generation: i32,
    /// What the last join said; empty unless this client leads.
    roster: Vec<Arc<str>>,
    joining: Option<Token>,
    syncing: Option<Token>,
    step: Step,
    assigned: Bytes,
}

/// What a client that behaves does next.
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

    /// Every third client is static, every fourth talks an old version that needs no second join.
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
            assignments: self.roster.iter().map(give).collect(),
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
                self.roster = members.map(|member| member.member_id.clone()).collect();
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
            other => panic!("a member was told {other:?}"),
        }
    }
}

/// Whose id it is. A static member keeps its assignment under a new id, so assignments name the owner.
fn owner(id: &str) -> &str {
    id.split('-').next().unwrap_or_default()
}

struct Storm {
    world: World,
    clients: Vec<Client>,
}

impl Storm {
    fn new(clients: usize, delay: u64) -> Self {
        let config = Config { initial_rebalance_delay_ms: delay, ..config() };
        let clients = (0..clients).map(|number| Client { number, ..Client::default() }).collect();
        Self { world: World::new(config), clients }
    }

    fn collect(&mut self) {
        for client in &mut self.clients {
            if let Some(response) = client.joining.and_then(|token| self.world.take(token)) {
                client.joining = None;
                client.on_join(response);
            }
            if let Some(response) = client.syncing.and_then(|token| self.world.take(token)) {
                client.syncing = None;
                client.on_sync(response);
            }
        }
    }

    /// One thing that happens in the storm.
    fn blow(&mut self, who: usize, what: u8, how: u16) {
        let world = &mut self.world;
        let client = &mut self.clients[who];
        match what {
            0..=3 => client.joining = Some(world.ask(|token| Input::Join(token, client.join(how)))),
            4 => {
                client.id = Arc::default();
                client.joining = Some(world.ask(|token| Input::Join(token, client.join(how))));
            }
            5..=7 => client.syncing = Some(world.ask(|token| Input::Sync(token, client.sync()))),
            8 => drop(world.ask(|token| Input::Heartbeat(token, client.heartbeat()))),
            9 => {
                let (member_id, instance_id) = (client.id.clone(), client.instance());
                let by_admin = how.is_multiple_of(2) && instance_id.is_some();
                let member_id = if by_admin { Arc::default() } else { member_id };
                let members = vec![LeavingMember { member_id, instance_id, reason: None }];
                world.ask(|token| Input::Leave(token, Leave { group: client.group().into(), members }));
            }
            10 => drop(world.ask(|token| Input::OffsetCommit(token, client.commit(how)))),
            11 if world.is_ending(client.producer()) => {}
            11 => {
                let OffsetCommit { group, topics, .. } = client.commit(how);
                let (producer, member_id) = (client.producer(), Arc::default());
                let request =
                    TxnOffsetCommit { producer, group, generation: -1, member_id, instance_id: None, topics };
                world.ask(|token| Input::TxnOffsetCommit(token, request));
            }
            12 => world.marker(client.producer(), how.is_multiple_of(2)),
            13 => drop(world.ask(|token| Input::DeleteGroups(token, vec![client.group().into()]))),
            14 => {
                let topics = vec![("t".into(), vec![i32::from(how % 3)]), ("u".into(), vec![0])];
                world.ask(|token| {
                    Input::OffsetDelete(token, OffsetDelete { group: client.group().into(), topics })
                });
            }
            15 => world.topic_deleted("u"),
            16..=20 => drop(world.write_one(Ok(()))),
            21 => world.refuse_one(),
            22 => world.advance(u64::from(how % 9_000)),
            _ => self.restart(how),
        }
        self.collect();
    }

    /// Rare: a restart ends the interesting part of a storm.
    fn restart(&mut self, how: u16) {
        if how.is_multiple_of(4) {
            self.world.restart();
            for client in &mut self.clients {
                (client.joining, client.syncing) = (None, None);
            }
        }
    }

    /// The clients that are left behave. Returns when all of them are at rest.
    fn calm(&mut self, survivors: usize) {
        for client in 0..self.clients.len() {
            self.world.marker(self.clients[client].producer(), client % 2 == 0);
        }
        self.clients.truncate(survivors);
        for client in &mut self.clients {
            client.step = Step::Join;
        }
        for _round in 0..200 {
            self.world.write_all();
            self.collect();
            if self.is_calm() {
                return;
            }
            self.round();
            self.world.advance(1_000);
        }
        let steps: Vec<_> = self.clients.iter().map(|c| (c.number, c.step, c.joining, c.syncing)).collect();
        panic!("no rest: {steps:?}\n{:#?}", self.world.groups.groups);
    }

    fn round(&mut self) {
        for client in &mut self.clients {
            if client.joining.is_some() || client.syncing.is_some() {
                continue;
            }
            let world = &mut self.world;
            match client.step {
                Step::Join => client.joining = Some(world.ask(|token| Input::Join(token, client.join(0)))),
                Step::Sync => client.syncing = Some(world.ask(|token| Input::Sync(token, client.sync()))),
                Step::Beat => {
                    let token = world.ask(|token| Input::Heartbeat(token, client.heartbeat()));
                    match world.take(token) {
                        Some(Response::Heartbeat(ErrorCode::None)) => {}
                        Some(Response::Heartbeat(error)) => client.on_error(error),
                        other => panic!("a heartbeat answered by {other:?}"),
                    }
                }
            }
        }
    }

    /// Every client beats in the current generation of a stable group, and nobody else is a member.
    fn is_calm(&self) -> bool {
        let groups = &self.world.groups.groups;
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

    fn check_rest(&mut self) {
        assert_eq!(self.world.unanswered(), 0, "somebody waits in a group at rest");
        for client in &self.clients {
            let assigned = String::from_utf8_lossy(&client.assigned);
            assert_eq!(
                assigned,
                format!("{} {}", client.generation, owner(&client.id)),
                "client {}",
                client.number
            );
        }
        assert_eq!(self.world.reload().image(), self.world.groups.image());
        assert!(self.world.groups.txns.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn after_any_storm_the_survivors_come_to_rest(
        events in proptest::collection::vec((0usize..7, 0u8..24, any::<u16>()), 0..250),
        survivors in 0usize..=7,
        delay in prop_oneof![Just(0u64), Just(1_500)],
    ) {
        let run = || {
            let mut storm = Storm::new(7, delay);
            for (who, what, how) in &events {
                storm.blow(*who, *what, *how);
            }
            storm.calm(survivors);
            storm.check_rest();
            storm.world
        };
        let (once, again) = (run(), run());
        assert_eq!(once.log, again.log, "the same inputs gave other writes");
        assert_eq!(once.groups.image(), again.groups.image());
    }
}
