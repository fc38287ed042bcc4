//! Bytes as a record batch. What runs, and what must hold, is in `moim_wire_kafka::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_kafka::fuzzing::record_batch(data));
