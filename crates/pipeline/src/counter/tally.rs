//! Counting of a batch of client messages in the store: which messages are counted, which are forwarded, and which
//! partitions must be re-read first (see [`super::gaps`]).

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt};

use moim_base::task::Shutdown;

use super::gaps::{Decision, Gaps};
use crate::consume::{BatchError, retry_while_unavailable};
use crate::store::{Batch, CountOutcome, CountState, Counting, Store, StoreError};

/// Concurrent requests to the store.
const AT_ONCE: usize = 128;

/// A record of `client_message`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) key: &'a [u8],
    pub(crate) payload: Option<&'a [u8]>,
    /// Client and sequence number; none if the record has no valid origin.
    pub(crate) origin: Option<(&'a str, u64)>,
}

/// A message of the batch and its outcome.
#[derive(Clone, Debug)]
pub(crate) struct CountedRecord<'a> {
    pub(crate) record: Record<'a>,
    /// The reason for the dead-letter topic.
    pub(crate) dead: Option<Cow<'static, str>>,
    pub(crate) outcome: CountOutcome,
}

/// What the counter does with a batch.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// Forward the messages, in one transaction with the offsets.
    Forward(Vec<CountedRecord<'a>>),
    /// Re-read these partitions from these offsets, and the others from the beginning of the batch.
    Reread(BTreeMap<i32, i64>),
}

/// Counts batches in the store.
pub(crate) struct Tally {
    store: Store,
    /// The generation under which a partition is counted, from the store.
    generations: HashMap<i32, u64>,
    /// By partition, under its generation: the offset after the last counted message, and the last committed offset.
    counted_to: HashMap<i32, i64>,
    committed_to: HashMap<i32, i64>,
    gaps: Gaps,
}

/// The messages of one client in a batch.
struct Group<'a> {
    client: &'a str,
    partition: i32,
    /// Their indexes in the batch.
    indexes: Vec<usize>,
}

impl Tally {
    pub(crate) fn new(store: Store) -> Self {
        Self {
            store,
            generations: HashMap::new(),
            counted_to: HashMap::new(),
            committed_to: HashMap::new(),
            gaps: Gaps::default(),
        }
    }

    /// A rebalance has changed the assignment.
    pub(crate) fn on_rebalance(&mut self) {
        self.generations.clear();
        self.counted_to.clear();
        self.committed_to.clear();
        self.gaps.clear();
    }

    /// A batch was forwarded, and the offset after it committed.
    pub(crate) fn on_committed(&mut self, partition: i32, next: i64) {
        self.committed_to.insert(partition, next);
    }

    /// The generation of a partition, if everything counted under it is committed.
    fn settled_generation(&self, partition: i32) -> Option<u64> {
        let counted_to = self.counted_to.get(&partition)?;
        let is_settled = self.committed_to.get(&partition).is_some_and(|next| next >= counted_to);
        self.generations.get(&partition).copied().filter(|_| is_settled)
    }

