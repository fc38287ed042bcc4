//! The fuzz targets: untrusted bytes into every decoder.
//!
//! The targets in `fuzz/` need a nightly compiler, so they only call these functions; the tests here run the same ones
//! over a fixed pseudo-random corpus on every `cargo test`. Invariant: these functions return for every input. A panic
//! is the finding.

use std::ops::ControlFlow;

use bytes::Bytes;

use crate::api::ApiKey;
use crate::codec::{DecodeError, Decoder};
use crate::compression::Compression;
use crate::header::RequestHeader;
use crate::messages::{recode_request, recode_response};
use crate::records::{self, BatchHeader, HEADER_LEN, ValidateLimits};

/// The most a batch may decompress to here: small, so that a bomb costs a fuzzer little.
const LIMIT: usize = 1 << 18;

/// Feeds `data` to every function that takes a batch: as it is, and with the length, format and CRC made right, without
/// which no random input gets past the checksum.
pub fn record_batch(data: &[u8]) {
    exercise(&Bytes::copy_from_slice(data));
    if data.len() >= HEADER_LEN {
        let mut sealed = data.to_vec();
        let length = i32::try_from(data.len() - 12).unwrap_or(i32::MAX);
        sealed[8..12].copy_from_slice(&length.to_be_bytes());
        sealed[16] = records::MAGIC as u8;
        let crc = crc32c::crc32c(&sealed[21..]);
        sealed[17..21].copy_from_slice(&crc.to_be_bytes());
        exercise(&Bytes::from(sealed));
    }
}

/// Reads `data` as a request frame without its size prefix, then its body as the response of the same API and version:
/// a client of ours trusts a broker no more than a broker trusts a client.
pub fn request_decoder(data: &[u8]) {
    let mut decoder = Decoder::new(Bytes::copy_from_slice(data));
    let Ok(header) = RequestHeader::decode(&mut decoder) else { return };
    let Ok(key) = ApiKey::try_from(header.api_key) else { return };
    let body = Bytes::copy_from_slice(&data[data.len() - decoder.remaining()..]);
    for recode in [recode_request, recode_response] {
        stable(recode, key, header.api_version, &body);
    }
}

type Recode = fn(ApiKey, i16, Bytes) -> Result<Bytes, DecodeError>;

/// What was read and written once must read and write the same from then on, or we would garble what we pass along.
fn stable(recode: Recode, key: ApiKey, version: i16, body: &Bytes) {
    if let Ok(written) = recode(key, version, body.clone()) {
        assert_eq!(recode(key, version, written.clone()), Ok(written), "{} v{version}", key.name());
    }
}

fn exercise(batch: &Bytes) {
    for whole in records::split_batches(batch).flatten() {
        assert!(BatchHeader::parse(&whole).is_some_and(|header| header.total_len() == whole.len()));
    }
    let limits = ValidateLimits { max_decompressed_bytes: LIMIT, require_keys: false };
    if let Ok(header) = records::validate_batch(batch, &limits) {
        valid(batch, header);
    }
    let _ = records::control_kind(batch);
    let _ = records::empty_batch(batch);
    let mut walked = 0;
    let walk = records::for_each_record(batch, LIMIT, &mut |record| {
        assert_eq!(record.headers.len(), record.headers.count());
        walked += 1;
        ControlFlow::Continue(())
    });
    let decoded = records::decode_batch(batch, LIMIT);
    assert_eq!(walk.is_ok(), decoded.is_ok(), "two readers of one batch disagree");
    if let Ok((header, list)) = decoded {
        assert_eq!((list.len(), walked), (header.records_count as usize, list.len()));
        retained(batch, &list);
    }
}

/// What must hold of a batch that passed validation.
fn valid(batch: &Bytes, mut header: BatchHeader) {
    let Ok((_, list)) = records::decode_batch(batch, LIMIT) else { panic!("valid, and does not decode") };
    let repaired = records::repair_max_timestamp(batch, &mut header);
    assert_eq!(BatchHeader::parse(&repaired), Some(header));
    for codec in Compression::ALL {
        let Ok(changed) = records::recompress(&repaired, codec, LIMIT) else {
            panic!("valid, and no {codec}")
        };
        assert!(records::check_crc(&changed));
        let again = records::decode_batch(&changed, LIMIT).map(|(_, again)| again);
        assert_eq!(again.as_ref(), Ok(&list));
    }
}

/// Compaction must keep exactly what it is told to, whatever the offsets look like.
fn retained(batch: &Bytes, list: &[records::Record]) {
    let mut turn = 0;
    let kept = records::retain_records(batch, LIMIT, &mut |_, _, _| {
        turn += 1;
        turn % 2 == 0
    });
    let want: Vec<_> = list.iter().skip(1).step_by(2).cloned().collect();
    match kept {
        Ok(Some(kept)) => {
            // An append time stays that of the batch, and so does each record's.
            let again = records::decode_batch(&kept, LIMIT).map(|(_, again)| again);
            assert_eq!(again, Ok(want));
        }
        Ok(None) => assert!(want.is_empty() && !list.is_empty()),
        Err(error) => panic!("decodes, and cannot be compacted: {error}"),
    }
}

#[cfg(test)]
mod tests;
