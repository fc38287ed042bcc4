//! The client: routes a command to its node, sends it, follows redirections, retries until the deadline.
//!
//! Invariants:
//!
//! - A command completes by its deadline, independent of the cluster's state.
//! - A command that may have been executed is retried only if it is read-only or the delivery mode allows
//!   it. Once its outcome is unknown it stays unknown: no error of a retry proves that the command was not
//!   executed.
//! - A caller waits for the cluster in three places only: the reply, capacity in a queue, the backoff before
//!   the next attempt. All three are bounded by the deadline.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use moim_base::task::Scope;
use moim_wire_resp::{Slot, Value};
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::address::Address;
use crate::command::{Cmd, Request};
use crate::connection::{Connection, Refused, Reply};
use crate::convert::{FromValue, convert};
use crate::error::{Error, ServerError};
use crate::node::{ConnectionFactory, Node, Nodes};
use crate::options::{Builder, Delivery, Options, ReadFrom};
use crate::redirect::{Decision, classify};
use crate::refresh;
use crate::signals::{Event, Metrics, Signals, Trigger, count};
use crate::spec::Block;
use crate::topology::Topology;
use crate::view::NodeInfo;

/// Deadline of commands without one.
const FOREVER: Duration = Duration::from_secs(86_400 * 365);

/// A client of a cluster. Cheap to clone; clones share all state.
///
/// ```no_run
/// # async fn example() -> Result<(), moim_slot_client::Error> {
/// use moim_slot_client::Client;
/// let client = Client::connect("127.0.0.1:6379").await?;
/// client.set("greeting", "hello").await?;
/// let greeting: Option<String> = client.get("greeting").await?;
/// assert_eq!(greeting.as_deref(), Some("hello"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) core: Arc<Core>,
    pub(crate) call: Call,
}

/// Per-handle command settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) timeout: Duration,
    pub(crate) delivery: Delivery,
    pub(crate) read_from: ReadFrom,
}

/// State shared by all clones.
pub(crate) struct Core {
    pub(crate) options: Arc<Options>,
    pub(crate) signals: Arc<Signals>,
    pub(crate) nodes: Nodes,
    pub(crate) topology: ArcSwap<Topology>,
}

impl Drop for Core {
    fn drop(&mut self) {
        // Wakes the refresh task, which ends when no client is left.
        self.signals.trigger(Trigger::Requested);
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("seeds", &self.core.options.seeds).finish_non_exhaustive()
    }
}

impl Client {
    /// A client with the default settings. `seeds`: `host:port` or `redis://user:password@host:port`,
    /// comma-separated.
    pub async fn connect(seeds: &str) -> Result<Self, Error> {
        Self::builder(seeds).connect().await
    }

    /// A builder for other settings.
    pub fn builder(seeds: &str) -> Builder {
        Builder::new(seeds)
    }

    pub(crate) async fn start(options: Options, scope: Scope) -> Result<Self, Error> {
        let (options, signals) = (Arc::new(options), Arc::new(Signals::new()));
        let factory =
            ConnectionFactory { options: options.clone(), signals: signals.clone(), scope: scope.clone() };
        let core = Arc::new(Core {
            options: options.clone(),
            signals,
            nodes: Nodes::new(factory),
            topology: ArcSwap::from_pointee(Topology::empty()),
        });
        let deadline = Instant::now() + options.timeout;
        let mut tries = 0;
        while let Err(reason) = core.refresh().await {
            tries += 1;
            let pause = backoff(tries);
            if Instant::now() + pause >= deadline {
                return Err(Error::Unavailable { reason, after: options.timeout });
            }
            tokio::time::sleep(pause).await;
        }
        scope.spawn("slot-client refresh", refresh::run(Arc::downgrade(&core)));
        let call =
            Call { timeout: options.timeout, delivery: options.delivery, read_from: options.read_from };
        Ok(Self { core, call })
    }

