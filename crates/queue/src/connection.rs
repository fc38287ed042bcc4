//! One client connection: reads frames, has requests handled in order, sends responses in order.
//!
//! A connection is one task on one event loop. Requests are handled as they arrive, even while earlier ones wait (for
//! the disk, for data, for a group). Responses leave in request order, as the protocol demands: the response queue
//! holds one entry per open request.
//!
//! Limits: a frame has at most `max_request_bytes`, and its memory is taken from the budget as its bytes arrive; at
//! most [`MAX_IN_FLIGHT`] requests are open; the records of a response are charged to the budget until they are sent.
//! A client that does not read its responses is not read from either, and is disconnected when it has read nothing
//! for the idle timeout, or for [`STUCK`] while other clients wait for the memory. A large frame waits while request
//! memory is exhausted; a client that is slow to send the rest of one is disconnected too, while other clients wait
//! for that memory.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::time::{Instant, Sleep};

use moim_wire_kafka::messages::ProduceResponse;
use moim_wire_kafka::{ApiKey, Decoder, Message, RequestHeader};

use crate::async_response::{AsyncOutcome, AsyncResponse};
use crate::broker::Broker;
use crate::dispatch;
use crate::handlers::fetch::DelayedFetch;
use crate::handlers::produce::{OffLoopAppend, ProduceOutcome};
use crate::handlers::sasl_authenticate;
use crate::loops::Wake;
use crate::partition::DelayedProduce;
use crate::response_writer::{Call, Flushed, ResponseWriter};
use crate::sasl::{Auth, UNKNOWN_MAX_FRAME};
use moim_base::socket::Socket;
use moim_base::task::Shutdown;
use moim_base::{ConnectionBudget, Exhausted, Permit};

/// Minimum request size: a header without a client id.
const MIN_FRAME: usize = 8;
/// Maximum number of open requests of one connection.
const MAX_IN_FLIGHT: usize = 256;
/// Maximum number of unsent response bytes before requests of the client wait.
const MAX_UNSENT: usize = 4 << 20;
/// Read size if nothing is known of the next frame.
const READ_BYTES: usize = 16 << 10;
/// Read size while the client keeps filling its reads.
const BUSY_READ_BYTES: usize = 64 << 10;
/// Maximum reservation ahead of the bytes that have arrived.
const RESERVE_BYTES: usize = 2 << 20;
/// Buffers up to this size are not charged to the request memory.
const UNCOUNTED_BYTES: usize = 128 << 10;

/// Time slice of a connection before other connections of the loop get their turn.
const TURN: Duration = Duration::from_millis(2);

/// Maximum time without a read by a client that holds response memory while response memory is short.
const STUCK: Duration = Duration::from_secs(5);
/// Bytes of a large frame that a client must send every [`STUCK`] while request memory is short.
const SLOW_BYTES: usize = 1 << 20;
/// Interval of the checks for stuck and slow clients.
const STUCK_CHECK: Duration = Duration::from_secs(1);

/// Maximum record bytes in unsent responses of a connection, unless one batch is larger.
const UNSENT_RECORDS: usize = 16 << 20;

/// Retry interval while request memory is exhausted.
const MEMORY_RETRY: Duration = Duration::from_millis(5);

thread_local! {
    /// A spare buffer of this loop; no connection has data in it.
    static SPARE: Cell<BytesMut> = Cell::default();
}

/// An entry of the response queue: a request whose response is not written yet.
pub(crate) enum QueuedResponse {
    /// The response is encoded and waits for its turn.
    Ready(Bytes),
    /// The batches are being appended off the loop.
    Appending(Arc<OffLoopAppend>),
    /// A produce that waits for its acknowledgements.
    Produce(Box<PendingProduce>),
    /// A delayed fetch that waits for data.
    Fetch(Box<DelayedFetch>),
    /// Another task computes the response.
    Async(Arc<AsyncResponse>),
}

/// A produce that was appended and is not committed yet.
pub(crate) struct PendingProduce {
    pub(crate) call: Call,
    pub(crate) response: ProduceResponse,
    pub(crate) acks: Arc<DelayedProduce>,
    pub(crate) deadline: Instant,
}

