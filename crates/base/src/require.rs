//! Optional parts of the machine that some tests need: a `redis-server`, an etcd, a file system that can be frozen.
//!
//! A test without its part is skipped. `MOIM_REQUIRE` lists the parts that must be there, separated by commas; a test that
//! would be skipped for want of one of them fails instead.

/// Notes that a test is skipped because `part` is missing.
///
/// # Panics
///
/// If `MOIM_REQUIRE` names the part.
pub fn skip(part: &str, reason: &str) {
    let required = std::env::var("MOIM_REQUIRE").unwrap_or_default();
    assert!(!is_required(&required, part), "{part} is required by MOIM_REQUIRE={required}: {reason}");
    eprintln!("skipped: {reason}");
}

fn is_required(required: &str, part: &str) -> bool {
    required.split(',').any(|name| name.trim() == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_required_by_name() {
        assert!(is_required("redis,etcd", "etcd") && is_required(" redis , etcd", "redis"));
        assert!(!is_required("redis-cli", "redis") && !is_required("", "redis"));
    }
}
