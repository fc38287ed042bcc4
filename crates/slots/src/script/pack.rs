//! The `struct` library: packs numbers and strings into bytes by a format.

use mlua::{Lua, MultiValue, Result, Table, Value};

use super::{LuaResult, LuaResults, argument, raise, wrong};

type Outcome<T> = std::result::Result<T, String>;

/// Creates the library table.
pub(super) fn library(lua: &Lua) -> Result<Table> {
    let table = lua.create_table()?;
    table.set("pack", lua.create_function(|lua, args: MultiValue| pack(lua, &args))?)?;
    table.set("unpack", lua.create_function(|lua, args: MultiValue| unpack(lua, &args))?)?;
    table.set("size", lua.create_function(|lua, args: MultiValue| size(lua, &args))?)?;
    Ok(table)
}

/// One item of a format.
enum Item {
    Int {
        width: usize,
        signed: bool,
    },
    Float,
    Double,
    /// `x`: a padding byte.
    Skip,
    /// `s`: a zero-terminated string.
    Zeroed,
    /// `cn`: n bytes; 0 takes the length from the previous value.
    Chars(usize),
}

/// Parses a format item by item.
struct Format<'a> {
    text: &'a [u8],
    at: usize,
    big: bool,
    align: usize,
}

impl<'a> Format<'a> {
    fn new(text: &'a [u8]) -> Format<'a> {
        Format { text, at: 0, big: false, align: 1 }
    }

    fn number(&mut self, default: usize) -> Outcome<usize> {
        let begin = self.at;
        while self.text.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        if begin == self.at {
            return Ok(default);
        }
        let digits = std::str::from_utf8(&self.text[begin..self.at]).unwrap_or_default();
        digits
            .parse()
            .ok()
            .filter(|&number| number < 1 << 31)
            .ok_or_else(|| "integral size overflow".to_string())
    }

    fn next(&mut self) -> Outcome<Option<Item>> {
        while let Some(&letter) = self.text.get(self.at) {
            self.at += 1;
            let int = |width, signed| Ok(Some(Item::Int { width, signed }));
            match letter {
                b'b' => return int(1, true),
                b'B' => return int(1, false),
                b'h' => return int(2, true),
                b'H' => return int(2, false),
                b'l' => return int(8, true),
                b'L' | b'T' => return int(8, false),
                b'i' | b'I' => {
                    let width = self.number(4)?;
                    if !(1..=32).contains(&width) {
                        return Err(format!("integral size {width} is larger than limit of 32"));
                    }
                    return int(width, letter == b'i');
                }
                b'f' => return Ok(Some(Item::Float)),
                b'd' => return Ok(Some(Item::Double)),
                b'x' => return Ok(Some(Item::Skip)),
                b's' => return Ok(Some(Item::Zeroed)),
                b'c' => return Ok(Some(Item::Chars(self.number(1)?))),
                b'>' => self.big = true,
                b'<' => self.big = false,
                b'!' => {
                    let align = self.number(8)?;
                    if !align.is_power_of_two() {
                        return Err("alignment is not a power of 2".into());
                    }
                    self.align = align;
                }
                b' ' => {}
                other => return Err(format!("invalid format option '{}'", char::from(other))),
            }
        }
        Ok(None)
    }

    /// Alignment padding before an item.
    fn padding(&self, item: &Item, at: usize) -> usize {
        let width = match item {
            Item::Int { width, .. } => *width,
            Item::Float => 4,
            Item::Double => 8,
            _ => return 0,
        };
        let align = width.min(self.align);
        if align <= 1 || !align.is_power_of_two() { 0 } else { at.next_multiple_of(align) - at }
    }
}

fn format_of(args: &MultiValue) -> Outcome<Vec<u8>> {
    match argument(args, 0) {
        Some(Value::String(text)) => Ok(text.as_bytes().to_vec()),
        other => Err(wrong(1, "string", other.map_or("no value", Value::type_name))),
    }
}

fn number_of(value: Option<&Value>, at: usize) -> Outcome<f64> {
    match value {
        Some(Value::Integer(number)) => Ok(*number as f64),
        Some(Value::Number(number)) => Ok(*number),
        Some(Value::String(text)) => {
            crate::value::number::parse_f64(&text.as_bytes()).ok_or_else(|| wrong(at, "number", "string"))
        }
        other => Err(wrong(at, "number", other.map_or("no value", Value::type_name))),
    }
}

fn pack(lua: &Lua, args: &MultiValue) -> LuaResult {
    match pack_bytes(args) {
        Ok(bytes) => lua.create_string(&bytes).map(Value::String),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

fn pack_bytes(args: &MultiValue) -> Outcome<Vec<u8>> {
    let text = format_of(args)?;
    let mut format = Format::new(&text);
    let (mut bytes, mut arg) = (Vec::new(), 1);
    while let Some(item) = format.next()? {
        bytes.resize(bytes.len() + format.padding(&item, bytes.len()), 0);
        match item {
            Item::Skip => bytes.push(0),
            Item::Int { width, .. } => {
                let number = number_of(argument(args, arg), arg + 1)?;
                let number = if number < 0.0 { number as i64 as i128 } else { number as u64 as i128 };
                let mut parts: Vec<u8> =
                    (0..width).map(|at| if at < 16 { (number >> (8 * at)) as u8 } else { 0 }).collect();
                if format.big {
                    parts.reverse();
                }
                bytes.extend(parts);
            }
            Item::Float => {
                let number = number_of(argument(args, arg), arg + 1)? as f32;
                bytes.extend(if format.big { number.to_be_bytes() } else { number.to_le_bytes() });
            }
            Item::Double => {
                let number = number_of(argument(args, arg), arg + 1)?;
                bytes.extend(if format.big { number.to_be_bytes() } else { number.to_le_bytes() });
            }
            Item::Zeroed | Item::Chars(_) => {
                let Some(Value::String(text)) = argument(args, arg) else {
                    let found = argument(args, arg).map_or("no value", Value::type_name);
                    return Err(wrong(arg + 1, "string", found));
                };
                let text = text.as_bytes();
                let length = if let Item::Chars(count) = item
                    && count > 0
                {
                    count
                } else {
                    text.len()
                };
                bytes.extend_from_slice(text.get(..length).ok_or("string too short")?);
                if let Item::Zeroed = item {
                    bytes.push(0);
                }
            }
        }
        arg += usize::from(!matches!(item, Item::Skip));
    }
    Ok(bytes)
}

fn size(lua: &Lua, args: &MultiValue) -> LuaResult {
    let total = || {
        let text = format_of(args)?;
        let mut format = Format::new(&text);
        let mut total = 0;
        while let Some(item) = format.next()? {
            total += format.padding(&item, total);
            total += match item {
                Item::Int { width, .. } => width,
                Item::Float => 4,
                Item::Double => 8,
                Item::Skip => 1,
                Item::Zeroed => return Err("variable-size format in 'size'".to_string()),
                Item::Chars(0) => return Err("variable-length format".to_string()),
                Item::Chars(count) => count,
            };
        }
        Ok(total)
    };
    match total() {
        Ok(total) => Ok(Value::Integer(total as i64)),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

fn unpack(lua: &Lua, args: &MultiValue) -> LuaResults {
    let read = || -> Outcome<Vec<Value>> {
        let text = format_of(args)?;
        let Some(Value::String(bytes)) = argument(args, 1) else {
            return Err(wrong(2, "string", argument(args, 1).map_or("no value", Value::type_name)));
        };
        let start = match argument(args, 2) {
            None => 1.0,
            some => number_of(some, 3)?,
        };
        if start < 1.0 {
            return Err("offset must be 1 or greater".into());
        }
        unpack_values(lua, &text, &bytes.as_bytes(), start as usize - 1)
    };
    match read() {
        Ok(values) => Ok(MultiValue::from_vec(values)),
        Err(failed) => Err(raise(lua, &failed)),
    }
}

fn unpack_values(lua: &Lua, text: &[u8], bytes: &[u8], mut at: usize) -> Outcome<Vec<Value>> {
    let mut format = Format::new(text);
    let mut values: Vec<Value> = Vec::new();
    let slice = |at: usize, count: usize| {
        bytes.get(at..at.saturating_add(count)).ok_or_else(|| "data string too short".to_string())
    };
    while let Some(item) = format.next()? {
        at += format.padding(&item, at);
        match item {
            Item::Skip => at += slice(at, 1)?.len(),
            Item::Int { width, signed } => {
                values.push(integer(slice(at, width)?, format.big, signed));
                at += width;
            }
            Item::Float => {
                let part: [u8; 4] = slice(at, 4)?.try_into().unwrap_or_default();
                let number = if format.big { f32::from_be_bytes(part) } else { f32::from_le_bytes(part) };
                values.push(Value::Number(f64::from(number)));
                at += 4;
            }
            Item::Double => {
                let part: [u8; 8] = slice(at, 8)?.try_into().unwrap_or_default();
                values.push(Value::Number(if format.big {
                    f64::from_be_bytes(part)
                } else {
                    f64::from_le_bytes(part)
                }));
                at += 8;
            }
            Item::Zeroed => {
                let rest = bytes.get(at..).unwrap_or_default();
                let end = rest.iter().position(|&byte| byte == 0).ok_or("unfinished string in data")?;
                values
                    .push(Value::String(lua.create_string(&rest[..end]).map_err(|error| error.to_string())?));
                at += end + 1;
            }
            Item::Chars(count) => {
                let count = match (count, values.pop()) {
                    (0, Some(last)) => number_of(Some(&last), 0)
                        .ok()
                        .filter(|count| *count >= 0.0)
                        .ok_or("format 'c0' needs a previous size")?
                        as usize,
                    (0, None) => return Err("format 'c0' needs a previous size".into()),
                    (count, last) => {
                        values.extend(last);
                        count
                    }
                };
                values.push(Value::String(
                    lua.create_string(slice(at, count)?).map_err(|error| error.to_string())?,
                ));
                at += count;
            }
        }
    }
    values.push(Value::Integer(at as i64 + 1));
    Ok(values)
}

fn integer(bytes: &[u8], big: bool, signed: bool) -> Value {
    let mut ordered = bytes.to_vec();
    if !big {
        ordered.reverse();
    }
    let number = ordered.iter().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    if signed {
        let unused = 64u32.saturating_sub(8 * bytes.len() as u32);
        return Value::Integer(((number << unused) as i64) >> unused);
    }
    match i64::try_from(number) {
        Ok(number) => Value::Integer(number),
        Err(_) => Value::Number(number as f64),
    }
}
