//! Leadership that follows the Raft leader: no key to compete for, the term is the fencing token.
//!
//! A leadership is valid only while a quorum has confirmed it: each confirmation is valid for most of the
//! election timeout, counted from the sending of the confirmation request. On a leadership transfer the
//! leader invalidates its leadership before it asks the target to start an election, and does not become
//! valid again in the same term: the target need not wait for the election timeout. The term is also written
//! to `cluster:leader/{app}`, by compare-and-swap from a smaller term only, so that transactions on the
//! group's store can be fenced by it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moim_coord::Coordinator;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::keys;
use crate::leadership::{ElectionError, LeaderChanges, LeaderElection, LeaderInfo, Leadership, Standing};
use crate::repository::{BoxFuture, Compare, Event, Expect, RepositoryError, Swap};
use crate::session::SessionEnd;

/// Fraction of a confirmation's validity that is used.
const SAFETY_FACTOR: f64 = 0.8;

/// Leads while this member is the Raft leader of its group. Cheap to clone.
#[derive(Clone)]
pub struct RaftElection {
    context: Context,
    name: Arc<str>,
    key: Arc<str>,
    coordinator: Coordinator,
    lease: Duration,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Term {
    node_id: String,
    term: u64,
}

impl RaftElection {
    pub(super) fn new(context: &Context, app: &str, coordinator: Coordinator, lease: Duration) -> Self {
        let key = keys::leader(app).into();
        Self { context: context.clone(), name: app.into(), key, coordinator, lease }
    }

    /// The term of this leader, confirmed by a quorum; `None` when this member is not the leader.
    async fn confirmed(&self) -> Option<u64> {
        let group = self.coordinator.group();
        let leads = |term: &Option<(u64, moim_raft::Member)>| {
            term.as_ref().filter(|(_, leader)| leader.id == group.voter()).map(|(term, _)| *term)
        };
        let before = leads(&group.leader_in_term())?;
        group.read_index().await.ok()?;
        let still = leads(&group.leader_in_term()) == Some(before) && !group.has_transferred(before);
        still.then_some(before)
    }

    /// True if this member is the leader of `term` by local knowledge and has not started a transfer.
    fn leads_in(&self, term: u64) -> bool {
        let group = self.coordinator.group();
        let known = group.leader_in_term();
        !group.has_transferred(term)
            && known.is_some_and(|(known, leader)| known == term && leader.id == group.voter())
    }

    /// A failed transfer leaves this member leader of a term it must not rely on: start a new election.
    async fn maybe_leave_term(&self, stuck: &mut Option<(u64, u64)>) {
        let group = self.coordinator.group();
        let led = group.leader_in_term().filter(|(_, leader)| leader.id == group.voter());
        let Some(term) = led.map(|(term, _)| term).filter(|term| group.has_transferred(*term)) else {
            *stuck = None;
            return;
        };
        let now = self.context.clock.monotonic_ns();
        let (_, since) = *stuck.get_or_insert((term, now));
        if Duration::from_nanos(now.saturating_sub(since)) > self.lease * 4 {
            *stuck = None;
            if let Err(error) = group.campaign().await {
                tracing::debug!(%error, term, "leadership transfer failed and no new election could be started");
            }
        }
    }

    /// Records the term; returns the revision of the record.
    async fn announce(&self, term: u64) -> Result<Option<i64>, RepositoryError> {
        let store = &self.context.repository;
        let entry = store.get(&self.key).await?;
        let known: Option<Term> = entry.as_ref().and_then(|entry| serde_json::from_slice(&entry.value).ok());
        let ours =
            known.as_ref().is_some_and(|known| known.term == term && known.node_id == *self.context.node_id);
        if let (true, Some(entry)) = (ours, &entry) {
            return Ok(Some(entry.mod_revision));
        }
        if known.is_some_and(|known| known.term >= term) {
            return Ok(None);
        }
        let expect = entry.map_or(Expect::Absent, |entry| Expect::Revision(entry.mod_revision));
        let value = Term { node_id: self.context.node_id.to_string(), term };
        let value = serde_json::to_vec(&value).expect("plain fields serialize to JSON");
        Ok(match store.compare_and_swap(&self.key, expect, Some(value.into()), None).await? {
            Swap::Done { revision } => Some(revision),
            Swap::Conflict { .. } => None,
        })
    }

    async fn run(&self) -> Result<Leadership, ElectionError> {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(100));
        let mut stuck = None;
        loop {
            if self.context.scope.shutdown().is_stopped() {
                return Err(ElectionError::Stopped);
            }
            let sent = self.context.clock.monotonic_ns();
            if let Some(term) = self.confirmed().await
                && let Ok(Some(revision)) = self.announce(term).await
            {
                return Ok(self.lead(term, revision, sent));
            }
            self.maybe_leave_term(&mut stuck).await;
            backoff.pause().await;
        }
    }