enum Event {
    Read(usize),
    Writable,
    Woken,
    Timer,
}

/// The state of a connection.
pub(crate) struct Connection {
    pub(crate) broker: Arc<Broker>,
    pub(crate) wake: Arc<Wake>,
    pub(crate) peer: std::net::SocketAddr,
    /// The authentication state.
    pub(crate) auth: Auth,
    /// The client software name and version from ApiVersions.
    pub(crate) software: Option<(String, String)>,
    socket: Box<dyn Socket>,
    input: BytesMut,
    /// Size of the next read.
    read_bytes: usize,
    /// Memory permit of the frame being read.
    charged: Option<Permit>,
    /// Time of the last slow-client check, and the input size at that time.
    slow_checked: (Instant, usize),
    /// Memory permit of the request being handled, until a handler takes it over.
    request_permit: Option<Permit>,
    /// Budget of the records in responses.
    responses: ConnectionBudget,
    /// Encoded responses that wait behind others.
    ready_bytes: usize,
    /// Time of the last bytes that the client took.
    last_sent: Instant,
    /// Time of the last stuck-client check.
    stuck_checked_at: Instant,
    /// Set if the next frame has to wait for memory or for the disk: time of the next attempt.
    retry_at: Option<Instant>,
    response_queue: VecDeque<QueuedResponse>,
    /// The frame of the request being handled, for a fetch that may be resumed.
    request_frame: Bytes,
    /// The last fetch, after an empty response; a request with the same bytes resumes it.
    idle_fetch: Option<Box<DelayedFetch>>,
    /// Set while a request is appended off the loop: the next request must not overtake it.
    appending: Option<Arc<OffLoopAppend>>,
    /// Set while a request changes state that later requests may read: they wait until it has completed.
    mutating: Option<Arc<AsyncResponse>>,
    out: ResponseWriter,
    /// Set while a file range is read into the page cache; true when it is there.
    warming: Option<Arc<AtomicBool>>,
    sleep: Pin<Box<Sleep>>,
    /// Start of this turn, or completion of its last request: the clock is read once for both.
    pub(crate) now: Instant,
    last_active: Instant,
    /// True if the node had no contact with the cluster at the last check. The client then gets ApiVersions and
    /// nothing else, so that it sees an unavailable broker and not an incompatible one.
    isolated: bool,
    /// True if the client has sent a request other than ApiVersions: before that it may still get them from an
    /// isolated node.
    pub(crate) has_requested: bool,
    /// True if the connection was woken since the waiting requests were last polled.
    woken: bool,
    closing: bool,
    /// True if the broker stops: requests that wait for other clients are abandoned, those that wait for the disk are
    /// not.
    draining: bool,
}

/// Serves one client until it disconnects, violates the protocol, or the broker stops.
pub(crate) async fn serve(
    broker: Arc<Broker>,
    socket: Box<dyn Socket>,
    wake: Arc<Wake>,
    peer: std::net::SocketAddr,
) {
    let now = Instant::now();
    let idle = Duration::from_millis(broker.options.idle_connection_ms);
    let mut connection = Connection {
        broker: Arc::clone(&broker),
        wake,
        peer,
        auth: Auth::new(&broker.options.users),
        software: None,
        socket,
        input: BytesMut::new(),
        read_bytes: READ_BYTES,
        charged: None,
        slow_checked: (now, 0),
        request_permit: None,
        responses: broker.responses.connection(UNSENT_RECORDS.max(broker.options.max_request_bytes)),
        ready_bytes: 0,
        last_sent: now,
        stuck_checked_at: now,
        retry_at: None,
        response_queue: VecDeque::new(),
        request_frame: Bytes::new(),
        idle_fetch: None,
        appending: None,
        mutating: None,
        out: ResponseWriter::default(),
        warming: None,
        sleep: Box::pin(tokio::time::sleep_until(now + idle)),
        now,
        last_active: now,
        isolated: false,
        has_requested: false,
        woken: false,
        closing: false,
        draining: false,
    };
    if let Err(error) = connection.run().await
        && !is_ordinary(&error)
    {
        broker.metrics.bad_connections.inc();
        if let Some(suppressed) = broker.log_rate_limit.take(Instant::now()) {
            tracing::warn!(%peer, %error, suppressed, "connection closed");
        }
    }
    connection.drop_idle_fetch();
    for queued in &mut connection.response_queue {
        if let QueuedResponse::Fetch(fetch) = queued {
            fetch.forget(&connection.wake);
        }
    }
}

