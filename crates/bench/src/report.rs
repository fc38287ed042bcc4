//! Output of results: a markdown table that can be pasted into a page, or JSON with every key.
//!
//! Owns the report types and their output. A ratio always comes with the number of pairs behind it and the number
//! dropped; a value that was not measured is shown as such and never filled in.

use std::fmt::Write as _;

use serde::Serialize;

use crate::slices::{Outcome, Ratio, Slice};

/// All results of one run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Description of the machine, in one line.
    pub machine: String,
    /// The metrics in the order they ran.
    pub metrics: Vec<Metric>,
    /// Metrics that could not be measured, and why.
    pub notes: Vec<String>,
}

/// One metric of the list in docs/performance.md.
#[derive(Debug, Default, Serialize)]
pub struct Metric {
    /// Metric number in that page.
    pub number: u8,
    /// Title of the metric.
    pub title: String,
    /// The figures of every side.
    pub sides: Vec<Side>,
    /// Ours against each other side.
    pub comparisons: Vec<Comparison>,
    /// Single figures (memory, start time) that are not rates.
    pub figures: Vec<Figure>,
}

/// One side of a comparison, medians over its quiet slices.
#[derive(Debug, Serialize)]
pub struct Side {
    /// Label of the side.
    pub label: String,
    /// Durability of its acknowledgements.
    pub durability: String,
    /// Operations per second.
    pub ops_per_s: Option<f64>,
    /// Payload throughput.
    pub mib_per_s: Option<f64>,
    /// Median latency.
    pub p50_ms: Option<f64>,
    /// 99th percentile.
    pub p99_ms: Option<f64>,
    /// Server CPU per operation.
    pub cpu_us_per_op: Option<f64>,
    /// Server CPU per GiB of payload.
    pub cpu_s_per_gib: Option<f64>,
    /// Operations refused in all slices because the server could not keep up.
    pub refused: u64,
}

/// The desired bound of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// At least this value.
    AtLeast(f64),
    /// At most this value.
    AtMost(f64),
}

/// The ratio of our figure to the peer's.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Label of the other side.
    pub against: String,
    /// Name of the compared figure.
    pub what: String,
    /// Median of the pair ratios; null if no pair was quiet.
    pub ratio: Option<f64>,
    /// The aim, if there is one.
    pub aim: Option<Aim>,
    /// True if the aim is reached; null without a ratio or an aim.
    pub reached: Option<bool>,
    /// Number of pairs behind the median.
    pub kept: usize,
    /// Pairs dropped because other processes were busy.
    pub dropped: usize,
}

/// A single figure.
#[derive(Debug, Serialize)]
pub struct Figure {
    /// Label of the side.
    pub side: String,
    /// Name of the figure.
    pub what: String,
    /// The value.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
    /// The aim, if there is one.
    pub aim: Option<Aim>,
    /// True if the aim is reached; null without an aim.
    pub reached: Option<bool>,
}

impl Aim {
    fn reached(self, value: f64) -> bool {
        match self {
            Aim::AtLeast(limit) => value >= limit,
            Aim::AtMost(limit) => value <= limit,
        }
    }

    fn text(self) -> String {
        match self {
            Aim::AtLeast(limit) => format!(">= {limit}"),
            Aim::AtMost(limit) => format!("<= {limit}"),
        }
    }
}

impl Side {
    /// The medians of subject `index`.
    #[must_use]
    pub fn of(outcome: &Outcome, index: usize, label: String, durability: String) -> Side {
        let value = |figure: fn(&Slice) -> Option<f64>| outcome.value(index, figure);
        let scaled = |figure: fn(&Slice) -> Option<f64>, by: f64| value(figure).map(|found| found * by);
        Side {
            label,
            durability,
            ops_per_s: value(|slice| Some(slice.ops_per_s())),
            mib_per_s: scaled(|slice| Some(slice.bytes_per_s()), 1.0 / f64::from(1 << 20)),
            p50_ms: scaled(|slice| slice.quantile(0.50), 1e3),
            p99_ms: scaled(|slice| slice.quantile(0.99), 1e3),
            cpu_us_per_op: scaled(Slice::cpu_per_op, 1e6),
            cpu_s_per_gib: value(Slice::cpu_per_gib),
            refused: outcome.rounds.iter().map(|round| round[index].work.refused).sum(),
        }
    }
}

impl Comparison {
    /// A comparison from a ratio, judged by its aim.
    #[must_use]
    pub fn new(
        against: &str,
        what: &str,
        ratio: Option<Ratio>,
        rounds: usize,
        aim: Option<Aim>,
    ) -> Comparison {
        let median = ratio.map(|ratio| ratio.median);
        Comparison {
            against: against.into(),
            what: what.into(),
            ratio: median,
            aim,
            reached: median.zip(aim).map(|(found, aim)| aim.reached(found)),
            kept: ratio.map_or(0, |ratio| ratio.kept),
            dropped: ratio.map_or(rounds, |ratio| ratio.dropped),
        }
    }
}

