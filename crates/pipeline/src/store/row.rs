//! A run of consecutive messages as one value of the store: each message is preceded by its length (four bytes, big
//! endian). The field name is `first-last`; a field that is a single number holds one plain message.

use std::ops::RangeInclusive;

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// A run of consecutive messages.
pub(super) struct Row {
    pub(super) numbers: RangeInclusive<u64>,
    pub(super) packed: Bytes,
}

/// Packs the messages into a row, if there are several and they are consecutive.
pub(super) fn of(messages: &[(u64, Bytes)]) -> Option<Row> {
    let [(first, _), .., (last, _)] = messages else { return None };
    if !messages.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1) {
        return None;
    }
    let mut packed = BytesMut::with_capacity(messages.iter().map(|(_, message)| 4 + message.len()).sum());
    for (_, message) in messages {
        packed.put_u32(u32::try_from(message.len()).ok()?);
        packed.put_slice(message);
    }
    Some(Row { numbers: *first..=*last, packed: packed.freeze() })
}

/// The sequence numbers of a field. None if the field name is malformed.
pub(super) fn numbers(field: &[u8]) -> Option<RangeInclusive<u64>> {
    let field = std::str::from_utf8(field).ok()?;
    let (first, last) = field.split_once('-').unwrap_or((field, field));
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(first..=last)
}

/// The messages of a field. None if it does not hold as many as its name says.
pub(super) fn unpack(
    numbers: &RangeInclusive<u64>,
    field: &[u8],
    value: &Bytes,
) -> Option<Vec<(u64, Bytes)>> {
    if !field.contains(&b'-') {
        return Some(vec![(*numbers.start(), value.clone())]);
    }
    let (mut rest, mut messages) = (value.clone(), Vec::new());
    for sn in numbers.clone() {
        let length = usize::try_from(rest.try_get_u32().ok()?).ok()?;
        if rest.len() < length {
            return None;
        }
        messages.push((sn, rest.split_to(length)));
    }
    rest.is_empty().then_some(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_round_trips_and_other_values_are_rejected() {
        let messages: Vec<_> =
            [(7, "seven"), (8, ""), (9, "nine")].map(|(sn, text)| (sn, Bytes::from(text))).to_vec();
        let row = of(&messages).unwrap();
        assert_eq!(row.numbers, 7..=9);
        assert_eq!(numbers(b"7-9"), Some(7..=9));
        assert_eq!(unpack(&(7..=9), b"7-9", &row.packed).as_ref(), Some(&messages));
        for cut in 0..row.packed.len() {
            assert_eq!(unpack(&(7..=9), b"7-9", &row.packed.slice(..cut)), None, "cut at {cut}");
        }
        assert_eq!(unpack(&(7..=8), b"7-8", &row.packed), None, "there is one too many");
        assert_eq!(unpack(&(7..=7), b"7", &messages[0].1).as_deref(), Some(&messages[..1]));
        assert!(of(&messages[..1]).is_none() && of(&[messages[0].clone(), messages[2].clone()]).is_none());
        for wrong in ["", "-", "7-", "a", "9-7", "1-2-3"] {
            assert_eq!(numbers(wrong.as_bytes()), None, "{wrong:?}");
        }
    }
}
