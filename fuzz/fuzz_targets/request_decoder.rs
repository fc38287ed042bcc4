//! Bytes as a request frame. What runs, and what must hold, is in `moim_wire_kafka::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_kafka::fuzzing::request_decoder(data));
