//! A toy state machine: the sum per key.

use std::collections::BTreeMap;

use super::*;
use crate::types::{BrokerEpoch, DirectoryId};
use moim_base::BrokerId;

#[derive(Default, Debug, PartialEq, Eq)]
struct Sums(BTreeMap<u8, u64>);

impl StateMachine for Sums {
    fn apply(&mut self, _offset: Offset, record: &[u8]) {
        *self.0.entry(record[0]).or_default() += u64::from(record[1]);
    }

    fn snapshot(&self) -> Bytes {
        self.0.iter().flat_map(|(key, sum)| [&[*key][..], &sum.to_be_bytes()].concat()).collect()
    }

    fn install(&mut self, bytes: &[u8]) -> Result<(), InstallError> {
        if !bytes.len().is_multiple_of(9) {
            return Err(InstallError(format!("{} bytes", bytes.len())));
        }
        let pairs = bytes.chunks(9).map(|c| (c[0], u64::from_be_bytes(c[1..].try_into().unwrap())));
        self.0 = pairs.collect();
        Ok(())
    }
}

fn records(range: std::ops::Range<u8>) -> Vec<(Offset, LeaderEpoch, [u8; 2])> {
    range.map(|n| (Offset(i64::from(n)), LeaderEpoch(2), [n % 5, n])).collect()
}

fn applied(range: std::ops::Range<u8>) -> Applier<Sums> {
    let mut applier = Applier::new(Sums::default());
    let records = records(range);
    applier.on_committed(records.iter().map(|(o, e, r)| (*o, *e, &r[..])), Offset(100));
    applier
}

#[test]
fn installed_snapshot_equals_state_after_applying_all_records() {
    let mut leader = applied(0..60);
    assert_eq!(leader.take_snapshot(), Offset(60));
    let mut follower = applied(0..10);
    let mut install = SnapshotTransfer::default();
    let snapshot = loop {
        let (snapshot, position) = install.next_chunk(0);
        let from = Sender { node: BrokerId(2), epoch: BrokerEpoch(1), directory: DirectoryId(1) };
        let fetch = SnapshotFetch { from, leader_epoch: LeaderEpoch(2), snapshot, position };
        if let Some(whole) = install.on_chunk(leader.chunk(&fetch, 7).unwrap()) {
            break whole;
        }
    };
    follower.install(snapshot).unwrap();
    assert_eq!((follower.machine(), follower.applied()), (leader.machine(), Offset(60)));
    let tail = records(60..80);
    for applier in [&mut leader, &mut follower] {
        applier.on_committed(tail.iter().map(|(o, e, r)| (*o, *e, &r[..])), Offset(80));
    }
    assert_eq!(follower.machine(), leader.machine());
    assert_eq!(leader.machine(), applied(0..80).machine());
}

#[test]
fn undecodable_snapshot_leaves_state_unchanged() {
    let mut applier = applied(0..10);
    let snapshot = Snapshot { end: Offset(50), last_epoch: LeaderEpoch(1), bytes: Bytes::from_static(b"x") };
    assert!(applier.install(snapshot).is_err());
    assert_eq!((applier.machine(), applier.applied()), (applied(0..10).machine(), Offset(10)));
}

#[test]
#[should_panic(expected = "applied record is below the high watermark")]
fn applying_an_uncommitted_record_panics() {
    let mut applier = Applier::new(Sums::default());
    applier.on_committed([(Offset(5), LeaderEpoch(0), &[0, 0][..])], Offset(5));
}