    /// The same client with a total command timeout.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.call.timeout = timeout;
        self
    }

    /// The same client with another delivery mode.
    #[must_use]
    pub fn delivery(mut self, delivery: Delivery) -> Self {
        self.call.delivery = delivery;
        self
    }

    /// The same client with another read preference.
    #[must_use]
    pub fn read_from(mut self, read_from: ReadFrom) -> Self {
        self.call.read_from = read_from;
        self
    }

    /// Runs any command.
    ///
    /// ```no_run
    /// # async fn example(client: moim_slot_client::Client) -> Result<(), moim_slot_client::Error> {
    /// use moim_slot_client::cmd;
    /// let length: u64 = client.run(cmd("XLEN").arg("stream")).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn run<T: FromValue>(&self, cmd: Cmd) -> Result<T, Error> {
        let request = cmd.finish();
        let result = match request.spec.spread {
            crate::spec::Spread::No => self.core.execute(&request, self.call).await,
            _ => Box::pin(self.core.spread(&request, self.call)).await,
        };
        result.and_then(convert)
    }

    /// Subscribes to client events. A lagging subscriber misses events.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.core.signals.listen()
    }

    /// The client's counters.
    pub fn metrics(&self) -> &Metrics {
        &self.core.signals.metrics
    }

    /// The nodes as of the last refresh.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        self.core.topology.load().view.nodes.clone()
    }

    /// The primary of a key's slot, by the cached topology.
    pub fn primary_of(&self, key: impl AsRef<[u8]>) -> Option<Address> {
        self.core.topology.load().primary(Slot::of(key.as_ref())).map(|node| node.address.clone())
    }

    /// Number of slots without a primary, by the cached topology.
    pub fn uncovered_slots(&self) -> usize {
        self.core.topology.load().uncovered()
    }

    /// Requests a topology refresh.
    pub fn refresh(&self) {
        self.core.signals.trigger(Trigger::Requested);
    }
}

/// A queued command.
pub(crate) struct Sent {
    node: Arc<Node>,
    reply: Reply,
}

/// State of a command between attempts.
struct Attempts<'a> {
    request: &'a Request,
    call: Call,
    deadline: Instant,
    timeout: Duration,
    tries: u32,
    redirects: u32,
    /// Redirection target, and whether to send ASKING there.
    to: Option<(Arc<Node>, bool)>,
    /// Failure of the last attempt.
    reason: String,
    /// Node of an attempt with unknown outcome.
    unknown: Option<String>,
    /// Target of the last redirection beyond the limit.
    redirect_loop: Option<String>,
}

impl Core {
    /// Routes a command and waits for its reply.
    pub(crate) async fn execute(&self, request: &Request, call: Call) -> Result<Value, Error> {
        if request.spec.blocks != Block::No {
            return Box::pin(self.execute_blocking(request, call)).await;
        }
        let deadline = Instant::now() + call.timeout;
        let sent = self.start(request, call);
        self.finish(request, call, sent, deadline).await
    }

    /// Fast path: queues the command without waiting. `None` when that is not possible.
    pub(crate) fn start(&self, request: &Request, call: Call) -> Option<Sent> {
        count(&self.signals.metrics.commands);
        let topology = self.topology.load();
        let (node, connection) = pick(&topology, request, call.read_from, 0)?;
        let reply = connection.send(request).ok()?;
        Some(Sent { node: node.clone(), reply })
    }

    /// Waits for a started command, with redirections and retries until its reply. Commands that were
    /// started together share their deadline; otherwise a hung node would cost each of them its own timeout
    /// in turn.
    pub(crate) async fn finish(
        &self,
        request: &Request,
        call: Call,
        sent: Option<Sent>,
        deadline: Instant,
    ) -> Result<Value, Error> {
        let mut attempts = Attempts::new(request, call, deadline);
        let mut next = sent;
        let result = loop {
            match self.attempt(&mut attempts, next.take()).await {
                Ok(Some(value)) => break Ok(value),
                Ok(None) => {}
                Err(error) => break Err(error),
            }
        };
        if result.is_err() {
            count(&self.signals.metrics.failed);
        }
        result
    }

    /// One attempt. `None` when another attempt must follow.
    async fn attempt(&self, attempts: &mut Attempts<'_>, sent: Option<Sent>) -> Result<Option<Value>, Error> {
        let sent = match sent {
            Some(sent) => sent,
            None => match self.send(attempts).await? {
                Some(sent) => sent,
                None => return Ok(None),
            },
        };
        let Sent { node, reply } = sent;
        match tokio::time::timeout_at(attempts.deadline, reply).await {
            Err(_) => {
                self.signals.trigger(Trigger::Timeout);
                count(&self.signals.metrics.timeouts);
                Err(Error::Timeout { node: node.address.to_string(), after: attempts.timeout })
            }
            Ok(Ok(value)) => self.on_value(attempts, &node, value).await,
            Ok(Err(lost)) => {
                attempts.reason = format!("{}: {}", node.address, lost.reason);
                if lost.sent {
                    let once = attempts.call.delivery == Delivery::AtMostOnce;
                    if once && !attempts.request.spec.repeatable {
                        let reason = lost.reason.to_string();
                        return Err(Error::Interrupted { node: node.address.to_string(), reason });
                    }
                    attempts.unknown = Some(node.address.to_string());
                }
                self.pause(attempts).await?;
                Ok(None)
            }
        }
    }

