//! Commit gates: a single shard on a journal whose disk the test controls. Checks what is sent before the commit, and
//! what survives a crash.

#![allow(clippy::unwrap_used)] // all of it is test
#![allow(clippy::disallowed_methods)] // real time

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use moim_base::SystemClock;
use moim_base::task::Shutdown;
use moim_journal::{
    Durability, DurableSink, JournalId, JournalOptions, PlainFraming, RealDisk, Store, StoreOptions,
};
use moim_slots::cluster;
use moim_slots::log::LocalLog;
use moim_slots::server::Server;
use moim_slots::shard::{Role, Shard};
use moim_slots::shared::{Shared, hex_id};

struct Sink(Arc<Shard>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        advanced.iter().for_each(|(_, end)| self.0.on_committed(*end));
    }
}

struct Alone {
    store: Store,
    shared: Arc<Shared>,
    shard: Arc<Shard>,
    server: Server,
    shutdown: Shutdown,
    address: SocketAddr,
}

impl Alone {
    fn start(data: &Path) -> Self {
        let clock = Arc::new(SystemClock::new());
        let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
        let store = Store::open(data, Arc::new(RealDisk), clock.clone(), options).unwrap();
        let options = JournalOptions {
            folder: "slots/shard-0".into(),
            framing: Arc::new(PlainFraming),
            durability: Durability::Fsync,
            segment_bytes: 64 << 20,
            tag: 1,
        };
        let journal = store.journal(JournalId { incarnation: 1, part: 0 }, options).unwrap();
        let shared = Arc::new(Shared::new(clock));
        let shutdown = Shutdown::new();
        let server = Server::start(Arc::clone(&shared), 1, shutdown.clone()).unwrap();
        let listener = Server::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let id = hex_id();
        shared.view.store(Arc::new(cluster::standalone(id.clone(), "127.0.0.1".into(), address.port())));
        let shard = Shard::new(0, id, Arc::new(LocalLog::new(journal.clone())), 1, None);
        store.set_sink(Arc::new(Sink(Arc::clone(&shard))));
        shard.on_committed(journal.durable_end());
        server.run_shard(&shard).unwrap();
        server.listen(&shard, listener).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while shard.role() != Role::Primary {
            assert!(Instant::now() < deadline, "the shard does not become primary");
            std::thread::yield_now();
        }
        Self { store, shared, shard, server, shutdown, address }
    }

    fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Client(stream)
    }

    /// Crashes: nothing more reaches the disk.
    fn crash(self) {
        self.shutdown.stop();
        self.server.join();
    }
}

struct Client(TcpStream);

impl Client {
    fn send(&mut self, lines: &str) {
        self.0.write_all(lines.as_bytes()).unwrap();
    }

    fn expect(&mut self, wanted: &str) {
        let mut got = vec![0; wanted.len()];
        self.0.read_exact(&mut got).unwrap();
        assert_eq!(String::from_utf8_lossy(&got), wanted);
    }

    /// Checks that nothing arrives. Earlier requests have completed: their turn also produced a reply that arrived.
    fn expect_nothing(&mut self) {
        self.0.set_nonblocking(true).unwrap();
        let read = self.0.read(&mut [0; 1]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock);
        self.0.set_nonblocking(false).unwrap();
    }
}

#[test]
fn uncommitted_writes_are_never_visible_in_replies() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    let (mut writer, mut reader) = (alone.client(), alone.client());
    // The PING reply shows that the SET after it, in the same turn, has executed.
    writer.send("PING\r\nSET a 1\r\n");
    writer.expect("+PONG\r\n");
    writer.expect_nothing();
    for hidden in ["GET a", "SET a 2 NX", "LPUSH a x", "DBSIZE", "EXISTS a", "TTL a"] {
        let mut reader = alone.client();
        reader.send(&format!("GET other\r\n{hidden}\r\n"));
        reader.expect("$-1\r\n");
        reader.expect_nothing();
    }
    reader.send("GET other\r\nGET a\r\n");
    reader.expect("$-1\r\n");
    reader.expect_nothing();
    while alone.store.pump() {}
    writer.expect("+OK\r\n");
    reader.expect("$1\r\n1\r\n");
    // A deletion is a write like any other.
    writer.send("PING\r\nDEL a\r\n");
    writer.expect("+PONG\r\n");
    reader.send("GET other\r\nGET a\r\n");
    reader.expect("$-1\r\n");
    reader.expect_nothing();
    while alone.store.pump() {}
    writer.expect(":1\r\n");
    reader.expect("$-1\r\n");
    alone.crash();
}

