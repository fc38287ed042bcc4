//! Scripts on a shard that can lose leadership: offloaded scripts reply only on a primary, endless scripts can be
//! killed, and no state of them remains.

#![allow(clippy::unwrap_used)] // all of it is test
#![allow(clippy::disallowed_methods)] // real time

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use moim_base::SystemClock;
use moim_base::task::{Scope, Shutdown};
use moim_journal::{
    Durability, DurableSink, Journal, JournalId, JournalOptions, PlainFraming, RealDisk, Store, StoreOptions,
};
use moim_slots::cluster;
use moim_slots::log::{LocalLog, LogError, ShardLog};
use moim_slots::server::Server;
use moim_slots::shard::{Role, Shard};
use moim_slots::shared::{Shared, hex_id};

const PATIENCE: Duration = Duration::from_secs(30);

/// A journal whose leadership the test controls.
struct Switched {
    inner: LocalLog,
    lead: AtomicI32,
}

impl ShardLog for Switched {
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError> {
        if self.leader_epoch() != Some(epoch) {
            return Err(LogError::NotLeader);
        }
        self.inner.append(base, epoch, time_ms, payload)
    }

    fn journal(&self) -> &Arc<Journal> {
        self.inner.journal()
    }

    fn leader_epoch(&self) -> Option<i32> {
        Some(self.lead.load(Ordering::Acquire)).filter(|lead| *lead > 0)
    }

    fn is_follower(&self) -> bool {
        self.leader_epoch().is_none()
    }

    fn replicas_with(&self, _end: i64) -> usize {
        0
    }
}

struct Sink(Arc<Shard>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        advanced.iter().for_each(|(_, end)| self.0.on_committed(*end));
    }
}

struct Node {
    _dir: tempfile::TempDir,
    _store: Store,
    shared: Arc<Shared>,
    shard: Arc<Shard>,
    log: Arc<Switched>,
}

impl Node {
    fn new(port: u16, loops: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(SystemClock::new());
        let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
        let store = Store::open(dir.path(), Arc::new(RealDisk), clock.clone(), options).unwrap();
        let options = JournalOptions {
            folder: "slots/shard-0".into(),
            framing: Arc::new(PlainFraming),
            durability: Durability::Fsync,
            segment_bytes: 64 << 20,
            tag: 1,
        };
        let journal = store.journal(JournalId { incarnation: 1, part: 0 }, options).unwrap();
        let shared = Arc::new(Shared::new(clock));
        let log = Arc::new(Switched { inner: LocalLog::new(journal.clone()), lead: AtomicI32::new(1) });
        let id = hex_id();
        shared.view.store(Arc::new(cluster::standalone(id.clone(), "127.0.0.1".into(), port)));
        let shard = Shard::new(0, id, log.clone(), loops, None);
        store.set_sink(Arc::new(Sink(Arc::clone(&shard))));
        shard.on_committed(journal.durable_end());
        store.start();
        Self { _dir: dir, _store: store, shared, shard, log }
    }

    fn set_lead(&self, lead: i32) {
        self.log.lead.store(lead, Ordering::Release);
        self.shard.task_wakeup.notify_one();
    }

    fn config(&self, name: &str, value: &str) {
        self.shared.settings.set_all(&[(name.to_owned(), value.to_owned())]).unwrap();
    }
}

/// A node with its own event loops.
struct Served {
    node: Node,
    server: Server,
    shutdown: Shutdown,
    address: SocketAddr,
}

impl Served {
    fn start() -> Self {
        let listener = Server::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let node = Node::new(address.port(), 2);
        let shutdown = Shutdown::new();
        let server = Server::start(Arc::clone(&node.shared), 2, shutdown.clone()).unwrap();
        server.run_shard(&node.shard).unwrap();
        server.listen(&node.shard, listener).unwrap();
        let served = Self { node, server, shutdown, address };
        served.wait_for(Role::Primary);
        served.node.config("busy-reply-threshold", "20");
        served
    }

