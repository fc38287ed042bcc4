//! How commands reach values of their type: look, change, create, and let go what became empty.
//!
//! The functions take the keyspace alone, so that a command can write its answer while it looks at a value.

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

/// A type of value.
pub(crate) trait Typed: Default {
    fn of(value: &Value) -> Option<&Self>;
    fn of_mut(value: &mut Value) -> Option<&mut Self>;
    fn into_value(self) -> Value;
    fn has_none(&self) -> bool;
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

            fn has_none(&self) -> bool {
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

    /// A stream without entries is still one: it has groups, and a last id.
    fn has_none(&self) -> bool {
        false
    }
}

/// The value at a key, for reading; the access is noted.
pub(crate) fn get<'d, T: Typed>(db: &'d mut Keyspace, key: &[u8]) -> Result<Option<&'d T>, Error> {
    of_item(db.touch(key))
}

/// The same without noting the access, so that several values can be looked at together.
pub(crate) fn peek<'d, T: Typed>(db: &'d Keyspace, key: &[u8]) -> Result<Option<&'d T>, Error> {
    of_item(db.get(key))
}

/// The string at a key.
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

/// The value at a key, to change it.
pub(crate) fn get_mut<'d, T: Typed>(db: &'d mut Keyspace, key: &[u8]) -> Result<Option<&'d mut T>, Error> {
    if get::<T>(db, key)?.is_none() {
        return Ok(None);
    }
    match db.value_mut(key) {
        Some(value) => T::of_mut(value).map(Some).ok_or(Error::WRONG_TYPE),
        None => Ok(None),
    }
}

/// The value at a key, an empty one if there was none. The caller puts something into it.
pub(crate) fn create<'d, T: Typed>(db: &'d mut Keyspace, key: &[u8]) -> Result<&'d mut T, Error> {
    if get::<T>(db, key)?.is_none() {
        db.put(key, T::default().into_value(), None);
    }
    db.value_mut(key).and_then(T::of_mut).ok_or(Error::WRONG_TYPE)
}

impl Ctx<'_> {
    /// Up to where values keep their small forms.
    pub(crate) fn limits(&self) -> Limits {
        self.shared.settings.limits()
    }

    /// A key whose value has become empty is gone. Answers whether it is.
    pub(crate) fn drop_if_empty<T: Typed>(&mut self, key: &[u8]) -> bool {
        matches!(peek::<T>(self.db, key), Ok(Some(value)) if value.has_none()) && self.delete(key)
    }

    /// Puts a value at a key in place of whatever there was, or lets the key go when the value is empty.
    /// Answers whether there is a value now.
    pub(crate) fn store<T: Typed>(&mut self, key: &[u8], value: T, class: u32, event: &'static str) -> bool {
        if value.has_none() {
            self.delete(key);
            return false;
        }
        self.db.put(key, value.into_value(), None);
        self.changed_with(key, class, event);
        true
    }
}

/// `start` and `stop` as ranks of something with `len` elements: negative ones count from the end.
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
    fn ranges_count_from_both_ends() {
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
