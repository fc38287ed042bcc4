//! Model tests: the keyspace against a plain map.

use std::collections::BTreeMap;

use super::*;

fn string(item: Option<Item<'_>>) -> Option<Vec<u8>> {
    match item? {
        Item::Str(string) => Some(string.to_vec()),
        Item::Value(_) => panic!("not a string"),
    }
}

#[test]
fn keyspace_matches_a_map_with_expire_times() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut space = Keyspace::new(42);
    let mut model: BTreeMap<Vec<u8>, (Vec<u8>, Option<i64>)> = BTreeMap::new();
    for round in 0..30_000 {
        let mut key = format!("key:{}", rng.u32(..2_000)).into_bytes();
        if rng.u8(..) < 20 {
            key = [key, vec![b'x'; 700]].concat();
        }
        let value = vec![round as u8; [0, 5, 64, 127, 128, 1_900, 5_000][rng.usize(..7)]];
        let expires_at = (rng.u8(..) < 80).then(|| rng.i64(0..1_000));
        match rng.u8(..10) {
            0..=4 => {
                space.set_str(&key, &value, expires_at);
                model.insert(key.clone(), (value, expires_at));
            }
            5 => assert_eq!(space.remove(&key), model.remove(&key).is_some()),
            6 => {
                let there = model.get_mut(&key).map(|(_, at)| *at = expires_at).is_some();
                assert_eq!(space.set_expiry(&key, expires_at), there);
            }
            7 => {
                space.edit_str(&key, |string| string.extend_from_slice(b"tail"));
                model.entry(key.clone()).or_default().0.extend_from_slice(b"tail");
            }
            8 => {
                let taken = space.take(&key);
                let wanted = model.remove(&key);
                assert_eq!(taken.is_some(), wanted.is_some());
                if let (Some((Owned::Str(got), at)), Some((value, expires_at))) = (taken, wanted) {
                    assert_eq!((got, at), (value, expires_at));
                }
            }
            _ => {
                let first = model.values().filter_map(|(_, at)| *at).min();
                assert_eq!(space.next_expiry(), first);
            }
        }
        space.settle();
        assert_eq!(string(space.get(&key)), model.get(&key).map(|(value, _)| value.clone()));
        assert_eq!(space.expiry(&key), model.get(&key).map(|(_, at)| *at));
        assert_eq!(space.len(), model.len());
    }
    let (mut cursor, mut seen) = (0, BTreeMap::new());
    loop {
        cursor = space.scan(cursor, |key, item, at| {
            assert!(seen.insert(key.to_vec(), (string(Some(item)).unwrap(), at)).is_none());
        });
        if cursor == 0 {
            break;
        }
    }
    assert_eq!(seen, model);
    for slot in 0..SLOTS as u16 {
        let mut keys = space.keys_in_slot(slot, usize::MAX);
        keys.sort();
        assert_eq!(keys.len(), space.slot_len(slot));
        assert!(keys.iter().all(|key| slot_of(key) == slot));
    }
    for key in model.keys() {
        assert!(space.remove(key));
    }
    assert_eq!((space.len(), space.memory(), space.expiring()), (0, 0, 0));
}

#[test]
fn a_small_key_takes_at_most_a_hundred_bytes() {
    let mut space = Keyspace::new(1);
    for n in 0..200_000 {
        space.set_str(format!("key:{n:012}").as_bytes(), &[b'v'; 64], None);
    }
    let each = space.memory() as f64 / 200_000.0;
    assert!(each < 98.0, "{each} bytes per key at 12 keys per slot");
    for n in 200_000..1_000_000 {
        space.set_str(format!("key:{n:012}").as_bytes(), &[b'v'; 64], None);
    }
    let each = space.memory() as f64 / 1_000_000.0;
    println!("{each} bytes per key");
    assert!(each <= 95.0, "{each} bytes per key");
}

#[test]
fn scan_of_a_large_slot_returns_stable_keys() {
    let mut space = Keyspace::new(1);
    let key = |n: usize| format!("{{a}}:{n}");
    (0..5_000).for_each(|n| space.set_str(key(n).as_bytes(), b"v", None));
    let (mut seen, mut cursor, mut next) = (std::collections::HashSet::new(), 0, 5_000);
    loop {
        cursor = space.scan(cursor, |key, _, _| {
            seen.insert(key.to_vec());
        });
        if cursor == 0 {
            break;
        }
        // The keyspace grows first and then shrinks to every seventh key.
        for _ in 0..40 {
            if next < 12_000 {
                space.set_str(key(next).as_bytes(), b"v", None);
            } else if next < 17_000 && (next - 12_000) % 7 != 0 {
                space.remove(key(next - 12_000).as_bytes());
            }
            next += 1;
        }
    }
    assert!((0..5_000).step_by(7).all(|n| seen.contains(key(n).as_bytes())));
}

