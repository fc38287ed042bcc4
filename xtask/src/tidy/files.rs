//! Rules for one file: shape, leftovers, and machine-specific paths and hosts.

use super::Finding;

/// Maximum number of lines without tests; a longer file probably does two things.
const MAX_LINES: usize = 800;

/// Markers of unfinished work. Split in two so that this file does not match itself.
const LEFTOVERS: [(&str, &str); 4] = [
    (concat!("to", "do!("), "unfinished code: finish it or write an issue"),
    (concat!("unimple", "mented!("), "unfinished code: finish it or write an issue"),
    (concat!("db", "g!("), "a debugging leftover"),
    (concat!("#[ig", "nore"), "a test that never runs proves nothing: fix it or delete it"),
];

/// Paths of a developer's machine.
const MACHINE_PATHS: [&str; 5] = [
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
    concat!("C:\\Us", "ers"),
];

/// The only registry that a lock file may name.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// All findings in one text file.
pub(crate) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if path.ends_with(".rs") {
        rust(path, text, &mut findings);
    }
    if path != "LICENSE" {
        for (number, line) in numbered(text) {
            if line != line.trim_end() {
                findings.push(Finding::at(path, number, "trailing white space"));
            }
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        findings.push(Finding::at(path, text.lines().count(), "the last line has no end"));
    }
    for (number, line) in numbered(text) {
        if let Some(found) = machine_path(line) {
            findings.push(Finding::at(path, number, format!("a path of one machine: {found}")));
        }
        if let Some(found) = private_host(line) {
            findings.push(Finding::at(path, number, format!("a host of one network: {found}")));
        }
    }
    if path.ends_with("Cargo.lock") {
        lock(path, text, &mut findings);
    }
    if path.ends_with(".cargo/config.toml") {
        for (number, line) in numbered(text) {
            if line.starts_with("[source") || line.starts_with("[registr") {
                findings.push(Finding::at(
                    path,
                    number,
                    "registry settings belong to the machine, not the project",
                ));
            }
        }
    }
    findings
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split('\n').enumerate().map(|(index, line)| (index + 1, line))
}

fn rust(path: &str, text: &str, findings: &mut Vec<Finding>) {
    if path.ends_with("/mod.rs") {
        findings.push(Finding::at(path, 0, "name the module after itself: foo.rs beside foo/, never mod.rs"));
    }
    if !text.starts_with("//!") {
        findings.push(Finding::at(
            path,
            1,
            "a file opens with `//!`: what it owns, its invariants, what it must never do",
        ));
    }
    let lines = product_lines(text);
    if !is_test(path) && lines > MAX_LINES {
        let message = format!("{lines} lines, tests apart; over {MAX_LINES} a file hides two things");
        findings.push(Finding::at(path, 0, message));
    }
    for (number, line) in numbered(text) {
        for (leftover, reason) in LEFTOVERS {
            if line.contains(leftover) {
                findings.push(Finding::at(path, number, format!("`{leftover}`: {reason}")));
            }
        }
    }
}

fn is_test(path: &str) -> bool {
    path.ends_with("tests.rs") || path.contains("/tests/")
}

/// The lines before the test module at the end of a file.
fn product_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests =
        lines.windows(2).position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod tests {"));
    tests.unwrap_or(lines.len())
}

fn machine_path(line: &str) -> Option<&str> {
    let (at, found) = MACHINE_PATHS.iter().find_map(|path| Some((line.find(path)?, path)))?;
    // `https://host/home/` is a URL and `crates/x/root/` a path of ours: a machine path begins here.
    let before = line[..at].chars().next_back();
    let begins =
        before.is_none_or(|c| !(c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | '/' | '}' | '~')));
    begins.then_some(*found)
}

