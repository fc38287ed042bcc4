//! Fault injection in the world, and recovery from the faults.
//!
//! Most faults may dispatch at any time and together. Faults that destroy guaranteed data (a wiped disk; a machine
//! crash for records that were only written) hit a partition only while two other replicas surely have everything,
//! and no other fault is injected until the cluster has noticed: replication cannot survive the loss of every
//! replica.

use moim_base::{BrokerId, Offset};

use super::node::SimNode;
use super::{PARTITIONS, ScheduledEvent, World, is_written_only, partition};
use crate::controller::{Node, Order};
use crate::log::LogView;
use crate::replica::{Replica, Role};
use crate::toy::{Crash, ToyLog};
use crate::types::BrokerEpoch;

/// The end of a fault.
#[derive(Debug)]
pub(super) enum Heal {
    Start(usize),
    Join {
        a: usize,
        b: usize,
    },
    Trust(usize),
    /// A node joins the cluster.
    Enter(usize),
}

impl World {
    pub(super) fn fault(&mut self) {
        if self.calm {
            return;
        }
        if self.scenario.hangs {
            return self.hang();
        }
        let next = self.rng.u64(50..900);
        self.after(next, ScheduledEvent::Fault);
        if self.is_spoiled_unnoticed() {
            return;
        }
        let node = self.rng.usize(0..self.nodes.len());
        if self.scenario.changes && self.rng.u32(0..10) < 2 {
            return self.give_order(node);
        }
        if self.scenario.spoils && self.rng.u32(0..10) < 6 {
            return if self.rng.bool() { self.wipe(node) } else { self.crash(node, Crash::Machine) };
        }
        match self.rng.u32(0..100) {
            0..18 => self.crash(node, Crash::Process),
            18..30 => self.crash(node, Crash::Machine),
            30..34 => (0..self.nodes.len()).for_each(|node| self.crash(node, Crash::Process)),
            34..42 => self.stop_cleanly(node),
            42..46 => self.wipe(node),
            46..56 => {
                self.nodes[node].paused_until_ms = self.now_ms + self.rng.u64(50..2_500);
            }
            56..68 => {
                let other = self.rng.usize(0..self.nodes.len());
                self.part(node, other);
            }
            68..76 => self.part(node, self.nodes.len()),
            76..80 => (0..=self.nodes.len()).for_each(|other| self.part(node, other)),
            80..86 => self.suspect(node),
            86..94 => self.reassign(),
            _ => self.retain(node),
        }
    }

    /// The disk of one node hangs; the next one does after it has been healthy for a while.
    fn hang(&mut self) {
        let node = self.rng.usize(0..self.nodes.len());
        let lasts = self.rng.u64(2_000..8_000);
        let yields = self.rng.bool();
        let me = &mut self.nodes[node];
        (me.hung_since_ms, me.hung_until_ms, me.yields) = (self.now_ms, self.now_ms + lasts, yields);
        self.after(lasts + 3_000, ScheduledEvent::Fault);
    }

    pub(super) fn heal(&mut self, heal: Heal) {
        match heal {
            Heal::Start(node) => self.nodes[node].up = true,
            Heal::Join { a, b } => {
                if let Some(at) = self.cut.iter().position(|pair| *pair == (a, b)) {
                    self.cut.swap_remove(at);
                }
            }
            Heal::Trust(node) => self.set_suspect(node, None),
            Heal::Enter(node) => self.enter(node),
        }
    }

    /// An operator drains, removes or restores a node.
    fn give_order(&mut self, node: usize) {
        let order = match self.orders[node] {
            None => return,
            Some(Order::Serve) if self.rng.bool() => Order::Drain,
            Some(Order::Serve) => Order::Remove,
            Some(_) => Order::Serve,
        };
        self.set_order(node, order);
    }

    /// A node joins, if it has not yet.
    fn enter(&mut self, node: usize) {
        if self.orders[node].is_none() {
            self.nodes[node].up = true;
            self.set_order(node, Order::Serve);
        }
    }

    fn set_order(&mut self, node: usize, order: Order) {
        if self.orders[node] == Some(order) {
            return;
        }
        self.orders[node] = Some(order);
        self.changes += 1;
        for other in &mut self.nodes {
            if let Some(controller) = &mut other.controller {
                let id = BrokerId(node as i32 + 1);
                controller.on_node(Node { id, zone: String::new(), order });
            }
        }
    }

    /// Ends every fault.
    pub(super) fn calm_down(&mut self) {
        self.calm = true;
        self.cut.clear();
        for node in 0..self.nodes.len() {
            self.set_order(node, Order::Serve);
            self.nodes[node].up = true;
            self.nodes[node].paused_until_ms = 0;
            self.nodes[node].hung_until_ms = 0;
            self.set_suspect(node, None);
        }
    }

    fn crash(&mut self, node: usize, crash: Crash) {
        if !self.nodes[node].up {
            return;
        }
        if crash == Crash::Machine {
            let parts: Vec<usize> = (0..PARTITIONS).filter(|part| is_written_only(*part)).collect();
            if !self.may_spoil(node, &parts) {
                return;
            }
            self.spoil(node, &parts);
        }
        let keep = self.rng.i64(0..3);
        let me = &mut self.nodes[node];
        me.disks.iter_mut().for_each(|log| log.crash(crash, keep));
        me.intact_since = None;
        me.stop();
        self.start_later(node);
    }

