//! The network between hosts: requests and replies as bytes, delayed, lost, reordered, or cut in one direction.
//!
//! A packet is lost if its link is cut when it is sent or when it arrives, and it never reaches a later process of its
//! receiver. As with TCP, loss is detected: after a while the connection breaks, and every call in flight on it fails.
//! So does a connection whose other end crashed. No packet is delivered in the tick in which it was sent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_raft::{BoxFuture, GroupId, Member, Router, Transport, TransportError};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::TICK_MS;
use super::trace::Trace;

/// Loss and delay of the links.
#[derive(Clone, Copy, Debug)]
pub struct LinkQuality {
    /// Lost packets per thousand.
    pub lost: u32,
    /// Maximum delay of most packets.
    pub delay_ms: u64,
    /// Packets per thousand with a delay of up to `late_ms`.
    pub late: u32,
    /// Maximum delay of late packets.
    pub late_ms: u64,
}

impl LinkQuality {
    /// A healthy local network.
    pub const HEALTHY: Self = Self { lost: 0, delay_ms: 4, late: 2, late_ms: 30 };
}

enum Body {
    Request { call: u64, group: GroupId, bytes: Bytes },
    Reply { call: u64, bytes: Bytes },
}

struct Packet {
    from: usize,
    /// The connection it travels on: caller and callee.
    connection: (usize, usize),
    from_instance: u64,
    to_instance: u64,
    body: Body,
}

struct NetworkState {
    random: fastrand::Rng,
    trace: Trace,
    now_ms: u64,
    quality: LinkQuality,
    /// Cut links, as (from, to).
    cut: BTreeSet<(usize, usize)>,
    /// Process number of each host, and whether that process runs.
    instances: Vec<(u64, bool)>,
    /// Packets by receiver, then arrival time, then order of sending.
    queued: Vec<BTreeMap<(u64, u64), Packet>>,
    /// Calls in flight, with their connections.
    calls: BTreeMap<u64, ((usize, usize), oneshot::Sender<Bytes>)>,
    /// Connections that will break, with the time.
    breaks_at: BTreeMap<(usize, usize), u64>,
    next: u64,
}

/// Handle to the network; clones share it.
#[derive(Clone)]
pub struct Network {
    state: Arc<Mutex<NetworkState>>,
}

/// Address of a host as a group member.
pub(super) fn address(host: usize) -> String {
    format!("host-{host}")
}

fn host_of(address: &str) -> Option<usize> {
    address.strip_prefix("host-")?.parse().ok()
}

impl NetworkState {
    fn send(&mut self, from: usize, to: usize, to_instance: u64, body: Body) {
        let connection = match body {
            Body::Request { .. } => (from, to),
            Body::Reply { .. } => (to, from),
        };
        let quality = self.quality;
        let draw = self.random.u32(0..1_000);
        if draw < quality.lost || self.cut.contains(&(from, to)) {
            self.break_later(connection);
            return;
        }
        let longest = if draw < quality.lost + quality.late { quality.late_ms } else { quality.delay_ms };
        self.next += 1;
        let at = (self.now_ms + TICK_MS + self.random.u64(0..=longest), self.next);
        let from_instance = self.instances[from].0;
        self.queued[to].insert(at, Packet { from, connection, from_instance, to_instance, body });
    }

    /// A packet was lost: the connection breaks after a while.
    fn break_later(&mut self, connection: (usize, usize)) {
        let at = self.now_ms + self.random.u64(100..2_000);
        self.breaks_at.entry(connection).or_insert(at);
    }

    fn break_due_connections(&mut self) {
        let now_ms = self.now_ms;
        let broken: Vec<_> =
            self.breaks_at.extract_if(.., |_, at| *at <= now_ms).map(|(connection, _)| connection).collect();
        for connection in broken {
            self.calls.retain(|_, (of, _)| *of != connection);
        }
    }
}

