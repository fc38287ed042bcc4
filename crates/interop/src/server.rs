//! One `moim serve` process: started on free ports with its data on a real disk, killed in every way, restarted on
//! the same ports, and never leaked.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::binary::{moim_binary, serves_etcd};
use crate::process::Process;

/// Time limit for a start. Recovery time is measured elsewhere; this only bounds the wait.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Start options of a server.
#[derive(Clone, Default)]
pub struct Options {
    /// Configuration by environment variables, as `("MOIM__KAFKA__PORT", "0")`.
    pub env: Vec<(String, String)>,
    /// Additional arguments of `moim serve`.
    pub args: Vec<String>,
    /// The binary, if it is not the one of [`moim_binary`].
    pub program: Option<PathBuf>,
    /// The data directory; by default the server gets a new one.
    pub data: Option<PathBuf>,
    /// `HOST:PORT` of the peer listener, if other nodes must know it in advance.
    pub peer: Option<String>,
}

impl Options {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets one key of the configuration, named as in `moim.toml`: `("kafka.port", "0")`.
    #[must_use]
    pub fn set(mut self, key: &str, value: impl ToString) -> Self {
        let name = format!("MOIM__{}", key.to_uppercase().replace('.', "__"));
        self.env.push((name, value.to_string()));
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }
}

/// A running `moim serve`, or an externally managed broker.
pub struct Server {
    options: Options,
    kafka: String,
    admin: String,
    redis: String,
    etcd: String,
    peer: String,
    ready_after: Duration,
    process: Option<Process>,
    dir: Option<TempDir>,
    log: PathBuf,
}

impl Server {
    /// Starts a server with an empty data directory.
    pub fn start(options: Options) -> Result<Self> {
        Self::start_watched(options, |_| {})
    }

    /// Starts a server; `on_spawn` gets the process id before the server is ready.
    pub fn start_watched(options: Options, on_spawn: impl FnOnce(u32)) -> Result<Self> {
        let dir = scratch()?;
        let log = dir.path().join("stderr.log");
        let any = || "127.0.0.1:0".to_owned();
        let mut server = Self {
            kafka: any(),
            admin: any(),
            redis: any(),
            etcd: any(),
            peer: options.peer.clone().unwrap_or_else(any),
            options,
            ready_after: Duration::ZERO,
            process: None,
            dir: Some(dir),
            log,
        };
        server.launch(on_spawn)?;
        Ok(server)
    }

    /// The external broker named by `INTEROP_KAFKA`, if set.
    pub fn external() -> Option<Self> {
        let kafka = std::env::var("INTEROP_KAFKA").ok()?;
        Some(Self {
            options: Options::new(),
            kafka,
            admin: String::new(),
            redis: String::new(),
            etcd: String::new(),
            peer: String::new(),
            ready_after: Duration::ZERO,
            process: None,
            dir: None,
            log: PathBuf::new(),
        })
    }

    /// `HOST:PORT` of the Kafka listener.
    pub fn kafka(&self) -> &str {
        &self.kafka
    }

    /// `HOST:PORT` of the admin listener.
    pub fn admin(&self) -> &str {
        &self.admin
    }

    /// `HOST:PORT` of the Redis listener: the home shard.
    pub fn redis(&self) -> &str {
        &self.redis
    }

    /// `HOST:PORT` of the etcd listener.
    pub fn etcd(&self) -> &str {
        &self.etcd
    }

    /// `HOST:PORT` of the peer listener.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The data directory.
    pub fn data(&self) -> PathBuf {
        let own = || self.dir.as_ref().map(|dir| dir.path().join("data")).unwrap_or_default();
        self.options.data.clone().unwrap_or_else(own)
    }

