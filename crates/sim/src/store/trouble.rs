//! What goes wrong with the machines of the store. Everything ends by itself, and any number of it may happen at once.

use std::collections::{BTreeMap, BTreeSet};

use moim_journal::disk::Survival;

use super::{NODES, Run};
use crate::rot::Rot;
use crate::world::World;

/// The faults of one run.
pub(super) struct Trouble {
    next_ms: u64,
    restart_at: BTreeMap<usize, u64>,
    resume_at: BTreeMap<usize, u64>,
    mend_at: Option<u64>,
    quick_at: BTreeMap<usize, u64>,
    /// Machines whose power will be cut.
    cuts: BTreeSet<usize>,
    disk_ms: u64,
    /// Others cause trouble, too.
    rarely: bool,
    pub(super) rot: Option<Rot>,
    pub(super) count: u64,
}

impl Trouble {
    pub(super) fn new(disk_ms: u64, rarely: bool, rot: Option<Rot>) -> Self {
        Self {
            next_ms: 0,
            restart_at: BTreeMap::new(),
            resume_at: BTreeMap::new(),
            mend_at: None,
            quick_at: BTreeMap::new(),
            cuts: BTreeSet::new(),
            disk_ms,
            rarely,
            rot,
            count: 0,
        }
    }

    pub(super) fn step(&mut self, world: &mut World, run: &mut Run, heal: bool) {
        let now = if heal { u64::MAX } else { world.now_ms() };
        // A disk whose power was cut ends its process.
        for host in 0..NODES {
            if world.host(host).has_failed() {
                self.cuts.remove(&host);
                run.crash(world, host, Survival::Random);
                self.restart_at.entry(host).or_insert(world.now_ms() + 300);
            }
        }
        for (host, _) in self.resume_at.extract_if(.., |_, at| *at <= now) {
            world.host(host).resume();
            run.shared.wires.set_deaf(host, false);
        }
        for (host, _) in self.restart_at.extract_if(.., |_, at| *at <= now) {
            run.start(world, host);
        }
        for (host, _) in self.quick_at.extract_if(.., |_, at| *at <= now) {
            world.host(host).set_disk_ms(self.disk_ms);
            world.host(host).set_disk_hangs(false);
            run.shared.wires.set_hung(host, false);
        }
        if self.mend_at.take_if(|at| *at <= now).is_some() {
            world.trace.note(format_args!("wires are mended"));
            run.shared.wires.mend();
        }
        match self.rot.as_mut().map(|rot| rot.is_repairing(world.now_ms(), || run.is_all_in_sync())) {
            Some(Ok(true)) => return,
            Some(Err(what)) => {
                run.violation.get_or_insert(what);
            }
            Some(Ok(false)) | None => {}
        }
        if !heal && world.now_ms() >= self.next_ms {
            let calm = if self.rarely { 1_000..6_000 } else { 100..1_500 };
            self.next_ms = world.now_ms() + world.random.u64(calm);
            self.begin(world, run);
        }
    }

    /// Ends the process of a machine for a while.
    pub(super) fn kill(&mut self, world: &mut World, run: &mut Run, host: usize, lasting_ms: u64) {
        if !world.host(host).is_up() {
            return;
        }
        let survival = [Survival::Nothing, Survival::Everything, Survival::Random];
        let survival = survival[world.random.usize(..3)];
        // It may stand still, and must not be brought back before its time.
        self.resume_at.remove(&host);
        run.shared.wires.set_deaf(host, false);
        self.cuts.remove(&host);
        run.crash(world, host, survival);
        self.restart_at.insert(host, world.now_ms() + lasting_ms);
    }

    /// Two machines lose each other for a while.
    pub(super) fn part(&mut self, world: &World, run: &Run, ends: (usize, usize), lasting_ms: u64) {
        world.trace.note(format_args!("hosts {} and {} lose each other", ends.0, ends.1));
        run.shared.wires.cut(ends.0, ends.1);
        self.mend_at = Some(world.now_ms() + lasting_ms);
    }

    /// Crashes the machine that rots and flips a bit on its disk, if nothing else is wrong.
    fn maybe_rot(&mut self, world: &mut World, run: &mut Run) -> bool {
        let Some(rot) = &mut self.rot else { return false };
        let is_calm = self.restart_at.is_empty()
            && self.resume_at.is_empty()
            && self.mend_at.is_none()
            && self.quick_at.is_empty()
            && self.cuts.is_empty();
        if !is_calm || !run.is_all_in_sync() {
            return false;
        }
        let survival = [Survival::Nothing, Survival::Everything, Survival::Random][world.random.usize(..3)];
        run.crash(world, rot.host, survival);
        let mut random = world.random.fork();
        world.host(rot.host).rot(&mut random);
        let restart_ms = world.now_ms() + world.random.u64(20..1_500);
        self.restart_at.insert(rot.host, restart_ms);
        rot.on_flip(restart_ms);
        self.count += 1;
        true
    }

    fn begin(&mut self, world: &mut World, run: &mut Run) {
        if let Some(rot) = &mut self.rot {
            rot.is_due |= world.random.bool();
            if rot.is_due {
                // It waits for a moment in which nothing else is wrong.
                if !self.maybe_rot(world, run) {
                    self.next_ms = world.now_ms() + 50;
                }
                return;
            }
        }
        let host = world.random.usize(..NODES);
        let until = world.now_ms() + world.random.u64(20..2_500);
        if !world.host(host).is_up() || world.host(host).is_paused() {
            return;
        }
        self.count += 1;
        let core = run.shared.core_host;
        match world.random.u8(..11) {
            0..2 => self.kill(world, run, host, until - world.now_ms()),
            2 => {
                let operations = world.random.u64(1..40);
                world.host(host).cut_power_after(operations);
                self.cuts.insert(host);
            }
            3..5 => {
                world.host(host).pause();
                run.shared.wires.set_deaf(host, true);
                self.resume_at.insert(host, until);
            }
            5..7 => {
                world.trace.note(format_args!("host {host} reaches nobody"));
                (0..NODES).filter(|other| *other != host).for_each(|other| run.shared.wires.cut(host, other));
                run.shared.wires.cut(host, core);
                self.mend_at = Some(until);
            }
            7 => {
                world.trace.note(format_args!("host {host} does not reach the core"));
                run.shared.wires.cut(host, core);
                self.mend_at = Some(until);
            }
            8 => {
                let other = (host + 1) % NODES;
                self.part(world, run, (host, other), until - world.now_ms());
            }
            // What a time to live may differ by does not include it, and moves of slots would wait for it.
            9 if run.stepper.is_none() && !self.rarely => {
                let until = world.now_ms() + world.random.u64(500..4_000);
                world.host(host).set_disk_hangs(true);
                run.shared.wires.set_hung(host, true);
                self.quick_at.insert(host, until);
            }
            _ => {
                world.trace.note(format_args!("the disk of host {host} is slow"));
                world.host(host).set_disk_ms(200);
                self.quick_at.insert(host, until);
            }
        }
    }
}
