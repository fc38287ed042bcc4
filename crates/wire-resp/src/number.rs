//! Numbers as Redis reads and writes them.
//!
//! Reading is strict: one spelling per integer (no `+`, no leading zero, no space), because the store keeps integers as
//! integers and must give back the bytes it was given.

use std::io::Write;

use bytes::{BufMut, BytesMut};

/// The digits of 00 to 99, two bytes each.
const PAIRS: &[u8; 200] = b"0001020304050607080910111213141516171819\
2021222324252627282930313233343536373839\
4041424344454647484950515253545556575859\
6061626364656667686970717273747576777879\
8081828384858687888990919293949596979899";

/// Reads a signed integer in its one spelling; `None` for anything else, out of range included.
pub fn parse_i64(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, text),
    };
    match digits {
        [b'0'] if !negative => return Some(0),
        [b'1'..=b'9', ..] if digits.len() <= 19 => {}
        _ => return None,
    }
    let mut magnitude: u64 = 0;
    for &digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        // 19 digits fit into 64 bits.
        magnitude = magnitude * 10 + u64::from(digit - b'0');
    }
    if negative { 0i64.checked_sub_unsigned(magnitude) } else { i64::try_from(magnitude).ok() }
}

/// The decimal spelling of an integer, without allocating.
#[derive(Clone, Copy)]
pub struct Decimal {
    digits: [u8; 20],
    start: u8,
}

impl Decimal {
    /// Spells `value`.
    pub fn new(value: i64) -> Self {
        let mut digits = [0; 20];
        let mut at = digits.len();
        let mut rest = value.unsigned_abs();
        while rest >= 100 {
            let pair = (rest % 100) as usize * 2;
            rest /= 100;
            at -= 2;
            digits[at..at + 2].copy_from_slice(&PAIRS[pair..pair + 2]);
        }
        if rest >= 10 {
            at -= 2;
            digits[at..at + 2].copy_from_slice(&PAIRS[rest as usize * 2..][..2]);
        } else {
            at -= 1;
            digits[at] = b'0' + rest as u8;
        }
        if value < 0 {
            at -= 1;
            digits[at] = b'-';
        }
        Self { digits, start: at as u8 }
    }

    /// The digits, with a minus sign when negative.
    pub fn as_bytes(&self) -> &[u8] {
        &self.digits[self.start as usize..]
    }
}

/// Appends the decimal spelling of `value`.
pub fn put_i64(out: &mut BytesMut, value: i64) {
    if let digit @ 0..=9 = value {
        out.put_u8(b'0' + digit as u8);
    } else {
        out.extend_from_slice(Decimal::new(value).as_bytes());
    }
}

/// A double as C's `%.17g` spells it, which is what Redis 7.0 answers: 17 significant digits without trailing zeros,
/// `3` for 3.0, `1e+20` for large exponents, `inf`, `-inf` and `nan`.
pub fn format_double(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    // Integers below 2^53 are exact in both spellings; this is the common score.
    if value == value.trunc() && value.abs() < 9e15 && !(value == 0.0 && value.is_sign_negative()) {
        return (value as i64).to_string();
    }
    let scientific = format!("{value:.16e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let Ok(exponent) = exponent.parse::<i32>() else { return scientific };
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    let digits = digits.trim_end_matches('0');
    let digits = if digits.is_empty() { "0" } else { digits };
    if !(-4..17).contains(&exponent) {
        let (first, rest) = digits.split_at(1);
        let dot = if rest.is_empty() { "" } else { "." };
        let mark = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{first}{dot}{rest}e{mark}{:02}", exponent.abs());
    }
    if exponent < 0 {
        return format!("{sign}0.{}{digits}", "0".repeat((-exponent - 1) as usize));
    }
    let whole = exponent as usize + 1;
    if digits.len() <= whole {
        return format!("{sign}{digits}{}", "0".repeat(whole - digits.len()));
    }
    format!("{sign}{}.{}", &digits[..whole], &digits[whole..])
}

/// Appends a double as [`format_double`] spells it.
pub fn put_double(out: &mut BytesMut, value: f64) {
    if value == value.trunc() && value.abs() < 9e15 && value.to_bits() != (-0.0f64).to_bits() {
        put_i64(out, value as i64);
    } else {
        let mut writer = out.writer();
        // Writing into memory cannot fail.
        let _ = writer.write_all(format_double(value).as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn integers_have_one_spelling() {
        for (text, expected) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("-9223372036854775809", None),
            ("99999999999999999999", None),
            ("", None),
            ("-", None),
            ("-0", None),
            ("00", None),
            ("01", None),
            ("+1", None),
            (" 1", None),
            ("1 ", None),
            ("1.0", None),
        ] {
            assert_eq!(parse_i64(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn doubles_are_spelled_as_c_does() {
        for (value, expected) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (3.0, "3"),
            (-17.0, "-17"),
            (1.5, "1.5"),
            (1.1, "1.1000000000000001"),
            (0.1, "0.10000000000000001"),
            (0.0001, "0.0001"),
            (0.00001, "1.0000000000000001e-05"),
            (1e16, "10000000000000000"),
            (1e17, "1e+17"),
            (1.5e300, "1.5000000000000001e+300"),
            (123456789.123, "123456789.123"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
        ] {
            assert_eq!(format_double(value), expected);
            let mut out = BytesMut::new();
            put_double(&mut out, value);
            assert_eq!(out, expected.as_bytes());
        }
    }

    proptest! {
        #[test]
        fn integers_survive(value: i64) {
            let decimal = Decimal::new(value);
            let expected = value.to_string();
            prop_assert_eq!(decimal.as_bytes(), expected.as_bytes());
            prop_assert_eq!(parse_i64(decimal.as_bytes()), Some(value));
        }

        #[test]
        fn doubles_survive(bits: u64) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            prop_assert_eq!(format_double(value).parse::<f64>().unwrap().to_bits(), bits);
        }
    }
}
