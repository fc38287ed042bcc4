//! `moim pipeline load`: clients that send lines.

use std::io::{BufRead as _, IsTerminal as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moim_base::{Clock as _, SystemClock};
use moim_pipeline::client::{self, ClientError};
use moim_pipeline::{ClientOptions, ClientState, ClientTls, Secret, Sending, lines};
use serde::Serialize;
use tokio::time::Instant;

use super::live::grouped;
use super::{CommonArgs, secret};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, note};

#[derive(Clone, Debug, Args)]
pub(crate) struct LoadArgs {
    /// Gateways, any of which will do
    #[arg(long, value_name = "HOST:PORT,…", value_delimiter = ',', default_value = "127.0.0.1:9700")]
    gateway: Vec<SocketAddr>,
    /// How many clients send at the same time
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,
    /// The name of the client, or what the names of several begin with
    #[arg(long, value_name = "NAME", default_value = "client")]
    client: String,
    /// What to send, line by line [default: the built-in text of 4,422 lines]
    #[arg(long, value_name = "FILE", conflicts_with = "typed")]
    file: Option<PathBuf>,
    /// Send the lines that are typed
    #[arg(long = "type")]
    typed: bool,
    /// At most so many lines a second and client [default: as fast as the gateways take them]
    #[arg(long, value_name = "N", value_parser = rate, conflicts_with = "typed")]
    rate: Option<f64>,
    /// Speak TLS with gateways whose certificate an authority in this file has signed (PEM)
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// The name their certificate must be for [default: the address in --gateway]
    #[arg(long, value_name = "NAME", requires = "tls_ca")]
    tls_name: Option<String>,
    /// Give up when nothing was acknowledged for so long [default: never]
    #[arg(long, value_name = "DURATION", value_parser = crate::target::duration)]
    patience: Option<Duration>,
    /// Where clients remember who they are
    #[arg(long, value_name = "DIR", default_value = ".moim/pipeline-clients")]
    state: PathBuf,
}

#[derive(Serialize)]
struct Sent {
    clients: usize,
    messages: u64,
    resent: u64,
    reconnects: u64,
    seconds: f64,
}

impl Report for Sent {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("clients", self.clients.to_string()),
            ("messages", grouped(self.messages)),
            ("sent again", grouped(self.resent)),
            ("reconnects", grouped(self.reconnects)),
            ("seconds", format!("{:.1}", self.seconds)),
        ])]
    }
}

pub(super) async fn run(common: &CommonArgs, args: &LoadArgs, output: Output) -> Outcome {
    let config = common.settings()?;
    let secret = secret(&config)?;
    if args.typed {
        return typed(args, secret).await;
    }
    let lines = match &args.file {
        None => built_in(),
        Some(path) => read(path)?,
    };
    let clients = options(args, &secret)?;
    let watched: Vec<Arc<Sending>> = clients.iter().map(|_| Arc::default()).collect();
    let total = lines.len() as u64 * clients.len() as u64;
    let bar = progress(total);
    let since = Instant::now();
    // A client with a missing message is reported at the end: the others continue.
    let sends = clients.iter().zip(&watched).map(|(options, watched)| async {
        match client::send(options, &lines, watched).await {
            Err(missing @ ClientError::Missing(..)) => Ok(Some(missing)),
            other => other.map(|()| None),
        }
    });
    let all = futures_util::future::try_join_all(sends);
    tokio::pin!(all);
    let sum = |of: fn(&Sending) -> u64| watched.iter().map(|sending| of(sending)).sum::<u64>();
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    let missing = loop {
        tokio::select! {
            done = &mut all => break done.map_err(failure)?.into_iter().flatten().next(),
            _ = tick.tick() => bar.set_position(sum(|s| s.acked.load(Ordering::Relaxed))),
        }
    };
    bar.finish_and_clear();
    let written = sum(|s| s.written.load(Ordering::Relaxed));
    output.print(&Sent {
        clients: clients.len(),
        messages: total,
        resent: written.saturating_sub(total),
        reconnects: sum(|s| s.reconnects.load(Ordering::Relaxed)),
        seconds: since.elapsed().as_secs_f64(),
    })?;
    missing.map_or(Ok(()), |missing| Err(failure(missing)))
}

