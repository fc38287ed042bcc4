//! Election by compare-and-swap: the creator of the key is the leader; lease expiry ends the leadership of a
//! failed leader.
//!
//! Invariants: the key is created by compare-and-swap only; its create revision, the token, grows with every
//! leader; a leader stops by its own clock before the lease can expire at the store.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{ElectionError, LeaderChanges, LeaderElection, LeaderInfo, Leadership, Standing};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::held_key;
use crate::keys;
use crate::repository::{BoxFuture, Compare, Entry, Event, RepositoryError, Txn, TxnOutcome};
use crate::session::{Session, SessionEnd};

/// Options of an election.
#[derive(Clone, Debug)]
pub struct ElectionOptions {
    /// Lease TTL: the time until a failed leader is replaced.
    pub ttl: Duration,
    /// The key; `cluster:leader/{name}` if empty.
    pub key: String,
}

impl Default for ElectionOptions {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(3), key: String::new() }
    }
}

/// Value of the election key.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    node_id: String,
    /// Informational.
    #[serde(default)]
    since: i64,
}

/// An election by compare-and-swap, on any store. Cheap to clone.
#[derive(Clone)]
pub struct CasElection {
    context: Context,
    name: Arc<str>,
    key: Arc<str>,
    ttl: Duration,
}

impl CasElection {
    /// A candidate for `name`. Does nothing until `campaign` or `observe` is called.
    pub fn new(context: &Context, name: impl Into<Arc<str>>, options: ElectionOptions) -> Self {
        let name = name.into();
        let key = if options.key.is_empty() { keys::leader(&name) } else { options.key };
        Self { context: context.clone(), name, key: key.into(), ttl: options.ttl }
    }

    /// Becomes leader immediately, or returns the current leader.
    pub async fn try_lead(&self) -> Result<Result<Leadership, Option<LeaderInfo>>, ElectionError> {
        let session = Session::open(&self.context, self.ttl).await?;
        match self.try_create(&session).await? {
            Ok(token) => Ok(Ok(self.lead(session, token))),
            Err((_, found)) => Ok(Err(found.as_ref().map(info))),
        }
    }

    /// Tries to create the key. On a conflict: the revision of the comparison, and the current entry.
    async fn try_create(
        &self,
        session: &Session,
    ) -> Result<Result<i64, (i64, Option<Entry>)>, RepositoryError> {
        let record =
            Record { node_id: self.context.node_id.to_string(), since: self.context.clock.wall_ms() };
        let value = serde_json::to_vec(&record).expect("plain fields serialize to JSON");
        let txn = Txn::new().when(Compare::Absent(self.key.to_string())).put_leased(
            &*self.key,
            value,
            session.lease(),
        );
        Ok(match self.context.repository.txn(txn).await? {
            TxnOutcome::Done { revision } => Ok(revision),
            TxnOutcome::Conflict { revision, mut current } => match current.pop().flatten() {
                // Created by an earlier attempt whose reply was lost.
                Some(entry) if entry.lease == Some(session.lease()) => Ok(entry.create_revision),
                found => Err((revision, found)),
            },
        })
    }

    fn lead(&self, session: Session, token: i64) -> Leadership {
        let (context, name) = (self.context.clone(), self.name.to_string());
        let event =
            ClusterEvent::Leader { name: name.clone(), leader: Some(context.node_id.to_string()), token };
        context.events.publish(event);
        context.metrics.leader_changes.inc();
        context.metrics.is_leader.inc();
        let gauge = context.metrics.is_leader.clone();
        held_key::monitor(&self.context, &session, self.key.to_string(), token, move |reason| {
            context.events.publish(ClusterEvent::LeadershipLost { name, reason: reason.to_owned() });
        });
        let ended = session.watcher();
        self.context.scope.spawn("cluster leadership", async move {
            ended.lost().await;
            gauge.dec();
        });
        let standing = Arc::new(CasStanding { session, key: Arc::clone(&self.key), token });
        Leadership { name: Arc::clone(&self.name), fencing_token: token, standing }
    }