impl Network {
    pub(super) fn new(random: fastrand::Rng, trace: Trace) -> Self {
        let state = NetworkState {
            random,
            trace,
            now_ms: 0,
            quality: LinkQuality::HEALTHY,
            cut: BTreeSet::new(),
            instances: Vec::new(),
            queued: Vec::new(),
            calls: BTreeMap::new(),
            breaks_at: BTreeMap::new(),
            next: 0,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_host(&self) {
        let mut state = self.state();
        state.instances.push((0, false));
        state.queued.push(BTreeMap::new());
    }

    pub(super) fn set_now(&self, now_ms: u64) {
        let mut state = self.state();
        state.now_ms = now_ms;
        state.break_due_connections();
    }

    pub(super) fn on_start(&self, host: usize) {
        let instance = &mut self.state().instances[host];
        *instance = (instance.0 + 1, true);
    }

    pub(super) fn on_crash(&self, host: usize) {
        let mut state = self.state();
        state.instances[host].1 = false;
        state.queued[host].clear();
        for other in 0..state.instances.len() {
            if state.cut.contains(&(host, other)) {
                state.break_later((other, host));
            } else {
                let now_ms = state.now_ms;
                state.breaks_at.insert((other, host), now_ms + TICK_MS);
            }
        }
    }

    /// Sets loss and delay of all links.
    pub fn set_quality(&self, quality: LinkQuality) {
        self.state().quality = quality;
    }

    /// Cuts a link in one direction.
    pub fn cut(&self, from: usize, to: usize) {
        self.state().cut.insert((from, to));
    }

    /// Restores every link.
    pub fn heal(&self) {
        self.state().cut.clear();
    }

    /// True if any link is cut.
    pub fn is_cut(&self) -> bool {
        !self.state().cut.is_empty()
    }

    /// Delivers arrived packets to a process. Call it on the runtime of that process.
    pub(super) fn deliver(&self, to: usize, router: &Router, on: &Handle) {
        loop {
            let packet = {
                let mut state = self.state();
                let now_ms = state.now_ms;
                let Some(first) = state.queued[to].first_entry().filter(|first| first.key().0 <= now_ms)
                else {
                    return;
                };
                let packet = first.remove();
                if state.cut.contains(&(packet.from, to)) || packet.to_instance != state.instances[to].0 {
                    state.break_later(packet.connection);
                    continue;
                }
                packet
            };
            let (from, from_instance) = (packet.from, packet.from_instance);
            match packet.body {
                Body::Request { call, group, bytes } => {
                    self.record(from, to, "request", group.0, &bytes);
                    let (router, network) = (router.clone(), self.clone());
                    on.spawn(async move {
                        let bytes = router.handle(group, bytes).await;
                        network.state().send(to, from, from_instance, Body::Reply { call, bytes });
                    });
                }
                Body::Reply { call, bytes } => {
                    let caller = self.state().calls.remove(&call);
                    if let Some((_, caller)) = caller {
                        self.record(from, to, "reply", call, &bytes);
                        let _ = caller.send(bytes);
                    }
                }
            }
        }
    }

    fn record(&self, from: usize, to: usize, kind: &str, id: u64, bytes: &Bytes) {
        let trace = self.state().trace.clone();
        let sum = bytes.iter().fold(0u32, |sum, byte| sum.rotate_left(5) ^ u32::from(*byte));
        trace.record(format_args!("{from} to {to} {kind} {id:x}: {} bytes {sum:x}", bytes.len()));
    }
}

/// Transport of one host.
pub struct Link {
    pub(super) network: Network,
    pub(super) host: usize,
}

/// Removes a call whose caller no longer waits.
struct PendingCall<'a>(&'a Network, u64);

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        self.0.state().calls.remove(&self.1);
    }
}

impl Link {
    /// Sends a request; `None` if the receiver is known to be down.
    fn send(&self, to: &Member, group: GroupId, bytes: Bytes) -> Option<(u64, oneshot::Receiver<Bytes>)> {
        let target = host_of(&to.address)?;
        let mut state = self.network.state();
        let (instance, is_up) = *state.instances.get(target)?;
        let cut = state.cut.contains(&(self.host, target)) || state.cut.contains(&(target, self.host));
        if !is_up && !cut {
            return None;
        }
        state.next += 1;
        let call = state.next;
        let (sender, reply) = oneshot::channel();
        state.calls.insert(call, ((self.host, target), sender));
        state.send(self.host, target, instance, Body::Request { call, group, bytes });
        Some((call, reply))
    }
}

impl Transport for Link {
    fn call<'a>(
        &'a self,
        to: &'a Member,
        group: GroupId,
        request: Bytes,
        timeout: Duration,
    ) -> BoxFuture<'a, Result<Bytes, TransportError>> {
        Box::pin(async move {
            let Some((call, reply)) = self.send(to, group, request) else {
                tokio::time::sleep(Duration::from_millis(TICK_MS)).await;
                return Err(TransportError::Unreachable(to.address.clone()));
            };
            let pending = PendingCall(&self.network, call);
            let reply = tokio::time::timeout(timeout, reply).await;
            drop(pending);
            match reply {
                Ok(Ok(bytes)) => Ok(bytes),
                Ok(Err(_)) => Err(TransportError::Broken(to.address.clone())),
                Err(_) => Err(TransportError::TimedOut),
            }
        })
    }
}
