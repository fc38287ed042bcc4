//! The `grpc-timeout` header: up to eight digits and a unit.

use std::time::Duration;

/// The time a caller gives, or `None` when the header is malformed.
pub fn parse(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = digits.iter().fold(0u64, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Some(Duration::from_secs(number * 3600)),
        b'M' => Some(Duration::from_secs(number * 60)),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

/// A time as a header, in the finest unit that eight digits can hold; never less than `timeout`.
pub fn format(timeout: Duration) -> String {
    const MOST: u128 = 99_999_999;
    let units = [(1, 'n'), (1_000, 'u'), (1_000_000, 'm'), (1_000_000_000, 'S'), (60_000_000_000, 'M')];
    for (nanos, unit) in units {
        let number = timeout.as_nanos().div_ceil(nanos);
        if number <= MOST {
            return format!("{number}{unit}");
        }
    }
    format!("{}H", timeout.as_nanos().div_ceil(3_600_000_000_000).min(MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_bad_values() {
        let cases = [
            ("1H", Some(3_600_000)),
            ("2M", Some(120_000)),
            ("3S", Some(3_000)),
            ("4m", Some(4)),
            ("5000u", Some(5)),
            ("6000000n", Some(6)),
            ("99999999H", Some(99_999_999 * 3_600_000)),
            ("0n", Some(0)),
            ("", None),
            ("S", None),
            ("123456789S", None),
            ("1", None),
            ("-1S", None),
            ("1.5S", None),
            ("1s", None),
        ];
        for (text, expected_ms) in cases {
            assert_eq!(parse(text.as_bytes()), expected_ms.map(Duration::from_millis), "{text:?}");
        }
    }

    #[test]
    fn what_is_formatted_is_never_shorter() {
        for timeout in [0, 1, 999, 99_999_999, 100_000_001, 5_000_000_000, 7_200_000_000_001] {
            let timeout = Duration::from_nanos(timeout);
            let parsed = parse(format(timeout).as_bytes()).unwrap();
            assert!(
                parsed >= timeout && parsed <= timeout * 2 + Duration::from_nanos(1),
                "{timeout:?} {parsed:?}"
            );
        }
        assert!(parse(format(Duration::MAX).as_bytes()).is_some());
    }
}
