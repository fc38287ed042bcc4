//! [`Message`], and the `messages!` notation that declares one.
//!
//! A declaration is the protocol's own table: a field, its type, the versions that have it, its default.
//!
//! ```text
//! messages! {
//!     /// What it is for.
//!     FooRequest(Foo) {                                   // (Foo): the API; left out for nested structs
//!         group_id: KString,                              // in every version
//!         retention_ms: i64 [2..=4, ignorable] = -1,      // absent in other versions, and ignored there
//!         topics: Option<Vec<FooTopic>> [null 1..],       // may be null from version 1
//!         cluster_id: Option<KString> [12.., tag 0],      // a tagged field, written when not the default
//!     }
//! }
//! ```
//!
//! The words in brackets keep this order: versions, `null`, `tag`, `ignorable`. A field that a version lacks
//! decodes to its default; encoding another value there is an error unless the field is `ignorable`. Fields
//! that may be null in every version default to null.

use super::{DecodeError, Decoder, EncodeError, Encoder};
use crate::api::ApiKey;

/// A request or response of one API, in any version the codec knows.
pub trait Message: Sized {
    /// The API it belongs to.
    const KEY: ApiKey;

    /// Reads the body (the header comes before, see [`crate::frame`]).
    fn decode(d: &mut Decoder, version: i16) -> Result<Self, DecodeError>;

    /// Appends the body.
    fn encode(&self, e: &mut Encoder, version: i16) -> Result<(), EncodeError>;
}

/// Pins the type of a default that `!=` alone would leave open (a `Vec` compares with many types).
pub(crate) fn differs<T: PartialEq>(value: &T, default: T) -> bool {
    *value != default
}

