//! Answers as Lua values and back, by the rules of Redis.

use bytes::Bytes;
use mlua::{Lua, Result, Table, Value};
use moim_wire_resp::{Protocol, Value as Reply};

/// Deeper tables are an error: a script can make one that contains itself.
const MAX_DEPTH: usize = 1000;

/// An answer as a script sees it.
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

/// What a script gave back, as an answer.
pub(super) fn to_reply(value: &Value, protocol: Protocol, depth: usize) -> Reply {
    if depth > MAX_DEPTH {
        return Reply::Error(Bytes::from_static(b"ERR reached lua stack limit"));
    }
    match value {
        Value::String(text) => Reply::Bulk(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Boolean(truth) if protocol == Protocol::Resp3 => Reply::Boolean(*truth),
        Value::Boolean(true) => Reply::Integer(1),
        Value::Boolean(false) => Reply::Null,
        Value::Integer(number) => Reply::Integer(*number),
        Value::Number(number) => Reply::Integer(truncate(*number)),
        Value::Table(table) => of_table(table, protocol, depth),
        _ => Reply::Null,
    }
}

/// As a processor converts a float: towards zero, and the lowest integer for what does not fit.
fn truncate(number: f64) -> i64 {
    if (-9.3e18..9.223_372_036_854_775e18).contains(&number) { number as i64 } else { i64::MIN }
}

fn of_table(table: &Table, protocol: Protocol, depth: usize) -> Reply {
    let field = |name: &str| table.raw_get::<Value>(name).unwrap_or(Value::Nil);
    let line = |text: &mlua::LuaString| -> Bytes {
        text.as_bytes().iter().map(|&byte| if byte == b'\r' || byte == b'\n' { b' ' } else { byte }).collect()
    };
    if let Value::String(text) = field("err") {
        return Reply::Error(line(&text));
    }
    if let Value::String(text) = field("ok") {
        return Reply::Simple(line(&text));
    }
    match field("double") {
        Value::Number(number) => return Reply::Double(number),
        Value::Integer(number) => return Reply::Double(number as f64),
        _ => {}
    }
    if let Value::String(digits) = field("big_number") {
        return Reply::BigNumber(line(&digits));
    }
    if let Value::Table(verbatim) = field("verbatim_string")
        && let (Ok(Value::String(kind)), Ok(Value::String(text))) =
            (verbatim.raw_get("format"), verbatim.raw_get("string"))
    {
        let mut letters = *b"txt";
        let kind = kind.as_bytes();
        let count = kind.len().min(3);
        letters[..count].copy_from_slice(&kind[..count]);
        return Reply::Verbatim { kind: letters, text: Bytes::copy_from_slice(&text.as_bytes()) };
    }
    if let Value::Table(map) = field("map") {
        let pairs = map.pairs::<Value, Value>().flatten();
        return Reply::Map(
            pairs
                .map(|(key, value)| {
                    (to_reply(&key, protocol, depth + 1), to_reply(&value, protocol, depth + 1))
                })
                .collect(),
        );
    }
    if let Value::Table(set) = field("set") {
        let members = set.pairs::<Value, Value>().flatten();
        return Reply::Set(members.map(|(member, _)| to_reply(&member, protocol, depth + 1)).collect());
    }
    let mut parts = Vec::new();
    for at in 1.. {
        match table.raw_get::<Value>(at) {
            Ok(Value::Nil) | Err(_) => break,
            Ok(part) => parts.push(to_reply(&part, protocol, depth + 1)),
        }
    }
    Reply::Array(parts)
}
