//! Stream commands: XADD, XTRIM, XDEL, XLEN, XRANGE, XREVRANGE, XSETID; and the parsing of ids and encoding of
//! entries.
//!
//! Effects never depend on the clock or on the block layout: a generated id is propagated explicitly, and approximate
//! trimming as trimming to the exact resulting length.

use moim_wire_resp::Encoder;

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::stream::{Entry, Id, Keep, Stream};

const GROUP: &str = "stream";

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("xadd", -5, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "Appends a new message to a stream.", xadd),
    Spec::new("xtrim", -4, WRITE, Keys::ONE, GROUP, "Deletes messages from the beginning of a stream.", xtrim),
    Spec::new("xdel", -3, WRITE | FAST, Keys::ONE, GROUP, "Returns the number of messages after removing them from a stream.", xdel),
    Spec::new("xlen", 2, READONLY | FAST, Keys::ONE, GROUP, "Returns the number of messages in a stream.", xlen),
    Spec::new("xrange", -4, READONLY, Keys::ONE, GROUP, "Returns the messages from a stream within a range of IDs.", |ctx| xrange(ctx, false)),
    Spec::new("xrevrange", -4, READONLY, Keys::ONE, GROUP, "Returns the messages from a stream within a range of IDs in reverse order.", |ctx| xrange(ctx, true)),
    Spec::new("xsetid", -3, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "An internal command for replicating stream values.", xsetid),
];

/// Maximum total size of an entry.
const MAX_ENTRY_BYTES: usize = 1 << 30;

fn bad_id() -> Error {
    Error::err("Invalid stream ID specified as stream command argument")
}

/// Parses `ms` or `ms-seq`, with `missing` for an absent sequence. Neither `-` nor `+`.
pub(super) fn strict_id(text: &[u8], missing: u64) -> Result<Id, Error> {
    let text = std::str::from_utf8(text).map_err(|_| bad_id())?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| bad_id());
    if text.len() > 127 {
        return Err(bad_id());
    }
    match text.split_once('-') {
        Some((ms, seq)) => Ok(Id { ms: number(ms)?, seq: number(seq)? }),
        None => Ok(Id { ms: number(text)?, seq: missing }),
    }
}

/// Parses an id, or `-` and `+` for the lowest and highest.
pub(super) fn any_id(text: &[u8], missing: u64) -> Result<Id, Error> {
    match text {
        b"-" => Ok(Id::MIN),
        b"+" => Ok(Id::MAX),
        text => strict_id(text, missing),
    }
}

/// Parses the start of a range; `(` makes it exclusive.
pub(super) fn range_start(text: &[u8]) -> Result<Id, Error> {
    match text {
        [b'(', rest @ ..] if !rest.is_empty() => {
            strict_id(rest, 0)?.next().ok_or_else(|| Error::err("invalid start ID for the interval"))
        }
        text => any_id(text, 0),
    }
}

/// Parses the end of a range; `(` makes it exclusive.
pub(super) fn range_end(text: &[u8]) -> Result<Id, Error> {
    match text {
        [b'(', rest @ ..] if !rest.is_empty() => {
            strict_id(rest, u64::MAX)?.previous().ok_or_else(|| Error::err("invalid end ID for the interval"))
        }
        text => any_id(text, u64::MAX),
    }
}

/// Replies with an id.
pub(super) fn write_id(out: &mut Encoder<'_>, id: Id) {
    out.bulk(id.to_string().as_bytes());
}

/// Replies with an entry: its id, then fields and values.
pub(super) fn write_entry(out: &mut Encoder<'_>, entry: &Entry<'_>) {
    out.array(2);
    write_id(out, entry.id);
    out.array(2 * entry.fields());
    for (field, value) in entry.pairs() {
        out.bulk(field.as_bytes());
        out.bulk(value.as_bytes());
    }
}

