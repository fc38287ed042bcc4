//! Decodes arbitrary bytes as a record batch. The target and its invariants are in `moim_wire_kafka::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_kafka::fuzzing::record_batch(data));
