//! The command table: one file per command or small family.
//!
//! A [`Spec`] holds the Redis properties of a command (arity, flags, key positions) and the function that executes
//! it. To add a family, write `cmd/<family>.rs` with `pub(crate) const COMMANDS: &[Spec]` and add it to [`FAMILIES`].

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
pub(crate) mod harness;
#[cfg(test)]
mod scenarios;

use std::sync::OnceLock;

use hashbrown::HashMap;
use moim_wire_resp::Args;

use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::session::Session;
use crate::shared::Shared;

/// The Redis version whose behaviour is the reference; clients enable features by it.
pub(crate) const REDIS_VERSION: &str = "7.0.15";

/// All command families, in no particular order.
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

/// The specification of a command.
pub struct Spec {
    /// Lower-case name; `config|get` for a subcommand.
    pub name: &'static str,
    /// Arity: the number of arguments including the name; negative means at least that many.
    pub arity: i32,
    /// Command flags, see [`flag`].
    pub flags: u32,
    /// Positions of the keys among the arguments.
    pub keys: Keys,
    /// Command group: `string`, `hash`, `connection` …
    pub group: &'static str,
    /// One-sentence description.
    pub summary: &'static str,
    /// The function that executes the command.
    pub run: fn(&mut Ctx<'_>) -> Done,
    /// Subcommands; `run` handles arguments that match none of them.
    pub subs: &'static [Spec],
}

/// Command flags. The names are those of COMMAND.
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
    /// The reply depends on keys that are not named: it waits for all previous writes.
    pub const WHOLE: u32 = 1 << 24;
    /// Runs other commands (EXEC): the keys are those of the queued commands.
    pub const CONTAINER: u32 = 1 << 25;
    /// Fast as long as its arguments are short, although Redis does not flag it so.
    pub const BRIEF: u32 = 1 << 26;

    /// Flag names in the order of the COMMAND reply.
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

/// Key positions of a command among its arguments.
#[derive(Clone, Copy)]
pub enum Keys {
    /// The command has no keys.
    None,
    /// Positions `first` to `last` (negative counts from the end, -1 is the last) with a step.
    Range {
        /// Position of the first key.
        first: usize,
        /// Position of the last key.
        last: i32,
        /// 2 if values alternate with keys.
        step: usize,
    },
    /// Argument `at` is the number of keys that follow; `also` is one more key before it (0 for none).
    Counted {
        /// Position of the number of keys.
        at: usize,
        /// Position of a destination key.
        also: usize,
    },
    /// Positions found by parsing the arguments.
    Found {
        /// Position of the first key as COMMAND shows it, unless options move it; 0 if no position is fixed.
        first: usize,
        /// Appends the positions of the keys.
        find: fn(&Args<'_>, &mut Vec<usize>),
    },
}

impl Keys {
    /// The first argument is the only key.
    pub const ONE: Keys = Keys::Range { first: 1, last: 1, step: 1 };
    /// All arguments are keys.
    pub const ALL: Keys = Keys::Range { first: 1, last: -1, step: 1 };
    /// The first two arguments are keys.
    pub const TWO: Keys = Keys::Range { first: 1, last: 2, step: 1 };

    /// Appends the positions of the keys; nothing if the arguments are invalid.
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
    /// The specification of a command without subcommands.
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

    /// Adds subcommands.
    pub const fn with(self, subs: &'static [Spec]) -> Self {
        Self { subs, ..self }
    }

    /// True if the command has this flag.
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// True if the arity allows this number of arguments, including the name.
    pub fn takes(&self, argc: usize) -> bool {
        let wanted = self.arity.unsigned_abs() as usize;
        if self.arity < 0 { argc >= wanted } else { argc == wanted }
    }

    /// True if the arguments name an unknown subcommand.
    pub(crate) fn lacks_subcommand(&self, args: &Args<'_>) -> bool {
        !self.subs.is_empty() && args.len() > 1
    }

    /// The name used in error replies: subcommands with a bar.
    pub fn full_name(&self) -> &'static str {
        self.name
    }
}

/// All commands.
pub fn all() -> impl Iterator<Item = &'static Spec> {
    FAMILIES.iter().flat_map(|family| family.iter())
}

/// Number of commands and subcommands.
pub(crate) fn count() -> usize {
    all().map(|spec| 1 + spec.subs.len()).sum()
}

/// All commands and subcommands with their indexes: each command, then its subcommands.
pub(crate) fn numbered() -> impl Iterator<Item = (u16, &'static Spec)> {
    all()
        .flat_map(|spec| std::iter::once(spec).chain(spec.subs))
        .enumerate()
        .map(|(at, spec)| (at as u16, spec))
}

/// Looks up a command by name, ignoring case; returns it with its index.
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

/// Looks up a command by name, ignoring case.
pub fn find(name: &[u8]) -> Option<&'static Spec> {
    // Subcommands are found through their command, never by their full name.
    find_numbered(name).map(|(spec, _)| spec).filter(|spec| !spec.name.contains('|'))
}

/// Index of a command in the table.
pub(crate) fn number_of(spec: &Spec) -> u16 {
    find_numbered(spec.name.as_bytes()).map_or(0, |(_, number)| number)
}

/// The command or subcommand named by the arguments, with its index.
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

/// The command or subcommand named by the arguments.
pub fn resolve(args: &Args<'_>) -> Option<&'static Spec> {
    resolve_numbered(args).map(|(spec, _)| spec)
}

/// Removes the subscriptions, MONITOR mode and tracking of a disconnected client.
pub(crate) fn on_disconnect(shared: &Shared, session: &mut Session) {
    pubsub::unsubscribe_all(shared, session);
    shared.monitors.remove(session.id);
    shared.tracking.disable(session.id);
    (session.tracking, session.caching) = (None, None);
    let mut about = crate::shared::lock(&session.about);
    (about.monitors, about.broadcasts, about.redirect) = (false, false, -1);
}

/// Replies with the lines of a HELP subcommand.
pub(crate) fn help(ctx: &mut Ctx<'_>, lines: &[&str]) -> Done {
    ctx.out.array(lines.len());
    lines.iter().for_each(|line| ctx.out.simple(line));
    Ok(())
}

/// The error reply for an unknown subcommand.
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
    fn command_names_are_unique_lower_case_and_found_in_any_case() {
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
    fn key_positions_follow_the_key_spec() {
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
