//! Decodes arbitrary bytes as requests of a Redis client. The target and its invariants are in
//! `moim_wire_resp::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_resp::fuzzing::request_decoder(data));