#[test]
fn acknowledged_writes_survive_a_crash_and_others_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    let mut client = alone.client();
    client.send("PING\r\nSET a 1 PX 100000000\r\nRPUSH l x y\r\nMULTI\r\nINCR {a}n\r\nINCR {a}n\r\nEXEC\r\n");
    client.expect("+PONG\r\n");
    while alone.store.pump() {}
    client.expect("+OK\r\n:2\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:1\r\n:2\r\n");
    client.send("PING\r\nSET b 1\r\n");
    client.expect("+PONG\r\n");
    client.expect_nothing();
    alone.crash();

    let alone = Alone::start(dir.path());
    let mut client = alone.client();
    client.send("GET a\r\nGET {a}n\r\nLRANGE l 0 -1\r\nEXISTS b\r\nPERSIST a\r\n");
    while alone.store.pump() {}
    client.expect("$1\r\n1\r\n$1\r\n2\r\n*2\r\n$1\r\nx\r\n$1\r\ny\r\n:0\r\n");
    alone.crash();
}

/// Encodes a command.
fn wire(command: &str) -> String {
    let words: Vec<&str> = command.split(' ').collect();
    let words = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), words.collect::<String>())
}

#[test]
fn pipeline_with_prefetch_replies_as_single_requests() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let long = "k".repeat(300);
    // Prefetched keys change while the batch runs: they are created, moved, deleted and created again with another
    // type.
    let mut script: Vec<(String, String)> = Vec::new();
    let mut say = |command: &str, reply: &str| script.push((wire(command), format!("{reply}\r\n")));
    say("DBSIZE", ":0");
    for round in 0..40 {
        let key = format!("key:{}", round % 7);
        say(&format!("SET {key} {}", "v".repeat(round * 9)), "+OK");
        say(&format!("STRLEN {key}"), &format!(":{}", round * 9));
        say(&format!("SET {long} {round}"), "+OK");
        say(&format!("INCR {long}"), &format!(":{}", round + 1));
        say(&format!("DEL {key}"), ":1");
        say(&format!("GET {key}"), "$-1");
        say(&format!("INCRBY {key} {round}"), &format!(":{round}"));
        say(&format!("GET {key}"), &format!("${}\r\n{round}", round.to_string().len()));
        say(&format!("HSET {key} f v"), "-WRONGTYPE Operation against a key holding the wrong kind of value");
        say(&format!("DEL {key} {long} {key}"), "-CROSSSLOT Keys in request don't hash to the same slot");
        say("NOSUCH a", "-ERR unknown command 'NOSUCH', with args beginning with: 'a' ");
        say(&format!("DEL {key}"), ":1");
    }
    script.insert(50, ("PING\r\n".into(), "+PONG\r\n".into()));
    script.insert(70, ("\r\nECHO 'a b'\r\n".into(), "$3\r\na b\r\n".into()));
    let (asked, wanted): (String, String) = script.into_iter().unzip();
    for piece in [asked.len(), 1_000, 77] {
        let mut client = alone.client();
        client.send(&wire(&format!("DEL {long}")));
        client.expect(if piece == asked.len() { ":0\r\n" } else { ":1\r\n" });
        std::thread::scope(|scope| {
            let mut sender = Client(client.0.try_clone().unwrap());
            let asked = asked.as_bytes();
            scope.spawn(move || asked.chunks(piece).for_each(|some| sender.0.write_all(some).unwrap()));
            client.expect(&wanted);
        });
    }
    alone.store.close().unwrap();
    alone.crash();
}

/// A command whose arguments may contain spaces.
fn words(words: &[&str]) -> String {
    let parts = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), parts.collect::<String>())
}

#[test]
fn transaction_above_maxmemory_is_rejected_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut client, mut other) = (alone.client(), alone.client());
    client.send("SET x 0\r\nMULTI\r\nSET x 1\r\nGET x\r\n");
    client.expect("+OK\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n");
    other.send("CONFIG SET maxmemory 1\r\n");
    other.expect("+OK\r\n");
    client.send("EXEC\r\nGET x\r\nMULTI\r\nGET x\r\nEXEC\r\n");
    client.expect(
        "-EXECABORT Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'.\r\n",
    );
    client.expect("$1\r\n0\r\n+OK\r\n+QUEUED\r\n*1\r\n$1\r\n0\r\n");
    alone.crash();
}