/// The trimming strategy of XADD and XTRIM.
#[derive(Clone, Copy)]
struct Trim {
    keep: Keep,
    /// `~`: approximate, whole blocks only.
    is_about: bool,
    limit: u64,
}

/// The id argument of XADD.
#[derive(Clone, Copy)]
enum Wanted {
    /// `*`: fully generated id.
    Next,
    /// `ms-*`: generated sequence.
    NextOf(u64),
    Exactly(Id),
}

#[derive(Default)]
struct Options {
    trim: Option<Trim>,
    only_if_there: bool,
    wanted: Option<Wanted>,
    /// Position of the id.
    id_at: usize,
}

/// Parses the options of XADD (up to the id) and of XTRIM.
fn options(ctx: &Ctx<'_>, adds: bool) -> Result<Options, Error> {
    let mut options = Options::default();
    let (mut keep, mut is_about, mut limit) = (None, false, None);
    let mut at = 2;
    while at < ctx.argc() {
        let more = ctx.argc() - 1 - at;
        if adds && ctx.arg(at) == b"*" {
            options.wanted = Some(Wanted::Next);
            break;
        }
        let by_length = ctx.is(at, "MAXLEN");
        if (by_length || ctx.is(at, "MINID")) && more > 0 {
            if keep.is_some() {
                return Err(Error::err(
                    "syntax error, MAXLEN and MINID options at the same time are not compatible",
                ));
            }
            is_about = more >= 2 && ctx.arg(at + 1) == b"~";
            if is_about || more >= 2 && ctx.arg(at + 1) == b"=" {
                at += 1;
            }
            at += 1;
            keep = Some(if by_length {
                let count = ctx.int(at)?;
                Keep::Newest(
                    u64::try_from(count).map_err(|_| Error::err("The MAXLEN argument must be >= 0."))?,
                )
            } else {
                Keep::From(strict_id(ctx.arg(at), 0)?)
            });
        } else if ctx.is(at, "LIMIT") && more > 0 {
            at += 1;
            let most = ctx.int(at)?;
            limit = Some(u64::try_from(most).map_err(|_| Error::err("The LIMIT argument must be >= 0."))?);
        } else if adds && ctx.is(at, "NOMKSTREAM") {
            options.only_if_there = true;
        } else if adds {
            options.wanted = Some(wanted(ctx.arg(at))?);
            break;
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    options.id_at = at;
    options.trim = trim(ctx, keep, is_about, limit, adds)?;
    Ok(options)
}

fn trim(
    ctx: &Ctx<'_>,
    keep: Option<Keep>,
    is_about: bool,
    limit: Option<u64>,
    adds: bool,
) -> Result<Option<Trim>, Error> {
    let Some(keep) = keep else {
        return match (limit, adds) {
            (Some(1..), _) => {
                Err(Error::err("syntax error, LIMIT cannot be used without specifying a trimming strategy"))
            }
            (_, false) => Err(Error::err("syntax error, XTRIM must be called with a trimming strategy")),
            _ => Ok(None),
        };
    };
    if limit.is_some() && !is_about && ctx.mode != Mode::Replay {
        return Err(Error::err("syntax error, LIMIT cannot be used without the special ~ option"));
    }
    let limit = match limit {
        Some(limit) => limit,
        None if !is_about => 0,
        // The default LIMIT is a hundred blocks.
        None => match 100 * ctx.limits().stream_entries as u64 {
            0 => 10_000,
            limit => limit.min(1_000_000),
        },
    };
    Ok(Some(Trim { keep, is_about, limit }))
}

fn wanted(text: &[u8]) -> Result<Wanted, Error> {
    match text.strip_suffix(b"-*") {
        Some(ms) => {
            let ms = std::str::from_utf8(ms).ok().and_then(|ms| ms.parse().ok());
            ms.map(Wanted::NextOf).ok_or_else(bad_id)
        }
        None => strict_id(text, 0).map(Wanted::Exactly),
    }
}

/// The id of a new entry after `last`; `None` if the requested id is not greater.
fn new_id(wanted: Wanted, last: Id, now: i64) -> Option<Id> {
    let now = u64::try_from(now).unwrap_or(0);
    match wanted {
        Wanted::Next if now > last.ms => Some(Id { ms: now, seq: 0 }),
        Wanted::Next => last.next(),
        Wanted::NextOf(ms) if ms > last.ms => Some(Id { ms, seq: 0 }),
        Wanted::NextOf(ms) if ms == last.ms => last.seq.checked_add(1).map(|seq| Id { ms, seq }),
        Wanted::NextOf(_) => None,
        Wanted::Exactly(id) => Some(id).filter(|id| *id > last),
    }
}

fn xadd(ctx: &mut Ctx<'_>) -> Done {
    let options = options(ctx, true)?;
    let first = options.id_at + 1;
    let words = ctx.argc().saturating_sub(first);
    let Some(wanted) = options.wanted.filter(|_| words >= 2 && words.is_multiple_of(2)) else {
        return Err(Error::arity("xadd"));
    };
    if let Wanted::Exactly(Id::MIN) = wanted {
        return Err(Error::err("The ID specified in XADD must be greater than 0-0"));
    }
    let key = ctx.arg(1);
    let last = match typed::get::<Stream>(ctx.db, key)? {
        Some(stream) => stream.last_id,
        None if options.only_if_there => {
            ctx.out.null();
            return Ok(());
        }
        None => Id::MIN,
    };
    if last == Id::MAX {
        return Err(Error::err("The stream has exhausted the last possible ID, unable to add more items"));
    }
    let id = new_id(wanted, last, ctx.now).ok_or_else(|| {
        Error::err("The ID specified in XADD is equal or smaller than the target stream top item")
    })?;
    let pairs: Vec<(&[u8], &[u8])> =
        (first..ctx.argc()).step_by(2).map(|at| (ctx.arg(at), ctx.arg(at + 1))).collect();
    if pairs.iter().map(|(field, value)| field.len() + value.len()).sum::<usize>() > MAX_ENTRY_BYTES {
        return Err(Error::err("Elements are too large to be stored"));
    }
    let limits = ctx.limits();
    let stream = typed::create::<Stream>(ctx.db, key)?;
    stream.push(id, &pairs, &limits);
    let gone = options.trim.map_or(0, |trim| stream.trim(trim.keep, trim.is_about, trim.limit));
    let length = stream.len();
    write_id(&mut ctx.out, id);
    ctx.changed_with(key, class::STREAM, "xadd");
    if gone > 0 {
        ctx.events.notify(class::STREAM, "xtrim", key);
    }
    ctx.ready(key);
    let is_exact = matches!(wanted, Wanted::Exactly(_)) && options.trim.is_none();
    if !is_exact {
        let id = id.to_string();
        let mut recorded = vec![b"XADD".as_slice(), key, id.as_bytes()];
        recorded.extend(pairs.iter().flat_map(|(field, value)| [*field, *value]));
        ctx.rewrite(&recorded);
        if gone > 0 {
            propagate_trim(ctx, key, length);
        }
    }
    Ok(())
}

/// Propagates a trim to this exact length, whatever the requested strategy.
fn propagate_trim(ctx: &mut Ctx<'_>, key: &[u8], length: u64) {
    ctx.rewrite(&[b"XTRIM", key, b"MAXLEN", b"=", length.to_string().as_bytes()]);
}

fn xtrim(ctx: &mut Ctx<'_>) -> Done {
    let options = options(ctx, false)?;
    let key = ctx.arg(1);
    let (gone, length) = match (typed::get_mut::<Stream>(ctx.db, key)?, options.trim) {
        (Some(stream), Some(trim)) => (stream.trim(trim.keep, trim.is_about, trim.limit), stream.len()),
        _ => (0, 0),
    };
    ctx.out.integer(gone as i64);
    if gone > 0 {
        ctx.changed_with(key, class::STREAM, "xtrim");
        propagate_trim(ctx, key, length);
    }
    Ok(())
}

fn xdel(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    if typed::get::<Stream>(ctx.db, key)?.is_none() {
        ctx.out.integer(0);
        return Ok(());
    }
    let ids = (2..ctx.argc()).map(|at| strict_id(ctx.arg(at), 0)).collect::<Result<Vec<_>, _>>()?;
    let mut gone = 0;
    if let Some(stream) = typed::get_mut::<Stream>(ctx.db, key)? {
        gone = ids.iter().filter(|id| stream.delete(**id)).count();
    }
    ctx.out.integer(gone as i64);
    if gone > 0 {
        ctx.changed_with(key, class::STREAM, "xdel");
    }
    Ok(())
}

fn xlen(ctx: &mut Ctx<'_>) -> Done {
    let length = typed::get::<Stream>(ctx.db, ctx.arg(1))?.map_or(0, Stream::len);
    ctx.out.integer(length as i64);
    Ok(())
}

fn xrange(ctx: &mut Ctx<'_>, is_back: bool) -> Done {
    let (start, end) = if is_back { (3, 2) } else { (2, 3) };
    let (start, end) = (range_start(ctx.arg(start))?, range_end(ctx.arg(end))?);
    let mut count = None;
    for at in (4..ctx.argc()).step_by(2) {
        if !ctx.is(at, "COUNT") || at + 1 >= ctx.argc() {
            return Err(Error::SYNTAX);
        }
        count = Some(ctx.int(at + 1)?.max(0) as usize);
    }
    let Some(stream) = typed::get::<Stream>(ctx.db, ctx.arg(1))? else {
        ctx.out.array(0);
        return Ok(());
    };
    if count == Some(0) {
        ctx.out.null_array();
        return Ok(());
    }
    let most = count.unwrap_or(usize::MAX);
    let entries = ctx.out.defer(moim_wire_resp::encode::Kind::Array);
    let mut written = 0;
    let mut write = |entry: Entry<'_>| {
        write_entry(&mut ctx.out, &entry);
        written += 1;
    };
    if is_back {
        stream.range_back(start, end).take(most).for_each(&mut write);
    } else {
        stream.range(start, end).take(most).for_each(&mut write);
    }
    ctx.out.finish(entries, written);
    Ok(())
}

fn xsetid(ctx: &mut Ctx<'_>) -> Done {
    let id = strict_id(ctx.arg(2), 0)?;
    let (mut added, mut max_deleted) = (None, Id::MIN);
    for at in (3..ctx.argc()).step_by(2) {
        if ctx.is(at, "ENTRIESADDED") && at + 1 < ctx.argc() {
            let count = ctx.int(at + 1)?;
            added = Some(u64::try_from(count).map_err(|_| Error::err("entries_added must be positive"))?);
        } else if ctx.is(at, "MAXDELETEDID") && at + 1 < ctx.argc() {
            max_deleted = strict_id(ctx.arg(at + 1), 0)?;
            if id < max_deleted {
                return Err(Error::err(
                    "The ID specified in XSETID is smaller than the provided max_deleted_entry_id",
                ));
            }
        } else {
            return Err(Error::SYNTAX);
        }
    }
    let key = ctx.arg(1);
    let stream = typed::get_mut::<Stream>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    if stream.last_entry_id().is_some_and(|last| id < last) {
        return Err(Error::err("The ID specified in XSETID is smaller than the target stream top item"));
    }
    if !stream.is_empty() && added.is_some_and(|added| stream.len() > added) {
        return Err(Error::err(
            "The entries_added specified in XSETID is smaller than the target stream length",
        ));
    }
    stream.last_id = id;
    stream.added = added.unwrap_or(stream.added);
    if max_deleted != Id::MIN {
        stream.max_deleted = max_deleted;
    }
    ctx.out.ok();
    ctx.changed_with(key, class::STREAM, "xsetid");
    Ok(())
}
