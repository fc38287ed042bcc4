//! The protocol between load clients and gateways: frames of a four-byte length (big endian) and a body whose first
//! byte is the kind.
//!
//! A session: `Hello` ▶ `Challenge` ▶ `Proof` ▶ `Welcome` or `Refused`; then any number of `Data` from the client and
//! `Ack` from the gateway; `Bye` from the client when it has sent everything, answered by `Done` when all of it is in
//! the queue.
//!
//! Memory is never allocated for a length that a peer merely claims: a frame is bounded by [`MAX_FRAME`], and is
//! decoded only when all its bytes have arrived.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::store::DIGEST;

/// Maximum size of a frame, without its length field.
pub const MAX_FRAME: usize = 1 << 20;
/// Maximum size of a message.
pub const MAX_MESSAGE: usize = MAX_FRAME - 64;
/// Maximum length of a client name.
pub const MAX_CLIENT_ID: usize = 128;
/// Protocol version; the first byte of `Hello`'s body.
const VERSION: u8 = 1;

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The client introduces itself.
    Hello {
        /// Name of the client.
        client: String,
        /// Incarnation of the client: a newer one fences an older one.
        incarnation: u64,
        /// The client's nonce of the proof.
        nonce: [u8; 16],
    },
    /// The gateway asks for a proof of the shared secret.
    Challenge {
        /// The gateway's nonce of the proof.
        nonce: [u8; 16],
    },
    /// The client proves its knowledge of the secret.
    Proof {
        /// HMAC-SHA-256, see [`crate::identity`].
        mac: [u8; 32],
    },
    /// The client may send.
    Welcome {
        /// Everything up to this sequence number is acknowledged.
        acked: u64,
        /// Maximum number of messages in flight beyond `acked`.
        window: u32,
    },
    /// The gateway ends the session.
    Refused {
        /// True if another gateway, or this one later, may accept the client.
        retry: bool,
        /// Reason, for the client's operator.
        reason: String,
    },
    /// A message.
    Data {
        /// Sequence number, from 1, without gaps.
        sn: u64,
        /// Text of the message.
        message: Bytes,
    },
    /// An acknowledgement.
    Ack {
        /// Everything up to this sequence number is acknowledged.
        acked: u64,
        /// Maximum number of messages in flight beyond `acked` from now on.
        window: u32,
        /// Single acknowledged messages beyond `acked`: they need not be resent.
        beyond: Vec<u64>,
    },
    /// The client has sent everything.
    Bye {
        /// The client's last sequence number.
        sent: u64,
        /// The digest of all lines ([`crate::store::digest_of_all`]); optional at the end of the frame.
        digest: Option<[u8; DIGEST]>,
    },
    /// The client's digest of the messages that the gateways already have under its name; they must match. May follow
    /// `Welcome`.
    Check {
        /// Last sequence number covered by the digest.
        upto: u64,
        /// The digest of the client's lines up to there.
        digest: [u8; DIGEST],
    },
    /// All messages are in the queue.
    Done {
        /// Sequence number of a missing message that blocks the count of the messages after it; 0 if absent.
        /// Omitted from the frame if 0.
        missing: u64,
    },
}

/// Why bytes are not a valid frame. The connection must be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame is longer than allowed.
    #[error("a frame of {0} bytes; at most {MAX_FRAME} are allowed")]
    TooLong(usize),
    /// The body does not match the kind.
    #[error("a malformed frame: {0}")]
    Malformed(&'static str),
    /// The peer speaks another protocol version.
    #[error("version {0} of the protocol is not spoken here; this is version {VERSION}")]
    Version(u8),
}

/// Appends a frame.
pub fn encode(frame: &Frame, out: &mut BytesMut) {
    let start = out.len();
    out.put_u32(0);
    match frame {
        Frame::Hello { client, incarnation, nonce } => {
            out.put_u8(1);
            out.put_u8(VERSION);
            out.put_u64(*incarnation);
            out.put_slice(nonce);
            out.put_slice(client.as_bytes());
        }
        Frame::Challenge { nonce } => {
            out.put_u8(2);
            out.put_slice(nonce);
        }
        Frame::Proof { mac } => {
            out.put_u8(3);
            out.put_slice(mac);
        }
        Frame::Welcome { acked, window } => {
            out.put_u8(4);
            out.put_u64(*acked);
            out.put_u32(*window);
        }
        Frame::Refused { retry, reason } => {
            out.put_u8(5);
            out.put_u8(u8::from(*retry));
            out.put_slice(reason.as_bytes());
        }
        Frame::Data { sn, message } => put_data(*sn, message, out),
        Frame::Ack { acked, window, beyond } => {
            out.put_u8(7);
            out.put_u64(*acked);
            out.put_u32(*window);
            beyond.iter().for_each(|sn| out.put_u64(*sn));
        }
        Frame::Bye { sent, digest } => {
            out.put_u8(8);
            out.put_u64(*sent);
            digest.iter().for_each(|digest| out.put_slice(digest));
        }
        Frame::Check { upto, digest } => {
            out.put_u8(10);
            out.put_u64(*upto);
            out.put_slice(digest);
        }
        Frame::Done { missing } => {
            out.put_u8(9);
            if *missing > 0 {
                out.put_u64(*missing);
            }
        }
    }
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_be_bytes());
}

/// Appends a `Data` frame: like [`encode`], without taking ownership of the message.
pub(crate) fn encode_data(sn: u64, message: &[u8], out: &mut BytesMut) {
    out.put_u32((1 + 8 + message.len()) as u32);
    put_data(sn, message, out);
}

