//! What goes wrong with the machines of a site. Everything ends by itself, and any number of it may happen at once.

use std::collections::{BTreeMap, BTreeSet};

use moim_journal::disk::Survival;

use super::{NODES, Served, Site};
use crate::rot::Rot;
use crate::world::World;

/// The faults of one site.
pub(super) struct Trouble {
    next_ms: u64,
    restart_at: BTreeMap<usize, u64>,
    resume_at: BTreeMap<usize, u64>,
    mend_at: Option<u64>,
    quick_at: BTreeMap<usize, u64>,
    /// Machines whose power will be cut.
    cuts: BTreeSet<usize>,
    disk_ms: u64,
    pub(super) rot: Option<Rot>,
    pub(super) count: u64,
}

impl Trouble {
    pub(super) fn new(disk_ms: u64, rot: Option<Rot>) -> Self {
        Self {
            next_ms: 0,
            restart_at: BTreeMap::new(),
            resume_at: BTreeMap::new(),
            mend_at: None,
            quick_at: BTreeMap::new(),
            cuts: BTreeSet::new(),
            disk_ms,
            rot,
            count: 0,
        }
    }

    pub(super) fn step<S: Served>(&mut self, world: &mut World, site: &mut Site<S>, heal: bool) {
        let now = if heal { u64::MAX } else { world.now_ms() };
        // A disk whose power was cut ends its process.
        for host in 0..NODES {
            if world.host(host).has_failed() {
                self.cuts.remove(&host);
                site.crash(world, host, Survival::Random);
                self.restart_at.entry(host).or_insert(world.now_ms() + 300);
            }
        }
        for (host, _) in self.resume_at.extract_if(.., |_, at| *at <= now) {
            world.host(host).resume();
            site.shared.wires.set_deaf(host, false);
        }
        for (host, _) in self.restart_at.extract_if(.., |_, at| *at <= now) {
            site.start(world, host);
        }
        for (host, _) in self.quick_at.extract_if(.., |_, at| *at <= now) {
            world.host(host).set_disk_ms(self.disk_ms);
            world.host(host).set_disk_hangs(false);
            site.shared.wires.set_hung(host, false);
        }
        if self.mend_at.take_if(|at| *at <= now).is_some() {
            world.trace.note(format_args!("wires are mended"));
            site.shared.wires.mend();
        }
        match self.rot.as_mut().map(|rot| rot.is_repairing(world.now_ms(), || site.is_all_in_sync())) {
            Some(Ok(true)) => return,
            Some(Err(what)) => {
                site.violation.get_or_insert(what);
            }
            Some(Ok(false)) | None => {}
        }
        if !heal && world.now_ms() >= self.next_ms {
            self.next_ms = world.now_ms() + world.random.u64(100..1_500);
            self.begin(world, site);
        }
    }

    /// Crashes the machine that rots and flips a bit on its disk, if nothing else is wrong.
    fn maybe_rot<S: Served>(&mut self, world: &mut World, site: &mut Site<S>) -> bool {
        let Some(rot) = &mut self.rot else { return false };
        let is_calm = self.restart_at.is_empty()
            && self.resume_at.is_empty()
            && self.mend_at.is_none()
            && self.quick_at.is_empty()
            && self.cuts.is_empty();
        if !is_calm || !site.is_all_in_sync() {
            return false;
        }
        let survival = [Survival::Nothing, Survival::Everything, Survival::Random][world.random.usize(..3)];
        site.crash(world, rot.host, survival);
        let mut random = world.random.fork();
        world.host(rot.host).rot(&mut random);
        let restart_ms = world.now_ms() + world.random.u64(20..1_500);
        self.restart_at.insert(rot.host, restart_ms);
        rot.on_flip(restart_ms);
        self.count += 1;
        true
    }

    fn begin<S: Served>(&mut self, world: &mut World, site: &mut Site<S>) {
        if let Some(rot) = &mut self.rot {
            rot.is_due |= world.random.bool();
            if rot.is_due {
                // It waits for a moment in which nothing else is wrong.
                if !self.maybe_rot(world, site) {
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
        let core = site.shared.core_host;
        match world.random.u8(..11) {
            0..2 => {
                let survival = [Survival::Nothing, Survival::Everything, Survival::Random];
                let survival = survival[world.random.usize(..3)];
                self.cuts.remove(&host);
                site.crash(world, host, survival);
                self.restart_at.insert(host, until);
            }
            2 => {
                let operations = world.random.u64(1..40);
                world.host(host).cut_power_after(operations);
                self.cuts.insert(host);
            }
            3..5 => {
                world.host(host).pause();
                site.shared.wires.set_deaf(host, true);
                self.resume_at.insert(host, until);
            }
            5..7 => {
                world.trace.note(format_args!("host {host} reaches nobody"));
                (0..NODES)
                    .filter(|other| *other != host)
                    .for_each(|other| site.shared.wires.cut(host, other));
                site.shared.wires.cut(host, core);
                self.mend_at = Some(until);
            }
            7 => {
                world.trace.note(format_args!("host {host} does not reach the core"));
                site.shared.wires.cut(host, core);
                self.mend_at = Some(until);
            }
            8 => {
                let other = (host + 1) % NODES;
                world.trace.note(format_args!("hosts {host} and {other} lose each other"));
                site.shared.wires.cut(host, other);
                self.mend_at = Some(until);
            }
            9 => {
                let until = world.now_ms() + world.random.u64(500..4_000);
                world.host(host).set_disk_hangs(true);
                site.shared.wires.set_hung(host, true);
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
