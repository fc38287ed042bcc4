//! Leader step-down without a quorum (check quorum).
//!
//! A member whose messages arrive but that receives none (a connection that loses one direction) would lead forever:
//! its heartbeats prevent an election, and it can commit nothing. Therefore a leader that no quorum has answered for
//! three election timeouts withholds appends and heartbeats; then the other members elect a leader. After a while it
//! resumes, in case no other member can lead.

use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::async_runtime::WatchReceiver;
use openraft::{Instant as _, ServerState};
use tokio::time::Instant;

use super::{Group, MUTED_NO_QUORUM, is_alone};

/// How long heartbeats are withheld: the other members elect within a second.
const SILENCE: Duration = Duration::from_secs(2);

impl Group {
    /// Withholds heartbeats while this member leads and no quorum answers. Returns when the group has stopped.
    pub async fn yield_without_quorum(&self) {
        let look = Duration::from_millis(self.core.options.timers.election_max_ms / 2);
        let limit = Duration::from_millis(self.core.options.timers.election_max_ms * 3);
        let mut metrics = self.raft().server_metrics();
        loop {
            let leads = {
                let now = metrics.borrow_watched();
                now.state == ServerState::Leader && !is_alone(&now)
            };
            if leads {
                self.watch_quorum(look, limit).await;
            }
            self.core.unmute(MUTED_NO_QUORUM);
            // The metrics of a stopped group still show its last state: only a change proves that it continues.
            if metrics.changed().await.is_err() {
                return;
            }
        }
    }

    /// Checks the quorum until this member no longer leads.
    async fn watch_quorum(&self, look: Duration, limit: Duration) {
        let (mut since, mut missed) = (Instant::now(), false);
        while self.is_leader() {
            tokio::time::sleep(look).await;
            let acked = {
                let metrics = self.raft().metrics();
                let now = metrics.borrow_watched();
                now.last_quorum_acked.as_ref().map(|at| at.elapsed())
            };
            let silent = acked.unwrap_or(Duration::MAX).min(since.elapsed());
            if self.core.muted.load(Ordering::Relaxed) & MUTED_NO_QUORUM != 0 {
                if since.elapsed() > SILENCE {
                    self.core.unmute(MUTED_NO_QUORUM);
                    (since, missed) = (Instant::now(), false);
                }
                continue;
            }
            // Twice in a row: a process that was paused has unread answers.
            if silent > limit && std::mem::replace(&mut missed, true) {
                tracing::warn!(
                    group = %self.core.options.group,
                    silent_ms = silent.as_millis() as u64,
                    "no quorum answers this leader: heartbeats withheld"
                );
                self.core.mute(MUTED_NO_QUORUM);
                since = Instant::now();
            } else if silent <= limit {
                missed = false;
            }
        }
    }
}
