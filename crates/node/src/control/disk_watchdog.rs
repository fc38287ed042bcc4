//! Judges the disk by how long syncs take. A plain state machine: time and what was seen come in, a verdict comes out.
//!
//! A sync that takes a second makes the disk *impaired*. It counts as working again after syncs have been quick for a
//! while, longer with every relapse: a disk that hangs now and then would otherwise have leaderships go to and fro.

use moim_journal::SyncReport;

/// A sync that takes as long makes the disk impaired.
const IMPAIRED_MS: u64 = 1_000;
/// Syncs of an impaired disk must be quicker than this.
const CALM_MS: u64 = 200;
/// For how long, at first.
const HOLD_MS: u64 = 10_000;
/// For how long at most.
const MAX_HOLD_MS: u64 = 40_000;
/// A disk that has worked for as long has its relapses forgiven.
const FORGIVE_MS: u64 = 120_000;
/// An idle disk is probed this often.
const PROBE_IDLE_MS: u64 = 5_000;
/// The same while it is impaired: it must show that it works.
const PROBE_IMPAIRED_MS: u64 = 500;
/// There is room again when it was seen for so long: a disk on the edge would have leaderships go to and fro.
const ROOM_MS: u64 = 2_000;

/// The state of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Verdict {
    /// Syncs hang, or did lately.
    pub(super) impaired: bool,
    /// There is no room for appends, or was none a moment ago.
    pub(super) full: bool,
    /// A probe is due.
    pub(super) probe: bool,
}

/// See above.
#[derive(Debug)]
pub(super) struct Watchdog {
    impaired: bool,
    /// While impaired: since when every sync has been quick, and at least one has ended.
    calm_since_ms: Option<u64>,
    /// Since when it has been working.
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

    /// Something was seen of the disk.
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
        let full = self.full_at_ms.is_some_and(|at_ms| now_ms < at_ms + ROOM_MS || is_full);
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

    /// A disk on which a sync begins every 100 ms and takes as long as `lasts` says.
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
    fn a_hung_sync_impairs_after_a_second_and_quick_ones_heal_after_ten() {
        let mut watchdog = Watchdog::new(0);
        assert_eq!(run(&mut watchdog, 0, 60_000, 900), None, "slow is not hung");
        assert_eq!(run(&mut watchdog, 60_000, 90_000, u64::MAX), Some(1_000));
        assert_eq!(run(&mut watchdog, 70_000, 170_000, 300), None, "not quick enough to be trusted");
        assert_eq!(run(&mut watchdog, 170_000, 200_000, 20), Some(10_000));
        // Every relapse takes longer to be forgiven.
        for (begin_ms, hold_ms) in [(200_000, 20_000), (300_000, 40_000)] {
            assert_eq!(run(&mut watchdog, begin_ms, begin_ms + 5_000, u64::MAX), Some(1_000));
            assert_eq!(run(&mut watchdog, begin_ms + 5_000, begin_ms + 90_000, 20), Some(hold_ms));
        }
        assert_eq!(run(&mut watchdog, 400_000, 405_000, u64::MAX), Some(1_000));
        assert_eq!(run(&mut watchdog, 405_000, 500_000, 20), Some(40_000), "but not for ever");
        assert_eq!(run(&mut watchdog, 2_000_000, 2_005_000, u64::MAX), Some(1_000));
        assert_eq!(run(&mut watchdog, 2_005_000, 2_100_000, 20), Some(10_000), "it had worked for long");
    }

    #[test]
    fn a_disk_heals_by_syncs_that_end_and_is_probed_for_them() {
        let mut watchdog = Watchdog::new(0);
        let idle = |idle_ms: u64, syncs: u64| SyncReport { pending_ms: 0, slowest_ms: 0, syncs, idle_ms };
        assert!(!watchdog.on_report(0, &idle(4_900, 0), false).probe);
        assert!(watchdog.on_report(100, &idle(5_000, 0), false).probe);
        watchdog.on_report(200, &SyncReport { pending_ms: 1_000, ..idle(0, 0) }, false);
        // Nothing hangs, and nothing was tried either.
        for now_ms in (300..60_000).step_by(100) {
            assert!(watchdog.on_report(now_ms, &idle(now_ms, 0), false).impaired);
        }
        assert!(watchdog.on_report(60_000, &idle(500, 0), false).probe, "an impaired disk is probed often");
        assert!(watchdog.on_report(60_100, &idle(0, 1), false).impaired);
        assert!(!watchdog.on_report(70_100, &idle(0, 1), false).impaired);
    }

    #[test]
    fn there_is_room_again_when_there_is_for_good() {
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