fn put_data(sn: u64, message: &[u8], out: &mut BytesMut) {
    out.put_u8(6);
    out.put_u64(sn);
    out.put_slice(message);
}

/// Takes the next frame off the front, if it is complete.
pub fn decode(input: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
    let Some(head) = input.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*head) as usize;
    if length > MAX_FRAME {
        return Err(FrameError::TooLong(length));
    }
    if input.len() < 4 + length {
        return Ok(None);
    }
    input.advance(4);
    parse(input.split_to(length).freeze()).map(Some)
}

fn parse(mut body: Bytes) -> Result<Frame, FrameError> {
    let short = FrameError::Malformed("it ends too early");
    let kind = body.try_get_u8().map_err(|_| FrameError::Malformed("it is empty"))?;
    let number =
        |body: &mut Bytes| body.try_get_u64().map_err(|_| FrameError::Malformed("it ends too early"));
    let frame = match kind {
        1 => {
            let version = body.try_get_u8().map_err(|_| short)?;
            if version != VERSION {
                return Err(FrameError::Version(version));
            }
            let incarnation = number(&mut body)?;
            let nonce = array(&mut body)?;
            return Ok(Frame::Hello { client: client_id(&body)?, incarnation, nonce });
        }
        2 => Frame::Challenge { nonce: array(&mut body)? },
        3 => Frame::Proof { mac: array(&mut body)? },
        4 => {
            let acked = number(&mut body)?;
            Frame::Welcome { acked, window: body.try_get_u32().map_err(|_| short)? }
        }
        5 => {
            let retry = body.try_get_u8().map_err(|_| short)? != 0;
            return Ok(Frame::Refused { retry, reason: String::from_utf8_lossy(&body).into_owned() });
        }
        6 => {
            let sn = number(&mut body)?;
            return Ok(Frame::Data { sn, message: body });
        }
        7 => {
            let acked = number(&mut body)?;
            let window = body.try_get_u32().map_err(|_| short)?;
            let mut beyond = Vec::with_capacity(body.len() / 8);
            while body.len() >= 8 {
                beyond.push(body.get_u64());
            }
            Frame::Ack { acked, window, beyond }
        }
        8 => {
            let sent = number(&mut body)?;
            let digest = if body.is_empty() { None } else { Some(array(&mut body)?) };
            Frame::Bye { sent, digest }
        }
        10 => Frame::Check { upto: number(&mut body)?, digest: array(&mut body)? },
        9 if body.is_empty() => Frame::Done { missing: 0 },
        9 => Frame::Done { missing: number(&mut body)? },
        _ => return Err(FrameError::Malformed("its kind is unknown")),
    };
    if body.is_empty() { Ok(frame) } else { Err(FrameError::Malformed("it has bytes too many")) }
}

fn array<const N: usize>(body: &mut Bytes) -> Result<[u8; N], FrameError> {
    let array = *body.first_chunk::<N>().ok_or(FrameError::Malformed("it ends too early"))?;
    body.advance(N);
    Ok(array)
}

/// Names become parts of keys with hash tags, so only plain characters are allowed.
fn client_id(bytes: &[u8]) -> Result<String, FrameError> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
    if bytes.is_empty() || bytes.len() > MAX_CLIENT_ID || !bytes.iter().all(plain) {
        return Err(FrameError::Malformed(
            "a client id has 1 to 128 letters, digits, dashes, underscores, dots or colons",
        ));
    }
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some() -> Vec<Frame> {
        vec![
            Frame::Hello { client: "c-1".into(), incarnation: 3, nonce: [7; 16] },
            Frame::Challenge { nonce: [9; 16] },
            Frame::Proof { mac: [1; 32] },
            Frame::Welcome { acked: 5, window: 100 },
            Frame::Refused { retry: true, reason: "later".into() },
            Frame::Data { sn: 6, message: Bytes::from_static(b"hello") },
            Frame::Ack { acked: 6, window: 9, beyond: vec![8, 9] },
            Frame::Bye { sent: 6, digest: None },
            Frame::Bye { sent: 6, digest: Some([4; 16]) },
            Frame::Check { upto: 5, digest: [3; 16] },
            Frame::Done { missing: 0 },
            Frame::Done { missing: 3 },
        ]
    }

    #[test]
    fn frames_decode_from_any_fragmentation() {
        let mut wire = BytesMut::new();
        for frame in some() {
            match &frame {
                Frame::Data { sn, message } => encode_data(*sn, message, &mut wire),
                frame => encode(frame, &mut wire),
            }
        }
        let mut input = BytesMut::new();
        let mut seen = Vec::new();
        for byte in wire {
            input.put_u8(byte);
            while let Some(frame) = decode(&mut input).unwrap() {
                seen.push(frame);
            }
        }
        assert_eq!(seen, some());
    }

    #[test]
    fn oversized_frame_is_refused_before_its_body_arrives() {
        let mut input = BytesMut::from(&(MAX_FRAME as u32 + 1).to_be_bytes()[..]);
        assert_eq!(decode(&mut input), Err(FrameError::TooLong(MAX_FRAME + 1)));
    }

    #[test]
    fn client_names_that_could_escape_the_hash_tag_are_refused() {
        for wrong in ["", "a}b", "a{b", "a b", &"x".repeat(129)] {
            let mut wire = BytesMut::new();
            encode(&Frame::Hello { client: wrong.into(), incarnation: 1, nonce: [0; 16] }, &mut wire);
            assert!(matches!(decode(&mut wire), Err(FrameError::Malformed(_))), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_decode_to_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut input = BytesMut::from(&(bytes.len() as u32).to_be_bytes()[..]);
            input.extend_from_slice(&bytes);
            let _ = decode(&mut input);
        }
    }
}
