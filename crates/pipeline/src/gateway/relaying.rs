//! A client's messages on their way into the queue: drives [`Relay`] with the producer's reports and the store's marks.
//!
//! Ends when another gateway has taken over, or when nobody gives it messages any more and all of them are through.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rdkafka::ClientContext;
use rdkafka::error::KafkaError;
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseRecord, ProducerContext};
use tokio::sync::{Notify, mpsc, watch};

use crate::gateway::outlet::Sent;
use crate::gateway::{Faults, Shared};
use crate::progress;
use crate::queue::{self, CLIENT_MESSAGE};
use crate::relay::{Relay, Reported};
use crate::store::{BoxFuture, Fenced, StoreError};

/// Between looks at what is late, and between tries of a producer that is full.
const TICK: Duration = Duration::from_millis(200);
const FULL: Duration = Duration::from_millis(5);
/// Reports are waited for so long before the store is told of those that came, while others are still to come.
const GATHER: Duration = Duration::from_millis(5);
/// How often the store is told that somebody is here, while nothing else tells it.
const TOUCH_MS: u64 = 1_500;

/// The session's end of a relay.
#[derive(Clone)]
pub(super) struct Handle {
    messages: mpsc::Sender<Vec<(u64, Bytes)>>,
    /// Up to where everything is in the queue.
    stored: watch::Receiver<u64>,
}

impl Handle {
    /// Hands on what the store has. Waits while the relay is full. False when somebody else relays by now.
    pub(super) async fn push(&self, messages: Vec<(u64, Bytes)>) -> bool {
        self.messages.send(messages).await.is_ok()
    }

    pub(super) fn stored(&self) -> watch::Receiver<u64> {
        self.stored.clone()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.messages.is_closed()
    }
}

/// Where the producer's reports for one client arrive.
#[derive(Default)]
pub(super) struct Inbox {
    reports: Mutex<Vec<(u64, u64, Reported)>>,
    notify: Notify,
}

impl Inbox {
    fn push(&self, round: u64, sn: u64, what: Reported) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.push((round, sn, what));
        // Whoever looks takes all of them.
        if reports.len() == 1 {
            drop(reports);
            self.notify.notify_one();
        }
    }

    pub(super) fn take(&self) -> Vec<(u64, u64, Reported)> {
        std::mem::take(&mut *self.reports.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What travels with a record and comes back with its report.
pub(super) struct Ticket {
    inbox: Arc<Inbox>,
    round: u64,
    sn: u64,
}

impl Ticket {
    pub(super) fn new(inbox: &Arc<Inbox>, round: u64, sn: u64) -> Self {
        Self { inbox: Arc::clone(inbox), round, sn }
    }
}

/// Receives the reports of the producer, on its thread.
pub(super) struct Context {
    faults: Faults,
}

impl Context {
    pub(super) fn new(faults: Faults) -> Self {
        Self { faults }
    }
}

impl ClientContext for Context {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "the gateway's producer");
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Self::DeliveryOpaque) {
        let first = ticket.round == 0;
        if first && self.faults.lose_report_of == Some(ticket.sn) {
            return;
        }
        let failed = result.is_err() || (first && self.faults.fail_report_of == Some(ticket.sn));
        let what = if failed { Reported::Failed } else { Reported::Delivered };
        ticket.inbox.push(ticket.round, ticket.sn, what);
    }
}

type Marking = BoxFuture<'static, Result<Result<u64, Fenced>, StoreError>>;

/// A relay at work.
pub(super) struct Relaying {
    shared: Arc<Shared>,
    client: Arc<str>,
    attempt: u64,
    /// Where all of its messages go.
    partition: i32,
    relay: Relay,
    inbox: Arc<Inbox>,
    marking: Option<Marking>,
    /// Reports of the round before are to be forgotten in the store before anything is marked.
    rewinding: bool,
    /// Since when there are reports that the store has not been told of.
    reported_ms: Option<u64>,
    touched_ms: u64,
    stored: watch::Sender<u64>,
}

impl Relaying {
    pub(super) fn start(
        shared: Arc<Shared>,
        client: &str,
        (attempt, partition): (u64, i32),
        stored: u64,
        kept: Vec<(u64, Bytes)>,
    ) -> Handle {
        let (messages, receiver) = mpsc::channel(4);
        let (sender, watch) = watch::channel(stored);
        let mut relay = Relay::new(stored);
        kept.into_iter().for_each(|(sn, message)| relay.push(sn, message));
        let relaying = Self {
            client: client.into(),
            attempt,
            partition,
            relay,
            inbox: Arc::default(),
            marking: None,
            rewinding: false,
            reported_ms: None,
            touched_ms: shared.now_ms(),
            stored: sender,
            shared: Arc::clone(&shared),
        };
        shared.scope.spawn("gateway-relay", relaying.run(receiver));
        Handle { messages, stored: watch }
    }

