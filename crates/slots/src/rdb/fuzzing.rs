//! Entry points of the fuzz target: untrusted bytes as a payload.
//!
//! The target in `fuzz/` needs a nightly compiler, so it only calls this; a test runs it over corrupted payloads on
//! every `cargo test`. Invariant: these functions return for every input.

use super::{Object, ObjectRef, read_object, restore, write_object};
use crate::value::limits::Limits;

/// Runs RESTORE on a payload. The checksum rejects most inputs, so the body is also decoded without it.
pub fn payload(data: &[u8]) {
    let _ = restore(data, &Limits::default());
    body(data);
}

/// Round trip of type and body: an accepted value must serialize and deserialize to the same value.
pub fn body(data: &[u8]) {
    let limits = Limits::default();
    let Ok(object) = read_object(data, &limits) else { return };
    let written = bytes(&object);
    match read_object(&written, &limits) {
        Ok(again) => assert_eq!(bytes(&again), written, "value changed in a round trip"),
        Err(_) => panic!("serialized value cannot be decoded"),
    }
}

fn bytes(object: &Object) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_object(
        &mut bytes,
        match object {
            Object::String(string) => ObjectRef::String(string),
            Object::List(list) => ObjectRef::List(list),
            Object::Set(set) => ObjectRef::Set(set),
            Object::Hash(hash) => ObjectRef::Hash(hash),
            Object::Zset(zset) => ObjectRef::Zset(zset),
            Object::Stream(stream) => ObjectRef::Stream(stream),
        },
    );
    bytes
}
