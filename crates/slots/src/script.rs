//! Lua scripting: Lua 5.1 in a sandbox, one interpreter per thread.
//!
//! A script runs to completion inside one command of the shard, as EXEC does: nothing else runs meanwhile, and its
//! effects are one batch. It accesses data only through `redis.call`. Its memory is bounded; after `lua-time-limit`
//! the shard replies BUSY, and SCRIPT KILL ends a script that has not written.
//!
//! Nothing a script does may outlive it: scripts see proxies of all tables (`prelude.lua`), and globals are rejected.

mod bits;
mod cache;
mod convert;
mod interrupt;
mod json;
pub(crate) mod library;
mod memory;
mod msgpack;
mod pack;
mod patterns;
pub(crate) mod sha1;
mod strings;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use bytes::BytesMut;
use hashbrown::HashMap;
use mlua::chunk::ChunkMode;
use mlua::state::{GcIncParams, GcMode};
use mlua::{Function, Lua, LuaOptions, MultiValue, StdLib, Table, Value};
use moim_wire_resp::{Encoder, OwnedArgs, Protocol, ReplyDecoder, Value as Reply};

use crate::cmd::{self, flag};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::settings::Policy;

pub use self::cache::Scripts;
use self::interrupt::{Interrupt, Stop};

/// Bytes that may enter the interpreter for a call or reply without its memory limit: under the limit every string
/// and table is created in a protected call, which costs more than the string. Anything larger is created under the
/// limit, and so is everything once half of the memory is in use.
const MAX_UNLIMITED: usize = 64 << 10;
/// GC pause in percent. Not more: an interpreter that runs out of memory does not collect garbage first.
const GC_PAUSE_PERCENT: i32 = 200;
/// Memory above which a full GC runs between two scripts. Below it incremental GC suffices: a full collection takes a
/// tenth of a millisecond, more than most scripts.
const MIN_GC_THRESHOLD: usize = 8 << 20;
/// The error text when the memory limit is reached.
const NO_MEMORY: &str = "not enough memory";
/// Compiled scripts cached per thread.
const MAX_COMPILED: usize = 1024;

/// Result of a function exposed to scripts.
type LuaResult = mlua::Result<Value>;
/// Several results of a function exposed to scripts.
type LuaResults = mlua::Result<MultiValue>;

/// An error propagating through a script: the value for `pcall`, and its source position.
#[derive(Clone, Debug)]
struct Raised {
    message: String,
    place: Option<(String, i64)>,
    /// True for errors of Lua's own libraries, which have no error code when a script catches them.
    is_native: bool,
}

impl std::fmt::Display for Raised {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.message)
    }
}

impl std::error::Error for Raised {}

/// Raises a library error: the source line precedes the text.
fn raise(lua: &Lua, text: &str) -> mlua::Error {
    let place = source_position(lua);
    let message = match &place {
        Some((source, line)) => format!("ERR {}:{line}: {text}", source.trim_start_matches('@')),
        None => format!("ERR {text}"),
    };
    mlua::Error::external(Raised { message, place, is_native: false })
}

/// Raises an error as Lua's own libraries do.
fn raise_native(lua: &Lua, text: &str) -> mlua::Error {
    let place = source_position(lua);
    let message = match &place {
        Some((source, line)) => format!("{}:{line}: {text}", source.trim_start_matches('@')),
        None => text.to_owned(),
    };
    mlua::Error::external(Raised { message, place, is_native: true })
}

/// Raises an error of `redis`, with its error code.
fn raise_coded(lua: &Lua, message: impl Into<String>) -> mlua::Error {
    mlua::Error::external(Raised { message: message.into(), place: source_position(lua), is_native: false })
}

/// The original error, however it was wrapped.
fn find_raised(error: &mlua::Error) -> Option<&Raised> {
    match error {
        mlua::Error::CallbackError { cause, .. } | mlua::Error::WithContext { cause, .. } => {
            find_raised(cause)
        }
        mlua::Error::ExternalError(inner) => inner.downcast_ref::<Raised>(),
        _ => None,
    }
}

fn argument(args: &MultiValue, at: usize) -> Option<&Value> {
    args.get(at)
}

fn wrong(at: usize, wanted: &str, found: &str) -> String {
    format!("bad argument #{at} ({wanted} expected, got {found})")
}

