//! Requests in every state of arrival.

use proptest::prelude::*;

use super::*;
use crate::args::OwnedArgs;
use crate::command;

/// All requests in `bytes`, brought in pieces of `piece` bytes; what is consumed is taken away, as a connection does.
fn read(bytes: &[u8], piece: usize, limits: Limits) -> Result<Vec<OwnedArgs>, ProtocolError> {
    let mut decoder = Decoder::new(limits);
    let (mut from, mut requests) = (0, Vec::new());
    for to in (0..bytes.len()).step_by(piece.max(1)).map(|start| (start + piece.max(1)).min(bytes.len())) {
        loop {
            match decoder.decode(&bytes[from..to])? {
                Decoded::Request { args, consumed } => {
                    requests.push(args.to_owned());
                    from += consumed;
                }
                Decoded::Empty { consumed } => from += consumed,
                Decoded::Incomplete { want } => {
                    assert!(want > 0);
                    break;
                }
            }
        }
    }
    Ok(requests)
}

fn check(text: &str, expected: Result<&[&[&str]], &str>) {
    for piece in [1, 2, 3, 7, text.len()] {
        let read = read(text.as_bytes(), piece, Limits::default()).map_err(|error| error.to_string());
        let expected = expected
            .map(|requests| {
                requests.iter().map(|request| OwnedArgs::from_slices(*request)).collect::<Vec<_>>()
            })
            .map_err(str::to_owned);
        assert_eq!(read, expected, "{text:?} in pieces of {piece}");
    }
}

#[test]
fn arrays_and_lines_follow_each_other() {
    check("*1\r\n$4\r\nPING\r\n", Ok(&[&["PING"]]));
    check("PING\r\nGET a\n\r\n*0\r\n*-1\r\n*1\r\n$0\r\n\r\n", Ok(&[&["PING"], &["GET", "a"], &[""]]));
    check("*2\r\n$3\r\nGET\r\n$2\r\n\r\n\r\nPING\r\n", Ok(&[&["GET", "\r\n"], &["PING"]]));
}

#[test]
fn typed_lines_have_quotes_and_escapes() {
    check("  SET  k \"a\\x41\\n\\\"\" 'it\\'s' \r\n", Ok(&[&["SET", "k", "aA\n\"", "it's"]]));
    check("ECHO \"\" '' \"\\xzz\"\n", Ok(&[&["ECHO", "", "", "xzz"]]));
    check("ECHO a\0 b\n\0 x\n", Ok(&[&["ECHO", "a"]]));
    check("ECHO a\"b\"\n", Ok(&[&["ECHO", "ab"]]));
    for wrong in ["ECHO \"a\n", "ECHO 'a\n", "ECHO \"a\"b\n", "ECHO 'a'b\n"] {
        check(wrong, Err("Protocol error: unbalanced quotes in request"));
    }
}

#[test]
fn what_is_wrong_is_answered_in_the_words_of_redis() {
    let line = "x".repeat(MAX_LINE + 1);
    for (text, expected) in [
        ("*3000000000\r\n", "invalid multibulk length"),
        ("*2147483648\r\n", "invalid multibulk length"),
        ("*x\r\n", "invalid multibulk length"),
        ("*\r\n", "invalid multibulk length"),
        ("*3\r\n$3\r\nSET\r\n$1\r\nx\r\nfooz\r\n", "expected '$', got 'f'"),
        ("*1\r\n:1\r\n", "expected '$', got ':'"),
        ("*1\r\n\r\n", "expected '$', got '\r'"),
        ("*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$2000000000\r\n", "invalid bulk length"),
        ("*1\r\n$-10\r\n", "invalid bulk length"),
        ("*1\r\n$blabla\r\n", "invalid bulk length"),
        (&format!("*{line}"), "too big mbulk count string"),
        (&format!("*1\r\n${line}"), "too big bulk count string"),
        (&line, "too big inline request"),
        (&format!("{line}\n"), "too big inline request"),
    ] {
        check(text, Err(&format!("Protocol error: {expected}")));
    }
}

#[test]
fn strangers_may_send_little() {
    let limits = Limits { unauthenticated: true, ..Limits::default() };
    assert_eq!(read(b"*11\r\n", 1, limits), Err(ProtocolError::UnauthenticatedCount));
    assert_eq!(read(b"*1\r\n$16385\r\n", 1, limits), Err(ProtocolError::UnauthenticatedLength));
    assert_eq!(read(b"*2\r\n$4\r\nAUTH\r\n$1\r\nx\r\n", 1, limits).map(|all| all.len()), Ok(1));
}

#[test]
fn a_request_is_bounded_as_a_whole() {
    let limits = Limits { request: 64, ..Limits::default() };
    assert_eq!(read(b"*2\r\n$3\r\nGET\r\n$60\r\n", 1, limits), Err(ProtocolError::RequestTooBig));
}

