//! Leadership by partition ownership: the owner of the partition is active, every other member is standby.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::worker::{Shared, claim_key};
use crate::assignment::AssignmentRecord;
use crate::backoff::Backoff;
use crate::keys;
use crate::leadership::{ElectionError, LeaderChanges, LeaderElection, LeaderInfo, Leadership, Standing};
use crate::repository::{BoxFuture, Compare, Event};
use crate::session::SessionEnd;

/// Active while this process owns the partition. Cheap to clone.
#[derive(Clone)]
pub struct KafkaElection {
    shared: Arc<Shared>,
    partition: Arc<str>,
}

impl KafkaElection {
    pub(super) fn new(shared: Arc<Shared>, partition: &str) -> Self {
        Self { shared, partition: partition.into() }
    }

    async fn run(&self) -> Result<Leadership, ElectionError> {
        let mut owned: watch::Receiver<BTreeMap<String, i64>> = self.shared.owned.subscribe();
        loop {
            let token = owned.borrow_and_update().get(&*self.partition).copied();
            if let Some(token) = token {
                let standing = Arc::new(KafkaStanding { election: self.clone(), token });
                return Ok(Leadership { name: Arc::clone(&self.partition), fencing_token: token, standing });
            }
            tokio::select! {
                () = self.shared.context.scope.shutdown().stopped() => return Err(ElectionError::Stopped),
                changed = owned.changed() => if changed.is_err() { return Err(ElectionError::Stopped) },
            }
        }
    }
}

impl LeaderElection for KafkaElection {
    fn campaign(&self) -> BoxFuture<'_, Result<Leadership, ElectionError>> {
        Box::pin(self.run())
    }

    /// Reports the owner in the assignment record as the leader.
    fn observe(&self) -> LeaderChanges {
        let (sender, receiver) = watch::channel(None);
        let store = Arc::clone(&self.shared.context.repository);
        let key = keys::assignment(self.shared.group(), &self.partition);
        let stop = self.shared.context.scope.shutdown().clone();
        self.shared.context.scope.spawn("kafka observer", async move {
            let observe = async {
                let mut backoff = Backoff::default();
                let info = |entry: &crate::Entry| {
                    let record = AssignmentRecord::from_bytes(&entry.value).ok()?;
                    let fencing_token = record.version;
                    let node_id = record.owner_node_id;
                    (!node_id.is_empty()).then_some(LeaderInfo { node_id, fencing_token })
                };
                loop {
                    if let Ok((revision, entries)) = store.list(&key).await
                        && let Ok(mut watch) = store.watch(&key, revision + 1).await
                    {
                        let found = entries.iter().find(|entry| entry.key == key).and_then(info);
                        sender.send_if_modified(|known| std::mem::replace(known, found.clone()) != found);
                        while let Some(Ok(event)) = watch.next().await {
                            if let Event::Put(entry) = event
                                && entry.key == key
                            {
                                let found = info(&entry);
                                sender.send_if_modified(|known| {
                                    std::mem::replace(known, found.clone()) != found
                                });
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

struct KafkaStanding {
    election: KafkaElection,
    token: i64,
}

impl Standing for KafkaStanding {
    fn is_valid(&self) -> bool {
        let shared = &self.election.shared;
        let owned = shared.owned.borrow().get(&*self.election.partition) == Some(&self.token);
        owned && shared.is_membership_valid()
    }

    fn lost(&self) -> BoxFuture<'_, SessionEnd> {
        Box::pin(async {
            let mut owned = self.election.shared.owned.subscribe();
            while self.is_valid() {
                // The loop condition is evaluated again after a change and after the timeout.
                let _ = tokio::time::timeout(Duration::from_millis(250), owned.changed()).await;
            }
            SessionEnd::Taken("Kafka assigned the partition to another member".to_owned())
        })
    }

    /// Does nothing: Kafka assigns the partition, and a member releases it by leaving the group.
    fn resign(&self) -> BoxFuture<'_, Result<(), ElectionError>> {
        Box::pin(async { Ok(()) })
    }

    fn fence(&self) -> Compare {
        let key = claim_key(self.election.shared.group(), &self.election.partition);
        Compare::Value(key, self.token.to_string().into())
    }
}
