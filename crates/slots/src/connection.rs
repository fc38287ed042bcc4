//! One client connection: reads requests, executes them, and sends replies once they are committed.
//!
//! Requests that arrive together run in one turn of the shard and their replies are sent in one write. Replies are
//! sent in request order; a reply that waits for the journal delays those after it. Nothing here waits under the
//! shard's lock.
//!
//! Bounded: the query buffer by the decoder's limits and the received bytes; the output buffer because no request
//! runs for a client that does not read; the duration of a turn by [`TURN_COMMANDS`].

mod prefetch;

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

use self::prefetch::Prefetch;
use crate::ctx::OnTimeout;
use crate::output_limit::{Class, Limit};
use crate::session::{Push, Session};
use crate::shard::{Role, Shard, Turn};
use crate::shared::{About, Client, Shared, lock};

/// Reply bytes that count as the work of one request.
const WORK_BYTES: usize = 256;
/// Requests per turn before other clients run.
const TURN_COMMANDS: usize = 256;
/// Output buffer size above which no more requests run.
const MAX_UNSENT: usize = 16 << 20;
/// Bytes per socket read.
const READ_BYTES: usize = 16 << 10;
/// Query buffer bound of a blocked client.
const MAX_BLOCKED_INPUT: usize = 64 << 10;
/// Polling interval while a script holds the shard.
const SCRIPT_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Retry interval of a command held by a slot migration; it is usually woken earlier.
const HELD_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Polling interval of WAIT.
const WAIT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Buffer bytes that are not charged to the memory budget, so that its lock is rarely taken.
const UNCHARGED_BYTES: usize = 64 << 10;
/// Granularity of budget reservations.
const BUDGET_STEP: usize = 1 << 20;
/// Time without budget after which a connection is closed. Waiting connections hold the memory that the others wait
/// for.
const BUDGET_TIMEOUT: Duration = Duration::from_secs(2);
/// Polling interval for the memory budget.
const BUDGET_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Check interval of a client above its soft output buffer limit, or subject to the idle timeout.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Polling interval of a primary without serving right.
const SERVING_RIGHT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Replies that wait for a commit.
struct GatedOutput {
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
    /// Bytes at the front of `out` that may be sent.
    ready: usize,
    /// The replies after them, which wait for a commit.
    held: VecDeque<GatedOutput>,
    /// The shard's count of voided replies when the first unsent reply was created.
    voided: u64,
    /// The commit gate for which the shard will wake this connection.
    waits_for: i64,
    on_loop: usize,
    paused_until: Option<Instant>,
    /// CLIENT PAUSE delays the next request.
    is_paused_client: bool,
    sleep: Pin<Box<Sleep>>,
    deadline: Option<Instant>,
    /// Budget reservation for the buffers, beyond [`UNCHARGED_BYTES`].
    permit: Option<Permit>,
    /// Since when the memory budget has been exhausted for this connection.
    budget_exhausted_since: Option<Instant>,
    /// Since when the output buffer has exceeded the soft limit.
    above_soft_since: Option<Instant>,
    /// Next periodic check without input: memory budget, soft limit or idle timeout. Set once per
    /// [`Connection::step`]: if every poll postponed it, it would never fire.
    next_check: Option<Instant>,
}

enum Event {
    Read(usize),
    Mail,
    Timer,
    Writable,
}

