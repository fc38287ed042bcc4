//! The behaviours of the client, one test each, against fake servers.

#![allow(clippy::unwrap_used)] // all of it is test

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_slot_client::{
    Builder, Client, Delivery, Error, Event, ReadFrom, Script, Slot, Trigger, Value, cmd,
};
use tokio::time::{Instant, timeout};

mod fake;

use fake::{Action, Fake, error, integer, key_in};

const HALVES: [Option<(u16, u16)>; 2] = [Some((0, 8191)), Some((8192, 16383))];

/// A client that refreshes only on triggers, without delay.
fn without_periodic_refresh(fake: &Fake) -> Builder {
    Client::builder(&fake.seed(0)).refresh_every(None).timeout(Duration::from_secs(5))
}

/// A client that never refreshes.
fn without_refresh(fake: &Fake) -> Builder {
    without_periodic_refresh(fake).refresh_at_most_every(Duration::from_secs(3600))
}

async fn event(
    events: &mut tokio::sync::broadcast::Receiver<Event>,
    wanted: impl Fn(&Event) -> bool,
) -> Event {
    let find = async {
        loop {
            let event = events.recv().await.unwrap();
            if wanted(&event) {
                return event;
            }
        }
    };
    timeout(Duration::from_secs(10), find).await.expect("the event arrives")
}

#[tokio::test]
async fn first_key_and_its_hash_tag_determine_the_node() {
    let fake = Fake::start(&HALVES, |_, _| None).await;
    let client = without_refresh(&fake).connect().await.unwrap();
    let (low, high) = (key_in(0, 8191), key_in(8192, 16383));
    for (command, node) in [
        (cmd("SET").arg((&low, 1)), 0),
        (cmd("SET").arg((&high, 1)), 1),
        (cmd("SET").arg((format!("x{{{high}}}y"), 1)), 1),
        (cmd("EVAL").arg(("return 1", 1, &high)), 1),
    ] {
        fake.clear_log();
        client.run::<()>(command.clone()).await.unwrap();
        assert_eq!(fake.log().iter().map(|(node, _)| *node).collect::<Vec<_>>(), [node], "{command:?}");
    }
    assert_eq!(client.uncovered_slots(), 0);
}

#[tokio::test]
async fn replies_before_a_disconnect_reach_all_callers() {
    const CALLERS: usize = 300;
    let mut received = 0;
    let fake = Fake::start(&[Some((0, 16383))], move |_, args| {
        if args[0] != "INCR" {
            return None;
        }
        // No reply until all commands arrived; then all replies at once, and a disconnect.
        received += 1;
        let all = || (1..=CALLERS).map(|value| format!(":{value}\r\n")).collect();
        Some(if received < CALLERS { Action::Reply(String::new()) } else { Action::ReplyAndClose(all()) })
    })
    .await;
    let client = without_refresh(&fake).connect().await.unwrap();
    let one = |_| client.run::<i64>(cmd("INCR").arg("k"));
    let mut values = futures_util::future::try_join_all((0..CALLERS).map(one)).await.unwrap();
    values.sort_unstable();
    assert_eq!(values, (1..=CALLERS as i64).collect::<Vec<_>>());
}

#[tokio::test]
async fn moved_is_followed_and_patches_the_slot() {
    let low = key_in(0, 8191);
    let slot = Slot::of(low.as_bytes());
    let ports = Arc::new(Mutex::new(Vec::new()));
    let known = ports.clone();
    let fake = Fake::start(&HALVES, move |node, args| {
        // An empty host is the host of the replying node.
        (node == 0 && args[0] == "GET")
            .then(|| error(format!("MOVED {slot} :{}", known.lock().unwrap()[1])))
            .flatten()
    })
    .await;
    ports.lock().unwrap().clone_from(&fake.ports);
    let client = without_refresh(&fake).connect().await.unwrap();
    fake.clear_log();
    client.get::<Value>(&low).await.unwrap();
    client.get::<Value>(&low).await.unwrap();
    let nodes: Vec<_> = fake.log().into_iter().map(|(node, _)| node).collect();
    assert_eq!(nodes, [0, 1, 1], "the second command is routed without a refresh");
    assert_eq!(client.primary_of(&low).unwrap().port, fake.ports[1]);
    assert_eq!(fake.topology_queries(), 0);
}

