//! Round trips, foreign framings, bombs and damage.

use proptest::prelude::*;

use super::*;

const LIMIT: usize = 1 << 20;

fn packed(codec: Compression, input: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    compress(codec, input, &mut out).unwrap();
    out
}

fn unpacked(codec: Compression, input: &[u8], limit: usize) -> Result<Vec<u8>, CompressionError> {
    let mut out = Vec::new();
    decompress_into(codec, input, &mut out, limit).map(|()| out)
}

#[test]
fn names_and_attributes_name_the_same_codec() {
    for (code, codec) in Compression::ALL.into_iter().enumerate() {
        assert_eq!(Compression::parse(codec.name()), Some(codec));
        assert_eq!(Compression::from_attributes(0x7ff0 | code as i16 & !8), Ok(codec));
    }
    assert_eq!(Compression::parse("uncompressed"), Some(Compression::None));
    assert_eq!(Compression::parse("producer"), None);
    assert_eq!(Compression::from_attributes(5), Err(CompressionError::Unknown(5)));
}

#[test]
fn both_directions_append() {
    for codec in Compression::ALL {
        let mut out = b"head".to_vec();
        compress(codec, b"body", &mut out).unwrap();
        let mut plain = b"head".to_vec();
        decompress_into(codec, &out[4..], &mut plain, 4).unwrap();
        assert_eq!(plain, b"headbody", "{codec}");
    }
}

#[test]
fn a_bomb_stops_at_the_limit() {
    let zeros = vec![0; 64 << 20];
    for codec in Compression::ALL {
        let bomb = packed(codec, &zeros);
        let mut out = Vec::new();
        assert_eq!(
            decompress_into(codec, &bomb, &mut out, LIMIT),
            Err(CompressionError::TooLarge),
            "{codec}"
        );
        assert!(out.len() <= LIMIT + 1, "{codec} wrote {}", out.len());
        assert!(out.capacity() <= 4 * LIMIT, "{codec} reserved {}", out.capacity());
    }
    let raw = snap::raw::Encoder::new().compress_vec(&zeros).unwrap();
    let mut out = Vec::new();
    assert_eq!(decompress_into(Compression::Snappy, &raw, &mut out, LIMIT), Err(CompressionError::TooLarge));
    assert_eq!(out.capacity(), 0);
}

#[test]
fn a_stream_that_stopped_half_way_leaves_nothing_for_the_next() {
    for codec in Compression::ALL {
        let big = packed(codec, &vec![1; 300_000]);
        assert_eq!(unpacked(codec, &big, 1000), Err(CompressionError::TooLarge), "{codec}");
        let _ = unpacked(codec, &big[..big.len() / 2], LIMIT);
        let small = packed(codec, b"next");
        assert_eq!(unpacked(codec, &small, LIMIT).as_deref(), Ok(b"next".as_slice()), "{codec}");
    }
}

#[test]
fn the_limit_itself_is_allowed() {
    let input = vec![7; 100_000];
    for codec in Compression::ALL {
        let bytes = packed(codec, &input);
        assert_eq!(unpacked(codec, &bytes, input.len()).as_deref(), Ok(input.as_slice()), "{codec}");
        assert_eq!(unpacked(codec, &bytes, input.len() - 1), Err(CompressionError::TooLarge), "{codec}");
    }
}

#[test]
fn concatenated_streams_are_one() {
    for codec in [Compression::Gzip, Compression::Snappy, Compression::Lz4, Compression::Zstd] {
        let mut both = packed(codec, b"first ");
        both.extend(packed(codec, b"second"));
        assert_eq!(unpacked(codec, &both, LIMIT).as_deref(), Ok(b"first second".as_slice()), "{codec}");
        assert_eq!(unpacked(codec, &both, 11), Err(CompressionError::TooLarge), "{codec}");
    }
}

#[test]
fn snappy_without_framing_is_read() {
    let raw = snap::raw::Encoder::new().compress_vec(b"raw block").unwrap();
    assert_eq!(unpacked(Compression::Snappy, &raw, LIMIT).as_deref(), Ok(b"raw block".as_slice()));
}

