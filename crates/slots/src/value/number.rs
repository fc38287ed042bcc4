//! Numbers as Redis reads and writes them: what counts as an integer, what as a float, and how a float
//! looks in a reply.

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
/// Redis adds in 80-bit floats, so that 1 + -1.1 is -0.1. Here decimals of ordinary size are added exactly,
/// the others as 64-bit floats.
pub fn add_floats(left: &[u8], right: &[u8]) -> Option<Result<String, f64>> {
    let (a, b) = (parse_f64(left)?, parse_f64(right)?);
    let sum = a + b;
    if !sum.is_finite() {
        return Some(Err(sum));
    }
    Some(Ok(match (decimal(left), decimal(right)) {
        (Some(a), Some(b)) => format_decimal(a + b),
        _ => plain(sum),
    }))
}

const DECIMALS: u32 = 17;

/// A plain decimal times 10^17, when it is exact in that.
fn decimal(text: &[u8]) -> Option<i128> {
    let text = std::str::from_utf8(text).ok()?;
    let (number, exponent) = match text.find(['e', 'E']) {
        Some(at) => (&text[..at], text[at + 1..].parse::<i32>().ok()?),
        None => (text, 0),
    };
    let (negative, digits) = match number.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.len() + part.len() > 34 || !whole.bytes().chain(part.bytes()).all(|c| c.is_ascii_digit()) {
        return None;
    }
    let mut value = whole.bytes().chain(part.bytes()).fold(0i128, |sum, c| sum * 10 + i128::from(c - b'0'));
    let power = DECIMALS as i32 + exponent - part.len() as i32;
    if value == 0 {
        return Some(0);
    }
    if power >= 0 {
        value = value.checked_mul(10i128.checked_pow(power as u32)?)?;
    } else {
        let divisor = 10i128.checked_pow(power.unsigned_abs())?;
        if value % divisor != 0 {
            return None;
        }
        value /= divisor;
    }
    (value < i128::MAX / 4).then_some(if negative { -value } else { value })
}

fn format_decimal(value: i128) -> String {
    let unit = 10i128.pow(DECIMALS);
    let (whole, part) = (value.abs() / unit, value.abs() % unit);
    let sign = if value < 0 { "-" } else { "" };
    if part == 0 {
        return format!("{sign}{whole}");
    }
    let part = format!("{part:017}");
    format!("{sign}{whole}.{}", part.trim_end_matches('0'))
}

fn plain(number: f64) -> String {
    match format!("{number}").as_str() {
        "-0" => "0".into(),
        text => text.into(),
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
    fn floats_are_added_as_decimals() {
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