    /// Counts a batch, client by client.
    pub(crate) async fn count<'a>(
        &mut self,
        records: &[Record<'a>],
        shutdown: &Shutdown,
    ) -> Result<Step<'a>, BatchError> {
        let mut outs: Vec<CountedRecord<'a>> = records.iter().map(classify).collect();
        let groups = by_client(&outs);
        let mut steps = Vec::with_capacity(groups.len());
        let mut begins: HashMap<i32, i64> = HashMap::new();
        for record in records {
            begins.entry(record.partition).or_insert(record.offset);
            let counted_to = self.counted_to.entry(record.partition).or_default();
            *counted_to = (record.offset + 1).max(*counted_to);
        }
        for group in &groups {
            let (partition, from) = (group.partition, begins.get(&group.partition).copied().unwrap_or(0));
            let by = Batch { generation: self.generation(partition, shutdown).await?, partition, from };
            let counting: Vec<Counting> = group.indexes.iter().map(|at| counting(&outs[*at])).collect();
            let (store, client) = (self.store.clone(), group.client);
            steps.push(async move {
                let call = || store.count(client, by, &counting);
                retry_while_unavailable(shutdown, call).await
            });
        }
        let mut rereads = BTreeMap::<i32, i64>::new();
        for (group, counted) in groups.iter().zip(join_all(steps).await) {
            let counted = counted?.map_err(|_| BatchError::Fenced)?;
            group.indexes.iter().zip(counted.outcomes).for_each(|(at, outcome)| outs[*at].outcome = outcome);
            match self.handle_gap(group, &counted.count_state, &mut outs) {
                Decision::Skip | Decision::Park => {}
                Decision::Reread(from) => {
                    let first = rereads.entry(group.partition).or_insert(from);
                    *first = from.min(*first);
                }
            }
        }
        if !rereads.is_empty() {
            for (partition, from) in &mut rereads {
                let first = begins.get(partition).copied().unwrap_or(*from);
                // Messages counted by an aborted transaction lie before the client's position, and are not forwarded
                // yet.
                *from = first.min(*from);
                tracing::warn!(partition, offset = from, "sequence gap; partition re-read");
            }
            return Ok(Step::Reread(rereads));
        }
        Ok(Step::Forward(outs))
    }

    /// Decides about a client's messages that stand behind a gap.
    fn handle_gap(
        &mut self,
        group: &Group<'_>,
        count_state: &CountState,
        outs: &mut [CountedRecord<'_>],
    ) -> Decision {
        self.gaps.on_count_state(group.client, count_state.last);
        let is_ahead = |at: &&usize| outs[**at].outcome == CountOutcome::Ahead;
        let ahead: Vec<usize> = group.indexes.iter().filter(is_ahead).copied().collect();
        let Some(first) = ahead.first() else { return Decision::Skip };
        let numbers: Vec<u64> = ahead.iter().map(|at| counting(&outs[*at]).sn).collect();
        let first = outs[*first].record.offset;
        let decision = self.gaps.decide(group.client, count_state, first, &numbers);
        for (at, sn) in ahead.iter().zip(numbers) {
            let out = &mut outs[*at];
            let is_kept = count_state.stored < sn && sn <= count_state.acked;
            if decision == Decision::Park && !is_kept {
                out.dead = Some(format!("message {} is missing before it", count_state.last + 1).into());
            } else {
                out.outcome = CountOutcome::Dropped;
            }
        }
        decision
    }

    /// Partitions of an idle counter with clients that are behind, and the offsets to re-read them from.
    pub(crate) async fn find_behind(&mut self, assigned: &[i32]) -> Result<BTreeMap<i32, i64>, StoreError> {
        let store = &self.store;
        let clients = store.clients().await?.into_iter().map(|client| async move {
            let found = store.count_state(&client).await?;
            Ok::<_, StoreError>(found.map(|(partition, count_state)| (client, partition, count_state)))
        });
        let found: Vec<_> =
            futures_util::stream::iter(clients).buffer_unordered(AT_ONCE).try_collect().await?;
        let mine = found.into_iter().flatten().filter(|(_, partition, _)| assigned.contains(partition));
        let mine: Vec<(String, i32, CountState)> = mine.collect();
        let mut settled = HashSet::new();
        for (client, partition, count_state) in &mine {
            if count_state.last < count_state.stored
                && let Some(generation) = self.settled_generation(*partition)
                && store.settle(client, *partition, generation).await?
            {
                settled.insert(client.as_str());
            }
        }
        let (rereads, blocked) = self.gaps.find_behind(&mine, &settled);
        for (client, missing) in blocked {
            self.store.block(&client, missing).await?;
        }
        Ok(rereads)
    }

    /// True if an idle counter has found clients that are behind, and should check again soon.
    pub(crate) fn has_suspects(&self) -> bool {
        !self.gaps.suspects().is_empty()
    }

    async fn generation(&mut self, partition: i32, shutdown: &Shutdown) -> Result<u64, BatchError> {
        if let Some(generation) = self.generations.get(&partition) {
            return Ok(*generation);
        }
        let call = || self.store.next_generation("counter", partition);
        let generation = retry_while_unavailable(shutdown, call).await?;
        self.generations.insert(partition, generation);
        Ok(generation)
    }
}

fn counting(out: &CountedRecord<'_>) -> Counting {
    let sn = out.record.origin.map_or(0, |(_, sn)| sn);
    Counting { sn, offset: out.record.offset, dead: out.dead.is_some() }
}

/// The indexes of each client's messages in the batch, by partition. A client's messages are usually adjacent,
/// because they arrive together.
fn by_client<'a>(outs: &[CountedRecord<'a>]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let (mut known, mut present) = (HashMap::new(), None);
    for (at, out) in outs.iter().enumerate() {
        let Some((client, _)) = out.record.origin else { continue };
        let whose = (client, out.record.partition);
        let group = match present {
            Some((before, group)) if before == whose => group,
            _ => *known.entry(whose).or_insert_with(|| {
                groups.push(Group { client, partition: whose.1, indexes: Vec::new() });
                groups.len() - 1
            }),
        };
        present = Some((whose, group));
        groups[group].indexes.push(at);
    }
    groups
}

/// Decides whether a message can be processed. A record without an origin cannot be counted for any client.
fn classify<'a>(record: &Record<'a>) -> CountedRecord<'a> {
    let is_text = record.payload.is_some_and(|payload| std::str::from_utf8(payload).is_ok());
    let dead = match (&record.origin, is_text) {
        (None, _) => Some(Cow::Borrowed("no client or sequence number")),
        (Some(_), false) => Some(Cow::Borrowed("not text")),
        (Some(_), true) => None,
    };
    // A record without an origin affects no client's count: it goes to the dead-letter topic with this transaction.
    let outcome = if record.origin.is_none() { CountOutcome::Counted } else { CountOutcome::Dropped };
    CountedRecord { record: *record, dead, outcome }
}
