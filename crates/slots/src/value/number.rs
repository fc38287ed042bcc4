//! Number parsing and formatting as in Redis: integers, floats, and the format of floats in replies.

use super::extended::Extended;

/// Parses a canonical integer: no sign but `-`, no leading zeros or spaces.
pub fn parse_i64(bytes: &[u8]) -> Option<i64> {
    if bytes.is_empty() || bytes.len() > 20 {
        return None;
    }
    let (negative, digits) = match bytes.split_first() {
        Some((b'-', rest)) => (true, rest),
        _ => (false, bytes),
    };
    if digits.is_empty() || (digits[0] == b'0' && bytes.len() > 1) {
        return None;
    }
    let mut number = 0u64;
    for &digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
    }
    match negative {
        false => i64::try_from(number).ok(),
        true if number == 1 << 63 => Some(i64::MIN),
        true => i64::try_from(number).ok().map(|number| -number),
    }
}

/// The decimal digits of an integer.
pub fn from_i64(number: i64) -> Vec<u8> {
    number.to_string().into_bytes()
}

/// Parses a float as C's `strtod` does if it must consume all input; never NaN. Overflow gives infinity, as in range
/// bounds.
///
/// Hexadecimal floats and infinities in any case are accepted; leading spaces are not.
pub fn parse_f64(bytes: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (sign, body) = match text.as_bytes().first()? {
        b'-' => (-1.0, &text[1..]),
        b'+' => (1.0, &text[1..]),
        _ => (1.0, text),
    };
    if let Some(hex) = strip_hex(body) {
        return parse_hex(hex).map(|number| sign * number);
    }
    if is_infinity(body) {
        return Some(sign * f64::INFINITY);
    }
    if !body.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    body.parse::<f64>().ok().filter(|number| !number.is_nan()).map(|number| sign * number)
}

/// Parses a value (a score, an increment, a coordinate): overflow and underflow are rejected.
pub fn parse_f64_in_range(bytes: &[u8]) -> Option<f64> {
    let number = parse_f64(bytes)?;
    let is_out = match number {
        0.0 => !is_zero(bytes),
        number => number.is_infinite() && !is_infinity(unsigned(bytes)),
    };
    (!is_out).then_some(number)
}

/// Parses the timeout of a blocking command, which Redis reads as a long double: one that only a long double can hold
/// is infinite here.
pub fn parse_timeout(bytes: &[u8]) -> Option<f64> {
    extended(bytes).and_then(|_| parse_f64(bytes))
}

/// True if an 80-bit float would be infinite; `None` if it is not a float.
pub fn is_infinite_long(bytes: &[u8]) -> Option<bool> {
    extended(bytes).map(|number| number.is_err())
}

fn unsigned(bytes: &[u8]) -> &str {
    let bytes = bytes.strip_prefix(b"-").or_else(|| bytes.strip_prefix(b"+")).unwrap_or(bytes);
    std::str::from_utf8(bytes).unwrap_or_default()
}

fn is_infinity(text: &str) -> bool {
    text.eq_ignore_ascii_case("inf") || text.eq_ignore_ascii_case("infinity")
}

fn strip_hex(text: &str) -> Option<&str> {
    text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))
}

/// True if all digits of a float are zero.
fn is_zero(bytes: &[u8]) -> bool {
    let body = unsigned(bytes);
    let (digits, exponents) = strip_hex(body).map_or((body, ['e', 'E']), |hex| (hex, ['p', 'P']));
    let digits = digits.split(exponents).next().unwrap_or_default();
    digits.bytes().all(|digit| matches!(digit, b'0' | b'.'))
}

/// Parses the digits after `0x`: rounded once, to the nearest double.
fn parse_hex(hex: &str) -> Option<f64> {
    let (digits, exponent) = match hex.find(['p', 'P']) {
        Some(at) => (&hex[..at], binary_exponent(&hex[at + 1..])?),
        None => (hex, 0),
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() && part.is_empty() {
        return None;
    }
    // Sixteen digits and, in the lowest bit, a sticky bit for the digits after them.
    let (mut number, mut dropped) = (0u64, 0i64);
    for digit in whole.chars().chain(part.chars()) {
        let digit = u64::from(digit.to_digit(16)?);
        if number >> 60 == 0 {
            number = number << 4 | digit;
        } else {
            number |= u64::from(digit != 0);
            dropped += 4;
        }
    }
    Some(scale(number as f64, exponent + dropped - 4 * part.len() as i64))
}

/// Parses the decimal exponent of a power of two, clamped to the range of doubles.
fn binary_exponent(text: &str) -> Option<i64> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let size = digits.parse::<i64>().unwrap_or(i64::MAX).min(1 << 40);
    Some(if text.starts_with('-') { -size } else { size })
}

/// Multiplies by a power of two.
fn scale(mut number: f64, mut exponent: i64) -> f64 {
    while exponent != 0 && number != 0.0 && number.is_finite() {
        let step = exponent.clamp(-1_000, 1_000);
        number *= 2f64.powi(step as i32);
        exponent -= step;
    }
    number
}

/// Formats a float for sorted sets and RESP: integers without a point, otherwise the shortest digits that parse to
/// the same float.
pub fn format_f64(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".into() } else { "-inf".into() };
    }
    if number == 0.0 {
        return if number.is_sign_negative() { "-0".into() } else { "0".into() };
    }
    if number.abs() < 1e17 && number.fract() == 0.0 {
        return format!("{}", number as i64);
    }
    format_g17(number)
}

/// Formats like C's `%.17g`.
pub fn format_g17(number: f64) -> String {
    format_g(number, 17)
}

