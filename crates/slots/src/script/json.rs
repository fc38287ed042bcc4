//! The `cjson` library of scripts.
//!
//! What is read comes from clients: nesting is bounded, and so is what a sparse table may become.

use mlua::{LightUserData, Lua, MultiValue, Result, Table, Value};

use super::{Answer, argument, raise, wrong};
use crate::value::number::format_g;

/// Deepest nesting that is written or read.
const MAX_DEPTH: usize = 1000;

type Outcome<T> = std::result::Result<T, String>;

/// The library.
pub(super) fn library(lua: &Lua) -> Result<Table> {
    let table = lua.create_table()?;
    table.set("encode", lua.create_function(|lua, args: MultiValue| encode(lua, &args))?)?;
    table.set("decode", lua.create_function(|lua, args: MultiValue| decode(lua, &args))?)?;
    for name in ["encode_sparse_array", "encode_max_depth", "decode_max_depth", "encode_number_precision"] {
        table.set(name, lua.create_function(|_, _: MultiValue| Ok(Value::Nil))?)?;
    }
    for name in [
        "encode_keep_buffer",
        "encode_invalid_numbers",
        "decode_invalid_numbers",
        "decode_array_with_array_mt",
    ] {
        table.set(name, lua.create_function(|_, _: MultiValue| Ok(Value::Nil))?)?;
    }
    table.set("null", Value::LightUserData(LightUserData(std::ptr::null_mut())))?;
    table.set("_NAME", "cjson")?;
    table.set("_VERSION", "2.1.0")?;
    Ok(table)
}

