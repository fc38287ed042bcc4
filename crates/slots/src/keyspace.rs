//! The keys of a shard and their values, in memory.
//!
//! Pure: no clock, no I/O, no locks; time is an argument. An entry (key, expiry, and the value when it is a small
//! string) is one allocation in the [`arena`]; the [`index`] finds it; what is too large or is no string is a
//! [`Value`] beside. Expiries are ordered in a set of their own, so that expiring costs what expires.
//!
//! Invariants: `expires` holds exactly the entries that have an expiry; `memory` is the sum of what the parts say.
//! It never deletes an expired key by itself: that is an effect, and the caller's.

pub(crate) mod arena;
mod aside;
pub(crate) mod entry;
pub(crate) mod image;
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

/// Where a key belongs: its slot and its hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyId {
    /// 0 to 16383.
    pub slot: u16,
    /// Seeded per process.
    pub hash: u64,
}

/// What a key holds.
#[derive(Clone, Copy)]
pub enum Item<'a> {
    /// A string.
    Str(&'a [u8]),
    /// Anything else; never [`Value::Str`].
    Value(&'a Value),
}

/// A value taken out of the keyspace, or on its way in.
#[derive(Clone)]
pub enum Owned {
    /// A string.
    Str(Vec<u8>),
    /// Anything else.
    Value(Value),
}

/// The keys of one shard.
pub struct Keyspace {
    index: Index,
    arena: Arena,
    values: Slab<Value>,
    long_keys: Slab<Box<[u8]>>,
    expires: BTreeSet<(i64, Ref)>,
    seed: [u64; 2],
    keys: usize,
    /// Bytes of what lives outside the arena.
    outside: usize,
    touched: Vec<u32>,
    /// Entries that expire at or before this are not seen. Set for reads on replicas, which must not delete.
    hidden_until: i64,
    memo: Option<(usize, usize, KeyId)>,
    images: Vec<image::Image>,
    hidden: Option<SlotSet>,
    hidden_keys: usize,
    hidden_expires: BTreeSet<(i64, Ref)>,
    access_now: u32,
    /// Set while the policy of eviction counts how often keys are used.
    lfu: Option<Lfu>,
    /// The libraries of functions.
    pub functions: crate::functions::Functions,
    /// Values whose memory takes long to give back; whoever owns the keyspace drops them elsewhere.
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

/// Keys that are looked for at once.
pub(crate) const LOOK_AHEAD: usize = 32;

/// A value with more elements than this is given back elsewhere.
const LAZY_FREE: usize = 64;

impl Keyspace {
    /// An empty keyspace; the seed keeps strangers from choosing keys that collide.
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

    /// Where a key belongs.
    pub fn id_of(&self, key: &[u8]) -> KeyId {
        if let Some((at, len, id)) = self.memo
            && at == key.as_ptr() as usize
            && len == key.len()
        {
            return id;
        }
        KeyId { slot: slot_of(key), hash: hash(key, self.seed) }
    }

    /// Saves computing it again for this very slice, until [`Keyspace::forget`].
    pub fn remember(&mut self, key: &[u8], id: KeyId) {
        self.memo = Some((key.as_ptr() as usize, key.len(), id));
    }

    /// See [`Keyspace::remember`].
    pub fn forget(&mut self) {
        self.memo = None;
    }

    /// Brings what these keys need from memory, all of it at once: each lookup alone waits several times, for the table, its
    /// piece, the reference in it, the page and the entry, and nothing else can be done meanwhile. Lookups that do not depend
    /// on each other wait together. Changes nothing.
    pub(crate) fn look_ahead(&self, ids: &[KeyId]) {
        // One step for all before the next for any: a step decides by what the one before brought.
        let mut seen = 0;
        for id in ids {
            seen ^= self.index.touch(id.slot, id.hash);
        }
        std::hint::black_box(seen);
        let mut guesses = [Ref::NONE; LOOK_AHEAD];
        for (guess, id) in guesses.iter_mut().zip(ids) {
            *guess = self.index.guess(id.slot, id.hash);
        }
        self.bring(&guesses);
    }

    /// Brings entries from memory, all of them at once.
    fn bring(&self, entries: &[Ref]) {
        let mut seen = 0;
        for at in entries.iter().filter(|at| **at != Ref::NONE) {
            let entry = self.arena.bytes(*at);
            seen ^= entry[0] ^ entry[entry.len() - 1];
        }
        std::hint::black_box(seen);
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.keys - self.hidden_keys
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many keys expire one day.
    pub fn expiring(&self) -> usize {
        self.expires.len()
    }

    /// Mean time to live, in milliseconds, over a few of those that expire next and last.
    pub fn average_ttl(&self, now: i64) -> i64 {
        let (first, last) = (self.expires.first(), self.expires.last());
        match (first, last) {
            (Some(first), Some(last)) => ((first.0 - now).max(0) + (last.0 - now).max(0)) / 2,
            _ => 0,
        }
    }

    /// How many keys a slot has.
    pub fn slot_len(&self, slot: u16) -> usize {
        if self.is_hidden(slot) { 0 } else { self.index.len(slot) }
    }

    /// Bytes in use for keys and values.
    pub fn memory(&self) -> usize {
        self.arena.used_bytes()
            + self.index.bytes()
            + self.outside
            + (self.expires.len() + self.hidden_expires.len()) * 24
    }

    /// Bytes the machine gave for entries, used or not.
    pub fn held_bytes(&self) -> usize {
        self.arena.held_bytes() + self.index.taken() + self.outside
    }

    /// The seconds that are noted at each access.
    pub fn set_access_clock(&mut self, seconds: u32) {
        self.access_now = seconds & 0xff_ffff;
        if let Some(lfu) = &mut self.lfu {
            lfu.set_clock(seconds);
        }
    }

    /// Notes how often keys are used instead of when; `None` stops that.
    pub(crate) fn set_lfu(&mut self, lfu: Option<Lfu>) {
        self.lfu = lfu;
    }

    /// How often a key was used, if that is noted: grows with the logarithm of accesses, and shrinks with time.
    pub fn frequency(&self, key: &[u8]) -> Option<u8> {
        let note = self.access(key)?;
        self.lfu.as_ref().map(|lfu| lfu.frequency(note))
    }

    /// The note that makes a key look as often used as this.
    pub(crate) fn set_frequency(&mut self, key: &[u8], frequency: u8) {
        if let Some(lfu) = &self.lfu {
            let note = lfu.note(frequency);
            self.set_access(key, note);
        }
    }

    /// Hides what has expired by then from lookups.
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

    /// Whether the key is there.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.find(self.id_of(key), key).is_some()
    }

    /// What the key holds.
    pub fn get(&self, key: &[u8]) -> Option<Item<'_>> {
        self.find(self.id_of(key), key).map(|(_, at)| self.item(at))
    }

    /// The same, and the access is noted for eviction.
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

    /// The access note of a key.
    pub fn access(&self, key: &[u8]) -> Option<u32> {
        self.find(self.id_of(key), key).map(|(_, at)| entry::access(self.arena.bytes(at)))
    }

    /// Sets the access note of a key.
    pub fn set_access(&mut self, key: &[u8], access: u32) {
        if let Some((_, at)) = self.find(self.id_of(key), key) {
            entry::set_access(self.arena.bytes_mut(at), access);
        }
    }

    /// Whether a small string was ever changed in place (`OBJECT ENCODING` says `raw`).
    pub fn is_raw(&self, key: &[u8]) -> bool {
        self.find(self.id_of(key), key)
            .is_some_and(|(_, at)| entry::parse(self.arena.bytes(at)).flags & RAW != 0)
    }

    /// A value that is no string, to change it. The expiry stays.
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

    /// Puts a string there, in place of whatever there was. The expiry becomes `expires_at`.
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

    /// Puts a number there that is made from what there was. The expiry stays. Looks the key up once.
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

    /// Puts a value there, in place of whatever there was. The expiry becomes `expires_at`.
    pub fn put(&mut self, key: &[u8], value: Value, expires_at: Option<i64>) {
        let id = self.id_of(key);
        let found = self.find(id, key);
        let bytes = value.memory();
        self.outside += bytes;
        let number = self.values.insert(value, bytes);
        self.write(id, found, key, OUTSIDE, expires_at, &number.to_le_bytes());
    }

    /// Puts back what [`Keyspace::take`] or a copy gave.
    pub fn put_owned(&mut self, key: &[u8], owned: Owned, expires_at: Option<i64>) {
        match owned {
            Owned::Str(string) => self.set_str(key, &string, expires_at),
            Owned::Value(value) => self.put(key, value, expires_at),
        }
    }

    /// Changes a string; a missing one is empty. The expiry stays. Not for keys that hold something else.
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
            // The same value under a new expiry keeps its number.
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
        // maxmemory is far below; a process that gets here would have been killed for its memory.
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

    /// Forgets a key. Answers whether it was there.
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

    /// Takes a value out, with its expiry.
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

    /// When the key expires; `None` when it is not there, `Some(None)` when it stays.
    pub fn expiry(&self, key: &[u8]) -> Option<Option<i64>> {
        self.find(self.id_of(key), key).map(|(_, at)| entry::expiry_of(self.arena.bytes(at)))
    }

    /// Sets or clears the expiry of a key that is there. Answers whether it is.
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

    /// The moment the next key expires.
    pub fn next_expiry(&self) -> Option<i64> {
        self.expires.first().map(|(at, _)| *at)
    }

    /// The key that expires next, if it has by `now`.
    pub fn first_expired(&self, now: i64) -> Option<&[u8]> {
        self.expires.first().filter(|(at, _)| *at <= now).map(|(_, at)| self.key_at(*at))
    }

    /// The key that expires next.
    pub fn next_to_expire(&self) -> Option<&[u8]> {
        self.expires.first().map(|(_, at)| self.key_at(*at))
    }

    /// Forgets every key. What took long to free is handed to [`Keyspace::take_garbage`].
    pub fn clear(&mut self) {
        if self.hidden.is_some() {
            // What is on its way here is not ours to forget.
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

    /// Values to be dropped where that harms nobody.
    pub fn take_garbage(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.garbage)
    }

    /// Brings the account of memory up to date with values that were changed in place.
    pub fn settle(&mut self) {
        while let Some(number) = self.touched.pop() {
            if let Some((Some(value), bytes)) = self.values.items.get_mut(number as usize) {
                let now = value.memory();
                self.outside = self.outside + now - *bytes;
                *bytes = now;
            }
        }
    }

    /// Shows keys of one slot, up to `most`.
    pub fn keys_in_slot(&self, slot: u16, most: usize) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        if self.is_seen(slot) {
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

    /// One step of a scan: shows the keys of a group of a table and gives the cursor of the next; 0 when it was the last.
    ///
    /// A cursor is the slot in its lower 14 bits and the upper 50 bits of the position in that slot's table.
    pub fn scan(&self, cursor: u64, mut show: impl FnMut(&[u8], Item<'_>, Option<i64>)) -> u64 {
        let (from, mut position) = ((cursor & 0x3fff) as u16, cursor & !0x3fff);
        let mut slots = (from..SLOTS as u16).filter(|slot| self.is_seen(*slot));
        let Some(slot) = slots.next() else { return 0 };
        if slot != from {
            position = 0;
        }
        let next = self.index.scan(slot, position, |at| {
            let expires_at = entry::expiry_of(self.arena.bytes(at));
            show(self.key_at(at), self.item(at), expires_at);
        });
        match next {
            // Positions step by powers of two; a table would need 2^47 pieces to lose a bit here.
            Some(next) => next & !0x3fff | u64::from(slot),
            None => slots.next().map_or(0, u64::from),
        }
    }

    /// Shows everything: key, what it holds, expiry.
    pub fn for_each(&self, mut show: impl FnMut(&[u8], Item<'_>, Option<i64>)) {
        for slot in (0..SLOTS as u16).filter(|slot| self.is_seen(*slot)) {
            self.index.for_each(slot, |at| show(self.key_at(at), self.item(at), self.expiry_at(at)));
        }
    }

    /// Some key, picked by `dice(n)`, which gives a number below n.
    pub fn random_key(&self, mut dice: impl FnMut(usize) -> usize) -> Option<&[u8]> {
        if self.is_empty() {
            return None;
        }
        let start = dice(SLOTS) as u16;
        let slot = (start..SLOTS as u16).chain(0..start).find(|slot| self.is_seen(*slot))?;
        self.index.pick(slot, dice).map(|at| self.key_at(at))
    }

    /// Some key of a slot.
    pub(crate) fn random_key_of(&self, slot: u16, dice: impl FnMut(usize) -> usize) -> Option<&[u8]> {
        if !self.is_seen(slot) {
            return None;
        }
        self.index.pick(slot, dice).map(|at| self.key_at(at))
    }

    /// The so many-th key in the order of expiry. Takes as long as there are keys before it.
    pub(crate) fn nth_expiring(&self, nth: usize) -> Option<&[u8]> {
        self.expires.iter().nth(nth).map(|(_, at)| self.key_at(*at))
    }

    /// Bytes a key and its value take, everything included.
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

/// A seeded hash of short strings: eight bytes at a time, each mixed in by a wide multiplication.
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
