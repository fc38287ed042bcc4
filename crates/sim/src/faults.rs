//! Fault injection for coordination nodes: crashes, power cuts, pauses, partitions, loss, slow disks, membership
//! changes.
//!
//! Faults follow each other and may overlap, as the seed decides. Each fault ends after a time; [`Faults::heal`] ends
//! all of them. Any number of hosts may be down or partitioned at the same time: a cluster without a quorum must not
//! give wrong answers either.

use std::collections::BTreeMap;

use moim_journal::disk::Survival;
use moim_raft::VoterId;

use crate::cluster::{Cluster, voter};
use crate::world::{LinkQuality, World};

/// The faults of one run.
pub(crate) struct Faults {
    next_ms: u64,
    restart_at: BTreeMap<usize, u64>,
    resume_at: BTreeMap<usize, u64>,
    heal_at: Option<u64>,
    links_healthy_at: Option<u64>,
    disk_healthy_at: BTreeMap<usize, u64>,
    /// Hosts that were never members.
    spare: Vec<usize>,
    /// The membership change in progress.
    change: Option<MembershipChange>,
    /// Minimum and maximum number of members.
    size: (usize, usize),
    /// Maximum sync duration of a healthy disk.
    disk_ms: u64,
    /// The newest term with an observed leader.
    term: u64,
}

struct MembershipChange {
    host: usize,
    since_ms: u64,
    task: Option<crate::world::Task<bool>>,
    step: Step,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Join,
    Promote,
    Leave,
}

fn survival(world: &mut World) -> Survival {
    match world.random.u8(0..4) {
        0 => Survival::Nothing,
        1 => Survival::Everything,
        _ => Survival::Random,
    }
}

impl Faults {
    pub(crate) fn new(spare: Vec<usize>, size: (usize, usize), disk_ms: u64) -> Self {
        Self {
            disk_ms,
            term: 0,
            next_ms: 0,
            restart_at: BTreeMap::new(),
            resume_at: BTreeMap::new(),
            heal_at: None,
            links_healthy_at: None,
            disk_healthy_at: BTreeMap::new(),
            spare,
            change: None,
            size,
        }
    }

    /// Ends expired faults and may start a new one.
    pub(crate) fn step(&mut self, world: &mut World, cluster: &mut Cluster) {
        self.crash_failed_hosts(world, cluster);
        self.end_expired_faults(world, cluster);
        self.step_membership_change(world, cluster);
        self.maybe_disturb_election(world, cluster);
        self.maybe_depose(world, cluster);
        if world.now_ms() >= self.next_ms {
            self.next_ms = world.now_ms() + world.random.u64(100..1_400);
            self.start_fault(world, cluster);
        }
    }

    /// During an election votes are being written to disks: a crash then may lose one.
    fn maybe_disturb_election(&mut self, world: &mut World, cluster: &mut Cluster) {
        if world.random.u32(0..25) > 0 || leader(cluster).is_some() {
            return;
        }
        let members = cluster.members();
        let host = members[world.random.usize(..members.len())];
        if world.host(host).is_up() {
            self.crash(world, cluster, host, Survival::Nothing);
            let back = world.now_ms() + world.random.u64(2..60);
            self.restart_at.insert(host, back);
        }
    }

    /// After an election, sometimes partitions the new leader at once and cuts the power of its voters. Their votes
    /// must survive.
    fn maybe_depose(&mut self, world: &mut World, cluster: &mut Cluster) {
        let Some(host) = leader(cluster) else { return };
        let nodes = cluster.shared.nodes();
        let term = nodes
            .iter()
            .find(|(number, _)| *number == host)
            .and_then(|(_, node)| node.coordinator.group().leader_in_term().map(|(term, _)| term));
        if term.is_none_or(|term| term <= self.term) {
            return;
        }
        self.term = term.unwrap_or(0);
        if world.random.u8(0..5) > 0 {
            return;
        }
        world.trace.record(format_args!("host {host} deposed in term {}", self.term));
        for other in cluster.members().to_vec() {
            if other != host {
                world.network.cut(host, other);
                world.network.cut(other, host);
                if world.host(other).is_up() {
                    self.crash(world, cluster, other, Survival::Nothing);
                    let back = world.now_ms() + world.random.u64(2..60);
                    self.restart_at.insert(other, back);
                }
            }
        }
        self.heal_at = Some(world.now_ms() + world.random.u64(1_000..3_500));
    }

    /// Crashes hosts whose disk lost power; they restart later.
    fn crash_failed_hosts(&mut self, world: &mut World, cluster: &mut Cluster) {
        for host in cluster.members().to_vec() {
            if world.host(host).has_failed() {
                let survival = survival(world);
                self.crash(world, cluster, host, survival);
            }
        }
    }

