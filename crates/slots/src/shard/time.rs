//! Shard time: the clock that expiry times are compared with.
//!
//! Shard time advances from the newest time in the journal with the monotonic clock: at full rate while it is behind
//! the wall clock, at half rate while it is ahead of it. So it never stands still and never goes back, whatever happens
//! to the wall clock.
//!
//! A replica that received the newest entry in this process knows how much time has passed since, and so does a primary
//! that continues: both slew ([`SLEW`]) where shard time lags behind the wall clock. A jump would expire keys before their
//! TTL, for example after a wall clock that was stepped back is corrected, or on a failover meanwhile. A primary records its
//! lag with every batch ([`LAG`]), so that it is known after a restart of all nodes too.
//!
//! A node that replays an entry from its disk at startup cannot know how long ago it was written: as primary it jumps to the
//! wall clock minus the recorded lag, if that is ahead by no more than [`JUMP_MS`]. By more than [`JUMP_MS`] shard time jumps
//! only if a majority of the nodes' clocks agrees with this one.
//!
//! Limit: a node that starts with a wrong clock and leads, before another node does, loses the time it was down; keys that
//! are set meanwhile expire early by that time if it exceeds [`JUMP_MS`].
//!
//! Pure: both clocks are inputs.

/// The largest lag behind the wall clock that is corrected without a majority of clocks.
pub(crate) const JUMP_MS: i64 = 10_000;
/// Internal effect: how far shard time lags behind the wall clock of the primary, in milliseconds.
pub(crate) const LAG: &[u8] = b"\0lag";
/// A smaller lag is not recorded.
const MIN_LAG_MS: i64 = 10;
/// Slew rate: of the time that passes, one part in this many is added while shard time is behind the wall clock.
const SLEW: u64 = 128;

/// The monotonic clock when shard time was last advanced.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ShardClock {
    /// `None` before the first reading.
    at_ns: Option<u64>,
    /// Elapsed time that is not part of shard time yet.
    rest_ns: u64,
    /// Shard time was advanced, or its entry received, at that moment: the elapsed time since is known.
    is_continuous: bool,
    /// Known lag behind the wall clock: elapsed time that shard time leaves out, to be slewed and never jumped over.
    lag_ms: i64,
}

/// A reading of shard time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardTime {
    pub(crate) time_ms: i64,
    /// The wall clock is far ahead, and no majority of clocks has confirmed it.
    pub(crate) is_unconfirmed: bool,
}

impl ShardClock {
    /// An entry of the journal has set shard time. `is_live`: the entry was received just now, not replayed at startup.
    pub(crate) fn begin(&mut self, monotonic_ns: u64, is_live: bool) {
        *self = Self { at_ns: Some(monotonic_ns), rest_ns: 0, is_continuous: is_live, lag_ms: 0 };
    }

    /// True if the elapsed time since shard time was set is known.
    pub(crate) fn is_continuous(&self) -> bool {
        self.is_continuous
    }

    /// The lag that the next batch records; none while it is negligible.
    pub(crate) fn recorded_lag_ms(&self) -> Option<i64> {
        (self.lag_ms >= MIN_LAG_MS).then_some(self.lag_ms)
    }

    /// A replayed batch recorded this lag.
    pub(crate) fn set_lag_ms(&mut self, lag_ms: i64) {
        self.lag_ms = lag_ms.max(0);
    }

