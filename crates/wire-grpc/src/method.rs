//! The path of every method, as the `:path` header has it.

#![allow(missing_docs)] // each is named after its method

pub mod kv {
    pub const RANGE: &str = "/etcdserverpb.KV/Range";
    pub const PUT: &str = "/etcdserverpb.KV/Put";
    pub const DELETE_RANGE: &str = "/etcdserverpb.KV/DeleteRange";
    pub const TXN: &str = "/etcdserverpb.KV/Txn";
    pub const COMPACT: &str = "/etcdserverpb.KV/Compact";
}

pub mod watch {
    pub const WATCH: &str = "/etcdserverpb.Watch/Watch";
}

pub mod lease {
    pub const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
    pub const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
    pub const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
    pub const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
    pub const LEASES: &str = "/etcdserverpb.Lease/LeaseLeases";
}

pub mod cluster {
    pub const MEMBER_ADD: &str = "/etcdserverpb.Cluster/MemberAdd";
    pub const MEMBER_REMOVE: &str = "/etcdserverpb.Cluster/MemberRemove";
    pub const MEMBER_UPDATE: &str = "/etcdserverpb.Cluster/MemberUpdate";
    pub const MEMBER_LIST: &str = "/etcdserverpb.Cluster/MemberList";
    pub const MEMBER_PROMOTE: &str = "/etcdserverpb.Cluster/MemberPromote";
}

pub mod maintenance {
    pub const ALARM: &str = "/etcdserverpb.Maintenance/Alarm";
    pub const STATUS: &str = "/etcdserverpb.Maintenance/Status";
    pub const DEFRAGMENT: &str = "/etcdserverpb.Maintenance/Defragment";
    pub const HASH: &str = "/etcdserverpb.Maintenance/Hash";
    pub const HASH_KV: &str = "/etcdserverpb.Maintenance/HashKV";
    pub const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";
    pub const MOVE_LEADER: &str = "/etcdserverpb.Maintenance/MoveLeader";
    pub const DOWNGRADE: &str = "/etcdserverpb.Maintenance/Downgrade";
}

pub mod auth {
    pub const STATUS: &str = "/etcdserverpb.Auth/AuthStatus";
    /// What every method of the service begins with.
    pub const PREFIX: &str = "/etcdserverpb.Auth/";
}

pub mod lock {
    pub const LOCK: &str = "/v3lockpb.Lock/Lock";
    pub const UNLOCK: &str = "/v3lockpb.Lock/Unlock";
}

pub mod election {
    pub const CAMPAIGN: &str = "/v3electionpb.Election/Campaign";
    pub const PROCLAIM: &str = "/v3electionpb.Election/Proclaim";
    pub const LEADER: &str = "/v3electionpb.Election/Leader";
    pub const OBSERVE: &str = "/v3electionpb.Election/Observe";
    pub const RESIGN: &str = "/v3electionpb.Election/Resign";
}

pub mod health {
    pub const CHECK: &str = "/grpc.health.v1.Health/Check";
    pub const WATCH: &str = "/grpc.health.v1.Health/Watch";
}
