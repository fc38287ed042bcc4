//! How long messages take from a client's first write until a counter has committed them, for runs in one process.
//!
//! Times are taken on one clock, so clients and counters must live in the same process. Verdicts never come from here.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// When messages were sent, and how long each took.
#[derive(Debug)]
pub struct Latency {
    began: Instant,
    /// Per client, by sequence number from 1: microseconds since `began`, or 0 for not yet.
    sent_us: HashMap<String, Box<[AtomicU64]>>,
    took_us: Mutex<Vec<u64>>,
}

/// What was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// How many messages.
    pub messages: usize,
    /// Half of them took no longer.
    pub p50: Duration,
    /// 99 of 100 took no longer.
    pub p99: Duration,
    /// None took longer.
    pub max: Duration,
}

impl Latency {
    /// For these clients, which send so many messages each.
    pub fn of(clients: impl IntoIterator<Item = String>, messages: usize) -> Self {
        let times = || (0..messages).map(|_| AtomicU64::new(0)).collect();
        let sent_us = clients.into_iter().map(|client| (client, times())).collect();
        Self { began: Instant::now(), sent_us, took_us: Mutex::default() }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }

    /// Where it stands when a client sent what; nothing for strangers.
    fn times(&self, client: &str) -> &[AtomicU64] {
        self.sent_us.get(client).map_or(&[], |times| times)
    }

    /// A client writes these messages; only the first time counts.
    pub(crate) fn on_sent(&self, client: &str, numbers: Range<u64>) {
        self.sent_by(self.now_us(), client, numbers);
    }

    fn sent_by(&self, now_us: u64, client: &str, numbers: Range<u64>) {
        let times = self.times(client);
        for at in numbers.filter_map(|sn| sent(times, sn)) {
            let _ = at.compare_exchange(0, now_us, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// A transaction that counted these messages is committed.
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

    /// What has been measured so far.
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
    fn the_first_write_counts_and_strangers_do_not() {
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
