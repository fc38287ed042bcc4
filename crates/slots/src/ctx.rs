//! The execution context of a command: arguments, keyspace, time, reply encoder, effects and events.
//!
//! A command is a function of its [`Ctx`] only. It writes exactly one reply to `out`, or returns an error (its output
//! is then discarded). A command that modified a key calls [`Ctx::changed`]; the command itself is then propagated as
//! an effect to the journal, unless [`Ctx::rewrite`] replaced it with commands that replay deterministically
//! (absolute times, the members that were drawn). Expired keys of the command are deleted before it runs.

use std::sync::atomic::Ordering;

use moim_wire_resp::number::parse_i64;
use moim_wire_resp::{Args, Encoder, OwnedArgs};

use crate::cmd::{self, Keys, Spec, flag};
use crate::effects::Effects;
use crate::error::{Done, Error};
use crate::events::{Events, class};
use crate::keyspace::{Item, Keyspace};
use crate::session::{Block, Session};
use crate::shared::Shared;
use crate::value::number;

/// Execution mode of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A client request on the primary.
    Primary,
    /// A client request on a replica: nothing may change.
    Replica,
    /// Journal replay: nothing may fail, nothing is propagated, and no key expires by itself.
    Replay,
}

/// The execution context of a command.
pub struct Ctx<'a> {
    /// Command name and arguments.
    pub args: Args<'a>,
    /// The keyspace of the shard.
    pub db: &'a mut Keyspace,
    /// Shard time in milliseconds since 1970; never decreases within a shard.
    pub now: i64,
    /// Encoder of the reply.
    pub out: Encoder<'a>,
    /// Effects to append to the journal.
    pub fx: &'a mut Effects,
    /// Change events of the shard.
    pub events: &'a mut Events,
    /// Session of the client.
    pub session: &'a mut Session,
    /// State shared by all shards and clients of this node.
    pub shared: &'a Shared,
    /// Execution mode.
    pub mode: Mode,
    /// True inside EXEC or a script, where blocking is not allowed.
    pub nested: bool,
    /// True if a script calls the command.
    pub in_script: bool,
    /// Number of changes made by the running command.
    pub dirty: u64,
    pub(crate) rewritten: bool,
}

