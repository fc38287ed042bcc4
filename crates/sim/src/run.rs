//! One run of the coordination core: found a cluster, run clients and faults, heal it, check the histories.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::clients::{ClientPool, read_every_key};
use crate::cluster::Cluster;
use crate::faults::Faults;
use crate::world::{LinkQuality, Task, World};

/// Trace lines shown with a failure.
const SHOWN: usize = 60;

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The seed; it decides everything else.
    pub seed: u64,
    /// Founding members; 0 lets the seed choose three, four or five.
    pub nodes: usize,
    /// Duration of fault injection, in simulated time.
    pub faults_ms: u64,
    /// Number of key-value clients.
    pub clients: u64,
}

impl Options {
    /// The default run of a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, nodes: 0, faults_ms: 8_000, clients: 5 }
    }
}

/// Statistics of a run without a violation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Hash of the whole trace.
    pub hash: u64,
    /// Number of trace lines.
    pub events: u64,
    /// Key operations with a known outcome.
    pub answered: u64,
    /// Operations with an unknown outcome.
    pub unknown: u64,
    /// Leases granted to clients.
    pub leases: u64,
    /// Number of lock acquisitions.
    pub holds: usize,
    /// Terms with a leader.
    pub terms: usize,
    /// The final revision.
    pub revision: i64,
    /// Simulated time of the run, in milliseconds.
    pub world_ms: u64,
}

/// A run with a violation.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed that repeats the run.
    pub seed: u64,
    /// The violation.
    pub what: String,
    /// The newest trace lines.
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

/// Runs one seed to its end.
pub fn run(options: Options) -> Result<Report, Failure> {
    run_traced(options).0
}

/// Like [`run`], and returns the kept part of the trace for any verdict.
pub fn run_traced(options: Options) -> (Result<Report, Failure>, Vec<String>) {
    let mut world = World::new(options.seed);
    let result = Run::new(&mut world, options).and_then(|mut run| run.execute(&mut world, options));
    let trace = world.trace.lines();
    (result.map_err(|what| Failure { seed: options.seed, what, trace: trace.clone() }), trace)
}

struct Run {
    cluster: Cluster,
    pool: Arc<ClientPool>,
    faults: Faults,
    tasks: Vec<Task<()>>,
}

impl Run {
    fn new(world: &mut World, options: Options) -> Result<Self, String> {
        let founders = if options.nodes == 0 { world.random.usize(3..=5) } else { options.nodes };
        let hosts: Vec<usize> = (0..founders + 3).map(|_| world.add_host()).collect();
        let clients = world.add_host();
        // Clients write nothing to their disk.
        world.host(clients).set_disk_ms(1_000);
        world.host(clients).start();
        let spare = hosts[founders..].to_vec();
        // A crash loses unsynced data: slow disks have more of it.
        let disk_ms = [2, 6, 20, 50][world.random.usize(..4)];
        hosts.iter().for_each(|host| world.host(*host).set_disk_ms(disk_ms));
        let cluster = Cluster::found(world, founders);
        let pool = ClientPool::new(Arc::clone(&cluster.shared));
        world.network.set_quality(LinkQuality::HEALTHY);
        let mut run = Self { cluster, pool, faults: Faults::new(spare, (3, 7), disk_ms), tasks: Vec::new() };
        let converged = |run: &mut Self, _: &mut World| run.cluster.converged().is_some();
        run.wait_until(world, 20_000, "the cluster to be founded", converged)?;
        run.tasks = run.pool.start(world, clients, options.clients);
        Ok(run)
    }

    fn execute(&mut self, world: &mut World, options: Options) -> Result<Report, String> {
        let end_ms = world.now_ms() + options.faults_ms;
        while world.now_ms() < end_ms {
            world.step();
            self.faults.step(world, &mut self.cluster);
            self.check_violations(world)?;
        }
        self.faults.heal(world, &mut self.cluster);
        let over = |run: &mut Self, _: &mut World| run.faults.is_over();
        self.wait_until(world, 20_000, "restarts and membership changes to end", over)?;
        self.pool.stop();
        // The last tasks are the watchers; they continue to run.
        let watchers = self.tasks.split_off(self.tasks.len() - self.pool.watched.revisions().len());
        let over = |run: &mut Self, _: &mut World| run.tasks.iter().all(Task::is_over);
        self.wait_until(world, 20_000, "clients to end", over)?;
        self.check_availability(world)?;
        let revision = self.check_agreement(world)?;
        let received = |run: &mut Self, _: &mut World| run.pool.watched.all_received(revision);
        self.wait_until(world, 20_000, "watchers to receive every revision", received)?;
        drop(watchers);
        self.check_histories(world, revision)
    }

    /// Steps without new faults until `done` returns true.
    fn wait_until(
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
            self.check_violations(world)?;
            if done(self, world) {
                return Ok(());
            }
        }
        Err(format!("timed out after {timeout_ms} ms waiting for {what}{}", self.describe()))
    }

    fn check_violations(&mut self, world: &mut World) -> Result<(), String> {
        self.cluster.check_nodes(world);
        self.cluster.shared.first_violation().map_or(Ok(()), Err)
    }

    /// Checks that every node answers again; its reads become part of the history.
    fn check_availability(&mut self, world: &mut World) -> Result<(), String> {
        for (number, _) in self.cluster.shared.nodes() {
            let mut task = None;
            let pool = Arc::clone(&self.pool);
            let answered = move |run: &mut Self, world: &mut World| {
                let over = task.as_ref().is_none_or(Task::is_over);
                if over && matches!(task.take().and_then(|task: Task<_>| task.take()), Some(Ok(()))) {
                    return true;
                }
                if over {
                    let nodes = run.cluster.shared.nodes();
                    let node = nodes.into_iter().find(|(host, _)| *host == number);
                    task = node.and_then(|(_, node)| {
                        world.host(number).spawn(read_every_key(Arc::clone(&pool), node.coordinator))
                    });
                }
                false
            };
            self.wait_until(world, 20_000, &format!("host {number} to answer"), answered)?;
        }
        Ok(())
    }

    /// Checks that every member ends in the same state; returns the revision.
    fn check_agreement(&mut self, world: &mut World) -> Result<i64, String> {
        let mut agreed = None;
        let converged = |run: &mut Self, _: &mut World| {
            agreed = run.cluster.converged();
            agreed.is_some()
        };
        self.wait_until(world, 20_000, "the members to converge", converged)?;
        let all = agreed.unwrap_or_default();
        let Some((_, first)) = all.first() else { return Err("no members left".to_owned()) };
        match all.iter().find(|(_, other)| other != first) {
            Some(_) => Err(format!("members have different states: {all:?}")),
            None => Ok(first.revision),
        }
    }

    fn check_histories(&self, world: &World, revision: i64) -> Result<Report, String> {
        let history = self.pool.keys.history();
        moim_history::check(&history).map_err(|error| error.to_string())?;
        self.pool.locks.check().map_err(|error| error.to_string())?;
        let unknown = history.entries.iter().filter(|entry| entry.fate == moim_history::Fate::Unknown);
        Ok(Report {
            hash: world.trace.hash(),
            events: world.trace.count(),
            answered: self.pool.answered.load(Ordering::Relaxed),
            unknown: unknown.count() as u64,
            leases: self.pool.leases.load(Ordering::Relaxed),
            holds: self.pool.locks.holds().len(),
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
