//! The commands: one file per command or small family, and the table of all of them.
//!
//! A [`Spec`] says what Redis says about a command (arity, flags, where its keys are) and which function runs it. To add
//! a family, write `cmd/<family>.rs` with `pub(crate) const COMMANDS: &[Spec]` and name it in [`FAMILIES`].

mod access;
mod admin;
mod bitfield;
mod bits;
mod blocking;
mod client;
mod cluster;
mod connection;
mod counters;
mod dump;
mod expire;
mod functions;
mod geo;
mod get;
mod hashes;
mod hyperloglog;
mod info;
mod introspect;
mod keys;
mod lcs;
mod lists;
mod migrate;
mod options;
pub(crate) mod pubsub;
mod range;
pub(crate) mod scan;
mod scripting;
mod set;
mod set_algebra;
mod sets;
mod sort;
mod stream_groups;
mod stream_info;
mod stream_read;
mod streams;
mod transaction;
pub(crate) mod typed;
mod zset_algebra;
mod zset_range;
mod zsets;

#[cfg(test)]
mod differential;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
pub(crate) mod trial;

use std::sync::OnceLock;

use hashbrown::HashMap;
use moim_wire_resp::Args;

use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::session::Session;
use crate::shared::Shared;

/// The Redis whose behaviour this is measured against; clients switch features on by it.
pub(crate) const REDIS_VERSION: &str = "7.0.15";

/// Every family, in no special order.
const FAMILIES: &[&[Spec]] = &[
    bitfield::COMMANDS,
    bits::COMMANDS,
    blocking::COMMANDS,
    admin::COMMANDS,
    client::COMMANDS,
    cluster::COMMANDS,
    connection::COMMANDS,
    info::COMMANDS,
    introspect::COMMANDS,
    transaction::COMMANDS,
    counters::COMMANDS,
    dump::COMMANDS,
    expire::COMMANDS,
    functions::COMMANDS,
    geo::COMMANDS,
    get::COMMANDS,
    hashes::COMMANDS,
    hyperloglog::COMMANDS,
    keys::COMMANDS,
    lcs::COMMANDS,
    lists::COMMANDS,
    migrate::COMMANDS,
    pubsub::COMMANDS,
    range::COMMANDS,
    scan::COMMANDS,
    scripting::COMMANDS,
    set::COMMANDS,
    set_algebra::COMMANDS,
    sets::COMMANDS,
    sort::COMMANDS,
    stream_groups::COMMANDS,
    stream_info::COMMANDS,
    stream_read::COMMANDS,
    streams::COMMANDS,
    zset_algebra::COMMANDS,
    zset_range::COMMANDS,
    zsets::COMMANDS,
];

/// What a command is and does.
pub struct Spec {
    /// In lower case; `config|get` for a subcommand.
    pub name: &'static str,
    /// Number of arguments with the name; negative: at least so many.
    pub arity: i32,
    /// See [`flag`].
    pub flags: u32,
    /// Where its keys are.
    pub keys: Keys,
    /// `string`, `hash`, `connection` …
    pub group: &'static str,
    /// One sentence.
    pub summary: &'static str,
    /// What it does.
    pub run: fn(&mut Ctx<'_>) -> Done,
    /// Its subcommands; `run` takes what they do not.
    pub subs: &'static [Spec],
}

/// What is special about a command. The names are those of COMMAND.
#[allow(missing_docs)]
pub mod flag {
    pub const WRITE: u32 = 1 << 0;
    pub const READONLY: u32 = 1 << 1;
    pub const DENYOOM: u32 = 1 << 2;
    pub const ADMIN: u32 = 1 << 3;
    pub const PUBSUB: u32 = 1 << 4;
    pub const NOSCRIPT: u32 = 1 << 5;
    pub const BLOCKING: u32 = 1 << 6;
    pub const LOADING: u32 = 1 << 7;
    pub const STALE: u32 = 1 << 8;
    pub const SKIP_MONITOR: u32 = 1 << 9;
    pub const SKIP_SLOWLOG: u32 = 1 << 10;
    pub const ASKING: u32 = 1 << 11;
    pub const FAST: u32 = 1 << 12;
    pub const NO_AUTH: u32 = 1 << 13;
    pub const MAY_REPLICATE: u32 = 1 << 14;
    pub const NO_MULTI: u32 = 1 << 15;
    pub const MOVABLEKEYS: u32 = 1 << 16;
    pub const ALLOW_BUSY: u32 = 1 << 17;
    pub const NO_ASYNC_LOADING: u32 = 1 << 18;
    pub const NO_MANDATORY_KEYS: u32 = 1 << 19;
    /// The answer depends on keys that are not named: it waits for everything before it.
    pub const WHOLE: u32 = 1 << 24;
    /// Runs other commands (EXEC): the keys are theirs.
    pub const CONTAINER: u32 = 1 << 25;
    /// Fast, although Redis does not call it so, as long as its arguments are short.
    pub const BRIEF: u32 = 1 << 26;

