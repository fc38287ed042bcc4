//! Replacements for functions of `string` that could run long inside one C call, built on [`super::patterns`]: they
//! report their work, so that a script inside them can be interrupted. `prelude.lua` combines them.

use mlua::{Lua, LuaString, MultiValue, Table, Value};

use super::patterns::{Captured, Failed, Matcher, find_plain, is_plain};
use super::{LuaResult, LuaResults, NO_MEMORY, argument, interrupt, memory, raise_native};

/// Creates the function table.
pub(super) fn library(lua: &Lua) -> mlua::Result<Table> {
    let table = lua.create_table()?;
    table.set("find", lua.create_function(|lua, args: MultiValue| find(lua, &args, true))?)?;
    table.set("match", lua.create_function(|lua, args: MultiValue| find(lua, &args, false))?)?;
    table.set("scan", lua.create_function(|lua, args: MultiValue| scan(lua, &args))?)?;
    table.set("gsub_text", lua.create_function(|lua, args: MultiValue| gsub_text(lua, &args))?)?;
    table.set("gsub_begin", lua.create_function(|lua, args: MultiValue| gsub_begin(lua, &args))?)?;
    table.set("gmatch_begin", lua.create_function(|lua, args: MultiValue| gmatch_begin(lua, &args))?)?;
    table.set("rep", lua.create_function(|lua, args: MultiValue| rep(lua, &args))?)?;
    Ok(table)
}

fn bad(lua: &Lua, at: usize, name: &str, what: &str) -> mlua::Error {
    raise_native(lua, &format!("bad argument #{at} to '{name}' ({what})"))
}

fn found_type(args: &MultiValue, at: usize) -> &'static str {
    match argument(args, at) {
        None => "no value",
        Some(Value::Integer(_)) => "number",
        Some(Value::LightUserData(_)) => "userdata",
        Some(value) => value.type_name(),
    }
}

/// Argument `at`, from zero, as a string; numbers are converted.
fn text(lua: &Lua, args: &MultiValue, at: usize, name: &str) -> mlua::Result<LuaString> {
    let value = argument(args, at).cloned().unwrap_or(Value::Nil);
    let is_text = matches!(value, Value::String(_) | Value::Integer(_) | Value::Number(_));
    match is_text.then(|| lua.coerce_string(value)).transpose()?.flatten() {
        Some(text) => Ok(text),
        None => Err(bad(lua, at + 1, name, &format!("string expected, got {}", found_type(args, at)))),
    }
}

/// Argument `at` as an integer, if present.
fn whole(lua: &Lua, args: &MultiValue, at: usize, name: &str) -> mlua::Result<Option<i64>> {
    let value = argument(args, at).cloned().unwrap_or(Value::Nil);
    match value {
        Value::Nil => Ok(None),
        Value::Integer(number) => Ok(Some(number)),
        Value::Number(number) => Ok(Some(number as i64)),
        Value::String(_) => match lua.coerce_number(value)? {
            Some(number) => Ok(Some(number as i64)),
            None => Err(bad(lua, at + 1, name, "number expected, got string")),
        },
        _ => Err(bad(lua, at + 1, name, &format!("number expected, got {}", found_type(args, at)))),
    }
}

fn failed(lua: &Lua, why: &Failed) -> mlua::Error {
    raise_native(lua, why)
}

fn captured(lua: &Lua, captured: Captured<'_>) -> LuaResult {
    match captured {
        Captured::Text(text) => lua.create_string(text).map(Value::String),
        Captured::Position(position) => Ok(Value::Integer(position as i64)),
    }
}

/// The captures of a match, or the whole match if there are none and `whole` is set.
fn push_captures<W: FnMut(usize) -> Result<(), Failed>>(
    lua: &Lua,
    matcher: &Matcher<'_, W>,
    (start, end): (usize, usize),
    whole: bool,
    into: &mut MultiValue,
) -> mlua::Result<()> {
    let count = matcher.count().max(usize::from(whole));
    for index in 0..count {
        let found = matcher.capture(index, start, end).map_err(|why| failed(lua, &why))?;
        into.push_back(captured(lua, found)?);
    }
    Ok(())
}

