//! Join server: responds to formation requests of other nodes on the peer port.
//!
//! An unauthenticated sender is not trusted: its request changes state only as far as the node records allow
//! ([`crate::control::records`]), which are changed by compare-and-swap. A member's statements about itself are
//! accepted only over a connection that is authenticated as that voter.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_coord::Coordinator;
use moim_raft::{BoxFuture, Service, VoterId};
use moim_state::StateRepository;
use moim_state::nodes::NodeRecord;
use tokio::time::Instant;

use super::protocol::{
    Card, FormationRequest, FormationResponse, Replacement, decode_request, encode_response, fetch_card,
};
use crate::control::records::{self, RecordError};
use crate::control::view::View;
use crate::data_dir::{DataDir, Identity, KnownRun};

/// Timeout of the liveness probe of the node that is recorded under a node id.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout of a request that needs the quorum.
const QUORUM_TIMEOUT: Duration = Duration::from_secs(4);

/// Access to the cluster's records, once this node is in a cluster.
pub(crate) struct ClusterAccess {
    /// The coordination core.
    pub(crate) coordinator: Coordinator,
    /// Repository of the node records.
    pub(crate) repository: Arc<dyn StateRepository>,
}

/// The formation service on the peer port.
pub(crate) struct JoinServer {
    data: Arc<DataDir>,
    card: Mutex<Card>,
    access: OnceLock<ClusterAccess>,
    rejection_logged_at: Mutex<Option<Instant>>,
}

impl JoinServer {
    /// A service for this data directory, with an empty card.
    pub(crate) fn new(data: Arc<DataDir>) -> Self {
        Self { data, card: Mutex::default(), access: OnceLock::new(), rejection_logged_at: Mutex::default() }
    }

    /// Sets the node card.
    pub(crate) fn set_card(&self, card: Card) {
        *self.card.lock().unwrap_or_else(PoisonError::into_inner) = card;
    }

    /// The current node card.
    pub(crate) fn card(&self) -> Card {
        self.card.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Enables requests that need the cluster.
    pub(crate) fn set_cluster_access(&self, access: ClusterAccess) {
        // Set once: a node does not change its cluster.
        let _ = self.access.set(access);
    }

    /// Logs a rejection, at most once a second: the request rate is under the sender's control.
    fn log_rejection(&self, applicant: &Card, response: &FormationResponse) {
        let FormationResponse::Conflict { why } = response else { return };
        let mut last = self.rejection_logged_at.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            *last = Some(Instant::now());
            tracing::warn!(node = applicant.node_id, address = applicant.peer, why, "join request rejected");
        }
    }

    pub(super) fn identity(&self) -> Identity {
        self.data.identity()
    }

    pub(super) fn data(&self) -> Arc<DataDir> {
        Arc::clone(&self.data)
    }

    pub(super) fn known_run(&self, voter: u64) -> Option<KnownRun> {
        self.data.known_run(voter)
    }

    /// Access to the cluster; `None` while this node starts.
    pub(super) fn cluster_access(&self) -> Option<&ClusterAccess> {
        self.access.get()
    }

    /// Returns the cluster secret to a founder that was down when the founders agreed, if its share of the secret
    /// matches.
    fn secret_for_founder(&self, applicant: &Card) -> FormationResponse {
        let identity = self.data.identity();
        let applicant = applicant.founder();
        let is_same_founder = |one: &crate::data_dir::Founder| {
            (one.node_id, &one.directory_id, &one.nonce)
                == (applicant.node_id, &applicant.directory_id, &applicant.nonce)
        };
        if identity.founders.iter().any(is_same_founder) {
            return FormationResponse::Secret { secret: identity.secret, founders: identity.founders };
        }
        FormationResponse::Conflict {
            why: format!("node {} is not a founder with this data directory", applicant.node_id),
        }
    }

