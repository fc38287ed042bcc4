//! Looks at a running script from time to time: whether it takes long, and whether somebody wants it to end.
//!
//! The hook that looks stays in the machine from one script to the next; what it looks at is put before it when a script
//! begins. Most scripts are over before the first look.

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
pub(super) const KILLED: &str = "Script killed by user with SCRIPT KILL.";

/// The look at what runs in a machine.
#[derive(Default)]
pub(super) struct Watch {
    watched: RefCell<Option<Watched>>,
    killed: Cell<bool>,
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
        *self.watched.borrow_mut() = Some(Watched { shard, clock, patience_ms, deadline_ms });
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
            if !self.killed.replace(true) {
                // A script may catch the error and go on: from now on every instruction is one.
                let every = HookTriggers::new().every_nth_instruction(1);
                lua.set_global_hook(every, |_, _| Err(mlua::Error::runtime(KILLED)))?;
            }
            return Err(mlua::Error::runtime(KILLED));
        }
        let now = watched.clock.monotonic_ms();
        if now >= watched.patience_ms {
            std::thread::yield_now();
        }
        if now >= watched.deadline_ms {
            watched.shard.busy.store(true, Ordering::Release);
        }
        Ok(VmState::Continue)
    }

    /// The script has written: it is not to be killed any more.
    pub(super) fn on_write(ctx: &Ctx<'_>) {
        if let Some(shard) = &ctx.session.shard {
            shard.script_wrote.store(true, Ordering::Release);
        }
    }

    /// The script is over; says whether it was killed.
    pub(super) fn end(&self, lua: &Lua) -> bool {
        if let Some(watched) = self.watched.take() {
            watched.shard.busy.store(false, Ordering::Release);
        }
        let killed = self.killed.take();
        if killed {
            self.remove(lua);
        }
        killed
    }

    /// Takes the hook away, or whatever took its place.
    pub(super) fn remove(&self, lua: &Lua) {
        lua.remove_global_hook();
        self.is_installed.set(false);
    }
}