/// Start of a search: counted from one, or from the end if negative. Returns an index from zero.
fn begin(at: i64, length: usize) -> usize {
    let at = if at < 0 { at.saturating_add(length as i64 + 1) } else { at };
    usize::try_from(at.saturating_sub(1)).unwrap_or(0).min(length)
}

/// `string.find` and `string.match`.
fn find(lua: &Lua, args: &MultiValue, finds: bool) -> LuaResults {
    let name = if finds { "find" } else { "match" };
    let (subject, pattern) = (text(lua, args, 0, name)?, text(lua, args, 1, name)?);
    let (subject, pattern) = (subject.as_bytes(), pattern.as_bytes());
    let at = begin(whole(lua, args, 2, name)?.unwrap_or(1), subject.len());
    let is_literal = !matches!(argument(args, 3), None | Some(Value::Nil | Value::Boolean(false)));
    let mut answer = MultiValue::new();
    if finds && (is_literal || is_plain(&pattern)) {
        match find_plain(&subject[at..], &pattern, interrupt::work).map_err(|why| failed(lua, &why))? {
            Some(found) => {
                let start = at + found;
                answer.push_back(Value::Integer(start as i64 + 1));
                answer.push_back(Value::Integer((start + pattern.len()) as i64));
            }
            None => answer.push_back(Value::Nil),
        }
        return Ok(answer);
    }
    let anchored = pattern.first() == Some(&b'^');
    let mut matcher = Matcher::new(&subject, &pattern, interrupt::work);
    match matcher.search(at, usize::from(anchored), anchored).map_err(|why| failed(lua, &why))? {
        Some(found) => {
            if finds {
                answer.push_back(Value::Integer(found.0 as i64 + 1));
                answer.push_back(Value::Integer(found.1 as i64));
            }
            push_captures(lua, &matcher, found, !finds, &mut answer)?;
        }
        None => answer.push_back(Value::Nil),
    }
    Ok(answer)
}

/// The first match at or after a position: its start and end, then its captures; nothing if there is no match. The
/// fourth argument enables the anchor. For `gmatch` and `gsub`, which have checked the arguments.
fn scan(lua: &Lua, args: &MultiValue) -> LuaResults {
    let (subject, pattern) = (text(lua, args, 0, "gsub")?, text(lua, args, 1, "gsub")?);
    let (subject, pattern) = (subject.as_bytes(), pattern.as_bytes());
    let at = begin(whole(lua, args, 2, "gsub")?.unwrap_or(1), subject.len());
    let anchored = matches!(argument(args, 3), Some(Value::Boolean(true)));
    let mut matcher = Matcher::new(&subject, &pattern, interrupt::work);
    let mut answer = MultiValue::new();
    let found = matcher.search(at, usize::from(anchored), anchored).map_err(|why| failed(lua, &why))?;
    if let Some(found) = found {
        answer.push_back(Value::Integer(found.0 as i64 + 1));
        answer.push_back(Value::Integer(found.1 as i64));
        push_captures(lua, &matcher, found, true, &mut answer)?;
    }
    Ok(answer)
}

/// Checks the arguments of `gmatch`: returns them as strings.
fn gmatch_begin(lua: &Lua, args: &MultiValue) -> LuaResults {
    let (subject, pattern) = (text(lua, args, 0, "gmatch")?, text(lua, args, 1, "gmatch")?);
    Ok(MultiValue::from_iter([Value::String(subject), Value::String(pattern)]))
}

/// Checks the arguments of `gsub` with a function or a table: returns the strings, whether the pattern is anchored,
/// and the maximum number of replacements.
fn gsub_begin(lua: &Lua, args: &MultiValue) -> LuaResults {
    let (subject, pattern) = (text(lua, args, 0, "gsub")?, text(lua, args, 1, "gsub")?);
    let most = whole(lua, args, 3, "gsub")?.unwrap_or(subject.as_bytes().len() as i64 + 1);
    let anchored = pattern.as_bytes().first() == Some(&b'^');
    Ok(MultiValue::from_iter([
        Value::String(subject),
        Value::String(pattern),
        Value::Boolean(anchored),
        Value::Integer(most),
    ]))
}

