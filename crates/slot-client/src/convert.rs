//! Conversion of replies to application types.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

use bytes::Bytes;
use moim_wire_resp::Value;

use crate::error::{Error, ServerError};

/// A type that a reply converts to. An error inside the reply becomes an error.
pub trait FromValue: Sized {
    /// Converts `value`.
    fn from_value(value: Value) -> Result<Self, Error>;
}

/// Converts, after errors were extracted.
pub(crate) fn convert<T: FromValue>(value: Value) -> Result<T, Error> {
    match value {
        Value::Error(text) => Err(ServerError::new(&text).into()),
        value => T::from_value(value),
    }
}

fn unexpected<T>(expected: &'static str, got: &Value) -> Result<T, Error> {
    let mut got = format!("{got:?}");
    if got.len() > 120 {
        let cut = (0..=120).rev().find(|at| got.is_char_boundary(*at)).unwrap_or(0);
        got.truncate(cut);
        got.push('…');
    }
    Err(Error::Unexpected { expected, got })
}

/// The reply unchanged.
impl FromValue for Value {
    fn from_value(value: Value) -> Result<Self, Error> {
        Ok(value)
    }
}

/// Any reply except an error.
impl FromValue for () {
    fn from_value(_value: Value) -> Result<Self, Error> {
        Ok(())
    }
}

impl FromValue for Bytes {
    fn from_value(value: Value) -> Result<Self, Error> {
        match value {
            Value::Bulk(bytes)
            | Value::Simple(bytes)
            | Value::BigNumber(bytes)
            | Value::Verbatim { text: bytes, .. } => Ok(bytes),
            Value::Integer(value) => Ok(value.to_string().into()),
            Value::Double(value) => Ok(moim_wire_resp::number::format_double(value).into()),
            other => unexpected("bytes", &other),
        }
    }
}

impl FromValue for String {
    fn from_value(value: Value) -> Result<Self, Error> {
        let bytes = Bytes::from_value(value)?;
        String::from_utf8(bytes.into())
            .map_err(|_| Error::Unexpected { expected: "text", got: "bytes that are not UTF-8".to_owned() })
    }
}

macro_rules! from_integer {
    ($($type:ty),*) => {$(
        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self, Error> {
                let parsed = match &value {
                    Value::Integer(value) => <$type>::try_from(*value).ok(),
                    Value::Boolean(value) => Some((*value).into()),
                    Value::Bulk(text) | Value::Simple(text) => {
                        std::str::from_utf8(text).ok().and_then(|text| text.parse().ok())
                    }
                    _ => None,
                };
                match parsed {
                    Some(parsed) => Ok(parsed),
                    None => unexpected(concat!("an integer (", stringify!($type), ")"), &value),
                }
            }
        }
    )*};
}
from_integer!(i32, u32, i64, u64, usize);

impl FromValue for f64 {
    fn from_value(value: Value) -> Result<Self, Error> {
        match &value {
            Value::Double(value) => Ok(*value),
            Value::Integer(value) => Ok(*value as f64),
            Value::Bulk(text) | Value::Simple(text) => {
                match std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()) {
                    Some(parsed) => Ok(parsed),
                    None => unexpected("a number", &value),
                }
            }
            _ => unexpected("a number", &value),
        }
    }
}

/// 1, true and OK are true; 0, false and null are false.
impl FromValue for bool {
    fn from_value(value: Value) -> Result<Self, Error> {
        match &value {
            Value::Boolean(value) => Ok(*value),
            Value::Integer(0) | Value::Null => Ok(false),
            Value::Integer(_) => Ok(true),
            Value::Simple(text) if text == "OK" => Ok(true),
            _ => unexpected("true or false", &value),
        }
    }
}

/// Null converts to `None`.
impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: Value) -> Result<Self, Error> {
        match value {
            Value::Null => Ok(None),
            value => T::from_value(value).map(Some),
        }
    }
}

/// The elements; null converts to an empty list. Of a map: key, value, key, value.
impl<T: FromValue> FromValue for Vec<T> {
    fn from_value(value: Value) -> Result<Self, Error> {
        match value {
            Value::Array(values) | Value::Set(values) | Value::Push(values) => {
                values.into_iter().map(convert).collect()
            }
            Value::Map(pairs) => {
                pairs.into_iter().flat_map(|(key, value)| [key, value]).map(convert).collect()
            }
            Value::Null => Ok(Vec::new()),
            other => unexpected("a list", &other),
        }
    }
}

