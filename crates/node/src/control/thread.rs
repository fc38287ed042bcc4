//! How the control thread comes up and goes down.
//!
//! Up: the peer port, the way into the cluster, the core, a quorum, this node's records. Every step that waits says for
//! what (`/readyz`), and every refusal by the cluster ends the start with its reason. Down: the core stops when the
//! [`Shutdown`] of the thread is given; nothing is flushed, because nothing that counts is unflushed.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::{aligned, rest};
use moim_base::task::{Scope, Shutdown, offload};
use moim_cluster::nodes::{MemberRecord, NodeRecord};
use moim_cluster::{CoordRepository, StateRepository};
use moim_coord::shelf::Shelf;
use moim_coord::{Coordinator, CoordinatorOptions};
use moim_journal::{RealDisk, Store};
use moim_raft::{
    GroupId, GroupOptions, Host, LocalPeer, Member, OpenError, PeerId, ServiceId, TcpServer, TcpTransport,
    Transport, VoterId,
};
use tokio::sync::oneshot;

use super::disk_health::{DiskHealth, DiskParts};
use super::events::{self, EventLog};
use super::presence::Presence;
use super::pulse::Pulse;
use super::records::{self, SUPPORTED_LEVEL};
use super::ruler::Ruler;
use super::view::View;
use super::{Control, ControlParts, marks, metrics, migrate, publish, steward};
use crate::data_dir::{Admission, Identity, decode_id};
use crate::exit::{Failure, Outcome, Status};
use crate::formation::{Card, Claimant, Doorkeeper, Entrant, Inside, Way};
use crate::journals::{LOCAL_TAG, LOST_DIRECTORY, RAFT_TAG};

/// When memory is first given back. The pause doubles: nobody knows when a start is over.
const SETTLED: Duration = Duration::from_secs(1);
/// Between two times that memory is given back, later.
const GIVE_BACK: Duration = Duration::from_secs(15);
/// The coordination group; applications' groups have other numbers.
pub(crate) const GROUP: GroupId = GroupId(1);
/// Between two tries to reach the quorum.
const QUORUM_PAUSE: Duration = Duration::from_millis(50);
/// For one try.
const QUORUM_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a node looks where the others are, and whether it is still wanted.
const LOOK: Duration = Duration::from_millis(500);
/// How long a node that was removed may take to give the coordination group away, and how often it looks.
const GIVE_AWAY: Duration = Duration::from_secs(10);
const GLANCE: Duration = Duration::from_millis(50);

/// Starts the control thread; returns when this node is a working member of its cluster.
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
    let up = ready.await.map_err(|_| lost())??;
    Ok(Control {
        coordinator: up.coordinator,
        repository: up.repository,
        peer: up.peer,
        failed: shutdown,
        removed: up.removed,
        local: up.local,
        events: up.events,
        pulse: up.pulse,
        presence: up.presence,
        record: up.record.into(),
        thread,
    })
}

/// What came up.
#[derive(Clone)]
struct Up {
    coordinator: Coordinator,
    repository: Arc<dyn StateRepository>,
    peer: SocketAddr,
    removed: Shutdown,
    local: LocalPeer,
    events: Arc<EventLog>,
    pulse: Arc<Pulse>,
    presence: Arc<Presence>,
    record: NodeRecord,
}

async fn run(parts: ControlParts, shutdown: Shutdown, started: oneshot::Sender<Outcome<Up>>) {
    let scope = Scope::new(shutdown.clone());
    // A core that stops while the node looks for its quorum would never find it.
    let up = tokio::select! {
        biased;
        up = bring_up(&parts, &scope) => up,
        () = shutdown.stopped() => {
            Err(Failure::error("the coordination core stopped; see the log").hint(LOST_DIRECTORY))
        }
    };
    match up {
        Ok(up) => {
            let coordinator = up.coordinator.clone();
            if started.send(Ok(up)).is_ok() {
                tokio::select! {
                    () = shutdown.stopped() => {}
                    () = give_back() => {}
                }
            }
            coordinator.stop().await;
        }
        Err(failure) => {
            let _ = started.send(Err(failure));
        }
    }
}