#[tokio::test]
async fn redirections_to_unknown_nodes_are_followed() {
    let stranger = Fake::start(&[Some((0, 16383))], |_, _| None).await;
    let to = stranger.ports[0];
    let fake = Fake::start(&[Some((0, 16383))], move |_, args| {
        (args[0] == "GET")
            .then(|| error(format!("MOVED {} 127.0.0.1:{to}", Slot::of(args[1].as_bytes()))))
            .flatten()
    })
    .await;
    let client = without_refresh(&fake).connect().await.unwrap();
    client.get::<Value>("k").await.unwrap();
    client.get::<Value>("k").await.unwrap();
    assert_eq!(stranger.log().len(), 2);
    assert_eq!(fake.log().len(), 1);
}

#[tokio::test]
async fn redirection_loop_ends() {
    let ports = Arc::new(Mutex::new(Vec::<u16>::new()));
    let known = ports.clone();
    let fake = Fake::start(&HALVES, move |node, args| {
        let to = known.lock().unwrap().get(1 - node).copied();
        (args[0] == "GET").then(|| error(format!("MOVED 0 127.0.0.1:{}", to.unwrap_or_default()))).flatten()
    })
    .await;
    ports.lock().unwrap().clone_from(&fake.ports);
    let client = without_refresh(&fake).timeout(Duration::from_millis(400)).connect().await.unwrap();
    for attempt in 1..=5 {
        let (start, before) = (Instant::now(), fake.log().len());
        let ended = client.get::<Value>("k").await;
        assert!(start.elapsed() < Duration::from_millis(800), "{:?}", start.elapsed());
        let sent = fake.log().len() - before;
        assert!(sent <= 12 * 6, "five redirections, then a backoff: {sent}");
        match ended {
            Err(Error::TooManyRedirects(_)) => {
                assert!(sent.is_multiple_of(6), "five redirections, then a backoff: {sent}");
                return;
            }
            // The deadline came between a command and its reply, not during a backoff: the outcome is
            // unknown then.
            Err(Error::Timeout { .. }) => assert!(attempt < 5, "it never ended in a backoff"),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn temporary_redirection_loop_is_retried() {
    let ports = Arc::new(Mutex::new(Vec::<u16>::new()));
    let known = ports.clone();
    let count = AtomicUsize::new(0);
    let fake = Fake::start(&HALVES, move |node, args| {
        let to = known.lock().unwrap().get(1 - node).copied();
        let redirects_back = args[0] == "GET" && count.fetch_add(1, Ordering::Relaxed) < 20;
        redirects_back.then(|| error(format!("MOVED 0 127.0.0.1:{}", to.unwrap_or_default()))).flatten()
    })
    .await;
    ports.lock().unwrap().clone_from(&fake.ports);
    let client = without_refresh(&fake).connect().await.unwrap();
    client.get::<Value>("k").await.unwrap();
    assert_eq!(fake.log().len(), 21);
}

#[tokio::test]
async fn ask_is_followed_once_as_one_unit() {
    let low = key_in(0, 8191);
    let ports = Arc::new(Mutex::new(Vec::<u16>::new()));
    let known = ports.clone();
    let fake = Fake::start(&HALVES, move |node, args| {
        (node == 0 && args[0] == "GET")
            .then(|| error(format!("ASK 1 127.0.0.1:{}", known.lock().unwrap()[1])))
            .flatten()
    })
    .await;
    ports.lock().unwrap().clone_from(&fake.ports);
    let client = without_refresh(&fake).connect().await.unwrap();
    // Concurrent commands to the target: nothing may come between ASKING and its command.
    let high = key_in(8192, 16383);
    let (received, _) = tokio::join!(client.get::<Value>(&low), async {
        for n in 0..50 {
            client.set(&high, n).await.unwrap();
        }
    });
    received.unwrap();
    let at_target: Vec<_> =
        fake.log().into_iter().filter(|(node, _)| *node == 1).map(|(_, received)| received).collect();
    let asking = at_target.iter().position(|received| received == "ASKING").expect("ASKING was sent");
    assert_eq!(at_target[asking + 1], format!("GET {low}"));
    fake.clear_log();
    client.get::<Value>(&low).await.unwrap();
    assert_eq!(fake.log()[0].0, 0, "ASK does not move the slot");
}

#[tokio::test]
async fn keys_of_many_slots_are_split_and_merged() {
    let fake = Fake::start(&HALVES, |_, args| match args[0].as_str() {
        "MGET" => {
            let values: String = args[1..].iter().map(|key| format!("${}\r\n{key}\r\n", key.len())).collect();
            Some(Action::Reply(format!("*{}\r\n{values}", args.len() - 1)))
        }
        "DEL" | "EXISTS" => integer(args.len() as i64 - 1),
        "DBSIZE" => integer(21),
        "KEYS" => Some(Action::Reply("*1\r\n$1\r\nk\r\n".to_owned())),
        _ => None,
    })
    .await;
    let client = without_refresh(&fake).connect().await.unwrap();
    let keys: Vec<String> = (0..100).map(|n| format!("key{n}")).collect();
    assert_eq!(client.mget::<Vec<String>>(&keys).await.unwrap(), keys, "in the order of the keys");
    assert_eq!(client.del(&keys).await.unwrap(), 100);
    let pairs: Vec<_> = keys.iter().map(|key| (key, 1)).collect();
    client.mset(pairs).await.unwrap();
    assert_eq!(client.dbsize().await.unwrap(), 42);
    assert_eq!(client.keys::<Vec<String>>("*").await.unwrap(), ["k", "k"]);
    for (_, received) in fake.log().iter().filter(|(_, received)| received.starts_with("MSET")) {
        let slots: Vec<_> =
            received.split(' ').skip(1).step_by(2).map(|key| Slot::of(key.as_bytes())).collect();
        assert!(slots.windows(2).all(|pair| pair[0] == pair[1]), "{received}");
    }
    fake.clear_log();
    client.mget::<Vec<String>>(["{a}1", "{a}2"]).await.unwrap();
    assert_eq!(fake.log().len(), 1, "one slot is one command");
}

#[tokio::test]
async fn scripts_are_loaded_on_all_nodes_and_noscript_falls_back_to_eval() {
    let fake = Fake::start(&[Some((0, 16383)), None], |_, args| match args[0].as_str() {
        "EVALSHA" => error("NOSCRIPT No matching script. Please use EVAL."),
        "EVAL" => integer(7),
        _ => None,
    })
    .await;
    let client = without_refresh(&fake).connect().await.unwrap();
    let script = Script::new("return 7");
    client.load_script(&script).await.unwrap();
    let mut nodes: Vec<_> = fake.log().into_iter().map(|(node, _)| node).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, [0, 1]);
    assert_eq!(client.eval::<i64, _>(&script, ["k"], ("a", 1)).await.unwrap(), 7);
    assert_eq!(fake.log().last().unwrap().1, "EVAL return 7 1 k a 1");
}

#[tokio::test]
async fn replicas_are_read_after_readonly() {
    let fake = Fake::start(&[Some((0, 16383)), None], |_, _| None).await;
    let client = without_refresh(&fake).read_from(ReadFrom::Replica).connect().await.unwrap();
    fake.clear_log();
    client.get::<Value>("k").await.unwrap();
    client.set("k", "v").await.unwrap();
    client.clone().read_from(ReadFrom::Primary).get::<Value>("k").await.unwrap();
    let log = fake.log();
    let log: Vec<_> = log.iter().map(|(node, received)| (*node, received.as_str())).collect();
    assert_eq!(log, [(1, "READONLY"), (1, "GET k"), (0, "SET k v"), (0, "GET k")]);
}

#[tokio::test]
async fn unreachable_replica_is_not_read_from() {
    let fake = Fake::start(&[Some((0, 16383)), None], |node, _| (node == 1).then_some(Action::Close)).await;
    let client = without_refresh(&fake).read_from(ReadFrom::ReplicaPreferred).connect().await.unwrap();
    for _ in 0..5 {
        client.get::<Value>("k").await.unwrap();
    }
    assert!(fake.log().iter().any(|(node, received)| *node == 0 && received == "GET k"));
}

#[tokio::test]
async fn redirection_storm_causes_one_refresh() {
    let ports = Arc::new(Mutex::new(Vec::<u16>::new()));
    let known = ports.clone();
    let fake = Fake::start(&HALVES, move |node, args| {
        let to = known.lock().unwrap().get(1).copied()?;
        let slot = Slot::of(args.get(1)?.as_bytes());
        (node == 0 && args[0] == "SET").then(|| error(format!("MOVED {slot} 127.0.0.1:{to}"))).flatten()
    })
    .await;
    let client = without_periodic_refresh(&fake)
        .refresh_at_most_every(Duration::from_millis(300))
        .connect()
        .await
        .unwrap();
    ports.lock().unwrap().clone_from(&fake.ports);
    fake.set_owners(&[None, Some((0, 16383))]);
    fake.clear_log();
    let mut events = client.events();
    let mut pipeline = client.pipeline();
    for n in 0..200 {
        pipeline.set(format!("key{n}"), n);
    }
    assert!(pipeline.run().await.iter().all(Result::is_ok));
    let started = event(&mut events, |event| matches!(event, Event::RefreshStarted(_))).await;
    assert_eq!(started, Event::RefreshStarted(vec![Trigger::MovedRedirect]));
    event(&mut events, |event| matches!(event, Event::TopologyChanged { .. })).await;
    assert!(
        fake.topology_queries() <= 4,
        "two nodes, two refreshes at the most: {}",
        fake.topology_queries()
    );
    assert_eq!(client.primary_of("anything").unwrap().port, fake.ports[1]);
}

#[tokio::test]
async fn discovered_nodes_are_queried_and_seeds_are_the_last_resort() {
    // The seed lists two other nodes; the first load queries them too.
    let fake = Fake::start(&[Some((0, 16383)), None, None], |_, _| None).await;
    let client = without_periodic_refresh(&fake).connect().await.unwrap();
    assert_eq!((fake.topology_queries(), client.nodes().len()), (3, 3));
    // All known nodes are unreachable; the seed's name resolves to another node.
    let unreachable = Fake::start(&[Some((0, 16383))], |_, _| Some(Action::Close)).await;
    let client = Client::builder(&unreachable.seed(0)).seed(&fake.seed(1)).connect().await.unwrap();
    assert_eq!(client.nodes().len(), 3);
}

#[tokio::test]
async fn temporary_errors_are_retried() {
    for code in [
        "TRYAGAIN Multiple keys",
        "CLUSTERDOWN Hash slot not served",
        "LOADING Redis is loading",
        "READONLY no",
    ] {
        let count = AtomicUsize::new(0);
        let fake = Fake::start(&[Some((0, 16383))], move |_, args| {
            (args[0] == "INCR" && count.fetch_add(1, Ordering::Relaxed) < 3).then(|| error(code)).flatten()
        })
        .await;
        let client = without_refresh(&fake).delivery(Delivery::AtMostOnce).connect().await.unwrap();
        client.run::<()>(cmd("INCR").arg("k")).await.unwrap();
        assert_eq!(fake.log().len(), 4, "{code}");
    }
}

#[tokio::test]
async fn command_ends_by_its_deadline_while_the_cluster_is_down() {
    let fake = Fake::start(&[Some((0, 16383))], |_, args| {
        (args[0] == "GET").then(|| error("CLUSTERDOWN The cluster is down")).flatten()
    })
    .await;
    let client = without_refresh(&fake).timeout(Duration::from_millis(300)).connect().await.unwrap();
    let start = Instant::now();
    let result = client.get::<Value>("k").await;
    assert!(
        matches!(&result, Err(error @ Error::Unavailable { reason, .. }) if reason.contains("CLUSTERDOWN") && error.happened_not()),
        "{result:?}"
    );
    assert!(start.elapsed() < Duration::from_millis(600), "{:?}", start.elapsed());
}

#[tokio::test]
async fn hung_node_is_detected_by_its_silence() {
    let count = AtomicUsize::new(0);
    let fake = Fake::start(&[Some((0, 16383))], move |_, args| {
        (args[0] == "GET" && count.fetch_add(1, Ordering::Relaxed) == 0).then_some(Action::Hang)
    })
    .await;
    let client =
        without_periodic_refresh(&fake).hung_after(Duration::from_millis(200)).connect().await.unwrap();
    let mut events = client.events();
    let start = Instant::now();
    client.get::<Value>("k").await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    event(&mut events, |event| matches!(event, Event::Hung(_))).await;
    let refresh = event(&mut events, |event| matches!(event, Event::RefreshStarted(_))).await;
    assert!(matches!(refresh, Event::RefreshStarted(reasons) if reasons.contains(&Trigger::Timeout)));
}

#[tokio::test]
async fn command_deadline_is_kept_while_a_node_hangs() {
    let fake = Fake::start(&[Some((0, 16383))], |_, args| (args[0] == "GET").then_some(Action::Hang)).await;
    let client = without_refresh(&fake).connect().await.unwrap();
    let start = Instant::now();
    let result = client.clone().timeout(Duration::from_millis(150)).get::<Value>("k").await;
    assert!(matches!(&result, Err(error @ Error::Timeout { .. }) if !error.happened_not()), "{result:?}");
    assert!(start.elapsed() < Duration::from_millis(600), "{:?}", start.elapsed());
}

#[tokio::test]
async fn pipelined_commands_share_their_deadline() {
    let fake = Fake::start(&[Some((0, 16383))], |_, args| (args[0] == "GET").then_some(Action::Hang)).await;
    let client = without_refresh(&fake).timeout(Duration::from_millis(200)).connect().await.unwrap();
    let start = Instant::now();
    let mut pipeline = client.pipeline();
    pipeline.get("a").get("b").get("c").get("d").get("e");
    let replies = pipeline.run().await;
    assert!(replies.iter().all(|reply| matches!(reply, Err(Error::Timeout { .. }))), "{replies:?}");
    assert!(start.elapsed() < Duration::from_millis(700), "{:?}", start.elapsed());
}

#[tokio::test]
async fn delivery_mode_decides_about_retries_after_a_disconnect() {
    for (delivery, command, sent) in [
        (Delivery::AtLeastOnce, cmd("INCR").arg("k"), 2),
        (Delivery::AtMostOnce, cmd("INCR").arg("k"), 1),
        (Delivery::AtLeastOnce, cmd("DEL").arg("k"), 2),
        (Delivery::AtMostOnce, cmd("DEL").arg("k"), 1),
        (Delivery::AtMostOnce, cmd("SET").arg(("k", "v")), 1),
        (Delivery::AtMostOnce, cmd("MGET").arg(("k", "k")), 2),
        (Delivery::AtMostOnce, cmd("GET").arg("k"), 2),
    ] {
        let count = AtomicUsize::new(0);
        let fake = Fake::start(&[Some((0, 16383))], move |_, args| {
            (args[0] != "CLUSTER" && count.fetch_add(1, Ordering::Relaxed) == 0).then_some(Action::Close)
        })
        .await;
        let client = without_refresh(&fake).delivery(delivery).connect().await.unwrap();
        let result = client.run::<Value>(command.clone()).await;
        assert_eq!(fake.log().len(), sent, "{delivery:?} {command:?}");
        assert_eq!(matches!(result, Err(Error::Interrupted { .. })), sent == 1, "{result:?}");
    }
}

#[tokio::test]
async fn unknown_outcome_is_never_reported_as_not_executed() {
    let listener = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let redirecting = listener();
    let moved = format!("MOVED 7629 {}", redirecting.local_addr().unwrap());
    for (listener, again, code) in [
        (listener(), "WRONGTYPE Operation against a key", Some("WRONGTYPE")),
        (listener(), "CLUSTERDOWN Hash slot not served", None),
        (redirecting, &moved, None),
    ] {
        let (count, again) = (AtomicUsize::new(0), again.to_owned());
        let fake = Fake::on(vec![listener], &[Some((0, 16383))], move |_, args| {
            if args[0] != "INCR" {
                return None;
            }
            // The first attempt is executed, but its reply is lost.
            if count.fetch_add(1, Ordering::Relaxed) == 0 { Some(Action::Close) } else { error(&again) }
        });
        let client = without_refresh(&fake).timeout(Duration::from_millis(500)).connect().await.unwrap();
        let failed = client.run::<Value>(cmd("INCR").arg("k")).await.unwrap_err();
        assert!(!failed.happened_not(), "{failed}");
        assert_eq!(failed.code(), code, "{failed}");
    }
}

#[tokio::test]
async fn partially_executed_command_is_reported() {
    let fake = Fake::start(&[Some((0, 8191)), Some((8192, 16383))], |node, args| {
        (args[0] == "MSET" && node == 1).then(|| error("OOM command not allowed")).flatten()
    })
    .await;
    let (low, high) = (key_in(0, 8191), key_in(8192, 16383));
    let client = without_refresh(&fake).connect().await.unwrap();
    let both = client.run::<Value>(cmd("MSET").arg((&low, 1)).arg((&high, 2))).await.unwrap_err();
    assert!(matches!(both, Error::Partly(_)) && !both.happened_not(), "{both}");
    let none = client.run::<Value>(cmd("MSET").arg((&high, 2))).await.unwrap_err();
    assert!(none.happened_not() && none.code() == Some("OOM"), "{none}");
}

#[tokio::test]
async fn connections_reconnect_and_persistent_failure_triggers_a_refresh() {
    let fake = Fake::start(&[Some((0, 8191))], |_, _| None).await;
    // No listener at the second node's address.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let view = format!(
        "id0 127.0.0.1:{}@1 master - 0 0 1 connected 0-8191\nid1 127.0.0.1:{free}@1 master - 0 0 2 connected 8192-16383\n",
        fake.ports[0]
    );
    fake.set_view(&view);
    let client = without_periodic_refresh(&fake).timeout(Duration::from_secs(10)).connect().await.unwrap();
    let mut events = client.events();
    let high = key_in(8192, 16383);
    let wait = client.set(&high, "v");
    let find = event(
        &mut events,
        |event| matches!(event, Event::RefreshStarted(reasons) if reasons.contains(&Trigger::PersistentReconnects)),
    );
    tokio::select! {
        result = wait => panic!("no server is listening: {result:?}"),
        _ = find => {}
    }
    // The node returns at the same address.
    let listener = std::net::TcpListener::bind(("127.0.0.1", free)).unwrap();
    let back = Fake::on(vec![listener], &[Some((0, 16383))], |_, _| None);
    back.set_view(&view);
    client.set(&high, "v").await.unwrap();
    assert_eq!(back.log(), [(0, format!("SET {high} v"))]);
}

#[tokio::test]
async fn queues_are_bounded_and_callers_wait_for_capacity_until_their_deadline() {
    let fake = Fake::start(&[Some((0, 16383))], |_, args| (args[0] == "GET").then_some(Action::Hang)).await;
    let client =
        without_refresh(&fake).queue(4, 1 << 20).timeout(Duration::from_millis(300)).connect().await.unwrap();
    let start = Instant::now();
    let all = futures_util::future::join_all((0..10).map(|_| client.get::<Value>("k"))).await;
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let full = all
        .iter()
        .filter(|result| matches!(result, Err(Error::Unavailable { reason, .. }) if reason.contains("full")));
    let late = all.iter().filter(|result| matches!(result, Err(Error::Timeout { .. })));
    assert_eq!((late.count(), full.count()), (4, 6));
}

#[tokio::test]
async fn cancelled_command_is_not_sent_later() {
    // No handshake reply, so commands wait for the connection.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = listener.local_addr().unwrap().port();
    let seed = Fake::start(&[Some((0, 16383))], move |_, args| {
        let view = format!("id0 127.0.0.1:{silent}@1 master - 0 0 1 connected 0-16383\n");
        (args[0] == "CLUSTER").then(|| Action::Reply(format!("${}\r\n{view}\r\n", view.len())))
    })
    .await;
    let client = without_refresh(&seed).connect_timeout(Duration::from_secs(30)).connect().await.unwrap();
    let impatient = client.clone().timeout(Duration::from_millis(50)).set("k", "abandoned").await;
    assert!(matches!(impatient, Err(Error::Timeout { .. })), "{impatient:?}");
    let (kept, seen) = tokio::join!(client.get::<Value>("k"), async {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"%1\r\n+proto\r\n:3\r\n+OK\r\n+PONG\r\n").await.unwrap();
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("GET") {
            assert!(stream.read_buf(&mut seen).await.unwrap() > 0);
        }
        stream.write_all(b"+OK\r\n").await.unwrap();
        String::from_utf8_lossy(&seen).into_owned()
    });
    kept.unwrap();
    assert!(!seen.contains("abandoned"), "{seen:?}");
}

