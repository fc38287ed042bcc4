//! `moim demo`: three nodes, ten clients, a kill in the middle, and a verdict. What a newcomer runs first.
//!
//! The pipeline runs in this process, the nodes are processes of their own, and the one that leads most is really killed.

mod keys;
mod trickle;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use moim_node::Signals;
use moim_pipeline::{ClientOptions, Counts, Parts, Pipeline, Sending, Verdict, client};
use tokio::time::Instant;

use super::dev::embed::Member;
use super::pipeline::create_topics;
use super::pipeline::live::{Live, grouped};
use super::pipeline::load::built_in;
use super::pipeline::stand::Stand;
use super::pipeline::verify::{conclude, settle};
use crate::cmd::block_on;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Format, Output, Section};
use crate::target::duration;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:
  moim demo                  # stays up afterwards: kill nodes, look around, Ctrl-C ends it
  moim demo --exit           # ends with the verdict: status 0, or 8 when a count is wrong")]
pub(crate) struct DemoArgs {
    /// End after the verdict
    #[arg(long)]
    exit: bool,
    /// How many clients send the 4,422 lines
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    clients: u16,
    /// The folder of the cluster; what an earlier demo left there is deleted
    #[arg(long, value_name = "DIR", default_value = ".moim/demo")]
    data: PathBuf,
    /// How long the run may take
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "3m")]
    timeout: Duration,
}

pub(crate) fn run(args: DemoArgs, output: Output) -> Outcome {
    if output.format == Format::Json {
        return Err(Failure::usage("the demo is for people: it has no JSON")
            .hint("`moim pipeline verify -o json` gives the verdict of a run"));
    }
    block_on(async move {
        let mut signals = Signals::listen()?;
        say("Moim: a queue, a store and coordination in one binary. Starting three nodes on this machine …")?;
        let mut demo = tokio::select! {
            demo = Demo::start(&args) => demo?,
            _ = signals.next() => return Ok(()),
        };
        let outcome = tokio::select! {
            outcome = demo.play(&args) => outcome,
            // Ctrl-C is how people leave.
            _ = signals.next() => Ok(()),
        };
        demo.end().await?;
        outcome
    })
}

/// Everything that runs.
struct Demo {
    stand: Stand,
    pipeline: Option<Pipeline>,
    began: Instant,
}

impl Demo {
    async fn start(args: &DemoArgs) -> Outcome<Self> {
        let began = Instant::now();
        let mut stand = Stand::start(&args.data, args.timeout).await?;
        stand.cluster.announce()?;
        say(&format!("\n{}\n", table(&stand.cluster.members()).text()))?;
        let mut config = stand.config.clone();
        config.gateway.instances = 2;
        config.gateway.report_timeout_ms = 30_000;
        let (store, secret) = (stand.store.clone(), stand.secret.clone());
        create_topics(&config).await?;
        let pipeline = Pipeline::start(&config, Parts::default(), store, secret).await;
        let pipeline = pipeline.map_err(|error| Failure::error(error.to_string()))?;
        Ok(Self { stand, pipeline: Some(pipeline), began })
    }

    async fn play(&mut self, args: &DemoArgs) -> Outcome {
        let verdict = self.reference_run(args).await?;
        self.show(&verdict)?;
        if !verdict.is_ok() {
            if let Some(found) = &verdict.first_wrong {
                say(&format!("first wrong: {} message {}: {}", found.client, found.sn, found.detail))?;
            }
            return conclude(&verdict);
        }
        if args.exit {
            return Ok(());
        }
        trickle::run(self, args).await
    }

    fn pipeline(&self) -> Outcome<&Pipeline> {
        self.pipeline.as_ref().ok_or_else(|| Failure::error("the pipeline has ended"))
    }

    /// The run of the document: every client sends the same lines, and the node that leads most is killed on the way.
    async fn reference_run(&self, args: &DemoArgs) -> Outcome<Verdict> {
        let lines = built_in();
        let clients = usize::from(args.clients);
        let total = (lines.len() * clients) as u64;
        let each = grouped(lines.len() as u64);
        say(&format!(
            "{clients} clients send the same {each} lines: {} messages. Every client must count {each}, every line {clients}.\n",
            grouped(total)
        ))?;
        let pipeline = self.pipeline()?;
        let options: Vec<ClientOptions> = (0..clients)
            .map(|n| ClientOptions {
                client: format!("client-{n}"),
                incarnation: 1,
                gateways: pipeline.gateways(),
                secret: self.stand.secret.clone(),
                tls: None,
                patience: None,
                rate: None,
            })
            .collect();
        let watched: Vec<Arc<Sending>> = options.iter().map(|_| Arc::default()).collect();
        let sends =
            options.iter().zip(&watched).map(|(options, sending)| client::send(options, &lines, sending));
        let sends = tokio::time::timeout(args.timeout, futures_util::future::try_join_all(sends));
        let live = std::cell::RefCell::new(Live::new(Some(total)));
        let story = self.kill_and_recover(total, &live);
        let both = async { tokio::join!(sends, story) };
        tokio::pin!(both);
        let (sent, told) = loop {
            tokio::select! {
                done = &mut both => break done,
                () = tick(&live) => live.borrow_mut().show(pipeline.progress()),
            }
        };
        told?;
        sent.map_err(|_| {
            Failure::new(Status::Timeout, "the clients did not get everything through in time")
        })?
        .map_err(|error| Failure::error(error.to_string()))?;
        let progress = pipeline.progress().clone();
        let show = || live.borrow_mut().show(&progress);
        let expected = Some(u64::from(args.clients));
        let verdict =
            settle(&self.stand.store, &self.stand.config.queue(), args.timeout, expected, show).await?;
        live.borrow_mut().show(&progress);
        live.borrow_mut().end();
        Ok(verdict)
    }

