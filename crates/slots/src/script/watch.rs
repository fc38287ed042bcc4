//! Looks at a running script from time to time: whether it takes long, whether a client wants it to end, and whether this
//! node still leads the shard.
//!
//! Two things call for a look: a hook that counts instructions of the machine, and the functions that scripts call, which report
//! their work ([`work`]): an instruction can take microseconds or, on large values, milliseconds. So the hook follows the time
//! that its last instructions took: it begins after few, comes more seldom while they are quick, and more often when they are not.
//!
//! The hook stays in the machine from one script to the next; what it looks at is put before it when a script
//! begins. Most scripts are over before the first look.
//!
//! A script on an event loop holds up the clients of that loop, also the one that wants to end it. One that takes long and has
//! changed nothing is stopped and begins anew away from the loops; in a transaction or on a replica, where it cannot leave, it ends
//! with an error. One whose node has lost the lead ends whatever it has done: its effects can never be committed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mlua::{HookTriggers, Lua, VmState};
use moim_base::Clock;

use super::memory;
use super::patterns::Failed;
use crate::ctx::{Ctx, Mode};
use crate::shard::Shard;

/// How long a script may run before it lets others run at every look. A lower priority does not do that: a thread that wakes up
/// still waits for the end of its share of the processor, which is milliseconds, and the script takes very long to hear that it
/// is to end. One that yields has used its share up, and goes on at once where no other thread wants to run.
const PATIENCE_MS: u64 = 50;
/// Instructions before the first look, between looks at most, and at least.
const FIRST: u32 = 256;
const MOST: u32 = 20_000;
const LEAST: u32 = 16;
/// Instructions between two looks that took less than this are quick; more than that, and they are slow.
const QUICK_NS: u64 = 200_000;
const SLOW_NS: u64 = 2_000_000;
/// Work between two looks: bytes compared, values converted, about a nanosecond to ten each.
const WORK: usize = 50_000;

const KILLED: &str = "Script killed by user with SCRIPT KILL.";
const TOO_LONG: &str =
    "Script stopped: it ran longer than busy-reply-threshold in a transaction or on a replica.";

thread_local! {
    /// The watch of this thread's machine.
    static CURRENT: RefCell<Option<Rc<Watch>>> = const { RefCell::new(None) };
    static DONE: Cell<usize> = const { Cell::new(0) };
}

/// A function that scripts call has done so much work. Fails when the script is to end.
pub(super) fn work(units: usize) -> Result<(), Failed> {
    let done = DONE.get() + units;
    if done < WORK {
        DONE.set(done);
        return Ok(());
    }
    DONE.set(0);
    CURRENT.with_borrow(|watch| match watch {
        Some(watch) => watch.check(),
        None => Ok(()),
    })
}

/// Why a script was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// SCRIPT KILL or FUNCTION KILL.
    Killed,
    /// It is to run elsewhere.
    Left,
    /// It cannot run elsewhere, and no client could end it.
    TooLong,
    /// This node does not lead the shard any more.
    LostLeadership,
    /// SHUTDOWN NOSAVE: what it has written is discarded.
    Abandoned,
    /// The node is about to stop.
    ShuttingDown,
    /// The code of a library did not end.
    LoadTimeout,
}

impl Stop {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Killed => KILLED,
            Self::Left => "The script goes on elsewhere.",
            Self::TooLong => TOO_LONG,
            Self::LostLeadership => "Script stopped: the shard has another primary.",
            Self::Abandoned => "Script stopped by SHUTDOWN NOSAVE; its writes are discarded.",
            Self::ShuttingDown => "Script stopped: the node shuts down.",
            Self::LoadTimeout => "FUNCTION LOAD timeout",
        }
    }

    /// Whether what the script has written must never be appended.
    pub(super) fn discards_effects(self) -> bool {
        matches!(self, Self::LostLeadership | Self::Abandoned | Self::ShuttingDown)
    }
}