#[test]
fn client_pause_write_allows_no_writes_scripts() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut client, mut writer) = (alone.client(), alone.client());
    let library = "#!lua name=l\nredis.register_function{function_name='f', callback=function() return 7 end, flags={'no-writes'}}";
    client.send(&words(&["FUNCTION", "LOAD", library]));
    client.expect("$1\r\nl\r\n");
    client.send("SET gone v PX 1\r\nCLIENT PAUSE 600000 WRITE\r\n");
    client.expect("+OK\r\n+OK\r\n");
    let reads = "#!lua flags=no-writes\nreturn 6";
    client.send(&words(&["EVAL", reads, "0"]));
    client.send(&words(&["MULTI"]));
    client.send(&words(&["EVAL", reads, "0"]));
    client.send(&words(&["EXEC"]));
    client.send(&words(&["FCALL", "F", "0"]));
    client.expect(":6\r\n+OK\r\n+QUEUED\r\n*1\r\n:6\r\n:7\r\n");
    // Invalid requests are rejected immediately; writes wait.
    writer.send("SET only-a-key\r\n");
    writer.expect("-ERR wrong number of arguments for 'set' command\r\n");
    writer.send(&words(&["EVAL", "return 8", "0"]));
    // Keys expire logically, but nothing is deleted.
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        client.send("GET gone\r\n");
        let mut first = [0; 2];
        client.0.read_exact(&mut first).unwrap();
        if &first == b"$-" {
            client.expect("1\r\n");
            break;
        }
        client.expect("\r\nv\r\n");
        assert!(Instant::now() < deadline, "the key stays");
    }
    client.send("DBSIZE\r\n");
    client.expect(":1\r\n");
    writer.expect_nothing();
    client.send("CLIENT UNPAUSE\r\nGET gone\r\nDBSIZE\r\n");
    client.expect("+OK\r\n$-1\r\n:0\r\n");
    writer.expect(":8\r\n");
    alone.crash();
}

#[test]
fn long_function_is_reported_and_killed_by_function_kill() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut client, mut runner) = (alone.client(), alone.client());
    let library = "#!lua name=l\nredis.register_function('f', function() while true do end end)";
    client.send(&words(&["FUNCTION", "LOAD", library]));
    client.expect("$1\r\nl\r\n");
    client.send("CONFIG SET busy-reply-threshold 1\r\n");
    client.expect("+OK\r\n");
    runner.send(&words(&["FCALL", "f", "0"]));
    let busy =
        "-BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.\r\n";
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        client.send("PING\r\n");
        let mut first = [0; 1];
        client.0.read_exact(&mut first).unwrap();
        if first[0] == b'-' {
            client.expect(&busy[1..]);
            break;
        }
        client.expect("PONG\r\n");
        assert!(Instant::now() < deadline, "no BUSY reply");
    }
    client.send("SCRIPT KILL\r\nFUNCTION STATS\r\n");
    client.expect(busy);
    client.expect("*4\r\n$14\r\nrunning_script\r\n*6\r\n$4\r\nname\r\n$1\r\nf\r\n$7\r\ncommand\r\n*3\r\n$5\r\nFCALL\r\n$1\r\nf\r\n$1\r\n0\r\n");
    let mut killer = alone.client();
    killer.send("FUNCTION KILL\r\n");
    killer.expect("+OK\r\n");
    runner.expect("-ERR Script killed by user with SCRIPT KILL.");
    alone.crash();
}

/// Polls until the shard replies BUSY.
fn until_busy(client: &mut Client) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        client.send("PING\r\n");
        if until(client, "\r\n").starts_with("-BUSY") {
            return;
        }
        assert!(Instant::now() < deadline, "no BUSY reply");
    }
}