    async fn run(mut self, mut messages: mpsc::Receiver<Vec<(u64, Bytes)>>) {
        let shutdown = self.shared.scope.shutdown().clone();
        let mut open = true;
        while open || !self.relay.is_done() {
            let full = !self.pump();
            self.maybe_mark();
            let room = self.relay.bytes() < self.shared.options.client_bytes;
            let pause = match self.reported_ms {
                _ if full => FULL,
                Some(_) if self.marking.is_none() => GATHER,
                _ => TICK,
            };
            let inbox = Arc::clone(&self.inbox);
            tokio::select! {
                more = messages.recv(), if open && room => match more {
                    Some(more) => more.into_iter().for_each(|(sn, message)| self.relay.push(sn, message)),
                    None => open = false,
                },
                () = inbox.notify.notified() => self.on_reports(),
                marked = next(&mut self.marking) => {
                    if !self.on_marked(marked).await {
                        return;
                    }
                }
                () = tokio::time::sleep(pause) => self.on_tick(),
                () = shutdown.stopped() => return,
            }
        }
    }

    /// Hands messages to the producer; false when it is full.
    fn pump(&mut self) -> bool {
        if self.relay.peek().is_none() {
            return true;
        }
        let now_ms = self.shared.now_ms();
        let shared = Arc::clone(&self.shared);
        let outlet = shared.outlet.open_now();
        while let Some((sn, message)) = self.relay.peek() {
            let ticket = Box::new(Ticket::new(&self.inbox, self.relay.round(), sn));
            let record = BaseRecord::with_opaque_to(CLIENT_MESSAGE, ticket)
                .partition(self.partition)
                .key(self.client.as_bytes())
                .payload(&message[..])
                .headers(queue::headers(&self.client, sn));
            match outlet.send(record) {
                Sent::Taken => self.relay.on_sent(now_ms),
                Sent::Later => return false,
            }
        }
        true
    }

    fn on_reports(&mut self) {
        let mut back = false;
        for (round, sn, what) in self.inbox.take() {
            back |= self.relay.on_report(round, sn, what);
        }
        self.reported_ms = self.reported_ms.or_else(|| Some(self.shared.now_ms()));
        if back {
            tracing::info!(
                client = &*self.client,
                from = self.relay.stored() + 1,
                "sending again: a message failed"
            );
            self.rewinding = true;
            progress::add(&self.shared.progress.resent, self.relay.last() - self.relay.stored());
        }
    }

    fn on_tick(&mut self) {
        let timeout = u64::try_from(self.shared.options.report_timeout.as_millis()).unwrap_or(u64::MAX);
        if self.relay.is_late(self.shared.now_ms(), timeout) {
            tracing::info!(
                client = &*self.client,
                from = self.relay.stored() + 1,
                "sending again: no report"
            );
            self.relay.go_back();
            self.rewinding = true;
            progress::add(&self.shared.progress.resent, self.relay.last() - self.relay.stored());
        }
    }

    /// One step of the store at a time: forgetting, marking, or a sign of life.
    fn maybe_mark(&mut self) {
        if self.marking.is_some() {
            return;
        }
        let store = self.shared.store.clone();
        let (client, attempt) = (Arc::clone(&self.client), self.attempt);
        if self.rewinding {
            self.rewinding = false;
            self.marking = Some(Box::pin(async move { store.rewind(&client, attempt).await }));
            return;
        }
        let now = self.shared.now_ms();
        let fresh = |since: u64| u128::from(now.saturating_sub(since)) < GATHER.as_millis();
        if self.reported_ms.is_some_and(fresh) && self.relay.awaits_reports() {
            return;
        }
        self.reported_ms = None;
        let reported = self.relay.take_reported();
        if reported.is_empty() && now.saturating_sub(self.touched_ms) < TOUCH_MS {
            return;
        }
        self.touched_ms = now;
        self.marking = Some(Box::pin(async move {
            // The same numbers until the store has answered: marking twice is marking once.
            loop {
                match store.mark(&client, attempt, &reported).await {
                    Err(StoreError::Unavailable(why)) => {
                        tracing::debug!(client = &*client, why, "cannot mark; trying again");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    other => return other,
                }
            }
        }));
    }

    /// False when this relay is at its end.
    async fn on_marked(&mut self, marked: Result<Result<u64, Fenced>, StoreError>) -> bool {
        match marked {
            Ok(Ok(stored)) => {
                let before = self.relay.stored();
                self.relay.on_marked(stored, self.shared.now_ms());
                progress::add(&self.shared.progress.relayed, self.relay.stored() - before);
                self.stored.send_replace(self.relay.stored());
                true
            }
            Ok(Err(Fenced)) => {
                tracing::info!(client = &*self.client, "another gateway relays for the client from now on");
                false
            }
            Err(error) => {
                // What was reported is forgotten here: everything not marked goes out again, in order.
                tracing::warn!(client = &*self.client, %error, "cannot mark; sending again");
                tokio::time::sleep(TICK).await;
                self.relay.go_back();
                self.rewinding = true;
                true
            }
        }
    }
}

/// Waits for the step under way; for ever when there is none.
async fn next(marking: &mut Option<Marking>) -> Result<Result<u64, Fenced>, StoreError> {
    match marking {
        Some(step) => {
            let result = step.await;
            *marking = None;
            result
        }
        None => std::future::pending().await,
    }
}
