-- What scripts see. It runs once in a new machine, with the functions that Rust provides in `raw`, and gives back
-- what Rust needs: the environment of scripts, the function that runs one, and the one that runs a function of a library.
--
-- Scripts get stand-ins for every table: what they read comes from the table behind, what they write is an error.
-- Nothing real is reachable from a script, so no script can change what the next one sees.
local raw = ...

local error, type, tostring, tonumber, select, next = error, type, tostring, tonumber, select, next
local rawget, rawset, rawequal, unpack, pairs, ipairs = rawget, rawset, rawequal, unpack, pairs, ipairs
local setmetatable, getmetatable, setfenv, getfenv = setmetatable, getmetatable, setfenv, getfenv
local pcall, xpcall, loadstring, assert = pcall, xpcall, loadstring, assert
local byte, format, floor = string.byte, string.format, math.floor
local memory = collectgarbage

local READONLY = "Attempt to modify a readonly table"
-- Stand-in to what is behind it.
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
        -- The first word is the code; a single word has none.
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
globals.string = stand_in(string)
globals.table = stand_in(table)

-- Errors of Rust are objects of its own: scripts get the text.
local function plain(fine, failed, ...)
    if fine then return fine, failed, ... end
    if type(failed) == "userdata" then failed = raw.explain(failed) end
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
    return load_text(table.concat(parts), name or "=(load)")
end
-- Levels count from the caller of these functions.
function globals.getfenv(f)
    f = f or 1
    if f == 0 then return environment end
    local found = getfenv(type(f) == "number" and f + 1 or f)
    return rawequal(found, _G) and environment or found
end
function globals.setfenv(f, t)
    if f == 0 then error(READONLY, 2) end
    return setfenv(type(f) == "number" and f + 1 or f, t)
end

setmetatable(globals, {
    __index = function(_, name)
        error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
    end,
})

-- The table of string functions is not to be had through a string either.
local of_strings = getmetatable("")
of_strings.__metatable = stand_in({})

local function explain(failed)
    if type(failed) == "userdata" then
        local message, source, line = raw.explain(failed)
        return { err = message, source = source, line = line }
    end
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

-- Whoever gets hold of the real globals finds nothing there.
for name in pairs(_G) do
    if name ~= "_G" then _G[name] = nil end
end

return environment, run, run_function
