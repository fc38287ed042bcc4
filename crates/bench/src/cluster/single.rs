//! Metrics 31 and 32: the assignment plan, a pure function; and the detection time of a killed member.

use std::collections::HashMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use moim_cluster::assignment::plan::{PlanNode, PlanPartition, plan};
use moim_cluster::config::StoreConfig;
use moim_cluster::membership::MemberStatus;
use moim_cluster::{Cluster, ClusterConfig};

use super::{Options, Running, store};
use crate::report::{Aim, Figure, Metric};
use crate::slices::median;

/// Number of computed plans.
const PLANS: usize = 7;
/// Timeout until a member is seen, or seen as gone.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The minimum number of moves of any plan that is balanced within one: an owner keeps at most a large share, and
/// only a limited number keep one.
fn least_moves(nodes: &[PlanNode], partitions: &[PlanPartition]) -> usize {
    let (share, larger) = (partitions.len() / nodes.len(), partitions.len() % nodes.len());
    let mut have: HashMap<&str, usize> = nodes.iter().map(|node| (node.id.as_str(), 0)).collect();
    for owner in partitions.iter().filter_map(|one| one.owner.as_deref()) {
        if let Some(count) = have.get_mut(owner) {
            *count += 1;
        }
    }
    let mut have: Vec<usize> = have.into_values().collect();
    have.sort_unstable_by(|a, b| b.cmp(a));
    let kept = have.iter().enumerate().map(|(at, have)| (*have).min(share + usize::from(at < larger)));
    partitions.len() - kept.sum::<usize>()
}

fn nodes(numbers: std::ops::Range<usize>) -> Vec<PlanNode> {
    numbers.map(|at| PlanNode { id: format!("n{at}"), zone: format!("z{}", at % 3) }).collect()
}

/// Metric 31.
pub(super) fn plans(options: &Options) -> Result<Metric> {
    let (count, servers) = (options.partitions, options.servers);
    let mut random = fastrand::Rng::with_seed(26);
    let zone = |at: usize| format!("z{}", at % 3);
    let fresh: Vec<_> = (0..count).map(|at| PlanPartition { owner: None, zone: zone(at) }).collect();
    // Random owners, far from balanced. A twentieth of the nodes is lost, as many are new.
    let lost = (servers / 20).max(1);
    let scattered: Vec<_> = (0..count)
        .map(|at| PlanPartition { owner: Some(format!("n{}", random.usize(0..servers))), zone: zone(at) })
        .collect();
    let mut figures = Vec::new();
    for (what, nodes, partitions) in [
        ("no partition has an owner", nodes(0..servers), &fresh),
        ("random owners, one in twenty lost", nodes(lost..servers + lost), &scattered),
    ] {
        let mut times = Vec::new();
        let mut moves = 0;
        for _ in 0..PLANS {
            let began = Instant::now();
            let made = plan(&nodes, partitions);
            times.push(began.elapsed().as_secs_f64());
            ensure!(made.owners.len() == count, "everything has an owner");
            moves = made.moves;
        }
        let took = median(times).context("plans were made")?;
        figures.push(Figure::new("plan", &format!("{what}: time"), took, "s", Some(Aim::AtMost(1.0))));
        let least = least_moves(&nodes, partitions).max(1);
        let above = (moves as f64 / least as f64 - 1.0) * 100.0;
        let text = format!("{what}: moves above the least possible ({least})");
        figures.push(Figure::new("plan", &text, above, "%", Some(Aim::AtMost(1.0))));
    }
    let title = format!("{count} partitions over {servers} nodes");
    Ok(Metric { number: 31, title, figures, ..Metric::default() })
}

fn config(etcd: &str, node: &str) -> ClusterConfig {
    let store = StoreConfig { kind: "etcd".into(), endpoints: vec![etcd.into()], ..StoreConfig::default() };
    ClusterConfig { node_id: node.into(), store, ..ClusterConfig::default() }
}

/// Runs a member with default settings until it is killed: the program of [`Options::member`].
pub fn member(etcd: &str) -> Result<()> {
    crate::load::runtime()?.block_on(async {
        let _cluster = Cluster::start(config(etcd, "victim")).await?;
        std::future::pending().await
    })
}

/// Metric 32.
pub(super) async fn detection(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let store = store(options)?;
    let etcd = store.endpoint(0);
    let observer = Cluster::start(config(&etcd, "observer")).await?;
    let (program, arguments) = options.member.split_first().context("a program that is a member")?;
    let mut times = Vec::new();
    for round in 0..options.rounds.clamp(1, 10) {
        progress(&format!("metric 32: kill {}", round + 1));
        let child = Command::new(program)
            .args(arguments)
            .arg(&etcd)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting a member")?;
        let mut victim = Running(child);
        await_status(&observer, MemberStatus::Up).await.context("the member does not come")?;
        // At a random point between two heartbeats.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(200..700))).await;
        let killed = Instant::now();
        victim.0.kill()?;
        await_status(&observer, MemberStatus::Down).await.context("the member does not go")?;
        times.push(killed.elapsed().as_secs_f64());
    }
    let worst = times.iter().copied().fold(0.0, f64::max);
    let middle = median(times).context("members were killed")?;
    observer.stop().await?;
    let figures = vec![
        Figure::new("members", "from kill -9 to DOWN, median", middle, "s", None),
        Figure::new("members", "from kill -9 to DOWN, worst", worst, "s", Some(Aim::AtMost(2.0))),
    ];
    let title = "a killed member, default settings".into();
    Ok(Metric { number: 32, title, figures, ..Metric::default() })
}

/// Waits until the victim has this status.
async fn await_status(observer: &Cluster, status: MemberStatus) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let is_so = || {
        let view = observer.members().view();
        view.iter().any(|member| member.info.id == "victim" && member.status == status)
    };
    while !is_so() {
        ensure!(Instant::now() < deadline, "not within {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_moves_are_the_excess_over_a_share_and_the_unassigned() {
        let own = |owner: &str| PlanPartition { owner: Some(owner.into()), zone: String::new() };
        let partitions = [own("n0"), own("n0"), own("n0"), own("gone"), own("n1")];
        // Five partitions over two nodes: three and two. n0 keeps three, n1 one, one is unassigned.
        assert_eq!(least_moves(&nodes(0..2), &partitions), 1);
        assert_eq!(plan(&nodes(0..2), &partitions).moves, 1);
        assert_eq!(least_moves(&nodes(5..6), &partitions), 5);
    }
}
