//! Timestamps as people write them: RFC 3339 (`2026-11-01T12:00:00Z`, `2026-11-01`), milliseconds since 1970, or relative
//! to the present (`-1h30m`). The present is an argument, never asked for here.

use crate::config::units::parse_millis;

/// A timestamp in ms since 1970.
pub(crate) fn parse_time(text: &str, now_ms: i64) -> Option<i64> {
    if let Some(ago) = text.strip_prefix('-') {
        // A bare number would be ambiguous: `@-1000` could be a typo for a timestamp.
        return ago
            .ends_with(|c: char| c.is_ascii_alphabetic())
            .then(|| parse_millis(ago))
            .flatten()
            .map(|ms| now_ms - ms);
    }
    match text.parse() {
        Ok(ms) => Some(ms),
        Err(_) => parse_rfc3339(text),
    }
}

fn parse_rfc3339(text: &str) -> Option<i64> {
    let (date, time) = match text.split_once(['T', 't', ' ']) {
        Some((date, time)) => (date, time),
        None => (text, "00:00:00Z"),
    };
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let zone_at = time.find(['Z', 'z', '+', '-'])?;
    let (clock, zone) = time.split_at_checked(zone_at)?;
    let (whole, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let [hour, minute, second] = numbers(whole, ':', [2, 2, 2])?;
    let in_range = (1..=12).contains(&month)
        && (1..=days_in_month(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !in_range
        || fraction.contains(|c: char| !c.is_ascii_digit())
        || fraction.is_empty() == clock.contains('.')
    {
        return None;
    }
    let millis: i64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    let offset_minutes = match zone.split_at_checked(1)? {
        ("Z" | "z", "") => 0,
        (sign @ ("+" | "-"), rest) => {
            let [hours, minutes] = numbers(rest, ':', [2, 2])?;
            let minutes = (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)?;
            if sign == "-" { -minutes } else { minutes }
        }
        _ => return None,
    };
    let days = days_since_1970(year, month, day);
    let seconds = days * 86_400 + hour * 3_600 + (minute - offset_minutes) * 60 + second;
    Some(seconds * 1_000 + millis)
}

/// A timestamp as RFC 3339 in UTC, to the millisecond.
pub(crate) fn show_time(ms: i64) -> String {
    let (days, of_day) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    // A guess that is at most a year too late, then the month that holds the day.
    let mut year = 1970 + days.div_euclid(365);
    while days_since_1970(year, 1, 1) > days {
        year -= 1;
    }
    let month = (1..=12).rev().find(|month| days_since_1970(year, *month, 1) <= days).unwrap_or(1);
    let day = days - days_since_1970(year, month, 1) + 1;
    let (seconds, millis) = (of_day / 1_000, of_day % 1_000);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Exactly these numbers with exactly these many digits.
fn numbers<const N: usize>(text: &str, separator: char, digits: [usize; N]) -> Option<[i64; N]> {
    let mut parts = text.split(separator);
    let mut all = [0; N];
    for (slot, digits) in all.iter_mut().zip(digits) {
        let part =
            parts.next().filter(|part| part.len() == digits && part.bytes().all(|b| b.is_ascii_digit()))?;
        *slot = part.parse().ok()?;
    }
    parts.next().is_none().then_some(all)
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in_month(year: i64, month: i64) -> i64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Counts whole years, then whole months. Leap days up to a year: each 4th, not each 100th, but each 400th.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let leap_days = |before: i64| (before - 1) / 4 - (before - 1) / 100 + (before - 1) / 400;
    let years = (year - 1970) * 365 + leap_days(year) - leap_days(1970);
    let months: i64 = (1..month).map(|month| days_in_month(year, month)).sum();
    years + months + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_round_trip() {
        for text in [
            "1970-01-01T00:00:00.000Z",
            "1999-12-31T23:59:59.999Z",
            "2024-02-29T12:00:00.001Z",
            "2026-11-15T15:30:53.120Z",
            "2100-03-01T00:00:00.000Z",
        ] {
            assert_eq!(show_time(parse_rfc3339(text).unwrap()), text);
        }
    }

    #[test]
    fn rfc3339() {
        for (text, wanted) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-03-01T00:00:00Z", Some(951_868_800_000)),
            ("2026-11-01T12:34:56.789Z", Some(1_793_536_496_789)),
            ("2026-11-01T12:34:56.7Z", Some(1_793_536_496_700)),
            ("2026-11-01t12:34:56+09:00", Some(1_793_504_096_000)),
            ("2026-11-01 12:34:56-00:30", Some(1_793_538_296_000)),
            ("2024-02-29T00:00:00Z", Some(1_709_164_800_000)),
            ("2023-02-29T00:00:00Z", None),
            ("2026-13-01T00:00:00Z", None),
            ("2026-11-01T24:00:00Z", None),
            ("2026-11-01T12:34:56", None),
            ("2026-11-01T12:34:56.Z", None),
            ("2026-1-1T00:00:00Z", None),
            ("2026-11-01T12:34:56+9", None),
            ("+026-11-01T12:34:56Z", None),
        ] {
            assert_eq!(parse_rfc3339(text), wanted, "{text}");
        }
    }
}
