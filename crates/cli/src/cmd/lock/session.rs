//! The server side of a lock: a lease that is kept alive and a key in the queue of the name.
//!
//! Invariant: the lease's time counts from when its last answered keep-alive was sent. The key of a contender has the name
//! of its lease, so joining the queue is idempotent: a repeated attempt has the same key.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use moim_cluster::EtcdClient;
use moim_cluster::etcd::{EtcdError, WatchError, WatchOptions, prefix_end};
use moim_wire_grpc::Code;
use moim_wire_grpc::etcd::{
    Compare, CompareResult, CompareTarget, CompareValue, EventType, KeyValue, PutRequest, RangeRequest,
    RangeResponse, RequestOp, RequestOpKind, ResponseOpKind, SortOrder, SortTarget, TxnRequest,
};
use tokio::sync::watch;

use super::moment::Moment;

/// When the command is asked to stop, in percent of the lease's time.
const STOP_PERCENT: u32 = 70;
/// When it is killed. What is left is for a kernel that is slow to kill and for clocks that drift.
const KILL_PERCENT: u32 = 85;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The reason why a lock was lost.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error("its lease has ended")]
    Lease,
    #[error("its key was deleted")]
    Key,
}

/// A lease, a key in the queue, and the state that keeps both alive.
#[derive(Clone)]
pub(super) struct Session {
    client: EtcdClient,
    lease: i64,
    ttl: Duration,
    /// When the last answered renewal was sent, in nanoseconds of [`Moment`].
    renewed: Arc<AtomicU64>,
    /// The create revision of our key once it is there, else 0.
    token: Arc<AtomicI64>,
    key: Bytes,
    prefix: Bytes,
    value: Bytes,
}

