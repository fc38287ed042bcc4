//! One client: reads requests, runs them, sends the answers that may leave.
//!
//! Requests that are there together run in one turn of the shard and their answers leave in one write. Answers leave in
//! the order of the requests; one that waits for the journal holds up those behind it. Nothing here waits under the
//! shard's lock.
//!
//! Bounded: the input by the decoder's limits and by what arrived; the output because nothing more is run for a client
//! that does not read; the time of a turn by [`TURN_COMMANDS`].

mod look_ahead;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use moim_base::memory::{Exhausted, Permit};
use moim_base::socket::Socket;
use moim_wire_resp::{Decoded, Decoder, Encoder, Limits};
use tokio::time::{Instant, Sleep};

use self::look_ahead::Ahead;
use crate::ctx::OnTimeout;
use crate::output_limit::{Class, Limit};
use crate::session::{Push, Session};
use crate::shard::{Role, Shard, Turn};
use crate::shared::{About, Client, Shared, lock};

/// So many bytes of answers are as much work as one request.
const WORK_BYTES: usize = 256;
/// Requests that run before others get their turn.
const TURN_COMMANDS: usize = 256;
/// Unsent answers above which nothing more is run.
const MAX_UNSENT: usize = 16 << 20;
/// What is read at a time.
const READ_BYTES: usize = 16 << 10;
/// What is read ahead of a client that waits.
const READ_AHEAD: usize = 64 << 10;
/// How often a connection looks whether a script has given the shard back.
const SCRIPT_PAUSE: Duration = Duration::from_millis(1);
/// How often a command that waits for a slot is tried again; it is woken before that.
const HELD_PAUSE: Duration = Duration::from_millis(50);
/// How often a client of WAIT looks whether the replicas are there.
const WAIT_PAUSE: Duration = Duration::from_millis(2);
/// What a connection may hold without asking: with more, the lock of the budget is rarely taken.
const FREE_BYTES: usize = 64 << 10;
/// What it takes from the budget at a time.
const BUDGET_STEP: usize = 1 << 20;
/// How long a connection waits for the budget before it is closed. Those that wait hold what the others wait for.
const STARVATION: Duration = Duration::from_secs(2);
/// How often it looks whether there is some.
const BUDGET_PAUSE: Duration = Duration::from_millis(20);
/// How often a client above its soft limit, or one that may be idle, is looked at.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// How often a primary without the right to answer looks again.
const RIGHT_PAUSE: Duration = Duration::from_millis(20);

/// Answers that wait for the journal.
struct Held {
    len: usize,
    gate: i64,
}

struct Connection {
    shared: Arc<Shared>,
    shard: Arc<Shard>,
    socket: Box<dyn Socket>,
    session: Session,
    decoder: Decoder,
    input: BytesMut,
    out: BytesMut,
    /// Bytes at the front of `out` that may leave.
    ready: usize,
    /// What lies behind them.
    held: VecDeque<Held>,
    /// The shard's count of voided answers when the first that has not left was made.
    voided: u64,
    /// The gate for which the shard wakes us.
    waits_for: i64,
    on_loop: usize,
    paused_until: Option<Instant>,
    /// CLIENT PAUSE holds its next request back.
    is_held_back: bool,
    sleep: Pin<Box<Sleep>>,
    deadline: Option<Instant>,
    /// What its buffers hold of the node's budget, beyond [`FREE_BYTES`].
    permit: Option<Permit>,
    /// Since when the budget has had nothing for it.
    starved_since: Option<Instant>,
    /// Since when its output has been above the soft limit.
    above_soft_since: Option<Instant>,
    /// When it looks again although nothing has come: at the budget, the soft limit, or whether it is idle. A moment that is
    /// settled once, in [`Connection::step`]: one that every poll puts off never comes.
    look_at: Option<Instant>,
}

enum Event {
    Read(usize),
    Mail,
    Timer,
    Writable,
}

