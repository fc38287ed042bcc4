//! The servers under test: our own binary and Apache Kafka, each a separate process.
//!
//! Owns their start, observation and stop. Every server listens on 127.0.0.1 on a free port, keeps its data in a
//! directory that is removed with the [`Server`], and is stopped by its process id. Kafka comes from its Maven
//! artifacts; without Java or Maven the caller gets the reason and continues without it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const KAFKA_VERSION: &str = "4.1.0";
const READY_WITHIN: Duration = Duration::from_secs(60);
const STOP_WITHIN: Duration = Duration::from_secs(30);

/// A running server.
pub struct Server {
    name: &'static str,
    child: Child,
    /// Address of the Kafka listener.
    pub addr: SocketAddr,
    /// Address of the Redis listener, if there is one.
    pub redis: Option<SocketAddr>,
    /// Time from the start of the process until it serves.
    pub ready_after: Duration,
    data: PathBuf,
    keep_data: bool,
}

impl Server {
    /// Label in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGKILL and keeps the data for a restart.
    pub fn kill(mut self) -> Result<()> {
        self.keep_data = true;
        self.child.kill().context("kill -9")?;
        self.child.wait().context("waiting for the killed server")?;
        Ok(())
    }

    /// Sends SIGTERM, waits for the exit, and keeps the data for a restart. Returns how long it took.
    pub fn stop(mut self) -> Result<Duration> {
        self.keep_data = true;
        let asked = Instant::now();
        self.terminate()?;
        while self.child.try_wait().context("waiting for the server")?.is_none() {
            if asked.elapsed() > STOP_WITHIN {
                bail!("{} did not end within {STOP_WITHIN:?} of SIGTERM", self.name);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(asked.elapsed())
    }

    fn terminate(&self) -> Result<()> {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .context("process id")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).context("SIGTERM")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !self.keep_data {
            let _ = fs::remove_dir_all(&self.data);
        }
    }
}

/// Starts `moim serve` on `data` and waits for its ready line.
pub fn start_moim(binary: &Path, data: &Path) -> Result<Server> {
    moim(binary, data, &["--peer-port".into(), "0".into()])
}

/// Starts Moim nodes that form a new cluster.
pub fn start_moim_cluster(binary: &Path, folder: &Path, nodes: usize) -> Result<Vec<Server>> {
    let ports = (0..nodes).map(|_| free_port()).collect::<Result<Vec<_>>>()?;
    let initial: Vec<String> =
        ports.iter().enumerate().map(|(at, port)| format!("{}=127.0.0.1:{port}", at + 1)).collect();
    let initial = initial.join(",");
    start_concurrently(nodes, |at| {
        let args = [
            "--node-id".to_owned(),
            (at + 1).to_string(),
            "--peer-port".to_owned(),
            ports[at].to_string(),
            "--initial-cluster".to_owned(),
            initial.clone(),
        ];
        moim(binary, &folder.join(format!("moim-{}", at + 1)), &args)
    })
}

/// Starts nodes concurrently: a node does not serve before a quorum runs.
fn start_concurrently(nodes: usize, start: impl Fn(usize) -> Result<Server> + Sync) -> Result<Vec<Server>> {
    std::thread::scope(|scope| {
        let start = &start;
        let starting: Vec<_> = (0..nodes).map(|at| scope.spawn(move || start(at))).collect();
        starting.into_iter().map(|thread| thread.join().expect("starting does not panic")).collect()
    })
}

fn moim(binary: &Path, data: &Path, args: &[String]) -> Result<Server> {
    fs::create_dir_all(data)?;
    let log = File::create(data.with_extension("log")).context("log file")?;
    let started = Instant::now();
    let mut child = Command::new(binary)
        .args(["serve", "--kafka-port", "0", "--etcd-port", "0", "--admin-port", "0"])
        .args(["--redis-port", "0", "--redis-replica-ports", "0"])
        .args(args)
        .arg("--data")
        .arg(data)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .with_context(|| format!("starting {}", binary.display()))?;
    let stdout = child.stdout.take().context("stdout")?;
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        let line =
            BufReader::new(stdout).lines().map_while(Result::ok).find(|line| line.starts_with("ready "));
        // After the deadline the receiver is gone and the line is not needed.
        let _ = sender.send(line.map(|line| (line, Instant::now())));
    });
    let placeholder = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut server = Server {
        name: "Moim",
        child,
        addr: placeholder,
        redis: None,
        ready_after: Duration::ZERO,
        data: data.to_owned(),
        keep_data: false,
    };
    let ready = receiver.recv_timeout(READY_WITHIN).ok().flatten();
    let (line, at) =
        ready.with_context(|| format!("no ready line; see {}", data.with_extension("log").display()))?;
    server.redis = address(&line, "redis=");
    server.addr = address(&line, "kafka=").with_context(|| format!("no kafka address in {line:?}"))?;
    server.ready_after = at - started;
    Ok(server)
}

fn address(ready: &str, listener: &str) -> Option<SocketAddr> {
    ready.split_whitespace().find_map(|word| word.strip_prefix(listener))?.parse().ok()
}

/// Installs Kafka's artifacts into `home/lib`, once. The error names what is missing.
pub fn install_kafka(home: &Path) -> Result<()> {
    let marker = home.join(format!("installed-{KAFKA_VERSION}"));
    if marker.exists() {
        return Ok(());
    }
    for tool in ["java", "mvn"] {
        let found = Command::new(tool).arg("-version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !found.is_ok_and(|status| status.success()) {
            bail!("`{tool}` is not on this machine");
        }
    }
    fs::create_dir_all(home)?;
    fs::write(home.join("pom.xml"), pom())?;
    let log = home.join("mvn.log");
    let status = Command::new("mvn")
        .args(["-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=lib"])
        .current_dir(home)
        .stdin(Stdio::null())
        .stdout(File::create(&log)?)
        .stderr(File::options().append(true).open(&log)?)
        .status()
        .context("running mvn")?;
    if !status.success() {
        bail!("mvn could not bring Kafka {KAFKA_VERSION}; see {}", log.display());
    }
    fs::write(marker, "")?;
    Ok(())
}

