-- The sandbox of scripts. It runs once in a new interpreter, with the native functions of Rust in `raw`, and returns
-- the environment of scripts, the function that runs a script, and the function that runs a library function.
--
-- Scripts see a read-only proxy of every table: reads go to the table behind it, writes are an error.
-- No original table is reachable from a script, so no script can change what the next one sees. There is no `setfenv`
-- and no `getfenv`, as in Redis: they would change the environment of a cached compiled script for its next run.
local raw = ...

local error, type, tostring, tonumber, select, next = error, type, tostring, tonumber, select, next
local rawget, rawset, rawequal, unpack, pairs, ipairs = rawget, rawset, rawequal, unpack, pairs, ipairs
local setmetatable, getmetatable, setfenv = setmetatable, getmetatable, setfenv
local pcall, xpcall, loadstring, assert = pcall, xpcall, loadstring, assert
local byte, sub, floor = string.byte, string.sub, math.floor
local native_match, native_concat, native_remove = string.match, table.concat, table.remove
local memory = collectgarbage

local READONLY = "Attempt to modify a readonly table"
-- Maps a proxy to the table behind it.
local behind = setmetatable({}, { __mode = "k" })

local function refuse() error(READONLY, 2) end

local function stand_in(real)
    local proxy = {}
    behind[proxy] = real
    local locked = {}
    behind[locked] = {}
    setmetatable(locked, { __newindex = refuse, __metatable = false })
    return setmetatable(proxy, { __index = real, __newindex = refuse, __metatable = locked })
end

local globals = {}
local environment = stand_in(globals)

-- redis --------------------------------------------------------------------------------------------------------

local redis = raw.redis

local function single(field, ...)
    local text = ...
    if select("#", ...) ~= 1 or type(text) ~= "string" then
        return { err = "ERR wrong number or type of arguments" }
    end
    if field == "err" then
        if byte(text, 1) == 45 then text = text:sub(2) end
        -- The first word is the error code; a single word has no code.
        if not text:find(" ", 1, true) then text = "ERR " .. text end
    end
    return { [field] = text }
end

function redis.error_reply(...) return single("err", ...) end
function redis.status_reply(...) return single("ok", ...) end
function redis.replicate_commands() return true end
function redis.set_repl() end
function redis.breakpoint() return false end
function redis.debug() end

globals.redis = stand_in(redis)
globals.cjson = stand_in(raw.cjson)
globals.cmsgpack = stand_in(raw.cmsgpack)
globals.bit = stand_in(raw.bit)
globals.struct = stand_in(raw.struct)

-- The standard library -----------------------------------------------------------------------------------------

local math_functions = {}
for name, f in pairs(math) do math_functions[name] = f end
math_functions.random = raw.random
math_functions.randomseed = raw.randomseed
globals.math = stand_in(math_functions)

-- Lua's own libraries cannot be interrupted inside a C call, and a script can choose arguments for which a call takes
-- minutes. The functions below either report their work (those of `raw.string`) or are Lua loops, in which the
-- interpreter performs its interrupt checks.

local rust = raw.string
string.find, string.match, string.rep = rust.find, rust.match, rust.rep

function string.gmatch(s, p)
    s, p = rust.gmatch_begin(s, p)
    local at, length = 1, #s
    local function advance(from, to, ...)
        if not from then
            at = nil
            return
        end
        -- Step past an empty match.
        at = to < from and from + 1 or to + 1
        return ...
    end
    return function()
        if not at or at > length + 1 then return end
        return advance(rust.scan(s, p, at))
    end
end
string.gfind = string.gmatch

local function replacement(repl, kind, whole, ...)
    local value
    if kind == "function" then value = repl(...) else value = repl[(...)] end
    if not value then return whole end
    local found = type(value)
    if found ~= "string" and found ~= "number" then
        error("invalid replacement value (a " .. found .. ")", 4)
    end
    return value
end

