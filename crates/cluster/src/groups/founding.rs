//! Group bootstrap: the agreement of the founders.
//!
//! Every founder queries the identity of every other one. When all have exchanged their folders, the list is
//! persisted and the group is bootstrapped from it; a bootstrapped founder shows the list. A founder that
//! finds its own folder in a bootstrapped list uses that list, too; one that finds a list without its folder
//! was a member before and lost its data: it must not vote.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_raft::{BoxFuture, Service, visit};
use serde::{Deserialize, Serialize};

use super::identity::{Founder, Identity};
use super::join::JoinCall;
use super::{GroupConfig, GroupError, GroupPeer, Port};
use crate::backoff::Backoff;

/// The state that a founder shows to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FounderState {
    pub(super) app: String,
    pub(super) node_id: String,
    pub(super) directory: String,
    /// The list it bootstrapped from, with nonces for a founder that showed its own; empty before.
    pub(super) acted: Vec<Founder>,
    /// Its part of the group's secret, before the bootstrap.
    #[serde(default)]
    pub(super) nonce: String,
    /// The group's secret, for a founder that showed its own part of it.
    #[serde(default)]
    pub(super) secret: Option<String>,
}

/// Serves this founder's state to the others until they agree.
struct FounderService(Mutex<FounderState>);

impl Service for FounderService {
    fn handle(&self, _request: Bytes) -> BoxFuture<'_, Bytes> {
        let shown = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let shown = serde_json::to_vec(&shown).expect("plain data encodes as JSON");
        Box::pin(async move { shown.into() })
    }
}

/// Returns the identity of this member, once all founders agree.
pub(super) async fn agree(
    config: &GroupConfig,
    port: &Port,
    peers: &[GroupPeer],
    begun: Option<Identity>,
) -> Result<Identity, GroupError> {
    let mut identity = match begun {
        Some(identity) => identity,
        None => {
            let identity = Identity::new(config);
            identity.save(config)?;
            identity
        }
    };
    let shown = FounderState {
        app: config.app.clone(),
        node_id: config.node_id.clone(),
        directory: identity.directory.clone(),
        acted: Vec::new(),
        nonce: identity.nonce.clone(),
        secret: None,
    };
    port.port.register_join_service(&config.app, Arc::new(FounderService(Mutex::new(shown))));
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(200));
    let (list, secret) = loop {
        let mut list: Vec<Founder> = Vec::new();
        let mut acted: Option<(Vec<Founder>, Option<String>)> = None;
        let mut sorted: Vec<&GroupPeer> = peers.iter().collect();
        sorted.sort_by(|a, b| a.node_id.cmp(&b.node_id));
        for (at, peer) in sorted.iter().enumerate() {
            let voter = at as u64 + 1;
            let drawn = if peer.node_id == config.node_id {
                Some((identity.directory.clone(), identity.nonce.clone()))
            } else {
                let seen = query_founder(&config.app, &identity.nonce, &peer.address)
                    .await
                    .filter(|seen| seen.app == config.app && seen.node_id == peer.node_id);
                if let Some(seen) = &seen
                    && !seen.acted.is_empty()
                    && acted.as_ref().is_none_or(|(_, secret)| secret.is_none())
                {
                    acted = Some((seen.acted.clone(), seen.secret.clone()));
                }
                seen.map(|seen| (seen.directory, seen.nonce))
            };
            if let Some((directory, nonce)) = drawn {
                let (node_id, address) = (peer.node_id.clone(), peer.address.clone());
                list.push(Founder { node_id, address, directory, voter, nonce });
            }
        }
        if let Some((acted, secret)) = acted {
            match secret {
                Some(secret) if acted.iter().any(|one| one.directory == identity.directory) => {
                    break (acted, secret);
                }
                _ => return Err(GroupError::BegunWithout(config.app.clone())),
            }
        }
        if list.len() == peers.len() {
            let secret = secret_of(&list);
            break (list, secret);
        }
        backoff.pause().await;
    };
    let own = list.iter().find(|one| one.directory == identity.directory);
    let own = own.ok_or_else(|| GroupError::Folder(format!("{} is not one of the peers", config.node_id)))?;
    identity.voter = own.voter;
    identity.cluster = format!("{:032x}", cluster_of(&config.app, &list));
    identity.founders = list;
    identity.secret = secret;
    identity.save(config)?;
    Ok(identity)
}

async fn query_founder(app: &str, nonce: &str, address: &str) -> Option<FounderState> {
    let question = JoinCall::Status { app: app.to_owned(), nonce: nonce.to_owned() };
    let question = serde_json::to_vec(&question).ok()?;
    let answer = visit(address, question.into(), Duration::from_secs(1)).await.ok()?;
    serde_json::from_slice(&answer).ok()
}

/// The group's secret is derived from the nonces of all founders; empty if one of them has none.
fn secret_of(founders: &[Founder]) -> String {
    let numbers = founders.iter().map(|one| u128::from_str_radix(&one.nonce, 16).ok());
    let mixed = numbers
        .zip(1u32..)
        .try_fold(0u128, |mixed, (number, at)| Some(mixed.rotate_left(11) ^ number?.rotate_left(at)));
    mixed.map_or_else(String::new, |mixed| format!("{:032x}", mixed.max(1)))
}

/// The group's cluster id is derived from its founders: no vote is needed.
fn cluster_of(app: &str, founders: &[Founder]) -> u128 {
    let mut text = app.to_owned();
    for one in founders {
        text.push_str(&one.directory);
    }
    (0..4u32).fold(0u128, |name, part| {
        (name << 32) | u128::from(crc32c::crc32c_append(part.wrapping_mul(0x9e37_79b9) + 1, text.as_bytes()))
    }) | 1
}
