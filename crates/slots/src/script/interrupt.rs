//! Interrupts running scripts: checks periodically whether the time limit is exceeded, whether a client requested
//! SCRIPT KILL, and whether this node is still the primary of the shard.
//!
//! Two sources trigger a check: an instruction-count hook of the interpreter, and native functions that report their
//! work ([`work`]): a single instruction can take microseconds or, on large values, milliseconds. The hook interval
//! therefore adapts to the time of the last interval: it starts short, grows while instructions are quick, and
//! shrinks when they are not.
//!
//! The hook stays installed between scripts; its target is set when a script starts. Most scripts finish before the
//! first check.
//!
//! A script on an event loop delays the clients of that loop, including the one that wants to kill it. A long script
//! without side effects is stopped and restarted off the event loops; in a transaction or on a replica, where it
//! cannot be offloaded, it ends with an error. A script whose node has lost leadership is stopped regardless of its
//! writes: its effects can never be committed.

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

/// Run time after which a script yields its thread at every check. A lower priority would not suffice: a thread that
/// wakes up would still wait for the end of the time slice, which is milliseconds, and SCRIPT KILL would take very
/// long. A thread that yields gives up its time slice, and continues immediately if no other thread is runnable.
const YIELD_AFTER_MS: u64 = 50;
/// Instructions before the first check; maximum and minimum interval between checks.
const FIRST_INTERVAL: u32 = 256;
const MAX_INTERVAL: u32 = 20_000;
const MIN_INTERVAL: u32 = 16;
/// Intervals shorter than this are quick; longer than the other, slow.
const QUICK_NS: u64 = 200_000;
const SLOW_NS: u64 = 2_000_000;
/// Work units between checks: bytes compared or values converted, about one to ten nanoseconds each.
const WORK_INTERVAL: usize = 50_000;

const KILLED: &str = "Script killed by user with SCRIPT KILL.";
const TOO_LONG: &str =
    "Script stopped: it ran longer than busy-reply-threshold in a transaction or on a replica.";

thread_local! {
    /// The interrupt state of this thread's interpreter.
    static CURRENT: RefCell<Option<Rc<Interrupt>>> = const { RefCell::new(None) };
    static WORK_DONE: Cell<usize> = const { Cell::new(0) };
}

/// Reports work of a native function. Fails when the script must end.
pub(super) fn work(units: usize) -> Result<(), Failed> {
    let done = WORK_DONE.get() + units;
    if done < WORK_INTERVAL {
        WORK_DONE.set(done);
        return Ok(());
    }
    WORK_DONE.set(0);
    CURRENT.with_borrow(|interrupt| match interrupt {
        Some(interrupt) => interrupt.check(),
        None => Ok(()),
    })
}

/// Why a script was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// SCRIPT KILL or FUNCTION KILL.
    Killed,
    /// The script is restarted off the event loops.
    Offload,
    /// The script cannot be offloaded, and no client could kill it.
    TooLong,
    /// This node lost leadership of the shard.
    LostLeadership,
    /// SHUTDOWN NOSAVE: the script's writes are discarded.
    Abandoned,
    /// The node is shutting down.
    ShuttingDown,
    /// The code of a library exceeded the load timeout.
    LoadTimeout,
}

impl Stop {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Killed => KILLED,
            Self::Offload => "Script stopped: it is restarted off the event loop.",
            Self::TooLong => TOO_LONG,
            Self::LostLeadership => "Script stopped: the shard has another primary.",
            Self::Abandoned => "Script stopped by SHUTDOWN NOSAVE; its writes are discarded.",
            Self::ShuttingDown => "Script stopped: the node shuts down.",
            Self::LoadTimeout => "FUNCTION LOAD timeout",
        }
    }

    /// True if the script's writes must never be appended to the journal.
    pub(super) fn discards_effects(self) -> bool {
        matches!(self, Self::LostLeadership | Self::Abandoned | Self::ShuttingDown)
    }
}

