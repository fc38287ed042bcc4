//! Message latency from a client's first write to the counter's commit, for runs in one process.
//!
//! All times are taken on one clock, so clients and counters must run in the same process. Verdicts are never derived
//! from it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Send times and measured latencies.
#[derive(Debug)]
pub struct Latency {
    began: Instant,
    /// Send times per client, indexed by sequence number from 1, in microseconds since `began`; 0 if not sent yet.
    sent_us: HashMap<String, Box<[AtomicU64]>>,
    took_us: Mutex<Vec<u64>>,
}

/// Latency percentiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// Number of measured messages.
    pub messages: usize,
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// Maximum.
    pub max: Duration,
}

impl Latency {
    /// For these clients, each of which sends `messages` messages.
    pub fn of(clients: impl IntoIterator<Item = String>, messages: usize) -> Self {
        let times = || (0..messages).map(|_| AtomicU64::new(0)).collect();
        let sent_us = clients.into_iter().map(|client| (client, times())).collect();
        Self { began: Instant::now(), sent_us, took_us: Mutex::default() }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }

    /// Send times of a client; empty for an unknown client.
    fn times(&self, client: &str) -> &[AtomicU64] {
        self.sent_us.get(client).map_or(&[], |times| times)
    }

    /// A client writes these messages; only the first write of a message counts.
    pub(crate) fn on_sent(&self, client: &str, numbers: Range<u64>) {
        self.sent_by(self.now_us(), client, numbers);
    }

    fn sent_by(&self, now_us: u64, client: &str, numbers: Range<u64>) {
        let times = self.times(client);
        for at in numbers.filter_map(|sn| sent(times, sn)) {
            let _ = at.compare_exchange(0, now_us, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// A transaction that counted these messages has committed.
    pub(crate) fn on_counted<'a>(&self, messages: impl Iterator<Item = (&'a str, u64)>) {
        self.counted_by(self.now_us(), messages);
    }

    fn counted_by<'a>(&self, now_us: u64, messages: impl Iterator<Item = (&'a str, u64)>) {
        let mut took = self.took_us.lock().unwrap_or_else(PoisonError::into_inner);
        let mut present: (&str, &[AtomicU64]) = ("", &[]);
        for (client, sn) in messages {
            if present.0 != client {
                present = (client, self.times(client));
            }
            let sent = sent(present.1, sn).map_or(0, |at| at.load(Ordering::Relaxed));
            if sent > 0 {
                took.push(now_us.saturating_sub(sent));
            }
        }
    }

    /// The percentiles measured so far.
    pub fn spread(&self) -> Spread {
        let mut took = self.took_us.lock().unwrap_or_else(PoisonError::into_inner).clone();
        took.sort_unstable();
        let at = |share: f64| {
            let rank = ((took.len() as f64 * share).ceil() as usize).clamp(1, took.len().max(1));
            Duration::from_micros(took.get(rank - 1).copied().unwrap_or(0))
        };
        Spread { messages: took.len(), p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

fn sent(times: &[AtomicU64], sn: u64) -> Option<&AtomicU64> {
    times.get(usize::try_from(sn.checked_sub(1)?).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_counts_the_first_write_and_ignores_unknown_clients() {
        let latency = Latency::of(["a".to_owned()], 100);
        latency.sent_by(1_000, "a", 1..101);
        for (client, sn) in [("a", 1), ("b", 1), ("a", 101)] {
            latency.sent_by(11_000, client, sn..sn + 1);
        }
        latency.counted_by(11_000, (1..=98).map(|sn| ("a", sn)));
        latency.counted_by(31_000, [("a", 99), ("a", 100), ("b", 1), ("a", 0), ("a", 101)].into_iter());
        let ms = Duration::from_millis;
        assert_eq!(latency.spread(), Spread { messages: 100, p50: ms(10), p99: ms(30), max: ms(30) });
        assert_eq!(Latency::of([], 0).spread(), Spread::default());
    }
}