/// The look at what runs in a machine.
#[derive(Default)]
pub(super) struct Watch {
    watched: RefCell<Option<Watched>>,
    stopped: Cell<Option<Stop>>,
    /// Every instruction is an error by now.
    is_ending: Cell<bool>,
    /// Instructions between two looks of the hook that the machine has; 0 while it has none.
    every: Cell<u32>,
    looked_ns: Cell<u64>,
}

struct Watched {
    clock: Arc<dyn Clock>,
    what: What,
}

enum What {
    Script(Box<Script>),
    /// The code of a library, which may run until then.
    Load {
        until_ms: u64,
    },
}

struct Script {
    shard: Arc<Shard>,
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
    /// The lead under which it runs, and the shard's count of voided answers; none on a replica.
    lead: Option<(Option<i32>, u64)>,
}

impl Script {
    fn verdict(&self, clock: &dyn Clock) -> Option<Stop> {
        let shard = &self.shard;
        if shard.script_killed.load(Ordering::Acquire) {
            return Some(Stop::Killed);
        }
        if shard.script_abandoned.load(Ordering::Acquire) {
            return Some(Stop::Abandoned);
        }
        if let Some(lead) = self.lead
            && (shard.log.leads(), shard.voided()) != lead
        {
            return Some(Stop::LostLeadership);
        }
        if shard.gone.is_stopped() {
            return Some(Stop::ShuttingDown);
        }
        let now = clock.monotonic_ms();
        let (is_late, is_busy) = (now >= self.patience_ms, now >= self.deadline_ms);
        let ends_elsewhere = self.may_leave || is_busy;
        if (is_late || is_busy)
            && ends_elsewhere
            && self.on_loop
            && !self.acted.get()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            return Some(if self.may_leave { Stop::Left } else { Stop::TooLong });
        }
        if is_late {
            std::thread::yield_now();
        }
        if is_busy {
            shard.busy.store(true, Ordering::Release);
        }
        None
    }
}

impl Watch {
    /// Makes it the watch of this thread.
    pub(super) fn install_here(self: &Rc<Self>) {
        CURRENT.set(Some(Rc::clone(self)));
    }

    /// A script begins.
    pub(super) fn begin(self: &Rc<Self>, lua: &Lua, ctx: &Ctx<'_>) -> mlua::Result<()> {
        let Some(shard) = ctx.session.shard.clone() else { return Ok(()) };
        shard.script_killed.store(false, Ordering::Release);
        shard.script_abandoned.store(false, Ordering::Release);
        shard.script_wrote.store(false, Ordering::Release);
        let clock = Arc::clone(&ctx.shared.clock);
        let limit = u64::try_from(ctx.shared.settings.number("busy-reply-threshold")).unwrap_or(0);
        let limit = if limit == 0 { u64::MAX } else { limit };
        let now = clock.monotonic_ms();
        let (patience_ms, deadline_ms) = (now.saturating_add(PATIENCE_MS), now.saturating_add(limit));
        let (on_loop, may_leave) = (!ctx.session.away, !ctx.session.away && ctx.may_block());
        let lead = (ctx.mode == Mode::Primary).then(|| (shard.log.leads(), shard.voided()));
        let acted = Cell::new(false);
        let script = Script { shard, patience_ms, deadline_ms, on_loop, may_leave, acted, lead };
        self.start(lua, Watched { clock, what: What::Script(Box::new(script)) })
    }

    /// The code of a library begins, and may run until then.
    pub(super) fn begin_load(
        self: &Rc<Self>,
        lua: &Lua,
        clock: &Arc<dyn Clock>,
        until_ms: u64,
    ) -> mlua::Result<()> {
        self.start(lua, Watched { clock: Arc::clone(clock), what: What::Load { until_ms } })
    }

