//! Times to live against wall clocks that are wrong: steps of the machines' wall clocks, and how far shard time may be from
//! the true time because of them.
//!
//! The design lets shard time follow the wall clock of the primary by at most 10 s ahead of what it was, further only if a
//! majority of the nodes' clocks agrees. So at most one machine is ever far ahead, and the others by no more than
//! [`SKEW_MS`]: shard time is never ahead of the true time by more than that. Any number of machines may be behind: then
//! shard time goes at half rate, and where a machine restarts it goes on from the newest time in the journal.
//!
//! The clocks stay wrong after the faults: a time to live ends all the same.

use std::collections::BTreeMap;

use super::NODES;
use crate::world::World;

/// By how much a clock that counts as right may be wrong.
const SKEW_MS: i64 = 250;
/// Far ahead: never taken without a majority, whatever shard time lags behind.
const AHEAD_MS: std::ops::Range<i64> = 20_000..86_400_000;
const BEHIND_MS: std::ops::Range<i64> = 1_000..86_400_000;
/// Shard time goes on from the newest time in the journal when a primary takes over whose clock is in doubt: so long the
/// newest write may be back by then.
const GAP_MS: i64 = 5_000;
/// After the last fault every shard has a primary within this time.
const SETTLE_MS: i64 = 8_000;
/// Times are told at the ends of ticks.
const TICKS_MS: i64 = 50;

/// What happens to the wall clocks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockFaults {
    /// A machine that is far ahead at times.
    pub ahead: Option<usize>,
    /// Any machine is behind at times.
    pub behind: bool,
}

impl ClockFaults {
    /// A third of the seeds each: one machine ahead, any machine behind, both.
    pub fn of(seed: u64) -> Self {
        let machine = usize::try_from(seed / 3 % NODES as u64).unwrap_or(0);
        Self { ahead: (seed % 3 != 1).then_some(machine), behind: !seed.is_multiple_of(3) }
    }
}

/// Steps wall clocks.
pub(super) struct Stepper {
    faults: ClockFaults,
    next_ms: u64,
    pub(super) steps: u64,
}

impl Stepper {
    pub(super) fn new(faults: ClockFaults) -> Self {
        Self { faults, next_ms: 0, steps: 0 }
    }

    /// Maybe steps the clock of a machine.
    pub(super) fn step(&mut self, world: &mut World) {
        if world.now_ms() < self.next_ms {
            return;
        }
        self.next_ms = world.now_ms() + world.random.u64(200..1_500);
        let host = world.random.usize(..NODES);
        let right = world.random.i64(-SKEW_MS..=SKEW_MS);
        // Seconds are as likely as hours.
        let far = |world: &mut World, range: std::ops::Range<i64>| {
            let most = range.start << world.random.u8(0..17);
            world.random.i64(range.start..=most.min(range.end))
        };
        let offset_ms = match world.random.u8(..3) {
            0 if self.faults.ahead == Some(host) => far(world, AHEAD_MS),
            1 if self.faults.behind => -far(world, BEHIND_MS),
            _ => right,
        };
        self.steps += 1;
        world.host(host).set_wall_offset_ms(offset_ms);
    }
}

/// How far shard time may be from the true time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    faults: ClockFaults,
    /// When the first clock may have been stepped, and when the last fault was over.
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

    /// The least that shard time is at a true time.
    fn least(&self, true_ms: i64) -> i64 {
        if !self.faults.behind {
            return true_ms - GAP_MS;
        }
        // While machines fail nobody may be there to let it go on.
        let since_ms = self.healed_ms.map_or(0, |healed| (true_ms - healed - SETTLE_MS).max(0));
        (true_ms - GAP_MS).min(self.began_ms - GAP_MS + since_ms / 2)
    }

    /// The most that shard time is at a true time.
    fn most(true_ms: i64) -> i64 {
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
    /// The write was acknowledged; else its outcome is unknown.
    is_acknowledged: bool,
    /// Not before this; never, while no time to live was set.
    earliest_ms: Option<i64>,
    /// Not after this; none if it is unknown whether a time to live was set.
    latest_ms: Option<i64>,
}

/// When a command was sent, and when its answer was there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) from_ms: u64,
    pub(super) until_ms: u64,
}

/// All keys with a time to live.
#[derive(Default)]
pub(super) struct Expiries {
    entries: BTreeMap<String, Entry>,
    order: Vec<String>,
    bounds: Option<Bounds>,
    /// Keys that were read before, and after the end of their time.
    pub(super) seen_alive: u64,
    pub(super) seen_gone: u64,
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

