//! One client connection: reads frames, has them handled in order, answers in order.
//!
//! A connection is one task on one event loop. Requests are handled as they arrive, also while earlier
//! ones wait (for the disk, for data, for a group); answers leave in the order of the requests, as the
//! protocol demands.
//!
//! Bounds: a frame is at most `max_request_bytes`, and memory for it is taken from the budget as its bytes arrive; at most
//! [`MAX_IN_FLIGHT`] requests are open; the records of a response are taken from the budget until they are sent. A client
//! that does not read its answers is not read from either, and is cut off when it has not read anything for as long as a
//! connection may be idle; or for [`STUCK`], while others wait for the memory. A large frame waits while memory for requests is
//! spent; a client that is slow to send the rest of one is cut off, too, while others wait for that memory.

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

use crate::broker::Broker;
use crate::dispatch;
use crate::handlers::fetch::PendingFetch;
use crate::handlers::produce::{Deferred, Settled};
use crate::handlers::sasl_authenticate;
use crate::later::{Answer, Later};
use crate::loops::Wake;
use crate::partition::PendingAcks;
use crate::reply::{Call, Flushed, Writer};
use crate::sasl::{Auth, UNKNOWN_MAX_FRAME};
use moim_base::socket::Socket;
use moim_base::task::Shutdown;
use moim_base::{ConnectionBudget, Exhausted, Permit};

/// The smallest request: a header without a client id.
const MIN_FRAME: usize = 8;
/// How many requests of one connection may be open at a time.
const MAX_IN_FLIGHT: usize = 256;
/// How many bytes of answers may wait for the client before its requests do.
const MAX_UNSENT: usize = 4 << 20;
/// What a read asks for when nothing is known of the next frame.
const READ_BYTES: usize = 16 << 10;
/// What a read asks for while the client keeps filling what it asks for.
const BUSY_READ_BYTES: usize = 64 << 10;
/// At most this much memory is reserved ahead of the bytes that have arrived.
const RESERVE_BYTES: usize = 2 << 20;
/// Buffers up to this size are not counted against the memory for requests.
const UNCOUNTED_BYTES: usize = 128 << 10;

/// How long a connection may keep its event loop before the others have their turn.
const TURN: Duration = Duration::from_millis(2);

/// How long a client that holds records of responses may read nothing while memory for responses is short.
const STUCK: Duration = Duration::from_secs(5);
/// What a client must send of a large frame every [`STUCK`] while memory for requests is short.
const SLOW_BYTES: usize = 1 << 20;
/// How often that is looked at.
const STUCK_LOOK: Duration = Duration::from_secs(1);

/// Records of responses that a connection may hold, unless one batch is larger.
const UNSENT_RECORDS: usize = 16 << 20;

/// How long a connection waits when there is no memory for requests.
const STARVED: Duration = Duration::from_millis(5);

thread_local! {
    /// A buffer that no connection of this loop has data in.
    static SPARE: Cell<BytesMut> = Cell::default();
}

/// A request whose answer is not written yet.
pub(crate) enum Slot {
    /// Encoded, waits for its turn.
    Ready(Bytes),
    /// Its batches are being appended off the loop.
    Appending(Arc<Deferred>),
    /// Waits for the journal.
    Produce(Box<PendingProduce>),
    /// Waits for data.
    Fetch(Box<PendingFetch>),
    /// Another task makes the answer.
    Later(Arc<Later>),
}

