//! Decodes arbitrary bytes as replies of a Redis server. The target and its invariants are in
//! `moim_wire_resp::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_resp::fuzzing::reply_decoder(data));
