//! Whether the wall clock of this node is right, as far as the other nodes can say.
//!
//! Shard time takes a large jump of the wall clock only if a majority of the nodes has about the same time
//! (`shard/time.rs`). Nothing is asked before a shard is in doubt.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use moim_base::BrokerId;

use super::Service;
use super::give::{Ask, Said};
use crate::peer::Wire;
use crate::shard::time::JUMP_MS;
use crate::shared::lock;

/// How long an agreement holds.
const HOLDS_NS: u64 = 10_000_000_000;
/// Between two rounds.
const PAUSE: Duration = Duration::from_secs(1);
/// For one answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Asks the others whenever a shard is in doubt.
pub(super) async fn run(service: Arc<Service>) {
    loop {
        service.shared.time_doubt.notified().await;
        let nodes = service.nodes();
        // Before the others are asked: what is stepped meanwhile is not agreed.
        let (now_ns, wall_ms) = (service.parts.clock.monotonic_ns(), service.parts.clock.wall_ms());
        let others = nodes.iter().filter(|node| **node != service.options.node);
        let mut offsets = Vec::new();
        for node in others {
            offsets.extend(service.clock_of(*node).await);
        }
        let total = nodes.len();
        if total > 0 && agrees(&offsets, total) {
            service.shared.agree_on_time(now_ns, wall_ms, HOLDS_NS);
            tracing::info!(?offsets, nodes = total, "wall clock jump confirmed by a majority");
        } else {
            tracing::warn!(
                ?offsets,
                nodes = total,
                "wall clock jump not confirmed by a majority; shard time goes on without it"
            );
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether this node and those whose clocks differ by little are more than half of all.
fn agrees(offsets: &[i64], nodes: usize) -> bool {
    let same = offsets.iter().filter(|offset| offset.abs() <= JUMP_MS).count();
    2 * (same + 1) > nodes
}

impl Service {
    /// The nodes that have a part in any shard; none before the records of the shards were read.
    fn nodes(&self) -> BTreeSet<BrokerId> {
        let records = lock(&self.records);
        records.values().flat_map(|state| state.replicas.iter().copied()).collect()
    }

    /// By how much the clock of another node is ahead of ours.
    async fn clock_of(&self, node: BrokerId) -> Option<i64> {
        let clock = &self.parts.clock;
        let answer = async {
            let began_ms = clock.wall_ms();
            let mut wire = Wire::open(self.parts.dialler.dial(node).await?).await?;
            wire.send(&Ask::Clock, b"").await?;
            let said = wire.receive::<Said>().await?;
            std::io::Result::Ok((said, began_ms, clock.wall_ms()))
        };
        let (said, began_ms, ended_ms) = tokio::time::timeout(ANSWER, answer).await.ok()?.ok()?;
        match said? {
            (Said::Clock { wall_ms }, _) => Some(wall_ms - (began_ms + (ended_ms - began_ms) / 2)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_of_all_nodes_must_have_about_the_same_time() {
        for (name, offsets, nodes, wanted) in [
            ("alone", &[][..], 1, true),
            ("nobody answers", &[], 3, false),
            ("one of two others agrees", &[3, 3_600_000], 3, true),
            ("one answers, and agrees", &[-9_000], 3, true),
            ("both disagree", &[-3_600_000, -3_600_001], 3, false),
            ("one of one other disagrees", &[11_000], 2, false),
            ("two of four others agree", &[0, 0, 20_000, 20_000], 5, true),
            ("one of four others agrees", &[0, 20_000, 20_000, 20_000], 5, false),
        ] {
            assert_eq!(agrees(offsets, nodes), wanted, "{name}");
        }
    }
}
