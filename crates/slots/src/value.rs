//! What a key can hold besides a small string.
//!
//! One file per type under `value/`. `memory` is O(1): it is asked after every command that changed the value.

/// A value that lives outside its entry.
#[derive(Clone)]
pub enum Value {
    /// A string too large for its entry.
    Str(Vec<u8>),
}

impl Value {
    /// Bytes it takes.
    pub fn memory(&self) -> usize {
        match self {
            Self::Str(string) => string.capacity() + size_of::<(Option<Self>, usize)>(),
        }
    }

    /// How many pieces have to be freed one by one.
    pub fn elements(&self) -> usize {
        match self {
            Self::Str(_) => 1,
        }
    }

    /// The name that TYPE gives.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Str(_) => "string",
        }
    }

    /// The name that OBJECT ENCODING gives.
    pub fn encoding(&self) -> &'static str {
        match self {
            Self::Str(_) => "raw",
        }
    }
}
