//! The keyspace of a shard: keys, values and expire times in memory.
//!
//! Pure: no clock, no I/O, no locks; time is an argument. An entry (key, expire time, and the value if it is a small
//! string) is one allocation in the [`arena`]; the [`index`] finds it; larger strings and other types are a [`Value`]
//! outside the arena. Expire times are ordered in a separate set, so that the expire cycle costs only what expires.
//!
//! Invariants: `expires` holds exactly the entries that have an expire time; `memory` is the sum over the parts. The
//! keyspace never deletes an expired key by itself: that is an effect, and up to the caller.

pub(crate) mod arena;
pub(crate) mod entry;
pub(crate) mod image;
mod importing;
mod index;
pub(crate) mod lfu;

use std::collections::BTreeSet;

use moim_wire_resp::number::Decimal;

use self::arena::{Arena, MAX_ENTRY, Ref};
use self::entry::{EXPIRES, LONG_KEY, MAX_KEY, OUTSIDE, Parts, RAW};
use self::index::{Index, Place};
use self::lfu::Lfu;
use crate::slot_set::SlotSet;
use crate::value::Value;
use crate::{SLOTS, slot_of};

/// Hash slot and hash of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyId {
    /// Hash slot, 0 to 16383.
    pub slot: u16,
    /// Hash of the key, seeded per process.
    pub hash: u64,
}

/// A borrowed value.
#[derive(Clone, Copy)]
pub enum Item<'a> {
    /// A string.
    Str(&'a [u8]),
    /// A value of another type; never [`Value::Str`].
    Value(&'a Value),
}

/// An owned value, removed from the keyspace or to be inserted.
#[derive(Clone)]
pub enum Owned {
    /// A string.
    Str(Vec<u8>),
    /// A value of another type.
    Value(Value),
}

/// The keyspace of one shard.
pub struct Keyspace {
    index: Index,
    arena: Arena,
    values: Slab<Value>,
    long_keys: Slab<Box<[u8]>>,
    expires: BTreeSet<(i64, Ref)>,
    seed: [u64; 2],
    keys: usize,
    /// Bytes of the values outside the arena.
    outside: usize,
    touched: Vec<u32>,
    /// Entries that expire at or before this time are hidden. Set for reads on replicas, which must not delete.
    hidden_until: i64,
    memo: Option<(usize, usize, KeyId)>,
    images: Vec<image::Image>,
    hidden: Option<SlotSet>,
    hidden_keys: usize,
    hidden_expires: BTreeSet<(i64, Ref)>,
    access_now: u32,
    /// LFU counter parameters, if the eviction policy is an LFU policy.
    lfu: Option<Lfu>,
    /// Function libraries.
    pub functions: crate::functions::Functions,
    /// Values that are expensive to free (lazy free); the owner of the keyspace drops them outside its lock.
    garbage: Vec<Value>,
}

struct Slab<T> {
    items: Vec<(Option<T>, usize)>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    const fn new() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }

    fn insert(&mut self, item: T, bytes: usize) -> u32 {
        match self.free.pop() {
            Some(at) => {
                self.items[at as usize] = (Some(item), bytes);
                at
            }
            None => {
                self.items.push((Some(item), bytes));
                u32::try_from(self.items.len() - 1).expect("fewer than 2^32 values fit in memory")
            }
        }
    }

    fn remove(&mut self, at: u32) -> (T, usize) {
        let (item, bytes) = std::mem::take(&mut self.items[at as usize]);
        self.free.push(at);
        (item.expect("an entry points at a value"), bytes)
    }

    fn get(&self, at: u32) -> &T {
        self.items[at as usize].0.as_ref().expect("an entry points at a value")
    }

    fn get_mut(&mut self, at: u32) -> &mut T {
        self.items[at as usize].0.as_mut().expect("an entry points at a value")
    }
}

/// Keys prefetched together.
pub(crate) const PREFETCH_KEYS: usize = 32;

/// Values with more elements than this are freed lazily.
const LAZY_FREE: usize = 64;

