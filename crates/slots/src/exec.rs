//! From a request to its answer: which command it is, whether it may run here and now, and what its answer waits for.
//!
//! The order of the checks is Redis's, because clients see which error comes first: name, number of arguments,
//! authentication, slot, memory, role, subscriptions, MULTI.

use std::sync::atomic::Ordering;

use bytes::BytesMut;
use moim_wire_resp::{Args, Encoder, Protocol};

use crate::cluster::{Asked, View, route};
use crate::cmd::{self, Keys, Spec, flag};
use crate::ctx::{Ctx, Mode, OnTimeout};
use crate::error::Error;
use crate::keyspace::Keyspace;
use crate::session::{Replies, Session};
use crate::shard::{Role, State, Turn};

impl Turn<'_> {
    /// Runs one request and writes its answer behind `out`. Gives the journal end the answer waits for; 0 is none.
    pub fn execute(&mut self, session: &mut Session, args: &Args<'_>, out: &mut BytesMut) -> i64 {
        let start = out.len();
        session.last_ms = self.now;
        (session.resumed, session.held) = (false, false);
        (self.state.events.gate, self.state.events.writer) = (0, session.id);
        self.state.fx.mark();
        let checked = self.check(session, args);
        if checked.as_ref().is_err_and(|error| *error == Error::HELD) {
            // As if it had not come yet: ASKING, MULTI and CLIENT REPLY stay as they are.
            session.held = true;
            self.state.db.forget();
            self.state.parked.add(&session.mailbox);
            return 0;
        }
        // What a client subscribes to is told to it whatever it said about answers.
        let is_asking = checked.as_ref().is_ok_and(|spec| spec.name == "asking");
        let is_told = session.replies != Replies::On
            && checked.as_ref().is_ok_and(|spec| spec.name.ends_with("subscribe"));
        match checked {
            Ok(spec) if session.multi.is_some() && !runs_in_multi(spec) => {
                queue(session, spec, args, self.state.fx.limits().batch);
                Encoder::new(out, session.protocol).simple("QUEUED");
            }
            Ok(spec) => self.run(session, spec, args, out),
            Err(error) => {
                if let Some(multi) = &mut session.multi {
                    multi.broken = true;
                }
                self.shared.stats.on_error(error.code());
                Encoder::new(out, session.protocol).error(error.0.as_bytes());
            }
        }
        // As in Redis, ASKING before MULTI lasts until EXEC.
        session.asking &= is_asking || session.multi.is_some();
        // The arguments end here, and what was remembered about where they lie with them.
        self.state.db.forget();
        self.maybe_discard();
        self.close_large();
        match session.replies {
            Replies::On => {}
            Replies::Off | Replies::Skip if is_told => {}
            Replies::Off | Replies::Skip => out.truncate(start),
            Replies::SkipNext => {}
        }
        session.replies = match session.replies {
            Replies::SkipNext => Replies::Skip,
            Replies::Skip => Replies::On,
            other => other,
        };
        for (client, with_error) in std::mem::take(&mut self.state.events.unblocked) {
            self.let_go(client, with_error);
        }
        if !self.state.events.ready.is_empty() {
            let gate = self.state.events.gate;
            self.serve_blocked();
            self.state.events.gate = gate;
        }
        let gate = self.gate(self.state.events.gate);
        self.send_notifications();
        self.maybe_append();
        gate
    }

    fn run(&mut self, session: &mut Session, spec: &'static Spec, args: &Args<'_>, out: &mut BytesMut) {
        session.last_command = spec.name;
        self.state.events.tallies.counts.commands += 1;
        let is_replica = self.shard.role() == Role::Replica;
        let state = &mut *self.state;
        let protocol = session.protocol;
        let mut ctx = Ctx {
            args: *args,
            db: &mut state.db,
            now: self.now,
            out: Encoder::new(out, protocol),
            fx: &mut state.fx,
            events: &mut state.events,
            session,
            shared: self.shared,
            mode: if is_replica { Mode::Replica } else { Mode::Primary },
            nested: false,
            in_script: false,
            dirty: 0,
            rewritten: false,
        };
        ctx.run(spec);
        let dirty = ctx.dirty;
        state.events.tallies.changes += dirty;
        // A replica hid what has expired, and so does a primary that is paused.
        state.db.hide_expired(i64::MIN);
        if let Some(block) = session.block.clone() {
            self.block(session, block);
        }
        if session.caching.is_some() && session.multi.is_none() && spec.name != "client|caching" {
            session.caching = None;
        }
    }

    fn check(&mut self, session: &mut Session, args: &Args<'_>) -> Result<&'static Spec, Error> {
        let (spec, number) = self.resolve(args).ok_or_else(|| unknown(args))?;
        session.command = number;
        if spec.lacks_subcommand(args) {
            // As an unknown command: nothing is queued, and a transaction is aborted.
            return Err(cmd::unknown_subcommand(args));
        }
        let checked = self.check_spec(session, spec, args);
        if checked.as_ref().is_err_and(|error| *error != Error::HELD) {
            self.state.events.tallies.on_rejected(number);
        }
        checked.map(|()| spec)
    }

    /// Which command it is. Pipelines are made of few: the one before is asked first.
    fn resolve(&mut self, args: &Args<'_>) -> Option<(&'static Spec, u16)> {
        if let Some(before) = self.resolved
            && before.0.name.as_bytes().eq_ignore_ascii_case(args.name())
        {
            return Some(before);
        }
        let found = cmd::resolve_numbered(args)?;
        let is_whole = found.0.subs.is_empty() && !found.0.name.contains('|');
        self.resolved = is_whole.then_some(found);
        Some(found)
    }

    fn check_spec(
        &mut self,
        session: &mut Session,
        spec: &'static Spec,
        args: &Args<'_>,
    ) -> Result<(), Error> {
        if !spec.takes(args.len()) {
            return Err(Error::arity(spec.name));
        }
        if !session.authenticated && !spec.has(flag::NO_AUTH) {
            return Err(Error::NO_AUTH);
        }
        if session.multi.is_some() && spec.has(flag::NO_MULTI) {
            return Err(Error::err("Command not allowed inside a transaction"));
        }
        let role = self.shard.role();
        if role == Role::Loading && !spec.has(flag::LOADING) {
            return Err(Error::LOADING);
        }
        if !matches!(spec.keys, Keys::None) {
            self.check_slot(session, spec, args, role)?;
        } else if spec.has(flag::WRITE) && role == Role::Replica {
            return Err(Error::READ_ONLY);
        } else if !self.state.moves.is_idle() || spec.name == "exec" {
            self.check_held(session, spec)?;
        }
        if spec.has(flag::DENYOOM) {
            self.make_room()?;
        } else if spec.name == "exec" {
            self.make_room_for_all(session);
        }
        if spec.has(flag::WRITE) {
            self.check_congestion()?;
            self.check_log()?;
        } else if spec.name == "exec" {
            self.check_congestion()?;
        }
        if session.subscriptions > 0 && session.protocol == Protocol::Resp2 {
            check_subscriber(spec)?;
        }
        Ok(())
    }

    /// Whether the journal takes writes. Asked once per turn.
    fn check_log(&mut self) -> Result<(), Error> {
        if self.admitted {
            return Ok(());
        }
        if self.shard.log.is_full() {
            return Err(Error::DISK_FULL);
        }
        if !self.shard.log.admits() {
            return Err(Error::NO_REPLICAS);
        }
        self.admitted = true;
        Ok(())
    }

    /// Whether a command that names no key has to wait for slots on their way: it is a transaction on them, or touches the
    /// whole shard while slots leave it.
    fn check_held(&self, session: &Session, spec: &'static Spec) -> Result<(), Error> {
        let moves = &self.state.moves;
        if spec.has(flag::WHOLE | flag::WRITE) && moves.has_frozen() {
            return Err(Error::HELD);
        }
        let Some(multi) = session.multi.as_ref().filter(|multi| spec.name == "exec" && !multi.broken) else {
            return Ok(());
        };
        let mut keys = Vec::new();
        for (spec, command) in &multi.commands {
            let args = command.args();
            keys.clear();
            spec.keys.positions(&args, &mut keys);
            let touches_any = match spec.keys {
                Keys::None => spec.has(flag::WHOLE | flag::WRITE),
                // A script that names no keys.
                _ => keys.is_empty(),
            };
            if touches_any && self.is_any_held() {
                return Err(Error::HELD);
            }
            if keys.iter().any(|at| self.is_held(&self.shared.view.load(), crate::slot_of(&args[*at]))) {
                return Err(Error::HELD);
            }
        }
        Ok(())
    }

    /// Whether commands that may touch any slot have to wait: slots leave, or have left without the view in use knowing.
    fn is_any_held(&self) -> bool {
        let moves = &self.state.moves;
        moves.has_frozen() || moves.epoch() > self.shared.view.load().map_epoch
    }

    /// Whether the map says that a slot is ours, or is about to, and the journal says that it is on its way.
    fn is_held(&self, view: &View, slot: u16) -> bool {
        let moves = &self.state.moves;
        if view.owner(slot) != Some(self.shard.index) {
            return self.shard.is_flipping.load(Ordering::Acquire) && moves.stages(slot);
        }
        // A slot that was dropped is missing here as long as the map in use is older than that.
        let is_old = moves.epoch() > view.map_epoch;
        let waits = moves.holds(slot) && (self.shard.role() == Role::Primary || moves.stages(slot));
        is_old || waits
    }

    /// Whether the keys are of one slot that is served here.
    fn check_slot(
        &mut self,
        session: &mut Session,
        spec: &'static Spec,
        args: &Args<'_>,
        role: Role,
    ) -> Result<(), Error> {
        let state = &mut *self.state;
        if let Keys::Range { first: 1, last: 1, .. } = spec.keys {
            let key = args.get(1).unwrap_or_default();
            let id = state.db.id_of(key);
            state.db.remember(key, id);
            return self.check_route(session, spec, args, id.slot, &[1], role);
        }
        let mut keys = Vec::new();
        spec.keys.positions(args, &mut keys);
        let Some(first) = keys.first() else {
            // A script that names no keys may touch any.
            return if self.is_any_held() { Err(Error::HELD) } else { Ok(()) };
        };
        let slot = crate::slot_of(&args[*first]);
        if keys.iter().any(|at| crate::slot_of(&args[*at]) != slot) {
            return Err(Error::CROSS_SLOT);
        }
        self.check_route(session, spec, args, slot, &keys, role)
    }

    fn check_route(
        &self,
        session: &mut Session,
        spec: &'static Spec,
        args: &Args<'_>,
        slot: u16,
        keys: &[usize],
        role: Role,
    ) -> Result<(), Error> {
        if self.shared.isolated.load(Ordering::Relaxed) {
            return Err(Error::CLUSTER_DOWN);
        }
        let moves = &self.state.moves;
        // The map of this turn will do to find that nothing is special: a slot leaves under the lock that this turn has.
        if moves.is_idle()
            && moves.epoch() <= self.view.map_epoch
            && self.view.owner(slot) == Some(self.shard.index)
            && role == Role::Primary
            && self.view.moving.is_empty()
        {
            return Ok(());
        }
        let view = self.shared.view.load();
        if (!moves.is_idle() || moves.epoch() > view.map_epoch) && self.is_held(&view, slot) {
            return Err(Error::HELD);
        }
        if view.owner(slot) == Some(self.shard.index) && role == Role::Primary && view.moving.is_empty() {
            return Ok(());
        }
        let missing = if view.moving.iter().any(|(moving, ..)| *moving == slot) {
            keys.iter().filter(|at| !self.state.db.contains(&args[**at])).count()
        } else {
            0
        };
        let asked = Asked {
            slot,
            shard: self.shard.index,
            is_primary: role == Role::Primary,
            asking: session.asking || spec.has(flag::ASKING),
            reads_replica: session.readonly && !spec.has(flag::WRITE),
            keys: keys.len(),
            missing,
        };
        route(&view, asked).check()
    }

    /// CLIENT UNBLOCK: as if its time had run out, or with an error.
    fn let_go(&mut self, client: u64, with_error: bool) {
        let on_timeout = self.state.blocked.on_timeout(client);
        self.answer_blocked(client, |to| match on_timeout {
            _ if with_error => to.error("UNBLOCKED client unblocked via CLIENT UNBLOCK"),
            Some(OnTimeout::Null) => to.null(),
            Some(OnTimeout::Number(number)) => to.integer(number),
            _ => to.null_array(),
        });
    }

    /// Whether there is room for more, after letting go of what the policy allows.
    pub(crate) fn make_room(&mut self) -> Result<(), Error> {
        let limit = self.shared.settings.max_memory.load(Ordering::Relaxed);
        // Slots that leave must not change any more; that lasts for moments.
        if limit == 0 || self.state.moves.has_frozen() || self.state.has_room(self.shared, limit) {
            return Ok(());
        }
        let State { db, fx, events, memory, evictor, .. } = &mut *self.state;
        let node = &self.shared.memory;
        let share = node.share(limit);
        let is_enough =
            |db: &Keyspace| memory.used_with(node, db.memory()) <= limit || db.memory() as u64 <= share;
        evictor.make_room(db, fx, events, self.shared, self.now, is_enough);
        if self.state.has_room(self.shared, limit) { Ok(()) } else { Err(Error::OOM) }
    }

    /// The same for the commands of a transaction: without room none of them runs.
    fn make_room_for_all(&mut self, session: &mut Session) {
        let Some(multi) = session.multi.as_mut().filter(|multi| !multi.broken) else { return };
        if multi.commands.iter().any(|(spec, _)| spec.has(flag::DENYOOM)) {
            multi.refused = self.make_room().err();
        }
    }

    /// Hands over what subscribers of keyspace notifications hear when this is committed.
    pub(crate) fn send_notifications(&mut self) {
        let events = &self.state.events;
        if events.notifications.is_empty() && events.invalid.is_empty() && !events.all_invalid {
            return;
        }
        let gate = self.gate(self.state.end());
        let gate = self.shard.message_gate(gate);
        self.state.events.tell_invalid(self.shared, &gate);
        let notifications = std::mem::take(&mut self.state.events.notifications);
        self.shared.publish_notifications(&notifications, &gate);
    }
}

