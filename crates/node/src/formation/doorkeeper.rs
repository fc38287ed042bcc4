//! Answers other nodes' questions about this one and about the cluster it is in.
//!
//! A visitor is not trusted: its question changes something only as far as the records allow
//! ([`crate::control::records`]), and those decide under compare-and-swap. What a member says of itself is taken only over
//! a connection on which it proved to be that voter.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_cluster::StateRepository;
use moim_cluster::nodes::NodeRecord;
use moim_coord::Coordinator;
use moim_raft::{BoxFuture, Service, VoterId};
use tokio::time::Instant;

use super::protocol::{Answer, Card, Question, Replacement, greet, read_question, write_answer};
use crate::control::records::{self, RecordError};
use crate::control::view::View;
use crate::data_dir::{DataDir, Identity, KnownRun};

/// How long the one who is said to have a place may take to show that it does.
const PROBE: Duration = Duration::from_millis(500);
/// How long a question may take that needs the cluster's word.
const PATIENCE: Duration = Duration::from_secs(4);

/// What a node inside a cluster can ask the cluster.
pub(crate) struct Inside {
    /// The coordination core.
    pub(crate) coordinator: Coordinator,
    /// Its records.
    pub(crate) repository: Arc<dyn StateRepository>,
}

/// The node's service on the peer port.
pub(crate) struct Doorkeeper {
    data: Arc<DataDir>,
    card: Mutex<Card>,
    inside: OnceLock<Inside>,
    complained: Mutex<Option<Instant>>,
}

impl Doorkeeper {
    /// Of this folder; it shows an empty card so far.
    pub(crate) fn new(data: Arc<DataDir>) -> Self {
        Self { data, card: Mutex::default(), inside: OnceLock::new(), complained: Mutex::default() }
    }

    /// What this node says of itself from now on.
    pub(crate) fn show(&self, card: Card) {
        *self.card.lock().unwrap_or_else(PoisonError::into_inner) = card;
    }

    /// What it says now.
    pub(crate) fn card(&self) -> Card {
        self.card.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on this node can answer for its cluster.
    pub(crate) fn go_inside(&self, inside: Inside) {
        // Said once: a node does not change clusters.
        let _ = self.inside.set(inside);
    }

    /// Says that a node was refused, once a second at most: strangers decide how often they ask.
    fn complain(&self, asks: &Card, answer: &Answer) {
        let Answer::Conflict { why } = answer else { return };
        let mut last = self.complained.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            *last = Some(Instant::now());
            tracing::warn!(node = asks.node_id, address = asks.peer, why, "a node was refused");
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

    /// The cluster, once this node can answer for it.
    pub(super) fn inside(&self) -> Option<&Inside> {
        self.inside.get()
    }

    /// Tells a founder that was away the secret, if it shows the part of it that it showed when the founders agreed.
    fn tell_secret(&self, asks: &Card) -> Answer {
        let identity = self.data.identity();
        let asks = asks.founder();
        let is_it = |one: &crate::data_dir::Founder| {
            (one.node_id, &one.directory_id, &one.nonce) == (asks.node_id, &asks.directory_id, &asks.nonce)
        };
        if identity.founders.iter().any(is_it) {
            return Answer::Secret { secret: identity.secret, founders: identity.founders };
        }
        Answer::Conflict { why: format!("node {} did not found this cluster with this folder", asks.node_id) }
    }

    async fn answer(&self, peer: Option<VoterId>, question: Question) -> Answer {
        let card = self.card();
        let (asks, fresh) = match question {
            Question::Greet => return Answer::Card { card },
            Question::Secret { me } => return self.tell_secret(&me),
            Question::Claim { claim } => return self.confirm(peer, claim).await,
            Question::Redundant { cluster_id, node_id, directory_id } => {
                if cluster_id != card.cluster_id {
                    return Answer::Conflict { why: "this node is in another cluster".to_owned() };
                }
                let Some(inside) = self.inside.get() else {
                    return Answer::Later { why: format!("node {} is still starting", card.node_id) };
                };
                let answer = inside.redundancy(&cluster_id, node_id, &directory_id);
                return match tokio::time::timeout(PATIENCE, answer).await {
                    Ok(answer) => answer,
                    Err(_) => Answer::Later { why: "the cluster has no quorum now".to_owned() },
                };
            }
            Question::Join { me, fresh, replaces } => (me, Some((fresh, replaces))),
            Question::Announce { me } if peer.is_some_and(|peer| peer.0 == me.voter) => (me, None),
            Question::Announce { .. } => {
                return Answer::Later {
                    why: "a node announces itself as a member of its cluster".to_owned(),
                };
            }
        };
        let Some(inside) = self.inside.get() else {
            return Answer::Later { why: format!("node {} is still starting", card.node_id) };
        };
        let answer = async {
            match fresh {
                Some((fresh, replaces)) => {
                    inside.admit(&card, &asks, fresh, replaces, self.identity().secret).await
                }
                None => inside.recognize(&card, &asks).await,
            }
        };
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(answer @ Answer::Conflict { .. }) => {
                self.complain(&asks, &answer);
                answer
            }
            Ok(answer) => answer,
            Err(_) => Answer::Later { why: "the cluster has no quorum now".to_owned() },
        }
    }
}

impl Service for Doorkeeper {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        self.handle_from(None, request)
    }