impl<'a> Ctx<'a> {
    /// Argument `index`, whose presence the arity guarantees. 0 is the command name.
    pub fn arg(&self, index: usize) -> &'a [u8] {
        self.args.get(index).unwrap_or_default()
    }

    /// Number of arguments, including the command name.
    pub fn argc(&self) -> usize {
        self.args.len()
    }

    /// Argument `index` as an integer.
    pub fn int(&self, index: usize) -> Result<i64, Error> {
        int(self.arg(index))
    }

    /// Argument `index` as a float.
    pub fn float(&self, index: usize) -> Result<f64, Error> {
        float(self.arg(index))
    }

    /// True if argument `index` is this keyword, ignoring case.
    pub fn is(&self, index: usize, word: &str) -> bool {
        self.arg(index).eq_ignore_ascii_case(word.as_bytes())
    }

    /// The string value of a key; WRONGTYPE for other types.
    pub fn string(&mut self, key: &[u8]) -> Result<Option<&[u8]>, Error> {
        match self.db.touch(key) {
            None => Ok(None),
            Some(Item::Str(string)) => Ok(Some(string)),
            Some(Item::Value(_)) => Err(Error::WRONG_TYPE),
        }
    }

    /// Signals a modified key: watching transactions abort, and the command is propagated.
    pub fn changed(&mut self, key: &[u8]) {
        self.dirty += 1;
        self.events.on_changed(key);
    }

    /// Signals a modified key and adds a keyspace notification.
    pub fn changed_with(&mut self, key: &[u8], class: u32, event: &'static str) {
        self.changed(key);
        self.events.notify(class, event, key);
    }

    /// Signals that the key may serve blocked clients.
    pub fn ready(&mut self, key: &[u8]) {
        self.events.on_ready(key);
    }

    /// Deletes a key as DEL does. Returns whether it existed.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        let was_there = self.db.remove(key);
        if was_there {
            self.changed_with(key, class::GENERIC, "del");
        }
        was_there
    }

    /// Propagates this command instead of the running one. May be called several times.
    pub fn rewrite(&mut self, args: &[&[u8]]) {
        self.rewritten = true;
        if self.mode == Mode::Primary {
            self.fx.push_slices(args);
        }
    }

    /// Propagates nothing for the changes of the running command.
    pub fn prevent_propagation(&mut self) {
        self.rewritten = true;
    }

    /// True if the command may block its client.
    pub fn may_block(&self) -> bool {
        !self.nested && self.mode == Mode::Primary
    }

    /// Blocks the client until one of `keys` is ready; the command is then executed again. The command must not have
    /// written a reply. `timeout_ms` 0 means no timeout; on timeout the client receives the reply given by
    /// `on_timeout`.
    pub fn block(&mut self, keys: Vec<Box<[u8]>>, timeout_ms: i64, on_timeout: OnTimeout) {
        let deadline = (timeout_ms > 0).then(|| self.now.saturating_add(timeout_ms));
        self.session.block = Some(Block {
            keys,
            deadline,
            on_timeout,
            command: self.args.to_owned(),
            on_keys: true,
            replicas: None,
            wake_on_delete: false,
        });
    }

    /// Executes another command and appends its reply. For EXEC and scripts.
    pub fn call(&mut self, spec: &'static Spec, command: &OwnedArgs) -> bool {
        let protocol = self.out.protocol();
        let mut inner = Ctx {
            args: command.args(),
            db: self.db,
            now: self.now,
            out: Encoder::new(self.out.buffer(), protocol),
            fx: self.fx,
            events: self.events,
            session: self.session,
            shared: self.shared,
            mode: self.mode,
            nested: true,
            in_script: self.in_script,
            dirty: 0,
            rewritten: false,
        };
        let number = std::mem::replace(&mut inner.session.command, cmd::number_of(spec));
        let fine = inner.run(spec);
        inner.session.command = number;
        let dirty = inner.dirty;
        self.dirty += dirty;
        // The inner command has propagated its own effects.
        self.rewritten = true;
        fine
    }

    /// Delegates to another command, which is propagated instead of this one.
    pub(crate) fn delegate_to(&mut self, spec: &'static Spec, command: &OwnedArgs) -> Done {
        let protocol = self.out.protocol();
        let mut inner = Ctx {
            args: command.args(),
            db: self.db,
            now: self.now,
            out: Encoder::new(self.out.buffer(), protocol),
            fx: self.fx,
            events: self.events,
            session: self.session,
            shared: self.shared,
            mode: self.mode,
            nested: self.nested,
            in_script: self.in_script,
            dirty: 0,
            rewritten: false,
        };
        let done = (spec.run)(&mut inner);
        let (dirty, rewritten) = (inner.dirty, inner.rewritten);
        if dirty > 0 && !rewritten && self.mode == Mode::Primary {
            self.fx.push(command.args().iter());
        }
        self.dirty += dirty;
        self.rewritten = true;
        done
    }

    /// Executes the command `spec`, named by `args`. Returns true unless it replied with an error.
    pub(crate) fn run(&mut self, spec: &'static Spec) -> bool {
        let start = self.out.buffer().len();
        let before = self.fx.commands();
        let began = self.start_timing(spec);
        if let Err(error) = self.check_batch(spec).and_then(|()| self.check_held(spec)) {
            self.out.error(error.0.as_bytes());
            return false;
        }
        self.expire_keys(spec);
        let missing = if self.events.notify & class::NEW == 0 { Vec::new() } else { self.missing_keys(spec) };
        let notified = self.events.notifications.len();
        let done = (spec.run)(self);
        for key in missing.iter().filter(|key| self.db.contains(key)) {
            // The `new` event precedes the events of the command itself.
            self.events.notify(class::NEW, "new", key);
            self.events.notifications[notified..].rotate_right(1);
        }
        let fine = done.is_ok();
        if let Err(error) = done {
            self.events.command_stats.on_failed(self.session.command);
            self.out.buffer().truncate(start);
            self.out.error(error.0.as_bytes());
            self.shared.stats.on_error(error.code());
        }
        if self.dirty > 0 && !self.rewritten && self.mode == Mode::Primary {
            self.fx.push(self.args.iter());
        }
        self.db.settle();
        if self.mode == Mode::Primary {
            self.update_hazards(spec, self.fx.commands() > before);
        }
        if let Some(began) = began {
            self.stop_timing(spec, began);
        }
        if self.session.tracking.is_some() && spec.has(flag::READONLY) {
            self.track_reads(spec);
        }
        if self.shared.monitors.any() && !spec.has(flag::SKIP_MONITOR | flag::ADMIN) {
            self.send_to_monitors();
        }
        fine
    }

    /// Rejects a command that would make the effects of a transaction or script exceed the batch limit. A batch is
    /// applied atomically, so every node that replays it holds all of it in memory.
    fn check_batch(&self, spec: &'static Spec) -> Result<(), Error> {
        if !self.nested || self.mode != Mode::Primary || !spec.has(flag::WRITE) {
            return Ok(());
        }
        let max = self.fx.limits().batch;
        if self.fx.marked_len() + self.args.byte_len() <= max {
            return Ok(());
        }
        Err(Error::err(format_args!("the changes of one transaction or script exceed {max} bytes")))
    }

    /// Replies TRYAGAIN if a command of a transaction or script accesses a slot in migration, whether declared or
    /// not. Transactions and scripts that declare their keys wait before they start.
    fn check_held(&self, spec: &'static Spec) -> Result<(), Error> {
        let Some(held) = self.events.held.as_ref().filter(|_| self.nested && self.mode == Mode::Primary)
        else {
            return Ok(());
        };
        let mut keys = Vec::new();
        spec.keys.positions(&self.args, &mut keys);
        match keys.iter().any(|at| held.contains(crate::slot_of(self.arg(*at)))) {
            true => Err(Error::coded("TRYAGAIN Hash slot is being migrated")),
            false => Ok(()),
        }
    }

    /// Caches the lookup of a single-key command's key. Valid only as long as the arguments.
    pub(crate) fn cache_key_lookup(&mut self, spec: &'static Spec) {
        if let Keys::Range { first: 1, last: 1, .. } = spec.keys {
            let key = self.arg(1);
            let id = self.db.id_of(key);
            self.db.cache_id(key, id);
        }
    }

    /// The keys of a write command that do not exist.
    fn missing_keys(&self, spec: &'static Spec) -> Vec<Box<[u8]>> {
        let mut keys = Vec::new();
        if spec.has(flag::WRITE) && self.mode == Mode::Primary {
            spec.keys.positions(&self.args, &mut keys);
        }
        keys.retain(|at| !self.db.contains(self.arg(*at)));
        keys.into_iter().map(|at| self.arg(at).into()).collect()
    }

    /// Registers the keys that a tracking client reads in the tracking table.
    fn track_reads(&mut self, spec: &'static Spec) {
        let Some(options) = self.session.tracking.clone().filter(|_| self.mode != Mode::Replay) else {
            return;
        };
        let keeps = match self.session.caching {
            _ if options.broadcast => false,
            Some(keeps) => keeps,
            None => !options.opt_in,
        };
        let mut keys = Vec::new();
        if keeps {
            spec.keys.positions(&self.args, &mut keys);
        }
        let most = usize::try_from(self.shared.settings.number("tracking-table-max-keys")).unwrap_or(0);
        for at in keys {
            self.shared.tracking.on_read(self.session.id, self.arg(at), most, &self.shared.pubsub);
        }
    }

    /// Sends the command to MONITOR clients. A blocked command was sent when it arrived.
    pub(crate) fn send_to_monitors(&self) {
        if self.mode == Mode::Replay || self.session.resumed {
            return;
        }
        let who = if self.in_script { "lua" } else { self.session.peer.as_str() };
        self.shared.monitors.show(self.shared.clock.wall_ms() * 1_000, who, &self.args);
    }

    /// Counts the call. Returns the start time if the call is timed: always, except that fast commands are sampled.
    fn start_timing(&mut self, spec: &'static Spec) -> Option<u64> {
        /// Upper bound of the execution time of a fast command.
        const FAST_US: i64 = 1_000;
        /// A BRIEF command with at most this many argument bytes counts as fast.
        const BRIEF_BYTES: usize = 16 << 10;
        if self.mode == Mode::Replay {
            return None;
        }
        if self.session.resumed {
            // The call was counted when the client blocked; the time measured now is that of serving it.
            return Some(self.shared.clock.monotonic_ns());
        }
        if self.session.away && !self.nested {
            // The call was counted before it was offloaded from the event loop.
            return Some(self.shared.clock.monotonic_ns());
        }
        let sampled = self.events.command_stats.on_call(self.session.command);
        let slower_than = self.shared.settings.slower_than_us.load(Ordering::Relaxed);
        let is_fast = spec.has(flag::FAST) || spec.has(flag::BRIEF) && self.args.byte_len() <= BRIEF_BYTES;
        let is_measured = sampled || !is_fast || (0..FAST_US).contains(&slower_than);
        is_measured.then(|| self.shared.clock.monotonic_ns())
    }

    fn stop_timing(&mut self, spec: &'static Spec, began: u64) {
        if self.session.block.is_some() {
            return;
        }
        let took = self.shared.clock.monotonic_ns().saturating_sub(began);
        self.events.command_stats.on_timed(self.session.command, took);
        let slower_than = self.shared.settings.slower_than_us.load(Ordering::Relaxed);
        let took_us = (took / 1_000) as i64;
        let is_slow = slower_than >= 0 && took_us >= slower_than;
        if is_slow && !spec.has(flag::SKIP_SLOWLOG) {
            let name = String::from_utf8_lossy(&self.session.name).into_owned();
            self.shared.on_slow(took_us, shorten(&self.args), &self.session.peer, &name);
        }
    }

    /// Marks the hazards of the command's writes, and raises the commit gate of its reply to the hazards of its keys.
    fn update_hazards(&mut self, spec: &'static Spec, wrote: bool) {
        let events = &mut *self.events;
        let batch = events.hazards.batch;
        match spec.keys {
            Keys::None => {}
            Keys::Range { first: 1, last: 1, .. } => {
                let hash = self.db.id_of(self.args.get(1).unwrap_or_default()).hash;
                if wrote {
                    events.hazards.mark(hash)
                } else {
                    events.gate = events.gate.max(events.hazards.of(hash))
                }
            }
            _ => {
                let mut keys = Vec::new();
                spec.keys.positions(&self.args, &mut keys);
                for at in keys {
                    let hash = self.db.id_of(self.args.get(at).unwrap_or_default()).hash;
                    if wrote {
                        events.hazards.mark(hash)
                    } else {
                        events.gate = events.gate.max(events.hazards.of(hash))
                    }
                }
            }
        }
        if wrote {
            events.gate = batch;
            if matches!(spec.keys, Keys::None) && !spec.has(flag::CONTAINER) {
                events.hazards.mark_all();
            }
        } else if spec.has(flag::WHOLE) {
            // The reply depends on all previous writes, including the current batch.
            events.gate = events.gate.max(if self.fx.is_empty() { batch - 1 } else { batch });
        }
    }

    /// Deletes the expired keys of the command. Each deletion is an effect of its own: replicas hide expired keys but
    /// never delete them.
    fn expire_keys(&mut self, spec: &'static Spec) {
        match self.mode {
            Mode::Replay => return,
            Mode::Replica => {
                self.db.hide_expired(self.now);
                return;
            }
            Mode::Primary => {}
        }
        if self.db.next_expiry().is_none_or(|at| at > self.now) {
            return;
        }
        if self.shared.is_paused(true, self.now) {
            // Under CLIENT PAUSE nothing changes, not even by expiry.
            self.db.hide_expired(self.now);
            return;
        }
        let mut keys = Vec::new();
        spec.keys.positions(&self.args, &mut keys);
        for at in keys {
            let key = self.arg(at);
            if self.db.expiry(key).flatten().is_some_and(|at| at <= self.now) {
                expire(self.db, self.fx, self.events, self.shared, key);
            }
        }
    }
}

