//! The aggregator: counts each distinct message in the store, once per client and sequence number.
//!
//! Offsets are committed after the store has everything up to them; what is read again after a crash is recognised by
//! its sequence number, so counting it again changes nothing.

use std::collections::HashMap;

use futures_util::StreamExt;
use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, Message};
use tokio::runtime::Handle;

use moim_base::task::Shutdown;

use crate::consume::{self, Failed, Source, patiently};
use crate::progress::{self, Progress};
use crate::queue::{self, MESSAGE_AGGREGATION, QueueOptions};
use crate::store::Store;

/// Scripts under way at a time.
const AT_ONCE: usize = 256;

/// How an aggregator works.
#[derive(Clone, Debug)]
pub struct AggregatorOptions {
    /// The queue.
    pub queue: QueueOptions,
    /// Which instance.
    pub instance: usize,
    /// At most so many messages between two commits.
    pub batch: usize,
}

/// Starts an aggregator on a thread of its own; it ends with `shutdown`.
pub fn start(
    options: AggregatorOptions,
    store: Store,
    progress: Progress,
    runtime: Handle,
    shutdown: Shutdown,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    consume::run(format!("aggregator-{}", options.instance), shutdown, move |shutdown, watch| {
        let source = Source::subscribe(&options.queue.consumer("aggregator"), MESSAGE_AGGREGATION)?;
        watch.reads_from(&source);
        while !shutdown.is_stopped() {
            let batch = source.gather(options.batch, shutdown);
            if batch.is_empty() {
                continue;
            }
            runtime.block_on(aggregate(&store, &batch, shutdown))?;
            progress::add(&progress.aggregated, batch.len() as u64);
            progress::add(&progress.steps, 1);
            let offsets = consume::after(MESSAGE_AGGREGATION, &batch)?;
            if let Err(error) = watch.during(|| source.consumer.commit(&offsets, CommitMode::Sync)) {
                // Somebody else reads it again, or we do: it counts once all the same.
                tracing::debug!(%error, "offsets were not committed");
            }
        }
        Ok(())
    })
}

async fn aggregate(store: &Store, batch: &[BorrowedMessage<'_>], shutdown: &Shutdown) -> Result<(), Failed> {
    let mut by_text: HashMap<&[u8], Vec<(&str, u64)>> = HashMap::new();
    for message in batch {
        // Only the counter writes here, and it writes who sent what.
        let Some(origin) = queue::origin(message) else { continue };
        by_text.entry(message.payload().unwrap_or_default()).or_default().push(origin);
    }
    let steps = by_text
        .into_iter()
        .map(|(text, by)| async move { patiently(shutdown, || store.aggregate(text, &by)).await });
    let mut done = futures_util::stream::iter(steps).buffer_unordered(AT_ONCE);
    while let Some(step) = done.next().await {
        step?;
    }
    Ok(())
}