impl Turn<'_> {
    /// Whether a request may change something: CLIENT PAUSE WRITE holds it back. A transaction is held at its EXEC.
    pub(crate) fn may_write(&self, session: &Session, args: &Args<'_>) -> bool {
        match (cmd::resolve(args), &session.multi) {
            (Some(spec), Some(multi)) if spec.name == "exec" => {
                multi.commands.iter().any(|(spec, command)| self.writes(spec, &command.args()))
            }
            (Some(_), Some(_)) | (None, _) => false,
            (Some(spec), None) => self.writes(spec, args),
        }
    }

    /// Whether the command changes something. A script that promises not to is taken at its word, and held to it.
    fn writes(&self, spec: &Spec, args: &Args<'_>) -> bool {
        if !spec.takes(args.len()) || !spec.has(flag::WRITE | flag::MAY_REPLICATE) {
            return false;
        }
        let name = String::from_utf8_lossy(args.get(1).unwrap_or_default());
        match spec.name {
            "eval" => !crate::script::promises_no_writes(args.get(1).unwrap_or_default()),
            "evalsha" => {
                let source = self.shared.scripts.get(&name.to_lowercase());
                source.is_some_and(|source| !crate::script::promises_no_writes(&source))
            }
            "fcall" => self.state.db.functions.find(&name).is_some_and(|(library, name)| {
                library
                    .functions
                    .get(name)
                    .is_some_and(|about| about.flags & crate::functions::NO_WRITES == 0)
            }),
            _ => true,
        }
    }
}

