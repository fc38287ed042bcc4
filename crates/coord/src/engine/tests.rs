//! Coordinators over the in-memory network, on real journals: forwarding, leader changes, leases, watches, alarms.

use super::*;
use crate::request::PutRequest;
use crate::testing::{TestCluster, until};
use crate::watch::WatchRequest;

fn no_tuning(_: &mut CoordinatorOptions) {}

fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Command {
    Command::client(Op::Put(PutRequest::new(key, value)))
}

fn revision(reply: &Reply) -> i64 {
    match reply {
        Reply::Put(put) => put.revision,
        other => panic!("{other:?}"),
    }
}

async fn value(node: &Coordinator, key: &'static str, serializable: bool) -> Option<Bytes> {
    let reply = node.range(RangeRequest::key(key), serializable).await.unwrap();
    reply.kvs.first().map(|kv| kv.value.clone())
}

#[test]
fn one_node_puts_reads_and_recovers_from_disk() {
    let mut cluster = TestCluster::start(1, no_tuning);
    let node = cluster.node(0);
    for number in 0..50_i64 {
        let reply = cluster.wait(node.execute(put("k", number.to_string()))).unwrap();
        assert_eq!(revision(&reply), number + 2);
        assert_eq!(cluster.wait(value(&node, "k", false)), Some(number.to_string().into()));
    }
    let header = node.header(SpaceId::User);
    assert_eq!((header.member_id, header.revision), (1, 51));
    drop(node);
    cluster.kill(0);
    cluster.start_node(0);
    cluster.settle();
    assert_eq!(cluster.wait(value(&cluster.node(0), "k", false)), Some("49".into()));
    assert_eq!(cluster.node(0).header(SpaceId::User).revision, 51);
}

#[test]
fn raft_core_that_stops_by_itself_stops_the_process() {
    let cluster = TestCluster::start(1, no_tuning);
    let node = cluster.node(0);
    cluster.wait(node.group().stop());
    until("the shutdown of the process is requested", || node.inner.shutdown.has_panicked().then_some(()));
}

#[test]
fn every_node_accepts_writes_and_reads_them_at_once() {
    let cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    for round in 0..30 {
        let node = cluster.node(round % 3);
        let reply = cluster.wait(node.execute(put("k", round.to_string()))).unwrap();
        // Its own state is never behind its reply.
        assert_eq!(node.header(SpaceId::User).revision, revision(&reply));
        assert_eq!(cluster.wait(value(&node, "k", true)), Some(round.to_string().into()));
        for at in 0..3 {
            let read = cluster.wait(value(&cluster.node(at), "k", false));
            assert_eq!(read, Some(round.to_string().into()), "node {at}");
        }
    }
    let refused = cluster.wait(cluster.node(1).execute(put("", "x"))).unwrap_err();
    assert_eq!(refused, CoordError::Refused(crate::Error::EmptyKey));
    let refused = cluster.wait(cluster.node(1).execute(put("/moim/x", "x"))).unwrap_err();
    assert_eq!(refused, CoordError::Refused(crate::Error::PermissionDenied));
}

/// Counts how often each command was applied: every put writes a key of its own under its number.
fn count(node: &Coordinator) -> i64 {
    node.read(|state| state.range(&RangeRequest { count_only: true, ..RangeRequest::between("n/", "n0") }))
        .unwrap()
        .count
}

#[test]
fn queued_commands_share_entries_and_get_their_own_replies() {
    let cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    for at in 0..3 {
        let node = cluster.node(at);
        let before = node.inner.shared.applied();
        let puts = (0..1_000).map(|number| {
            let node = node.clone();
            async move {
                let key = format!("n/{at}/{number}");
                let reply = node.execute(put(key.clone(), "v")).await.unwrap();
                let made = node.range(RangeRequest::key(key), true).await.unwrap();
                assert_eq!(made.kvs[0].mod_revision, revision(&reply));
            }
        });
        cluster.wait(futures_util::future::join_all(puts));
        let entries = node.inner.shared.applied() - before;
        assert!(entries < 200, "1,000 commands took {entries} entries");
    }
    cluster.settle();
    assert!((0..3).all(|at| count(&cluster.node(at)) == 3_000));
}

