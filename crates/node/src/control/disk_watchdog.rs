//! Disk watchdog: judges the disk by the duration of syncs. A pure state machine: time and sync reports in, a verdict
//! out.
//!
//! A sync that takes a second makes the disk *impaired*. The disk is healthy again after a period of fast syncs, which
//! doubles with every relapse: otherwise a disk that hangs now and then would make leaderships flap.

use moim_journal::SyncReport;

/// Sync duration that makes the disk impaired.
const IMPAIRED_MS: u64 = 1_000;
/// Maximum sync duration during the recovery of an impaired disk.
const CALM_MS: u64 = 200;
/// Initial recovery period.
const HOLD_MS: u64 = 10_000;
/// Maximum recovery period.
const MAX_HOLD_MS: u64 = 40_000;
/// Healthy time after which the recovery period is reset.
const FORGIVE_MS: u64 = 120_000;
/// Probe interval of an idle disk.
const PROBE_IDLE_MS: u64 = 5_000;
/// Probe interval of an impaired disk, which needs completed syncs to recover.
const PROBE_IMPAIRED_MS: u64 = 500;
/// Time with free space after which the disk is no longer full: a disk at the limit would make leaderships flap.
const FREE_SPACE_MS: u64 = 2_000;

/// Verdict on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Verdict {
    /// A sync hangs, or did recently.
    pub(super) impaired: bool,
    /// There is no free space for appends, or was none within [`FREE_SPACE_MS`].
    pub(super) full: bool,
    /// A probe is due.
    pub(super) probe: bool,
}

/// State machine of the disk's health.
#[derive(Debug)]
pub(super) struct Watchdog {
    impaired: bool,
    /// While impaired: start of the period in which every sync was fast and at least one completed.
    calm_since_ms: Option<u64>,
    /// Start of the current or last healthy period.
    worked_since_ms: u64,
    hold_ms: u64,
    syncs: u64,
    full_at_ms: Option<u64>,
}

impl Watchdog {
    pub(super) fn new(now_ms: u64) -> Self {
        Self {
            impaired: false,
            calm_since_ms: None,
            worked_since_ms: now_ms,
            hold_ms: HOLD_MS,
            syncs: 0,
            full_at_ms: None,
        }
    }

    /// Processes a sync report and returns the verdict.
    pub(super) fn on_report(&mut self, now_ms: u64, seen: &SyncReport, is_full: bool) -> Verdict {
        let slowest_ms = seen.pending_ms.max(seen.slowest_ms);
        let ended = std::mem::replace(&mut self.syncs, seen.syncs) != seen.syncs;
        if slowest_ms >= IMPAIRED_MS {
            self.become_impaired(now_ms);
        } else if self.impaired {
            self.maybe_recover(now_ms, slowest_ms, ended);
        }
        if is_full {
            self.full_at_ms = Some(now_ms);
        }
        let full = self.full_at_ms.is_some_and(|at_ms| now_ms < at_ms + FREE_SPACE_MS || is_full);
        let every_ms = if self.impaired { PROBE_IMPAIRED_MS } else { PROBE_IDLE_MS };
        Verdict { impaired: self.impaired, full, probe: seen.idle_ms >= every_ms }
    }

    fn become_impaired(&mut self, now_ms: u64) {
        self.calm_since_ms = None;
        if self.impaired {
            return;
        }
        self.impaired = true;
        if now_ms >= self.worked_since_ms + FORGIVE_MS {
            self.hold_ms = HOLD_MS;
        }
    }

