//! A process that must not outlive the one that started it.

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::exit::{Failure, Outcome};

/// From now on the kernel kills this process when its parent ends, which must be the process with this id.
///
/// The kernel means the parent's thread that started us: the parent has to do that on a thread which lives
/// as long as the process.
pub(crate) fn die_with(parent: Option<u32>) -> Outcome {
    let Some(parent) = parent else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::error(format!("cannot be tied to the parent: {error}")))?;
    // It may have ended before we asked.
    match getppid() {
        Some(pid) if u32::try_from(pid.as_raw_nonzero().get()) == Ok(parent) => Ok(()),
        _ => Err(Failure::error(format!("process {parent} is not the parent, or has ended"))),
    }
}