/// A script to run.
pub(crate) struct Script<'a> {
    /// SHA-1 digest in forty hexadecimal digits.
    pub(crate) sha: &'a str,
    /// Source text.
    pub(crate) source: &'a [u8],
    pub(crate) keys: Vec<&'a [u8]>,
    pub(crate) args: Vec<&'a [u8]>,
    /// True for EVAL_RO: the script may not write.
    pub(crate) read_only: bool,
}

thread_local! {
    static INTERPRETER: RefCell<Option<Interpreter>> = const { RefCell::new(None) };
}

/// The outcome of a script run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an offloaded script has no reply yet"]
pub(crate) enum RunOutcome {
    /// The reply is written.
    Completed,
    /// The script took long, has no side effects yet, and must be offloaded from the event loops.
    Offload,
}

/// Runs a script and writes its reply.
pub(crate) fn run(ctx: &mut Ctx<'_>, script: &Script<'_>) -> Result<RunOutcome, Error> {
    with_interpreter(|interpreter| interpreter.run(ctx, script))?
}

/// Checks that a script compiles.
pub(crate) fn check(source: &[u8]) -> Done {
    let (body, _) = shebang(source)?;
    with_interpreter(|interpreter| interpreter.compile(&body).map(|_| ()))?
}

/// True if the shebang declares `allow-oom`.
fn allows_oom(source: &[u8]) -> bool {
    let line = source.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"#!") && String::from_utf8_lossy(line).contains("allow-oom")
}

/// True if the shebang declares `no-writes`.
pub(crate) fn declares_no_writes(source: &[u8]) -> bool {
    shebang(source).is_ok_and(|(_, read_only)| read_only)
}

/// Drops the interpreter of this thread with its compiled scripts.
pub(crate) fn flush() {
    INTERPRETER.with_borrow_mut(|interpreter| *interpreter = None);
}

fn with_interpreter<T>(act: impl FnOnce(&mut Interpreter) -> T) -> Result<T, Error> {
    INTERPRETER.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Some(Interpreter::new().map_err(|error| Error::err(format_args!("no Lua: {error}")))?);
        }
        slot.as_mut().map(act).ok_or(Error::SYNTAX)
    })
}

/// Parses an optional `#!lua flags=…` line. Returns the source without it, and whether it declares `no-writes`.
fn shebang(source: &[u8]) -> Result<(Vec<u8>, bool), Error> {
    let Some(rest) = source.strip_prefix(b"#!") else { return Ok((source.to_vec(), false)) };
    let end = rest.iter().position(|&byte| byte == b'\n').ok_or(Error::err("Invalid script shebang"))?;
    let line = String::from_utf8_lossy(&rest[..end]).into_owned();
    let mut words = line.split_whitespace();
    let engine = words.next().unwrap_or_default();
    if engine != "lua" {
        return Err(Error::err(format_args!("Unexpected engine in script shebang: {engine}")));
    }
    let mut read_only = false;
    for word in words {
        let Some(flags) = word.strip_prefix("flags=") else {
            return Err(Error::err(format_args!("Unknown lua shebang option: {word}")));
        };
        for flag in flags.split(',').filter(|flag| !flag.is_empty()) {
            match flag {
                "no-writes" => read_only = true,
                "allow-oom" | "allow-stale" | "no-cluster" | "allow-cross-slot-keys" => {}
                _ => return Err(Error::err(format_args!("Unexpected flag in script shebang: {flag}"))),
            }
        }
    }
    // The line end stays, so that errors report the right line numbers.
    Ok((rest[end..].to_vec(), read_only))
}

/// A script or function call.
struct Call<'a> {
    /// The name in error messages.
    label: &'a str,
    /// The key in the statistics of quick scripts.
    cache_key: &'a str,
    function: &'a Function,
    runner: &'a Function,
    keys: &'a [&'a [u8]],
    args: &'a [&'a [u8]],
    read_only: bool,
    /// True if the call may write above `maxmemory`.
    allow_oom: bool,
}

/// A Lua interpreter with the libraries for scripts.
struct Interpreter {
    lua: Lua,
    environment: Table,
    runner: Function,
    /// Runs functions, which receive keys and arguments as parameters.
    function_runner: Function,
    /// Functions of the loaded libraries, by the digest of their code.
    libraries: HashMap<String, HashMap<String, Function>>,
    /// The table behind `redis`: the functions that run commands are set for each script.
    redis: Table,
    compiled: HashMap<String, (Function, bool)>,
    random: Rc<Cell<u64>>,
    protocol: Rc<Cell<Protocol>>,
    json: Rc<Cell<json::Settings>>,
    interrupt: Rc<Interrupt>,
    /// A full GC runs above this memory usage.
    gc_threshold: usize,
}

