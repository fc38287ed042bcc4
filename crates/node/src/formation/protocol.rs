//! What nodes say to each other about being in a cluster: questions and answers, as JSON over the peer port.
//!
//! Any node may be asked by any other, member or not, so a card holds no secret, and a question changes something only
//! where the answer says so ([`Question::Join`], [`Question::Announce`]). The latter is taken from members only, over a
//! connection on which they proved who they are. Unknown fields are passed over: nodes of
//! neighbouring versions understand each other.

use std::time::Duration;

use bytes::Bytes;
use moim_raft::visit;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

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
    /// Its part of the secret of a cluster to be founded; empty once it is in one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) nonce: String,
    /// The run of its folder.
    pub(crate) run: u64,
    /// Tells the run apart from that of a copy of the folder.
    pub(crate) run_nonce: String,
}

/// A folder's claim to be the newest state of its voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// The stable node number.
    pub(crate) node_id: i32,
    /// Its Raft voter.
    pub(crate) voter: u64,
    /// Its data folder.
    pub(crate) directory_id: String,
    /// The run.
    pub(crate) run: u64,
    /// Tells the run apart from that of a copy of the folder.
    pub(crate) nonce: String,
    /// Where it is reached.
    pub(crate) peer: String,
    /// The last entry of its Raft log.
    pub(crate) last_index: u64,
    /// The last one that is committed and on stable storage there.
    pub(crate) settled: u64,
    /// An operator accepted that the folder is an older copy.
    #[serde(default)]
    pub(crate) forced: bool,
}

/// A voter and where it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reached {
    /// The voter.
    pub(crate) voter: u64,
    /// Where.
    pub(crate) address: String,
}

/// Asks for the place of a folder of the same node that was rolled back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Replacement {
    /// That folder.
    pub(crate) directory_id: String,
    /// What showed that it was rolled back.
    pub(crate) why: String,
    /// A digest that only a member of the cluster can make.
    pub(crate) proof: String,
}

impl Replacement {
    /// The digest for these two folders.
    pub(crate) fn proof_of(secret: &str, old: &str, new: &str) -> String {
        let text = format!("moim replace\n{secret}\n{old}\n{new}");
        let digest = Sha256::digest(text.as_bytes());
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
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
            founders: identity.founders.iter().map(without_nonce).collect(),
            run: identity.run,
            run_nonce: identity.run_nonce.clone(),
            nonce: if identity.admission == Admission::New { identity.nonce.clone() } else { String::new() },
            ..self
        }
    }

    /// This node as a founder.
    pub(crate) fn founder(&self) -> Founder {
        Founder {
            node_id: self.node_id,
            directory_id: self.directory_id.clone(),
            peer: self.peer.clone(),
            nonce: self.nonce.clone(),
        }
    }
}

fn without_nonce(founder: &Founder) -> Founder {
    Founder { nonce: String::new(), ..founder.clone() }
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
        /// The rolled-back folder whose place is asked for.
        #[serde(default)]
        replaces: Option<Replacement>,
    },
    /// My folder is the newest state of this voter: confirm it. Taken from that voter only.
    Claim {
        /// The claim.
        claim: Claim,
    },
    /// I am one of your founders, was away when the others agreed, and have not heard the secret. The card shows my part
    /// of it.
    Secret {
        /// Who asks.
        me: Card,
    },
    /// The commit log of this node's data directory is damaged: can the cluster do without its content?
    Redundant {
        /// The cluster of the directory.
        cluster_id: String,
        /// The node.
        node_id: i32,
        /// The directory.
        directory_id: String,
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
        /// The secret of the cluster.
        #[serde(default)]
        secret: String,
    },
    /// This is the secret.
    Secret {
        /// The secret of the cluster.
        secret: String,
        /// The founders with their parts of it, so that each of them can tell the others.
        founders: Vec<Founder>,
    },
    /// The run is written down here.
    Confirmed {
        /// Who votes, as this node knows.
        voters: Vec<Reached>,
        /// The last entry of its log.
        index: u64,
    },
    /// The folder was put back from an older copy.
    RolledBack {
        /// What shows it.
        why: String,
        /// Whether a quorum works without it.
        quorum: bool,
    },
    /// An earlier run may still be alive elsewhere. Asking again is right.
    Leased {
        /// Which.
        why: String,
    },
    /// The other nodes have everything that the data directory had.
    Redundant,
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