/// Serves a client until it leaves.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    shard: Arc<Shard>,
    socket: Box<dyn Socket>,
    peer: String,
    local: String,
    on_loop: usize,
) {
    let id = shared.next_client.fetch_add(1, Ordering::Relaxed);
    let now = shared.clock.wall_ms();
    let mut session = Session::new(id, peer.clone(), local.clone(), now);
    session.shard = Some(Arc::clone(&shard));
    session.authenticated = shared.settings.get("requirepass").is_none_or(|password| password.is_empty());
    let about = About {
        id,
        peer,
        local,
        since_ms: now,
        last_ms: now,
        protocol: 2,
        multi: -1,
        redirect: -1,
        ..About::default()
    };
    *lock(&session.about) = about;
    let client = Client { mailbox: Arc::clone(&session.mailbox), about: Arc::clone(&session.about) };
    shared.clients().insert(id, client);
    shared.stats.connections.inc();
    let mut connection = Connection {
        voided: shard.voided(),
        decoder: Decoder::new(limits(&session)),
        shared: Arc::clone(&shared),
        shard,
        socket,
        session,
        input: BytesMut::new(),
        out: BytesMut::new(),
        ready: 0,
        held: VecDeque::new(),
        waits_for: 0,
        on_loop,
        paused_until: None,
        is_held_back: false,
        sleep: Box::pin(tokio::time::sleep(Duration::from_secs(3600))),
        deadline: None,
        permit: None,
        starved_since: None,
        above_soft_since: None,
        look_at: None,
    };
    let gone = connection.shard.gone.clone();
    let ended = tokio::select! {
        biased;
        ended = connection.run() => ended,
        () = gone.stopped() => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended");
    }
    connection.leave();
    shared.clients().remove(&id);
}

impl Connection {
    async fn run(&mut self) -> io::Result<()> {
        loop {
            let more = self.step()?;
            if self.session.closing && self.out.is_empty() {
                return Ok(());
            }
            if more {
                tokio::task::yield_now().await;
                continue;
            }
            match poll_fn(|cx| self.poll_event(cx)).await? {
                Event::Read(0) => return Ok(()),
                Event::Read(read) => {
                    self.shared.stats.read_bytes.inc_by(read as u64);
                }
                Event::Timer => {
                    self.on_timer();
                    if self.is_idle() {
                        return Ok(());
                    }
                }
                Event::Mail | Event::Writable => {}
            }
        }
    }

    /// Does what can be done without waiting. Answers whether there is more.
    fn step(&mut self) -> io::Result<bool> {
        self.check_lead()?;
        self.take_mail()?;
        let more = if self.may_take() && !self.input.is_empty() { self.take_requests()? } else { false };
        self.release()?;
        self.flush()?;
        self.settle_budget()?;
        self.check_output()?;
        self.look_at = self.look_after().map(|pause| Instant::now() + pause);
        Ok(more && self.may_take())
    }

