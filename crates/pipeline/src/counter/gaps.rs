//! Handling of a sequence gap: a message whose predecessor was not counted.
//!
//! A client's messages stand in one partition, and the relay writes them in order, so a gap has one of four causes.
//! (1) The relay failed to produce the predecessor and resends everything from it on: the message is still in the
//! store, and skipping it loses nothing. (2) The relay has already resent the messages, further on in the topic. (3)
//! The store has lost writes (a failover of a store with asynchronous replication): the predecessor stands earlier in
//! the topic, and is re-read from the position where, according to the store, counting stopped. If that does not
//! close the gap, the partition is re-read from its beginning, once the gap has lasted for a while or everything was
//! read. (4) The predecessor is lost: the messages behind the gap go to the dead-letter topic with the reason, during
//! that last re-read.
//!
//! Invariant: when everything was read, a message is neither counted nor dead-lettered only while the gateway keeps
//! it.
//!
//! Bounded: a gap is searched at most three times ([`Search`]) until the client's last sequence number changes. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::store::CountState;

/// Number of clients with gaps to remember; beyond it, searches are repeated.
const REMEMBERED: usize = 100_000;

/// State of the search for the gap after a client's last sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Search {
    last: u64,
    level: Level,
    /// Number of batches in which the gap was present.
    batches: u32,
    /// Everything was read, and the re-read from the beginning is the final attempt: messages behind the gap are
    /// dead-lettered.
    is_final: bool,
}

/// A gap present in this many batches is searched from the beginning, even if not everything was read.
const MAX_GAP_BATCHES: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// No re-read yet.
    Nothing,
    /// Re-read from the client's position in the store.
    Position,
    /// Re-read from the beginning of the partition.
    Beginning,
}

/// What happens to a client's messages behind a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Skip them: the gateway resends them.
    Skip,
    /// Re-read the partition from this offset.
    Reread(i64),
    /// Their predecessor is lost: write them to the dead-letter topic.
    Park,
}

/// A counter's memory of gaps.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    searched: HashMap<String, Search>,
    /// The last counted sequence number seen for each client.
    counted: HashMap<String, u64>,
    /// Clients that were behind the queue at the last idle check: last counted, stored.
    suspects: HashMap<String, (u64, u64)>,
    /// The same for clients for which re-reading did not help.
    given_up: HashMap<String, (u64, u64)>,
}

impl Gaps {
    /// Clears everything after a rebalance: another counter may have made progress meanwhile.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Takes a client's last counted sequence number. A search for a gap after another number becomes obsolete.
    pub(super) fn on_count_state(&mut self, client: &str, last: u64) {
        if self.searched.get(client).is_some_and(|search| search.last != last) {
            self.searched.remove(client);
        }
        if self.counted.len() >= REMEMBERED {
            self.counted.clear();
        }
        match self.counted.get_mut(client) {
            Some(counted) => *counted = last.max(*counted),
            None => drop(self.counted.insert(client.to_owned(), last)),
        }
    }

    /// Decides about a client's messages with these sequence numbers. `first` is the offset of the first of them.
    pub(super) fn decide(
        &mut self,
        client: &str,
        count_state: &CountState,
        first: i64,
        numbers: &[u64],
    ) -> Decision {
        // Unconfirmed by the queue, and kept in the store: the gateway resends it.
        if numbers.iter().all(|sn| count_state.stored < *sn && *sn <= count_state.acked) {
            return Decision::Skip;
        }
        // No gateway ever had it, or the store has lost it: its predecessor may never have been sent.
        if numbers.iter().all(|sn| *sn > count_state.stored) {
            return Decision::Park;
        }
        let search = self.search_of(client, count_state.last);
        search.batches += 1;
        let (level, is_final, batches) = (search.level, search.is_final, search.batches);
        let from = count_state.offset.map(|offset| offset + 1).filter(|from| *from < first);
        match level {
            _ if is_final => Decision::Park,
            Level::Nothing if from.is_some() => {
                search.level = Level::Position;
                Decision::Reread(from.unwrap_or(0))
            }
            Level::Nothing | Level::Position if batches > MAX_GAP_BATCHES => {
                search.level = Level::Beginning;
                Decision::Reread(0)
            }
            Level::Nothing | Level::Position | Level::Beginning => Decision::Skip,
        }
    }

    fn search_of(&mut self, client: &str, last: u64) -> &mut Search {
        if self.searched.len() >= REMEMBERED {
            self.searched.clear();
        }
        let fresh = Search { last, level: Level::Nothing, batches: 0, is_final: false };
        let search = self.searched.entry(client.to_owned()).or_insert(fresh);
        if search.last != last {
            *search = fresh;
        }
        search
    }

