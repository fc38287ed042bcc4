//! The fuzz targets: untrusted bytes into both decoders.
//!
//! The targets in `fuzz/` need a nightly compiler, so they only call these functions; the tests here run the same ones over
//! a fixed pseudo-random corpus on every `cargo test`. Invariant: these functions return for every input.

use bytes::BytesMut;

use crate::encode::Protocol;
use crate::reply::ReplyDecoder;
use crate::request::{Decoded, Decoder};

/// Reads `data` as requests, at once and in pieces: both ways must find the same.
pub fn request_decoder(data: &[u8]) {
    let piece = data.first().map_or(1, |byte| usize::from(*byte % 16) + 1);
    assert_eq!(requests(data, data.len()), requests(data, piece));
}

/// The requests of `data` that arrives by `piece`, and whether it ended in an error.
fn requests(data: &[u8], piece: usize) -> (Vec<Vec<Vec<u8>>>, bool) {
    let mut decoder = Decoder::default();
    let (mut from, mut to, mut found) = (0, 0, Vec::new());
    while to < data.len() {
        to = (to + piece.max(1)).min(data.len());
        loop {
            match decoder.decode(&data[from..to]) {
                Ok(Decoded::Request { args, consumed }) => {
                    found.push(args.iter().map(<[u8]>::to_vec).collect());
                    from += consumed;
                }
                Ok(Decoded::Empty { consumed }) => from += consumed,
                Ok(Decoded::Incomplete { .. }) => break,
                Err(_) => return (found, true),
            }
        }
    }
    (found, false)
}

/// Reads `data` as answers. What was read must be written and read again as the same.
pub fn reply_decoder(data: &[u8]) {
    let (mut decoder, mut bytes) = (ReplyDecoder::new(1 << 20), BytesMut::from(data));
    while let Ok(Some(value)) = decoder.decode(&mut bytes) {
        let mut written = BytesMut::new();
        value.encode(Protocol::Resp3, &mut written);
        let mut again = BytesMut::new();
        if let Ok(Some(value)) = ReplyDecoder::default().decode(&mut written.clone()) {
            value.encode(Protocol::Resp3, &mut again);
        }
        assert_eq!(written, again);
        written.clear();
        value.encode(Protocol::Resp2, &mut written);
        assert!(matches!(ReplyDecoder::default().decode(&mut written), Ok(Some(_))) && written.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs made of the pieces that the protocol is made of: plain noise dies at its first byte.
    fn corpus(run: fn(&[u8])) {
        const PIECES: [&str; 24] = [
            "*", "$", "\r\n", "\r", "\n", "+", "-", ":", "%", "~", ">", "|", "=", "!", "(", ",", "#t", "_",
            "0", "1", "3", "-1", "abc", "\"",
        ];
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..20_000 {
            let mut data = Vec::new();
            for _ in 0..random.usize(0..24) {
                match random.u8(0..16) {
                    0 => data.push(random.u8(..)),
                    1 => data.extend_from_slice(random.u32(..).to_string().as_bytes()),
                    2 => data.extend_from_slice(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"),
                    _ => data.extend_from_slice(random.choice(PIECES).unwrap_or_default().as_bytes()),
                }
            }
            run(&data);
        }
    }

    #[test]
    fn requests_of_any_bytes_are_taken_or_refused() {
        corpus(request_decoder);
    }

    #[test]
    fn answers_of_any_bytes_are_taken_or_refused() {
        corpus(reply_decoder);
    }
}
