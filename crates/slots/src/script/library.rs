//! Loads function libraries into an interpreter and runs their functions.
//!
//! Loading runs the code once with only `redis.register_function` available. Every thread that runs a function loads
//! the library for itself, so a library must not rely on local state of an earlier call.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use mlua::chunk::ChunkMode;
use mlua::{Function, Lua, MultiValue, Table, Value};
use moim_base::Clock;

use super::{Call, Interpreter, RunOutcome, argument, one_line, raise_coded, sha1, with_interpreter};
use crate::ctx::Ctx;
use crate::error::Error;
use crate::functions::{self, About, FLAGS, Library};

/// Timeout of loading.
const LOAD_MS: u64 = 500;

/// A registered function.
struct Registered {
    name: String,
    callback: Function,
    about: About,
}

/// Loads a library: its name and its functions. The clock, if given, enforces the load timeout.
pub(crate) fn load(code: &[u8], clock: Option<&Arc<dyn Clock>>) -> Result<Library, Error> {
    let (name, body) = functions::metadata(code)?;
    let sha = sha1::hex(code);
    let registered = with_interpreter(|interpreter| interpreter.load_library(&sha, body, clock))??;
    if registered.is_empty() {
        return Err(Error::err("No functions registered"));
    }
    Ok(Library { name, code: code.into(), sha, functions: registered })
}

/// Runs a function and writes its reply.
pub(crate) fn run(
    ctx: &mut Ctx<'_>,
    library: &Library,
    function: &str,
    keys: &[&[u8]],
    args: &[&[u8]],
    read_only: bool,
) -> Result<RunOutcome, Error> {
    let label = format!("{}:{function}", library.sha);
    with_interpreter(|interpreter| {
        let callback = interpreter.function(library, function)?;
        let runner = interpreter.function_runner.clone();
        let call = Call {
            label: function,
            cache_key: &label,
            function: &callback,
            runner: &runner,
            keys,
            args,
            read_only,
            // The memory check took place before the call.
            allow_oom: true,
        };
        interpreter.execute(ctx, &call)
    })?
}

impl Interpreter {
    /// A function of a library, which is loaded if this interpreter has not done so.
    fn function(&mut self, library: &Library, name: &str) -> Result<Function, Error> {
        if !self.libraries.contains_key(&library.sha) {
            let (_, body) = functions::metadata(&library.code)?;
            self.load_library(&library.sha, body, None)?;
        }
        let found = self.libraries.get(&library.sha).and_then(|functions| functions.get(name));
        found.cloned().ok_or_else(|| Error::err("Function not found"))
    }

    fn load_library(
        &mut self,
        sha: &str,
        body: &[u8],
        clock: Option<&Arc<dyn Clock>>,
    ) -> Result<BTreeMap<String, About>, Error> {
        /// Maximum number of libraries per interpreter.
        const MAX_LIBRARIES: usize = 1024;
        let chunk = self.lua.load(body).set_name("@user_function").set_mode(ChunkMode::Text);
        let function = chunk.set_environment(self.environment.clone()).into_function().map_err(|error| {
            let text = match &error {
                mlua::Error::SyntaxError { message, .. } => message.clone(),
                other => other.to_string(),
            };
            Error::err(format_args!("Error compiling function: {}", one_line(&text)))
        })?;
        if let Some(clock) = clock {
            let begun = self.interrupt.begin_load(&self.lua, clock, clock.monotonic_ms() + LOAD_MS);
            begun.map_err(|error| super::failed(&error))?;
        }
        let registered = self.register(&function);
        if let Some(why) = self.interrupt.end(&self.lua) {
            return Err(Error::err(format_args!("Error registering functions: {}", why.text())));
        }
        let registered = registered
            .map_err(|text| Error::err(format_args!("Error registering functions: {}", one_line(&text))))?;
        if self.libraries.len() >= MAX_LIBRARIES {
            self.libraries.clear();
        }
        let abouts = registered.iter().map(|found| (found.name.clone(), found.about.clone())).collect();
        let callbacks = registered.into_iter().map(|found| (found.name, found.callback)).collect();
        self.libraries.insert(sha.to_owned(), callbacks);
        Ok(abouts)
    }