impl Interpreter {
    fn new() -> mlua::Result<Interpreter> {
        let libraries = StdLib::STRING | StdLib::TABLE | StdLib::MATH;
        let lua = Lua::new_with(libraries, LuaOptions::default())?;
        let (random, protocol) = (Rc::new(Cell::new(1)), Rc::new(Cell::new(Protocol::Resp2)));
        let json = Rc::new(Cell::new(json::Settings::default()));
        let raw = raw_functions(&lua, &random, &protocol, &json)?;
        let redis = raw.get::<Table>("redis")?;
        let prelude = lua.load(include_str!("script/prelude.lua")).set_name("=prelude");
        let (environment, runner, function_runner) = prelude.call::<(Table, Function, Function)>(raw)?;
        memory::install(&lua)?;
        lua.gc_set_mode(GcMode::Incremental(GcIncParams::default().pause(GC_PAUSE_PERCENT)));
        let interrupt: Rc<Interrupt> = Rc::default();
        interrupt.install_here();
        Ok(Interpreter {
            lua,
            environment,
            runner,
            function_runner,
            libraries: HashMap::new(),
            redis,
            compiled: HashMap::new(),
            random,
            protocol,
            json,
            interrupt,
            gc_threshold: MIN_GC_THRESHOLD,
        })
    }

    fn compile(&self, source: &[u8]) -> Result<Function, Error> {
        let chunk = self.lua.load(source).set_name("@user_script").set_mode(ChunkMode::Text);
        chunk.set_environment(self.environment.clone()).into_function().map_err(|error| {
            let text = match &error {
                mlua::Error::SyntaxError { message, .. } => message.clone(),
                other => other.to_string(),
            };
            Error::err(format_args!("Error compiling script (new function): {}", one_line(&text)))
        })
    }

    fn find(&mut self, script: &Script<'_>) -> Result<(Function, bool), Error> {
        if let Some(found) = self.compiled.get(script.sha) {
            return Ok(found.clone());
        }
        let (body, read_only) = shebang(script.source)?;
        let function = self.compile(&body)?;
        if self.compiled.len() >= MAX_COMPILED {
            self.compiled.clear();
        }
        self.compiled.insert(script.sha.to_owned(), (function.clone(), read_only));
        Ok((function, read_only))
    }

    fn run(&mut self, ctx: &mut Ctx<'_>, script: &Script<'_>) -> Result<RunOutcome, Error> {
        let (function, no_writes) = self.find(script)?;
        let runner = self.runner.clone();
        let call = Call {
            label: script.sha,
            cache_key: script.sha,
            function: &function,
            runner: &runner,
            keys: &script.keys,
            args: &script.args,
            read_only: script.read_only || no_writes,
            allow_oom: allows_oom(script.source),
        };
        self.execute(ctx, &call)
    }

    /// Runs a compiled script and writes its reply.
    fn execute(&mut self, ctx: &mut Ctx<'_>, call: &Call<'_>) -> Result<RunOutcome, Error> {
        self.random.set(0);
        self.protocol.set(Protocol::Resp2);
        self.json.set(json::Settings::default());
        self.interrupt.begin(&self.lua, ctx).map_err(|error| failed(&error))?;
        memory::begin(ctx.shared.script_budget(), self.interrupt.may_offload());
        let began = ctx.shared.clock.monotonic_ns();
        let outcome = self.call(ctx, call);
        // Also subject to interruption: a table that contains another many times can make an endless reply.
        let reply = match outcome {
            Ok((true, value)) => convert::to_reply(&value, self.protocol.get()),
            Ok((false, value)) => Err(raised(&value, call.label)),
            Err(error) => Err(failed(&error)),
        };
        ctx.shared.scripts.on_run(call.cache_key, ctx.shared.clock.monotonic_ns().saturating_sub(began));
        let is_out_of_memory_error = matches!(&reply, Err(error) if error.0.contains(NO_MEMORY));
        let offloads = is_out_of_memory_error && self.interrupt.may_offload();
        let stopped = self.interrupt.end(&self.lua);
        // After the result was dropped: otherwise the GC would count it as in use.
        self.collect_garbage();
        memory::end(&self.lua);
        match stopped {
            Some(Stop::Offload) => return Ok(RunOutcome::Offload),
            // Offloaded, it has more memory from the start.
            None if offloads => return Ok(RunOutcome::Offload),
            Some(why) => {
                if why.discards_effects()
                    && !ctx.fx.is_empty()
                    && let Some(shard) = &ctx.session.shard
                {
                    shard.discards_effects.store(true, Ordering::Release);
                }
                let text = why.text();
                return Err(Error::err(format_args!("{text} script: {}, on @user_script", call.label)));
            }
            None => {}
        }
        reply?.write(&mut ctx.out);
        Ok(RunOutcome::Completed)
    }

