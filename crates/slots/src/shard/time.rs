//! Shard time: what expiries are compared with.
//!
//! It goes on from the newest time in the journal with the monotonic clock: at full rate while it is behind the wall clock,
//! at half rate while it is ahead of it. So it never stands still and never goes back, whatever happens to the wall clock.
//!
//! A node that reads an entry from its disk at a start cannot know how long ago it was written: as primary it takes the wall
//! clock where that is ahead by no more than [`JUMP_MS`]. A replica that received the newest entry in this process knows how
//! much time has passed since, and so does a primary that continues: both make a lag of that size up slowly ([`SLEW`]). A jump
//! would end keys before their time to live, for example after a wall clock that was stepped back is set right, or on a
//! failover meanwhile. By more than [`JUMP_MS`] time jumps only if a majority of the nodes' clocks agrees with this one.
//!
//! Pure: both clocks are inputs.

/// The largest difference to the wall clock that is made up for without asking.
pub(crate) const JUMP_MS: i64 = 10_000;
/// Of the time that passes, one part in so many is added while shard time is behind the wall clock.
const SLEW: u64 = 128;

/// The monotonic clock when shard time was last told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// None: not told yet.
    at_ns: Option<u64>,
    /// What has passed since and is not part of shard time yet.
    rest_ns: u64,
    /// Shard time was told, or its entry received, at that moment: how much time has passed since is known.
    is_continuous: bool,
}

/// Shard time now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) time_ms: i64,
    /// The wall clock is far ahead, and it is not known whether it is right.
    pub(crate) is_in_doubt: bool,
}

impl Pace {
    /// Shard time was set by an entry of the journal. `is_live`: the entry was received just now, not read at a start.
    pub(crate) fn begin(&mut self, monotonic_ns: u64, is_live: bool) {
        *self = Self { at_ns: Some(monotonic_ns), rest_ns: 0, is_continuous: is_live };
    }

    /// What shard time is now if it was `time_ms`; 0 is none. `is_agreed`: a majority of the nodes' clocks agrees with ours.
    pub(crate) fn advance(&mut self, time_ms: i64, monotonic_ns: u64, wall_ms: i64, is_agreed: bool) -> Told {
        const MS: u64 = 1_000_000;
        let passed_ns = self.at_ns.map_or(0, |at_ns| monotonic_ns.saturating_sub(at_ns)) + self.rest_ns;
        self.at_ns = Some(monotonic_ns);
        let at_rate = |pace: &mut Self, ns_per_ms: u64| {
            pace.rest_ns = passed_ns % ns_per_ms;
            time_ms.saturating_add(i64::try_from(passed_ns / ns_per_ms).unwrap_or(i64::MAX))
        };
        let (told, is_in_doubt) = if time_ms <= 0 {
            // Nothing in the journal is compared with it.
            (wall_ms.max(0), false)
        } else if time_ms > wall_ms {
            (at_rate(self, 2 * MS), false)
        } else {
            let full = at_rate(self, MS);
            if wall_ms - full > JUMP_MS {
                if is_agreed { (wall_ms, false) } else { (full, true) }
            } else if self.is_continuous {
                let slewed = at_rate(self, MS - MS / SLEW);
                (slewed.min(wall_ms), false)
            } else {
                (wall_ms, false)
            }
        };
        self.is_continuous = !is_in_doubt;
        if told == wall_ms {
            self.rest_ns = 0;
        }
        Told { time_ms: told, is_in_doubt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Step = (u64, i64, bool);
    type Seen = (i64, bool);

    /// Lets clocks go: (monotonic seconds that pass, wall clock after them in seconds, agreed); gives shard time in seconds.
    fn run(start_s: i64, steps: &[Step]) -> Vec<Seen> {
        let (mut pace, mut time_ms, mut mono_ns) = (Pace::default(), start_s * 1_000, 7_000_000_000);
        pace.begin(mono_ns, false);
        let mut told = Vec::new();
        for (passed_s, wall_s, is_agreed) in steps {
            // However it is cut into turns, the sum is the same.
            for part in 1..=10 {
                mono_ns += passed_s * 100_000_000;
                let before_s = wall_s - *passed_s as i64;
                let wall_ms = before_s * 1_000 + *passed_s as i64 * 100 * part;
                let now = pace.advance(time_ms, mono_ns, wall_ms, *is_agreed);
                assert!(now.time_ms >= time_ms, "shard time never goes back");
                time_ms = now.time_ms;
                if part == 10 {
                    told.push((time_ms / 1_000, now.is_in_doubt));
                }
            }
        }
        told
    }

    #[test]
    fn shard_time_keeps_advancing_and_never_goes_back() {
        let cases: [(&str, i64, &[Step], &[Seen]); 11] = [
            (
                "it follows the wall clock",
                1_000,
                &[(10, 1_010, false), (60, 1_070, false)],
                &[(1_010, false), (1_070, false)],
            ),
            ("the first time is the wall clock's", 0, &[(10, 5_000, false)], &[(5_000, false)]),
            (
                "a small jump is taken by a new primary",
                1_000,
                &[(0, 1_005, false), (10, 1_015, false)],
                &[(1_005, false), (1_015, false)],
            ),
            (
                "a small step of the wall clock is made up slowly",
                1_000,
                &[(10, 1_010, false), (0, 1_018, false), (128, 1_146, false), (1_280, 2_426, true)],
                &[(1_010, false), (1_010, false), (1_139, false), (2_426, false)],
            ),
            (
                "a wall clock that was stepped back and is set right ends nothing early",
                5_000,
                &[(10, 1_000, false), (4, 5_014, false)],
                &[(5_005, false), (5_009, false)],
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
                "an hour fast alone",
                1_000,
                &[(10, 4_610, false), (100, 4_710, false)],
                &[(1_010, true), (1_110, true)],
            ),
            (
                "an hour fast and set right",
                1_000,
                &[(10, 4_610, false), (10, 1_020, false)],
                &[(1_010, true), (1_020, false)],
            ),
            (
                "a day of rest that the others agree with",
                1_000,
                &[(10, 87_410, false), (10, 87_420, true)],
                &[(1_010, true), (87_420, false)],
            ),
            (
                "a machine that slept",
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
    fn half_rate_loses_nothing_between_short_turns() {
        let mut pace = Pace::default();
        pace.begin(0, false);
        let mut time_ms = 10_000;
        for turn in 1..=1_000_000u64 {
            time_ms = pace.advance(time_ms, turn * 1_300, 0, false).time_ms;
        }
        assert_eq!(time_ms, 10_000 + 650);
    }
}