#[test]
fn script_kill_works_repeatedly() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut client, mut runner) = (alone.client(), alone.client());
    client.send("CONFIG SET busy-reply-threshold 1\r\n");
    client.expect("+OK\r\n");
    for _ in 0..3 {
        runner.send(&words(&["EVAL", "while true do pcall(function() while true do end end) end", "0"]));
        until_busy(&mut client);
        client.send("SCRIPT KILL\r\n");
        client.expect("+OK\r\n");
        assert!(until(&mut runner, "\r\n").starts_with("-ERR Script killed by user"));
        // The interpreter is unchanged.
        runner.send(&words(&[
            "EVAL",
            "local sum = 0 for n = 1, 100000 do sum = sum + n end return sum",
            "0",
        ]));
        runner.expect(":5000050000\r\n");
    }
    alone.crash();
}

/// Reads until `end`, which may be preceded by out-of-band messages.
fn until(client: &mut Client, end: &str) -> String {
    let mut got = Vec::new();
    while !got.ends_with(end.as_bytes()) {
        let mut byte = [0; 1];
        client.0.read_exact(&mut byte).unwrap();
        got.push(byte[0]);
    }
    String::from_utf8_lossy(&got).into_owned()
}

#[test]
fn tracking_invalidations_are_sent_after_commit() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    let (mut reader, mut writer) = (alone.client(), alone.client());
    reader.send("HELLO 3\r\nCLIENT TRACKING ON\r\n");
    until(&mut reader, "+OK\r\n");
    reader.send("GET a\r\nGET b\r\n");
    reader.expect("_\r\n_\r\n");
    writer.send("PING\r\nSET a 1\r\n");
    writer.expect("+PONG\r\n");
    // The write is executed and not committed.
    reader.expect_nothing();
    while alone.store.pump() {}
    reader.expect(">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n");
    writer.expect("+OK\r\n");
    // One invalidation per read: the key must be read again.
    writer.send("PING\r\nSET a 2\r\nFLUSHALL\r\n");
    writer.expect("+PONG\r\n");
    while alone.store.pump() {}
    writer.expect("+OK\r\n+OK\r\n");
    reader.expect(">2\r\n$10\r\ninvalidate\r\n_\r\n");
    reader.send("CLIENT TRACKING OFF\r\nGET a\r\nCLIENT TRACKINGINFO\r\n");
    let said = until(&mut reader, "prefixes\r\n*0\r\n");
    assert!(said.starts_with("+OK\r\n_\r\n%3\r\n$5\r\nflags\r\n~1\r\n$3\r\noff\r\n"), "{said}");
    alone.crash();
}

#[test]
fn deeply_nested_script_values_do_not_crash() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let mut client = alone.client();
    let json =
        "local deep = cjson.decode(string.rep('[',1000)..string.rep(']',1000)) return #cjson.encode(deep)";
    let endless = "local a = {} local b = {a} a[1] = b return a";
    for _ in 0..3 {
        client.send(&words(&["EVAL", json, "0"]));
        client.expect(":2000\r\n");
        client.send(&words(&["EVAL", endless, "0"]));
        until(&mut client, "-ERR reached lua stack limit\r\n");
    }
    alone.crash();
}

#[test]
fn tracking_optin_and_optout_limit_tracked_reads() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut reader, mut writer) = (alone.client(), alone.client());
    reader.send("HELLO 3\r\nCLIENT TRACKING ON OPTIN\r\n");
    until(&mut reader, "+OK\r\n");
    reader.send("GET a\r\nCLIENT CACHING YES\r\nGET b\r\nGET c\r\nCLIENT CACHING NO\r\n");
    reader.expect("_\r\n+OK\r\n_\r\n_\r\n");
    reader.expect("-ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.\r\n");
    // A read inside a script is tracked for the caller.
    reader.send("CLIENT CACHING YES\r\n");
    reader.send(&words(&["EVAL", "return redis.call('get', KEYS[1])", "1", "d"]));
    reader.expect("+OK\r\n_\r\n");
    for key in ["a", "c", "b", "d"] {
        writer.send(&format!("SET {key} 1\r\n"));
        writer.expect("+OK\r\n");
    }
    reader.expect(">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nb\r\n");
    reader.expect(">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nd\r\n");
    alone.crash();
}

