//! `moim bench slots`: SET and then GET over keys made for the occasion.
//!
//! All clients share one smart client, which sends what they ask at the same time together; every GET must find what was
//! SET, or the run has failed.

use std::time::Duration;

use clap::Args;
use futures_util::StreamExt as _;
use moim_slot_client::{Client, Error, Value, cmd};

use super::load::{Done, Figures, LoadArgs, Measured, Phase, Stop, noise, together, unique};
use crate::cmd::pipeline::live::grouped;
use crate::coordination::address;
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, note};
use crate::target::{Service, duration, target};

/// Keys made and deleted at a time.
const AT_ONCE: usize = 128;

#[derive(Debug, Args)]
pub(super) struct SlotsBench {
    /// Redis Cluster nodes [default: $MOIM_REDIS, else the nearest .moim/context.toml, else 127.0.0.1:6379]
    #[arg(long, value_name = "HOST:PORT,…")]
    redis: Option<String>,
    #[command(flatten)]
    load: LoadArgs,
    /// How many clients ask at the same time, each one thing at a time
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    clients: u32,
    /// How many keys there are
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=100_000_000))]
    size: u32,
    /// How long a command may wait for servers
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    timeout: Duration,
}

pub(super) async fn run(args: &SlotsBench, stop: &Stop, output: Output) -> Outcome {
    let servers: Vec<_> = target(Service::Redis, args.redis.as_deref())?
        .addresses
        .iter()
        .map(|(host, port)| address(host, *port))
        .collect();
    let servers = servers.join(",");
    let client = Client::connect(&servers).await.map_err(|error| {
        failure(&error).hint("--redis names nodes of a Redis Cluster; `moim dev` starts one")
    })?;
    let bench = Bench { args, name: unique(), client: client.timeout(args.timeout), stop };
    let measured = bench.measure().await;
    if let Err(failure) = bench.clean().await {
        note(format_args!("keys {}:* are left over: {failure}", bench.name));
    }
    let clients = args.clients as usize;
    output.print(&Measured { bench: "slots", servers, clients, phases: measured? })
}

struct Bench<'a> {
    args: &'a SlotsBench,
    name: String,
    client: Client,
    stop: &'a Stop,
}

impl Bench<'_> {
    fn key(&self, number: u32) -> String {
        format!("{}:{number}", self.name)
    }

    fn any_key(&self) -> String {
        self.key(fastrand::u32(..self.args.keys))
    }

    async fn measure(&self) -> Outcome<Vec<Figures>> {
        let args = self.args;
        let value = noise(args.size as usize);
        note(format_args!("making {} keys", grouped(args.keys.into())));
        self.each_key(async |key| self.set(&key, &value).await).await?;
        let seconds = args.load.duration.as_secs_f64();
        note(format_args!("{} clients SET for {seconds:.0} s", grouped(args.clients.into())));
        let phase = self.phase();
        let done = Done { operations: 1, bytes: value.len() };
        let set = async |_| self.set(&self.any_key(), &value).await.map(|()| done);
        let set = together("SET", (0..args.clients).map(|_| phase.repeat(set))).await?;
        if self.stop.is_stopped() {
            return Ok(vec![set]);
        }
        note(format_args!("{} clients GET for {seconds:.0} s", grouped(args.clients.into())));
        let phase = self.phase();
        let get = async |_| {
            let key = self.any_key();
            let found: Value = self.client.run(cmd("GET").arg(&key)).await.map_err(|e| failure(&e))?;
            if found.as_bytes().is_some_and(|bytes| bytes.as_ref() == value.as_slice()) {
                return Ok(done);
            }
            Err(Failure::new(Status::Unhealthy, format!("{key} does not hold what was written")))
        };
        let get = together("GET", (0..args.clients).map(|_| phase.repeat(get))).await?;
        Ok(vec![set, get])
    }

    fn phase(&self) -> Phase<'_> {
        let workers = self.args.clients as usize;
        Phase::begin(&self.args.load, self.stop, workers, 1, self.args.timeout)
    }

    async fn set(&self, key: &str, value: &[u8]) -> Outcome {
        self.client.run::<Value>(cmd("SET").arg(key).arg(value)).await.map(drop).map_err(|e| failure(&e))
    }

    async fn each_key(&self, work: impl AsyncFn(String) -> Outcome) -> Outcome {
        let all = (0..self.args.keys).map(|number| work(self.key(number)));
        let mut all = futures_util::stream::iter(all).buffer_unordered(AT_ONCE);
        while let Some(done) = all.next().await {
            done?;
        }
        Ok(())
    }

    async fn clean(&self) -> Outcome {
        let unlink = async |key: String| {
            self.client.run::<Value>(cmd("UNLINK").arg(&key)).await.map(drop).map_err(|e| failure(&e))
        };
        self.each_key(unlink).await
    }
}

fn failure(error: &Error) -> Failure {
    let status = match error {
        Error::Timeout { .. } | Error::Interrupted { .. } | Error::Partly(_) => Status::Timeout,
        Error::Unavailable { .. } | Error::TooManyRedirects(..) | Error::Closed => Status::Unreachable,
        Error::Config(_) => Status::Usage,
        Error::Server(_) | Error::CrossSlot | Error::Unexpected { .. } | Error::Protocol(_) => Status::Error,
    };
    Failure::new(status, error.to_string())
}
