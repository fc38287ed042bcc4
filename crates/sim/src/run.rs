//! One run: found a cluster, let clients and faults loose, heal it, and judge.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::clients::{Crowd, read_every_key};
use crate::cluster::Cluster;
use crate::faults::Faults;
use crate::world::{Task, Weather, World};

/// Lines of the trace that a failure shows.
const SHOWN: usize = 60;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Decides everything else.
    pub seed: u64,
    /// Founding members; 0 lets the seed choose three, four or five.
    pub nodes: usize,
    /// How long faults last, in the world's time.
    pub faults_ms: u64,
    /// Clients of the key-value store.
    pub clients: u64,
}

impl Options {
    /// The usual run from a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, nodes: 0, faults_ms: 8_000, clients: 5 }
    }
}

/// A run in which nothing was wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The checksum of everything that happened.
    pub hash: u64,
    /// Lines of trace.
    pub events: u64,
    /// Operations on keys that were answered.
    pub answered: u64,
    /// Operations whose outcome nobody knows.
    pub unknown: u64,
    /// Leases that clients had.
    pub leases: u64,
    /// Times somebody held a lock.
    pub holds: usize,
    /// Terms that had a leader.
    pub terms: usize,
    /// The last revision.
    pub revision: i64,
    /// Milliseconds that passed in the world.
    pub world_ms: u64,
}