    /// Runs the code of a library and collects its registrations.
    fn register(&self, function: &Function) -> Result<Vec<Registered>, String> {
        let registered: RefCell<Vec<Registered>> = RefCell::default();
        let outcome = self.lua.scope(|scope| {
            let register = |lua: &Lua, args: MultiValue| {
                let found = registration(&args).map_err(|why| raise_coded(lua, format!("ERR {why}")))?;
                let mut all = registered.borrow_mut();
                if all.iter().any(|known| known.name == found.name) {
                    return Err(raise_coded(lua, "ERR Function already exists in the library"));
                }
                all.push(found);
                Ok(Value::Nil)
            };
            self.redis.raw_set("register_function", scope.create_function(register)?)?;
            for name in ["call", "pcall", "setresp"] {
                let refuse = move |lua: &Lua, _: MultiValue| -> mlua::Result<Value> {
                    Err(raise_coded(
                        lua,
                        format!("ERR Script attempted to access nonexistent global variable '{name}'"),
                    ))
                };
                if name != "setresp" {
                    self.redis.raw_set(name, scope.create_function(refuse)?)?;
                }
            }
            self.runner.call::<(bool, Value)>((function, Value::Nil, Value::Nil))
        });
        let refused = |lua: &Lua, _: MultiValue| -> mlua::Result<Value> {
            Err(raise_coded(lua, "ERR redis.register_function can only be called on FUNCTION LOAD command"))
        };
        let _ = self
            .lua
            .create_function(refused)
            .and_then(|refused| self.redis.raw_set("register_function", refused));
        match outcome {
            Ok((true, _)) => Ok(registered.into_inner()),
            Ok((false, failed)) => Err(message(&failed)),
            Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
        }
    }
}

fn message(failed: &Value) -> String {
    let Value::Table(table) = failed else { return "unknown error".to_owned() };
    let text = |field: &str| match table.raw_get::<Value>(field) {
        Ok(Value::String(text)) => Some(String::from_utf8_lossy(&text.as_bytes()).into_owned()),
        _ => None,
    };
    let message = text("err").unwrap_or_else(|| "ERR unknown error".to_owned());
    let message = message.strip_prefix("ERR ").unwrap_or(&message).to_owned();
    match (text("source"), table.raw_get::<Value>("line")) {
        (Some(source), Ok(Value::Integer(line))) => format!("{source}: {line}: {message}"),
        _ => message,
    }
}

/// Parses the arguments of `redis.register_function`: a name and a function, or a table of named arguments.
fn registration(args: &MultiValue) -> Result<Registered, String> {
    let found = match (args.len(), argument(args, 0), argument(args, 1)) {
        (1, Some(Value::Table(table)), _) => named(table)?,
        (1, ..) => {
            return Err(
                "calling redis.register_function with a single argument is only applicable to Lua table (representing named arguments)."
                    .to_owned(),
            );
        }
        (2, Some(Value::String(name)), Some(Value::Function(callback))) => Registered {
            name: String::from_utf8_lossy(&name.as_bytes()).into_owned(),
            callback: callback.clone(),
            about: About::default(),
        },
        (2, Some(Value::String(_)), _) => {
            return Err("second argument to redis.register_function must be a function".to_owned());
        }
        (2, ..) => return Err("first argument to redis.register_function must be a string".to_owned()),
        _ => return Err("wrong number of arguments to redis.register_function".to_owned()),
    };
    functions::check_name(&found.name).map_err(|error| error.0.trim_start_matches("ERR ").to_owned())?;
    Ok(found)
}

fn named(table: &Table) -> Result<Registered, String> {
    let (mut name, mut callback, mut about) = (None, None, About::default());
    for pair in table.pairs::<Value, Value>() {
        let (key, value) = pair.map_err(|error| error.to_string())?;
        let Value::String(key) = &key else {
            return Err("named argument key given to redis.register_function is not a string".to_owned());
        };
        let text = || match &value {
            Value::String(text) => Some(String::from_utf8_lossy(&text.as_bytes()).into_owned()),
            _ => None,
        };
        let must_be = |what: &str, kind: &str| {
            format!("{what} argument given to redis.register_function must be a {kind}")
        };
        match &*key.as_bytes() {
            b"function_name" => name = Some(text().ok_or_else(|| must_be("function_name", "string"))?),
            b"description" => {
                about.description = Some(text().ok_or_else(|| must_be("description", "string"))?)
            }
            b"callback" => match &value {
                Value::Function(function) => callback = Some(function.clone()),
                _ => return Err(must_be("callback", "function")),
            },
            b"flags" => match &value {
                Value::Table(flags) => about.flags = read_flags(flags)?,
                _ => {
                    return Err("flags argument to redis.register_function must be a table representing function flags"
                        .to_owned());
                }
            },
            _ => return Err("unknown argument given to redis.register_function".to_owned()),
        }
    }
    let name = name.ok_or("redis.register_function must get a function name argument")?;
    let callback = callback.ok_or("redis.register_function must get a callback argument")?;
    Ok(Registered { name, callback, about })
}

fn read_flags(flags: &Table) -> Result<u8, String> {
    let mut bits = 0;
    for flag in flags.sequence_values::<Value>() {
        let flag = flag.map_err(|error| error.to_string())?;
        let Value::String(flag) = &flag else { return Err("unknown flag given".to_owned()) };
        let known = FLAGS.iter().find(|(_, name)| *flag.as_bytes() == *name.as_bytes());
        bits |= known.ok_or("unknown flag given")?.0;
    }
    Ok(bits)
}