/// A host name that only resolves inside a private network.
fn private_host(line: &str) -> Option<&str> {
    let (_, after) = line.split_once("://")?;
    let host = after.split(['/', ':', '"', '\'', ' ', ')', '`', '>', '?', ',']).next()?;
    let private_name = [".internal", ".corp", ".lan", ".intranet"].iter().any(|end| host.ends_with(end));
    let mirror = ["artifactory", "nexus", "jfrog"].iter().any(|name| host.contains(name));
    let octets: Vec<u8> = host.split('.').filter_map(|part| part.parse().ok()).collect();
    let private_address = host.split('.').count() == 4
        && match octets[..] {
            [10, ..] | [192, 168, ..] => octets.len() == 4,
            [172, second, ..] => octets.len() == 4 && (16..32).contains(&second),
            _ => false,
        };
    (private_name || mirror || private_address).then_some(host)
}

fn lock(path: &str, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in numbered(text) {
        if let Some(source) = line.strip_prefix("source = ")
            && source.trim_matches('"') != CRATES_IO
        {
            findings.push(Finding::at(path, number, "a dependency from elsewhere than crates.io"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of `check`, shortened to `line: first words`.
    fn found(path: &str, text: &str) -> Vec<String> {
        let short = |f: Finding| format!("{}: {}", f.line, f.message.split(':').next().unwrap_or_default());
        check(path, text).into_iter().map(short).collect()
    }

    #[test]
    fn rules_find_what_they_name() {
        let todo = format!("//! Doc.\nfn f() {{ {}) }}\n", concat!("to", "do!("));
        let ignored = format!("//! Doc.\n{}]\n", concat!("#[ig", "nore"));
        let home = format!("see {}me/x\n", concat!("/ho", "me/"));
        let cases: [(&str, &str, &[&str]); 12] = [
            ("src/a.rs", "//! Doc.\n", &[]),
            ("src/a.rs", "use x;\n", &["1: a file opens with `//!`"]),
            ("src/a.rs", "//! Doc. \n", &["1: trailing white space"]),
            ("src/a.rs", "//! Doc.", &["1: the last line has no end"]),
            ("src/a/mod.rs", "//! Doc.\n", &["0: name the module after itself"]),
            ("src/a.rs", &todo, &[concat!("2: `to", "do!(`")]),
            ("src/a.rs", &ignored, &[concat!("2: `#[ig", "nore`")]),
            ("README.md", &home, &["1: a path of one machine"]),
            ("README.md", "https://x.org/home/page and crates/root/x\n", &[]),
            ("x.toml", concat!("url = \"https:/", "/nexus.some.corp/x\"\n"), &["1: a host of one network"]),
            ("x.toml", concat!("url = \"http:/", "/10.0.0.5:8081/x\"\n"), &["1: a host of one network"]),
            ("README.md", "kafka://127.0.0.1:9092 and https://docs.rs/10\n", &[]),
        ];
        for (path, text, expected) in cases {
            assert_eq!(found(path, text), expected, "{path}: {text:?}");
        }
    }

    #[test]
    fn long_file_is_found_without_counting_its_tests() {
        let long = format!("//! Doc.\n{}", "//\n".repeat(800));
        assert_eq!(found("src/a.rs", &long).len(), 1);
        assert_eq!(found("src/a/tests.rs", &long).len(), 0);
        assert_eq!(found("crates/x/tests/a.rs", &long).len(), 0);
        let with_tests = format!("//! Doc.\n#[cfg(test)]\nmod tests {{\n{}}}\n", "//\n".repeat(800));
        assert_eq!(found("src/a.rs", &with_tests).len(), 0);
    }

    #[test]
    fn a_lock_file_names_crates_io_only() {
        let fine = format!("source = \"{CRATES_IO}\"\n");
        assert_eq!(found("Cargo.lock", &fine), Vec::<String>::new());
        let git = "source = \"git+https://github.com/x/y\"\n";
        assert_eq!(found("Cargo.lock", git), ["1: a dependency from elsewhere than crates.io"]);
    }

    #[test]
    fn a_registry_setting_is_not_committed() {
        let text = "[source.crates-io]\nreplace-with = \"mirror\"\n";
        assert_eq!(found(".cargo/config.toml", text).len(), 1);
    }
}
