//! The verdict as a pure function: compares what the sources say was sent, line by line, with what the sinks have
//! counted.
//!
//! Per client the source is the list of its lines (by hash) that gateways have accepted, and what the client says it
//! sent, with a digest. The sinks are the client's count and every text's count. Every difference is a loss, a
//! duplicate, or a message in flight; a message in flight must be found at a stage ([`Unread`]): at the client, at
//! its relay, or in a topic.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClientCounts, Messages, Observed, Unread, Verdict, WrongClient, WrongMessage};

/// Maximum number of messages and of clients that a verdict names.
pub const MAX_WRONG: usize = 100;

/// Computes the verdict. `expected_each` is how often every text was sent, if the caller knows it as well.
pub fn judge(observed: &Observed, expected_each: Option<u64>) -> Verdict {
    let mut builder = VerdictBuilder::new(observed);
    for (client, counts) in &observed.clients {
        builder.on_client(client, counts);
    }
    builder.on_texts(expected_each);
    builder.finish(expected_each)
}

/// Intermediate state of a verdict.
struct VerdictBuilder<'a> {
    observed: &'a Observed,
    /// Expected final count of each text.
    expected: BTreeMap<&'a str, u64>,
    /// Messages of each text that are in flight.
    in_flight_texts: BTreeMap<&'a str, u64>,
    /// Messages sent whose text is unknown.
    unknown: u64,
    in_flight: u64,
    texts_in_flight: u64,
    lost: [u64; 2],
    duplicated: [u64; 2],
    wrong_clients: Vec<WrongClient>,
    wrong: Vec<WrongMessage>,
    /// Messages are missing, and it is unknown whether they are in flight.
    is_open: bool,
}

impl<'a> VerdictBuilder<'a> {
    fn new(observed: &'a Observed) -> Self {
        let mut builder = Self {
            observed,
            expected: BTreeMap::new(),
            in_flight_texts: BTreeMap::new(),
            unknown: 0,
            in_flight: 0,
            texts_in_flight: 0,
            lost: [0; 2],
            duplicated: [0; 2],
            wrong_clients: Vec::new(),
            wrong: Vec::new(),
            is_open: false,
        };
        if let Some(unread) = &observed.unread {
            for (_, _, text) in &unread.clients {
                *builder.in_flight_texts.entry(text).or_default() += 1;
            }
            for (text, count) in &unread.texts {
                *builder.in_flight_texts.entry(text).or_default() += count;
            }
        }
        builder
    }

