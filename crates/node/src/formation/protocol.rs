//! What nodes say to each other about being in a cluster: questions and answers, as JSON over the peer port.
//!
//! Any node may be asked by anybody, member or not, so nothing here is secret, and a question changes something only
//! where the answer says so ([`Question::Join`], [`Question::Announce`]). Unknown fields are passed over: nodes of
//! neighbouring versions understand each other.

use std::time::Duration;

use bytes::Bytes;
use moim_raft::visit;
use serde::{Deserialize, Serialize};

use crate::data_dir::{Admission, Founder, Identity};

/// What a node says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Card {
    /// The stable node number.
    pub(crate) node_id: i32,
    /// Its data folder.
    pub(crate) directory_id: String,
    /// The life of that folder.
    pub(crate) incarnation: u64,
    /// Its cluster; empty when it is in none.
    pub(crate) cluster_id: String,
    /// Its Raft voter; 0 when it has none.
    pub(crate) voter: u64,
    /// How far it is on its way into a cluster.
    pub(crate) admission: Admission,
    /// Who founded its cluster or, while it is in none, the founders it has seen so far.
    pub(crate) founders: Vec<Founder>,
    /// The node ids of its `--initial-cluster`.
    pub(crate) listed: Vec<i32>,
    /// Where other nodes reach it.
    pub(crate) peer: String,
    /// Its failure domain.
    pub(crate) zone: String,
    /// The Moim it runs.
    pub(crate) version: String,
    /// The newest cluster format it can take part in.
    pub(crate) feature_level: u32,
}

impl Card {
    /// The card of this folder, with the rest as it was.
    pub(crate) fn with_identity(self, identity: &Identity) -> Self {
        Self {
            node_id: identity.node_id,
            directory_id: identity.directory_id.clone(),
            incarnation: identity.incarnation,
            cluster_id: identity.cluster_id.clone(),
            voter: identity.voter,
            admission: identity.admission,
            founders: identity.founders.clone(),
            ..self
        }
    }

    /// This node as a founder.
    pub(crate) fn founder(&self) -> Founder {
        Founder { node_id: self.node_id, directory_id: self.directory_id.clone(), peer: self.peer.clone() }
    }
}

/// What a node asks another.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Question {
    /// Who are you?
    Greet,
    /// Let me in. `fresh` asks for a place nobody had (`--join`); without it only the place of a replaced node is
    /// meant.
    Join {
        /// Who asks.
        me: Card,
        /// Whether a new place is asked for.
        fresh: bool,
    },
    /// I am back, and this is where I am reached now.
    Announce {
        /// Who asks.
        me: Card,
    },
}

/// What the other says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// This is me.
    Card {
        /// Who answers.
        card: Card,
    },
    /// You are in.
    Admitted {
        /// The cluster.
        cluster_id: String,
        /// The voter this folder is from now on.
        voter: u64,
        /// The life of this folder.
        incarnation: u64,
    },
    /// You are known, and I know where you are.
    Known,
    /// Not without an operator's word. Asking again is right.
    NotAdmitted {
        /// What the operator has to do.
        why: String,
    },
    /// Never: what you are or have does not fit into this cluster.
    Conflict {
        /// Why.
        why: String,
    },
    /// Not now. Asking again is right.
    Later {
        /// Why.
        why: String,
    },
}

/// Asks whoever listens at `address`. The error is for people.
pub(crate) async fn ask(address: &str, question: &Question, timeout: Duration) -> Result<Answer, String> {
    let question = serde_json::to_vec(question).map_err(|error| error.to_string())?;
    let answer = visit(address, question.into(), timeout).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&answer)
        .map_err(|error| format!("{address}: an answer that makes no sense: {error}"))
}

/// Asks who somebody is.
pub(crate) async fn greet(address: &str, timeout: Duration) -> Result<Card, String> {
    match ask(address, &Question::Greet, timeout).await? {
        Answer::Card { card } => Ok(card),
        other => Err(format!("{address}: an answer that makes no sense: {other:?}")),
    }
}

/// Reads a question. The error is for whoever asked.
pub(crate) fn read_question(bytes: &Bytes) -> Result<Question, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("not a question: {error}"))
}

/// An answer as bytes.
pub(crate) fn write_answer(answer: &Answer) -> Bytes {
    serde_json::to_vec(answer).expect("plain fields can be written down").into()
}
