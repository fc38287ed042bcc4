//! The methods of the etcd v3 API, each asked as often as it may be: reads and renewals until the deadline,
//! changes once.

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

/// Between two tries of a read.
const PAUSE_MS: std::ops::RangeInclusive<u64> = 10..=60;
/// A read that hangs this long is asked elsewhere.
const TRY: Duration = Duration::from_secs(3);

/// A client of an etcd, or of a Moim. Cheap to clone.
#[derive(Clone)]
pub struct EtcdClient {
    channel: Channel,
    call_timeout: Duration,
}

/// How a call may be repeated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    /// It changes nothing, or the same again: until the deadline.
    Freely,
    /// It changes something: while it was surely not done.
    IfUndone,
}

impl EtcdClient {
    /// A client whose connections live on the current runtime. Nothing is connected yet.
    pub fn new(options: EtcdOptions, scope: &Scope) -> Self {
        let call_timeout = options.call_timeout;
        Self { channel: Channel::new(options, scope), call_timeout }
    }

    /// The same client with another time for each call.
    #[must_use]
    pub fn with_timeout(&self, call_timeout: Duration) -> Self {
        Self { channel: self.channel.clone(), call_timeout }
    }

    /// Its way to the servers.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Whether any server takes connections: one try of each, without the patience of a call.
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
        repeat: Repeat,
    ) -> Result<A, EtcdError> {
        let deadline = self.deadline();
        loop {
            let link = self.channel.link(deadline, false).await?;
            let left = deadline.saturating_duration_since(Instant::now());
            // A change has one try and all the time; a read rather asks somebody else.
            let within = if repeat == Repeat::Freely { left.min(TRY) } else { left };
            let error = match timeout(within, unary(&link, path, question, within)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => EtcdError::Unknown(format!("{}: no answer in time", link.endpoint)),
            };
            let again = match repeat {
                Repeat::Freely => error.may_pass(),
                Repeat::IfUndone => error.may_pass() && !error.may_have_happened(),
            };
            if error.may_pass() {
                // Also when this call has no time left: the next one shall ask somebody else.
                self.channel.leave(&link);
            }
            let pause = Duration::from_millis(fastrand::u64(PAUSE_MS));
            if !again || Instant::now() + pause >= deadline {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Reads keys.
    pub async fn range(&self, request: &RangeRequest) -> Result<RangeResponse, EtcdError> {
        self.call(method::kv::RANGE, request, Repeat::Freely).await
    }

    /// Gives a key a value.
    pub async fn put(&self, request: &PutRequest) -> Result<PutResponse, EtcdError> {
        self.call(method::kv::PUT, request, Repeat::IfUndone).await
    }

    /// Takes keys away.
    pub async fn delete(&self, request: &DeleteRangeRequest) -> Result<DeleteRangeResponse, EtcdError> {
        self.call(method::kv::DELETE_RANGE, request, Repeat::IfUndone).await
    }

    /// Compares and changes.
    pub async fn txn(&self, request: &TxnRequest) -> Result<TxnResponse, EtcdError> {
        let repeat = if only_reads(request) { Repeat::Freely } else { Repeat::IfUndone };
        self.call(method::kv::TXN, request, repeat).await
    }

    /// Forgets history before a revision.
    pub async fn compact(&self, request: &CompactionRequest) -> Result<CompactionResponse, EtcdError> {
        self.call(method::kv::COMPACT, request, Repeat::IfUndone).await
    }

    /// Watches keys. Returns when the server has begun to watch.
    pub async fn watch(&self, options: WatchOptions) -> Result<EtcdWatch, WatchError> {
        EtcdWatch::open(self.channel.clone(), options, self.deadline()).await
    }

    /// Makes a lease of so many seconds; an id of 0 lets the server choose.
    pub async fn lease_grant(&self, ttl: i64, id: i64) -> Result<LeaseGrantResponse, EtcdError> {
        self.call(method::lease::GRANT, &LeaseGrantRequest { ttl, id }, Repeat::IfUndone).await
    }

    /// Ends a lease and its keys.
    pub async fn lease_revoke(&self, id: i64) -> Result<LeaseRevokeResponse, EtcdError> {
        self.call(method::lease::REVOKE, &LeaseRevokeRequest { id }, Repeat::IfUndone).await
    }

    /// How long a lease has left; a `ttl` of -1 is a lease that does not exist.
    pub async fn lease_time_to_live(
        &self,
        id: i64,
        keys: bool,
    ) -> Result<LeaseTimeToLiveResponse, EtcdError> {
        self.call(method::lease::TIME_TO_LIVE, &LeaseTimeToLiveRequest { id, keys }, Repeat::Freely).await
    }

    /// Every lease.
    pub async fn leases(&self) -> Result<LeaseLeasesResponse, EtcdError> {
        self.call(method::lease::LEASES, &LeaseLeasesRequest {}, Repeat::Freely).await
    }

    /// Renews a lease once; a `ttl` of 0 is a lease that does not exist.
    pub async fn lease_keep_alive(&self, id: i64) -> Result<LeaseKeepAliveResponse, EtcdError> {
        self.call(method::lease::KEEP_ALIVE, &LeaseKeepAliveRequest { id }, Repeat::Freely).await
    }

    /// The members.
    pub async fn member_list(&self) -> Result<MemberListResponse, EtcdError> {
        self.call(method::cluster::MEMBER_LIST, &MemberListRequest { linearizable: true }, Repeat::Freely)
            .await
    }

    /// How the member that is asked does.
    pub async fn status(&self) -> Result<StatusResponse, EtcdError> {
        self.call(method::maintenance::STATUS, &StatusRequest {}, Repeat::Freely).await
    }

    /// The alarms that are on.
    pub async fn alarms(&self) -> Result<AlarmResponse, EtcdError> {
        self.alarm(AlarmAction::Get, 0, AlarmType::None).await
    }

    /// Asks for alarms, raises one, or takes it back.
    pub async fn alarm(
        &self,
        action: AlarmAction,
        member_id: u64,
        alarm: AlarmType,
    ) -> Result<AlarmResponse, EtcdError> {
        let request = AlarmRequest { action: action as i32, member_id, alarm: alarm as i32 };
        let repeat = if action == AlarmAction::Get { Repeat::Freely } else { Repeat::IfUndone };
        self.call(method::maintenance::ALARM, &request, repeat).await
    }

    /// Removes a member for good.
    pub async fn member_remove(&self, id: u64) -> Result<MemberRemoveResponse, EtcdError> {
        self.call(method::cluster::MEMBER_REMOVE, &MemberRemoveRequest { id }, Repeat::IfUndone).await
    }

    /// Asks the member, which must be the leader, to step down for another.
    pub async fn move_leader(&self, target_id: u64) -> Result<MoveLeaderResponse, EtcdError> {
        self.call(method::maintenance::MOVE_LEADER, &MoveLeaderRequest { target_id }, Repeat::IfUndone).await
    }

    /// The store of the member as a file. The call's time counts for each piece.
    pub async fn snapshot(&self) -> Result<Snapshot, EtcdError> {
        let link = self.channel.link(self.deadline(), false).await?;
        let mut stream = Stream::open(&link, method::maintenance::SNAPSHOT, None).await?;
        stream.send(&SnapshotRequest {}, true)?;
        Ok(Snapshot { stream, patience: self.call_timeout })
    }
}

/// A store that arrives as a file.
pub struct Snapshot {
    stream: Stream,
    patience: Duration,
}

impl Snapshot {
    /// The next piece, or `None` after the last: the SHA-256 of all before it.
    pub async fn next(&mut self) -> Result<Option<Bytes>, EtcdError> {
        match timeout_at(Instant::now() + self.patience, self.stream.next::<SnapshotResponse>()).await {
            Ok(piece) => Ok(piece?.map(|piece| piece.blob)),
            Err(_) => Err(EtcdError::Unknown("the snapshot has stopped to arrive".to_owned())),
        }
    }
}

fn only_reads(txn: &TxnRequest) -> bool {
    txn.success.iter().chain(&txn.failure).all(|step| match &step.op {
        None | Some(RequestOpKind::Range(_)) => true,
        Some(RequestOpKind::Put(_) | RequestOpKind::DeleteRange(_)) => false,
        Some(RequestOpKind::Txn(nested)) => only_reads(nested),
    })
}
