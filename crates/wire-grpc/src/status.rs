//! Status codes, and the text of an error as the `grpc-message` header carries it: percent-encoded UTF-8.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The gRPC status code of a call, by its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Code {
    /// Success.
    Ok = 0,
    /// The caller cancelled the call.
    Canceled = 1,
    /// Unknown error.
    Unknown = 2,
    /// The request is invalid regardless of the state.
    InvalidArgument = 3,
    /// The deadline expired; the call may have taken effect.
    DeadlineExceeded = 4,
    /// The named entity does not exist.
    NotFound = 5,
    /// The entity to create already exists.
    AlreadyExists = 6,
    /// The caller lacks permission.
    PermissionDenied = 7,
    /// A resource or quota is exhausted.
    ResourceExhausted = 8,
    /// The present state does not allow the call.
    FailedPrecondition = 9,
    /// Aborted by a concurrent operation.
    Aborted = 10,
    /// A value outside the valid range.
    OutOfRange = 11,
    /// The method does not exist.
    Unimplemented = 12,
    /// An invariant was violated.
    Internal = 13,
    /// Temporarily unavailable; a retry may help.
    Unavailable = 14,
    /// The data is lost or corrupt.
    DataLoss = 15,
    /// The caller is not authenticated.
    Unauthenticated = 16,
}

impl Code {
    /// Every code, in numeric order.
    pub const ALL: [Self; 17] = [
        Self::Ok,
        Self::Canceled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The code with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The code of a `grpc-status` header. An undecodable value is `Unknown`, as the protocol requires.
    pub fn from_header(value: &[u8]) -> Self {
        let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        number.and_then(Self::from_number).unwrap_or(Self::Unknown)
    }

    /// The `grpc-status` header.
    pub fn as_header(self) -> &'static str {
        const NUMBERS: [&str; 17] =
            ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"];
        NUMBERS[usize::from(self as u8)]
    }
}

/// The outcome of a call.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message} ({code:?})")]
pub struct Status {
    /// The code.
    pub code: Code,
    /// The error message.
    pub message: Cow<'static, str>,
}

impl Status {
    /// A status with a message.
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into() }
    }
}

/// A text as a `grpc-message` header.
pub fn encode_message(text: &str) -> Cow<'_, str> {
    let plain = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b'%';
    if text.bytes().all(plain) {
        return Cow::Borrowed(text);
    }
    let mut encoded = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        if plain(byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    Cow::Owned(encoded)
}

/// The text of a `grpc-message` header. A percent sign without two digits stands for itself.
pub fn decode_message(header: &[u8]) -> String {
    let mut bytes = Vec::with_capacity(header.len());
    let mut rest = header;
    while let [first, tail @ ..] = rest {
        let escaped = match (first, tail) {
            (b'%', [high, low, after @ ..]) => {
                digit(*high).zip(digit(*low)).map(|(h, l)| (h << 4 | l, after))
            }
            _ => None,
        };
        let (byte, after) = escaped.unwrap_or((*first, tail));
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_their_numbers() {
        for (number, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(code as usize, number);
            assert_eq!(Code::from_header(code.as_header().as_bytes()), code);
        }
        for bad in ["", "17", "-1", "x", "300"] {
            assert_eq!(Code::from_header(bad.as_bytes()), Code::Unknown, "{bad}");
        }
    }

    #[test]
    fn messages_travel_percent_encoded() {
        let cases = [
            ("etcdserver: no leader", "etcdserver: no leader"),
            ("100%", "100%25"),
            ("a\nb", "a%0Ab"),
            ("käse", "k%C3%A4se"),
            ("", ""),
        ];
        for (text, header) in cases {
            assert_eq!(encode_message(text), header);
            assert_eq!(decode_message(header.as_bytes()), text);
        }
        assert_eq!(decode_message(b"50% off %zz %4"), "50% off %zz %4");
    }
}
