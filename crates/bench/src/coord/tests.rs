//! The loads on a real etcd, if installed: the counted operations equal those the server executed.

use std::time::Duration;

use super::*;
use crate::load::Until;
use crate::load::coord::Watchers;

fn real() -> Option<(Runtime, Running)> {
    let Some(real @ RealEtcd::Program(_)) = RealEtcd::find() else {
        eprintln!("SKIPPED: no etcd on this machine");
        return None;
    };
    let cluster = Cluster::etcd(&real, 1, false).unwrap();
    Some((load::runtime().unwrap(), Running { label: "etcd", cluster }))
}

#[test]
fn every_counted_put_is_a_revision() {
    let Some((runtime, running)) = real() else { return };
    let addr = running.addr(0).unwrap();
    let revision = || runtime.block_on(loads::status(addr)).unwrap().header.unwrap().revision;
    let before = revision();
    let work = runtime.block_on(loads::puts(addr, 20, Until::Operations(5))).unwrap();
    assert_eq!(work.ops, 100);
    assert_eq!(revision() - before, 100);
    let missing = runtime.block_on(loads::gets(addr, 2, Until::Operations(1)));
    assert!(missing.is_err(), "a get that finds nothing is no get");
    runtime.block_on(loads::fill(addr)).unwrap();
    let work = runtime.block_on(loads::gets(addr, 20, Until::Operations(5))).unwrap();
    assert_eq!((work.ops, work.latency.unwrap().len()), (100, 100));
}

#[test]
fn every_watcher_sees_every_update() {
    let Some((runtime, running)) = real() else { return };
    let addr = running.addr(0).unwrap();
    let mut watchers = runtime.block_on(Watchers::create(addr, 30)).unwrap();
    for _ in 0..2 {
        let load = watchers.run(Duration::from_millis(100), Duration::from_millis(20));
        assert_eq!(runtime.block_on(load).unwrap().ops, 5 * 30);
    }
}
