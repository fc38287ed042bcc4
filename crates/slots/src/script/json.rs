//! The `cjson` library.
//!
//! The input is untrusted: nesting is bounded, and so is the size of an array from a sparse table. Settings last only
//! as long as the script that changes them: other scripts use the same interpreter.

use std::cell::Cell;
use std::rc::Rc;

use mlua::{LightUserData, Lua, MultiValue, Result, Table, Value};

use super::strings::check_size;
use super::{LuaResult, argument, interrupt, raise, wrong};
use crate::value::number::format_g;

/// Maximum nesting for encoding and decoding, whatever a script sets: both recurse on this thread's stack.
const MAX_DEPTH: usize = 1000;
/// Maximum length of a mostly sparse array.
const MAX_SPARSE_LENGTH: i64 = 1 << 20;
/// Maximum value of a numeric setting.
const MAX_SETTING: f64 = 2_147_483_647.0;

type Outcome<T> = std::result::Result<T, String>;

/// Handling of numbers that JSON cannot represent (NaN, infinity).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Invalid {
    Refused,
    Written,
    Null,
}

/// The `cjson` settings of a script.
#[derive(Clone, Copy)]
pub(super) struct Settings {
    /// True if an excessively sparse table is encoded as an object.
    sparse_convert: bool,
    /// Ratio of length to items above which a table is excessively sparse; 0 disables the check.
    sparse_ratio: i64,
    /// Length up to which a table is never excessively sparse.
    sparse_safe: i64,
    encode_depth: usize,
    decode_depth: usize,
    precision: usize,
    keep_buffer: bool,
    encode_invalid: Invalid,
    decode_invalid: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            sparse_convert: false,
            sparse_ratio: 2,
            sparse_safe: 10,
            encode_depth: MAX_DEPTH,
            decode_depth: MAX_DEPTH,
            precision: 14,
            keep_buffer: true,
            encode_invalid: Invalid::Refused,
            decode_invalid: true,
        }
    }
}

/// Parses an optional numeric setting from `least` to `most`.
fn whole(args: &MultiValue, at: usize, name: &str, least: f64, most: f64) -> Outcome<Option<i64>> {
    let number = match argument(args, at) {
        None | Some(Value::Nil) => return Ok(None),
        Some(Value::Integer(number)) => *number as f64,
        Some(Value::Number(number)) => *number,
        Some(Value::String(text)) => {
            text.to_str().ok().and_then(|text| text.trim().parse().ok()).unwrap_or(f64::NAN)
        }
        Some(_) => f64::NAN,
    };
    if (least..=most).contains(&number) {
        return Ok(Some(number as i64));
    }
    let at = at + 1;
    Err(format!("bad argument #{at} to '{name}' (expected integer between {least} and {most})"))
}

/// Parses an optional setting that is a boolean or one of the words.
fn choice(args: &MultiValue, name: &str, words: &[&str]) -> Outcome<Option<usize>> {
    match argument(args, 0) {
        None | Some(Value::Nil) => Ok(None),
        Some(Value::Boolean(is_on)) => Ok(Some(usize::from(*is_on))),
        Some(Value::String(text)) => {
            let text = text.to_string_lossy();
            let found = words.iter().position(|word| *word == text);
            found.map(Some).ok_or_else(|| format!("bad argument #1 to '{name}' (invalid option '{text}')"))
        }
        Some(other) => {
            Err(format!("bad argument #1 to '{name}' (string expected, got {})", other.type_name()))
        }
    }
}

/// A function that reads and changes a setting.
type Setter = fn(&mut Settings, &MultiValue) -> Outcome<MultiValue>;

fn sparse_array(settings: &mut Settings, args: &MultiValue) -> Outcome<MultiValue> {
    const NAME: &str = "encode_sparse_array";
    let convert = choice(args, NAME, &["off", "on"])?;
    let (ratio, safe) = (whole(args, 1, NAME, 0.0, MAX_SETTING)?, whole(args, 2, NAME, 0.0, MAX_SETTING)?);
    settings.sparse_convert = convert.map_or(settings.sparse_convert, |on| on == 1);
    settings.sparse_ratio = ratio.unwrap_or(settings.sparse_ratio);
    settings.sparse_safe = safe.unwrap_or(settings.sparse_safe);
    let number = |number: i64| Value::Number(number as f64);
    Ok(MultiValue::from_iter([
        Value::Boolean(settings.sparse_convert),
        number(settings.sparse_ratio),
        number(settings.sparse_safe),
    ]))
}

