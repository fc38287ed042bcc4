//! After the verdict: a small load that goes on and is verified all the time, while a person looks around and breaks things.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moim_pipeline::verify::{judge, observe};
use moim_pipeline::{ClientOptions, client};
use tokio::time::Instant;

use super::keys::Keys;
use super::{Demo, DemoArgs, say};
use crate::cmd::pipeline::live::grouped;
use crate::exit::Outcome;

/// Lines per round, and how long a round lasts at least.
const LINES: usize = 10;
const ROUND: Duration = Duration::from_secs(1);
/// How often the verdict is said.
const SAY: Duration = Duration::from_secs(10);

pub(super) async fn run(demo: &Demo, args: &DemoArgs) -> Outcome {
    welcome(demo, args)?;
    let options = ClientOptions {
        client: "trickle".into(),
        incarnation: 1,
        gateways: demo.pipeline()?.gateways(),
        secret: demo.stand.secret.clone(),
        tls: None,
        patience: None,
        rate: None,
    };
    let load = load(options);
    tokio::pin!(load);
    let mut keys = Keys::listen();
    let mut said = tokio::time::interval_at(Instant::now() + SAY, SAY);
    loop {
        tokio::select! {
            () = &mut load => {}
            _ = said.tick() => verdict(demo).await?,
            key = keys.next() => match key {
                'q' => return Ok(()),
                'v' => verdict(demo).await?,
                'k' => kill(demo).await?,
                'r' => restart(demo).await?,
                _ => {}
            }
        }
    }
}

/// Sends lines for ever. A gateway that refuses is asked again.
async fn load(options: ClientOptions) {
    let mut lines: Vec<Bytes> = Vec::new();
    let watched = Arc::default();
    loop {
        let round = Instant::now();
        for _ in 0..LINES {
            lines.push(Bytes::from(format!("trickle {}", lines.len() + 1)));
        }
        if let Err(error) = client::send(&options, &lines, &watched).await {
            tracing::debug!(%error, "the trickle was refused");
        }
        tokio::time::sleep_until(round + ROUND).await;
    }
}

async fn verdict(demo: &Demo) -> Outcome {
    let text = match observe(&demo.stand.store).await {
        Ok(observed) => {
            let counts = observed.clients.get("trickle").cloned().unwrap_or_default();
            let verdict = judge(&observed, None);
            format!(
                "trickle: sent {} · counted {} · in flight {}   all: duplicated {}",
                grouped(counts.sent),
                grouped(counts.counted),
                grouped(counts.in_flight()),
                grouped(verdict.duplicated)
            )
        }
        Err(error) => format!("the store does not answer just now: {error}"),
    };
    say(&text)
}

async fn kill(demo: &Demo) -> Outcome {
    let running = demo.stand.cluster.members().iter().filter(|member| member.pid.is_some()).count();
    if running < 3 {
        return say("one node is down already: with two of three down there is no quorum (r restarts it)");
    }
    let (node, led) = demo.busiest().await?;
    demo.stand.cluster.kill(node).await?;
    say(&format!("✗ kill -9 of node {node}, which led {led} of the partitions; r brings it back"))
}

async fn restart(demo: &Demo) -> Outcome {
    for member in demo.stand.cluster.members().iter().filter(|member| member.pid.is_none()) {
        demo.stand.cluster.restart(member.id).await?;
        say(&format!("✓ node {} is back", member.id))?;
    }
    Ok(())
}

fn welcome(demo: &Demo, args: &DemoArgs) -> Outcome {
    let members = demo.stand.cluster.members();
    let listed = |of: fn(&super::Member) -> Option<String>| {
        members.iter().filter_map(of).collect::<Vec<_>>().join(",")
    };
    let (kafka, etcd) = (listed(|m| Some(m.kafka.clone())), listed(|m| Some(m.etcd.clone())));
    let redis = members.first().and_then(|m| m.redis.clone()).unwrap_or_default();
    let (host, port) = redis.rsplit_once(':').unwrap_or(("127.0.0.1", "6379"));
    say(&format!(
        "\nThe cluster stays up, with ten messages a second that are verified all the time. Lines to paste:\n\
         \x20 moim topic consume message_aggregation -n 3\n\
         \x20 moim group describe pipeline-counter\n\
         \x20 moim cluster status\n\
         \x20 moim pipeline verify\n\
         \x20 kcat -b {kafka} -L\n\
         \x20 redis-cli -c -h {host} -p {port} cluster shards\n\
         \x20 ETCDCTL_API=3 etcdctl --endpoints={etcd} get --prefix /moim/ --keys-only\n\
         \x20 moim dev kill 2 --data {data}      moim dev restart 2 --data {data}\n\
         Keys: k kill a node · r restart it · v verify now · q quit\n",
        data = args.data.display()
    ))
}
