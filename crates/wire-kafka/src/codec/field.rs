//! [`Field`]: how each Rust type looks on the wire.
//!
//! A message is a list of fields, so this table is the whole mapping: integers as they are, `KString` and
//! `Bytes` with a length, `Vec` with a count, `Option` for what may be null.

use bytes::Bytes;

use super::{DecodeError, Decoder, EncodeError, Encoder, Records};
use crate::{KString, Uuid};

/// A type that can stand in a message.
pub(crate) trait Field: Sized {
    /// Fewest bytes a value takes in any version: bounds the count of an array by the bytes that are left.
    const MIN_WIRE: usize;

    fn read(d: &mut Decoder, version: i16) -> Result<Self, DecodeError>;

    fn write(&self, e: &mut Encoder, version: i16) -> Result<(), EncodeError>;

    /// A random value that exists in `version`, for round trips.
    #[cfg(test)]
    fn arbitrary(rng: &mut fastrand::Rng, version: i16) -> Self;
}

/// A type with a null of its own on the wire; `Option` of it is a [`Field`].
pub(crate) trait Nullable: Field {
    fn read_nullable(d: &mut Decoder, version: i16) -> Result<Option<Self>, DecodeError>;

    fn write_nullable(value: Option<&Self>, e: &mut Encoder, version: i16) -> Result<(), EncodeError>;
}

impl<T: Nullable> Field for Option<T> {
    const MIN_WIRE: usize = 1;

    fn read(d: &mut Decoder, version: i16) -> Result<Self, DecodeError> {
        T::read_nullable(d, version)
    }

    fn write(&self, e: &mut Encoder, version: i16) -> Result<(), EncodeError> {
        T::write_nullable(self.as_ref(), e, version)
    }

    #[cfg(test)]
    fn arbitrary(rng: &mut fastrand::Rng, version: i16) -> Self {
        (rng.u8(..4) > 0).then(|| T::arbitrary(rng, version))
    }
}

macro_rules! fixed_size {
    ($($ty:ty => $size:literal $method:ident $arbitrary:expr;)+) => { $(
        impl Field for $ty {
            const MIN_WIRE: usize = $size;

            fn read(d: &mut Decoder, _: i16) -> Result<Self, DecodeError> {
                d.$method()
            }

            fn write(&self, e: &mut Encoder, _: i16) -> Result<(), EncodeError> {
                e.$method(*self);
                Ok(())
            }

            #[cfg(test)]
            fn arbitrary(rng: &mut fastrand::Rng, _: i16) -> Self {
                $arbitrary(rng)
            }
        }
    )+ };
}

fixed_size! {
    i8 => 1 i8 |rng: &mut fastrand::Rng| rng.i8(..);
    i16 => 2 i16 |rng: &mut fastrand::Rng| rng.i16(..);
    i32 => 4 i32 |rng: &mut fastrand::Rng| rng.i32(..);
    i64 => 8 i64 |rng: &mut fastrand::Rng| rng.i64(..);
    f64 => 8 f64 |rng: &mut fastrand::Rng| rng.f64();
    bool => 1 bool |rng: &mut fastrand::Rng| rng.bool();
    Uuid => 16 uuid |rng: &mut fastrand::Rng| Uuid(rng.u128(..).to_be_bytes());
}

/// What cannot be null is read as if it could, and null refused.
macro_rules! with_length {
    ($($ty:ty: $read:ident, $write:ident, $arbitrary:expr;)+) => { $(
        impl Field for $ty {
            const MIN_WIRE: usize = 1;

            fn read(d: &mut Decoder, version: i16) -> Result<Self, DecodeError> {
                Self::read_nullable(d, version)?.ok_or(DecodeError::UnexpectedNull)
            }

            fn write(&self, e: &mut Encoder, version: i16) -> Result<(), EncodeError> {
                Self::write_nullable(Some(self), e, version)
            }

            #[cfg(test)]
            fn arbitrary(rng: &mut fastrand::Rng, _: i16) -> Self {
                $arbitrary(rng)
            }
        }

        impl Nullable for $ty {
            fn read_nullable(d: &mut Decoder, _: i16) -> Result<Option<Self>, DecodeError> {
                Ok(d.$read()?.map(Into::into))
            }

            fn write_nullable(value: Option<&Self>, e: &mut Encoder, _: i16) -> Result<(), EncodeError> {
                e.$write(value)
            }
        }
    )+ };
}

with_length! {
    KString: nullable_string, nullable_string, arbitrary_text;
    Bytes: nullable_bytes, nullable_bytes, arbitrary_bytes;
    Records: nullable_bytes, nullable_records, |rng: &mut _| Records::Bytes(arbitrary_bytes(rng));
}

impl<T: Field> Field for Vec<T> {
    const MIN_WIRE: usize = 1;

    fn read(d: &mut Decoder, version: i16) -> Result<Self, DecodeError> {
        Self::read_nullable(d, version)?.ok_or(DecodeError::UnexpectedNull)
    }

    fn write(&self, e: &mut Encoder, version: i16) -> Result<(), EncodeError> {
        Self::write_nullable(Some(self), e, version)
    }

    #[cfg(test)]
    fn arbitrary(rng: &mut fastrand::Rng, version: i16) -> Self {
        (0..rng.usize(..3)).map(|_| T::arbitrary(rng, version)).collect()
    }
}

impl<T: Field> Nullable for Vec<T> {
    fn read_nullable(d: &mut Decoder, version: i16) -> Result<Option<Self>, DecodeError> {
        let Some(count) = d.length()? else { return Ok(None) };
        if count > d.remaining() / T::MIN_WIRE {
            return Err(DecodeError::BadLength(count as i64));
        }
        let mut items = Vec::with_capacity(first_capacity::<T>(count, d.remaining()));
        for _ in 0..count {
            items.push(T::read(d, version)?);
        }
        Ok(Some(items))
    }

    fn write_nullable(value: Option<&Self>, e: &mut Encoder, version: i16) -> Result<(), EncodeError> {
        e.length(value.map(Vec::len))?;
        value.into_iter().flatten().try_for_each(|item| item.write(e, version))
    }
}

/// Room for an array before its first element is read. A struct is often larger in memory than on the wire,
/// so reserve no more memory than the frame has bytes left and let the rest grow as elements really arrive.
pub(super) fn first_capacity<T>(count: usize, remaining: usize) -> usize {
    const ALWAYS: usize = 8;
    count.min((remaining / size_of::<T>().max(1)).max(ALWAYS))
}

#[cfg(test)]
fn arbitrary_text(rng: &mut fastrand::Rng) -> KString {
    KString::from((0..rng.usize(..12)).map(|_| rng.char(..)).collect::<String>())
}

#[cfg(test)]
fn arbitrary_bytes(rng: &mut fastrand::Rng) -> Bytes {
    (0..rng.usize(..200)).map(|_| rng.u8(..)).collect::<Vec<_>>().into()
}