/// A single number as result.
fn single(number: usize) -> Outcome<MultiValue> {
    Ok(MultiValue::from_iter([Value::Number(number as f64)]))
}

fn flag(is_on: bool) -> Outcome<MultiValue> {
    Ok(MultiValue::from_iter([Value::Boolean(is_on)]))
}

fn depth(of: &mut usize, args: &MultiValue, name: &str) -> Outcome<MultiValue> {
    if let Some(depth) = whole(args, 0, name, 1.0, MAX_SETTING)? {
        *of = usize::try_from(depth).unwrap_or(MAX_DEPTH);
    }
    single(*of)
}

fn precision(settings: &mut Settings, args: &MultiValue) -> Outcome<MultiValue> {
    if let Some(digits) = whole(args, 0, "encode_number_precision", 1.0, 14.0)? {
        settings.precision = usize::try_from(digits).unwrap_or(14);
    }
    single(settings.precision)
}

fn keep_buffer(settings: &mut Settings, args: &MultiValue) -> Outcome<MultiValue> {
    let given = choice(args, "encode_keep_buffer", &["off", "on"])?;
    settings.keep_buffer = given.map_or(settings.keep_buffer, |on| on == 1);
    flag(settings.keep_buffer)
}

fn encode_invalid(settings: &mut Settings, args: &MultiValue) -> Outcome<MultiValue> {
    match choice(args, "encode_invalid_numbers", &["off", "on", "null"])? {
        None => {}
        Some(0) => settings.encode_invalid = Invalid::Refused,
        Some(1) => settings.encode_invalid = Invalid::Written,
        Some(_) => settings.encode_invalid = Invalid::Null,
    }
    flag(settings.encode_invalid != Invalid::Refused)
}

fn decode_invalid(settings: &mut Settings, args: &MultiValue) -> Outcome<MultiValue> {
    let given = choice(args, "decode_invalid_numbers", &["off", "on"])?;
    settings.decode_invalid = given.map_or(settings.decode_invalid, |on| on == 1);
    flag(settings.decode_invalid)
}

/// The setting functions with their maximum number of arguments.
const SETTERS: [(&str, usize, Setter); 7] = [
    ("encode_sparse_array", 3, sparse_array),
    ("encode_max_depth", 1, |settings, args| depth(&mut settings.encode_depth, args, "encode_max_depth")),
    ("decode_max_depth", 1, |settings, args| depth(&mut settings.decode_depth, args, "decode_max_depth")),
    ("encode_number_precision", 1, precision),
    ("encode_keep_buffer", 1, keep_buffer),
    ("encode_invalid_numbers", 1, encode_invalid),
    ("decode_invalid_numbers", 1, decode_invalid),
];

/// Creates the library table. The caller resets the settings before each script.
pub(super) fn library(lua: &Lua, settings: &Rc<Cell<Settings>>) -> Result<Table> {
    let table = lua.create_table()?;
    let current = Rc::clone(settings);
    let write = move |lua: &Lua, args: MultiValue| encode(lua, &args, current.get());
    table.set("encode", lua.create_function(write)?)?;
    let current = Rc::clone(settings);
    let read = move |lua: &Lua, args: MultiValue| decode(lua, &args, current.get());
    table.set("decode", lua.create_function(read)?)?;
    for (name, most, set) in SETTERS {
        let current = Rc::clone(settings);
        let act = move |lua: &Lua, args: MultiValue| {
            let mut settings = current.get();
            let outcome = if args.len() > most {
                Err(format!("bad argument #{} to '{name}' (found too many arguments)", most + 1))
            } else {
                set(&mut settings, &args)
            };
            let answer = outcome.map_err(|why| raise(lua, &why))?;
            current.set(settings);
            Ok(answer)
        };
        table.set(name, lua.create_function(act)?)?;
    }
    table.set("null", Value::LightUserData(LightUserData(std::ptr::null_mut())))?;
    table.set("_NAME", "cjson")?;
    table.set("_VERSION", "2.1.0")?;
    Ok(table)
}