    /// Queues the command at its node. `None` after a backoff, when no node accepted it.
    async fn send(&self, attempts: &mut Attempts<'_>) -> Result<Option<Sent>, Error> {
        let picked = match attempts.to.take() {
            Some((node, asking)) => {
                let connection = node.main.clone();
                Some((node, connection, asking))
            }
            None => {
                let topology = self.topology.load();
                pick(&topology, attempts.request, attempts.call.read_from, attempts.tries)
                    .map(|(node, connection)| (node.clone(), connection.clone(), false))
            }
        };
        let Some((node, connection, asking)) = picked else {
            self.signals.trigger(Trigger::UncoveredSlot);
            attempts.reason = "no node has the slot".to_owned();
            self.pause(attempts).await?;
            return Ok(None);
        };
        let refused = if asking {
            connection.send(&attempts.request.asking())
        } else {
            connection.send(attempts.request)
        };
        match refused {
            Ok(reply) => return Ok(Some(Sent { node, reply })),
            Err(Refused::Full) => {
                attempts.reason = format!("the queue to {} is full", node.address);
                let capacity = tokio::time::timeout(backoff(attempts.tries), connection.wait_for_capacity());
                if tokio::time::timeout_at(attempts.deadline, capacity).await.is_err() {
                    return Err(attempts.out_of_time());
                }
            }
            Err(Refused::Down(reason)) => {
                attempts.reason = format!("{}: {reason}", node.address);
                self.pause(attempts).await?;
            }
            Err(Refused::Closed) => {
                attempts.reason = format!("{} left the cluster", node.address);
                self.pause(attempts).await?;
            }
        }
        Ok(None)
    }

    async fn on_value(
        &self,
        attempts: &mut Attempts<'_>,
        node: &Arc<Node>,
        value: Value,
    ) -> Result<Option<Value>, Error> {
        match classify(&value, &node.address.host) {
            Decision::Done => return attempts.final_reply(value).map(Some),
            Decision::Moved(slot, to) => {
                count(&self.signals.metrics.moved);
                let target = self.patch(slot, &to);
                self.signals.trigger(Trigger::MovedRedirect);
                self.redirect(attempts, target, false).await?;
            }
            Decision::Ask(_, to) => {
                count(&self.signals.metrics.asked);
                self.signals.trigger(Trigger::AskRedirect);
                self.redirect(attempts, self.nodes.get(&to), true).await?;
            }
            Decision::Later { refresh } => {
                if refresh {
                    self.signals.trigger(Trigger::Refused);
                }
                if let Value::Error(text) = &value {
                    attempts.reason = format!("{}: {}", node.address, String::from_utf8_lossy(text));
                }
                self.pause(attempts).await?;
            }
        }
        Ok(None)
    }

    /// Patches the topology with the owner of a slot; returns its node.
    fn patch(&self, slot: Slot, to: &Address) -> Arc<Node> {
        let node = self.nodes.get(to);
        if !self.topology.load().patch(slot, to) {
            self.signals.trigger(Trigger::UnknownNode);
            self.topology.rcu(|topology| {
                let more = topology.with(node.clone());
                more.patch(slot, to);
                more
            });
        }
        self.signals.emit(Event::SlotPatched { slot, to: to.clone() });
        node
    }

    /// Follows a redirection. A redirection loop means that nodes disagree, as during a failover: after the
    /// maximum number of redirections the command backs off and starts again with the current topology.
    async fn redirect(&self, attempts: &mut Attempts<'_>, to: Arc<Node>, asking: bool) -> Result<(), Error> {
        attempts.redirects += 1;
        if attempts.redirects <= self.options.max_redirects {
            attempts.to = Some((to, asking));
            return Ok(());
        }
        attempts.redirects = 0;
        attempts.redirect_loop = Some(to.address.to_string());
        let paused = self.pause(attempts).await;
        attempts.redirect_loop = None;
        paused
    }

