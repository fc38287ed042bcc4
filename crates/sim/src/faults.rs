//! What goes wrong: one thing after the other, and sometimes several at once, as the seed says.
//!
//! Each fault ends by itself; [`Faults::heal`] ends all of them. Any number of machines may be down or cut off at the
//! same time: a cluster that cannot answer must not answer wrongly either.

use std::collections::BTreeMap;

use moim_journal::disk::Survival;
use moim_raft::VoterId;

use crate::cluster::{Cluster, voter};
use crate::world::{Weather, World};

/// The faults of one run.
pub(crate) struct Faults {
    next_ms: u64,
    restart_at: BTreeMap<usize, u64>,
    resume_at: BTreeMap<usize, u64>,
    mend_at: Option<u64>,
    fair_at: Option<u64>,
    quick_at: BTreeMap<usize, u64>,
    /// Machines that were never used.
    spare: Vec<usize>,
    /// Changes of members under way, and since when.
    change: Option<Change>,
    /// Least and most members.
    size: (usize, usize),
    /// How long a disk takes when it is well.
    disk_ms: u64,
    /// The newest term whose leader was seen.
    term: u64,
}

struct Change {
    host: usize,
    since_ms: u64,
    task: Option<crate::world::Task<bool>>,
    what: Step,
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
            mend_at: None,
            fair_at: None,
            quick_at: BTreeMap::new(),
            spare,
            change: None,
            size,
        }
    }

    /// Ends what is over and maybe begins something.
    pub(crate) fn step(&mut self, world: &mut World, cluster: &mut Cluster) {
        self.bury(world, cluster);
        self.end_what_is_over(world, cluster);
        self.change_members(world, cluster);
        self.maybe_disturb_election(world, cluster);
        self.maybe_depose(world, cluster);
        if world.now_ms() >= self.next_ms {
            self.next_ms = world.now_ms() + world.random.u64(100..1_400);
            self.begin(world, cluster);
        }
    }

    /// While nobody leads, votes are on their way to the disks: a good time to lose one.
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

    /// A leader was just elected: sometimes it is cut off at once, and those who voted for it lose power. What they
    /// promised must hold.
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
        world.trace.note(format_args!("host {host} is deposed in term {}", self.term));
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
        self.mend_at = Some(world.now_ms() + world.random.u64(1_000..3_500));
    }

    /// A machine whose disk lost power is dead; it comes back later.
    fn bury(&mut self, world: &mut World, cluster: &mut Cluster) {
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

    fn end_what_is_over(&mut self, world: &mut World, cluster: &mut Cluster) {
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
        for host in due(&mut self.quick_at) {
            world.host(host).set_disk_ms(self.disk_ms);
        }
        if self.mend_at.take_if(|at| *at <= now).is_some() {
            world.trace.note(format_args!("the wires are mended"));
            world.network.mend();
        }
        if self.fair_at.take_if(|at| *at <= now).is_some() {
            world.network.set_weather(Weather::FAIR);
        }
    }

    fn begin(&mut self, world: &mut World, cluster: &mut Cluster) {
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
            30..38 => self.crash_everybody(world, cluster),
            38..48 if world.host(host).is_up() => {
                world.host(host).pause();
                let length = world.random.u64(50..2_500);
                self.resume_at.insert(host, now + length);
            }
            48..70 => {
                cut(world, cluster, host);
                self.mend_at = Some(now + world.random.u64(200..3_000));
            }
            70..80 => {
                let weather = Weather {
                    lost: world.random.u32(0..250),
                    delay_ms: world.random.u64(4..80),
                    late: world.random.u32(0..200),
                    late_ms: world.random.u64(100..900),
                };
                world.trace.note(format_args!("{weather:?}"));
                world.network.set_weather(weather);
                self.fair_at = Some(now + world.random.u64(200..2_500));
            }
            80..88 => {
                world.trace.note(format_args!("host {host} has a slow disk"));
                let slow = world.random.u64(20..250);
                world.host(host).set_disk_ms(slow);
                self.quick_at.insert(host, now + world.random.u64(300..2_000));
            }
            88..93 => transfer(world, cluster, voter(host)),
            93..96 => snapshot(world, cluster, host),
            _ => self.begin_change(world, cluster),
        }
    }

    fn crash_everybody(&mut self, world: &mut World, cluster: &mut Cluster) {
        for host in cluster.members().to_vec() {
            if world.host(host).is_up() {
                let survival = survival(world);
                self.crash(world, cluster, host, survival);
            }
        }
    }

    fn begin_change(&mut self, world: &mut World, cluster: &mut Cluster) {
        if self.change.is_some() {
            return;
        }
        let now = world.now_ms();
        let count = cluster.members().len();
        let grow =
            count < self.size.1 && !self.spare.is_empty() && (count <= self.size.0 || world.random.bool());
        if grow && let Some(host) = self.spare.pop() {
            world.trace.note(format_args!("host {host} is to join"));
            cluster.add(world, host);
            self.change = Some(Change { host, since_ms: now, task: None, what: Step::Join });
        } else if count > self.size.0 {
            let host = cluster.members()[world.random.usize(..count)];
            world.trace.note(format_args!("host {host} is to leave"));
            self.change = Some(Change { host, since_ms: now, task: None, what: Step::Leave });
        }
    }

    /// Carries a change of members on: asks again until it is done, whatever the answers were.
    fn change_members(&mut self, world: &mut World, cluster: &mut Cluster) {
        let Some(change) = &mut self.change else { return };
        let now = world.now_ms();
        let done = match &change.task {
            Some(task) if task.is_over() => task.take(),
            Some(_) if now < change.since_ms + 4_000 => return,
            Some(_) | None => None,
        };
        let host = change.host;
        match (done, change.what) {
            (Some(true), Step::Join) => {
                world.trace.note(format_args!("host {host} has joined"));
                (change.what, change.task) = (Step::Promote, None);
            }
            (Some(true), Step::Promote) => {
                world.trace.note(format_args!("host {host} votes"));
                self.change = None;
            }
            (Some(true), Step::Leave) => {
                world.trace.note(format_args!("host {host} has left"));
                self.change = None;
                self.restart_at.remove(&host);
                self.resume_at.remove(&host);
                cluster.retire(world, host);
            }
            (Some(false) | None, what) => {
                // Not at once: a refusal comes quickly.
                if now < change.since_ms + 100 && change.task.is_some() {
                    return;
                }
                change.since_ms = now;
                change.task = ask_for_change(world, cluster, host, what);
            }
        }
    }

    /// Ends everything.
    pub(crate) fn heal(&mut self, world: &mut World, cluster: &mut Cluster) {
        world.trace.note(format_args!("everything heals"));
        world.network.mend();
        world.network.set_weather(Weather::FAIR);
        (self.mend_at, self.fair_at) = (None, None);
        for host in cluster.members().to_vec() {
            world.host(host).resume();
            world.host(host).set_disk_ms(self.disk_ms);
        }
        self.resume_at.clear();
        for at in self.restart_at.values_mut() {
            *at = (*at).min(world.now_ms() + 200);
        }
    }

    /// What still happens when no new fault begins: restarts, and a change of members that was begun is finished.
    pub(crate) fn finish(&mut self, world: &mut World, cluster: &mut Cluster) {
        self.bury(world, cluster);
        self.end_what_is_over(world, cluster);
        self.change_members(world, cluster);
    }

    /// Whether nothing is under way any more.
    pub(crate) fn is_over(&self) -> bool {
        self.change.is_none() && self.restart_at.is_empty()
    }
}

