//! Times to live under faults of wall clocks: steps of the hosts' wall clocks, and the resulting bounds of shard time.
//!
//! Shard time follows the wall clock of the primary by at most 10 s ahead of its previous value, further only if a
//! majority of the nodes' clocks agrees. So at most one host is ever far ahead, and the others by no more than
//! [`SKEW_MS`]: shard time is never ahead of world time by more than that. Any number of hosts may be behind: then
//! shard time advances at half rate, and after a restart it continues from the newest time in the journal.
//!
//! The clocks stay wrong after the last fault: times to live must expire all the same.

use std::collections::BTreeMap;

use super::NODES;
use crate::world::World;

/// Maximum error of a clock that counts as correct.
const SKEW_MS: i64 = 250;
/// Offset of a clock that is far ahead: never accepted without a majority, however far shard time lags behind.
const AHEAD_MS: std::ops::Range<i64> = 20_000..86_400_000;
const BEHIND_MS: std::ops::Range<i64> = 1_000..86_400_000;
/// A new primary with a clock in doubt continues shard time from the newest time in the journal: the maximum age of
/// that time.
const GAP_MS: i64 = 5_000;
/// Time limit for every shard to have a primary after the last fault.
const SETTLE_MS: i64 = 8_000;
/// Rounding of times to ticks.
const TICKS_MS: i64 = 50;

/// Faults of the wall clocks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockFaults {
    /// A host whose clock is far ahead at times.
    pub ahead: Option<usize>,
    /// True if the clock of any host is behind at times.
    pub behind: bool,
}

impl ClockFaults {
    /// A third of the seeds each: one host ahead, any host behind, both.
    pub fn of(seed: u64) -> Self {
        let host = usize::try_from(seed / 3 % NODES as u64).unwrap_or(0);
        Self { ahead: (seed % 3 != 1).then_some(host), behind: !seed.is_multiple_of(3) }
    }
}

/// Steps the wall clocks of hosts.
pub(super) struct ClockStepper {
    faults: ClockFaults,
    next_ms: u64,
    pub(super) steps: u64,
}

impl ClockStepper {
    pub(super) fn new(faults: ClockFaults) -> Self {
        Self { faults, next_ms: 0, steps: 0 }
    }

    /// May step the clock of a host.
    pub(super) fn step(&mut self, world: &mut World) {
        if world.now_ms() < self.next_ms {
            return;
        }
        self.next_ms = world.now_ms() + world.random.u64(200..1_500);
        let host = world.random.usize(..NODES);
        let correct_ms = world.random.i64(-SKEW_MS..=SKEW_MS);
        // Seconds are as likely as hours.
        let far = |world: &mut World, range: std::ops::Range<i64>| {
            let most = range.start << world.random.u8(0..17);
            world.random.i64(range.start..=most.min(range.end))
        };
        let offset_ms = match world.random.u8(..3) {
            0 if self.faults.ahead == Some(host) => far(world, AHEAD_MS),
            1 if self.faults.behind => -far(world, BEHIND_MS),
            _ => correct_ms,
        };
        self.steps += 1;
        world.host(host).set_wall_offset_ms(offset_ms);
    }
}

/// Bounds of shard time, relative to world time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    faults: ClockFaults,
    /// Time of the first possible clock step, and the end of the last fault.
    began_ms: i64,
    healed_ms: Option<i64>,
}

impl Bounds {
    pub(super) fn new(faults: ClockFaults, began_ms: u64) -> Self {
        Self { faults, began_ms: signed(began_ms), healed_ms: None }
    }

    pub(super) fn heal(&mut self, now_ms: u64) {
        self.healed_ms = Some(signed(now_ms));
    }

    /// Minimum shard time at a world time.
    fn min(&self, true_ms: i64) -> i64 {
        if !self.faults.behind {
            return true_ms - GAP_MS;
        }
        // During faults a shard may have no primary that advances its time.
        let since_ms = self.healed_ms.map_or(0, |healed| (true_ms - healed - SETTLE_MS).max(0));
        (true_ms - GAP_MS).min(self.began_ms - GAP_MS + since_ms / 2)
    }

    /// Maximum shard time at a world time.
    fn max(true_ms: i64) -> i64 {
        true_ms + SKEW_MS + TICKS_MS
    }
}

fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

/// A key with a time to live, written by one client, in shard time.
#[derive(Clone, Debug)]
struct Entry {
    value: String,
    /// True if the write was acknowledged; otherwise its outcome is unknown.
    is_acknowledged: bool,
    /// Earliest expiry; `None` if no time to live was set.
    earliest_ms: Option<i64>,
    /// Latest expiry; `None` if it is unknown whether a time to live was set.
    latest_ms: Option<i64>,
}

/// Send time of a command, and arrival time of its reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestTimes {
    pub(super) from_ms: u64,
    pub(super) until_ms: u64,
}

/// Checker of all keys with a time to live.
#[derive(Default)]
pub(super) struct Expiries {
    entries: BTreeMap<String, Entry>,
    order: Vec<String>,
    bounds: Option<Bounds>,
    /// Reads that found their key, and reads that did not.
    pub(super) reads_found: u64,
    pub(super) reads_missing: u64,
}

impl Expiries {
    pub(super) fn begin(&mut self, bounds: Bounds) {
        self.bounds = Some(bounds);
    }

