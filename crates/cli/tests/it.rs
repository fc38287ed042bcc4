//! Integration tests of the `moim` binary: real processes, real sockets, one data directory each.

#[path = "it/bad_servers.rs"]
mod bad_servers;
#[path = "it/bench.rs"]
mod bench;
#[path = "it/bit_rot.rs"]
mod bit_rot;
#[path = "it/cluster.rs"]
mod cluster;
#[path = "it/dev.rs"]
mod dev;
#[path = "it/etcd.rs"]
mod etcd;
#[path = "it/formation.rs"]
mod formation;
#[path = "it/groups.rs"]
mod groups;
#[path = "it/kafka_mode.rs"]
mod kafka_mode;
#[path = "it/kafka_mode_claims.rs"]
mod kafka_mode_claims;
#[path = "it/keys.rs"]
mod keys;
#[path = "it/locks.rs"]
mod locks;
#[path = "it/nodes.rs"]
mod nodes;
#[path = "it/replication.rs"]
mod replication;
#[path = "it/rollback.rs"]
mod rollback;
#[path = "it/routing.rs"]
mod routing;
#[path = "it/serving.rs"]
mod serving;
#[path = "it/slots.rs"]
mod slots;
#[path = "it/stuck_shards.rs"]
mod stuck_shards;
#[path = "it/support.rs"]
mod support;
#[path = "it/topics.rs"]
mod topics;