    /// Any key that was written lately.
    pub(super) fn any(&self) -> Option<String> {
        let recent = &self.order[self.order.len().saturating_sub(30)..];
        (!recent.is_empty()).then(|| recent[fastrand::usize(..recent.len())].clone())
    }

    pub(super) fn keys(&self) -> Vec<String> {
        self.order.clone()
    }

    /// A key was written, with a time to live or without one; `asked` is none if the outcome is unknown.
    pub(super) fn on_set(&mut self, key: &str, value: &str, ttl_ms: Option<u64>, asked: Option<Asked>) {
        let mut entry = Entry {
            value: value.to_owned(),
            is_acknowledged: asked.is_some(),
            earliest_ms: None,
            latest_ms: None,
        };
        if let Some((ttl_ms, asked)) = ttl_ms.zip(asked) {
            entry.earliest_ms = Some(self.bounds().least(signed(asked.from_ms)) + signed(ttl_ms));
            entry.latest_ms = Some(Bounds::most(signed(asked.until_ms)) + signed(ttl_ms));
        }
        self.entries.insert(key.to_owned(), entry);
        self.order.push(key.to_owned());
    }

    /// A key is about to be given a time to live.
    pub(super) fn before_expire(&mut self, key: &str, ttl_ms: u64, now_ms: u64) {
        let earliest_ms = self.bounds().least(signed(now_ms)) + signed(ttl_ms);
        if let Some(entry) = self.entries.get_mut(key) {
            entry.earliest_ms = Some(earliest_ms);
        }
    }

    /// A key was given a time to live.
    pub(super) fn on_expire(&mut self, key: &str, ttl_ms: u64, until_ms: u64) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.latest_ms = Some(Bounds::most(signed(until_ms)) + signed(ttl_ms));
        }
    }

    /// A key was read; says what is wrong with that.
    pub(super) fn on_get(&mut self, key: &str, found: Option<&str>, asked: Asked) -> Result<(), String> {
        let least_ms = self.bounds().least(signed(asked.from_ms));
        let most_ms = Bounds::most(signed(asked.until_ms));
        let Some(entry) = self.entries.get(key) else { return Ok(()) };
        match found {
            Some(value) if value != entry.value => {
                Err(format!("{key} is {value}, but {} was written", entry.value))
            }
            Some(_) if entry.latest_ms.is_some_and(|latest| least_ms > latest + TICKS_MS) => Err(format!(
                "{key} is there at {asked:?}, long after its time to live (shard time {least_ms} or more): {entry:?}"
            )),
            None if entry.is_acknowledged
                && entry.earliest_ms.is_none_or(|earliest| most_ms + TICKS_MS < earliest) =>
            {
                Err(format!(
                    "{key} is gone at {asked:?}, before the end of its time to live (shard time {most_ms} or less): {entry:?}"
                ))
            }
            Some(_) => {
                self.seen_alive += 1;
                Ok(())
            }
            None => {
                self.seen_gone += 1;
                Ok(())
            }
        }
    }

    /// Whether every time to live is certainly over.
    pub(super) fn all_over(&self, now_ms: u64) -> bool {
        let least_ms = self.bounds().least(signed(now_ms));
        self.entries
            .values()
            .filter_map(|entry| entry.latest_ms)
            .all(|latest| least_ms > latest + 2 * TICKS_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_there_for_its_time_and_not_much_longer() {
        let mut expiries = Expiries::default();
        let mut bounds = Bounds::new(ClockFaults { ahead: Some(1), behind: false }, 1_000);
        bounds.heal(60_000);
        expiries.begin(bounds);
        let asked = |at_ms| Asked { from_ms: at_ms, until_ms: at_ms + 10 };
        expiries.on_set("a", "1", Some(9_000), Some(asked(10_000)));
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
            assert_eq!(expiries.on_get(key, found, asked(at_ms)).is_ok(), is_fine, "{key} {found:?} {at_ms}");
        }
        assert!(!expiries.all_over(24_000) && expiries.all_over(25_000));
    }

    #[test]
    fn shard_time_goes_at_half_rate_where_clocks_are_behind() {
        let mut bounds = Bounds::new(ClockFaults { ahead: None, behind: true }, 10_000);
        assert_eq!(bounds.least(11_000), 5_000);
        assert_eq!(bounds.least(20_000), 5_000);
        bounds.heal(20_000);
        assert_eq!(bounds.least(28_000), 5_000);
        assert_eq!(bounds.least(48_000), 15_000);
    }
}