fn encode(lua: &Lua, args: &MultiValue) -> Answer {
    let mut text = Vec::new();
    match argument(args, 0)
        .ok_or_else(|| wrong(1, "value", "no value"))
        .and_then(|value| write(&mut text, value, 0))
    {
        Ok(()) => lua.create_string(&text).map(Value::String),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

fn write(to: &mut Vec<u8>, value: &Value, depth: usize) -> Outcome<()> {
    if depth > MAX_DEPTH {
        return Err(format!("Cannot serialise, excessive depth ({depth})"));
    }
    match value {
        Value::Nil | Value::LightUserData(_) => to.extend_from_slice(b"null"),
        Value::Boolean(truth) => to.extend_from_slice(if *truth { b"true" } else { b"false" }),
        Value::Integer(number) => write_number(to, *number as f64)?,
        Value::Number(number) => write_number(to, *number)?,
        Value::String(text) => write_string(to, &text.as_bytes()),
        Value::Table(table) => write_table(to, table, depth)?,
        other => return Err(format!("Cannot serialise {}: type not supported", other.type_name())),
    }
    Ok(())
}

fn write_number(to: &mut Vec<u8>, number: f64) -> Outcome<()> {
    if !number.is_finite() {
        return Err("Cannot serialise number: must not be NaN or Inf".into());
    }
    to.extend_from_slice(format_g(number, 14).as_bytes());
    Ok(())
}

fn write_string(to: &mut Vec<u8>, text: &[u8]) {
    to.push(b'"');
    for &byte in text {
        match byte {
            b'"' => to.extend_from_slice(b"\\\""),
            b'\\' => to.extend_from_slice(b"\\\\"),
            b'/' => to.extend_from_slice(b"\\/"),
            8 => to.extend_from_slice(b"\\b"),
            9 => to.extend_from_slice(b"\\t"),
            10 => to.extend_from_slice(b"\\n"),
            12 => to.extend_from_slice(b"\\f"),
            13 => to.extend_from_slice(b"\\r"),
            0..0x20 | 0x7f => to.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => to.push(byte),
        }
    }
    to.push(b'"');
}

/// How long the array is that a table is; `None` when it is no array. A table with large holes is refused.
fn array_length(table: &Table) -> Outcome<Option<i64>> {
    let (mut highest, mut items) = (0i64, 0i64);
    for pair in table.pairs::<Value, Value>() {
        let (key, _) = pair.map_err(|error| error.to_string())?;
        let key = match key {
            Value::Integer(key) if key > 0 => key,
            Value::Number(key) if key > 0.0 && key.fract() == 0.0 && key < 1e15 => key as i64,
            _ => return Ok(None),
        };
        highest = highest.max(key);
        items += 1;
    }
    if highest > 10 && highest > items * 2 {
        return Err("Cannot serialise table: excessively sparse array".into());
    }
    Ok((items > 0).then_some(highest))
}

fn write_table(to: &mut Vec<u8>, table: &Table, depth: usize) -> Outcome<()> {
    if let Some(length) = array_length(table)? {
        to.push(b'[');
        for at in 1..=length {
            if at > 1 {
                to.push(b',');
            }
            let value: Value = table.raw_get(at).map_err(|error| error.to_string())?;
            write(to, &value, depth + 1)?;
        }
        to.push(b']');
        return Ok(());
    }
    to.push(b'{');
    let mut first = true;
    for pair in table.pairs::<Value, Value>() {
        let (key, value) = pair.map_err(|error| error.to_string())?;
        if !std::mem::take(&mut first) {
            to.push(b',');
        }
        match &key {
            Value::String(text) => write_string(to, &text.as_bytes()),
            Value::Integer(number) => write_string(to, format_g(*number as f64, 14).as_bytes()),
            Value::Number(number) => write_string(to, format_g(*number, 14).as_bytes()),
            _ => return Err("Cannot serialise table: table key must be a number or string".into()),
        }
        to.push(b':');
        write(to, &value, depth + 1)?;
    }
    to.push(b'}');
    Ok(())
}

fn decode(lua: &Lua, args: &MultiValue) -> Answer {
    let text = match argument(args, 0) {
        Some(Value::String(text)) => text.as_bytes().to_vec(),
        Some(Value::Integer(number)) => number.to_string().into_bytes(),
        other => {
            let found = other.map_or("no value", Value::type_name);
            return Err(raise(lua, &wrong(1, "string", found)));
        }
    };
    let mut parser = Parser { lua, text: &text, at: 0 };
    let parsed = parser.value(0).and_then(|value| {
        parser.spaces();
        if parser.at == text.len() { Ok(value) } else { Err(parser.unexpected("the end")) }
    });
    match parsed {
        Ok(value) => Ok(value),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

struct Parser<'a> {
    lua: &'a Lua,
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn spaces(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn unexpected(&self, wanted: &str) -> String {
        let found = match self.peek() {
            None => "T_END",
            Some(b'{') => "T_OBJ_BEGIN",
            Some(b'}') => "T_OBJ_END",
            Some(b'[') => "T_ARR_BEGIN",
            Some(b']') => "T_ARR_END",
            Some(b'"') => "T_STRING",
            Some(b'-' | b'0'..=b'9') => "T_NUMBER",
            Some(b't' | b'f') => "T_BOOLEAN",
            Some(b'n') => "T_NULL",
            Some(b':') => "T_COLON",
            Some(b',') => "T_COMMA",
            Some(_) => "invalid token",
        };
        format!("Expected {wanted} but found {found} at character {}", self.at + 1)
    }

    fn value(&mut self, depth: usize) -> Outcome<Value> {
        if depth > MAX_DEPTH {
            return Err(format!("Found too many nested data structures ({depth})"));
        }
        self.spaces();
        let memory = |error: mlua::Error| error.to_string();
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => {
                let text = self.string()?;
                self.lua.create_string(&text).map(Value::String).map_err(memory)
            }
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => {
                for (word, value) in [
                    (&b"true"[..], Value::Boolean(true)),
                    (b"false", Value::Boolean(false)),
                    (b"null", Value::LightUserData(LightUserData(std::ptr::null_mut()))),
                ] {
                    if self.text[self.at..].starts_with(word) {
                        self.at += word.len();
                        return Ok(value);
                    }
                }
                Err(self.unexpected("value"))
            }
        }
    }

    fn number(&mut self) -> Outcome<Value> {
        let begin = self.at;
        while matches!(self.peek(), Some(b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')) {
            self.at += 1;
        }
        let text = std::str::from_utf8(&self.text[begin..self.at]).unwrap_or_default();
        text.parse().map(Value::Number).map_err(|_| {
            self.at = begin;
            format!("Expected value but found invalid number at character {}", begin + 1)
        })
    }

    fn object(&mut self, depth: usize) -> Outcome<Value> {
        let table = self.lua.create_table().map_err(|error| error.to_string())?;
        self.at += 1;
        self.spaces();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Table(table));
        }
        loop {
            self.spaces();
            if self.peek() != Some(b'"') {
                return Err(self.unexpected("object key string"));
            }
            let key = self.string()?;
            self.spaces();
            if self.peek() != Some(b':') {
                return Err(self.unexpected("colon"));
            }
            self.at += 1;
            let value = self.value(depth + 1)?;
            let key = self.lua.create_string(&key).map_err(|error| error.to_string())?;
            table.raw_set(key, value).map_err(|error| error.to_string())?;
            self.spaces();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Table(table));
                }
                _ => return Err(self.unexpected("comma or object end")),
            }
        }
    }

    fn array(&mut self, depth: usize) -> Outcome<Value> {
        let table = self.lua.create_table().map_err(|error| error.to_string())?;
        self.at += 1;
        self.spaces();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::Table(table));
        }
        for index in 1.. {
            let value = self.value(depth + 1)?;
            table.raw_set(index, value).map_err(|error| error.to_string())?;
            self.spaces();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    break;
                }
                _ => return Err(self.unexpected("comma or array end")),
            }
        }
        Ok(Value::Table(table))
    }

    fn string(&mut self) -> Outcome<Vec<u8>> {
        let begin = self.at;
        self.at += 1;
        let mut text = Vec::new();
        loop {
            let Some(byte) = self.peek() else {
                self.at = begin;
                return Err(format!(
                    "Expected value but found unterminated string at character {}",
                    begin + 1
                ));
            };
            self.at += 1;
            match byte {
                b'"' => return Ok(text),
                b'\\' => self.escape(&mut text)?,
                byte => text.push(byte),
            }
        }
    }

    fn escape(&mut self, text: &mut Vec<u8>) -> Outcome<()> {
        let bad = |at: usize| format!("Expected value but found invalid escape code at character {at}");
        let byte = self.peek().ok_or_else(|| bad(self.at))?;
        self.at += 1;
        text.push(match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 8,
            b'f' => 12,
            b'n' => 10,
            b'r' => 13,
            b't' => 9,
            b'u' => {
                let mut code = self.hex4().ok_or_else(|| bad(self.at))?;
                if (0xd800..0xdc00).contains(&code) && self.text[self.at..].starts_with(b"\\u") {
                    self.at += 2;
                    let low = self.hex4().ok_or_else(|| bad(self.at))?;
                    if !(0xdc00..0xe000).contains(&low) {
                        return Err(bad(self.at));
                    }
                    code = 0x1_0000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                }
                let letter = char::from_u32(code).ok_or_else(|| bad(self.at))?;
                text.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
                return Ok(());
            }
            _ => return Err(bad(self.at)),
        });
        Ok(())
    }

    fn hex4(&mut self) -> Option<u32> {
        let digits = std::str::from_utf8(self.text.get(self.at..self.at + 4)?).ok()?;
        self.at += 4;
        u32::from_str_radix(digits, 16).ok()
    }
}
