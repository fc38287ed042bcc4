//! Bytes as answers of a Redis server. What runs, and what must hold, is in `moim_wire_resp::fuzzing`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| moim_wire_resp::fuzzing::reply_decoder(data));