/// Puts until stopped; returns the acknowledged puts and those with unknown outcome.
async fn load(
    node: Coordinator,
    name: String,
    stop: Arc<std::sync::atomic::AtomicBool>,
) -> (Vec<String>, u64) {
    let (mut done, mut unknown) = (Vec::new(), 0);
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let key = format!("n/{name}/{number}");
        // The version counts: a command applied twice shows as version 2.
        match node.execute(put(key.clone(), "v")).await {
            Ok(_) => done.push(key),
            Err(CoordError::Timeout) => unknown += 1,
            Err(CoordError::NoLeader | CoordError::TooManyRequests) => {}
            Err(error) => panic!("{error}"),
        }
    }
    (done, unknown)
}

#[test]
fn leader_failure_under_load_loses_no_reply_and_applies_no_command_twice() {
    let mut cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    let leader = cluster.leader();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let others: Vec<usize> = (0..3).filter(|at| *at != leader).collect();
    let mut loads = Vec::new();
    for at in &others {
        for lane in 0..8 {
            let work = load(cluster.node(*at), format!("{at}-{lane}"), Arc::clone(&stop));
            #[allow(clippy::disallowed_methods)] // a test's load
            loads.push(cluster.runtime(*at).spawn(work));
        }
    }
    until("the load runs", || (count(&cluster.node(others[0])) > 200).then_some(()));
    cluster.kill(leader);
    let new = cluster.leader_among(&others);
    let before = count(&cluster.node(new));
    until("the load continues", || (count(&cluster.node(new)) > before + 200).then_some(()));
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = 0;
    let mut worked = Vec::new();
    for work in loads {
        worked.push(cluster.wait(work).unwrap());
    }
    // Each node acknowledges what it has applied itself; this one may be behind another.
    cluster.wait(cluster.node(new).linearizable()).unwrap();
    for (done, unknown) in worked {
        assert_eq!(unknown, 0, "the new leader's first entry decides every earlier proposal");
        acknowledged += done.len();
        for key in done {
            let found = cluster.wait(cluster.node(new).range(RangeRequest::key(key.clone()), true)).unwrap();
            assert_eq!(found.kvs.first().map(|kv| kv.version), Some(1), "{key}");
        }
    }
    let node = cluster.node(new);
    let all = node.read(|state| state.range(&RangeRequest::between("n/", "n0"))).unwrap();
    assert!(all.kvs.iter().all(|kv| kv.version == 1));
    assert!(all.count >= i64::try_from(acknowledged).unwrap());
    cluster.start_node(leader);
    cluster.settle();
    assert_eq!(count(&cluster.node(leader)), count(&node));
}

#[test]
fn isolated_node_returns_timeout_or_no_leader() {
    let cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    let old = cluster.leader();
    cluster.isolate(old);
    let lonely = cluster.node(old);
    let error = cluster.wait(lonely.execute(put("k", "lost?"))).unwrap_err();
    assert!(matches!(error, CoordError::Timeout | CoordError::NoLeader), "{error:?}");
    let error = cluster.wait(lonely.range(RangeRequest::key("k"), false)).unwrap_err();
    assert!(matches!(error, CoordError::Timeout | CoordError::NoLeader), "{error:?}");
    // Serializable reads are still served.
    assert_eq!(cluster.wait(value(&lonely, "k", true)), None);
    let others: Vec<usize> = (0..3).filter(|at| *at != old).collect();
    cluster.leader_among(&others);
    cluster.insist(others[0], |node| async move { node.execute(put("k", "new")).await });
    cluster.network.heal();
    cluster.settle();
    assert_eq!(cluster.wait(value(&lonely, "k", false)), Some("new".into()));
}

async fn next_events(stream: &mut WatchStream, count: usize) -> Vec<(i64, String)> {
    let mut seen = Vec::new();
    while seen.len() < count {
        match stream.next().await.expect("the node runs") {
            WatchItem::Events { batch, .. } => {
                seen.extend(batch.events.iter().map(|event| {
                    (event.kv.mod_revision, String::from_utf8_lossy(&event.kv.value).into_owned())
                }))
            }
            other => panic!("{other:?}"),
        }
    }
    seen
}