    /// Advances shard time from `time_ms` (0: not set) to now. `is_agreed`: a majority of the nodes' clocks agrees with
    /// ours.
    pub(crate) fn advance(
        &mut self,
        time_ms: i64,
        monotonic_ns: u64,
        wall_ms: i64,
        is_agreed: bool,
    ) -> ShardTime {
        const MS: u64 = 1_000_000;
        let passed_ns = self.at_ns.map_or(0, |at_ns| monotonic_ns.saturating_sub(at_ns)) + self.rest_ns;
        self.at_ns = Some(monotonic_ns);
        let at_rate = |clock: &mut Self, ns_per_ms: u64| {
            clock.rest_ns = passed_ns % ns_per_ms;
            time_ms.saturating_add(i64::try_from(passed_ns / ns_per_ms).unwrap_or(i64::MAX))
        };
        let (time, is_unconfirmed) = if time_ms <= 0 {
            // No expiry in the journal is compared with it.
            (wall_ms.max(0), false)
        } else if time_ms > wall_ms {
            let time = at_rate(self, 2 * MS);
            // Half rate leaves out as much as it adds.
            self.lag_ms = self.lag_ms.saturating_add(time - time_ms);
            (time, false)
        } else {
            let full = at_rate(self, MS);
            let target_ms = wall_ms.saturating_sub(self.lag_ms);
            if target_ms.saturating_sub(full) > JUMP_MS {
                if is_agreed { (target_ms, false) } else { (full, true) }
            } else if self.is_continuous {
                let slewed = at_rate(self, MS - MS / SLEW);
                (slewed.min(wall_ms), false)
            } else {
                (target_ms.max(full), false)
            }
        };
        if !is_unconfirmed && time <= wall_ms {
            self.lag_ms = wall_ms - time;
        }
        self.is_continuous = true;
        if time == wall_ms {
            self.rest_ns = 0;
        }
        ShardTime { time_ms: time, is_unconfirmed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Step = (u64, i64, bool);
    type Seen = (i64, bool);

    /// Advances the clocks by (monotonic seconds, wall clock after them in seconds, agreed); returns shard time in
    /// seconds.
    fn run(start_s: i64, steps: &[Step]) -> Vec<Seen> {
        let (mut clock, mut time_ms, mut mono_ns) = (ShardClock::default(), start_s * 1_000, 7_000_000_000);
        clock.begin(mono_ns, false);
        let mut readings = Vec::new();
        for (passed_s, wall_s, is_agreed) in steps {
            // The sum does not depend on how the time is cut into turns.
            for part in 1..=10 {
                mono_ns += passed_s * 100_000_000;
                let before_s = wall_s - *passed_s as i64;
                let wall_ms = before_s * 1_000 + *passed_s as i64 * 100 * part;
                let now = clock.advance(time_ms, mono_ns, wall_ms, *is_agreed);
                assert!(now.time_ms >= time_ms, "shard time never goes back");
                time_ms = now.time_ms;
                if part == 10 {
                    readings.push((time_ms / 1_000, now.is_unconfirmed));
                }
            }
        }
        readings
    }

    #[test]
    fn shard_time_keeps_advancing_and_never_goes_back() {
        let cases: [(&str, i64, &[Step], &[Seen]); 12] = [
            (
                "it follows the wall clock",
                1_000,
                &[(10, 1_010, false), (60, 1_070, false)],
                &[(1_010, false), (1_070, false)],
            ),
            ("shard time starts with the wall clock", 0, &[(10, 5_000, false)], &[(5_000, false)]),
            (
                "a new primary jumps over a small lag",
                1_000,
                &[(0, 1_005, false), (10, 1_015, false)],
                &[(1_005, false), (1_015, false)],
            ),
            (
                "a small step of the wall clock is slewed",
                1_000,
                &[(10, 1_010, false), (0, 1_018, false), (128, 1_146, false), (1_280, 2_426, true)],
                &[(1_010, false), (1_010, false), (1_139, false), (2_426, false)],
            ),
            (
                "a wall clock that was stepped back and is corrected expires no key early",
                5_000,
                &[(10, 1_000, false), (4, 5_014, false)],
                &[(5_005, false), (5_009, false)],
            ),
            (
                "a wall clock that was stepped back for a minute ends nothing early when it is corrected",
                5_000,
                &[(60, 1_000, false), (4, 5_064, true), (0, 5_164, true)],
                &[(5_030, false), (5_034, false), (5_134, false)],
            ),
            (
                "the wall clock stepped back an hour",
                5_000,
                &[(100, 1_500, false), (100, 1_600, false)],
                &[(5_050, false), (5_100, false)],
            ),
            (
                "it waits for the wall clock at half rate",
                1_100,
                &[(100, 1_100, false), (100, 1_200, false)],
                &[(1_150, false), (1_200, false)],
            ),
            (
                "one clock an hour fast",
                1_000,
                &[(10, 4_610, false), (100, 4_710, false)],
                &[(1_010, true), (1_110, true)],
            ),
            (
                "a clock an hour fast is corrected",
                1_000,
                &[(10, 4_610, false), (10, 1_020, false)],
                &[(1_010, true), (1_020, false)],
            ),
            (
                "a day of downtime that a majority of clocks confirms",
                1_000,
                &[(10, 87_410, false), (10, 87_420, true)],
                &[(1_010, true), (87_420, false)],
            ),
            (
                "a machine that was suspended",
                1_000,
                &[(0, 1_008, false), (0, 1_030, false)],
                &[(1_008, false), (1_008, true)],
            ),
        ];
        for (name, start_s, steps, wanted) in cases {
            assert_eq!(run(start_s, steps), wanted, "{name}");
        }
    }

    #[test]
    fn half_rate_loses_no_time_between_short_turns() {
        let mut clock = ShardClock::default();
        clock.begin(0, false);
        let mut time_ms = 10_000;
        for turn in 1..=1_000_000u64 {
            time_ms = clock.advance(time_ms, turn * 1_300, 0, false).time_ms;
        }
        assert_eq!(time_ms, 10_000 + 650);
    }
}
