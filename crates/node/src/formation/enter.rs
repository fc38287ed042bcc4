//! The way of a data folder into a cluster, from empty to a voter id of its own.
//!
//! Each step is written to `node.json` before it is acted on; see [`Admission`]. Waiting shows as the reason why the
//! node is not ready, and in the log once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::agree::{self, Step};
use super::doorkeeper::Doorkeeper;
use super::protocol::{Answer, Card, Question, ask, greet};
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
        match &self.way {
            Way::Alone => self.found(vec![self.doorkeeper.card().founder()], random_id()),
            Way::Founders(listed) if listed.len() == 1 => {
                self.found(vec![self.doorkeeper.card().founder()], random_id())
            }
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

    /// Writes down that the folder is one of these founders.
    fn found(&self, founders: Vec<Founder>, cluster_id: String) -> Outcome<Identity> {
        let identity = self.data.identity();
        let voter = agree::voter_of(&founders, identity.node_id)
            .ok_or_else(|| Failure::error("this node is not among the founders that were agreed on"))?;
        self.advance(Identity { cluster_id, voter, admission: Admission::Founding, founders, ..identity })
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
                    return self.found(founders, cluster_id);
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

    /// Asks to be let in until somebody does.
    async fn join(&self, addresses: &[String], fresh: bool) -> Outcome<Identity> {
        // What was seen of founders is of no use any more, and must not be mistaken for a list to act on.
        self.doorkeeper.show(Card { founders: Vec::new(), ..self.doorkeeper.card() });
        loop {
            for address in addresses {
                let me = self.doorkeeper.card();
                match ask(address, &Question::Join { me, fresh }, JOIN_TIMEOUT).await {
                    Ok(Answer::Admitted { cluster_id, voter, incarnation }) => {
                        tracing::info!(cluster = cluster_id, voter, "let in");
                        let identity = self.data.identity();
                        let admission = Admission::Joining;
                        return self.advance(Identity {
                            cluster_id,
                            voter,
                            incarnation,
                            admission,
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
                    Ok(Answer::Card { .. } | Answer::Known) => {
                        self.wait(&format!("waiting to be let in: {address} answers what was not asked"));
                    }
                    Err(error) => self.wait(&format!("waiting to be let in: {error}")),
                }
            }
            tokio::time::sleep(JOIN_PAUSE).await;
        }
    }

    fn wait(&self, why: &str) {
        self.readiness.waits(why);
    }

    /// Tells the others that this member is back and where; an error when they say it is none any more. True when one
    /// of them knows it.
    pub(crate) async fn announce(&self, addresses: &[String]) -> Outcome<bool> {
        let identity = self.data.identity();
        let mut seeds = self.way.seeds(identity.node_id);
        seeds
            .extend(addresses.iter().filter(|address| !seeds.contains(address)).cloned().collect::<Vec<_>>());
        let question = Question::Announce { me: self.doorkeeper.card() };
        let answers = join_all(seeds.iter().map(|address| ask(address, &question, TIMEOUT))).await;
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
}