fn short_log(options: &mut CoordinatorOptions) {
    options.group.snapshot_after = 50;
    options.group.keep_entries = 10;
}

#[test]
fn watch_misses_nothing_across_a_leader_change_and_a_snapshot() {
    let mut cluster = TestCluster::start(3, short_log);
    cluster.settle();
    let (leader, watched) = (cluster.leader(), cluster.follower());
    let node = cluster.node(watched);
    let mut stream = node.watcher();
    let (id, now) = stream.create(WatchRequest { key: "k".into(), ..WatchRequest::default() }).unwrap();
    assert_eq!(now, 1);
    let mut expected = Vec::new();
    let write = |cluster: &TestCluster, at: usize, expected: &mut Vec<(i64, String)>| {
        let text = expected.len().to_string();
        let reply = cluster.insist(at, |node| {
            let text = text.clone();
            async move { node.execute(put("k", text)).await }
        });
        expected.push((revision(&reply), text));
    };
    for _ in 0..20 {
        write(&cluster, leader, &mut expected);
    }
    assert_eq!(cluster.wait(next_events(&mut stream, 20)), expected);
    // Far behind: it catches up by a snapshot, not by the log.
    cluster.isolate(watched);
    let others: Vec<usize> = (0..3).filter(|at| *at != watched).collect();
    for _ in 0..200 {
        write(&cluster, others[0], &mut expected);
    }
    let leader = cluster.leader_among(&others);
    until("the log is cut", || (cluster.node(leader).group().metrics().purged > Some(100)).then_some(()));
    cluster.network.heal();
    cluster.settle();
    assert!(node.group().metrics().snapshot.is_some(), "it came by snapshot");
    cluster.kill(leader);
    let rest: Vec<usize> = others.iter().copied().filter(|at| *at != leader).collect();
    for _ in 0..20 {
        write(&cluster, rest[0], &mut expected);
    }
    assert_eq!(cluster.wait(next_events(&mut stream, 220)), expected[20..]);
    stream.request_progress();
    let progress = cluster.wait(stream.next()).unwrap();
    assert_eq!(progress, WatchItem::Progress { watcher: None, revision: expected.last().unwrap().0 });
    assert!(stream.cancel(id) && !stream.cancel(id));
}

#[test]
fn failed_snapshot_is_retried_without_waiting_for_the_next() {
    let cluster = TestCluster::start(1, short_log);
    cluster.settle();
    let node = cluster.node(0);
    // A file at the path of the folder: no snapshot can be written there.
    let folder = cluster.folder(0).join("raft/1/snapshots");
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    std::fs::write(&folder, "in the way").unwrap();
    for number in 0..60 {
        cluster.wait(node.execute(put("k", number.to_string()))).unwrap();
    }
    until("it failed", || node.group().snapshot_failed().then_some(()));
    std::fs::remove_file(&folder).unwrap();
    // No further entry triggers a snapshot.
    until("a snapshot exists", || node.group().metrics().snapshot.map(drop));
    assert!(!node.group().snapshot_failed());
}

#[test]
fn watch_overtaken_by_compaction_is_canceled() {
    let cluster = TestCluster::start(1, no_tuning);
    cluster.settle();
    let node = cluster.node(0);
    for number in 0..10 {
        cluster.wait(node.execute(put("k", number.to_string()))).unwrap();
    }
    let mut stream = node.watcher();
    let request = WatchRequest { key: "k".into(), start_revision: 3, ..WatchRequest::default() };
    let (late, _) = stream.create(request.clone()).unwrap();
    assert_eq!(cluster.wait(node.compact(Origin::Client, SpaceId::User, 8, true)), Ok(11));
    let (later, _) = stream.create(request).unwrap();
    for watcher in [late, later] {
        let item = cluster.wait(stream.next()).unwrap();
        assert_eq!(item, WatchItem::Canceled { watcher, compact_revision: 8 });
    }
    let refused = cluster.wait(node.compact(Origin::Client, SpaceId::User, 8, false)).unwrap_err();
    assert_eq!(refused, CoordError::Refused(crate::Error::Compacted));
}