    /// Kills the busiest node once a third is counted, says what that did, and brings it back.
    async fn kill_and_recover(&self, total: u64, live: &std::cell::RefCell<Live>) -> Outcome {
        let progress = self.pipeline()?.progress();
        let counted = || Counts::get(&progress.counted);
        while counted() < total / 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (node, led) = self.busiest().await?;
        let pid = self.stand.cluster.members().iter().find(|m| m.id == node).and_then(|m| m.pid).unwrap_or(0);
        self.stand.cluster.kill(node).await?;
        let killed = Instant::now();
        live.borrow()
            .say(&format!("  ✗ kill -9 of node {node} (process {pid}), which led {led} of the partitions"));
        let stall = stall(counted, total).await;
        live.borrow().say(&format!(
            "  … nothing was counted for {:.1} s; the other two have taken over",
            stall.as_secs_f64()
        ));
        self.stand.cluster.restart(node).await?;
        live.borrow().say(&format!(
            "  ✓ node {node} is back, {:.1} s after it was killed, and catches up",
            killed.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    async fn busiest(&self) -> Outcome<(i32, usize)> {
        let queue = self.stand.config.queue();
        let leaders = tokio::task::spawn_blocking(move || moim_pipeline::queue::leaders(&queue)).await;
        let leaders = leaders
            .map_err(|e| Failure::error(e.to_string()))?
            .map_err(|e| super::pipeline::kafka_failure(&e))?;
        leaders
            .into_iter()
            .max_by_key(|(_, led)| *led)
            .ok_or_else(|| Failure::error("no partition has a leader"))
    }

    fn show(&self, verdict: &Verdict) -> Outcome {
        let word = if verdict.is_ok() { "VERIFIED" } else { "FAILED" };
        let text = format!(
            "{word}  sent {} = counted {} · lost {} · duplicated {} · dead-lettered {} · {:.1} s",
            grouped(verdict.sent),
            grouped(verdict.counted),
            grouped(verdict.lost),
            grouped(verdict.duplicated),
            grouped(verdict.dead_lettered),
            self.began.elapsed().as_secs_f64()
        );
        let text = if verdict.is_ok() { text } else { text.replace(" = counted", ", counted") };
        let line = "─".repeat(text.chars().count() + 2);
        say(&format!("\n┌{line}┐\n│ {text} │\n└{line}┘"))
    }

    async fn end(mut self) -> Outcome {
        if let Some(pipeline) = self.pipeline.take() {
            let stopping = tokio::task::spawn_blocking(move || pipeline.stop());
            // Workers in the middle of something are left to the end of the process.
            let _ = tokio::time::timeout(Duration::from_secs(3), stopping).await;
        }
        self.stand.cluster.end().await
    }
}

/// Waits for the next time to show something, without holding on to it meanwhile.
async fn tick(live: &std::cell::RefCell<Live>) {
    let next = live.borrow().pause();
    tokio::time::sleep(next).await;
}

/// The longest time without a count from now until counting goes on for a while.
async fn stall(counted: impl Fn() -> u64, total: u64) -> Duration {
    const CALM: Duration = Duration::from_millis(1_500);
    let (mut last, mut moved, mut longest) = (counted(), Instant::now(), Duration::ZERO);
    let began = Instant::now();
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let now = counted();
        if now > last {
            longest = longest.max(moved.elapsed());
            (last, moved) = (now, Instant::now());
            let calm = began.elapsed() > longest + CALM;
            if calm || now >= total {
                return longest;
            }
        } else if moved.elapsed() > Duration::from_secs(60) {
            return moved.elapsed();
        }
    }
}

fn table(members: &[Member]) -> Section {
    let mut table = Section::new(&["NODE", ">PID", "KAFKA", "REDIS", "ETCD", "ADMIN"]);
    for member in members {
        table.row(vec![
            member.id.to_string(),
            member.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            member.kafka.clone(),
            member.redis.clone().unwrap_or_else(|| "-".to_owned()),
            member.etcd.clone(),
            member.admin.clone(),
        ]);
    }
    table
}

fn say(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}
