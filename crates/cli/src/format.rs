//! Formats of messages, after kcat: how `consume` prints one, how `produce` reads a line.
//!
//! Invariant: bytes pass through unchanged; only JSON output encodes them as text, and names the encoding. A null key or value
//! prints as nothing, and its size as -1.

use std::io::{self, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use moim_wire_kafka::records::Record;
use serde_json::{Value, json};

/// A part of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(Vec<u8>),
    Field(Field),
}

/// A property of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Topic,
    Partition,
    Offset,
    Key,
    Value,
    Timestamp,
    Headers,
    KeySize,
    ValueSize,
}

/// A parsed format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MessageFormat {
    pieces: Vec<Piece>,
}

impl MessageFormat {
    /// Reads `%k %v\n` and the like.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut literal = Vec::new();
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match c {
                '%' => match chars.next() {
                    Some('%') => literal.push(b'%'),
                    name => {
                        let field = name.and_then(field_named).ok_or_else(|| {
                            let name =
                                name.map_or_else(|| "at the end".to_owned(), |name| format!("%{name}"));
                            format!("unknown field {name}; there are %t %p %o %k %v %s %T %h %K %S and %%")
                        })?;
                        if !literal.is_empty() {
                            pieces.push(Piece::Literal(std::mem::take(&mut literal)));
                        }
                        pieces.push(Piece::Field(field));
                    }
                },
                '\\' => literal.push(escape(&mut chars)?),
                c => literal.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal));
        }
        Ok(Self { pieces })
    }

    /// Prints one message.
    pub(crate) fn write(
        &self,
        out: &mut impl Write,
        topic: &str,
        partition: i32,
        record: &Record,
    ) -> io::Result<()> {
        for piece in &self.pieces {
            match piece {
                Piece::Literal(bytes) => out.write_all(bytes)?,
                Piece::Field(Field::Topic) => out.write_all(topic.as_bytes())?,
                Piece::Field(Field::Partition) => write!(out, "{partition}")?,
                Piece::Field(Field::Offset) => write!(out, "{}", record.offset)?,
                Piece::Field(Field::Timestamp) => write!(out, "{}", record.timestamp)?,
                Piece::Field(Field::Key) => out.write_all(record.key.as_deref().unwrap_or_default())?,
                Piece::Field(Field::Value) => out.write_all(record.value.as_deref().unwrap_or_default())?,
                Piece::Field(Field::KeySize) => write!(out, "{}", size(record.key.as_deref()))?,
                Piece::Field(Field::ValueSize) => write!(out, "{}", size(record.value.as_deref()))?,
                Piece::Field(Field::Headers) => {
                    for (index, (name, value)) in record.headers.iter().enumerate() {
                        out.write_all(if index == 0 { b"" } else { b"," })?;
                        out.write_all(name)?;
                        out.write_all(b"=")?;
                        out.write_all(value.as_deref().unwrap_or_default())?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn field_named(name: char) -> Option<Field> {
    Some(match name {
        't' => Field::Topic,
        'p' => Field::Partition,
        'o' => Field::Offset,
        'k' => Field::Key,
        'v' | 's' => Field::Value,
        'T' => Field::Timestamp,
        'h' => Field::Headers,
        'K' => Field::KeySize,
        'S' => Field::ValueSize,
        _ => return None,
    })
}

fn escape(chars: &mut std::str::Chars<'_>) -> Result<u8, String> {
    match chars.next() {
        Some('n') => Ok(b'\n'),
        Some('t') => Ok(b'\t'),
        Some('r') => Ok(b'\r'),
        Some('0') => Ok(0),
        Some('\\') => Ok(b'\\'),
        Some('x') => {
            let digits: String = chars.by_ref().take(2).collect();
            let byte = (digits.len() == 2).then(|| u8::from_str_radix(&digits, 16).ok()).flatten();
            byte.ok_or_else(|| format!("\\x{digits} is not a byte; write two hexadecimal digits"))
        }
        Some(c) => Err(format!("unknown escape \\{c}; there are \\n \\t \\r \\0 \\\\ and \\xHH")),
        None => Err("a backslash at the end; write \\\\ for one".to_owned()),
    }
}

fn size(bytes: Option<&[u8]>) -> i64 {
    bytes.map_or(-1, |bytes| i64::try_from(bytes.len()).unwrap_or(i64::MAX))
}

/// A message as one JSON object. No key is ever left out.
pub(crate) fn message_json(topic: &str, partition: i32, record: &Record) -> Value {
    let (key, key_encoding) = bytes_json(record.key.as_deref());
    let (value, value_encoding) = bytes_json(record.value.as_deref());
    let header = |(name, value): &(bytes::Bytes, Option<bytes::Bytes>)| {
        let (value, value_encoding) = bytes_json(value.as_deref());
        json!({ "key": String::from_utf8_lossy(name), "value": value, "value_encoding": value_encoding })
    };
    json!({
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": key,
        "key_encoding": key_encoding,
        "value": value,
        "value_encoding": value_encoding,
        "headers": record.headers.iter().map(header).collect::<Vec<_>>(),
    })
}

/// Bytes as text when they are text, else as base64; null stays null.
pub(crate) fn bytes_json(bytes: Option<&[u8]>) -> (Value, Value) {
    match bytes.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => (Value::Null, Value::Null),
        Some((_, Ok(text))) => (text.into(), "utf8".into()),
        Some((bytes, Err(_))) => (STANDARD.encode(bytes).into(), "base64".into()),
    }
}

/// How a line of input becomes a message.
#[derive(Clone, Debug)]
pub(crate) struct LineFormat {
    pieces: Vec<Piece>,
}

/// The name and the value of a header.
pub(crate) type Header<'a> = (&'a [u8], Option<&'a [u8]>);

/// The parts of a line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// The key, when the format has one.
    pub(crate) key: Option<&'a [u8]>,
    /// The value.
    pub(crate) value: &'a [u8],
    /// Headers, in order.
    pub(crate) headers: Vec<Header<'a>>,
    /// The partition, when the format has one.
    pub(crate) partition: Option<i32>,
}

impl LineFormat {
    /// Reads the format of a line; the newline at its end may be left out.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut pieces = MessageFormat::parse(text)?.pieces;
        if let Some(Piece::Literal(end)) = pieces.last_mut() {
            end.pop_if(|byte| *byte == b'\n');
            if end.is_empty() {
                pieces.pop();
            }
        }
        let mut seen = Vec::new();
        for pair in pieces.windows(2) {
            if matches!(pair, [Piece::Field(_), Piece::Field(_)]) {
                return Err("two fields need something between them".to_owned());
            }
        }
        for piece in &pieces {
            match piece {
                Piece::Literal(bytes) if bytes.contains(&b'\n') => {
                    return Err("a message is one line: \\n may stand at the end only".to_owned());
                }
                Piece::Literal(_) => {}
                Piece::Field(field @ (Field::Key | Field::Value | Field::Partition | Field::Headers)) => {
                    if seen.contains(field) {
                        return Err("a field may stand once only".to_owned());
                    }
                    seen.push(*field);
                }
                Piece::Field(_) => return Err("a line can hold %k, %v (or %s), %p and %h only".to_owned()),
            }
        }
        Ok(Self { pieces })
    }

    /// True if the format has a key.
    pub(crate) fn has_key(&self) -> bool {
        self.pieces.contains(&Piece::Field(Field::Key))
    }

    /// Parses a line without its newline. A field ends where the literal after it first occurs.
    pub(crate) fn split<'a>(&self, line: &'a [u8]) -> Result<Line<'a>, String> {
        let mut parsed = Line::default();
        let mut rest = line;
        let mut pieces = self.pieces.iter().peekable();
        while let Some(piece) = pieces.next() {
            let field = match piece {
                Piece::Literal(wanted) => {
                    rest = rest.strip_prefix(wanted.as_slice()).ok_or_else(|| missing(wanted))?;
                    continue;
                }
                Piece::Field(field) => field,
            };
            let len = match pieces.peek() {
                Some(Piece::Literal(end)) => {
                    rest.windows(end.len()).position(|at| at == end.as_slice()).ok_or_else(|| missing(end))?
                }
                _ => rest.len(),
            };
            let (text, after) = rest.split_at(len);
            rest = after;
            match field {
                Field::Key => parsed.key = Some(text),
                Field::Value => parsed.value = text,
                Field::Headers => parsed.headers = headers(text)?,
                Field::Partition => {
                    let number = std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok());
                    parsed.partition = Some(number.ok_or("the partition is not a number")?);
                }
                _ => return Err("a line can hold %k, %v (or %s), %p and %h only".to_owned()),
            }
        }
        if rest.is_empty() { Ok(parsed) } else { Err("more follows than the format has".to_owned()) }
    }
}

fn missing(wanted: &[u8]) -> String {
    format!("no `{}` where the format has one", String::from_utf8_lossy(wanted).escape_debug())
}

fn headers(text: &[u8]) -> Result<Vec<Header<'_>>, String> {
    let pairs = text.split(|byte| *byte == b',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let at = pair.iter().position(|byte| *byte == b'=').ok_or("a header is not KEY=VALUE")?;
            Ok((&pair[..at], Some(&pair[at + 1..])))
        })
        .collect()
}

#[cfg(test)]
mod tests;
