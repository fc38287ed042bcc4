//! Confirming the runs of other members: whether a claim comes from the newest state of a voter's folder.
//!
//! What speaks against it, in this order:
//! - the voter was removed, or another process answers in its name where it was last reached;
//! - the voter was reached elsewhere, and the lease of that run has not ended yet;
//! - this folder has confirmed the same run or a later one of another start, or the cluster has recorded that the folder
//!   held a later Raft entry durably: it was put back from an older copy.
//!
//! A restart claims a greater run from the same address and is confirmed at once. What is confirmed is on stable storage
//! before the answer is sent.

use std::time::Duration;

use moim_raft::VoterId;

use super::claim::store_run;
use super::doorkeeper::{Doorkeeper, Inside};
use super::protocol::{Answer, Claim, Reached, greet};
use crate::control::records;
use crate::control::view::View;
use crate::data_dir::KnownRun;

/// How long a process that has the identity may take to answer.
const PROBE: Duration = Duration::from_millis(500);
/// How long a quorum is waited for.
const QUORUM: Duration = Duration::from_secs(1);

impl Doorkeeper {
    /// Answers the claim of a member that proved to be this voter.
    pub(super) async fn confirm(&self, peer: Option<VoterId>, claim: Claim) -> Answer {
        if peer.is_none_or(|peer| peer.0 != claim.voter) {
            return Answer::Later { why: "a run is claimed by the voter itself".to_owned() };
        }
        let Some(inside) = self.inside() else {
            return Answer::Later { why: "this node is still starting".to_owned() };
        };
        let (node, view) = (claim.node_id, View::of(&inside.coordinator));
        if claim.voter == self.identity().voter {
            return Answer::Conflict { why: format!("node {node} runs at {}", self.card().peer) };
        }
        if view.is_out(node, claim.voter, &claim.directory_id) {
            let why = format!("this data folder was node {node} and was removed or replaced since");
            return Answer::Conflict { why };
        }
        let known = self.known_run(claim.voter);
        let record = view.node(node).filter(|record| record.voter == claim.voter);
        let at = known.as_ref().map(|known| known.peer.clone());
        let at = at.or_else(|| record.map(|record| record.peer.clone())).unwrap_or_default();
        if let Some(why) = other_process(&at, &claim).await {
            return Answer::Conflict { why };
        }
        // Before anything else: a copy of a running node's folder that is also older must not take that node's place as one
        // that was rolled back.
        let leads = inside.coordinator.group().leader().is_some();
        if leads && !at.is_empty() && at != claim.peer && record.is_some_and(|record| view.is_running(record))
        {
            let why = format!("the lease of node {node} at {at} has not ended");
            return Answer::Leased { why };
        }
        if let Some(why) = rolled_back(inside, known.as_ref(), &claim).filter(|_| !claim.forced) {
            let quorum = tokio::time::timeout(QUORUM, inside.coordinator.linearizable()).await;
            return Answer::RolledBack { why, quorum: matches!(quorum, Ok(Ok(()))) };
        }
        let mut run = run_of(&claim);
        if let Some(known) = known.filter(|_| !claim.forced) {
            run.index = run.index.max(known.index);
        }
        match store_run(self.data(), claim.voter, run).await {
            Ok(true) => confirmed(inside),
            Ok(false) => Answer::Later { why: "another claim of the same run came first".to_owned() },
            Err(why) => Answer::Later { why },
        }
    }
}

fn run_of(claim: &Claim) -> KnownRun {
    KnownRun {
        run: claim.run,
        nonce: claim.nonce.clone(),
        peer: claim.peer.clone(),
        index: claim.settled.min(claim.last_index),
    }
}

fn confirmed(inside: &Inside) -> Answer {
    let group = inside.coordinator.group();
    let voters = group.metrics().voters.into_iter();
    let voters = voters.map(|member| Reached { voter: member.id.0, address: member.address }).collect();
    Answer::Confirmed { voters, index: group.last_index().unwrap_or(0) }
}

/// Says which process serves under the identity of the claim, if there is another one.
async fn other_process(at: &str, claim: &Claim) -> Option<String> {
    if at.is_empty() {
        return None;
    }
    let there = greet(at, PROBE).await.ok()?;
    let same = there.directory_id == claim.directory_id && there.voter == claim.voter;
    (same && !there.run_nonce.is_empty() && there.run_nonce != claim.nonce).then(|| {
        format!("node {} is running at {at} (run {}) with the same data directory", there.node_id, there.run)
    })
}

/// What shows that the folder was put back from an older copy.
fn rolled_back(inside: &Inside, known: Option<&KnownRun>, claim: &Claim) -> Option<String> {
    if let Some(known) = known.filter(|known| known.outdates(&run_of(claim))) {
        return Some(format!(
            "it claims run {}, but run {} of node {} was confirmed before",
            claim.run, known.run, claim.node_id
        ));
    }
    let mark = records::mark_of(&inside.coordinator, claim.node_id).filter(|mark| mark.voter == claim.voter);
    let index = mark.map_or(0, |mark| mark.index).max(known.map_or(0, |known| known.index));
    (claim.last_index < index).then(|| {
        format!(
            "its Raft log ends at entry {}, but node {} had entry {index} on stable storage",
            claim.last_index, claim.node_id
        )
    })
}