#[test]
fn leases_expire_on_time_across_leader_change_and_renew_on_any_node() {
    let mut cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    let (leader, follower) = (cluster.leader(), cluster.follower());
    let node = cluster.node(follower);
    let grant = |ttl_ms| cluster.wait(node.lease_grant(Origin::Client, LeaseId::NONE, ttl_ms)).unwrap();
    let ((short, ttl_ms), (long, _)) = (grant(1_000), grant(60_000));
    assert_eq!(ttl_ms, 1_000);
    let leased = |key: &'static str, lease| {
        Command::client(Op::Put(PutRequest { lease, ..PutRequest::new(key, "v") }))
    };
    cluster.wait(node.execute(leased("short", short))).unwrap();
    cluster.wait(node.execute(leased("long", long))).unwrap();
    assert_eq!(cluster.wait(node.lease_keep_alive(Origin::Client, long)), Ok(60_000));
    assert_eq!(cluster.wait(node.lease_keep_alive(Origin::Client, LeaseId(5))), Ok(0));
    let info = cluster.wait(node.lease_time_to_live(long, true)).unwrap();
    assert_eq!((info.granted_ms, &info.keys[..]), (60_000, &[Bytes::from("long")][..]));
    assert!((1..=60_000).contains(&info.remaining_ms), "{info:?}");
    let (nodes, _) = cluster.wait(node.lease_grant(Origin::Node, LeaseId::NONE, 60_000)).unwrap();
    let denied = CoordError::Refused(crate::Error::PermissionDenied);
    assert_eq!(cluster.wait(node.lease_keep_alive(Origin::Client, nodes)), Err(denied.clone()));
    assert_eq!(cluster.wait(node.lease_revoke(Origin::Client, nodes)), Err(denied));
    assert_eq!(cluster.wait(node.lease_keep_alive(Origin::Node, nodes)), Ok(60_000));
    cluster.wait(node.lease_revoke(Origin::Node, nodes)).unwrap();
    let unknown = cluster.wait(node.lease_time_to_live(LeaseId(5), true)).unwrap();
    assert_eq!((unknown.granted_ms, unknown.remaining_ms), (0, -1));
    // Renewed through a follower for three times its TTL, it stays.
    let clock = moim_base::clock::SystemClock::new();
    while clock.monotonic_ms() < 3_000 {
        assert_eq!(cluster.wait(node.lease_keep_alive(Origin::Client, short)), Ok(1_000));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(cluster.wait(value(&node, "short", false)), Some("v".into()));
    // It is not renewed, and the leader that kept its deadline is killed: the new leader expires it.
    cluster.kill(leader);
    let died = clock.monotonic_ms();
    let others: Vec<usize> = (0..3).filter(|at| *at != leader).collect();
    cluster.leader_among(&others);
    until("it ends", || cluster.node(follower).read(|state| state.lease(short).is_none().then_some(())));
    let lived_ms = clock.monotonic_ms() - died;
    assert!(lived_ms >= 900, "it ended {lived_ms} ms after its last renewal");
    assert_eq!(cluster.wait(value(&node, "short", false)), None);
    assert_eq!(cluster.wait(value(&node, "long", false)), Some("v".into()));
    assert_eq!(cluster.wait(node.leases()), Ok(vec![long]));
    cluster.wait(node.lease_revoke(Origin::Client, long)).unwrap();
    assert_eq!(cluster.wait(value(&node, "long", false)), None);
}

