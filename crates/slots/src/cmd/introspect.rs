//! COMMAND: command introspection.

use moim_wire_resp::OwnedArgs;

use super::access;
use super::scan::glob;
use super::{Keys, Spec, flag, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};

const ANY: u32 = LOADING | STALE;

pub(crate) const COMMANDS: &[Spec] = &[Spec::new(
    "command",
    -1,
    ANY,
    Keys::None,
    "server",
    "Returns detailed information about all commands.",
    command,
)
.with(&[
    Spec::new("command|count", 2, ANY, Keys::None, "server", "Returns a count of commands.", |ctx| {
        ctx.out.integer(super::all().count() as i64);
        Ok(())
    }),
    Spec::new(
        "command|info",
        -2,
        ANY,
        Keys::None,
        "server",
        "Returns information about one, multiple or all commands.",
        info,
    ),
    Spec::new(
        "command|docs",
        -2,
        ANY,
        Keys::None,
        "server",
        "Returns documentary information about one, multiple or all commands.",
        docs,
    ),
    Spec::new("command|list", -2, ANY, Keys::None, "server", "Returns a list of command names.", list),
    Spec::new(
        "command|getkeys",
        -4,
        ANY,
        Keys::None,
        "server",
        "Extracts the key names from an arbitrary command.",
        |ctx| getkeys(ctx, false),
    ),
    Spec::new(
        "command|getkeysandflags",
        -4,
        ANY,
        Keys::None,
        "server",
        "Extracts the key names and access flags for an arbitrary command.",
        |ctx| getkeys(ctx, true),
    ),
    Spec::new(
        "command|help",
        2,
        ANY,
        Keys::None,
        "server",
        "Returns helpful text about the different subcommands.",
        |ctx| {
            super::help(
                ctx,
                &[
                    "COMMAND <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
                    "(no subcommand)",
                    "    Return details about all Redis commands.",
                    "COUNT",
                    "    Return the total number of commands in this Redis server.",
                    "LIST",
                    "    Return a list of all commands in this Redis server.",
                    "INFO [<command-name> ...]",
                    "    Return details about multiple Redis commands.",
                    "DOCS [<command-name> ...]",
                    "    Return documentation details about multiple Redis commands.",
                    "GETKEYS <full-command>",
                    "    Return the keys from a full Redis command.",
                    "HELP",
                    "    Prints this help.",
                ],
            )
        },
    ),
])];

fn command(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 1 {
        return Err(super::unknown_subcommand(&ctx.args));
    }
    ctx.out.array(super::all().count());
    super::all().for_each(|spec| describe(ctx, spec));
    Ok(())
}

/// The ACL categories derived from a command's flags and group.
pub(super) fn categories(spec: &Spec) -> Vec<&'static str> {
    let mut all = Vec::new();
    if spec.has(WRITE) {
        all.push("@write");
    }
    if spec.has(READONLY) {
        all.push("@read");
    }
    all.push(match spec.group {
        "generic" => "@keyspace",
        "string" => "@string",
        "list" => "@list",
        "set" => "@set",
        "sorted-set" | "sorted_set" | "zset" => "@sortedset",
        "hash" => "@hash",
        "stream" => "@stream",
        "pubsub" => "@pubsub",
        "transactions" => "@transaction",
        "scripting" => "@scripting",
        "connection" => "@connection",
        "bitmap" => "@bitmap",
        "hyperloglog" => "@hyperloglog",
        "geo" => "@geo",
        _ => "@slow",
    });
    if spec.has(ADMIN) {
        all.extend(["@admin", "@dangerous"]);
    }
    if spec.has(BLOCKING) {
        all.push("@blocking");
    }
    all.push(if spec.has(FAST) { "@fast" } else { "@slow" });
    all.dedup();
    all
}

fn range(keys: &Keys) -> (i64, i64, i64) {
    match *keys {
        Keys::None | Keys::Found { first: 0, .. } => (0, 0, 0),
        Keys::Found { first, .. } => (first as i64, first as i64, 1),
        Keys::Range { first, last, step } => (first as i64, i64::from(last), step as i64),
        Keys::Counted { also: 0, .. } => (0, 0, 0),
        Keys::Counted { also, .. } => (also as i64, also as i64, 1),
    }
}

fn describe(ctx: &mut Ctx<'_>, spec: &Spec) {
    ctx.out.array(10);
    ctx.out.bulk(spec.name.as_bytes());
    ctx.out.integer(i64::from(spec.arity));
    let movable = matches!(spec.keys, Keys::Counted { .. } | Keys::Found { .. });
    let flags = spec.flags | if movable { MOVABLEKEYS } else { 0 };
    let names: Vec<_> = flag::NAMES.iter().filter(|(bit, _)| flags & bit != 0).collect();
    ctx.out.set(names.len());
    names.iter().for_each(|(_, name)| ctx.out.simple(name));
    let (first, last, step) = range(&spec.keys);
    [first, last, step].into_iter().for_each(|number| ctx.out.integer(number));
    let categories = categories(spec);
    ctx.out.set(categories.len());
    categories.iter().for_each(|name| ctx.out.simple(name));
    ctx.out.set(0);
    key_specs(ctx, spec);
    match spec.subs.len() {
        0 => ctx.out.set(0),
        subs => ctx.out.array(subs),
    }
    spec.subs.iter().for_each(|sub| describe(ctx, sub));
}