/// Serves a client until it disconnects.
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
        is_paused_client: false,
        sleep: Box::pin(tokio::time::sleep(Duration::from_secs(3600))),
        deadline: None,
        permit: None,
        budget_exhausted_since: None,
        above_soft_since: None,
        next_check: None,
    };
    let gone = connection.shard.removed.clone();
    let ended = tokio::select! {
        biased;
        ended = connection.run() => ended,
        () = gone.stopped() => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "client connection closed");
    }
    connection.on_disconnect();
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

    /// Makes all progress possible without waiting. Returns true if more remains.
    fn step(&mut self) -> io::Result<bool> {
        self.check_leadership()?;
        self.process_mailbox()?;
        let more =
            if self.may_execute() && !self.input.is_empty() { self.execute_requests()? } else { false };
        self.release()?;
        self.flush()?;
        self.settle_budget()?;
        self.check_output()?;
        self.next_check = self.check_interval().map(|pause| Instant::now() + pause);
        Ok(more && self.may_execute())
    }

    /// Closes the connection if a reply waits for a serving right that this node may never regain. The outcome is
    /// unknown, so an error reply would be wrong, and a waiting client would not look for the new primary.
    fn check_isolated(&self) -> io::Result<()> {
        let waits = self.ready > 0 || !self.held.is_empty();
        if waits && self.shared.isolated.load(Ordering::Relaxed) && !self.may_reply() {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "node isolated: serving right lost",
            ));
        }
        Ok(())
    }

    fn check_interval(&self) -> Option<Duration> {
        if self.budget_exhausted_since.is_some() {
            return Some(BUDGET_POLL_INTERVAL);
        }
        let closes_idle = self.shared.settings.timeout_s.load(Ordering::Relaxed) > 0;
        (closes_idle || self.above_soft_since.is_some()).then_some(CHECK_INTERVAL)
    }

    /// Adjusts the budget reservation to the buffer sizes. While the budget is exhausted nothing more is read; a
    /// connection that stays without budget is closed.
    fn settle_budget(&mut self) -> io::Result<()> {
        let queued = self.session.multi.as_ref().map_or(0, |multi| multi.bytes);
        let names = self.session.watched_bytes + self.session.subscriptions_bytes;
        let held = self.input.len() + self.out.len() + self.decoder.held_bytes() + queued + names;
        if held <= UNCHARGED_BYTES {
            (self.permit, self.budget_exhausted_since) = (None, None);
            return Ok(());
        }
        let wanted = (held - UNCHARGED_BYTES).next_multiple_of(BUDGET_STEP);
        let taken = match &mut self.permit {
            Some(permit) if permit.bytes() >= wanted => {
                permit.shrink_to(wanted);
                Ok(())
            }
            Some(permit) => permit.grow(wanted - permit.bytes()),
            None => self.shared.buffer_budget().try_take(wanted).map(|permit| self.permit = Some(permit)),
        };
        match taken {
            Ok(()) => self.budget_exhausted_since = None,
            Err(Exhausted::TooLarge) => return Err(budget_exhausted()),
            Err(Exhausted::Layer | Exhausted::Connection) => {
                let since = *self.budget_exhausted_since.get_or_insert_with(Instant::now);
                if since.elapsed() > BUDGET_TIMEOUT {
                    tracing::warn!(
                        held,
                        client = self.session.id,
                        "memory budget exhausted; client disconnected"
                    );
                    return Err(budget_exhausted());
                }
            }
        }
        Ok(())
    }

    /// Enforces `client-output-buffer-limit`.
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
                "client output buffer limit exceeded",
            ));
        }
        Ok(())
    }

    fn may_execute(&self) -> bool {
        !self.session.closing
            && self.session.block.is_none()
            && self.out.len() < MAX_UNSENT
            && self.paused_until.is_none()
    }

    /// Executes the complete requests in the query buffer. Returns true if there may be more.
    fn execute_requests(&mut self) -> io::Result<bool> {
        let voided = self.shard.voided();
        let Some(mut turn) = self.shard.turn(&self.shared) else {
            if self.shard.busy.load(Ordering::Acquire) {
                return self.serve_busy();
            }
            // An offloaded script holds the shard.
            self.paused_until = Some(Instant::now() + SCRIPT_POLL_INTERVAL);
            return Ok(false);
        };
        let mut prefetch = Prefetch::begin(&mut turn);
        let (mut at, mut run, mut more) = (0, 0, false);
        let replied_before = self.out.len();
        loop {
            let (args, consumed) = match prefetch.next(&mut turn, &self.decoder, &self.input, at) {
                Some(next) => next,
                None => match self.decoder.decode(&self.input[at..]) {
                    Ok(Decoded::Request { args, consumed }) => (args, consumed),
                    Ok(Decoded::Empty { consumed }) => {
                        at += consumed;
                        continue;
                    }
                    Ok(Decoded::Incomplete { want }) => {
                        self.input.advance(at);
                        self.input.reserve(want.min(MAX_BLOCKED_INPUT.max(self.input.len())));
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
                if !std::mem::replace(&mut self.is_paused_client, true) {
                    self.shared.paused_clients.fetch_add(1, Ordering::Relaxed);
                }
                break;
            }
            if std::mem::take(&mut self.is_paused_client) {
                self.shared.paused_clients.fetch_sub(1, Ordering::Relaxed);
            }
            let before = self.out.len();
            let was_known = self.session.authenticated;
            let gate = turn.execute(&mut self.session, &args, &mut self.out);
            if self.session.held {
                self.input.advance(at);
                self.paused_until = Some(Instant::now() + HELD_RETRY_INTERVAL);
                break;
            }
            at += consumed;
            let new_output = NewOutput { len: self.out.len() - before, gate, under: voided };
            hold(&self.shard, &mut self.held, &mut self.ready, &mut self.voided, new_output);
            if self.session.authenticated != was_known {
                prefetch.discard();
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
        prefetch.finish(&mut turn);
        turn.finish();
        self.shared.rest(Some(run + (self.out.len() - replied_before) / WORK_BYTES));
        if self.shard.voided() != voided {
            // Some of these replies may predate the change of leadership and would be taken for newer ones.
            return Err(leadership_changed());
        }
        self.update_about(now);
        // Replies without a gate, such as protocol errors.
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

    /// BUSY state: a script exceeds its time limit. Only commands that can end it are served, without the shard's
    /// lock.
    fn serve_busy(&mut self) -> io::Result<bool> {
        loop {
            let consumed = match self.decoder.decode(&self.input) {
                Ok(Decoded::Request { args, consumed }) => {
                    let (before, was_known) = (self.out.len(), self.session.authenticated);
                    crate::busy::execute(&self.shard, &self.shared, &mut self.session, &args, &mut self.out);
                    let len = self.out.len() - before;
                    let new_output = NewOutput { len, gate: 0, under: self.shard.voided() };
                    hold(&self.shard, &mut self.held, &mut self.ready, &mut self.voided, new_output);
                    if self.session.authenticated != was_known {
                        self.decoder.set_limits(limits(&self.session));
                    }
                    consumed
                }
                Ok(Decoded::Empty { consumed }) => consumed,
                Ok(Decoded::Incomplete { want }) => {
                    self.input.reserve(want.min(MAX_BLOCKED_INPUT));
                    return Ok(false);
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            };
            self.input.advance(consumed);
        }
    }

    fn update_about(&mut self, now: i64) {
        let session = &self.session;
        let mut about = lock(&session.about);
        about.last_ms = now;
        about.last_command = session.last_command;
        about.multi = session.multi.as_ref().map_or(-1, |multi| multi.commands.len() as i64);
        about.subscriptions = session.subscriptions;
        about.subscribed = session.subscribed.each_ref().map(std::collections::BTreeSet::len);
        about.readonly = session.readonly;
        about.request_bytes = 0;
        about.blocked = session.block.is_some();
    }

    fn process_mailbox(&mut self) -> io::Result<()> {
        let mail = self.session.mailbox.take();
        if mail.killed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if mail.retry_requested && self.session.held {
            self.paused_until = None;
        }
        if let Some((reply, gate)) = mail.reply {
            self.session.block = None;
            self.deadline = None;
            // A reply without a commit gate also reflects the keys under one leadership.
            if mail.reply_made_under.is_some_and(|voided| voided != self.shard.voided()) {
                return Err(leadership_changed());
            }
            self.push(&reply, gate, mail.reply_made_under.unwrap_or_else(|| self.shard.voided()));
        }
        for Push { bytes, gate, voided } in mail.pushes {
            if gate == 0 {
                self.push(&bytes, 0, self.shard.voided());
            } else if voided == self.shard.voided() {
                self.push(&bytes, gate, voided);
            }
        }
        for channel in mail.removed_channels {
            let before = self.out.len();
            crate::cmd::pubsub::remove_sharded_channel(
                &self.shared,
                &mut self.session,
                &channel,
                &mut self.out,
            );
            let len = self.out.len() - before;
            self.hold_new(len, 0);
        }
        Ok(())
    }

    /// Appends output created under the given count of voided replies.
    fn push(&mut self, bytes: &Bytes, gate: i64, made_under: u64) {
        self.out.extend_from_slice(bytes);
        self.hold(bytes.len(), gate, made_under);
    }

    /// Accounts for output that says nothing about keys or was created just now.
    fn hold_new(&mut self, len: usize, gate: i64) {
        self.hold(len, gate, self.shard.voided());
    }

    /// Accounts for `len` bytes at the end of `out`: ready to send, or waiting for `gate`.
    fn hold(&mut self, len: usize, gate: i64, made_under: u64) {
        hold(
            &self.shard,
            &mut self.held,
            &mut self.ready,
            &mut self.voided,
            NewOutput { len, gate, under: made_under },
        );
    }

    /// Marks committed replies as ready to send.
    fn release(&mut self) -> io::Result<()> {
        while let Some(front) = self.held.front() {
            if self.shard.committed() < front.gate {
                if self.waits_for != front.gate {
                    self.waits_for = front.gate;
                    self.shard.wait_for(self.on_loop, front.gate, &self.session.mailbox);
                }
                break;
            }
            // Read after `committed`: the count increases before a truncated journal can commit further.
            if self.shard.voided() != self.voided {
                break;
            }
            self.ready += front.len;
            self.held.pop_front();
        }
        if !self.held.is_empty() && self.shard.voided() != self.voided {
            // These replies may no longer be true. The client must retry.
            return Err(leadership_changed());
        }
        Ok(())
    }

    /// Replies created under a previous leadership must not be sent: a new primary may have served other values
    /// since.
    fn check_leadership(&self) -> io::Result<()> {
        if self.ready > 0 && self.shard.voided() != self.voided {
            return Err(leadership_changed());
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.ready == 0 || !self.may_reply() {
            return Ok(());
        }
        self.check_leadership()?;
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

    /// True if this node may reply for the shard now. Checked after execution, before sending.
    fn may_reply(&self) -> bool {
        // The log learns first that leadership is lost; the role follows.
        self.shard.role() != Role::Primary
            || self.shard.log.leader_epoch().is_some()
                && self.shard.holds_serving_right(self.shared.clock.as_ref())
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        if self.paused_until.is_some_and(|at| at <= now) {
            self.paused_until = None;
        }
        self.poll_replicas();
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
                // A timeout also reveals the state of the keys.
                let gate = if self.shard.is_async.load(Ordering::Relaxed) { 0 } else { gate };
                let len = self.out.len() - before;
                self.hold_new(len, gate);
            } else {
                // The reply is already in the mailbox.
                self.session.block = Some(block);
            }
        }
    }

    /// WAIT: the number of replicas that acknowledged the previous writes, once there are enough; an error if this
    /// node lost leadership, so that none ever will.
    fn has_replicas(&self) -> Option<Result<i64, ()>> {
        let (end, wanted) = self.session.block.as_ref().and_then(|block| block.replicas)?;
        if self.shard.role() != Role::Primary {
            return Some(Err(()));
        }
        let have = self.shard.log.replicas_with(end) as i64;
        (have >= wanted).then_some(Ok(have))
    }

    fn poll_replicas(&mut self) {
        let Some(have) = self.has_replicas() else { return };
        let Some(mut turn) = self.shard.turn(&self.shared) else {
            // A script holds the shard.
            self.paused_until = Some(Instant::now() + SCRIPT_POLL_INTERVAL);
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

    fn on_disconnect(&mut self) {
        if std::mem::take(&mut self.is_paused_client) {
            self.shared.paused_clients.fetch_sub(1, Ordering::Relaxed);
        }
        if !self.session.watched.is_empty() || self.session.block.is_some() {
            let (client, watched) = (self.session.id, std::mem::take(&mut self.session.watched));
            if let Some(turn) = self.shard.turn(&self.shared) {
                remove_client(turn, client, watched);
            } else {
                // A script holds the shard, possibly for long.
                let (shard, shared) = (Arc::clone(&self.shard), Arc::clone(&self.shared));
                drop(tokio::task::spawn_blocking(move || {
                    remove_client(shard.turn_blocking(&shared), client, watched)
                }));
            }
        }
        crate::cmd::on_disconnect(&self.shared, &mut self.session);
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
        let silenced = self.ready > 0 && !self.may_reply();
        if self.ready > 0 && !silenced && self.socket.poll_write_ready(cx)?.is_ready() {
            return Poll::Ready(Ok(Event::Writable));
        }
        let wants_input = self.may_execute() || !self.session.closing && self.input.len() < MAX_BLOCKED_INPUT;
        if wants_input && self.budget_exhausted_since.is_none() {
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
        let right = silenced.then(|| Instant::now() + SERVING_RIGHT_POLL_INTERVAL);
        let waits = self.session.block.as_ref().is_some_and(|block| block.replicas.is_some());
        if waits && self.paused_until.is_none() && self.has_replicas().is_some() {
            return Poll::Ready(Ok(Event::Timer));
        }
        // Every wake-up checks the replicas again; this timer provides one.
        let replicas = waits.then(|| Instant::now() + WAIT_POLL_INTERVAL);
        let timers = [self.deadline, self.paused_until, right, replicas, self.next_check];
        let Some(wanted) = timers.into_iter().flatten().min() else {
            return Poll::Pending;
        };
        if self.sleep.deadline() != wanted {
            self.sleep.as_mut().reset(wanted);
        }
        self.sleep.as_mut().poll(cx).map(|()| Ok(Event::Timer))
    }
}

fn budget_exhausted() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "memory budget of the node exhausted")
}

fn leadership_changed() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "shard leadership changed")
}

/// Removes the watched keys and the blocking state of a disconnected client.
fn remove_client(mut turn: Turn<'_>, client: u64, watched: Vec<Box<[u8]>>) {
    for key in watched {
        turn.state.events.unwatch(client, &key);
    }
    turn.unblock(client);
    turn.finish();
}

/// Output bytes: their length, their commit gate, and the shard's count of voided replies when they were created.
struct NewOutput {
    len: usize,
    gate: i64,
    under: u64,
}

/// Marks output as ready to send, or queues it behind its commit gate.
fn hold(
    shard: &Shard,
    held: &mut VecDeque<GatedOutput>,
    ready: &mut usize,
    voided: &mut u64,
    new_output: NewOutput,
) {
    let NewOutput { len, gate, under } = new_output;
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
        _ => held.push_back(GatedOutput { len, gate }),
    }
}

/// Decoder limits for one request.
fn limits(session: &Session) -> Limits {
    Limits { unauthenticated: !session.authenticated, ..Limits::default() }
}