#[test]
fn full_quota_refuses_puts_everywhere_until_the_alarm_is_disarmed() {
    let cluster = TestCluster::start(3, |options| options.quota_bytes = 64 << 10);
    cluster.settle();
    let node = cluster.node(cluster.follower());
    let big = || put("big", vec![7; 8 << 10]);
    let error = until("it is full", || cluster.wait(node.execute(big())).err());
    assert_eq!(error, CoordError::Refused(crate::Error::NoSpace));
    let alarms = until("the alarm is on", || {
        let alarms = cluster.wait(node.alarms()).unwrap();
        (!alarms.is_empty()).then_some(alarms)
    });
    for at in 0..3 {
        let refused = cluster.wait(cluster.node(at).execute(put("small", "v"))).unwrap_err();
        assert_eq!(refused, CoordError::Refused(crate::Error::NoSpace), "node {at}");
    }
    assert!(cluster.wait(value(&node, "big", false)).is_some(), "reads go on");
    let delete = Command::client(Op::Delete(crate::request::DeleteRequest::key("big")));
    cluster.wait(node.execute(delete)).unwrap();
    let now = node.header(SpaceId::User).revision;
    for at in 0..3 {
        // Each node reclaims its memory by itself.
        let _ = cluster.wait(cluster.node(at).compact(Origin::Client, SpaceId::User, now, true));
        until("memory is reclaimed", || (cluster.node(at).status().db_size < 32 << 10).then_some(()));
    }
    for alarm in alarms {
        assert_eq!(cluster.wait(node.alarm_off(alarm)), Ok(vec![alarm]));
    }
    cluster.wait(node.execute(put("small", "v"))).unwrap();
}

#[test]
fn membership_changes_and_leadership_transfer_work_through_any_node() {
    let mut cluster = TestCluster::without_founders(4, no_tuning);
    cluster.found(3);
    cluster.settle();
    let follower = cluster.follower();
    let node = cluster.node(follower);
    cluster.start_node(3);
    let newcomer = cluster.member(3);
    cluster.wait(node.add_learner(newcomer.clone())).unwrap();
    let stranger = Member { id: VoterId(9), address: newcomer.address.clone() };
    assert_eq!(cluster.wait(node.add_learner(stranger)), Err(CoordError::MemberExists));
    until("the learner has caught up", || cluster.wait(node.promote_member(newcomer.id)).ok());
    assert_eq!(cluster.wait(node.promote_member(newcomer.id)), Err(CoordError::NotLearner));
    assert_eq!(cluster.wait(node.promote_member(VoterId(9))), Err(CoordError::MemberNotFound));
    assert_eq!(cluster.wait(node.move_leader(VoterId(9))), Err(CoordError::BadLeaderTransferee));
    let record = br#"{"node_id":4,"voter":4,"name":"four","etcd":"127.0.0.1:2379","peer":"node-4"}"#;
    let record = Command::node(Op::Put(PutRequest::new("/moim/nodes/4", &record[..])));
    cluster.wait(node.execute(record)).unwrap();
    let fourth = node.members().into_iter().find(|member| member.voter == newcomer.id).unwrap();
    assert_eq!((fourth.node_id, fourth.name.as_str(), fourth.learner), (Some(4), "four", false));
    assert_eq!(fourth.client_urls, ["http://127.0.0.1:2379"]);
    until("leadership moves", || cluster.wait(node.move_leader(newcomer.id)).ok());
    assert_eq!(cluster.leader(), 3);
    let removed = VoterId(1 + u64::try_from((0..3).find(|at| *at != follower).unwrap()).unwrap());
    cluster.wait(node.remove_member(removed)).unwrap();
    until("the member is removed", || {
        (!node.members().iter().any(|member| member.voter == removed)).then_some(())
    });
    cluster.wait(node.execute(put("k", "v"))).unwrap();
}

#[test]
fn database_streamed_during_puts_is_consistent() {
    let cluster = TestCluster::start(1, no_tuning);
    cluster.settle();
    let node = cluster.node(0);
    for number in 0..100 {
        cluster.wait(node.execute(put(format!("n/{number}"), vec![1; 4 << 10]))).unwrap();
    }
    let mut database = node.database();
    let mut file = database.next().unwrap().unwrap().to_vec();
    cluster.wait(node.execute(put("n/later", "v"))).unwrap();
    for piece in database {
        file.extend_from_slice(&piece.unwrap());
    }
    let state = crate::bolt::read(&file).unwrap();
    assert_eq!(state.live_keys(SpaceId::User), 100);
    let (mine, theirs) =
        (node.hash_kv(SpaceId::User, 101).unwrap(), state.hash_kv(SpaceId::User, 101).unwrap());
    assert_eq!(mine.hash, theirs.hash);
}

