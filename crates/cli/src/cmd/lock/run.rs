//! The command of a lock: started when the lock is held, asked to stop and killed before the lock can pass on.
//!
//! Invariants: the command is started only while there is time left; it never outlives this process (it is tied
//! to it, and the guard kills what it started); the status is 125 whenever the lock was not held to the
//! command's end.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::pin::Pin;
use std::process::ExitStatus;
use std::time::Duration;

use moim_cluster::EtcdClient;
use rustix::process::{Signal, set_child_subreaper};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::RunArgs;
use super::descendants::{Family, MARKS, marks_with};
use super::guard::Guard;
use super::moment::Moment;
use super::session::{Acquire, Lost, Session};
use crate::coordination::{connect, failure, open};
use crate::exit::{Failure, Outcome, Status};
use crate::output::note;
use crate::parent;
use crate::target::EtcdArgs;

/// A lock that was deleted may have another holder already: SIGKILL follows soon after SIGTERM.
const HURRY: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_millis(200);
/// The timeout of the release of a lock; after that it ends with its lease.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits for the lock, runs the command, and ends this process with the command's status.
pub(super) async fn run(client: &EtcdArgs, args: &RunArgs, value: &str) -> Outcome {
    let mut signals = Forwarded::listen()?;
    // Zero asks once, in all the time the servers need to answer.
    let deadline = args.wait.filter(|wait| !wait.is_zero()).map(|wait| Moment::now().after(wait));
    // With a time to wait, servers may come up meanwhile; without one, an address without a server is a mistake.
    let session = match args.wait {
        Some(wait) if !wait.is_zero() => open(&client.target()?, client),
        _ => connect(client).await.map_err(not_acquired)?,
    };
    let pending = PendingSession::default();
    let held = tokio::select! {
        biased;
        held = acquire(&session, args, value, &pending) => held,
        signal = signals.next() => {
            let message = format!("signal {} came before the lock `{}`", signal.as_raw(), args.name);
            Err(Failure::new(Status::NotHeld, message))
        }
        () = reached(deadline) => Err(timed_out(args)),
    };
    match held {
        Ok(held) => std::process::exit(hold(held, args, signals).await?),
        Err(failure) => {
            pending.leave().await;
            Err(failure)
        }
    }
}

/// Returns at the deadline; without one, never.
async fn reached(deadline: Option<Moment>) {
    match deadline {
        Some(deadline) => deadline.reached().await,
        None => std::future::pending().await,
    }
}

/// The session, with its key in the queue, that has to be released if waiting ends now.
#[derive(Default)]
struct PendingSession(RefCell<Option<Session>>);

impl PendingSession {
    async fn leave(&self) {
        let session = self.0.borrow_mut().take();
        if let Some(session) = session {
            // It ends by itself if this fails.
            let _ = tokio::time::timeout(RELEASE_TIMEOUT, session.release()).await;
        }
    }
}

type KeepAlive = Pin<Box<dyn Future<Output = Lost>>>;

/// A lock that is held.
struct Held {
    session: Session,
    token: i64,
    /// Renews for as long as it is polled, and ends when the lock is lost.
    keep_alive: KeepAlive,
    renewed: watch::Receiver<()>,
}

async fn acquire(
    client: &EtcdClient,
    args: &RunArgs,
    value: &str,
    pending: &PendingSession,
) -> Outcome<Held> {
    loop {
        match try_acquire(client, args, value, pending).await {
            Ok(Some(held)) => return Ok(held),
            Ok(None) => return Err(timed_out(args)),
            // The servers were unavailable for longer than the TTL of the lease.
            Err(Acquire::Lost(lost)) => note(format_args!("waiting again for `{}`: {lost}", args.name)),
            // The servers do not answer yet, and the wait is not over.
            Err(Acquire::Failed(error))
                if error.code().is_none() && args.wait.is_some_and(|wait| !wait.is_zero()) => {}
            Err(Acquire::Failed(error)) => return Err(not_acquired(failure(&error))),
            Err(error) => return Err(not_acquired(Failure::error(error.to_string()))),
        }
        pending.leave().await;
        tokio::time::sleep(PAUSE).await;
    }
}

/// One lease's worth of waiting.
async fn try_acquire(
    client: &EtcdClient,
    args: &RunArgs,
    value: &str,
    pending: &PendingSession,
) -> Result<Option<Held>, Acquire> {
    let session = Session::open(client, &args.name, value, args.ttl).await?;
    pending.0.replace(Some(session.clone()));
    let (told, renewed) = watch::channel(());
    let mut keep_alive: KeepAlive = {
        let session = session.clone();
        Box::pin(async move { session.keep(told).await })
    };
    let acquired = tokio::select! {
        acquired = session.acquire(args.wait != Some(Duration::ZERO)) => acquired?,
        lost = &mut keep_alive => return Err(Acquire::Lost(lost)),
    };
    Ok(acquired.map(|token| Held { session, token, keep_alive, renewed }))
}

fn timed_out(args: &RunArgs) -> Failure {
    let message = match args.wait {
        Some(wait) if !wait.is_zero() => format!("`{}` was not acquired within {wait:?}", args.name),
        Some(_) | None => format!("`{}` is held by another client", args.name),
    };
    Failure::new(Status::NotHeld, message)
}

