//! Slot migrations with faults at every step: each migration has a planned step, and a primary that fails at it.
//!
//! A step is observed on the hosts themselves, in their journals and in the slot map; the fault follows at once, or a
//! few milliseconds later, when the writes of the step may be committed, or not. Most faults are crashes. Some
//! partition source and target for longer than a source waits, so that it abandons the attempt and serves its slots
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use moim_slots::service::{MoveStep, Selection, Step};
use moim_slots::slot_of;
use moim_slots::slot_set::SlotSet;

use super::clients::keys;
use super::{NODES, Run, Shared};
use crate::world::{Task, World};

/// The primary that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// The primary of the source shard.
    Source,
    /// The primary of the target shard.
    Target,
    /// Both primaries, at the same time.
    Both,
}

impl Victim {
    /// All victims.
    pub const ALL: [Self; 3] = [Self::Source, Self::Target, Self::Both];
}

/// A killed primary, and the step of its migration.
pub type KilledAt = (Step, Victim);

/// Duration of a partition: longer than a source waits for its target.
const PARTITION_MS: std::ops::Range<u64> = 5_500..7_000;

/// The fault of a migration.
#[derive(Clone, Copy)]
enum Fault {
    Kill(Victim),
    Partition,
}

/// Starts slot migrations and injects their faults.
pub(super) struct MigrationDriver {
    /// Index of the next step and victim.
    next: usize,
    /// The request to start a migration.
    starting: Option<Task<()>>,
    plan: Option<(Step, Fault)>,
    /// Time and migration of the next fault.
    due: Option<(u64, MoveStep, Fault)>,
    /// The newest observed step of each migration.
    observed: BTreeMap<u64, Step>,
    completed: BTreeSet<u64>,
    pub(super) kills: Vec<KilledAt>,
}

impl MigrationDriver {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            // Consecutive seeds start at consecutive steps.
            next: usize::try_from(seed % 1_000).unwrap_or(0) * 3,
            starting: None,
            plan: None,
            due: None,
            observed: BTreeMap::new(),
            completed: BTreeSet::new(),
            kills: Vec::new(),
        }
    }

    pub(super) fn completed(&self) -> u64 {
        self.completed.len() as u64
    }

    /// True if every node reports that no slot is migrating.
    pub(super) fn is_idle(&self, shared: &Shared) -> bool {
        (0..NODES).all(|host| shared.node(host).is_some_and(|node| node.service.steps().is_empty()))
    }

    /// Observes all migrations; starts one, or injects a fault.
    pub(super) fn step(&mut self, world: &mut World, run: &mut Run) {
        let nodes: Vec<_> = (0..NODES).filter_map(|host| run.shared.node(host)).collect();
        let steps: Vec<MoveStep> = nodes.iter().flat_map(|node| node.service.steps()).collect();
        for observed in &steps {
            let newest = self.observed.entry(observed.id).or_insert(observed.step);
            *newest = observed.step.max(*newest);
            self.completed.extend((observed.step >= Step::Moved).then_some(observed.id));
            if let Some((_, fault)) = self.plan.take_if(|(step, _)| *step == observed.step) {
                let later = [0, 0, 4, 10, 30][world.random.usize(..5)];
                self.due = Some((world.now_ms() + later, *observed, fault));
            }
        }
        if let Some((_, migration, fault)) = self.due.take_if(|(at, ..)| *at <= world.now_ms()) {
            self.inject(world, run, migration, fault);
        }
        if steps.is_empty() && self.due.is_none() && self.starting.as_ref().is_none_or(Task::is_over) {
            self.start(world, run);
        }
    }

    fn inject(&mut self, world: &mut World, run: &mut Run, migration: MoveStep, fault: Fault) {
        let leader = |shard: u16| {
            (0..NODES).find(|host| run.shared.node(*host).is_some_and(|node| node.service.leads(shard)))
        };
        let (Some(source), Some(target)) = (leader(migration.from), leader(migration.to)) else { return };
        let mut faults = std::mem::replace(&mut run.faults, super::Faults::new(0, false, None));
        let duration_ms = world.random.u64(20..1_500);
        faults.count += 1;
        world.trace.record(format_args!("fault in migration {} at step {:?}", migration.id, migration.step));
        match fault {
            Fault::Kill(victim) => {
                let hosts = match victim {
                    Victim::Source => vec![source],
                    Victim::Target => vec![target],
                    Victim::Both => vec![source, target],
                };
                hosts.into_iter().for_each(|host| faults.kill(world, run, host, duration_ms));
                self.kills.push((migration.step, victim));
            }
            Fault::Partition if source != target => {
                let duration_ms = world.random.u64(PARTITION_MS);
                faults.partition(world, run, (source, target), duration_ms);
            }
            Fault::Partition => {}
        }
        run.faults = faults;
    }

    /// Has a random node start a migration of slots that clients use.
    fn start(&mut self, world: &mut World, run: &Run) {
        let host = world.random.usize(..NODES);
        let Some(node) = run.shared.node(host) else { return };
        let view = node.service.shared().view.load_full();
        let from = world.random.u16(..run.shared.shards as u16);
        let used = keys(run.clock_stepper.is_some()).map(|key| slot_of(key.as_bytes()));
        let slots: SlotSet = used.filter(|slot| view.owner(*slot) == Some(from)).collect();
        if slots.is_empty() {
            return;
        }
        // A planned step that was not observed is kept for the next migration.
        if self.plan.is_none() {
            let (step, victim) = (Step::ALL[self.next % 7], Victim::ALL[self.next / 7 % 3]);
            let fault = if world.random.u8(..8) == 0 { Fault::Partition } else { Fault::Kill(victim) };
            self.next += 1;
            self.plan = Some((step, fault));
        }
        let to = 1 - from;
        world.trace.record(format_args!("migration of slots {slots} from shard {from} to {to}"));
        let service = Arc::clone(&node.service);
        self.starting = world.host(host).spawn(async move {
            // After a rejection or an unknown outcome another migration is started.
            let _ = service.begin_move(&from.to_string(), &to.to_string(), &Selection::Slots(slots)).await;
        });
    }
}
