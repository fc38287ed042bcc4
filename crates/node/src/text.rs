//! Text that people read: counted nouns, and whether a stream takes escape codes.

/// `1 message`, `2 messages`.
pub fn counted(count: u64, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// True if escape codes may be written to a stream: it is a terminal, and `NO_COLOR` is not set.
pub fn styled(is_terminal: bool) -> bool {
    let has_no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    is_terminal && !has_no_color
}
