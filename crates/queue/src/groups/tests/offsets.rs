//! Offsets: commits, transactions, deletion, expiry.
