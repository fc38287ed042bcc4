//! The methods of the etcd v3 API with their retry rules: reads and lease renewals are retried until the
//! deadline, writes are sent once.

use std::time::Duration;

use bytes::Bytes;
use moim_base::task::Scope;
use moim_wire_grpc::etcd::{
    AlarmAction, AlarmRequest, AlarmResponse, AlarmType, CompactionRequest, CompactionResponse,
    DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseLeasesRequest, LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse,
    LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, MemberListRequest, MemberListResponse,
    MemberRemoveRequest, MemberRemoveResponse, MoveLeaderRequest, MoveLeaderResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, RequestOpKind, SnapshotRequest, SnapshotResponse,
    StatusRequest, StatusResponse, TxnRequest, TxnResponse,
};
use moim_wire_grpc::{Message, method};
use tokio::time::{Instant, timeout, timeout_at};

use super::call::{Stream, unary};
use super::channel::{Channel, EtcdOptions};
use super::error::EtcdError;
use super::watch::{EtcdWatch, WatchError, WatchOptions};

/// Pause between two attempts of a read.
const PAUSE_MS: std::ops::RangeInclusive<u64> = 10..=60;
/// Timeout of one read attempt; then the read fails over to another server.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// A client of an etcd or a Moim server. Cheap to clone.
#[derive(Clone)]
pub struct EtcdClient {
    channel: Channel,
    call_timeout: Duration,
}

/// Retry rule of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// Read-only or idempotent: retried until the deadline.
    Idempotent,
    /// A write: retried only while it was certainly not applied.
    IfNotApplied,
}

impl EtcdClient {
    /// A client whose connections live on the current runtime. It connects on demand.
    pub fn new(options: EtcdOptions, scope: &Scope) -> Self {
        let call_timeout = options.call_timeout;
        Self { channel: Channel::new(options, scope), call_timeout }
    }

    /// The same client with another call timeout.
    #[must_use]
    pub fn with_timeout(&self, call_timeout: Duration) -> Self {
        Self { channel: self.channel.clone(), call_timeout }
    }

    /// The connection channel.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Succeeds if any server accepts connections: one attempt for each server, without retries.
    pub async fn probe(&self) -> Result<(), EtcdError> {
        self.channel.link(self.deadline(), true).await.map(drop)
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.call_timeout
    }

