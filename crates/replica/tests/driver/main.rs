//! Drivers of three nodes over real journals and real connections.
#![allow(clippy::unwrap_used)]

mod cluster;

use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::{BrokerId, Offset};
use moim_journal::{Framing, PlainFraming, Rewrite};
use moim_replica::{AckError, Durability, PartitionId, ResetPolicy};

use cluster::{Cluster, ID, Kind, frames, run, until};

#[test]
fn appended_records_are_committed_and_replicated_to_every_node() {
    for durability in [Durability::Fsync, Durability::Replicated] {
        run(async {
            let cluster = Cluster::start(Kind { durability, ..Kind::default() }).await;
            cluster.leads(1).await;
            assert_eq!(cluster.append(2, b"no"), Err(AckError::NotLeader));
            for n in 0..200_u32 {
                cluster.append(1, &n.to_be_bytes()).unwrap();
            }
            // A batch that bypasses the commit log, and is larger than an answer.
            cluster.append(1, &vec![3; 2 << 20]).unwrap();
            for node in 1..=3 {
                cluster.committed(node, 201).await;
            }
            for node in 2..=3 {
                cluster.same(1, node).await;
                assert_eq!(cluster.owner(node).appended.load(Ordering::SeqCst), 201);
                assert_eq!(cluster.owner(node).follows.load(Ordering::SeqCst), 1);
            }
            assert_eq!(cluster.owner(1).leads.load(Ordering::SeqCst), 0);
            assert_eq!(cluster.record().await.value.isr.len(), 3, "no replica left the ISR");
        });
    }
}

#[test]
fn dead_follower_leaves_isr_and_rejoins_on_return() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.append(1, b"two").unwrap();
        cluster.committed(1, 2).await;
        cluster.in_sync(&[1, 2]).await;
        // On a slow machine other nodes may be silent for a moment, too.
        let suspects = || cluster.node(1).driver.suspects().into_iter().map(|one| one.0).collect::<Vec<_>>();
        until("dead node is suspected", || suspects() == [BrokerId(3)]).await;
        cluster.fill(1, 100, 10_000).await;
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.append(1, b"three").unwrap();
        cluster.committed(3, 103).await;
        cluster.same(1, 3).await;
        until("no node is suspected", || cluster.node(1).driver.suspects().is_empty()).await;
    });
}

#[test]
fn below_min_isr_appends_are_refused_and_waiters_fail() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(2).await;
        cluster.append(1, b"two").unwrap();
        cluster.in_sync(&[1, 3]).await;
        cluster.kill(3).await;
        cluster.append(1, b"three").unwrap();
        cluster.in_sync(&[1]).await;
        until("under min ISR callback", || cluster.owner(1).under_min.load(Ordering::SeqCst) == 1).await;
        assert_eq!(cluster.append(1, b"four"), Err(AckError::NotEnoughReplicas));
        assert!(cluster.replica(1).high_watermark().0 < 3);
        cluster.up(2).await;
        cluster.committed(1, 3).await;
        cluster.append(1, b"four").unwrap();
        cluster.committed(2, 4).await;
    });
}

#[test]
fn former_leader_truncates_uncommitted_records() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(2, 1).await;
        cluster.committed(3, 1).await;
        // Isolated: its further appends reach no other node.
        cluster.kill(2).await;
        cluster.kill(3).await;
        for n in 0..50_u32 {
            if cluster.append(1, &n.to_be_bytes()).is_err() {
                break;
            }
        }
        assert!(cluster.journal(1).end() > 1);
        cluster.kill(1).await;
        for node in 1..=3 {
            cluster.up(node).await;
        }
        let members: Vec<_> = (1..=3).map(|node| cluster.member(node)).collect();
        cluster
            .change(|draft| {
                members.iter().for_each(|member| draft.restamp(*member));
                draft.lose(BrokerId(1));
                assert!(draft.elect(BrokerId(2)));
            })
            .await;
        cluster.leads(2).await;
        cluster.append(2, b"two").unwrap();
        cluster.committed(2, 2).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.same(2, 1).await;
        cluster.same(2, 3).await;
        assert!(cluster.owner(1).truncations.load(Ordering::SeqCst) > 0);
        let log = frames(cluster.journal(1));
        assert_eq!(log.iter().map(|frame| (frame.0, frame.1)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
    });
}

