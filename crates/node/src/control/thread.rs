//! Startup and shutdown of the control thread.
//!
//! Startup order: the peer port, cluster formation, the coordination core, a quorum, this node's records. Every step
//! that waits publishes its reason (`/readyz`), and a rejection by the cluster ends the start with its reason.
//! Shutdown: the core stops when the [`Shutdown`] of the thread is triggered. There is nothing to flush: every
//! acknowledged write is durable already.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::{aligned, rest};
use moim_base::task::{Scope, Shutdown, offload};
use moim_coord::spill::SpillFile;
use moim_coord::{Coordinator, CoordinatorOptions};
use moim_journal::{RealDisk, Store};
use moim_raft::{
    GroupId, GroupOptions, Host, LocalPeer, Member, OpenError, PeerId, ServiceId, TcpServer, TcpTransport,
    Transport, VoterId,
};
use moim_state::nodes::{MemberRecord, NodeRecord};
use moim_state::{CoordRepository, StateRepository};
use tokio::sync::oneshot;

use super::controller_election::ControllerElection;
use super::disk_health::{DiskHealth, DiskParts};
use super::events::{self, EventLog};
use super::failure_detector::FailureDetector;
use super::presence::Presence;
use super::records::{self, SUPPORTED_LEVEL};
use super::view::View;
use super::{Control, ControlParts, group_membership, marks, metrics, publish};
use crate::data_dir::{Admission, Identity, decode_id};
use crate::exit::{Failure, Outcome, Status};
use crate::formation::{Bootstrap, BootstrapMode, Card, Claimant, ClusterAccess, JoinServer};
use crate::journals::{LOST_DIRECTORY, RAFT_TAG};

/// Pause before the first release of freed memory. It doubles each time, because the end of the startup load is
/// unknown.
const FIRST_RELEASE_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause between releases of freed memory.
const MAX_RELEASE_PAUSE: Duration = Duration::from_secs(15);
/// Raft group id of the coordination group; groups of applications have other ids.
pub(crate) const GROUP: GroupId = GroupId(1);
/// Pause between attempts to reach the quorum.
const QUORUM_PAUSE: Duration = Duration::from_millis(50);
/// Timeout of one attempt to reach the quorum.
const QUORUM_TIMEOUT: Duration = Duration::from_secs(1);
/// Poll interval of the node records: addresses of the other nodes, and whether this node was removed.
const RECORD_POLL: Duration = Duration::from_millis(500);
/// Timeout of the leadership transfer of a removed node.
const STEP_DOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval during that transfer.
const STEP_DOWN_POLL: Duration = Duration::from_millis(50);

/// Starts the control thread; returns when this node is a member of its cluster and its records are written.
pub(crate) async fn start(parts: ControlParts) -> Outcome<Control> {
    let (started, ready) = oneshot::channel();
    let shutdown = Shutdown::new();
    let (stopping, name) = (shutdown.clone(), "moim-control".to_owned());
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        let runtime = aligned(tokio::runtime::Builder::new_current_thread().enable_all());
        match runtime {
            Ok(runtime) => runtime.block_on(run(parts, stopping, started)),
            Err(error) => {
                let _ =
                    started.send(Err(Failure::error(format!("cannot start the control thread: {error}"))));
            }
        }
    });
    let thread =
        thread.map_err(|error| Failure::error(format!("cannot start the control thread: {error}")))?;
    let lost = || Failure::error("the control thread ended; see the log");
    let started = ready.await.map_err(|_| lost())??;
    Ok(Control {
        coordinator: started.coordinator,
        repository: started.repository,
        peer: started.peer,
        failed: shutdown,
        removed: started.removed,
        local: started.local,
        events: started.events,
        failure_detector: started.failure_detector,
        presence: started.presence,
        record: started.record.into(),
        thread,
    })
}

/// Result of a successful start.
#[derive(Clone)]
struct Started {
    coordinator: Coordinator,
    repository: Arc<dyn StateRepository>,
    peer: SocketAddr,
    removed: Shutdown,
    local: LocalPeer,
    events: Arc<EventLog>,
    failure_detector: Arc<FailureDetector>,
    presence: Arc<Presence>,
    record: NodeRecord,
}

