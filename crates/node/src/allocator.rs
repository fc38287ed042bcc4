//! The allocator of the process, and how it is told to give memory back to the system.
//!
//! By itself it does so while a thread goes on allocating. A thread that freed much and then rests, as after a compaction
//! of the coordination core, would keep it: 32 of 53 MiB where a hundred thousand versions were forgotten.

#![allow(unsafe_code)] // one call of the allocator's own interface, which its crate does not offer

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// Of mimalloc, which is linked in as the global allocator.
    fn mi_collect(force: bool);
}

/// Gives back what this thread has freed. Takes about a millisecond: not for every request.
pub(crate) fn give_back() {
    // SAFETY: the function takes no pointer, may be called at any time from any thread, and looks only at memory that the
    // allocator knows to be free. Its signature is that of mimalloc.h.
    unsafe { mi_collect(true) }
}
