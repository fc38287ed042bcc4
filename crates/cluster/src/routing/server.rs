//! A range server: registers itself, follows the table through a manager, checks range ownership on each
//! request, and executes the manager's commands.
//!
//! Invariants:
//! - A key is served only while the registration is valid (by this process's clock), the table assigns the
//!   range to this server, the partition is ready, and it is not drained. A paused or isolated server
//!   therefore stops before its ranges move to others.
//! - A server that registered again serves nothing before it has seen a table at least as new as the
//!   store's, read after the registration, and has prepared its ranges again: others may have owned them
//!   meanwhile.
//! - A drained partition stays drained until the table assigns it to another server, or the leading manager
//!   aborts the operation. Commands with a lower term than seen are rejected.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use moim_wire_grpc::routing::{Ack, Command, CommandKind};
use tokio::sync::{mpsc, watch};

use super::link::{self, Follower};
use super::store::RoutingTableStore;
use super::table::{RouteEntry, RoutingTable};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::registry::{NodeRegistry, RegisterError, Registration, ServerInfo};
use crate::repository::BoxFuture;

/// Application callbacks for range ownership changes. An error aborts the operation; the partition stays as
/// it was.
pub trait RangeHooks: Send + Sync + 'static {
    /// Stop serving the partition: complete the requests in progress, and return the state for the next
    /// owner.
    fn drain<'a>(&'a self, range: &'a RouteEntry) -> BoxFuture<'a, Result<Bytes, String>>;

    /// Prepare to serve the partition. The hand-off is empty when the previous owner failed: recover then.
    fn prepare<'a>(&'a self, partition: &'a str, handoff: Bytes) -> BoxFuture<'a, Result<(), String>>;

    /// Serve the drained partition again: the operation was aborted.
    fn resume<'a>(&'a self, range: &'a RouteEntry) -> BoxFuture<'a, Result<(), String>>;

    /// Split the partition at `key`; `upper` is the id of the upper part.
    fn split<'a>(
        &'a self,
        range: &'a RouteEntry,
        key: &'a str,
        upper: &'a str,
    ) -> BoxFuture<'a, Result<(), String>>;

    /// Merge the partition `above`, which this server owns, too, into this one.
    fn merge<'a>(&'a self, range: &'a RouteEntry, above: &'a RouteEntry)
    -> BoxFuture<'a, Result<(), String>>;

    /// The partition moved to another server: release its resources.
    fn released(&self, partition: &str);
}

/// The range of a key is not served here; the new owner, if known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved(pub Option<Box<RouteEntry>>);

#[derive(Default)]
struct State {
    /// Prepared partitions.
    ready: BTreeSet<String>,
    /// Partitions that are drained for an operation.
    drained: BTreeSet<String>,
    /// Partitions that are prepared for an operation whose table has not arrived yet.
    awaited: BTreeSet<String>,
}

struct Inner {
    id: String,
    registration: Registration,
    hooks: Arc<dyn RangeHooks>,
    table: watch::Receiver<Arc<RoutingTable>>,
    #[cfg(test)]
    pushed: watch::Sender<Arc<RoutingTable>>,
    state: Mutex<State>,
    /// The highest manager term seen.
    term: AtomicI64,
    /// The registration for which `table` is confirmed as current; 0 for none.
    confirmed: AtomicI64,
    store: RoutingTableStore,
    context: Context,
    namespace: String,
}

/// A range server. Cheap to clone; the registration ends with the last clone.
#[derive(Clone)]
pub struct RouteServer {
    inner: Arc<Inner>,
    _alive: mpsc::Sender<()>,
}