async fn run(parts: ControlParts, shutdown: Shutdown, started: oneshot::Sender<Outcome<Started>>) {
    let scope = Scope::new(shutdown.clone());
    // Without the core, the wait for a quorum would never end.
    let outcome = tokio::select! {
        biased;
        outcome = start_control(&parts, &scope) => outcome,
        () = shutdown.stopped() => {
            Err(Failure::error("the coordination core stopped; see the log").hint(LOST_DIRECTORY))
        }
    };
    match outcome {
        Ok(handles) => {
            let coordinator = handles.coordinator.clone();
            if started.send(Ok(handles)).is_ok() {
                tokio::select! {
                    () = shutdown.stopped() => {}
                    () = release_freed_memory() => {}
                }
            }
            coordinator.stop().await;
        }
        Err(failure) => {
            let _ = started.send(Err(failure));
        }
    }
}

/// Releases freed memory to the system periodically. A start, a failover or a full listing allocates much for a moment,
/// and this thread is idle afterwards.
async fn release_freed_memory() {
    let mut pause = FIRST_RELEASE_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        crate::allocator::release_freed_memory();
        pause = (pause * 2).min(MAX_RELEASE_PAUSE);
    }
}

async fn start_control(parts: &ControlParts, scope: &Scope) -> Outcome<Started> {
    let local = LocalPeer::unjoined();
    let peer = listen(parts, &local, scope).await?;
    let join_server = Arc::new(JoinServer::new(Arc::clone(&parts.data)));
    join_server.set_card(card(parts, peer).with_identity(&parts.data.identity()));
    parts.router.serve(ServiceId::NODE, Arc::clone(&join_server) as _);
    let bootstrap = Bootstrap {
        mode: mode(parts)?,
        data: &parts.data,
        join_server: &join_server,
        readiness: &parts.readiness,
    };
    let identity = bootstrap.run().await?;
    let transport = Arc::new(TcpTransport::new(local.clone(), scope.clone()));
    let coordinator = open(parts, &identity, &local, &transport, scope).await?;
    let repository: Arc<dyn StateRepository> = Arc::new(CoordRepository::new(coordinator.clone()));
    let access = ClusterAccess { coordinator: coordinator.clone(), repository: Arc::clone(&repository) };
    join_server.set_cluster_access(access);
    let card = join_server.card();
    let claimant = Claimant {
        data: &parts.data,
        group: coordinator.group(),
        transport: transport.as_ref(),
        peer: &card.peer,
    };
    claimant.claim(&bootstrap).await?;
    initialize_member(parts, &coordinator, &identity, &card).await?;
    join_server.set_card(card.clone().with_identity(&parts.data.identity()));
    wait_for_quorum(parts, &coordinator, transport.as_ref(), &bootstrap).await?;
    write_founding_records(&coordinator, repository.as_ref(), &identity, &card).await?;

    let record = record(parts, &identity, &card);
    publish(repository.as_ref(), &record).await?;
    let member = MemberRecord {
        node_id: record.node_id,
        incarnation: record.incarnation,
        voter: record.voter,
        ..MemberRecord::default()
    };
    let presence = Arc::new(Presence::new(Arc::clone(&repository), Arc::clone(&parts.data), member));
    let removed = Shutdown::new();
    let (readiness, shutdown) = (parts.readiness.clone(), scope.shutdown().clone());
    scope.spawn("presence", Arc::clone(&presence).run(readiness, shutdown.clone()));
    scope.spawn(
        "group-membership",
        group_membership::run(coordinator.clone(), Arc::clone(&repository), shutdown.clone()),
    );
    let (events, disk) = (Arc::new(EventLog::default()), Arc::new(DiskHealth::default()));
    parts.router.serve(ServiceId::HEALTH, Arc::clone(&disk) as _);
    let failure_detector = FailureDetector::new(
        record.node_id,
        Arc::clone(&transport),
        Arc::clone(&parts.clock),
        Arc::clone(&disk),
        Arc::clone(&events),
    );
    let failure_detector = Arc::new(failure_detector);
    let watching = DiskParts {
        node_id: record.node_id,
        health: disk,
        presence: Arc::clone(&presence),
        coordinator: coordinator.clone(),
        store: Arc::clone(&parts.store),
        failure_detector: Arc::clone(&failure_detector),
        events: Arc::clone(&events),
        clock: Arc::clone(&parts.clock),
        readiness: parts.readiness.clone(),
        scope: scope.clone(),
    };
    scope.spawn("disk-health", watching.watch(shutdown.clone()));
    scope.spawn("failure-detector", Arc::clone(&failure_detector).run(coordinator.clone(), shutdown.clone()));
    let controller_election = ControllerElection {
        node_id: record.node_id,
        coordinator: coordinator.clone(),
        repository: Arc::clone(&repository),
        clock: Arc::clone(&parts.clock),
        peers: Arc::clone(&failure_detector) as _,
        settings: parts.topic_defaults.clone(),
    };
    scope.spawn("controller", controller_election.run(shutdown.clone()));
    repeat_claims(parts, &coordinator, &transport, &card, &removed, scope);
    let mark = marks::run(
        record.node_id,
        coordinator.clone(),
        Arc::clone(&repository),
        Arc::clone(&parts.store),
        shutdown.clone(),
    );
    scope.spawn("marks", mark);
    let (log, watched) = (Arc::clone(&events), Arc::clone(&repository));
    scope.spawn("events", events::follow(log, watched, Arc::clone(&parts.clock), shutdown.clone()));
    let follow = RecordFollower {
        coordinator: coordinator.clone(),
        transport,
        record: record.clone(),
        removed: removed.clone(),
    };
    scope.spawn("records", follow.run(shutdown));
    metrics::register(&parts.metrics, &coordinator, scope);
    Ok(Started { coordinator, repository, peer, removed, local, events, failure_detector, presence, record })
}

