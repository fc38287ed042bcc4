//! The newcomer's side of joining: a ticket, the acceptance, the sync.
//!
//! Any member can be asked; one that does not lead says who does. Every step can be asked again: the request is
//! recorded in the group, so a leader that goes in the middle is followed by one that knows of it.

use std::time::Duration;

use bytes::Bytes;
use moim_raft::visit;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::backoff::Backoff;

/// What a newcomer says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct JoinRequest {
    /// The node.
    pub node_id: String,
    /// Where its group port is.
    pub endpoint: String,
    /// Its failure domain.
    pub zone: String,
    /// What it does.
    pub roles: Vec<String>,
    /// Whatever else.
    pub metadata: std::collections::BTreeMap<String, String>,
}

/// The right to ask how a request went, for a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinTicket {
    /// Whose group.
    pub app: String,
    /// The node.
    pub node_id: String,
    /// Which request of that node.
    pub id: String,
    /// How long it is good for, from when it was given.
    pub valid_ms: u64,
}

/// The newcomer is let in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JoinAcceptance {
    /// Its voter id.
    pub peer_id: u64,
    /// Who sends it the snapshot.
    pub snapshot_source: String,
    /// The log index from which it is a member.
    pub effective_index: u64,
    /// The group's name among all groups.
    pub cluster: String,
    /// What only members of the group know.
    #[serde(default)]
    pub secret: String,
}

/// Why a newcomer is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The leader, or a person, said no.
    #[error("the join was rejected: {0}")]
    Rejected(String),
    /// It took too long; everything about it is forgotten.
    #[error("the join has expired")]
    Expired,
    /// No member answered in time.
    #[error("no member of the group answers: {0}")]
    Unreachable(String),
}

/// What is asked of a member.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Question {
    Status {
        app: String,
        /// The asking founder's part of the group's secret.
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
        /// The voter id that was accepted under this ticket; 0 from a newcomer that does not say.
        #[serde(default)]
        peer_id: u64,
    },
}

/// What a member answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(super) enum Answer {
    Ticket {
        ticket: JoinTicket,
    },
    Accepted {
        acceptance: JoinAcceptance,
    },
    /// Nothing is decided, or the newcomer has not caught up: ask again.
    Pending,
    Active,
    Redirect {
        leader: Option<String>,
    },
    Rejected {
        reason: String,
    },
    Expired,
    /// It could not be done now: ask again.
    Busy {
        reason: String,
    },
}

/// Asks the members of a group to be let in.
pub struct JoinClient {
    app: String,
    members: Vec<String>,
}

impl JoinClient {
    /// Any of the group's members will do.
    pub fn new(app: &str, members: &[String]) -> Self {
        Self { app: app.to_owned(), members: members.to_vec() }
    }

    /// Hands in a request.
    pub async fn request_join(
        &self,
        node_id: &str,
        endpoint: &str,
        request: &JoinRequest,
    ) -> Result<JoinTicket, JoinError> {
        let mut request = request.clone();
        node_id.clone_into(&mut request.node_id);
        endpoint.clone_into(&mut request.endpoint);
        let question = Question::Request { app: self.app.clone(), request };
        match self.ask(&question, Duration::from_secs(30)).await? {
            Answer::Ticket { ticket } => Ok(ticket),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits for the answer.
    pub async fn await_acceptance(&self, ticket: &JoinTicket) -> Result<JoinAcceptance, JoinError> {
        let question = Question::Await { ticket: ticket.clone() };
        match self.ask(&question, Duration::from_millis(ticket.valid_ms) + Duration::from_secs(5)).await? {
            Answer::Accepted { acceptance } => Ok(acceptance),
            other => Err(unexpected(&other)),
        }
    }

    /// Says that this member runs, and waits until it has caught up and votes.
    pub async fn complete_sync(
        &self,
        ticket: &JoinTicket,
        acceptance: &JoinAcceptance,
    ) -> Result<(), JoinError> {
        self.complete(ticket, acceptance.peer_id).await
    }

    pub(super) async fn complete(&self, ticket: &JoinTicket, peer_id: u64) -> Result<(), JoinError> {
        let question = Question::Complete { ticket: ticket.clone(), peer_id };
        match self.ask(&question, Duration::from_millis(ticket.valid_ms) + Duration::from_secs(5)).await? {
            Answer::Active => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks the leader, wherever it is, until there is an answer that is one.
    async fn ask(&self, question: &Question, patience: Duration) -> Result<Answer, JoinError> {
        let bytes = Bytes::from(serde_json::to_vec(question).expect("plain fields can be written down"));
        let deadline = Instant::now() + patience;
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(300));
        let mut next = 0;
        let mut leader: Option<String> = None;
        let mut last = "none was asked".to_owned();
        while Instant::now() < deadline {
            let fallback = self.members.get(next % self.members.len().max(1)).cloned();
            let Some(address) = leader.take().or(fallback) else { break };
            match visit(&address, bytes.clone(), Duration::from_secs(6)).await {
                Ok(answer) => match serde_json::from_slice::<Answer>(&answer) {
                    Ok(Answer::Redirect { leader: Some(address) }) => {
                        leader = Some(address);
                        continue;
                    }
                    Ok(Answer::Redirect { leader: None }) => last = "nobody leads".to_owned(),
                    Ok(Answer::Busy { reason }) => last = reason,
                    Ok(Answer::Pending) => leader = Some(address),
                    Ok(Answer::Rejected { reason }) => return Err(JoinError::Rejected(reason)),
                    Ok(Answer::Expired) => return Err(JoinError::Expired),
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

fn unexpected(answer: &Answer) -> JoinError {
    JoinError::Unreachable(format!("an answer that makes no sense: {answer:?}"))
}
