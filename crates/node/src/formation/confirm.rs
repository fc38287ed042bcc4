//! Confirmation of the runs of other members: checks that a claim comes from the newest state of a voter's data
//! directory.
//!
//! Reasons for a rejection, in this order:
//! - the voter was removed, or another process with its identity answers at the last known address;
//! - the last known address differs, and the member lease of that run has not expired yet;
//! - this data directory has confirmed the same run number with another nonce, or a higher run number, or a durability
//!   mark names a later Raft entry: the claiming data directory was restored from an older copy.
//!
//! A restart claims a higher run from the same address and is confirmed at once. A confirmed run is on stable storage
//! before the response is sent.

use std::time::Duration;

use moim_raft::VoterId;

use super::claim::store_run;
use super::join_server::{ClusterAccess, JoinServer};
use super::protocol::{Claim, FormationResponse, VoterAddress, fetch_card};
use crate::control::records;
use crate::control::view::View;
use crate::data_dir::KnownRun;

/// Timeout of the probe for another process with the same identity.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout of the quorum check.
const QUORUM_TIMEOUT: Duration = Duration::from_secs(1);

impl JoinServer {
    /// Confirms or rejects the claim of a voter, over a connection authenticated as that voter.
    pub(super) async fn confirm(&self, peer: Option<VoterId>, claim: Claim) -> FormationResponse {
        if peer.is_none_or(|peer| peer.0 != claim.voter) {
            let why = "claim rejected: the connection is not authenticated as this voter".to_owned();
            return FormationResponse::Later { why };
        }
        let Some(access) = self.cluster_access() else {
            return FormationResponse::Later { why: "this node is still starting".to_owned() };
        };
        let (node, view) = (claim.node_id, View::of(&access.coordinator));
        if claim.voter == self.identity().voter {
            return FormationResponse::Conflict { why: format!("node {node} runs at {}", self.card().peer) };
        }
        if view.is_out(node, claim.voter, &claim.directory_id) {
            let why = format!("this data directory was node {node} and was removed or replaced since");
            return FormationResponse::Conflict { why };
        }
        let known = self.known_run(claim.voter);
        let record = view.node(node).filter(|record| record.voter == claim.voter);
        let last_address = known.as_ref().map(|known| known.peer.clone());
        let last_address =
            last_address.or_else(|| record.map(|record| record.peer.clone())).unwrap_or_default();
        if let Some(why) = other_process(&last_address, &claim).await {
            return FormationResponse::Conflict { why };
        }
        // Before the rollback check: an older copy of a running node's data directory must not replace that node as
        // rolled back.
        let has_leader = access.coordinator.group().leader().is_some();
        let has_moved = !last_address.is_empty() && last_address != claim.peer;
        if has_leader && has_moved && record.is_some_and(|record| view.is_running(record)) {
            let why = format!("the lease of node {node} at {last_address} has not expired");
            return FormationResponse::Leased { why };
        }
        if let Some(why) = rollback_evidence(access, known.as_ref(), &claim).filter(|_| !claim.forced) {
            let quorum = tokio::time::timeout(QUORUM_TIMEOUT, access.coordinator.linearizable()).await;
            return FormationResponse::RolledBack { why, quorum: matches!(quorum, Ok(Ok(()))) };
        }
        let mut run = run_of(&claim);
        if let Some(known) = known.filter(|_| !claim.forced) {
            run.index = run.index.max(known.index);
        }
        match store_run(self.data(), claim.voter, run).await {
            Ok(true) => confirmation(access),
            Ok(false) => {
                FormationResponse::Later { why: "another claim of the same run came first".to_owned() }
            }
            Err(why) => FormationResponse::Later { why },
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

fn confirmation(access: &ClusterAccess) -> FormationResponse {
    let group = access.coordinator.group();
    let voters = group.metrics().voters.into_iter();
    let voters = voters.map(|member| VoterAddress { voter: member.id.0, address: member.address }).collect();
    FormationResponse::Confirmed { voters, index: group.last_index().unwrap_or(0) }
}

/// Describes another process that serves under the identity of the claim, if there is one.
async fn other_process(address: &str, claim: &Claim) -> Option<String> {
    if address.is_empty() {
        return None;
    }
    let card = fetch_card(address, PROBE_TIMEOUT).await.ok()?;
    let same = card.directory_id == claim.directory_id && card.voter == claim.voter;
    (same && !card.run_nonce.is_empty() && card.run_nonce != claim.nonce).then(|| {
        let (node, run) = (card.node_id, card.run);
        format!("node {node} is running at {address} (run {run}) with the same data directory")
    })
}

/// Evidence that the claiming data directory was restored from an older copy.
fn rollback_evidence(access: &ClusterAccess, known: Option<&KnownRun>, claim: &Claim) -> Option<String> {
    if let Some(known) = known.filter(|known| known.outdates(&run_of(claim))) {
        return Some(format!(
            "it claims run {}, but run {} of node {} was confirmed before",
            claim.run, known.run, claim.node_id
        ));
    }
    let mark = records::mark_of(&access.coordinator, claim.node_id).filter(|mark| mark.voter == claim.voter);
    let index = mark.map_or(0, |mark| mark.index).max(known.map_or(0, |known| known.index));
    (claim.last_index < index).then(|| {
        format!(
            "its Raft log ends at entry {}, but node {} had entry {index} on stable storage",
            claim.last_index, claim.node_id
        )
    })
}
