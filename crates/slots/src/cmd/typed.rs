//! Typed access to values: read, modify, create, and delete the key of an empty collection.
//!
//! The functions borrow only the keyspace, so that a command can write its reply while it reads a value.

use crate::ctx::Ctx;
use crate::error::Error;
use crate::keyspace::{Item, Keyspace};
use crate::value::Value;
use crate::value::hash::Hash;
use crate::value::limits::Limits;
use crate::value::list::List;
use crate::value::set::Set;
use crate::value::stream::Stream;
use crate::value::zset::Zset;

/// A value type.
pub(crate) trait Typed: Default {
    fn of(value: &Value) -> Option<&Self>;
    fn of_mut(value: &mut Value) -> Option<&mut Self>;
    fn into_value(self) -> Value;
    fn is_empty_collection(&self) -> bool;
}

macro_rules! typed {
    ($($name:ident)*) => {$(
        impl Typed for $name {
            fn of(value: &Value) -> Option<&Self> {
                if let Value::$name(value) = value { Some(value) } else { None }
            }

            fn of_mut(value: &mut Value) -> Option<&mut Self> {
                if let Value::$name(value) = value { Some(value) } else { None }
            }

            fn into_value(self) -> Value {
                Value::$name(self)
            }

            fn is_empty_collection(&self) -> bool {
                self.is_empty()
            }
        }
    )*};
}

typed!(Hash List Set Zset);

impl Typed for Stream {
    fn of(value: &Value) -> Option<&Self> {
        if let Value::Stream(stream) = value { Some(stream) } else { None }
    }

    fn of_mut(value: &mut Value) -> Option<&mut Self> {
        if let Value::Stream(stream) = value { Some(stream) } else { None }
    }

    fn into_value(self) -> Value {
        Value::Stream(Box::new(self))
    }

    /// An empty stream still exists: it has groups and a last id.
    fn is_empty_collection(&self) -> bool {
        false
    }
}

/// The value at a key, for reading; updates its access information.
pub(crate) fn get<'d, T: Typed>(db: &'d mut Keyspace, key: &[u8]) -> Result<Option<&'d T>, Error> {
    of_item(db.touch(key))
}

/// The value at a key without updating its access information, so that several values can be borrowed together.
pub(crate) fn peek<'d, T: Typed>(db: &'d Keyspace, key: &[u8]) -> Result<Option<&'d T>, Error> {
    of_item(db.get(key))
}

/// The string at a key, without updating its access information.
pub(crate) fn peek_string<'d>(db: &'d Keyspace, key: &[u8]) -> Result<Option<&'d [u8]>, Error> {
    match db.get(key) {
        None => Ok(None),
        Some(Item::Str(string)) => Ok(Some(string)),
        Some(Item::Value(_)) => Err(Error::WRONG_TYPE),
    }
}

fn of_item<T: Typed>(item: Option<Item<'_>>) -> Result<Option<&T>, Error> {
    match item {
        None => Ok(None),
        Some(Item::Str(_)) => Err(Error::WRONG_TYPE),
        Some(Item::Value(value)) => T::of(value).map(Some).ok_or(Error::WRONG_TYPE),
    }
}

/// The value at a key, for modification.
pub(crate) fn get_mut<'d, T: Typed>(db: &'d mut Keyspace, key: &[u8]) -> Result<Option<&'d mut T>, Error> {
    if get::<T>(db, key)?.is_none() {
        return Ok(None);
    }
    match db.value_mut(key) {
        Some(value) => T::of_mut(value).map(Some).ok_or(Error::WRONG_TYPE),
        None => Ok(None),
    }
}

/// The value at a key, created empty if missing. The caller must add an element.
pub(crate) fn create<'d, T: Typed>(db: &'d mut Keyspace, key: &[u8]) -> Result<&'d mut T, Error> {
    if get::<T>(db, key)?.is_none() {
        db.put(key, T::default().into_value(), None);
    }
    db.value_mut(key).and_then(T::of_mut).ok_or(Error::WRONG_TYPE)
}

impl Ctx<'_> {
    /// Limits of the compact encodings.
    pub(crate) fn limits(&self) -> Limits {
        self.shared.settings.limits()
    }

    /// Deletes the key if its value became empty. Returns whether it did.
    pub(crate) fn drop_if_empty<T: Typed>(&mut self, key: &[u8]) -> bool {
        matches!(peek::<T>(self.db, key), Ok(Some(value)) if value.is_empty_collection()) && self.delete(key)
    }

    /// Replaces the value at a key, or deletes the key if the value is empty. Returns whether a value exists now.
    pub(crate) fn store<T: Typed>(&mut self, key: &[u8], value: T, class: u32, event: &'static str) -> bool {
        if value.is_empty_collection() {
            self.delete(key);
            return false;
        }
        self.db.put(key, value.into_value(), None);
        self.changed_with(key, class, event);
        true
    }
}

/// Resolves `start` and `stop`, negative ones from the end, to a range of ranks below `len`.
pub(crate) fn rank_range(start: i64, stop: i64, len: usize) -> std::ops::Range<usize> {
    let len = len as i64;
    let from_end = |index: i64| if index < 0 { len.saturating_add(index) } else { index };
    let (start, stop) = (from_end(start).max(0), from_end(stop).min(len - 1));
    if start > stop { 0..0 } else { start as usize..stop as usize + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_ranges_resolve_negative_indexes() {
        for (start, stop, len, range) in [
            (0, -1, 3, 0..3),
            (-2, -1, 3, 1..3),
            (-100, 100, 3, 0..3),
            (2, 1, 3, 0..0),
            (3, 5, 3, 0..0),
            (0, -4, 3, 0..0),
            (0, -1, 0, 0..0),
            (i64::MIN, i64::MAX, 2, 0..2),
        ] {
            assert_eq!(rank_range(start, stop, len), range, "{start} {stop} {len}");
        }
    }
}