#[test]
fn formerly_quick_script_does_not_block_its_event_loop() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut client, mut runner) = (alone.client(), alone.client());
    let script = "while ARGV[1] == 'on' do pcall(function() while true do end end) end return 1";
    for _ in 0..50 {
        runner.send(&words(&["EVAL", script, "0", "once"]));
        runner.expect(":1\r\n");
    }
    client.send("CONFIG SET busy-reply-threshold 1\r\n");
    client.expect("+OK\r\n");
    runner.send(&words(&["EVAL", script, "0", "on"]));
    until_busy(&mut client);
    client.send("SCRIPT KILL\r\n");
    client.expect("+OK\r\n");
    assert!(until(&mut runner, "\r\n").starts_with("-ERR Script killed by user"));
    // A transaction cannot be offloaded, and on its event loop no client could kill it.
    runner.send("MULTI\r\nINCR n\r\n");
    runner.send(&words(&["EVAL", script, "0", "on"]));
    runner.send("INCR n\r\nEXEC\r\n");
    runner.expect("+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n*3\r\n:1\r\n-ERR Script stopped: ");
    assert!(until(&mut runner, "\r\n").ends_with("on @user_script\r\n"));
    runner.expect(":2\r\n");
    alone.crash();
}

#[test]
fn monitor_receives_commands_of_other_clients() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut monitor, mut client) = (alone.client(), alone.client());
    monitor.send("MONITOR\r\n");
    monitor.expect("+OK\r\n");
    client.send("MULTI\r\nSET a 1\r\nEXEC\r\nNOSUCH\r\nCONFIG GET port\r\n");
    client.send(&words(&["EVAL", "return redis.call('get', KEYS[1])", "1", "a"]));
    client.send("ECHO end\r\n");
    until(&mut client, "end\r\n");
    let seen = until(&mut monitor, "\"end\"\r\n");
    let commands: Vec<&str> =
        seen.lines().filter_map(|line| line.split_once("] ")).map(|(_, shown)| shown).collect();
    let script = "\"EVAL\" \"return redis.call('get', KEYS[1])\" \"1\" \"a\"";
    assert_eq!(
        commands,
        ["\"MULTI\"", "\"SET\" \"a\" \"1\"", "\"EXEC\"", script, "\"get\" \"a\"", "\"ECHO\" \"end\""]
    );
    assert!(seen.contains(" [0 lua] \"get\""), "{seen}");
    monitor.send("RESET\r\n");
    until(&mut monitor, "+RESET\r\n");
    alone.crash();
}

#[test]
fn value_larger_than_a_frame_survives_a_restart() {
    const LEN: usize = 257 << 20;
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let mut client = alone.client();
    client.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.send(&format!("*3\r\n$3\r\nSET\r\n$3\r\nbig\r\n${LEN}\r\n"));
    let piece = vec![b'v'; 1 << 20];
    for _ in 0..LEN >> 20 {
        client.0.write_all(&piece).unwrap();
    }
    client.send("\r\n");
    client.expect("+OK\r\n");
    alone.store.close().unwrap();
    alone.crash();

    let alone = Alone::start(dir.path());
    let mut client = alone.client();
    client.send("STRLEN big\r\n");
    client.expect(&format!(":{LEN}\r\n"));
    alone.crash();
}

#[test]
fn blocking_moves_time_out_with_null_array() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let mut client = alone.client();
    for command in ["BLMOVE {a}1 {a}2 LEFT RIGHT 0.01", "BRPOPLPUSH {a}1 {a}2 0.01", "BLPOP {a}1 0.01"] {
        client.send(&format!("{command}\r\n"));
        client.expect("*-1\r\n");
    }
    // Where blocking is not allowed, the commands reply as LMOVE does.
    client
        .send("MULTI\r\nBLMOVE {a}1 {a}2 LEFT RIGHT 0\r\nBRPOPLPUSH {a}1 {a}2 0\r\nBLPOP {a}1 0\r\nEXEC\r\n");
    client.expect("+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n*3\r\n$-1\r\n$-1\r\n*-1\r\n");
    // CLIENT UNBLOCK replies as a timeout does.
    client.send("CLIENT ID\r\n");
    client.expect(":1\r\n");
    client.send("BLMOVE {a}1 {a}2 LEFT RIGHT 0\r\n");
    let mut other = alone.client();
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        other.send("CLIENT UNBLOCK 1\r\n");
        let mut reply = [0; 4];
        other.0.read_exact(&mut reply).unwrap();
        if &reply == b":1\r\n" {
            break;
        }
        assert!(Instant::now() < deadline, "the client does not block");
    }
    client.expect("*-1\r\n");
    alone.crash();
}

