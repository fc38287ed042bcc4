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
fn what_is_appended_is_committed_and_on_every_node() {
    for durability in [Durability::Fsync, Durability::Replicated] {
        run(async {
            let cluster = Cluster::start(Kind { durability, ..Kind::default() }).await;
            cluster.leads(1).await;
            assert_eq!(cluster.append(2, b"no"), Err(AckError::NotLeader));
            for n in 0..200_u32 {
                cluster.append(1, &n.to_be_bytes()).unwrap();
            }
            // One that does not go through the commit log, and is larger than an answer.
            cluster.append(1, &vec![3; 2 << 20]).unwrap();
            for node in 1..=3 {
                cluster.committed(node, 201).await;
            }
            for node in 2..=3 {
                cluster.same(1, node).await;
                assert_eq!(cluster.told(node).appended.load(Ordering::SeqCst), 201);
                assert_eq!(cluster.told(node).follows.load(Ordering::SeqCst), 1);
            }
            assert_eq!(cluster.told(1).leads.load(Ordering::SeqCst), 0);
            assert_eq!(cluster.record().await.value.isr.len(), 3, "nobody left meanwhile");
        });
    }
}

#[test]
fn a_follower_that_dies_is_left_out_and_back_in_sync_when_it_returns() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.append(1, b"two").unwrap();
        cluster.committed(1, 2).await;
        cluster.in_sync(&[1, 2]).await;
        // On a slow machine others may be silent for a moment, too.
        let suspects = || cluster.node(1).driver.suspects().into_iter().map(|one| one.0).collect::<Vec<_>>();
        until("who is dead is suspected", || suspects() == [BrokerId(3)]).await;
        cluster.fill(1, 100, 10_000).await;
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.append(1, b"three").unwrap();
        cluster.committed(3, 103).await;
        cluster.same(1, 3).await;
        until("nobody is suspected", || cluster.node(1).driver.suspects().is_empty()).await;
    });
}

#[test]
fn below_the_minimum_nothing_is_taken_and_who_waits_is_told() {
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
        until("the bad news", || cluster.told(1).under_min.load(Ordering::SeqCst) == 1).await;
        assert_eq!(cluster.append(1, b"four"), Err(AckError::NotEnoughReplicas));
        assert!(cluster.copy(1).high_watermark().0 < 3);
        cluster.up(2).await;
        cluster.committed(1, 3).await;
        cluster.append(1, b"four").unwrap();
        cluster.committed(2, 4).await;
    });
}

#[test]
fn a_former_leader_gives_up_what_was_never_committed() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(2, 1).await;
        cluster.committed(3, 1).await;
        // Cut off: what it takes now reaches nobody.
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
        assert!(cluster.told(1).cuts.load(Ordering::SeqCst) > 0);
        let log = frames(cluster.journal(1));
        assert_eq!(log.iter().map(|frame| (frame.0, frame.1)).collect::<Vec<_>>(), [(0, 0), (1, 1)]);
    });
}

#[test]
fn leadership_moves_while_everybody_appends_and_nothing_committed_is_lost() {
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
fn records_are_gone_when_they_are_gone_from_everybody_in_sync() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.fill(1, 300, 10_000).await;
        cluster.committed(3, 300).await;
        cluster.journal(1).set_start(250).unwrap();
        let leader = cluster.copy(1).clone();
        leader.on_log_start();
        assert_eq!(leader.gone_everywhere(Offset(250)).await.unwrap(), Offset(250));
        assert_eq!([2, 3].map(|node| cluster.journal(node).start()), [250, 250]);
        assert!(cluster.copy(2).gone_everywhere(Offset(250)).await.is_err(), "only a leader knows");
        // Nobody waits for a node that is away, once it is out of the in-sync set.
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
fn a_copy_with_damage_comes_back_into_the_in_sync_set_only_whole() {
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
            // What the controller does when it reads the member's record.
            cluster.change(|draft| draft.forget(BrokerId(3))).await;
            cluster.append(1, b"commits without it").unwrap();
            cluster.committed(1, 301).await;
            cluster.committed(2, 301).await;
            cluster.in_sync(&[1, 2]).await;
            assert_eq!((cluster.journal(3).end(), driver.repairs()), (300, 0), "the leader was not told");
            driver.on_damage_told(&[ID]);
            cluster.in_sync(&[1, 2, 3]).await;
            cluster.committed(3, 301).await;
            assert!(!cluster.journal(3).is_damaged());
            until("the end of the repair", || cluster.node(3).driver.repairing().is_empty()).await;
            assert_eq!(cluster.node(3).driver.repairs(), 2, "it began, and it ended");
            let installed = policy == ResetPolicy::InstallSnapshot && log_start > 0;
            assert_eq!(cluster.told(3).installs.load(Ordering::SeqCst), usize::from(installed));
            if !installed {
                cluster.same(1, 3).await;
            }
        }
    });
}

