//! Every message, every version: round trips, truncation, damage.

use std::collections::HashMap;
use std::fmt::Debug;

use bytes::{Bytes, BytesMut};

use super::*;
use crate::codec::Field;
use crate::{ApiKey, DecodeError, Decoder, EncodeError, Encoder, Message};

/// Runs `$check::<M>()` for every message there is.
macro_rules! for_every_message {
    ($check:ident $(, $arg:expr)*) => {
        with_all_messages!(for_every_message @ $check ($($arg),*))
    };
    (@ $check:ident $args:tt $($api:ident: $request:ident, $response:ident;)+) => {
        $(
            for_every_message!(@call $check $request $args);
            for_every_message!(@call $check $response $args);
        )+
    };
    (@call $check:ident $message:ident ($($arg:expr),*)) => {
        $check::<$message>($($arg),*)
    };
}

// After the macro, which it uses.
mod golden;

fn encode<M: Message>(message: &M, version: i16) -> Bytes {
    let mut e = Encoder::new();
    message.encode(&mut e, version).unwrap();
    let (buf, gaps) = e.finish();
    assert!(gaps.is_empty());
    buf.freeze()
}

fn name_of<M>() -> &'static str {
    std::any::type_name::<M>().rsplit("::").next().unwrap()
}

fn decode<M: Message>(bytes: Bytes, version: i16) -> Result<M, DecodeError> {
    let mut d = Decoder::new(bytes);
    let message = M::decode(&mut d, version)?;
    d.finish()?;
    Ok(message)
}

#[test]
fn the_table_of_messages_is_complete() {
    fn count<M: Message>(seen: &mut HashMap<ApiKey, usize>) {
        *seen.entry(M::KEY).or_default() += 1;
    }
    let mut seen = HashMap::new();
    for_every_message!(count, &mut seen);
    for key in ApiKey::ALL {
        assert_eq!(seen.get(key), Some(&2), "{key}");
    }
}

#[test]
fn what_is_encoded_decodes_to_the_same() {
    fn check<M: Message + Field + Default + PartialEq + Debug>() {
        let mut rng = fastrand::Rng::with_seed(M::KEY as u64);
        for version in M::KEY.versions() {
            let plain = M::default();
            assert_eq!(
                decode::<M>(encode(&plain, version), version).as_ref(),
                Ok(&plain),
                "version {version}"
            );
            for _ in 0..50 {
                let message = M::arbitrary(&mut rng, version);
                let bytes = encode(&message, version);
                assert_eq!(decode::<M>(bytes.clone(), version).as_ref(), Ok(&message), "version {version}");
                assert!(bytes.len() >= M::MIN_WIRE || bytes.is_empty());
                let recode =
                    if name_of::<M>().ends_with("Request") { recode_request } else { recode_response };
                assert_eq!(recode(M::KEY, version, bytes.clone()), Ok(bytes), "version {version}");
            }
        }
    }
    for_every_message!(check);
}

#[test]
fn no_proper_prefix_is_a_message() {
    fn check<M: Message + Field + Debug>() {
        let mut rng = fastrand::Rng::with_seed(M::KEY as u64);
        for version in M::KEY.versions() {
            let bytes = encode(&M::arbitrary(&mut rng, version), version);
            for len in 0..bytes.len() {
                let result = decode::<M>(bytes.slice(..len), version);
                assert!(result.is_err(), "version {version}, {len} of {} bytes: {result:?}", bytes.len());
            }
        }
    }
    for_every_message!(check);
}

#[test]
fn a_byte_too_many_is_refused() {
    fn check<M: Message + Default + PartialEq + Debug>() {
        for version in M::KEY.versions() {
            let mut bytes = BytesMut::from(encode(&M::default(), version));
            bytes.extend_from_slice(&[0]);
            assert_eq!(decode::<M>(bytes.freeze(), version), Err(DecodeError::TrailingBytes(1)));
        }
    }
    for_every_message!(check);
}

#[test]
fn damage_never_panics_and_never_allocates_for_lengths_that_cannot_be() {
    fn check<M: Message + Field>() {
        let mut rng = fastrand::Rng::with_seed(M::KEY as u64);
        for version in M::KEY.versions() {
            let sound = encode(&M::arbitrary(&mut rng, version), version);
            for at in 0..sound.len() {
                // The largest classic length, the largest compact length, and one flipped bit.
                for lie in [&[0x7f, 0xff, 0xff, 0xff][..], &[0xff, 0xff, 0xff, 0xff, 0x07]] {
                    let mut bytes = BytesMut::from(&sound[..at]);
                    bytes.extend_from_slice(lie);
                    bytes.extend_from_slice(&sound[(at + lie.len()).min(sound.len())..]);
                    let _ = decode::<M>(bytes.freeze(), version);
                }
                let mut bytes = BytesMut::from(&sound[..]);
                bytes[at] ^= 1 << rng.u8(..8);
                let _ = decode::<M>(bytes.freeze(), version);
            }
            let noise: Vec<u8> = (0..rng.usize(..300)).map(|_| rng.u8(..)).collect();
            let _ = decode::<M>(noise.into(), version);
        }
    }
    for_every_message!(check);
}

#[test]
fn versions_outside_the_table_are_refused() {
    fn check<M: Message + Default + Debug + PartialEq>() {
        let key = M::KEY as i16;
        for version in [M::KEY.versions().start() - 1, M::KEY.versions().end() + 1] {
            let refused = M::default().encode(&mut Encoder::new(), version);
            assert_eq!(refused, Err(EncodeError::UnsupportedVersion { key, version }));
            let refused = decode::<M>(Bytes::from_static(&[0; 64]), version);
            assert_eq!(refused, Err(DecodeError::UnsupportedVersion { key, version }));
        }
    }
    for_every_message!(check);
}
