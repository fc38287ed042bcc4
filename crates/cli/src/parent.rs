//! A process that must not outlive its parent (`PR_SET_PDEATHSIG`).

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::exit::{Failure, Outcome};

/// Makes the kernel kill this process when its parent ends, which must be the process with this id.
///
/// The kernel watches the thread of the parent that started this process: that thread must live as long as the parent.
pub(crate) fn exit_with_parent(parent: Option<u32>) -> Outcome {
    let Some(parent) = parent else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::error(format!("cannot be tied to the parent: {error}")))?;
    // The parent may have ended before the signal was set.
    match getppid() {
        Some(pid) if u32::try_from(pid.as_raw_nonzero().get()) == Ok(parent) => Ok(()),
        _ => Err(Failure::error(format!("process {parent} is not the parent, or has ended"))),
    }
}