#[test]
fn a_follower_below_the_leaders_log_start_begins_anew_there() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.fill(1, 300, 10_000).await;
        cluster.committed(1, 301).await;
        cluster.journal(1).set_start(250).unwrap();
        // A follower that is there moves its own start along.
        cluster.append(1, b"on").unwrap();
        until("the log start", || cluster.journal(2).start() == 250).await;
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        cluster.same(1, 3).await;
        assert_eq!(cluster.journal(3).start(), 250);
        assert_eq!(cluster.told(3).cuts.load(Ordering::SeqCst), 1);
        cluster.append(1, b"and on").unwrap();
        cluster.committed(3, 303).await;
    });
}

#[test]
fn a_new_replica_begins_with_the_batch_that_holds_the_log_start() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append_batch(1, 10, b"ten records");
        cluster.append_batch(1, 10, b"ten more");
        cluster.committed(3, 20).await;
        cluster.kill(3).await;
        cluster.wipe(3);
        // What DeleteRecords does: the log starts in the middle of the second batch.
        cluster.journal(1).set_start(13).unwrap();
        cluster.append_batch(1, 5, b"and on");
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        until("the log start", || cluster.journal(3).start() == 13).await;
        assert_eq!(frames(cluster.journal(3)), frames(cluster.journal(1)));
        assert_eq!(frames(cluster.journal(3))[0].0, 10, "the whole batch is there");
        until("an answer", || cluster.copy(3).leader_end() == Some(Offset(25))).await;
    });
}

#[test]
fn a_replica_that_was_away_while_the_log_start_moved_into_a_batch_comes_back() {
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
            cluster.told(3).cuts.load(Ordering::SeqCst),
            0,
            "its log reaches the batch: nothing is given up"
        );
    });
}

#[test]
fn a_log_cut_down_to_a_start_inside_of_a_batch_begins_with_that_batch_again() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append_batch(1, 10, b"ten records");
        cluster.committed(3, 10).await;
        cluster.journal(3).set_start(6).unwrap();
        cluster.kill(3).await;
        cluster.append_batch(1, 5, b"five");
        cluster.up(3).await;
        // As a cut that a new leader asks for leaves it: empty, from the middle of a batch on.
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
fn a_replica_away_for_longer_than_tombstones_are_kept_is_rebuilt() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"key=value").unwrap();
        cluster.committed(3, 1).await;
        cluster.kill(3).await;
        cluster.append(1, b"key deleted").unwrap();
        cluster.append(1, b"another").unwrap();
        cluster.committed(1, 3).await;
        // The value and, later, its tombstone go; what is gone is on record before.
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
            let told = |frame: &bytes::Bytes| frame.windows(9).any(|part| part == b"key=value");
            all.filter(|(_, _, frame)| told(frame)).count()
        };
        assert_eq!(content(3), 0, "a deleted key is back");
        assert_eq!(cluster.journal(3).cleaned_below(), 2);
        // Who was there hears of it with the next record.
        cluster.append(1, b"next").unwrap();
        until("a note", || cluster.journal(2).cleaned_below() == 2).await;
        assert_eq!(cluster.told(3).cuts.load(Ordering::SeqCst), 1);
        assert_eq!(cluster.told(2).cuts.load(Ordering::SeqCst), 0, "who was there is not rebuilt");
        // Once more, with everything that was removed on record there: nothing to rebuild.
        cluster.kill(3).await;
        cluster.append(1, b"on").unwrap();
        cluster.up(3).await;
        cluster.in_sync(&[1, 2, 3]).await;
        assert_eq!(cluster.told(3).cuts.load(Ordering::SeqCst), 0);
        cluster.committed(3, 5).await;
        until("everybody has it", || cluster.copy(1).removable_below() == Offset(5)).await;
    });
}