    /// Names in the order in which COMMAND shows them.
    pub const NAMES: &[(u32, &str)] = &[
        (WRITE, "write"),
        (READONLY, "readonly"),
        (DENYOOM, "denyoom"),
        (ADMIN, "admin"),
        (PUBSUB, "pubsub"),
        (NOSCRIPT, "noscript"),
        (BLOCKING, "blocking"),
        (LOADING, "loading"),
        (STALE, "stale"),
        (SKIP_MONITOR, "skip_monitor"),
        (SKIP_SLOWLOG, "skip_slowlog"),
        (ASKING, "asking"),
        (FAST, "fast"),
        (NO_AUTH, "no_auth"),
        (MAY_REPLICATE, "may_replicate"),
        (NO_MULTI, "no_multi"),
        (MOVABLEKEYS, "movablekeys"),
        (ALLOW_BUSY, "allow_busy"),
        (NO_ASYNC_LOADING, "no_async_loading"),
        (NO_MANDATORY_KEYS, "no_mandatory_keys"),
    ];
}

/// Where the keys of a command are among its arguments.
#[derive(Clone, Copy)]
pub enum Keys {
    /// There are none.
    None,
    /// From `first` to `last` (negative: from the end, -1 the last) in steps.
    Range {
        /// The first.
        first: usize,
        /// The last.
        last: i32,
        /// 2 where values lie between them.
        step: usize,
    },
    /// A number at `at` says how many follow; `also` is one more key before it (0: none).
    Counted {
        /// Where the number is.
        at: usize,
        /// A destination.
        also: usize,
    },
    /// Found by looking at the arguments.
    Found {
        /// Where the first key is unless options say otherwise, as COMMAND shows it; 0 where no position is fixed.
        first: usize,
        /// Adds the positions of the keys.
        find: fn(&Args<'_>, &mut Vec<usize>),
    },
}

impl Keys {
    /// One key.
    pub const ONE: Keys = Keys::Range { first: 1, last: 1, step: 1 };
    /// All arguments.
    pub const ALL: Keys = Keys::Range { first: 1, last: -1, step: 1 };
    /// The first two.
    pub const TWO: Keys = Keys::Range { first: 1, last: 2, step: 1 };

    /// Adds the positions of the keys; nothing where the arguments make no sense.
    pub fn positions(&self, args: &Args<'_>, into: &mut Vec<usize>) {
        match *self {
            Keys::None => {}
            Keys::Range { first, last, step } => {
                let last = match usize::try_from(last) {
                    Ok(last) => last,
                    Err(_) => args.len().saturating_sub(last.unsigned_abs() as usize),
                };
                into.extend((first..=last.min(args.len().saturating_sub(1))).step_by(step));
            }
            Keys::Counted { at, also } => {
                if also > 0 && also < args.len() {
                    into.push(also);
                }
                let count = args.get(at).and_then(moim_wire_resp::number::parse_i64).unwrap_or(0);
                let count = usize::try_from(count).unwrap_or(0);
                if count <= args.len().saturating_sub(at + 1) {
                    into.extend(at + 1..at + 1 + count);
                }
            }
            Keys::Found { find, .. } => find(args, into),
        }
    }
}

impl Spec {
    /// A command without subcommands.
    pub const fn new(
        name: &'static str,
        arity: i32,
        flags: u32,
        keys: Keys,
        group: &'static str,
        summary: &'static str,
        run: fn(&mut Ctx<'_>) -> Done,
    ) -> Self {
        Self { name, arity, flags, keys, group, summary, run, subs: &[] }
    }

    /// The same with subcommands.
    pub const fn with(self, subs: &'static [Spec]) -> Self {
        Self { subs, ..self }
    }

    /// Whether it has this flag.
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether so many arguments, the name included, are as many as it takes.
    pub fn takes(&self, argc: usize) -> bool {
        let wanted = self.arity.unsigned_abs() as usize;
        if self.arity < 0 { argc >= wanted } else { argc == wanted }
    }

    /// Whether the arguments name a subcommand that the command does not have.
    pub(crate) fn lacks_subcommand(&self, args: &Args<'_>) -> bool {
        !self.subs.is_empty() && args.len() > 1
    }

    /// The name that errors give: subcommands with a bar.
    pub fn full_name(&self) -> &'static str {
        self.name
    }
}

/// All commands, by name.
pub fn all() -> impl Iterator<Item = &'static Spec> {
    FAMILIES.iter().flat_map(|family| family.iter())
}

/// How many commands there are, subcommands included.
pub(crate) fn count() -> usize {
    all().map(|spec| 1 + spec.subs.len()).sum()
}

/// All commands and their subcommands with their numbers: each command, then what belongs to it.
pub(crate) fn numbered() -> impl Iterator<Item = (u16, &'static Spec)> {
    all()
        .flat_map(|spec| std::iter::once(spec).chain(spec.subs))
        .enumerate()
        .map(|(at, spec)| (at as u16, spec))
}

/// The command of that name, whatever its case, and its number.
fn find_numbered(name: &[u8]) -> Option<(&'static Spec, u16)> {
    static TABLE: OnceLock<HashMap<&'static [u8], (&'static Spec, u16)>> = OnceLock::new();
    let table = TABLE
        .get_or_init(|| numbered().map(|(number, spec)| (spec.name.as_bytes(), (spec, number))).collect());
    let mut lower = [0; 32];
    let lower = lower.get_mut(..name.len())?;
    lower.copy_from_slice(name);
    lower.make_ascii_lowercase();
    table.get(&*lower).copied()
}

