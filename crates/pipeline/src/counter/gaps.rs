//! What to do with a message whose predecessor was not counted.
//!
//! A client's messages stand in one partition, and the relay writes them in order, so a gap means one of four things. The relay
//! has failed to store the predecessor and sends everything from it on again: the message waits in the store, and leaving it
//! aside loses nothing. Or it has already sent them again, further on in the topic. Or the store went back (a failover of a store
//! that replicates asynchronously): the predecessor stands in the topic before the message, and is read again, from where the
//! store says that counting stopped; if that does not close the gap, from the beginning of the partition, once the gap has lasted
//! for a while or everything was read. Or the predecessor is gone: then the messages behind it go to the dead letters with the
//! reason, in that last reading.
//!
//! Invariant: when everything was read, a message is uncounted and no dead letter only while the gateway keeps it.
//!
//! Bounded: a gap is searched for three times at most ([`Search`]) until the client's last number changes. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::store::Standing;

/// So many clients with gaps are remembered; with more, searches are repeated.
const REMEMBERED: usize = 100_000;

/// How far a gap behind a client's last number has been searched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Search {
    last: u64,
    level: Level,
    /// In so many batches the gap was there.
    batches: u32,
    /// Everything was read, and reading from the beginning is the last thing to do: what is behind the gap is set aside.
    is_final: bool,
}

/// A gap that is there in so many batches is searched for from the beginning although not everything was read.
const LASTS: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// Nowhere.
    Nothing,
    /// From the client's position in the store.
    Position,
    /// From the beginning of the partition.
    Beginning,
}

/// What becomes of the messages of a client that stand behind a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// The gateway sends them again.
    Leave,
    /// The partition is read again from this offset.
    Reread(i64),
    /// Their predecessor is not to be had: to the dead letters with them.
    Park,
}

/// What a counter remembers of gaps.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    searched: HashMap<String, Search>,
    /// The last number of each client that was seen counted.
    counted: HashMap<String, u64>,
    /// Clients that were behind the queue when an idle counter last looked: last number, stored.
    suspects: HashMap<String, (u64, u64)>,
    /// The same of clients for which reading again was of no use.
    given_up: HashMap<String, (u64, u64)>,
}