fn leader(cluster: &Cluster) -> Option<usize> {
    let nodes = cluster.shared.nodes();
    nodes.iter().find(|(_, node)| node.coordinator.group().is_leader()).map(|(host, _)| *host)
}

/// Cuts one machine off, splits the machines in two, or cuts single links in one direction.
fn cut(world: &mut World, cluster: &Cluster, host: usize) {
    let members = cluster.members().to_vec();
    let side: Vec<bool> = match world.random.u8(0..3) {
        0 => members.iter().map(|member| *member == host).collect(),
        _ => members.iter().map(|_| world.random.bool()).collect(),
    };
    let both_ways = world.random.u8(0..3) > 0;
    world.trace.note(format_args!("the wires are cut: {members:?} {side:?} {both_ways}"));
    for (from, from_side) in members.iter().zip(&side) {
        for (to, to_side) in members.iter().zip(&side) {
            if from_side != to_side && (both_ways || *from_side) {
                world.network.cut(*from, *to);
            }
        }
    }
}

fn transfer(world: &mut World, cluster: &Cluster, to: VoterId) {
    world.trace.note(format_args!("the leadership is to go to {to}"));
    if let Some(node) = cluster.shared.any_node() {
        node.handle.spawn(async move {
            let _ = node.coordinator.move_leader(to).await;
        });
    }
}

fn snapshot(world: &mut World, cluster: &Cluster, host: usize) {
    if let Some((_, node)) = cluster.shared.nodes().into_iter().find(|(number, _)| *number == host) {
        world.trace.note(format_args!("host {host} is to take a snapshot"));
        node.handle.spawn(async move {
            let _ = node.coordinator.group().snapshot().await;
        });
    }
}

fn ask_for_change(
    world: &mut World,
    cluster: &Cluster,
    host: usize,
    what: Step,
) -> Option<crate::world::Task<bool>> {
    let nodes = cluster.shared.nodes();
    if nodes.is_empty() {
        return None;
    }
    let (asked, node) = nodes[world.random.usize(..nodes.len())].clone();
    let member = moim_raft::Member { id: voter(host), address: world.host(host).address() };
    world.host(asked).spawn(async move {
        let changed = match what {
            Step::Join => node.coordinator.add_learner(member).await,
            Step::Promote => node.coordinator.promote_member(member.id).await,
            Step::Leave => node.coordinator.remove_member(member.id).await,
        };
        use moim_coord::CoordError::{MemberExists, MemberNotFound, NotLearner};
        matches!(
            (changed, what),
            (Ok(()), _)
                | (Err(MemberExists), Step::Join)
                | (Err(NotLearner), Step::Promote)
                | (Err(MemberNotFound), Step::Leave)
        )
    })
}
