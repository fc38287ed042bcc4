//! Snapshot files: complete or refused, the newest wins, leftovers are removed.

use std::collections::{BTreeMap, BTreeSet};

use moim_journal::RealDisk;
use moim_journal::disk::{Fault, SimDisk, Survival};
use openraft::BasicNode;
use tempfile::TempDir;

use super::*;
use crate::types::{LogId, Membership, StoredMembership};

fn meta(index: u64) -> SnapshotMeta {
    let nodes = BTreeMap::from([(1, BasicNode::new("a:1"))]);
    let members = Membership::new(vec![BTreeSet::from([1])], nodes).unwrap();
    let at = LogId::new_term_index(1, index);
    SnapshotMeta { last_log_id: Some(at), last_membership: StoredMembership::new(Some(at), members) }
}

fn open(dir: &TempDir) -> Arc<SnapshotDir> {
    SnapshotDir::open(Arc::new(RealDisk), dir.path(), "raft/1/snapshots").unwrap()
}

fn names(dir: &TempDir) -> Vec<String> {
    let list = std::fs::read_dir(dir.path().join("raft/1/snapshots")).unwrap();
    let mut names: Vec<_> = list.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn content(snapshot: &SnapshotFile) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    snapshot.content()?.1.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[test]
fn content_of_any_size_reads_back_after_a_restart() {
    for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7] {
        let dir = tempfile::tempdir().unwrap();
        let body: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        open(&dir).write(&meta(5), |out| out.write_all(&body)).unwrap();
        let (found, snapshot) = open(&dir).current().unwrap();
        assert_eq!(found, meta(5));
        assert_eq!(snapshot.verify().unwrap(), meta(5));
        assert!(content(&snapshot).unwrap() == body, "{len} bytes");
    }
}

#[test]
fn the_newest_snapshot_stays_and_an_older_one_does_not_take_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let snapshots = open(&dir);
    for index in [5, 9, 7] {
        snapshots.write(&meta(index), |out| out.write_all(&index.to_le_bytes())).unwrap();
    }
    let (found, snapshot) = snapshots.current().unwrap();
    assert_eq!(found, meta(9));
    assert_eq!(content(&snapshot).unwrap(), 9_u64.to_le_bytes());
    assert_eq!(names(&dir), ["00000000000000000009-1.snap"]);
}

#[test]
fn a_snapshot_that_was_not_finished_is_gone_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let snapshots = open(&dir);
    snapshots.write(&meta(5), |out| out.write_all(b"state")).unwrap();
    let failed = snapshots.write(&meta(6), |_| Err(io::Error::other("no")));
    assert!(failed.is_err());
    std::mem::forget(snapshots.draft().unwrap());
    assert_eq!(names(&dir).len(), 2);
    assert_eq!(open(&dir).current().unwrap().0, meta(5));
    assert_eq!(names(&dir), ["00000000000000000005-1.snap"]);
}

#[test]
fn any_changed_byte_and_any_missing_end_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    let snapshots = open(&dir);
    snapshots.write(&meta(5), |out| out.write_all(b"the state")).unwrap();
    let (_, whole) = snapshots.current().unwrap();
    let bytes = whole.piece(0, usize::MAX).unwrap();
    let check = |bytes: &[u8]| {
        let mut copy = snapshots.draft().unwrap();
        copy.append(bytes).unwrap();
        copy.verify().is_ok()
    };
    assert!(check(&bytes));
    for at in 0..bytes.len() {
        let mut broken = bytes.to_vec();
        broken[at] ^= 1;
        assert!(!check(&broken), "byte {at}");
        assert!(!check(&bytes[..at]), "{at} bytes");
    }
    assert!(!check(&[&bytes[..], b"x"].concat()), "more than the end");
}

/// Writes snapshots until a power loss at the `operation`th operation; returns the last acknowledged one.
fn write_until_power_loss(disk: &SimDisk, operation: u64) -> u64 {
    disk.create_dir(Path::new("/data")).unwrap();
    disk.sync_dir(Path::new("/")).unwrap();
    disk.set_fault(Some((operation, Fault::PowerCut)));
    let open = SnapshotDir::open(Arc::new(disk.clone()), Path::new("/data"), "raft/1/snapshots");
    let Ok(snapshots) = open else { return 0 };
    let written = |index: &u64| snapshots.write(&meta(*index), |out| out.write_all(&[7; 1000])).is_ok();
    (1..=4).take_while(written).last().unwrap_or(0)
}

#[test]
fn a_snapshot_that_was_acknowledged_survives_a_power_loss_at_any_operation() {
    let whole = SimDisk::new();
    assert_eq!(write_until_power_loss(&whole, u64::MAX), 4);
    for operation in 2..whole.operations() {
        let disk = SimDisk::new();
        let acknowledged = write_until_power_loss(&disk, operation);
        for (seed, survival) in [Survival::Nothing, Survival::Everything, Survival::Random].iter().enumerate()
        {
            let disk = disk.crash(*survival, seed as u64);
            let at = format!("operation {operation}, {survival:?}, {acknowledged} acknowledged");
            let snapshots =
                SnapshotDir::open(Arc::new(disk), Path::new("/data"), "raft/1/snapshots").unwrap();
            let found = snapshots.current().map(|(found, snapshot)| {
                assert_eq!(content(&snapshot).unwrap(), [7; 1000], "{at}");
                found.last_log_id.unwrap().index
            });
            assert!(found.unwrap_or(0) >= acknowledged, "{at}: found {found:?}");
        }
    }
}
