//! `moim manager`: runs a partition manager until a signal stops it.
//!
//! The one line on stdout is `ready namespace=… manager=H:P`; logs go to stderr. Any number of managers may run for
//! one namespace: they elect one of them, and all of them push the table.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use moim_base::task::{Scope, Shutdown};
use moim_cluster::manager::{Manager, ManagerOptions};
use moim_cluster::{Context, EtcdRepository};
use moim_node::{Signals, cannot_listen, raise_file_limit, start_logs, use_small_pages};

use crate::coordination::connect;
use crate::exit::{Failure, Outcome};
use crate::target::{EtcdArgs, seconds};

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim manager                                              # on 127.0.0.1:9646, for the namespace `moim`
  moim manager --namespace actorbase --port 0 --initial-partitions 64
  moim manager --etcd 10.0.0.1:2379,10.0.0.2:2379 --host 10.0.0.5 --insecure

Servers register under /NAMESPACE/nodes/ and follow the manager that leads; SDKs follow any of them. The table is at
/NAMESPACE/routing. Start a second manager anywhere to have one in reserve.")]
pub(crate) struct ManagerArgs {
    #[command(flatten)]
    client: EtcdArgs,
    /// Whose table
    #[arg(long, default_value = "moim")]
    namespace: String,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 9646)]
    port: u16,
    /// The address that servers and SDKs are told [default: the listener's own]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Partitions of the first table
    #[arg(long, default_value_t = 16, value_name = "N")]
    initial_partitions: usize,
    /// How long a leading manager that is gone is waited for
    #[arg(long, default_value = "3s", value_parser = seconds)]
    ttl: Duration,
    /// Leave ranges where they are when servers come
    #[arg(long)]
    no_rebalance: bool,
    /// Allow an address that other machines can reach, without TLS and authentication
    #[arg(long)]
    insecure: bool,
}

pub(crate) fn run(args: &ManagerArgs) -> Outcome {
    if !args.host.is_loopback() && !args.insecure {
        return Err(Failure::usage(format!("{} can be reached from other machines", args.host))
            .hint("the port has no TLS and no authentication: add --insecure if the network is closed"));
    }
    start_logs("info");
    raise_file_limit(0);
    use_small_pages();
    // Planning over a large table takes tens of milliseconds; pushes to servers and SDKs must not wait for that.
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    runtime.block_on(serve(args))
}

async fn serve(args: &ManagerArgs) -> Outcome {
    let mut signals = Signals::listen()?;
    let client = connect(&args.client).await?;
    let scope = Scope::new(Shutdown::new());
    let repository = Arc::new(EtcdRepository::new(client, ""));
    let context = Context::new("manager", repository, &scope);
    let address = SocketAddr::new(args.host, args.port);
    let options = ManagerOptions {
        listen: address,
        advertise: args.advertise.clone().unwrap_or_default(),
        election_ttl: args.ttl,
        initial_partitions: args.initial_partitions,
        rebalance: !args.no_rebalance,
        ..ManagerOptions::new(args.namespace.clone())
    };
    let started = Manager::start(&context, options).await;
    let manager = started.map_err(|error| cannot_listen(address, &error, "--port"))?;
    {
        let mut out = std::io::stdout().lock();
        writeln!(out, "ready namespace={} manager={}", args.namespace, manager.address())?;
        out.flush()?;
    }
    tokio::select! {
        name = signals.next() => tracing::info!(signal = name, "stopping"),
        () = scope.shutdown().stopped() => {}
    }
    scope.shutdown().stop();
    // Leases are revoked in the background: another manager can be elected at once.
    tokio::time::sleep(Duration::from_millis(50)).await;
    if scope.shutdown().has_panicked() {
        Err(Failure::error("a task of the manager panicked"))
    } else {
        Ok(())
    }
}