/// Pairs: of a map, or of an alternating array.
impl<K: FromValue + Eq + Hash, V: FromValue, S: BuildHasher + Default> FromValue for HashMap<K, V, S> {
    fn from_value(value: Value) -> Result<Self, Error> {
        match value {
            Value::Map(pairs) => {
                pairs.into_iter().map(|(key, value)| Ok((convert(key)?, convert(value)?))).collect()
            }
            Value::Array(values) if values.len() % 2 == 0 => {
                let mut values = values.into_iter();
                let mut map = HashMap::default();
                while let (Some(key), Some(value)) = (values.next(), values.next()) {
                    map.insert(convert(key)?, convert(value)?);
                }
                Ok(map)
            }
            Value::Null => Ok(HashMap::default()),
            other => unexpected("pairs", &other),
        }
    }
}

macro_rules! from_tuple {
    ($count:literal: $($name:ident),*) => {
        impl<$($name: FromValue),*> FromValue for ($($name,)*) {
            fn from_value(value: Value) -> Result<Self, Error> {
                match value {
                    Value::Array(values) if values.len() == $count => {
                        let mut values = values.into_iter();
                        Ok(($(convert::<$name>(values.next().unwrap_or(Value::Null))?,)*))
                    }
                    other => unexpected(concat!("a list of ", $count), &other),
                }
            }
        }
    };
}
from_tuple!(2: A, B);
from_tuple!(3: A, B, C);
from_tuple!(4: A, B, C, D);

/// Members of a sorted set with their scores; both shapes of the protocol (nested pairs, or one flat list).
#[derive(Clone, Debug, PartialEq)]
pub struct Scored(pub Vec<(Bytes, f64)>);

impl FromValue for Scored {
    fn from_value(value: Value) -> Result<Self, Error> {
        let values: Vec<Value> = FromValue::from_value(value)?;
        if values.iter().all(|value| matches!(value, Value::Array(_))) {
            return Ok(Self(values.into_iter().map(convert).collect::<Result<_, _>>()?));
        }
        let mut values = values.into_iter();
        let mut scored = Vec::new();
        while let (Some(member), Some(score)) = (values.next(), values.next()) {
            scored.push((convert(member)?, convert(score)?));
        }
        Ok(Self(scored))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &'static str) -> Value {
        Value::bulk(text)
    }

    #[test]
    fn replies_convert_to_the_requested_type() {
        assert_eq!(convert::<i64>(bulk("42")).unwrap(), 42);
        assert_eq!(convert::<Option<String>>(Value::Null).unwrap(), None);
        assert_eq!(convert::<f64>(bulk("1.5")).unwrap(), 1.5);
        assert!(convert::<bool>(Value::ok()).unwrap());
        assert_eq!(convert::<Vec<u32>>(Value::Array(vec![bulk("1"), Value::Integer(2)])).unwrap(), [1, 2]);
        let pairs = [(bulk("a"), bulk("1"))];
        let flat = Value::Array(vec![bulk("a"), bulk("1")]);
        for value in [Value::Map(pairs.to_vec()), flat.clone()] {
            assert_eq!(convert::<HashMap<String, i64>>(value).unwrap(), HashMap::from([("a".to_owned(), 1)]));
        }
        for value in [flat, Value::Array(vec![Value::Array(vec![bulk("a"), Value::Double(1.0)])])] {
            assert_eq!(convert::<Scored>(value).unwrap().0, [(Bytes::from("a"), 1.0)]);
        }
        assert_eq!(
            convert::<(i64, String)>(Value::Array(vec![Value::Integer(1), bulk("x")])).unwrap(),
            (1, "x".into())
        );
    }

    #[test]
    fn type_mismatch_is_an_error() {
        assert!(matches!(convert::<i64>(bulk("x")), Err(Error::Unexpected { .. })));
        assert!(matches!(convert::<String>(bulk("x").clone()).as_deref(), Ok("x")));
        assert!(matches!(convert::<()>(Value::Error("ERR no".into())), Err(Error::Server(_))));
        let inside = Value::Array(vec![Value::Error("WRONGTYPE x".into())]);
        assert_eq!(convert::<Vec<i64>>(inside).unwrap_err().code(), Some("WRONGTYPE"));
    }
}