impl RouteServer {
    /// Registers the server and follows the table.
    pub async fn start(
        context: &Context,
        registry: &NodeRegistry,
        namespace: &str,
        server: ServerInfo,
        managers: &[String],
        hooks: Arc<dyn RangeHooks>,
    ) -> Result<Self, RegisterError> {
        let id = server.id.clone();
        let registration = registry.register(server).await?;
        let (sender, table) = watch::channel(Arc::default());
        let inner = Arc::new(Inner {
            id: id.clone(),
            registration,
            hooks,
            table,
            #[cfg(test)]
            pushed: sender.clone(),
            state: Mutex::default(),
            term: AtomicI64::new(0),
            confirmed: AtomicI64::new(0),
            store: RoutingTableStore::new(context, namespace),
            context: context.clone(),
            namespace: namespace.to_owned(),
        });
        let (commands, inbox) = mpsc::channel(64);
        let (ack_sender, acks) = mpsc::channel(64);
        let drained = Arc::clone(&inner);
        let follower = Follower {
            context: context.clone(),
            managers: managers.to_vec(),
            channel: link::channel(context, managers),
            namespace: namespace.to_owned(),
            node_id: id,
            table: sender,
            commands: Some(commands),
            acks: Some(acks),
            drained: Box::new(move || drained.state().drained.iter().cloned().collect()),
        };
        let (alive, mut dropped) = mpsc::channel::<()>(1);
        let (stop, running) = (context.scope.shutdown().clone(), Arc::clone(&inner));
        context.scope.spawn("range server", async move {
            tokio::select! {
                () = stop.stopped() => {}
                _ = dropped.recv() => {}
                () = follower.run() => {}
                () = running.run(inbox, ack_sender) => {}
            }
        });
        Ok(Self { inner, _alive: alive })
    }

    /// The range of a key if this server serves it; else the known owner, for a redirect.
    pub fn check(&self, key: &str) -> Result<RouteEntry, Moved> {
        let table = self.inner.table.borrow().clone();
        let Some(entry) = table.lookup(key) else { return Err(Moved(None)) };
        if entry.node_id != self.inner.id {
            return Err(Moved((!entry.node_id.is_empty()).then(|| Box::new(entry.clone()))));
        }
        let state = self.inner.state();
        let serves = state.ready.contains(&entry.partition_id)
            && !state.drained.contains(&entry.partition_id)
            && self.inner.is_confirmed();
        if serves { Ok(entry.clone()) } else { Err(Moved(None)) }
    }

    /// The last received table.
    pub fn table(&self) -> Arc<RoutingTable> {
        self.inner.table.borrow().clone()
    }

    /// The served partitions.
    pub fn partitions(&self) -> Vec<RouteEntry> {
        let table = self.table();
        table
            .entries()
            .iter()
            .filter(|entry| self.check(&entry.key_range_start).as_ref() == Ok(&***entry))
            .map(|entry| (**entry).clone())
            .collect()
    }

    /// Replaces the last received table.
    #[cfg(test)]
    pub(crate) fn set_table(&self, table: Arc<RoutingTable>) {
        self.inner.pushed.send_replace(table);
    }

    /// True while the registration is valid.
    pub fn is_registered(&self) -> bool {
        self.inner.registration.is_valid()
    }