    fn start_later(&mut self, node: usize) {
        let longest = if self.scenario.spoils { 120 } else { 2_500 };
        let delay = self.rng.u64(20..longest);
        self.after(delay, ScheduledEvent::Heal(Heal::Start(node)));
    }

    fn stop_cleanly(&mut self, node: usize) {
        let me = &mut self.nodes[node];
        if !me.up || me.paused_until_ms > self.now_ms {
            return;
        }
        me.disks.iter_mut().for_each(|log| log.sync(log.end()));
        if let Some(lease) = me.lease.filter(|_| self.rng.bool()) {
            self.store.revoke(lease);
        }
        self.nodes[node].stop();
        self.start_later(node);
    }

    fn wipe(&mut self, node: usize) {
        let parts: Vec<usize> = (0..PARTITIONS).collect();
        if !self.nodes[node].up || !self.may_spoil(node, &parts) {
            return;
        }
        self.spoil(node, &parts);
        let me = &mut self.nodes[node];
        me.disks.iter_mut().for_each(|log| *log = ToyLog::default());
        me.directory += 100;
        me.intact_since = None;
        me.stop();
        self.start_later(node);
    }

    /// True if two other replicas surely have everything, with no other fault in progress.
    fn may_spoil(&self, node: usize, parts: &[usize]) -> bool {
        let well = |other: &SimNode| other.up && other.paused_until_ms <= self.now_ms;
        let others_well = self.nodes.iter().all(well) && self.cut.is_empty();
        others_well
            && parts.iter().all(|part| {
                let Some(state) = self.record(*part) else { return false };
                let sure = state.isr.iter().filter(|entry| {
                    let other = &self.nodes[entry.node.0 as usize - 1];
                    other.index != node && entry.epoch == other.epoch && other.spoiled[*part] < entry.epoch
                });
                sure.count() >= 2
            })
    }

    fn spoil(&mut self, node: usize, parts: &[usize]) {
        let epoch = self.nodes[node].epoch;
        for part in parts {
            self.nodes[node].spoiled[*part] = epoch;
        }
        // Its requests to the repository are lost with it: the cluster must not act on them.
        self.queue.retain(|scheduled| {
            !matches!(&scheduled.0.what, ScheduledEvent::StoreTxn { node: sender, .. } if *sender == node)
        });
    }

    /// True if a record still counts on destroyed data.
    fn is_spoiled_unnoticed(&self) -> bool {
        (0..PARTITIONS).any(|part| {
            self.record(part).is_some_and(|state| {
                state.isr.iter().chain(&state.eligible).any(|entry| {
                    let spoiled: BrokerEpoch = self.nodes[entry.node.0 as usize - 1].spoiled[part];
                    entry.epoch <= spoiled
                })
            })
        })
    }

    fn part(&mut self, a: usize, b: usize) {
        if a != b {
            self.cut.push((a, b));
            let delay = self.rng.u64(100..3_000);
            self.after(delay, ScheduledEvent::Heal(Heal::Join { a, b }));
        }
    }

    fn suspect(&mut self, node: usize) {
        self.set_suspect(node, Some(self.now_ms));
        let delay = self.rng.u64(100..1_500);
        self.after(delay, ScheduledEvent::Heal(Heal::Trust(node)));
    }

    fn set_suspect(&mut self, node: usize, since_ms: Option<u64>) {
        for other in &mut self.nodes {
            if let Some(controller) = &mut other.controller {
                controller.on_suspect(BrokerId(node as i32 + 1), since_ms);
            }
        }
    }

    /// An administrator asks every controller to start or cancel a reassignment.
    fn reassign(&mut self) {
        let part = self.rng.usize(0..PARTITIONS);
        let known = (1..).zip(&self.orders).filter(|(_, order)| order.is_some());
        let mut target: Vec<BrokerId> = known.map(|(id, _)| BrokerId(id)).collect();
        self.rng.shuffle(&mut target);
        target.truncate(3);
        let target = (self.rng.u32(0..4) > 0).then_some(&target[..]);
        for node in 0..self.nodes.len() {
            let Some(controller) = &mut self.nodes[node].controller else { continue };
            let term = controller.term();
            if let Ok(Some(change)) = controller.reassign(partition(part), target) {
                self.send_change(node, term, change);
            }
        }
    }

    /// A leader deletes old records, as retention does: never past the high watermark.
    fn retain(&mut self, node: usize) {
        let part = self.rng.usize(0..PARTITIONS);
        let me = &mut self.nodes[node];
        let leads =
            me.replicas[part].as_ref().is_some_and(|replica| matches!(replica.role(), Role::Leader(_)));
        let hw = me.replicas[part].as_ref().map_or(Offset(0), Replica::high_watermark);
        let log = &mut me.disks[part];
        // The newest record is the leader's only producer state here.
        let most = if self.scenario.is_idempotent(part) { Offset(hw.0 - 1) } else { hw };
        if me.up && leads && most > log.start() {
            let start = self.rng.i64(log.start().0..=most.0);
            log.set_start(Offset(start));
        }
    }
}
