//! Faults of the hosts of a testbed. Every fault ends after a time, and any number of them may overlap.

use std::collections::{BTreeMap, BTreeSet};

use moim_journal::disk::Survival;

use super::{NODES, Service, Testbed};
use crate::bit_rot::BitRot;
use crate::world::World;

/// The faults of one testbed.
pub(super) struct Faults {
    next_ms: u64,
    restart_at: BTreeMap<usize, u64>,
    resume_at: BTreeMap<usize, u64>,
    heal_at: Option<u64>,
    disk_healthy_at: BTreeMap<usize, u64>,
    /// Hosts with a scheduled power cut.
    power_cuts: BTreeSet<usize>,
    disk_ms: u64,
    pub(super) rot: Option<BitRot>,
    pub(super) count: u64,
}

impl Faults {
    pub(super) fn new(disk_ms: u64, rot: Option<BitRot>) -> Self {
        Self {
            next_ms: 0,
            restart_at: BTreeMap::new(),
            resume_at: BTreeMap::new(),
            heal_at: None,
            disk_healthy_at: BTreeMap::new(),
            power_cuts: BTreeSet::new(),
            disk_ms,
            rot,
            count: 0,
        }
    }

    pub(super) fn step<S: Service>(&mut self, world: &mut World, testbed: &mut Testbed<S>, heal: bool) {
        let now = if heal { u64::MAX } else { world.now_ms() };
        // A host whose disk lost power crashes.
        for host in 0..NODES {
            if world.host(host).has_failed() {
                self.power_cuts.remove(&host);
                testbed.crash(world, host, Survival::Random);
                self.restart_at.entry(host).or_insert(world.now_ms() + 300);
            }
        }
        for (host, _) in self.resume_at.extract_if(.., |_, at| *at <= now) {
            world.host(host).resume();
            testbed.shared.links.set_unresponsive(host, false);
        }
        for (host, _) in self.restart_at.extract_if(.., |_, at| *at <= now) {
            testbed.start(world, host);
        }
        for (host, _) in self.disk_healthy_at.extract_if(.., |_, at| *at <= now) {
            world.host(host).set_disk_ms(self.disk_ms);
            world.host(host).set_disk_hangs(false);
            testbed.shared.links.set_hung(host, false);
        }
        if self.heal_at.take_if(|at| *at <= now).is_some() {
            world.trace.record(format_args!("links healed"));
            testbed.shared.links.heal();
        }
        match self.rot.as_mut().map(|rot| rot.is_repairing(world.now_ms(), || testbed.is_all_in_sync())) {
            Some(Ok(true)) => return,
            Some(Err(what)) => {
                testbed.violation.get_or_insert(what);
            }
            Some(Ok(false)) | None => {}
        }
        if !heal && world.now_ms() >= self.next_ms {
            self.next_ms = world.now_ms() + world.random.u64(100..1_500);
            self.start_fault(world, testbed);
        }
    }

    /// Crashes the host with bit rot and flips a bit on its disk, if no other fault is active.
    fn maybe_flip_bit<S: Service>(&mut self, world: &mut World, testbed: &mut Testbed<S>) -> bool {
        let Some(rot) = &mut self.rot else { return false };
        let is_idle = self.restart_at.is_empty()
            && self.resume_at.is_empty()
            && self.heal_at.is_none()
            && self.disk_healthy_at.is_empty()
            && self.power_cuts.is_empty();
        if !is_idle || !testbed.is_all_in_sync() {
            return false;
        }
        let survival = [Survival::Nothing, Survival::Everything, Survival::Random][world.random.usize(..3)];
        testbed.crash(world, rot.host, survival);
        let mut random = world.random.fork();
        world.host(rot.host).flip_bit(&mut random);
        let restart_ms = world.now_ms() + world.random.u64(20..1_500);
        self.restart_at.insert(rot.host, restart_ms);
        rot.on_flip(restart_ms);
        self.count += 1;
        true
    }

    fn start_fault<S: Service>(&mut self, world: &mut World, testbed: &mut Testbed<S>) {
        if let Some(rot) = &mut self.rot {
            rot.is_due |= world.random.bool();
            if rot.is_due {
                // Retried until no other fault is active.
                if !self.maybe_flip_bit(world, testbed) {
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
        let core = testbed.shared.core_host;
        match world.random.u8(..11) {
            0..2 => {
                let survival = [Survival::Nothing, Survival::Everything, Survival::Random];
                let survival = survival[world.random.usize(..3)];
                self.power_cuts.remove(&host);
                testbed.crash(world, host, survival);
                self.restart_at.insert(host, until);
            }
            2 => {
                let operations = world.random.u64(1..40);
                world.host(host).cut_power_after(operations);
                self.power_cuts.insert(host);
            }
            3..5 => {
                world.host(host).pause();
                testbed.shared.links.set_unresponsive(host, true);
                self.resume_at.insert(host, until);
            }
            5..7 => {
                world.trace.record(format_args!("host {host} isolated"));
                (0..NODES)
                    .filter(|other| *other != host)
                    .for_each(|other| testbed.shared.links.cut(host, other));
                testbed.shared.links.cut(host, core);
                self.heal_at = Some(until);
            }
            7 => {
                world.trace.record(format_args!("host {host} partitioned from the core"));
                testbed.shared.links.cut(host, core);
                self.heal_at = Some(until);
            }
            8 => {
                let other = (host + 1) % NODES;
                world.trace.record(format_args!("hosts {host} and {other} partitioned"));
                testbed.shared.links.cut(host, other);
                self.heal_at = Some(until);
            }
            9 => {
                let until = world.now_ms() + world.random.u64(500..4_000);
                world.host(host).set_disk_hangs(true);
                testbed.shared.links.set_hung(host, true);
                self.disk_healthy_at.insert(host, until);
            }
            _ => {
                world.trace.record(format_args!("slow disk on host {host}"));
                world.host(host).set_disk_ms(200);
                self.disk_healthy_at.insert(host, until);
            }
        }
    }
}