#[test]
fn an_unknown_subcommand_aborts_the_transaction() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let aborted = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    for container in
        ["OBJECT", "CONFIG", "XGROUP", "XINFO", "CLIENT", "SCRIPT", "MEMORY", "FUNCTION", "CLUSTER"]
    {
        let mut client = alone.client();
        client.send(&format!("MULTI\r\n{container} foo k\r\nEXEC\r\n"));
        client.expect("+OK\r\n");
        client.expect(&format!("-ERR unknown subcommand 'foo'. Try {container} HELP.\r\n"));
        client.expect(aborted);
    }
    let mut client = alone.client();
    client.send("MULTI\r\nOBJECT ENCODING\r\nEXEC\r\n");
    client.expect("+OK\r\n-ERR wrong number of arguments for 'object|encoding' command\r\n");
    client.expect(aborted);
    client.send("OBJECT\r\n");
    client.expect("-ERR wrong number of arguments for 'object' command\r\n");
    client.send(&wire("EVAL return(redis.pcall('object','foo','k').err) 0"));
    client.expect("$44\r\nERR Unknown Redis command called from script\r\n");
    alone.crash();
}

#[test]
fn request_with_more_than_a_million_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let mut client = alone.client();
    client.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut request = String::from("*1100002\r\n$5\r\nRPUSH\r\n$1\r\nl\r\n");
    (0..1_100_000).for_each(|_| request.push_str("$1\r\nx\r\n"));
    client.send(&request);
    client.expect(":1100000\r\n");
    client.send("LLEN l\r\n");
    client.expect(":1100000\r\n");
    alone.crash();
}

#[test]
fn client_leaves_subscriber_mode_when_its_last_sharded_channel_migrates() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let mut client = alone.client();
    client.send("SSUBSCRIBE one two\r\n");
    client.send("GET a\r\n");
    client.expect("-CROSSSLOT Keys in request don't hash to the same slot\r\n$-1\r\n");
    client.send("SSUBSCRIBE {c}one\r\nSSUBSCRIBE {c}two\r\nGET a\r\n");
    client.expect("*3\r\n$10\r\nssubscribe\r\n$6\r\n{c}one\r\n:1\r\n");
    client.expect("*3\r\n$10\r\nssubscribe\r\n$6\r\n{c}two\r\n:2\r\n");
    client.expect("-ERR Can't execute 'get': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this context\r\n");
    alone.server.shared().pubsub.unsubscribe_slots(0, |channel| channel == b"{c}one");
    client.expect("*3\r\n$12\r\nsunsubscribe\r\n$6\r\n{c}one\r\n:1\r\n");
    alone.server.shared().pubsub.unsubscribe_slots(0, |_| true);
    client.expect("*3\r\n$12\r\nsunsubscribe\r\n$6\r\n{c}two\r\n:0\r\n");
    client.send("GET a\r\n");
    client.expect("$-1\r\n");
    alone.crash();
}

#[test]
fn slow_subscriber_is_disconnected_at_its_output_buffer_limit() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let (mut subscriber, mut publisher) = (alone.client(), alone.client());
    publisher.send(&wire("CONFIG SET client-output-buffer-limit").replace("*3", "*4"));
    publisher.send("$15\r\npubsub 1mb 0 60\r\n");
    publisher.expect("+OK\r\n");
    subscriber.send("SUBSCRIBE c\r\n");
    subscriber.expect("*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
    let message = wire(&format!("PUBLISH c {}", "m".repeat(100 << 10)));
    // Socket buffers hold only a few megabytes of it.
    let sent = (0..500).position(|_| {
        publisher.send(&message);
        let mut reply = [0; 4];
        publisher.0.read_exact(&mut reply).unwrap();
        &reply == b":0\r\n"
    });
    assert!(sent.is_some(), "50 MB wait for a client that reads nothing");
    alone.crash();
}