/// Gives memory back now and then. A start, a failover or a client that lists everything takes much for a moment, and
/// afterwards this thread rests.
async fn give_back() {
    let mut pause = SETTLED;
    loop {
        tokio::time::sleep(pause).await;
        crate::allocator::give_back();
        pause = (pause * 2).min(GIVE_BACK);
    }
}

async fn bring_up(parts: &ControlParts, scope: &Scope) -> Outcome<Up> {
    let local = LocalPeer::unjoined();
    let peer = listen(parts, &local, scope).await?;
    let doorkeeper = Arc::new(Doorkeeper::new(Arc::clone(&parts.data)));
    doorkeeper.show(card(parts, peer).with_identity(&parts.data.identity()));
    parts.router.serve(ServiceId::NODE, Arc::clone(&doorkeeper) as _);
    let entrant =
        Entrant { way: way(parts)?, data: &parts.data, doorkeeper: &doorkeeper, readiness: &parts.readiness };
    let identity = entrant.enter().await?;
    let transport = Arc::new(TcpTransport::new(local.clone(), scope.clone()));
    let coordinator = open(parts, &identity, &local, &transport, scope).await?;
    let repository: Arc<dyn StateRepository> = Arc::new(CoordRepository::new(coordinator.clone()));
    let inside = Inside { coordinator: coordinator.clone(), repository: Arc::clone(&repository) };
    doorkeeper.go_inside(inside);
    let card = doorkeeper.card();
    let claimant = Claimant {
        data: &parts.data,
        group: coordinator.group(),
        transport: transport.as_ref(),
        peer: &card.peer,
    };
    claimant.claim(&entrant).await?;
    take_part(parts, &coordinator, &identity, &card).await?;
    doorkeeper.show(card.clone().with_identity(&parts.data.identity()));
    find_quorum(parts, &coordinator, transport.as_ref(), &entrant).await?;
    settle_in(parts, &coordinator, repository.as_ref(), &identity, &card).await?;

    let record = record(parts, &identity, &card);
    publish(repository.as_ref(), &record).await?;
    let mark = MemberRecord {
        node_id: record.node_id,
        incarnation: record.incarnation,
        voter: record.voter,
        ..MemberRecord::default()
    };
    let presence = Arc::new(Presence::new(Arc::clone(&repository), Arc::clone(&parts.data), mark));
    let removed = Shutdown::new();
    let (readiness, shutdown) = (parts.readiness.clone(), scope.shutdown().clone());
    scope.spawn("presence", Arc::clone(&presence).keep(readiness, shutdown.clone()));
    scope.spawn("steward", steward::run(coordinator.clone(), Arc::clone(&repository), shutdown.clone()));
    let (events, disk) = (Arc::new(EventLog::default()), Arc::new(DiskHealth::default()));
    parts.router.serve(ServiceId::HEALTH, Arc::clone(&disk) as _);
    let pulse = Pulse::new(
        record.node_id,
        Arc::clone(&transport),
        Arc::clone(&parts.clock),
        Arc::clone(&disk),
        Arc::clone(&events),
    );
    let pulse = Arc::new(pulse);
    let watching = DiskParts {
        node_id: record.node_id,
        health: disk,
        presence: Arc::clone(&presence),
        coordinator: coordinator.clone(),
        store: Arc::clone(&parts.store),
        pulse: Arc::clone(&pulse),
        events: Arc::clone(&events),
        clock: Arc::clone(&parts.clock),
        readiness: parts.readiness.clone(),
        scope: scope.clone(),
    };
    scope.spawn("disk-health", watching.watch(shutdown.clone()));
    scope.spawn("pulse", Arc::clone(&pulse).run(coordinator.clone(), shutdown.clone()));
    let ruler = Ruler {
        node_id: record.node_id,
        coordinator: coordinator.clone(),
        repository: Arc::clone(&repository),
        clock: Arc::clone(&parts.clock),
        peers: Arc::clone(&pulse) as _,
        settings: parts.topic_defaults.clone(),
    };
    scope.spawn("controller", ruler.run(shutdown.clone()));
    spread_run(parts, &coordinator, &transport, &card, &removed, scope);
    let mark = marks::run(
        record.node_id,
        coordinator.clone(),
        Arc::clone(&repository),
        Arc::clone(&parts.store),
        shutdown.clone(),
    );
    scope.spawn("marks", mark);
    let (told, watched) = (Arc::clone(&events), Arc::clone(&repository));
    scope.spawn("events", events::follow(told, watched, Arc::clone(&parts.clock), shutdown.clone()));
    let follow = Follow {
        coordinator: coordinator.clone(),
        transport,
        record: record.clone(),
        removed: removed.clone(),
    };
    scope.spawn("records", follow.run(shutdown));
    metrics::register(&parts.metrics, &coordinator, scope);
    Ok(Up { coordinator, repository, peer, removed, local, events, pulse, presence, record })
}

