//! A batch of clients' messages on its way into the store: what is counted, what is passed on, and what has to be read again
//! first (see [`super::gaps`]).

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt};

use moim_base::task::Shutdown;

use super::gaps::{Decision, Gaps};
use crate::consume::{Failed, patiently};
use crate::store::{Batch, Counting, Standing, Store, StoreError, Verdict};

/// Questions to the store at a time.
const AT_ONCE: usize = 128;

/// A record of `client_message`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) key: &'a [u8],
    pub(crate) payload: Option<&'a [u8]>,
    /// Client and sequence number; none when the record does not say.
    pub(crate) origin: Option<(&'a str, u64)>,
}

/// A message of the batch and where it goes.
#[derive(Clone, Debug)]
pub(crate) struct Out<'a> {
    pub(crate) record: Record<'a>,
    /// Why it goes to the dead letters.
    pub(crate) dead: Option<Cow<'static, str>>,
    pub(crate) verdict: Verdict,
}

/// What to do with a batch.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// Pass it on, in one transaction with its offsets.
    PassOn(Vec<Out<'a>>),
    /// Read these partitions again from these offsets, and the others from the beginning of the batch.
    Reread(BTreeMap<i32, i64>),
}

/// The side of the store.
pub(crate) struct Tally {
    store: Store,
    /// The generation under which a partition is counted, from the store.
    generations: HashMap<i32, u64>,
    /// By partition, under its generation: behind the last message that was counted, and what was committed last.
    counted_to: HashMap<i32, i64>,
    committed_to: HashMap<i32, i64>,
    gaps: Gaps,
}

/// A client's messages of a batch.
struct Group<'a> {
    client: &'a str,
    partition: i32,
    /// Their places in the batch.
    places: Vec<usize>,
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

    /// Partitions have changed hands.
    pub(crate) fn on_change(&mut self) {
        self.generations.clear();
        self.counted_to.clear();
        self.committed_to.clear();
        self.gaps.clear();
    }

    /// A batch was passed on, and the offset behind it committed.
    pub(crate) fn on_committed(&mut self, partition: i32, next: i64) {
        self.committed_to.insert(partition, next);
    }

    /// The generation of a partition of which everything that was counted under it is committed.
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
    ) -> Result<Step<'a>, Failed> {
        let mut outs: Vec<Out<'a>> = records.iter().map(judge).collect();
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
            let counting: Vec<Counting> = group.places.iter().map(|at| counting(&outs[*at])).collect();
            let (store, client) = (self.store.clone(), group.client);
            steps.push(async move {
                let call = || store.count(client, by, &counting);
                patiently(shutdown, call).await
            });
        }
        let mut rereads = BTreeMap::<i32, i64>::new();
        for (group, counted) in groups.iter().zip(join_all(steps).await) {
            let counted = counted?.map_err(|_| Failed::Fenced)?;
            group.places.iter().zip(counted.verdicts).for_each(|(at, verdict)| outs[*at].verdict = verdict);
            match self.look_at_gap(group, &counted.standing, &mut outs) {
                Decision::Leave | Decision::Park => {}
                Decision::Reread(from) => {
                    let first = rereads.entry(group.partition).or_insert(from);
                    *first = from.min(*first);
                }
            }
        }
        if !rereads.is_empty() {
            for (partition, from) in &mut rereads {
                let first = begins.get(partition).copied().unwrap_or(*from);
                // What a transaction that was undone has counted is behind the client's position, and not passed on.
                *from = first.min(*from);
                tracing::warn!(
                    partition,
                    offset = from,
                    "gap in a client's messages; reading the partition again"
                );
            }
            return Ok(Step::Reread(rereads));
        }
        Ok(Step::PassOn(outs))
    }

    /// Decides about the messages of a client that stand behind a gap.
    fn look_at_gap(&mut self, group: &Group<'_>, standing: &Standing, outs: &mut [Out<'_>]) -> Decision {
        self.gaps.on_standing(group.client, standing.last);
        let is_ahead = |at: &&usize| outs[**at].verdict == Verdict::Ahead;
        let ahead: Vec<usize> = group.places.iter().filter(is_ahead).copied().collect();
        let Some(first) = ahead.first() else { return Decision::Leave };
        let numbers: Vec<u64> = ahead.iter().map(|at| counting(&outs[*at]).sn).collect();
        let first = outs[*first].record.offset;
        let decision = self.gaps.decide(group.client, standing, first, &numbers);
        for (at, sn) in ahead.iter().zip(numbers) {
            let out = &mut outs[*at];
            let is_kept = standing.stored < sn && sn <= standing.acked;
            if decision == Decision::Park && !is_kept {
                out.dead = Some(format!("message {} is missing before it", standing.last + 1).into());
            } else {
                out.verdict = Verdict::Dropped;
            }
        }
        decision
    }

    /// What is behind in the partitions of an idle counter: from where to read them again.
    pub(crate) async fn behind(&mut self, assigned: &[i32]) -> Result<BTreeMap<i32, i64>, StoreError> {
        let store = &self.store;
        let clients = store.clients().await?.into_iter().map(|client| async move {
            let found = store.standing(&client).await?;
            Ok::<_, StoreError>(found.map(|(partition, standing)| (client, partition, standing)))
        });
        let found: Vec<_> =
            futures_util::stream::iter(clients).buffer_unordered(AT_ONCE).try_collect().await?;
        let mine = found.into_iter().flatten().filter(|(_, partition, _)| assigned.contains(partition));
        let mine: Vec<(String, i32, Standing)> = mine.collect();
        let mut settled = HashSet::new();
        for (client, partition, standing) in &mine {
            if standing.last < standing.stored
                && let Some(generation) = self.settled_generation(*partition)
                && store.settle(client, *partition, generation).await?
            {
                settled.insert(client.as_str());
            }
        }
        let (rereads, blocked) = self.gaps.behind(&mine, &settled);
        for (client, missing) in blocked {
            self.store.block(&client, missing).await?;
        }
        Ok(rereads)
    }

    /// Whether an idle counter has found clients behind, and should look again soon.
    pub(crate) fn has_suspects(&self) -> bool {
        !self.gaps.suspects().is_empty()
    }

    async fn generation(&mut self, partition: i32, shutdown: &Shutdown) -> Result<u64, Failed> {
        if let Some(generation) = self.generations.get(&partition) {
            return Ok(*generation);
        }
        let call = || self.store.next_generation("counter", partition);
        let generation = patiently(shutdown, call).await?;
        self.generations.insert(partition, generation);
        Ok(generation)
    }
}

