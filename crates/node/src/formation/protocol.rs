//! Formation protocol: requests and responses between nodes, as JSON over the peer port.
//!
//! Any process can send a request, member or not, so a node card holds no secret, and only [`FormationRequest::Join`],
//! [`FormationRequest::Claim`] and [`FormationRequest::Announce`] change state. The last two are accepted only from the
//! member itself, over an authenticated connection. Unknown fields are ignored, for compatibility between neighbouring
//! versions.

use std::time::Duration;

use bytes::Bytes;
use moim_raft::visit;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::data_dir::{Admission, Founder, Identity};

/// Node card: the public description of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Card {
    /// Node id.
    pub(crate) node_id: i32,
    /// Directory id of its data directory.
    pub(crate) directory_id: String,
    /// Incarnation of its data directory.
    pub(crate) incarnation: u64,
    /// Cluster id; empty before it is in a cluster.
    pub(crate) cluster_id: String,
    /// Voter id; 0 before it has one.
    pub(crate) voter: u64,
    /// Its formation state.
    pub(crate) admission: Admission,
    /// Founders of its cluster or, before it is in a cluster, the founders that it has seen so far.
    pub(crate) founders: Vec<Founder>,
    /// Node ids of its `--initial-cluster`.
    pub(crate) listed: Vec<i32>,
    /// Advertised peer address.
    pub(crate) peer: String,
    /// Failure domain.
    pub(crate) zone: String,
    /// Moim version.
    pub(crate) version: String,
    /// Newest feature level that it supports.
    pub(crate) feature_level: u32,
    /// Its share of the secret of a cluster to be founded; empty once it is in a cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) nonce: String,
    /// Run number of its data directory.
    pub(crate) run: u64,
    /// Nonce of the run; a copy of the data directory has another one.
    pub(crate) run_nonce: String,
}

/// Claim that a data directory is the newest state of its voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// Node id.
    pub(crate) node_id: i32,
    /// Voter id.
    pub(crate) voter: u64,
    /// Directory id.
    pub(crate) directory_id: String,
    /// Run number.
    pub(crate) run: u64,
    /// Nonce of the run; a copy of the data directory has another one.
    pub(crate) nonce: String,
    /// Peer address.
    pub(crate) peer: String,
    /// Index of the last entry of its Raft log.
    pub(crate) last_index: u64,
    /// Index of the last entry that is committed and on stable storage there.
    pub(crate) settled: u64,
    /// True if an operator accepted that the data directory is an older copy.
    #[serde(default)]
    pub(crate) forced: bool,
}

/// A voter and its peer address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VoterAddress {
    /// Voter id.
    pub(crate) voter: u64,
    /// Peer address.
    pub(crate) address: String,
}

/// Request to replace the rolled-back or damaged data directory of the same node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Replacement {
    /// Directory id of that data directory.
    pub(crate) directory_id: String,
    /// The evidence of the rollback or damage.
    pub(crate) why: String,
    /// Digest that proves knowledge of the cluster secret.
    pub(crate) proof: String,
}

impl Replacement {
    /// The digest for these two directory ids.
    pub(crate) fn proof_of(secret: &str, old: &str, new: &str) -> String {
        let text = format!("moim replace\n{secret}\n{old}\n{new}");
        let digest = Sha256::digest(text.as_bytes());
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Card {
    /// This card with the fields of `identity`.
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

/// A request between nodes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum FormationRequest {
    /// Requests the node card.
    Greet,
    /// Requests admission. With `fresh` (`--join`) a new node id is admitted; without it only the replacement of a
    /// node.
    Join {
        /// Card of the joining node.
        me: Card,
        /// True if a new node id may be admitted.
        fresh: bool,
        /// The rolled-back or damaged data directory to replace.
        #[serde(default)]
        replaces: Option<Replacement>,
    },
    /// Requests confirmation of a run. Accepted from the claiming voter only.
    Claim {
        /// The claim.
        claim: Claim,
    },
    /// Requests the cluster secret, for a founder that was down when the other founders agreed. The card holds its
    /// share.
    Secret {
        /// Card of the founder.
        me: Card,
    },
    /// Asks whether the other nodes have all data of a data directory whose commit log is damaged.
    Redundant {
        /// Cluster id of the data directory.
        cluster_id: String,
        /// Node id.
        node_id: i32,
        /// Directory id.
        directory_id: String,
    },
    /// Announces a restarted member and its current peer address.
    Announce {
        /// Card of the member.
        me: Card,
    },
}

/// A response to a [`FormationRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum FormationResponse {
    /// The node card.
    Card {
        /// Card of the responding node.
        card: Card,
    },
    /// The node is admitted.
    Admitted {
        /// Cluster id.
        cluster_id: String,
        /// Voter id of the data directory.
        voter: u64,
        /// Incarnation of the data directory.
        incarnation: u64,
        /// Cluster secret.
        #[serde(default)]
        secret: String,
    },
    /// The cluster secret.
    Secret {
        /// Cluster secret.
        secret: String,
        /// The founders with their shares of the secret, so that each of them can answer [`FormationRequest::Secret`].
        founders: Vec<Founder>,
    },
    /// The run is confirmed, and recorded on stable storage.
    Confirmed {
        /// Voters, as far as the responding node knows.
        voters: Vec<VoterAddress>,
        /// Index of the last entry of its Raft log.
        index: u64,
    },
    /// The data directory was restored from an older copy.
    RolledBack {
        /// The evidence.
        why: String,
        /// True if the other nodes have a quorum without it.
        quorum: bool,
    },
    /// An earlier run may still be alive at another address. Retryable.
    Leased {
        /// The lease that has not expired.
        why: String,
    },
    /// The other nodes have all data of the data directory.
    Redundant,
    /// The member and its address are recorded.
    Known,
    /// Not admitted without an operator action. Retryable.
    NotAdmitted {
        /// The required operator action.
        why: String,
    },
    /// Rejected for good: the node or its data directory does not belong to this cluster.
    Conflict {
        /// The reason.
        why: String,
    },
    /// Temporarily unavailable. Retryable.
    Later {
        /// The reason.
        why: String,
    },
}

/// Sends a request to the node at `address`, over an unauthenticated connection.
pub(crate) async fn send_request(
    address: &str,
    request: &FormationRequest,
    timeout: Duration,
) -> Result<FormationResponse, String> {
    let request = serde_json::to_vec(request).map_err(|error| error.to_string())?;
    let response = visit(address, request.into(), timeout).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&response)
        .map_err(|error| format!("undecodable formation response from {address}: {error}"))
}

/// Fetches the card of the node at `address`.
pub(crate) async fn fetch_card(address: &str, timeout: Duration) -> Result<Card, String> {
    match send_request(address, &FormationRequest::Greet, timeout).await? {
        FormationResponse::Card { card } => Ok(card),
        other => Err(format!("unexpected formation response from {address}: {other:?}")),
    }
}

/// Decodes a request. The error is returned to the sender.
pub(crate) fn decode_request(bytes: &Bytes) -> Result<FormationRequest, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("undecodable formation request: {error}"))
}

/// Encodes a response.
pub(crate) fn encode_response(response: &FormationResponse) -> Bytes {
    serde_json::to_vec(response).expect("plain fields serialize").into()
}