/// Declares structs with their wire form; see the file's head for the notation.
macro_rules! messages {
    ($(
        $(#[$meta:meta])*
        $name:ident $(($key:ident))? {
            $( $(#[$field_meta:meta])* $field:ident: $ty:ty $([$($when:tt)+])? $(= $default:expr)?, )*
        }
    )+) => { $(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $( $(#[$field_meta])* pub $field: $ty, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $crate::codec::message::default_of!($($default)?), )* }
            }
        }

        impl $crate::codec::Field for $name {
            const MIN_WIRE: usize = {
                let fields: usize = 0 $( + $crate::codec::message::min_wire!($ty, [$($($when)+)?]) )*;
                if fields == 0 { 1 } else { fields }
            };

            fn read(d: &mut $crate::Decoder, version: i16) -> Result<Self, $crate::DecodeError> {
                #[allow(unused_mut, reason = "only structs with tagged fields change after the first pass")]
                let mut message = Self {
                    $( $field: $crate::codec::message::read!(
                        d, version, $crate::codec::message::default_of!($($default)?), [$($($when)+)?]
                    ), )*
                };
                if d.is_flexible() {
                    d.tagged_fields(|_d, _tag| {
                        $( $crate::codec::message::read_tagged!(
                            _d, _tag, version, message.$field, [$($($when)+)?]
                        ); )*
                        Ok(false)
                    })?;
                }
                Ok(message)
            }

            fn write(&self, e: &mut $crate::Encoder, version: i16) -> Result<(), $crate::EncodeError> {
                $( $crate::codec::message::write!(
                    e, version, self.$field, $crate::codec::message::default_of!($($default)?),
                    (stringify!($name), stringify!($field)), [$($($when)+)?]
                ); )*
                if e.is_flexible() {
                    let tagged: u32 = 0 $( + $crate::codec::message::count_tagged!(
                        version, self.$field, $crate::codec::message::default_of!($($default)?), [$($($when)+)?]
                    ) )*;
                    e.uvarint(tagged);
                    $( $crate::codec::message::write_tagged!(
                        e, version, self.$field, $crate::codec::message::default_of!($($default)?),
                        [$($($when)+)?]
                    ); )*
                }
                Ok(())
            }

            #[cfg(test)]
            fn arbitrary(rng: &mut fastrand::Rng, version: i16) -> Self {
                Self {
                    $( $field: $crate::codec::message::arbitrary!(
                        rng, version, $crate::codec::message::default_of!($($default)?), [$($($when)+)?]
                    ), )*
                }
            }
        }

        $crate::codec::message::whole_or_nested!($name $($key)?);
    )+ };
}

/// A whole message carries its API key; a nested struct may be null behind a marker byte.
macro_rules! whole_or_nested {
    ($name:ident $key:ident) => {
        impl $crate::Message for $name {
            const KEY: $crate::ApiKey = $crate::ApiKey::$key;

            fn decode(d: &mut $crate::Decoder, version: i16) -> Result<Self, $crate::DecodeError> {
                d.set_flexible(Self::KEY.check_decode(version)?);
                $crate::codec::Field::read(d, version)
            }

            fn encode(&self, e: &mut $crate::Encoder, version: i16) -> Result<(), $crate::EncodeError> {
                e.set_flexible(Self::KEY.check_encode(version)?);
                $crate::codec::Field::write(self, e, version)
            }
        }
    };
    ($name:ident) => {
        impl $crate::codec::Nullable for $name {
            fn read_nullable(
                d: &mut $crate::Decoder,
                version: i16,
            ) -> Result<Option<Self>, $crate::DecodeError> {
                match d.i8()? {
                    ..0 => Ok(None),
                    0.. => $crate::codec::Field::read(d, version).map(Some),
                }
            }

            fn write_nullable(
                value: Option<&Self>,
                e: &mut $crate::Encoder,
                version: i16,
            ) -> Result<(), $crate::EncodeError> {
                e.i8(if value.is_some() { 1 } else { -1 });
                value.map_or(Ok(()), |value| $crate::codec::Field::write(value, e, version))
            }
        }
    };
}

macro_rules! default_of {
    () => {
        Default::default()
    };
    ($default:expr) => {
        $default
    };
}

/// Only fields that every version has count towards the minimum.
macro_rules! min_wire {
    ($ty:ty, []) => {
        <$ty as $crate::codec::Field>::MIN_WIRE
    };
    ($ty:ty, [$($when:tt)+]) => {
        0
    };
}

macro_rules! read {
    ($d:ident, $v:ident, $default:expr, []) => {
        $crate::codec::Field::read($d, $v)?
    };
    ($d:ident, $v:ident, $default:expr, [null $null:expr]) => {
        match $crate::codec::Field::read($d, $v)? {
            None if !($null).contains(&$v) => return Err($crate::DecodeError::UnexpectedNull),
            value => value,
        }
    };
    ($d:ident, $v:ident, $default:expr, [$versions:expr, null $null:expr]) => {
        if ($versions).contains(&$v) {
            $crate::codec::message::read!($d, $v, $default, [null $null])
        } else {
            $default
        }
    };
    ($d:ident, $v:ident, $default:expr, [$versions:expr, tag $tag:literal $(, ignorable)?]) => {
        $default
    };
    ($d:ident, $v:ident, $default:expr, [$versions:expr $(, ignorable)?]) => {
        if ($versions).contains(&$v) { $crate::codec::Field::read($d, $v)? } else { $default }
    };
}

macro_rules! read_tagged {
    ($d:ident, $tag:ident, $v:ident, $field:expr, [$versions:expr, tag $own:literal $(, ignorable)?]) => {
        if $tag == $own && ($versions).contains(&$v) {
            $field = $crate::codec::Field::read($d, $v)?;
            return Ok(true);
        }
    };
    ($d:ident, $tag:ident, $v:ident, $field:expr, [$($when:tt)*]) => {};
}

macro_rules! write {
    ($e:ident, $v:ident, $field:expr, $default:expr, $names:expr, []) => {
        $crate::codec::Field::write(&$field, $e, $v)?
    };
    ($e:ident, $v:ident, $field:expr, $default:expr, ($message:expr, $name:expr), [null $null:expr]) => {
        if $field.is_none() && !($null).contains(&$v) {
            return Err($crate::EncodeError::NotNullable { message: $message, field: $name, version: $v });
        } else {
            $crate::codec::Field::write(&$field, $e, $v)?
        }
    };
    ($e:ident, $v:ident, $field:expr, $default:expr, $names:tt, [$versions:expr, null $null:expr]) => {
        if ($versions).contains(&$v) {
            $crate::codec::message::write!($e, $v, $field, $default, $names, [null $null])
        } else {
            $crate::codec::message::absent!($v, $field, $default, $names, [])
        }
    };
    ($e:ident, $v:ident, $field:expr, $default:expr, $names:tt,
        [$versions:expr, tag $tag:literal $(, $ignorable:ident)?]) => {
        if !($versions).contains(&$v) {
            $crate::codec::message::absent!($v, $field, $default, $names, [$($ignorable)?])
        }
    };
    ($e:ident, $v:ident, $field:expr, $default:expr, $names:tt, [$versions:expr $(, $ignorable:ident)?]) => {
        if ($versions).contains(&$v) {
            $crate::codec::Field::write(&$field, $e, $v)?
        } else {
            $crate::codec::message::absent!($v, $field, $default, $names, [$($ignorable)?])
        }
    };
}

/// What happens to a field that the version lacks.
macro_rules! absent {
    ($v:ident, $field:expr, $default:expr, $names:tt, [ignorable]) => {
        ()
    };
    ($v:ident, $field:expr, $default:expr, ($message:expr, $name:expr), []) => {
        if $crate::codec::message::differs(&$field, $default) {
            return Err($crate::EncodeError::NoSuchField { message: $message, field: $name, version: $v });
        }
    };
}

macro_rules! count_tagged {
    ($v:ident, $field:expr, $default:expr, [$versions:expr, tag $tag:literal $(, ignorable)?]) => {
        u32::from(($versions).contains(&$v) && $crate::codec::message::differs(&$field, $default))
    };
    ($v:ident, $field:expr, $default:expr, [$($when:tt)*]) => {
        0
    };
}

macro_rules! write_tagged {
    ($e:ident, $v:ident, $field:expr, $default:expr, [$versions:expr, tag $tag:literal $(, ignorable)?]) => {
        if ($versions).contains(&$v) && $crate::codec::message::differs(&$field, $default) {
            $e.tagged_field($tag, |e| $crate::codec::Field::write(&$field, e, $v))?;
        }
    };
    ($e:ident, $v:ident, $field:expr, $default:expr, [$($when:tt)*]) => {};
}

#[cfg(test)]
macro_rules! arbitrary {
    ($rng:ident, $v:ident, $default:expr, []) => {
        $crate::codec::Field::arbitrary($rng, $v)
    };
    ($rng:ident, $v:ident, $default:expr, [null $null:expr]) => {
        match $crate::codec::Field::arbitrary($rng, $v) {
            None if !($null).contains(&$v) => $default,
            value => value,
        }
    };
    ($rng:ident, $v:ident, $default:expr, [$versions:expr, null $null:expr]) => {
        if ($versions).contains(&$v) {
            $crate::codec::message::arbitrary!($rng, $v, $default, [null $null])
        } else {
            $default
        }
    };
    ($rng:ident, $v:ident, $default:expr, [$versions:expr $(, $($word:tt)+)?]) => {
        if ($versions).contains(&$v) { $crate::codec::Field::arbitrary($rng, $v) } else { $default }
    };
}

#[cfg(test)]
pub(crate) use arbitrary;
pub(crate) use {
    absent, count_tagged, default_of, messages, min_wire, read, read_tagged, whole_or_nested, write,
    write_tagged,
};