    /// Closes the connection if an answer waits for a serving right that this node may never get again. Its outcome is unknown,
    /// so it must not be an error, and a client that waits does not look for the new primary.
    fn check_isolated(&self) -> io::Result<()> {
        let waits = self.ready > 0 || !self.held.is_empty();
        if waits && self.shared.isolated.load(Ordering::Relaxed) && !self.may_answer() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "this node is isolated"));
        }
        Ok(())
    }

    fn look_after(&self) -> Option<Duration> {
        if self.starved_since.is_some() {
            return Some(BUDGET_PAUSE);
        }
        let closes_idle = self.shared.settings.timeout_s.load(Ordering::Relaxed) > 0;
        (closes_idle || self.above_soft_since.is_some()).then_some(LOOK_PAUSE)
    }

    /// Takes what the buffers hold from the node's budget, or gives it back. While there is not enough nothing more is read, and a
    /// connection that goes on without is closed.
    fn settle_budget(&mut self) -> io::Result<()> {
        let queued = self.session.multi.as_ref().map_or(0, |multi| multi.bytes);
        let names = self.session.watched_bytes + self.session.listens_bytes;
        let held = self.input.len() + self.out.len() + self.decoder.held_bytes() + queued + names;
        if held <= FREE_BYTES {
            (self.permit, self.starved_since) = (None, None);
            return Ok(());
        }
        let wanted = (held - FREE_BYTES).next_multiple_of(BUDGET_STEP);
        let taken = match &mut self.permit {
            Some(permit) if permit.bytes() >= wanted => {
                permit.shrink_to(wanted);
                Ok(())
            }
            Some(permit) => permit.grow(wanted - permit.bytes()),
            None => self.shared.buffer_budget().try_take(wanted).map(|permit| self.permit = Some(permit)),
        };
        match taken {
            Ok(()) => self.starved_since = None,
            Err(Exhausted::TooLarge) => return Err(no_memory()),
            Err(Exhausted::Layer | Exhausted::Connection) => {
                let since = *self.starved_since.get_or_insert_with(Instant::now);
                if since.elapsed() > STARVATION {
                    tracing::warn!(
                        held,
                        client = self.session.id,
                        "memory budget exhausted; client disconnected"
                    );
                    return Err(no_memory());
                }
            }
        }
        Ok(())
    }

    /// `client-output-buffer-limit`.
    fn check_output(&mut self) -> io::Result<()> {
        let class = if self.session.subscriptions > 0 { Class::PubSub } else { Class::Normal };
        let Limit { hard, soft, soft_seconds } = self.shared.settings.output.get(class);
        let unsent = self.out.len() as u64;
        if soft == 0 || unsent <= soft {
            self.above_soft_since = None;
        } else {
            self.above_soft_since.get_or_insert_with(Instant::now);
        }
        let is_late = self.above_soft_since.is_some_and(|at| at.elapsed().as_secs() > soft_seconds);
        if hard > 0 && unsent > hard || is_late {
            tracing::warn!(
                unsent,
                client = self.session.id,
                "output buffer limit exceeded; client disconnected"
            );
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the output buffer limit is exceeded",
            ));
        }
        Ok(())
    }

    fn may_take(&self) -> bool {
        !self.session.closing
            && self.session.block.is_none()
            && self.out.len() < MAX_UNSENT
            && self.paused_until.is_none()
    }

    /// Runs the requests that are complete. Answers whether there may be more.
    fn take_requests(&mut self) -> io::Result<bool> {
        let voided = self.shard.voided();
        let Some(mut turn) = self.shard.turn(&self.shared) else {
            if self.shard.busy.load(Ordering::Acquire) {
                return self.refuse_busy();
            }
            // A script runs elsewhere and has the shard.
            self.paused_until = Some(Instant::now() + SCRIPT_PAUSE);
            return Ok(false);
        };
        let mut ahead = Ahead::take(&mut turn);
        let (mut at, mut run, mut more) = (0, 0, false);
        let answered_before = self.out.len();
        loop {
            let (args, consumed) = match ahead.next(&mut turn, &self.decoder, &self.input, at) {
                Some(next) => next,
                None => match self.decoder.decode(&self.input[at..]) {
                    Ok(Decoded::Request { args, consumed }) => (args, consumed),
                    Ok(Decoded::Empty { consumed }) => {
                        at += consumed;
                        continue;
                    }
                    Ok(Decoded::Incomplete { want }) => {
                        self.input.advance(at);
                        self.input.reserve(want.min(READ_AHEAD.max(self.input.len())));
                        break;
                    }
                    Err(error) => {
                        Encoder::new(&mut self.out, self.session.protocol).error(format!("ERR {error}"));
                        self.session.closing = true;
                        self.input.clear();
                        break;
                    }
                },
            };
            if self.shared.is_paused(false, turn.now)
                || self.shared.is_paused(true, turn.now) && turn.may_write(&self.session, &args)
            {
                self.input.advance(at);
                self.paused_until = Some(Instant::now() + Duration::from_millis(10));
                if !std::mem::replace(&mut self.is_held_back, true) {
                    self.shared.paused_clients.fetch_add(1, Ordering::Relaxed);
                }
                break;
            }
            if std::mem::take(&mut self.is_held_back) {
                self.shared.paused_clients.fetch_sub(1, Ordering::Relaxed);
            }
            let before = self.out.len();
            let was_known = self.session.authenticated;
            let gate = turn.execute(&mut self.session, &args, &mut self.out);
            if self.session.held {
                self.input.advance(at);
                self.paused_until = Some(Instant::now() + HELD_PAUSE);
                break;
            }
            at += consumed;
            let made = Made { len: self.out.len() - before, gate, under: voided };
            hold(&self.shard, &mut self.held, &mut self.ready, &mut self.voided, made);
            if self.session.authenticated != was_known {
                ahead.forget();
                self.decoder.set_limits(limits(&self.session));
            }
            run += 1;
            if run == TURN_COMMANDS
                || self.session.closing
                || self.session.block.is_some()
                || self.out.len() >= MAX_UNSENT
            {
                self.input.advance(at);
                more = true;
                break;
            }
        }
        let now = turn.now;
        ahead.give_back(&mut turn);
        turn.finish();
        self.shared.rest(Some(run + (self.out.len() - answered_before) / WORK_BYTES));
        if self.shard.voided() != voided {
            // Some of these answers may have been made before, and be taken for newer ones.
            return Err(another_primary());
        }
        self.note_about(now);
        // Bytes that belong to answers without a gate, errors of the protocol for one.
        let known = self.ready + self.held.iter().map(|held| held.len).sum::<usize>();
        let rest = self.out.len() - known;
        self.hold(rest, 0, voided);
        if let Some(block) = &self.session.block {
            let now_ms = now;
            self.deadline =
                block.deadline.map(|at| Instant::now() + Duration::from_millis((at - now_ms).max(0) as u64));
        }
        Ok(more)
    }

    /// A script runs and does not end: only what can end it is let in, and it does not need the shard.
    fn refuse_busy(&mut self) -> io::Result<bool> {
        loop {
            let consumed = match self.decoder.decode(&self.input) {
                Ok(Decoded::Request { args, consumed }) => {
                    let (before, was_known) = (self.out.len(), self.session.authenticated);
                    crate::busy::answer(&self.shard, &self.shared, &mut self.session, &args, &mut self.out);
                    let len = self.out.len() - before;
                    let made = Made { len, gate: 0, under: self.shard.voided() };
                    hold(&self.shard, &mut self.held, &mut self.ready, &mut self.voided, made);
                    if self.session.authenticated != was_known {
                        self.decoder.set_limits(limits(&self.session));
                    }
                    consumed
                }
                Ok(Decoded::Empty { consumed }) => consumed,
                Ok(Decoded::Incomplete { want }) => {
                    self.input.reserve(want.min(READ_AHEAD));
                    return Ok(false);
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            };
            self.input.advance(consumed);
        }
    }

    fn note_about(&mut self, now: i64) {
        let session = &self.session;
        let mut about = lock(&session.about);
        about.last_ms = now;
        about.last_command = session.last_command;
        about.multi = session.multi.as_ref().map_or(-1, |multi| multi.commands.len() as i64);
        about.subscriptions = session.subscriptions;
        about.listens = session.listens.each_ref().map(std::collections::BTreeSet::len);
        about.readonly = session.readonly;
        about.request_bytes = 0;
        about.blocked = session.block.is_some();
    }

    fn take_mail(&mut self) -> io::Result<()> {
        let mail = self.session.mailbox.take();
        if mail.killed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if mail.nudged && self.session.held {
            self.paused_until = None;
        }
        if let Some((answer, gate)) = mail.answer {
            self.session.block = None;
            self.deadline = None;
            // One that waits for no commit says what the keys were under a lead, too.
            if mail.answered_under.is_some_and(|voided| voided != self.shard.voided()) {
                return Err(another_primary());
            }
            self.push(&answer, gate, mail.answered_under.unwrap_or_else(|| self.shard.voided()));
        }
        for Push { bytes, gate, voided } in mail.pushes {
            if gate == 0 {
                self.push(&bytes, 0, self.shard.voided());
            } else if voided == self.shard.voided() {
                self.push(&bytes, gate, voided);
            }
        }
        for channel in mail.left_channels {
            let before = self.out.len();
            crate::cmd::pubsub::leave_channel(&self.shared, &mut self.session, &channel, &mut self.out);
            let len = self.out.len() - before;
            self.hold_new(len, 0);
        }
        Ok(())
    }

    /// Adds what was made under the given count of voided answers.
    fn push(&mut self, bytes: &Bytes, gate: i64, made_under: u64) {
        self.out.extend_from_slice(bytes);
        self.hold(bytes.len(), gate, made_under);
    }

    /// Adds what says nothing about keys, or was made just now.
    fn hold_new(&mut self, len: usize, gate: i64) {
        self.hold(len, gate, self.shard.voided());
    }

    /// Puts `len` bytes at the end of the answers: they may leave, or they wait for `gate`.
    fn hold(&mut self, len: usize, gate: i64, made_under: u64) {
        hold(
            &self.shard,
            &mut self.held,
            &mut self.ready,
            &mut self.voided,
            Made { len, gate, under: made_under },
        );
    }

    /// Moves what the journal has committed to what may leave.
    fn release(&mut self) -> io::Result<()> {
        while let Some(front) = self.held.front() {
            if self.shard.committed() < front.gate {
                if self.waits_for != front.gate {
                    self.waits_for = front.gate;
                    self.shard.wait_for(self.on_loop, front.gate, &self.session.mailbox);
                }
                break;
            }
            // Read after `committed`: the count goes up before a journal that was cut can be committed further.
            if self.shard.voided() != self.voided {
                break;
            }
            self.ready += front.len;
            self.held.pop_front();
        }
        if !self.held.is_empty() && self.shard.voided() != self.voided {
            // What these answers say may not be so any more. The client must ask again.
            return Err(another_primary());
        }
        Ok(())
    }

    /// What was made under a lead that is over must not leave: somebody else may have answered since.
    fn check_lead(&self) -> io::Result<()> {
        if self.ready > 0 && self.shard.voided() != self.voided {
            return Err(another_primary());
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.ready == 0 || !self.may_answer() {
            return Ok(());
        }
        self.check_lead()?;
        while self.ready > 0 {
            match self.socket.try_write(&[IoSlice::new(&self.out[..self.ready])]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => {
                    self.out.advance(sent);
                    self.ready -= sent;
                    self.shared.stats.written_bytes.inc_by(sent as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.out.is_empty() {
            self.out.clear();
        }
        Ok(())
    }

    /// Whether this node may speak for the shard now. Asked after executing, before sending.
    fn may_answer(&self) -> bool {
        // The log knows first that a lead is over; the role follows.
        self.shard.role() != Role::Primary
            || self.shard.log.leads().is_some() && self.shard.may_answer(self.shared.clock.as_ref())
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|at| at <= now) {
            self.paused_until = None;
        }
        self.look_for_replicas();
        if self.deadline.is_some_and(|at| at <= now)
            && let Some(block) = self.session.block.take()
        {
            self.deadline = None;
            let Some(mut turn) = self.shard.turn(&self.shared) else {
                self.session.block = Some(block);
                self.deadline = Some(now + Duration::from_millis(10));
                return;
            };
            let waited = turn.unblock(self.session.id);
            let gate = turn.state.applied;
            turn.finish();
            if waited || !block.on_keys {
                let before = self.out.len();
                let mut to = Encoder::new(&mut self.out, self.session.protocol);
                match block.on_timeout {
                    OnTimeout::NullArray => to.null_array(),
                    OnTimeout::Null => to.null(),
                    OnTimeout::Number(_) => to.integer(self.shard.log.replicas_with(gate) as i64),
                }
                // That nothing was there is an answer about the keys, too.
                let gate = if self.shard.is_async.load(Ordering::Relaxed) { 0 } else { gate };
                let len = self.out.len() - before;
                self.hold_new(len, gate);
            } else {
                // The answer is in the mail.
                self.session.block = Some(block);
            }
        }
    }

    /// WAIT: how many replicas have what was written before it, once they are enough; an error when none ever will have it,
    /// because this node leads no more.
    fn has_replicas(&self) -> Option<Result<i64, ()>> {
        let (end, wanted) = self.session.block.as_ref().and_then(|block| block.replicas)?;
        if self.shard.role() != Role::Primary {
            return Some(Err(()));
        }
        let have = self.shard.log.replicas_with(end) as i64;
        (have >= wanted).then_some(Ok(have))
    }

    fn look_for_replicas(&mut self) {
        let Some(have) = self.has_replicas() else { return };
        let Some(mut turn) = self.shard.turn(&self.shared) else {
            // A script has the shard.
            self.paused_until = Some(Instant::now() + SCRIPT_PAUSE);
            return;
        };
        turn.unblock(self.session.id);
        turn.finish();
        (self.session.block, self.deadline) = (None, None);
        let before = self.out.len();
        let mut to = Encoder::new(&mut self.out, self.session.protocol);
        match have {
            Ok(have) => to.integer(have),
            Err(()) => to.error(
                "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            ),
        }
        let len = self.out.len() - before;
        self.hold_new(len, 0);
    }

    fn is_idle(&self) -> bool {
        let limit = self.shared.settings.timeout_s.load(Ordering::Relaxed);
        limit > 0
            && self.session.block.is_none()
            && self.session.subscriptions == 0
            && self.shared.clock.wall_ms() - self.session.last_ms > limit * 1_000
    }

    fn leave(&mut self) {
        if std::mem::take(&mut self.is_held_back) {
            self.shared.paused_clients.fetch_sub(1, Ordering::Relaxed);
        }
        if !self.session.watched.is_empty() || self.session.block.is_some() {
            let (client, watched) = (self.session.id, std::mem::take(&mut self.session.watched));
            if let Some(turn) = self.shard.turn(&self.shared) {
                forget(turn, client, watched);
            } else {
                // A script has the shard, and may have it for long.
                let (shard, shared) = (Arc::clone(&self.shard), Arc::clone(&self.shared));
                drop(tokio::task::spawn_blocking(move || forget(shard.turn_away(&shared), client, watched)));
            }
        }
        crate::cmd::on_leave(&self.shared, &mut self.session);
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Event>> {
        if self.session.mailbox.poll(cx.waker()) {
            return Poll::Ready(Ok(Event::Mail));
        }
        let is_void = self.shard.voided() != self.voided;
        let gated = self.held.front().is_some_and(|front| is_void || self.shard.committed() >= front.gate);
        if gated {
            return Poll::Ready(Ok(Event::Mail));
        }
        self.check_isolated()?;
        let silenced = self.ready > 0 && !self.may_answer();
        if self.ready > 0 && !silenced && self.socket.poll_write_ready(cx)?.is_ready() {
            return Poll::Ready(Ok(Event::Writable));
        }
        let wants_input = self.may_take() || !self.session.closing && self.input.len() < READ_AHEAD;
        if wants_input && self.starved_since.is_none() {
            if self.input.capacity() - self.input.len() < 64 {
                self.input.reserve(READ_BYTES);
            }
            if let Poll::Ready(read) = self.socket.poll_read(cx, &mut self.input) {
                return Poll::Ready(read.map(Event::Read));
            }
            if self.input.is_empty() && self.input.capacity() > READ_BYTES {
                self.input = BytesMut::new();
            }
        }
        let right = silenced.then(|| Instant::now() + RIGHT_PAUSE);
        let waits = self.session.block.as_ref().is_some_and(|block| block.replicas.is_some());
        if waits && self.paused_until.is_none() && self.has_replicas().is_some() {
            return Poll::Ready(Ok(Event::Timer));
        }
        // Whatever wakes this looks again, this timer for one.
        let replicas = waits.then(|| Instant::now() + WAIT_PAUSE);
        let timers = [self.deadline, self.paused_until, right, replicas, self.look_at];
        let Some(wanted) = timers.into_iter().flatten().min() else {
            return Poll::Pending;
        };
        if self.sleep.deadline() != wanted {
            self.sleep.as_mut().reset(wanted);
        }
        self.sleep.as_mut().poll(cx).map(|()| Ok(Event::Timer))
    }
}

fn no_memory() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "the memory budget of the node is spent")
}

fn another_primary() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the shard has another primary")
}

/// A client that is gone watches nothing and waits for nothing.
fn forget(mut turn: Turn<'_>, client: u64, watched: Vec<Box<[u8]>>) {
    for key in watched {
        turn.state.events.unwatch(client, &key);
    }
    turn.unblock(client);
    turn.finish();
}

/// Bytes at the end of the answers: how many, what they wait for, and the shard's count of voided answers when they were made.
struct Made {
    len: usize,
    gate: i64,
    under: u64,
}

/// They may leave, or they wait for their gate.
fn hold(shard: &Shard, held: &mut VecDeque<Held>, ready: &mut usize, voided: &mut u64, made: Made) {
    let Made { len, gate, under } = made;
    if len == 0 {
        return;
    }
    if held.is_empty() {
        if *ready == 0 {
            *voided = under;
        }
        if gate == 0 || shard.committed() >= gate {
            *ready += len;
            return;
        }
    }
    match held.back_mut() {
        Some(last) if last.gate >= gate => last.len += len,
        _ => held.push_back(Held { len, gate }),
    }
}

/// What a client may send in one request.
fn limits(session: &Session) -> Limits {
    Limits { unauthenticated: !session.authenticated, ..Limits::default() }
}
