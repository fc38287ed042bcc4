//! Batches of our own encoder, of other clients, and malformed ones.

use std::ops::ControlFlow;

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;

use super::*;
use crate::compression::Compression;
use crate::fuzzing;

const LIMIT: usize = 1 << 20;
const LIMITS: ValidateLimits = ValidateLimits { max_decompressed_bytes: LIMIT, require_keys: false };
const T0: i64 = 1_700_000_000_000;

type Plain = (i64, Option<Vec<u8>>, Option<Vec<u8>>, Vec<(Vec<u8>, Option<Vec<u8>>)>);

/// The records of every golden batch.
fn four_records() -> Vec<Plain> {
    let header = |name: &str, value: Option<&[u8]>| (name.as_bytes().to_vec(), value.map(<[u8]>::to_vec));
    vec![
        (
            T0,
            Some(b"user-1".to_vec()),
            Some(b"hello ".repeat(20)),
            vec![header("trace", Some(&[1, 2])), header("trace", None), header("", Some(b""))],
        ),
        (T0 + 5, None, Some(vec![]), vec![]),
        (T0 + 2, Some(b"user-2".to_vec()), None, vec![header("h", Some(b"v"))]),
        (T0 + 1, Some(vec![]), Some(vec![b'x'; 300]), vec![]),
    ]
}

fn fill(mut builder: BatchBuilder, records: &[Plain]) -> Bytes {
    for (timestamp, key, value, headers) in records {
        let headers: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_slice(), value.as_deref())).collect();
        builder.push(*timestamp, key.as_deref(), value.as_deref(), &headers);
    }
    builder.build()
}

fn plain(record: &Record) -> Plain {
    let owned = |bytes: &Option<Bytes>| bytes.as_ref().map(|bytes| bytes.to_vec());
    let headers = record.headers.iter().map(|(name, value)| (name.to_vec(), owned(value))).collect();
    (record.timestamp, owned(&record.key), owned(&record.value), headers)
}

fn sample(codec: Compression) -> Bytes {
    fill(BatchBuilder::new(codec).producer(7, 1, 40), &four_records())
}

/// `batch` with bytes replaced and its length and CRC made right again, so that only the change itself is wrong.
fn tampered(batch: &Bytes, change: impl FnOnce(&mut BatchHeader)) -> Bytes {
    let mut bytes = batch.to_vec();
    let mut header = BatchHeader::parse(batch).unwrap();
    change(&mut header);
    header.seal(&mut bytes);
    Bytes::from(bytes)
}

/// A batch of `count` records whose payload is `payload` as it stands.
fn raw_batch(count: i32, payload: &[u8]) -> Bytes {
    let mut bytes = vec![0; HEADER_LEN];
    bytes.extend_from_slice(payload);
    let mut header =
        BatchHeader { records_count: count, last_offset_delta: count - 1, ..BatchHeader::default() };
    header.seal(&mut bytes);
    Bytes::from(bytes)
}

#[test]
fn batches_of_other_implementations_are_read_in_full() {
    let mut seen = 0;
    for line in include_str!("tests/golden.txt").lines().filter(|line| !line.starts_with('#')) {
        let [maker, codec, hex] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let bytes = hex
            .as_bytes()
            .as_chunks::<2>()
            .0
            .iter()
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap());
        let batch: Bytes = bytes.collect::<Vec<_>>().into();
        let header = validate_batch(&batch, &LIMITS).unwrap();
        assert_eq!(header.compression().unwrap() as u8, codec.parse::<u8>().unwrap(), "{maker}");
        assert_eq!((header.base_timestamp, header.max_timestamp), (T0, T0 + 5), "{maker} {codec}");
        let (decoded, records) = decode_batch(&batch, LIMIT).unwrap();
        assert_eq!(decoded, header, "{maker} {codec}");
        assert_eq!(records.iter().map(plain).collect::<Vec<_>>(), four_records(), "{maker} {codec}");
        if maker == "aiokafka" {
            assert!(header.is_transactional() && header.has_producer());
            assert_eq!((header.producer_id, header.producer_epoch, header.base_sequence), (4711, 3, 17));
        }
        seen += 1;
    }
    assert!(seen >= 10);
}

