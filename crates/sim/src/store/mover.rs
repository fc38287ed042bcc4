//! Slots on the move while whoever moves them dies: for every move it is decided at which step a primary is struck, and which.
//!
//! A step is seen on the machines themselves, in their journals and in the slot map; the blow falls then, or a few milliseconds
//! later, when what the step wrote may be committed, or not. Most blows are crashes. Some part source and target for longer
//! than a source waits, so that it gives the attempt up and serves again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use moim_slots::service::{MoveStep, Selection, Step};
use moim_slots::slot_of;
use moim_slots::slot_set::SlotSet;

use super::clients::keys;
use super::{NODES, Run, Shared};
use crate::world::{Task, World};

/// Who is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// The primary that gives.
    Source,
    /// The primary that gets.
    Target,
    /// Both, at the same moment.
    Both,
}

impl Victim {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Source, Self::Target, Self::Both];
}

/// A primary that was killed, and at which step.
pub type Struck = (Step, Victim);

/// Longer than a source waits for its target.
const PARTED_MS: std::ops::Range<u64> = 5_500..7_000;

/// What is to happen to the next move.
#[derive(Clone, Copy)]
enum Blow {
    Kill(Victim),
    Part,
}

/// See the module.
pub(super) struct Mover {
    /// Which step and victim come next.
    next: usize,
    /// Somebody has been told to begin a move.
    beginning: Option<Task<()>>,
    plan: Option<(Step, Blow)>,
    /// When the blow falls, and on which move.
    due: Option<(u64, MoveStep, Blow)>,
    /// The furthest that anybody saw each move.
    seen: BTreeMap<u64, Step>,
    over: BTreeSet<u64>,
    pub(super) struck: Vec<Struck>,
}

impl Mover {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            // Seeds that follow each other strike at steps that follow each other.
            next: usize::try_from(seed % 1_000).unwrap_or(0) * 3,
            beginning: None,
            plan: None,
            due: None,
            seen: BTreeMap::new(),
            over: BTreeSet::new(),
            struck: Vec::new(),
        }
    }

    pub(super) fn moved(&self) -> u64 {
        self.over.len() as u64
    }

    /// Whether every node knows that no slot is on its way.
    pub(super) fn is_idle(&self, shared: &Shared) -> bool {
        (0..NODES).all(|host| shared.node(host).is_some_and(|node| node.service.steps().is_empty()))
    }

    /// Looks at all moves; begins one, or strikes.
    pub(super) fn step(&mut self, world: &mut World, run: &mut Run) {
        let nodes: Vec<_> = (0..NODES).filter_map(|host| run.shared.node(host)).collect();
        let steps: Vec<MoveStep> = nodes.iter().flat_map(|node| node.service.steps()).collect();
        for one in &steps {
            let furthest = self.seen.entry(one.id).or_insert(one.step);
            *furthest = one.step.max(*furthest);
            self.over.extend((one.step >= Step::Moved).then_some(one.id));
            if let Some((_, blow)) = self.plan.take_if(|(step, _)| *step == one.step) {
                let later = [0, 0, 4, 10, 30][world.random.usize(..5)];
                self.due = Some((world.now_ms() + later, *one, blow));
            }
        }
        if let Some((_, one, blow)) = self.due.take_if(|(at, ..)| *at <= world.now_ms()) {
            self.strike(world, run, one, blow);
        }
        if steps.is_empty() && self.due.is_none() && self.beginning.as_ref().is_none_or(Task::is_over) {
            self.begin(world, run);
        }
    }

    fn strike(&mut self, world: &mut World, run: &mut Run, one: MoveStep, blow: Blow) {
        let leader = |shard: u16| {
            (0..NODES).find(|host| run.shared.node(*host).is_some_and(|node| node.service.leads(shard)))
        };
        let (Some(source), Some(target)) = (leader(one.from), leader(one.to)) else { return };
        let mut trouble = std::mem::replace(&mut run.trouble, super::Trouble::new(0, false, None));
        let lasting = world.random.u64(20..1_500);
        trouble.count += 1;
        world.trace.note(format_args!("move {} is struck: {:?}", one.id, one.step));
        match blow {
            Blow::Kill(victim) => {
                let hosts = match victim {
                    Victim::Source => vec![source],
                    Victim::Target => vec![target],
                    Victim::Both => vec![source, target],
                };
                hosts.into_iter().for_each(|host| trouble.kill(world, run, host, lasting));
                self.struck.push((one.step, victim));
            }
            Blow::Part if source != target => {
                let lasting = world.random.u64(PARTED_MS);
                trouble.part(world, run, (source, target), lasting);
            }
            Blow::Part => {}
        }
        run.trouble = trouble;
    }

    /// Has some node begin a move of slots that clients use.
    fn begin(&mut self, world: &mut World, run: &Run) {
        let host = world.random.usize(..NODES);
        let Some(node) = run.shared.node(host) else { return };
        let view = node.service.shared().view.load_full();
        let from = world.random.u16(..run.shared.shards as u16);
        let used = keys(run.stepper.is_some()).map(|key| slot_of(key.as_bytes()));
        let slots: SlotSet = used.filter(|slot| view.owner(*slot) == Some(from)).collect();
        if slots.is_empty() {
            return;
        }
        // A step that nobody saw is waited for in the next move.
        if self.plan.is_none() {
            let (step, victim) = (Step::ALL[self.next % 7], Victim::ALL[self.next / 7 % 3]);
            let blow = if world.random.u8(..8) == 0 { Blow::Part } else { Blow::Kill(victim) };
            self.next += 1;
            self.plan = Some((step, blow));
        }
        let to = 1 - from;
        world.trace.note(format_args!("slots {slots} are to move from shard {from} to {to}"));
        let service = Arc::clone(&node.service);
        self.beginning = world.host(host).spawn(async move {
            // Refused or not heard of: another one is begun then.
            let _ = service.begin_move(&from.to_string(), &to.to_string(), &Selection::Slots(slots)).await;
        });
    }
}
