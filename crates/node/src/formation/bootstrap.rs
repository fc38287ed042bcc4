//! Bootstrap of a data directory into a cluster: from an empty directory to a voter id.
//!
//! Each step is written to `node.json` before it takes effect; see [`Admission`]. The reason of a wait is published as
//! the readiness reason, and logged once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use moim_raft::{Member, ServiceId, Transport, VoterId};

use super::founding::{self, Step};
use super::join_server::JoinServer;
use super::protocol::{Card, FormationRequest, FormationResponse, Replacement, fetch_card, send_request};
use crate::admin::Readiness;
use crate::data_dir::{Admission, DataDir, Founder, Identity, random_id};
use crate::exit::{Failure, Outcome, Status};

/// Pause between rounds of the founders' agreement.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause between join attempts.
const JOIN_PAUSE: Duration = Duration::from_millis(500);
/// Timeout of a request that one node answers alone.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of a join request, which needs the quorum.
const JOIN_TIMEOUT: Duration = Duration::from_secs(6);

/// How an empty data directory finds its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BootstrapMode {
    /// Founds a single-node cluster.
    Standalone,
    /// Founds a cluster with these founders: peer addresses by node id.
    Founders(BTreeMap<i32, String>),
    /// Joins an existing cluster through one of these addresses.
    Join(Vec<String>),
}

impl BootstrapMode {
    /// Peer addresses of other nodes.
    fn seeds(&self, me: i32) -> Vec<String> {
        match self {
            Self::Standalone => Vec::new(),
            Self::Founders(listed) => {
                listed.iter().filter(|(id, _)| **id != me).map(|(_, address)| address.clone()).collect()
            }
            Self::Join(addresses) => addresses.clone(),
        }
    }
}

/// Dependencies of the bootstrap.
pub(crate) struct Bootstrap<'a> {
    pub(crate) mode: BootstrapMode,
    pub(crate) data: &'a DataDir,
    pub(crate) join_server: &'a Arc<JoinServer>,
    pub(crate) readiness: &'a Readiness,
}

