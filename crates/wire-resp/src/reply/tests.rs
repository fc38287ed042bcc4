//! Answers in every state of arrival.

use proptest::prelude::*;

use super::*;
use crate::encode::Protocol;

/// All answers in `text`, brought in pieces of `piece` bytes.
fn read(text: &[u8], piece: usize) -> Result<Vec<Value>, ReplyError> {
    let (mut decoder, mut bytes, mut values) = (ReplyDecoder::default(), BytesMut::new(), Vec::new());
    for part in text.chunks(piece.max(1)) {
        bytes.extend_from_slice(part);
        while let Some(value) = decoder.decode(&mut bytes)? {
            values.push(value);
        }
    }
    Ok(values)
}

fn check(text: &str, expected: Result<&[Value], ReplyError>) {
    for piece in [1, 2, 5, text.len()] {
        assert_eq!(
            read(text.as_bytes(), piece).as_deref(),
            expected.as_ref().copied(),
            "{text:?} by {piece}"
        );
    }
}

#[test]
fn every_kind_of_answer_is_read() {
    use Value::*;
    let bytes = |text: &'static str| Bytes::from_static(text.as_bytes());
    check("+OK\r\n+PONG\r\n-ERR no\r\n", Ok(&[Value::ok(), Simple(bytes("PONG")), Error(bytes("ERR no"))]));
    check(":-7\r\n$2\r\n\r\n\r\n$0\r\n\r\n", Ok(&[Integer(-7), Bulk(bytes("\r\n")), Bulk(bytes(""))]));
    check("$-1\r\n*-1\r\n_\r\n", Ok(&[Null, Null, Null]));
    check("*2\r\n*0\r\n*1\r\n:1\r\n", Ok(&[Array(vec![Array(vec![]), Array(vec![Integer(1)])])]));
    check("%1\r\n+k\r\n~1\r\n#t\r\n", Ok(&[Map(vec![(Simple(bytes("k")), Set(vec![Boolean(true)]))])]));
    check(">1\r\n,1.5\r\n,-inf\r\n", Ok(&[Push(vec![Double(1.5)]), Double(f64::NEG_INFINITY)]));
    check(
        "=6\r\ntxt:hi\r\n(123\r\n",
        Ok(&[Verbatim { kind: *b"txt", text: bytes("hi") }, BigNumber(bytes("123"))]),
    );
    check("!5\r\nERR x\r\n", Ok(&[Error(bytes("ERR x"))]));
    check(
        "|1\r\n+ttl\r\n:3\r\n:9\r\n*1\r\n|1\r\n+a\r\n+b\r\n:8\r\n",
        Ok(&[Integer(9), Array(vec![Integer(8)])]),
    );
}

#[test]
fn what_no_server_sends_ends_the_connection() {
    check("x\r\n", Err(ReplyError::UnknownType(b'x')));
    check("\r\n", Err(ReplyError::UnknownType(b'\r')));
    check(":x\r\n", Err(ReplyError::BadNumber));
    check("$-2\r\n", Err(ReplyError::BadNumber));
    check("*5000000000\r\n", Err(ReplyError::BadNumber));
    check("+O\rK\r\n", Err(ReplyError::NoLineEnd));
    check("$1\r\nabc", Err(ReplyError::NoLineEnd));
    check("$2000000000\r\n", Err(ReplyError::TooLarge));
    check(&"*1\r\n".repeat(MAX_DEPTH + 1), Err(ReplyError::TooDeep));
    check(&format!("+{}", "x".repeat(MAX_LINE)), Err(ReplyError::TooLarge));
}

#[test]
fn large_answers_are_slices_of_what_was_read() {
    let body = "x".repeat(COPY_UP_TO);
    let mut bytes = BytesMut::from(format!("*2\r\n${}\r\n{body}\r\n:1\r\n+OK\r\n", body.len()).as_str());
    let from = bytes.as_ptr() as usize;
    let Ok(Some(Value::Array(values))) = ReplyDecoder::default().decode(&mut bytes) else { panic!() };
    let Value::Bulk(found) = &values[0] else { panic!() };
    assert_eq!(found.as_ptr() as usize, from + "*2\r\n$16384\r\n".len());
    assert_eq!((found.len(), &bytes[..]), (body.len(), &b"+OK\r\n"[..]));
}

#[test]
fn a_large_number_of_values_is_not_reserved_on_its_word() {
    let mut decoder = ReplyDecoder::default();
    assert_eq!(decoder.decode(&mut BytesMut::from("*4294967295\r\n:1\r\n")), Ok(None));
}

fn line() -> impl Strategy<Value = Bytes> {
    "[a-zA-Z0-9 ]{0,12}".prop_map(Bytes::from)
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        line().prop_map(Value::Simple),
        line().prop_map(Value::Error),
        any::<i64>().prop_map(Value::Integer),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::bulk),
        any::<f64>().prop_filter("equal to itself", |x| !x.is_nan()).prop_map(Value::Double),
        any::<bool>().prop_map(Value::Boolean),
        line().prop_map(|text| Value::Verbatim { kind: *b"mkd", text }),
        "[1-9][0-9]{0,30}".prop_map(|digits| Value::BigNumber(digits.into())),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Set),
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Push),
            prop::collection::vec((inner.clone(), inner), 0..4).prop_map(Value::Map),
        ]
    })
}

proptest! {
    #[test]
    fn what_a_server_writes_a_client_reads(values in prop::collection::vec(value(), 0..4), piece in 1usize..40) {
        let mut out = BytesMut::new();
        for value in &values {
            value.encode(Protocol::Resp3, &mut out);
        }
        prop_assert_eq!(read(&out, piece), Ok(values));
    }

    #[test]
    fn resp2_is_always_readable(value in value()) {
        let mut out = BytesMut::new();
        value.encode(Protocol::Resp2, &mut out);
        prop_assert_eq!(read(&out, 9).map(|all| all.len()), Ok(1));
    }
}
