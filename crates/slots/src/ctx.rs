//! What a command sees: its arguments, the keyspace, the time, where its answer goes, and whom to tell.
//!
//! A command is a function of its [`Ctx`] and of nothing else. It writes exactly one answer to `out`, or gives an error
//! (what it wrote is then thrown away). A command that changed a key calls [`Ctx::changed`]; the command itself then
//! becomes the effect in the journal, unless [`Ctx::rewrite`] said something that is safer to replay (absolute times, the
//! members that were drawn). Keys of the command that have expired are gone before it runs.

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

/// Why a command runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A client of the primary asked.
    Primary,
    /// A client of a replica asked: nothing may change.
    Replica,
    /// The journal says that it happened: nothing may fail, nothing is recorded, nothing expires by itself.
    Replay,
}

/// Everything a command may use.
pub struct Ctx<'a> {
    /// Name and arguments.
    pub args: Args<'a>,
    /// The keys of the shard.
    pub db: &'a mut Keyspace,
    /// Milliseconds since 1970; never goes back within a shard.
    pub now: i64,
    /// Where the answer goes.
    pub out: Encoder<'a>,
    /// Where effects go.
    pub fx: &'a mut Effects,
    /// Whom to tell.
    pub events: &'a mut Events,
    /// The client.
    pub session: &'a mut Session,
    /// What all shards and clients of this node share.
    pub shared: &'a Shared,
    /// Why it runs.
    pub mode: Mode,
    /// Whether it runs inside EXEC or a script, where nothing may block.
    pub nested: bool,
    /// A script runs it.
    pub in_script: bool,
    /// Changes the running command has made.
    pub dirty: u64,
    pub(crate) rewritten: bool,
}

