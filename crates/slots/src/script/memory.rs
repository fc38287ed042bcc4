//! Memory limit of this thread's Lua interpreter, charged to the memory budget of the node.
//!
//! An interpreter may use [`UNCHARGED`] bytes uncharged, which the number of threads bounds. Beyond that its limit is
//! its budget reservation: the limit grows when an interrupt check finds half of it in use, before a large value
//! enters the interpreter, and at the start of a script that cannot restart elsewhere. A rejected reservation is "not
//! enough memory" to the script. After the script all unused memory is released.
//!
//! Invariant: the limit of the interpreter never exceeds [`UNCHARGED`] plus the reservation.

use std::cell::{Cell, RefCell};

use mlua::{Lua, WeakLua};
use moim_base::{LayerBudget, Permit};

/// Maximum memory of an interpreter.
pub(super) const MAX_MEMORY: usize = 256 << 20;
/// Memory that is not charged to the budget.
pub(super) const UNCHARGED: usize = 32 << 20;
/// Granularity of budget reservations.
const STEP: usize = 8 << 20;

thread_local! {
    static LUA: RefCell<Option<WeakLua>> = const { RefCell::new(None) };
    static LAYER: RefCell<Option<LayerBudget>> = const { RefCell::new(None) };
    static RESERVATION: RefCell<Option<Permit>> = const { RefCell::new(None) };
    static LIMIT: Cell<usize> = const { Cell::new(UNCHARGED) };
}

/// Registers the interpreter of this thread.
pub(super) fn install(lua: &Lua) -> mlua::Result<()> {
    RESERVATION.set(None);
    LIMIT.set(UNCHARGED);
    LUA.set(Some(lua.weak()));
    lua.set_memory_limit(UNCHARGED).map(drop)
}

/// The current memory limit.
pub(super) fn limit() -> usize {
    LIMIT.get()
}

/// Prepares for a script. A script that cannot restart elsewhere reserves what is available in advance, because it
/// may need much before the first interrupt check.
pub(super) fn begin(layer: &LayerBudget, may_restart: bool) {
    if RESERVATION.with_borrow(Option::is_none) {
        LAYER.set(Some(layer.clone()));
    }
    if !may_restart {
        let mut wanted = MAX_MEMORY;
        while wanted > limit() && !raise_limit(wanted) {
            wanted /= 2;
        }
    }
}

/// Raises the limit to `wanted` bytes; false if the budget does not allow it.
pub(super) fn raise_limit(wanted: usize) -> bool {
    let limit = limit();
    if wanted <= limit {
        return true;
    }
    if wanted > MAX_MEMORY {
        return false;
    }
    let more = (wanted - limit).next_multiple_of(STEP).min(MAX_MEMORY - limit);
    let taken = RESERVATION.with_borrow_mut(|held| match held {
        Some(held) => held.grow(more).is_ok(),
        None => LAYER.with_borrow(|layer| match layer.as_ref().map(|layer| layer.try_take(more)) {
            Some(Ok(permit)) => {
                *held = Some(permit);
                true
            }
            Some(Err(_)) | None => false,
        }),
    });
    taken && set_limit(limit + more)
}

/// Reserves memory for a value of `bytes` that is about to enter the interpreter or is built for it. False if it
/// cannot fit.
pub(super) fn reserve(bytes: usize) -> bool {
    let used =
        LUA.with_borrow(|lua| lua.as_ref().and_then(WeakLua::try_upgrade).map_or(0, |lua| lua.used_memory()));
    // Twice: the value and the copy that it is created from.
    raise_limit(used.saturating_add(bytes.saturating_mul(2))) || raise_limit(used.saturating_add(bytes))
}

/// Interrupt check: raises the limit when half of it is in use.
pub(super) fn on_interrupt_check(lua: &Lua) {
    let used = lua.used_memory();
    if used > limit() / 2 {
        raise_limit((2 * used + UNCHARGED).min(MAX_MEMORY));
    }
}

/// Releases unused memory after the script and its garbage collection.
pub(super) fn end(lua: &Lua) {
    RESERVATION.with_borrow_mut(|held| {
        let Some(permit) = held else { return };
        let used = lua.used_memory().next_multiple_of(STEP).saturating_sub(UNCHARGED).min(permit.bytes());
        if set_limit(UNCHARGED + used) {
            permit.shrink_to(used);
        }
        if permit.bytes() == 0 {
            *held = None;
        }
    });
}

fn set_limit(limit: usize) -> bool {
    let set = LUA.with_borrow(|lua| {
        lua.as_ref().and_then(WeakLua::try_upgrade).is_some_and(|lua| lua.set_memory_limit(limit).is_ok())
    });
    if set {
        LIMIT.set(limit);
    }
    set
}