    /// Waits before the next attempt: a backoff with jitter, or until the topology changes.
    async fn pause(&self, attempts: &mut Attempts<'_>) -> Result<(), Error> {
        attempts.tries += 1;
        count(&self.signals.metrics.retries);
        let wait = backoff(attempts.tries);
        if Instant::now() + wait >= attempts.deadline {
            self.signals.trigger(Trigger::Timeout);
            return Err(attempts.out_of_time());
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            // Not for the first attempts: the change may be the failure itself.
            () = self.signals.changed.notified(), if attempts.tries > 2 => {}
        }
        Ok(())
    }

    /// A blocking command: on an exclusive connection, with its block time added to the timeout.
    async fn execute_blocking(&self, request: &Request, call: Call) -> Result<Value, Error> {
        count(&self.signals.metrics.commands);
        let timeout = block_time(request).map_or(FOREVER, |block| block.saturating_add(call.timeout));
        let mut attempts = Attempts { timeout, ..Attempts::new(request, call, Instant::now() + timeout) };
        loop {
            let (node, asking) = match attempts.to.take() {
                Some(to) => to,
                None => {
                    let topology = self.topology.load();
                    let Some((node, _)) = pick(&topology, request, ReadFrom::Primary, attempts.tries) else {
                        self.signals.trigger(Trigger::UncoveredSlot);
                        drop(topology);
                        self.pause(&mut attempts).await?;
                        continue;
                    };
                    (node.clone(), false)
                }
            };
            let mut own =
                ExclusiveConnection { connection: node.exclusive(), node: node.clone(), keep: false };
            let request = if asking { request.asking() } else { request.clone() };
            let Ok(reply) = own.connection.send(&request) else {
                self.pause(&mut attempts).await?;
                continue;
            };
            let done = self.attempt(&mut attempts, Some(Sent { node, reply })).await;
            own.keep = done.is_ok();
            drop(own);
            if let Some(value) = done? {
                return Ok(value);
            }
        }
    }

    /// Runs a command at one node, independent of its slots.
    pub(crate) async fn execute_at(
        &self,
        node: &Arc<Node>,
        request: &Request,
        call: Call,
    ) -> Result<Value, Error> {
        let sent = node.main.send(request).ok().map(|reply| Sent { node: node.clone(), reply });
        count(&self.signals.metrics.commands);
        let mut attempts = Attempts::new(request, call, Instant::now() + call.timeout);
        let mut next = sent;
        loop {
            if next.is_none() {
                attempts.to = Some((node.clone(), false));
            }
            if let Some(value) = self.attempt(&mut attempts, next.take()).await? {
                return Ok(value);
            }
        }
    }
}

/// An exclusive connection; returned to the pool when it is idle, closed otherwise.
struct ExclusiveConnection {
    connection: Arc<Connection>,
    node: Arc<Node>,
    keep: bool,
}

impl Drop for ExclusiveConnection {
    fn drop(&mut self) {
        if self.keep {
            self.node.release(self.connection.clone());
        } else {
            self.connection.close();
        }
    }
}

impl<'a> Attempts<'a> {
    fn new(request: &'a Request, call: Call, deadline: Instant) -> Self {
        Self {
            request,
            call,
            deadline,
            timeout: call.timeout,
            tries: 0,
            redirects: 0,
            to: None,
            reason: String::new(),
            unknown: None,
            redirect_loop: None,
        }
    }

    /// The last reply of the server. If an earlier attempt may have been executed, an error reply is marked
    /// as repeated, because it does not prove that the command was not executed.
    fn final_reply(&self, value: Value) -> Result<Value, Error> {
        match value {
            Value::Error(text) if self.unknown.is_some() && !self.request.spec.repeatable => {
                Err(ServerError::of_repetition(&text).into())
            }
            value => Ok(value),
        }
    }

    /// The error at the deadline: a timeout if the command may have been executed.
    fn out_of_time(&self) -> Error {
        match (&self.unknown, &self.redirect_loop) {
            (Some(node), _) => Error::Timeout { node: node.clone(), after: self.timeout },
            (None, Some(to)) => Error::TooManyRedirects(to.clone()),
            (None, None) => Error::Unavailable { reason: self.reason.clone(), after: self.timeout },
        }
    }
}