#[test]
fn no_committed_record_is_lost_when_leadership_moves_under_load() {
    run(async {
        let cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        let mut committed = 0;
        for round in 0..12 {
            let (leader, next) = (1 + round % 3, 1 + (round + 1) % 3);
            for n in 0..20_u32 {
                cluster.append(leader, &n.to_be_bytes()).unwrap();
                if n == 10 {
                    cluster.committed(leader, cluster.journal(leader).end()).await;
                    committed = cluster.journal(leader).end();
                }
            }
            cluster.change(|draft| assert!(draft.elect(BrokerId(next)))).await;
            cluster.leads(next).await;
            assert!(cluster.journal(next).end() >= committed);
        }
        cluster.append(1, b"last").unwrap();
        let end = cluster.journal(1).end();
        for node in 1..=3 {
            cluster.committed(node, end).await;
        }
        cluster.same(1, 2).await;
        cluster.same(1, 3).await;
        cluster.in_sync(&[1, 2, 3]).await;
    });
}

#[test]
fn delete_records_waits_for_the_whole_isr() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.fill(1, 300, 10_000).await;
        cluster.committed(3, 300).await;
        cluster.journal(1).set_start(250).unwrap();
        let leader = cluster.replica(1).clone();
        leader.on_log_start();
        assert_eq!(leader.gone_everywhere(Offset(250)).await.unwrap(), Offset(250));
        assert_eq!([2, 3].map(|node| cluster.journal(node).start()), [250, 250]);
        assert!(cluster.replica(2).gone_everywhere(Offset(250)).await.is_err(), "only a leader knows");
        // Deletion does not wait for an offline node, once it is out of the in-sync set.
        cluster.kill(3).await;
        cluster.journal(1).set_start(280).unwrap();
        leader.on_log_start();
        assert_eq!(leader.low_watermark(), Some(Offset(250)));
        cluster.append(1, b"waits for the dead one").unwrap();
        assert_eq!(leader.gone_everywhere(Offset(280)).await.unwrap(), Offset(280));
        cluster.in_sync(&[1, 2]).await;
    });
}

#[test]
fn damaged_replica_rejoins_isr_only_after_repair() {
    run(async {
        for (policy, log_start) in [
            (ResetPolicy::LogStart, 0),
            (ResetPolicy::LogStart, 250),
            (ResetPolicy::InstallSnapshot, 0),
            (ResetPolicy::InstallSnapshot, 250),
        ] {
            let cluster = Cluster::start(Kind { policy, ..Kind::default() }).await;
            cluster.leads(1).await;
            cluster.fill(1, 300, 10_000).await;
            cluster.committed(3, 300).await;
            cluster.journal(1).set_start(log_start).unwrap();
            cluster.damage(3);
            let driver = &cluster.node(3).driver;
            assert_eq!((cluster.journal(3).is_damaged(), driver.repairing()), (true, vec![]));
            assert_eq!(cluster.journal(3).end(), 300, "a record counts on it");
            // The controller's reaction to the member record.
            cluster.change(|draft| draft.forget(BrokerId(3))).await;
            cluster.append(1, b"commits without it").unwrap();
            cluster.committed(1, 301).await;
            cluster.committed(2, 301).await;
            cluster.in_sync(&[1, 2]).await;
            assert_eq!((cluster.journal(3).end(), driver.repairs()), (300, 0), "the leader was not owner");
            driver.on_damage_registered(&[ID]);
            cluster.in_sync(&[1, 2, 3]).await;
            cluster.committed(3, 301).await;
            assert!(!cluster.journal(3).is_damaged());
            until("the end of the repair", || cluster.node(3).driver.repairing().is_empty()).await;
            assert_eq!(cluster.node(3).driver.repairs(), 2, "it began, and it ended");
            let installed = policy == ResetPolicy::InstallSnapshot && log_start > 0;
            assert_eq!(cluster.owner(3).installs.load(Ordering::SeqCst), usize::from(installed));
            if !installed {
                cluster.same(1, 3).await;
            }
        }
    });
}

