//! Rollback detection at startup: a node proves that its data directory is the newest state of its voter before its
//! Raft member participates.
//!
//! The node claims its run ([`crate::data_dir::KnownRun`]) at the other members. Each of them records the run and
//! confirms it, or rejects it: the data directory was rolled back, or another process serves under the same identity.
//! Until a majority of the voters has confirmed the run (this node counts itself), the Raft member grants no vote and
//! acknowledges no append. A confirmation is not a vote, so nodes that all start at the same time confirm each other.
//!
//! Afterwards the claim is repeated until every member has confirmed it: otherwise a member that was down would not
//! know the run when it is the only one left that could. It is also repeated when the durable Raft index has advanced:
//! the recorded index reveals a copy made within the run, also when all nodes start at once and the state of the core
//! is not known yet.
//!
//! Limits: a rollback of a majority of the voters together, or of the only node of a cluster, is not detected.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use moim_base::task::{Shutdown, offload};
use moim_raft::{Group, Member, ServiceId, Transport, VoterId};
use tokio::time::Instant;

use super::bootstrap::Bootstrap;
use super::protocol::{Claim, FormationRequest, FormationResponse};
use crate::data_dir::{Aside, DataDir};
use crate::exit::{Failure, Outcome, Status};

/// Timeout of a claim request.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Wait for further responses after a majority has confirmed the run: one of them may reject it.
const GRACE_PERIOD: Duration = Duration::from_millis(200);
/// Pause between rounds.
const PAUSE: Duration = Duration::from_millis(50);
/// Number of rounds between lookups of the seed addresses.
const SEED_ROUNDS: u32 = 10;
/// Maximum wait for the lease expiry of an earlier run.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum wait of a rolled-back data directory for a quorum of the other voters, which could admit the node again.
const QUORUM_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval of claims while members have not confirmed the run.
const REPEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of claims after all members have confirmed: there may be new members. Also the interval at which an
/// advanced durable Raft index is claimed.
const CONFIRMED_INTERVAL: Duration = Duration::from_secs(5);

/// Claims this node's run at the other members.
pub(crate) struct Claimant<'a> {
    pub(crate) data: &'a DataDir,
    pub(crate) group: &'a Group,
    pub(crate) transport: &'a dyn Transport,
    /// Peer address of this node.
    pub(crate) peer: &'a str,
}

/// Responses of one round.
#[derive(Default)]
struct Round {
    confirmed: BTreeSet<u64>,
    /// Voters according to the member with the longest log.
    voters: Vec<Member>,
    index: u64,
    conflict: Option<String>,
    rolled_back: Option<(String, bool)>,
    leased: Option<String>,
    pending: Option<String>,
}

