//! Encoding and decoding of batches and groups around every limit.

use proptest::prelude::*;

use super::*;

#[test]
fn effects_round_trip_and_truncation_is_detected() {
    let mut effects = Effects::default();
    let long = vec![7; 300];
    effects.push_slices(&[b"SET", b"k", &long]);
    effects.push_slices(&[b"DEL", b""]);
    assert_eq!(effects.commands(), 2);
    let payload = effects.payload(1_234).to_vec();
    let (time, commands) = read(&payload).unwrap();
    assert_eq!(time, 1_234);
    assert_eq!(commands[0], OwnedArgs::from_slices([&b"SET"[..], b"k", &long]));
    assert_eq!(commands[1], OwnedArgs::from_slices(["DEL", ""]));
    let whole = [HEADER, payload.len() - 6];
    for cut in 0..payload.len() {
        let cut_read = read(&payload[..cut]);
        if !whole.contains(&cut) && cut != 9 {
            assert!(cut_read.is_err(), "cut at {cut}");
        }
    }
    effects.clear();
    assert!(effects.is_empty());
    assert_eq!(read(&[9; 20]), Err(BadEffects::Version(9)));
}

fn frames(effects: &mut Effects) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    while let Some(next) = effects.front() {
        frames.push(next.payload());
        effects.on_appended();
    }
    frames
}

fn limits(frame: usize) -> FrameLimits {
    FrameLimits { frame, ..FrameLimits::default() }
}

#[test]
fn batch_around_the_frame_limit_round_trips() {
    const FRAME: usize = 100;
    for size in 0..=4 * FRAME {
        let mut effects = Effects::with_limits(limits(FRAME));
        let value = vec![b'v'; size];
        effects.push_slices(&[b"S", &value]);
        let len = effects.len();
        assert_eq!(effects.is_large(), len > FRAME);
        assert_eq!(effects.seal(77), len > FRAME, "{size}");
        let frames = frames(&mut effects);
        assert_eq!(frames.len(), (len - HEADER).div_ceil(FRAME - HEADER), "{size}");
        assert!(frames.iter().all(|frame| frame.len() <= FRAME + PIECE_HEADER - HEADER));
        let mut groups = Groups::default();
        let (last, before) = frames.split_last().unwrap();
        for frame in before {
            assert_eq!(groups.take(parse(frame).unwrap()), Ok(None));
            assert!(groups.is_open());
        }
        let (time, commands) = groups.take(parse(last).unwrap()).unwrap().unwrap();
        assert_eq!((time, commands), (77, vec![OwnedArgs::from_slices([&b"S"[..], &value])]));
        assert!(effects.is_settled() && !effects.is_congested() && !groups.is_open());
    }
}

#[test]
fn commands_before_a_large_command_get_their_own_frame() {
    let mut effects = Effects::with_limits(limits(50));
    effects.push_slices(&[b"small"]);
    effects.mark();
    effects.push_slices(&[b"large", &[0; 200]]);
    assert!(effects.seal(1));
    let frames = frames(&mut effects);
    assert_eq!(read(&frames[0]).unwrap().1, [OwnedArgs::from_slices(["small"])]);
    assert!(matches!(parse(&frames[1]), Ok(Frame::Piece(Piece { number: 0, is_last: false, .. }))));
    assert!(matches!(parse(&frames[5]), Ok(Frame::Piece(Piece { number: 4, is_last: false, .. }))));
    assert!(matches!(parse(&frames[frames.len() - 1]), Ok(Frame::Piece(Piece { is_last: true, .. }))));
}

#[test]
fn incomplete_group_is_discarded() {
    let mut effects = Effects::with_limits(limits(50));
    effects.push_slices(&[b"large", &[0; 200]]);
    effects.seal(1);
    let large = frames(&mut effects);
    effects.push_slices(&[b"small"]);
    effects.seal(2);
    let small = frames(&mut effects);
    for cut in 1..large.len() {
        // Another batch or group follows the incomplete group of a former primary.
        let mut groups = Groups::default();
        let given: Vec<_> = large[..cut].iter().chain(&small).chain(&large).collect();
        let whole: Vec<_> =
            given.into_iter().filter_map(|frame| groups.take(parse(frame).unwrap()).unwrap()).collect();
        assert_eq!(whole.iter().map(|(time, _)| *time).collect::<Vec<_>>(), [2, 1], "{cut}");
        let mut groups = Groups::default();
        for frame in large[..cut].iter().chain(&large) {
            let is_last = std::ptr::eq(frame, &large[large.len() - 1]);
            assert_eq!(groups.take(parse(frame).unwrap()).unwrap().is_some(), is_last);
        }
        // A piece is missing: corruption, not a former primary.
        let mut groups = Groups::default();
        assert_eq!(groups.take(parse(&large[cut]).unwrap()), Err(BadEffects::Piece(cut as u32)));
    }
}

proptest! {
    #[test]
    fn random_batches_round_trip_at_any_frame_limit(
        batches in prop::collection::vec(prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..4), 1..5), 1..5),
        frame in HEADER + 1..200,
    ) {
        let mut effects = Effects::with_limits(limits(frame));
        for (batch, time) in batches.iter().zip(1..) {
            for command in batch {
                effects.push(command.iter().map(|arg| &arg[..]));
            }
            effects.seal(time);
        }
        let mut groups = Groups::default();
        let mut read = Vec::new();
        for payload in frames(&mut effects) {
            prop_assert!(payload.len() <= frame + PIECE_HEADER);
            read.extend(groups.take(parse(&payload).unwrap()).unwrap());
        }
        prop_assert!(!groups.is_open() && effects.is_settled());
        let wanted: Vec<(i64, Vec<OwnedArgs>)> = (1..)
            .zip(&batches)
            .map(|(time, batch)| (time, batch.iter().map(OwnedArgs::from_slices).collect()))
            .collect();
        prop_assert_eq!(read, wanted);
    }
}