/// `gsub` with a string as the replacement.
fn gsub_text(lua: &Lua, args: &MultiValue) -> LuaResults {
    let (subject, pattern) = (text(lua, args, 0, "gsub")?, text(lua, args, 1, "gsub")?);
    if !matches!(argument(args, 2), Some(Value::String(_) | Value::Integer(_) | Value::Number(_))) {
        return Err(bad(lua, 3, "gsub", "string/function/table expected"));
    }
    let replacement = text(lua, args, 2, "gsub")?;
    let (subject, pattern, replacement) = (subject.as_bytes(), pattern.as_bytes(), replacement.as_bytes());
    let most = whole(lua, args, 3, "gsub")?.unwrap_or(subject.len() as i64 + 1);
    let anchored = pattern.first() == Some(&b'^');
    let mut matcher = Matcher::new(&subject, &pattern, interrupt::work);
    let (mut out, mut count, mut at) = (Vec::new(), 0i64, 0);
    while count < most {
        let found = matcher.run(at, usize::from(anchored)).map_err(|why| failed(lua, &why))?;
        if let Some(end) = found {
            count += 1;
            let added = replace(&matcher, &replacement, (at, end), &mut out);
            added.and_then(|()| check_size(&out)).map_err(|why| failed(lua, &why))?;
        }
        match found {
            Some(end) if end > at => at = end,
            _ if at < subject.len() => {
                out.push(subject[at]);
                at += 1;
            }
            _ => break,
        }
        if anchored {
            break;
        }
    }
    out.extend_from_slice(&subject[at..]);
    Ok(MultiValue::from_iter([Value::String(lua.create_string(&out)?), Value::Integer(count)]))
}

/// Appends the replacement of a match.
fn replace<W: FnMut(usize) -> Result<(), Failed>>(
    matcher: &Matcher<'_, W>,
    replacement: &[u8],
    (start, end): (usize, usize),
    out: &mut Vec<u8>,
) -> Result<(), Failed> {
    interrupt::work(replacement.len() / 16)?;
    let mut at = 0;
    while let Some(&byte) = replacement.get(at) {
        at += 1;
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        // A lone percent sign at the end refers to the zero byte that terminates a string in C.
        let next = replacement.get(at).copied().unwrap_or(0);
        at += 1;
        match next {
            b'0' => out.extend_from_slice(match matcher.whole(start, end) {
                Captured::Text(text) => text,
                Captured::Position(_) => &[],
            }),
            b'1'..=b'9' => match matcher.capture(usize::from(next - b'1'), start, end)? {
                Captured::Text(text) => out.extend_from_slice(text),
                Captured::Position(position) => out.extend_from_slice(position.to_string().as_bytes()),
            },
            other => out.push(other),
        }
    }
    Ok(())
}

/// Rejects a result that exceeds the memory limit of scripts.
pub(super) fn check_size(made: &[u8]) -> Result<(), Failed> {
    let fits = made.len() < memory::limit() / 4 || memory::reserve(made.len());
    if fits { Ok(()) } else { Err(NO_MEMORY.to_owned()) }
}

/// `string.rep`.
fn rep(lua: &Lua, args: &MultiValue) -> LuaResult {
    let piece = text(lua, args, 0, "rep")?;
    let Some(times) = whole(lua, args, 1, "rep")? else {
        return Err(bad(lua, 2, "rep", &format!("number expected, got {}", found_type(args, 1))));
    };
    let piece = piece.as_bytes();
    let times = usize::try_from(times).unwrap_or(0);
    match piece.len().checked_mul(times) {
        Some(size) if memory::reserve(size) => {
            interrupt::work(size / 64).map_err(|why| failed(lua, &why))?;
            lua.create_string(piece.repeat(times)).map(Value::String)
        }
        _ => Err(failed(lua, &NO_MEMORY.to_owned())),
    }
}
