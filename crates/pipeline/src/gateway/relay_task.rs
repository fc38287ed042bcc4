//! The task that relays one client's messages to the queue: drives [`Relay`] with delivery reports and with marks in
//! the store.
//!
//! Ends when another gateway has taken over the client, or when its session has ended and all messages are stored in
//! the queue.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rdkafka::ClientContext;
use rdkafka::error::KafkaError;
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseRecord, ProducerContext};
use tokio::sync::{Notify, mpsc, watch};

use crate::gateway::producer::Sent;
use crate::gateway::{Faults, Shared};
use crate::progress;
use crate::queue::{self, CLIENT_MESSAGE};
use crate::relay::{Delivery, Relay};
use crate::store::{BoxFuture, Fenced, StoreError};

/// Interval of the timeout check, and retry interval of a full producer.
const TIMEOUT_CHECK: Duration = Duration::from_millis(200);
const FULL_RETRY: Duration = Duration::from_millis(5);
/// How long delivery reports are gathered before they are marked in the store, while more are expected.
const REPORT_LINGER: Duration = Duration::from_millis(5);
/// Interval of the heartbeat to the store, while no other write shows that this gateway serves the client.
const HEARTBEAT_MS: u64 = 1_500;

/// The session's handle of a relay task.
#[derive(Clone)]
pub(super) struct RelayHandle {
    messages: mpsc::Sender<Vec<(u64, Bytes)>>,
    /// Everything up to this sequence number is in the queue.
    stored: watch::Receiver<u64>,
}

impl RelayHandle {
    /// Hands on messages that are in the store. Waits while the relay is full. False if another gateway has taken
    /// over the client.
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

/// Receives the producer's delivery reports for one client.
#[derive(Default)]
pub(super) struct Inbox {
    reports: Mutex<Vec<(u64, u64, Delivery)>>,
    notify: Notify,
}

impl Inbox {
    fn push(&self, round: u64, sn: u64, what: Delivery) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.push((round, sn, what));
        // The reader takes all reports at once, so only the first one wakes it.
        if reports.len() == 1 {
            drop(reports);
            self.notify.notify_one();
        }
    }

    pub(super) fn take(&self) -> Vec<(u64, u64, Delivery)> {
        std::mem::take(&mut *self.reports.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Opaque of a record, returned with its delivery report.
pub(super) struct DeliveryTag {
    inbox: Arc<Inbox>,
    round: u64,
    sn: u64,
}

impl DeliveryTag {
    pub(super) fn new(inbox: &Arc<Inbox>, round: u64, sn: u64) -> Self {
        Self { inbox: Arc::clone(inbox), round, sn }
    }
}

/// Receives delivery reports on the producer's thread.
pub(super) struct ReportContext {
    faults: Faults,
}

impl ReportContext {
    pub(super) fn new(faults: Faults) -> Self {
        Self { faults }
    }
}

impl ClientContext for ReportContext {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "gateway producer error");
    }
}

impl ProducerContext for ReportContext {
    type DeliveryOpaque = Box<DeliveryTag>;

    fn delivery(&self, result: &DeliveryResult<'_>, tag: Self::DeliveryOpaque) {
        let first = tag.round == 0;
        if first && self.faults.lose_report_of == Some(tag.sn) {
            return;
        }
        let failed = result.is_err() || (first && self.faults.fail_report_of == Some(tag.sn));
        let what = if failed { Delivery::Failed } else { Delivery::Delivered };
        tag.inbox.push(tag.round, tag.sn, what);
    }
}

type StoreCall = BoxFuture<'static, Result<Result<u64, Fenced>, StoreError>>;

/// A running relay.
pub(super) struct RelayTask {
    shared: Arc<Shared>,
    client: Arc<str>,
    attempt: u64,
    /// Partition of all messages of the client.
    partition: i32,
    relay: Relay,
    inbox: Arc<Inbox>,
    store_call: Option<StoreCall>,
    /// Delivery reports of the previous round must be dropped in the store before anything is marked.
    rewinding: bool,
    /// When the oldest report arrived that is not marked in the store.
    reported_ms: Option<u64>,
    heartbeat_ms: u64,
    stored: watch::Sender<u64>,
}

impl RelayTask {
    pub(super) fn start(
        shared: Arc<Shared>,
        client: &str,
        (attempt, partition): (u64, i32),
        stored: u64,
        kept: Vec<(u64, Bytes)>,
    ) -> RelayHandle {
        let (messages, receiver) = mpsc::channel(4);
        let (sender, watch) = watch::channel(stored);
        let mut relay = Relay::new(stored);
        kept.into_iter().for_each(|(sn, message)| relay.push(sn, message));
        let relay_task = Self {
            client: client.into(),
            attempt,
            partition,
            relay,
            inbox: Arc::default(),
            store_call: None,
            rewinding: false,
            reported_ms: None,
            heartbeat_ms: shared.now_ms(),
            stored: sender,
            shared: Arc::clone(&shared),
        };
        shared.scope.spawn("gateway-relay", relay_task.run(receiver));
        RelayHandle { messages, stored: watch }
    }