fn tls(args: &LoadArgs) -> Outcome<Option<ClientTls>> {
    let load = |file: &PathBuf| ClientTls::load(file, args.tls_name.as_deref());
    args.tls_ca.as_ref().map(load).transpose().map_err(|error| Failure::usage(error.to_string()))
}

fn rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate: &f64| *rate > 0.0 && rate.is_finite())
        .ok_or_else(|| "not a rate".to_owned())
}

/// The built-in text.
pub(crate) fn built_in() -> Vec<Bytes> {
    lines::all().into_iter().map(Bytes::from).collect()
}

/// The lines of a file, without their ends. Empty lines are no messages.
fn read(path: &std::path::Path) -> Outcome<Vec<Bytes>> {
    let bytes =
        std::fs::read(path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let line = |line: &[u8]| Bytes::copy_from_slice(line.strip_suffix(b"\r").unwrap_or(line));
    let lines: Vec<Bytes> = bytes.split(|byte| *byte == b'\n').map(line).filter(|l| !l.is_empty()).collect();
    if lines.is_empty() {
        return Err(Failure::usage(format!("{}: there is no line to send", path.display())));
    }
    if let Some(at) = lines.iter().position(|line| line.len() > moim_pipeline::frame::MAX_MESSAGE) {
        return Err(Failure::usage(format!("{}: line {} is too long", path.display(), at + 1)));
    }
    Ok(lines)
}

fn options(args: &LoadArgs, secret: &Secret) -> Outcome<Vec<ClientOptions>> {
    let now_ms = u64::try_from(SystemClock::new().wall_ms()).unwrap_or(0);
    let tls = tls(args)?;
    let one = |client: String| {
        let state =
            ClientState::begin(&args.state, &client, now_ms).map_err(|e| Failure::error(e.to_string()))?;
        let (gateways, secret) = (args.gateway.clone(), secret.clone());
        Ok(ClientOptions {
            client,
            incarnation: state.incarnation(),
            gateways,
            secret,
            tls: tls.clone(),
            patience: args.patience,
            rate: args.rate,
        })
    };
    match args.clients {
        0 => Err(Failure::usage("--clients 0: there must be at least one client")),
        1 => Ok(vec![one(args.client.clone())?]),
        n => (0..n).map(|at| one(format!("{}-{at}", args.client))).collect(),
    }
}

/// Every line is kept on disk before it is sent, and sent again by the next life of the client if need be.
async fn typed(args: &LoadArgs, secret: Secret) -> Outcome {
    let now_ms = u64::try_from(SystemClock::new().wall_ms()).unwrap_or(0);
    let state =
        ClientState::begin(&args.state, &args.client, now_ms).map_err(|e| Failure::error(e.to_string()))?;
    let options = ClientOptions {
        client: args.client.clone(),
        incarnation: state.incarnation(),
        gateways: args.gateway.clone(),
        secret,
        tls: tls(args)?,
        patience: args.patience,
        rate: None,
    };
    let mut lines = state.typed().map_err(|e| Failure::error(e.to_string()))?;
    let watched = Arc::default();
    if !lines.is_empty() {
        client::send(&options, &lines, &watched).await.map_err(failure)?;
    }
    if std::io::stdin().is_terminal() {
        note("type a line to send it; Ctrl-D ends");
    }
    let (sender, mut typed) = tokio::sync::mpsc::channel(16);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    while let Some(line) = typed.recv().await {
        if line.is_empty() {
            continue;
        }
        state.keep(&line).map_err(|e| Failure::error(e.to_string()))?;
        lines.push(Bytes::from(line));
        client::send(&options, &lines, &watched).await.map_err(failure)?;
        note(format_args!("message {} is in the queue", lines.len()));
    }
    Ok(())
}

fn failure(error: ClientError) -> Failure {
    match &error {
        ClientError::Refused(_) => Failure::new(Status::NotAllowed, error.to_string()),
        ClientError::Missing(..) => Failure::new(Status::Unhealthy, error.to_string())
            .hint("`moim pipeline verify` says where it went"),
        ClientError::GaveUp { .. } => Failure::new(Status::Unreachable, error.to_string()),
        ClientError::NoGateway => Failure::usage(error.to_string()),
    }
}

fn progress(total: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template("  sent {bar:32} {human_pos} of {human_len}  {per_sec}  {eta} left");
    let bar = ProgressBar::new(total);
    if std::io::stderr().is_terminal() {
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    } else {
        ProgressBar::hidden()
    }
}
