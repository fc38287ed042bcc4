//! `moim bench pipeline`: clients, gateways, counters and aggregators in this process, on any queue and any store.
//!
//! Every client's first line is a warm-up: groups have formed and connections stand when the clock starts. It is part of
//! the verdict all the same.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use moim_pipeline::{
    ClientOptions, Counts, Latency, Parts, Pipeline, PipelineConfig, Secret, Sending, client,
};
use serde::Serialize;
use tokio::time::Instant;

use crate::cmd::pipeline::live::grouped;
use crate::cmd::pipeline::load::built_in;
use crate::cmd::pipeline::verify::{conclude, settle};
use crate::cmd::pipeline::{CommonArgs, create_topics, kafka_failure, store};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, note};
use crate::target::duration;

#[derive(Debug, Args)]
pub(crate) struct PipelineBench {
    #[command(flatten)]
    common: CommonArgs,
    /// How many clients send at the same time
    #[arg(long, value_name = "N", default_value_t = 10)]
    clients: usize,
    /// How many lines each client sends
    #[arg(long, value_name = "N", default_value_t = moim_pipeline::lines::COUNT)]
    lines: usize,
    /// At most so many lines a second and client [default: as fast as they are taken]
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// Messages of a client that may be under way
    #[arg(long, value_name = "N")]
    window: Option<u32>,
    /// At most so many messages in one transaction
    #[arg(long, value_name = "N")]
    transaction_size: Option<usize>,
    /// At most so many messages between two commits of an aggregator
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// How many counters, and how many aggregators
    #[arg(long, value_name = "N")]
    instances: Option<usize>,
    /// How many gateways
    #[arg(long, value_name = "N")]
    gateways: Option<usize>,
    /// Acknowledge what is in the queue, not what is in the store: for a store that can lose what it acknowledged
    #[arg(long)]
    ack_after_queue: bool,
    /// Delete what an earlier run left, first
    #[arg(long)]
    clean: bool,
    /// How long the run may take
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10m")]
    timeout: Duration,
}

#[derive(Serialize)]
struct Measured {
    clients: usize,
    messages: u64,
    /// From the first message until every client had its last acknowledged and relayed.
    sent_seconds: f64,
    counted_seconds: f64,
    verified_seconds: f64,
    messages_per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// The most memory this process has had.
    peak_memory_bytes: u64,
    /// What counters committed, and what aggregators counted, at a time.
    transactions: u64,
    aggregator_batches: u64,
    resent: u64,
    aborted: u64,
    lost: u64,
    duplicated: u64,
    verdict: &'static str,
}

impl Report for Measured {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("clients", grouped(self.clients as u64)),
            ("messages", grouped(self.messages)),
            ("sent after", format!("{:.2} s", self.sent_seconds)),
            ("counted after", format!("{:.2} s", self.counted_seconds)),
            ("verified after", format!("{:.2} s", self.verified_seconds)),
            ("messages/s", grouped(self.messages_per_second as u64)),
            ("sent to counted, p50", format!("{:.1} ms", self.p50_ms)),
            ("p99", format!("{:.1} ms", self.p99_ms)),
            ("longest", format!("{:.1} ms", self.max_ms)),
            ("memory of this process", format!("{:.0} MB", self.peak_memory_bytes as f64 / 1e6)),
            ("transactions", grouped(self.transactions)),
            ("batches of aggregators", grouped(self.aggregator_batches)),
            ("sent again by gateways", grouped(self.resent)),
            ("transactions undone", grouped(self.aborted)),
            ("lost", grouped(self.lost)),
            ("duplicated", grouped(self.duplicated)),
            ("verdict", self.verdict.to_owned()),
        ])]
    }
}

pub(super) async fn run(args: &PipelineBench, output: Output) -> Outcome {
    if args.clients == 0 || args.lines < 2 {
        return Err(Failure::usage("at least one client and two lines"));
    }
    let config = settings(args)?;
    let store = store(&config).await?;
    if args.clean {
        moim_pipeline::queue::delete_topics(&config.queue()).await.map_err(|e| kafka_failure(&e))?;
        store.wipe().await.map_err(|e| Failure::new(Status::Unreachable, e.to_string()))?;
    }
    let known = store.clients().await.map_err(|e| Failure::new(Status::Unreachable, e.to_string()))?;
    if !known.is_empty() {
        return Err(Failure::new(
            Status::Conflict,
            format!("the store holds {} clients of another run", known.len()),
        )
        .hint("--clean deletes it, with its topics"));
    }
    let secret = Secret::random()?;
    let pipeline = start(&config, store.clone(), secret.clone(), args.timeout).await?;
    let bench = Bench { args, secret, pipeline };
    let outcome = bench.measure(&config, &store).await;
    let Bench { pipeline, .. } = bench;
    let stopped = tokio::task::spawn_blocking(move || pipeline.stop());
    let (result, verdict) = outcome?;
    stopped.await.map_err(|e| Failure::error(e.to_string()))?;
    output.print(&result)?;
    conclude(&verdict)
}

