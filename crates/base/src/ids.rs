//! Newtypes for numbers that are easily confused.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

number! {
    /// A position in a partition. The next offset to be written is the log end.
    Offset(i64)
}
number! {
    /// Counts the leaderships of a partition; every batch carries the one it was written under.
    LeaderEpoch(i32)
}
number! {
    /// The stable number of a node, which Kafka clients know as the broker id.
    BrokerId(i32)
}

/// The incarnation of a topic: a topic deleted and made again under its name has another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TopicId(pub u128);

impl TopicId {
    /// The id that names no topic.
    pub const ZERO: Self = Self(0);

    /// The sixteen bytes that travel in the protocol.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The id of these sixteen bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// Reads the form that `Display` prints.
    pub fn parse(text: &str) -> Option<Self> {
        (text.len() == 32).then(|| u128::from_str_radix(text, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TopicId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_id_survives_text_and_bytes() {
        let id = TopicId(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(TopicId::parse(&id.to_string()), Some(id));
        assert_eq!(TopicId::from_bytes(id.to_bytes()), id);
        assert_eq!(TopicId::parse("zz"), None);
    }
}
