//! The joining node's side of a join: ticket, acceptance, sync.
//!
//! Any member accepts a call; a follower redirects to the leader. Every step can be retried: the request is
//! recorded in the group, so the next leader continues it.

use std::time::Duration;

use bytes::Bytes;
use moim_raft::visit;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::backoff::Backoff;

/// Description of the joining node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct JoinRequest {
    /// Node id.
    pub node_id: String,
    /// Address of its group port.
    pub endpoint: String,
    /// Zone (failure domain).
    pub zone: String,
    /// Roles.
    pub roles: Vec<String>,
    /// Additional metadata.
    pub metadata: std::collections::BTreeMap<String, String>,
}

/// Permission to query the state of a join request, for a limited time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinTicket {
    /// Application name.
    pub app: String,
    /// Node id.
    pub node_id: String,
    /// Id of the request of that node.
    pub id: String,
    /// Validity from the time of issue.
    pub valid_ms: u64,
}

/// Acceptance of a join request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinAcceptance {
    /// Voter id of the joining node.
    pub peer_id: u64,
    /// Address of the member that sends the snapshot.
    pub snapshot_source: String,
    /// Log index at which the node becomes a member.
    pub effective_index: u64,
    /// Cluster id of the group.
    pub cluster: String,
    /// Shared secret of the group's members.
    #[serde(default)]
    pub secret: String,
}

/// A failed join.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The leader or an operator rejected the request.
    #[error("the join was rejected: {0}")]
    Rejected(String),
    /// The join timed out; the group keeps nothing of it.
    #[error("the join has expired")]
    Expired,
    /// No member answered in time.
    #[error("no member of the group answers: {0}")]
    Unreachable(String),
}

/// A call of a joining node or a founder to a member.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum JoinCall {
    Status {
        app: String,
        /// The calling founder's part of the group's secret.
        #[serde(default)]
        nonce: String,
    },
    Request {
        app: String,
        request: JoinRequest,
    },
    Await {
        ticket: JoinTicket,
    },
    Complete {
        ticket: JoinTicket,
        /// The voter id that was accepted under this ticket; 0 from a joining node of an older version.
        #[serde(default)]
        peer_id: u64,
    },
}

/// A member's reply.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(super) enum JoinReply {
    Ticket {
        ticket: JoinTicket,
    },
    Accepted {
        acceptance: JoinAcceptance,
    },
    /// No decision yet, or the learner has not caught up: retry.
    Pending,
    Active,
    Redirect {
        leader: Option<String>,
    },
    Rejected {
        reason: String,
    },
    Expired,
    /// Temporary failure: retry.
    Busy {
        reason: String,
    },
}

/// Client of the join protocol.
pub struct JoinClient {
    app: String,
    members: Vec<String>,
}

impl JoinClient {
    /// A client that calls any of these members.
    pub fn new(app: &str, members: &[String]) -> Self {
        Self { app: app.to_owned(), members: members.to_vec() }
    }

    /// Submits a join request.
    pub async fn request_join(
        &self,
        node_id: &str,
        endpoint: &str,
        request: &JoinRequest,
    ) -> Result<JoinTicket, JoinError> {
        let mut request = request.clone();
        node_id.clone_into(&mut request.node_id);
        endpoint.clone_into(&mut request.endpoint);
        let question = JoinCall::Request { app: self.app.clone(), request };
        match self.call_leader(&question, Duration::from_secs(30)).await? {
            JoinReply::Ticket { ticket } => Ok(ticket),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits for the acceptance.
    pub async fn await_acceptance(&self, ticket: &JoinTicket) -> Result<JoinAcceptance, JoinError> {
        let question = JoinCall::Await { ticket: ticket.clone() };
        match self
            .call_leader(&question, Duration::from_millis(ticket.valid_ms) + Duration::from_secs(5))
            .await?
        {
            JoinReply::Accepted { acceptance } => Ok(acceptance),
            other => Err(unexpected(&other)),
        }
    }

    /// Reports that this member runs, and waits until it has caught up and is promoted to voter.
    pub async fn complete_sync(
        &self,
        ticket: &JoinTicket,
        acceptance: &JoinAcceptance,
    ) -> Result<(), JoinError> {
        self.complete(ticket, acceptance.peer_id).await
    }

    pub(super) async fn complete(&self, ticket: &JoinTicket, peer_id: u64) -> Result<(), JoinError> {
        let question = JoinCall::Complete { ticket: ticket.clone(), peer_id };
        match self
            .call_leader(&question, Duration::from_millis(ticket.valid_ms) + Duration::from_secs(5))
            .await?
        {
            JoinReply::Active => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Calls the leader, following redirects, until there is a definite reply.
    async fn call_leader(&self, call: &JoinCall, patience: Duration) -> Result<JoinReply, JoinError> {
        let bytes = Bytes::from(serde_json::to_vec(call).expect("plain fields serialize to JSON"));
        let deadline = Instant::now() + patience;
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(300));
        let mut next = 0;
        let mut leader: Option<String> = None;
        let mut last = "no member configured".to_owned();
        while Instant::now() < deadline {
            let fallback = self.members.get(next % self.members.len().max(1)).cloned();
            let Some(address) = leader.take().or(fallback) else { break };
            match visit(&address, bytes.clone(), Duration::from_secs(6)).await {
                Ok(answer) => match serde_json::from_slice::<JoinReply>(&answer) {
                    Ok(JoinReply::Redirect { leader: Some(address) }) => {
                        leader = Some(address);
                        continue;
                    }
                    Ok(JoinReply::Redirect { leader: None }) => last = "no leader".to_owned(),
                    Ok(JoinReply::Busy { reason }) => last = reason,
                    Ok(JoinReply::Pending) => leader = Some(address),
                    Ok(JoinReply::Rejected { reason }) => return Err(JoinError::Rejected(reason)),
                    Ok(JoinReply::Expired) => return Err(JoinError::Expired),
                    Ok(answer) => return Ok(answer),
                    Err(error) => last = format!("{address}: {error}"),
                },
                Err(error) => last = format!("{address}: {error}"),
            }
            if leader.is_none() {
                next += 1;
            }
            backoff.pause().await;
        }
        Err(JoinError::Unreachable(last))
    }
}

fn unexpected(answer: &JoinReply) -> JoinError {
    JoinError::Unreachable(format!("unexpected join reply: {answer:?}"))
}
