//! Payloads of Redis 7.0.15, round trips, and corrupted payloads.

use super::*;
use crate::value::limits::Limits;
use crate::value::list::End;
use crate::value::listpack::Element;
use crate::value::stream::{Id, group::Group};

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// A textual form of a value.
fn show(value: &Object) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let join = |parts: Vec<String>| parts.join(" ");
    let sorted = |mut parts: Vec<String>| {
        parts.sort();
        parts.join(" ")
    };
    match value {
        Object::String(bytes) => text(bytes),
        Object::List(list) => join(list.iter().map(text).collect()),
        Object::Set(set) => sorted(set.iter().map(|member| text(&member)).collect()),
        Object::Hash(hash) => sorted(hash.iter().map(|(f, v)| format!("{}={}", text(f), text(v))).collect()),
        Object::Zset(zset) => {
            join(zset.iter().map(|(member, score)| format!("{}={score}", text(member))).collect())
        }
        Object::Stream(stream) => show_stream(stream),
    }
}

fn show_stream(stream: &Stream) -> String {
    let mut text = String::new();
    for entry in stream.range(Id::MIN, Id::MAX) {
        let pair = |(field, value): (Element<'_>, Element<'_>)| {
            format!(
                "{}={}",
                String::from_utf8_lossy(field.as_bytes()),
                String::from_utf8_lossy(value.as_bytes())
            )
        };
        text += &format!("{} {} ", entry.id, entry.pairs().map(pair).collect::<Vec<_>>().join(","));
    }
    text += &format!("last {} deleted {} added {}", stream.last_id, stream.max_deleted, stream.added);
    for (name, group) in &stream.groups {
        let pending: Vec<String> = group
            .pending_from(Id::MIN)
            .map(|(id, pending)| {
                format!("{id}:{}:{}", String::from_utf8_lossy(&pending.consumer), pending.deliveries)
            })
            .collect();
        let read = group.entries_read;
        text +=
            &format!(" {} {} {read:?} [{}]", String::from_utf8_lossy(name), group.last_id, pending.join(" "));
    }
    text
}

#[test]
fn reads_what_redis_dumped() {
    let long = "x".repeat(100);
    for (payload, value) in [
        ("000568656c6c6f0a006372df766534200a", "hello".to_string()),
        ("00c139300a009d94ea2793fc08b9", "12345".to_string()),
        ("00c30e412c0361626361e0ff02e115070162630a00d25733cec044e12b", "abc".repeat(100)),
        (
            "120102c32a4088158800000007008161020101df3802f270110104e06478e05a000666f400f2052a01207e0409cbb802ff0a006690f0b2476eff7a",
            format!("a 1 -200 70000 {long} 5000000000 3000"),
        ),
        ("0b1404000000030000000100000002000000e09304000a00742f3348486c6a39", "1 2 300000".to_string()),
        ("02030163016201610a005ea67e5623750bab", "a b c".to_string()),
        (
            "1018180000000600816602817602816e020c01816d02dffb02ff0a004358fea6071a4881",
            "f=v m=-5 n=12".to_string(),
        ),
        (
            "111d1d0000000600816302842d696e6605816102010181620283322e3504ff0a003992339be11f323d",
            "c=-inf a=1 b=2.5".to_string(),
        ),
        (
            "13011000000000000000010000000000000001c34063407115710000002b00050101010201816602846e616d650500200c0000200105640181780205200c0001200c02c0c802600d0003200f030001c12c800d0002200f200d0090c00d0004400d00f4800d0500010601dfff203d07856f746865720601200f00ff0507000101030106010167020181ffffffffffffffff0200000000000000010000000000000001e362b0e0a10100000100000000000000020000000000000001e362b0e0a101000001010163e362b0e0a10100000200000000000000010000000000000001000000000000000200000000000000010a007b8cd1edea2da39e",
            "1-1 f=100,name=x 2-1 f=200,name=x 4-1 f=400,name=x 5-1 f=500,name=x 7-0 other=1 last 7-0 deleted 3-1 added 6 g 2-1 None [1-1:c:1 2-1:c:1]".to_string(),
        ),
    ] {
        let read = restore(&hex(payload), &Limits::default()).unwrap();
        assert_eq!(show(&read), value);
    }
}