/// Repeats the claim of this run until every member has confirmed it, including members that were down at the start.
fn repeat_claims(
    parts: &ControlParts,
    coordinator: &Coordinator,
    transport: &Arc<TcpTransport>,
    card: &Card,
    lost: &Shutdown,
    scope: &Scope,
) {
    let (data, coordinator, transport) =
        (Arc::clone(&parts.data), coordinator.clone(), Arc::clone(transport));
    let (peer, lost, shutdown) = (card.peer.clone(), lost.clone(), scope.shutdown().clone());
    scope.spawn("run-claims", async move {
        let transport = transport.as_ref();
        let claimant = Claimant { data: &data, group: coordinator.group(), transport, peer: &peer };
        claimant.repeat(&lost, &shutdown).await;
    });
}

async fn listen(parts: &ControlParts, local: &LocalPeer, scope: &Scope) -> Outcome<SocketAddr> {
    let address = SocketAddr::new(parts.host, parts.config.peer.port);
    let server = TcpServer::bind(address, local.clone(), parts.router.clone(), scope).await;
    let server = server.map_err(|error| crate::serve::cannot_listen(address, &error, "--peer-port"))?;
    Ok(server.address())
}

fn mode(parts: &ControlParts) -> Outcome<BootstrapMode> {
    let cluster = &parts.config.cluster;
    let founders = cluster.founders().map_err(|why| Failure::usage(format!("`cluster.initial` {why}")))?;
    let join = cluster.join_addresses();
    Ok(if !founders.is_empty() {
        BootstrapMode::Founders(founders)
    } else if !join.is_empty() {
        BootstrapMode::Join(join)
    } else {
        BootstrapMode::Standalone
    })
}

fn card(parts: &ControlParts, peer: SocketAddr) -> Card {
    let config = &parts.config;
    let listed = config.cluster.founders().unwrap_or_default();
    Card {
        listed: listed.into_keys().collect(),
        peer: crate::serve::advertised(config, &config.peer.advertise, peer),
        zone: config.node.zone.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        feature_level: SUPPORTED_LEVEL,
        ..Card::default()
    }
}

fn record(parts: &ControlParts, identity: &Identity, card: &Card) -> NodeRecord {
    let config = &parts.config;
    let kafka = SocketAddr::new(parts.host, config.kafka.port);
    NodeRecord {
        node_id: identity.node_id,
        voter: identity.voter,
        incarnation: identity.incarnation,
        directory_id: identity.directory_id.clone(),
        name: format!("node-{}", identity.node_id),
        zone: card.zone.clone(),
        peer: card.peer.clone(),
        etcd: crate::serve::advertised(config, &config.etcd.advertise, parts.etcd),
        // Port 0 is published after the listener is bound.
        kafka: match (config.kafka.port, config.kafka.advertise.as_str()) {
            (0, "") => String::new(),
            (_, advertise) => crate::serve::advertised(config, advertise, kafka),
        },
        admin: crate::serve::advertised(config, "", parts.admin),
        redis: String::new(),
        version: card.version.clone(),
        feature_level: card.feature_level,
    }
}

