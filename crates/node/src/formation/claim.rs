//! A start proves that its folder is the newest state of its voter, before it takes part in the Raft group.
//!
//! The folder claims its run ([`crate::data_dir::KnownRun`]) at the other members. Each of them confirms it, after it has
//! written it down, or says why not: the folder was rolled back, or another process serves under the same identity. Until
//! a majority of the voters has confirmed it (this one counts itself), the group grants no vote and acknowledges no
//! append. Confirming is not voting, so nodes that all start at the same time confirm each other.
//!
//! Afterwards the claim is repeated until every member has heard it: a member that was down would otherwise not know
//! the run when it is the only one left that could. It is repeated as well when the folder has moved on: what members
//! wrote down tells a copy made within the run, also when all nodes start at once and no state of the core is known yet.
//!
//! Limits: a folder that was put back together with those of a majority of the voters, and the folder of a cluster's only
//! node, cannot be told from current ones.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use moim_base::task::{Shutdown, offload};
use moim_raft::{Group, Member, ServiceId, Transport, VoterId};
use tokio::time::Instant;

use super::enter::Entrant;
use super::protocol::{Answer, Claim, Question};
use crate::data_dir::{Aside, DataDir};
use crate::exit::{Failure, Outcome, Status};

/// For one question.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long other answers are waited for when a majority has confirmed the run: one of them may know better.
const GRACE: Duration = Duration::from_millis(200);
/// Between two rounds.
const PAUSE: Duration = Duration::from_millis(50);
/// Rounds between two looks at the addresses the node was started with.
const SEEDS: u32 = 10;
/// How long the lease of an earlier run may take to end.
const LEASED: Duration = Duration::from_secs(10);
/// How long a rolled-back folder waits for a quorum of the others, which could let it in again.
const NO_QUORUM: Duration = Duration::from_secs(120);
/// Between two rounds to members that have not heard of the run.
const SPREAD: Duration = Duration::from_secs(1);
/// The same when all have: there may be new members. Also between two times that they are told how far the folder is.
const ALL: Duration = Duration::from_secs(5);

/// What a claim is made with.
pub(crate) struct Claimant<'a> {
    pub(crate) data: &'a DataDir,
    pub(crate) group: &'a Group,
    pub(crate) transport: &'a dyn Transport,
    /// Where this node is reached.
    pub(crate) peer: &'a str,
}

/// What the others said in one round.
#[derive(Default)]
struct Round {
    confirmed: BTreeSet<u64>,
    /// Who votes, as the member with the longest log knows it.
    voters: Vec<Member>,
    index: u64,
    conflict: Option<String>,
    rolled_back: Option<(String, bool)>,
    leased: Option<String>,
    waits: Option<String>,
}

