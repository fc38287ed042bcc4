//! LFU access counters, in the 24 bits of access information of an entry.
//!
//! As in Redis: 16 bits of minutes and an 8-bit logarithmic counter. The counter is incremented with decreasing
//! probability, so that 255 stands for about a million accesses; it decays with idle minutes. New keys start above
//! zero, or they would be evicted first.

/// Initial counter of a new key.
const BEGIN: u8 = 5;

/// LFU parameters and random state.
#[derive(Clone, Debug)]
pub(crate) struct Lfu {
    minutes: u32,
    log_factor: u32,
    decay_minutes: u32,
    random: u64,
}

impl Lfu {
    /// Parameters `lfu-log-factor` and `lfu-decay-time`.
    pub(crate) fn new(log_factor: u32, decay_minutes: u32, seed: u64) -> Lfu {
        Lfu { minutes: 0, log_factor, decay_minutes, random: seed | 1 }
    }

    pub(super) fn set_clock(&mut self, seconds: u32) {
        self.minutes = (seconds / 60) & 0xffff;
    }

    /// The counter of an entry after decay.
    pub(super) fn frequency(&self, note: u32) -> u8 {
        let counter = note as u8;
        if self.decay_minutes == 0 {
            return counter;
        }
        let passed = self.minutes.wrapping_sub(note >> 8) & 0xffff;
        counter.saturating_sub(u8::try_from(passed / self.decay_minutes).unwrap_or(u8::MAX))
    }

    /// The access information after an access now.
    pub(super) fn touch(&mut self, note: u32) -> u32 {
        let counter = self.frequency(note);
        let base = f64::from(counter.saturating_sub(BEGIN));
        let chance = 1.0 / (base * f64::from(self.log_factor) + 1.0);
        // Marsaglia's xorshift: speed matters more than quality.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let grows = ((self.random >> 11) as f64) < chance * (1u64 << 53) as f64;
        self.note(counter.saturating_add(u8::from(grows)))
    }

    pub(super) fn new_note(&self) -> u32 {
        self.note(BEGIN)
    }

    pub(super) fn note(&self, frequency: u8) -> u32 {
        self.minutes << 8 | u32::from(frequency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lfu_counter_grows_logarithmically_and_decays() {
        let mut lfu = Lfu::new(10, 1, 3);
        lfu.set_clock(60);
        let mut note = lfu.new_note();
        let mut after = Vec::new();
        for accesses in 1..=100_000 {
            note = lfu.touch(note);
            if [10, 1_000, 100_000].contains(&accesses) {
                after.push(lfu.frequency(note));
            }
        }
        assert!(after[0] < 15 && (15..40).contains(&after[1]) && (100..200).contains(&after[2]), "{after:?}");
        let before = lfu.frequency(note);
        lfu.set_clock(60 * 11);
        assert_eq!(lfu.frequency(note), before - 10);
        lfu.set_clock(60 * 1_000);
        assert_eq!(lfu.frequency(note), 0);
    }
}
