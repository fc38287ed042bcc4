//! Numbers as Redis reads and writes them: what counts as an integer, what as a float, and how a float
//! looks in a reply.

use super::extended::Extended;

/// An integer in its one canonical form: no sign but `-`, no leading zeros or spaces.
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

/// A float as C's `strtod` takes it when it must take all of it; never NaN.
///
/// Hexadecimal floats and infinities in any case are accepted; leading spaces are not.
pub fn parse_f64(bytes: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(bytes).ok()?;
    if text.is_empty() || text.len() > 320 || text.starts_with(|c: char| c.is_ascii_whitespace()) {
        return None;
    }
    let (sign, body) = match text.as_bytes()[0] {
        b'-' => (-1.0, &text[1..]),
        b'+' => (1.0, &text[1..]),
        _ => (1.0, text),
    };
    if body.starts_with(['+', '-']) {
        return None;
    }
    if let Some(hex) = body.strip_prefix("0x").or_else(|| body.strip_prefix("0X")) {
        return parse_hex(hex).map(|number| sign * number);
    }
    if body.eq_ignore_ascii_case("inf") || body.eq_ignore_ascii_case("infinity") {
        return Some(sign * f64::INFINITY);
    }
    if !body.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    body.parse::<f64>().ok().filter(|number| !number.is_nan()).map(|number| sign * number)
}

fn parse_hex(hex: &str) -> Option<f64> {
    let (digits, exponent) = match hex.find(['p', 'P']) {
        Some(at) => (&hex[..at], hex[at + 1..].parse::<i32>().ok()?),
        None => (hex, 0),
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() && part.is_empty() {
        return None;
    }
    let mut number = 0.0f64;
    for digit in whole.chars() {
        number = number * 16.0 + f64::from(digit.to_digit(16)?);
    }
    let mut scale = 1.0 / 16.0;
    for digit in part.chars() {
        number += f64::from(digit.to_digit(16)?) * scale;
        scale /= 16.0;
    }
    Some(number * 2f64.powi(exponent))
}

/// A float as sorted sets and RESP show it: whole numbers without a point, else the shortest digits
/// that read back as the same float.
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

/// As C's `%.17g` prints it.
pub fn format_g17(number: f64) -> String {
    format_g(number, 17)
}

/// As C's `%.<digits>g` prints a finite number.
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

/// The sum of two floats as `INCRBYFLOAT` and `HINCRBYFLOAT` store it: plain decimals, at most 17 digits
/// behind the point, trailing zeros gone. None when either is no float; infinite and NaN sums come back as
/// such.
///
/// Redis adds in floats of 80 bits, so that 1 + -1.1 is -0.1; so does this, in integers.
pub fn add_floats(left: &[u8], right: &[u8]) -> Option<Result<String, f64>> {
    match (extended(left)?, extended(right)?) {
        (Ok(left), Ok(right)) => Some(Ok(left.plus(right).format())),
        (Err(left), Err(right)) => Some(Err(left + right)),
        (Err(infinite), Ok(_)) | (Ok(_), Err(infinite)) => Some(Err(infinite)),
    }
}

/// A float of 80 bits, or an infinite one.
fn extended(bytes: &[u8]) -> Option<Result<Extended, f64>> {
    /// Longer ones are not read.
    const LONGEST: usize = 255;
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= LONGEST)?;
    if let Some(number) = Extended::parse(text) {
        return Some(Ok(number));
    }
    let number = parse_f64(bytes)?;
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    match number.is_infinite() {
        // A decimal that is out of range is no number.
        _ if is_plain => None,
        true => Some(Err(number)),
        false => Some(Ok(Extended::from_f64(number))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_one_form() {
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
    fn floats_are_read_as_c_does() {
        for (text, number) in [
            ("1", Some(1.0)),
            ("+1.5", Some(1.5)),
            ("-.5", Some(-0.5)),
            ("1e3", Some(1000.0)),
            ("0x10", Some(16.0)),
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
    fn floats_are_shown_as_redis_does() {
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