    async fn run(mut self, mut messages: mpsc::Receiver<Vec<(u64, Bytes)>>) {
        let shutdown = self.shared.scope.shutdown().clone();
        let mut open = true;
        while open || !self.relay.is_done() {
            let full = !self.pump();
            self.maybe_mark();
            let has_capacity = self.relay.bytes() < self.shared.options.client_bytes;
            let pause = match self.reported_ms {
                _ if full => FULL_RETRY,
                Some(_) if self.store_call.is_none() => REPORT_LINGER,
                _ => TIMEOUT_CHECK,
            };
            let inbox = Arc::clone(&self.inbox);
            tokio::select! {
                more = messages.recv(), if open && has_capacity => match more {
                    Some(more) => more.into_iter().for_each(|(sn, message)| self.relay.push(sn, message)),
                    None => open = false,
                },
                () = inbox.notify.notified() => self.on_reports(),
                marked = next(&mut self.store_call) => {
                    if !self.on_marked(marked).await {
                        return;
                    }
                }
                () = tokio::time::sleep(pause) => self.on_timeout_check(),
                () = shutdown.stopped() => return,
            }
        }
    }

    /// Hands messages to the producer; false if it is full.
    fn pump(&mut self) -> bool {
        if self.relay.peek().is_none() {
            return true;
        }
        let now_ms = self.shared.now_ms();
        let shared = Arc::clone(&self.shared);
        let producer = shared.producer.current();
        while let Some((sn, message)) = self.relay.peek() {
            let tag = Box::new(DeliveryTag::new(&self.inbox, self.relay.round(), sn));
            let record = BaseRecord::with_opaque_to(CLIENT_MESSAGE, tag)
                .partition(self.partition)
                .key(self.client.as_bytes())
                .payload(&message[..])
                .headers(queue::headers(&self.client, sn));
            match producer.send(record) {
                Sent::Accepted => self.relay.on_sent(now_ms),
                Sent::Retry => return false,
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
                "relay resend after a failed delivery"
            );
            self.rewinding = true;
            progress::add(&self.shared.progress.resent, self.relay.last() - self.relay.stored());
        }
    }

    fn on_timeout_check(&mut self) {
        let timeout = u64::try_from(self.shared.options.report_timeout.as_millis()).unwrap_or(u64::MAX);
        if self.relay.is_overdue(self.shared.now_ms(), timeout) {
            tracing::info!(
                client = &*self.client,
                from = self.relay.stored() + 1,
                "relay resend after a missing delivery report"
            );
            self.relay.start_round();
            self.rewinding = true;
            progress::add(&self.shared.progress.resent, self.relay.last() - self.relay.stored());
        }
    }

    /// Starts the next store call, one at a time: rewind, mark, or heartbeat.
    fn maybe_mark(&mut self) {
        if self.store_call.is_some() {
            return;
        }
        let store = self.shared.store.clone();
        let (client, attempt) = (Arc::clone(&self.client), self.attempt);
        if self.rewinding {
            self.rewinding = false;
            self.store_call = Some(Box::pin(async move { store.rewind(&client, attempt).await }));
            return;
        }
        let now = self.shared.now_ms();
        let fresh = |since: u64| u128::from(now.saturating_sub(since)) < REPORT_LINGER.as_millis();
        if self.reported_ms.is_some_and(fresh) && self.relay.awaits_reports() {
            return;
        }
        self.reported_ms = None;
        let reported = self.relay.take_reported();
        if reported.is_empty() && now.saturating_sub(self.heartbeat_ms) < HEARTBEAT_MS {
            return;
        }
        self.heartbeat_ms = now;
        self.store_call = Some(Box::pin(async move {
            // Retries with the same numbers until the store answers: marking is idempotent.
            loop {
                match store.mark_stored(&client, attempt, &reported).await {
                    Err(StoreError::Unavailable(why)) => {
                        tracing::debug!(client = &*client, why, "store mark failed; retrying");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    other => return other,
                }
            }
        }));
    }

    /// False if this relay must end.
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
                tracing::info!(client = &*self.client, "relay fenced by another gateway");
                false
            }
            Err(error) => {
                // The reports are dropped here: every unmarked message is resent, in order.
                tracing::warn!(client = &*self.client, %error, "store mark failed; resending");
                tokio::time::sleep(TIMEOUT_CHECK).await;
                self.relay.start_round();
                self.rewinding = true;
                true
            }
        }
    }
}

/// Waits for the store call in flight; never returns if absent.
async fn next(store_call: &mut Option<StoreCall>) -> Result<Result<u64, Fenced>, StoreError> {
    match store_call {
        Some(step) => {
            let result = step.await;
            *store_call = None;
            result
        }
        None => std::future::pending().await,
    }
}