    /// Runs a full GC if there may be much garbage.
    fn collect_garbage(&mut self) {
        if self.lua.used_memory() > self.gc_threshold.min(memory::limit() / 2) {
            let _ = self.lua.gc_collect();
            // Never near the limit: a script would run out of memory there, and the interpreter does not collect
            // garbage on its own.
            self.gc_threshold = (2 * self.lua.used_memory()).clamp(MIN_GC_THRESHOLD, memory::MAX_MEMORY / 2);
        }
    }

    /// Lends the command context to the interpreter while the script runs.
    fn call(&self, ctx: &mut Ctx<'_>, call: &Call<'_>) -> mlua::Result<(bool, Value)> {
        let bytes = call.keys.iter().chain(call.args).map(|text| 64 + text.len()).sum();
        let (keys, args) =
            unlimited(&self.lua, bytes, || Ok((self.strings(call.keys)?, self.strings(call.args)?)))?;
        let caller = RefCell::new(Caller {
            ctx,
            read_only: call.read_only,
            allow_oom: call.allow_oom,
            slot: call.keys.first().map(|key| crate::slot_of(key)),
            protocol: &self.protocol,
            interrupt: &self.interrupt,
            buffer: BytesMut::new(),
            reply_len: 0,
        });
        self.lua.scope(|scope| {
            let run = |lua: &Lua, args: MultiValue| caller.borrow_mut().call(lua, &args, true);
            let try_run = |lua: &Lua, args: MultiValue| caller.borrow_mut().call(lua, &args, false);
            unlimited(&self.lua, 0, || {
                self.redis.raw_set("call", scope.create_function(run)?)?;
                self.redis.raw_set("pcall", scope.create_function(try_run)?)
            })?;
            call.runner.call::<(bool, Value)>((call.function, keys, args))
        })
    }

    /// A Lua list of strings. They are inserted one by one: each value held occupies one of the few reference slots
    /// of the interpreter.
    fn strings(&self, of: &[&[u8]]) -> mlua::Result<Table> {
        let list = self.lua.create_table_with_capacity(of.len(), 0)?;
        for (text, at) in of.iter().zip(1..) {
            list.raw_set(at, self.lua.create_string(text)?)?;
        }
        Ok(list)
    }
}

/// Creates a value of `bytes` in the interpreter; without the memory limit if it is small.
fn unlimited<T>(lua: &Lua, bytes: usize, put: impl FnOnce() -> mlua::Result<T>) -> mlua::Result<T> {
    if bytes > MAX_UNLIMITED || lua.used_memory() > memory::limit() / 2 {
        memory::reserve(bytes);
        return put();
    }
    lua.set_memory_limit(0)?;
    let done = put();
    lua.set_memory_limit(memory::limit())?;
    done
}

/// Makes an error text fit on one protocol line.
fn one_line(text: &str) -> String {
    text.replace(['\r', '\n'], " ")
}

fn failed(error: &mlua::Error) -> Error {
    let text = error.to_string();
    let text = text.lines().next().unwrap_or_default();
    Error::err(format_args!("Error running script: {}", text.trim_start_matches("runtime error: ")))
}