    async fn call<Q: Message, A: Message + Default>(
        &self,
        path: &'static str,
        question: &Q,
        retry: Retry,
    ) -> Result<A, EtcdError> {
        let deadline = self.deadline();
        loop {
            let link = self.channel.link(deadline, false).await?;
            let left = deadline.saturating_duration_since(Instant::now());
            // A write gets one attempt with the whole timeout; a read fails over earlier.
            let within = if retry == Retry::Idempotent { left.min(ATTEMPT_TIMEOUT) } else { left };
            let error = match timeout(within, unary(&link, path, question, within)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => EtcdError::Unknown(format!("{}: no reply within the timeout", link.endpoint)),
            };
            let again = match retry {
                Retry::Idempotent => error.is_retryable_read(),
                Retry::IfNotApplied => error.is_retryable_read() && !error.may_have_happened(),
            };
            if error.is_retryable_read() {
                // Also without time left for this call: the next call must use another server.
                self.channel.leave(&link);
            }
            let pause = Duration::from_millis(fastrand::u64(PAUSE_MS));
            if !again || Instant::now() + pause >= deadline {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Range read.
    pub async fn range(&self, request: &RangeRequest) -> Result<RangeResponse, EtcdError> {
        self.call(method::kv::RANGE, request, Retry::Idempotent).await
    }

    /// Put.
    pub async fn put(&self, request: &PutRequest) -> Result<PutResponse, EtcdError> {
        self.call(method::kv::PUT, request, Retry::IfNotApplied).await
    }

    /// DeleteRange.
    pub async fn delete(&self, request: &DeleteRangeRequest) -> Result<DeleteRangeResponse, EtcdError> {
        self.call(method::kv::DELETE_RANGE, request, Retry::IfNotApplied).await
    }

    /// Transaction.
    pub async fn txn(&self, request: &TxnRequest) -> Result<TxnResponse, EtcdError> {
        let retry = if is_read_only(request) { Retry::Idempotent } else { Retry::IfNotApplied };
        self.call(method::kv::TXN, request, retry).await
    }

    /// Compacts the history before a revision.
    pub async fn compact(&self, request: &CompactionRequest) -> Result<CompactionResponse, EtcdError> {
        self.call(method::kv::COMPACT, request, Retry::IfNotApplied).await
    }

    /// Opens a watch. Returns when the server has created it.
    pub async fn watch(&self, options: WatchOptions) -> Result<EtcdWatch, WatchError> {
        EtcdWatch::open(self.channel.clone(), options, self.deadline()).await
    }

    /// Grants a lease with a TTL in seconds; an id of 0 lets the server choose.
    pub async fn lease_grant(&self, ttl: i64, id: i64) -> Result<LeaseGrantResponse, EtcdError> {
        self.call(method::lease::GRANT, &LeaseGrantRequest { ttl, id }, Retry::IfNotApplied).await
    }

    /// Revokes a lease and deletes its keys.
    pub async fn lease_revoke(&self, id: i64) -> Result<LeaseRevokeResponse, EtcdError> {
        self.call(method::lease::REVOKE, &LeaseRevokeRequest { id }, Retry::IfNotApplied).await
    }

    /// Remaining TTL of a lease; a `ttl` of -1 means that the lease does not exist.
    pub async fn lease_time_to_live(
        &self,
        id: i64,
        keys: bool,
    ) -> Result<LeaseTimeToLiveResponse, EtcdError> {
        self.call(method::lease::TIME_TO_LIVE, &LeaseTimeToLiveRequest { id, keys }, Retry::Idempotent).await
    }

    /// Lists all leases.
    pub async fn leases(&self) -> Result<LeaseLeasesResponse, EtcdError> {
        self.call(method::lease::LEASES, &LeaseLeasesRequest {}, Retry::Idempotent).await
    }

    /// Renews a lease once; a `ttl` of 0 means that the lease does not exist.
    pub async fn lease_keep_alive(&self, id: i64) -> Result<LeaseKeepAliveResponse, EtcdError> {
        self.call(method::lease::KEEP_ALIVE, &LeaseKeepAliveRequest { id }, Retry::Idempotent).await
    }

    /// Lists the cluster members.
    pub async fn member_list(&self) -> Result<MemberListResponse, EtcdError> {
        self.call(method::cluster::MEMBER_LIST, &MemberListRequest { linearizable: true }, Retry::Idempotent)
            .await
    }

    /// Status of the member that serves the call.
    pub async fn status(&self) -> Result<StatusResponse, EtcdError> {
        self.call(method::maintenance::STATUS, &StatusRequest {}, Retry::Idempotent).await
    }

    /// Lists the active alarms.
    pub async fn alarms(&self) -> Result<AlarmResponse, EtcdError> {
        self.alarm(AlarmAction::Get, 0, AlarmType::None).await
    }

    /// Lists, activates or deactivates an alarm.
    pub async fn alarm(
        &self,
        action: AlarmAction,
        member_id: u64,
        alarm: AlarmType,
    ) -> Result<AlarmResponse, EtcdError> {
        let request = AlarmRequest { action: action as i32, member_id, alarm: alarm as i32 };
        let retry = if action == AlarmAction::Get { Retry::Idempotent } else { Retry::IfNotApplied };
        self.call(method::maintenance::ALARM, &request, retry).await
    }

    /// Removes a member permanently.
    pub async fn member_remove(&self, id: u64) -> Result<MemberRemoveResponse, EtcdError> {
        self.call(method::cluster::MEMBER_REMOVE, &MemberRemoveRequest { id }, Retry::IfNotApplied).await
    }

    /// Moves the leadership; the serving member must be the leader.
    pub async fn move_leader(&self, target_id: u64) -> Result<MoveLeaderResponse, EtcdError> {
        self.call(method::maintenance::MOVE_LEADER, &MoveLeaderRequest { target_id }, Retry::IfNotApplied)
            .await
    }

    /// Streams a snapshot of the member's store. The call timeout applies to each chunk.
    pub async fn snapshot(&self) -> Result<Snapshot, EtcdError> {
        let link = self.channel.link(self.deadline(), false).await?;
        let mut stream = Stream::open(&link, method::maintenance::SNAPSHOT, None).await?;
        stream.send(&SnapshotRequest {}, true)?;
        Ok(Snapshot { stream, patience: self.call_timeout })
    }
}

/// A snapshot stream.
pub struct Snapshot {
    stream: Stream,
    patience: Duration,
}

impl Snapshot {
    /// The next chunk, or `None` after the last. The stream ends with the SHA-256 of the preceding bytes.
    pub async fn next(&mut self) -> Result<Option<Bytes>, EtcdError> {
        match timeout_at(Instant::now() + self.patience, self.stream.next::<SnapshotResponse>()).await {
            Ok(piece) => Ok(piece?.map(|piece| piece.blob)),
            Err(_) => Err(EtcdError::Unknown("snapshot stream timed out".to_owned())),
        }
    }
}

fn is_read_only(txn: &TxnRequest) -> bool {
    txn.success.iter().chain(&txn.failure).all(|step| match &step.op {
        None | Some(RequestOpKind::Range(_)) => true,
        Some(RequestOpKind::Put(_) | RequestOpKind::DeleteRange(_)) => false,
        Some(RequestOpKind::Txn(nested)) => is_read_only(nested),
    })
}