impl Keyspace {
    /// An empty keyspace; the seed prevents clients from choosing colliding keys.
    pub fn new(seed: u64) -> Self {
        Self {
            index: Index::new(),
            arena: Arena::new(),
            values: Slab::new(),
            long_keys: Slab::new(),
            expires: BTreeSet::new(),
            seed: [seed | 1, seed.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15],
            keys: 0,
            outside: 0,
            touched: Vec::new(),
            hidden_until: i64::MIN,
            memo: None,
            images: Vec::new(),
            hidden: None,
            hidden_keys: 0,
            hidden_expires: BTreeSet::new(),
            access_now: 0,
            lfu: None,
            functions: crate::functions::Functions::default(),
            garbage: Vec::new(),
        }
    }

    /// Hash slot and hash of a key.
    pub fn id_of(&self, key: &[u8]) -> KeyId {
        if let Some((at, len, id)) = self.memo
            && at == key.as_ptr() as usize
            && len == key.len()
        {
            return id;
        }
        KeyId { slot: slot_of(key), hash: hash(key, self.seed) }
    }

    /// Caches the id of this very slice until [`Keyspace::clear_cached_id`].
    pub fn cache_id(&mut self, key: &[u8], id: KeyId) {
        self.memo = Some((key.as_ptr() as usize, key.len(), id));
    }

    /// Clears the cache of [`Keyspace::cache_id`].
    pub fn clear_cached_id(&mut self) {
        self.memo = None;
    }

    /// Prefetches the memory that lookups of these keys will access. Each lookup alone has several dependent cache
    /// misses (table, bucket, reference, page, entry); independent lookups overlap theirs. Changes nothing.
    pub(crate) fn prefetch(&self, ids: &[KeyId]) {
        // Each step runs for all keys before the next step: a step depends on the memory that the previous one
        // loaded.
        let mut seen = 0;
        for id in ids {
            seen ^= self.index.prefetch(id.slot, id.hash);
        }
        std::hint::black_box(seen);
        let mut guesses = [Ref::NONE; PREFETCH_KEYS];
        for (guess, id) in guesses.iter_mut().zip(ids) {
            *guess = self.index.guess(id.slot, id.hash);
        }
        self.prefetch_entries(&guesses);
    }

    /// Prefetches entries together.
    fn prefetch_entries(&self, entries: &[Ref]) {
        let mut seen = 0;
        for at in entries.iter().filter(|at| **at != Ref::NONE) {
            let entry = self.arena.bytes(*at);
            seen ^= entry[0] ^ entry[entry.len() - 1];
        }
        std::hint::black_box(seen);
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys - self.hidden_keys
    }

    /// True if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of keys with an expire time.
    pub fn expiring(&self) -> usize {
        self.expires.len()
    }

    /// Average TTL in milliseconds, sampled from the keys that expire first and last.
    pub fn average_ttl(&self, now: i64) -> i64 {
        let (first, last) = (self.expires.first(), self.expires.last());
        match (first, last) {
            (Some(first), Some(last)) => ((first.0 - now).max(0) + (last.0 - now).max(0)) / 2,
            _ => 0,
        }
    }

    /// Number of keys in a slot.
    pub fn slot_len(&self, slot: u16) -> usize {
        if self.is_hidden(slot) { 0 } else { self.index.len(slot) }
    }

    /// Memory used by keys and values, in bytes.
    pub fn memory(&self) -> usize {
        self.arena.used_bytes()
            + self.index.bytes()
            + self.outside
            + (self.expires.len() + self.hidden_expires.len()) * 24
    }

    /// Memory allocated for entries, used or not.
    pub fn held_bytes(&self) -> usize {
        self.arena.held_bytes() + self.index.taken() + self.outside
    }

    /// Sets the clock for access times (LRU), in seconds.
    pub fn set_access_clock(&mut self, seconds: u32) {
        self.access_now = seconds & 0xff_ffff;
        if let Some(lfu) = &mut self.lfu {
            lfu.set_clock(seconds);
        }
    }

