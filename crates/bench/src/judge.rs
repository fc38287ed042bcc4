//! From slices to verdicts: which figure of which two sides is compared, and its aim.

use crate::report::{Aim, Comparison};
use crate::slices::{Outcome, Slice};

/// A figure in which two sides are compared.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    /// Payload bytes per second.
    Throughput,
    /// Operations per second.
    Rate,
    P50,
    P99,
    CpuPerOp,
    CpuPerGib,
}

/// Our side, the peer's, the figure, and the aim of its ratio.
pub(crate) struct Wanted(
    pub(crate) &'static str,
    pub(crate) &'static str,
    pub(crate) What,
    pub(crate) Option<Aim>,
);

impl What {
    fn name(self) -> &'static str {
        match self {
            What::Throughput => "throughput",
            What::Rate => "operations a second",
            What::P50 => "p50",
            What::P99 => "p99",
            What::CpuPerOp => "server CPU per op",
            What::CpuPerGib => "server CPU per GiB",
        }
    }

    fn of(self, slice: &Slice) -> Option<f64> {
        match self {
            What::Throughput => Some(slice.bytes_per_s()),
            What::Rate => Some(slice.ops_per_s()),
            What::P50 => slice.quantile(0.50),
            What::P99 => slice.quantile(0.99),
            What::CpuPerOp => slice.cpu_per_op(),
            What::CpuPerGib => slice.cpu_per_gib(),
        }
    }
}

/// The wanted comparisons whose sides both ran.
pub(crate) fn judge(outcome: &Outcome, labels: &[String], wanted: &[Wanted]) -> Vec<Comparison> {
    let index = |label: &str| labels.iter().position(|side| side == label);
    let mut found = Vec::new();
    for Wanted(ours, theirs, what, aim) in wanted {
        let (Some(a), Some(b)) = (index(ours), index(theirs)) else { continue };
        let ratio = outcome.ratio(a, b, |slice| what.of(slice));
        let against = if *ours == "Moim" { (*theirs).to_owned() } else { format!("{theirs} (by {ours})") };
        found.push(Comparison::new(&against, what.name(), ratio, outcome.rounds.len(), *aim));
    }
    found
}

/// Description of the machine, in one line.
pub(crate) fn machine_line() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease");
    let memory = read("/proc/meminfo");
    let kib = memory.split_whitespace().nth(1).and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0);
    let cpu = read("/proc/cpuinfo");
    let model =
        cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(" : unknown processor");
    format!(
        "{} cores ({}), {:.0} GiB, Linux {}, loopback",
        crate::procfs::cores(),
        model.trim_start_matches([' ', '\t', ':']).trim(),
        kib / 1024.0 / 1024.0,
        kernel.trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use anyhow::Result;

    use crate::slices::{Plan, Subject, Work, alternate};

    struct Fixed(&'static str, u64);

    impl Subject for Fixed {
        fn label(&self) -> String {
            self.0.into()
        }
        fn durability(&self) -> String {
            "none".into()
        }
        fn pid(&self) -> Option<u32> {
            None
        }
        fn run(&mut self, slice: Duration) -> Result<Work> {
            let cpu = Some(Duration::from_micros(self.1));
            Ok(Work { ops: 1, bytes: self.1, refused: 0, elapsed: slice, latency: None, cpu })
        }
    }

    #[test]
    fn only_sides_that_ran_are_judged() {
        let plan = Plan { pairs: 1, slice: Duration::from_millis(1), noise_limit: f64::INFINITY };
        let mut subjects: Vec<Box<dyn Subject>> =
            vec![Box::new(Fixed("Moim", 30)), Box::new(Fixed("Kafka", 10))];
        let outcome = alternate(&plan, &mut subjects, &[], &mut |_| ()).unwrap();
        let wanted = [
            Wanted("Moim", "Kafka", What::Throughput, Some(Aim::AtLeast(2.0))),
            Wanted("Moim", "Kafka", What::CpuPerOp, Some(Aim::AtMost(2.0))),
            Wanted("Moim", "Kafka", What::P99, None),
            Wanted("Moim", "floor server", What::Throughput, None),
        ];
        let found = judge(&outcome, &["Moim".into(), "Kafka".into()], &wanted);
        let seen: Vec<_> = found.iter().map(|c| (c.what.as_str(), c.ratio, c.reached)).collect();
        assert_eq!(
            seen,
            [
                ("throughput", Some(3.0), Some(true)),
                ("server CPU per op", Some(3.0), Some(false)),
                ("p99", None, None)
            ]
        );
    }
}