#[test]
fn what_is_wanted_grows_with_what_arrived() {
    let mut decoder = Decoder::default();
    let mut bytes = b"*2\r\n$3\r\nSET\r\n$536870912\r\n".to_vec();
    let mut wanted = Vec::new();
    while bytes.len() < 1 << 20 {
        let Ok(Decoded::Incomplete { want }) = decoder.decode(&bytes) else { panic!("not complete yet") };
        wanted.push(want);
        bytes.resize(bytes.len() + want, b'x');
    }
    assert!(wanted[0] <= 16 * 1024, "{wanted:?}");
    assert!(wanted.windows(2).all(|pair| pair[1] <= 2 * pair[0] + 16 * 1024), "{wanted:?}");
    assert!(wanted.len() < 12, "{wanted:?}");
}

#[test]
fn a_million_arguments_are_not_reserved_on_their_word() {
    let mut decoder = Decoder::default();
    assert!(matches!(decoder.decode(b"*1048576\r\n$1\r\na\r\n"), Ok(Decoded::Incomplete { .. })));
    assert!(decoder.spans.capacity() < 64);
}

proptest! {
    #[test]
    fn what_a_client_writes_a_server_reads(
        requests in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..6), 0..8),
        piece in 1usize..64,
    ) {
        let mut bytes = bytes::BytesMut::new();
        for request in &requests {
            command::encode(&mut bytes, request);
        }
        let expected: Vec<_> = requests.iter().map(OwnedArgs::from_slices).collect();
        prop_assert_eq!(read(&bytes, piece, Limits::default()), Ok(expected));
    }

    #[test]
    fn pieces_change_nothing(bytes in prop::collection::vec(
        prop::sample::select(b"*$-019\r\n\"'\\x a".to_vec()), 0..60), piece in 1usize..9,
    ) {
        let whole = read(&bytes, bytes.len(), Limits::default());
        prop_assert_eq!(read(&bytes, piece, Limits::default()), whole);
    }
}

/// A command on the wire.
fn encoded<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut out = bytes::BytesMut::new();
    command::encode(&mut out, args);
    out.to_vec()
}

/// The requests of a batch, and how many bytes they are.
fn batched(decoder: &Decoder, bytes: &[u8], most: usize) -> (Vec<OwnedArgs>, usize) {
    let (mut batch, mut from) = (Batch::default(), 0);
    decoder.batch(bytes, most, &mut batch);
    let requests = (0..batch.len()).filter_map(|index| batch.get(bytes, index));
    let requests = requests.map(|(args, consumed)| {
        from += consumed;
        args.to_owned()
    });
    (requests.collect(), from)
}

#[test]
fn a_batch_holds_what_is_whole_and_plain_and_nothing_else() {
    let check = |text: &str, plain: usize| {
        let (all, _) = batched(&Decoder::default(), text.as_bytes(), 9);
        assert_eq!(all.len(), plain, "{text:?}");
    };
    check("", 0);
    check("*1\r\n$4\r\nPING\r\n*1\r\n$4\r\nPING\r\nPING\r\n*1\r\n$4\r\nPING\r\n", 2);
    check("*0\r\n*1\r\n$4\r\nPING\r\n", 0);
    check("*1\r\n$04\r\nPING\r\n", 0);
    check("*01\r\n$4\r\nPING\r\n", 0);
    check("*1\r\n+4\r\nPING\r\n", 0);
    check("*1\r\n$-1\r\n", 0);
    check("*1\r\n$1234567890123\r\n", 0);
    check(&"*1\r\n$4\r\nPING\r\n".repeat(12), 9);
    let bytes = encoded(&["SET", "k", &"v".repeat(1_234)]);
    assert_eq!(batched(&Decoder::default(), &bytes, 9).1, bytes.len());
    for cut in 0..bytes.len() {
        assert_eq!(batched(&Decoder::default(), &bytes[..cut], 9).0, [], "cut at {cut}");
    }
    // What has begun to be decoded, or may not be sent yet, is no part of a batch.
    let mut decoder = Decoder::default();
    assert!(matches!(decoder.decode(&bytes[..20]), Ok(Decoded::Incomplete { .. })));
    assert_eq!(batched(&decoder, &bytes, 9).0, []);
    let limits = Limits { unauthenticated: true, ..Limits::default() };
    assert_eq!(batched(&Decoder::new(limits), &bytes, 9).0, []);
    let limits = Limits { bulk: 1_233, ..Limits::default() };
    assert_eq!(batched(&Decoder::new(limits), &bytes, 9).0, []);
    let limits = Limits { request: bytes.len() - 1, ..Limits::default() };
    assert_eq!(batched(&Decoder::new(limits), &bytes, 9).0, []);
}

proptest! {
    #[test]
    fn a_batch_reads_as_the_decoder_does(
        requests in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..150), 1..5), 1..6),
        broken in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        let mut bytes: Vec<u8> = requests.iter().flat_map(|args| encoded(args)).collect();
        if let Some((at, with)) = broken {
            let at = at.index(bytes.len());
            bytes[at] = with;
        }
        let (mut decoder, mut from) = (Decoder::default(), 0);
        let (whole, _) = batched(&decoder, &bytes, 99);
        for request in whole {
            match decoder.decode(&bytes[from..]) {
                Ok(Decoded::Request { args, consumed }) => {
                    prop_assert_eq!(args.to_owned(), request);
                    from += consumed;
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
