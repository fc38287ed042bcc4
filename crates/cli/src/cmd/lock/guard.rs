//! The guard: a process that kills the command in time when `moim lock run` cannot, because it was stopped,
//! killed, or starved.
//!
//! It knows nothing of locks. Its stdin gives it two deadlines: of SIGTERM and of SIGKILL for the command. New deadlines
//! replace the old ones; without new ones they are reached; the end of the input means that the parent has ended. It is in a group of its own, so that a Ctrl-Z or Ctrl-C at the terminal does not reach it.

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::descendants::Family;
use super::moment::Moment;
use super::session::Session;
use crate::exit::{Failure, Outcome};

/// The parent's handle on its guard.
pub(super) struct Guard {
    child: Child,
    input: Option<ChildStdin>,
    mark: String,
}

/// The interval in which the guard scans for processes of the command, in case it must find them without the parent.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

impl Guard {
    /// Starts a guard over this process and everything with this mark, with the session's times.
    pub(super) fn start(session: &Session, mark: &str) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["lock", "guard", "--over", &std::process::id().to_string(), "--mark", mark])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| Failure::error(format!("the guard does not start: {error}")))?;
        let input = child.stdin.take();
        if let Some(input) = &input {
            // A guard that was stopped must not block this process when its input is full.
            rustix::io::ioctl_fionbio(input, true)?;
        }
        let mut guard = Self { child, input, mark: mark.to_owned() };
        guard.tell(Some(session.stop_at()), session.kill_at())?;
        Ok(guard)
    }

    /// Its process, which must not be killed with the command.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the new deadlines of the session. A guard that does not read any more is replaced.
    pub(super) fn renew(&mut self, session: &Session) -> Outcome {
        if self.tell(Some(session.stop_at()), session.kill_at()).is_err() {
            let new = Self::start(session, &self.mark)?;
            let old = std::mem::replace(self, new);
            old.dismiss();
        }
        Ok(())
    }

    /// SIGTERM was sent to the command; this is the deadline of SIGKILL. A guard that cannot be reached has an earlier
    /// deadline already.
    pub(super) fn hurry(&mut self, kill_at: Moment) {
        let _ = self.tell(None, kill_at);
    }

    fn tell(&mut self, stop_at: Option<Moment>, kill_at: Moment) -> io::Result<()> {
        let stop_at = stop_at.map_or(u64::MAX, |moment| moment.0);
        match &mut self.input {
            Some(input) => input.write_all(format!("{stop_at} {}\n", kill_at.0).as_bytes()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// The command has ended: there is nothing to guard any more.
    pub(super) fn dismiss(mut self) {
        // Killed before its input ends: the end of the input would make it kill what the command left behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.input = None;
    }
}

/// The guard itself, over the process with this id and everything with this mark.
pub(super) fn watch(parent: u32, mark: &str) -> Outcome {
    let mut family = Family::new(parent, std::process::id(), mark);
    let (mut stop_at, mut kill_at) = (u64::MAX, u64::MAX);
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::NONBLOCK)?;
    let mut told = Told::default();
    loop {
        let now = Moment::now().0;
        if now >= kill_at {
            family.kill();
            return Ok(());
        }
        if now >= stop_at {
            stop_at = u64::MAX;
            family.signal(Signal::TERM);
        }
        set(&timer, stop_at.min(kill_at))?;
        let stdin = io::stdin();
        let mut waited = [PollFd::new(&stdin, PollFlags::IN), PollFd::new(&timer, PollFlags::IN)];
        match poll(&mut waited, Some(&LOOK)) {
            Ok(0) => family.look(),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::error(format!("the guard cannot wait: {error}"))),
        }
        if waited[0].revents().is_empty() {
            continue;
        }
        match told.read()? {
            Some(Some(moments)) => (stop_at, kill_at) = moments,
            Some(None) => {}
            // The parent has ended: the lease is not renewed any more.
            None => {
                family.kill();
                return Ok(());
            }
        }
    }
}

fn set(timer: impl std::os::fd::AsFd, at: u64) -> Outcome {
    // All zero would switch the timer off.
    let at = at.clamp(1, i64::MAX.unsigned_abs());
    let value = Timespec {
        tv_sec: i64::try_from(at / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(at % 1_000_000_000).unwrap_or(0),
    };
    let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
    timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &once)?;
    Ok(())
}

/// Lines from the parent, which may come in pieces.
#[derive(Default)]
struct Told {
    held: Vec<u8>,
}

impl Told {
    /// The last moments of what has arrived, if a line is whole; nothing at all at the end.
    fn read(&mut self) -> Outcome<Option<Option<(u64, u64)>>> {
        let mut piece = [0; 512];
        // Past the buffer of the standard library: what is in there would not wake a poll.
        let read = rustix::io::read(io::stdin(), &mut piece)?;
        if read == 0 {
            return Ok(None);
        }
        self.held.extend_from_slice(&piece[..read]);
        Ok(Some(self.take()))
    }

    fn take(&mut self) -> Option<(u64, u64)> {
        let end = self.held.iter().rposition(|byte| *byte == b'\n')?;
        let lines: Vec<u8> = self.held.drain(..=end).collect();
        let line = std::str::from_utf8(&lines).ok()?.lines().next_back()?.to_owned();
        let (stop_at, kill_at) = line.split_once(' ')?;
        Some((stop_at.parse().ok()?, kill_at.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_line_counts() {
        let mut told = Told::default();
        let mut push = |piece: &str| {
            told.held.extend_from_slice(piece.as_bytes());
            told.take()
        };
        assert_eq!(push("1"), None);
        assert_eq!(push("0 20\n30 4"), Some((10, 20)));
        assert_eq!(push("0\n50 60\n"), Some((50, 60)));
    }
}