/// Has every member confirm this run, those too that were down when it began.
fn spread_run(
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
        claimant.spread(&lost, &shutdown).await;
    });
}

async fn listen(parts: &ControlParts, local: &LocalPeer, scope: &Scope) -> Outcome<SocketAddr> {
    let address = SocketAddr::new(parts.host, parts.config.peer.port);
    let server = TcpServer::bind(address, local.clone(), parts.router.clone(), scope).await;
    let server = server.map_err(|error| crate::serve::cannot_listen(address, &error, "--peer-port"))?;
    Ok(server.address())
}

fn way(parts: &ControlParts) -> Outcome<Way> {
    let cluster = &parts.config.cluster;
    let founders = cluster.founders().map_err(|why| Failure::usage(format!("`cluster.initial` {why}")))?;
    let join = cluster.join_addresses();
    Ok(if !founders.is_empty() {
        Way::Founders(founders)
    } else if !join.is_empty() {
        Way::Join(join)
    } else {
        Way::Alone
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
        // A port that is still to be picked is told when it is.
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

/// Opens this node's member of the group, under the name it has from now on.
async fn open(
    parts: &ControlParts,
    identity: &Identity,
    local: &LocalPeer,
    transport: &Arc<TcpTransport>,
    scope: &Scope,
) -> Outcome<Coordinator> {
    let cluster = decode_id(&identity.cluster_id)
        .ok_or_else(|| Failure::error(format!("the cluster id {} makes no sense", identity.cluster_id)))?;
    let voter = VoterId(identity.voter);
    local.become_member(PeerId { cluster, voter, secret: identity.secret_number() });
    let host = Host {
        store: Store::clone(&parts.store),
        disk: Arc::new(RealDisk),
        root: parts.data.path.clone(),
        router: parts.router.clone(),
        transport: Arc::clone(transport) as _,
    };
    // What etcd clients see has 64 bits.
    let short = (cluster >> 64) as u64 ^ cluster as u64;
    let mut group = GroupOptions::new(GROUP, voter, RAFT_TAG);
    group.unconfirmed = true;
    let mut options = CoordinatorOptions::new(group, short.max(1));
    options.quota_bytes = parts.config.etcd.quota_bytes;
    options.compaction_retention_ms = parts.config.etcd.compaction_retention_ms;
    options.watch_runtime = Some(parts.etcd_runtime.clone());
    options.shelf = shelf(&parts.data.path);
    options.on_reclaimed = Some(crate::allocator::give_back);
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
fn shelf(folder: &Path) -> Option<Shelf> {
    let path = folder.join("history.tmp");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
    let shelf = file.and_then(|file| {
        std::fs::remove_file(&path)?;
        Shelf::new(file)
    });
    let kept = |error: &io::Error| tracing::warn!(%error, "old values of coordination stay in memory");
    shelf.inspect_err(kept).ok()
}

/// Sees to it that this member has a log, and only in a way that lets no voter begin twice.
async fn take_part(
    parts: &ControlParts,
    coordinator: &Coordinator,
    identity: &Identity,
    card: &Card,
) -> Outcome {
    let group = coordinator.group();
    let stopped = |error| Failure::error(format!("the coordination core stopped: {error}"));
    let has_begun = group.has_begun().await.map_err(stopped)?;
    match identity.admission {
        Admission::New => return Err(Failure::error("this folder is in no cluster yet")),
        Admission::Founding if !has_begun => {
            let founders =
                if identity.founders.is_empty() { vec![card.founder()] } else { identity.founders.clone() };
            let members: Vec<Member> = founders
                .iter()
                .zip(1..)
                .map(|(founder, voter)| Member { id: VoterId(voter), address: founder.peer.clone() })
                .collect();
            group.initialize(&members).await.map_err(|error| {
                Failure::error(format!("the coordination group could not be founded: {error}"))
            })?;
        }
        Admission::Joining => {
            parts.readiness.waits("waiting for the cluster to send its log");
            while group.wait_for(QUORUM_TIMEOUT, |now| now.last_index.is_some()).await.is_err() {}
        }
        Admission::Member if !has_begun => {
            let message = format!(
                "{} holds no Raft log, but voter {} had one",
                parts.data.path.display(),
                identity.voter
            );
            return Err(Failure::error(message).hint(
                "restore the folder, or empty it: then `moim cluster replace` lets the node in as a new one",
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
            // Nobody else can lead: there is nothing to wait for.
            group.campaign().await.map_err(stopped)?;
        }
        Ok(())
    };
    // Side by side: until both are done nobody is served here.
    let (recorded, led) = tokio::join!(recorded, led);
    recorded.map_err(|error| Failure::error(format!("cannot write node.json: {error}")))??;
    led
}

/// Returns when a quorum answers. Meanwhile the others are told where this node is; they may say that it is out.
async fn find_quorum(
    parts: &ControlParts,
    coordinator: &Coordinator,
    transport: &dyn Transport,
    entrant: &Entrant<'_>,
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
            async { if others.is_empty() { Ok(true) } else { entrant.announce(transport, &others).await } };
        let confirmed = tokio::time::timeout(QUORUM_TIMEOUT, coordinator.linearizable());
        let (announced, confirmed) = tokio::join!(announced, confirmed);
        announced?;
        if matches!(confirmed, Ok(Ok(()))) {
            return Ok(());
        }
        parts.readiness.waits(&format!("waiting for a quorum of {} voters", metrics.voters.len()));
        tokio::time::sleep(QUORUM_PAUSE).await;
    }
}

/// What has to be in the store before anything is built on it.
async fn settle_in(
    parts: &ControlParts,
    coordinator: &Coordinator,
    repository: &dyn StateRepository,
    identity: &Identity,
    card: &Card,
) -> Outcome {
    let founders =
        if identity.founders.is_empty() { vec![card.founder()] } else { identity.founders.clone() };
    loop {
        let settled = async {
            if View::of(coordinator).next_voter.is_none() {
                records::found(repository, &founders).await?;
            }
            migrate::migrate(&parts.store, Arc::clone(&parts.clock), LOCAL_TAG, repository).await?;
            Ok::<_, records::RecordError>(())
        };
        match settled.await {
            Ok(()) => break,
            Err(records::RecordError::Store(error)) if !error.is_retryable() => {
                return Err(Failure::error(format!("the cluster's records cannot be written: {error}")));
            }
            Err(error) => {
                tracing::debug!(%error, "the cluster's first records were not written; trying again");
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

/// Follows what the records say about this node and the others.
struct Follow {
    coordinator: Coordinator,
    transport: Arc<TcpTransport>,
    record: NodeRecord,
    removed: Shutdown,
}

impl Follow {
    /// Waits until the steward has taken this node out of the coordination group, if it leads it.
    async fn give_away(&self) {
        let group = self.coordinator.group();
        while group.is_leader() && group.metrics().voters.iter().any(|voter| voter.id.0 == self.record.voter)
        {
            tokio::time::sleep(GLANCE).await;
        }
    }

    async fn run(self, shutdown: Shutdown) {
        loop {
            let view = View::of(&self.coordinator);
            for node in view.nodes.iter().filter(|node| node.voter != 0 && !node.peer.is_empty()) {
                self.transport.set_address(VoterId(node.voter), &node.peer);
            }
            if view.is_out(self.record.node_id, self.record.voter, &self.record.directory_id) {
                // Whoever leads the group gives it away first: others may have no vote yet, and never would get one.
                let _ = tokio::time::timeout(GIVE_AWAY, self.give_away()).await;
                self.removed.stop();
                return;
            }
            tokio::select! {
                () = shutdown.stopped() => return,
                () = rest(LOOK) => {}
            }
        }
    }
}
