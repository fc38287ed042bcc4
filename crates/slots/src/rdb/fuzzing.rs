//! What the fuzz target runs: bytes from outside as a payload.
//!
//! The target in `fuzz/` needs a nightly compiler, so it only calls this; a test runs it over tampered payloads on every
//! `cargo test`. Invariant: these functions return for every input.

use super::{Object, ObjectRef, read_object, restore, write_object};
use crate::value::limits::Limits;

/// A payload as RESTORE gets it. The checksum keeps most bytes out, so the body is read without it as well.
pub fn payload(data: &[u8]) {
    let _ = restore(data, &Limits::default());
    body(data);
}

/// Type and body: what is taken in must be written and taken in again, and come out the same.
pub fn body(data: &[u8]) {
    let limits = Limits::default();
    let Ok(object) = read_object(data, &limits) else { return };
    let written = bytes(&object);
    match read_object(&written, &limits) {
        Ok(again) => assert_eq!(bytes(&again), written, "it changes when it is carried over"),
        Err(_) => panic!("what was written cannot be read"),
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
