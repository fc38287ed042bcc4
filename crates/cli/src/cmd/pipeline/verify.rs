//! `moim pipeline verify` and `clean`.

use std::time::Duration;

use clap::Args;
use moim_pipeline::store::hex;
use moim_pipeline::verify::{
    Observed, Verdict, committed, judge, locate, locate_text, name_wrong, observe, observe_clients, trace,
    trace_text, unread,
};
use moim_pipeline::{KafkaError, QueueOptions, Store, StoreError};
use tokio::time::Instant;

use super::live::grouped;
use super::{CommonArgs, kafka_failure, store};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, confirm, note};
use crate::target::duration;

/// The poll interval of a run that is not complete.
const LOOK: Duration = Duration::from_millis(100);
/// A run that has not moved for so long will not: a counter whose client has forgotten it is replaced after 12 s, and has to
/// find its place in the group.
const STUCK: Duration = Duration::from_secs(30);
/// So often the store and the topics are read until they fit together.
const TRIES: usize = 5;
/// For this many wrong messages the topics are searched for the first record.
const EXPLAINED: usize = 3;

#[derive(Clone, Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Wait for messages that are still under way
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    wait: Option<Duration>,
    /// How often every message was sent [default: worked out where all clients sent the same lines]
    #[arg(long, value_name = "N")]
    expect_each: Option<u64>,
}

impl Report for Verdict {
    fn sections(&self) -> Vec<Section> {
        let mut clients = Section::new(&["CLIENT", ">SENT", ">COUNTED", ">DEAD-LETTERED", ">IN FLIGHT"]);
        for (client, counts) in &self.clients {
            clients.row(vec![
                client.clone(),
                counts.sent.to_string(),
                counts.counted.to_string(),
                counts.dead_lettered.to_string(),
                counts.in_flight().to_string(),
            ]);
        }
        let each = self.messages.expected_each.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let summary = Section::pairs([
            ("distinct messages", self.messages.distinct.to_string()),
            ("expected of each", each),
            ("in flight", self.in_flight.to_string()),
            ("lost", self.lost.to_string()),
            ("duplicated", self.duplicated.to_string()),
            ("dead-lettered", self.dead_lettered.to_string()),
            ("behind a missing one", self.parked.to_string()),
            ("verdict", self.verdict.to_owned()),
        ]);
        let mut sections = vec![clients, summary];
        if !self.messages.wrong.is_empty() {
            let mut wrong = Section::new(&["MESSAGE", ">COUNT", ">EXPECTED", "TEXT"]);
            for message in &self.messages.wrong {
                let text = message.text.clone().unwrap_or_else(|| "-".to_owned());
                wrong.row(vec![
                    message.hash.clone(),
                    message.count.to_string(),
                    message.expected.to_string(),
                    text,
                ]);
            }
            sections.push(wrong);
        }
        if !self.wrong_clients.is_empty() {
            let mut wrong = Section::new(&["WRONG CLIENT", ">COUNTED", ">EXPECTED", "WHY"]);
            for client in &self.wrong_clients {
                let (counted, expected) = (client.counted.to_string(), client.expected.to_string());
                wrong.row(vec![client.client.clone(), counted, expected, client.detail.clone()]);
            }
            sections.push(wrong);
        }
        if let Some(found) = &self.first_wrong {
            sections.push(Section::pairs([
                ("first wrong", format!("{} message {}", found.client, found.sn)),
                ("where", found.detail.clone()),
            ]));
        }
        sections
    }
}

pub(super) async fn run(common: &CommonArgs, args: &VerifyArgs, output: Output) -> Outcome {
    let config = common.settings()?;
    let store = store(&config).await?;
    let wait = args.wait.unwrap_or(Duration::ZERO);
    let verdict = settle(&store, &config.queue(), wait, args.expect_each, || ()).await?;
    output.print(&verdict)?;
    conclude(&verdict)
}

/// A failure unless everything was counted once.
pub(crate) fn conclude(verdict: &Verdict) -> Outcome {
    if verdict.is_ok() {
        return Ok(());
    }
    if verdict.is_pending() {
        let message = format!("nothing is wrong, {} messages are on their way", grouped(verdict.in_flight));
        return Err(Failure::new(Status::Timeout, message).hint("--wait 60s waits for them"));
    }
    let message = format!(
        "verification failed: {} lost, {} duplicated, {} wrong messages, {} wrong clients",
        grouped(verdict.lost),
        grouped(verdict.duplicated),
        verdict.messages.wrong.len(),
        verdict.wrong_clients.len()
    );
    Err(Failure::new(Status::Unhealthy, message))
}

/// Reads everything; or only the clients, while one of them has messages under way and there is time to wait: reading
/// every message again and again would slow down what is looked at. Says whether it was everything.
async fn look(store: &Store, may_wait: bool) -> std::result::Result<(Observed, bool), StoreError> {
    if may_wait {
        let clients = observe_clients(store).await?;
        if clients.values().any(|counts| counts.in_flight() > 0) {
            return Ok((Observed { clients, ..Observed::default() }, false));
        }
    }
    Ok((observe(store).await?, true))
}