#[test]
fn an_uncompressed_batch_is_built_byte_for_byte_as_others_build_it() {
    let golden =
        include_str!("tests/golden.txt").lines().find_map(|line| line.strip_prefix("aiokafka 0 ")).unwrap();
    let builder = BatchBuilder::new(Compression::None).producer(4711, 3, 17).transactional(true);
    let ours: String = fill(builder, &four_records()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(ours, golden);
}

#[test]
fn every_codec_survives_a_round_trip() {
    for codec in Compression::ALL {
        let builder = BatchBuilder::new(codec).producer(7, 1, 40).base_offset(1000).leader_epoch(9);
        let batch = fill(builder, &four_records());
        assert!(check_crc(&batch), "{codec}");
        let header = validate_batch(&batch, &LIMITS).unwrap();
        assert_eq!(header.total_len(), batch.len());
        assert_eq!(header.compression(), Ok(codec));
        assert_eq!((header.last_offset(), header.last_sequence()), (1003, 43));
        assert_eq!((header.partition_leader_epoch, header.max_timestamp), (9, T0 + 5));
        let (_, records) = decode_batch(&batch, LIMIT).unwrap();
        assert_eq!(records.iter().map(plain).collect::<Vec<_>>(), four_records());
        assert_eq!(records.iter().map(|r| r.offset).collect::<Vec<_>>(), [1000, 1001, 1002, 1003]);
    }
}

#[test]
fn uncompressed_records_share_the_bytes_of_their_batch() {
    let batch = sample(Compression::None);
    let (_, records) = decode_batch(&batch, 0).unwrap();
    let range = batch.as_ptr_range();
    assert!(range.contains(&records[0].key.as_ref().unwrap().as_ptr()));
}

#[test]
fn base_offset_and_leader_epoch_are_patched_without_the_crc() {
    let batch = sample(Compression::Lz4);
    let header = BatchHeader::parse(&batch).unwrap();
    let mut patched = header.patched_prefix(123_456, 77).to_vec();
    patched.extend_from_slice(&batch[PATCH_LEN..]);
    assert!(check_crc(&patched));
    let moved = BatchHeader::parse(&patched).unwrap();
    assert_eq!(moved, BatchHeader { base_offset: 123_456, partition_leader_epoch: 77, ..header });
}

#[test]
fn sequences_wrap_at_two_to_the_31() {
    let last = |base_sequence, last_offset_delta| {
        BatchHeader { base_sequence, last_offset_delta, ..BatchHeader::default() }.last_sequence()
    };
    assert_eq!(last(0, 4), 4);
    assert_eq!(last(i32::MAX, 0), i32::MAX);
    assert_eq!(last(i32::MAX, 1), 0);
    assert_eq!(last(i32::MAX - 1, 4), 2);
    assert_eq!(last(NO_SEQUENCE, 4), NO_SEQUENCE);
}

#[test]
fn headers_that_make_no_sense_are_refused() {
    let batch = sample(Compression::None);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = batch.to_vec();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        BatchHeader::read(&changed)
    };
    assert_eq!(with(16, &[1]), Err(RecordsError::Magic(1)));
    assert_eq!(with(8, &48_i32.to_be_bytes()), Err(RecordsError::Length));
    assert_eq!(with(8, &(-1_i32).to_be_bytes()), Err(RecordsError::Length));
    assert_eq!(with(57, &(-1_i32).to_be_bytes()), Err(RecordsError::Count));
    assert_eq!(with(23, &(-1_i32).to_be_bytes()), Err(RecordsError::Count));
    assert_eq!(BatchHeader::read(&batch[..HEADER_LEN - 1]), Err(RecordsError::TooShort));
    assert!(BatchHeader::parse(&batch[..HEADER_LEN]).is_some());
    // The shortest old message is shorter than our header, and still told apart.
    assert_eq!(BatchHeader::read(&[0; 26]), Err(RecordsError::Magic(0)));
}

#[test]
fn batches_are_split_where_they_end() {
    let (one, two) = (sample(Compression::None), sample(Compression::Zstd));
    let mut range = BytesMut::new();
    range.extend_from_slice(&one);
    range.extend_from_slice(&two);
    let whole = range.freeze();
    let split: Vec<_> = split_batches(&whole).collect();
    assert_eq!(split, [Ok(one.clone()), Ok(two.clone())]);
    for end in one.len() + 1..whole.len() {
        let split: Vec<_> = split_batches(&whole.slice(..end)).collect();
        assert_eq!(split, [Ok(one.clone()), Err(RecordsError::TooShort)], "{end}");
    }
    assert_eq!(split_batches(&Bytes::new()).count(), 0);
    assert_eq!(split_batches(&Bytes::from(vec![0; 40])).collect::<Vec<_>>(), [Err(RecordsError::Magic(0))]);
}