fn not_acquired(mut failure: Failure) -> Failure {
    failure.status = Status::NotHeld;
    failure.context("the lock was not acquired")
}

/// Runs the command while the lock is held. Gives the status to end with.
async fn hold(held: Held, args: &RunArgs, mut signals: Forwarded) -> Outcome<i32> {
    let Held { session, token, mut keep_alive, mut renewed } = held;
    set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| Failure::error(format!("cannot look after the command's children: {error}")))?;
    // No other holder on this machine has it, however soon a process id is used again.
    let mark = format!("{}-{}", std::process::id(), Moment::now().0);
    let mut guard = Guard::start(&session, &mark)?;
    if session.stop_at().is_over() {
        return Err(Failure::new(Status::NotHeld, "the lock was lost before the command could start"));
    }
    let mut child = start(args, token, &session.key(), &mark)?;
    let (why, kill_at) = loop {
        tokio::select! {
            biased;
            status = child.wait() => {
                if session.stop_at().is_over() {
                    // The guard killed the command first: this is not an exit of the command itself.
                    break ("no server has renewed it".to_owned(), session.kill_at());
                }
                guard.dismiss();
                if let Err(error) = session.release().await {
                    note(format_args!("the lock stays until its lease ends: {error}"));
                }
                return Ok(code(status?));
            }
            lost = &mut keep_alive => {
                keep_alive = Box::pin(std::future::pending());
                break (lost.to_string(), session.kill_at().min(Moment::now().after(HURRY)));
            }
            () = session.stop_reached() => break ("no server has renewed it".to_owned(), session.kill_at()),
            _ = renewed.changed() => guard.renew(&session)?,
            signal = signals.next() => forward(&child, signal),
        }
    };
    note(format_args!("moim: the lock `{}` is lost: {why}; stopping the command", args.name));
    guard.hurry(kill_at);
    tokio::select! {
        () = stop(&mut child, Family::new(std::process::id(), guard.pid(), &mark), kill_at) => {}
        // As long as the lease is renewed, no other contender gets the lock before the command has ended.
        _ = async { keep_alive.await; std::future::pending().await } => {}
    }
    guard.dismiss();
    // If the session recovered meanwhile, the release lets the next contender have the lock.
    let _ = tokio::time::timeout(RELEASE_TIMEOUT, session.release()).await;
    Err(Failure::new(Status::NotHeld, format!("the lock `{}` was lost", args.name)))
}

fn start(args: &RunArgs, token: i64, key: &str, mark: &str) -> Outcome<Child> {
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command
        .args(["lock", "exec", "--die-with", &std::process::id().to_string(), "--"])
        .args(&args.command)
        .env("MOIM_FENCING_TOKEN", token.to_string())
        .env("MOIM_LOCK_KEY", key)
        .env(MARKS, marks_with(mark));
    if !at_terminal() {
        command.process_group(0);
    }
    let mut command = Command::from(command);
    command.kill_on_drop(true);
    command.spawn().map_err(|error| Failure::error(format!("the command does not start: {error}")))
}

/// SIGTERM now, SIGKILL in time, to everything the command has started.
async fn stop(child: &mut Child, mut family: Family, kill_at: Moment) {
    family.signal(Signal::TERM);
    tokio::select! {
        _ = child.wait() => {}
        () = kill_at.reached() => {}
    }
    // The command itself may have ended and left others.
    family.kill();
    let _ = child.wait().await;
}

/// At a terminal the command stays in our group: it may read from there, and Ctrl-C reaches it directly.
fn at_terminal() -> bool {
    std::io::stdin().is_terminal()
}

fn forward(child: &Child, signal: Signal) {
    if at_terminal() && [Signal::INT, Signal::QUIT].contains(&signal) {
        return;
    }
    if let Some(pid) =
        child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw)
    {
        // One that has ended needs no signal.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// As a shell says it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Signals that are the command's.
struct Forwarded {
    received: mpsc::Receiver<Signal>,
    _listeners: Vec<tokio::task::JoinHandle<()>>,
}

impl Forwarded {
    fn listen() -> Outcome<Self> {
        let (sender, received) = mpsc::channel(16);
        let scope = moim_base::task::Scope::new(moim_base::task::Shutdown::new());
        let all = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];
        let mut listeners = Vec::new();
        for kind in all {
            let mut stream = signal(SignalKind::from_raw(kind.as_raw()))?;
            let sender = sender.clone();
            listeners.push(scope.spawn("signal", async move {
                while stream.recv().await.is_some() {
                    if sender.send(kind).await.is_err() {
                        return;
                    }
                }
            }));
        }
        Ok(Self { received, _listeners: listeners })
    }

    /// The next signal. Cancel-safe.
    async fn next(&mut self) -> Signal {
        match self.received.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }
}

/// Becomes the command, tied to its parent.
pub(super) fn exec(die_with: u32, command: &[OsString]) -> Outcome {
    parent::exit_with_parent(Some(die_with))?;
    let Some((program, args)) = command.split_first() else {
        return Err(Failure::usage("there is no command"));
    };
    let error = std::process::Command::new(program).args(args).exec();
    note(format_args!("moim: cannot run {}: {error}", program.to_string_lossy()));
    // As every shell has it.
    std::process::exit(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}
