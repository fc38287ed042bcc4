//! The `cmsgpack` library: MessagePack.

use mlua::{Lua, MultiValue, Result, Table, Value};

use super::strings::check_size;
use super::{LuaResult, LuaResults, argument, interrupt, raise, wrong};

/// Maximum nesting for encoding; deeper tables are encoded as nil.
const MAX_DEPTH: usize = 16;
/// Maximum number of values returned by one call: what fits on the interpreter's stack.
const MAX_VALUES: usize = 7_900;
/// Maximum nesting for decoding.
const MAX_READ_DEPTH: usize = 200;

type Outcome<T> = std::result::Result<T, String>;

/// Creates the library table.
pub(super) fn library(lua: &Lua) -> Result<Table> {
    let table = lua.create_table()?;
    table.set("pack", lua.create_function(|lua, args: MultiValue| pack(lua, &args))?)?;
    table.set("unpack", lua.create_function(|lua, args: MultiValue| unpack(lua, &args, Part::All))?)?;
    table.set("unpack_one", lua.create_function(|lua, args: MultiValue| unpack(lua, &args, Part::One))?)?;
    table
        .set("unpack_limit", lua.create_function(|lua, args: MultiValue| unpack(lua, &args, Part::Limit))?)?;
    table.set("_NAME", "cmsgpack")?;
    table.set("_VERSION", "lua-cmsgpack 0.4.0")?;
    Ok(table)
}

fn pack(lua: &Lua, args: &MultiValue) -> LuaResult {
    if args.is_empty() {
        return Err(raise(lua, "bad argument #0 to 'pack' (MessagePack pack needs input.)"));
    }
    let mut bytes = Vec::new();
    for value in args {
        if let Err(failed) = write(&mut bytes, value, 0) {
            return Err(raise(lua, &failed));
        }
    }
    lua.create_string(&bytes).map(Value::String)
}

fn write(to: &mut Vec<u8>, value: &Value, depth: usize) -> Outcome<()> {
    interrupt::work(16)?;
    check_size(to)?;
    match value {
        Value::Boolean(truth) => to.push(if *truth { 0xc3 } else { 0xc2 }),
        Value::Integer(number) => write_int(to, *number),
        Value::Number(number) if number.fract() == 0.0 && number.abs() < 9.2e18 => {
            write_int(to, *number as i64)
        }
        Value::Number(number) => match *number as f32 {
            short if f64::from(short) == *number => {
                to.push(0xca);
                to.extend_from_slice(&short.to_be_bytes());
            }
            _ => {
                to.push(0xcb);
                to.extend_from_slice(&number.to_be_bytes());
            }
        },
        Value::String(text) => {
            let text = text.as_bytes();
            write_head(to, text.len(), Some((0xa0, 32)), [Some(0xd9), Some(0xda), Some(0xdb)]);
            to.extend_from_slice(&text);
        }
        Value::Table(table) if depth < MAX_DEPTH => write_table(to, table, depth)?,
        _ => to.push(0xc0),
    }
    Ok(())
}

fn write_int(to: &mut Vec<u8>, number: i64) {
    let (tag, width) = match number {
        0..128 => return to.push(number as u8),
        -32..0 => return to.push(number as u8),
        128..=0xff => (0xcc, 1),
        0x100..=0xffff => (0xcd, 2),
        0x1_0000..=0xffff_ffff => (0xce, 4),
        0x1_0000_0000.. => (0xcf, 8),
        -128..-32 => (0xd0, 1),
        -32768..-128 => (0xd1, 2),
        -2_147_483_648..-32768 => (0xd2, 4),
        _ => (0xd3, 8),
    };
    to.push(tag);
    to.extend_from_slice(&number.to_be_bytes()[8 - width..]);
}

/// Encodes a length: in the tag if it is short, otherwise after it in one, two or four bytes.
fn write_head(to: &mut Vec<u8>, length: usize, short: Option<(u8, usize)>, tags: [Option<u8>; 3]) {
    if let Some((tag, below)) = short
        && length < below
    {
        return to.push(tag | length as u8);
    }
    let bytes = (length as u32).to_be_bytes();
    match (length, tags) {
        (0..=0xff, [Some(tag), ..]) => to.extend_from_slice(&[tag, bytes[3]]),
        (0..=0xffff, [_, Some(tag), _]) => to.extend_from_slice(&[tag, bytes[2], bytes[3]]),
        (_, [.., tag]) => {
            to.push(tag.unwrap_or(0xc1));
            to.extend_from_slice(&bytes);
        }
    }
}

