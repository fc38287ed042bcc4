//! Bytes as requests of a Redis client. What runs, and what must hold, is in `moim_wire_resp::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_resp::fuzzing::request_decoder(data));
