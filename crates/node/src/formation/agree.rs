//! How founders agree on a cluster, as a pure decision.
//!
//! Every founder asks all the others until each has the same list of (node, data folder, address). From that list
//! follow the cluster id and everybody's voter id, so there is nothing to vote on. A founder acts on the list only when
//! it has shown it and *every* other one has shown it the same list, and writes it down before it acts; from then on it shows no other.
//! So two lists can never both be acted on: each needs the word of all, and nobody gives it twice.
//!
//! A founder that was away when the others acted (it crashed in between) finds itself in their list, by its folder's
//! id, and acts on it too. A folder that is not in their list, although its node is, is a new and empty one: it must
//! not take the voter id of the lost one, because that may have voted. It waits for an operator's word.
//!
//! Limits: should two of three founders lose their folders after the third acted, that one waits for ever and its
//! folder has to be deleted too. Nothing was acknowledged by then.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use super::protocol::Card;
use crate::data_dir::{Admission, Founder, decode_id, encode_id};

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask again, for this reason. The founders seen so far are to be shown to the others.
    Wait { why: String, seen: Vec<Founder> },
    /// Everybody agrees, or the others did already: act on this list.
    Found(Vec<Founder>),
    /// There is a cluster that does not know this folder; the address of one of its nodes.
    Outside { cluster_id: String, address: String },
}

/// Decides, given the addresses of `--initial-cluster` and what the others last said.
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
        return Step::Outside { cluster_id: card.cluster_id.clone(), address };
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
        // The others act on what this one shows. One that acted on a list it never showed could die before anybody
        // heard of it, and come back to others that agreed on another.
        return wait("showing the others what was seen".to_owned());
    }
    Step::Found(seen)
}

fn seen_by(me: &Card, others: &BTreeMap<i32, Card>) -> Vec<Founder> {
    let mut seen: Vec<_> = others.values().map(Card::founder).chain([me.founder()]).collect();
    seen.sort_by_key(|founder| founder.node_id);
    seen
}

/// The cluster that these founders make: their random ids, mixed in order.
pub(super) fn cluster_of(founders: &[Founder]) -> String {
    let mixed = founders
        .iter()
        .map(|founder| decode_id(&founder.directory_id).unwrap_or(0))
        .fold(0_u128, |mixed, id| mixed.rotate_left(11) ^ id);
    encode_id(mixed.max(1))
}

/// The secret of that cluster: a digest of what each of them adds. Empty if one of them has nothing to add.
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

/// The voter id of a founder: its place, from 1.
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

    /// Three founders that see each other.
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
    fn founders_that_have_all_seen_the_same_act_on_it() {
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
    fn nobody_acts_before_all_have_seen_the_same() {
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
    fn nobody_acts_on_a_list_it_has_not_shown() {
        let mut cards = cards();
        let founders = cards[0].founders.clone();
        cards[0].founders.clear();
        let Step::Wait { seen, .. } = step(0, &cards) else { panic!("it acted") };
        assert_eq!(seen, founders);
        // The wait shows it; the next look may act.
        cards[0].founders = seen;
        assert_eq!(step(0, &cards), Step::Found(founders));
    }

    #[test]
    fn a_founder_that_was_away_finds_itself_in_the_list() {
        let mut cards = cards();
        let founders = cards[0].founders.clone();
        cards[0].admission = Admission::Member;
        cards[0].cluster_id = cluster_of(&founders);
        cards[1].founders.clear();
        assert_eq!(step(1, &cards), Step::Found(founders.clone()));

        // The same node with another folder is not the founder.
        cards[1].directory_id = encode_id(999);
        assert_eq!(
            step(1, &cards),
            Step::Outside { cluster_id: cluster_of(&founders), address: "h1:1".into() }
        );
    }

    #[test]
    fn the_cluster_id_depends_on_every_folder() {
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
    fn the_secret_depends_on_every_nonce_and_cannot_be_told_from_a_card() {
        let founders = cards()[0].founders.clone();
        let secret = secret_of(&founders);
        assert_eq!(secret.len(), 22);
        for at in 0..3 {
            let mut other = founders.clone();
            other[at].nonce = encode_id(7);
            assert_ne!(secret_of(&other), secret);
            other[at].nonce.clear();
            assert_eq!(secret_of(&other), "", "a folder from before there were secrets");
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
