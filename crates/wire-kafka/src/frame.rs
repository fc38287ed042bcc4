//! Whole frames: size prefix, header, body.
//!
//! The size prefix counts the bytes after itself, the holes for record data included.

use bytes::{Bytes, BytesMut};

use crate::api::ApiKey;
use crate::codec::{DecodeError, Decoder, EncodeError, Encoder, Gap, Message};
use crate::header::{RequestHeader, ResponseHeader};

/// Bytes of the size prefix.
pub const SIZE_PREFIX: usize = 4;

/// A request as it goes on the wire, size prefix included. The header says which version.
///
/// # Panics
/// When the request holds [`crate::Records::Gap`]: only a server splices files.
pub fn encode_request<R: Message>(header: &RequestHeader, request: &R) -> Result<Bytes, EncodeError> {
    let mut e = Encoder::new();
    e.i32(0);
    header.encode(&mut e)?;
    request.encode(&mut e, header.api_version)?;
    let (frame, gaps) = close_frame(e, 0)?;
    assert!(gaps.is_empty(), "a request cannot have gaps");
    Ok(frame.freeze())
}

/// Appends a response, size prefix included, to `buf`; the gaps are positions in the returned buffer.
pub fn encode_response<R: Message>(
    buf: BytesMut,
    correlation_id: i32,
    version: i16,
    response: &R,
) -> Result<(BytesMut, Vec<Gap>), EncodeError> {
    let start = buf.len();
    let mut e = Encoder::with_buf(buf);
    e.i32(0);
    ResponseHeader { correlation_id }.encode(&mut e, R::KEY, version);
    response.encode(&mut e, version)?;
    close_frame(e, start)
}

/// Reads a request from a frame without its size prefix. Every byte must belong to it.
pub fn decode_request<R: Message>(frame: Bytes) -> Result<(RequestHeader, R), DecodeError> {
    let mut d = Decoder::new(frame);
    let header = RequestHeader::decode(&mut d)?;
    if header.api_key != R::KEY as i16 {
        return Err(DecodeError::UnknownApi(header.api_key));
    }
    let request = decode_body(&mut d, header.api_version)?;
    Ok((header, request))
}

/// Reads the body that follows a header. Bytes left over are an error, except for ApiVersions: a newer client
/// may append to it before it knows what we speak.
pub fn decode_body<R: Message>(d: &mut Decoder, version: i16) -> Result<R, DecodeError> {
    let body = R::decode(d, version)?;
    if R::KEY != ApiKey::ApiVersions {
        d.finish()?;
    }
    Ok(body)
}

/// Reads a response from a frame without its size prefix.
pub fn decode_response<R: Message>(frame: Bytes, version: i16) -> Result<(ResponseHeader, R), DecodeError> {
    let mut d = Decoder::new(frame);
    let header = ResponseHeader::decode(&mut d, R::KEY, version)?;
    let response = decode_body(&mut d, version)?;
    Ok((header, response))
}

fn close_frame(mut e: Encoder, start: usize) -> Result<(BytesMut, Vec<Gap>), EncodeError> {
    let size = e.position() - start - SIZE_PREFIX + e.gap_bytes();
    e.patch_i32(start, i32::try_from(size).map_err(|_| EncodeError::TooLong(size))?);
    Ok(e.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{
        ApiVersionsRequest, FetchResponse, FetchableTopicResponse, HeartbeatRequest, PartitionData,
    };
    use crate::{KString, Records};

    fn header(key: ApiKey, version: i16) -> RequestHeader {
        RequestHeader {
            api_key: key as i16,
            api_version: version,
            correlation_id: -5,
            client_id: Some(KString::from_static("me")),
        }
    }

    #[test]
    fn the_size_prefix_counts_the_gaps_but_not_itself() {
        let response = FetchResponse {
            responses: vec![FetchableTopicResponse {
                partitions: vec![PartitionData { records: Some(Records::Gap(1000)), ..Default::default() }],
                ..Default::default()
            }],
            ..Default::default()
        };
        let earlier = BytesMut::from(&b"earlier"[..]);
        let (buf, gaps) = encode_response(earlier, 1, 12, &response).unwrap();
        assert_eq!(buf[..7], *b"earlier");
        let size = i32::from_be_bytes(*buf[7..].first_chunk().unwrap());
        assert_eq!(size as usize, buf.len() - 7 - SIZE_PREFIX + 1000);
        assert_eq!(gaps.iter().map(|gap| gap.len).collect::<Vec<_>>(), [1000]);
    }

    #[test]
    fn bytes_after_a_request_are_refused_except_after_api_versions() {
        let trailing = |frame: Bytes| Bytes::from([&frame[SIZE_PREFIX..], &[9]].concat());
        let frame = encode_request(&header(ApiKey::Heartbeat, 4), &HeartbeatRequest::default()).unwrap();
        let refused = decode_request::<HeartbeatRequest>(trailing(frame)).unwrap_err();
        assert_eq!(refused, DecodeError::TrailingBytes(1));
        let frame = encode_request(&header(ApiKey::ApiVersions, 3), &ApiVersionsRequest::default()).unwrap();
        assert!(decode_request::<ApiVersionsRequest>(trailing(frame)).is_ok());
    }

    #[test]
    fn a_request_of_another_api_is_refused() {
        let frame = encode_request(&header(ApiKey::Heartbeat, 4), &HeartbeatRequest::default()).unwrap();
        let refused = decode_request::<ApiVersionsRequest>(frame.slice(SIZE_PREFIX..)).unwrap_err();
        assert_eq!(refused, DecodeError::UnknownApi(12));
    }

    #[test]
    fn the_header_of_an_unknown_api_or_version_can_still_be_read() {
        for (api_key, api_version) in [(999, 3), (18, 99), (3, -1)] {
            let sent = RequestHeader { api_key, api_version, correlation_id: 4, client_id: None };
            let mut e = Encoder::new();
            sent.encode(&mut e).unwrap();
            let read = RequestHeader::decode(&mut Decoder::new(e.finish().0.freeze()));
            assert_eq!(read, Ok(sent));
        }
    }

    #[test]
    fn unknown_tagged_fields_in_a_header_are_skipped() {
        let mut e = Encoder::new();
        e.i32(7);
        e.uvarint(1);
        e.tagged_field(3, |e| {
            e.i64(1);
            Ok(())
        })
        .unwrap();
        e.i8(42);
        let mut d = Decoder::new(e.finish().0.freeze());
        assert_eq!(
            ResponseHeader::decode(&mut d, ApiKey::Produce, 9),
            Ok(ResponseHeader { correlation_id: 7 })
        );
        assert_eq!(d.i8(), Ok(42));
    }
}
