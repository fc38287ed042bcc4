//! The allocator of the process, and its function that returns free memory to the system.

#![allow(unsafe_code)] // one call of the allocator's own interface, which its crate does not offer

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// Of mimalloc, which is linked in as the global allocator.
    fn mi_collect(force: bool);
}

/// Returns the memory that this thread has freed to the system. Takes about a millisecond: not for every request.
pub(crate) fn release_memory() {
    // SAFETY: the function takes no pointer, may be called at any time from any thread, and reads only memory that the
    // allocator knows to be free. Its signature is that of mimalloc.h.
    unsafe { mi_collect(true) }
}
