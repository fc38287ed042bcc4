//! Counts while they grow: a bar per stage on a terminal, a line a second elsewhere. On stderr, so that pipes see data alone.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use moim_pipeline::Counts;
use tokio::time::{Instant, sleep};

use crate::output::note;

const STAGES: [&str; 4] = ["in the store", "in the queue", "counted", "aggregated"];

/// Where counts are shown.
pub(crate) struct Live {
    bars: Option<(MultiProgress, Vec<ProgressBar>)>,
    every: Duration,
    since: Instant,
    shown: [u64; 4],
    said: Instant,
}

impl Live {
    /// Shows counts up to `total`, where that is known.
    pub(crate) fn new(total: Option<u64>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let every = Duration::from_millis(if terminal { 100 } else { 1_000 });
        let now = Instant::now();
        Self { bars: terminal.then(|| bars(total)), every, since: now, shown: [u64::MAX; 4], said: now }
    }

    /// Returns when it is time to show something. Cancel-safe.
    pub(crate) async fn tick(&self) {
        sleep(self.every).await;
    }

    /// How long to wait before showing something again.
    pub(crate) fn pause(&self) -> Duration {
        self.every
    }

    /// Shows what the counts are now.
    pub(crate) fn show(&mut self, counts: &Counts) {
        let now = [&counts.kept, &counts.relayed, &counts.counted, &counts.aggregated].map(Counts::get);
        match &self.bars {
            Some((_, bars)) => bars.iter().zip(now).for_each(|(bar, count)| bar.set_position(count)),
            None => {
                if now == self.shown {
                    return;
                }
                let before = self.shown[2].min(now[2]);
                let rate = (now[2] - before) as f64 / self.said.elapsed().as_secs_f64().max(0.001);
                let stages: Vec<_> = STAGES
                    .iter()
                    .zip(now)
                    .map(|(name, count)| format!("{name} {}", grouped(count)))
                    .collect();
                let since = self.since.elapsed().as_secs_f64();
                note(format_args!(
                    "{since:6.1} s  {}  ({} counted/s)",
                    stages.join("  "),
                    grouped(rate as u64)
                ));
                self.said = Instant::now();
            }
        }
        self.shown = now;
    }

    /// Says something between the counts.
    pub(crate) fn say(&self, text: &str) {
        match &self.bars {
            Some((all, _)) => all.suspend(|| note(text)),
            None => note(text),
        }
    }

    /// Leaves the last counts standing.
    pub(crate) fn end(&mut self) {
        if let Some((_, bars)) = self.bars.take() {
            bars.iter().for_each(ProgressBar::abandon);
        }
    }
}

fn bars(total: Option<u64>) -> (MultiProgress, Vec<ProgressBar>) {
    let all = MultiProgress::new();
    let known = "  {prefix:<13} {bar:28} {human_pos:>8} of {human_len} {per_sec:>14}";
    let unknown = "  {prefix:<13} {human_pos:>10} {per_sec:>14}";
    let style = ProgressStyle::with_template(if total.is_some() { known } else { unknown })
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bars = STAGES.iter().map(|name| {
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        all.add(bar.with_style(style.clone()).with_prefix(*name))
    });
    let bars = bars.collect();
    (all, bars)
}

/// `44,220`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        let all = [0, 7, 999, 1_000, 44_220, 1_234_567].map(grouped);
        assert_eq!(all, ["0", "7", "999", "1,000", "44,220", "1,234,567"]);
    }
}