/// Formats a finite number like C's `%.<digits>g`.
pub fn format_g(number: f64, digits: usize) -> String {
    let exact = format!("{number:.*e}", digits - 1);
    let (mantissa, exponent) = exact.split_once('e').unwrap_or((&exact, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |digits: &str| match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => digits.to_string(),
    };
    if exponent < -4 || exponent >= digits as i32 {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trim(mantissa), exponent.abs());
    }
    trim(&format!("{number:.*}", (digits as i32 - 1 - exponent) as usize))
}

/// The sum of two floats as `INCRBYFLOAT` and `HINCRBYFLOAT` store it: plain decimal, at most 17 decimal places,
/// without trailing zeros. `None` if either is not a float; infinite and NaN sums are returned as such.
///
/// Redis adds long doubles (80 bits), so that 1 + -1.1 is -0.1; so does this, with integers.
pub fn add_floats(left: &[u8], right: &[u8]) -> Option<Result<String, f64>> {
    match (extended(left)?, extended(right)?) {
        (Ok(left), Ok(right)) => Some(Ok(left.plus(right).format())),
        (Err(left), Err(right)) => Some(Err(left + right)),
        (Err(infinite), Ok(_)) | (Ok(_), Err(infinite)) => Some(Err(infinite)),
    }
}

/// Parses an 80-bit float, or an infinite one.
fn extended(bytes: &[u8]) -> Option<Result<Extended, f64>> {
    /// Maximum length of the text.
    const LONGEST: usize = 255;
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= LONGEST)?;
    if let Some(number) = Extended::parse(text) {
        return Some(Ok(number));
    }
    let number = parse_f64(bytes)?;
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    match number.is_infinite() {
        // A decimal out of range is not a number.
        _ if is_plain => None,
        true => Some(Err(number)),
        false => Some(Ok(Extended::from_f64(number))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_integers_are_parsed() {
        for (text, number) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("-9223372036854775809", None),
            ("01", None),
            ("-0", None),
            ("+1", None),
            (" 1", None),
            ("1 ", None),
            ("", None),
            ("-", None),
        ] {
            assert_eq!(parse_i64(text.as_bytes()), number, "{text}");
        }
    }

    #[test]
    fn floats_are_parsed_as_by_strtod() {
        for (text, number) in [
            ("1", Some(1.0)),
            ("+1.5", Some(1.5)),
            ("-.5", Some(-0.5)),
            ("1e3", Some(1000.0)),
            ("0x10", Some(16.0)),
            ("0x1.8p3", Some(12.0)),
            ("0x.8", Some(0.5)),
            ("-0X1F", Some(-31.0)),
            ("0x1p-1074", Some(5e-324)),
            ("0x20000000000001", Some(9_007_199_254_740_992.0)),
            ("0x200000000000010000000000001", Some(4.056481920730335e31)),
            ("0x1p99999999999999999999", Some(f64::INFINITY)),
            ("0x", None),
            ("0x1p", None),
            ("0x1g", None),
            ("1e400", Some(f64::INFINITY)),
            ("-inf", Some(f64::NEG_INFINITY)),
            ("+Infinity", Some(f64::INFINITY)),
            ("nan", None),
            ("", None),
            (" 1", None),
            ("1 ", None),
            ("1x", None),
            ("--1", None),
        ] {
            assert_eq!(parse_f64(text.as_bytes()), number, "{text}");
        }
    }

    #[test]
    fn out_of_range_values_are_rejected() {
        for (text, number) in [
            ("1e400", None),
            ("-1e400", None),
            ("1e-400", None),
            ("0x1p2000", None),
            ("0x1p-2000", None),
            ("1e-320", Some(1e-320)),
            ("0e400", Some(0.0)),
            ("0x0p9999", Some(0.0)),
            ("-inf", Some(f64::NEG_INFINITY)),
            ("0x10", Some(16.0)),
            ("nan", None),
        ] {
            assert_eq!(parse_f64_in_range(text.as_bytes()), number, "{text}");
        }
    }

    #[test]
    fn floats_are_added_as_long_doubles() {
        for (left, right, sum) in [
            ("1", "-1.1", "-0.1"),
            ("0", "0.25", "0.25"),
            ("1.23", "1.23", "2.46"),
            ("5.0e3", "2.0e2", "5200"),
            ("-0.1", "0.1", "0"),
            ("17179869184", "1", "17179869185"),
            ("3", "1.000000000005", "4.000000000005"),
        ] {
            assert_eq!(add_floats(left.as_bytes(), right.as_bytes()), Some(Ok(sum.to_string())));
        }
        assert_eq!(add_floats(b"x", b"1"), None);
        assert_eq!(add_floats(b"inf", b"1"), Some(Err(f64::INFINITY)));
        assert_eq!(add_floats(b"0x10", b"1.5"), Some(Ok("17.5".to_owned())));
        assert_eq!(add_floats(b"1e9999", b"1"), None);
        assert!(matches!(add_floats(b"inf", b"-inf"), Some(Err(sum)) if sum.is_nan()));
    }

    #[test]
    fn floats_are_formatted_as_in_redis() {
        for (number, text) in [
            (3.0, "3"),
            (0.1, "0.10000000000000001"),
            (1e20, "1e+20"),
            (1.5, "1.5"),
            (-0.0, "-0"),
            (1e-7, "9.9999999999999995e-08"),
            (17179869184.0, "17179869184"),
            (f64::NEG_INFINITY, "-inf"),
            (3.123, "3.1230000000000002"),
        ] {
            assert_eq!(format_f64(number), text);
        }
    }
}
