//! Topology refresh: one task, one refresh at a time, one rate limit for all triggers.
//!
//! A refresh queries all known nodes at once, then the nodes they list, and the seeds when none responds. It
//! does not wait for the last node: once most have replied, the rest have [`GRACE`] left, so that one hung
//! node delays no refresh.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use moim_wire_resp::Value;
use tokio::time::Instant;

use crate::address::Address;
use crate::client::Core;
use crate::command::cmd;
use crate::signals::{Event, Trigger, count};
use crate::topology::Topology;
use crate::view::{View, choose};

/// Remaining time of slow nodes after most have replied.
const GRACE: Duration = Duration::from_millis(100);

/// Maximum factor of the refresh interval while refreshes bring no change.
const MAX_INTERVAL_FACTOR: u32 = 4;

/// Refreshes on triggers, until the client is dropped.
pub(crate) async fn run(core: Weak<Core>) {
    let Some(strong) = core.upgrade() else { return };
    let (signals, options) = (strong.signals.clone(), strong.options.clone());
    drop(strong);
    let mut interval = options.refresh_at_most_every;
    let mut last = Instant::now();
    loop {
        match options.refresh_every {
            None => signals.wanted().await,
            Some(period) => {
                if tokio::time::timeout(period, signals.wanted()).await.is_err() {
                    signals.trigger(Trigger::Periodic);
                }
            }
        }
        // Clients that lost the same node must not refresh at the same moment.
        let jitter = interval.mul_f64(0.75 + fastrand::f64() / 2.0);
        tokio::time::sleep_until(last + jitter).await;
        let Some(core) = core.upgrade() else { return };
        last = Instant::now();
        let changed = core.refresh().await.unwrap_or(false);
        interval = if changed {
            options.refresh_at_most_every
        } else {
            (interval * 2).min(options.refresh_at_most_every * MAX_INTERVAL_FACTOR)
        };
    }
}

impl Core {
    /// Queries, chooses a view, swaps the topology. True when it changed.
    pub(crate) async fn refresh(&self) -> Result<bool, String> {
        let reasons = self.signals.take();
        self.signals.emit(Event::RefreshStarted(reasons));
        count(&self.signals.metrics.refreshes);
        let old = self.topology.load_full();
        let known: Vec<Address> = old.nodes().iter().map(|node| node.address.clone()).collect();
        let views = match self.query_views(known).await {
            views if views.is_empty() => self.query_views(self.options.seeds.clone()).await,
            views => views,
        };
        let before = (!old.view.nodes.is_empty()).then_some(&old.view);
        let Some(chosen) = choose(before, &views).and_then(|index| views.into_iter().nth(index)) else {
            count(&self.signals.metrics.refreshes_failed);
            let reason = "no node returned the topology".to_owned();
            self.signals.emit(Event::RefreshFailed(reason.clone()));
            return Err(reason);
        };
        let new = Topology::build(chosen, &mut |address| self.nodes.get(address));
        let (added, removed, slots_moved) = new.difference(&old);
        let new = Arc::new(new);
        self.topology.store(new.clone());
        self.nodes.retain(new.nodes());
        self.signals.changed.notify_waiters();
        let changed = !added.is_empty() || !removed.is_empty() || slots_moved > 0;
        if changed {
            self.signals.emit(Event::TopologyChanged { added, removed, slots_moved });
        }
        Ok(changed)
    }

    /// The views of `first`, and of the nodes they list.
    async fn query_views(&self, first: Vec<Address>) -> Vec<View> {
        let mut queried: HashSet<Address> = first.iter().cloned().collect();
        let mut views = self.query_all(first).await;
        let listed = views.iter().flat_map(|view| &view.nodes).filter(|node| !node.failing);
        let new: Vec<_> = listed
            .map(|node| node.address.clone())
            .filter(|address| queried.insert(address.clone()))
            .collect();
        views.extend(self.query_all(new).await);
        views
    }

    async fn query_all(&self, addresses: Vec<Address>) -> Vec<View> {
        let total = addresses.len();
        let mut open: FuturesUnordered<_> =
            addresses.into_iter().map(|address| self.query(address)).collect();
        let mut views = Vec::with_capacity(total);
        let mut until = Instant::now() + self.options.refresh_timeout;
        while let Ok(Some(view)) = tokio::time::timeout_at(until, open.next()).await {
            views.extend(view);
            if views.len() > total / 2 {
                until = until.min(Instant::now() + GRACE);
            }
        }
        views
    }

    /// The view of the node at `address`, if it responds with one.
    async fn query(&self, address: Address) -> Option<View> {
        let node = self.nodes.get(&address);
        let reply = node.main.send(&cmd("CLUSTER NODES").finish()).ok()?.await.ok()?;
        match reply {
            Value::Error(text) if text.starts_with(b"ERR This instance has cluster support disabled") => {
                Some(View::single(address))
            }
            other => View::parse(std::str::from_utf8(other.as_bytes()?).ok()?, &address.host),
        }
    }
}
