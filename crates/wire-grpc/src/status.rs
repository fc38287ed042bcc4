//! Status codes, and the text of an error as the `grpc-message` header carries it: percent-encoded UTF-8.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The outcome of a call, by its number in the protocol.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Code {
    /// Fine.
    Ok = 0,
    /// The caller gave up.
    Canceled = 1,
    /// Nobody knows.
    Unknown = 2,
    /// The request cannot be right, whatever the state.
    InvalidArgument = 3,
    /// The time was not enough; it may have happened.
    DeadlineExceeded = 4,
    /// What was named does not exist.
    NotFound = 5,
    /// What was to be made exists.
    AlreadyExists = 6,
    /// Not allowed for this caller.
    PermissionDenied = 7,
    /// No room.
    ResourceExhausted = 8,
    /// The state does not allow it now.
    FailedPrecondition = 9,
    /// Somebody else was faster.
    Aborted = 10,
    /// A number outside of what exists.
    OutOfRange = 11,
    /// There is no such method.
    Unimplemented = 12,
    /// An invariant was broken.
    Internal = 13,
    /// Not now; trying again may help.
    Unavailable = 14,
    /// The data cannot be trusted.
    DataLoss = 15,
    /// The caller is nobody.
    Unauthenticated = 16,
}

impl Code {
    /// Every code, in the order of their numbers.
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

    /// The code of a number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The code of a `grpc-status` header. What cannot be read is `Unknown`, as the protocol wants it.
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

/// How a call ended.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message} ({code:?})")]
pub struct Status {
    /// The code.
    pub code: Code,
    /// The text that goes with it.
    pub message: Cow<'static, str>,
}

impl Status {
    /// A status with a text.
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
