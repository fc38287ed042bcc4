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