    async fn respond(&self, peer: Option<VoterId>, request: FormationRequest) -> FormationResponse {
        let card = self.card();
        let (applicant, fresh) = match request {
            FormationRequest::Greet => return FormationResponse::Card { card },
            FormationRequest::Secret { me } => return self.secret_for_founder(&me),
            FormationRequest::Claim { claim } => return self.confirm(peer, claim).await,
            FormationRequest::Redundant { cluster_id, node_id, directory_id } => {
                if cluster_id != card.cluster_id {
                    return FormationResponse::Conflict { why: "this node is in another cluster".to_owned() };
                }
                let Some(access) = self.access.get() else {
                    return FormationResponse::Later {
                        why: format!("node {} is still starting", card.node_id),
                    };
                };
                let response = access.redundancy(&cluster_id, node_id, &directory_id);
                return match tokio::time::timeout(QUORUM_TIMEOUT, response).await {
                    Ok(response) => response,
                    Err(_) => FormationResponse::Later { why: "the cluster has no quorum now".to_owned() },
                };
            }
            FormationRequest::Join { me, fresh, replaces } => (me, Some((fresh, replaces))),
            FormationRequest::Announce { me } if peer.is_some_and(|peer| peer.0 == me.voter) => (me, None),
            FormationRequest::Announce { .. } => {
                return FormationResponse::Later {
                    why: "announcement rejected: the connection is not authenticated as this voter"
                        .to_owned(),
                };
            }
        };
        let Some(access) = self.access.get() else {
            return FormationResponse::Later { why: format!("node {} is still starting", card.node_id) };
        };
        let response = async {
            match fresh {
                Some((fresh, replaces)) => {
                    access.admit(&card, &applicant, fresh, replaces, self.identity().secret).await
                }
                None => access.on_announce(&card, &applicant).await,
            }
        };
        match tokio::time::timeout(QUORUM_TIMEOUT, response).await {
            Ok(response @ FormationResponse::Conflict { .. }) => {
                self.log_rejection(&applicant, &response);
                response
            }
            Ok(response) => response,
            Err(_) => FormationResponse::Later { why: "the cluster has no quorum now".to_owned() },
        }
    }
}

impl Service for JoinServer {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        self.handle_from(None, request)
    }

    fn handle_from(&self, peer: Option<VoterId>, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            let response = match decode_request(&request) {
                Ok(request) => self.respond(peer, request).await,
                Err(why) => FormationResponse::Conflict { why },
            };
            encode_response(&response)
        })
    }
}

impl ClusterAccess {
    /// Admits a data directory that is in no cluster, or rejects it.
    async fn admit(
        &self,
        card: &Card,
        applicant: &Card,
        fresh: bool,
        replaces: Option<Replacement>,
        secret: String,
    ) -> FormationResponse {
        if let Err(why) = self.check_level(applicant) {
            return FormationResponse::Conflict { why };
        }
        if let Some(old) = &replaces
            && old.proof == Replacement::proof_of(&secret, &old.directory_id, &applicant.directory_id)
            && let Err(error) = self.retire_rolled_back(applicant, old).await
        {
            return FormationResponse::Later { why: error.to_string() };
        }
        match self.find_or_admit(card, applicant, fresh).await {
            Ok(Ok(record)) => {
                tracing::info!(node = record.node_id, voter = record.voter, "node admitted");
                FormationResponse::Admitted {
                    cluster_id: card.cluster_id.clone(),
                    voter: record.voter,
                    incarnation: record.incarnation,
                    secret,
                }
            }
            Ok(Err(rejection)) => rejection,
            Err(error) => FormationResponse::Later { why: error.to_string() },
        }
    }