    /// Time from the last start to the ready line.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// The process id, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.id())
    }

    /// True if the process is still running.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::is_running)
    }

    /// Sends SIGKILL: the process crashes (the kernel's page cache survives).
    pub fn kill(&mut self) -> Result<()> {
        self.signal(Signal::KILL)?;
        self.wait(Duration::from_secs(10)).map(drop)
    }

    /// Sends SIGSTOP: connections stay open and requests are not answered.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Sends SIGCONT.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Sends SIGTERM and waits for the exit.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(Duration::from_secs(40))
    }

    /// Restarts after a stop: same data, same ports.
    pub fn restart(&mut self) -> Result<()> {
        self.restart_watched(|_| {})
    }

    /// Restarts; `on_spawn` gets the process id before the server is ready.
    pub fn restart_watched(&mut self, on_spawn: impl FnOnce(u32)) -> Result<()> {
        if self.is_running() {
            bail!("the server still runs");
        }
        self.launch(on_spawn)
    }

    /// The tail of the server's log, for the message of a failed test.
    pub fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// The complete log of the server.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    fn launch(&mut self, on_spawn: impl FnOnce(u32)) -> Result<()> {
        let start = Instant::now();
        let log = File::options().create(true).append(true).open(&self.log).context("the log file")?;
        let program = match &self.options.program {
            Some(program) => program,
            None => moim_binary()?,
        };
        let mut command = Command::new(program);
        command
            .arg("serve")
            .arg("--data")
            .arg(self.data())
            .args(["--kafka-port", port(&self.kafka), "--admin-port", port(&self.admin)])
            .args(&self.options.args)
            .envs(self.options.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        if serves_etcd(program)? {
            command.args(["--etcd-port", port(&self.etcd), "--peer-port", port(&self.peer)]);
            command.args(["--redis-port", port(&self.redis), "--redis-replica-ports", "0"]);
        }
        let mut process = Process::spawn(&mut command)?;
        on_spawn(process.id());
        let stdout = process.child().stdout.take().context("its output")?;
        self.process = Some(process);
        let ready = self.ready_line(stdout)?;
        for word in ready.split_whitespace() {
            match word.split_once('=') {
                Some(("kafka", address)) => self.kafka = address.to_owned(),
                Some(("admin", address)) => self.admin = address.to_owned(),
                Some(("redis", address)) => self.redis = address.to_owned(),
                Some(("etcd", address)) => self.etcd = address.to_owned(),
                Some(("peer", address)) => self.peer = address.to_owned(),
                _ => {}
            }
        }
        if port(&self.kafka) == "0" {
            bail!("the ready line names no kafka listener: {ready}");
        }
        self.ready_after = start.elapsed();
        Ok(())
    }

    /// Reads the ready line on a separate thread, so that a silent process cannot block the test.
    fn ready_line(&mut self, stdout: impl Read + Send + 'static) -> Result<String> {
        let (sender, line) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut line = String::new();
            let _ = reader.read_line(&mut line);
            let _ = sender.send(line);
            let _ = std::io::copy(&mut reader, &mut std::io::sink()); // keep the pipe open and empty
        });
        match line.recv_timeout(START_TIMEOUT) {
            Ok(line) if line.starts_with("ready ") => Ok(line.trim().to_owned()),
            Ok(line) => bail!("moim ended or said something else first: {line:?}\n{}", self.log_tail()),
            Err(_) => bail!("moim was not ready within {START_TIMEOUT:?}\n{}", self.log_tail()),
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.process.as_ref().context("the server does not run")?.signal(signal)
    }

    fn wait(&mut self, patience: Duration) -> Result<ExitStatus> {
        let process = self.process.as_mut().context("the server does not run")?;
        let status = process.wait(patience).with_context(|| self.log_tail())?;
        self.process = None;
        Ok(status)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process = None;
        if std::thread::panicking() && self.dir.is_some() {
            eprintln!("--- the server's log ends with:\n{}", self.log_tail());
        }
    }
}

fn port(address: &str) -> &str {
    address.rsplit(':').next().unwrap_or("0")
}

/// A temporary directory below the build directory: on a real disk, because /tmp may be a memory file system.
pub(crate) fn scratch() -> Result<TempDir> {
    let exe = std::env::current_exe().context("the path of this program")?;
    let target = exe.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists()).map(Path::to_path_buf);
    let target = target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"));
    let parent = target.join("interop-data");
    std::fs::create_dir_all(&parent).context("the folder for data")?;
    tempfile::Builder::new().prefix("server-").tempdir_in(parent).context("a folder for data")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_key_maps_to_its_environment_variable() {
        let options = Options::new().set("kafka.group_min_session_timeout_ms", 1000);
        assert_eq!(
            options.env,
            [("MOIM__KAFKA__GROUP_MIN_SESSION_TIMEOUT_MS".to_owned(), "1000".to_owned())]
        );
    }
}
