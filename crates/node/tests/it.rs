//! The binary as its users run it: real processes, real sockets, a folder of their own each.

#[path = "it/serving.rs"]
mod serving;
#[path = "it/strangers.rs"]
mod strangers;
#[path = "it/support.rs"]
mod support;