    fn wait_for(&self, role: Role) {
        let deadline = Instant::now() + PATIENCE;
        while self.node.shard.role() != role {
            assert!(Instant::now() < deadline, "the shard does not become {role:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client(stream)
    }

    /// Waits until a script makes the shard reply BUSY.
    fn wait_until_busy(&self) -> Client {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut client = self.client();
            client.send(&["PING"]);
            let reply = client.line();
            if reply.contains("BUSY") {
                return client;
            }
            assert!(Instant::now() < deadline, "no script runs: {reply}");
        }
    }

    fn stop(self) {
        self.shutdown.stop();
        self.server.join();
    }
}

struct Client(TcpStream);

impl Client {
    fn send(&mut self, words: &[&str]) {
        let words = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect::<Vec<_>>();
        self.0.write_all(format!("*{}\r\n{}", words.len(), words.concat()).as_bytes()).unwrap();
    }

    /// The next line; empty if the connection was closed.
    fn line(&mut self) -> String {
        let (mut line, mut byte) = (Vec::new(), [0]);
        while !line.ends_with(b"\r\n") {
            match self.0.read(&mut byte) {
                Ok(0) => break,
                Ok(_) => line.push(byte[0]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
                Err(error) => panic!("no reply: {error}"),
            }
        }
        String::from_utf8_lossy(&line).trim_end().to_owned()
    }

    fn ask(&mut self, words: &[&str]) -> String {
        self.send(words);
        self.line()
    }
}

/// Runs a client against a node on this thread, whose single blocking thread is occupied until `before` has run.
fn with_work_held_back(script: &[&str], before: impl FnOnce(&Node)) -> String {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let node = Node::new(listener.local_addr().unwrap().port(), 1);
    let address = listener.local_addr().unwrap();
    let outcome = runtime.block_on(async {
        let scope = Scope::new(Shutdown::new());
        let server = Server::on_current_runtime(Arc::clone(&node.shared), scope);
        server.run_shard(&node.shard).unwrap();
        let deadline = Instant::now() + PATIENCE;
        while node.shard.role() != Role::Primary {
            assert!(Instant::now() < deadline, "the shard does not become primary");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut client = Client(TcpStream::connect(address).unwrap());
        client.0.set_read_timeout(Some(PATIENCE)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        server.adopt(&node.shard, Box::new(tokio::net::TcpStream::from_std(accepted).unwrap()));
        // From here on nothing can be offloaded.
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (taken, is_taken) = tokio::sync::oneshot::channel();
        drop(tokio::task::spawn_blocking(move || {
            let _ = taken.send(());
            let _ = held.recv();
        }));
        is_taken.await.unwrap();
        client.send(script);
        let is_blocked = || {
            let clients = node.shared.clients();
            clients.values().any(|client| client.about.lock().unwrap().blocked)
        };
        while !is_blocked() {
            assert!(Instant::now() < deadline, "the script is not offloaded");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        before(&node);
        while node.log.leader_epoch().is_none() && node.shard.role() != Role::Replica {
            assert!(Instant::now() < deadline, "the shard does not become replica");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(release);
        let reader = std::thread::spawn(move || client.line());
        while !reader.is_finished() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        reader.join().unwrap()
    });
    runtime.shutdown_background();
    outcome
}

#[test]
fn offloaded_script_does_not_run_after_leadership_loss() {
    let read = ["EVAL", "return redis.call('exists', KEYS[1])", "1", "k"];
    assert_eq!(with_work_held_back(&read, |_| {}), ":0", "the primary replies");
    let moved = with_work_held_back(&read, |node| node.set_lead(0));
    assert!(moved.starts_with("-MOVED "), "a replica does not: {moved}");
    // Without keys there is no node to redirect to.
    let refused =
        with_work_held_back(&["EVAL", "return redis.call('exists', 'k')", "0"], |node| node.set_lead(0));
    assert!(refused.starts_with("-UNBLOCKED "), "{refused}");
}

#[test]
fn script_on_a_replica_needs_readonly_for_keys() {
    let served = Served::start();
    served.node.set_lead(0);
    served.wait_for(Role::Replica);
    let mut client = served.client();
    let script = ["EVAL", "return redis.call('exists', 'k')", "0"];
    let refused = client.ask(&script);
    assert!(refused.contains("non local key"), "{refused}");
    assert_eq!(client.ask(&["READONLY"]), "+OK");
    assert_eq!(client.ask(&script), ":0");
    served.stop();
}

const WRITES_FOR_EVER: [&str; 4] =
    ["EVAL", "redis.call('set', KEYS[1], 'uncommitted') while true do end", "1", "k"];

#[test]
fn script_that_has_written_stops_on_leadership_loss() {
    let served = Served::start();
    let mut writer = served.client();
    writer.send(&WRITES_FOR_EVER);
    let mut other = served.wait_until_busy();
    assert!(other.ask(&["SCRIPT", "KILL"]).starts_with("-UNKILLABLE"));
    served.node.set_lead(0);
    served.wait_for(Role::Replica);
    let reply = writer.line();
    assert!(reply.is_empty() || reply.starts_with('-'), "nothing is acknowledged: {reply}");
    served.node.set_lead(2);
    served.wait_for(Role::Primary);
    assert_eq!(served.client().ask(&["EXISTS", "k"]), ":0", "its writes are discarded");
    assert_eq!(served.client().ask(&["SET", "k", "v"]), "+OK");
    served.stop();
}

#[test]
fn shutdown_nosave_stops_a_script_that_has_written() {
    let served = Served::start();
    assert_eq!(served.client().ask(&["SET", "kept", "1"]), "+OK");
    let mut writer = served.client();
    writer.send(&WRITES_FOR_EVER);
    let mut other = served.wait_until_busy();
    assert!(other.ask(&["SHUTDOWN"]).starts_with("-BUSY"));
    assert_eq!(other.ask(&["SHUTDOWN", "NOSAVE"]), "", "the connection is closed, as in Redis");
    let reply = writer.line();
    assert!(reply.is_empty() || reply.starts_with('-'), "{reply}");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let reply = served.client().ask(&["EXISTS", "k"]);
        if reply == ":0" {
            break;
        }
        assert!(Instant::now() < deadline, "{reply}");
    }
    assert_eq!(served.client().ask(&["EXISTS", "kept"]), ":1", "committed writes exist");
    served.stop();
}

#[test]
fn client_must_authenticate_before_script_kill() {
    let served = Served::start();
    let mut runner = served.client();
    runner.send(&["EVAL", "while true do end", "0"]);
    drop(served.wait_until_busy());
    served.node.config("requirepass", "secret");
    for command in
        [&["SCRIPT", "KILL"][..], &["FUNCTION", "KILL"], &["SHUTDOWN", "NOSAVE"], &["MULTI"], &["GET", "k"]]
    {
        let reply = served.client().ask(command);
        assert_eq!(reply, "-NOAUTH Authentication required.", "{command:?}");
    }
    let mut client = served.client();
    assert!(client.ask(&["AUTH", "wrong"]).starts_with("-WRONGPASS"));
    assert_eq!(client.ask(&["SCRIPT", "KILL"]), "-NOAUTH Authentication required.");
    assert_eq!(client.ask(&["AUTH", "secret"]), "+OK");
    assert_eq!(client.ask(&["SCRIPT", "KILL"]), "+OK");
    let reply = runner.line();
    assert!(reply.contains("Script killed by user"), "{reply}");
    served.stop();
}

/// Each takes minutes or runs forever inside one library call, or with few instructions.
const ENDLESS: &[&str] = &[
    "return string.find(string.rep('a', 30), string.rep('a-', 30) .. 'b')",
    "return string.match(string.rep('a', 40), string.rep('a*', 40) .. 'b')",
    "return string.gsub(string.rep('a', 40), string.rep('a?', 40) .. string.rep('a', 40) .. 'b', '')",
    "for x in string.gmatch(string.rep('a', 40), string.rep('a-', 40) .. 'b') do end",
    "return string.find(string.rep('a', 2000000), string.rep('a', 1000000) .. 'b', 1, true)",
    "table.insert({}, -2147483647, 1)",
    "local t = {} for i = 1, 60 do t = {t, t} end return cjson.encode(t)",
    "local t = {} for i = 1, 15 do t = {t, t, t, t, t, t, t, t, t, t} end return cmsgpack.pack(t)",
    "local t = {} for i = 1, 60 do t = {t, t} end return t",
    "local a = string.rep('a', 10000000) while true do local b = a .. 'x' end",
    "while true do local t = {} for i = 1, 100000 do t[i] = i end table.sort(t, function(a, b) return a > b end) end",
    "while true do pcall(string.find, string.rep('a', 30), string.rep('a-', 30) .. 'b') end",
];

#[test]
fn every_script_can_be_killed() {
    let served = Served::start();
    for script in ENDLESS {
        let mut runner = served.client();
        runner.send(&["EVAL", script, "0"]);
        let ended = std::thread::spawn(move || runner.line());
        let (mut killer, deadline) = (served.client(), Instant::now() + PATIENCE);
        // Other clients are served meanwhile.
        while !ended.is_finished() {
            let reply = killer.ask(&["SCRIPT", "KILL"]);
            assert!(reply == "+OK" || reply.starts_with("-NOTBUSY"), "{script}: {reply}");
            assert!(Instant::now() < deadline, "{script} does not end");
        }
        let reply = ended.join().unwrap();
        assert!(reply.contains("Script killed by user") || reply.contains("memory"), "{script}: {reply}");
        assert_eq!(served.client().ask(&["PING"]), "+PONG");
    }
    served.stop();
}

#[test]
fn script_memory_is_charged_to_the_budget_and_released() {
    const MIB: usize = 1 << 20;
    let served = Served::start();
    let layer = moim_base::MemoryBudget::new(64 * MIB).layer("scripts", 64 * MIB, 64 * MIB);
    assert!(served.node.shared.scripts_memory.set(layer.clone()).is_ok());
    let concat = |bytes: usize| format!("local a = string.rep('a', {bytes}) return #(a .. 'x')");
    let fill = |entries: usize| format!("local t = {{}} for i = 1, {entries} do t[i] = i end return #t");
    let double = |times: usize| format!("local s = 'x' for i = 1, {times} do s = s .. s end return #s");
    // (script, reply; none if it needs more than the available memory)
    let table = [
        (concat(10 * MIB), Some(10 * MIB + 1)),
        (concat(20 * MIB), Some(20 * MIB + 1)),
        (concat(60 * MIB), None),
        (fill(1_000_000), Some(1_000_000)),
        (fill(20_000_000), None),
        (double(24), Some(1 << 24)),
        (double(27), None),
        (concat(10 * MIB), Some(10 * MIB + 1)),
    ];
    for (script, expected) in table {
        let reply = served.client().ask(&["EVAL", &script, "0"]);
        match expected {
            Some(number) => assert_eq!(reply, format!(":{number}"), "{script}"),
            None => {
                assert!(reply.starts_with('-') && reply.contains("not enough memory"), "{script}: {reply}")
            }
        }
        assert_eq!(layer.used(), 0, "{script}");
    }
    // With the budget exhausted, small scripts still run.
    let held = layer.try_take(64 * MIB).unwrap();
    let reply = served.client().ask(&["EVAL", &concat(20 * MIB), "0"]);
    assert!(reply.contains("not enough memory"), "{reply}");
    assert_eq!(served.client().ask(&["EVAL", &concat(MIB), "0"]), format!(":{}", MIB + 1));
    assert_eq!(served.client().ask(&["PING"]), "+PONG");
    drop(held);
    assert_eq!(served.client().ask(&["EVAL", &concat(20 * MIB), "0"]), format!(":{}", 20 * MIB + 1));
    served.stop();
}
