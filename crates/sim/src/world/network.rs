//! Wires between hosts: requests and replies as bytes, late, lost, out of order, or cut off in one direction.
//!
//! A packet is lost when its link is cut at either end of its way, and never reaches a later life of its receiver. As
//! with TCP, nothing is lost in silence for ever: a while later the connection breaks, and every call that was under way
//! on it fails. So does a connection whose other end died. Nothing is ever delivered in the tick in which it was sent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_raft::{BoxFuture, GroupId, Member, Router, Transport, TransportError};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::TICK_MS;
use super::trace::Trace;

/// How the wires are.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Of a thousand packets, how many are lost.
    pub lost: u32,
    /// Most packets take up to this long.
    pub delay_ms: u64,
    /// Of a thousand packets, how many take up to `late_ms`.
    pub late: u32,
    /// See `late`.
    pub late_ms: u64,
}

impl Weather {
    /// A quiet local network.
    pub const FAIR: Self = Self { lost: 0, delay_ms: 4, late: 2, late_ms: 30 };
}

enum Body {
    Request { call: u64, group: GroupId, bytes: Bytes },
    Reply { call: u64, bytes: Bytes },
}

struct Packet {
    from: usize,
    /// Who called whom: the connection it travels on.
    line: (usize, usize),
    from_life: u64,
    to_life: u64,
    body: Body,
}

struct Wires {
    random: fastrand::Rng,
    trace: Trace,
    now_ms: u64,
    weather: Weather,
    /// From, to.
    cut: BTreeSet<(usize, usize)>,
    /// Of each host, which life it is in, and whether it lives.
    lives: Vec<(u64, bool)>,
    /// By receiver, then time, then order of sending.
    queued: Vec<BTreeMap<(u64, u64), Packet>>,
    /// With their connections.
    calls: BTreeMap<u64, ((usize, usize), oneshot::Sender<Bytes>)>,
    /// Connections that will break, and when.
    doomed: BTreeMap<(usize, usize), u64>,
    next: u64,
}

/// The wires. Clones are the same.
#[derive(Clone)]
pub struct Network {
    wires: Arc<Mutex<Wires>>,
}

/// What a host answers to as a member of a group.
pub(super) fn address(host: usize) -> String {
    format!("host-{host}")
}

fn host_of(address: &str) -> Option<usize> {
    address.strip_prefix("host-")?.parse().ok()
}

impl Wires {
    fn send(&mut self, from: usize, to: usize, to_life: u64, body: Body) {
        let line = match body {
            Body::Request { .. } => (from, to),
            Body::Reply { .. } => (to, from),
        };
        let weather = self.weather;
        let draw = self.random.u32(0..1_000);
        if draw < weather.lost || self.cut.contains(&(from, to)) {
            self.doom(line);
            return;
        }
        let longest = if draw < weather.lost + weather.late { weather.late_ms } else { weather.delay_ms };
        self.next += 1;
        let at = (self.now_ms + TICK_MS + self.random.u64(0..=longest), self.next);
        self.queued[to].insert(at, Packet { from, line, from_life: self.lives[from].0, to_life, body });
    }

    /// Something was lost on a connection.
    fn doom(&mut self, line: (usize, usize)) {
        let at = self.now_ms + self.random.u64(100..2_000);
        self.doomed.entry(line).or_insert(at);
    }

    fn break_lines(&mut self) {
        let now_ms = self.now_ms;
        let broken: Vec<_> =
            self.doomed.extract_if(.., |_, at| *at <= now_ms).map(|(line, _)| line).collect();
        for line in broken {
            self.calls.retain(|_, (of, _)| *of != line);
        }
    }
}

impl Network {
    pub(super) fn new(random: fastrand::Rng, trace: Trace) -> Self {
        let wires = Wires {
            random,
            trace,
            now_ms: 0,
            weather: Weather::FAIR,
            cut: BTreeSet::new(),
            lives: Vec::new(),
            queued: Vec::new(),
            calls: BTreeMap::new(),
            doomed: BTreeMap::new(),
            next: 0,
        };
        Self { wires: Arc::new(Mutex::new(wires)) }
    }