    fn lead(&self, term: u64, revision: i64, sent: u64) -> Leadership {
        let token = i64::try_from(term).unwrap_or(i64::MAX);
        let standing = Arc::new(RaftStanding {
            election: self.clone(),
            term,
            revision,
            usable_until: AtomicU64::new(self.until(sent)),
            end: watch::channel(None).0,
        });
        self.context.metrics.leader_changes.inc();
        self.context.metrics.is_leader.inc();
        let (name, leader) = (self.name.to_string(), Some(self.context.node_id.to_string()));
        self.context.events.publish(ClusterEvent::Leader { name, leader, token });
        let kept = Arc::downgrade(&standing);
        let (election, stop) = (self.clone(), self.context.scope.shutdown().clone());
        self.context.scope.spawn("group leadership", async move {
            let confirm = async {
                loop {
                    tokio::time::sleep(election.lease / 5).await;
                    let sent = election.context.clock.monotonic_ns();
                    let confirmed = tokio::time::timeout(election.lease, election.confirmed()).await;
                    let Some(standing) = kept.upgrade() else { return "resigned".to_owned() };
                    match confirmed {
                        Ok(Some(now)) if now == term && standing.is_valid() => {
                            standing.usable_until.fetch_max(election.until(sent), Ordering::SeqCst);
                        }
                        // Another member leads, or this one leads in a later term: both end this leadership.
                        Ok(Some(_)) => return "a later term has started".to_owned(),
                        Ok(None) | Err(_) if !standing.is_valid() => {
                            return "no quorum confirmation".to_owned();
                        }
                        Ok(None) | Err(_) => {}
                    }
                }
            };
            let reason = tokio::select! {
                () = stop.stopped() => "the process stops".to_owned(),
                reason = confirm => reason,
            };
            election.context.metrics.is_leader.dec();
            if let Some(standing) = kept.upgrade() {
                standing.end.send_replace(Some(SessionEnd::Taken(reason.clone())));
                let name = election.name.to_string();
                election.context.events.publish(ClusterEvent::LeadershipLost { name, reason });
            }
        });
        Leadership { name: Arc::clone(&self.name), fencing_token: token, standing }
    }

    fn until(&self, sent: u64) -> u64 {
        sent.saturating_add(u64::try_from(self.lease.mul_f64(SAFETY_FACTOR).as_nanos()).unwrap_or(u64::MAX))
    }
}

impl LeaderElection for RaftElection {
    fn campaign(&self) -> BoxFuture<'_, Result<Leadership, ElectionError>> {
        Box::pin(self.run())
    }

    fn observe(&self) -> LeaderChanges {
        let (sender, receiver) = watch::channel(None);
        let (store, key) = (Arc::clone(&self.context.repository), Arc::clone(&self.key));
        let stop = self.context.scope.shutdown().clone();
        self.context.scope.spawn("group observer", async move {
            let observe = async {
                let mut backoff = Backoff::default();
                let info = |entry: &crate::Entry| {
                    let term: Term = serde_json::from_slice(&entry.value).ok()?;
                    let fencing_token = i64::try_from(term.term).unwrap_or(i64::MAX);
                    Some(LeaderInfo { node_id: term.node_id, fencing_token })
                };
                loop {
                    if let Ok((revision, entries)) = store.list(&key).await
                        && let Ok(mut watch) = store.watch(&key, revision + 1).await
                    {
                        let found = entries.iter().find(|entry| *entry.key == *key).and_then(info);
                        sender.send_if_modified(|known| std::mem::replace(known, found.clone()) != found);
                        while let Some(Ok(event)) = watch.next().await {
                            if let Event::Put(entry) = event
                                && *entry.key == *key
                            {
                                sender.send_replace(info(&entry));
                            }
                        }
                    }
                    backoff.pause().await;
                }
            };
            tokio::select! {
                () = stop.stopped() => {}
                () = sender.closed() => {}
                () = observe => {}
            }
        });
        LeaderChanges { receiver }
    }
}

struct RaftStanding {
    election: RaftElection,
    term: u64,
    revision: i64,
    usable_until: AtomicU64,
    end: watch::Sender<Option<SessionEnd>>,
}

impl Standing for RaftStanding {
    fn is_valid(&self) -> bool {
        let now = self.election.context.clock.monotonic_ns();
        self.end.borrow().is_none()
            && now < self.usable_until.load(Ordering::SeqCst)
            && self.election.leads_in(self.term)
    }

    fn lost(&self) -> BoxFuture<'_, SessionEnd> {
        Box::pin(async {
            let mut end = self.end.subscribe();
            loop {
                if let Some(why) = end.borrow_and_update().clone() {
                    return why;
                }
                if !self.is_valid() {
                    return SessionEnd::Expired;
                }
                // The sender is in `self`; it outlives this wait.
                let _ = tokio::time::timeout(self.election.lease / 5, end.changed()).await;
            }
        })
    }

    fn resign(&self) -> BoxFuture<'_, Result<(), ElectionError>> {
        Box::pin(async {
            self.end.send_replace(Some(SessionEnd::Closed));
            let group = self.election.coordinator.group();
            let metrics = group.metrics();
            let other = metrics.voters.iter().map(|member| member.id).find(|id| *id != group.voter());
            if let Some(other) = other {
                let moved = self.election.coordinator.move_leader(other).await;
                moved.map_err(|error| RepositoryError::Unavailable(error.to_string()))?;
            }
            Ok(())
        })
    }

    fn fence(&self) -> Compare {
        Compare::ModRevision(self.election.key.to_string(), self.revision)
    }
}