/// Key specifications in the form of COMMAND INFO.
fn key_specs(ctx: &mut Ctx<'_>, spec: &Spec) {
    let (begin, find): (usize, [(&str, i64); 3]) = match spec.keys {
        Keys::None | Keys::Found { .. } => {
            ctx.out.set(0);
            return;
        }
        Keys::Range { first, last, step } => {
            let last = if last < 0 { i64::from(last) } else { i64::from(last) - first as i64 };
            (first, [("lastkey", last), ("keystep", step as i64), ("limit", 0)])
        }
        Keys::Counted { at, .. } => (at, [("keynumidx", 0), ("firstkey", 1), ("keystep", 1)]),
    };
    ctx.out.set(1);
    ctx.out.map(3);
    ctx.out.bulk(b"flags");
    let words = access::words(spec, &moim_wire_resp::OwnedArgs::from_slices([spec.name]).args(), 0);
    ctx.out.set(words.len());
    words.iter().for_each(|word| ctx.out.simple(word));
    ctx.out.bulk(b"begin_search");
    ctx.out.map(2);
    ctx.out.bulk(b"type");
    ctx.out.bulk(b"index");
    ctx.out.bulk(b"spec");
    ctx.out.map(1);
    ctx.out.bulk(b"index");
    ctx.out.integer(begin as i64);
    ctx.out.bulk(b"find_keys");
    ctx.out.map(2);
    ctx.out.bulk(b"type");
    let is_range = find[0].0 == "lastkey";
    ctx.out.bulk(if is_range { b"range" } else { b"keynum" });
    ctx.out.bulk(b"spec");
    ctx.out.map(find.len());
    for (name, number) in find {
        ctx.out.bulk(name.as_bytes());
        ctx.out.integer(number);
    }
}

/// A command by name; `config|get` names a subcommand.
fn named(name: &[u8]) -> Option<&'static Spec> {
    let text = std::str::from_utf8(name).ok()?.to_lowercase();
    match text.split_once('|') {
        None => super::find(name),
        Some((family, _)) => super::find(family.as_bytes())?.subs.iter().find(|sub| sub.name == text),
    }
}

fn info(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() == 2 {
        ctx.out.array(super::all().count());
        super::all().for_each(|spec| describe(ctx, spec));
        return Ok(());
    }
    ctx.out.array(ctx.argc() - 2);
    for name in ctx.args.from(2).iter() {
        match named(name) {
            Some(spec) => describe(ctx, spec),
            None => ctx.out.null(),
        }
    }
    Ok(())
}

fn document(ctx: &mut Ctx<'_>, spec: &Spec) {
    ctx.out.bulk(spec.name.as_bytes());
    ctx.out.map(if spec.subs.is_empty() { 3 } else { 4 });
    for (name, value) in [("summary", spec.summary), ("since", "1.0.0"), ("group", spec.group)] {
        ctx.out.bulk(name.as_bytes());
        ctx.out.bulk(value.as_bytes());
    }
    if !spec.subs.is_empty() {
        ctx.out.bulk(b"subcommands");
        ctx.out.map(spec.subs.len());
        spec.subs.iter().for_each(|sub| document(ctx, sub));
    }
}

fn docs(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() == 2 {
        ctx.out.map(super::all().count());
        super::all().for_each(|spec| document(ctx, spec));
        return Ok(());
    }
    let found: Vec<_> = ctx.args.from(2).iter().filter_map(named).collect();
    ctx.out.map(found.len());
    found.into_iter().for_each(|spec| document(ctx, spec));
    Ok(())
}

fn list(ctx: &mut Ctx<'_>) -> Done {
    let all = || super::all().flat_map(|spec| std::iter::once(spec).chain(spec.subs));
    let mut names: Vec<&str> = all().map(|spec| spec.name).collect();
    match ctx.argc() {
        2 => {}
        5 if ctx.is(2, "FILTERBY") && ctx.is(3, "PATTERN") => {
            names.retain(|name| glob(ctx.arg(4), name.as_bytes(), true));
        }
        5 if ctx.is(2, "FILTERBY") && ctx.is(3, "ACLCAT") => {
            let wanted = format!("@{}", String::from_utf8_lossy(ctx.arg(4)).to_lowercase());
            let is_wanted = |spec: &&Spec| categories(spec).contains(&wanted.as_str());
            names = all().filter(is_wanted).map(|spec| spec.name).collect();
        }
        5 if ctx.is(2, "FILTERBY") && ctx.is(3, "MODULE") => names.clear(),
        _ => return Err(Error::SYNTAX),
    }
    ctx.out.array(names.len());
    names.iter().for_each(|name| ctx.out.bulk(name.as_bytes()));
    Ok(())
}

fn getkeys(ctx: &mut Ctx<'_>, with_flags: bool) -> Done {
    let command = OwnedArgs::from_slices(ctx.args.from(2).iter());
    let args = command.args();
    let spec = super::resolve(&args).ok_or_else(|| Error::err("Invalid command specified"))?;
    if matches!(spec.keys, Keys::None) {
        return Err(Error::err("The command has no key arguments"));
    }
    if !spec.takes(args.len()) {
        return Err(Error::err("Invalid number of arguments specified for command"));
    }
    let mut keys = Vec::new();
    spec.keys.positions(&args, &mut keys);
    if keys.is_empty() && !spec.has(NO_MANDATORY_KEYS) {
        return Err(Error::err("Invalid arguments specified for command"));
    }
    ctx.out.array(keys.len());
    for (key, at) in keys.into_iter().enumerate() {
        if with_flags {
            ctx.out.array(2);
        }
        ctx.out.bulk(&args[at]);
        if with_flags {
            let words = access::words(spec, &args, key);
            ctx.out.set(words.len());
            words.iter().for_each(|word| ctx.out.simple(word));
        }
    }
    Ok(())
}
