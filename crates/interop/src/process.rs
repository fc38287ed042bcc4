//! A child process: signalled, awaited, and never leaked.

use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// A child process and its guard, which outlives this process.
pub(crate) struct Process {
    child: Child,
    guard: Guard,
}

impl Process {
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("{:?} did not start", command.get_program()))?;
        let guard = Guard::over(child.id())?;
        Ok(Self { child, guard })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("a process id")?;
        kill_process(pid, signal).context("the signal was not delivered")
    }

    /// Waits for the exit, up to `patience`.
    pub(crate) fn wait(&mut self, patience: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("the process did not end within {patience:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.guard.dismiss(); // first: its process id must not be reused meanwhile
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills the child when this process exits without having done so, even by SIGKILL: a shell that waits for the end of
/// its input, which this process holds.
struct Guard {
    shell: Child,
    _input: ChildStdin,
}

impl Guard {
    fn over(pid: u32) -> Result<Self> {
        let mut shell = Command::new("sh")
            .args(["-c", "read _; kill -9 \"$0\"", &pid.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("sh did not start")?;
        let input = shell.stdin.take().context("its input")?;
        Ok(Self { shell, _input: input })
    }

    fn dismiss(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.dismiss();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_kills_its_process_when_its_input_ends() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        let mut guard = Guard::over(sleeper.id()).unwrap();
        let Guard { shell, _input } = &mut guard;
        drop(std::mem::replace(
            _input,
            Command::new("true").stdin(Stdio::piped()).spawn().unwrap().stdin.take().unwrap(),
        ));
        shell.wait().unwrap();
        let status = sleeper.wait().unwrap();
        assert!(!status.success());
    }
}