fn pom() -> String {
    format!(
        "<project xmlns=\"http://maven.apache.org/POM/4.0.0\"><modelVersion>4.0.0</modelVersion>\
         <groupId>moim.bench</groupId><artifactId>peer</artifactId><version>1</version><dependencies><dependency>\
         <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA_VERSION}</version>\
         </dependency></dependencies></project>\n"
    )
}

/// Starts a one-node Kafka on `data` from the artifacts in `home`, with the heap size of its own start script.
/// `serves` is polled until the broker answers requests.
pub fn start_kafka(home: &Path, data: &Path, serves: &dyn Fn(SocketAddr) -> bool) -> Result<Server> {
    kafka(home, data, (free_port()?, &[free_port()?], 0), "", serves)
}

/// Starts Kafka nodes that form a cluster, each broker and controller. `settings` are lines of their properties.
pub fn start_kafka_cluster(
    home: &Path,
    folder: &Path,
    nodes: usize,
    settings: &str,
    serves: &(dyn Fn(SocketAddr) -> bool + Sync),
) -> Result<Vec<Server>> {
    let ports = (0..2 * nodes).map(|_| free_port()).collect::<Result<Vec<_>>>()?;
    let (clients, controllers) = ports.split_at(nodes);
    start_concurrently(nodes, |at| {
        let data = folder.join(format!("kafka-{}", at + 1));
        kafka(home, &data, (clients[at], controllers, at), settings, serves)
    })
}

fn kafka(
    home: &Path,
    data: &Path,
    (port, controllers, at): (u16, &[u16], usize),
    settings: &str,
    serves: &dyn Fn(SocketAddr) -> bool,
) -> Result<Server> {
    fs::create_dir_all(data)?;
    let properties = data.with_extension("properties");
    fs::write(&properties, kafka_properties(port, controllers, at, data) + settings)?;
    let java = |main: &str, heap: &[&str]| {
        let mut command = Command::new("java");
        command.args(heap).arg("-cp").arg(home.join("lib").join("*")).arg(main).stdin(Stdio::null());
        command
    };
    let formatted = java("kafka.tools.StorageTool", &[])
        .args(["format", "-t", "bW9pbS1iZW5jaC1wZWVyMQ", "--ignore-formatted", "-c"])
        .arg(&properties)
        .output()
        .context("running java")?;
    if !formatted.status.success() {
        bail!("formatting Kafka's storage: {}", String::from_utf8_lossy(&formatted.stderr));
    }
    let log = File::create(data.with_extension("log"))?;
    let started = Instant::now();
    let heap = [
        "-Xmx1g",
        "-Xms1g",
        "-server",
        "-XX:+UseG1GC",
        "-XX:MaxGCPauseMillis=20",
        "-XX:InitiatingHeapOccupancyPercent=35",
    ];
    let child = java("kafka.Kafka", &heap)
        .arg(&properties)
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("starting Kafka")?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut server = Server {
        name: "Kafka",
        child,
        addr,
        redis: None,
        ready_after: Duration::ZERO,
        data: data.to_owned(),
        keep_data: false,
    };
    while !serves(addr) {
        if let Some(status) = server.child.try_wait()? {
            bail!("Kafka ended at its start ({status}); see {}", data.with_extension("log").display());
        }
        if started.elapsed() > READY_WITHIN {
            bail!("Kafka did not serve within {READY_WITHIN:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    server.ready_after = started.elapsed();
    Ok(server)
}

/// Kafka's defaults, except for what few nodes and a short test need.
fn kafka_properties(port: u16, controllers: &[u16], at: usize, data: &Path) -> String {
    let voters: Vec<String> =
        controllers.iter().enumerate().map(|(at, port)| format!("{}@127.0.0.1:{port}", at + 1)).collect();
    let (voters, controller, node) = (voters.join(","), controllers[at], at + 1);
    // The replication factor of its internal topics is that of Moim's.
    let (copies, in_sync) = if controllers.len() < 3 { (1, 1) } else { (3, 2) };
    format!(
        "process.roles=broker,controller\nnode.id={node}\n\
         listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n\
         advertised.listeners=PLAINTEXT://127.0.0.1:{port}\n\
         controller.listener.names=CONTROLLER\ncontroller.quorum.voters={voters}\n\
         listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n\
         log.dirs={}\noffsets.topic.replication.factor={copies}\ntransaction.state.log.replication.factor={copies}\n\
         transaction.state.log.min.isr={in_sync}\ndefault.replication.factor={copies}\nmin.insync.replicas={in_sync}\n\
         log.segment.delete.delay.ms=100\n",
        data.display()
    )
}

/// A free port.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_line_gives_the_kafka_address() {
        let line = "ready node=1 cluster=abc kafka=127.0.0.1:4711 admin=127.0.0.1:1";
        assert_eq!(address(line, "kafka="), Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 4711))));
        assert_eq!((address(line, "redis="), address("ready node=1", "kafka=")), (None, None));
    }

    #[test]
    fn server_that_exits_at_once_is_an_error() {
        let dir = std::env::temp_dir().join(format!("moim-bench-peer-{}", std::process::id()));
        let error = start_moim(Path::new("/bin/false"), &dir).err().unwrap();
        assert!(error.to_string().contains("no ready line"), "{error}");
        assert!(!dir.exists(), "the data folder goes with the server");
        let _ = fs::remove_file(dir.with_extension("log"));
    }
}
