//! Conversion between RESP replies and Lua values, by the rules of Redis.

use bytes::Bytes;
use mlua::{Lua, Result, Table, Value};
use moim_wire_resp::{Protocol, Value as Reply};

use super::patterns::Failed;
use super::{interrupt, memory};
use crate::error::Error;

/// Maximum nesting: a script can create a table that contains itself.
const MAX_DEPTH: usize = 1000;

/// Converts a reply to a Lua value.
pub(super) fn to_lua(lua: &Lua, reply: &Reply, protocol: Protocol) -> Result<Value> {
    let string = |bytes: &[u8]| lua.create_string(bytes).map(Value::String);
    let one = |field: &str, value: Value| {
        let table = lua.create_table()?;
        table.raw_set(field, value)?;
        Ok(Value::Table(table))
    };
    match reply {
        Reply::Null if protocol == Protocol::Resp3 => Ok(Value::Nil),
        Reply::Null => Ok(Value::Boolean(false)),
        Reply::Simple(text) => one("ok", string(text)?),
        Reply::Error(text) => one("err", string(text)?),
        Reply::Integer(number) => Ok(Value::Number(*number as f64)),
        Reply::Bulk(bytes) => string(bytes),
        Reply::Array(parts) | Reply::Push(parts) => {
            let table = lua.create_table_with_capacity(parts.len(), 0)?;
            for (at, part) in parts.iter().enumerate() {
                table.raw_set(at + 1, to_lua(lua, part, protocol)?)?;
            }
            Ok(Value::Table(table))
        }
        Reply::Map(pairs) => {
            let table = lua.create_table_with_capacity(0, pairs.len())?;
            for (key, value) in pairs {
                table.raw_set(to_lua(lua, key, protocol)?, to_lua(lua, value, protocol)?)?;
            }
            one("map", Value::Table(table))
        }
        Reply::Set(members) => {
            let table = lua.create_table_with_capacity(0, members.len())?;
            for member in members {
                table.raw_set(to_lua(lua, member, protocol)?, true)?;
            }
            one("set", Value::Table(table))
        }
        Reply::Double(number) => one("double", Value::Number(*number)),
        Reply::Boolean(truth) => Ok(Value::Boolean(*truth)),
        Reply::Verbatim { kind, text } => {
            let table = lua.create_table()?;
            table.raw_set("string", string(text)?)?;
            table.raw_set("format", string(kind)?)?;
            one("verbatim_string", Value::Table(table))
        }
        Reply::BigNumber(digits) => one("big_number", string(digits)?),
    }
}

/// Converts a script's result to a reply. A table that contains another many times can expand to a reply of any size:
/// a reply larger than the memory of scripts is an error.
pub(super) fn to_reply(value: &Value, protocol: Protocol) -> std::result::Result<Reply, Error> {
    Converter { protocol, bytes: 0 }.value(value, 0).map_err(|why| Error::err(format_args!("{why}")))
}

/// Bytes charged per value of a reply, besides its text.
const VALUE_BYTES: usize = 64;

struct Converter {
    protocol: Protocol,
    bytes: usize,
}

impl Converter {
    fn value(&mut self, value: &Value, depth: usize) -> std::result::Result<Reply, Failed> {
        if depth > MAX_DEPTH {
            return Ok(Reply::Error(Bytes::from_static(b"ERR reached lua stack limit")));
        }
        interrupt::work(16)?;
        let text = if let Value::String(text) = value { text.as_bytes().len() } else { 0 };
        self.bytes += VALUE_BYTES + text;
        if !memory::raise_limit(self.bytes) {
            return Err("Error running script: the answer takes more memory than scripts may use".to_owned());
        }
        Ok(match value {
            Value::String(text) => Reply::Bulk(Bytes::copy_from_slice(&text.as_bytes())),
            Value::Boolean(truth) if self.protocol == Protocol::Resp3 => Reply::Boolean(*truth),
            Value::Boolean(true) => Reply::Integer(1),
            Value::Boolean(false) => Reply::Null,
            Value::Integer(number) => Reply::Integer(*number),
            Value::Number(number) => Reply::Integer(truncate(*number)),
            Value::Table(table) => self.table(table, depth)?,
            _ => Reply::Null,
        })
    }
}

/// Converts a float as a processor does: truncated, and the minimum integer if out of range.
fn truncate(number: f64) -> i64 {
    if (-9.3e18..9.223_372_036_854_775e18).contains(&number) { number as i64 } else { i64::MIN }
}

impl Converter {
    fn table(&mut self, table: &Table, depth: usize) -> std::result::Result<Reply, Failed> {
        let field = |name: &str| table.raw_get::<Value>(name).unwrap_or(Value::Nil);
        let line = |text: &mlua::LuaString| -> Bytes {
            text.as_bytes()
                .iter()
                .map(|&byte| if byte == b'\r' || byte == b'\n' { b' ' } else { byte })
                .collect()
        };
        if let Value::String(text) = field("err") {
            return Ok(Reply::Error(line(&text)));
        }
        if let Value::String(text) = field("ok") {
            return Ok(Reply::Simple(line(&text)));
        }
        match field("double") {
            Value::Number(number) => return Ok(Reply::Double(number)),
            Value::Integer(number) => return Ok(Reply::Double(number as f64)),
            _ => {}
        }
        if let Value::String(digits) = field("big_number") {
            return Ok(Reply::BigNumber(line(&digits)));
        }
        if let Value::Table(verbatim) = field("verbatim_string")
            && let (Ok(Value::String(kind)), Ok(Value::String(text))) =
                (verbatim.raw_get("format"), verbatim.raw_get("string"))
        {
            let mut letters = *b"txt";
            let kind = kind.as_bytes();
            let count = kind.len().min(3);
            letters[..count].copy_from_slice(&kind[..count]);
            return Ok(Reply::Verbatim { kind: letters, text: Bytes::copy_from_slice(&text.as_bytes()) });
        }
        if let Value::Table(map) = field("map") {
            let mut pairs = Vec::new();
            for (key, value) in map.pairs::<Value, Value>().flatten() {
                pairs.push((self.value(&key, depth + 1)?, self.value(&value, depth + 1)?));
            }
            return Ok(Reply::Map(pairs));
        }
        if let Value::Table(set) = field("set") {
            let mut members = Vec::new();
            for (member, _) in set.pairs::<Value, Value>().flatten() {
                members.push(self.value(&member, depth + 1)?);
            }
            return Ok(Reply::Set(members));
        }
        let mut parts = Vec::new();
        for at in 1.. {
            match table.raw_get::<Value>(at) {
                Ok(Value::Nil) | Err(_) => break,
                Ok(part) => parts.push(self.value(&part, depth + 1)?),
            }
        }
        Ok(Reply::Array(parts))
    }
}