#[test]
fn follower_below_leader_log_start_is_reset_to_it() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.fill(1, 300, 10_000).await;
        cluster.committed(1, 301).await;
        cluster.journal(1).set_start(250).unwrap();
        // A connected follower advances its own log start.
        cluster.append(1, b"on").unwrap();
        until("the log start", || cluster.journal(2).start() == 250).await;
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.same(1, 3).await;
        assert_eq!(cluster.journal(3).start(), 250);
        assert_eq!(cluster.owner(3).truncations.load(Ordering::SeqCst), 1);
        cluster.append(1, b"and on").unwrap();
        cluster.committed(3, 303).await;
    });
}

#[test]
fn new_replica_starts_with_the_batch_containing_the_log_start() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append_batch(1, 10, b"ten records");
        cluster.append_batch(1, 10, b"ten more");
        cluster.committed(3, 20).await;
        cluster.kill(3).await;
        cluster.wipe(3);
        // As by DeleteRecords: the log starts in the middle of the second batch.
        cluster.journal(1).set_start(13).unwrap();
        cluster.append_batch(1, 5, b"and on");
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        until("the log start", || cluster.journal(3).start() == 13).await;
        assert_eq!(frames(cluster.journal(3)), frames(cluster.journal(1)));
        assert_eq!(frames(cluster.journal(3))[0].0, 10, "the whole batch is there");
        until("an answer", || cluster.replica(3).leader_end() == Some(Offset(25))).await;
    });
}

#[test]
fn absent_replica_returns_after_log_start_moved_into_a_batch() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append_batch(1, 4, b"four");
        cluster.committed(3, 4).await;
        cluster.kill(3).await;
        cluster.append_batch(1, 30, b"thirty");
        cluster.committed(1, 34).await;
        cluster.journal(1).set_start(20).unwrap();
        cluster.append_batch(1, 2, b"two");
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.same(1, 3).await;
        until("the log start", || cluster.journal(3).start() == 20).await;
        assert_eq!(
            cluster.owner(3).truncations.load(Ordering::SeqCst),
            0,
            "its log reaches the batch: nothing is given up"
        );
    });
}

#[test]
fn log_truncated_to_a_start_inside_a_batch_refetches_that_batch() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append_batch(1, 10, b"ten records");
        cluster.committed(3, 10).await;
        cluster.journal(3).set_start(6).unwrap();
        cluster.kill(3).await;
        cluster.append_batch(1, 5, b"five");
        cluster.up(3).await;
        // As after a truncation requested by a new leader: empty, starting in the middle of a batch.
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.kill(3).await;
        cluster.up_with(3, |journal| journal.truncate(8).unwrap()).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.append_batch(1, 1, b"one");
        cluster.committed(3, 16).await;
        assert_eq!(frames(cluster.journal(3)).len(), 3);
    });
}