impl Figure {
    /// A figure judged by its aim.
    #[must_use]
    pub fn new(side: &str, what: &str, value: f64, unit: &str, aim: Option<Aim>) -> Figure {
        let reached = aim.map(|aim| aim.reached(value));
        Figure { side: side.into(), what: what.into(), value, unit: unit.into(), aim, reached }
    }
}

impl Report {
    /// The report as markdown tables.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = format!("{}\n", self.machine);
        for metric in &self.metrics {
            let _ = writeln!(out, "\n## {}. {}\n", metric.number, metric.title);
            if !metric.sides.is_empty() {
                out.push_str(&sides_table(&metric.sides));
            }
            if !metric.comparisons.is_empty() {
                out.push('\n');
                out.push_str(&comparisons_table(&metric.comparisons));
            }
            if !metric.figures.is_empty() {
                out.push_str(&figures_table(&metric.figures));
            }
        }
        for note in &self.notes {
            let _ = write!(out, "\nnote: {note}");
        }
        out
    }

    /// The report as JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}

fn sides_table(sides: &[Side]) -> String {
    let mut rows = vec![cells(&[
        "side",
        "durability",
        "op/s",
        "MiB/s",
        "p50 ms",
        "p99 ms",
        "CPU µs/op",
        "CPU s/GiB",
        "refused",
    ])];
    for side in sides {
        rows.push(vec![
            side.label.clone(),
            side.durability.clone(),
            number(side.ops_per_s),
            number(side.mib_per_s),
            number(side.p50_ms),
            number(side.p99_ms),
            number(side.cpu_us_per_op),
            number(side.cpu_s_per_gib),
            side.refused.to_string(),
        ]);
    }
    table(&rows)
}

fn comparisons_table(comparisons: &[Comparison]) -> String {
    let mut rows = vec![cells(&["ours against", "figure", "ratio", "aim", "", "pairs", "dropped"])];
    for comparison in comparisons {
        rows.push(vec![
            comparison.against.clone(),
            comparison.what.clone(),
            comparison.ratio.map_or("no quiet pair".into(), |ratio| format!("{ratio:.2}x")),
            comparison.aim.map_or(String::new(), Aim::text),
            verdict(comparison.reached),
            comparison.kept.to_string(),
            comparison.dropped.to_string(),
        ]);
    }
    table(&rows)
}

fn figures_table(figures: &[Figure]) -> String {
    let mut rows = vec![cells(&["side", "figure", "value", "aim", ""])];
    for figure in figures {
        rows.push(vec![
            figure.side.clone(),
            figure.what.clone(),
            format!("{} {}", number(Some(figure.value)), figure.unit),
            figure.aim.map_or(String::new(), Aim::text),
            verdict(figure.reached),
        ]);
    }
    table(&rows)
}

fn verdict(reached: Option<bool>) -> String {
    reached.map_or("", |reached| if reached { "reached" } else { "missed" }).into()
}

fn cells(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Three significant digits.
fn number(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(v) if v.abs() >= 100.0 => format!("{v:.0}"),
        Some(v) if v.abs() >= 10.0 => format!("{v:.1}"),
        Some(v) if v.abs() >= 1.0 => format!("{v:.2}"),
        Some(v) => format!("{v:.3}"),
    }
}

/// Rows as an aligned markdown table; the first row is the header.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(3))
        .collect();
    let mut out = String::new();
    for (index, row) in rows.iter().enumerate() {
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(out, "| {cell:<width$} ");
        }
        out.push_str("|\n");
        if index == 0 {
            for width in &widths {
                let _ = write!(out, "|{}", "-".repeat(width + 2));
            }
            out.push_str("|\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aims_point_both_ways() {
        let ratio = |median| Some(Ratio { median, kept: 5, dropped: 1 });
        let faster = Comparison::new("Kafka", "throughput", ratio(2.0), 6, Some(Aim::AtLeast(2.0)));
        assert_eq!(faster.reached, Some(true));
        let slower = Comparison::new("Kafka", "p99", ratio(0.3), 6, Some(Aim::AtMost(0.2)));
        assert_eq!(slower.reached, Some(false));
    }

    #[test]
    fn missing_ratio_is_not_judged() {
        let none = Comparison::new("Kafka", "throughput", None, 6, Some(Aim::AtLeast(2.0)));
        assert_eq!((none.ratio, none.reached, none.kept, none.dropped), (None, None, 0, 6));
    }

    #[test]
    fn table_lines_up_and_json_keeps_empty_keys() {
        let figure = Figure::new("Moim", "idle memory", 12.5, "MiB", Some(Aim::AtMost(30.0)));
        let metric =
            Metric { number: 14, title: "memory".into(), figures: vec![figure], ..Metric::default() };
        let report = Report { machine: "m".into(), metrics: vec![metric], notes: vec![] };
        let text = report.table();
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.chars().count() == lines[0].chars().count()), "{text}");
        assert!(lines[2].contains("12.5 MiB") && lines[2].contains("reached"));
        assert!(report.json().unwrap().contains("\"sides\": []"));
    }
}
