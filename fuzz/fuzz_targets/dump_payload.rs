//! Bytes as the payload of a RESTORE. What runs, and what must hold, is in `moim_slots::rdb::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_slots::rdb::fuzzing::payload(data));
