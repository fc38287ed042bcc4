//! The configured Raft groups: founded, joined, or restarted, on one port.

use std::net::SocketAddr;
use std::path::Path;

use futures_util::future::try_join_all;

use super::StartError;
use super::domain::Domain;
use crate::backoff::Backoff;
use crate::config::{AppConfig, ClusterConfig, Mode, Peers};
use crate::context::Context;
use crate::groups::{AppGroup, GroupConfig, GroupPeer, GroupPort, GroupRecord, JoinRequest};
use crate::keys;

/// Opens the groups of all applications that have one. Returns when all of them serve.
pub(super) async fn open(config: &ClusterConfig, context: &Context) -> Result<Vec<Domain>, StartError> {
    let mut wanted = Vec::new();
    for (name, app) in config.apps.iter().filter(|(_, app)| app.mode == Mode::Raft) {
        let peers = app.members().map_err(|text| StartError::App(format!("apps.{name}: peers: {text}")))?;
        if peers != Peers::None {
            wanted.push((name, app, peers));
        }
    }
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let (listen, advertise) = address(config, wanted.iter().map(|(_, _, peers)| peers))?;
    let port = GroupPort::bind(listen, &advertise).await;
    let port = port.map_err(|error| StartError::App(format!("raft.listen: {listen}: {error}")))?;
    let opening = wanted.into_iter().map(|(name, app, peers)| {
        let group = GroupConfig {
            port: Some(port.clone()),
            equipment_group: app.equipment_group.clone(),
            manual_approval: app.manual_approval,
            join_timeout: app.join_timeout.0,
            events: context.events.clone(),
            metrics: context.metrics.clone(),
            ..GroupConfig::new(name, &config.node_id, Path::new(&config.raft.data).join(keys::segment(name)))
        };
        async move {
            let opened = open_one(config, context, group, app, peers).await;
            let group = opened.map_err(|error| StartError::App(format!("apps.{name}: {error}")))?;
            // The store is for discovery only; a node that does not read it gets the members from the group.
            if let Err(error) = group.publish(&*context.repository).await {
                tracing::warn!(%error, app = name, "publishing the group members to the store failed");
            }
            Ok(Domain::group(context, name, group))
        }
    });
    try_join_all(opening).await
}

/// Listen and advertised address: as configured, or the address that the peers expect for this node.
fn address<'a>(
    config: &ClusterConfig,
    all: impl Iterator<Item = &'a Peers>,
) -> Result<(SocketAddr, String), StartError> {
    let listen: SocketAddr =
        config.raft.listen.parse().map_err(|error| StartError::App(format!("raft.listen: {error}")))?;
    let own = |peers: &'a Peers| match peers {
        Peers::Listed(list) => {
            list.iter().find(|(node, _)| *node == config.node_id).map(|(_, address)| address)
        }
        Peers::None | Peers::Store => None,
    };
    let own = all.filter_map(own).next();
    let listen = match own.and_then(|own| own.parse().ok()) {
        Some(own) if listen.port() == 0 => own,
        _ => listen,
    };
    let advertise = match own {
        Some(own) if config.raft.advertise.is_empty() => own.clone(),
        _ => config.raft.advertise.clone(),
    };
    Ok((listen, advertise))
}

async fn open_one(
    config: &ClusterConfig,
    context: &Context,
    group: GroupConfig,
    app: &AppConfig,
    peers: Peers,
) -> Result<AppGroup, String> {
    let patience = app.join_timeout.0;
    let members = match peers {
        Peers::Listed(list) if list.iter().any(|(node, _)| *node == config.node_id) => {
            let peer = |(node_id, address)| GroupPeer { node_id, address };
            let peers: Vec<GroupPeer> = list.into_iter().map(peer).collect();
            let founded =
                Box::pin(AppGroup::found(group, &peers)).await.map_err(|error| error.to_string())?;
            founded.ready(patience).await.map_err(|error| error.to_string())?;
            return Ok(founded);
        }
        Peers::Listed(list) => list.into_iter().map(|(_, address)| address).collect(),
        Peers::Store | Peers::None => {
            match tokio::time::timeout(patience, members_in_store(context, &group.app)).await {
                Ok(members) => members,
                Err(_) => return Err("peers: the store knows no members of its group".to_owned()),
            }
        }
    };
    let request = JoinRequest {
        zone: config.zone.clone(),
        roles: config.roles.clone(),
        metadata: config.metadata.clone(),
        ..JoinRequest::default()
    };
    let joined = Box::pin(AppGroup::join(group, &members, request));
    let joined = joined.await.map_err(|error| error.to_string())?;
    joined.ready(patience).await.map_err(|error| error.to_string())?;
    Ok(joined)
}

/// The members of a group as recorded in the store; waits for the record.
async fn members_in_store(context: &Context, app: &str) -> Vec<String> {
    let mut backoff = Backoff::default();
    loop {
        if let Ok(Some(entry)) = context.repository.get(&keys::raft_group(app)).await
            && let Ok(record) = serde_json::from_slice::<GroupRecord>(&entry.value)
            && !record.peers.is_empty()
        {
            return record.peers.into_iter().map(|peer| peer.address).collect();
        }
        backoff.pause().await;
    }
}
