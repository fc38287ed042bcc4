//! The pattern matcher compared with Lua's library, and sandbox escape attempts.

use mlua::{Lua, LuaOptions, MultiValue, StdLib, Value};
use moim_wire_resp::OwnedArgs;

use crate::cmd::harness::{Harness, show};

fn eval(harness: &mut Harness, script: &str) -> String {
    show(&harness.run_args(&OwnedArgs::from_slices(["eval", script, "0"])).unwrap())
}

/// A Lua with our `string` functions, and one with Lua's own.
fn interpreters() -> (Lua, Lua) {
    let own = Lua::new_with(StdLib::STRING | StdLib::TABLE, LuaOptions::default()).unwrap();
    let ours = Lua::new_with(StdLib::STRING | StdLib::TABLE, LuaOptions::default()).unwrap();
    let library = super::strings::library(&ours).unwrap();
    ours.globals().set("rust", library).unwrap();
    (own, ours)
}

/// The result of a function as text; errors without their position.
fn outcome(lua: &Lua, code: &str, args: &[&[u8]]) -> String {
    let function: mlua::Function = lua.load(code).eval().unwrap();
    let args: MultiValue = args.iter().map(|arg| Value::String(lua.create_string(arg).unwrap())).collect();
    match function.call::<MultiValue>(args) {
        Ok(values) => {
            let show = |value: &Value| match value {
                Value::String(text) => format!("{:?}", text.as_bytes().to_vec()),
                Value::Integer(number) => number.to_string(),
                Value::Number(number) => number.to_string(),
                Value::Nil => "nil".to_owned(),
                other => format!("{other:?}"),
            };
            values.iter().map(show).collect::<Vec<_>>().join(" ")
        }
        Err(error) => {
            let raised = super::find_raised(&error).map(|raised| raised.message.clone());
            let text = raised.unwrap_or_else(|| error.to_string());
            let known = [
                "malformed pattern (ends with '%')",
                "malformed pattern (missing ']')",
                "unbalanced pattern",
                "missing '[' after '%f' in pattern",
                "invalid capture index",
                "invalid pattern capture",
                "unfinished capture",
                "too many captures",
            ];
            let found = known.iter().find(|known| text.contains(**known));
            format!("error: {}", found.map_or(text.as_str(), |known| known))
        }
    }
}

fn random_pattern(random: &mut fastrand::Rng) -> Vec<u8> {
    const PIECES: &[&str] = &[
        "a", "b", "c", ".", "%a", "%d", "%s", "%w", "%p", "%S", "%x", "%z", "%u", "%l", "%c", "[ab]", "[^a]",
        "[a-c]", "[%a_]", "[]]", "[^]]", "[a-]", "[%]]", "(", ")", "()", "(a)", "(.-)", "%1", "%2", "%b()",
        "%bxy", "%f[a]", "%f[%w]", "*", "+", "-", "?", "$", "^", "%", "[", "]", "%%", "%.", "%b", "%f", "[a",
        "[^", "x", "y", " ", "1", "\0", "é",
    ];
    let count = random.usize(0..7);
    (0..count).flat_map(|_| PIECES[random.usize(..PIECES.len())].bytes()).collect()
}

fn random_text(random: &mut fastrand::Rng, most: usize) -> Vec<u8> {
    const BYTES: &[u8] = b"aaabbbccc()xy 1_.%A\0\xc3";
    let count = random.usize(0..most);
    (0..count).map(|_| BYTES[random.usize(..BYTES.len())]).collect()
}

/// The same function in terms of Lua's library and of the prelude.
const FUNCTIONS: &[(&str, &str)] = &[
    ("function(s, p) return string.find(s, p) end", "function(s, p) return rust.find(s, p) end"),
    ("function(s, p) return string.find(s, p, 3) end", "function(s, p) return rust.find(s, p, 3) end"),
    ("function(s, p) return string.find(s, p, -2) end", "function(s, p) return rust.find(s, p, -2) end"),
    (
        "function(s, p) return string.find(s, p, 1, true) end",
        "function(s, p) return rust.find(s, p, 1, true) end",
    ),
    ("function(s, p) return string.match(s, p) end", "function(s, p) return rust.match(s, p) end"),
    ("function(s, p) return string.match(s, p, 2) end", "function(s, p) return rust.match(s, p, 2) end"),
    (
        "function(s, p, r) return string.gsub(s, p, r) end",
        "function(s, p, r) return rust.gsub_text(s, p, r) end",
    ),
    (
        "function(s, p, r) return string.gsub(s, p, r, 2) end",
        "function(s, p, r) return rust.gsub_text(s, p, r, 2) end",
    ),
];

