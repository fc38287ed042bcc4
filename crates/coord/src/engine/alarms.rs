//! No room: the quota and the disk, and the alarm that both raise.
//!
//! Every node looks at its own size and disk before it takes what grows; the first that has no room raises NOSPACE
//! through the log, and from then on every node refuses. It stays until somebody takes it back, as in etcd: room that
//! comes and goes would make writes come and go.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Inner;
use super::error::CoordError;
use crate::error::Error;
use crate::range::SpaceId;
use crate::reply::Reply;
use crate::request::{Alarm, AlarmKind, Command, Op, Origin};

/// Between two proposals of the same alarm.
const ALARM_PAUSE_MS: u64 = 1_000;
/// A node that is not alone raises the alarm for its disk after this long: meanwhile others may serve in its place.
const DISK_ALARM_AFTER_MS: u64 = 3_000;
/// Between two attempts to free space by dropping the log, and for every so many bytes of the snapshot that it takes as
/// much again.
const FREE_LOG_PAUSE_MS: u64 = 2_000;
const FREE_LOG_BYTES: u64 = 64 << 20;

impl Inner {
    /// Refuses what grows when there is no room, and sees to it that everybody knows.
    pub(super) fn check_room(self: &Arc<Self>, command: &Command) -> Result<(), CoordError> {
        let bytes = match &command.op {
            Op::Put(put) if SpaceId::of(&put.key) == SpaceId::User => put.key.len() + put.value.len(),
            Op::Txn(txn) if txn.has_put() && txn.space()? == SpaceId::User => txn.put_bytes(),
            Op::LeaseGrant { .. } if command.origin == Origin::Client => 0,
            _ => return Ok(()),
        };
        if self.shared.size_bytes().saturating_add(bytes as u64) > self.options.quota_bytes {
            self.raise_no_space();
            return Err(Error::NoSpace.into());
        }
        if self.host.store.is_full() && !*self.withdrawn.borrow() {
            self.maybe_raise_disk_alarm();
            return Err(Error::NoSpace.into());
        }
        Ok(())
    }

    /// Raises the alarm when this node's disk is full and no other node serves in its place. A disk that is full on one
    /// node of several is that node's affair.
    pub(super) fn maybe_raise_disk_alarm(self: &Arc<Self>) {
        let (now_ms, full) = (self.now_ms(), self.host.store.is_full());
        if !full || *self.withdrawn.borrow() {
            self.full_since_ms.store(0, Ordering::Relaxed);
            return;
        }
        let known =
            self.full_since_ms.compare_exchange(0, now_ms.max(1), Ordering::Relaxed, Ordering::Relaxed);
        let since_ms = known.err().unwrap_or(now_ms);
        let alone = self.group.metrics().voters.len() < 2;
        if alone || now_ms >= since_ms + DISK_ALARM_AFTER_MS {
            self.raise_no_space();
        }
    }

    /// Drops the log while the disk is full: a log that grew until it was would keep it full after everything else was
    /// deleted, compacted and disarmed.
    pub(super) async fn maybe_free_log(&self, again_ms: &mut u64) {
        if !self.host.store.is_full() || self.now_ms() < *again_ms {
            return;
        }
        *again_ms = self.now_ms() + FREE_LOG_PAUSE_MS * (1 + self.shared.size_bytes() / FREE_LOG_BYTES);
        self.shared.unsnapped.store(0, Ordering::Relaxed);
        if let Err(error) = self.group.free_log().await {
            tracing::debug!(%error, "the Raft log was not dropped for want of space");
        }
    }

    fn raise_no_space(self: &Arc<Self>) {
        let alarm = Alarm { kind: AlarmKind::NoSpace, member: self.group.voter().0 };
        let on = self.shared.state().alarms().any(|other| other == alarm);
        let now_ms = self.now_ms();
        let last_ms = self.alarmed_ms.load(Ordering::Relaxed);
        if on || (last_ms > 0 && now_ms < last_ms + ALARM_PAUSE_MS) {
            return;
        }
        self.alarmed_ms.store(now_ms, Ordering::Relaxed);
        tracing::warn!("no room: the NOSPACE alarm is raised");
        // Nobody waits for it; it is raised again by the next request if it gets lost.
        if let Err(error) = self.queue.push(&Command::node(Op::AlarmOn(alarm)), None, now_ms) {
            tracing::warn!(%error, "the alarm could not be raised");
        }
    }

    pub(super) async fn alarm(&self, op: Op) -> Result<Vec<Alarm>, CoordError> {
        match self.submit(&Command::node(op), None).await? {
            Reply::Alarms { changed, .. } => Ok(changed),
            other => unreachable!("an alarm is answered as one, not with {other:?}"),
        }
    }

    pub(super) fn describe(&self, alarm: Alarm) -> String {
        let kind = match alarm.kind {
            AlarmKind::NoSpace => "NOSPACE",
            AlarmKind::Corrupt => "CORRUPT",
        };
        format!("memberID:{} alarm:{kind}", alarm.member)
    }
}