local function replace_one(parts, s, repl, kind, copied, from, to, ...)
    if not from then return nil end
    if from > copied then parts[#parts + 1] = sub(s, copied, from - 1) end
    parts[#parts + 1] = replacement(repl, kind, sub(s, from, to), ...)
    return from, to
end

function string.gsub(s, p, repl, most)
    local kind = type(repl)
    if kind ~= "function" and kind ~= "table" then return rust.gsub_text(s, p, repl, most) end
    local anchored
    s, p, anchored, most = rust.gsub_begin(s, p, repl, most)
    local parts, count, at, copied, length = {}, 0, 1, 1, #s
    while count < most and at <= length + 1 do
        local from, to = replace_one(parts, s, repl, kind, copied, rust.scan(s, p, at, anchored))
        if not from then break end
        count = count + 1
        copied = to + 1
        if to < from then
            -- An empty match: the byte after it is kept.
            copied = from
            at = from + 1
        else
            at = copied
        end
        if anchored then break end
    end
    if copied <= length then parts[#parts + 1] = sub(s, copied) end
    return globals.table.concat(parts), count
end
globals.string = stand_in(string)

local function bad(at, name, what, level) error("bad argument #" .. at .. " to '" .. name .. "' (" .. what .. ")", level) end

local function check_table(t, name)
    if type(t) ~= "table" then
        bad(1, name, "table expected, got " .. type(t), 4)
    end
    if behind[t] then error(READONLY, 3) end
end

-- Elements concatenated per C call.
local PIECE = 4096

local function concat(t, separator, first, last)
    if type(t) ~= "table" then bad(1, "concat", "table expected, got " .. type(t), 3) end
    local from = first == nil and 1 or tonumber(first)
    local to = last == nil and #t or tonumber(last)
    if not from or not to or to - from < PIECE then
        local whole = native_concat(t, separator, first, last)
        return whole
    end
    local pieces = {}
    for at = from, to, PIECE do
        pieces[#pieces + 1] = native_concat(t, separator, at, at + PIECE - 1 < to and at + PIECE - 1 or to)
    end
    return concat(pieces, separator)
end
table.concat = concat

function table.insert(t, ...)
    check_table(t, "insert")
    local count, length = select("#", ...), #t
    if count == 1 then
        rawset(t, length + 1, (...))
        return
    end
    if count ~= 2 then error("wrong number of arguments to 'insert'", 2) end
    local at, value = ...
    local place = tonumber(at)
    if not place then bad(2, "insert", "number expected, got " .. type(at), 3) end
    place = place >= 0 and floor(place) or -floor(-place)
    for index = length + 1, place + 1, -1 do rawset(t, index, t[index - 1]) end
    rawset(t, place, value)
end

-- A merge sort on a copy: a failing comparison leaves the table unchanged, and no input order makes it slow.
function table.sort(t, less)
    check_table(t, "sort")
    if less ~= nil and type(less) ~= "function" then
        bad(2, "sort", "function expected, got " .. type(less), 3)
    end
    local length = #t
    local from, to = {}, {}
    for at = 1, length do from[at] = rawget(t, at) end
    local width = 1
    while width < length do
        for low = 1, length, 2 * width do
            local middle = low + width
            local high = middle + width
            if middle > length + 1 then middle = length + 1 end
            if high > length + 1 then high = length + 1 end
            local left, right = low, middle
            for at = low, high - 1 do
                local takes_right
                if left >= middle then
                    takes_right = true
                elseif right >= high then
                    takes_right = false
                elseif less then
                    takes_right = less(from[right], from[left])
                else
                    takes_right = from[right] < from[left]
                end
                if takes_right then
                    to[at] = from[right]
                    right = right + 1
                else
                    to[at] = from[left]
                    left = left + 1
                end
            end
        end
        from, to = to, from
        width = 2 * width
    end
    for at = 1, length do rawset(t, at, from[at]) end
end

function table.remove(t, ...)
    check_table(t, "remove")
    return native_remove(t, ...)
end

function table.foreach(t, f)
    for key, value in globals.pairs(t) do
        local found = f(key, value)
        if found ~= nil then return found end
    end
end
globals.table = stand_in(table)

-- An error inside a function of this file is reported at the line of the script that called it.
local function moved(message)
    local text = native_match(message, "^prelude:%d+: (.*)$")
    if not text then return message end
    local source, line = raw.where()
    if not source then return text end
    return sub(source, 2) .. ":" .. line .. ": " .. text
end

-- Errors raised by Rust are userdata: scripts receive the text.
local function plain(fine, failed, ...)
    if fine then return fine, failed, ... end
    if type(failed) == "userdata" then failed = raw.explain(failed) end
    if type(failed) == "string" then failed = moved(failed) end
    if type(failed) == "table" and type(failed.err) == "string" then failed = failed.err end
    return fine, failed, ...
end

local coroutines = {}
for name, f in pairs(coroutine) do coroutines[name] = f end
local resume = coroutine.resume
function coroutines.resume(...) return plain(resume(...)) end
globals.coroutine = stand_in(coroutines)
function globals.pcall(...) return plain(pcall(...)) end
function globals.xpcall(f, handler)
    return xpcall(f, function(failed)
        if type(failed) == "userdata" then failed = raw.explain(failed) end
        if type(failed) == "string" then failed = moved(failed) end
        return handler(failed)
    end)
end

for name, f in pairs({
    error = error, type = type, tostring = tostring, tonumber = tonumber, select = select, rawequal = rawequal,
    unpack = unpack, assert = assert,
}) do
    globals[name] = f
end
globals._VERSION = _VERSION
globals._G = environment

function globals.next(t, k) return next(behind[t] or t, k) end
function globals.pairs(t)
    local real = behind[t]
    if not real then return pairs(t) end
    return function(_, k) return next(real, k) end, t, nil
end
function globals.ipairs(t) return ipairs(behind[t] and {} or t) end
function globals.rawget(t, k) return rawget(behind[t] or t, k) end
function globals.rawset(t, k, v)
    if behind[t] then error(READONLY, 0) end
    return rawset(t, k, v)
end
function globals.setmetatable(t, m)
    if behind[t] then error(READONLY, 0) end
    return setmetatable(t, m)
end
function globals.getmetatable(t) return getmetatable(t) end
function globals.collectgarbage(what) return what == "count" and memory("count") or 0 end
function globals.gcinfo() return floor(memory("count")) end

local function load_text(text, name)
    if type(text) ~= "string" or byte(text, 1) == 27 then return nil, "binary chunks are not loaded" end
    local f, failed = loadstring(text, name)
    if f then setfenv(f, environment) end
    return f, failed
end
globals.loadstring = load_text
function globals.load(reader, name)
    local parts = {}
    repeat
        local part = reader()
        parts[#parts + 1] = part
    until not part or part == ""
    return load_text(globals.table.concat(parts), name or "=(load)")
end
setmetatable(globals, {
    __index = function(_, name)
        error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
    end,
})

-- The original string table is not reachable through a string's metatable either.
local of_strings = getmetatable("")
of_strings.__metatable = stand_in({})

local function explain(failed)
    if type(failed) == "userdata" then
        local message, source, line, native = raw.explain(failed)
        if native then message = "ERR " .. message end
        return { err = message, source = source, line = line }
    end
    if type(failed) == "string" then failed = moved(failed) end
    if type(failed) ~= "table" then failed = { err = "ERR " .. tostring(failed) } end
    if failed.line == nil then failed.source, failed.line = raw.where() end
    return failed
end

local function run(script, keys, args)
    rawset(globals, "KEYS", keys)
    rawset(globals, "ARGV", args)
    return xpcall(script, explain)
end

local function run_function(callback, keys, args)
    rawset(globals, "KEYS", nil)
    rawset(globals, "ARGV", nil)
    return xpcall(function() return callback(keys, args) end, explain)
end

-- The original globals are emptied, in case a script obtains them.
for name in pairs(_G) do
    if name ~= "_G" then _G[name] = nil end
end

return environment, run, run_function