/// Leader changes under load from every node; each acknowledged command is applied once.
#[test]
fn leader_changes_under_load_only_delay_commands() {
    let cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut loads = Vec::new();
    for at in 0..3 {
        for lane in 0..4 {
            let work = load(cluster.node(at), format!("{at}-{lane}"), Arc::clone(&stop));
            #[allow(clippy::disallowed_methods)] // a test's load
            loads.push(cluster.runtime(at).spawn(work));
        }
    }
    for round in 0..6 {
        let old = cluster.leader();
        let before = count(&cluster.node(old));
        if round % 2 == 0 {
            // Leadership transfer.
            let to = cluster.member((old + 1) % 3).id;
            until("leadership moves", || cluster.wait(cluster.node(old).move_leader(to)).ok());
        } else {
            // Isolated, with entries that no other node has.
            cluster.isolate(old);
            let others: Vec<usize> = (0..3).filter(|at| *at != old).collect();
            cluster.leader_among(&others);
            cluster.network.heal();
        }
        until("the load continues", || (count(&cluster.node(old)) > before + 50).then_some(()));
    }
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = 0;
    let done: Vec<_> = loads.into_iter().map(|work| cluster.wait(work).unwrap()).collect();
    cluster.settle();
    for (keys, unknown) in done {
        assert_eq!(unknown, 0);
        acknowledged += keys.len();
        for key in keys {
            let found = cluster.wait(cluster.node(0).range(RangeRequest::key(key.clone()), true)).unwrap();
            assert_eq!(found.kvs.first().map(|kv| kv.version), Some(1), "{key}");
        }
    }
    for at in 0..3 {
        let all = cluster.node(at).read(|state| state.range(&RangeRequest::between("n/", "n0"))).unwrap();
        assert!(all.kvs.iter().all(|kv| kv.version == 1), "a command was applied twice");
        assert_eq!(all.count, i64::try_from(acknowledged).unwrap(), "node {at}");
    }
}

#[test]
fn thousand_watchers_receive_a_change_and_an_unread_stream_stays_small() {
    let cluster = TestCluster::start(1, no_tuning);
    cluster.settle();
    let node = cluster.node(0);
    let mut unread = node.watcher();
    unread.create(WatchRequest { key: "k".into(), ..WatchRequest::default() }).unwrap();
    let mut streams: Vec<WatchStream> = (0..1_000).map(|_| node.watcher()).collect();
    for stream in &mut streams {
        stream.create(WatchRequest { key: "k".into(), ..WatchRequest::default() }).unwrap();
    }
    cluster.wait(async {
        for round in 0..20 {
            let reply = node.execute(put("k", round.to_string())).await.unwrap();
            let heard = streams.iter_mut().map(|stream| next_events(stream, 1));
            for events in futures_util::future::join_all(heard).await {
                assert_eq!(events, [(revision(&reply), round.to_string())]);
            }
        }
    });
    assert!(unread.backlog() <= 1, "one mark, however much it misses");
    assert_eq!(cluster.wait(next_events(&mut unread, 20)).len(), 20);
}

#[test]
fn full_disk_refuses_growth_and_allows_compaction() {
    let mut cluster = TestCluster::without_founders(3, no_tuning);
    cluster.found(3);
    cluster.settle();
    let node = cluster.node(cluster.follower());
    cluster.wait(node.execute(put("k", "v"))).unwrap();
    drop(node);
    for at in 0..3 {
        cluster.kill(at);
    }
    // Between the space kept free of everything and the space kept free for Raft.
    cluster.want_free_space(2);
    for at in 0..3 {
        cluster.start_node(at);
    }
    cluster.settle();
    let node = cluster.node(cluster.follower());
    assert!(cluster.store(0).is_full());
    let alarms = until("every node raises the alarm", || {
        let alarms = cluster.wait(node.alarms()).ok()?;
        (alarms.len() == 3).then_some(alarms)
    });
    let refused = cluster.wait(node.execute(put("l", "v"))).unwrap_err();
    assert_eq!(refused, CoordError::Refused(crate::Error::NoSpace));
    assert_eq!(cluster.wait(value(&node, "k", false)), Some("v".into()));
    let member = Command::node(Op::Put(PutRequest::new("/moim/members/1", "alive")));
    cluster.wait(node.execute(member)).unwrap();
    let delete = Command::client(Op::Delete(crate::request::DeleteRequest::key("k")));
    cluster.wait(node.execute(delete)).unwrap();
    // Disarmed while the disk is still full, the alarm is raised again at once.
    assert_eq!(cluster.wait(node.alarm_off(alarms[0])), Ok(vec![alarms[0]]));
    until("it is on again", || (cluster.wait(node.alarms()).unwrap().len() == 3).then_some(()));
}