/// What runs at once although a transaction is open.
fn runs_in_multi(spec: &Spec) -> bool {
    matches!(spec.name, "exec" | "discard" | "multi" | "watch" | "quit" | "reset")
}

/// Queues a command between MULTI and EXEC; `most` bytes of them, which is what a transaction may record.
fn queue(session: &mut Session, spec: &'static Spec, args: &Args<'_>, most: usize) {
    if let Some(multi) = &mut session.multi {
        multi.bytes += args.byte_len() + 64;
        multi.broken |= multi.bytes > most;
        if !multi.broken {
            multi.commands.push((spec, args.to_owned()));
        }
    }
}

fn check_subscriber(spec: &Spec) -> Result<(), Error> {
    let allowed = matches!(
        spec.name,
        "subscribe"
            | "unsubscribe"
            | "psubscribe"
            | "punsubscribe"
            | "ssubscribe"
            | "sunsubscribe"
            | "ping"
            | "quit"
            | "reset"
    );
    if allowed {
        return Ok(());
    }
    Err(Error::err(format_args!(
        "Can't execute '{}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this context",
        spec.name.split('|').next().unwrap_or_default()
    )))
}

fn unknown(args: &Args<'_>) -> Error {
    let cut = |text: &[u8], most: usize| -> String {
        String::from_utf8_lossy(&text[..text.len().min(most)]).into_owned()
    };
    let mut shown = String::new();
    for arg in args.from(1).iter() {
        if shown.len() >= 128 {
            break;
        }
        shown.push_str(&format!("'{}' ", cut(arg, 128 - shown.len())));
    }
    Error::err(format_args!("unknown command '{}', with args beginning with: {shown}", cut(args.name(), 128)))
}