    /// Switches between LFU counters and, with `None`, access times (LRU).
    pub(crate) fn set_lfu(&mut self, lfu: Option<Lfu>) {
        self.lfu = lfu;
    }

    /// LFU frequency of a key, under an LFU policy: logarithmic in the number of accesses, decaying with time.
    pub fn frequency(&self, key: &[u8]) -> Option<u8> {
        let note = self.access(key)?;
        self.lfu.as_ref().map(|lfu| lfu.frequency(note))
    }

    /// Sets the LFU frequency of a key.
    pub(crate) fn set_frequency(&mut self, key: &[u8], frequency: u8) {
        if let Some(lfu) = &self.lfu {
            let note = lfu.note(frequency);
            self.set_access(key, note);
        }
    }

    /// Hides keys that expire at or before `until` from lookups.
    pub(crate) fn hide_expired(&mut self, until: i64) {
        self.hidden_until = until;
    }

    fn find(&self, id: KeyId, key: &[u8]) -> Option<(Place, Ref)> {
        let found = self.index.find(id.slot, id.hash, |at| {
            let (flags, stored) = entry::key_of(self.arena.bytes(at));
            if flags & LONG_KEY == 0 {
                stored == key
            } else {
                **self.long_keys.get(entry::number(stored, 0)) == *key
            }
        })?;
        if self.hidden_until > i64::MIN
            && entry::expiry_of(self.arena.bytes(found.1)).is_some_and(|at| at <= self.hidden_until)
        {
            return None;
        }
        Some(found)
    }