    /// Deregisters: the manager reassigns the ranges immediately.
    pub async fn stop(self) -> Result<(), crate::RepositoryError> {
        self.inner.registration.clone().deregister().await
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the registration is valid and the table is confirmed to be no older than it.
    fn is_confirmed(&self) -> bool {
        self.registration.created().is_some_and(|created| created == self.confirmed.load(Ordering::SeqCst))
    }

    async fn run(&self, mut inbox: mpsc::Receiver<Command>, ack_sender: mpsc::Sender<Ack>) {
        let (mut table, mut registration) = (self.table.clone(), self.registration.clone());
        let (mut created, mut needed) = (None, None);
        loop {
            if created != registration.created() {
                created = registration.created();
                needed = None;
                self.release_all();
            }
            // Tables before commands: a command refers to the table that was sent before it.
            tokio::select! {
                biased;
                () = registration.changed() => {}
                saved = self.stored_table(), if created.is_some() && needed.is_none() => {
                    needed = Some(saved);
                    let now = table.borrow_and_update().clone();
                    self.maybe_confirm(created, needed, &now).await;
                }
                changed = table.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let now = table.borrow_and_update().clone();
                    self.maybe_confirm(created, needed, &now).await;
                }
                command = inbox.recv() => {
                    let Some(command) = command else { return };
                    let operation = command.operation;
                    let (error, handoff) = match self.on_command(command).await {
                        Ok(handoff) => (String::new(), handoff),
                        Err(error) => (error, Bytes::new()),
                    };
                    if operation > 0 && ack_sender.send(Ack { operation, error, handoff }).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Releases every partition: the registration under which they were owned has ended.
    fn release_all(&self) {
        self.confirmed.store(0, Ordering::SeqCst);
        let State { ready, .. } = std::mem::take(&mut *self.state());
        for partition in ready {
            self.hooks.released(&partition);
        }
    }

    /// Incarnation and version of the table in the store. Retries until the store responds.
    async fn stored_table(&self) -> (i64, i64) {
        let mut backoff = Backoff::default();
        loop {
            match self.store.load().await {
                Ok(saved) => {
                    let table = saved.unwrap_or_default().table;
                    return (table.incarnation, table.version);
                }
                Err(error) => {
                    tracing::debug!(%error, server = self.id, "routing table read failed; retrying")
                }
            }
            backoff.pause().await;
        }
    }

    /// Applies the table once it is as new as the store's table after the registration `created`.
    async fn maybe_confirm(&self, created: Option<i64>, needed: Option<(i64, i64)>, table: &RoutingTable) {
        let (Some(created), Some(needed)) = (created, needed) else { return };
        if (table.incarnation, table.version) >= needed {
            self.on_table(table).await;
            self.confirmed.store(created, Ordering::SeqCst);
        }
    }

    /// Prepares newly owned partitions, and releases the others.
    async fn on_table(&self, table: &RoutingTable) {
        let ours: BTreeMap<&str, &RouteEntry> = table
            .entries()
            .iter()
            .filter(|entry| entry.node_id == self.id)
            .map(|entry| (entry.partition_id.as_str(), &**entry))
            .collect();
        let released: Vec<String> = {
            let mut state = self.state();
            let released = state.ready.iter().filter(|id| !ours.contains_key(id.as_str())).cloned().collect();
            state.drained.retain(|id| ours.contains_key(id.as_str()));
            released
        };
        for id in released {
            // A partition prepared by an operation is not in the table yet; the operation completes or
            // aborts it explicitly.
            if self.state().awaited.contains(&id) {
                continue;
            }
            self.state().ready.remove(&id);
            self.hooks.released(&id);
        }
        self.state().awaited.retain(|id| !ours.contains_key(id.as_str()));
        for id in ours.keys() {
            if !self.state().ready.contains(*id) {
                // Assigned without an operation: its owner failed.
                match self.hooks.prepare(id, Bytes::new()).await {
                    Ok(()) => drop(self.state().ready.insert((*id).to_owned())),
                    Err(error) => {
                        tracing::warn!(partition = id, error, "partition preparation failed")
                    }
                }
            }
        }
        let event = ClusterEvent::Routing { namespace: self.namespace.clone(), version: table.version };
        self.context.events.publish(event);
    }

    fn on_ready(&self, partition: &str) {
        let mut state = self.state();
        state.ready.insert(partition.to_owned());
        state.awaited.insert(partition.to_owned());
    }

    async fn on_command(&self, command: Command) -> Result<Bytes, String> {
        let seen = self.term.fetch_max(command.term, Ordering::SeqCst);
        if command.term < seen {
            return Err(format!("the manager of term {} has been replaced", command.term));
        }
        let table = self.table.borrow().clone();
        let partition = command.partition_id.as_str();
        let ours = || {
            let found = table.get(partition).filter(|entry| entry.node_id == self.id);
            found.cloned().ok_or_else(|| format!("{} does not have partition {partition}", self.id))
        };
        match command.kind() {
            CommandKind::Drain => {
                let range = ours()?;
                self.state().drained.insert(partition.to_owned());
                let drained = self.hooks.drain(&range).await;
                if drained.is_err() {
                    self.state().drained.remove(partition);
                }
                drained
            }
            CommandKind::Prepare => {
                self.hooks.prepare(partition, command.handoff).await?;
                self.on_ready(partition);
                Ok(Bytes::new())
            }
            CommandKind::Resume => {
                if self.state().drained.contains(partition) {
                    self.hooks.resume(&ours()?).await?;
                    self.state().drained.remove(partition);
                } else if self.state().awaited.remove(partition) {
                    // Prepared for an operation that was aborted.
                    self.state().ready.remove(partition);
                    self.hooks.released(partition);
                }
                Ok(Bytes::new())
            }
            CommandKind::Split => {
                self.hooks.split(&ours()?, &command.key, &command.other_id).await?;
                self.on_ready(&command.other_id);
                Ok(Bytes::new())
            }
            CommandKind::Merge => {
                let above = table.get(&command.other_id).cloned();
                let above = above.ok_or_else(|| format!("there is no partition {}", command.other_id))?;
                self.hooks.merge(&ours()?, &above).await?;
                Ok(Bytes::new())
            }
            CommandKind::Unknown => Err("unknown command".to_owned()),
        }
    }
}
