//! Command execution: resolves a request, checks whether it may run here and now, executes it, and determines the
//! commit gate of its reply.
//!
//! The order of the checks is that of Redis, because clients observe which error comes first: command name, arity,
//! authentication, slot, memory, role, subscriber mode, MULTI.

use std::sync::atomic::Ordering;

use bytes::BytesMut;
use moim_wire_resp::{Args, Encoder, Protocol};

use crate::cluster::{RouteRequest, View, route};
use crate::cmd::{self, Keys, Spec, flag};
use crate::ctx::{Ctx, Mode, OnTimeout};
use crate::error::Error;
use crate::keyspace::Keyspace;
use crate::session::{Replies, Session};
use crate::shard::{Role, State, Turn};

impl Turn<'_> {
    /// Executes one request and appends its reply to `out`. Returns the journal end that the reply waits for; 0 for
    /// none.
    pub fn execute(&mut self, session: &mut Session, args: &Args<'_>, out: &mut BytesMut) -> i64 {
        let start = out.len();
        session.last_ms = self.now;
        (session.resumed, session.held) = (false, false);
        (self.state.events.gate, self.state.events.writer) = (0, session.id);
        self.state.fx.mark();
        let checked = self.check(session, args);
        if checked.as_ref().is_err_and(|error| *error == Error::HELD) {
            // Treated as not received: the ASKING, MULTI and CLIENT REPLY state stays unchanged.
            session.held = true;
            self.state.db.clear_cached_id();
            self.state.held_connections.add(&session.mailbox);
            return 0;
        }
        // Subscription confirmations are sent regardless of CLIENT REPLY.
        let is_asking = checked.as_ref().is_ok_and(|spec| spec.name == "asking");
        let is_confirmation = session.replies != Replies::On
            && checked.as_ref().is_ok_and(|spec| spec.name.ends_with("subscribe"));
        match checked {
            Ok(spec) if session.multi.is_some() && !runs_in_multi(spec) => {
                queue(session, spec, args, self.state.fx.limits().batch);
                Encoder::new(out, session.protocol).simple("QUEUED");
            }
            Ok(spec) => self.run(session, spec, args, out),
            Err(error) => {
                if let Some(multi) = &mut session.multi {
                    multi.dirty_exec = true;
                }
                self.shared.stats.on_error(error.code());
                Encoder::new(out, session.protocol).error(error.0.as_bytes());
            }
        }
        // As in Redis, ASKING before MULTI lasts until EXEC.
        session.asking &= is_asking || session.multi.is_some();
        // The cached key lookup refers to the arguments, which end here.
        self.state.db.clear_cached_id();
        self.maybe_discard();
        self.close_large();
        match session.replies {
            Replies::On => {}
            Replies::Off | Replies::Skip if is_confirmation => {}
            Replies::Off | Replies::Skip => out.truncate(start),
            Replies::SkipNext => {}
        }
        session.replies = match session.replies {
            Replies::SkipNext => Replies::Skip,
            Replies::Skip => Replies::On,
            other => other,
        };
        for (client, with_error) in std::mem::take(&mut self.state.events.unblocked) {
            self.force_unblock(client, with_error);
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
        self.state.events.command_stats.counts.commands += 1;
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
        state.events.command_stats.changes += dirty;
        // Ends the hiding of expired keys by a replica or a paused primary.
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
            // Handled as an unknown command: nothing is queued, and the transaction is aborted.
            return Err(cmd::unknown_subcommand(args));
        }
        let checked = self.check_spec(session, spec, args);
        if checked.as_ref().is_err_and(|error| *error != Error::HELD) {
            self.state.events.command_stats.on_rejected(number);
        }
        checked.map(|()| spec)
    }

    /// Looks up the command. A pipeline repeats few commands: the previous one is compared first.
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
        } else if !self.state.migrations.is_idle() || spec.name == "exec" {
            self.check_held(session, spec)?;
        }
        if spec.has(flag::DENYOOM) {
            self.maybe_evict()?;
        } else if spec.name == "exec" {
            self.maybe_evict_for_exec(session);
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

    /// Checks whether the journal accepts writes. Checked once per turn.
    fn check_log(&mut self) -> Result<(), Error> {
        if self.admitted {
            return Ok(());
        }
        if self.shard.log.is_full() {
            return Err(Error::DISK_FULL);
        }
        if !self.shard.log.has_min_isr() {
            return Err(Error::NO_REPLICAS);
        }
        self.admitted = true;
        Ok(())
    }

    /// Checks whether a command without keys must wait for a slot migration: a transaction on such slots, or a
    /// command on the whole shard while slots migrate away.
    fn check_held(&self, session: &Session, spec: &'static Spec) -> Result<(), Error> {
        let migrations = &self.state.migrations;
        if spec.has(flag::WHOLE | flag::WRITE) && migrations.has_frozen() {
            return Err(Error::HELD);
        }
        let Some(multi) = session.multi.as_ref().filter(|multi| spec.name == "exec" && !multi.dirty_exec)
        else {
            return Ok(());
        };
        let mut keys = Vec::new();
        for (spec, command) in &multi.commands {
            let args = command.args();
            keys.clear();
            spec.keys.positions(&args, &mut keys);
            let touches_any = match spec.keys {
                Keys::None => spec.has(flag::WHOLE | flag::WRITE),
                // A script that declares no keys.
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

    /// True if commands that may access any slot must wait: slots are migrating, or have left before the slot map in
    /// use reflects it.
    fn is_any_held(&self) -> bool {
        let migrations = &self.state.migrations;
        migrations.has_frozen() || migrations.epoch() > self.shared.view.load().map_epoch
    }

    /// True if the slot map assigns the slot to this shard, or is about to, while the journal shows it in migration.
    fn is_held(&self, view: &View, slot: u16) -> bool {
        let migrations = &self.state.migrations;
        if view.owner(slot) != Some(self.shard.index) {
            return self.shard.is_flipping.load(Ordering::Acquire) && migrations.stages(slot);
        }
        // A dropped slot is missing here as long as the slot map in use is older than the drop.
        let is_old = migrations.epoch() > view.map_epoch;
        let waits = migrations.holds(slot) && (self.shard.role() == Role::Primary || migrations.stages(slot));
        is_old || waits
    }

    /// Checks that the keys belong to one slot and that this shard serves it.
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
            state.db.cache_id(key, id);
            return self.check_route(session, spec, args, id.slot, &[1], role);
        }
        let mut keys = Vec::new();
        spec.keys.positions(args, &mut keys);
        let Some(first) = keys.first() else {
            // A script that declares no keys may access any slot.
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
        let migrations = &self.state.migrations;
        // The slot map of this turn is sufficient to see that nothing migrates: a slot leaves under the lock that
        // this turn holds.
        if migrations.is_idle()
            && migrations.epoch() <= self.view.map_epoch
            && self.view.owner(slot) == Some(self.shard.index)
            && role == Role::Primary
            && self.view.moving.is_empty()
        {
            return Ok(());
        }
        let view = self.shared.view.load();
        if (!migrations.is_idle() || migrations.epoch() > view.map_epoch) && self.is_held(&view, slot) {
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
        let asked = RouteRequest {
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

    /// CLIENT UNBLOCK: unblocks a client as on timeout, or with an error.
    fn force_unblock(&mut self, client: u64, with_error: bool) {
        let on_timeout = self.state.blocked.on_timeout(client);
        self.answer_blocked(client, |to| match on_timeout {
            _ if with_error => to.error("UNBLOCKED client unblocked via CLIENT UNBLOCK"),
            Some(OnTimeout::Null) => to.null(),
            Some(OnTimeout::Number(number)) => to.integer(number),
            _ => to.null_array(),
        });
    }

    /// Evicts keys as the policy allows; OOM error if memory stays above `maxmemory`.
    pub(crate) fn maybe_evict(&mut self) -> Result<(), Error> {
        let limit = self.shared.settings.max_memory.load(Ordering::Relaxed);
        // Slots that are frozen for migration must not change; that lasts only moments.
        if limit == 0 || self.state.migrations.has_frozen() || self.state.has_room(self.shared, limit) {
            return Ok(());
        }
        let State { db, fx, events, memory, evictor, .. } = &mut *self.state;
        let node = &self.shared.memory;
        let share = node.share(limit);
        let is_enough =
            |db: &Keyspace| memory.used_with(node, db.memory()) <= limit || db.memory() as u64 <= share;
        evictor.maybe_evict(db, fx, events, self.shared, self.now, is_enough);
        if self.state.has_room(self.shared, limit) { Ok(()) } else { Err(Error::OOM) }
    }

    /// Evicts for a transaction: without memory none of its commands runs.
    fn maybe_evict_for_exec(&mut self, session: &mut Session) {
        let Some(multi) = session.multi.as_mut().filter(|multi| !multi.dirty_exec) else { return };
        if multi.commands.iter().any(|(spec, _)| spec.has(flag::DENYOOM)) {
            multi.refused = self.maybe_evict().err();
        }
    }

    /// Hands over the keyspace notifications, which are sent on commit.
    pub(crate) fn send_notifications(&mut self) {
        let events = &self.state.events;
        if events.notifications.is_empty() && events.invalidations.is_empty() && !events.invalidate_all {
            return;
        }
        let gate = self.gate(self.state.end());
        let gate = self.shard.message_gate(gate);
        self.state.events.send_invalidations(self.shared, &gate);
        let notifications = std::mem::take(&mut self.state.events.notifications);
        self.shared.publish_notifications(&notifications, &gate);
    }
}

impl Turn<'_> {
    /// True if the request may write: CLIENT PAUSE WRITE then delays it. A transaction is delayed at its EXEC.
    pub(crate) fn may_write(&self, session: &Session, args: &Args<'_>) -> bool {
        match (cmd::resolve(args), &session.multi) {
            (Some(spec), Some(multi)) if spec.name == "exec" => {
                multi.commands.iter().any(|(spec, command)| self.writes(spec, &command.args()))
            }
            (Some(_), Some(_)) | (None, _) => false,
            (Some(spec), None) => self.writes(spec, args),
        }
    }

    /// True if the command writes. A script that declares `no-writes` is trusted here, and the declaration is
    /// enforced when it runs.
    fn writes(&self, spec: &Spec, args: &Args<'_>) -> bool {
        if !spec.takes(args.len()) || !spec.has(flag::WRITE | flag::MAY_REPLICATE) {
            return false;
        }
        let name = String::from_utf8_lossy(args.get(1).unwrap_or_default());
        match spec.name {
            "eval" => !crate::script::declares_no_writes(args.get(1).unwrap_or_default()),
            "evalsha" => {
                let source = self.shared.scripts.get(&name.to_lowercase());
                source.is_some_and(|source| !crate::script::declares_no_writes(&source))
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

/// True for commands that execute immediately inside MULTI.
fn runs_in_multi(spec: &Spec) -> bool {
    matches!(spec.name, "exec" | "discard" | "multi" | "watch" | "quit" | "reset")
}

/// Queues a command between MULTI and EXEC. `most` bounds the queued bytes: the batch limit of a transaction.
fn queue(session: &mut Session, spec: &'static Spec, args: &Args<'_>, most: usize) {
    if let Some(multi) = &mut session.multi {
        multi.bytes += args.byte_len() + 64;
        multi.dirty_exec |= multi.bytes > most;
        if !multi.dirty_exec {
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