/// A run in which something was wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Gives the same run again.
    pub seed: u64,
    /// What.
    pub what: String,
    /// The end of what happened before.
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.what)?;
        for line in &self.trace[self.trace.len().saturating_sub(SHOWN)..] {
            writeln!(f, "  {line}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Runs a world from a seed to its end.
pub fn run(options: Options) -> Result<Report, Failure> {
    run_traced(options).0
}

/// As [`run`], with the trace as far as it was kept, whatever the verdict.
pub fn run_traced(options: Options) -> (Result<Report, Failure>, Vec<String>) {
    let mut world = World::new(options.seed);
    let result = Run::new(&mut world, options).and_then(|mut run| run.live(&mut world, options));
    let trace = world.trace.lines();
    (result.map_err(|what| Failure { seed: options.seed, what, trace: trace.clone() }), trace)
}

struct Run {
    cluster: Cluster,
    crowd: Arc<Crowd>,
    faults: Faults,
    tasks: Vec<Task<()>>,
}

impl Run {
    fn new(world: &mut World, options: Options) -> Result<Self, String> {
        let founders = if options.nodes == 0 { world.random.usize(3..=5) } else { options.nodes };
        let hosts: Vec<usize> = (0..founders + 3).map(|_| world.add_host()).collect();
        let clients = world.add_host();
        // Nothing is ever written there.
        world.host(clients).set_disk_ms(1_000);
        world.host(clients).start();
        let spare = hosts[founders..].to_vec();
        // What is not synced is what a crash can take: slow disks have more of it.
        let disk_ms = [2, 6, 20, 50][world.random.usize(..4)];
        hosts.iter().for_each(|host| world.host(*host).set_disk_ms(disk_ms));
        let cluster = Cluster::found(world, founders);
        let crowd = Crowd::new(Arc::clone(&cluster.shared));
        world.network.set_weather(Weather::FAIR);
        let mut run = Self { cluster, crowd, faults: Faults::new(spare, (3, 7), disk_ms), tasks: Vec::new() };
        let led = |run: &mut Self, _: &mut World| run.cluster.converged().is_some();
        run.quiet(world, 20_000, "the cluster to be founded", led)?;
        run.tasks = run.crowd.start(world, clients, options.clients);
        Ok(run)
    }

    fn live(&mut self, world: &mut World, options: Options) -> Result<Report, String> {
        let end_ms = world.now_ms() + options.faults_ms;
        while world.now_ms() < end_ms {
            world.step();
            self.faults.step(world, &mut self.cluster);
            self.look(world)?;
        }
        self.faults.heal(world, &mut self.cluster);
        let over = |run: &mut Self, _: &mut World| run.faults.is_over();
        self.quiet(world, 20_000, "restarts and changes of members to end", over)?;
        self.crowd.stop();
        // The last tasks are the watchers, which go on.
        let watchers = self.tasks.split_off(self.tasks.len() - self.crowd.watched.heard().len());
        let over = |run: &mut Self, _: &mut World| run.tasks.iter().all(Task::is_over);
        self.quiet(world, 20_000, "clients to end", over)?;
        self.progress(world)?;
        let revision = self.agree(world)?;
        let heard = |run: &mut Self, _: &mut World| run.crowd.watched.all_heard(revision);
        self.quiet(world, 20_000, "watchers to hear everything", heard)?;
        drop(watchers);
        self.judge(world, revision)
    }

    /// Lets time pass without new faults until something is so.
    fn quiet(
        &mut self,
        world: &mut World,
        timeout_ms: u64,
        what: &str,
        mut done: impl FnMut(&mut Self, &mut World) -> bool,
    ) -> Result<(), String> {
        let deadline_ms = world.now_ms() + timeout_ms;
        while world.now_ms() < deadline_ms {
            world.step();
            self.faults.finish(world, &mut self.cluster);
            self.look(world)?;
            if done(self, world) {
                return Ok(());
            }
        }
        Err(format!("waited {timeout_ms} ms in vain for {what}{}", self.describe()))
    }

    fn look(&mut self, world: &mut World) -> Result<(), String> {
        self.cluster.look(world);
        self.cluster.shared.first_violation().map_or(Ok(()), Err)
    }

    /// Every node answers again, and what it reads becomes part of the history.
    fn progress(&mut self, world: &mut World) -> Result<(), String> {
        for (number, _) in self.cluster.shared.nodes() {
            let mut task = None;
            let crowd = Arc::clone(&self.crowd);
            let answered = move |run: &mut Self, world: &mut World| {
                let over = task.as_ref().is_none_or(Task::is_over);
                if over && matches!(task.take().and_then(|task: Task<_>| task.take()), Some(Ok(()))) {
                    return true;
                }
                if over {
                    let nodes = run.cluster.shared.nodes();
                    let node = nodes.into_iter().find(|(host, _)| *host == number);
                    task = node.and_then(|(_, node)| {
                        world.host(number).spawn(read_every_key(Arc::clone(&crowd), node.coordinator))
                    });
                }
                false
            };
            self.quiet(world, 20_000, &format!("host {number} to answer"), answered)?;
        }
        Ok(())
    }

    /// Every member ends in the same state; answers its revision.
    fn agree(&mut self, world: &mut World) -> Result<i64, String> {
        let mut agreed = None;
        let converged = |run: &mut Self, _: &mut World| {
            agreed = run.cluster.converged();
            agreed.is_some()
        };
        self.quiet(world, 20_000, "the members to agree", converged)?;
        let all = agreed.unwrap_or_default();
        let Some((_, first)) = all.first() else { return Err("there are no members".to_owned()) };
        match all.iter().find(|(_, other)| other != first) {
            Some(_) => Err(format!("members have different states: {all:?}")),
            None => Ok(first.revision),
        }
    }

    fn judge(&self, world: &World, revision: i64) -> Result<Report, String> {
        let history = self.crowd.keys.history();
        moim_history::check(&history).map_err(|error| error.to_string())?;
        self.crowd.locks.check().map_err(|error| error.to_string())?;
        let unknown = history.entries.iter().filter(|entry| entry.fate == moim_history::Fate::Unknown);
        Ok(Report {
            hash: world.trace.hash(),
            events: world.trace.count(),
            answered: self.crowd.answered.load(Ordering::Relaxed),
            unknown: unknown.count() as u64,
            leases: self.crowd.leases.load(Ordering::Relaxed),
            holds: self.crowd.locks.holds().len(),
            terms: self.cluster.shared.terms(),
            revision,
            world_ms: world.now_ms(),
        })
    }

    fn describe(&self) -> String {
        let mut lines = String::new();
        for (number, node) in self.cluster.shared.nodes() {
            lines.push_str(&format!("\n  host {number}: {:?}", node.coordinator.group().metrics()));
        }
        lines
    }
}