impl<'a> Ctx<'a> {
    /// Argument `index`, which the arity promises. 0 is the name.
    pub fn arg(&self, index: usize) -> &'a [u8] {
        self.args.get(index).unwrap_or_default()
    }

    /// How many arguments there are, the name included.
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

    /// Whether argument `index` is this word, whatever its case.
    pub fn is(&self, index: usize, word: &str) -> bool {
        self.arg(index).eq_ignore_ascii_case(word.as_bytes())
    }

    /// The string at a key; an error when it holds something else.
    pub fn string(&mut self, key: &[u8]) -> Result<Option<&[u8]>, Error> {
        match self.db.touch(key) {
            None => Ok(None),
            Some(Item::Str(string)) => Ok(Some(string)),
            Some(Item::Value(_)) => Err(Error::WRONG_TYPE),
        }
    }

    /// The key has changed: transactions that watch it fail, and the command is recorded.
    pub fn changed(&mut self, key: &[u8]) {
        self.dirty += 1;
        self.events.on_changed(key);
    }

    /// The key has changed, with a notification.
    pub fn changed_with(&mut self, key: &[u8], class: u32, event: &'static str) {
        self.changed(key);
        self.events.notify(class, event, key);
    }

    /// The key holds something that blocked clients may take.
    pub fn ready(&mut self, key: &[u8]) {
        self.events.on_ready(key);
    }

    /// Forgets a key, as DEL does. Answers whether it was there.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        let was_there = self.db.remove(key);
        if was_there {
            self.changed_with(key, class::GENERIC, "del");
        }
        was_there
    }

    /// Records these commands in place of the one that runs. May be called several times.
    pub fn rewrite(&mut self, args: &[&[u8]]) {
        self.rewritten = true;
        if self.mode == Mode::Primary {
            self.fx.push_slices(args);
        }
    }

    /// Says that whatever changed needs no record.
    pub fn record_nothing(&mut self) {
        self.rewritten = true;
    }

    /// Whether the command may make its client wait.
    pub fn may_block(&self) -> bool {
        !self.nested && self.mode == Mode::Primary
    }

    /// Makes the client wait until one of `keys` is ready, and then runs the command again. The command must have written
    /// nothing. `timeout_ms` 0 waits for ever; when time runs out the client gets a null array, or what `on_timeout` says.
    pub fn block(&mut self, keys: Vec<Box<[u8]>>, timeout_ms: i64, on_timeout: OnTimeout) {
        let deadline = (timeout_ms > 0).then(|| self.now.saturating_add(timeout_ms));
        self.session.block = Some(Block {
            keys,
            deadline,
            on_timeout,
            command: self.args.to_owned(),
            on_keys: true,
            replicas: None,
            on_gone: false,
        });
    }

    /// Runs another command in place, with the answer behind what is written. For EXEC and scripts.
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
        // What the inner command did is recorded by itself.
        self.rewritten = true;
        fine
    }

    /// Does what another command does, which is then what is recorded.
    pub(crate) fn pass_on(&mut self, spec: &'static Spec, command: &OwnedArgs) -> Done {
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

    /// Runs the command that `args` names, which is `spec`. Answers whether it gave no error.
    pub(crate) fn run(&mut self, spec: &'static Spec) -> bool {
        let start = self.out.buffer().len();
        let before = self.fx.commands();
        let began = self.begin_measuring(spec);
        if let Err(error) = self.check_batch(spec).and_then(|()| self.check_held(spec)) {
            self.out.error(error.0.as_bytes());
            return false;
        }
        self.expire_keys(spec);
        let missing = if self.events.notify & class::NEW == 0 { Vec::new() } else { self.missing_keys(spec) };
        let told = self.events.notifications.len();
        let done = (spec.run)(self);
        for key in missing.iter().filter(|key| self.db.contains(key)) {
            // Before what the command itself told.
            self.events.notify(class::NEW, "new", key);
            self.events.notifications[told..].rotate_right(1);
        }
        let fine = done.is_ok();
        if let Err(error) = done {
            self.events.tallies.on_failed(self.session.command);
            self.out.buffer().truncate(start);
            self.out.error(error.0.as_bytes());
            self.shared.stats.on_error(error.code());
        }
        if self.dirty > 0 && !self.rewritten && self.mode == Mode::Primary {
            self.fx.push(self.args.iter());
        }
        self.db.settle();
        if self.mode == Mode::Primary {
            self.note_hazards(spec, self.fx.commands() > before);
        }
        if let Some(began) = began {
            self.end_measuring(spec, began);
        }
        if self.session.tracking.is_some() && spec.has(flag::READONLY) {
            self.remember_reader(spec);
        }
        if self.shared.monitors.any() && !spec.has(flag::SKIP_MONITOR | flag::ADMIN) {
            self.show_to_monitors();
        }
        fine
    }

    /// Whether what a transaction or a script has recorded leaves room for this command: others see all of it or nothing, so
    /// all of it is held in memory wherever it is replayed.
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

    /// Whether a command of a transaction or a script touches a slot that is on its way, declared or not. Those that declare
    /// their keys wait before they begin.
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

    /// Where the only key of a command lies is worked out once. To be forgotten with the arguments.
    pub(crate) fn remember_key(&mut self, spec: &'static Spec) {
        if let Keys::Range { first: 1, last: 1, .. } = spec.keys {
            let key = self.arg(1);
            let id = self.db.id_of(key);
            self.db.remember(key, id);
        }
    }

    /// The keys of a command that may create them, and that are not there.
    fn missing_keys(&self, spec: &'static Spec) -> Vec<Box<[u8]>> {
        let mut keys = Vec::new();
        if spec.has(flag::WRITE) && self.mode == Mode::Primary {
            spec.keys.positions(&self.args, &mut keys);
        }
        keys.retain(|at| !self.db.contains(self.arg(*at)));
        keys.into_iter().map(|at| self.arg(at).into()).collect()
    }

    /// What a client keeps of what it reads, it hears of when that changes.
    fn remember_reader(&mut self, spec: &'static Spec) {
        let Some(wish) = self.session.tracking.clone().filter(|_| self.mode != Mode::Replay) else { return };
        let keeps = match self.session.caching {
            _ if wish.broadcast => false,
            Some(keeps) => keeps,
            None => !wish.opt_in,
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

    /// Shows the command to those who see all of them. One that waited was shown when it came.
    pub(crate) fn show_to_monitors(&self) {
        if self.mode == Mode::Replay || self.session.resumed {
            return;
        }
        let who = if self.in_script { "lua" } else { self.session.peer.as_str() };
        self.shared.monitors.show(self.shared.clock.wall_ms() * 1_000, who, &self.args);
    }

    /// Counts the call. Gives the time where it is measured: always, but for fast commands one in many.
    fn begin_measuring(&mut self, spec: &'static Spec) -> Option<u64> {
        /// No fast command takes that long.
        const FAST_US: i64 = 1_000;
        /// A command with no more bytes than this copies them in no time.
        const BRIEF_BYTES: usize = 16 << 10;
        if self.mode == Mode::Replay {
            return None;
        }
        if self.session.resumed {
            // It was counted when it began to wait; what counts now is what it takes to serve it.
            return Some(self.shared.clock.monotonic_ns());
        }
        if self.session.away && !self.nested {
            // It was counted when it left the loop.
            return Some(self.shared.clock.monotonic_ns());
        }
        let sampled = self.events.tallies.on_call(self.session.command);
        let slower_than = self.shared.settings.slower_than_us.load(Ordering::Relaxed);
        let is_fast = spec.has(flag::FAST) || spec.has(flag::BRIEF) && self.args.byte_len() <= BRIEF_BYTES;
        let is_measured = sampled || !is_fast || (0..FAST_US).contains(&slower_than);
        is_measured.then(|| self.shared.clock.monotonic_ns())
    }

    fn end_measuring(&mut self, spec: &'static Spec, began: u64) {
        if self.session.block.is_some() {
            return;
        }
        let took = self.shared.clock.monotonic_ns().saturating_sub(began);
        self.events.tallies.on_measured(self.session.command, took);
        let slower_than = self.shared.settings.slower_than_us.load(Ordering::Relaxed);
        let took_us = (took / 1_000) as i64;
        let is_slow = slower_than >= 0 && took_us >= slower_than;
        if is_slow && !spec.has(flag::SKIP_SLOWLOG) {
            let name = String::from_utf8_lossy(&self.session.name).into_owned();
            self.shared.on_slow(took_us, shorten(&self.args), &self.session.peer, &name);
        }
    }

    /// What the command wrote is a hazard for others, and what others wrote to its keys is one for its answer.
    fn note_hazards(&mut self, spec: &'static Spec, wrote: bool) {
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
            // Everything before it, the batch in the making included.
            events.gate = events.gate.max(if self.fx.is_empty() { batch - 1 } else { batch });
        }
    }

    /// Lets the keys of the command that have expired go. That is an effect of its own: replicas hide, but never delete.
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
            // Nothing changes under CLIENT PAUSE, time or not.
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

/// Deletes a key because its time has come, and records that.
pub(crate) fn expire(db: &mut Keyspace, fx: &mut Effects, events: &mut Events, shared: &Shared, key: &[u8]) {
    if db.remove(key) {
        fx.push_slices(&[b"DEL", key]);
        events.hazards.mark(db.id_of(key).hash);
        events.on_vanished(key);
        events.notify(class::EXPIRED, "expired", key);
        shared.stats.expired.inc();
    }
}

/// What a client hears whose time ran out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnTimeout {
    /// A null array (BLPOP).
    NullArray,
    /// A null (BLMOVE).
    Null,
    /// A number (WAIT).
    Number(i64),
}

/// Reads an integer as Redis does.
pub fn int(text: &[u8]) -> Result<i64, Error> {
    parse_i64(text).ok_or(Error::NOT_INTEGER)
}

/// Reads a float as Redis does.
pub fn float(text: &[u8]) -> Result<f64, Error> {
    number::parse_f64_in_range(text).ok_or(Error::NOT_FLOAT)
}

/// Reads the timeout of a blocking command: seconds, perhaps with a fraction. Gives milliseconds.
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

/// Writes an answer for a command that does nothing but say OK.
pub fn ok(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.ok();
    Ok(())
}

/// The arguments for the slow log: at most 32 of at most 128 bytes.
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