fn is_ordinary(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(error.kind(), K::ConnectionReset | K::BrokenPipe | K::ConnectionAborted | K::UnexpectedEof)
}

impl Connection {
    async fn run(&mut self) -> io::Result<()> {
        loop {
            let cluster_contact = self.broker.cluster_contact();
            self.isolated = cluster_contact.is_stopped();
            if !self.run_during(&cluster_contact).await? {
                return Ok(());
            }
        }
    }

    /// Serves the client until the node's cluster contact changes. Returns true if the connection continues after
    /// that.
    async fn run_during(&mut self, cluster_contact: &Shutdown) -> io::Result<bool> {
        let shutdown = self.broker.shutdown.clone();
        let mut stopped = pin!(shutdown.stopped());
        let mut ended = pin!(cluster_contact.stopped());
        let was_isolated = self.isolated;
        // The waker that the shutdown wakes; registered once, because every wait of a task has the same waker.
        let mut stop_waker: Option<Waker> = None;
        loop {
            // Checked here too: a client that never pauses always has an event before the shutdown.
            if !self.draining && shutdown.is_stopped() {
                self.drain();
            }
            if cluster_contact.is_stopped() && !was_isolated {
                // Some clients give up the whole cluster if they are disconnected during the version negotiation.
                return if self.has_requested {
                    Err(io::ErrorKind::ConnectionAborted.into())
                } else {
                    Ok(true)
                };
            }
            let more = self.turn()?;
            if self.isolated != was_isolated {
                return Ok(true);
            }
            if more {
                tokio::task::yield_now().await;
                self.now = Instant::now();
                continue;
            }
            if self.closing && self.response_queue.is_empty() && self.out.is_empty() {
                return Ok(false);
            }
            let event = std::future::poll_fn(|cx| {
                let ends = cluster_contact.is_stopped() && !was_isolated;
                if ends || !self.draining && shutdown.is_stopped() {
                    return Poll::Ready(Ok(Event::Woken));
                }
                if !stop_waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
                    stop_waker = Some(cx.waker().clone());
                    if !was_isolated && ended.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(Ok(Event::Woken));
                    }
                    if stopped.as_mut().poll(cx).is_ready() && !self.draining {
                        return Poll::Ready(Ok(Event::Woken));
                    }
                }
                self.poll_event(cx)
            });
            let event = event.await?;
            self.now = Instant::now();
            match event {
                Event::Read(0) => {
                    if self.input.is_empty() || self.closing {
                        return Ok(false);
                    }
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "client disconnected within a frame",
                    ));
                }
                Event::Read(_) => self.last_active = self.now,
                Event::Timer if self.is_idle() => return Ok(false),
                Event::Timer if self.is_stuck() => {
                    let why = "client does not read its responses while response memory is short";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Event::Timer if self.is_slow() => {
                    let why = "client does not complete a large request while request memory is short";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Event::Woken => self.woken = true,
                Event::Timer | Event::Writable => {}
            }
        }
    }

    /// The broker stops: fetches are answered with the available data, produces once they are committed.
    fn drain(&mut self) {
        self.closing = true;
        self.draining = true;
        for queued in &mut self.response_queue {
            if let QueuedResponse::Fetch(fetch) = queued {
                fetch.deadline = self.now;
            }
        }
    }

    /// Does the work that needs no wait, for about [`TURN`]. Returns true if there may be more: a client that sends
    /// costly requests without a pause must not keep the loop from other connections.
    fn turn(&mut self) -> io::Result<bool> {
        let end = self.now + TURN;
        loop {
            if self.drain_response_queue(end)? {
                self.flush()?;
                return Ok(true);
            }
            while self.can_take()
                && let Some(frame) = self.next_frame()?
            {
                self.handle(frame)?;
                if self.input.is_empty() {
                    break;
                }
                self.now = Instant::now();
                if self.now >= end {
                    self.drain_response_queue(end)?;
                    self.flush()?;
                    return Ok(true);
                }
            }
            let held_up = !self.can_take();
            let more = self.drain_response_queue(end)?;
            let congested = self.is_congested();
            self.flush()?;
            if more {
                return Ok(true);
            }
            // Requests that are already in the input buffer and were blocked continue now: no event will come for
            // them.
            let unblocked = held_up && self.can_take() || congested && !self.is_congested();
            if !unblocked {
                return Ok(false);
            }
        }
    }

    /// Sends until the socket is full; a file range that is not in the page cache is read on another thread first.
    fn flush(&mut self) -> io::Result<()> {
        if let Some(warming) = &self.warming {
            if !warming.load(Ordering::Acquire) {
                return Ok(());
            }
            self.warming = None;
            self.out.on_warm();
        }
        let before = self.out.len();
        let flushed = self.out.flush(&mut *self.socket)?;
        if self.out.len() < before {
            self.last_sent = self.now;
            if !self.out.is_empty() {
                self.last_active = self.now;
            }
        }
        if let Flushed::Cold(range) = flushed {
            let done = Arc::new(AtomicBool::new(false));
            self.warming = Some(Arc::clone(&done));
            let (broker, wake) = (Arc::clone(&self.broker), Arc::clone(&self.wake));
            tokio::task::spawn_blocking(move || {
                // A read error occurs again when the range is sent.
                let _ = range.read();
                done.store(true, Ordering::Release);
                broker.loops.wake_one(&wake);
            });
        }
        Ok(())
    }

    fn can_take(&self) -> bool {
        !self.closing
            && self.appending.is_none()
            && self.mutating.is_none()
            && self.response_queue.len() < MAX_IN_FLIGHT
            && self.ready_bytes < MAX_UNSENT
            && !self.is_congested()
    }

    /// True if the client neither sends requests nor reads responses.
    fn is_idle(&self) -> bool {
        (self.response_queue.is_empty() || self.is_congested()) && self.now >= self.idle_at()
    }

    fn idle_at(&self) -> Instant {
        self.last_active + Duration::from_millis(self.broker.options.idle_connection_ms)
    }

    /// True if the client must read before more requests are handled.
    fn is_congested(&self) -> bool {
        self.out.len() >= MAX_UNSENT
    }

    /// True if the client holds response memory without reading while other clients may wait for it.
    fn is_stuck(&mut self) -> bool {
        if self.now < self.stuck_at() || !self.out.holds_records() {
            return false;
        }
        self.stuck_checked_at = self.now;
        let responses = &self.broker.responses;
        self.now >= self.last_sent + STUCK && responses.used() > responses.limit() / 2
    }

    fn stuck_at(&self) -> Instant {
        (self.last_sent + STUCK).max(self.stuck_checked_at + STUCK_CHECK)
    }

    /// True if the client is slow to send a large frame while other clients may wait for the memory. A frame that
    /// itself waits for memory counts as slow too, because it holds memory that other frames wait for.
    fn is_slow(&mut self) -> bool {
        if self.charged.is_none() || self.now < self.slow_at() {
            return false;
        }
        let received = self.input.len().saturating_sub(self.slow_checked.1);
        self.slow_checked = (self.now, self.input.len());
        let requests = &self.broker.requests;
        received < SLOW_BYTES && requests.used() >= requests.limit() / 2
    }

    fn slow_at(&self) -> Instant {
        self.slow_checked.0 + STUCK
    }

    /// Takes a complete frame from the input buffer, if there is one.
    fn next_frame(&mut self) -> io::Result<Option<Bytes>> {
        self.retry_at = None;
        if self.input.len() < 4 {
            return Ok(None);
        }
        let size = i32::from_be_bytes([self.input[0], self.input[1], self.input[2], self.input[3]]);
        let mut max = self.broker.options.max_request_bytes;
        let mut min = MIN_FRAME;
        if !self.auth.is_open() {
            max = max.min(UNKNOWN_MAX_FRAME);
            if self.auth == (Auth::Chosen { raw: true }) {
                min = 0;
            }
        }
        let size = usize::try_from(size).ok().filter(|s| (min..=max).contains(s)).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("frame size {size} out of range ({min} to {max} bytes)"),
            )
        })?;
        if self.input.len() < 4 + size {
            self.reserve_input(4 + size)?;
            return Ok(None);
        }
        let produces = size >= MIN_FRAME && self.input[4..6] == (ApiKey::Produce as i16).to_be_bytes();
        if produces && self.broker.store.is_behind() {
            // The disk falls behind: the request waits here, in order, instead of being rejected.
            self.retry_at = Some(self.now + MEMORY_RETRY);
            return Ok(None);
        }
        self.request_permit = self.charged.take();
        self.input.advance(4);
        Ok(Some(self.input.split_to(size).freeze()))
    }

    /// Reserves input memory for a frame of `total` bytes, but never far ahead of the bytes that have arrived. Small
    /// frames always get memory, so that clients that send large frames slowly cannot starve the others.
    fn reserve_input(&mut self, total: usize) -> io::Result<()> {
        let requests = &self.broker.requests;
        // Half of the layer is for frames that have not begun: a frame that has begun may complete.
        if total > UNCOUNTED_BYTES && self.charged.is_none() && requests.used() >= requests.limit() / 2 {
            self.retry_at = Some(self.now + MEMORY_RETRY);
            return Ok(());
        }
        if total > requests.limit() {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, Exhausted::TooLarge));
        }
        let missing = (total - self.input.len()).min(RESERVE_BYTES);
        let (available, charged) = (self.input.capacity(), self.charged.as_ref().map_or(0, Permit::bytes));
        let fits = available - self.input.len() >= missing;
        // A growing buffer at least doubles.
        let wanted = if fits { available } else { (2 * available).max(self.input.len() + missing) };
        if wanted > UNCOUNTED_BYTES && wanted > charged {
            let taken = match &mut self.charged {
                Some(permit) => permit.grow(wanted - charged),
                none => requests.try_take(wanted).map(|permit| *none = Some(permit)),
            };
            if taken.is_err() {
                // The frame waits with the memory it has; a client that makes other clients wait too is disconnected.
                self.retry_at = Some(self.now + MEMORY_RETRY);
                return Ok(());
            }
            if charged == 0 {
                self.slow_checked = (self.now, self.input.len());
            }
        }
        if !fits {
            self.input.reserve(missing);
        }
        Ok(())
    }

    fn handle(&mut self, frame: Bytes) -> io::Result<()> {
        if self.auth == (Auth::Chosen { raw: true }) {
            // After a handshake of version 0 the token and its response have no request framing.
            if !sasl_authenticate::token(self, &frame) {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "authentication failed: wrong user name or password",
                ));
            }
            self.out.push_encoded(Bytes::from_static(&[0; 4]));
            return Ok(());
        }
        if self.maybe_resume_fetch(&frame) {
            return Ok(());
        }
        self.request_frame = frame.clone();
        let mut decoder = Decoder::new(frame);
        let header = RequestHeader::decode(&mut decoder).map_err(bad_frame)?;
        let handled = dispatch::dispatch(self, header, decoder);
        self.request_frame = Bytes::new();
        self.request_permit = None;
        handled
    }

    /// True if a request has the same bytes as the last empty fetch, which it resumes.
    fn maybe_resume_fetch(&mut self, frame: &[u8]) -> bool {
        if !self.response_queue.is_empty() || !self.auth.is_open() {
            return false;
        }
        let (broker, now) = (&self.broker, self.now);
        let Some(fetch) = self.idle_fetch.take_if(|fetch| fetch.maybe_resume(frame, broker, now)) else {
            return false;
        };
        self.broker.metrics.request(ApiKey::Fetch);
        self.response_queue.push_back(QueuedResponse::Fetch(fetch));
        true
    }

    /// The frame of the request being handled, for a fetch; ends the resumable fetch before it. Empty if other
    /// requests are queued before it: until their responses are sent, the frame would pin the input buffer.
    pub(crate) fn take_request_frame(&mut self) -> Bytes {
        self.drop_idle_fetch();
        let request_frame = std::mem::take(&mut self.request_frame);
        if self.response_queue.is_empty() { request_frame } else { Bytes::new() }
    }

    /// The memory permit of the request being handled, for a handler that keeps its bytes.
    pub(crate) fn take_permit(&mut self) -> Option<Permit> {
        self.request_permit.take()
    }

    fn drop_idle_fetch(&mut self) {
        if let Some(mut fetch) = self.idle_fetch.take() {
            fetch.forget(&self.wake);
        }
    }

    /// Queues a response, behind those of earlier requests.
    pub(crate) fn respond(&mut self, call: Call, response: &impl Message) -> io::Result<()> {
        if self.response_queue.is_empty() {
            self.out.push(call, response)
        } else {
            let bytes = encode_alone(call, response)?;
            self.ready_bytes += bytes.len();
            self.response_queue.push_back(QueuedResponse::Ready(bytes));
            Ok(())
        }
    }

    /// Queues an entry for a request whose response comes later.
    pub(crate) fn enqueue(&mut self, queued: QueuedResponse) {
        self.response_queue.push_back(queued);
    }

    /// Queues an entry for a produce that is appended off the loop; blocks further requests until it is appended.
    pub(crate) fn enqueue_appending(&mut self, off_loop: Arc<OffLoopAppend>) {
        self.appending = Some(Arc::clone(&off_loop));
        self.response_queue.push_back(QueuedResponse::Appending(off_loop));
    }

    /// Queues an entry for a mutating request; blocks further requests until it has completed: as in Kafka, the next
    /// request of a connection sees the effect of the one before it.
    pub(crate) fn enqueue_mutation(&mut self, async_response: Arc<AsyncResponse>) {
        self.mutating = Some(Arc::clone(&async_response));
        self.response_queue.push_back(QueuedResponse::Async(async_response));
    }

    /// True if requests are served: not while the node has no contact with the cluster.
    pub(crate) fn is_served(&mut self) -> bool {
        if self.isolated && !self.broker.cluster_contact().is_stopped() {
            self.isolated = false;
        }
        !self.isolated
    }

    /// Stops reading; the connection ends when the open requests are answered.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Writes the responses that are ready at the head of the response queue. A fetch is read when it reaches the
    /// head, which may take long, and many may be queued: returns true if there may be more when the time slice ends.
    fn drain_response_queue(&mut self, end: Instant) -> io::Result<bool> {
        if self.appending.as_ref().is_some_and(|off_loop| off_loop.is_done()) {
            self.appending = None;
        }
        self.mutating.take_if(|async_response| async_response.is_done());
        while !self.is_congested()
            && let Some(front) = self.response_queue.front_mut()
        {
            match front {
                QueuedResponse::Appending(off_loop) => {
                    let Some(produced) = off_loop.take() else { return Ok(false) };
                    self.appending = None;
                    match produced.outcome(&self.broker) {
                        ProduceOutcome::Silent { failed } => self.closing |= failed,
                        ProduceOutcome::Response(call, response) => self.out.push(call, &response)?,
                        ProduceOutcome::Wait(pending) => {
                            *front = QueuedResponse::Produce(pending);
                            continue;
                        }
                    }
                }
                QueuedResponse::Ready(bytes) => {
                    self.ready_bytes -= bytes.len();
                    self.out.push_encoded(std::mem::take(bytes));
                }
                QueuedResponse::Async(async_response) => match async_response.take() {
                    Some(AsyncOutcome::Bytes(bytes)) => self.out.push_encoded(bytes),
                    Some(AsyncOutcome::Failed) => {
                        return Err(io::Error::other("request completed without a response"));
                    }
                    // The shutdown does not wait for a group that waits for members; the client retries on the next
                    // broker.
                    None if self.draining => return Err(io::ErrorKind::ConnectionAborted.into()),
                    None => return Ok(false),
                },
                QueuedResponse::Produce(produce) => {
                    if !produce.acks.is_done() && self.now < produce.deadline {
                        return Ok(false);
                    }
                    let PendingProduce { call, response, acks, .. } = &mut **produce;
                    crate::handlers::produce::finish(&self.broker, call.version, response, acks);
                    self.out.push(produce.call, &produce.response)?;
                }
                QueuedResponse::Fetch(fetch) => {
                    let woken = std::mem::take(&mut self.woken);
                    if !fetch.poll(&self.broker, &self.wake, self.now, woken, &self.responses) {
                        return Ok(false);
                    }
                    if self.out.is_empty() {
                        // The client has not had time to read this response.
                        self.last_sent = self.now;
                    }
                    fetch.write(&self.broker, &mut self.out)?;
                    let Some(QueuedResponse::Fetch(mut fetch)) = self.response_queue.pop_front() else {
                        continue;
                    };
                    // Watches belong to the connection, not to one fetch: the next queued fetch may watch the same
                    // partition.
                    if fetch.can_resume() && self.response_queue.is_empty() {
                        self.idle_fetch = Some(fetch);
                    } else {
                        fetch.forget(&self.wake);
                    }
                    if !self.response_queue.is_empty() {
                        self.now = Instant::now();
                        if self.now >= end {
                            return Ok(true);
                        }
                    }
                    continue;
                }
            }
            self.response_queue.pop_front();
        }
        Ok(false)
    }

    /// Time of the next poll without an event. Never a time that polling does not move: the timer would fire in a
    /// loop.
    fn next_timer(&self) -> Option<Instant> {
        let stuck = self.out.holds_records().then(|| self.stuck_at());
        let front = match self.response_queue.front() {
            _ if self.is_congested() => Some(self.idle_at()),
            None => Some(self.idle_at()),
            Some(QueuedResponse::Fetch(fetch)) => Some(fetch.next_timer()),
            Some(QueuedResponse::Produce(produce)) => Some(produce.deadline),
            Some(QueuedResponse::Ready(_) | QueuedResponse::Async(_) | QueuedResponse::Appending(_)) => None,
        };
        let slow = self.charged.is_some().then(|| self.slow_at());
        [front, stuck, slow].into_iter().flatten().min()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Event>> {
        let awaits_wake = !self.response_queue.is_empty() || self.warming.is_some();
        if awaits_wake && self.wake.poll_woken(cx).is_ready() {
            return Poll::Ready(Ok(Event::Woken));
        }
        if !self.out.is_empty() && self.warming.is_none() && self.socket.poll_write_ready(cx)?.is_ready() {
            return Poll::Ready(Ok(Event::Writable));
        }
        if self.can_take() && self.retry_at.is_none() {
            if self.input.capacity() == 0 {
                self.input = SPARE.take();
            }
            if self.input.capacity() == self.input.len() {
                self.input.reserve(self.read_bytes);
            }
            let available = self.input.capacity() - self.input.len();
            if let Poll::Ready(result) = self.socket.poll_read(cx, &mut self.input) {
                if matches!(result, Ok(read) if read == available) {
                    self.read_bytes = BUSY_READ_BYTES;
                }
                return Poll::Ready(result.map(Event::Read));
            }
            let idle = matches!(
                self.response_queue.front(),
                None | Some(QueuedResponse::Fetch(_) | QueuedResponse::Async(_))
            );
            if self.input.is_empty() && idle {
                // An idle client holds no buffer, because there may be ten thousand of them. The loop keeps one spare
                // buffer for the next client.
                let mut spare = std::mem::take(&mut self.input);
                if spare.try_reclaim(READ_BYTES) && spare.capacity() <= BUSY_READ_BYTES {
                    SPARE.set(spare);
                }
                self.read_bytes = READ_BYTES;
            }
        }
        let Some(wanted) = [self.next_timer(), self.retry_at].into_iter().flatten().min() else {
            return Poll::Pending;
        };
        // The timer is moved only when it must fire earlier; firing too early costs one empty turn.
        if wanted < self.sleep.deadline() || self.sleep.is_elapsed() {
            self.sleep.as_mut().reset(wanted);
        }
        if self.sleep.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(Event::Timer));
        }
        Poll::Pending
    }
}

pub(crate) fn bad_frame(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("malformed request: {error}"))
}

/// Encodes a response into its own buffer, for asynchronous requests.
pub(crate) fn encode_alone(call: Call, response: &impl Message) -> io::Result<Bytes> {
    let mut own = ResponseWriter::default();
    own.push(call, response)?;
    Ok(own.into_bytes())
}
