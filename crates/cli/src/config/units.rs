//! Sizes and durations as people write them: `64MiB`, `10k`, `7d`, `1h30m`, `500ms`.
//!
//! A bare number is in the unit of its key (bytes or milliseconds). Units of size are binary with and without the `i`:
//! `1GB` for a segment is not meant as 1,000,000,000.

/// Parses a size in bytes.
pub(crate) fn parse_bytes(text: &str) -> Option<i64> {
    let (number, unit) = split_number(text.trim())?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    number.checked_mul(1_i64 << shift)
}

/// Parses a duration in milliseconds. Several parts are added: `1h30m`.
pub(crate) fn parse_millis(text: &str) -> Option<i64> {
    let mut rest = text.trim();
    if let Ok(number) = rest.parse::<i64>() {
        return Some(number);
    }
    let mut total = 0_i64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: i64 = rest.get(..digits)?.parse().ok()?;
        rest = rest.get(digits..)?;
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let factor = match rest.get(..letters)? {
            "ms" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 604_800_000,
            _ => return None,
        };
        rest = rest.get(letters..)?;
        total = total.checked_add(number.checked_mul(factor)?)?;
    }
    Some(total)
}

/// The size in the largest binary unit that keeps it short: `1.5 MiB`.
pub(crate) fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let number =
        if unit == 0 || value.fract() < 0.05 { format!("{value:.0}") } else { format!("{value:.1}") };
    format!("{number} {}", UNITS[unit])
}

fn split_number(text: &str) -> Option<(i64, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '-')).unwrap_or(text.len());
    Some((text.get(..end)?.parse().ok()?, text.get(end..)?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("512", Some(512)),
            ("64MiB", Some(64 << 20)),
            ("64 mb", Some(64 << 20)),
            ("2g", Some(2 << 30)),
            ("1.5g", None),
            ("", None),
            ("MiB", None),
            ("9999999999t", None),
        ] {
            assert_eq!(parse_bytes(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn durations() {
        for (text, ms) in [
            ("250", Some(250)),
            ("-1", Some(-1)),
            ("250ms", Some(250)),
            ("7d", Some(604_800_000)),
            ("1h30m", Some(5_400_000)),
            ("1h 30m", None),
            ("h", None),
            ("5 parsecs", None),
        ] {
            assert_eq!(parse_millis(text), ms, "{text:?}");
        }
    }

    #[test]
    fn a_size_is_shown_in_its_largest_unit() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB")] {
            assert_eq!(show_bytes(bytes), text);
        }
    }
}