/// Opens this node's member of the coordination group under its voter id.
async fn open(
    parts: &ControlParts,
    identity: &Identity,
    local: &LocalPeer,
    transport: &Arc<TcpTransport>,
    scope: &Scope,
) -> Outcome<Coordinator> {
    let cluster = decode_id(&identity.cluster_id).ok_or_else(|| {
        Failure::error(format!("undecodable cluster id {} in node.json", identity.cluster_id))
    })?;
    let voter = VoterId(identity.voter);
    local.become_member(PeerId { cluster, voter, secret: identity.secret_number() });
    let host = Host {
        store: Store::clone(&parts.store),
        disk: Arc::new(RealDisk),
        root: parts.data.path.clone(),
        router: parts.router.clone(),
        transport: Arc::clone(transport) as _,
    };
    // The cluster id of the etcd API has 64 bits.
    let short = (cluster >> 64) as u64 ^ cluster as u64;
    let mut group = GroupOptions::new(GROUP, voter, RAFT_TAG);
    group.unconfirmed = true;
    let mut options = CoordinatorOptions::new(group, short.max(1));
    options.quota_bytes = parts.config.etcd.quota_bytes;
    options.compaction_retention_ms = parts.config.etcd.compaction_retention_ms;
    options.watch_runtime = Some(parts.etcd_runtime.clone());
    options.spill = spill_file(&parts.data.path);
    options.on_reclaimed = Some(crate::allocator::release_freed_memory);
    let opened = Coordinator::open(&host, options, Arc::clone(&parts.clock), scope).await;
    opened.map_err(|error| {
        let failure = Failure::error(format!("cannot open the coordination core: {error}"));
        match error {
            OpenError::Damaged { .. } => failure.hint(LOST_DIRECTORY),
            OpenError::Io { source, .. } if source.kind() == io::ErrorKind::InvalidData => {
                failure.hint(LOST_DIRECTORY) // a snapshot
            }
            _ => failure,
        }
    })
}

/// A place for old values, in a file that has no name from the beginning: nothing of it is needed again.
fn spill_file(folder: &Path) -> Option<SpillFile> {
    let path = folder.join("history.tmp");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
    let spill = file.and_then(|file| {
        std::fs::remove_file(&path)?;
        SpillFile::new(file)
    });
    let kept = |error: &io::Error| tracing::warn!(%error, "old values of coordination stay in memory");
    spill.inspect_err(kept).ok()
}

/// Ensures that this member has a Raft log, and that no voter is initialized twice.
async fn initialize_member(
    parts: &ControlParts,
    coordinator: &Coordinator,
    identity: &Identity,
    card: &Card,
) -> Outcome {
    let group = coordinator.group();
    let stopped = |error| Failure::error(format!("the coordination core stopped: {error}"));
    let is_initialized = group.has_begun().await.map_err(stopped)?;
    match identity.admission {
        Admission::New => return Err(Failure::error("data directory is in no cluster yet")),
        Admission::Founding if !is_initialized => {
            let founders =
                if identity.founders.is_empty() { vec![card.founder()] } else { identity.founders.clone() };
            let members: Vec<Member> = founders
                .iter()
                .zip(1..)
                .map(|(founder, voter)| Member { id: VoterId(voter), address: founder.peer.clone() })
                .collect();
            group.initialize(&members).await.map_err(|error| {
                Failure::error(format!("cannot initialize the coordination group: {error}"))
            })?;
        }
        Admission::Joining => {
            parts.readiness.set_waiting("waiting for the cluster to send its log");
            while group.wait_for(QUORUM_TIMEOUT, |now| now.last_index.is_some()).await.is_err() {}
        }
        Admission::Member if !is_initialized => {
            let message = format!(
                "{} holds no Raft log, but voter {} had one",
                parts.data.path.display(),
                identity.voter
            );
            return Err(Failure::error(message).hint(
                "restore the data directory, or empty it: then `moim cluster replace` admits the node as a new one",
            ));
        }
        Admission::Founding | Admission::Member => {}
    }
    let data = Arc::clone(&parts.data);
    let recorded = offload(move || Ok(data.update(|identity| identity.admission = Admission::Member)));
    let metrics = group.metrics();
    let alone = metrics.voters.len() == 1 && metrics.voters[0].id == metrics.voter;
    let led = async {
        if alone && metrics.leadership.leader.is_none() {
            // The only voter need not wait for the election timeout.
            group.campaign().await.map_err(stopped)?;
        }
        Ok(())
    };
    // Concurrently: the node serves only after both.
    let (recorded, led) = tokio::join!(recorded, led);
    recorded.map_err(|error| Failure::error(format!("cannot write node.json: {error}")))??;
    led
}