/// A produce that was appended and is not committed yet.
pub(crate) struct PendingProduce {
    pub(crate) call: Call,
    pub(crate) response: ProduceResponse,
    pub(crate) acks: Arc<PendingAcks>,
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
    /// Who the client is.
    pub(crate) auth: Auth,
    /// What ApiVersions has said of the client's program.
    pub(crate) software: Option<(String, String)>,
    socket: Box<dyn Socket>,
    input: BytesMut,
    /// What the next read asks for.
    read_bytes: usize,
    /// For the frame being read.
    charged: Option<Permit>,
    /// When it was last looked at whether the client is slow with it, and what had arrived by then.
    slow_look: (Instant, usize),
    /// For the request being handled, until a handler takes it along.
    held: Option<Permit>,
    /// For the records of responses.
    responses: ConnectionBudget,
    /// Encoded answers that wait behind others.
    ready_bytes: usize,
    /// When the client last took something of what is to be sent.
    last_sent: Instant,
    /// When it was last looked at whether it is stuck.
    stuck_look: Instant,
    /// The next frame has to wait, for memory or for the disk; looked at again at this moment.
    starved: Option<Instant>,
    slots: VecDeque<Slot>,
    /// The request that is being handled, for a handler that wants to know it again.
    question: Bytes,
    /// The last fetch, answered with nothing; the same question goes on with it.
    repeat: Option<Box<PendingFetch>>,
    /// Set while a request is appended off the loop: the next one must not overtake it.
    appending: Option<Arc<Deferred>>,
    /// Set while a request changes what later ones may ask about: they wait until it has ended.
    changing: Option<Arc<Later>>,
    out: Writer,
    /// Set while a range of a file is brought into memory; true when it is there.
    warming: Option<Arc<AtomicBool>>,
    sleep: Pin<Box<Sleep>>,
    /// When this turn began, or its last request was done: the clock is read once for both.
    pub(crate) now: Instant,
    last_active: Instant,
    /// The node was out of touch with the cluster when this was last looked at: the client is told which versions are
    /// spoken, so that it takes what follows for a broker that went away and not for one it cannot talk to, and nothing else.
    isolated: bool,
    /// Whether the client has asked for anything but versions: one that has not may still learn them from an isolated node.
    pub(crate) has_asked: bool,
    /// Somebody had news since the waiting requests were last looked at.
    woken: bool,
    closing: bool,
    /// The broker stops: what waits for others is given up, what waits for the disk is not.
    draining: bool,
}