impl Bootstrap<'_> {
    /// Returns when `node.json` has a cluster id and a voter id.
    pub(crate) async fn run(&self) -> Outcome<Identity> {
        let identity = self.data.identity();
        if identity.admission != Admission::New {
            self.reject_other_cluster(&identity).await?;
            return Ok(identity);
        }
        if let Some(replaces) = &identity.replaces {
            let mut addresses = self.mode.seeds(identity.node_id);
            addresses.extend(
                replaces.peers.iter().filter(|peer| !addresses.contains(peer)).cloned().collect::<Vec<_>>(),
            );
            return self.join(&addresses, false).await;
        }
        match &self.mode {
            BootstrapMode::Standalone => self.found_standalone(),
            BootstrapMode::Founders(listed) if listed.len() == 1 => self.found_standalone(),
            BootstrapMode::Founders(listed) => self.agree_with_founders(listed).await,
            BootstrapMode::Join(addresses) => self.join(addresses, true).await,
        }
    }

    /// Rejects a start with the seed addresses of another cluster than that of the data directory.
    async fn reject_other_cluster(&self, identity: &Identity) -> Outcome {
        let seeds = self.mode.seeds(identity.node_id);
        let cards = join_all(seeds.iter().map(|address| fetch_card(address, TIMEOUT / 2))).await;
        for (address, card) in seeds.iter().zip(cards) {
            let Ok(card) = card else { continue };
            if !card.cluster_id.is_empty() && card.cluster_id != identity.cluster_id {
                let message = format!(
                    "{} belongs to cluster {}, but {address} is a node of cluster {}",
                    self.data.path.display(),
                    identity.cluster_id,
                    card.cluster_id
                );
                return Err(Failure::new(Status::Conflict, message)
                    .hint("pass the data directory of that cluster, or an empty one, with --data"));
            }
        }
        Ok(())
    }

    fn found_standalone(&self) -> Outcome<Identity> {
        self.record_founding(vec![self.join_server.card().founder()], random_id(), random_id())
    }

    /// Records in `node.json` that this node is one of these founders.
    fn record_founding(
        &self,
        founders: Vec<Founder>,
        cluster_id: String,
        secret: String,
    ) -> Outcome<Identity> {
        let identity = self.data.identity();
        let voter = founding::voter_of(&founders, identity.node_id)
            .ok_or_else(|| Failure::error("this node is not in the agreed list of founders"))?;
        let admission = Admission::Founding;
        self.advance(Identity { cluster_id, secret, voter, admission, founders, ..identity })
    }

    fn advance(&self, identity: Identity) -> Outcome<Identity> {
        self.data.record(identity.clone())?;
        self.join_server.set_card(self.join_server.card().with_identity(&identity));
        Ok(identity)
    }

    /// Agrees with the other founders, or joins the cluster if it exists already.
    async fn agree_with_founders(&self, listed: &BTreeMap<i32, String>) -> Outcome<Identity> {
        let me = self.data.identity().node_id;
        let others: Vec<(i32, &String)> =
            listed.iter().map(|(id, address)| (*id, address)).filter(|(id, _)| *id != me).collect();
        loop {
            let cards = join_all(others.iter().map(|(_, address)| fetch_card(address, TIMEOUT))).await;
            let mut cards_by_node: BTreeMap<i32, Card> = BTreeMap::new();
            for ((node_id, address), card) in others.iter().zip(cards) {
                match card {
                    Ok(card) if card.node_id == *node_id => drop(cards_by_node.insert(*node_id, card)),
                    Ok(card) => {
                        let found = card.node_id;
                        self.wait(&format!("{address} is node {found}, not node {node_id}"));
                    }
                    Err(error) => tracing::debug!(node = node_id, %error, "founder unreachable"),
                }
            }
            let card = self.join_server.card();
            match founding::decide(&card, listed, &cards_by_node) {
                Step::Found(founders) => {
                    let cluster_id = founding::cluster_of(&founders);
                    let acted = cards_by_node.values().find(|card| card.admission != Admission::New);
                    let agreed = match acted.and_then(|card| listed.get(&card.node_id)) {
                        None => Some((founding::secret_of(&founders), founders)),
                        Some(address) => self.fetch_secret(address).await,
                    };
                    if let Some((secret, founders)) = agreed {
                        return self.record_founding(founders, cluster_id, secret);
                    }
                }
                Step::ClusterExists { cluster_id, .. } => {
                    tracing::info!(
                        cluster = cluster_id,
                        "cluster exists already; joining with an empty data directory"
                    );
                    let addresses: Vec<String> =
                        others.iter().map(|(_, address)| (*address).clone()).collect();
                    return self.join(&addresses, false).await;
                }
                Step::Wait { why, seen } => {
                    self.wait(&why);
                    self.join_server.set_card(Card { founders: seen, ..card });
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Fetches the cluster secret from a founder that has committed to the list.
    async fn fetch_secret(&self, address: &str) -> Option<(String, Vec<Founder>)> {
        let request = FormationRequest::Secret { me: self.join_server.card() };
        match send_request(address, &request, TIMEOUT).await {
            Ok(FormationResponse::Secret { secret, founders }) => Some((secret, founders)),
            Ok(response) => {
                self.wait(&format!("waiting for the cluster secret: {address}: {response:?}"));
                None
            }
            Err(error) => {
                self.wait(&format!("waiting for the cluster secret: {error}"));
                None
            }
        }
    }

    /// Sends join requests until the node is admitted.
    async fn join(&self, addresses: &[String], fresh: bool) -> Outcome<Identity> {
        let identity = self.data.identity();
        let replaces = identity.replaces.map(|old| Replacement {
            proof: Replacement::proof_of(&old.secret, &old.directory_id, &identity.directory_id),
            directory_id: old.directory_id,
            why: old.why,
        });
        // The founders seen so far are obsolete, and must not be taken for a list to commit to.
        self.join_server.set_card(Card { founders: Vec::new(), ..self.join_server.card() });
        loop {
            for address in addresses {
                let me = self.join_server.card();
                let request = FormationRequest::Join { me, fresh, replaces: replaces.clone() };
                match send_request(address, &request, JOIN_TIMEOUT).await {
                    Ok(FormationResponse::Admitted { cluster_id, voter, incarnation, secret }) => {
                        tracing::info!(cluster = cluster_id, voter, "admitted to the cluster");
                        let identity = self.data.identity();
                        let admission = Admission::Joining;
                        return self.advance(Identity {
                            cluster_id,
                            voter,
                            incarnation,
                            secret,
                            admission,
                            replaces: None,
                            ..identity
                        });
                    }
                    Ok(FormationResponse::Conflict { why }) => {
                        return Err(Failure::new(
                            Status::Conflict,
                            format!("{address} refuses this node: {why}"),
                        ));
                    }
                    Ok(FormationResponse::NotAdmitted { why }) => {
                        self.wait(&format!("not admitted: {why}"));
                        break;
                    }
                    Ok(FormationResponse::Later { why }) => {
                        self.wait(&format!("waiting for admission: {address}: {why}"))
                    }
                    Ok(
                        FormationResponse::Card { .. }
                        | FormationResponse::Known
                        | FormationResponse::Secret { .. }
                        | FormationResponse::Confirmed { .. }
                        | FormationResponse::RolledBack { .. }
                        | FormationResponse::Redundant
                        | FormationResponse::Leased { .. },
                    ) => {
                        self.wait(&format!("waiting for admission: unexpected response from {address}"));
                    }
                    Err(error) => self.wait(&format!("waiting for admission: {error}")),
                }
            }
            tokio::time::sleep(JOIN_PAUSE).await;
        }
    }

    /// Members of this cluster at the seed addresses.
    pub(super) async fn seed_members(&self) -> Vec<Member> {
        let identity = self.data.identity();
        let seeds = self.mode.seeds(identity.node_id);
        let cards = join_all(seeds.iter().map(|address| fetch_card(address, TIMEOUT))).await;
        let member = |(address, card): (&String, Result<Card, String>)| {
            let card = card.ok().filter(|card| card.cluster_id == identity.cluster_id && card.voter != 0)?;
            Some(Member { id: VoterId(card.voter), address: address.clone() })
        };
        seeds.iter().zip(cards).filter_map(member).collect()
    }

    pub(super) fn wait(&self, why: &str) {
        self.readiness.set_waiting(why);
    }

    /// Announces this restarted member and its address to the other members. True if one of them has it on record; an
    /// error if it was removed.
    pub(crate) async fn announce(&self, transport: &dyn Transport, addresses: &[String]) -> Outcome<bool> {
        let identity = self.data.identity();
        let mut seeds = self.mode.seeds(identity.node_id);
        seeds
            .extend(addresses.iter().filter(|address| !seeds.contains(address)).cloned().collect::<Vec<_>>());
        let announce = |address: String| async move { self.announce_at(transport, &address).await };
        let responses = join_all(seeds.iter().cloned().map(announce)).await;
        let mut known = false;
        for (address, response) in seeds.iter().zip(responses) {
            match response {
                Ok(FormationResponse::Conflict { why }) => {
                    return Err(Failure::new(
                        Status::Conflict,
                        format!("{address} refuses this node: {why}"),
                    )
                    .hint("to join again, start with an empty data directory and --join"));
                }
                Ok(FormationResponse::Known) => known = true,
                Ok(response) => tracing::debug!(address, ?response, "announcement not accepted yet"),
                Err(error) => tracing::debug!(%error, "announcement failed: member unreachable"),
            }
        }
        Ok(known)
    }

    /// Announces this node to the member at `address`, over an authenticated connection.
    async fn announce_at(
        &self,
        transport: &dyn Transport,
        address: &str,
    ) -> Result<FormationResponse, String> {
        let card = fetch_card(address, TIMEOUT).await?;
        let me = self.join_server.card();
        if card.voter == 0 || card.cluster_id != me.cluster_id {
            return Ok(FormationResponse::Later {
                why: format!("{address} is not a member of this cluster"),
            });
        }
        let to = Member { id: VoterId(card.voter), address: address.to_owned() };
        let request =
            serde_json::to_vec(&FormationRequest::Announce { me }).map_err(|error| error.to_string())?;
        let response = transport.ask(&to, ServiceId::NODE, request.into(), TIMEOUT).await;
        let response = response.map_err(|error| format!("{address}: {error}"))?;
        serde_json::from_slice(&response)
            .map_err(|error| format!("undecodable formation response from {address}: {error}"))
    }
}