/// A raised value as an error reply: message, script and line.
fn raised(value: &Value, sha: &str) -> Error {
    let table = match value {
        Value::Table(table) => table,
        // An out-of-memory error of the interpreter does not pass through the error handler.
        Value::String(text) => {
            let text = one_line(&String::from_utf8_lossy(&text.as_bytes()));
            return Error::err(format_args!("Error running script: {text}"));
        }
        Value::Error(error) => return failed(error),
        _ => return Error::err("Error running script: unknown error"),
    };
    let text = |field: &str| match table.raw_get::<Value>(field) {
        Ok(Value::String(text)) => Some(String::from_utf8_lossy(&text.as_bytes()).into_owned()),
        _ => None,
    };
    let message = one_line(&text("err").unwrap_or_else(|| "ERR unknown error".into()));
    match (text("source"), table.raw_get::<Value>("line")) {
        (Some(source), Ok(Value::Integer(line))) => {
            Error::coded(format!("{message} script: {sha}, on {source}:{line}."))
        }
        _ => Error::coded(message),
    }
}

/// The innermost source position in the running script.
fn source_position(lua: &Lua) -> Option<(String, i64)> {
    (0..64).find_map(|level| {
        lua.inspect_stack(level, |frame| {
            let source = frame.source();
            let source = source.source.as_deref().unwrap_or_default().to_owned();
            let line = frame.current_line().map_or(0, |line| line as i64);
            matches!(source.as_str(), "@user_script" | "@user_function").then_some((source, line))
        })
        .flatten()
    })
}

/// The native functions that the prelude builds on.
fn raw_functions(
    lua: &Lua,
    random: &Rc<Cell<u64>>,
    protocol: &Rc<Cell<Protocol>>,
    json: &Rc<Cell<json::Settings>>,
) -> mlua::Result<Table> {
    let raw = lua.create_table()?;
    raw.set("redis", redis_functions(lua, protocol)?)?;
    raw.set("cjson", json::library(lua, json)?)?;
    raw.set("cmsgpack", msgpack::library(lua)?)?;
    raw.set("bit", bits::library(lua)?)?;
    raw.set("struct", pack::library(lua)?)?;
    raw.set("string", strings::library(lua)?)?;
    raw.set("where", lua.create_function(|lua, ()| Ok(source_position(lua).unzip()))?)?;
    raw.set("explain", lua.create_function(explain)?)?;
    let state = Rc::clone(random);
    raw.set("random", lua.create_function(move |lua, args: MultiValue| next_random(lua, &state, &args))?)?;
    let state = Rc::clone(random);
    let seed = move |_: &Lua, args: MultiValue| {
        state.set(match argument(&args, 0) {
            Some(Value::Integer(seed)) => *seed as u64,
            Some(Value::Number(seed)) => seed.to_bits(),
            _ => 0,
        });
        Ok(Value::Nil)
    };
    raw.set("randomseed", lua.create_function(seed)?)?;
    Ok(raw)
}

/// Message, source and line of an error raised by Rust code.
///
/// Also whether the message has no error code, because Lua's own libraries would have raised it.
fn explain(lua: &Lua, error: mlua::Error) -> mlua::Result<(String, Option<String>, Option<i64>, bool)> {
    let (message, place, is_native) = match find_raised(&error) {
        Some(raised) => (raised.message.clone(), raised.place.clone(), raised.is_native),
        None => (
            format!("ERR {}", error.to_string().lines().next().unwrap_or_default()),
            source_position(lua),
            false,
        ),
    };
    let (source, line) = place.unzip();
    Ok((message, source, line, is_native))
}