#[test]
fn lua_patterns_match_as_in_lua() {
    let (own, ours) = interpreters();
    let seed = std::env::var("MOIM_DIFFERENTIAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut matched = 0;
    for round in 0..20_000 {
        let (subject, pattern) = (random_text(&mut random, 14), random_pattern(&mut random));
        let replacement = match random.u8(..4) {
            0 => b"%1".to_vec(),
            1 => b"<%0>%%".to_vec(),
            2 => b"%2%".to_vec(),
            _ => random_text(&mut random, 4),
        };
        let (theirs, mine) = FUNCTIONS[random.usize(..FUNCTIONS.len())];
        let args: &[&[u8]] = &[&subject, &pattern, &replacement];
        let (wanted, found) = (
            outcome(&own, &format!("return {theirs}"), args),
            outcome(&ours, &format!("return {mine}"), args),
        );
        matched += usize::from(!wanted.starts_with("error") && wanted != "nil");
        assert_eq!(
            found,
            wanted,
            "round {round}: {theirs} of {subject:?} and {:?}",
            String::from_utf8_lossy(&pattern)
        );
    }
    assert!(matched > 2_000, "only {matched} patterns matched");
}

#[test]
fn gmatch_and_gsub_match_lua() {
    let (own, _) = interpreters();
    let mut harness = Harness::new();
    let mut random = fastrand::Rng::with_seed(5);
    let over = "local r = {} for a, b in string.gmatch(ARGV[1], ARGV[2]) do r[#r+1] = tostring(a) .. '/' .. tostring(b) if #r > 40 then break end end return table.concat(r, ' ')";
    let by_function = "local s, n = string.gsub(ARGV[1], ARGV[2], function(a, b) if a == 'a' then return nil end return '<' .. tostring(a) .. '|' .. tostring(b) .. '>' end) return s .. ' ' .. n";
    let by_table =
        "local s, n = string.gsub(ARGV[1], ARGV[2], { a = 'A', ab = 7, [1] = 'one' }) return s .. ' ' .. n";
    for round in 0..3_000 {
        let (subject, pattern) = (random_text(&mut random, 12), random_pattern(&mut random));
        for code in [over, by_function, by_table] {
            let args: &[&[u8]] = &[&subject, &pattern];
            let function = format!("return function(...) local ARGV = {{...}} {code} end");
            let wanted = outcome(&own, &function, args);
            if wanted.starts_with("error") {
                continue;
            }
            let command: Vec<&[u8]> = vec![b"eval", code.as_bytes(), b"0", &subject, &pattern];
            let moim_wire_resp::Value::Bulk(found) =
                harness.run_args(&OwnedArgs::from_slices(&command)).unwrap()
            else {
                panic!(
                    "round {round}: {code} of {subject:?} and {:?} failed",
                    String::from_utf8_lossy(&pattern)
                );
            };
            assert_eq!(
                format!("{:?}", found.to_vec()),
                wanted,
                "round {round}: {code} {:?}",
                String::from_utf8_lossy(&pattern)
            );
        }
    }
}

#[test]
fn table_functions_match_lua() {
    let mut harness = Harness::new();
    for (script, wanted) in [
        (
            "local t = {} for i = 1, 1000 do t[i] = (i * 7919) % 1009 end table.sort(t) for i = 2, #t do if t[i] < t[i-1] then return 'wrong' end end return #t",
            ":1000",
        ),
        (
            "local t = {'b', 'a', 'c'} table.sort(t, function(a, b) return a > b end) return table.concat(t)",
            "cba",
        ),
        ("local t = {3, 'x', 1} return pcall(table.sort, t)", "(nil)"),
        (
            "local t = {} for i = 1, 10000 do t[i] = i % 10 end local s = table.concat(t, ',') return {#s, string.sub(s, 1, 9), string.sub(s, -5)}",
            "[:19999 1,2,3,4,5 8,9,0]",
        ),
        ("return table.concat({1, 2, 3}, '-', 2, 3)", "2-3"),
        (
            "local t = {} table.insert(t, 'a') table.insert(t, 1, 'b') table.insert(t, 2, 'c') return t",
            "[b c a]",
        ),
        ("return select(2, pcall(table.insert, {}, 1, 2, 3))", "wrong number of arguments to 'insert'"),
        ("local t = {} table.insert(t, -5, 'x') return {#t, t[-5]}", "[:0 x]"),
        ("return {string.rep('', 2147483647), string.rep('ab', 2), string.rep('x', -1)}", "[ abab ]"),
        (
            "local parts, at = {'return ', '4', '2'}, 0 return load(function() at = at + 1 return parts[at] end)()",
            ":42",
        ),
        ("return {('a,b'):find(',', 1, true)}", "[:2 :2]"),
        ("return select(2, pcall(string.find, 'a', '%'))", "malformed pattern (ends with '%')"),
    ] {
        let found = eval(&mut harness, script);
        let found = found.rsplit_once("user_script:1: ").map_or(found.as_str(), |(_, text)| text);
        assert_eq!(found, wanted, "{script}");
    }
}

/// Each script tries to leave state for scripts of other clients; whether it fails or not, the next script finds
/// nothing.
#[test]
fn scripts_leave_no_state_behind() {
    let probe = "local names = {} for _, t in pairs({_G, string, table, math, redis, cjson, bit, struct, cmsgpack, coroutine}) do for k in pairs(t) do names[#names + 1] = tostring(k) end end table.sort(names) return table.concat(names, ' ') .. ' ' .. tostring(rawget(_G, 1)) .. tostring(_G[1]) .. tostring(string[1]) .. tostring(getmetatable('').x) .. type(pcall) .. ('x'):rep(2) .. string.format('%d', 7) .. table.concat({load('return 1')(), loadstring('return 2')()}, ',')";
    let mut harness = Harness::new();
    let before = eval(&mut harness, probe);
    assert!(before.contains("xx7") || before.starts_with('-'), "{before}");
    let attempts = [
        "setfenv(1, {redis = redis})",
        "setfenv(2, {})",
        "setfenv(pcall, {})",
        "setfenv(load, {table = {concat = function() return 'return 666' end}})",
        "getfenv(1).x = 1",
        "getfenv(0).string = nil",
        "table.insert(_G, 'evil')",
        "table.insert(string, 'evil')",
        "table.insert(redis, 1, 'evil')",
        "table.sort(_G)",
        "rawset(_G, 'x', 1)",
        "rawset(string, 'rep', nil)",
        "setmetatable(_G, {})",
        "setmetatable(string, {__index = function() return 1 end})",
        "getmetatable(_G).__index = {}",
        "rawset(getmetatable(_G), '__index', {})",
        "getmetatable('').__index = function() return 1 end",
        "rawset(getmetatable(''), 'x', 1)",
        "getmetatable('').x = 1",
        "string.rep = nil",
        "redis.call = nil",
        "x = 1",
        "_G.x = 1",
        "_G._G = {}",
        "math.random = nil",
        "cjson.encode_max_depth(1)",
        "coroutine.wrap(function() x = 1 end)()",
        "loadstring('y = 1')()",
        "debug.sethook()",
        "newproxy(true)",
        "local f = string.gmatch('a', 'a') setfenv(f, {})",
    ];
    for attempt in attempts {
        eval(&mut harness, attempt);
        eval(&mut harness, &format!("pcall(function() {attempt} end)"));
        // The same script again, as another client sends it.
        eval(&mut harness, attempt);
        assert_eq!(eval(&mut harness, probe), before, "{attempt}");
    }
    let gone = eval(&mut harness, "return pcall(function() return setfenv end) and 1 or 0");
    assert_eq!(gone, ":0", "setfenv must not exist");
}
