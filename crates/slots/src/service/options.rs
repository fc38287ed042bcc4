//! What the store of a node is started with.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use moim_base::BrokerId;

use crate::effects::FrameLimits;

/// What the store is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// This node.
    pub node: BrokerId,
    /// The cluster, for ids that no other cluster has.
    pub cluster_id: String,
    /// Where listeners bind.
    pub host: IpAddr,
    /// The ports of other shards: shard n takes the n-th. Starting with 0 they are picked.
    pub replica_ports: RangeInclusive<u16>,
    /// What clients are told in place of the address that is bound; empty for that one.
    pub advertise_host: String,
    /// The port that clients are told for the home shard; 0 for the one that is bound.
    pub advertise_port: u16,
    /// Event loops.
    pub loops: usize,
    /// Nodes that found the cluster: as many shards are made at first.
    pub founders: usize,
    /// Where snapshots are kept.
    pub data: std::path::PathBuf,
    /// `maxmemory` at the start; 0 for none.
    pub max_memory: u64,
    /// How large the frames of a shard's journal are.
    pub frames: FrameLimits,
    /// How often replicas are compared with their primary, in milliseconds.
    pub check_interval_ms: u64,
}