    fn crash(&mut self, world: &mut World, cluster: &mut Cluster, host: usize, survival: Survival) {
        cluster.crash(world, host, survival);
        self.resume_at.remove(&host);
        let longest = if world.random.bool() { 100 } else { 2_500 };
        let back = world.now_ms() + world.random.u64(10..longest);
        self.restart_at.insert(host, back);
    }

    fn end_expired_faults(&mut self, world: &mut World, cluster: &mut Cluster) {
        let now = world.now_ms();
        let due = |at: &mut BTreeMap<usize, u64>| -> Vec<usize> {
            at.extract_if(.., |_, at| *at <= now).map(|(host, _)| host).collect()
        };
        for host in due(&mut self.restart_at) {
            cluster.start(world, host);
        }
        for host in due(&mut self.resume_at) {
            world.host(host).resume();
        }
        for host in due(&mut self.disk_healthy_at) {
            world.host(host).set_disk_ms(self.disk_ms);
        }
        if self.heal_at.take_if(|at| *at <= now).is_some() {
            world.trace.record(format_args!("network healed"));
            world.network.heal();
        }
        if self.links_healthy_at.take_if(|at| *at <= now).is_some() {
            world.network.set_quality(LinkQuality::HEALTHY);
        }
    }

    fn start_fault(&mut self, world: &mut World, cluster: &mut Cluster) {
        let members = cluster.members();
        let host = members[world.random.usize(..members.len())];
        let host = if world.random.bool() { leader(cluster).unwrap_or(host) } else { host };
        let now = world.now_ms();
        match world.random.u32(0..100) {
            0..18 if world.host(host).is_up() => {
                let survival = survival(world);
                self.crash(world, cluster, host, survival);
            }
            18..30 if world.host(host).is_up() => {
                let operations = world.random.u64(1..40);
                world.host(host).cut_power_after(operations);
            }
            30..38 => self.crash_all(world, cluster),
            38..48 if world.host(host).is_up() => {
                world.host(host).pause();
                let length = world.random.u64(50..2_500);
                self.resume_at.insert(host, now + length);
            }
            48..70 => {
                partition_network(world, cluster, host);
                self.heal_at = Some(now + world.random.u64(200..3_000));
            }
            70..80 => {
                let quality = LinkQuality {
                    lost: world.random.u32(0..250),
                    delay_ms: world.random.u64(4..80),
                    late: world.random.u32(0..200),
                    late_ms: world.random.u64(100..900),
                };
                world.trace.record(format_args!("{quality:?}"));
                world.network.set_quality(quality);
                self.links_healthy_at = Some(now + world.random.u64(200..2_500));
            }
            80..88 => {
                world.trace.record(format_args!("slow disk on host {host}"));
                let slow = world.random.u64(20..250);
                world.host(host).set_disk_ms(slow);
                self.disk_healthy_at.insert(host, now + world.random.u64(300..2_000));
            }
            88..93 => transfer(world, cluster, voter(host)),
            93..96 => snapshot(world, cluster, host),
            _ => self.start_membership_change(world, cluster),
        }
    }

    fn crash_all(&mut self, world: &mut World, cluster: &mut Cluster) {
        for host in cluster.members().to_vec() {
            if world.host(host).is_up() {
                let survival = survival(world);
                self.crash(world, cluster, host, survival);
            }
        }
    }

    fn start_membership_change(&mut self, world: &mut World, cluster: &mut Cluster) {
        if self.change.is_some() {
            return;
        }
        let now = world.now_ms();
        let count = cluster.members().len();
        let grow =
            count < self.size.1 && !self.spare.is_empty() && (count <= self.size.0 || world.random.bool());
        if grow && let Some(host) = self.spare.pop() {
            world.trace.record(format_args!("host {host} joins"));
            cluster.add(world, host);
            self.change = Some(MembershipChange { host, since_ms: now, task: None, step: Step::Join });
        } else if count > self.size.0 {
            let host = cluster.members()[world.random.usize(..count)];
            world.trace.record(format_args!("host {host} leaves"));
            self.change = Some(MembershipChange { host, since_ms: now, task: None, step: Step::Leave });
        }
    }

