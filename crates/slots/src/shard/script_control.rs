//! Ending the script that has a shard, and discarding what it did.
//!
//! A script that has written cannot be killed as long as its node leads: half of it would be committed. When the lead is lost,
//! or by SHUTDOWN NOSAVE, it ends all the same: what it did was never appended, and the memory that shows it is read anew.

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

    /// SHUTDOWN NOSAVE while a script runs: ends it, whatever it has written. The shard is read anew from its journal.
    pub(crate) fn abandon_script(&self) {
        self.script_abandoned.store(true, Ordering::Release);
    }
}

impl Turn<'_> {
    /// Throws away what a script did that was stopped, with everything in memory, which shows it: the shard is read anew. Nothing
    /// of this turn leaves.
    pub(crate) fn maybe_discard(&mut self) {
        if !self.shard.discards_effects.swap(false, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(shard = self.shard.index, "uncommitted effects of a stopped script discarded");
        self.shard.set_role(Role::Loading);
        self.shard.void_answers();
        self.state.forget();
        self.shard.news.notify_one();
    }
}