#[test]
fn what_a_producer_may_not_send_is_refused() {
    let good = sample(Compression::None);
    let longer = Bytes::from([good.as_ref(), b"x"].concat());
    let invalid =
        |header: fn(&mut BatchHeader)| validate_batch(&tampered(&good, header), &LIMITS).unwrap_err();

    assert_eq!(validate_batch(&longer, &LIMITS), Err(RecordsError::Length));
    assert_eq!(validate_batch(&good.slice(..good.len() - 1), &LIMITS), Err(RecordsError::TooShort));
    assert_eq!(invalid(|h| h.records_count = 3), RecordsError::Count);
    assert_eq!(invalid(|h| h.last_offset_delta = 4), RecordsError::Count);
    assert_eq!(invalid(|h| (h.records_count, h.last_offset_delta) = (5, 4)), RecordsError::Count);
    assert_eq!(invalid(|h| (h.records_count, h.last_offset_delta) = (3, 2)), RecordsError::Count);
    assert_eq!(invalid(|h| (h.records_count, h.last_offset_delta) = (0, 0)), RecordsError::Count);
    assert_eq!(invalid(|h| h.attributes |= 8), RecordsError::TimestampType);
    assert!(matches!(invalid(|h| h.attributes |= 5), RecordsError::Compression(_)));
    assert!(matches!(invalid(|h| h.attributes |= 4), RecordsError::Compression(_)));
    assert!(matches!(invalid(|h| h.producer_epoch = -1), RecordsError::Invalid(_)));
    assert!(matches!(invalid(|h| h.base_sequence = -1), RecordsError::Invalid(_)));
    assert!(matches!(invalid(|h| h.base_timestamp = i64::MAX), RecordsError::Invalid(_)));
    // Timestamp deltas 0 and -1: the lower one leaves the range.
    let falling = raw_batch(2, &[12, 0, 0, 0, 1, 1, 0, 12, 0, 1, 2, 1, 1, 0]);
    let falling = tampered(&falling, |header| header.base_timestamp = i64::MIN);
    assert!(matches!(validate_batch(&falling, &LIMITS), Err(RecordsError::Invalid(_))));
    assert!(matches!(
        invalid(|h| {
            h.producer_id = -1;
            h.attributes |= 16;
        }),
        RecordsError::Invalid(_)
    ));
    let empty = BatchBuilder::new(Compression::None).build();
    assert_eq!(validate_batch(&empty, &LIMITS), Err(RecordsError::Count));
}

#[test]
fn records_that_do_not_parse_are_refused() {
    // length, attributes, timestamp delta, offset delta, key length, value length, header count: all zigzag varints.
    let cases: &[(&str, i32, &[u8], bool)] = &[
        ("smallest record", 1, &[12, 0, 0, 0, 1, 1, 0], true),
        ("record longer than the batch", 1, &[14, 0, 0, 0, 1, 1, 0], false),
        ("negative record length", 1, &[11, 0, 0, 0, 1, 1, 0], false),
        ("record length zero", 1, &[0], false),
        ("bytes after the last field", 1, &[14, 0, 0, 0, 1, 1, 0, 0], false),
        ("record ends inside its fields", 1, &[10, 0, 0, 0, 1, 1], false),
        ("key longer than the record", 1, &[12, 0, 0, 0, 8, 1, 0], false),
        ("key length -2", 1, &[12, 0, 0, 0, 3, 1, 0], false),
        ("value length -2", 1, &[12, 0, 0, 0, 1, 3, 0], false),
        ("negative header count", 1, &[12, 0, 0, 0, 1, 1, 1], false),
        ("a header with an empty name and no value", 1, &[16, 0, 0, 0, 1, 1, 2, 0, 1], true),
        ("a header without a name", 1, &[16, 0, 0, 0, 1, 1, 2, 1, 1], false),
        ("a header count beyond the record", 1, &[20, 0, 0, 0, 1, 1, 0xfe, 0xff, 0xff, 0xff, 0x0f], false),
        ("first offset not zero", 1, &[12, 0, 0, 2, 1, 1, 0], false),
        ("two records", 2, &[12, 0, 0, 0, 1, 1, 0, 12, 0, 0, 2, 1, 1, 0], true),
        ("an offset twice", 2, &[12, 0, 0, 0, 1, 1, 0, 12, 0, 0, 0, 1, 1, 0], false),
        ("a gap between offsets", 2, &[12, 0, 0, 0, 1, 1, 0, 12, 0, 0, 4, 1, 1, 0], false),
        ("a count of two with one record", 2, &[12, 0, 0, 0, 1, 1, 0], false),
        ("a count of one with two records", 1, &[12, 0, 0, 0, 1, 1, 0, 12, 0, 0, 2, 1, 1, 0], false),
        ("no record at all", 1, &[], false),
    ];
    for (name, count, payload, fine) in cases {
        let outcome = validate_batch(&raw_batch(*count, payload), &LIMITS);
        assert_eq!(outcome.is_ok(), *fine, "{name}: {outcome:?}");
    }
}

