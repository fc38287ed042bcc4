//! NOSPACE: the quota and free disk space, and the alarm that both raise.
//!
//! Every node checks its own size and disk before it proposes a command that grows the state; the first node without
//! space raises NOSPACE through the log, and from then on every node refuses. As in etcd the alarm stays until an
//! operator disarms it: an alarm that follows free space up and down would make writes flap.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Inner;
use super::error::CoordError;
use crate::error::Error;
use crate::range::SpaceId;
use crate::reply::Reply;
use crate::request::{Alarm, AlarmKind, Command, Op, Origin};

/// Minimum interval between two proposals of the same alarm.
const ALARM_PAUSE_MS: u64 = 1_000;
/// In a cluster of several nodes, the disk alarm is raised after this long: meanwhile others may serve in its place.
const DISK_ALARM_AFTER_MS: u64 = 3_000;
/// Minimum interval between two attempts to free space by dropping the log. It grows by the same amount for every
/// `FREE_LOG_BYTES` of the snapshot that dropping takes.
const FREE_LOG_PAUSE_MS: u64 = 2_000;
const FREE_LOG_BYTES: u64 = 64 << 20;

impl Inner {
    /// Refuses commands that grow the state when there is no space, and raises the alarm.
    pub(super) fn check_quota(self: &Arc<Self>, command: &Command) -> Result<(), CoordError> {
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

    /// Raises the alarm if this node's disk is full and no other node serves in its place. A full disk on one node of
    /// several concerns only that node.
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

    /// Drops the Raft log while the disk is full: a log that filled the disk would keep it full after everything else
    /// was deleted, compacted and disarmed.
    pub(super) async fn maybe_free_log(&self, again_ms: &mut u64) {
        if !self.host.store.is_full() || self.now_ms() < *again_ms {
            return;
        }
        *again_ms = self.now_ms() + FREE_LOG_PAUSE_MS * (1 + self.shared.size_bytes() / FREE_LOG_BYTES);
        self.shared.bytes_since_snapshot.store(0, Ordering::Relaxed);
        if let Err(error) = self.group.free_log().await {
            tracing::debug!(%error, "Raft log not dropped on full disk");
        }
    }

    fn raise_no_space(self: &Arc<Self>) {
        let alarm = Alarm { kind: AlarmKind::NoSpace, member: self.group.voter().0 };
        let on = self.shared.state().alarms().any(|other| other == alarm);
        let now_ms = self.now_ms();
        let last_ms = self.last_alarm_ms.load(Ordering::Relaxed);
        if on || (last_ms > 0 && now_ms < last_ms + ALARM_PAUSE_MS) {
            return;
        }
        self.last_alarm_ms.store(now_ms, Ordering::Relaxed);
        tracing::warn!(member = alarm.member, "NOSPACE alarm raised");
        // The proposal is not awaited; the next refused request raises the alarm again if it is lost.
        if let Err(error) = self.queue.push(&Command::node(Op::AlarmOn(alarm)), None, now_ms) {
            tracing::warn!(%error, "NOSPACE alarm not proposed");
        }
    }

    pub(super) async fn alarm(&self, op: Op) -> Result<Vec<Alarm>, CoordError> {
        match self.submit(&Command::node(op), None).await? {
            Reply::Alarms { changed, .. } => Ok(changed),
            other => unreachable!("alarm command replied with {other:?}"),
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