    pub(super) fn heal(&mut self, now_ms: u64) {
        if let Some(bounds) = &mut self.bounds {
            bounds.heal(now_ms);
        }
    }

    fn bounds(&self) -> Bounds {
        self.bounds.unwrap_or(Bounds::new(ClockFaults { ahead: None, behind: true }, 0))
    }

    /// A random key of those written last.
    pub(super) fn recent_key(&self) -> Option<String> {
        let recent = &self.order[self.order.len().saturating_sub(30)..];
        (!recent.is_empty()).then(|| recent[fastrand::usize(..recent.len())].clone())
    }

    pub(super) fn keys(&self) -> Vec<String> {
        self.order.clone()
    }

    /// A key was written, with or without a time to live; `times` is `None` if the outcome is unknown.
    pub(super) fn on_set(
        &mut self,
        key: &str,
        value: &str,
        ttl_ms: Option<u64>,
        times: Option<RequestTimes>,
    ) {
        let mut entry = Entry {
            value: value.to_owned(),
            is_acknowledged: times.is_some(),
            earliest_ms: None,
            latest_ms: None,
        };
        if let Some((ttl_ms, times)) = ttl_ms.zip(times) {
            entry.earliest_ms = Some(self.bounds().min(signed(times.from_ms)) + signed(ttl_ms));
            entry.latest_ms = Some(Bounds::max(signed(times.until_ms)) + signed(ttl_ms));
        }
        self.entries.insert(key.to_owned(), entry);
        self.order.push(key.to_owned());
    }

    /// PEXPIRE is about to be sent for a key.
    pub(super) fn before_expire(&mut self, key: &str, ttl_ms: u64, now_ms: u64) {
        let earliest_ms = self.bounds().min(signed(now_ms)) + signed(ttl_ms);
        if let Some(entry) = self.entries.get_mut(key) {
            entry.earliest_ms = Some(earliest_ms);
        }
    }

    /// PEXPIRE of a key succeeded.
    pub(super) fn on_expire(&mut self, key: &str, ttl_ms: u64, until_ms: u64) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.latest_ms = Some(Bounds::max(signed(until_ms)) + signed(ttl_ms));
        }
    }

    /// A key was read; fails if the result violates the bounds.
    pub(super) fn on_get(
        &mut self,
        key: &str,
        found: Option<&str>,
        times: RequestTimes,
    ) -> Result<(), String> {
        let min_ms = self.bounds().min(signed(times.from_ms));
        let max_ms = Bounds::max(signed(times.until_ms));
        let Some(entry) = self.entries.get(key) else { return Ok(()) };
        match found {
            Some(value) if value != entry.value => {
                Err(format!("{key} has value {value}, written was {}", entry.value))
            }
            Some(_) if entry.latest_ms.is_some_and(|latest| min_ms > latest + TICKS_MS) => Err(format!(
                "{key} exists at {times:?}, after its time to live expired (shard time at least {min_ms}): {entry:?}"
            )),
            None if entry.is_acknowledged
                && entry.earliest_ms.is_none_or(|earliest| max_ms + TICKS_MS < earliest) =>
            {
                Err(format!(
                    "{key} is missing at {times:?}, before its time to live expired (shard time at most {max_ms}): {entry:?}"
                ))
            }
            Some(_) => {
                self.reads_found += 1;
                Ok(())
            }
            None => {
                self.reads_missing += 1;
                Ok(())
            }
        }
    }

    /// True if every time to live has certainly expired.
    pub(super) fn all_expired(&self, now_ms: u64) -> bool {
        let min_ms = self.bounds().min(signed(now_ms));
        self.entries.values().filter_map(|entry| entry.latest_ms).all(|latest| min_ms > latest + 2 * TICKS_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_exists_until_its_time_to_live_expires_within_the_bounds() {
        let mut expiries = Expiries::default();
        let mut bounds = Bounds::new(ClockFaults { ahead: Some(1), behind: false }, 1_000);
        bounds.heal(60_000);
        expiries.begin(bounds);
        let times = |at_ms| RequestTimes { from_ms: at_ms, until_ms: at_ms + 10 };
        expiries.on_set("a", "1", Some(9_000), Some(times(10_000)));
        expiries.on_set("unknown", "2", Some(9_000), None);
        for (key, found, at_ms, is_fine) in [
            ("a", Some("1"), 10_100, true),
            ("a", Some("2"), 10_100, false),
            ("a", None, 10_100, false),
            ("a", None, 13_000, false),
            ("a", None, 14_000, true),
            ("a", Some("1"), 24_000, true),
            ("a", Some("1"), 24_500, false),
            ("unknown", None, 10_100, true),
            ("unknown", Some("2"), 10_100, true),
        ] {
            assert_eq!(expiries.on_get(key, found, times(at_ms)).is_ok(), is_fine, "{key} {found:?} {at_ms}");
        }
        assert!(!expiries.all_expired(24_000) && expiries.all_expired(25_000));
    }

    #[test]
    fn shard_time_advances_at_half_rate_when_clocks_are_behind() {
        let mut bounds = Bounds::new(ClockFaults { ahead: None, behind: true }, 10_000);
        assert_eq!(bounds.min(11_000), 5_000);
        assert_eq!(bounds.min(20_000), 5_000);
        bounds.heal(20_000);
        assert_eq!(bounds.min(28_000), 5_000);
        assert_eq!(bounds.min(48_000), 15_000);
    }
}