/// Interrupt state of an interpreter.
#[derive(Default)]
pub(super) struct Interrupt {
    target: RefCell<Option<Target>>,
    stopped: Cell<Option<Stop>>,
    /// Set once every instruction raises an error.
    is_ending: Cell<bool>,
    /// Instructions between two calls of the installed hook; 0 if none is installed.
    every: Cell<u32>,
    checked_ns: Cell<u64>,
}

struct Target {
    clock: Arc<dyn Clock>,
    kind: TargetKind,
}

enum TargetKind {
    Script(Box<Script>),
    /// The code of a library, with its deadline.
    Load {
        until_ms: u64,
    },
}

struct Script {
    shard: Arc<Shard>,
    /// When the script starts to yield.
    yield_at_ms: u64,
    /// When the shard starts to reply BUSY.
    deadline_ms: u64,
    /// True if the script runs on an event loop, if there are any.
    on_loop: bool,
    /// True if the command may be offloaded to another thread.
    may_offload: bool,
    /// True once the script has side effects that cannot be repeated.
    has_side_effects: Cell<bool>,
    /// Leader epoch of the start, and the shard's count of voided replies; `None` on a replica.
    leadership: Option<(Option<i32>, u64)>,
}

impl Script {
    fn stop_reason(&self, clock: &dyn Clock) -> Option<Stop> {
        let shard = &self.shard;
        if shard.script_killed.load(Ordering::Acquire) {
            return Some(Stop::Killed);
        }
        if shard.script_abandoned.load(Ordering::Acquire) {
            return Some(Stop::Abandoned);
        }
        if let Some(leadership) = self.leadership
            && (shard.log.leader_epoch(), shard.voided()) != leadership
        {
            return Some(Stop::LostLeadership);
        }
        if shard.removed.is_stopped() {
            return Some(Stop::ShuttingDown);
        }
        let now = clock.monotonic_ms();
        let (is_late, is_busy) = (now >= self.yield_at_ms, now >= self.deadline_ms);
        let must_stop = self.may_offload || is_busy;
        if (is_late || is_busy)
            && must_stop
            && self.on_loop
            && !self.has_side_effects.get()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            return Some(if self.may_offload { Stop::Offload } else { Stop::TooLong });
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

impl Interrupt {
    /// Installs this as the interrupt state of the thread.
    pub(super) fn install_here(self: &Rc<Self>) {
        CURRENT.set(Some(Rc::clone(self)));
    }

    /// Starts the checks of a script.
    pub(super) fn begin(self: &Rc<Self>, lua: &Lua, ctx: &Ctx<'_>) -> mlua::Result<()> {
        let Some(shard) = ctx.session.shard.clone() else { return Ok(()) };
        shard.script_killed.store(false, Ordering::Release);
        shard.script_abandoned.store(false, Ordering::Release);
        shard.script_wrote.store(false, Ordering::Release);
        let clock = Arc::clone(&ctx.shared.clock);
        let limit = u64::try_from(ctx.shared.settings.number("busy-reply-threshold")).unwrap_or(0);
        let limit = if limit == 0 { u64::MAX } else { limit };
        let now = clock.monotonic_ms();
        let (yield_at_ms, deadline_ms) = (now.saturating_add(YIELD_AFTER_MS), now.saturating_add(limit));
        let (on_loop, may_offload) = (!ctx.session.away, !ctx.session.away && ctx.may_block());
        let leadership = (ctx.mode == Mode::Primary).then(|| (shard.log.leader_epoch(), shard.voided()));
        let has_side_effects = Cell::new(false);
        let script =
            Script { shard, yield_at_ms, deadline_ms, on_loop, may_offload, has_side_effects, leadership };
        self.start(lua, Target { clock, kind: TargetKind::Script(Box::new(script)) })
    }

    /// Starts the checks of library code, with its deadline.
    pub(super) fn begin_load(
        self: &Rc<Self>,
        lua: &Lua,
        clock: &Arc<dyn Clock>,
        until_ms: u64,
    ) -> mlua::Result<()> {
        self.start(lua, Target { clock: Arc::clone(clock), kind: TargetKind::Load { until_ms } })
    }

    fn start(self: &Rc<Self>, lua: &Lua, target: Target) -> mlua::Result<()> {
        self.checked_ns.set(target.clock.monotonic_ns());
        *self.target.borrow_mut() = Some(target);
        WORK_DONE.set(0);
        if self.every.get() == FIRST_INTERVAL { Ok(()) } else { self.install(lua, FIRST_INTERVAL) }
    }

    fn install(self: &Rc<Self>, lua: &Lua, every: u32) -> mlua::Result<()> {
        self.every.set(every);
        let interrupt = Rc::clone(self);
        let triggers = HookTriggers::new().every_nth_instruction(every);
        lua.set_global_hook(triggers, move |lua, _| interrupt.on_hook(lua))
    }

    fn stop_reason(&self) -> Option<Stop> {
        let target = self.target.borrow();
        let target = target.as_ref()?;
        match &target.kind {
            TargetKind::Script(script) => script.stop_reason(target.clock.as_ref()),
            TargetKind::Load { until_ms } => {
                (target.clock.monotonic_ms() > *until_ms).then_some(Stop::LoadTimeout)
            }
        }
    }

    /// Check from inside a native function. The hook then ends the script.
    fn check(&self) -> Result<(), Failed> {
        let why = self.stopped.get().or_else(|| self.stop_reason());
        self.stopped.set(why);
        why.map_or(Ok(()), |why| Err(why.text().to_owned()))
    }

    fn on_hook(self: &Rc<Self>, lua: &Lua) -> mlua::Result<VmState> {
        if let Some(why) = self.stopped.get().or_else(|| self.stop_reason()) {
            self.stopped.set(Some(why));
            if !self.is_ending.replace(true) {
                // A script may catch the error and continue: from now on every instruction raises it.
                let every = HookTriggers::new().every_nth_instruction(1);
                lua.set_global_hook(every, move |_, _| Err(mlua::Error::runtime(why.text())))?;
            }
            return Err(mlua::Error::runtime(why.text()));
        }
        memory::on_interrupt_check(lua);
        self.adapt(lua)?;
        Ok(VmState::Continue)
    }

    fn adapt(self: &Rc<Self>, lua: &Lua) -> mlua::Result<()> {
        let Some(now) = self.target.borrow().as_ref().map(|target| target.clock.monotonic_ns()) else {
            return Ok(());
        };
        let took = now.saturating_sub(self.checked_ns.replace(now));
        let every = self.every.get();
        let next = match took {
            ..QUICK_NS => (every * 2).min(MAX_INTERVAL),
            SLOW_NS.. => (every / 8).max(MIN_INTERVAL),
            _ => every,
        };
        if next == every { Ok(()) } else { self.install(lua, next) }
    }

    /// Notes a command of the script. A script that has written can no longer be killed; a published message cannot
    /// be sent again.
    pub(super) fn on_command(&self, ctx: &Ctx<'_>, wrote: bool, published: bool) {
        if (wrote || published)
            && let Some(Target { kind: TargetKind::Script(script), .. }) = &*self.target.borrow()
        {
            script.has_side_effects.set(true);
        }
        if wrote && let Some(shard) = &ctx.session.shard {
            shard.script_wrote.store(true, Ordering::Release);
        }
    }

    /// True if the running script has no side effects and may be restarted off the event loops.
    pub(super) fn may_offload(&self) -> bool {
        let can_run_there = || tokio::runtime::Handle::try_current().is_ok();
        match &*self.target.borrow() {
            Some(Target { kind: TargetKind::Script(script), .. }) => {
                script.may_offload && script.on_loop && !script.has_side_effects.get() && can_run_there()
            }
            Some(Target { kind: TargetKind::Load { .. }, .. }) | None => false,
        }
    }

    /// Ends the checks; returns why the script was stopped, if it was.
    pub(super) fn end(&self, lua: &Lua) -> Option<Stop> {
        if let Some(Target { kind: TargetKind::Script(script), .. }) = self.target.take() {
            script.shard.busy.store(false, Ordering::Release);
        }
        if self.is_ending.take() {
            lua.remove_global_hook();
            self.every.set(0);
        }
        self.stopped.take()
    }
}
