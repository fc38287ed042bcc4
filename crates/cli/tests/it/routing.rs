//! `moim manager` and `moim routing`, with two managers and two range servers, against every store.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moim_base::task::{Scope, Shutdown};
use moim_cluster::etcd::EtcdOptions;
use moim_cluster::registry::{NodeRegistry, ServerInfo};
use moim_cluster::routing::{RangeHooks, RouteEntry, RouteServer};
use moim_cluster::{BoxFuture, Context, EtcdClient, EtcdRepository};

use crate::cluster::eventually;
use crate::etcd::Etcd;
use crate::support::command;

/// Hooks of a server without data.
struct Empty;

type Step<'a, T> = BoxFuture<'a, Result<T, String>>;

impl RangeHooks for Empty {
    fn drain<'a>(&'a self, _range: &'a RouteEntry) -> Step<'a, Bytes> {
        Box::pin(async { Ok(Bytes::new()) })
    }

    fn prepare<'a>(&'a self, _partition: &'a str, _handoff: Bytes) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn resume<'a>(&'a self, _range: &'a RouteEntry) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn split<'a>(&'a self, _range: &'a RouteEntry, _key: &'a str, _upper: &'a str) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn merge<'a>(&'a self, _range: &'a RouteEntry, _above: &'a RouteEntry) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn released(&self, _partition: &str) {}
}

struct Manager {
    child: Child,
    address: String,
}

impl Manager {
    fn start(etcd: &str) -> Self {
        let args =
            ["manager", "--namespace", "shop", "--port", "0", "--initial-partitions", "4", "--etcd", etcd];
        let mut child = command(&args).stdout(Stdio::piped()).spawn().expect("moim starts");
        let mut ready = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        out.read_line(&mut ready).expect("a ready line");
        let address = ready.trim().strip_prefix("ready namespace=shop manager=").expect("the ready line");
        Self { child, address: address.to_owned() }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Range servers in this process, stopped on drop.
struct Servers {
    _runtime: tokio::runtime::Runtime,
    _servers: Vec<RouteServer>,
}

impl Servers {
    fn start(etcd: &str, managers: &[String], ids: &[&str]) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let servers = runtime.block_on(async {
            let mut servers = Vec::new();
            for id in ids {
                let scope = Scope::new(Shutdown::new());
                let client = EtcdClient::new(EtcdOptions::new([etcd]), &scope);
                let context = Context::new(*id, Arc::new(EtcdRepository::new(client, "")), &scope);
                let registry = NodeRegistry::new(&context, "shop", Duration::from_secs(5));
                let info =
                    ServerInfo { id: (*id).to_owned(), address: format!("{id}:1"), ..ServerInfo::default() };
                let server =
                    RouteServer::start(&context, &registry, "shop", info, managers, Arc::new(Empty)).await;
                servers.push(server.expect("it registers"));
            }
            servers
        });
        Self { _runtime: runtime, _servers: servers }
    }
}

#[test]
fn routing_table_is_shown_split_merged_migrated_and_drained() {
    for etcd in Etcd::all() {
        let unmanaged = etcd.moim(&["routing", "show", "--namespace", "shop"]);
        assert_eq!(unmanaged.status, 4, "{unmanaged:?}");
        let managers = [Manager::start(&etcd.address), Manager::start(&etcd.address)];
        let addresses: Vec<String> = managers.iter().map(|manager| manager.address.clone()).collect();
        let _servers = Servers::start(&etcd.address, &addresses, &["s1", "s2"]);
        let routing =
            |args: &[&str]| etcd.moim(&[&["routing", "--namespace", "shop", "-o", "json"], args].concat());
        let table = || routing(&["show"]).json();
        eventually("ranges are served", || {
            let shown = routing(&["show"]);
            shown.status == 0
                && shown.json()["servers"].as_array().is_some_and(|servers| {
                    servers.len() == 2
                        && servers.iter().all(|one| one["partitions"] == 2 && one["connected"] == true)
                })
        });
        let shown = table();
        assert_eq!(shown["partitions"].as_array().map(Vec::len), Some(4));
        assert_eq!(shown["partitions"][0]["key_range_start"], "");
        let split = routing(&["split", "p1", "!x"]);
        assert_eq!(split.status, 0, "{split:?}");
        let upper = split.json()["partition"].as_str().expect("a name").to_owned();
        let moved = routing(&["migrate", &upper, "--to", "s2"]);
        assert_eq!(moved.status, 0, "{moved:?}");
        assert_eq!(routing(&["merge", "p1", &upper]).status, 2, "needs --yes");
        let merged = routing(&["merge", "p1", &upper, "--yes"]);
        assert_eq!(merged.status, 0, "{merged:?}");
        assert_eq!(table()["partitions"].as_array().map(Vec::len), Some(4));
        let drained = routing(&["drain", "s1"]);
        assert_eq!(drained.status, 0, "{drained:?}");
        assert!(table()["partitions"].as_array().expect("a list").iter().all(|one| one["node_id"] == "s2"));
        for (args, status) in [
            (&["split", "p1", "zzz"][..], 2),
            (&["split", "unknown", "a"], 3),
            (&["migrate", "p1", "--to", "unknown"], 3),
            (&["drain", "s2"], 7),
        ] {
            let done = routing(args);
            assert_eq!(done.status, status, "{args:?} {done:?}");
        }
        let plain = etcd.moim(&["routing", "--namespace", "shop", "show"]);
        assert!(plain.stdout.contains("PARTITION") && plain.stdout.contains("s2:1"), "{plain:?}");
    }
}
