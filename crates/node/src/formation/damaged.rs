//! A data directory whose commit log is damaged may have lost acknowledged records and votes, so it is as good as lost.
//!
//! Where the other nodes have everything, it is treated like a rolled-back one without an operator: its content is set aside,
//! and the node joins again under a new voter id and refetches its replicas. A member decides that ([`Inside::redundancy`]),
//! after a linearizable read: every partition of the node must have another in-sync replica, and no other process may
//! serve under the same directory id. Otherwise the node stops and names the remedy.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::doorkeeper::Inside;
use super::protocol::{Answer, Question, ask, greet};
use crate::control::records::DAMAGED;
use crate::control::view::{Partitions, View};
use crate::data_dir::{Aside, DataDir};
use crate::exit::Outcome;

/// For one question.
const TIMEOUT: Duration = Duration::from_secs(3);
/// For members to answer that a quorum works and the lease of the last run has expired.
const PATIENCE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(250);
/// For the process that may serve under the same directory id to answer.
const PROBE: Duration = Duration::from_millis(500);

/// Marks the directory to be set aside if a member of its cluster says that it is redundant. Answers whether it did.
pub(crate) async fn maybe_set_aside(data: &DataDir, why: &str) -> Outcome<bool> {
    let identity = data.identity();
    let peers: Vec<String> = data.known_peers().into_iter().map(|(_, peer)| peer).collect();
    if identity.cluster_id.is_empty() || peers.is_empty() {
        return Ok(false);
    }
    let question = Question::Redundant {
        cluster_id: identity.cluster_id.clone(),
        node_id: identity.node_id,
        directory_id: identity.directory_id.clone(),
    };
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let answers = join_all(peers.iter().map(|peer| ask(peer, &question, TIMEOUT))).await;
        for answer in answers {
            match answer {
                Ok(Answer::Redundant) => {
                    let aside = Aside::new(format!("{DAMAGED}{why}"), peers, identity.run);
                    data.update(|identity| identity.aside = Some(aside.clone()))?;
                    return Ok(true);
                }
                Ok(Answer::Conflict { why }) => {
                    tracing::error!(why, "damaged data directory is not set aside");
                    return Ok(false);
                }
                Ok(answer) => tracing::debug!(?answer, "damaged data directory: asking again"),
                Err(error) => tracing::debug!(error, "damaged data directory: no answer from a member"),
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(false)
}

impl Inside {
    /// Whether the cluster can do without the content of a member's data directory.
    pub(super) async fn redundancy(&self, cluster_id: &str, node_id: i32, directory_id: &str) -> Answer {
        let later = |why: &str| Answer::Later { why: why.to_owned() };
        if self.coordinator.linearizable().await.is_err() {
            return later("the cluster has no quorum now");
        }
        let view = View::of(&self.coordinator);
        let Some(record) = view.node(node_id).filter(|record| record.directory_id == directory_id) else {
            return Answer::Conflict {
                why: format!("node {node_id} of cluster {cluster_id} has another data directory"),
            };
        };
        if greet(&record.peer, PROBE).await.is_ok_and(|there| there.directory_id == directory_id) {
            let why = format!("node {node_id} is running at {} with the same data directory", record.peer);
            return Answer::Conflict { why };
        }
        if view.is_running(record) {
            return later("the lease of the last run has not expired");
        }
        if Partitions::of(&self.coordinator).load(node_id).only_copies > 0 {
            let why = format!("node {node_id} holds the only in-sync replica of a partition");
            return Answer::Conflict { why };
        }
        Answer::Redundant
    }
}