impl Gaps {
    /// Partitions have changed hands: another counter may have gone on meanwhile.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// A client's last number: a search for what follows another one is of no use any more.
    pub(super) fn on_standing(&mut self, client: &str, last: u64) {
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

    /// Decides about messages of a client with these numbers. `first` is the offset of the first of them.
    pub(super) fn decide(
        &mut self,
        client: &str,
        standing: &Standing,
        first: i64,
        numbers: &[u64],
    ) -> Decision {
        // Not in the queue for the gateway, and in the store: it goes out again.
        if numbers.iter().all(|sn| standing.stored < *sn && *sn <= standing.acked) {
            return Decision::Leave;
        }
        // No gateway ever had it, or the store has forgotten it: its predecessor may never have been sent.
        if numbers.iter().all(|sn| *sn > standing.stored) {
            return Decision::Park;
        }
        let search = self.search_of(client, standing.last);
        search.batches += 1;
        let (level, is_final, batches) = (search.level, search.is_final, search.batches);
        let from = standing.offset.map(|offset| offset + 1).filter(|from| *from < first);
        match level {
            _ if is_final => Decision::Park,
            Level::Nothing if from.is_some() => {
                search.level = Level::Position;
                Decision::Reread(from.unwrap_or(0))
            }
            Level::Nothing | Level::Position if batches > LASTS => {
                search.level = Level::Beginning;
                Decision::Reread(0)
            }
            Level::Nothing | Level::Position | Level::Beginning => Decision::Leave,
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

    /// An idle counter looks at the clients of its partitions: those whose messages are all in the queue, have been read, and
    /// are not counted. Each has to be found twice before its partition is read again. Answers from where, by partition, and
    /// the clients for which that was of no use.
    ///
    /// `settled`: what was passed on of these is committed. Only then can a message be counted in a batch in which it stands
    /// before its predecessor, so only then is a reading the last one.
    pub(super) fn behind(
        &mut self,
        clients: &[(String, i32, Standing)],
        settled: &HashSet<&str>,
    ) -> (BTreeMap<i32, i64>, Vec<(String, u64)>) {
        let (mut rereads, mut blocked) = (BTreeMap::<i32, i64>::new(), Vec::new());
        let mut suspects = HashMap::new();
        for (client, partition, standing) in clients {
            self.on_standing(client, standing.last);
            let counted = self.counted.get(client).copied().unwrap_or(0);
            if standing.last >= standing.stored.max(counted) {
                continue;
            }
            let seen = (standing.last, standing.stored);
            if self.given_up.get(client) == Some(&seen) {
                continue;
            }
            if self.suspects.get(client) != Some(&seen) {
                suspects.insert(client.clone(), seen);
                continue;
            }
            let search = self.search_of(client, standing.last);
            let from = match (search.level, standing.offset) {
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
                    // A count that was only remembered may have been that of a run that was cleaned up.
                    self.counted.remove(client);
                    self.given_up.insert(client.clone(), seen);
                    if standing.last < standing.stored {
                        blocked.push((client.clone(), standing.last + 1));
                    }
                    continue;
                }
            }
            suspects.insert(client.clone(), seen);
        }
        self.suspects = suspects;
        (rereads, blocked)
    }

    /// The clients that an idle counter found behind when it last looked.
    pub(super) fn suspects(&self) -> HashSet<&str> {
        self.suspects.keys().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(last: u64, offset: Option<i64>, stored: u64, acked: u64) -> Standing {
        Standing { last, offset, stored, acked }
    }

    #[test]
    fn a_gap_is_searched_for_from_near_to_far_and_then_given_up() {
        let mut gaps = Gaps::default();
        // The gateway has 7 to 9 and has not heard of them: it sends them again.
        assert_eq!(gaps.decide("c", &standing(5, Some(40), 6, 9), 50, &[7, 8]), Decision::Leave);
        // 7 went through, says the gateway: so did 6. It stands before, or further on.
        let here = standing(5, Some(40), 7, 9);
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Reread(41));
        for _ in 1..LASTS {
            assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Leave);
        }
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Reread(0));
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Leave);
        // It moved, and went back: that is another gap.
        gaps.on_standing("c", 6);
        assert_eq!(gaps.decide("c", &here, 50, &[7, 8]), Decision::Reread(41));
        // Nothing stands between.
        assert_eq!(gaps.decide("d", &standing(5, Some(49), 7, 9), 50, &[7]), Decision::Leave);
        assert_eq!(gaps.decide("e", &standing(5, None, 7, 9), 50, &[7]), Decision::Leave);
        // A number that no gateway knows is no reason to read anything again.
        assert_eq!(gaps.decide("f", &standing(0, None, 0, 0), 50, &[7]), Decision::Park);
    }

    #[test]
    fn an_idle_counter_reads_again_only_for_clients_that_stay_behind() {
        let mut gaps = Gaps::default();
        let settled = HashSet::from(["c"]);
        let behind = |last, stored| vec![("c".to_owned(), 3, standing(last, Some(40), stored, stored))];
        let nothing = (BTreeMap::new(), Vec::new());
        assert_eq!(gaps.behind(&behind(5, 7), &settled), nothing, "it may not have been read yet");
        assert_eq!(gaps.behind(&behind(6, 7), &settled), nothing, "it moved");
        assert_eq!(gaps.behind(&behind(6, 7), &settled).0, [(3, 41)].into());
        let here = standing(6, Some(40), 8, 8);
        assert_eq!(gaps.decide("c", &here, 50, &[8]), Decision::Leave, "it may stand further on");
        assert_eq!(gaps.behind(&behind(6, 7), &settled).0, [(3, 0)].into());
        assert_eq!(gaps.decide("c", &here, 50, &[8]), Decision::Park, "everything was read");
        assert_eq!(gaps.behind(&behind(6, 7), &settled).1, [("c".to_owned(), 7)]);
        assert_eq!(gaps.behind(&behind(6, 7), &settled), nothing, "once is enough");
        assert!(gaps.suspects().is_empty());
        assert_eq!(gaps.behind(&behind(7, 7), &settled), nothing);
        // While another counter's work may not be committed, no reading is the last.
        let mut gaps = Gaps::default();
        assert_eq!(gaps.behind(&behind(6, 8), &HashSet::new()), nothing);
        for (settled, from) in [(HashSet::new(), 41), (HashSet::new(), 0), (settled, 0)] {
            assert_eq!(gaps.behind(&behind(6, 8), &settled).0, [(3, from)].into());
            let parks = gaps.decide("c", &here, 50, &[8]) == Decision::Park;
            assert_eq!(parks, !settled.is_empty());
        }
    }
}