/// Waits for a quorum. Meanwhile this node announces its address to the other members, which may reject it as removed.
async fn wait_for_quorum(
    parts: &ControlParts,
    coordinator: &Coordinator,
    transport: &dyn Transport,
    bootstrap: &Bootstrap<'_>,
) -> Outcome {
    let group = coordinator.group();
    loop {
        let metrics = group.metrics();
        let others: Vec<String> = metrics
            .voters
            .iter()
            .chain(&metrics.learners)
            .filter(|member| member.id != metrics.voter)
            .map(|member| member.address.clone())
            .collect();
        let announced =
            async { if others.is_empty() { Ok(true) } else { bootstrap.announce(transport, &others).await } };
        let confirmed = tokio::time::timeout(QUORUM_TIMEOUT, coordinator.linearizable());
        let (announced, confirmed) = tokio::join!(announced, confirmed);
        announced?;
        if matches!(confirmed, Ok(Ok(()))) {
            return Ok(());
        }
        parts.readiness.set_waiting(&format!("waiting for a quorum of {} voters", metrics.voters.len()));
        tokio::time::sleep(QUORUM_PAUSE).await;
    }
}

/// Writes the founding records, if they do not exist yet, and checks the feature level.
async fn write_founding_records(
    coordinator: &Coordinator,
    repository: &dyn StateRepository,
    identity: &Identity,
    card: &Card,
) -> Outcome {
    let founders =
        if identity.founders.is_empty() { vec![card.founder()] } else { identity.founders.clone() };
    while View::of(coordinator).next_voter.is_none() {
        match records::found_cluster(repository, &founders).await {
            Ok(()) => break,
            Err(records::RecordError::Store(error)) if !error.is_retryable() => {
                return Err(Failure::error(format!(
                    "cannot write the founding records of the cluster: {error}"
                )));
            }
            Err(error) => {
                tracing::debug!(%error, "founding records write failed; retrying");
                tokio::time::sleep(QUORUM_PAUSE).await;
            }
        }
    }
    let level = View::of(coordinator).feature_level.unwrap_or(0);
    if level > SUPPORTED_LEVEL {
        let message = format!(
            "the cluster runs at feature level {level}, this moim ({}) supports up to {SUPPORTED_LEVEL}",
            env!("CARGO_PKG_VERSION")
        );
        return Err(
            Failure::new(Status::Conflict, message).hint("run the newer moim that the other nodes run")
        );
    }
    Ok(())
}

/// Follows the node records: addresses of the other nodes, and the removal of this one.
struct RecordFollower {
    coordinator: Coordinator,
    transport: Arc<TcpTransport>,
    record: NodeRecord,
    removed: Shutdown,
}

impl RecordFollower {
    /// Waits until a removed leader has lost its vote in the coordination group.
    async fn wait_for_step_down(&self) {
        let group = self.coordinator.group();
        while group.is_leader() && group.metrics().voters.iter().any(|voter| voter.id.0 == self.record.voter)
        {
            tokio::time::sleep(STEP_DOWN_POLL).await;
        }
    }

    async fn run(self, shutdown: Shutdown) {
        loop {
            let view = View::of(&self.coordinator);
            for node in view.nodes.iter().filter(|node| node.voter != 0 && !node.peer.is_empty()) {
                self.transport.set_address(VoterId(node.voter), &node.peer);
            }
            if view.is_out(self.record.node_id, self.record.voter, &self.record.directory_id) {
                // A leader is removed from the group before it stops: other members may have no vote yet, and only the
                // leader can give them one.
                let _ = tokio::time::timeout(STEP_DOWN_TIMEOUT, self.wait_for_step_down()).await;
                self.removed.stop();
                return;
            }
            tokio::select! {
                () = shutdown.stopped() => return,
                () = rest(RECORD_POLL) => {}
            }
        }
    }
}
