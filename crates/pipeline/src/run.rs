//! A pipeline in one process: gateways, counters and aggregators, started and stopped together.

use std::io;
use std::net::SocketAddr;
use std::thread::JoinHandle;

use tokio::runtime::Handle;

use moim_base::task::Shutdown;

use crate::aggregator::{self, AggregatorOptions};
use crate::config::PipelineConfig;
use crate::counter::{self, CounterOptions};
use crate::gateway::{Faults, Gateway, GatewayError};
use crate::identity::Secret;
use crate::progress::Progress;
use crate::store::Store;

/// Why a pipeline does not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A gateway failed to start.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// A thread could not be spawned.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}

/// A running pipeline.
pub struct Pipeline {
    gateways: Vec<Gateway>,
    workers: Vec<Worker>,
    progress: Progress,
}

/// A counter or an aggregator on its thread.
pub struct Worker {
    shutdown: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Finishes the current batch and stops. Blocks.
    pub fn stop(&mut self) {
        self.shutdown.stop();
        if let Some(thread) = self.thread.take() {
            // A panic of the worker is reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// The roles to start.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Start gateways.
    pub gateways: bool,
    /// Start counters.
    pub counters: bool,
    /// Start aggregators.
    pub aggregators: bool,
    /// Instance number of the first counter and aggregator of this process.
    pub first_instance: usize,
    /// Injected faults of the gateways.
    pub faults: Faults,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            gateways: true,
            counters: true,
            aggregators: true,
            first_instance: 0,
            faults: Faults::default(),
        }
    }
}

impl Pipeline {
    /// Starts the pipeline. The topics must exist: [`crate::queue::create_topics`].
    pub async fn start(
        config: &PipelineConfig,
        parts: Parts,
        store: Store,
        secret: Secret,
    ) -> Result<Self, RunError> {
        let progress = Progress::default();
        let queue = config.queue();
        let mut pipeline = Self { gateways: Vec::new(), workers: Vec::new(), progress: progress.clone() };
        let runtime = Handle::current();
        if parts.aggregators {
            for instance in 0..config.aggregator.instances {
                let instance = parts.first_instance + instance;
                let options = AggregatorOptions {
                    queue: queue.clone(),
                    instance,
                    batch: config.aggregator.batch.max(1),
                };
                let shutdown = Shutdown::new();
                let (store, progress, runtime) = (store.clone(), progress.clone(), runtime.clone());
                let thread = aggregator::start(options, store, progress, runtime, shutdown.clone())?;
                pipeline.workers.push(Worker { shutdown, thread: Some(thread) });
            }
        }
        if parts.counters {
            for instance in 0..config.counter.instances {
                let options = CounterOptions {
                    queue: queue.clone(),
                    instance: parts.first_instance + instance,
                    transaction_size: config.counter.transaction_size.max(1),
                };
                let shutdown = Shutdown::new();
                let (store, progress, runtime) = (store.clone(), progress.clone(), runtime.clone());
                let thread = counter::start(options, store, progress, runtime, shutdown.clone())?;
                pipeline.workers.push(Worker { shutdown, thread: Some(thread) });
            }
        }
        if parts.gateways {
            for instance in 0..config.gateway.instances {
                let options = config.gateway(instance, parts.faults).map_err(GatewayError::Tls)?;
                let gateway =
                    Gateway::start(options, &queue, store.clone(), secret.clone(), progress.clone()).await?;
                pipeline.gateways.push(gateway);
            }
        }
        Ok(pipeline)
    }

    /// The addresses that clients connect to.
    pub fn gateways(&self) -> Vec<SocketAddr> {
        self.gateways.iter().map(Gateway::address).collect()
    }

    /// Progress counts of this process.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Stops everything. Must not be called on the runtime's thread: the runtime has to keep running meanwhile.
    pub fn stop(mut self) {
        self.gateways.iter().for_each(Gateway::stop);
        self.workers.iter().for_each(|worker| worker.shutdown.stop());
        self.workers.iter_mut().for_each(Worker::stop);
    }
}