#[test]
fn a_count_of_two_billion_reserves_nothing() {
    let batch = raw_batch(i32::MAX, &[12, 0, 0, 0, 1, 1, 0]);
    assert_eq!(decode_batch(&batch, LIMIT), Err(RecordsError::Count));
    assert_eq!(validate_batch(&batch, &LIMITS), Err(RecordsError::Count));
}

#[test]
fn a_compacted_topic_wants_keys() {
    let keyed = ValidateLimits { require_keys: true, ..LIMITS };
    for codec in Compression::ALL {
        assert_eq!(validate_batch(&sample(codec), &keyed), Err(RecordsError::Keyless), "{codec}");
    }
    let batch = fill(BatchBuilder::new(Compression::None), &four_records()[2..]);
    assert!(validate_batch(&batch, &keyed).is_ok(), "an empty key is a key");
}

#[test]
fn a_bomb_inside_a_batch_is_refused() {
    let mut builder = BatchBuilder::new(Compression::None);
    builder.push(T0, None, Some(&vec![0; 8 * LIMIT]), &[]);
    let plain = builder.build();
    assert!(validate_batch(&plain, &LIMITS).is_ok(), "the limit is about decompression");
    for codec in &Compression::ALL[1..] {
        let bomb = recompress(&plain, *codec, LIMIT).unwrap();
        assert_eq!(validate_batch(&bomb, &LIMITS), Err(RecordsError::TooLarge), "{codec}");
        assert_eq!(decode_batch(&bomb, LIMIT), Err(RecordsError::TooLarge), "{codec}");
        assert_eq!(recompress(&bomb, Compression::None, LIMIT), Err(RecordsError::TooLarge), "{codec}");
    }
}

#[test]
fn a_max_timestamp_that_is_wrong_is_recomputed_and_repaired() {
    for codec in Compression::ALL {
        let wrong = tampered(&sample(codec), |header| header.max_timestamp = NO_TIMESTAMP);
        let mut header = validate_batch(&wrong, &LIMITS).unwrap();
        assert_eq!(header.max_timestamp, T0 + 5);
        let repaired = repair_max_timestamp(&wrong, &mut header);
        assert_eq!(repaired, sample(codec));
        assert_eq!(BatchHeader::parse(&repaired), Some(header));
        let same = repair_max_timestamp(&repaired, &mut header);
        assert_eq!(same.as_ptr(), repaired.as_ptr());
    }
}

#[test]
fn records_without_a_time_are_fine() {
    let mut builder = BatchBuilder::new(Compression::None);
    builder.push(NO_TIMESTAMP, None, Some(b"v"), &[]);
    let batch = builder.build();
    assert_eq!(validate_batch(&batch, &LIMITS).unwrap().max_timestamp, NO_TIMESTAMP);
}

#[test]
fn log_append_time_is_the_time_of_every_record() {
    for codec in Compression::ALL {
        let mut batch = BytesMut::from(sample(codec).as_ref());
        set_log_append_time(&mut batch, T0 + 60_000);
        let batch = batch.freeze();
        assert!(check_crc(&batch));
        let (header, records) = decode_batch(&batch, LIMIT).unwrap();
        assert!(header.is_log_append_time());
        assert_eq!(header.compression(), Ok(codec));
        assert!(records.iter().all(|record| record.timestamp == T0 + 60_000));
        let built =
            fill(BatchBuilder::new(codec).producer(7, 1, 40).log_append_time(T0 + 60_000), &four_records());
        assert_eq!(built, batch);
    }
}

