//! Positions in a partition as people write them: `start`, `end`, `42`, `+5`, `-10`, `@TIME`.

use moim_kafka_client::OffsetSpec;

use crate::timestamp::parse_time;

/// Parses a position; `now_ms` is the present for relative timestamps.
pub(crate) fn parse_offset_spec(text: &str, now_ms: i64) -> Result<OffsetSpec, String> {
    let wrong = || {
        format!(
            "`{text}` is not an offset position: use start, end, an offset, +N, -N or @TIME (RFC 3339, ms, or ago as @-1h)"
        )
    };
    let count = |digits: &str| digits.parse().ok().filter(|count: &i64| *count >= 0).ok_or_else(wrong);
    match text {
        "start" | "beginning" | "earliest" => Ok(OffsetSpec::Earliest),
        "end" | "latest" => Ok(OffsetSpec::Latest),
        _ => match text.split_at_checked(1) {
            Some(("+", digits)) => count(digits).map(OffsetSpec::AfterEarliest),
            Some(("-", digits)) => count(digits).map(OffsetSpec::BeforeLatest),
            Some(("@", time)) => parse_time(time, now_ms).map(OffsetSpec::Timestamp).ok_or_else(wrong),
            _ => count(text).map(OffsetSpec::Offset),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_as_people_write_them() {
        let now = 10_000_000;
        for (text, wanted) in [
            ("start", Some(OffsetSpec::Earliest)),
            ("end", Some(OffsetSpec::Latest)),
            ("42", Some(OffsetSpec::Offset(42))),
            ("+5", Some(OffsetSpec::AfterEarliest(5))),
            ("-10", Some(OffsetSpec::BeforeLatest(10))),
            ("@1700000000000", Some(OffsetSpec::Timestamp(1_700_000_000_000))),
            ("@-1h", Some(OffsetSpec::Timestamp(now - 3_600_000))),
            ("@-1000", None),
            ("@1970-01-02", Some(OffsetSpec::Timestamp(86_400_000))),
            ("@", None),
            ("--5", None),
            ("+", None),
            ("", None),
            ("soon", None),
            ("시작", None),
        ] {
            assert_eq!(parse_offset_spec(text, now).ok(), wanted, "{text:?}");
        }
    }
}
