//! Agreement of the founders on a cluster: a pure decision.
//!
//! Every founder fetches the cards of all others until all have the same list of (node id, directory id, address). The
//! list determines the cluster id and all voter ids, so there is nothing to vote on. A founder commits to a list only
//! after it has published the list in its card and *every* other founder has published the same list. It records the
//! list before it takes effect, and publishes no other list afterwards. So two lists can never both be committed: each
//! needs all founders, and no founder commits twice.
//!
//! A founder that was down when the others committed finds its directory id in their list and commits to it too. A data
//! directory that is not in their list, although its node id is, is a new and empty one: it must not take the voter id
//! of the lost one, which may have voted. It waits for an operator.
//!
//! Limits: if two of three founders lose their data directories after the third committed, the third waits for ever,
//! and its data directory has to be deleted too. Nothing was acknowledged by then.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use super::protocol::Card;
use crate::data_dir::{Admission, Founder, decode_id, encode_id};

/// The next step of a founder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Try again, for this reason. The founders seen so far are to be published in the card.
    Wait { why: String, seen: Vec<Founder> },
    /// All founders agree, or the others have committed already: commit to this list.
    Found(Vec<Founder>),
    /// A cluster exists whose founders do not include this data directory; the address of one of its nodes.
    ClusterExists { cluster_id: String, address: String },
}

/// Decides the next step from the addresses of `--initial-cluster` and the last cards of the other founders.
pub(super) fn decide(me: &Card, listed: &BTreeMap<i32, String>, others: &BTreeMap<i32, Card>) -> Step {
    for (node_id, card) in others {
        if card.admission == Admission::New {
            continue;
        }
        let mine =
            |founder: &Founder| founder.node_id == me.node_id && founder.directory_id == me.directory_id;
        if card.founders.iter().any(mine) {
            return Step::Found(card.founders.clone());
        }
        let address = listed.get(node_id).cloned().unwrap_or_else(|| card.peer.clone());
        return Step::ClusterExists { cluster_id: card.cluster_id.clone(), address };
    }
    let seen = seen_by(me, others);
    let wait = |why: String| Step::Wait { why, seen: seen.clone() };
    if let Some((node_id, address)) =
        listed.iter().find(|(node_id, _)| **node_id != me.node_id && !others.contains_key(node_id))
    {
        return wait(format!("waiting for founder {node_id} at {address}"));
    }
    for (node_id, card) in others {
        if !card.listed.iter().copied().eq(listed.keys().copied()) {
            return wait(format!("node {node_id} was started with another --initial-cluster"));
        }
        if card.founders != seen {
            return wait(format!("agreeing with node {node_id}"));
        }
    }
    if me.founders != seen {
        // The other founders commit to what this one publishes. A founder that committed to an unpublished list could
        // crash before another founder saw it, and restart after the others agreed on another list.
        return wait("publishing the list of founders".to_owned());
    }
    Step::Found(seen)
}

fn seen_by(me: &Card, others: &BTreeMap<i32, Card>) -> Vec<Founder> {
    let mut seen: Vec<_> = others.values().map(Card::founder).chain([me.founder()]).collect();
    seen.sort_by_key(|founder| founder.node_id);
    seen
}

/// Cluster id of these founders: their random directory ids, mixed in order.
pub(super) fn cluster_of(founders: &[Founder]) -> String {
    let mixed = founders
        .iter()
        .map(|founder| decode_id(&founder.directory_id).unwrap_or(0))
        .fold(0_u128, |mixed, id| mixed.rotate_left(11) ^ id);
    encode_id(mixed.max(1))
}

/// Cluster secret of these founders: a digest of their nonces. Empty if one of them has no nonce.
pub(super) fn secret_of(founders: &[Founder]) -> String {
    let mut digest = Sha256::new();
    for founder in founders {
        let Some(nonce) = decode_id(&founder.nonce) else { return String::new() };
        digest.update(nonce.to_be_bytes());
    }
    let mut secret = [0; 16];
    secret.copy_from_slice(&digest.finalize()[..16]);
    encode_id(u128::from_be_bytes(secret).max(1))
}