/// The node for a command, on attempt `tries`.
fn pick<'a>(
    topology: &'a Topology,
    request: &Request,
    read_from: ReadFrom,
    tries: u32,
) -> Option<(&'a Arc<Node>, &'a Arc<Connection>)> {
    let main = |node: &'a Arc<Node>| (node, &node.main);
    let Some(slot) = request.slot else {
        let nodes = topology.nodes();
        let start = if nodes.is_empty() { 0 } else { fastrand::usize(..nodes.len()) };
        let turn =
            || nodes.iter().cycle().skip(start + tries as usize % nodes.len().max(1)).take(nodes.len());
        return turn()
            .find(|node| node.main.is_up())
            .or_else(|| turn().find(|node| !node.main.is_down()))
            .or(nodes.first())
            .map(main);
    };
    let primary = || topology.primary(slot).map(main);
    if !request.spec.reads || read_from == ReadFrom::Primary {
        return primary();
    }
    let replica = || {
        let replicas = topology.replicas(slot);
        let count = replicas.len();
        let start = if count == 0 { 0 } else { fastrand::usize(..count) };
        let mut turn = replicas.clone().chain(replicas).skip(start).take(count);
        turn.find(|node| !node.reads.is_down()).map(|node| (node, &node.reads))
    };
    let up = |found: &(&Arc<Node>, &Arc<Connection>)| !found.1.is_down();
    match read_from {
        ReadFrom::Primary => primary(),
        ReadFrom::PrimaryPreferred => primary().filter(up).or_else(replica).or_else(primary),
        ReadFrom::Replica => replica(),
        ReadFrom::ReplicaPreferred => replica().or_else(primary),
        ReadFrom::Any => {
            if fastrand::usize(..=topology.replicas(slot).len()) == 0 {
                primary().filter(up).or_else(replica).or_else(primary)
            } else {
                replica().or_else(primary)
            }
        }
    }
}

/// 8 ms, doubling up to 256 ms, half of it random.
pub(crate) fn backoff(tries: u32) -> Duration {
    let interval = Duration::from_millis(4 << tries.clamp(1, 6));
    interval.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Block time that a command requests; `None` without limit.
fn block_time(request: &Request) -> Option<Duration> {
    let number =
        |index: usize| -> Option<f64> { std::str::from_utf8(request.args().nth(index)?).ok()?.parse().ok() };
    let seconds = match request.spec.blocks {
        Block::No => return Some(Duration::ZERO),
        Block::First => number(1),
        Block::Last => number(request.args.saturating_sub(1)),
        Block::LastMillis => number(request.args.saturating_sub(1)).map(|millis| millis / 1000.0),
        Block::Word => {
            let word = request.args().position(|arg| arg.eq_ignore_ascii_case(b"BLOCK"));
            word.and_then(|at| number(at + 1)).map(|millis| millis / 1000.0)
        }
    };
    match seconds {
        Some(0.0) => None,
        Some(seconds) => Some(Duration::try_from_secs_f64(seconds).unwrap_or(FOREVER)),
        // The server rejects an argument that we cannot parse.
        None => Some(Duration::ZERO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::cmd;

    #[test]
    fn blocking_commands_get_their_block_time() {
        let time = |cmd: Cmd| block_time(&cmd.finish());
        assert_eq!(time(cmd("BLPOP").arg(("a", "b", 1.5))), Some(Duration::from_millis(1500)));
        assert_eq!(time(cmd("BLPOP").arg(("a", 0))), None);
        assert_eq!(time(cmd("BLMPOP").arg((2, 1, "a")).arg("LEFT")), Some(Duration::from_secs(2)));
        assert_eq!(
            time(cmd("XREAD").arg(("BLOCK", 20)).arg(("STREAMS", "a", "$"))),
            Some(Duration::from_millis(20))
        );
        assert_eq!(time(cmd("BLPOP").arg(("a", "x"))), Some(Duration::ZERO));
        assert_eq!(time(cmd("BLPOP").arg(("a", -1))), Some(FOREVER));
    }

    #[test]
    fn backoff_grows_with_jitter() {
        for (tries, most) in [(1, 8), (2, 16), (6, 256), (60, 256)] {
            let pause = backoff(tries);
            assert!(
                pause <= Duration::from_millis(most) && pause >= Duration::from_millis(most / 2),
                "{tries}: {pause:?}"
            );
        }
    }
}