#[test]
fn query_buffers_of_all_clients_stay_within_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let budget = moim_base::memory::MemoryBudget::new(16 << 20).layer("buffers", 16 << 20, 16 << 20);
    assert!(alone.server.shared().buffers.set(budget.clone()).is_ok());
    let value = "v".repeat(8 << 20);
    let request = wire(&format!("SET k {value}"));
    // Each client leaves its request unfinished: together they need four times the budget.
    let unfinished: Vec<_> = (0..8)
        .map(|_| {
            let (mut client, part) = (alone.client(), request[..request.len() - 10].to_owned());
            std::thread::spawn(move || {
                let sent = client.0.write_all(part.as_bytes());
                // Blocks until the server closes the connection.
                let read = client.0.read(&mut [0; 1]);
                sent.is_err() || !matches!(read, Err(error) if error.kind() == ErrorKind::WouldBlock)
            })
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(30);
    while unfinished.iter().filter(|client| client.is_finished()).count() < 6 {
        assert!(budget.used() <= 16 << 20);
        assert!(Instant::now() < deadline, "clients without budget are not disconnected");
        // Other clients are served meanwhile.
        let mut other = alone.client();
        other.send("PING\r\n");
        other.expect("+PONG\r\n");
    }
    drop(unfinished);
    alone.crash();
}

#[test]
fn channel_names_and_watched_keys_are_charged_to_the_budget() {
    const NAME: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let budget = moim_base::memory::MemoryBudget::new(64 << 20).layer("buffers", 64 << 20, 64 << 20);
    assert!(alone.server.shared().buffers.set(budget.clone()).is_ok());
    let wait_for = |command: &str, holds: &dyn Fn(usize) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds(budget.used()) {
            assert!(Instant::now() < deadline, "{command}: {} bytes are counted", budget.used());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // Both the session and the shared registry store each name.
    for (command, reply) in [("SUBSCRIBE", NAME), ("PSUBSCRIBE", NAME), ("WATCH", 0)] {
        let mut client = alone.client();
        for number in 0..12 {
            client.send(&wire(&format!("{command} {number:02}{}", "n".repeat(NAME - 2))));
            let mut answered = vec![0; reply + 5];
            client.0.read_exact(&mut answered).unwrap();
        }
        wait_for(command, &|used| used >= 2 * 12 * NAME);
        drop(client);
        wait_for(command, &|used| used == 0);
    }
    alone.crash();
}

#[test]
fn idle_client_is_disconnected_after_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    alone.store.start();
    let mut client = alone.client();
    client.send("CONFIG SET timeout 1\r\n");
    client.expect("+OK\r\n");
    assert_eq!(client.0.read(&mut [0; 1]).unwrap(), 0, "the server closes the connection");
    alone.crash();
}

#[test]
fn isolated_node_replies_clusterdown_and_disconnects_waiting_clients() {
    let dir = tempfile::tempdir().unwrap();
    let alone = Alone::start(dir.path());
    let (mut waiting, mut client) = (alone.client(), alone.client());
    // The serving right has expired: the reply waits for a new one.
    alone.shard.set_serving_right_until(1);
    waiting.send("GET a\r\n");
    client.send("GET a\r\n");
    for (index, stream) in [&mut waiting, &mut client].into_iter().enumerate() {
        stream.0.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(stream.0.read(&mut [0; 1]).is_err(), "client {index} receives a reply without serving right");
        stream.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    }
    alone.shared.isolated.store(true, Ordering::Release);
    for stream in [&mut waiting, &mut client] {
        assert!(matches!(stream.0.read(&mut [0; 1]), Ok(0)), "a client that waits is disconnected");
    }
    // No command with keys runs from now on, so the error is definite; other replies wait for a new serving right.
    let mut client = alone.client();
    client.send("SET a 1\r\nMULTI\r\nSET a 1\r\nEXEC\r\n");
    alone.shard.set_serving_right_until(u64::MAX);
    client.expect("-CLUSTERDOWN The cluster is down\r\n+OK\r\n");
    client.expect("-CLUSTERDOWN The cluster is down\r\n-EXECABORT ");
    let mut client = alone.client();
    client.send("PING\r\nCLUSTER INFO\r\n");
    client.expect("+PONG\r\n");
    assert!(until(&mut client, "\r\n\r\n").contains("cluster_state:fail"));
    alone.shared.isolated.store(false, Ordering::Release);
    let mut client = alone.client();
    client.send("GET a\r\nCLUSTER INFO\r\n");
    client.expect("$-1\r\n");
    assert!(until(&mut client, "\r\n\r\n").contains("cluster_state:ok"));
    alone.crash();
}