#[test]
fn expired_keys_are_hidden_on_replicas() {
    let mut space = Keyspace::new(1);
    space.set_str(b"a", b"1", Some(10));
    assert!(space.contains(b"a"));
    space.hide_expired(9);
    assert!(space.contains(b"a"));
    space.hide_expired(10);
    assert!(!space.contains(b"a"));
    space.hide_expired(i64::MIN);
    assert_eq!(space.first_expired(10), Some(&b"a"[..]));
    assert_eq!(space.first_expired(9), None);
}

#[test]
fn image_is_point_in_time_under_concurrent_writes() {
    fn write(out: &mut Vec<u8>, key: &[u8], item: Item<'_>, at: Option<i64>) {
        let Item::Str(value) = item else { panic!("not a string") };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        out.extend_from_slice(format!("{} {} {at:?}\n", text(key), text(value)).as_bytes());
    }
    let lines = |space: &Keyspace| {
        let mut out = Vec::new();
        space.for_each(|key, item, at| write(&mut out, key, item, at));
        let mut lines: Vec<_> = String::from_utf8(out).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    for (seed, flush) in [(1, false), (2, true), (3, false)] {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut space = Keyspace::new(9);
        let change = |space: &mut Keyspace, rng: &mut fastrand::Rng| {
            let key = format!("k{}", rng.u32(..3_000)).into_bytes();
            let value = vec![rng.u8(b'a'..=b'z'); rng.usize(1..40) * if rng.u8(..) < 5 { 100 } else { 1 }];
            match rng.u8(..6) {
                0 => drop(space.remove(&key)),
                1 => drop(space.take(&key)),
                2 => drop(space.set_expiry(&key, Some(rng.i64(..)))),
                3 => space.edit_str(&key, |string| string.push(b'!')),
                _ => space.set_str(&key, &value, None),
            }
        };
        (0..5_000).for_each(|_| change(&mut space, &mut rng));
        let wanted = lines(&space);
        space.begin_image(1, None, write);
        let mut out = Vec::new();
        loop {
            if space.image_step(1, 500, &mut out).unwrap() {
                break;
            }
            (0..50).for_each(|_| change(&mut space, &mut rng));
            if flush && rng.u8(..) < 20 {
                space.clear();
            }
        }
        let mut got: Vec<_> = String::from_utf8(out).unwrap().lines().map(str::to_owned).collect();
        got.sort();
        assert_eq!(got, wanted, "seed {seed}");
        assert_ne!(lines(&space), wanted);
    }
}

#[test]
fn early_image_output_is_chunked() {
    fn write(out: &mut Vec<u8>, key: &[u8], item: Item<'_>, _: Option<i64>) {
        let Item::Str(value) = item else { panic!("not a string") };
        out.extend_from_slice(key);
        out.extend_from_slice(value);
    }
    let mut space = Keyspace::new(5);
    let keys: Vec<String> = (10_000..20_000).map(|n| format!("k{n}")).collect();
    keys.iter().for_each(|key| space.set_str(key.as_bytes(), &[b'a'; 94], None));
    space.begin_image(1, None, write);
    keys.iter().for_each(|key| space.set_str(key.as_bytes(), b"new", None));
    let (mut all, mut done) = (0, false);
    while !done {
        let mut piece = Vec::new();
        done = space.image_step(1, 1_000, &mut piece).unwrap();
        assert!(piece.len() <= 80_000, "{}", piece.len());
        all += piece.len();
    }
    assert_eq!(all, 100 * keys.len());
    assert!(!space.has_image(1));
}

#[test]
fn counter_update_in_place_keeps_the_expire_time() {
    let mut space = Keyspace::new(3);
    let add = |space: &mut Keyspace, key: &[u8], fail: bool| {
        space.put_number(key, |item| match string(item) {
            _ if fail => Err("no"),
            None => Ok(1),
            Some(text) => Ok(String::from_utf8(text).unwrap().parse::<i64>().unwrap() + 1),
        })
    };
    assert_eq!(add(&mut space, b"n", false), Ok(1));
    space.set_str(b"n", b"99", Some(77));
    assert_eq!(add(&mut space, b"n", true), Err("no"));
    assert_eq!(add(&mut space, b"n", false), Ok(100));
    assert_eq!((string(space.get(b"n")), space.expiry(b"n")), (Some(b"100".to_vec()), Some(Some(77))));
    let long = vec![b'k'; 5_000];
    assert_eq!((add(&mut space, &long, false), add(&mut space, &long, false)), (Ok(1), Ok(2)));
    space.set_str(b"n", &[b'1'; 3_000], None);
    assert_eq!(space.put_number(b"n", |_| Ok::<_, ()>(-5)), Ok(-5));
    assert_eq!((string(space.get(b"n")), space.len()), (Some(b"-5".to_vec()), 2));
}
