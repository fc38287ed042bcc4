//! Looks at a running script from time to time: whether it takes long, and whether somebody wants it to end.
//!
//! The hook that looks stays in the machine from one script to the next; what it looks at is put before it when a script
//! begins. Most scripts are over before the first look.
//!
//! A script on an event loop keeps everybody there waiting, also whoever wants to end it. One that takes long and has changed
//! nothing is stopped and begins anew away from the loops; in a transaction or on a replica, where it cannot leave, it ends with
//! an error.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mlua::{HookTriggers, Lua, VmState};
use moim_base::Clock;

use super::LOOK_EVERY;
use crate::ctx::Ctx;
use crate::shard::Shard;

/// How long a script may run before it lets others run at every look. A lower priority does not do that: a thread that wakes up
/// still waits for the end of its share of the processor, which is milliseconds, and the script takes very long to hear that it
/// is to end. One that yields has used its share up, and goes on at once where nobody else wants to run.
const PATIENCE_MS: u64 = 50;
const KILLED: &str = "Script killed by user with SCRIPT KILL.";
const TOO_LONG: &str =
    "Script stopped: it ran longer than busy-reply-threshold in a transaction or on a replica.";

/// Why a script was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Somebody wanted it to end.
    Killed,
    /// It is to run elsewhere.
    Left,
    /// It cannot run elsewhere, and nobody could end it.
    TooLong,
}

impl Stop {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Killed => KILLED,
            Self::Left => "The script goes on elsewhere.",
            Self::TooLong => TOO_LONG,
        }
    }
}

/// The look at what runs in a machine.
#[derive(Default)]
pub(super) struct Watch {
    watched: RefCell<Option<Watched>>,
    stopped: Cell<Option<Stop>>,
    /// Whether the machine has the hook.
    is_installed: Cell<bool>,
}

struct Watched {
    shard: Arc<Shard>,
    clock: Arc<dyn Clock>,
    /// When it begins to let others run.
    patience_ms: u64,
    /// When others are told that the shard is busy.
    deadline_ms: u64,
    /// It runs on an event loop, unless there is none.
    on_loop: bool,
    /// Its command may be left to another thread.
    may_leave: bool,
    /// It did what cannot be done twice.
    acted: Cell<bool>,
}

impl Watch {
    /// A script begins.
    pub(super) fn begin(self: &Rc<Self>, lua: &Lua, ctx: &Ctx<'_>) -> mlua::Result<()> {
        let Some(shard) = ctx.session.shard.clone() else { return Ok(()) };
        shard.script_killed.store(false, Ordering::Release);
        shard.script_wrote.store(false, Ordering::Release);
        let clock = Arc::clone(&ctx.shared.clock);
        let limit = u64::try_from(ctx.shared.settings.number("busy-reply-threshold")).unwrap_or(0);
        let limit = if limit == 0 { u64::MAX } else { limit };
        let now = clock.monotonic_ms();
        let (patience_ms, deadline_ms) = (now.saturating_add(PATIENCE_MS), now.saturating_add(limit));
        let (on_loop, may_leave) = (!ctx.session.away, !ctx.session.away && ctx.may_block());
        let acted = Cell::new(false);
        let watched = Watched { shard, clock, patience_ms, deadline_ms, on_loop, may_leave, acted };
        *self.watched.borrow_mut() = Some(watched);
        if !self.is_installed.replace(true) {
            let watch = Rc::clone(self);
            let triggers = HookTriggers::new().every_nth_instruction(LOOK_EVERY);
            lua.set_global_hook(triggers, move |lua, _| watch.look(lua))?;
        }
        Ok(())
    }

    fn look(&self, lua: &Lua) -> mlua::Result<VmState> {
        let watched = self.watched.borrow();
        let Some(watched) = &*watched else { return Ok(VmState::Continue) };
        if watched.shard.script_killed.load(Ordering::Acquire) {
            return self.stop(lua, Stop::Killed);
        }
        let now = watched.clock.monotonic_ms();
        let (is_late, is_busy) = (now >= watched.patience_ms, now >= watched.deadline_ms);
        let ends_elsewhere = watched.may_leave || is_busy;
        if (is_late || is_busy)
            && ends_elsewhere
            && watched.on_loop
            && !watched.acted.get()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            return self.stop(lua, if watched.may_leave { Stop::Left } else { Stop::TooLong });
        }
        if is_late {
            std::thread::yield_now();
        }
        if is_busy {
            watched.shard.busy.store(true, Ordering::Release);
        }
        Ok(VmState::Continue)
    }

    fn stop(&self, lua: &Lua, why: Stop) -> mlua::Result<VmState> {
        if self.stopped.replace(Some(why)).is_none() {
            // A script may catch the error and go on: from now on every instruction is one.
            let every = HookTriggers::new().every_nth_instruction(1);
            lua.set_global_hook(every, move |_, _| Err(mlua::Error::runtime(why.text())))?;
        }
        Err(mlua::Error::runtime(why.text()))
    }

    /// The script has run a command. One that has written is not to be killed any more; what was said cannot be said again.
    pub(super) fn on_command(&self, ctx: &Ctx<'_>, wrote: bool, said: bool) {
        if (wrote || said)
            && let Some(watched) = &*self.watched.borrow()
        {
            watched.acted.set(true);
        }
        if wrote && let Some(shard) = &ctx.session.shard {
            shard.script_wrote.store(true, Ordering::Release);
        }
    }

    /// The script is over; says why, if it was stopped.
    pub(super) fn end(&self, lua: &Lua) -> Option<Stop> {
        if let Some(watched) = self.watched.take() {
            watched.shard.busy.store(false, Ordering::Release);
        }
        let stopped = self.stopped.take();
        if stopped.is_some() {
            self.remove(lua);
        }
        stopped
    }

    /// Takes the hook away, or whatever took its place.
    pub(super) fn remove(&self, lua: &Lua) {
        lua.remove_global_hook();
        self.is_installed.set(false);
    }
}