    /// Idle check of the clients of the assigned partitions: finds clients whose messages are all in the queue and
    /// read, but not counted. Each must be found twice before its partition is re-read. Returns the offsets to
    /// re-read from, by partition, and the clients for which re-reading did not help.
    ///
    /// `settled`: clients whose forwarded messages are committed. Only then can a message be counted in a
    /// batch in which it stands before its predecessor, so only then can a re-read be the final one.
    pub(super) fn find_behind(
        &mut self,
        clients: &[(String, i32, CountState)],
        settled: &HashSet<&str>,
    ) -> (BTreeMap<i32, i64>, Vec<(String, u64)>) {
        let (mut rereads, mut blocked) = (BTreeMap::<i32, i64>::new(), Vec::new());
        let mut suspects = HashMap::new();
        for (client, partition, count_state) in clients {
            self.on_count_state(client, count_state.last);
            let counted = self.counted.get(client).copied().unwrap_or(0);
            if count_state.last >= count_state.stored.max(counted) {
                continue;
            }
            let seen = (count_state.last, count_state.stored);
            if self.given_up.get(client) == Some(&seen) {
                continue;
            }
            if self.suspects.get(client) != Some(&seen) {
                suspects.insert(client.clone(), seen);
                continue;
            }
            let search = self.search_of(client, count_state.last);
            let from = match (search.level, count_state.offset) {
                (Level::Nothing, Some(offset)) => {
                    search.level = Level::Position;
                    Some(offset + 1)
                }
                (level, _) if !search.is_final => {
                    search.is_final = settled.contains(client.as_str()) || level == Level::Beginning;
                    search.level = Level::Beginning;
                    Some(0)
                }
                _ => None,
            };
            match from {
                Some(from) => {
                    let first = rereads.entry(*partition).or_insert(from);
                    *first = from.min(*first);
                }
                None => {
                    // The remembered count may belong to an earlier run that was wiped.
                    self.counted.remove(client);
                    self.given_up.insert(client.clone(), seen);
                    if count_state.last < count_state.stored {
                        blocked.push((client.clone(), count_state.last + 1));
                    }
                    continue;
                }
            }
            suspects.insert(client.clone(), seen);
        }
        self.suspects = suspects;
        (rereads, blocked)
    }

    /// The clients found behind at the last idle check.
    pub(super) fn suspects(&self) -> HashSet<&str> {
        self.suspects.keys().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_state(last: u64, offset: Option<i64>, stored: u64, acked: u64) -> CountState {
        CountState { last, offset, stored, acked }
    }

    #[test]
    fn gap_is_searched_from_the_position_then_the_beginning_then_dead_lettered() {
        let mut gaps = Gaps::default();
        // The gateway has 7 to 9 without a delivery report: it resends them.
        assert_eq!(gaps.decide("c", &count_state(5, Some(40), 6, 9), 50, &[7, 8]), Decision::Skip);
        // The gateway has a delivery report for 7, hence for 6 as well: 6 stands earlier, or further on.
        let here = count_state(5, Some(40), 7, 9);
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Reread(41));
        for _ in 1..MAX_GAP_BATCHES {
            assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Skip);
        }
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Reread(0));
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Skip);
        // The count advanced and went back: that is a new gap.
        gaps.on_count_state("c", 6);
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Reread(41));
        // There is no offset between them.
        assert_eq!(gaps.decide("d", &count_state(5, Some(49), 7, 9), 50, &[7]), Decision::Skip);
        assert_eq!(gaps.decide("e", &count_state(5, None, 7, 9), 50, &[7]), Decision::Skip);
        // A sequence number that no gateway knows causes no re-read.
        assert_eq!(gaps.decide("f", &count_state(0, None, 0, 0), 50, &[7]), Decision::Park);
    }

    #[test]
    fn idle_check_rereads_only_for_clients_that_stay_behind() {
        let mut gaps = Gaps::default();
        let settled = HashSet::from(["c"]);
        let find_behind =
            |last, stored| vec![("c".to_owned(), 3, count_state(last, Some(40), stored, stored))];
        let nothing = (BTreeMap::new(), Vec::new());
        assert_eq!(gaps.find_behind(&find_behind(5, 7), &settled), nothing, "it may not have been read yet");
        assert_eq!(gaps.find_behind(&find_behind(6, 7), &settled), nothing, "it moved");
        assert_eq!(gaps.find_behind(&find_behind(6, 7), &settled).0, [(3, 41)].into());
        let here = count_state(6, Some(40), 8, 8);
        assert_eq!(gaps.decide("c", &here, 50, &[8]), Decision::Skip, "it may stand further on");
        assert_eq!(gaps.find_behind(&find_behind(6, 7), &settled).0, [(3, 0)].into());
        assert_eq!(gaps.decide("c", &here, 50, &[8]), Decision::Park, "everything was read");
        assert_eq!(gaps.find_behind(&find_behind(6, 7), &settled).1, [("c".to_owned(), 7)]);
        assert_eq!(gaps.find_behind(&find_behind(6, 7), &settled), nothing, "once is enough");
        assert!(gaps.suspects().is_empty());
        assert_eq!(gaps.find_behind(&find_behind(7, 7), &settled), nothing);
        // While another counter's transaction may be uncommitted, no re-read is the final one.
        let mut gaps = Gaps::default();
        assert_eq!(gaps.find_behind(&find_behind(6, 8), &HashSet::new()), nothing);
        for (settled, from) in [(HashSet::new(), 41), (HashSet::new(), 0), (settled, 0)] {
            assert_eq!(gaps.find_behind(&find_behind(6, 8), &settled).0, [(3, from)].into());
            let parks = gaps.decide("c", &here, 50, &[8]) == Decision::Park;
            assert_eq!(parks, !settled.is_empty());
        }
    }
}
