//! Producer-id allocation: every id is unique in the life of the cluster.
//!
//! A block of ids is taken from the state repository by compare-and-swap; the rest of a block is lost when the
//! process ends, which is harmless.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use moim_state::{Expect, StateRepository, Swap};
use moim_wire_kafka::ErrorCode;

const KEY: &str = "/moim/producer-ids";
const BLOCK: i64 = 1_000;

#[derive(Serialize, Deserialize)]
struct NextBlock {
    next: i64,
}

/// The producer-id allocator.
pub(crate) struct ProducerIds {
    repository: Arc<dyn StateRepository>,
    block: tokio::sync::Mutex<std::ops::Range<i64>>,
}

impl ProducerIds {
    pub(crate) fn new(repository: Arc<dyn StateRepository>) -> Self {
        Self { repository, block: tokio::sync::Mutex::new(0..0) }
    }

    /// Allocates a producer id that is unique in the cluster.
    pub(crate) async fn next(&self) -> Result<i64, ErrorCode> {
        let mut block = self.block.lock().await;
        loop {
            if let Some(id) = block.next() {
                return Ok(id);
            }
            *block = self.take_block().await?;
        }
    }

    async fn take_block(&self) -> Result<std::ops::Range<i64>, ErrorCode> {
        let unavailable = |error: &dyn std::fmt::Display| {
            tracing::warn!(%error, "producer id block allocation failed");
            ErrorCode::CoordinatorNotAvailable
        };
        loop {
            let entry = self.repository.get(KEY).await.map_err(|e| unavailable(&e))?;
            let (start, expected) = match &entry {
                None => (1, Expect::Absent),
                Some(entry) => {
                    let next: NextBlock =
                        serde_json::from_slice(&entry.value).map_err(|e| unavailable(&e))?;
                    (next.next, Expect::Revision(entry.mod_revision))
                }
            };
            let value =
                serde_json::to_vec(&NextBlock { next: start + BLOCK }).map_err(|e| unavailable(&e))?;
            let swap = self.repository.compare_and_swap(KEY, expected, Some(Bytes::from(value)), None);
            match swap.await.map_err(|e| unavailable(&e))? {
                Swap::Done { .. } => return Ok(start..start + BLOCK),
                Swap::Conflict { .. } => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use moim_base::ManualClock;
    use moim_state::MemoryRepository;

    use super::*;

    #[test]
    fn two_brokers_never_hand_out_the_same_id() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let repository: Arc<dyn StateRepository> =
                Arc::new(MemoryRepository::new(Arc::new(ManualClock::at(0))));
            let (one, two) = (ProducerIds::new(Arc::clone(&repository)), ProducerIds::new(repository));
            let mut seen = std::collections::HashSet::new();
            for _ in 0..BLOCK + 10 {
                assert!(seen.insert(one.next().await.unwrap()));
                assert!(seen.insert(two.next().await.unwrap()));
            }
        });
    }
}