    fn unread(&self) -> Option<&'a Unread> {
        self.observed.unread.as_ref()
    }

    fn wrong_client(&mut self, client: &str, counts: &ClientCounts, detail: String) {
        let (client, counted) = (client.to_owned(), counts.counted);
        self.wrong_clients.push(WrongClient { client, counted, expected: counts.expected(), detail });
    }

    fn on_client(&mut self, client: &'a str, counts: &ClientCounts) {
        let done = counts.counted + counts.dead_lettered;
        if done != counts.last {
            let detail = format!(
                "the last message counted is {}, {} were counted and {} dead-lettered",
                counts.last, counts.counted, counts.dead_lettered
            );
            self.wrong_client(client, counts, detail);
            self.lost[0] += counts.last.saturating_sub(done);
            self.duplicated[0] += done.saturating_sub(counts.last);
        }
        if counts.last > counts.sent {
            let detail = format!("{} messages were sent, {} are counted", counts.sent, counts.last);
            self.wrong_client(client, counts, detail);
            self.duplicated[0] += counts.last - counts.sent;
        }
        if counts.acked > counts.sent {
            let detail = format!("{} messages were accepted of {} that were sent", counts.acked, counts.sent);
            self.wrong_client(client, counts, detail);
        }
        self.locate_in_flight(client, counts);
        self.expect(client, counts);
    }

    /// Finds the stage of each message of a client that was sent and not counted.
    fn locate_in_flight(&mut self, client: &'a str, counts: &ClientCounts) {
        let missing = counts.sent.saturating_sub(counts.last);
        if missing == 0 {
            return;
        }
        let Some(unread) = self.unread() else {
            self.in_flight += missing;
            self.is_open = true;
            return;
        };
        // At the client, and at its relay.
        let at_client = counts.sent.saturating_sub(counts.acked.max(counts.last));
        let at_relay = counts.acked.saturating_sub(counts.relayed.max(counts.last));
        let in_topic: BTreeSet<u64> = unread
            .clients
            .iter()
            .filter(|(of, sn, _)| of == client && *sn > counts.last && *sn <= counts.relayed)
            .map(|(_, sn, _)| *sn)
            .collect();
        let known = (at_client + at_relay + in_topic.len() as u64).min(missing);
        self.in_flight += known;
        if known < missing {
            self.lost[0] += missing - known;
            let parked = unread.parked.get(client).map_or(0, BTreeSet::len);
            let detail = format!(
                "messages from {} on are not counted: {} of them are nowhere on their way, {parked} are dead letters",
                counts.last + 1,
                missing - known
            );
            self.wrong_client(client, counts, detail);
        }
    }

    /// Adds the expected text counts of a client's lines.
    fn expect(&mut self, client: &'a str, counts: &ClientCounts) {
        let lines = self.observed.lines.get(client);
        let from_topic = self.unread().and_then(|unread| unread.lines.get(client));
        let dead = self.unread().and_then(|unread| unread.dead.get(client));
        let mut unknown_dead = counts.dead_lettered;
        for sn in 1..=counts.acked.max(counts.last) {
            if dead.is_some_and(|dead| dead.contains(&sn)) {
                unknown_dead = unknown_dead.saturating_sub(1);
                continue;
            }
            let text = lines.and_then(|lines| lines.get(&sn)).or_else(|| from_topic?.get(&sn));
            let Some(text) = text else {
                self.unknown += 1;
                continue;
            };
            *self.expected.entry(text).or_default() += 1;
            if sn > counts.relayed.max(counts.last) {
                *self.in_flight_texts.entry(text).or_default() += 1;
            }
        }
        // Dead letters that were not read: their texts are among the missing ones.
        if unknown_dead > 0 && self.unread().is_none() {
            self.is_open = true;
        } else if unknown_dead > 0 {
            let detail = format!("{unknown_dead} of its dead letters are not in the topic");
            self.wrong_client(client, counts, detail);
            self.lost[0] += unknown_dead;
        }
        if let Some((until, digest)) = &counts.digest
            && let Some(lines) = lines
            && *until <= counts.acked
            && super::digest_of_lines(lines, *until).as_ref() != Some(digest)
        {
            let detail = format!("lines 1 to {until} that were accepted are not those that it says it sent");
            self.wrong_client(client, counts, detail);
        }
    }

    fn on_texts(&mut self, expected_each: Option<u64>) {
        let counts = &self.observed.messages;
        let names: BTreeSet<&str> =
            counts.keys().map(String::as_str).chain(self.expected.keys().copied()).collect();
        let mut unknown = self.unknown;
        for hash in names {
            let count = counts.get(hash).copied().unwrap_or(0);
            let expected = self.expected.get(hash).copied().unwrap_or(0);
            // Counts that can belong to messages whose text is unknown.
            let granted = count.saturating_sub(expected).min(unknown);
            unknown -= granted;
            let surplus = count.saturating_sub(expected + granted);
            let missing = expected.saturating_sub(count);
            let in_flight_texts = missing.min(self.in_flight_texts.get(hash).copied().unwrap_or(0));
            let lost = missing - in_flight_texts;
            self.texts_in_flight += in_flight_texts;
            self.duplicated[1] += surplus;
            let is_certain = self.unread().is_some();
            if lost > 0 && !is_certain {
                self.is_open = true;
                self.texts_in_flight += lost;
            } else {
                self.lost[1] += lost;
            }
            // While messages are on their way to the gateways, not all expected ones have been accepted.
            let of_each = expected_each.filter(|_| self.in_flight == 0).unwrap_or(expected);
            let is_wrong = surplus > 0 || (lost > 0 && is_certain) || (expected != of_each && granted == 0);
            if is_wrong {
                let expected = if expected == 0 { 0 } else { of_each.max(expected) };
                self.wrong.push(WrongMessage { hash: hash.to_owned(), text: None, count, expected });
            }
        }
        // Messages with unknown texts for which no count is left.
        let uncounted = unknown.saturating_sub(self.in_flight);
        if uncounted > 0 && self.unread().is_none() {
            self.is_open = true;
        } else {
            self.lost[1] += uncounted;
        }
    }

    fn finish(mut self, expected_each: Option<u64>) -> Verdict {
        let clients = &self.observed.clients;
        let total = |of: fn(&ClientCounts) -> u64| clients.values().map(of).sum::<u64>();
        let each: BTreeSet<u64> = self.expected.values().copied().collect();
        let same = each.first().copied().filter(|_| each.len() == 1 && self.unknown == 0);
        // A message missing in its client's count is missing in its text's count as well: that is one loss.
        let (lost, duplicated) = (self.lost[0].max(self.lost[1]), self.duplicated[0].max(self.duplicated[1]));
        let in_flight = self.in_flight.max(self.texts_in_flight);
        let is_wrong = lost > 0 || duplicated > 0 || !self.wrong.is_empty() || !self.wrong_clients.is_empty();
        let verdict = match (is_wrong, in_flight > 0 || self.is_open) {
            (true, _) => "failed",
            (false, true) => "pending",
            (false, false) => "ok",
        };
        self.wrong.truncate(MAX_WRONG);
        self.wrong_clients.truncate(MAX_WRONG);
        let parked = self.unread().map_or(0, |unread| unread.parked.values().map(BTreeSet::len).sum());
        Verdict {
            messages: Messages {
                distinct: self.observed.messages.len() as u64,
                expected_each: expected_each.or(same),
                wrong: self.wrong,
            },
            clients: clients.clone(),
            wrong_clients: self.wrong_clients,
            sent: total(|c| c.sent),
            counted: total(|c| c.counted),
            in_flight,
            lost,
            duplicated,
            dead_lettered: total(|c| c.dead_lettered),
            parked: parked as u64,
            verdict,
            first_wrong: None,
        }
    }
}
