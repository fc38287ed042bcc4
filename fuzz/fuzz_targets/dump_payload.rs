//! Decodes arbitrary bytes as the payload of a RESTORE. The target and its invariants are in
//! `moim_slots::rdb::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_slots::rdb::fuzzing::payload(data));