    fn wires(&self) -> MutexGuard<'_, Wires> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_host(&self) {
        let mut wires = self.wires();
        wires.lives.push((0, false));
        wires.queued.push(BTreeMap::new());
    }

    pub(super) fn set_now(&self, now_ms: u64) {
        let mut wires = self.wires();
        wires.now_ms = now_ms;
        wires.break_lines();
    }

    pub(super) fn begin_life(&self, host: usize) {
        let life = &mut self.wires().lives[host];
        *life = (life.0 + 1, true);
    }

    pub(super) fn end_life(&self, host: usize) {
        let mut wires = self.wires();
        wires.lives[host].1 = false;
        wires.queued[host].clear();
        for other in 0..wires.lives.len() {
            if wires.cut.contains(&(host, other)) {
                wires.doom((other, host));
            } else {
                let now_ms = wires.now_ms;
                wires.doomed.insert((other, host), now_ms + TICK_MS);
            }
        }
    }

    /// Changes how the wires are.
    pub fn set_weather(&self, weather: Weather) {
        self.wires().weather = weather;
    }

    /// Cuts a link in one direction.
    pub fn cut(&self, from: usize, to: usize) {
        self.wires().cut.insert((from, to));
    }

    /// Mends every link.
    pub fn mend(&self) {
        self.wires().cut.clear();
    }

    /// Whether any link is cut.
    pub fn is_cut(&self) -> bool {
        !self.wires().cut.is_empty()
    }

    /// Hands a process what has arrived for it. On its runtime.
    pub(super) fn deliver(&self, to: usize, router: &Router, on: &Handle) {
        loop {
            let packet = {
                let mut wires = self.wires();
                let now_ms = wires.now_ms;
                let Some(first) = wires.queued[to].first_entry().filter(|first| first.key().0 <= now_ms)
                else {
                    return;
                };
                let packet = first.remove();
                if wires.cut.contains(&(packet.from, to)) || packet.to_life != wires.lives[to].0 {
                    wires.doom(packet.line);
                    continue;
                }
                packet
            };
            let (from, from_life) = (packet.from, packet.from_life);
            match packet.body {
                Body::Request { call, group, bytes } => {
                    self.note(from, to, "asks", group.0, &bytes);
                    let (router, network) = (router.clone(), self.clone());
                    on.spawn(async move {
                        let bytes = router.handle(group, bytes).await;
                        network.wires().send(to, from, from_life, Body::Reply { call, bytes });
                    });
                }
                Body::Reply { call, bytes } => {
                    let waiting = self.wires().calls.remove(&call);
                    if let Some((_, waiting)) = waiting {
                        self.note(from, to, "answers", call, &bytes);
                        let _ = waiting.send(bytes);
                    }
                }
            }
        }
    }

    fn note(&self, from: usize, to: usize, what: &str, about: u64, bytes: &Bytes) {
        let trace = self.wires().trace.clone();
        let sum = bytes.iter().fold(0u32, |sum, byte| sum.rotate_left(5) ^ u32::from(*byte));
        trace.note(format_args!("{from} {what} {to}: {:x} {} bytes {sum:x}", about, bytes.len()));
    }
}

/// One host's way into the network.
pub struct Link {
    pub(super) network: Network,
    pub(super) host: usize,
}

/// Forgets a call whose caller does not wait any more.
struct Waiting<'a>(&'a Network, u64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.wires().calls.remove(&self.1);
    }
}

impl Link {
    /// Sends a request; `None` when its receiver is known to be down.
    fn send(&self, to: &Member, group: GroupId, bytes: Bytes) -> Option<(u64, oneshot::Receiver<Bytes>)> {
        let target = host_of(&to.address)?;
        let mut wires = self.network.wires();
        let (life, lives) = *wires.lives.get(target)?;
        let cut = wires.cut.contains(&(self.host, target)) || wires.cut.contains(&(target, self.host));
        if !lives && !cut {
            return None;
        }
        wires.next += 1;
        let call = wires.next;
        let (done, answer) = oneshot::channel();
        wires.calls.insert(call, ((self.host, target), done));
        wires.send(self.host, target, life, Body::Request { call, group, bytes });
        Some((call, answer))
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
            let Some((call, answer)) = self.send(to, group, request) else {
                tokio::time::sleep(Duration::from_millis(TICK_MS)).await;
                return Err(TransportError::Unreachable(to.address.clone()));
            };
            let waiting = Waiting(&self.network, call);
            let answer = tokio::time::timeout(timeout, answer).await;
            drop(waiting);
            match answer {
                Ok(Ok(bytes)) => Ok(bytes),
                Ok(Err(_)) => Err(TransportError::Broken(to.address.clone())),
                Err(_) => Err(TransportError::TimedOut),
            }
        })
    }
}