#[test]
fn replica_absent_beyond_tombstone_retention_is_rebuilt() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"key=value").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.append(1, b"key deleted").unwrap();
        cluster.append(1, b"another").unwrap();
        cluster.committed(1, 3).await;
        // The value and, later, its tombstone are removed; the removal is recorded before.
        let journal = cluster.journal(1).clone();
        journal.roll_if_older(i64::MAX);
        let mut cleaned = journal.cleaned();
        cleaned.below = 2;
        journal.note_cleaned(cleaned).unwrap();
        let both = &mut |frame: &[u8]| match PlainFraming.peek(frame).unwrap().base {
            0 | 1 => Rewrite::Drop,
            _ => Rewrite::Keep,
        };
        journal.compact(3, both).unwrap();
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        let content = |node: i32| {
            let all = frames(cluster.journal(node)).into_iter();
            let has_value = |frame: &bytes::Bytes| frame.windows(9).any(|part| part == b"key=value");
            all.filter(|(_, _, frame)| has_value(frame)).count()
        };
        assert_eq!(content(3), 0, "a deleted key is back");
        assert_eq!(cluster.journal(3).cleaned_below(), 2);
        // A follower that was present learns of it with the next record.
        cluster.append(1, b"next").unwrap();
        until("a note", || cluster.journal(2).cleaned_below() == 2).await;
        assert_eq!(cluster.owner(3).truncations.load(Ordering::SeqCst), 1);
        assert_eq!(
            cluster.owner(2).truncations.load(Ordering::SeqCst),
            0,
            "a present replica is not rebuilt"
        );
        // Again, with every removal already noted there: nothing to rebuild.
        cluster.kill(3).await;
        cluster.append(1, b"on").unwrap();
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        assert_eq!(cluster.owner(3).truncations.load(Ordering::SeqCst), 0);
        cluster.committed(3, 5).await;
        until("all followers have it", || cluster.replica(1).removable_below() == Offset(5)).await;
    });
}

#[test]
fn shard_replica_below_leader_log_start_installs_snapshot() {
    run(async {
        let mut cluster =
            Cluster::start(Kind { policy: ResetPolicy::InstallSnapshot, ..Kind::default() }).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.fill(1, 300, 10_000).await;
        cluster.committed(1, 301).await;
        cluster.journal(1).set_start(250).unwrap();
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        assert_eq!(cluster.owner(3).installs.load(Ordering::SeqCst), 1);
        assert_eq!((cluster.journal(3).start(), cluster.journal(3).end()), (301, 301));
        cluster.append(1, b"on").unwrap();
        cluster.committed(3, 302).await;
    });
}

#[test]
fn compaction_gaps_are_filled_on_a_new_replica() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.kill(3).await;
        cluster.fill(1, 600, 6_000).await;
        cluster.committed(1, 600).await;
        let journal = cluster.journal(1).clone();
        // Its last frames are removed too: the gap reaches to the log end.
        journal.roll_if_older(i64::MAX);
        let thirds = &mut |frame: &[u8]| match PlainFraming.peek(frame).unwrap().base {
            base if base % 3 == 0 && base < 570 => Rewrite::Keep,
            _ => Rewrite::Drop,
        };
        journal.compact(600, thirds).unwrap();
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        assert_eq!(cluster.journal(3).end(), 600);
        let kept: Vec<_> = frames(&journal);
        let copied = frames(cluster.journal(3));
        for frame in &kept {
            assert!(copied.contains(frame), "frame {} is missing", frame.0);
        }
        cluster.append(1, b"on").unwrap();
        cluster.committed(3, 601).await;
    });
}

#[test]
fn new_run_leads_nothing_until_a_record_names_it() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        // Its lease was lost, and it registers again.
        let run = cluster.register(1).await;
        cluster.node(1).driver.set_run(run);
        cluster.nodes[0].as_mut().unwrap().run = run;
        assert_eq!(cluster.append(1, b"no"), Err(AckError::NotLeader));
        assert_eq!(cluster.owner(1).ended.load(Ordering::SeqCst), 1);
        let member = cluster.member(1);
        cluster
            .change(|draft| {
                draft.restamp(member);
                assert!(draft.elect(BrokerId(1)));
            })
            .await;
        cluster.leads(1).await;
        assert_eq!(cluster.replica(1).leader_epoch().unwrap().0, 1);
        cluster.append(1, b"two").unwrap();
        for node in 1..=3 {
            cluster.committed(node, 2).await;
        }
    });
}

#[test]
fn idle_follower_stays_in_sync() {
    run(async {
        let cluster = Cluster::start(Kind { lag_ms: 400, ..Kind::default() }).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        let before = cluster.record().await.revision;
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        for n in 2..40 {
            cluster.append(1, b"more").unwrap();
            cluster.committed(1, n).await;
        }
        assert_eq!(cluster.record().await.revision, before, "no replica left the ISR");
    });
}

