//! The elected manager: reassigns ranges of failed servers, rebalances ranges to new servers, and carries
//! out operations.
//!
//! Migration of a range from a live server:
//!
//! ```text
//!   DRAIN(old) ─▶ hand-off ─▶ PREPARE(new, hand-off) ─▶ save (the only commit point) ─▶ push
//!        └ any failure before the save: RESUME(old), RESUME(new)
//! ```
//!
//! A manager failure between DRAIN and the save leaves the old owner drained; when that server connects to
//! the next leader it reports the drained range, and gets RESUME. The old leader cannot save any more by
//! then: its saves are fenced.
//!
//! A range is taken from a server without its consent only after its lease has expired: the save compares
//! that the server's registration is absent, and a move compares that the source is still the process that
//! was drained. A closed or refused connection proves nothing.
//!
//! One operation at a time holds the lock on `saved`; reconciliation alternates with operations between
//! batches.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use moim_wire_grpc::routing::{
    ChangeKind, ChangeRequest, ChangeResponse, Command, CommandKind, Hello, Server, ShowResponse,
};
use moim_wire_grpc::{Code, Status};
use tokio::sync::{Mutex as AsyncMutex, MutexGuard as AsyncGuard, Notify};

use super::{Servers, Shared};
use crate::assignment::plan::{PlanNode, PlanPartition, plan};
use crate::backoff::Backoff;
use crate::leadership::Leadership;
use crate::registry::nodes_prefix;
use crate::repository::Compare;
use crate::routing::store::{RoutingError, Saved};
use crate::routing::table::{NodeStatus, RouteEntry, RoutingTable};
use crate::session::SessionEnd;

/// Maximum number of ranges in one migration batch.
const MAX_MOVES: usize = 64;
/// Maximum number of registration comparisons in one save, below the transaction limit.
const MAX_REGISTRATION_COMPARES: usize = 64;
/// Timeout of a drain.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Delay after a server change, to combine it with further changes.
const SETTLE: Duration = Duration::from_millis(20);
/// Delay of the initial table, to wait for more servers.
const INITIAL_DELAY: Duration = Duration::from_millis(300);

pub(super) struct LeaderState {
    shared: Weak<Shared>,
    leadership: Leadership,
    /// The table as this leader last saved or read it; `None` until it was read.
    saved: AsyncMutex<Option<Saved>>,
    /// Partitions of operations in progress.
    busy: Mutex<BTreeSet<String>>,
    /// Signals the reconcile loop.
    wake: Notify,
    /// True if ranges wait for a server to connect.
    waits_for_connection: AtomicBool,
}

/// Result of one reconciliation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// A change was made, and more may be needed.
    More,
    /// A change is needed and not possible yet.
    Waiting,
    /// The table is as planned.
    Settled,
}

/// A range and its target server.
struct Move {
    entry: RouteEntry,
    to: String,
}

fn status_error(code: Code, message: impl Into<String>) -> Status {
    Status::new(code, message.into())
}

fn status(error: RoutingError) -> Status {
    let code = match error {
        RoutingError::Conflict => Code::Aborted,
        RoutingError::Fenced => Code::FailedPrecondition,
        RoutingError::Malformed(_) => Code::DataLoss,
        RoutingError::Invalid(_) => Code::InvalidArgument,
        RoutingError::Store(_) => Code::Unavailable,
    };
    status_error(code, error.to_string())
}

