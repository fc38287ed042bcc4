//! Alternating slices: every subject gets a short slice in turn, round after round.
//!
//! A shared machine drifts by a factor of two within minutes, so absolute figures of two separate runs are not
//! comparable. Neighbouring slices see the same machine: the ratio within one round is kept, and the median over the
//! rounds is reported. A pair during which other processes used more than [`Plan::noise_limit`] of the machine is
//! dropped and counted as dropped.

use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

use crate::procfs;

/// Number and length of the slices.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Pairs required after the warm-up; noisy ones are repeated, up to three times as many in total.
    pub pairs: usize,
    /// Length of one slice.
    pub slice: Duration,
    /// Share of the machine that other processes may use before a slice counts as noisy.
    pub noise_limit: f64,
}

impl Default for Plan {
    fn default() -> Self {
        Plan { pairs: 5, slice: Duration::from_secs(3), noise_limit: 0.10 }
    }
}

/// The work done in one slice.
#[derive(Clone, Debug)]
pub struct Work {
    /// Completed operations: acknowledged batches, received responses, consumed records.
    pub ops: u64,
    /// Payload bytes transferred.
    pub bytes: u64,
    /// Operations that the server refused because it could not keep up; a client retries them after a pause.
    pub refused: u64,
    /// From the start of the first operation to the end of the last one.
    pub elapsed: Duration,
    /// Nanoseconds per operation, if the load measures them.
    pub latency: Option<Histogram<u64>>,
    /// CPU time of a server inside this process (probes); separate servers are read by pid.
    pub cpu: Option<Duration>,
}

/// An empty histogram of nanoseconds, up to a minute. Its range is fixed: larger values saturate.
pub(crate) fn latencies() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(60_000_000_000, 3)?)
}

/// One side of a comparison.
pub trait Subject {
    /// Label in the report.
    fn label(&self) -> String;
    /// Durability of an acknowledgement on this side.
    fn durability(&self) -> String;
    /// Process id of the server, if it is a separate process.
    fn pid(&self) -> Option<u32>;
    /// Process ids of the servers, if there are several.
    fn pids(&self) -> Vec<u32> {
        self.pid().into_iter().collect()
    }
    /// Number of slices discarded at the beginning.
    fn warm_up(&self) -> u32 {
        1
    }
    /// Preparation before the slice, unmeasured.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }
    /// Runs the slice.
    fn run(&mut self, slice: Duration) -> Result<Work>;
    /// Cleanup after the slice, unmeasured: removes what it left, so that the next subject does not pay for it.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }
}

/// One measured slice.
#[derive(Clone, Debug)]
pub struct Slice {
    /// The work of the load.
    pub work: Work,
    /// CPU time of the server during the slice.
    pub server_cpu: Option<Duration>,
    /// Share of the machine used by processes outside the comparison.
    pub others: f64,
}

impl Slice {
    /// Operations per second.
    #[must_use]
    pub fn ops_per_s(&self) -> f64 {
        self.work.ops as f64 / self.work.elapsed.as_secs_f64()
    }

    /// Payload bytes per second.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.work.bytes as f64 / self.work.elapsed.as_secs_f64()
    }

    /// Server CPU seconds per operation.
    #[must_use]
    pub fn cpu_per_op(&self) -> Option<f64> {
        (self.work.ops > 0).then_some(self.server_cpu?.as_secs_f64() / self.work.ops as f64)
    }

    /// Server CPU seconds per GiB of payload.
    #[must_use]
    pub fn cpu_per_gib(&self) -> Option<f64> {
        let gib = self.work.bytes as f64 / (1_u64 << 30) as f64;
        (self.work.bytes > 0).then_some(self.server_cpu?.as_secs_f64() / gib)
    }

    /// A latency quantile in seconds.
    #[must_use]
    pub fn quantile(&self, q: f64) -> Option<f64> {
        self.work
            .latency
            .as_ref()
            .filter(|latency| !latency.is_empty())
            .map(|latency| latency.value_at_quantile(q) as f64 / 1e9)
    }
}

