//! What the commands do, one file per noun or verb. A command gets its parsed flags and prints one report.

pub(crate) mod config;
pub(crate) mod group;
pub(crate) mod topic;
pub(crate) mod version;