#[test]
fn snappy_is_written_in_framed_blocks_of_32_kib() {
    let bytes = packed(Compression::Snappy, &vec![1; 70_000]);
    assert_eq!(bytes[..16], *b"\x82SNAPPY\0\0\0\0\x01\0\0\0\x01");
    let (mut rest, mut lengths) = (&bytes[16..], Vec::new());
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let (block, after) = after.split_at(u32::from_be_bytes(*length) as usize);
        lengths.push(snap::raw::decompress_len(block).unwrap());
        rest = after;
    }
    assert_eq!(lengths, [32_768, 32_768, 70_000 - 65_536]);
}

#[test]
fn lz4_frames_with_linked_blocks_and_checksums_are_read() {
    let input: Vec<u8> = (0..200_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
    let frame = FrameInfo::new()
        .block_mode(BlockMode::Linked)
        .block_size(BlockSize::Max256KB)
        .block_checksums(true)
        .content_checksum(true);
    let mut encoder = FrameEncoder::with_frame_info(frame, Vec::new());
    encoder.write_all(&input).unwrap();
    let bytes = encoder.finish().unwrap();
    assert_eq!(unpacked(Compression::Lz4, &bytes, LIMIT).as_deref(), Ok(input.as_slice()));
}

#[test]
fn lz4_frames_written_have_independent_blocks() {
    // The fifth byte is the frame's flags; version 01 in the top bits, then the independence bit the Java client wants.
    assert_eq!(packed(Compression::Lz4, b"x")[4] & 0b1110_0000, 0b0110_0000);
}

#[test]
fn frames_of_different_block_sizes_follow_each_other() {
    let mut bytes = Vec::new();
    for size in [BlockSize::Max4MB, BlockSize::Max64KB] {
        let mut encoder = FrameEncoder::with_frame_info(FrameInfo::new().block_size(size), &mut bytes);
        encoder.write_all(&[9; 70_000]).unwrap();
        encoder.finish().unwrap();
    }
    assert_eq!(unpacked(Compression::Lz4, &bytes, LIMIT).map(|plain| plain.len()), Ok(140_000));
}

#[test]
fn damaged_streams_are_errors_or_other_bytes_but_never_panics() {
    let input: Vec<u8> = (0..5_000_u32).map(|n| ((n * n) >> 5) as u8).collect();
    for codec in Compression::ALL {
        let bytes = packed(codec, &input);
        for end in 0..bytes.len() {
            let _ = unpacked(codec, &bytes[..end], LIMIT);
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            let _ = unpacked(codec, &damaged, LIMIT);
        }
    }
}

#[test]
fn trailing_garbage_is_refused() {
    for codec in [Compression::Gzip, Compression::Snappy, Compression::Lz4, Compression::Zstd] {
        let mut bytes = packed(codec, b"records");
        bytes.extend_from_slice(b"garbage");
        assert!(matches!(unpacked(codec, &bytes, LIMIT), Err(CompressionError::Corrupt { .. })), "{codec}");
    }
}

proptest! {
    #[test]
    fn bytes_survive_a_round_trip(input in prop::collection::vec(any::<u8>(), 0..4096), repeat in 1_usize..40) {
        let input = input.repeat(repeat);
        for codec in Compression::ALL {
            prop_assert_eq!(unpacked(codec, &packed(codec, &input), input.len()).unwrap(), input.clone());
        }
    }

    #[test]
    fn random_bytes_never_panic(input in prop::collection::vec(any::<u8>(), 0..512), framed in any::<bool>()) {
        for codec in Compression::ALL {
            // A right beginning gets further into the decoder.
            let mut bytes = if framed { packed(codec, b"some words")[..8].to_vec() } else { Vec::new() };
            bytes.extend_from_slice(&input);
            let _ = unpacked(codec, &bytes, LIMIT);
        }
    }
}