#[test]
fn control_batches_say_how_a_transaction_ended() {
    for kind in [ControlKind::Abort, ControlKind::Commit] {
        let batch = control_batch(kind, 99, 4, 12, T0, 500, 3);
        assert!(check_crc(&batch));
        let header = validate_batch(&batch, &ValidateLimits { require_keys: true, ..LIMITS }).unwrap();
        assert!(header.is_control() && header.is_transactional());
        assert_eq!((header.producer_id, header.producer_epoch, header.base_sequence), (99, 4, NO_SEQUENCE));
        assert_eq!((header.base_offset, header.last_offset(), header.partition_leader_epoch), (500, 500, 3));
        assert_eq!(control_kind(&batch), Some(kind));
        let (_, records) = decode_batch(&batch, LIMIT).unwrap();
        assert_eq!(records[0].key.as_deref(), Some([0, 0, 0, kind as u8].as_slice()));
        assert_eq!(records[0].value.as_deref(), Some([0, 0, 0, 0, 0, 12].as_slice()));
    }
    assert_eq!(control_kind(&sample(Compression::None)), None);
    let mut other = BatchBuilder::new(Compression::None).producer(1, 1, -1).control(true);
    other.push(T0, Some(&[0, 0, 0, 2]), None, &[]);
    assert_eq!(control_kind(&other.build()), None, "kinds of later versions are not ours to read");
}

#[test]
fn recompression_changes_nothing_but_the_codec() {
    for from in Compression::ALL {
        for to in Compression::ALL {
            let batch = sample(from);
            let changed = recompress(&batch, to, LIMIT).unwrap();
            if from == to {
                assert_eq!(changed.as_ptr(), batch.as_ptr());
            }
            assert_eq!(changed, sample(to), "{from} to {to}");
        }
    }
}

#[test]
fn retained_records_keep_their_offsets_and_times() {
    for codec in Compression::ALL {
        let batch = fill(BatchBuilder::new(codec).producer(7, 1, 40).base_offset(100), &four_records());
        let mut asked = Vec::new();
        let kept = retain_records(&batch, LIMIT, &mut |offset, key, tombstone| {
            asked.push((offset, key.map(<[u8]>::to_vec), tombstone));
            offset == 100 || offset == 102
        });
        let kept = kept.unwrap().unwrap();
        let keys = four_records().into_iter().map(|(_, key, ..)| key);
        let want: Vec<_> = keys.enumerate().map(|(at, key)| (100 + at as i64, key, at == 2)).collect();
        assert_eq!(asked, want);
        assert!(check_crc(&kept));
        let (header, records) = decode_batch(&kept, LIMIT).unwrap();
        assert_eq!((header.base_offset, header.last_offset(), header.records_count), (100, 103, 2));
        assert_eq!((header.last_sequence(), header.max_timestamp), (43, T0 + 2));
        assert_eq!(header.compression(), Ok(codec));
        assert_eq!(records.iter().map(|record| record.offset).collect::<Vec<_>>(), [100, 102]);
        let plains: Vec<_> = records.iter().map(plain).collect();
        assert_eq!(plains, [four_records()[0].clone(), four_records()[2].clone()]);

        let all = retain_records(&batch, LIMIT, &mut |_, _, _| true).unwrap().unwrap();
        assert_eq!(all.as_ptr(), batch.as_ptr());
        assert_eq!(retain_records(&batch, LIMIT, &mut |_, _, _| false), Ok(None));
    }
}

#[test]
fn retained_records_keep_the_append_time_of_their_batch() {
    let batch = fill(BatchBuilder::new(Compression::None).log_append_time(T0 + 60_000), &four_records());
    let kept = retain_records(&batch, LIMIT, &mut |offset, _, _| offset == 0).unwrap().unwrap();
    let (header, records) = decode_batch(&kept, LIMIT).unwrap();
    assert_eq!((header.max_timestamp, records[0].timestamp), (T0 + 60_000, T0 + 60_000));
}

