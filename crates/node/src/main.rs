//! The `moim` binary.
fn main() {}
