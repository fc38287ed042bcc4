//! `moim dev -d`: the supervisor goes on in the background once the cluster is ready.
//!
//! The first process starts this program again and passes on what it prints. When the cluster is ready the
//! second one leaves the terminal and closes its output, which is how the first one knows that it may end.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::UpArgs;
use super::control::{Request, ask};
use super::up::lock;
use crate::cmd::block_on;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Format, Output};

const LOG: &str = "dev.log";

/// Starts a supervisor, waits until its cluster is ready, and leaves it alone.
pub(super) fn run(args: &UpArgs, data: &Path, patience: Duration, output: Output) -> Outcome {
    if data.is_dir() {
        // A supervisor that runs already would answer instead of the new one, and look like its success.
        drop(lock(data)?);
    }
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["dev", "--detached", "--timeout", &format!("{}ms", patience.as_millis())]);
    command.arg("--data").arg(data);
    if let Some(nodes) = args.nodes {
        command.args(["--nodes", &nodes.to_string()]);
    }
    if let Some(base) = args.base_port {
        command.args(["--base-port", &base.to_string()]);
    }
    if output.format == Format::Json {
        command.args(["--output", "json"]);
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut said = child.stdout.take().ok_or_else(|| Failure::error("the supervisor has no output"))?;
    let mut buffer = [0; 4096];
    loop {
        match said.read(&mut buffer)? {
            0 => break,
            read => std::io::stdout().write_all(&buffer[..read])?,
        }
    }
    std::io::stdout().flush()?;
    // It closed its output: either it continues in the background, or it has ended with an error.
    if child.try_wait()?.is_none()
        && block_on(async { ask(data, Request::Status, Duration::from_secs(5)).await.map(drop) }).is_ok()
    {
        return Ok(());
    }
    let status = child.wait()?;
    let number = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(Status::Error as u8);
    Err(Failure::new(Status::from_number(number), "the cluster did not start"))
}

/// In the process that stays: leaves the terminal and lets the first process end.
pub(super) fn let_go(args: &UpArgs, data: &Path) -> Outcome {
    if !args.detached {
        return Ok(());
    }
    let failed = |error: rustix::io::Errno| Failure::error(format!("cannot go to the background: {error}"));
    // Fails only for the leader of a process group, which has no terminal to leave then.
    let _ = rustix::process::setsid();
    let log = OpenOptions::new().create(true).append(true).open(data.join(LOG))?;
    rustix::stdio::dup2_stderr(&log).map_err(failed)?;
    rustix::stdio::dup2_stdout(&log).map_err(failed)
}