impl Session {
    /// A lease for a contender for `name`.
    pub(super) async fn open(
        client: &EtcdClient,
        name: &str,
        value: &str,
        ttl: Duration,
    ) -> Result<Self, EtcdError> {
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1_000)).unwrap_or(i64::MAX);
        let sent = Moment::now();
        let granted = client.lease_grant(seconds, 0).await?;
        let prefix = format!("{name}/");
        Ok(Self {
            client: client.clone(),
            lease: granted.id,
            ttl: Duration::from_secs(u64::try_from(granted.ttl).unwrap_or(0)),
            renewed: Arc::new(AtomicU64::new(sent.0)),
            token: Arc::new(AtomicI64::new(0)),
            key: format!("{prefix}{:x}", granted.id).into(),
            prefix: prefix.into(),
            value: value.to_owned().into(),
        })
    }

    /// The key in the queue.
    pub(super) fn key(&self) -> String {
        String::from_utf8_lossy(&self.key).into_owned()
    }

    /// When the command has to be asked to stop, if no renewal comes.
    pub(super) fn stop_at(&self) -> Moment {
        self.renewed().after(self.ttl * STOP_PERCENT / 100)
    }

    /// When the command has to be killed, if no renewal comes.
    pub(super) fn kill_at(&self) -> Moment {
        self.renewed().after(self.ttl * KILL_PERCENT / 100)
    }

    fn renewed(&self) -> Moment {
        Moment(self.renewed.load(Ordering::SeqCst))
    }

    /// Returns when the time to stop has come. Cancel-safe.
    pub(super) async fn stop_reached(&self) {
        // A renewal moves it while we wait.
        while !self.stop_at().is_over() {
            self.stop_at().reached().await;
        }
    }

    /// Renews the lease three times per TTL, signals each renewal, and returns when the lock is lost for certain.
    ///
    /// A failed renewal is not a loss; the deadlines of SIGTERM and SIGKILL stay as they are.
    pub(super) async fn keep(&self, told: watch::Sender<()>) -> Lost {
        let client = self.client.with_timeout((self.ttl / 6).max(Duration::from_millis(100)));
        loop {
            self.renewed().after(self.ttl / 3).reached().await;
            let sent = Moment::now();
            match client.lease_keep_alive(self.lease).await {
                Ok(renewed) if renewed.ttl > 0 => {
                    self.renewed.store(sent.0, Ordering::SeqCst);
                    told.send_replace(());
                }
                Ok(_) => return Lost::Lease,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
            // Another client may have deleted the key.
            let token = self.token.load(Ordering::SeqCst);
            if token != 0
                && let Ok(found) =
                    client.range(&RangeRequest { key: self.key.clone(), ..Default::default() }).await
                && found.kvs.first().is_none_or(|kv| kv.create_revision != token)
            {
                return Lost::Key;
            }
        }
    }

    /// Joins the queue and waits for our turn. Gives the fencing token: the create revision of our key.
    pub(super) async fn acquire(&self, wait: bool) -> Result<Option<i64>, Acquire> {
        let token = self.join().await?;
        self.token.store(token, Ordering::SeqCst);
        loop {
            let (revision, before) = self.predecessor(token).await?;
            let Some(before) = before else { break };
            if !wait {
                return Ok(None);
            }
            self.deleted(before.key, revision).await?;
        }
        // Ours is the oldest key, if it still exists.
        let found = self.range(RangeRequest { key: self.key.clone(), ..Default::default() }).await?;
        match found.kvs.first() {
            Some(kv) if kv.create_revision == token => Ok(Some(token)),
            _ => Err(Acquire::Lost(Lost::Key)),
        }
    }

    /// Puts our key unless it is there; either way its create revision is the token.
    async fn join(&self) -> Result<i64, Acquire> {
        let absent = Compare {
            result: CompareResult::Equal as i32,
            target: CompareTarget::Create as i32,
            key: self.key.clone(),
            value: Some(CompareValue::CreateRevision(0)),
            range_end: Bytes::new(),
        };
        let put = PutRequest {
            key: self.key.clone(),
            value: self.value.clone(),
            lease: self.lease,
            ..Default::default()
        };
        let get = RangeRequest { key: self.key.clone(), ..Default::default() };
        let request = TxnRequest {
            compare: vec![absent],
            success: vec![RequestOp { op: Some(RequestOpKind::Put(put)) }],
            failure: vec![RequestOp { op: Some(RequestOpKind::Range(get)) }],
        };
        loop {
            let error = match self.client.txn(&request).await {
                Ok(done) if done.succeeded => return Ok(done.header.map_or(0, |header| header.revision)),
                Ok(done) => {
                    let found = done.responses.into_iter().find_map(|response| match response.op {
                        Some(ResponseOpKind::Range(range)) => range.kvs.into_iter().next(),
                        _ => None,
                    });
                    match found {
                        Some(kv) => return Ok(kv.create_revision),
                        // Gone between the two: the lease has ended, and the next try says so.
                        None => continue,
                    }
                }
                Err(error) => error,
            };
            match error {
                // The same key again: if the first attempt was executed, it is still one key in the queue.
                error if error.may_have_happened() => tokio::time::sleep(PAUSE).await,
                error if error.code() == Some(Code::NotFound) => return Err(Acquire::Lost(Lost::Lease)),
                error => return Err(error.into()),
            }
        }
    }

    /// The youngest key that is older than ours, and the revision at which that was so.
    async fn predecessor(&self, token: i64) -> Result<(i64, Option<KeyValue>), Acquire> {
        let request = RangeRequest {
            key: self.prefix.clone(),
            range_end: prefix_end(&self.prefix).into(),
            limit: 1,
            sort_order: SortOrder::Descend as i32,
            sort_target: SortTarget::Create as i32,
            max_create_revision: token - 1,
            keys_only: true,
            ..Default::default()
        };
        let found = self.range(request).await?;
        Ok((found.header.map_or(0, |header| header.revision), found.kvs.into_iter().next()))
    }

    async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Acquire> {
        loop {
            match self.client.range(&request).await {
                Ok(found) => return Ok(found),
                // A transient error: the caller bounds the wait.
                Err(error) if error.code().is_none() || error.may_have_happened() => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until this key is deleted after `revision`, at which it was there.
    async fn deleted(&self, key: Bytes, revision: i64) -> Result<(), Acquire> {
        let options = WatchOptions { key, start_revision: revision + 1, ..Default::default() };
        let mut watch = loop {
            match self.client.watch(options.clone()).await {
                Ok(watch) => break watch,
                Err(WatchError::Failed(_)) => tokio::time::sleep(PAUSE).await,
                Err(error) => return gone_or(error),
            }
        };
        loop {
            match watch.next().await {
                Ok(batch) if batch.events.iter().any(|event| event.kind == EventType::Delete as i32) => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) => return gone_or(error),
            }
        }
    }

    /// Revokes the lease and with it the key in the queue. The next contender gets the lock at once.
    pub(super) async fn release(&self) -> Result<(), EtcdError> {
        let client = self.client.with_timeout(self.ttl.min(Duration::from_secs(5)));
        match client.lease_revoke(self.lease).await {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Some(Code::NotFound) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Why a lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub(super) enum Acquire {
    #[error("lost while waiting: {0}")]
    Lost(Lost),
    #[error(transparent)]
    Failed(#[from] EtcdError),
    #[error("{0}")]
    Watch(WatchError),
}

/// After a compaction the caller looks again; every other end is one.
fn gone_or(error: WatchError) -> Result<(), Acquire> {
    match error {
        WatchError::Compacted { .. } => Ok(()),
        error => Err(Acquire::Watch(error)),
    }
}
