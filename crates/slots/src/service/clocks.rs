//! Confirms the wall clock of this node by a majority of the nodes' clocks.
//!
//! Shard time follows a large jump of the wall clock only if a majority of the nodes shows about the same time
//! (`shard/time.rs`). The nodes are asked only when a shard needs it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use moim_base::BrokerId;

use super::Service;
use crate::peer::{PeerConnection, PeerRequest, PeerResponse};
use crate::shard::time::JUMP_MS;
use crate::shared::lock;

/// How long a confirmation holds.
const CONFIRMED_NS: u64 = 10_000_000_000;
/// The pause between two rounds.
const ROUND_PAUSE: Duration = Duration::from_secs(1);
/// The timeout of one response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Asks the other nodes whenever the wall clock is unconfirmed.
pub(super) async fn run(service: Arc<Service>) {
    loop {
        service.shared.clock_unconfirmed.notified().await;
        let nodes = service.nodes();
        // Before the other nodes are asked: a step of the clock meanwhile is not confirmed.
        let (now_ns, wall_ms) = (service.parts.clock.monotonic_ns(), service.parts.clock.wall_ms());
        let others = nodes.iter().filter(|node| **node != service.options.node);
        let mut offsets = Vec::new();
        for node in others {
            offsets.extend(service.clock_of(*node).await);
        }
        let total = nodes.len();
        if total > 0 && is_majority(&offsets, total) {
            service.shared.agree_on_time(now_ns, wall_ms, CONFIRMED_NS);
            tracing::info!(?offsets, nodes = total, "wall clock jump confirmed by a majority");
        } else {
            tracing::warn!(
                ?offsets,
                nodes = total,
                "wall clock jump not confirmed by a majority; shard time goes on without it"
            );
        }
        tokio::time::sleep(ROUND_PAUSE).await;
    }
}

/// True if this node and the nodes with about the same time are a majority.
fn is_majority(offsets: &[i64], nodes: usize) -> bool {
    let same = offsets.iter().filter(|offset| offset.abs() <= JUMP_MS).count();
    2 * (same + 1) > nodes
}

impl Service {
    /// The nodes that are replicas of any shard; empty before the shards' records were read.
    fn nodes(&self) -> BTreeSet<BrokerId> {
        let records = lock(&self.records);
        records.values().flat_map(|state| state.replicas.iter().copied()).collect()
    }

    /// How much the wall clock of another node is ahead of this node's.
    async fn clock_of(&self, node: BrokerId) -> Option<i64> {
        let clock = &self.parts.clock;
        let answer = async {
            let began_ms = clock.wall_ms();
            let mut connection = PeerConnection::open(self.parts.dialler.dial(node).await?).await?;
            connection.send(&PeerRequest::Clock, b"").await?;
            let response = connection.receive::<PeerResponse>().await?;
            std::io::Result::Ok((response, began_ms, clock.wall_ms()))
        };
        let (response, began_ms, ended_ms) =
            tokio::time::timeout(RESPONSE_TIMEOUT, answer).await.ok()?.ok()?;
        match response? {
            (PeerResponse::Clock { wall_ms }, _) => Some(wall_ms - (began_ms + (ended_ms - began_ms) / 2)),
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
            ("no node answers", &[], 3, false),
            ("one of two others is_majority", &[3, 3_600_000], 3, true),
            ("one answers, and is_majority", &[-9_000], 3, true),
            ("both disagree", &[-3_600_000, -3_600_001], 3, false),
            ("one of one other disagrees", &[11_000], 2, false),
            ("two of four others agree", &[0, 0, 20_000, 20_000], 5, true),
            ("one of four others is_majority", &[0, 20_000, 20_000, 20_000], 5, false),
        ] {
            assert_eq!(is_majority(offsets, nodes), wanted, "{name}");
        }
    }
}