    /// Retires the voter of a node that proved to be a member and reported its data directory as rolled back or
    /// damaged. The node id stays reserved for it.
    async fn retire_rolled_back(&self, applicant: &Card, old: &Replacement) -> Result<(), RecordError> {
        let known = records::get(self.repository.as_ref(), applicant.node_id).await?;
        let Some((_, record)) = known.filter(|(_, record)| record.directory_id == old.directory_id) else {
            return Ok(());
        };
        let running = fetch_card(&record.peer, PROBE_TIMEOUT).await;
        if running.is_ok_and(|card| card.directory_id == old.directory_id) {
            return Err(RecordError::Running(applicant.node_id));
        }
        tracing::warn!(
            node = applicant.node_id,
            voter = record.voter,
            why = old.why,
            "voter retired: data directory rolled back or damaged"
        );
        records::replace_rolled_back(self.repository.as_ref(), applicant.node_id, &old.why).await
    }

    fn check_level(&self, applicant: &Card) -> Result<(), String> {
        let level = View::of(&self.coordinator).feature_level.unwrap_or(0);
        if applicant.feature_level >= level {
            return Ok(());
        }
        Err(format!(
            "the cluster runs at feature level {level}, moim {} supports up to {}",
            applicant.version, applicant.feature_level
        ))
    }

    /// The node record of a data directory, created if it may be admitted, or the rejection.
    async fn find_or_admit(
        &self,
        card: &Card,
        applicant: &Card,
        fresh: bool,
    ) -> Result<Result<NodeRecord, FormationResponse>, RecordError> {
        let (node, cluster) = (applicant.node_id, &card.cluster_id);
        let known = records::get(self.repository.as_ref(), node).await?;
        match &known {
            // Admitted before: the response was lost, or the node crashed before it recorded it.
            Some((_, record)) if record.directory_id == applicant.directory_id && record.voter != 0 => {
                return Ok(Ok(record.clone()));
            }
            Some((_, record)) if record.voter == 0 => {}
            Some((_, record)) => return Ok(Err(reject_node_id_in_use(record).await)),
            None if fresh => {}
            None => {
                let why = format!("node {node} is not part of cluster {cluster}; start it with --join");
                return Ok(Err(FormationResponse::NotAdmitted { why }));
            }
        }
        records::admit(self.repository.as_ref(), applicant, known).await.map(Ok)
    }

    /// Processes the announcement of a restarted member: records its address, or rejects a removed data directory.
    async fn on_announce(&self, card: &Card, applicant: &Card) -> FormationResponse {
        if applicant.cluster_id != card.cluster_id {
            let (theirs, ours) = (&applicant.cluster_id, &card.cluster_id);
            return FormationResponse::Conflict {
                why: format!("the data directory belongs to cluster {theirs}, this is cluster {ours}"),
            };
        }
        let view = View::of(&self.coordinator);
        let node = applicant.node_id;
        if view.is_out(node, applicant.voter, &applicant.directory_id) {
            let why = format!("this data directory was node {node} and was removed or replaced since");
            return FormationResponse::Conflict { why };
        }
        let Some(record) = view.node(node).filter(|record| record.voter == applicant.voter) else {
            return FormationResponse::Later {
                why: format!("voter {} is not known here yet", applicant.voter),
            };
        };
        if record.peer == applicant.peer {
            return FormationResponse::Known;
        }
        // The leader of the coordination group takes the address from the record.
        let moved = NodeRecord { peer: applicant.peer.clone(), ..record.clone() };
        match records::publish(self.repository.as_ref(), &moved).await {
            Ok(()) => FormationResponse::Known,
            Err(error) => FormationResponse::Later { why: error.to_string() },
        }
    }
}

/// Rejects another data directory for a node id in use. A probe of the recorded address distinguishes a duplicate node
/// id from a lost data directory.
async fn reject_node_id_in_use(record: &NodeRecord) -> FormationResponse {
    let node = record.node_id;
    match fetch_card(&record.peer, PROBE_TIMEOUT).await {
        Ok(card) if card.directory_id == record.directory_id => {
            let why = format!("node {node} is running at {}; node ids are unique", record.peer);
            FormationResponse::Conflict { why }
        }
        _ => {
            let why = format!(
                "node {node} is in the cluster with another data directory; \
                 `moim cluster replace {node}` lets this one take its place"
            );
            FormationResponse::NotAdmitted { why }
        }
    }
}