/// All rounds of one comparison: `rounds[r][s]` is subject `s` in round `r`.
#[derive(Debug)]
pub struct Outcome {
    /// The rounds in the order they ran.
    pub rounds: Vec<Vec<Slice>>,
    noise_limit: f64,
}

/// The median of the ratios of two subjects, and the number of pairs behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Median of `ours / theirs` over the kept pairs.
    pub median: f64,
    /// Number of pairs behind the median.
    pub kept: usize,
    /// Pairs dropped as noisy.
    pub dropped: usize,
}

/// Runs the subjects in turn. `watched` are further processes of the comparison: they are idle during another
/// subject's slice, but not foreign.
pub fn alternate(
    plan: &Plan,
    subjects: &mut [Box<dyn Subject + '_>],
    watched: &[u32],
    progress: &mut dyn FnMut(&str),
) -> Result<Outcome> {
    for subject in subjects.iter_mut() {
        for _ in 0..subject.warm_up() {
            progress(&format!("warm-up  {}", subject.label()));
            one(plan, subject.as_mut(), watched)?;
        }
    }
    let mut outcome = Outcome { rounds: Vec::new(), noise_limit: plan.noise_limit };
    while outcome.rounds.len() < plan.pairs * 3 && outcome.quiet_rounds() < plan.pairs {
        let number = outcome.rounds.len() + 1;
        let mut round = Vec::with_capacity(subjects.len());
        for subject in subjects.iter_mut() {
            let slice = one(plan, subject.as_mut(), watched)?;
            progress(&format!(
                "round {number}  {}: {:.0} op/s, {:.1} MiB/s, other processes {:.0}%",
                subject.label(),
                slice.ops_per_s(),
                slice.bytes_per_s() / f64::from(1 << 20),
                slice.others * 100.0
            ));
            round.push(slice);
        }
        outcome.rounds.push(round);
    }
    Ok(outcome)
}

fn one(plan: &Plan, subject: &mut dyn Subject, watched: &[u32]) -> Result<Slice> {
    subject.prepare().with_context(|| format!("preparing {}", subject.label()))?;
    let before = Reading::take(&subject.pids(), watched)?;
    let work = subject.run(plan.slice).with_context(|| format!("measuring {}", subject.label()))?;
    let after = Reading::take(&subject.pids(), watched)?;
    subject.settle().with_context(|| format!("cleaning up after {}", subject.label()))?;
    let server_cpu = work.cpu.or_else(|| Some(after.server?.saturating_sub(before.server?)));
    Ok(Slice { others: after.others_since(&before), server_cpu, work })
}

/// The counters at one point in time.
struct Reading {
    at: std::time::Instant,
    machine: procfs::Machine,
    server: Option<Duration>,
    ours: Duration,
}

impl Reading {
    fn take(servers: &[u32], watched: &[u32]) -> Result<Reading> {
        let mut ours = procfs::cpu_of_self()?;
        for pid in watched {
            ours += procfs::cpu_of(*pid).with_context(|| format!("server {pid} has ended"))?;
        }
        let mut server_cpu = None;
        for pid in servers {
            let cpu = procfs::cpu_of(*pid).context("the server has ended")?;
            server_cpu = Some(server_cpu.unwrap_or_default() + cpu);
            if !watched.contains(pid) {
                ours += cpu;
            }
        }
        Ok(Reading { at: std::time::Instant::now(), machine: procfs::machine()?, server: server_cpu, ours })
    }

    fn others_since(&self, before: &Reading) -> f64 {
        let busy = self.machine.busy.saturating_sub(before.machine.busy);
        let kernel = self.machine.kernel_threads.saturating_sub(before.machine.kernel_threads);
        let others = busy.saturating_sub(kernel).saturating_sub(self.ours.saturating_sub(before.ours));
        others.as_secs_f64() / ((self.at - before.at).as_secs_f64() * procfs::cores())
    }
}

impl Outcome {
    fn quiet(&self, slice: &Slice) -> bool {
        slice.others <= self.noise_limit
    }

    fn quiet_rounds(&self) -> usize {
        self.rounds.iter().filter(|round| round.iter().all(|slice| self.quiet(slice))).count()
    }

    /// The median ratio of subject `ours` to subject `theirs` of a slice's `figure`. None if no pair was quiet.
    pub fn ratio(&self, ours: usize, theirs: usize, figure: impl Fn(&Slice) -> Option<f64>) -> Option<Ratio> {
        let mut ratios = Vec::new();
        let mut dropped = 0;
        for round in &self.rounds {
            if !self.quiet(&round[ours]) || !self.quiet(&round[theirs]) {
                dropped += 1;
                continue;
            }
            if let (Some(a), Some(b)) = (figure(&round[ours]), figure(&round[theirs]))
                && b > 0.0
            {
                ratios.push(a / b);
            }
        }
        Some(Ratio { kept: ratios.len(), dropped, median: median(ratios)? })
    }

    /// The median of a figure over a subject's quiet slices (over all of them if none was quiet).
    pub fn value(&self, subject: usize, figure: impl Fn(&Slice) -> Option<f64>) -> Option<f64> {
        let all = || self.rounds.iter().map(|round| &round[subject]);
        let quiet: Vec<f64> = all().filter(|slice| self.quiet(slice)).filter_map(&figure).collect();
        if quiet.is_empty() { median(all().filter_map(figure).collect()) } else { median(quiet) }
    }
}

/// The median; None for an empty list.
#[must_use]
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(ops: u64, others: f64) -> Slice {
        let work = Work {
            ops,
            bytes: ops * 10,
            refused: 0,
            elapsed: Duration::from_secs(2),
            latency: None,
            cpu: None,
        };
        Slice { work, server_cpu: Some(Duration::from_secs(1)), others }
    }

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn noisy_pairs_are_dropped_and_counted() {
        let outcome = Outcome {
            rounds: vec![
                vec![slice(20, 0.01), slice(10, 0.02)],
                vec![slice(90, 0.50), slice(10, 0.02)],
                vec![slice(90, 0.01), slice(10, 0.11)],
                vec![slice(40, 0.10), slice(10, 0.00)],
            ],
            noise_limit: 0.10,
        };
        let ratio = outcome.ratio(0, 1, |slice| Some(slice.ops_per_s()));
        assert_eq!(ratio, Some(Ratio { median: 3.0, kept: 2, dropped: 2 }));
        assert_eq!(outcome.quiet_rounds(), 2);
    }

    #[test]
    fn run_without_quiet_slices_has_values_but_no_ratio() {
        let outcome = Outcome { rounds: vec![vec![slice(20, 0.3), slice(10, 0.3)]], noise_limit: 0.10 };
        assert_eq!(outcome.ratio(0, 1, |slice| Some(slice.ops_per_s())), None);
        assert_eq!(outcome.value(0, |slice| Some(slice.ops_per_s())), Some(10.0));
    }

    struct Counting<'a> {
        slices: &'a std::cell::Cell<u32>,
    }

    impl Subject for Counting<'_> {
        fn label(&self) -> String {
            "counting".into()
        }
        fn durability(&self) -> String {
            "none".into()
        }
        fn pid(&self) -> Option<u32> {
            None
        }
        fn run(&mut self, slice: Duration) -> Result<Work> {
            self.slices.set(self.slices.get() + 1);
            std::thread::sleep(slice);
            Ok(Work { ops: 1, bytes: 1, refused: 0, elapsed: slice, latency: None, cpu: Some(slice) })
        }
    }

    #[test]
    fn noisy_pairs_are_repeated_at_most_three_times() {
        let counts = [std::cell::Cell::new(0), std::cell::Cell::new(0)];
        // A negative limit makes every slice noisy.
        let plan = Plan { pairs: 2, slice: Duration::from_millis(5), noise_limit: -1.0 };
        let mut subjects: Vec<Box<dyn Subject + '_>> =
            counts.iter().map(|slices| Box::new(Counting { slices }) as Box<dyn Subject>).collect();
        let outcome = alternate(&plan, &mut subjects, &[], &mut |_| ()).unwrap();
        assert_eq!(outcome.rounds.len(), 6);
        assert!(counts.iter().all(|count| count.get() == 7), "six rounds and one warm-up each");
    }
}