fn write_table(to: &mut Vec<u8>, table: &Table, depth: usize) -> Outcome<()> {
    let text = |error: mlua::Error| error.to_string();
    // Counted first without storing the pairs: each value held occupies one of the few reference slots of the
    // interpreter.
    let mut pairs = 0;
    for pair in table.pairs::<Value, Value>() {
        pair.map_err(text)?;
        interrupt::work(8)?;
        pairs += 1;
    }
    let length = table.raw_len();
    if pairs == length && length > 0 || pairs == 0 {
        write_head(to, length, Some((0x90, 16)), [None, Some(0xdc), Some(0xdd)]);
        for at in 1..=length {
            write(to, &table.raw_get::<Value>(at).map_err(text)?, depth + 1)?;
        }
    } else {
        write_head(to, pairs, Some((0x80, 16)), [None, Some(0xde), Some(0xdf)]);
        for pair in table.pairs::<Value, Value>() {
            let (key, value) = pair.map_err(text)?;
            write(to, &key, depth + 1)?;
            write(to, &value, depth + 1)?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    All,
    One,
    Limit,
}

fn number(value: Option<&Value>) -> i64 {
    match value {
        Some(Value::Integer(number)) => *number,
        Some(Value::Number(number)) => *number as i64,
        _ => 0,
    }
}

fn unpack(lua: &Lua, args: &MultiValue, part: Part) -> LuaResults {
    let failed = |text: String| Err(raise(lua, &text));
    let bytes = match argument(args, 0) {
        Some(Value::String(text)) => text.as_bytes().to_vec(),
        other => return failed(wrong(1, "string", other.map_or("no value", Value::type_name))),
    };
    let (limit, offset) = match part {
        Part::All => (i64::MAX, 0),
        Part::One => (1, number(argument(args, 1))),
        Part::Limit => (number(argument(args, 1)), number(argument(args, 2))),
    };
    if offset < 0 || limit < 0 {
        return failed(format!("Invalid request to unpack with offset of {offset} and limit of {limit}."));
    }
    let offset = offset as usize;
    if offset > bytes.len() {
        return failed(format!("Start offset {offset} greater than input length {}.", bytes.len()));
    }
    let mut reader = Reader { lua, bytes: &bytes, at: offset };
    let mut values = Vec::new();
    while reader.at < bytes.len() && (values.len() as i64) < limit {
        if values.len() == MAX_VALUES {
            return failed("stack overflow (too many results to unpack)".to_owned());
        }
        match reader.value(0) {
            Ok(value) => values.push(value),
            Err(text) => return failed(text),
        }
    }
    if part != Part::All {
        let next = if reader.at == bytes.len() { -1 } else { reader.at as i64 };
        values.insert(0, Value::Integer(next));
    }
    Ok(MultiValue::from_vec(values))
}

struct Reader<'a> {
    lua: &'a Lua,
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Outcome<&[u8]> {
        let taken =
            self.bytes.get(self.at..self.at.saturating_add(count)).ok_or("Missing bytes in input.")?;
        self.at += count;
        Ok(taken)
    }

    fn unsigned(&mut self, width: usize) -> Outcome<u64> {
        Ok(self.take(width)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn signed(&mut self, width: usize) -> Outcome<Value> {
        let unused = 64 - 8 * width as u32;
        Ok(Value::Integer(((self.unsigned(width)? << unused) as i64) >> unused))
    }

    fn text(&mut self, length: usize) -> Outcome<Value> {
        let lua = self.lua;
        let bytes = self.take(length)?;
        lua.create_string(bytes).map(Value::String).map_err(|error| error.to_string())
    }

    fn value(&mut self, depth: usize) -> Outcome<Value> {
        interrupt::work(16)?;
        if depth > MAX_READ_DEPTH {
            return Err("Too many nested structures in input.".into());
        }
        let tag = self.unsigned(1)? as u8;
        Ok(match tag {
            0x00..=0x7f => Value::Integer(i64::from(tag)),
            0xe0..=0xff => Value::Integer(i64::from(tag as i8)),
            0x80..=0x8f => self.map(usize::from(tag & 0x0f), depth)?,
            0x90..=0x9f => self.array(usize::from(tag & 0x0f), depth)?,
            0xa0..=0xbf => self.text(usize::from(tag & 0x1f))?,
            0xc0 => Value::Nil,
            0xc2 => Value::Boolean(false),
            0xc3 => Value::Boolean(true),
            0xca => Value::Number(f64::from(f32::from_bits(self.unsigned(4)? as u32))),
            0xcb => Value::Number(f64::from_bits(self.unsigned(8)?)),
            0xcc => Value::Integer(self.unsigned(1)? as i64),
            0xcd => Value::Integer(self.unsigned(2)? as i64),
            0xce => Value::Integer(self.unsigned(4)? as i64),
            0xcf => Value::Number(self.unsigned(8)? as f64),
            0xd0 => self.signed(1)?,
            0xd1 => self.signed(2)?,
            0xd2 => self.signed(4)?,
            0xd3 => self.signed(8)?,
            0xc4 | 0xd9 => {
                let length = self.unsigned(1)? as usize;
                self.text(length)?
            }
            0xc5 | 0xda => {
                let length = self.unsigned(2)? as usize;
                self.text(length)?
            }
            0xc6 | 0xdb => {
                let length = self.unsigned(4)? as usize;
                self.text(length)?
            }
            0xdc => {
                let length = self.unsigned(2)? as usize;
                self.array(length, depth)?
            }
            0xdd => {
                let length = self.unsigned(4)? as usize;
                self.array(length, depth)?
            }
            0xde => {
                let length = self.unsigned(2)? as usize;
                self.map(length, depth)?
            }
            0xdf => {
                let length = self.unsigned(4)? as usize;
                self.map(length, depth)?
            }
            _ => return Err("Bad data format in input.".into()),
        })
    }

    fn array(&mut self, length: usize, depth: usize) -> Outcome<Value> {
        let table = self.lua.create_table().map_err(|error| error.to_string())?;
        for at in 1..=length {
            let value = self.value(depth + 1)?;
            table.raw_set(at, value).map_err(|error| error.to_string())?;
        }
        Ok(Value::Table(table))
    }

    fn map(&mut self, length: usize, depth: usize) -> Outcome<Value> {
        let table = self.lua.create_table().map_err(|error| error.to_string())?;
        for _ in 0..length {
            let key = self.value(depth + 1)?;
            let value = self.value(depth + 1)?;
            if !matches!(key, Value::Nil) {
                table.raw_set(key, value).map_err(|error| error.to_string())?;
            }
        }
        Ok(Value::Table(table))
    }
}