    async fn run(&self) -> Result<Leadership, ElectionError> {
        let mut backoff = Backoff::default();
        let mut session: Option<Session> = None;
        loop {
            if self.context.scope.shutdown().is_stopped() {
                return Err(ElectionError::Stopped);
            }
            let ours = match session.take().filter(Session::is_valid) {
                Some(ours) => ours,
                None => match Session::open(&self.context, self.ttl).await {
                    Ok(ours) => ours,
                    Err(error) if error.is_retryable() => {
                        backoff.pause().await;
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                },
            };
            match self.try_create(&ours).await {
                // A key that was created late under an expired lease gives no leadership.
                Ok(Ok(token)) if ours.is_valid() => return Ok(self.lead(ours, token)),
                Ok(Ok(_)) => {}
                Ok(Err((revision, _))) => {
                    backoff.reset();
                    self.wait_for_vacancy(revision).await;
                    // Jitter, so that candidates do not retry at once.
                    tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3_000))).await;
                    session = Some(ours);
                }
                Err(RepositoryError::LeaseNotFound(_)) => {}
                Err(error) if error.is_retryable() => {
                    backoff.pause().await;
                    session = Some(ours);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns when the key may be absent: it was deleted after `revision`, or the watch failed.
    async fn wait_for_vacancy(&self, revision: i64) {
        let Ok(mut watch) = self.context.repository.watch(&self.key, revision + 1).await else {
            return tokio::time::sleep(Duration::from_millis(100)).await;
        };
        loop {
            match watch.next().await {
                Some(Ok(Event::Delete { key, .. })) if *key == *self.key => return,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }
}

fn info(entry: &Entry) -> LeaderInfo {
    let node_id = serde_json::from_slice::<Record>(&entry.value)
        .map_or_else(|_| String::from_utf8_lossy(&entry.value).into_owned(), |record| record.node_id);
    LeaderInfo { node_id, fencing_token: entry.create_revision }
}

impl LeaderElection for CasElection {
    fn campaign(&self) -> BoxFuture<'_, Result<Leadership, ElectionError>> {
        Box::pin(self.run())
    }

    fn observe(&self) -> LeaderChanges {
        let (sender, receiver) = watch::channel(None);
        let (context, key) = (self.context.clone(), Arc::clone(&self.key));
        let name = self.name.to_string();
        let stop = context.scope.shutdown().clone();
        context.scope.clone().spawn("cluster election observer", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = sender.closed() => {}
                () = observe(&context, &name, &key, &sender) => {}
            }
        });
        LeaderChanges { receiver }
    }
}

/// Publishes the current leader to `sender`; never returns.
async fn observe(context: &Context, name: &str, key: &str, sender: &watch::Sender<Option<LeaderInfo>>) {
    let set = |leader: Option<LeaderInfo>| {
        let changed = sender.send_if_modified(|known| {
            let changed = *known != leader;
            known.clone_from(&leader);
            changed
        });
        let own = leader.as_ref().is_some_and(|leader| *leader.node_id == *context.node_id);
        if changed && !own {
            context.metrics.leader_changes.inc();
            let token = leader.as_ref().map_or(0, |leader| leader.fencing_token);
            let leader = leader.map(|leader| leader.node_id);
            context.events.publish(ClusterEvent::Leader { name: name.to_owned(), leader, token });
        }
    };
    let mut backoff = Backoff::default();
    loop {
        if let Ok((revision, entries)) = context.repository.list(key).await
            && let Ok(mut watch) = context.repository.watch(key, revision + 1).await
        {
            backoff.reset();
            set(entries.iter().find(|entry| entry.key == key).map(info));
            while let Some(Ok(event)) = watch.next().await {
                match event {
                    Event::Put(entry) if entry.key == key => set(Some(info(&entry))),
                    Event::Delete { key: deleted, .. } if deleted == key => set(None),
                    Event::Put(_) | Event::Delete { .. } => {}
                }
            }
        }
        backoff.pause().await;
    }
}

struct CasStanding {
    session: Session,
    key: Arc<str>,
    token: i64,
}

impl Standing for CasStanding {
    fn is_valid(&self) -> bool {
        self.session.is_valid()
    }

    fn lost(&self) -> BoxFuture<'_, SessionEnd> {
        Box::pin(self.session.lost())
    }

    fn resign(&self) -> BoxFuture<'_, Result<(), ElectionError>> {
        Box::pin(async { Ok(self.session.close().await?) })
    }

    fn fence(&self) -> Compare {
        Compare::CreateRevision(self.key.to_string(), self.token)
    }
}