#[test]
fn removed_replica_is_dropped() {
    run(async {
        let cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.change(|draft| assert!(draft.begin_move(&[BrokerId(1), BrokerId(2)]))).await;
        cluster.change(|draft| assert!(draft.finish_move(1))).await;
        until("the drop", || cluster.owner(3).dropped.load(Ordering::SeqCst) == 1).await;
        cluster.node(3).driver.detach(ID);
        cluster.append(1, b"two").unwrap();
        cluster.committed(2, 2).await;
    });
}

#[test]
fn commits_do_not_wait_for_a_full_disk() {
    run(async {
        // No follower leaves the in-sync set for being slow here.
        let kind = Kind { lag_ms: 600_000, full: Some(3), ..Kind::default() };
        let cluster = Cluster::start(kind).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(2, 1).await;
        cluster.in_sync(&[1, 2]).await;
        assert_eq!(cluster.journal(3).end(), 0);
    });
}

#[test]
fn only_arriving_replicas_are_throttled() {
    // Throttled by the sender, or by the receiver.
    for (sending, taking_in) in [(Some(1), None), (None, Some(1))] {
        run(async {
            let cluster = Cluster::start(Kind::default()).await;
            let rates = |sending, taking_in| {
                (1..=3).for_each(|node| cluster.node(node).driver.set_move_rates(sending, taking_in));
            };
            cluster.leads(1).await;
            cluster.change(|draft| assert!(draft.begin_move(&[BrokerId(1), BrokerId(2)]))).await;
            cluster.change(|draft| assert!(draft.finish_move(2))).await;
            until("the drop", || cluster.owner(3).dropped.load(Ordering::SeqCst) == 1).await;
            cluster.fill(1, 300, 10_000).await;
            cluster.committed(2, 300).await;

            rates(sending, taking_in);
            let target = [BrokerId(1), BrokerId(2), BrokerId(3)];
            cluster.change(|draft| assert!(draft.begin_move(&target))).await;
            // One answer is sent, and its cost at a byte per second is most of a day.
            until("the first answer", || cluster.journal(3).end() > 0).await;
            for n in 0..100 {
                cluster.append(1, b"others go on").unwrap();
                cluster.committed(2, 301 + n).await;
            }
            assert!(cluster.journal(3).end() < 300, "{}", cluster.journal(3).end());
            assert!(cluster.record().await.value.is_arriving(BrokerId(3)));

            rates(None, None);
            cluster.in_sync(&[1, 2, 3]).await;
            cluster.append(1, b"and now all").unwrap();
            cluster.committed(3, 401).await;
            cluster.same(1, 3).await;
        });
    }
}

#[test]
fn log_ends_are_reported_to_other_nodes() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(2, 1).await;
        let driver = &cluster.node(1).driver;
        let unknown = PartitionId { index: 77, ..ID };
        let (run, ends) = driver.ask_log_ends(BrokerId(2), vec![ID, unknown]).await.unwrap();
        assert_eq!(run, cluster.node(2).run.epoch);
        assert_eq!(ends[0].1.unwrap().end, Offset(1));
        assert_eq!(ends[1], (unknown, None));
        let driver = driver.clone();
        cluster.kill(2).await;
        assert!(driver.ask_log_ends(BrokerId(2), vec![ID]).await.is_err());
    });
}

#[test]
fn many_partitions_share_a_connection() {
    run(async {
        let cluster = Cluster::start(Kind { partitions: 150, ..Kind::default() }).await;
        let leader = |index: u32| 1 + (index % 3) as i32;
        let id = |index: u32| PartitionId { index, ..ID };
        until("leading", || {
            (0..150).all(|index| cluster.replica_of(leader(index), id(index)).leader_epoch().is_some())
        })
        .await;
        for round in 0..10_u32 {
            for index in 0..150 {
                cluster.append_to(leader(index), id(index), &round.to_be_bytes()).unwrap();
            }
        }
        until("the commits", || {
            (0..150).all(|index| {
                (1..=3).all(|node| cluster.replica_of(node, id(index)).high_watermark() == Offset(10))
            })
        })
        .await;
    });
}
