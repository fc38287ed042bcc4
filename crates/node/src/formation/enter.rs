//! The way of a data folder into a cluster, from empty to a voter id of its own.
//!
//! Each step is written to `node.json` before it is acted on; see [`Admission`]. Waiting shows as the reason why the
//! node is not ready, and in the log once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use moim_raft::{Member, ServiceId, Transport, VoterId};

use super::agree::{self, Step};
use super::doorkeeper::Doorkeeper;
use super::protocol::{Answer, Card, Question, Replacement, ask, greet};
use crate::admin::Readiness;
use crate::data_dir::{Admission, DataDir, Founder, Identity, random_id};
use crate::exit::{Failure, Outcome, Status};

/// Between two rounds of questions.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two tries to be let in.
const JOIN_PAUSE: Duration = Duration::from_millis(500);
/// For one question.
const TIMEOUT: Duration = Duration::from_secs(1);
/// For one that the cluster has to agree to.
const JOIN_TIMEOUT: Duration = Duration::from_secs(6);

/// How an empty folder is told to find its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// It is a cluster of its own.
    Alone,
    /// With these founders, by node id.
    Founders(BTreeMap<i32, String>),
    /// By asking one of these.
    Join(Vec<String>),
}

impl Way {
    /// Where others can be found.
    fn seeds(&self, me: i32) -> Vec<String> {
        match self {
            Self::Alone => Vec::new(),
            Self::Founders(listed) => {
                listed.iter().filter(|(id, _)| **id != me).map(|(_, address)| address.clone()).collect()
            }
            Self::Join(addresses) => addresses.clone(),
        }
    }
}

/// What the way needs.
pub(crate) struct Entrant<'a> {
    pub(crate) way: Way,
    pub(crate) data: &'a DataDir,
    pub(crate) doorkeeper: &'a Arc<Doorkeeper>,
    pub(crate) readiness: &'a Readiness,
}