#[test]
fn a_shard_below_the_leaders_log_start_installs_its_snapshot() {
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
        assert_eq!(cluster.told(3).installs.load(Ordering::SeqCst), 1);
        assert_eq!((cluster.journal(3).start(), cluster.journal(3).end()), (301, 301));
        cluster.append(1, b"on").unwrap();
        cluster.committed(3, 302).await;
    });
}

#[test]
fn holes_that_compaction_left_are_filled_on_a_new_copy() {
    run(async {
        let mut cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.kill(3).await;
        cluster.fill(1, 600, 6_000).await;
        cluster.committed(1, 600).await;
        let journal = cluster.journal(1).clone();
        // Its last frames go too: the hole reaches to the log's end.
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
fn a_new_run_of_a_node_leads_nothing_until_a_record_names_it() {
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
        assert_eq!(cluster.told(1).ended.load(Ordering::SeqCst), 1);
        let member = cluster.member(1);
        cluster
            .change(|draft| {
                draft.restamp(member);
                assert!(draft.elect(BrokerId(1)));
            })
            .await;
        cluster.leads(1).await;
        assert_eq!(cluster.copy(1).leader_epoch().unwrap().0, 1);
        cluster.append(1, b"two").unwrap();
        for node in 1..=3 {
            cluster.committed(node, 2).await;
        }
    });
}

#[test]
fn a_follower_with_nothing_to_fetch_for_long_is_still_in_sync() {
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
        assert_eq!(cluster.record().await.revision, before, "nobody was left out");
    });
}

#[test]
fn a_node_that_has_no_part_any_more_is_told_to_drop_its_copy() {
    run(async {
        let cluster = Cluster::start(Kind::default()).await;
        cluster.leads(1).await;
        cluster.append(1, b"one").unwrap();
        cluster.change(|draft| assert!(draft.begin_move(&[BrokerId(1), BrokerId(2)]))).await;
        cluster.change(|draft| assert!(draft.finish_move(1))).await;
        until("the drop", || cluster.told(3).dropped.load(Ordering::SeqCst) == 1).await;
        cluster.node(3).driver.detach(ID);
        cluster.append(1, b"two").unwrap();
        cluster.committed(2, 2).await;
    });
}

#[test]
fn commits_do_not_wait_for_a_disk_without_room() {
    run(async {
        // Nobody is given up for being slow here.
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
fn a_replica_that_is_being_moved_is_slowed_down_and_nobody_else() {
    // By whoever sends, or by whoever takes in.
    for (sending, taking_in) in [(Some(1), None), (None, Some(1))] {
        run(async {
            let cluster = Cluster::start(Kind::default()).await;
            let rates = |sending, taking_in| {
                (1..=3).for_each(|node| cluster.node(node).driver.set_move_rates(sending, taking_in));
            };
            cluster.leads(1).await;
            cluster.change(|draft| assert!(draft.begin_move(&[BrokerId(1), BrokerId(2)]))).await;
            cluster.change(|draft| assert!(draft.finish_move(2))).await;
            until("the drop", || cluster.told(3).dropped.load(Ordering::SeqCst) == 1).await;
            cluster.fill(1, 300, 10_000).await;
            cluster.committed(2, 300).await;

            rates(sending, taking_in);
            let target = [BrokerId(1), BrokerId(2), BrokerId(3)];
            cluster.change(|draft| assert!(draft.begin_move(&target))).await;
            // One answer goes, and what it costs at a byte a second is most of a day.
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
fn log_ends_can_be_asked_for() {
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
            (0..150).all(|index| cluster.copy_of(leader(index), id(index)).leader_epoch().is_some())
        })
        .await;
        for round in 0..10_u32 {
            for index in 0..150 {
                cluster.append_to(leader(index), id(index), &round.to_be_bytes()).unwrap();
            }
        }
        until("the commits", || {
            (0..150).all(|index| {
                (1..=3).all(|node| cluster.copy_of(node, id(index)).high_watermark() == Offset(10))
            })
        })
        .await;
    });
}