#[test]
fn an_empty_batch_still_knows_its_producer() {
    let batch =
        fill(BatchBuilder::new(Compression::Gzip).producer(7, 1, 40).base_offset(100), &four_records());
    let empty = empty_batch(&batch).unwrap();
    assert!(check_crc(&empty));
    let (header, records) = decode_batch(&empty, 0).unwrap();
    assert!(records.is_empty());
    assert_eq!((header.last_offset(), header.last_sequence(), header.producer_id), (103, 43, 7));
    assert_eq!(retain_records(&empty, 0, &mut |_, _, _| false), Ok(Some(empty.clone())));
    assert_eq!(recompress(&empty, Compression::Zstd, 0), Ok(empty));
}

#[test]
fn a_walk_stops_when_told_and_may_nest() {
    let (outer, inner) = (sample(Compression::Lz4), sample(Compression::Zstd));
    let mut seen = 0;
    let header = for_each_record(&outer, LIMIT, &mut |record| {
        let value = record.value.map(<[u8]>::to_vec);
        for_each_record(&inner, LIMIT, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(record.value.map(<[u8]>::to_vec), value, "the inner walk has a buffer of its own");
        seen += 1;
        if seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(header.unwrap().records_count, 4);
    assert_eq!(seen, 2);
}

#[test]
fn a_changed_bit_is_caught_and_a_prefix_is_short() {
    for codec in Compression::ALL {
        let batch = sample(codec);
        for end in 0..batch.len() {
            assert_eq!(
                validate_batch(&batch.slice(..end), &LIMITS),
                Err(RecordsError::TooShort),
                "{codec} {end}"
            );
        }
        for bit in 0..batch.len() * 8 {
            let mut flipped = batch.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let flipped = Bytes::from(flipped);
            // Base offset and leader epoch are the broker's to change; everything else is covered.
            let free = bit / 8 < 8 || (12..16).contains(&(bit / 8));
            assert_eq!(validate_batch(&flipped, &LIMITS).is_ok(), free, "{codec} bit {bit}");
            fuzzing::record_batch(&flipped);
        }
    }
}

fn any_record() -> impl Strategy<Value = Plain> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..200);
    let maybe = move || prop::option::of(bytes());
    (-1..1_i64 << 45, maybe(), maybe(), prop::collection::vec((bytes(), maybe()), 0..4))
}

proptest! {
    #[test]
    fn any_records_survive_a_round_trip(records in prop::collection::vec(any_record(), 1..30), codec in 0_usize..5) {
        let batch = fill(BatchBuilder::new(Compression::ALL[codec]).base_offset(5), &records);
        let header = validate_batch(&batch, &LIMITS).unwrap();
        prop_assert_eq!(Some(header.max_timestamp), records.iter().map(|record| record.0).max());
        let (decoded, back) = decode_batch(&batch, LIMIT).unwrap();
        prop_assert_eq!(decoded, header);
        prop_assert_eq!(back.iter().map(plain).collect::<Vec<_>>(), records);
    }

    #[test]
    fn any_subset_can_be_retained(records in prop::collection::vec(any_record(), 1..30), mask in any::<u32>(), codec in 0_usize..5) {
        let batch = fill(BatchBuilder::new(Compression::ALL[codec]), &records);
        let keep = |offset: i64| mask >> offset & 1 == 1;
        let kept = retain_records(&batch, LIMIT, &mut |offset, _, _| keep(offset)).unwrap();
        let want: Vec<_> = (0..records.len() as i64).filter(|offset| keep(*offset)).collect();
        match kept {
            None => prop_assert!(want.is_empty()),
            Some(kept) => {
                prop_assert!(check_crc(&kept));
                let (header, back) = decode_batch(&kept, LIMIT).unwrap();
                prop_assert_eq!(header.last_offset(), records.len() as i64 - 1);
                prop_assert_eq!(back.iter().map(|record| record.offset).collect::<Vec<_>>(), want);
                for record in &back {
                    prop_assert_eq!(&plain(record), &records[record.offset as usize]);
                }
            }
        }
    }

    #[test]
    fn a_payload_of_noise_behind_a_good_crc_never_panics(payload in prop::collection::vec(any::<u8>(), 0..300), count in 1..20, codec in 0_i16..8) {
        let batch = tampered(&raw_batch(count, &payload), |header| header.attributes = codec);
        fuzzing::record_batch(&batch);
    }
}
