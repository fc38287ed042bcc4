//! Zigzag variable-length integers, as records use them.
//!
//! Invariant: a reader never looks past its slice and refuses an encoding that does not fit its type, so one value has
//! a bounded size. The writers emit the shortest form.

/// Takes a 32-bit value off the front of `input`.
///
/// One and two bytes cover deltas and lengths of small records, which is what the produce path walks; the rest is kept
/// out of line so that the caller's loop stays small.
#[inline(always)]
pub(super) fn read_i32(input: &mut &[u8]) -> Option<i32> {
    match **input {
        [first, ref rest @ ..] if first < 0x80 => {
            *input = rest;
            Some(unzigzag32(u32::from(first)))
        }
        [first, second, ref rest @ ..] if second < 0x80 => {
            *input = rest;
            Some(unzigzag32(u32::from(first & 0x7f) | u32::from(second) << 7))
        }
        _ => read_u64_slow(input).and_then(|raw| u32::try_from(raw).ok()).map(unzigzag32),
    }
}

/// Takes a 64-bit value off the front of `input`.
#[inline(always)]
pub(super) fn read_i64(input: &mut &[u8]) -> Option<i64> {
    match **input {
        [first, ref rest @ ..] if first < 0x80 => {
            *input = rest;
            Some(unzigzag64(u64::from(first)))
        }
        _ => read_u64_slow(input).map(unzigzag64),
    }
}

#[inline(never)]
fn read_u64_slow(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for (at, byte) in input.iter().take(10).enumerate() {
        // The tenth byte has room for one bit.
        if at == 9 && *byte > 1 {
            return None;
        }
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            *input = &input[at + 1..];
            return Some(value);
        }
    }
    None
}

/// Appends a value; 32-bit values are written through this too, their encoding is the same.
pub(super) fn write(out: &mut Vec<u8>, value: i64) {
    let mut raw = zigzag(value);
    while raw >= 0x80 {
        out.push(raw as u8 | 0x80);
        raw >>= 7;
    }
    out.push(raw as u8);
}

/// How many bytes [`write`] takes for a value.
pub(super) fn len(value: i64) -> usize {
    let bits = 64 - (zigzag(value) | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

const fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

const fn unzigzag32(raw: u32) -> i32 {
    (raw >> 1) as i32 ^ -((raw & 1) as i32)
}

const fn unzigzag64(raw: u64) -> i64 {
    (raw >> 1) as i64 ^ -((raw & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [i64; 14] = [
        0,
        -1,
        1,
        63,
        -64,
        64,
        8191,
        8192,
        -8193,
        i32::MAX as i64,
        i32::MIN as i64,
        i32::MAX as i64 + 1,
        i64::MAX,
        i64::MIN,
    ];

    #[test]
    fn values_survive_a_round_trip_in_the_length_announced() {
        for value in VALUES {
            let mut bytes = Vec::new();
            write(&mut bytes, value);
            assert_eq!(bytes.len(), len(value), "{value}");
            assert_eq!(read_i64(&mut bytes.as_slice()), Some(value));
            assert_eq!(read_i32(&mut bytes.as_slice()), i32::try_from(value).ok(), "{value}");
            for end in 0..bytes.len() {
                assert_eq!(read_i64(&mut &bytes[..end]), None, "{value} cut at {end}");
                assert_eq!(read_i32(&mut &bytes[..end]), None, "{value} cut at {end}");
            }
        }
    }

    #[test]
    fn an_encoding_that_overflows_is_refused() {
        assert_eq!(read_i32(&mut [0xff, 0xff, 0xff, 0xff, 0x1f].as_slice()), None);
        assert_eq!(read_i64(&mut [0xff; 11].as_slice()), None);
        let ten = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
        assert_eq!(read_i64(&mut ten.as_slice()), None);
    }
}
