//! Client stall times by kind of fault, compared with the aims.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::faults::Kind;
use super::number;

/// The longest stalls of all rounds.
#[derive(Default)]
pub(super) struct Stalls(BTreeMap<Kind, Vec<Duration>>);

impl Stalls {
    /// Records the longest stall of a round; returns the longest of each layer as text.
    pub(super) fn note(&mut self, kind: Kind, stalls: &BTreeMap<String, Duration>) -> String {
        let longest = |layer: &str| {
            let of_layer = stalls.iter().filter(|(name, _)| name.starts_with(layer));
            of_layer.map(|(_, stall)| *stall).max().unwrap_or_default()
        };
        let layers = [longest("queue"), longest("store"), longest("core")];
        self.0.entry(kind).or_default().push(layers.into_iter().max().unwrap_or_default());
        let [queue, store, core] = layers.map(|stall| stall.as_millis());
        format!("queue {queue} ms, store {store} ms, core {core} ms")
    }

    fn percentile(stalls: &[Duration], percent: usize) -> Duration {
        let mut sorted = stalls.to_vec();
        sorted.sort_unstable();
        sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
    }

    /// Panics if a gray failure stalled clients for longer than `MOIM_STORM_SLACK` times its aim.
    pub(super) fn check(&self) {
        let slack = u32::try_from(number("MOIM_STORM_SLACK", 3)).unwrap();
        for (kind, stalls) in &self.0 {
            let Some(aim) = kind.aim() else { continue };
            let p99 = Self::percentile(stalls, 99);
            assert!(
                p99 <= aim * slack,
                "{kind:?}: a p99 stall of {p99:?}, and {slack} times {aim:?} is allowed"
            );
        }
    }
}

impl fmt::Display for Stalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16} {:>6} {:>9} {:>9} {:>9} {:>9}",
            "FAULT", "ROUNDS", "P50 MS", "P99 MS", "MAX MS", "AIM MS"
        )?;
        for (kind, stalls) in &self.0 {
            let ms = |percent| Self::percentile(stalls, percent).as_millis();
            let aim = kind.aim().map_or("-".to_owned(), |aim| aim.as_millis().to_string());
            let (kind, rounds) = (format!("{kind:?}"), stalls.len());
            writeln!(f, "{kind:<16} {rounds:>6} {:>9} {:>9} {:>9} {aim:>9}", ms(50), ms(99), ms(100))?;
        }
        Ok(())
    }
}

#[test]
fn percentiles_of_the_longest_stalls() {
    let stalls: Vec<_> = (1..=100).map(Duration::from_secs).collect();
    assert_eq!(Stalls::percentile(&stalls, 99), Duration::from_secs(99));
    assert_eq!(Stalls::percentile(&stalls[..3], 50), Duration::from_secs(2));
    assert_eq!(Stalls::percentile(&stalls[..1], 99), Duration::from_secs(1));
}