    fn handle_from(&self, peer: Option<VoterId>, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            let answer = match read_question(&request) {
                Ok(question) => self.answer(peer, question).await,
                Err(why) => Answer::Conflict { why },
            };
            write_answer(&answer)
        })
    }
}

impl Inside {
    /// A folder that is in no cluster wants to be in this one.
    async fn admit(
        &self,
        card: &Card,
        asks: &Card,
        fresh: bool,
        replaces: Option<Replacement>,
        secret: String,
    ) -> Answer {
        if let Err(why) = self.check_level(asks) {
            return Answer::Conflict { why };
        }
        if let Some(old) = &replaces
            && old.proof == Replacement::proof_of(&secret, &old.directory_id, &asks.directory_id)
            && let Err(error) = self.retire_rolled_back(asks, old).await
        {
            return Answer::Later { why: error.to_string() };
        }
        match self.find_place(card, asks, fresh).await {
            Ok(Ok(record)) => {
                tracing::info!(node = record.node_id, voter = record.voter, "a node was let in");
                Answer::Admitted {
                    cluster_id: card.cluster_id.clone(),
                    voter: record.voter,
                    incarnation: record.incarnation,
                    secret,
                }
            }
            Ok(Err(refusal)) => refusal,
            Err(error) => Answer::Later { why: error.to_string() },
        }
    }

    /// A node that proved to be a member says that its folder was rolled back: its voter is retired, its place stays.
    async fn retire_rolled_back(&self, asks: &Card, old: &Replacement) -> Result<(), RecordError> {
        let known = records::get(self.repository.as_ref(), asks.node_id).await?;
        let Some((_, record)) = known.filter(|(_, record)| record.directory_id == old.directory_id) else {
            return Ok(());
        };
        let there = greet(&record.peer, PROBE).await;
        if there.is_ok_and(|there| there.directory_id == old.directory_id) {
            return Err(RecordError::Running(asks.node_id));
        }
        tracing::warn!(
            node = asks.node_id,
            voter = record.voter,
            why = old.why,
            "data directory of a node was rolled back or damaged; its voter is retired"
        );
        records::replace_rolled_back(self.repository.as_ref(), asks.node_id, &old.why).await
    }

    fn check_level(&self, asks: &Card) -> Result<(), String> {
        let level = View::of(&self.coordinator).feature_level.unwrap_or(0);
        if asks.feature_level >= level {
            return Ok(());
        }
        Err(format!(
            "the cluster runs at feature level {level}, moim {} supports up to {}",
            asks.version, asks.feature_level
        ))
    }

    /// The record under which a folder is in the cluster, or why there is none.
    async fn find_place(
        &self,
        card: &Card,
        asks: &Card,
        fresh: bool,
    ) -> Result<Result<NodeRecord, Answer>, RecordError> {
        let (node, cluster) = (asks.node_id, &card.cluster_id);
        let known = records::get(self.repository.as_ref(), node).await?;
        match &known {
            // The answer got lost, or the node crashed before it wrote it down.
            Some((_, record)) if record.directory_id == asks.directory_id && record.voter != 0 => {
                return Ok(Ok(record.clone()));
            }
            Some((_, record)) if record.voter == 0 => {}
            Some((_, record)) => return Ok(Err(refuse_taken(record).await)),
            None if fresh => {}
            None => {
                let why = format!("node {node} is not part of cluster {cluster}; start it with --join");
                return Ok(Err(Answer::NotAdmitted { why }));
            }
        }
        records::admit(self.repository.as_ref(), asks, known).await.map(Ok)
    }

    /// A node that is in this cluster, as far as it knows, has started.
    async fn recognize(&self, card: &Card, asks: &Card) -> Answer {
        if asks.cluster_id != card.cluster_id {
            let (theirs, ours) = (&asks.cluster_id, &card.cluster_id);
            return Answer::Conflict {
                why: format!("the folder is of cluster {theirs}, this is cluster {ours}"),
            };
        }
        let view = View::of(&self.coordinator);
        let node = asks.node_id;
        if view.is_out(node, asks.voter, &asks.directory_id) {
            let why = format!("this data folder was node {node} and was removed or replaced since");
            return Answer::Conflict { why };
        }
        let Some(record) = view.node(node).filter(|record| record.voter == asks.voter) else {
            return Answer::Later { why: format!("voter {} is not known here yet", asks.voter) };
        };
        if record.peer == asks.peer {
            return Answer::Known;
        }
        // The record is what counts; the leader of the group follows it.
        let moved = NodeRecord { peer: asks.peer.clone(), ..record.clone() };
        match records::publish(self.repository.as_ref(), &moved).await {
            Ok(()) => Answer::Known,
            Err(error) => Answer::Later { why: error.to_string() },
        }
    }
}

/// A node's place is asked for by another folder. Whether that is a mistake shows at the address the node has.
async fn refuse_taken(record: &NodeRecord) -> Answer {
    let node = record.node_id;
    match greet(&record.peer, PROBE).await {
        Ok(there) if there.directory_id == record.directory_id => {
            let why = format!("node {node} is running at {}; node ids are unique", record.peer);
            Answer::Conflict { why }
        }
        _ => {
            let why = format!(
                "node {node} is in the cluster with another data folder; \
                 `moim cluster replace {node}` lets this one take its place"
            );
            Answer::NotAdmitted { why }
        }
    }
}
