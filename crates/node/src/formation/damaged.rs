//! Data directory with a damaged commit log or checkpoint: it may have lost acknowledged records and votes, so it
//! counts as lost.
//!
//! If the other nodes have all of its data, it is treated like a rolled-back one, without an operator: its content is
//! set aside, and the node joins again under a new voter id and refetches its replicas. A member decides this
//! ([`ClusterAccess::redundancy`]) after a linearizable read: every partition of the node must have another in-sync
//! replica, and no other process may serve under the same directory id. Otherwise the node stops and names the remedy.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::join_server::ClusterAccess;
use super::protocol::{FormationRequest, FormationResponse, fetch_card, send_request};
use crate::control::records::DAMAGED;
use crate::control::view::{Partitions, View};
use crate::data_dir::{Aside, DataDir};
use crate::exit::Outcome;

/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum wait for a quorum and for the lease expiry of the last run.
const DECISION_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between rounds.
const PAUSE: Duration = Duration::from_millis(250);
/// Timeout of the probe for another process with the same directory id.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// Marks the data directory to be set aside if a member of its cluster reports it as redundant. Returns whether it did.
pub(crate) async fn maybe_set_aside(data: &DataDir, why: &str) -> Outcome<bool> {
    let identity = data.identity();
    let peers: Vec<String> = data.known_peers().into_iter().map(|(_, peer)| peer).collect();
    if identity.cluster_id.is_empty() || peers.is_empty() {
        return Ok(false);
    }
    let request = FormationRequest::Redundant {
        cluster_id: identity.cluster_id.clone(),
        node_id: identity.node_id,
        directory_id: identity.directory_id.clone(),
    };
    let began = Instant::now();
    while began.elapsed() < DECISION_TIMEOUT {
        let responses = join_all(peers.iter().map(|peer| send_request(peer, &request, TIMEOUT))).await;
        for response in responses {
            match response {
                Ok(FormationResponse::Redundant) => {
                    let aside = Aside::new(format!("{DAMAGED}{why}"), peers, identity.run);
                    data.update(|identity| identity.aside = Some(aside.clone()))?;
                    return Ok(true);
                }
                Ok(FormationResponse::Conflict { why }) => {
                    tracing::error!(why, "damaged data directory not set aside");
                    return Ok(false);
                }
                Ok(response) => {
                    tracing::debug!(?response, "damaged data directory: redundancy not confirmed yet")
                }
                Err(error) => tracing::debug!(error, "damaged data directory: member unreachable"),
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(false)
}

impl ClusterAccess {
    /// Checks whether the other nodes have all data of a member's data directory.
    pub(super) async fn redundancy(
        &self,
        cluster_id: &str,
        node_id: i32,
        directory_id: &str,
    ) -> FormationResponse {
        let later = |why: &str| FormationResponse::Later { why: why.to_owned() };
        if self.coordinator.linearizable().await.is_err() {
            return later("the cluster has no quorum now");
        }
        let view = View::of(&self.coordinator);
        let Some(record) = view.node(node_id).filter(|record| record.directory_id == directory_id) else {
            return FormationResponse::Conflict {
                why: format!("node {node_id} of cluster {cluster_id} has another data directory"),
            };
        };
        if fetch_card(&record.peer, PROBE_TIMEOUT).await.is_ok_and(|card| card.directory_id == directory_id) {
            let why = format!("node {node_id} is running at {} with the same data directory", record.peer);
            return FormationResponse::Conflict { why };
        }
        if view.is_running(record) {
            return later("the lease of the last run has not expired");
        }
        if Partitions::of(&self.coordinator).load(node_id).only_copies > 0 {
            let why = format!("node {node_id} holds the only in-sync replica of a partition");
            return FormationResponse::Conflict { why };
        }
        FormationResponse::Redundant
    }
}