impl Claimant<'_> {
    fn question(&self) -> Question {
        let identity = self.data.identity();
        Question::Claim {
            claim: Claim {
                node_id: identity.node_id,
                voter: identity.voter,
                directory_id: identity.directory_id,
                run: identity.run,
                nonce: identity.run_nonce,
                peer: self.peer.to_owned(),
                last_index: self.group.last_index().unwrap_or(0),
                settled: self.group.settled_index().unwrap_or(0),
                forced: identity.forced,
            },
        }
    }

    async fn ask(&self, to: &Member) -> Result<Answer, String> {
        let question = serde_json::to_vec(&self.question()).map_err(|error| error.to_string())?;
        let answer = self.transport.ask(to, ServiceId::NODE, question.into(), TIMEOUT).await;
        let answer = answer.map_err(|error| format!("{}: {error}", to.address))?;
        serde_json::from_slice(&answer).map_err(|error| format!("{}: {error}", to.address))
    }

    /// Asks these members; not longer than it takes a majority, and a little for the others.
    async fn round(&self, members: &[Member], is_enough: impl Fn(&Round) -> bool) -> Round {
        let mut round = Round::default();
        let mut answers = FuturesUnordered::new();
        for member in members {
            answers.push(async move { (member, self.ask(member).await) });
        }
        let mut deadline = Instant::now() + TIMEOUT;
        loop {
            let next = match tokio::time::timeout_at(deadline, answers.next()).await {
                Ok(Some(next)) => next,
                Ok(None) | Err(_) => return round,
            };
            round.take_in(next.0, next.1);
            if is_enough(&round) {
                deadline = deadline.min(Instant::now() + GRACE);
            }
        }
    }

    /// Returns when the run is confirmed. An error ends the start: another process has the identity, or the folder was
    /// rolled back (then it is marked to be set aside).
    pub(crate) async fn claim(&self, entrant: &Entrant<'_>) -> Outcome {
        let me = self.group.voter();
        let is_empty = self.group.last_index().is_none();
        let recorded = self.recorded_voters();
        if is_empty && recorded.len() < 2 {
            // It has never acknowledged anything.
            self.group.confirm();
            return Ok(());
        }
        // A folder that has confirmed others once had a Raft log: without one it is a torn copy, or lost it.
        while !is_empty && self.group.wait_for(TIMEOUT, |now| !now.voters.is_empty()).await.is_err() {}
        let began = Instant::now();
        let mut seeds: Vec<Member> = Vec::new();
        for number in 1.. {
            let mut metrics = self.group.metrics();
            if metrics.voters.is_empty() {
                metrics.voters.clone_from(&recorded);
            }
            let known = metrics.voters.iter().chain(&metrics.learners).chain(&seeds);
            let mut others: Vec<Member> = known.filter(|member| member.id != me).cloned().collect();
            others.sort();
            others.dedup();
            let is_enough = |round: &Round| {
                let newer = round.index > self.group.last_index().unwrap_or(0) && !round.voters.is_empty();
                let voters = if newer { &round.voters } else { &metrics.voters };
                let is_in = |voter: &&Member| voter.id == me || round.confirmed.contains(&voter.id.0);
                voters.iter().filter(is_in).count() * 2 > voters.len()
            };
            let round = self.round(&others, is_enough).await;
            let is_free = self.judge(&round, entrant, began, &others)?;
            if is_free && is_enough(&round) {
                self.group.confirm();
                self.data.update(|identity| identity.forced = false)?;
                return Ok(());
            }
            if is_free {
                let waits = round.waits.as_deref().unwrap_or("no answer yet");
                entrant.wait(&format!("waiting for a majority of voters to confirm this run: {waits}"));
            }
            if number % SEEDS == 0 {
                seeds = entrant.seed_members().await;
                seeds.extend(round.voters);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// This voter, and those whose runs its folder has confirmed.
    fn recorded_voters(&self) -> Vec<Member> {
        let others = self
            .data
            .known_peers()
            .into_iter()
            .map(|(voter, address)| Member { id: VoterId(voter), address });
        others.chain([Member { id: self.group.voter(), address: self.peer.to_owned() }]).collect()
    }

    /// Whether nothing speaks against the run; an error if something does for good.
    fn judge(
        &self,
        round: &Round,
        entrant: &Entrant<'_>,
        began: Instant,
        others: &[Member],
    ) -> Outcome<bool> {
        if let Some(why) = &round.conflict {
            return Err(Failure::new(Status::Conflict, format!("this node cannot start: {why}")).hint(
                "a data directory serves one process; to join again, start with an empty folder and --join",
            ));
        }
        if let Some((why, quorum)) = &round.rolled_back {
            let message = format!("{} was rolled back: {why}", self.data.path.display());
            if *quorum {
                let peers = others.iter().map(|member| member.address.clone()).collect();
                let run = self.data.identity().run;
                self.data.update(|identity| identity.aside = Some(Aside::new(why.clone(), peers, run)))?;
                return Err(
                    Failure::error(message).hint("start it again: its content is set aside and refetched")
                );
            }
            if began.elapsed() > NO_QUORUM {
                return Err(Failure::error(message).hint(
                    "start the other voters: they hold what is missing here. If all of them were restored from copies, too, \
                     `moim cluster recover --data DIR --accept-data-loss` lets this directory go on as it is",
                ));
            }
            entrant.wait(&format!("{message}; waiting for a quorum of the other voters"));
            return Ok(false);
        }
        if let Some(why) = &round.leased {
            if began.elapsed() > LEASED {
                return Err(Failure::new(Status::Conflict, format!("this node cannot start: {why}"))
                    .hint("a data directory serves one process: stop the other one first"));
            }
            entrant.wait(why);
            return Ok(false);
        }
        Ok(true)
    }

    /// Claims the run at members that have not confirmed it, until the node stops. Stops the node if another process has
    /// taken its identity over.
    pub(crate) async fn spread(&self, lost: &Shutdown, shutdown: &Shutdown) {
        let me = self.group.voter();
        let mut confirmed: BTreeSet<u64> = BTreeSet::new();
        let (mut told, mut told_at) = (0, Instant::now());
        loop {
            let settled = self.group.settled_index().unwrap_or(0);
            if settled > told && told_at.elapsed() >= ALL {
                confirmed.clear();
                (told, told_at) = (settled, Instant::now());
            }
            let metrics = self.group.metrics();
            let known = metrics.voters.iter().chain(&metrics.learners);
            let missing: Vec<Member> = known
                .filter(|member| member.id != me && !confirmed.contains(&member.id.0))
                .cloned()
                .collect();
            let round = self.round(&missing, |_| false).await;
            if let Some(why) = &round.conflict {
                tracing::error!(why, "identity of this node is in use by another process; stopping");
                return lost.stop();
            }
            if let Some((why, _)) = &round.rolled_back {
                // Its log may have gone on since it was asked about; a member that is sure stops the node by a conflict.
                tracing::debug!(why, "run of this node is not confirmed by a member yet");
            }
            confirmed.extend(round.confirmed);
            let all = missing.iter().all(|member| confirmed.contains(&member.id.0));
            let pause = if all { ALL } else { SPREAD };
            tokio::select! {
                () = shutdown.stopped() => return,
                () = moim_base::rest::rest(pause) => {}
            }
        }
    }
}

impl Round {
    fn take_in(&mut self, from: &Member, answer: Result<Answer, String>) {
        match answer {
            Ok(Answer::Confirmed { voters, index }) => {
                self.confirmed.insert(from.id.0);
                if index >= self.index {
                    let member = |voter: super::protocol::Reached| Member {
                        id: VoterId(voter.voter),
                        address: voter.address,
                    };
                    self.voters = voters.into_iter().map(member).collect();
                    self.index = index;
                }
            }
            Ok(Answer::Conflict { why }) => self.conflict = Some(why),
            Ok(Answer::RolledBack { why, quorum }) => {
                let known = self.rolled_back.as_ref().is_some_and(|(_, known)| *known);
                self.rolled_back = Some((why, quorum || known));
            }
            Ok(Answer::Leased { why }) => self.leased = Some(why),
            Ok(Answer::Later { why }) => self.waits = Some(format!("{}: {why}", from.address)),
            Ok(answer) => self.waits = Some(format!("{}: {answer:?}", from.address)),
            Err(error) => self.waits = Some(error),
        }
    }
}

/// Writes a confirmed run down, on a thread that may wait for the disk.
pub(super) async fn store_run(
    data: std::sync::Arc<DataDir>,
    voter: u64,
    run: crate::data_dir::KnownRun,
) -> Result<bool, String> {
    let stored = offload(move || Ok(data.confirm_run(voter, run))).await;
    stored.map_err(|error| error.to_string())?.map_err(|failure| failure.message)
}
