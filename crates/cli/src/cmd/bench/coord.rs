//! `moim bench coord`: puts, reads of the newest state, and how soon a watcher sees a change, over keys made for the
//! occasion. Each client has a connection of its own.

use bytes::Bytes;
use clap::Args;
use futures_util::StreamExt as _;
use moim_cluster::EtcdClient;
use moim_cluster::etcd::{EtcdError, EtcdWatch, WatchOptions, prefix_range};
use moim_wire_grpc::etcd::{DeleteRangeRequest, PutRequest, RangeRequest};
use tokio::time::timeout;

use super::load::{Done, Figures, LoadArgs, Measured, Phase, Stop, noise, together, unique};
use crate::coordination::{address, connect, failure, open};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, note};
use crate::target::EtcdArgs;

/// Keys made at a time.
const AT_ONCE: usize = 64;

#[derive(Debug, Args)]
pub(super) struct CoordBench {
    #[command(flatten)]
    client: EtcdArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// How many clients ask at the same time, each one thing at a time
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    clients: u16,
    /// How many keys there are
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 256, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    size: u32,
}

pub(super) async fn run(args: &CoordBench, stop: &Stop, output: Output) -> Outcome {
    let client = connect(&args.client).await?;
    let target = args.client.target()?;
    let servers: Vec<_> = target.addresses.iter().map(|(host, port)| address(host, *port)).collect();
    let name = unique();
    let clients = (0..args.clients).map(|_| open(&target, &args.client)).collect();
    let bench = Bench { args, name: name.clone(), clients, stop };
    let measured = bench.measure(&client).await;
    let (key, range_end) = prefix_range(format!("{name}/").as_bytes());
    let all = DeleteRangeRequest { key: key.into(), range_end: range_end.into(), ..Default::default() };
    if let Err(error) = client.delete(&all).await {
        note(format_args!("keys {name}/… are left over: {error}"));
    }
    let clients = usize::from(args.clients);
    output.print(&Measured { bench: "coord", servers: servers.join(","), clients, phases: measured? })
}

struct Bench<'a> {
    args: &'a CoordBench,
    name: String,
    clients: Vec<EtcdClient>,
    stop: &'a Stop,
}

impl Bench<'_> {
    async fn measure(&self, client: &EtcdClient) -> Outcome<Vec<Figures>> {
        let seconds = self.args.load.duration.as_secs_f64();
        let value = Bytes::from(noise(self.args.size as usize));
        let done = Done { operations: 1, bytes: value.len() };
        let workers = self.clients.len();
        self.fill(client, &value).await?;
        note(format_args!("{workers} clients put for {seconds:.0} s"));
        let phase = self.phase(workers);
        let put = self.clients.iter().map(|client| {
            let (phase, value) = (&phase, &value);
            phase.repeat(async move |_| {
                let put = self.put(self.any_key(), value);
                client.put(&put).await.map(|_| done).map_err(|error| failure(&error))
            })
        });
        let mut figures = vec![together("put", put).await?];
        if self.stop.is_stopped() {
            return Ok(figures);
        }
        note(format_args!("{workers} clients read the newest state for {seconds:.0} s"));
        let phase = self.phase(workers);
        let get = self.clients.iter().map(|client| {
            let phase = &phase;
            phase.repeat(async move |_| {
                let range = RangeRequest { key: self.any_key(), ..Default::default() };
                let found = client.range(&range).await.map_err(|error| failure(&error))?;
                Ok(Done { operations: 1, bytes: found.kvs.first().map_or(0, |kv| kv.value.len()) })
            })
        });
        figures.push(together("get", get).await?);
        if self.stop.is_stopped() {
            return Ok(figures);
        }
        note(format_args!("a client puts and a watcher waits for it, for {seconds:.0} s"));
        figures.push(self.watch(client, &value).await?);
        Ok(figures)
    }

    /// Every key once, so that there is something to read.
    async fn fill(&self, client: &EtcdClient, value: &Bytes) -> Outcome {
        let all = (0..self.args.keys).map(|number| {
            let put = self.put(self.key(number), value);
            async move { client.put(&put).await.map(drop).map_err(|error| failure(&error)) }
        });
        let mut all = futures_util::stream::iter(all).buffer_unordered(AT_ONCE);
        while let Some(done) = all.next().await {
            done?;
        }
        Ok(())
    }

    /// One put at a time; its time is over when the watcher has seen it.
    async fn watch(&self, client: &EtcdClient, value: &Bytes) -> Outcome<Figures> {
        let (key, range_end) = prefix_range(format!("{}/", self.name).as_bytes());
        let options = WatchOptions { key: key.into(), range_end: range_end.into(), ..Default::default() };
        let refused = |error: moim_cluster::etcd::WatchError| Failure::error(error.to_string());
        let mut watch = self.clients[0].watch(options).await.map_err(refused)?;
        let phase = self.phase(1);
        let work = async |_| {
            let put = self.put(self.any_key(), value);
            let header = client.put(&put).await.map_err(|error: EtcdError| failure(&error))?.header;
            let revision = header.map_or(0, |header| header.revision);
            timeout(self.args.client.timeout, seen(&mut watch, revision))
                .await
                .map_err(|_| Failure::new(Status::Timeout, "a watcher was not told of a change"))??;
            Ok(Done { operations: 1, bytes: value.len() })
        };
        together("watch", [phase.repeat(work)]).await
    }

    fn phase(&self, workers: usize) -> Phase<'_> {
        Phase::begin(&self.args.load, self.stop, workers, 1, self.args.client.timeout)
    }

    fn any_key(&self) -> Bytes {
        self.key(fastrand::u32(..self.args.keys))
    }

    fn key(&self, number: u32) -> Bytes {
        Bytes::from(format!("{}/{number}", self.name))
    }

    fn put(&self, key: Bytes, value: &Bytes) -> PutRequest {
        PutRequest { key, value: value.clone(), ..Default::default() }
    }
}

/// Returns once the watch has delivered this revision.
async fn seen(watch: &mut EtcdWatch, revision: i64) -> Outcome {
    while watch.next_revision() <= revision {
        watch.next().await.map_err(|error| Failure::error(error.to_string()))?;
    }
    Ok(())
}
