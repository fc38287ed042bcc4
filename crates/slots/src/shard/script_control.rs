//! Stopping the script that holds a shard, and discarding its effects.
//!
//! SCRIPT KILL is refused for a script that has written while its node leads: half of it would be committed. On loss of
//! leadership, or by SHUTDOWN NOSAVE, the script is stopped all the same: its effects were never appended, and the
//! keyspace that shows them is replayed from the start.

use std::sync::atomic::Ordering;

use super::{Role, Shard, Turn};
use crate::error::Error;

impl Shard {
    /// SCRIPT KILL.
    pub(crate) fn kill_script(&self) -> Result<(), Error> {
        if !self.busy.load(Ordering::Acquire) {
            return Err(Error::coded("NOTBUSY No scripts in execution right now."));
        }
        if self.script_wrote.load(Ordering::Acquire) {
            return Err(Error::coded(
                "UNKILLABLE Sorry the script already executed write commands against the dataset. You can either wait the script termination or kill the server in a hard way using the SHUTDOWN NOSAVE command.",
            ));
        }
        self.script_killed.store(true, Ordering::Release);
        Ok(())
    }

    /// SHUTDOWN NOSAVE while a script runs: stops it although it has written. The shard is replayed from its journal.
    pub(crate) fn abandon_script(&self) {
        self.script_abandoned.store(true, Ordering::Release);
    }
}

impl Turn<'_> {
    /// Discards the effects of a stopped script together with the keyspace that shows them; the shard is replayed. No
    /// reply of this turn is sent.
    pub(crate) fn maybe_discard(&mut self) {
        if !self.shard.discards_effects.swap(false, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(shard = self.shard.index, "uncommitted effects of a stopped script discarded");
        self.shard.set_role(Role::Loading);
        self.shard.void_pending_replies();
        self.state.reset();
        self.shard.task_wakeup.notify_one();
    }
}
