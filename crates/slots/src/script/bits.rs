//! The `bit` library: operations on 32-bit integers.

use mlua::{Lua, MultiValue, Result, Table, Value};

use super::{LuaResult, argument, raise, wrong};

/// Creates the library table.
pub(super) fn library(lua: &Lua) -> Result<Table> {
    let table = lua.create_table()?;
    let one = |name: &str, apply: fn(u32) -> u32| {
        table.set(name, lua.create_function(move |lua, args: MultiValue| unary(lua, &args, apply))?)
    };
    one("tobit", |n| n)?;
    one("bnot", |n| !n)?;
    one("bswap", u32::swap_bytes)?;
    let many = |name: &str, apply: fn(u32, u32) -> u32| {
        table.set(name, lua.create_function(move |lua, args: MultiValue| fold(lua, &args, apply))?)
    };
    many("band", |a, b| a & b)?;
    many("bor", |a, b| a | b)?;
    many("bxor", |a, b| a ^ b)?;
    let shift = |name: &str, apply: fn(u32, u32) -> u32| {
        table.set(name, lua.create_function(move |lua, args: MultiValue| binary(lua, &args, apply))?)
    };
    shift("lshift", |n, by| n << (by & 31))?;
    shift("rshift", |n, by| n >> (by & 31))?;
    shift("arshift", |n, by| ((n as i32) >> (by & 31)) as u32)?;
    shift("rol", |n, by| n.rotate_left(by & 31))?;
    shift("ror", |n, by| n.rotate_right(by & 31))?;
    table.set("tohex", lua.create_function(|lua, args: MultiValue| tohex(lua, &args))?)?;
    Ok(table)
}

/// A number reduced to 32 bits, as the library defines it: rounded, then modulo 2^32.
fn bits(value: Option<&Value>, at: usize) -> std::result::Result<u32, String> {
    match value {
        Some(Value::Integer(number)) => Ok(*number as u32),
        Some(Value::Number(number)) if number.is_finite() => {
            Ok(number.round_ties_even().rem_euclid(4_294_967_296.0) as u64 as u32)
        }
        Some(Value::String(text)) => {
            let text = text.as_bytes();
            let number =
                crate::value::number::parse_f64(&text).ok_or_else(|| wrong(at, "number", "string"))?;
            Ok(number.round_ties_even().rem_euclid(4_294_967_296.0) as u64 as u32)
        }
        Some(other) => Err(wrong(at, "number", other.type_name())),
        None => Err(wrong(at, "number", "no value")),
    }
}

fn give(lua: &Lua, result: std::result::Result<u32, String>) -> LuaResult {
    match result {
        Ok(bits) => Ok(Value::Integer(i64::from(bits as i32))),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

fn unary(lua: &Lua, args: &MultiValue, apply: fn(u32) -> u32) -> LuaResult {
    give(lua, bits(argument(args, 0), 1).map(apply))
}

fn binary(lua: &Lua, args: &MultiValue, apply: fn(u32, u32) -> u32) -> LuaResult {
    give(lua, bits(argument(args, 0), 1).and_then(|n| Ok(apply(n, bits(argument(args, 1), 2)?))))
}

fn fold(lua: &Lua, args: &MultiValue, apply: fn(u32, u32) -> u32) -> LuaResult {
    let folded = || {
        let mut result = bits(argument(args, 0), 1)?;
        for (at, value) in args.iter().enumerate().skip(1) {
            result = apply(result, bits(Some(value), at + 1)?);
        }
        Ok(result)
    };
    give(lua, folded())
}

fn tohex(lua: &Lua, args: &MultiValue) -> LuaResult {
    let digits = match argument(args, 1) {
        None => Ok(8),
        some => bits(some, 2).map(|n| n as i32),
    };
    match bits(argument(args, 0), 1).and_then(|n| Ok((n, digits?))) {
        Ok((n, digits)) => {
            let text = if digits < 0 { format!("{n:08X}") } else { format!("{n:08x}") };
            let keep = (digits.unsigned_abs() as usize).min(8);
            lua.create_string(&text[8 - keep..]).map(Value::String)
        }
        Err(failed) => Err(raise(lua, &failed)),
    }
}