fn encode(lua: &Lua, args: &MultiValue, settings: Settings) -> LuaResult {
    let mut writer = Writer { to: Vec::new(), settings };
    match argument(args, 0)
        .ok_or_else(|| wrong(1, "value", "no value"))
        .and_then(|value| writer.write(value, 0))
    {
        Ok(()) => lua.create_string(&writer.to).map(Value::String),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

struct Writer {
    to: Vec<u8>,
    settings: Settings,
}

impl Writer {
    /// Encodes a value at a nesting depth.
    fn write(&mut self, value: &Value, depth: usize) -> Outcome<()> {
        interrupt::work(16)?;
        check_size(&self.to)?;
        match value {
            Value::Nil | Value::LightUserData(_) => self.to.extend_from_slice(b"null"),
            Value::Boolean(truth) => self.to.extend_from_slice(if *truth { b"true" } else { b"false" }),
            Value::Integer(number) => self.number(*number as f64)?,
            Value::Number(number) => self.number(*number)?,
            Value::String(text) => write_string(&mut self.to, &text.as_bytes()),
            Value::Table(table) => self.table(table, depth + 1)?,
            other => return Err(format!("Cannot serialise {}: type not supported", other.type_name())),
        }
        Ok(())
    }

    fn number(&mut self, number: f64) -> Outcome<()> {
        if number.is_finite() {
            self.to.extend_from_slice(format_g(number, self.settings.precision).as_bytes());
            return Ok(());
        }
        match self.settings.encode_invalid {
            Invalid::Refused => return Err("Cannot serialise number: must not be NaN or Inf".into()),
            Invalid::Null => self.to.extend_from_slice(b"null"),
            Invalid::Written if number.is_nan() => self.to.extend_from_slice(b"nan"),
            Invalid::Written => self.to.extend_from_slice(if number > 0.0 { b"inf" } else { b"-inf" }),
        }
        Ok(())
    }

    /// Array length of a table; `None` if it is not an array. An excessively sparse table is rejected, or not an
    /// array.
    fn array_length(&self, table: &Table) -> Outcome<Option<i64>> {
        let Settings { sparse_convert, sparse_ratio, sparse_safe, .. } = self.settings;
        let (mut highest, mut items) = (0i64, 0i64);
        for pair in table.pairs::<Value, Value>() {
            let (key, _) = pair.map_err(|error| error.to_string())?;
            interrupt::work(8)?;
            let key = match key {
                Value::Integer(key) if key > 0 => key,
                Value::Number(key) if key > 0.0 && key.fract() == 0.0 && key < 1e15 => key as i64,
                _ => return Ok(None),
            };
            highest = highest.max(key);
            items += 1;
        }
        if sparse_ratio > 0 && highest > sparse_safe && highest > items.saturating_mul(sparse_ratio) {
            if sparse_convert {
                return Ok(None);
            }
            return Err("Cannot serialise table: excessively sparse array".into());
        }
        // Without a ratio nothing bounds the holes except the memory limit of scripts.
        if highest > MAX_SPARSE_LENGTH.max(items) {
            return Err("Cannot serialise table: excessively sparse array".into());
        }
        Ok((items > 0).then_some(highest))
    }

    /// Encodes a table at a nesting depth.
    fn table(&mut self, table: &Table, depth: usize) -> Outcome<()> {
        if depth > self.settings.encode_depth.min(MAX_DEPTH) {
            return Err(format!("Cannot serialise, excessive depth ({depth})"));
        }
        if let Some(length) = self.array_length(table)? {
            self.to.push(b'[');
            for at in 1..=length {
                if at > 1 {
                    self.to.push(b',');
                }
                let value: Value = table.raw_get(at).map_err(|error| error.to_string())?;
                self.write(&value, depth)?;
            }
            self.to.push(b']');
            return Ok(());
        }
        self.to.push(b'{');
        let mut first = true;
        for pair in table.pairs::<Value, Value>() {
            let (key, value) = pair.map_err(|error| error.to_string())?;
            if !std::mem::take(&mut first) {
                self.to.push(b',');
            }
            let digits = self.settings.precision;
            match &key {
                Value::String(text) => write_string(&mut self.to, &text.as_bytes()),
                Value::Integer(number) => {
                    write_string(&mut self.to, format_g(*number as f64, digits).as_bytes());
                }
                Value::Number(number) => write_string(&mut self.to, format_g(*number, digits).as_bytes()),
                _ => return Err("Cannot serialise table: table key must be a number or string".into()),
            }
            self.to.push(b':');
            self.write(&value, depth)?;
        }
        self.to.push(b'}');
        Ok(())
    }
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

fn decode(lua: &Lua, args: &MultiValue, settings: Settings) -> LuaResult {
    let text = match argument(args, 0) {
        Some(Value::String(text)) => text.as_bytes().to_vec(),
        Some(Value::Integer(number)) => number.to_string().into_bytes(),
        other => {
            let found = other.map_or("no value", Value::type_name);
            return Err(raise(lua, &wrong(1, "string", found)));
        }
    };
    let mut parser = Parser { lua, text: &text, at: 0, settings };
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
    settings: Settings,
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

    /// Decodes a value at a nesting depth.
    fn value(&mut self, depth: usize) -> Outcome<Value> {
        interrupt::work(16)?;
        self.spaces();
        let memory = |error: mlua::Error| error.to_string();
        match self.peek() {
            Some(b'{' | b'[') if depth >= self.settings.decode_depth.min(MAX_DEPTH) => {
                let (depth, at) = (depth + 1, self.at + 1);
                Err(format!("Found too many nested data structures ({depth}) at character {at}"))
            }
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => {
                let text = self.string()?;
                self.lua.create_string(&text).map(Value::String).map_err(memory)
            }
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => {
                if let Some(number) = self.word() {
                    return Ok(number);
                }
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

    /// Decodes a word for a number that JSON cannot represent (`NaN`, `Infinity`), if allowed.
    fn word(&mut self) -> Option<Value> {
        if !self.settings.decode_invalid {
            return None;
        }
        let rest = &self.text[self.at..];
        let words = [
            ("infinity", f64::INFINITY),
            ("inf", f64::INFINITY),
            ("-infinity", f64::NEG_INFINITY),
            ("-inf", f64::NEG_INFINITY),
            ("nan", f64::NAN),
            ("-nan", f64::NAN),
        ];
        let begins =
            |word: &str| rest.get(..word.len()).is_some_and(|it| it.eq_ignore_ascii_case(word.as_bytes()));
        let (word, number) = words.into_iter().find(|(word, _)| begins(word))?;
        self.at += word.len();
        Some(Value::Number(number))
    }

    /// Decodes a hexadecimal number, which is not valid JSON either.
    fn hexadecimal(&mut self) -> Option<Value> {
        let rest = &self.text[self.at..];
        let (sign, digits) = rest.strip_prefix(b"-").map_or((1.0, rest), |rest| (-1.0, rest));
        let digits = digits.strip_prefix(b"0x").or_else(|| digits.strip_prefix(b"0X"))?;
        let count = digits.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        if !self.settings.decode_invalid || count == 0 {
            return None;
        }
        let digit = |byte: &u8| f64::from(char::from(*byte).to_digit(16).unwrap_or(0));
        let number = digits[..count].iter().fold(0.0, |number, byte| number * 16.0 + digit(byte));
        self.at += rest.len() - digits.len() + count;
        Some(Value::Number(sign * number))
    }

    fn number(&mut self) -> Outcome<Value> {
        if let Some(number) = self.hexadecimal().or_else(|| self.word()) {
            return Ok(number);
        }
        let begin = self.at;
        while matches!(self.peek(), Some(b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')) {
            self.at += 1;
        }
        let digits = &self.text[begin..self.at];
        let text = std::str::from_utf8(digits).unwrap_or_default();
        // Leading zeros are accepted only if invalid numbers are.
        let plain = digits.strip_prefix(b"-").unwrap_or(digits);
        let is_padded = plain.len() > 1 && plain[0] == b'0' && plain[1].is_ascii_digit();
        let is_hex = matches!(self.peek(), Some(b'x' | b'X'));
        match text.parse() {
            Ok(number) if self.settings.decode_invalid || !is_padded && !is_hex => Ok(Value::Number(number)),
            _ => {
                self.at = begin;
                Err(format!("Expected value but found invalid number at character {}", begin + 1))
            }
        }
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