/// Voter id of a founder: its position in the list, from 1.
pub(super) fn voter_of(founders: &[Founder], node_id: i32) -> Option<u64> {
    founders.iter().zip(1..).find(|(founder, _)| founder.node_id == node_id).map(|(_, voter)| voter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(node_id: i32, directory: u128) -> Card {
        Card {
            node_id,
            directory_id: encode_id(directory),
            peer: format!("h{node_id}:1"),
            listed: vec![1, 2, 3],
            nonce: encode_id(directory + 1_000),
            ..Card::default()
        }
    }

    fn listed() -> BTreeMap<i32, String> {
        (1..=3).map(|id| (id, format!("h{id}:1"))).collect()
    }

    /// Three founders that have published the same list.
    fn cards() -> Vec<Card> {
        let mut cards: Vec<_> = (1..=3).map(|id| card(id, 100 + id as u128)).collect();
        let all: Vec<_> = cards.iter().map(Card::founder).collect();
        for card in &mut cards {
            card.founders = all.clone();
        }
        cards
    }

    fn step(me: usize, cards: &[Card]) -> Step {
        let others = cards
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != me)
            .map(|(_, card)| (card.node_id, card.clone()));
        decide(&cards[me], &listed(), &others.collect())
    }

    #[test]
    fn founders_commit_when_all_have_published_the_same_list() {
        let cards = cards();
        let founders = cards[0].founders.clone();
        for me in 0..3 {
            assert_eq!(step(me, &cards), Step::Found(founders.clone()));
        }
        assert_eq!(
            (voter_of(&founders, 1), voter_of(&founders, 3), voter_of(&founders, 4)),
            (Some(1), Some(3), None)
        );
    }

    #[test]
    fn founder_waits_until_all_have_published_the_same_list() {
        let mut cards = cards();
        cards[2].founders.pop();
        let Step::Wait { why, seen } = step(0, &cards) else { panic!() };
        assert_eq!((why.as_str(), seen.len()), ("agreeing with node 3", 3));
        let missing = decide(&cards[0], &listed(), &[(2, cards[1].clone())].into());
        assert!(matches!(missing, Step::Wait { why, .. } if why == "waiting for founder 3 at h3:1"));
        cards[2].listed = vec![1, 3];
        assert!(
            matches!(step(0, &cards), Step::Wait { why, .. } if why.contains("another --initial-cluster"))
        );
    }

    #[test]
    fn founder_does_not_commit_to_an_unpublished_list() {
        let mut cards = cards();
        let founders = cards[0].founders.clone();
        cards[0].founders.clear();
        let Step::Wait { seen, .. } = step(0, &cards) else { panic!("committed to an unpublished list") };
        assert_eq!(seen, founders);
        // The wait publishes the list; the next round may commit.
        cards[0].founders = seen;
        assert_eq!(step(0, &cards), Step::Found(founders));
    }

    #[test]
    fn founder_that_was_down_commits_to_the_list_of_the_others() {
        let mut cards = cards();
        let founders = cards[0].founders.clone();
        cards[0].admission = Admission::Member;
        cards[0].cluster_id = cluster_of(&founders);
        cards[1].founders.clear();
        assert_eq!(step(1, &cards), Step::Found(founders.clone()));

        // The same node id with another data directory is not the founder.
        cards[1].directory_id = encode_id(999);
        assert_eq!(
            step(1, &cards),
            Step::ClusterExists { cluster_id: cluster_of(&founders), address: "h1:1".into() }
        );
    }

    #[test]
    fn cluster_id_depends_on_every_directory_id() {
        let founders = cards()[0].founders.clone();
        let cluster = cluster_of(&founders);
        assert_eq!(cluster.len(), 22);
        for at in 0..3 {
            let mut other = founders.clone();
            other[at].directory_id = encode_id(7);
            assert_ne!(cluster_of(&other), cluster);
        }
    }

    #[test]
    fn secret_depends_on_every_nonce_and_is_not_in_a_card() {
        let founders = cards()[0].founders.clone();
        let secret = secret_of(&founders);
        assert_eq!(secret.len(), 22);
        for at in 0..3 {
            let mut other = founders.clone();
            other[at].nonce = encode_id(7);
            assert_ne!(secret_of(&other), secret);
            other[at].nonce.clear();
            assert_eq!(secret_of(&other), "", "a data directory without a nonce");
        }
        let identity = crate::data_dir::Identity {
            format: crate::data_dir::FORMAT,
            cluster_id: cluster_of(&founders),
            node_id: 1,
            incarnation: 1,
            directory_id: founders[0].directory_id.clone(),
            voter: 1,
            admission: Admission::Founding,
            founders: founders.clone(),
            nonce: founders[0].nonce.clone(),
            secret: secret.clone(),
            ..crate::data_dir::Identity::default()
        };
        let card = Card::default().with_identity(&identity);
        let shown = serde_json::to_string(&card).unwrap();
        assert!(founders.iter().all(|founder| !shown.contains(&founder.nonce)), "{shown}");
        assert!(!shown.contains(&secret), "{shown}");
    }
}