#[test]
fn reads_ziplists_of_older_versions() {
    // Header, then: "a" (previous 0), 2 (immediate), -3 (one byte), 300 (two bytes).
    let entries = [0u8, 1, b'a', 3, 0xf3, 2, 0xfe, 0xfd, 3, 0xc0, 0x2c, 0x01, 0xff];
    let mut list = Vec::new();
    list.extend_from_slice(&(10 + entries.len() as u32).to_le_bytes());
    list.extend_from_slice(&[0; 4]);
    list.extend_from_slice(&4u16.to_le_bytes());
    list.extend_from_slice(&entries);
    for (kind, value) in [(10, "a 2 -3 300"), (13, "-3=300 a=2")] {
        let mut body = vec![kind];
        write_string(&mut body, &list);
        assert_eq!(show(&read::object(&body, &Limits::default()).unwrap()), value);
    }
}

fn samples() -> Vec<Object> {
    let limits = Limits::default();
    let mut samples = vec![Object::String(b"".to_vec()), Object::String(vec![b'x'; 20_000])];
    for count in [1, 100, 2000] {
        let (mut list, mut set, mut ints) = (List::new(), Set::new(), Set::new());
        let (mut hash, mut zset) = (Hash::new(), Zset::new());
        let mut stream = Box::<Stream>::default();
        for n in 0..count {
            let text = format!("element {n}");
            list.push(End::Right, text.as_bytes(), &limits);
            set.insert(text.as_bytes(), &limits);
            ints.insert((n * 1000).to_string().as_bytes(), &limits);
            hash.set(text.as_bytes(), &[b'v'; 10], &limits);
            zset.insert(text.as_bytes(), f64::from(n) / 3.0, &limits);
            let field: &[u8] = if n % 7 == 0 { b"other" } else { b"field" };
            stream.push(Id { ms: u64::from(n as u32) + 1, seq: 0 }, &[(field, text.as_bytes())], &limits);
        }
        let mut group = Group::new(Id { ms: 1, seq: 0 }, Some(1));
        let (consumer, _) = group.touch_consumer(b"consumer-1", 5);
        group.assign(Id { ms: 1, seq: 0 }, &consumer, 77, 3);
        stream.groups.insert(b"group"[..].into(), group);
        stream.delete(Id { ms: 2, seq: 0 });
        samples.extend([
            Object::List(list),
            Object::Set(set),
            Object::Set(ints),
            Object::Hash(hash),
            Object::Zset(zset),
            Object::Stream(stream),
        ]);
    }
    samples
}

fn as_ref(value: &Object) -> ObjectRef<'_> {
    match value {
        Object::String(bytes) => ObjectRef::String(bytes),
        Object::List(list) => ObjectRef::List(list),
        Object::Set(set) => ObjectRef::Set(set),
        Object::Hash(hash) => ObjectRef::Hash(hash),
        Object::Zset(zset) => ObjectRef::Zset(zset),
        Object::Stream(stream) => ObjectRef::Stream(stream),
    }
}

#[test]
fn dump_restore_round_trip() {
    for value in samples() {
        let payload = dump(as_ref(&value));
        assert_eq!(show(&restore(&payload, &Limits::default()).unwrap()), show(&value));
    }
}

#[test]
fn invalid_footer_is_rejected() {
    let limits = Limits::default();
    let mut payload = dump(ObjectRef::String(b"hello"));
    assert_eq!(restore(&payload[..5], &limits).unwrap_err(), RestoreError::Footer);
    payload[2] ^= 1;
    assert_eq!(restore(&payload, &limits).unwrap_err(), RestoreError::Footer);
    let mut newer = vec![0, 1, b'x', 99, 0];
    let sum = crc64(0, &newer);
    newer.extend_from_slice(&sum.to_le_bytes());
    assert_eq!(restore(&newer, &limits).unwrap_err(), RestoreError::Footer);
}

#[test]
fn corrupted_bodies_never_panic_and_allocate_little() {
    let mut random = fastrand::Rng::with_seed(11);
    let mut bodies: Vec<Vec<u8>> = samples()
        .iter()
        .map(|value| {
            let mut body = Vec::new();
            write_object(&mut body, as_ref(value));
            body.truncate(3000);
            body
        })
        .collect();
    bodies.push(hex(
        "120102c32a4088158800000007008161020101df3802f270110104e06478e05a000666f400f2052a01207e0409cbb802ff",
    ));
    bodies.push(hex("111d1d0000000600816302842d696e6605816102010181620283322e3504ff"));
    bodies.push(hex("0b1404000000030000000100000002000000e0930400"));
    for _ in 0..4000 {
        let mut body = random.choice(&bodies).unwrap().clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..body.len().min(60));
            let any = random.u8(..);
            body[at] = *random.choice(&[0, 0xff, 0x80, 0x81, 0xc3, any]).unwrap();
        }
        fuzzing::body(&body);
    }
}
