//! The options of a node's store.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use moim_base::BrokerId;

use crate::effects::FrameLimits;

/// The options of a node's store.
#[derive(Clone, Debug)]
pub struct Options {
    /// The id of this node.
    pub node: BrokerId,
    /// The cluster id; part of the Redis node ids.
    pub cluster_id: String,
    /// The address that listeners bind to.
    pub host: IpAddr,
    /// The ports of the replicas of other shards: shard n takes the n-th. A range that starts with 0 picks free ports.
    pub replica_ports: RangeInclusive<u16>,
    /// The advertised host; empty for the bound address.
    pub advertise_host: String,
    /// The advertised port of the home shard; 0 for the bound port.
    pub advertise_port: u16,
    /// The number of event loops.
    pub loops: usize,
    /// The number of founders: as many shards are created at first.
    pub founders: usize,
    /// The data folder; snapshots are below it.
    pub data: std::path::PathBuf,
    /// The initial `maxmemory`; 0 for no limit.
    pub max_memory: u64,
    /// The frame limits of a shard's journal.
    pub frames: FrameLimits,
    /// The interval between two keyspace hash checks, in milliseconds.
    pub check_interval_ms: u64,
}
