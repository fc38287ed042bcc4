//! How the allocator of the process is asked to return free memory to the system.
//!
//! The binary owns the allocator and installs the function; a program without it, such as a test, keeps its memory. The
//! allocator itself returns memory only while a thread goes on allocating. A thread that freed much and then rests, as
//! after a compaction of the coordination core, would keep it: 32 of 53 MiB where a hundred thousand versions were
//! compacted.

use std::sync::OnceLock;

static RELEASE_MEMORY: OnceLock<fn()> = OnceLock::new();

/// Installs the function that returns the free memory of the calling thread to the system. The first call counts.
pub fn set_release_memory(release: fn()) {
    let _ = RELEASE_MEMORY.set(release);
}

/// Returns the memory that this thread has freed. Takes about a millisecond: not for every request.
pub(crate) fn release_freed_memory() {
    if let Some(release) = RELEASE_MEMORY.get() {
        release();
    }
}