/// `math.random`: the same sequence in every run, so that scripts are deterministic.
fn next_random(lua: &Lua, state: &Cell<u64>, args: &MultiValue) -> LuaResult {
    // Steele's SplitMix64.
    let next = state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    state.set(next);
    let mixed = (next ^ (next >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let unit = ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
    let number = |at: usize| match argument(args, at) {
        Some(Value::Integer(number)) => Some(*number as f64),
        Some(Value::Number(number)) => Some(number.floor()),
        _ => None,
    };
    let (low, high) = match (args.len(), number(0), number(1)) {
        (0, ..) => return Ok(Value::Number(unit)),
        (1, Some(high), _) => (1.0, high),
        (2, Some(low), Some(high)) => (low, high),
        _ => return Err(raise(lua, &wrong(1, "number", "no value"))),
    };
    if high < low {
        return Err(raise(lua, "bad argument #1 to 'random' (interval is empty)"));
    }
    Ok(Value::Number((unit * (high - low + 1.0)).floor() + low))
}

fn redis_functions(lua: &Lua, protocol: &Rc<Cell<Protocol>>) -> mlua::Result<Table> {
    let redis = lua.create_table()?;
    let sha1hex = |lua: &Lua, args: MultiValue| match (args.len(), argument(&args, 0)) {
        (1, Some(value)) => {
            let text = lua.coerce_string(value.clone())?.map_or(Vec::new(), |text| text.as_bytes().to_vec());
            lua.create_string(sha1::hex(&text)).map(Value::String)
        }
        _ => Err(raise_coded(lua, "ERR wrong number of arguments")),
    };
    redis.set("sha1hex", lua.create_function(sha1hex)?)?;
    redis.set("log", lua.create_function(|lua, args: MultiValue| log(lua, &args))?)?;
    let protocol = Rc::clone(protocol);
    let setresp = move |lua: &Lua, args: MultiValue| match (args.len(), argument(&args, 0)) {
        (1, Some(Value::Integer(version @ (2 | 3)))) => {
            protocol.set(if *version == 2 { Protocol::Resp2 } else { Protocol::Resp3 });
            Ok(Value::Nil)
        }
        (1, _) => Err(raise_coded(lua, "ERR RESP version must be 2 or 3.")),
        _ => Err(raise_coded(lua, "ERR redis.setresp() requires one argument.")),
    };
    redis.set("setresp", lua.create_function(setresp)?)?;
    redis.set("acl_check_cmd", lua.create_function(|_, _: MultiValue| Ok(Value::Boolean(true)))?)?;
    for (name, number) in [("LOG_DEBUG", 0), ("LOG_VERBOSE", 1), ("LOG_NOTICE", 2), ("LOG_WARNING", 3)] {
        redis.set(name, number)?;
    }
    for (name, number) in
        [("REPL_NONE", 0), ("REPL_AOF", 1), ("REPL_SLAVE", 2), ("REPL_REPLICA", 2), ("REPL_ALL", 3)]
    {
        redis.set(name, number)?;
    }
    redis.set("REDIS_VERSION", "7.0.15")?;
    redis.set("REDIS_VERSION_NUM", 0x0007_000f)?;
    Ok(redis)
}

fn log(lua: &Lua, args: &MultiValue) -> LuaResult {
    if args.len() < 2 {
        return Err(raise_coded(lua, "ERR redis.log() requires two arguments or more."));
    }
    let Some(Value::Integer(level)) = argument(args, 0) else {
        return Err(raise_coded(lua, "ERR First argument must be a number (log level)."));
    };
    if !(0..=3).contains(level) {
        return Err(raise_coded(lua, "ERR Invalid debug level."));
    }
    let words: Vec<String> = args.iter().skip(1).filter_map(|value| value.to_string().ok()).collect();
    tracing::info!(target: "moim_slots::script", level, "{}", words.join(" "));
    Ok(Value::Nil)
}

/// The arguments of a command.
fn arguments(args: &MultiValue) -> Result<OwnedArgs, Error> {
    if args.is_empty() {
        return Err(Error::err("Please specify at least one argument for this redis lib call"));
    }
    let mut words = Vec::with_capacity(args.len());
    for value in args {
        words.push(match value {
            Value::Number(number) => crate::value::number::format_g17(*number).into_bytes(),
            Value::String(text) => text.as_bytes().to_vec(),
            Value::Integer(number) => number.to_string().into_bytes(),
            _ => return Err(Error::err("Lua redis lib command arguments must be strings or integers")),
        });
    }
    Ok(OwnedArgs::from_slices(words))
}

/// Runs the commands of a script.
struct Caller<'c, 'a> {
    ctx: &'c mut Ctx<'a>,
    read_only: bool,
    allow_oom: bool,
    /// The hash slot of all keys.
    slot: Option<u16>,
    protocol: &'c Cell<Protocol>,
    interrupt: &'c Interrupt,
    buffer: BytesMut,
    /// Length of the last reply.
    reply_len: usize,
}

impl Caller<'_, '_> {
    /// `redis.call` raises errors, `redis.pcall` returns them.
    fn call(&mut self, lua: &Lua, args: &MultiValue, raises: bool) -> LuaResult {
        let reply = match arguments(args).and_then(|args| self.run(&args)) {
            Ok(reply) => reply,
            Err(error) => Reply::Error(error.0.into_owned().into_bytes().into()),
        };
        match &reply {
            Reply::Error(message) if raises => Err(raise_coded(lua, String::from_utf8_lossy(message))),
            Reply::Error(message) => {
                let table = lua.create_table()?;
                table.raw_set("err", lua.create_string(message)?)?;
                if let Some((source, line)) = source_position(lua) {
                    table.raw_set("source", source)?;
                    table.raw_set("line", line)?;
                }
                Ok(Value::Table(table))
            }
            reply => unlimited(lua, self.reply_len, || convert::to_lua(lua, reply, self.protocol.get())),
        }
    }

    fn run(&mut self, command: &OwnedArgs) -> Result<Reply, Error> {
        let args = command.args();
        let spec = cmd::resolve(&args).filter(|spec| !spec.lacks_subcommand(&args));
        let spec = spec.ok_or(Error::err("Unknown Redis command called from script"))?;
        if !spec.takes(args.len()) {
            return Err(Error::err("Wrong number of args calling Redis command from script"));
        }
        if spec.has(flag::NOSCRIPT) {
            return Err(Error::err("This Redis command is not allowed from script"));
        }
        if self.read_only && spec.has(flag::WRITE | flag::MAY_REPLICATE) {
            return Err(Error::err("Write commands are not allowed from read-only scripts."));
        }
        if self.ctx.mode == Mode::Replica && spec.has(flag::WRITE) {
            return Err(Error::READ_ONLY);
        }
        if spec.has(flag::DENYOOM) && !self.allow_oom && self.ctx.dirty == 0 && self.is_out_of_memory() {
            return Err(Error::OOM);
        }
        let blocks = |word: &[u8]| word.eq_ignore_ascii_case(b"BLOCK");
        if spec.has(flag::BLOCKING) && spec.group == "stream" && args.iter().any(blocks) {
            let name = spec.name;
            return Err(Error::err(format_args!(
                "{name} command is not allowed with BLOCK option from scripts"
            )));
        }
        self.check_slot(spec, command)?;
        let protocol = self.protocol.get();
        let ctx = &mut *self.ctx;
        self.buffer.clear();
        let mut inner = Ctx {
            args,
            db: ctx.db,
            now: ctx.now,
            out: Encoder::new(&mut self.buffer, protocol),
            fx: ctx.fx,
            events: ctx.events,
            session: ctx.session,
            shared: ctx.shared,
            mode: ctx.mode,
            nested: true,
            in_script: true,
            dirty: 0,
            rewritten: false,
        };
        let number = std::mem::replace(&mut inner.session.command, cmd::number_of(spec));
        inner.cache_key_lookup(spec);
        inner.run(spec);
        inner.db.clear_cached_id();
        inner.session.command = number;
        let dirty = inner.dirty;
        ctx.dirty += dirty;
        // The commands have propagated their own effects.
        ctx.rewritten = true;
        let says = spec.has(flag::PUBSUB);
        if dirty > 0 || says {
            self.interrupt.on_command(ctx, dirty > 0, says);
        }
        self.reply_len = self.buffer.len();
        match ReplyDecoder::new(usize::MAX).decode(&mut self.buffer) {
            Ok(Some(reply)) => Ok(reply),
            _ => Ok(Reply::Null),
        }
    }

    /// True if memory is above `maxmemory` and cannot be freed. Eviction happens between commands, never inside a
    /// script; a script that has written continues.
    fn is_out_of_memory(&self) -> bool {
        let settings = &self.ctx.shared.settings;
        let limit = settings.max_memory.load(Ordering::Relaxed);
        self.ctx.mode == Mode::Primary
            && limit > 0
            && self.ctx.shared.memory.used().max(self.ctx.db.memory() as u64) > limit
            && settings.policy() == Policy::NoEviction
    }

    fn check_slot(&mut self, spec: &cmd::Spec, command: &OwnedArgs) -> Done {
        let args = command.args();
        let mut keys = Vec::new();
        spec.keys.positions(&args, &mut keys);
        for at in keys {
            let slot = crate::slot_of(args.get(at).unwrap_or_default());
            if self.slot.is_none()
                && let Some(shard) = &self.ctx.session.shard
                && (self.ctx.shared.view.load().owner(slot) != Some(shard.index)
                    || self.ctx.mode == Mode::Replica && !self.ctx.session.readonly)
            {
                return Err(Error::err("Script attempted to access a non local key in a cluster node"));
            }
            if *self.slot.get_or_insert(slot) != slot {
                return Err(Error::err("Script attempted to access keys that do not hash to the same slot"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
