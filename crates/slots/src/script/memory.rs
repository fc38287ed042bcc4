//! What the Lua machine of this thread may take, out of the memory budget of the node.
//!
//! A machine has [`FREE`] without asking, which the number of threads bounds. Beyond that its limit is what it holds of the budget:
//! the limit grows when a look at the script finds half of it in use, before something large goes into the machine, and at the
//! begin of a script that cannot begin anew elsewhere. What is not granted is "not enough memory" to the script. After the script
//! everything that is not in use any more is given back.
//!
//! Invariant: the limit of the machine is never more than [`FREE`] and what is held.

use std::cell::{Cell, RefCell};

use mlua::{Lua, WeakLua};
use moim_base::{LayerBudget, Permit};

/// The most that all scripts of a thread may take together.
pub(super) const MAX_MEMORY: usize = 256 << 20;
/// What a machine may take without asking.
pub(super) const FREE: usize = 32 << 20;
/// What it takes from the budget at a time.
const STEP: usize = 8 << 20;

thread_local! {
    static LUA: RefCell<Option<WeakLua>> = const { RefCell::new(None) };
    static LAYER: RefCell<Option<LayerBudget>> = const { RefCell::new(None) };
    static HELD: RefCell<Option<Permit>> = const { RefCell::new(None) };
    static LIMIT: Cell<usize> = const { Cell::new(FREE) };
}

/// The machine is the one of this thread from now on.
pub(super) fn install(lua: &Lua) -> mlua::Result<()> {
    HELD.set(None);
    LIMIT.set(FREE);
    LUA.set(Some(lua.weak()));
    lua.set_memory_limit(FREE).map(drop)
}

/// What the machine may take now.
pub(super) fn limit() -> usize {
    LIMIT.get()
}

/// A script begins. One that cannot begin anew elsewhere takes ahead what there is, because it may need much before the first look.
pub(super) fn begin(layer: &LayerBudget, begins_anew: bool) {
    if HELD.with_borrow(Option::is_none) {
        LAYER.set(Some(layer.clone()));
    }
    if !begins_anew {
        let mut wanted = MAX_MEMORY;
        while wanted > limit() && !extend(wanted) {
            wanted /= 2;
        }
    }
}

/// Lets the machine take so much in all, if there is so much.
pub(super) fn extend(wanted: usize) -> bool {
    let limit = limit();
    if wanted <= limit {
        return true;
    }
    if wanted > MAX_MEMORY {
        return false;
    }
    let more = (wanted - limit).next_multiple_of(STEP).min(MAX_MEMORY - limit);
    let taken = HELD.with_borrow_mut(|held| match held {
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

/// Something of so many bytes is about to go into the machine, or is made for it. False when it cannot fit.
pub(super) fn make_room(bytes: usize) -> bool {
    let used =
        LUA.with_borrow(|lua| lua.as_ref().and_then(WeakLua::try_upgrade).map_or(0, |lua| lua.used_memory()));
    // Twice: beside the text itself there is the copy that it is made from.
    extend(used.saturating_add(bytes.saturating_mul(2))) || extend(used.saturating_add(bytes))
}

/// A look at the script: with half of the limit in use it gets more.
pub(super) fn on_look(lua: &Lua) {
    let used = lua.used_memory();
    if used > limit() / 2 {
        extend((2 * used + FREE).min(MAX_MEMORY));
    }
}

/// The script is over, and its garbage is gone.
pub(super) fn end(lua: &Lua) {
    HELD.with_borrow_mut(|held| {
        let Some(permit) = held else { return };
        let used = lua.used_memory().next_multiple_of(STEP).saturating_sub(FREE).min(permit.bytes());
        if set_limit(FREE + used) {
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