/// Looks until everything is through, or nothing moves any more, or `wait` is over. A wrong verdict says where.
pub(crate) async fn settle(
    store: &Store,
    queue: &QueueOptions,
    wait: Duration,
    expect_each: Option<u64>,
    mut show: impl FnMut(),
) -> Outcome<Verdict> {
    let until = Instant::now() + wait;
    let mut moved = Instant::now();
    let mut last = None;
    loop {
        let over = Instant::now() >= until || moved.elapsed() > STUCK;
        let (observed, whole) = match look(store, !over).await {
            Ok(looked) => looked,
            // A store in the middle of a failover answers again soon.
            Err(error) if Instant::now() < until => {
                tracing::debug!(%error, "cannot look; trying again");
                tokio::time::sleep(LOOK).await;
                continue;
            }
            Err(error) => return Err(Failure::new(Status::Unreachable, error.to_string())),
        };
        show();
        let counted: u64 =
            observed.clients.values().map(|client| client.counted + client.dead_lettered).sum();
        let mark = (counted, observed.messages.values().sum::<u64>());
        if last.replace(mark) != Some(mark) {
            moved = Instant::now();
        }
        // Dead letters are only known from their topic.
        let is_dead = observed.clients.values().any(|client| client.dead_lettered > 0);
        if whole && judge(&observed, expect_each).is_ok() {
            return Ok(judge(&observed, expect_each));
        }
        if over || (whole && is_dead) {
            let verdict = judge(&look_well(store, queue).await?, expect_each);
            if over || verdict.is_ok() {
                return explain(store, queue, verdict).await;
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Reads the store and the topics. While something is committed between the two, they do not fit together: then what the topics
/// hold is left out, and nothing that is missing counts as lost.
async fn look_well(store: &Store, queue: &QueueOptions) -> Outcome<Observed> {
    let mut observed = Observed::default();
    for _ in 0..TRIES {
        let before = blocking(queue, committed).await?;
        observed = observe(store).await.map_err(|e| Failure::new(Status::Unreachable, e.to_string()))?;
        let unknown = observed.unknown();
        let found = blocking(queue, move |queue| unread(queue, &unknown)).await?;
        if found.is_settled_since(&before) {
            observed.unread = Some(found);
            break;
        }
    }
    Ok(observed)
}

async fn blocking<T: Send + 'static>(
    queue: &QueueOptions,
    ask: impl FnOnce(&QueueOptions) -> Result<T, KafkaError> + Send + 'static,
) -> Outcome<T> {
    let queue = queue.clone();
    let asked = tokio::task::spawn_blocking(move || ask(&queue)).await;
    asked.map_err(|e| Failure::error(e.to_string()))?.map_err(|e| kafka_failure(&e))
}

async fn explain(store: &Store, queue: &QueueOptions, mut verdict: Verdict) -> Outcome<Verdict> {
    if verdict.is_ok() || verdict.is_pending() {
        return Ok(verdict);
    }
    if let Err(error) = name_wrong(store, &mut verdict).await {
        tracing::debug!(%error, "cannot read the texts of wrong messages");
    }
    let suspects: Vec<String> = verdict.wrong_clients.iter().map(|wrong| wrong.client.clone()).collect();
    for client in suspects {
        let name = client.clone();
        let seen = blocking(queue, move |queue| trace(queue, &name)).await?;
        let counts = &verdict.clients[&client];
        if let Some(found) = locate(&client, counts, &seen) {
            verdict.first_wrong = Some(found);
            return Ok(verdict);
        }
    }
    for wrong in verdict.messages.wrong.iter().take(EXPLAINED) {
        let hash = wrong.hash.clone();
        let passed = blocking(queue, move |queue| trace_text(queue, &hash)).await?;
        let unreachable = |error: StoreError| Failure::new(Status::Unreachable, error.to_string());
        let counted = store.counted_for(&wrong.hash).await.map_err(unreachable)?;
        let mut senders = Vec::new();
        for (client, counts) in &verdict.clients {
            let lines = store.lines(client).await.map_err(unreachable)?;
            let sent = lines.range(1..=counts.last).filter(|(_, digest)| hex(&digest[..]) == wrong.hash);
            senders.extend(sent.map(|(sn, _)| (client.clone(), *sn)));
        }
        verdict.first_wrong = locate_text(wrong, &senders, &passed, &counted);
        if verdict.first_wrong.is_some() {
            return Ok(verdict);
        }
    }
    Ok(verdict)
}

pub(super) async fn clean(common: &CommonArgs, yes: bool) -> Outcome {
    let config = common.settings()?;
    confirm(&format!("delete every message and count of pipeline `{}`", config.name), yes)?;
    moim_pipeline::queue::delete_topics(&config.queue()).await.map_err(|e| kafka_failure(&e))?;
    let store = store(&config).await?;
    let deleted = store.wipe().await.map_err(|e| Failure::new(Status::Unreachable, e.to_string()))?;
    note(format_args!("deleted the topics and {} keys", grouped(deleted)));
    Ok(())
}