fn settings(args: &PipelineBench) -> Outcome<PipelineConfig> {
    let mut config = args.common.settings()?;
    config.gateway.listen.set_port(0);
    config.gateway.ack_after_queue |= args.ack_after_queue;
    if let Some(window) = args.window {
        config.gateway.window = window;
    }
    if let Some(size) = args.transaction_size {
        config.counter.transaction_size = size;
    }
    if let Some(batch) = args.batch {
        config.aggregator.batch = batch;
    }
    if let Some(instances) = args.instances {
        (config.counter.instances, config.aggregator.instances) = (instances, instances);
    }
    if let Some(gateways) = args.gateways {
        config.gateway.instances = gateways;
    }
    Ok(config)
}

/// Topics that were just deleted may take a moment to be gone.
async fn start(
    config: &PipelineConfig,
    store: moim_pipeline::Store,
    secret: Secret,
    patience: Duration,
) -> Outcome<Pipeline> {
    let until = Instant::now() + patience.min(Duration::from_secs(30));
    loop {
        match create_topics(config).await {
            Ok(()) => break,
            Err(failure) if Instant::now() >= until => return Err(failure),
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }
    let started = Pipeline::start(config, Parts::default(), store, secret).await;
    started.map_err(|error| Failure::error(error.to_string()))
}

struct Bench<'a> {
    args: &'a PipelineBench,
    secret: Secret,
    pipeline: Pipeline,
}

impl Bench<'_> {
    async fn measure(
        &self,
        config: &PipelineConfig,
        store: &moim_pipeline::Store,
    ) -> Outcome<(Measured, moim_pipeline::Verdict)> {
        let args = self.args;
        let lines = lines(args.lines);
        let names = || (0..args.clients).map(|n| format!("client-{n}"));
        let counts = self.pipeline.progress();
        self.send(&lines[..1], names(), None).await?;
        self.until(|| Counts::get(&counts.aggregated) >= args.clients as u64).await?;
        note(format_args!("{} clients send {} lines each", args.clients, grouped(args.lines as u64)));
        let latency = Arc::new(Latency::of(names(), args.lines));
        let _ = counts.latency.set(Arc::clone(&latency));
        let (since, total) = (Instant::now(), (args.clients * args.lines) as u64);
        self.send(&lines, names(), Some(&latency)).await?;
        let sent = since.elapsed();
        self.until(|| Counts::get(&counts.counted) >= total).await?;
        let counted = since.elapsed();
        self.until(|| Counts::get(&counts.aggregated) >= total).await?;
        let each = Some(args.clients as u64);
        let verdict = settle(store, &config.queue(), args.timeout, each, || ()).await?;
        let verified = since.elapsed().as_secs_f64();
        let (spread, ms) = (latency.spread(), |took: Duration| took.as_secs_f64() * 1e3);
        let messages = total - args.clients as u64;
        let result = Measured {
            clients: args.clients,
            messages,
            sent_seconds: sent.as_secs_f64(),
            counted_seconds: counted.as_secs_f64(),
            verified_seconds: verified,
            messages_per_second: messages as f64 / verified,
            p50_ms: ms(spread.p50),
            p99_ms: ms(spread.p99),
            max_ms: ms(spread.max),
            peak_memory_bytes: peak_memory_bytes(),
            transactions: Counts::get(&counts.transactions),
            aggregator_batches: Counts::get(&counts.steps),
            resent: Counts::get(&counts.resent),
            aborted: Counts::get(&counts.aborted),
            lost: verdict.lost,
            duplicated: verdict.duplicated,
            verdict: verdict.verdict,
        };
        Ok((result, verdict))
    }

    async fn send(
        &self,
        lines: &[Bytes],
        names: impl Iterator<Item = String>,
        latency: Option<&Arc<Latency>>,
    ) -> Outcome {
        let options: Vec<ClientOptions> = names
            .map(|client| ClientOptions {
                client,
                incarnation: 1,
                gateways: self.pipeline.gateways(),
                secret: self.secret.clone(),
                tls: None,
                patience: None,
                rate: self.args.rate,
            })
            .collect();
        let watched: Vec<Arc<Sending>> = options.iter().map(|_| Arc::default()).collect();
        if let Some(latency) = latency {
            watched.iter().for_each(|sending| drop(sending.latency.set(Arc::clone(latency))));
        }
        let sends =
            options.iter().zip(&watched).map(|(options, watched)| client::send(options, lines, watched));
        let all = tokio::time::timeout(self.args.timeout, futures_util::future::try_join_all(sends));
        let sent = all.await.map_err(|_| Failure::new(Status::Timeout, "not everything was sent in time"))?;
        sent.map(drop).map_err(|error| Failure::error(error.to_string()))
    }

    async fn until(&self, done: impl Fn() -> bool) -> Outcome {
        let until = Instant::now() + self.args.timeout;
        while !done() {
            if Instant::now() >= until {
                return Err(Failure::new(Status::Timeout, "not everything was counted in time"));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

/// So many different lines: the built-in text, and beyond it the same with a number.
fn lines(count: usize) -> Vec<Bytes> {
    let text = built_in();
    let line = |at: usize| match at / text.len() {
        0 => text[at].clone(),
        round => Bytes::from([&text[at % text.len()], format!(" ({round})").as_bytes()].concat()),
    };
    (0..count).map(line).collect()
}

/// The kernel's high-water mark of this process; 0 where it does not say.
fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn lines_are_all_different() {
        let lines = lines(10_000);
        assert_eq!(lines[0], built_in()[0]);
        assert_eq!(lines.iter().collect::<HashSet<_>>().len(), 10_000);
    }
}