    fn item(&self, at: Ref) -> Item<'_> {
        let bytes = self.arena.bytes(at);
        let head = entry::parse(bytes);
        if head.is_outside() {
            match self.values.get(entry::number(bytes, head.value.0)) {
                Value::Str(string) => Item::Str(string),
                value => Item::Value(value),
            }
        } else {
            Item::Str(&bytes[head.value.0..head.value.1])
        }
    }

    fn expiry_at(&self, at: Ref) -> Option<i64> {
        entry::expiry_of(self.arena.bytes(at))
    }

    fn key_at(&self, at: Ref) -> &[u8] {
        let (flags, stored) = entry::key_of(self.arena.bytes(at));
        if flags & LONG_KEY == 0 { stored } else { self.long_keys.get(entry::number(stored, 0)) }
    }

    /// True if the key exists.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.find(self.id_of(key), key).is_some()
    }

    /// The value of a key.
    pub fn get(&self, key: &[u8]) -> Option<Item<'_>> {
        self.find(self.id_of(key), key).map(|(_, at)| self.item(at))
    }

    /// The value of a key; updates its access information for eviction.
    pub fn touch(&mut self, key: &[u8]) -> Option<Item<'_>> {
        let (_, at) = self.find(self.id_of(key), key)?;
        if let Some(lfu) = &mut self.lfu {
            let entry = self.arena.bytes_mut(at);
            entry::set_access(entry, lfu.touch(entry::access(entry)));
        } else if self.access_now != 0 {
            entry::set_access(self.arena.bytes_mut(at), self.access_now);
        }
        Some(self.item(at))
    }

    /// The access information (LRU or LFU) of a key.
    pub fn access(&self, key: &[u8]) -> Option<u32> {
        self.find(self.id_of(key), key).map(|(_, at)| entry::access(self.arena.bytes(at)))
    }

    /// Sets the access information of a key.
    pub fn set_access(&mut self, key: &[u8], access: u32) {
        if let Some((_, at)) = self.find(self.id_of(key), key) {
            entry::set_access(self.arena.bytes_mut(at), access);
        }
    }

    /// True if a small string was ever modified in place (`OBJECT ENCODING` then reports `raw`).
    pub fn is_raw(&self, key: &[u8]) -> bool {
        self.find(self.id_of(key), key)
            .is_some_and(|(_, at)| entry::parse(self.arena.bytes(at)).flags & RAW != 0)
    }

    /// A value other than a string, for modification. The expire time stays.
    pub fn value_mut(&mut self, key: &[u8]) -> Option<&mut Value> {
        let id = self.id_of(key);
        self.before_change(id.slot);
        let (_, at) = self.find(id, key)?;
        let bytes = self.arena.bytes(at);
        let head = entry::parse(bytes);
        if !head.is_outside() {
            return None;
        }
        let number = entry::number(bytes, head.value.0);
        if self.touched.last() != Some(&number) {
            self.touched.push(number);
        }
        match self.values.get_mut(number) {
            Value::Str(_) => None,
            value => Some(value),
        }
    }

    /// Sets a string and replaces the previous value and expire time.
    pub fn set_str(&mut self, key: &[u8], value: &[u8], expires_at: Option<i64>) {
        self.put_str(key, value, expires_at, 0);
    }

    fn put_str(&mut self, key: &[u8], value: &[u8], expires_at: Option<i64>, flags: u8) {
        let overhead = 4 + 2 + 8 + 2;
        if key.len().min(MAX_KEY) + value.len() + overhead > MAX_ENTRY {
            self.put(key, Value::Str(value.to_vec()), expires_at);
            return;
        }
        let id = self.id_of(key);
        let found = self.find(id, key);
        self.write(id, found, key, flags, expires_at, value);
    }

    /// Replaces a value by a number computed from it. The expire time stays. One lookup.
    pub fn put_number<E>(
        &mut self,
        key: &[u8],
        make: impl FnOnce(Option<Item<'_>>) -> Result<i64, E>,
    ) -> Result<i64, E> {
        let id = self.id_of(key);
        let found = self.find(id, key);
        let number = make(found.map(|(_, at)| self.item(at)))?;
        let expires_at = found.and_then(|(_, at)| self.expiry_at(at));
        self.write(id, found, key, 0, expires_at, Decimal::new(number).as_bytes());
        Ok(number)
    }

    /// Sets a value and replaces the previous value and expire time.
    pub fn put(&mut self, key: &[u8], value: Value, expires_at: Option<i64>) {
        let id = self.id_of(key);
        let found = self.find(id, key);
        let bytes = value.memory();
        self.outside += bytes;
        let number = self.values.insert(value, bytes);
        self.write(id, found, key, OUTSIDE, expires_at, &number.to_le_bytes());
    }

    /// Inserts a value returned by [`Keyspace::take`] or a copy.
    pub fn put_owned(&mut self, key: &[u8], owned: Owned, expires_at: Option<i64>) {
        match owned {
            Owned::Str(string) => self.set_str(key, &string, expires_at),
            Owned::Value(value) => self.put(key, value, expires_at),
        }
    }

    /// Modifies a string in place; a missing one is created empty. The expire time stays. Not for keys of other
    /// types.
    pub fn edit_str<T>(&mut self, key: &[u8], edit: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let id = self.id_of(key);
        let Some((_, at)) = self.find(id, key) else {
            let mut string = Vec::new();
            let done = edit(&mut string);
            self.put_str(key, &string, None, RAW);
            return done;
        };
        let bytes = self.arena.bytes(at);
        let head = entry::parse(bytes);
        if head.is_outside() {
            let number = entry::number(bytes, head.value.0);
            self.before_change(id.slot);
            self.touched.push(number);
            if let Value::Str(string) = self.values.get_mut(number) {
                return edit(string);
            }
            let done = edit(&mut Vec::new());
            debug_assert!(false, "only strings are edited as strings");
            return done;
        }
        let mut string = bytes[head.value.0..head.value.1].to_vec();
        let done = edit(&mut string);
        self.put_str(key, &string, head.expires_at, RAW);
        done
    }

    fn write(
        &mut self,
        id: KeyId,
        found: Option<(Place, Ref)>,
        key: &[u8],
        flags: u8,
        expires_at: Option<i64>,
        value: &[u8],
    ) {
        self.before_change(id.slot);
        let mut number = [0; 4];
        let access = match (&mut self.lfu, &found) {
            (None, _) => self.access_now,
            (Some(lfu), None) => lfu.new_note(),
            (Some(lfu), Some((_, at))) => lfu.touch(entry::access(self.arena.bytes(*at))),
        };
        let mut parts = Parts { flags, access, expires_at, key, value };
        let Some((place, old)) = found else {
            if key.len() > MAX_KEY {
                self.outside += key.len();
                number = self.long_keys.insert(key.into(), key.len()).to_le_bytes();
                parts.flags |= LONG_KEY;
                parts.key = &number;
            }
            let at = self.alloc(parts.len());
            parts.write(self.arena.bytes_mut(at));
            self.insert(id, at);
            if let Some(expires_at) = expires_at {
                self.expires_of(id.slot).insert((expires_at, at));
            }
            return;
        };
        let head = entry::parse(self.arena.bytes(old));
        if head.is_outside() {
            let number = entry::number(self.arena.bytes(old), head.value.0);
            // The same value with a new expire time keeps its number.
            if !(flags & OUTSIDE != 0 && value == number.to_le_bytes()) {
                self.drop_value(number);
            }
        }
        if head.flags & LONG_KEY != 0 {
            number.copy_from_slice(&self.arena.bytes(old)[head.key.0..head.key.1]);
            parts.flags |= LONG_KEY;
            parts.key = &number;
        }
        let (old_len, new_len) = (head.len(), parts.len());
        let at = if Arena::same_class(old_len, new_len) {
            old
        } else {
            let at = self.alloc(new_len);
            self.arena.free(old);
            self.index.replace(id.slot, place, at);
            at
        };
        parts.write(self.arena.bytes_mut(at));
        if at != old || head.expires_at != expires_at {
            if let Some(expired_at) = head.expires_at {
                self.expires_of(id.slot).remove(&(expired_at, old));
            }
            if let Some(expires_at) = expires_at {
                self.expires_of(id.slot).insert((expires_at, at));
            }
        }
    }

    fn alloc(&mut self, len: usize) -> Ref {
        // maxmemory is far lower; a process of this size would have been killed by the OOM killer.
        self.arena.alloc(len).expect("a keyspace holds at most 32 GiB of small entries")
    }

    fn insert(&mut self, id: KeyId, at: Ref) {
        let (arena, long_keys, seed) = (&self.arena, &self.long_keys, self.seed);
        self.index.insert(id.slot, id.hash, at, |r| hash_at(arena, long_keys, seed, r));
        self.keys += 1;
        self.hidden_keys += usize::from(self.is_hidden(id.slot));
    }

    fn drop_value(&mut self, number: u32) {
        let (value, bytes) = self.values.remove(number);
        self.outside -= bytes;
        if value.elements() > LAZY_FREE {
            self.garbage.push(value);
        }
    }

    /// Deletes a key. Returns whether it existed.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let id = self.id_of(key);
        let Some((place, at)) = self.find(id, key) else { return false };
        self.before_change(id.slot);
        let head = entry::parse(self.arena.bytes(at));
        if head.is_outside() {
            let number = entry::number(self.arena.bytes(at), head.value.0);
            self.drop_value(number);
        }
        self.unlink(id, place, at);
        true
    }

    /// Removes a key and returns its value and expire time.
    pub fn take(&mut self, key: &[u8]) -> Option<(Owned, Option<i64>)> {
        let id = self.id_of(key);
        let (place, at) = self.find(id, key)?;
        self.before_change(id.slot);
        let bytes = self.arena.bytes(at);
        let head = entry::parse(bytes);
        let owned = if head.is_outside() {
            let number = entry::number(bytes, head.value.0);
            let (value, bytes) = self.values.remove(number);
            self.outside -= bytes;
            match value {
                Value::Str(string) => Owned::Str(string),
                value => Owned::Value(value),
            }
        } else {
            Owned::Str(bytes[head.value.0..head.value.1].to_vec())
        };
        self.unlink(id, place, at);
        Some((owned, head.expires_at))
    }

    fn unlink(&mut self, id: KeyId, place: Place, at: Ref) {
        let head = entry::parse(self.arena.bytes(at));
        if let Some(expires_at) = head.expires_at {
            self.expires_of(id.slot).remove(&(expires_at, at));
        }
        let (arena, long_keys, seed) = (&self.arena, &self.long_keys, self.seed);
        self.index.remove(id.slot, id.hash, place, |r| hash_at(arena, long_keys, seed, r));
        if head.flags & LONG_KEY != 0 {
            let number = entry::number(self.arena.bytes(at), head.key.0);
            let (_, bytes) = self.long_keys.remove(number);
            self.outside -= bytes;
        }
        self.arena.free(at);
        self.keys -= 1;
        self.hidden_keys -= usize::from(self.is_hidden(id.slot));
    }

    /// Expire time of a key; `None` if it does not exist, `Some(None)` if it is persistent.
    pub fn expiry(&self, key: &[u8]) -> Option<Option<i64>> {
        self.find(self.id_of(key), key).map(|(_, at)| entry::expiry_of(self.arena.bytes(at)))
    }

    /// Sets or clears the expire time of an existing key. Returns whether it exists.
    pub fn set_expiry(&mut self, key: &[u8], expires_at: Option<i64>) -> bool {
        let id = self.id_of(key);
        let Some((place, at)) = self.find(id, key) else { return false };
        let bytes = self.arena.bytes(at);
        let head = entry::parse(bytes);
        if head.expires_at != expires_at {
            let value = bytes[head.value.0..head.value.1].to_vec();
            self.write(id, Some((place, at)), key, head.flags & (OUTSIDE | RAW), expires_at, &value);
        }
        true
    }

    /// The earliest expire time.
    pub fn next_expiry(&self) -> Option<i64> {
        self.expires.first().map(|(at, _)| *at)
    }

    /// The key with the earliest expire time, if it is due at `now`.
    pub fn first_expired(&self, now: i64) -> Option<&[u8]> {
        self.expires.first().filter(|(at, _)| *at <= now).map(|(_, at)| self.key_at(*at))
    }

    /// The key with the earliest expire time.
    pub fn next_to_expire(&self) -> Option<&[u8]> {
        self.expires.first().map(|(_, at)| self.key_at(*at))
    }

    /// Deletes all keys. Values that are expensive to free are returned by [`Keyspace::take_garbage`].
    pub fn clear(&mut self) {
        if self.hidden.is_some() {
            // Slots that are being imported are not part of this keyspace yet and stay.
            for slot in 0..SLOTS as u16 {
                if !self.is_hidden(slot) {
                    self.clear_slot(slot);
                }
            }
            return;
        }
        self.before_clear();
        let seed = self.seed[0];
        let mut old = std::mem::replace(self, Self::new(seed));
        (self.access_now, self.lfu) = (old.access_now, old.lfu.take());
        self.garbage = std::mem::take(&mut old.garbage);
        self.functions = std::mem::take(&mut old.functions);
        self.images = std::mem::take(&mut old.images);
        self.garbage.extend(old.values.items.drain(..).filter_map(|(value, _)| value));
    }

    /// Values to be freed lazily, outside the shard's lock.
    pub fn take_garbage(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.garbage)
    }

    /// Updates the memory accounting of values that were modified in place.
    pub fn settle(&mut self) {
        while let Some(number) = self.touched.pop() {
            if let Some((Some(value), bytes)) = self.values.items.get_mut(number as usize) {
                let now = value.memory();
                self.outside = self.outside + now - *bytes;
                *bytes = now;
            }
        }
    }

    /// Up to `most` keys of one slot (CLUSTER GETKEYSINSLOT).
    pub fn keys_in_slot(&self, slot: u16, most: usize) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        if self.is_visible(slot) {
            let mut at = Some(0);
            while let Some(position) = at.filter(|_| keys.len() < most) {
                at = self.index.scan(slot, position, |entry| {
                    if keys.len() < most {
                        keys.push(self.key_at(entry).to_vec());
                    }
                });
            }
        }
        keys
    }

    /// One SCAN step: visits the keys of one group and returns the cursor of the next; 0 at the end.
    ///
    /// A cursor is the slot in the lower 14 bits and the upper 50 bits of the position in that slot's table.
    pub fn scan(&self, cursor: u64, mut visit: impl FnMut(&[u8], Item<'_>, Option<i64>)) -> u64 {
        let (from, mut position) = ((cursor & 0x3fff) as u16, cursor & !0x3fff);
        let mut slots = (from..SLOTS as u16).filter(|slot| self.is_visible(*slot));
        let Some(slot) = slots.next() else { return 0 };
        if slot != from {
            position = 0;
        }
        let next = self.index.scan(slot, position, |at| {
            let expires_at = entry::expiry_of(self.arena.bytes(at));
            visit(self.key_at(at), self.item(at), expires_at);
        });
        match next {
            // Positions advance by powers of two; a table would need 2^47 buckets to lose a bit here.
            Some(next) => next & !0x3fff | u64::from(slot),
            None => slots.next().map_or(0, u64::from),
        }
    }

    /// Visits every key with its value and expire time.
    pub fn for_each(&self, mut visit: impl FnMut(&[u8], Item<'_>, Option<i64>)) {
        for slot in (0..SLOTS as u16).filter(|slot| self.is_visible(*slot)) {
            self.index.for_each(slot, |at| visit(self.key_at(at), self.item(at), self.expiry_at(at)));
        }
    }

    /// A random key, selected by `random_below(n)`, which returns a number below n.
    pub fn random_key(&self, mut random_below: impl FnMut(usize) -> usize) -> Option<&[u8]> {
        if self.is_empty() {
            return None;
        }
        let start = random_below(SLOTS) as u16;
        let slot = (start..SLOTS as u16).chain(0..start).find(|slot| self.is_visible(*slot))?;
        self.index.pick(slot, random_below).map(|at| self.key_at(at))
    }

    /// A random key of a slot.
    pub(crate) fn random_key_of(&self, slot: u16, random_below: impl FnMut(usize) -> usize) -> Option<&[u8]> {
        if !self.is_visible(slot) {
            return None;
        }
        self.index.pick(slot, random_below).map(|at| self.key_at(at))
    }

    /// The nth key in order of expire time. Linear in n.
    pub(crate) fn nth_expiring(&self, nth: usize) -> Option<&[u8]> {
        self.expires.iter().nth(nth).map(|(_, at)| self.key_at(*at))
    }

    /// Total memory of a key and its value (MEMORY USAGE).
    pub fn memory_of(&self, key: &[u8]) -> Option<usize> {
        let (_, at) = self.find(self.id_of(key), key)?;
        let bytes = self.arena.bytes(at);
        let head = entry::parse(bytes);
        let outside =
            if head.is_outside() { self.values.get(entry::number(bytes, head.value.0)).memory() } else { 0 };
        let long = if head.flags & LONG_KEY != 0 { key.len() } else { 0 };
        let expiry = if head.flags & EXPIRES != 0 { 24 } else { 0 };
        Some(bytes.len() + outside + long + expiry + 8)
    }
}

fn hash_at(arena: &Arena, long_keys: &Slab<Box<[u8]>>, seed: [u64; 2], at: Ref) -> u64 {
    let (flags, stored) = entry::key_of(arena.bytes(at));
    if flags & LONG_KEY == 0 {
        hash(stored, seed)
    } else {
        hash(long_keys.get(entry::number(stored, 0)), seed)
    }
}

/// A seeded hash of short strings: eight bytes at a time, each mixed by a wide multiplication.
fn hash(bytes: &[u8], seed: [u64; 2]) -> u64 {
    let fold = |a: u64, b: u64| {
        let wide = u128::from(a) * u128::from(b);
        (wide as u64) ^ (wide >> 64) as u64
    };
    let mut state = seed[0] ^ bytes.len() as u64;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
        state = fold(state ^ word, seed[1] ^ 0xa076_1d64_78bd_642f);
    }
    let rest = chunks.remainder();
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        state = fold(state ^ u64::from_le_bytes(last), seed[1] ^ 0xe703_7ed1_a0b4_28db);
    }
    fold(state ^ 0x8ebc_6af0_9c88_c6e3, seed[1])
}

#[cfg(test)]
mod tests;