impl Entrant<'_> {
    /// Returns when the folder has a cluster and a voter id, in `node.json`.
    pub(crate) async fn enter(&self) -> Outcome<Identity> {
        let identity = self.data.identity();
        if identity.admission != Admission::New {
            self.refuse_other_cluster(&identity).await?;
            return Ok(identity);
        }
        if let Some(replaces) = &identity.replaces {
            let mut addresses = self.way.seeds(identity.node_id);
            addresses.extend(
                replaces.peers.iter().filter(|peer| !addresses.contains(peer)).cloned().collect::<Vec<_>>(),
            );
            return self.join(&addresses, false).await;
        }
        match &self.way {
            Way::Alone => self.found_alone(),
            Way::Founders(listed) if listed.len() == 1 => self.found_alone(),
            Way::Founders(listed) => self.agree(listed).await,
            Way::Join(addresses) => self.join(addresses, true).await,
        }
    }

    /// A folder of one cluster must not be started beside the nodes of another.
    async fn refuse_other_cluster(&self, identity: &Identity) -> Outcome {
        let seeds = self.way.seeds(identity.node_id);
        let cards = join_all(seeds.iter().map(|address| greet(address, TIMEOUT / 2))).await;
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
                    .hint("pass the folder of that cluster, or an empty one, with --data"));
            }
        }
        Ok(())
    }

    fn found_alone(&self) -> Outcome<Identity> {
        self.found(vec![self.doorkeeper.card().founder()], random_id(), random_id())
    }

    /// Writes down that the folder is one of these founders.
    fn found(&self, founders: Vec<Founder>, cluster_id: String, secret: String) -> Outcome<Identity> {
        let identity = self.data.identity();
        let voter = agree::voter_of(&founders, identity.node_id)
            .ok_or_else(|| Failure::error("this node is not among the founders that were agreed on"))?;
        let admission = Admission::Founding;
        self.advance(Identity { cluster_id, secret, voter, admission, founders, ..identity })
    }

    fn advance(&self, identity: Identity) -> Outcome<Identity> {
        self.data.record(identity.clone())?;
        self.doorkeeper.show(self.doorkeeper.card().with_identity(&identity));
        Ok(identity)
    }

    /// Finds the other founders and agrees with them, or finds that there is a cluster already.
    async fn agree(&self, listed: &BTreeMap<i32, String>) -> Outcome<Identity> {
        let me = self.data.identity().node_id;
        let others: Vec<(i32, &String)> =
            listed.iter().map(|(id, address)| (*id, address)).filter(|(id, _)| *id != me).collect();
        loop {
            let cards = join_all(others.iter().map(|(_, address)| greet(address, TIMEOUT))).await;
            let mut heard: BTreeMap<i32, Card> = BTreeMap::new();
            for ((node_id, address), card) in others.iter().zip(cards) {
                match card {
                    Ok(card) if card.node_id == *node_id => drop(heard.insert(*node_id, card)),
                    Ok(card) => {
                        let found = card.node_id;
                        self.wait(&format!("{address} is node {found}, not node {node_id}"));
                    }
                    Err(error) => tracing::debug!(node = node_id, %error, "a founder does not answer"),
                }
            }
            let card = self.doorkeeper.card();
            match agree::decide(&card, listed, &heard) {
                Step::Found(founders) => {
                    let cluster_id = agree::cluster_of(&founders);
                    let acted = heard.values().find(|card| card.admission != Admission::New);
                    let agreed = match acted.and_then(|card| listed.get(&card.node_id)) {
                        None => Some((agree::secret_of(&founders), founders)),
                        Some(address) => self.ask_secret(address).await,
                    };
                    if let Some((secret, founders)) = agreed {
                        return self.found(founders, cluster_id, secret);
                    }
                }
                Step::Outside { cluster_id, .. } => {
                    tracing::info!(
                        cluster = cluster_id,
                        "there is a cluster already; this folder is new to it"
                    );
                    let addresses: Vec<String> =
                        others.iter().map(|(_, address)| (*address).clone()).collect();
                    return self.join(&addresses, false).await;
                }
                Step::Wait { why, seen } => {
                    self.wait(&why);
                    self.doorkeeper.show(Card { founders: seen, ..card });
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Asks a founder that has acted for the secret of the cluster.
    async fn ask_secret(&self, address: &str) -> Option<(String, Vec<Founder>)> {
        let question = Question::Secret { me: self.doorkeeper.card() };
        match ask(address, &question, TIMEOUT).await {
            Ok(Answer::Secret { secret, founders }) => Some((secret, founders)),
            Ok(answer) => {
                self.wait(&format!("waiting for the cluster's secret: {address}: {answer:?}"));
                None
            }
            Err(error) => {
                self.wait(&format!("waiting for the cluster's secret: {error}"));
                None
            }
        }
    }

    /// Asks to be let in until somebody does.
    async fn join(&self, addresses: &[String], fresh: bool) -> Outcome<Identity> {
        let identity = self.data.identity();
        let replaces = identity.replaces.map(|old| Replacement {
            proof: Replacement::proof_of(&old.secret, &old.directory_id, &identity.directory_id),
            directory_id: old.directory_id,
            why: old.why,
        });
        // What was seen of founders is of no use any more, and must not be mistaken for a list to act on.
        self.doorkeeper.show(Card { founders: Vec::new(), ..self.doorkeeper.card() });
        loop {
            for address in addresses {
                let me = self.doorkeeper.card();
                let question = Question::Join { me, fresh, replaces: replaces.clone() };
                match ask(address, &question, JOIN_TIMEOUT).await {
                    Ok(Answer::Admitted { cluster_id, voter, incarnation, secret }) => {
                        tracing::info!(cluster = cluster_id, voter, "let in");
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
                    Ok(Answer::Conflict { why }) => {
                        return Err(Failure::new(
                            Status::Conflict,
                            format!("{address} refuses this node: {why}"),
                        ));
                    }
                    Ok(Answer::NotAdmitted { why }) => {
                        self.wait(&format!("not admitted: {why}"));
                        break;
                    }
                    Ok(Answer::Later { why }) => {
                        self.wait(&format!("waiting to be let in: {address}: {why}"))
                    }
                    Ok(
                        Answer::Card { .. }
                        | Answer::Known
                        | Answer::Secret { .. }
                        | Answer::Confirmed { .. }
                        | Answer::RolledBack { .. }
                        | Answer::Redundant
                        | Answer::Leased { .. },
                    ) => {
                        self.wait(&format!("waiting to be let in: {address} answers what was not asked"));
                    }
                    Err(error) => self.wait(&format!("waiting to be let in: {error}")),
                }
            }
            tokio::time::sleep(JOIN_PAUSE).await;
        }
    }

    /// The members of this cluster among the addresses the node was started with.
    pub(super) async fn seed_members(&self) -> Vec<Member> {
        let identity = self.data.identity();
        let seeds = self.way.seeds(identity.node_id);
        let cards = join_all(seeds.iter().map(|address| greet(address, TIMEOUT))).await;
        let member = |(address, card): (&String, Result<Card, String>)| {
            let card = card.ok().filter(|card| card.cluster_id == identity.cluster_id && card.voter != 0)?;
            Some(Member { id: VoterId(card.voter), address: address.clone() })
        };
        seeds.iter().zip(cards).filter_map(member).collect()
    }

    pub(super) fn wait(&self, why: &str) {
        self.readiness.waits(why);
    }

    /// Tells the others that this member is back and where; an error when they say it is none any more. True when one
    /// of them knows it.
    pub(crate) async fn announce(&self, transport: &dyn Transport, addresses: &[String]) -> Outcome<bool> {
        let identity = self.data.identity();
        let mut seeds = self.way.seeds(identity.node_id);
        seeds
            .extend(addresses.iter().filter(|address| !seeds.contains(address)).cloned().collect::<Vec<_>>());
        let announce = |address: String| async move { self.announce_at(transport, &address).await };
        let answers = join_all(seeds.iter().cloned().map(announce)).await;
        let mut known = false;
        for (address, answer) in seeds.iter().zip(answers) {
            match answer {
                Ok(Answer::Conflict { why }) => {
                    return Err(Failure::new(
                        Status::Conflict,
                        format!("{address} refuses this node: {why}"),
                    )
                    .hint("to join again, start with an empty folder and --join"));
                }
                Ok(Answer::Known) => known = true,
                Ok(answer) => tracing::debug!(address, ?answer, "not known yet"),
                Err(error) => tracing::debug!(%error, "a member does not answer"),
            }
        }
        Ok(known)
    }

    /// Announces this node to the one that listens at `address`, over a connection of members: it has to be one.
    async fn announce_at(&self, transport: &dyn Transport, address: &str) -> Result<Answer, String> {
        let there = greet(address, TIMEOUT).await?;
        let me = self.doorkeeper.card();
        if there.voter == 0 || there.cluster_id != me.cluster_id {
            return Ok(Answer::Later { why: format!("{address} is not a member of this cluster") });
        }
        let to = Member { id: VoterId(there.voter), address: address.to_owned() };
        let question = serde_json::to_vec(&Question::Announce { me }).map_err(|error| error.to_string())?;
        let answer = transport.ask(&to, ServiceId::NODE, question.into(), TIMEOUT).await;
        let answer = answer.map_err(|error| format!("{address}: {error}"))?;
        serde_json::from_slice(&answer).map_err(|error| format!("{address}: undecodable answer: {error}"))
    }
}