/// The command of that name, whatever its case.
pub fn find(name: &[u8]) -> Option<&'static Spec> {
    // Subcommands are found through their command, never by their full names.
    find_numbered(name).map(|(spec, _)| spec).filter(|spec| !spec.name.contains('|'))
}

/// The number of a command.
pub(crate) fn number_of(spec: &Spec) -> u16 {
    find_numbered(spec.name.as_bytes()).map_or(0, |(_, number)| number)
}

/// The command, or the subcommand where there is one, that these arguments name, and its number.
pub(crate) fn resolve_numbered(args: &Args<'_>) -> Option<(&'static Spec, u16)> {
    let (spec, number) = find_numbered(args.name())?;
    if spec.subs.is_empty() {
        return Some((spec, number)).filter(|_| !args.name().contains(&b'|'));
    }
    let sub = args.get(1).unwrap_or_default();
    let found = spec.subs.iter().position(|candidate| {
        candidate.name.split_once('|').is_some_and(|(_, name)| sub.eq_ignore_ascii_case(name.as_bytes()))
    });
    Some(found.map_or((spec, number), |at| (&spec.subs[at], number + 1 + at as u16)))
}

/// The command, or the subcommand where there is one, that these arguments name.
pub fn resolve(args: &Args<'_>) -> Option<&'static Spec> {
    resolve_numbered(args).map(|(spec, _)| spec)
}

/// A client has left: what it listened to is let go.
pub(crate) fn on_leave(shared: &Shared, session: &mut Session) {
    pubsub::leave(shared, session);
    shared.monitors.remove(session.id);
    shared.tracking.end(session.id);
    (session.tracking, session.caching) = (None, None);
    let mut about = crate::shared::lock(&session.about);
    (about.monitors, about.broadcasts, about.redirect) = (false, false, -1);
}

/// Answers with lines of help.
pub(crate) fn help(ctx: &mut Ctx<'_>, lines: &[&str]) -> Done {
    ctx.out.array(lines.len());
    lines.iter().for_each(|line| ctx.out.simple(line));
    Ok(())
}

/// The error for a subcommand that does not exist.
pub(crate) fn unknown_subcommand(args: &Args<'_>) -> Error {
    let name = String::from_utf8_lossy(args.name()).into_owned();
    let sub = String::from_utf8_lossy(args.get(1).unwrap_or_default()).chars().take(128).collect::<String>();
    Error::err(format_args!("unknown subcommand '{sub}'. Try {} HELP.", name.to_uppercase()))
}

#[cfg(test)]
mod tests {
    use moim_wire_resp::OwnedArgs;

    use super::*;

    #[test]
    fn names_are_lower_case_unique_and_short_enough_to_be_found() {
        let mut names: Vec<_> = all().map(|spec| spec.name).collect();
        for name in &names {
            assert_eq!(find(name.to_ascii_uppercase().as_bytes()).unwrap().name, *name);
        }
        names.sort_unstable();
        let before = names.len();
        names.dedup();
        assert_eq!(names.len(), before);
    }

    #[test]
    fn keys_are_where_they_should_be() {
        for (keys, command, wanted) in [
            (Keys::ONE, "get a", vec![1]),
            (Keys::ALL, "del a b c", vec![1, 2, 3]),
            (Keys::Range { first: 1, last: -1, step: 2 }, "mset a 1 b 2", vec![1, 3]),
            (Keys::Range { first: 1, last: -2, step: 1 }, "blpop a b 0", vec![1, 2]),
            (Keys::Counted { at: 2, also: 0 }, "eval s 2 a b c", vec![3, 4]),
            (Keys::Counted { at: 2, also: 1 }, "zunionstore d 1 a", vec![1, 3]),
            (Keys::Counted { at: 2, also: 0 }, "eval s 9 a", vec![]),
            (Keys::Counted { at: 2, also: 0 }, "eval s x a", vec![]),
        ] {
            let args = OwnedArgs::from_slices(command.split(' '));
            let mut found = Vec::new();
            keys.positions(&args.args(), &mut found);
            assert_eq!(found, wanted, "{command}");
        }
    }
}