impl LeaderState {
    pub(super) fn new(shared: &Arc<Shared>, leadership: Leadership) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::downgrade(shared),
            leadership,
            saved: AsyncMutex::new(None),
            busy: Mutex::default(),
            wake: Notify::new(),
            waits_for_connection: AtomicBool::new(false),
        })
    }

    pub(super) fn is_valid(&self) -> bool {
        self.leadership.is_valid()
    }

    pub(super) async fn lost(&self) -> SessionEnd {
        self.leadership.lost().await
    }

    fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.upgrade()
    }

    /// Runs the reconcile loop until it is dropped.
    pub(super) async fn run(&self) {
        let Some(shared) = self.shared() else { return };
        let mut backoff = Backoff::default();
        let mut servers = shared.servers.subscribe();
        loop {
            let progress = match self.reconcile(&shared).await {
                Ok(Progress::More) => continue,
                Ok(progress) => progress,
                Err(error) => {
                    tracing::debug!(%error, "routing table reconciliation failed");
                    *self.saved.lock().await = None;
                    backoff.pause().await;
                    continue;
                }
            };
            backoff.reset();
            self.waits_for_connection.store(progress == Progress::Waiting, Ordering::SeqCst);
            tokio::select! {
                () = self.wake.notified() => {}
                changed = servers.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    tokio::time::sleep(SETTLE).await;
                }
                // Retry moves that wait for a connection.
                () = tokio::time::sleep(Duration::from_secs(1)), if progress == Progress::Waiting => {}
            }
        }
    }

    /// A server has connected: it resumes the ranges that it drained for an operation that is not in
    /// progress.
    pub(super) fn on_connected(&self, hello: &Hello) {
        let Some(shared) = self.shared() else { return };
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for partition in hello.drained.iter().filter(|partition| !busy.contains(*partition)) {
            shared.hub.send(&hello.node_id, self.command(CommandKind::Resume, partition));
        }
        // Reconnects of a thousand servers need no reconciliation of a settled table.
        if self.waits_for_connection.load(Ordering::SeqCst) {
            self.wake.notify_one();
        }
    }

    fn command(&self, kind: CommandKind, partition: &str) -> Command {
        Command {
            term: self.leadership.fencing_token(),
            kind: kind as i32,
            partition_id: partition.to_owned(),
            ..Command::default()
        }
    }

    /// Locks the table; reads it if it was not read yet.
    async fn lock<'a>(&'a self, shared: &Shared) -> Result<AsyncGuard<'a, Option<Saved>>, RoutingError> {
        let mut saved = self.saved.lock().await;
        if saved.is_none() {
            *saved = Some(shared.store.load().await?.unwrap_or_default());
        }
        Ok(saved)
    }

    async fn save(
        &self,
        shared: &Shared,
        saved: &mut Option<Saved>,
        table: RoutingTable,
        draining: Vec<String>,
        registrations: &[Compare],
    ) -> Result<i64, RoutingError> {
        if !self.is_valid() {
            return Err(RoutingError::Fenced);
        }
        let before = saved.as_ref().cloned().unwrap_or_default();
        let fence = Some(self.leadership.fence());
        match shared.store.swap(&before, table, draining, fence.clone(), registrations).await {
            Ok(after) => {
                let version = after.table.version;
                shared.feed.publish(Arc::clone(&after.table), &shared.context.metrics);
                *saved = Some(after);
                shared.store.sweep(fence).await;
                Ok(version)
            }
            Err(error) => {
                // Read the current table before the next step.
                *saved = None;
                Err(error)
            }
        }
    }

    /// Moves the table towards its planned state.
    async fn reconcile(&self, shared: &Shared) -> Result<Progress, RoutingError> {
        let Some(servers) = shared.servers.borrow().clone() else { return Ok(Progress::Settled) };
        let mut saved = self.lock(shared).await?;
        let before = saved.as_ref().cloned().unwrap_or_default();
        if before.revision == 0 {
            drop(saved);
            return self.create_initial_table(shared, &servers).await;
        }
        let (next, mut moves) = planned(&servers, &before, shared.options.rebalance);
        if let Some(mut next) = next {
            let failed = limit_failed_owners(&before, &mut next);
            let prefix = nodes_prefix(&shared.options.namespace);
            let absent: Vec<Compare> =
                failed.iter().map(|node| Compare::Absent(format!("{prefix}{node}"))).collect();
            let table = before.table.next(|entries| *entries = next)?;
            self.save(shared, &mut saved, table, before.draining.clone(), &absent).await?;
            return Ok(Progress::More);
        }
        if moves.is_empty() {
            return Ok(Progress::Settled);
        }
        moves.retain(|one| shared.hub.is_connected(&one.entry.node_id) && shared.hub.is_connected(&one.to));
        moves.truncate(MAX_MOVES);
        if moves.is_empty() {
            return Ok(Progress::Waiting);
        }
        let moved = self.migrate(shared, &mut saved, moves).await?;
        Ok(if moved > 0 { Progress::More } else { Progress::Waiting })
    }

    /// Creates the initial table, once there are servers.
    async fn create_initial_table(
        &self,
        shared: &Shared,
        servers: &Servers,
    ) -> Result<Progress, RoutingError> {
        if servers.is_empty() {
            return Ok(Progress::Settled);
        }
        // Servers that are started together register within this delay.
        tokio::time::sleep(INITIAL_DELAY).await;
        let servers = shared.servers.borrow().clone().unwrap_or_default();
        let nodes = eligible(&servers, &[]);
        let mut saved = self.lock(shared).await?;
        if saved.as_ref().is_some_and(|saved| saved.revision != 0) || nodes.is_empty() {
            return Ok(Progress::More);
        }
        let count = shared.options.initial_partitions.clamp(1, 95);
        let planned = vec![PlanPartition { owner: None, zone: String::new() }; count];
        let plan = plan(&nodes, &planned);
        // The printable characters, in equal shares; the outer ranges extend beyond them.
        let bound = |at: usize| match at {
            0 => String::new(),
            at if at == count => String::new(),
            at => char::from(b' ' + u8::try_from(at * 95 / count).unwrap_or(94)).to_string(),
        };
        let entries = (0..count).map(|at| {
            let mut entry = RouteEntry {
                partition_id: format!("p{}", at + 1),
                key_range_start: bound(at),
                key_range_end: bound(at + 1),
                node_id: nodes[plan.owners[at]].id.clone(),
                ..RouteEntry::default()
            };
            update_server_status(&mut entry, &servers, &[]);
            entry
        });
        let table = RoutingTable::new(1, entries.collect())?;
        self.save(shared, &mut saved, table, Vec::new(), &[]).await?;
        Ok(Progress::More)
    }

    /// Moves ranges between live servers; returns the number of moved ranges.
    async fn migrate(
        &self,
        shared: &Shared,
        saved: &mut Option<Saved>,
        moves: Vec<Move>,
    ) -> Result<usize, RoutingError> {
        let names: Vec<String> = moves.iter().map(|one| one.entry.partition_id.clone()).collect();
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).extend(names.iter().cloned());
        // A source that restarts after its drain would serve the range again: the save must fail then.
        let known = shared.servers.borrow().clone().unwrap_or_default();
        let steps = moves.iter().map(|one| self.hand_over(shared, one));
        let handed = join_all(steps).await;
        let before = saved.as_ref().cloned().unwrap_or_default();
        let servers = shared.servers.borrow().clone().unwrap_or_default();
        let prefix = nodes_prefix(&shared.options.namespace);
        let (mut targets, mut sources) = (BTreeMap::new(), BTreeMap::new());
        for (one, handed) in moves.iter().zip(&handed) {
            match handed {
                Ok(()) => {
                    targets.insert(one.entry.partition_id.as_str(), one.to.as_str());
                    let source = &one.entry.node_id;
                    let compare = match known.get(source) {
                        Some(server) => Compare::CreateRevision(format!("{prefix}{source}"), server.epoch),
                        None => Compare::Absent(format!("{prefix}{source}")),
                    };
                    sources.insert(source.as_str(), compare);
                }
                Err(error) => {
                    tracing::info!(partition = one.entry.partition_id, error, "range migration failed")
                }
            }
        }
        let table = before.table.next(|entries| {
            for entry in entries {
                if let Some(to) = targets.get(entry.partition_id.as_str()) {
                    let entry = Arc::make_mut(entry);
                    (*to).clone_into(&mut entry.node_id);
                    update_server_status(entry, &servers, &before.draining);
                }
            }
        });
        let done = match (targets.is_empty(), table) {
            (true, _) => Ok(0),
            (false, Ok(table)) => {
                let (count, sources) = (targets.len(), sources.into_values().collect::<Vec<_>>());
                self.save(shared, saved, table, before.draining.clone(), &sources).await.map(|_| count)
            }
            (false, Err(error)) => Err(error.into()),
        };
        let is_done = done.is_ok();
        for (one, handed) in moves.iter().zip(&handed) {
            // After a save with unknown outcome the servers reconcile when they see the table.
            if handed.is_err() || (!is_done && self.is_valid()) {
                shared
                    .hub
                    .send(&one.entry.node_id, self.command(CommandKind::Resume, &one.entry.partition_id));
                shared.hub.send(&one.to, self.command(CommandKind::Resume, &one.entry.partition_id));
            }
        }
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.retain(|name| !names.contains(name));
        done
    }

    async fn hand_over(&self, shared: &Shared, one: &Move) -> Result<(), String> {
        let within = shared.options.command_timeout;
        let partition = &one.entry.partition_id;
        let drain = self.command(CommandKind::Drain, partition);
        let handoff = shared.hub.request(&one.entry.node_id, drain, within).await?;
        let prepare = Command { handoff, ..self.command(CommandKind::Prepare, partition) };
        shared.hub.request(&one.to, prepare, within).await.map(drop)
    }

    /// Carries out an operation.
    pub(super) async fn change(&self, request: ChangeRequest) -> Result<ChangeResponse, Status> {
        let shared =
            self.shared().ok_or_else(|| status_error(Code::Unavailable, "manager is shutting down"))?;
        match request.kind() {
            ChangeKind::Split => self.split(&shared, &request.partition_id, &request.argument).await,
            ChangeKind::Merge => self.merge(&shared, &request.partition_id, &request.argument).await,
            ChangeKind::Migrate => self.move_to(&shared, &request.partition_id, &request.node_id).await,
            ChangeKind::Drain => self.drain(&shared, &request.node_id).await,
            ChangeKind::Undrain => self.undrain(&shared, &request.node_id).await,
            ChangeKind::Unknown => Err(status_error(Code::Unimplemented, "unknown operation")),
        }
    }

    async fn split(&self, shared: &Shared, partition: &str, key: &str) -> Result<ChangeResponse, Status> {
        let mut saved = self.lock(shared).await.map_err(status)?;
        let before = saved.as_ref().cloned().unwrap_or_default();
        let entry = find(&before.table, partition)?;
        if !entry.contains(key) || key == entry.key_range_start {
            let message = format!("{key:?} is not inside of partition {partition}");
            return Err(status_error(Code::InvalidArgument, message));
        }
        let upper = (before.table.version + 1..)
            .map(|number| format!("p{number}"))
            .find(|name| before.table.get(name).is_none())
            .unwrap_or_default();
        let command = Command {
            other_id: upper.clone(),
            key: key.to_owned(),
            ..self.command(CommandKind::Split, partition)
        };
        self.request_owner(shared, &entry, command).await?;
        let table = before.table.next(|entries| {
            if let Some(lower) = entries.iter_mut().find(|one| one.partition_id == partition) {
                let lower = Arc::make_mut(lower);
                let mut above = lower.clone();
                above.partition_id.clone_from(&upper);
                key.clone_into(&mut above.key_range_start);
                key.clone_into(&mut lower.key_range_end);
                entries.push(Arc::new(above));
            }
        });
        let table = table.map_err(|error| status(error.into()))?;
        let version = match self.save(shared, &mut saved, table, before.draining.clone(), &[]).await {
            Ok(version) => version,
            Err(error) => {
                shared.hub.send(&entry.node_id, self.command(CommandKind::Resume, &upper));
                return Err(status(error));
            }
        };
        Ok(ChangeResponse { version, partition_id: upper })
    }

    async fn merge(&self, shared: &Shared, partition: &str, above: &str) -> Result<ChangeResponse, Status> {
        let mut saved = self.lock(shared).await.map_err(status)?;
        let before = saved.as_ref().cloned().unwrap_or_default();
        let (low, high) = (find(&before.table, partition)?, find(&before.table, above)?);
        if low.key_range_end.is_empty() || low.key_range_end != high.key_range_start {
            let message = format!("partition {above} does not begin where {partition} ends");
            return Err(status_error(Code::InvalidArgument, message));
        }
        if low.node_id != high.node_id {
            let one = Move { entry: high.clone(), to: low.node_id.clone() };
            if self.migrate(shared, &mut saved, vec![one]).await.map_err(status)? == 0 {
                let message = format!("partition {above} could not be moved to {}", low.node_id);
                return Err(status_error(Code::FailedPrecondition, message));
            }
        }
        let before = saved.as_ref().cloned().unwrap_or_default();
        let command = Command { other_id: above.to_owned(), ..self.command(CommandKind::Merge, partition) };
        self.request_owner(shared, &low, command).await?;
        let table = before.table.next(|entries| {
            entries.retain(|one| one.partition_id != above);
            if let Some(low) = entries.iter_mut().find(|one| one.partition_id == partition) {
                Arc::make_mut(low).key_range_end.clone_from(&high.key_range_end);
            }
        });
        let table = table.map_err(|error| status(error.into()))?;
        let saved = self.save(shared, &mut saved, table, before.draining.clone(), &[]).await;
        let version = saved.map_err(status)?;
        Ok(ChangeResponse { version, partition_id: partition.to_owned() })
    }

    async fn move_to(&self, shared: &Shared, partition: &str, to: &str) -> Result<ChangeResponse, Status> {
        let mut saved = self.lock(shared).await.map_err(status)?;
        let before = saved.as_ref().cloned().unwrap_or_default();
        let entry = find(&before.table, partition)?;
        let is_known = shared.servers.borrow().as_ref().is_some_and(|servers| servers.contains_key(to));
        if !is_known {
            return Err(status_error(Code::NotFound, format!("there is no server {to}")));
        }
        let partition_id = partition.to_owned();
        if entry.node_id == to {
            return Ok(ChangeResponse { version: before.table.version, partition_id });
        }
        let one = Move { entry, to: to.to_owned() };
        if self.migrate(shared, &mut saved, vec![one]).await.map_err(status)? == 0 {
            return Err(status_error(
                Code::FailedPrecondition,
                format!("partition {partition} could not be moved"),
            ));
        }
        let version = saved.as_ref().map_or(0, |saved| saved.table.version);
        Ok(ChangeResponse { version, partition_id })
    }

    async fn drain(&self, shared: &Shared, node: &str) -> Result<ChangeResponse, Status> {
        {
            let mut saved = self.lock(shared).await.map_err(status)?;
            let before = saved.as_ref().cloned().unwrap_or_default();
            let servers = shared.servers.borrow().clone().unwrap_or_default();
            if !servers.contains_key(node) {
                return Err(status_error(Code::NotFound, format!("there is no server {node}")));
            }
            let mut draining = before.draining.clone();
            if !draining.iter().any(|one| one == node) {
                draining.push(node.to_owned());
            }
            if eligible(&servers, &draining).is_empty() {
                return Err(status_error(Code::FailedPrecondition, "no server is left to take the ranges"));
            }
            self.set_draining(shared, &mut saved, draining).await?;
        }
        self.wake.notify_one();
        let left = async {
            loop {
                {
                    let saved = self.lock(shared).await.map_err(status)?;
                    let table = saved.as_ref().map(|saved| Arc::clone(&saved.table)).unwrap_or_default();
                    if !table.entries().iter().any(|entry| entry.node_id == node) {
                        return Ok(ChangeResponse { version: table.version, partition_id: String::new() });
                    }
                }
                if !self.is_valid() {
                    return Err(status_error(
                        Code::Unavailable,
                        "this manager lost its leadership; the drain continues",
                    ));
                }
                self.wake.notify_one();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        match tokio::time::timeout(DRAIN_TIMEOUT, left).await {
            Ok(done) => done,
            Err(_) => Err(status_error(
                Code::DeadlineExceeded,
                format!("server {node} still has ranges; the drain continues"),
            )),
        }
    }

    async fn undrain(&self, shared: &Shared, node: &str) -> Result<ChangeResponse, Status> {
        let mut saved = self.lock(shared).await.map_err(status)?;
        let mut draining = saved.as_ref().cloned().unwrap_or_default().draining;
        draining.retain(|one| one != node);
        let version = self.set_draining(shared, &mut saved, draining).await?;
        self.wake.notify_one();
        Ok(ChangeResponse { version, partition_id: String::new() })
    }

    async fn set_draining(
        &self,
        shared: &Shared,
        saved: &mut Option<Saved>,
        draining: Vec<String>,
    ) -> Result<i64, Status> {
        let before = saved.as_ref().cloned().unwrap_or_default();
        if before.draining == draining {
            return Ok(before.table.version);
        }
        let servers = shared.servers.borrow().clone().unwrap_or_default();
        let table = before.table.next(|entries| {
            for entry in entries {
                let mut shown = (**entry).clone();
                if update_server_status(&mut shown, &servers, &draining) {
                    *entry = Arc::new(shown);
                }
            }
        });
        let table = table.map_err(|error| status(error.into()))?;
        self.save(shared, saved, table, draining, &[]).await.map_err(status)
    }

    /// Sends a command to the owner of a range; a range without an owner needs none.
    async fn request_owner(
        &self,
        shared: &Shared,
        entry: &RouteEntry,
        command: Command,
    ) -> Result<Bytes, Status> {
        if entry.node_id.is_empty() {
            return Ok(Bytes::new());
        }
        let result = shared.hub.request(&entry.node_id, command, shared.options.command_timeout).await;
        result.map_err(|error| status_error(Code::FailedPrecondition, error))
    }

    pub(super) fn show(&self) -> ShowResponse {
        let Some(shared) = self.shared() else { return ShowResponse::default() };
        let table = Arc::clone(&shared.feed.current().table);
        let servers = shared.servers.borrow().clone().unwrap_or_default();
        let draining: BTreeSet<&str> = table
            .entries()
            .iter()
            .filter(|entry| NodeStatus::from_i32(entry.node_status) == NodeStatus::Draining)
            .map(|entry| entry.node_id.as_str())
            .collect();
        let mut owned: HashMap<&str, usize> = HashMap::new();
        for entry in table.entries() {
            *owned.entry(entry.node_id.as_str()).or_default() += 1;
        }
        let servers = servers.values().map(|server| {
            let owned = owned.get(server.info.id.as_str()).copied().unwrap_or(0);
            let status = match (draining.contains(server.info.id.as_str()), owned) {
                (true, _) => NodeStatus::Draining,
                (false, 0) => NodeStatus::Waiting,
                (false, _) => NodeStatus::Active,
            };
            Server {
                node_id: server.info.id.clone(),
                node_address: server.info.address.clone(),
                node_status: status as i32,
                partitions: owned as u64,
                connected: shared.hub.is_connected(&server.info.id),
            }
        });
        ShowResponse {
            incarnation: table.incarnation,
            version: table.version,
            servers: servers.collect(),
            routes: table.entries().iter().map(|entry| entry.to_wire()).collect(),
            leader: shared.context.node_id.to_string(),
            subscribers: shared.feed.subscribers() as u64,
        }
    }
}

fn find(table: &RoutingTable, partition: &str) -> Result<RouteEntry, Status> {
    let found = table.get(partition).cloned();
    found.ok_or_else(|| status_error(Code::NotFound, format!("there is no partition {partition}")))
}

/// Servers that may get ranges, in order of their ids.
fn eligible(servers: &Servers, draining: &[String]) -> Vec<PlanNode> {
    let able = servers.values().filter(|server| !draining.contains(&server.info.id));
    able.map(|server| PlanNode { id: server.info.id.clone(), zone: server.info.zone.clone() }).collect()
}

/// Updates the server status in an entry; true if that changes the entry.
fn update_server_status(entry: &mut RouteEntry, servers: &Servers, draining: &[String]) -> bool {
    let mut is_new = false;
    let status = match servers.get(&entry.node_id) {
        Some(server) => {
            is_new = entry.node_address != server.info.address;
            entry.node_address.clone_from(&server.info.address);
            if draining.contains(&entry.node_id) { NodeStatus::Draining } else { NodeStatus::Active }
        }
        None if entry.node_id.is_empty() => NodeStatus::Waiting,
        None => NodeStatus::Failed,
    } as i32;
    is_new |= entry.node_status != status;
    entry.node_status = status;
    is_new
}

/// The owners that lose ranges in `next`, at most [`MAX_REGISTRATION_COMPARES`] of them; ranges of further
/// owners stay for the next save.
fn limit_failed_owners(before: &Saved, next: &mut [Arc<RouteEntry>]) -> BTreeSet<String> {
    let mut failed = BTreeSet::new();
    for (old, new) in before.table.entries().iter().zip(next) {
        if old.node_id == new.node_id || old.node_id.is_empty() {
            continue;
        }
        if failed.len() < MAX_REGISTRATION_COMPARES || failed.contains(&old.node_id) {
            failed.insert(old.node_id.clone());
        } else {
            *new = Arc::clone(old);
        }
    }
    failed
}

/// The planned table: its entries, if they change without a migration, and the ranges that must migrate
/// between live servers.
fn planned(servers: &Servers, before: &Saved, rebalance: bool) -> (Option<Vec<Arc<RouteEntry>>>, Vec<Move>) {
    let eligible = eligible(servers, &before.draining);
    let able: HashSet<&str> = eligible.iter().map(|node| node.id.as_str()).collect();
    let entries = before.table.entries();
    let planned = entries.iter().map(|entry| {
        let keeps = able.contains(entry.node_id.as_str());
        PlanPartition { owner: keeps.then(|| entry.node_id.clone()), zone: String::new() }
    });
    let plan = plan(&eligible, &planned.collect::<Vec<_>>());
    let draining: HashSet<&str> = before.draining.iter().map(String::as_str).collect();
    // Server status, looked up once and not for each range.
    let shown: HashMap<&str, (&str, NodeStatus)> = servers
        .iter()
        .map(|(id, server)| {
            let status =
                if draining.contains(id.as_str()) { NodeStatus::Draining } else { NodeStatus::Active };
            (id.as_str(), (server.info.address.as_str(), status))
        })
        .collect();
    let mut next: Option<Vec<Arc<RouteEntry>>> = None;
    let mut moves = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        let known = shown.get(entry.node_id.as_str());
        let mut owner = entry.node_id.as_str();
        if let Some(wanted) = plan.owners.get(at).map(|node| eligible[*node].id.as_str())
            && wanted != owner
        {
            if known.is_none() {
                owner = wanted;
            } else if rebalance || draining.contains(owner) {
                moves.push(Move { entry: (**entry).clone(), to: wanted.to_owned() });
            }
        }
        let (address, status) = match shown.get(owner) {
            Some((address, status)) => (*address, *status),
            None if owner.is_empty() => (entry.node_address.as_str(), NodeStatus::Waiting),
            None => (entry.node_address.as_str(), NodeStatus::Failed),
        };
        if owner != entry.node_id || address != entry.node_address || status as i32 != entry.node_status {
            let mut changed = (**entry).clone();
            owner.clone_into(&mut changed.node_id);
            address.clone_into(&mut changed.node_address);
            changed.node_status = status as i32;
            next.get_or_insert_with(|| entries.to_vec())[at] = Arc::new(changed);
        }
    }
    (next, moves)
}
