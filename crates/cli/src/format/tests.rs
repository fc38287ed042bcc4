//! Tables of formats.

use bytes::Bytes;

use super::*;

fn record() -> Record {
    Record {
        key: Some(Bytes::from_static(b"k")),
        value: Some(Bytes::from_static(b"va\xfflue")),
        headers: vec![
            (Bytes::from_static(b"a"), Some(Bytes::from_static(b"1"))),
            (Bytes::from_static(b"a"), None),
        ],
        timestamp: 5,
        offset: 42,
    }
}

#[test]
fn printing() {
    let null = Record { key: None, value: None, headers: vec![], timestamp: -1, offset: 0 };
    for (format, record, wanted) in [
        ("%t %p %o %T\\n", &record(), &b"topic 3 42 5\n"[..]),
        ("%k=%v", &record(), b"k=va\xfflue"),
        ("%s|%S|%K|%h", &record(), b"va\xfflue|6|1|a=1,a="),
        ("[%k][%v] %K %S", &null, b"[][] -1 -1"),
        ("100%% \\x41\\t\\\\ 모임", &record(), "100% A\t\\ 모임".as_bytes()),
        ("", &record(), b""),
    ] {
        let mut out = Vec::new();
        MessageFormat::parse(format).unwrap().write(&mut out, "topic", 3, record).unwrap();
        assert_eq!(out, wanted, "{format:?}");
    }
}

#[test]
fn wrong_formats_say_what_is_wrong() {
    for (format, wanted) in [
        ("%z", "unknown field %z; there are %t %p %o %k %v %s %T %h %K %S and %%"),
        ("%", "unknown field at the end; there are %t %p %o %k %v %s %T %h %K %S and %%"),
        ("\\q", "unknown escape \\q; there are \\n \\t \\r \\0 \\\\ and \\xHH"),
        ("\\", "a backslash at the end; write \\\\ for one"),
        ("\\x4", "\\x4 is not a byte; write two hexadecimal digits"),
        ("\\x모임", "\\x모임 is not a byte; write two hexadecimal digits"),
    ] {
        assert_eq!(MessageFormat::parse(format).unwrap_err(), wanted, "{format:?}");
    }
}

#[test]
fn json_says_how_bytes_are_written_and_omits_nothing() {
    let wanted = json!({
        "topic": "t", "partition": 3, "offset": 42, "timestamp": 5,
        "key": "k", "key_encoding": "utf8",
        "value": "dmH/bHVl", "value_encoding": "base64",
        "headers": [
            { "key": "a", "value": "1", "value_encoding": "utf8" },
            { "key": "a", "value": null, "value_encoding": null },
        ],
    });
    assert_eq!(message_json("t", 3, &record()), wanted);
}

#[test]
fn lines() {
    let line = |key: Option<&'static str>, value: &'static str| Line {
        key: key.map(str::as_bytes),
        value: value.as_bytes(),
        ..Line::default()
    };
    for (format, text, wanted) in [
        ("%v\\n", "a b", Ok(line(None, "a b"))),
        ("%s", "", Ok(line(None, ""))),
        ("%k,%v\\n", "a,b,c", Ok(line(Some("a"), "b,c"))),
        ("%k,%v", "a", Err("no `,` where the format has one")),
        ("%v;", "a;b", Err("more follows than the format has")),
        ("<%k> %v", "<> x", Ok(line(Some(""), "x"))),
        ("<%k> %v", "x", Err("no `<` where the format has one")),
        ("%p:%v", "x:1", Err("the partition is not a number")),
        ("%p:%v", "2:1", Ok(Line { partition: Some(2), ..line(None, "1") })),
        (
            "%h %v",
            "a=1,b= v",
            Ok(Line { headers: vec![(b"a", Some(b"1")), (b"b", Some(b""))], ..line(None, "v") }),
        ),
        ("%h %v", "a v", Err("a header is not KEY=VALUE")),
    ] {
        let format = LineFormat::parse(format).unwrap();
        assert_eq!(format.split(text.as_bytes()), wanted.map_err(str::to_owned), "{format:?} {text:?}");
    }
}

#[test]
fn formats_that_cannot_be_a_line() {
    for (format, wanted) in [
        ("%k%v", "two fields need something between them"),
        ("%v\\n%k\\n", "a message is one line: \\n may stand at the end only"),
        ("%o %v", "a line can hold %k, %v (or %s), %p and %h only"),
        ("%v %s", "a field may stand once only"),
    ] {
        assert_eq!(LineFormat::parse(format).unwrap_err(), wanted, "{format:?}");
    }
}