#[test]
fn full_disk_drops_the_raft_log_however_short() {
    let mut cluster = TestCluster::start(1, no_tuning);
    cluster.settle();
    for number in 0..100 {
        cluster.wait(cluster.node(0).execute(put(format!("key {number}"), "v"))).unwrap();
    }
    assert_eq!(cluster.node(0).group().metrics().purged, None, "a log that is far from its limits");
    cluster.kill(0);
    cluster.want_free_space(2);
    cluster.start_node(0);
    cluster.settle();
    until("the log is dropped up to a snapshot", || {
        let metrics = cluster.node(0).group().metrics();
        (metrics.purged >= Some(100)).then_some(())
    });
    let node = cluster.node(0);
    assert_eq!(cluster.wait(value(&node, "key 99", false)), Some("v".into()));
}

#[test]
fn withdrawn_node_refuses_etcd_requests_at_once_and_raises_no_alarm() {
    let mut cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    let full = cluster.follower();
    cluster.kill(full);
    cluster.want_free_space(2);
    cluster.start_node(full);
    cluster.node(full).set_withdrawn(true);
    cluster.settle();
    let scope = moim_base::task::Scope::new(moim_base::task::Shutdown::new());
    let callers = {
        let _there = cluster.runtime(full).enter();
        cluster.node(full).for_many_callers(&scope)
    };
    assert_eq!(cluster.wait(callers.execute(put("k", "v"))).unwrap_err(), CoordError::NoLeader);
    assert_eq!(cluster.wait(value_of(&callers, "k")), Err(CoordError::NoLeader));
    // The node's own requests are served, and the others accept writes for longer than it takes to raise an alarm.
    let other = (0..3).find(|at| *at != full).unwrap();
    let mut number = 0;
    let began_ms = cluster.node(other).inner.now_ms();
    while cluster.node(other).inner.now_ms() < began_ms + 4_500 {
        number += 1;
        cluster.wait(cluster.node(other).execute(put("k", number.to_string()))).unwrap();
    }
    let member = Command::node(Op::Put(PutRequest::new("/moim/members/1", "alive")));
    cluster.wait(cluster.node(full).execute(member)).unwrap();
    assert_eq!(cluster.wait(cluster.node(other).alarms()), Ok(Vec::new()));
    cluster.node(full).set_withdrawn(false);
    until("no other node serves in its place", || {
        let alarms = cluster.wait(cluster.node(other).alarms()).ok()?;
        (alarms.len() == 1).then_some(())
    });
}

#[test]
fn isolated_node_refuses_etcd_requests_at_once_and_serves_its_own() {
    let cluster = TestCluster::start(3, no_tuning);
    cluster.settle();
    let isolated = cluster.follower();
    let scope = moim_base::task::Scope::new(moim_base::task::Shutdown::new());
    let callers = {
        let _there = cluster.runtime(isolated).enter();
        cluster.node(isolated).for_many_callers(&scope)
    };
    cluster.node(isolated).set_isolated(true);
    assert_eq!(cluster.wait(callers.execute(put("k", "v"))).unwrap_err(), CoordError::NoLeader);
    assert_eq!(cluster.wait(value_of(&callers, "k")), Err(CoordError::NoLeader));
    cluster.wait(cluster.node(isolated).execute(put("own", "v"))).unwrap();
    cluster.node(isolated).set_isolated(false);
    cluster.wait(callers.execute(put("k", "v"))).unwrap();
}

async fn value_of(node: &Coordinator, key: &'static str) -> Result<(), CoordError> {
    node.range(RangeRequest::key(key), false).await.map(drop)
}