    fn start(self: &Rc<Self>, lua: &Lua, watched: Watched) -> mlua::Result<()> {
        self.looked_ns.set(watched.clock.monotonic_ns());
        *self.watched.borrow_mut() = Some(watched);
        DONE.set(0);
        if self.every.get() == FIRST { Ok(()) } else { self.install(lua, FIRST) }
    }

    fn install(self: &Rc<Self>, lua: &Lua, every: u32) -> mlua::Result<()> {
        self.every.set(every);
        let watch = Rc::clone(self);
        let triggers = HookTriggers::new().every_nth_instruction(every);
        lua.set_global_hook(triggers, move |lua, _| watch.look(lua))
    }

    fn verdict(&self) -> Option<Stop> {
        let watched = self.watched.borrow();
        let watched = watched.as_ref()?;
        match &watched.what {
            What::Script(script) => script.verdict(watched.clock.as_ref()),
            What::Load { until_ms } => {
                (watched.clock.monotonic_ms() > *until_ms).then_some(Stop::LoadTimeout)
            }
        }
    }

    /// A look from inside a function that the script has called. The hook ends the script after it.
    fn check(&self) -> Result<(), Failed> {
        let why = self.stopped.get().or_else(|| self.verdict());
        self.stopped.set(why);
        why.map_or(Ok(()), |why| Err(why.text().to_owned()))
    }

    fn look(self: &Rc<Self>, lua: &Lua) -> mlua::Result<VmState> {
        if let Some(why) = self.stopped.get().or_else(|| self.verdict()) {
            self.stopped.set(Some(why));
            if !self.is_ending.replace(true) {
                // A script may catch the error and go on: from now on every instruction is one.
                let every = HookTriggers::new().every_nth_instruction(1);
                lua.set_global_hook(every, move |_, _| Err(mlua::Error::runtime(why.text())))?;
            }
            return Err(mlua::Error::runtime(why.text()));
        }
        memory::on_look(lua);
        self.adapt(lua)?;
        Ok(VmState::Continue)
    }

    fn adapt(self: &Rc<Self>, lua: &Lua) -> mlua::Result<()> {
        let Some(now) = self.watched.borrow().as_ref().map(|watched| watched.clock.monotonic_ns()) else {
            return Ok(());
        };
        let took = now.saturating_sub(self.looked_ns.replace(now));
        let every = self.every.get();
        let next = match took {
            ..QUICK_NS => (every * 2).min(MOST),
            SLOW_NS.. => (every / 8).max(LEAST),
            _ => every,
        };
        if next == every { Ok(()) } else { self.install(lua, next) }
    }

    /// The script has run a command. One that has written is not to be killed any more; a message cannot be sent again.
    pub(super) fn on_command(&self, ctx: &Ctx<'_>, wrote: bool, said: bool) {
        if (wrote || said)
            && let Some(Watched { what: What::Script(script), .. }) = &*self.watched.borrow()
        {
            script.acted.set(true);
        }
        if wrote && let Some(shard) = &ctx.session.shard {
            shard.script_wrote.store(true, Ordering::Release);
        }
    }

    /// Whether the script that runs has done nothing that counts, and may begin anew away from the loops.
    pub(super) fn may_leave(&self) -> bool {
        let can_run_there = || tokio::runtime::Handle::try_current().is_ok();
        match &*self.watched.borrow() {
            Some(Watched { what: What::Script(script), .. }) => {
                script.may_leave && script.on_loop && !script.acted.get() && can_run_there()
            }
            Some(Watched { what: What::Load { .. }, .. }) | None => false,
        }
    }

    /// The script is over; says why, if it was stopped.
    pub(super) fn end(&self, lua: &Lua) -> Option<Stop> {
        if let Some(Watched { what: What::Script(script), .. }) = self.watched.take() {
            script.shard.busy.store(false, Ordering::Release);
        }
        if self.is_ending.take() {
            lua.remove_global_hook();
            self.every.set(0);
        }
        self.stopped.take()
    }
}
