//! Little-endian encoding of the crate's own file formats.
//!
//! Decoding never panics: bytes from a disk are checked, not trusted. Encoding appends to a plain vector.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::types::JournalId;

/// Cursor over untrusted bytes; every getter returns `None` past the end.
pub(crate) struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.rest.split_at_checked(len)?;
        self.rest = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        Some(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn i32(&mut self) -> Option<i32> {
        Some(i32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Option<i64> {
        Some(i64::from_le_bytes(self.array()?))
    }

    pub(crate) fn id(&mut self) -> Option<JournalId> {
        Some(JournalId { incarnation: u128::from_le_bytes(self.array()?), part: self.u32()? })
    }

    /// A length-prefixed byte string.
    pub(crate) fn blob(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.blob()?.to_vec()).ok()
    }
}

/// Appending side of [`Input`].
pub(crate) trait Output {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    fn put_i32(&mut self, value: i32) {
        self.put(&value.to_le_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
    fn put_i64(&mut self, value: i64) {
        self.put(&value.to_le_bytes());
    }
    fn put_id(&mut self, id: JournalId) {
        self.put(&id.incarnation.to_le_bytes());
        self.put_u32(id.part);
    }
    fn put_count(&mut self, count: usize) {
        self.put_u32(u32::try_from(count).expect("a count in our own file fits 32 bits"));
    }
    fn put_blob(&mut self, bytes: &[u8]) {
        self.put_count(bytes.len());
        self.put(bytes);
    }
}

impl Output for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Locks a mutex whose poisoning means a broken invariant: a crash is better than a wrong answer.
pub(crate) trait Locked<T> {
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T> Locked<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().expect("a thread panicked while it held a journal lock")
    }
}

/// Waits on a condition variable, with a timeout if one is given.
pub(crate) fn wait_on<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Option<Duration>,
) -> MutexGuard<'a, T> {
    const POISONED: &str = "a thread panicked while it held a journal lock";
    match limit {
        None => condvar.wait(guard).expect(POISONED),
        Some(limit) => condvar.wait_timeout(guard, limit).expect(POISONED).0,
    }
}