/// Deletes an expired key and propagates the deletion.
pub(crate) fn expire(db: &mut Keyspace, fx: &mut Effects, events: &mut Events, shared: &Shared, key: &[u8]) {
    if db.remove(key) {
        fx.push_slices(&[b"DEL", key]);
        events.hazards.mark(db.id_of(key).hash);
        events.on_implicit_delete(key);
        events.notify(class::EXPIRED, "expired", key);
        shared.stats.expired.inc();
    }
}

/// The reply to a blocked client on timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnTimeout {
    /// A null array (BLPOP).
    NullArray,
    /// A null (BLMOVE).
    Null,
    /// An integer (WAIT).
    Number(i64),
}

/// Parses an integer as Redis does.
pub fn int(text: &[u8]) -> Result<i64, Error> {
    parse_i64(text).ok_or(Error::NOT_INTEGER)
}

/// Parses a float as Redis does.
pub fn float(text: &[u8]) -> Result<f64, Error> {
    number::parse_f64_in_range(text).ok_or(Error::NOT_FLOAT)
}

/// Parses the timeout of a blocking command in seconds, possibly fractional. Returns milliseconds.
pub fn timeout_ms(text: &[u8]) -> Result<i64, Error> {
    let seconds = number::parse_timeout(text).ok_or(Error::BAD_TIMEOUT)?;
    if seconds < 0.0 {
        return Err(Error::NEGATIVE_TIMEOUT);
    }
    let ms = (seconds * 1_000.0).ceil();
    if !ms.is_finite() || ms > 9.0e15 {
        return Err(Error::err("timeout is out of range"));
    }
    Ok(ms as i64)
}

/// Replies OK for a command without other effects.
pub fn ok(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.ok();
    Ok(())
}

/// The arguments for the slow log: at most 32, each at most 128 bytes.
fn shorten(args: &Args<'_>) -> Vec<Vec<u8>> {
    let mut short: Vec<Vec<u8>> = args
        .iter()
        .take(31)
        .map(|arg| {
            if arg.len() <= 128 {
                return arg.to_vec();
            }
            [&arg[..128], format!("... ({} more bytes)", arg.len() - 128).as_bytes()].concat()
        })
        .collect();
    match args.len() {
        0..=31 => {}
        32 => short.push(args[31].to_vec()),
        more => short.push(format!("... ({} more arguments)", more - 31).into_bytes()),
    }
    short
}
