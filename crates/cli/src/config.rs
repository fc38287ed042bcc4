//! The configuration of a node as people give it: files, environment variables and flags, sizes and durations.

pub(crate) mod layers;
#[cfg(test)]
mod tests;
pub(crate) mod units;