/// Serves one client until it goes, misbehaves, or the broker stops.
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
        slow_look: (now, 0),
        held: None,
        responses: broker.responses.connection(UNSENT_RECORDS.max(broker.options.max_request_bytes)),
        ready_bytes: 0,
        last_sent: now,
        stuck_look: now,
        starved: None,
        slots: VecDeque::new(),
        question: Bytes::new(),
        repeat: None,
        appending: None,
        changing: None,
        out: Writer::default(),
        warming: None,
        sleep: Box::pin(tokio::time::sleep_until(now + idle)),
        now,
        last_active: now,
        isolated: false,
        has_asked: false,
        woken: false,
        closing: false,
        draining: false,
    };
    if let Err(error) = connection.run().await
        && !is_ordinary(&error)
    {
        broker.metrics.bad_connections.inc();
        if let Some(left_out) = broker.log_budget.take(Instant::now()) {
            tracing::warn!(%peer, %error, left_out, "closing a connection");
        }
    }
    connection.forget_repeat();
    for slot in &mut connection.slots {
        if let Slot::Fetch(fetch) = slot {
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
            let spell = self.broker.spell();
            self.isolated = spell.is_stopped();
            if !self.run_during(&spell).await? {
                return Ok(());
            }
        }
    }

    /// Serves the client while the node is in touch with the cluster, or as long as it is not. Answers whether to go on
    /// after that has changed.
    async fn run_during(&mut self, spell: &Shutdown) -> io::Result<bool> {
        let shutdown = self.broker.shutdown.clone();
        let mut stopped = pin!(shutdown.stopped());
        let mut ended = pin!(spell.stopped());
        let was_isolated = self.isolated;
        // Whom the stop wakes; asked for once, because every wait of a task has the same waker.
        let mut told: Option<Waker> = None;
        loop {
            // Looked at here too: for a client that never pauses there is always an event before the stop.
            if !self.draining && shutdown.is_stopped() {
                self.drain();
            }
            if spell.is_stopped() && !was_isolated {
                // Closed in the middle of the negotiation, some clients give the whole cluster up.
                return if self.has_asked { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(true) };
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
            if self.closing && self.slots.is_empty() && self.out.is_empty() {
                return Ok(false);
            }
            let event = std::future::poll_fn(|cx| {
                let ends = spell.is_stopped() && !was_isolated;
                if ends || !self.draining && shutdown.is_stopped() {
                    return Poll::Ready(Ok(Event::Woken));
                }
                if !told.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
                    told = Some(cx.waker().clone());
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
                        "the client left in the middle of a frame",
                    ));
                }
                Event::Read(_) => self.last_active = self.now,
                Event::Timer if self.is_idle() => return Ok(false),
                Event::Timer if self.is_stuck() => {
                    let why = "the client does not read its responses, and memory for them is short";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Event::Timer if self.is_slow() => {
                    let why = "the client does not finish a large request, and memory for requests is short";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Event::Woken => self.woken = true,
                Event::Timer | Event::Writable => {}
            }
        }
    }

    /// The broker stops: fetches are answered with what there is, produces once they are committed.
    fn drain(&mut self) {
        self.closing = true;
        self.draining = true;
        for slot in &mut self.slots {
            if let Slot::Fetch(fetch) = slot {
                fetch.deadline = self.now;
            }
        }
    }

    /// Does what can be done without waiting, for about as long as [`TURN`]. Gives whether there may be more
    /// to do: a client that sends costly requests without a pause must not keep the loop from the others.
    fn turn(&mut self) -> io::Result<bool> {
        let end = self.now + TURN;
        loop {
            if self.settle(end)? {
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
                    self.settle(end)?;
                    self.flush()?;
                    return Ok(true);
                }
            }
            let held_up = !self.can_take();
            let more = self.settle(end)?;
            let congested = self.is_congested();
            self.flush()?;
            if more {
                return Ok(true);
            }
            // Requests that are here already and could not be taken go on now: no event will come for them.
            let room = held_up && self.can_take() || congested && !self.is_congested();
            if !room {
                return Ok(false);
            }
        }
    }

    /// Sends what can be sent; a range of a file that is not in memory is read on another thread first.
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
                // An error shows again when the range is sent.
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
            && self.changing.is_none()
            && self.slots.len() < MAX_IN_FLIGHT
            && self.ready_bytes < MAX_UNSENT
            && !self.is_congested()
    }

    /// Whether the client neither asks for anything nor reads what it asked for.
    fn is_idle(&self) -> bool {
        (self.slots.is_empty() || self.is_congested()) && self.now >= self.idle_at()
    }

    fn idle_at(&self) -> Instant {
        self.last_active + Duration::from_millis(self.broker.options.idle_connection_ms)
    }

    /// Whether the client must read before anything else is done for it.
    fn is_congested(&self) -> bool {
        self.out.len() >= MAX_UNSENT
    }

    /// Whether the client holds records of responses that it does not read, while others may wait for the memory.
    fn is_stuck(&mut self) -> bool {
        if self.now < self.stuck_at() || !self.out.holds_records() {
            return false;
        }
        self.stuck_look = self.now;
        let responses = &self.broker.responses;
        self.now >= self.last_sent + STUCK && responses.used() > responses.limit() / 2
    }

    fn stuck_at(&self) -> Instant {
        (self.last_sent + STUCK).max(self.stuck_look + STUCK_LOOK)
    }

    /// Whether the client is slow with a large frame, while others may wait for the memory. A frame that itself waits for memory
    /// counts as slow, too: those that wait hold what the others wait for.
    fn is_slow(&mut self) -> bool {
        if self.charged.is_none() || self.now < self.slow_at() {
            return false;
        }
        let received = self.input.len().saturating_sub(self.slow_look.1);
        self.slow_look = (self.now, self.input.len());
        let requests = &self.broker.requests;
        received < SLOW_BYTES && requests.used() >= requests.limit() / 2
    }

    fn slow_at(&self) -> Instant {
        self.slow_look.0 + STUCK
    }

    /// Takes a whole frame off the input, if there is one.
    fn next_frame(&mut self) -> io::Result<Option<Bytes>> {
        self.starved = None;
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
                format!("a frame of {size} bytes ({min} to {max} are allowed)"),
            )
        })?;
        if self.input.len() < 4 + size {
            self.make_room(4 + size)?;
            return Ok(None);
        }
        let produces = size >= MIN_FRAME && self.input[4..6] == (ApiKey::Produce as i16).to_be_bytes();
        if produces && self.broker.store.is_behind() {
            // The disk does not keep up: the request waits here, in order, instead of being refused.
            self.starved = Some(self.now + STARVED);
            return Ok(None);
        }
        self.held = self.charged.take();
        self.input.advance(4);
        Ok(Some(self.input.split_to(size).freeze()))
    }

    /// Reserves for a frame of `total` bytes, but never far ahead of what has arrived. Small frames always
    /// have room, so that those who send large ones slowly cannot keep everybody else from being served.
    fn make_room(&mut self, total: usize) -> io::Result<()> {
        let requests = &self.broker.requests;
        // Half of it is for frames that are not begun yet: who has begun may finish.
        if total > UNCOUNTED_BYTES && self.charged.is_none() && requests.used() >= requests.limit() / 2 {
            self.starved = Some(self.now + STARVED);
            return Ok(());
        }
        if total > requests.limit() {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, Exhausted::TooLarge));
        }
        let missing = (total - self.input.len()).min(RESERVE_BYTES);
        let (room, charged) = (self.input.capacity(), self.charged.as_ref().map_or(0, Permit::bytes));
        let fits = room - self.input.len() >= missing;
        // A buffer that grows doubles at least.
        let wanted = if fits { room } else { (2 * room).max(self.input.len() + missing) };
        if wanted > UNCOUNTED_BYTES && wanted > charged {
            let taken = match &mut self.charged {
                Some(permit) => permit.grow(wanted - charged),
                none => requests.try_take(wanted).map(|permit| *none = Some(permit)),
            };
            if taken.is_err() {
                // It waits with what it has; a client that makes others wait as well is cut off.
                self.starved = Some(self.now + STARVED);
                return Ok(());
            }
            if charged == 0 {
                self.slow_look = (self.now, self.input.len());
            }
        }
        if !fits {
            self.input.reserve(missing);
        }
        Ok(())
    }

    fn handle(&mut self, frame: Bytes) -> io::Result<()> {
        if self.auth == (Auth::Chosen { raw: true }) {
            // After a handshake of version 0 the token has no request around it, and neither has the answer.
            if !sasl_authenticate::token(self, &frame) {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "wrong user name or password"));
            }
            self.out.push_encoded(Bytes::from_static(&[0; 4]));
            return Ok(());
        }
        if self.goes_on(&frame) {
            return Ok(());
        }
        self.question = frame.clone();
        let mut decoder = Decoder::new(frame);
        let header = RequestHeader::decode(&mut decoder).map_err(bad_frame)?;
        let handled = dispatch::dispatch(self, header, decoder);
        self.question = Bytes::new();
        self.held = None;
        handled
    }

    /// Whether a request repeats the last fetch, which then waits on.
    fn goes_on(&mut self, frame: &[u8]) -> bool {
        if !self.slots.is_empty() || !self.auth.is_open() {
            return false;
        }
        let (broker, now) = (&self.broker, self.now);
        let Some(fetch) = self.repeat.take_if(|fetch| fetch.repeat(frame, broker, now)) else { return false };
        self.broker.metrics.request(ApiKey::Fetch);
        self.slots.push_back(Slot::Fetch(fetch));
        true
    }

    /// The request being handled, for a fetch; the fetch before it is over. Nothing where others wait before it: until they are
    /// answered it would hold on to the buffer that it came in.
    pub(crate) fn take_question(&mut self) -> Bytes {
        self.forget_repeat();
        let question = std::mem::take(&mut self.question);
        if self.slots.is_empty() { question } else { Bytes::new() }
    }

    /// The memory of the request being handled, for a handler that keeps its bytes for longer.
    pub(crate) fn take_permit(&mut self) -> Option<Permit> {
        self.held.take()
    }

    fn forget_repeat(&mut self) {
        if let Some(mut fetch) = self.repeat.take() {
            fetch.forget(&self.wake);
        }
    }

    /// Answers a request; behind those that came before it.
    pub(crate) fn answer(&mut self, call: Call, response: &impl Message) -> io::Result<()> {
        if self.slots.is_empty() {
            self.out.push(call, response)
        } else {
            let bytes = encode_alone(call, response)?;
            self.ready_bytes += bytes.len();
            self.slots.push_back(Slot::Ready(bytes));
            Ok(())
        }
    }

    /// Keeps the place of a request that is answered later.
    pub(crate) fn wait(&mut self, slot: Slot) {
        self.slots.push_back(slot);
    }

    /// Keeps the place of a produce that is appended off the loop, and takes no further request until it is.
    pub(crate) fn wait_appending(&mut self, deferred: Arc<Deferred>) {
        self.appending = Some(Arc::clone(&deferred));
        self.slots.push_back(Slot::Appending(deferred));
    }

    /// Keeps the place of a request that changes something, and takes no further request until it has: as in Kafka, the next
    /// request of a connection sees what the one before it did.
    pub(crate) fn wait_changing(&mut self, later: Arc<Later>) {
        self.changing = Some(Arc::clone(&later));
        self.slots.push_back(Slot::Later(later));
    }

    /// Whether requests are served: not while the node is out of touch with the cluster.
    pub(crate) fn is_served(&mut self) -> bool {
        if self.isolated && !self.broker.spell().is_stopped() {
            self.isolated = false;
        }
        !self.isolated
    }

    /// Stops reading; the connection ends when what is open is answered.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Writes the answers at the head of the line that are ready. A fetch is looked up when its turn has come, which may take
    /// long, and many may stand in line: answers whether there may be more when the time is over.
    fn settle(&mut self, end: Instant) -> io::Result<bool> {
        if self.appending.as_ref().is_some_and(|deferred| deferred.is_done()) {
            self.appending = None;
        }
        self.changing.take_if(|later| later.is_done());
        while !self.is_congested()
            && let Some(front) = self.slots.front_mut()
        {
            match front {
                Slot::Appending(deferred) => {
                    let Some(produced) = deferred.take() else { return Ok(false) };
                    self.appending = None;
                    match produced.settle(&self.broker) {
                        Settled::Silent { failed } => self.closing |= failed,
                        Settled::Answer(call, response) => self.out.push(call, &response)?,
                        Settled::Wait(pending) => {
                            *front = Slot::Produce(pending);
                            continue;
                        }
                    }
                }
                Slot::Ready(bytes) => {
                    self.ready_bytes -= bytes.len();
                    self.out.push_encoded(std::mem::take(bytes));
                }
                Slot::Later(later) => match later.take() {
                    Some(Answer::Bytes(bytes)) => self.out.push_encoded(bytes),
                    Some(Answer::Failed) => return Err(io::Error::other("a request has no answer")),
                    // A group that waits for members is not waited for; the client asks the next broker.
                    None if self.draining => return Err(io::ErrorKind::ConnectionAborted.into()),
                    None => return Ok(false),
                },
                Slot::Produce(produce) => {
                    if !produce.acks.is_done() && self.now < produce.deadline {
                        return Ok(false);
                    }
                    let PendingProduce { call, response, acks, .. } = &mut **produce;
                    crate::handlers::produce::finish(&self.broker, call.version, response, acks);
                    self.out.push(produce.call, &produce.response)?;
                }
                Slot::Fetch(fetch) => {
                    let woken = std::mem::take(&mut self.woken);
                    if !fetch.poll(&self.broker, &self.wake, self.now, woken, &self.responses) {
                        return Ok(false);
                    }
                    if self.out.is_empty() {
                        // Its client has not had the time to read it.
                        self.last_sent = self.now;
                    }
                    fetch.write(&self.broker, &mut self.out)?;
                    let Some(Slot::Fetch(mut fetch)) = self.slots.pop_front() else { continue };
                    // Wishes are the connection's, not a fetch's: the next one in line may wish for the same.
                    if fetch.can_repeat() && self.slots.is_empty() {
                        self.repeat = Some(fetch);
                    } else {
                        fetch.forget(&self.wake);
                    }
                    if !self.slots.is_empty() {
                        self.now = Instant::now();
                        if self.now >= end {
                            return Ok(true);
                        }
                    }
                    continue;
                }
            }
            self.slots.pop_front();
        }
        Ok(false)
    }

    /// When to look again though nothing has happened. Never a moment that looking does not get past: the
    /// timer would fire without end.
    fn alarm(&self) -> Option<Instant> {
        let stuck = self.out.holds_records().then(|| self.stuck_at());
        let front = match self.slots.front() {
            _ if self.is_congested() => Some(self.idle_at()),
            None => Some(self.idle_at()),
            Some(Slot::Fetch(fetch)) => Some(fetch.alarm()),
            Some(Slot::Produce(produce)) => Some(produce.deadline),
            Some(Slot::Ready(_) | Slot::Later(_) | Slot::Appending(_)) => None,
        };
        let slow = self.charged.is_some().then(|| self.slow_at());
        [front, stuck, slow].into_iter().flatten().min()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Event>> {
        let awaits_news = !self.slots.is_empty() || self.warming.is_some();
        if awaits_news && self.wake.poll_woken(cx).is_ready() {
            return Poll::Ready(Ok(Event::Woken));
        }
        if !self.out.is_empty() && self.warming.is_none() && self.socket.poll_write_ready(cx)?.is_ready() {
            return Poll::Ready(Ok(Event::Writable));
        }
        if self.can_take() && self.starved.is_none() {
            if self.input.capacity() == 0 {
                self.input = SPARE.take();
            }
            if self.input.capacity() == self.input.len() {
                self.input.reserve(self.read_bytes);
            }
            let room = self.input.capacity() - self.input.len();
            if let Poll::Ready(result) = self.socket.poll_read(cx, &mut self.input) {
                if matches!(result, Ok(read) if read == room) {
                    self.read_bytes = BUSY_READ_BYTES;
                }
                return Poll::Ready(result.map(Event::Read));
            }
            let idle = matches!(self.slots.front(), None | Some(Slot::Fetch(_) | Slot::Later(_)));
            if self.input.is_empty() && idle {
                // Nobody knows when the next request comes: ten thousand idle clients hold no buffers. The loop
                // keeps one for whoever asks next.
                let mut spare = std::mem::take(&mut self.input);
                if spare.try_reclaim(READ_BYTES) && spare.capacity() <= BUSY_READ_BYTES {
                    SPARE.set(spare);
                }
                self.read_bytes = READ_BYTES;
            }
        }
        let Some(wanted) = [self.alarm(), self.starved].into_iter().flatten().min() else {
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
    io::Error::new(io::ErrorKind::InvalidData, format!("a malformed request: {error}"))
}

/// Encodes into a buffer of its own; used by tasks that answer later.
pub(crate) fn encode_alone(call: Call, response: &impl Message) -> io::Result<Bytes> {
    let mut own = Writer::default();
    own.push(call, response)?;
    Ok(own.into_bytes())
}