impl Claimant<'_> {
    fn request(&self) -> FormationRequest {
        let identity = self.data.identity();
        FormationRequest::Claim {
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

    async fn send(&self, to: &Member) -> Result<FormationResponse, String> {
        let request = serde_json::to_vec(&self.request()).map_err(|error| error.to_string())?;
        let response = self.transport.ask(to, ServiceId::NODE, request.into(), TIMEOUT).await;
        let response = response.map_err(|error| format!("{}: {error}", to.address))?;
        serde_json::from_slice(&response).map_err(|error| format!("{}: {error}", to.address))
    }

    /// Sends the claim to these members, and waits until `is_enough`, plus a grace period for the others.
    async fn round(&self, members: &[Member], is_enough: impl Fn(&Round) -> bool) -> Round {
        let mut round = Round::default();
        let mut responses = FuturesUnordered::new();
        for member in members {
            responses.push(async move { (member, self.send(member).await) });
        }
        let mut deadline = Instant::now() + TIMEOUT;
        loop {
            let next = match tokio::time::timeout_at(deadline, responses.next()).await {
                Ok(Some(next)) => next,
                Ok(None) | Err(_) => return round,
            };
            round.on_response(next.0, next.1);
            if is_enough(&round) {
                deadline = deadline.min(Instant::now() + GRACE_PERIOD);
            }
        }
    }

    /// Returns when the run is confirmed. An error ends the start: another process serves under the identity, or the
    /// data directory was rolled back (it is then marked to be set aside).
    pub(crate) async fn claim(&self, bootstrap: &Bootstrap<'_>) -> Outcome {
        let me = self.group.voter();
        let is_empty = self.group.last_index().is_none();
        let known_voters = self.confirmed_voters();
        if is_empty && known_voters.len() < 2 {
            // This voter has never acknowledged an entry.
            self.group.confirm();
            return Ok(());
        }
        // A data directory with confirmed runs of other voters once had a Raft log: without one it is an incomplete
        // copy, or it lost the log.
        while !is_empty && self.group.wait_for(TIMEOUT, |now| !now.voters.is_empty()).await.is_err() {}
        let began = Instant::now();
        let mut seeds: Vec<Member> = Vec::new();
        for number in 1.. {
            let mut metrics = self.group.metrics();
            if metrics.voters.is_empty() {
                metrics.voters.clone_from(&known_voters);
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
            let is_unopposed = self.judge(&round, bootstrap, began, &others)?;
            if is_unopposed && is_enough(&round) {
                self.group.confirm();
                self.data.update(|identity| identity.forced = false)?;
                return Ok(());
            }
            if is_unopposed {
                let pending = round.pending.as_deref().unwrap_or("no response yet");
                bootstrap.wait(&format!("waiting for a majority of voters to confirm this run: {pending}"));
            }
            if number % SEED_ROUNDS == 0 {
                seeds = bootstrap.seed_members().await;
                seeds.extend(round.voters);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// This voter, and the voters whose runs its data directory has confirmed.
    fn confirmed_voters(&self) -> Vec<Member> {
        let others = self
            .data
            .known_peers()
            .into_iter()
            .map(|(voter, address)| Member { id: VoterId(voter), address });
        others.chain([Member { id: self.group.voter(), address: self.peer.to_owned() }]).collect()
    }

    /// True if no member rejected the run; an error if the rejection is final.
    fn judge(
        &self,
        round: &Round,
        bootstrap: &Bootstrap<'_>,
        began: Instant,
        others: &[Member],
    ) -> Outcome<bool> {
        if let Some(why) = &round.conflict {
            return Err(Failure::new(Status::Conflict, format!("this node cannot start: {why}")).hint(
                "a data directory serves one process; to join again, start with an empty data directory and --join",
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
            if began.elapsed() > QUORUM_TIMEOUT {
                return Err(Failure::error(message).hint(
                    "start the other voters: they hold what is missing here. If all of them were restored from copies, \
                     too, `moim cluster recover --data DIR --accept-data-loss` lets this directory go on as it is",
                ));
            }
            bootstrap.wait(&format!("{message}; waiting for a quorum of the other voters"));
            return Ok(false);
        }
        if let Some(why) = &round.leased {
            if began.elapsed() > LEASE_TIMEOUT {
                return Err(Failure::new(Status::Conflict, format!("this node cannot start: {why}"))
                    .hint("a data directory serves one process: stop the other one first"));
            }
            bootstrap.wait(why);
            return Ok(false);
        }
        Ok(true)
    }

    /// Repeats the claim at members that have not confirmed it, until the node stops. Stops the node if another process
    /// has taken over its identity.
    pub(crate) async fn repeat(&self, lost: &Shutdown, shutdown: &Shutdown) {
        let me = self.group.voter();
        let mut confirmed: BTreeSet<u64> = BTreeSet::new();
        let (mut claimed_index, mut claimed_at) = (0, Instant::now());
        loop {
            let settled = self.group.settled_index().unwrap_or(0);
            if settled > claimed_index && claimed_at.elapsed() >= CONFIRMED_INTERVAL {
                confirmed.clear();
                (claimed_index, claimed_at) = (settled, Instant::now());
            }
            let metrics = self.group.metrics();
            let known = metrics.voters.iter().chain(&metrics.learners);
            let missing: Vec<Member> = known
                .filter(|member| member.id != me && !confirmed.contains(&member.id.0))
                .cloned()
                .collect();
            let round = self.round(&missing, |_| false).await;
            if let Some(why) = &round.conflict {
                tracing::error!(why, "node identity in use by another process; stopping");
                return lost.stop();
            }
            if let Some((why, _)) = &round.rolled_back {
                // The Raft log may have advanced since the claim was built; a final rejection is a conflict.
                tracing::debug!(why, "run not confirmed by a member yet");
            }
            confirmed.extend(round.confirmed);
            let all = missing.iter().all(|member| confirmed.contains(&member.id.0));
            let pause = if all { CONFIRMED_INTERVAL } else { REPEAT_INTERVAL };
            tokio::select! {
                () = shutdown.stopped() => return,
                () = moim_base::rest::rest(pause) => {}
            }
        }
    }
}

impl Round {
    fn on_response(&mut self, from: &Member, response: Result<FormationResponse, String>) {
        match response {
            Ok(FormationResponse::Confirmed { voters, index }) => {
                self.confirmed.insert(from.id.0);
                if index >= self.index {
                    let member = |voter: super::protocol::VoterAddress| Member {
                        id: VoterId(voter.voter),
                        address: voter.address,
                    };
                    self.voters = voters.into_iter().map(member).collect();
                    self.index = index;
                }
            }
            Ok(FormationResponse::Conflict { why }) => self.conflict = Some(why),
            Ok(FormationResponse::RolledBack { why, quorum }) => {
                let known = self.rolled_back.as_ref().is_some_and(|(_, known)| *known);
                self.rolled_back = Some((why, quorum || known));
            }
            Ok(FormationResponse::Leased { why }) => self.leased = Some(why),
            Ok(FormationResponse::Later { why }) => self.pending = Some(format!("{}: {why}", from.address)),
            Ok(response) => self.pending = Some(format!("{}: {response:?}", from.address)),
            Err(error) => self.pending = Some(error),
        }
    }
}

/// Records a confirmed run, on a blocking thread.
pub(super) async fn store_run(
    data: std::sync::Arc<DataDir>,
    voter: u64,
    run: crate::data_dir::KnownRun,
) -> Result<bool, String> {
    let stored = offload(move || Ok(data.confirm_run(voter, run))).await;
    stored.map_err(|error| error.to_string())?.map_err(|failure| failure.message)
}