fn counting(out: &Out<'_>) -> Counting {
    let sn = out.record.origin.map_or(0, |(_, sn)| sn);
    Counting { sn, offset: out.record.offset, dead: out.dead.is_some() }
}

/// Where the messages of each client stand in the batch, by partition. A client's messages stand together as a rule: they came
/// together.
fn by_client<'a>(outs: &[Out<'a>]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let (mut known, mut present) = (HashMap::new(), None);
    for (at, out) in outs.iter().enumerate() {
        let Some((client, _)) = out.record.origin else { continue };
        let whose = (client, out.record.partition);
        let group = match present {
            Some((before, group)) if before == whose => group,
            _ => *known.entry(whose).or_insert_with(|| {
                groups.push(Group { client, partition: whose.1, places: Vec::new() });
                groups.len() - 1
            }),
        };
        present = Some((whose, group));
        groups[group].places.push(at);
    }
    groups
}

/// Whether a message can be processed. A record that does not say where it comes from cannot be counted for anybody.
fn judge<'a>(record: &Record<'a>) -> Out<'a> {
    let text = record.payload.is_some_and(|payload| std::str::from_utf8(payload).is_ok());
    let dead = match (&record.origin, text) {
        (None, _) => Some(Cow::Borrowed("no client or sequence number")),
        (Some(_), false) => Some(Cow::Borrowed("not text")),
        (Some(_), true) => None,
    };
    // Without an origin no client's count is concerned: it goes to the dead letters with this transaction.
    let verdict = if record.origin.is_none() { Verdict::Counted } else { Verdict::Dropped };
    Out { record: *record, dead, verdict }
}
