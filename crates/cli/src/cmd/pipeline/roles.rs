//! `moim pipeline run|gateway|counter|aggregator`: roles that run until a signal stops them.

use std::io::IsTerminal as _;
use std::time::Duration;

use moim_node::{Signals, start_logs};
use moim_pipeline::{Faults, Parts, Pipeline, PipelineConfig, Store};
use serde::Serialize;
use tokio::time::Instant;

use super::live::Live;
use super::{CommonArgs, RoleArgs, create_topics, secret, store};
use crate::exit::{Failure, Outcome};
use crate::output::{Output, Report, Section, note};

/// Which roles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    All,
    Gateway,
    Counter,
    Aggregator,
}

#[derive(Serialize)]
struct Started {
    name: String,
    gateways: Vec<String>,
    counters: usize,
    aggregators: usize,
    token_file: String,
}

impl Report for Started {
    fn sections(&self) -> Vec<Section> {
        let gateways = if self.gateways.is_empty() { "-".to_owned() } else { self.gateways.join(",") };
        vec![Section::pairs([
            ("pipeline", self.name.clone()),
            ("gateways", gateways),
            ("counters", self.counters.to_string()),
            ("aggregators", self.aggregators.to_string()),
            ("token file", self.token_file.clone()),
        ])]
    }
}

/// How long an unavailable store is retried.
const PATIENCE: Duration = Duration::from_secs(30);

/// The store, even if it is only just starting or in the middle of a failover.
async fn patiently_connected(config: &PipelineConfig) -> Outcome<Store> {
    let until = Instant::now() + PATIENCE;
    let mut told = false;
    loop {
        match store(config).await {
            Err(failure) if Instant::now() < until => {
                if !std::mem::replace(&mut told, true) {
                    let seconds = PATIENCE.as_secs();
                    let why = &failure.message;
                    note(format_args!("waiting up to {seconds} s for the store at {}: {why}", config.redis));
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            other => return other,
        }
    }
}

pub(super) async fn run(common: &CommonArgs, role: &RoleArgs, which: Which, output: Output) -> Outcome {
    // Transient errors belong to a log; a terminal shows the counts.
    let quiet = std::io::stderr().is_terminal();
    start_logs(if quiet { "warn" } else { "warn,moim_pipeline=info" });
    let mut signals = Signals::listen()?;
    let mut config = common.settings()?;
    if let Some(listen) = role.listen {
        config.gateway.listen = listen;
    }
    if let Some(timeout) = role.report_timeout {
        config.gateway.report_timeout_ms = timeout.as_millis() as u64;
    }
    if let Some(size) = role.transaction_size {
        config.counter.transaction_size = size;
    }
    if role.tls_cert.is_some() {
        config.gateway.tls_cert_file.clone_from(&role.tls_cert);
        config.gateway.tls_key_file.clone_from(&role.tls_key);
    }
    config.gateway.ack_after_queue |= role.ack_after_queue;
    let parts = Parts {
        gateways: matches!(which, Which::All | Which::Gateway),
        counters: matches!(which, Which::All | Which::Counter),
        aggregators: matches!(which, Which::All | Which::Aggregator),
        first_instance: role.first_instance,
        faults: Faults {
            fail_report_of: role.fail_report_of,
            lose_report_of: role.lose_report_of,
            producer_messages: role.producer_messages,
        },
    };
    if let Some(instances) = role.instances {
        config.gateway.instances = instances;
        config.counter.instances = instances;
        config.aggregator.instances = instances;
    }
    let secret = secret(&config)?;
    let starting = async {
        let store = patiently_connected(&config).await?;
        create_topics(&config).await?;
        Pipeline::start(&config, parts, store, secret).await.map_err(|e| Failure::error(e.to_string()))
    };
    let pipeline = tokio::select! {
        started = starting => started?,
        _ = signals.next() => return Ok(()),
    };
    output.print(&Started {
        name: config.name.clone(),
        gateways: pipeline.gateways().iter().map(ToString::to_string).collect(),
        counters: if parts.counters { config.counter.instances } else { 0 },
        aggregators: if parts.aggregators { config.aggregator.instances } else { 0 },
        token_file: config.token_file.display().to_string(),
    })?;
    let mut live = Live::new(None);
    loop {
        tokio::select! {
            _ = signals.next() => break,
            () = live.tick() => live.show(pipeline.progress()),
        }
    }
    live.end();
    tokio::task::spawn_blocking(move || pipeline.stop()).await.map_err(|e| Failure::error(e.to_string()))
}