#[tokio::test]
async fn pipelines_keep_the_order_and_every_reply() {
    let fake = Fake::start(&HALVES, |_, args| match args[0].as_str() {
        "INCRBY" => integer(args[2].parse().unwrap()),
        "LPUSH" => error("WRONGTYPE no list"),
        _ => None,
    })
    .await;
    // A small queue, so that the pipeline must wait in the middle.
    let client = without_refresh(&fake).queue(7, 1 << 20).connect().await.unwrap();
    let mut pipeline = client.pipeline();
    for n in 0..500 {
        pipeline.incrby("k", n);
    }
    pipeline.lpush("k", "x").mget(["a", "b"]);
    assert_eq!(pipeline.len(), 502);
    let replies = pipeline.run().await;
    assert!(pipeline.is_empty());
    for (n, reply) in replies[..500].iter().enumerate() {
        assert!(matches!(reply, Ok(Value::Integer(value)) if *value == n as i64), "{n}: {reply:?}");
    }
    assert_eq!(replies[500].as_ref().unwrap_err().code(), Some("WRONGTYPE"));
    let order: Vec<_> = fake
        .log()
        .into_iter()
        .filter(|(_, received)| received.starts_with("INCRBY"))
        .map(|(_, received)| received)
        .collect();
    assert_eq!(order, (0..500).map(|n| format!("INCRBY k {n}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn transaction_returns_its_first_error() {
    let fake = Fake::start(&[Some((0, 16383))], |_, args| match args[0].as_str() {
        "BAD" => error("ERR unknown command 'BAD'"),
        "EXEC" => error("EXECABORT Transaction discarded because of previous errors."),
        "SET" => Some(Action::Reply("+QUEUED\r\n".to_owned())),
        _ => None,
    })
    .await;
    let client = without_refresh(&fake).connect().await.unwrap();
    let result =
        client.transaction().then(cmd("SET").arg(("k", 1))).then(cmd("BAD").arg("k")).run::<Value>().await;
    assert!(matches!(result, Err(Error::Server(error)) if error.text() == "ERR unknown command 'BAD'"));
}

#[tokio::test]
async fn blocking_commands_do_not_delay_other_commands() {
    let fake = Fake::start(&[Some((0, 16383))], |_, args| (args[0] == "BLPOP").then_some(Action::Hang)).await;
    let client = without_refresh(&fake).hung_after(Duration::from_millis(100)).connect().await.unwrap();
    let waiting = client.clone().timeout(Duration::from_millis(100));
    let start = Instant::now();
    let (blocked, ()) = tokio::join!(waiting.blpop::<Value>("k", 0.3), async {
        for _ in 0..20 {
            client.set("k", "v").await.unwrap();
        }
        assert!(start.elapsed() < Duration::from_millis(300));
    });
    assert!(matches!(blocked, Err(Error::Timeout { .. })), "{blocked:?}");
    assert!(start.elapsed() >= Duration::from_millis(400), "block time plus timeout: {:?}", start.elapsed());
}

#[tokio::test]
async fn dropped_client_closes_its_connections() {
    let fake = Fake::start(&HALVES, |_, _| None).await;
    let client = without_periodic_refresh(&fake).connect().await.unwrap();
    client.set("k", "v").await.unwrap();
    let mut events = client.events();
    drop(client);
    // The refresh task and the connections hold the other ends of the event channel.
    let closed = async {
        while !matches!(events.recv().await, Err(tokio::sync::broadcast::error::RecvError::Closed)) {}
    };
    timeout(Duration::from_secs(5), closed).await.expect("all tasks have ended");
}

#[tokio::test]
async fn invalid_addresses_are_rejected_at_once() {
    assert!(matches!(Client::connect("http://x").await, Err(Error::Config(_))));
    assert!(matches!(Client::connect("").await, Err(Error::Config(_))));
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let result = Client::builder(&free.to_string()).timeout(Duration::from_millis(200)).connect().await;
    assert!(matches!(result, Err(Error::Unavailable { .. })));
}