    /// Continues a membership change: repeats the request until it succeeds.
    fn step_membership_change(&mut self, world: &mut World, cluster: &mut Cluster) {
        let Some(change) = &mut self.change else { return };
        let now = world.now_ms();
        let done = match &change.task {
            Some(task) if task.is_over() => task.take(),
            Some(_) if now < change.since_ms + 4_000 => return,
            Some(_) | None => None,
        };
        let host = change.host;
        match (done, change.step) {
            (Some(true), Step::Join) => {
                world.trace.record(format_args!("host {host} is a learner"));
                (change.step, change.task) = (Step::Promote, None);
            }
            (Some(true), Step::Promote) => {
                world.trace.record(format_args!("host {host} is a voter"));
                self.change = None;
            }
            (Some(true), Step::Leave) => {
                world.trace.record(format_args!("host {host} was removed"));
                self.change = None;
                self.restart_at.remove(&host);
                self.resume_at.remove(&host);
                cluster.retire(world, host);
            }
            (Some(false) | None, step) => {
                // After a pause: a rejection arrives quickly.
                if now < change.since_ms + 100 && change.task.is_some() {
                    return;
                }
                change.since_ms = now;
                change.task = request_membership_change(world, cluster, host, step);
            }
        }
    }

    /// Ends all faults.
    pub(crate) fn heal(&mut self, world: &mut World, cluster: &mut Cluster) {
        world.trace.record(format_args!("all faults end"));
        world.network.heal();
        world.network.set_quality(LinkQuality::HEALTHY);
        (self.heal_at, self.links_healthy_at) = (None, None);
        for host in cluster.members().to_vec() {
            world.host(host).resume();
            world.host(host).set_disk_ms(self.disk_ms);
        }
        self.resume_at.clear();
        for at in self.restart_at.values_mut() {
            *at = (*at).min(world.now_ms() + 200);
        }
    }

    /// Steps without starting new faults: restarts hosts and finishes a membership change.
    pub(crate) fn finish(&mut self, world: &mut World, cluster: &mut Cluster) {
        self.crash_failed_hosts(world, cluster);
        self.end_expired_faults(world, cluster);
        self.step_membership_change(world, cluster);
    }

    /// True if no restart and no membership change is pending.
    pub(crate) fn is_over(&self) -> bool {
        self.change.is_none() && self.restart_at.is_empty()
    }
}

fn leader(cluster: &Cluster) -> Option<usize> {
    let nodes = cluster.shared.nodes();
    nodes.iter().find(|(_, node)| node.coordinator.group().is_leader()).map(|(host, _)| *host)
}

/// Partitions the network: isolates one host, splits the hosts in two, or cuts links in one direction.
fn partition_network(world: &mut World, cluster: &Cluster, host: usize) {
    let members = cluster.members().to_vec();
    let side: Vec<bool> = match world.random.u8(0..3) {
        0 => members.iter().map(|member| *member == host).collect(),
        _ => members.iter().map(|_| world.random.bool()).collect(),
    };
    let both_ways = world.random.u8(0..3) > 0;
    world.trace.record(format_args!("network partitioned: {members:?} {side:?} {both_ways}"));
    for (from, from_side) in members.iter().zip(&side) {
        for (to, to_side) in members.iter().zip(&side) {
            if from_side != to_side && (both_ways || *from_side) {
                world.network.cut(*from, *to);
            }
        }
    }
}

fn transfer(world: &mut World, cluster: &Cluster, to: VoterId) {
    world.trace.record(format_args!("leadership transfer to {to}"));
    if let Some(node) = cluster.shared.any_node() {
        node.handle.spawn(async move {
            let _ = node.coordinator.move_leader(to).await;
        });
    }
}

fn snapshot(world: &mut World, cluster: &Cluster, host: usize) {
    if let Some((_, node)) = cluster.shared.nodes().into_iter().find(|(number, _)| *number == host) {
        world.trace.record(format_args!("snapshot on host {host}"));
        node.handle.spawn(async move {
            let _ = node.coordinator.group().snapshot().await;
        });
    }
}

fn request_membership_change(
    world: &mut World,
    cluster: &Cluster,
    host: usize,
    step: Step,
) -> Option<crate::world::Task<bool>> {
    let nodes = cluster.shared.nodes();
    if nodes.is_empty() {
        return None;
    }
    let (contact, node) = nodes[world.random.usize(..nodes.len())].clone();
    let member = moim_raft::Member { id: voter(host), address: world.host(host).address() };
    world.host(contact).spawn(async move {
        let changed = match step {
            Step::Join => node.coordinator.add_learner(member).await,
            Step::Promote => node.coordinator.promote_member(member.id).await,
            Step::Leave => node.coordinator.remove_member(member.id).await,
        };
        use moim_coord::CoordError::{MemberExists, MemberNotFound, NotLearner};
        matches!(
            (changed, step),
            (Ok(()), _)
                | (Err(MemberExists), Step::Join)
                | (Err(NotLearner), Step::Promote)
                | (Err(MemberNotFound), Step::Leave)
        )
    })
}