    fn maybe_recover(&mut self, now_ms: u64, slowest_ms: u64, ended: bool) {
        if slowest_ms >= CALM_MS {
            self.calm_since_ms = None;
        } else if ended {
            self.calm_since_ms.get_or_insert(now_ms);
        }
        if self.calm_since_ms.is_some_and(|since_ms| now_ms >= since_ms + self.hold_ms) {
            self.impaired = false;
            self.worked_since_ms = now_ms;
            self.hold_ms = (self.hold_ms * 2).min(MAX_HOLD_MS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk on which a sync starts every 100 ms and takes `lasts_ms`. Returns the time until the verdict changes.
    fn run(watchdog: &mut Watchdog, from_ms: u64, until_ms: u64, lasts_ms: u64) -> Option<u64> {
        let before = watchdog.impaired;
        for now_ms in (from_ms..until_ms).step_by(100) {
            let pending_ms = if lasts_ms == u64::MAX { now_ms - from_ms } else { 0 };
            let slowest_ms = if lasts_ms == u64::MAX { 0 } else { lasts_ms };
            let syncs = if lasts_ms == u64::MAX { watchdog.syncs } else { now_ms };
            let seen = SyncReport { pending_ms, slowest_ms, syncs, idle_ms: 0 };
            if watchdog.on_report(now_ms, &seen, false).impaired != before {
                return Some(now_ms - from_ms);
            }
        }
        None
    }

    #[test]
    fn hung_sync_impairs_after_one_second_and_fast_syncs_recover_after_ten() {
        let mut watchdog = Watchdog::new(0);
        assert_eq!(run(&mut watchdog, 0, 60_000, 900), None, "slow is not hung");
        assert_eq!(run(&mut watchdog, 60_000, 90_000, u64::MAX), Some(1_000));
        assert_eq!(run(&mut watchdog, 70_000, 170_000, 300), None, "not fast enough to recover");
        assert_eq!(run(&mut watchdog, 170_000, 200_000, 20), Some(10_000));
        // Every relapse doubles the recovery period.
        for (begin_ms, hold_ms) in [(200_000, 20_000), (300_000, 40_000)] {
            assert_eq!(run(&mut watchdog, begin_ms, begin_ms + 5_000, u64::MAX), Some(1_000));
            assert_eq!(run(&mut watchdog, begin_ms + 5_000, begin_ms + 90_000, 20), Some(hold_ms));
        }
        assert_eq!(run(&mut watchdog, 400_000, 405_000, u64::MAX), Some(1_000));
        assert_eq!(run(&mut watchdog, 405_000, 500_000, 20), Some(40_000), "up to the maximum");
        assert_eq!(run(&mut watchdog, 2_000_000, 2_005_000, u64::MAX), Some(1_000));
        assert_eq!(
            run(&mut watchdog, 2_005_000, 2_100_000, 20),
            Some(10_000),
            "reset after a long healthy period"
        );
    }

    #[test]
    fn recovery_needs_completed_syncs_and_an_impaired_disk_is_probed() {
        let mut watchdog = Watchdog::new(0);
        let idle = |idle_ms: u64, syncs: u64| SyncReport { pending_ms: 0, slowest_ms: 0, syncs, idle_ms };
        assert!(!watchdog.on_report(0, &idle(4_900, 0), false).probe);
        assert!(watchdog.on_report(100, &idle(5_000, 0), false).probe);
        watchdog.on_report(200, &SyncReport { pending_ms: 1_000, ..idle(0, 0) }, false);
        // No sync hangs, but none completed either.
        for now_ms in (300..60_000).step_by(100) {
            assert!(watchdog.on_report(now_ms, &idle(now_ms, 0), false).impaired);
        }
        assert!(watchdog.on_report(60_000, &idle(500, 0), false).probe, "an impaired disk is probed often");
        assert!(watchdog.on_report(60_100, &idle(0, 1), false).impaired);
        assert!(!watchdog.on_report(70_100, &idle(0, 1), false).impaired);
    }

    #[test]
    fn full_disk_recovers_after_free_space_has_been_stable() {
        let mut watchdog = Watchdog::new(0);
        let seen = SyncReport::default();
        let mut full = |now_ms: u64, is_full: bool| watchdog.on_report(now_ms, &seen, is_full).full;
        assert!(!full(0, false));
        assert!(full(100, true));
        assert!(full(2_000, false));
        assert!(full(2_050, true));
        assert!(full(4_000, false));
        assert!(!full(4_050, false));
    }
}
