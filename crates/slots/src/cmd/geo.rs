//! Geo commands: GEOADD and the searches. Positions are the scores of sorted set members ([`area`]).

mod area;

use moim_wire_resp::{Args, Encoder, OwnedArgs, Protocol};

use self::area::{Point, Shape};
use super::flag::{DENYOOM, MOVABLEKEYS, READONLY, WRITE};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::{Ctx, float};
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::zset::Zset;

const GROUP: &str = "geo";
const STORES: Keys = Keys::Found { first: 1, find: keys_with_store };
const RADIUS: u32 = WRITE | DENYOOM | MOVABLEKEYS;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("geoadd", -5, WRITE | DENYOOM, Keys::ONE, GROUP, "Adds one or more members to a geospatial index.", geoadd),
    Spec::new("geodist", -4, READONLY, Keys::ONE, GROUP, "Returns the distance between two members of a geospatial index.", geodist),
    Spec::new("geohash", -2, READONLY, Keys::ONE, GROUP, "Returns members from a geospatial index as geohash strings.", geohash),
    Spec::new("geopos", -2, READONLY, Keys::ONE, GROUP, "Returns the longitude and latitude of members from a geospatial index.", geopos),
    Spec::new("georadius", -6, RADIUS, STORES, GROUP, "Queries a geospatial index for members within a distance from a coordinate, optionally stores the result.", |ctx| search(ctx, Form::Around { stores: true })),
    Spec::new("georadius_ro", -6, READONLY, Keys::ONE, GROUP, "Returns members from a geospatial index that are within a distance from a coordinate.", |ctx| search(ctx, Form::Around { stores: false })),
    Spec::new("georadiusbymember", -5, RADIUS, STORES, GROUP, "Queries a geospatial index for members within a distance from a member, optionally stores the result.", |ctx| search(ctx, Form::AroundMember { stores: true })),
    Spec::new("georadiusbymember_ro", -5, READONLY, Keys::ONE, GROUP, "Returns members from a geospatial index that are within a distance from a member.", |ctx| search(ctx, Form::AroundMember { stores: false })),
    Spec::new("geosearch", -7, READONLY, Keys::ONE, GROUP, "Queries a geospatial index for members inside an area of a box or a circle.", |ctx| search(ctx, Form::Search)),
    Spec::new("geosearchstore", -8, WRITE | DENYOOM, Keys::TWO, GROUP, "Queries a geospatial index for members inside an area of a box or a circle, optionally stores the result.", |ctx| search(ctx, Form::SearchStore)),
];

/// The source key, and the last STORE or STOREDIST key.
fn keys_with_store(args: &Args<'_>, into: &mut Vec<usize>) {
    into.push(1);
    let stores =
        |at: &usize| args[*at].eq_ignore_ascii_case(b"STORE") || args[*at].eq_ignore_ascii_case(b"STOREDIST");
    let found = (5..args.len().saturating_sub(1)).rfind(stores);
    into.extend(found.map(|at| at + 1));
}

fn point(ctx: &Ctx<'_>, at: usize) -> Result<Point, Error> {
    let point = Point { longitude: ctx.float(at)?, latitude: ctx.float(at + 1)? };
    if point.is_valid() {
        return Ok(point);
    }
    Err(Error::err(format_args!(
        "invalid longitude,latitude pair {:.6},{:.6}",
        point.longitude, point.latitude
    )))
}

/// Metres per unit.
fn unit(text: &[u8]) -> Result<f64, Error> {
    match text.to_ascii_lowercase().as_slice() {
        b"m" => Ok(1.0),
        b"km" => Ok(1_000.0),
        b"ft" => Ok(0.3048),
        b"mi" => Ok(1_609.34),
        _ => Err(Error::err("unsupported unit provided. please use M, KM, FT, MI")),
    }
}

/// Writes a distance with four decimal places.
fn write_distance(out: &mut Encoder<'_>, distance: f64) {
    let scaled = (distance * 10_000.0).round_ties_even() as i64;
    out.bulk(format!("{}.{:04}", scaled / 10_000, scaled % 10_000).as_bytes());
}

/// Writes a coordinate with up to 17 decimal places.
fn write_coordinate(out: &mut Encoder<'_>, degrees: f64) {
    let text = format!("{degrees:.17}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if out.protocol() == Protocol::Resp3 {
        out.buffer().extend_from_slice(format!(",{text}\r\n").as_bytes());
    } else {
        out.bulk(text.as_bytes());
    }
}

fn write_point(out: &mut Encoder<'_>, point: Point) {
    out.array(2);
    write_coordinate(out, point.longitude);
    write_coordinate(out, point.latitude);
}

/// Delegates to ZADD, which is propagated instead.
fn geoadd(ctx: &mut Ctx<'_>) -> Done {
    let mut first = 2;
    let (mut only_new, mut only_old) = (false, false);
    while first < ctx.argc() {
        match ctx.arg(first).to_ascii_lowercase().as_slice() {
            b"nx" => only_new = true,
            b"xx" => only_old = true,
            b"ch" => {}
            _ => break,
        }
        first += 1;
    }
    if !(ctx.argc() - first).is_multiple_of(3) || only_new && only_old {
        return Err(Error::SYNTAX);
    }
    let mut words: Vec<Vec<u8>> = vec![b"ZADD".to_vec()];
    words.extend((1..first).map(|at| ctx.arg(at).to_vec()));
    for at in (first..ctx.argc()).step_by(3) {
        words.push(point(ctx, at)?.score().to_string().into_bytes());
        words.push(ctx.arg(at + 2).to_vec());
    }
    let spec = super::find(b"zadd").ok_or(Error::SYNTAX)?;
    if !spec.takes(words.len()) {
        return Err(Error::arity("geoadd"));
    }
    ctx.delegate_to(spec, &OwnedArgs::from_slices(&words))
}

/// The position of a member.
fn position(zset: Option<&Zset>, member: &[u8]) -> Option<Point> {
    zset.and_then(|zset| zset.score(member)).map(Point::of_score)
}

fn geodist(ctx: &mut Ctx<'_>) -> Done {
    let metres = match ctx.argc() {
        4 => 1.0,
        5 => unit(ctx.arg(4))?,
        _ => return Err(Error::SYNTAX),
    };
    let (one, other) = (ctx.arg(2), ctx.arg(3));
    let zset = typed::get::<Zset>(ctx.db, ctx.arg(1))?;
    match (position(zset, one), position(zset, other)) {
        (Some(one), Some(other)) => write_distance(&mut ctx.out, one.distance(other) / metres),
        _ => ctx.out.null(),
    }
    Ok(())
}

fn geohash(ctx: &mut Ctx<'_>) -> Done {
    let members: Vec<&[u8]> = ctx.args.from(2).iter().collect();
    let zset = typed::get::<Zset>(ctx.db, ctx.arg(1))?;
    ctx.out.array(members.len());
    for member in members {
        match position(zset, member) {
            Some(point) => ctx.out.bulk(&point.geohash()),
            None => ctx.out.null(),
        }
    }
    Ok(())
}

fn geopos(ctx: &mut Ctx<'_>) -> Done {
    let members: Vec<&[u8]> = ctx.args.from(2).iter().collect();
    let zset = typed::get::<Zset>(ctx.db, ctx.arg(1))?;
    ctx.out.array(members.len());
    for member in members {
        match position(zset, member) {
            Some(point) => write_point(&mut ctx.out, point),
            None => ctx.out.null_array(),
        }
    }
    Ok(())
}

/// The variants of the search commands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Around { stores: bool },
    AroundMember { stores: bool },
    Search,
    SearchStore,
}

impl Form {
    fn is_search(self) -> bool {
        matches!(self, Form::Search | Form::SearchStore)
    }

    fn takes_store(self) -> bool {
        matches!(self, Form::Around { stores: true } | Form::AroundMember { stores: true })
    }

    /// Positions of the key and of the first option.
    fn layout(self) -> (usize, usize) {
        match self {
            Form::Around { .. } => (1, 6),
            Form::AroundMember { .. } => (1, 5),
            Form::Search => (1, 2),
            Form::SearchStore => (2, 3),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Ascending,
    Descending,
}

/// The parsed search.
struct Query<'a> {
    centre: Option<Point>,
    /// The centre is a member of a key that does not exist: the result is empty.
    is_nowhere: bool,
    shape: Option<Shape>,
    metres: f64,
    with_distance: bool,
    with_hash: bool,
    with_point: bool,
    order: Option<Order>,
    count: usize,
    any: bool,
    store: Option<&'a [u8]>,
    store_distances: bool,
}

/// A member found by a search.
struct Found {
    member: Vec<u8>,
    score: f64,
    point: Point,
    distance: f64,
}

fn circle(ctx: &Ctx<'_>, at: usize) -> Result<(Shape, f64), Error> {
    let radius = float(ctx.arg(at)).map_err(|_| Error::err("need numeric radius"))?;
    if radius < 0.0 {
        return Err(Error::err("radius cannot be negative"));
    }
    let metres = unit(ctx.arg(at + 1))?;
    Ok((Shape::Circle { radius: radius * metres }, metres))
}

fn rectangle(ctx: &Ctx<'_>, at: usize) -> Result<(Shape, f64), Error> {
    let width = float(ctx.arg(at)).map_err(|_| Error::err("need numeric width"))?;
    let height = float(ctx.arg(at + 1)).map_err(|_| Error::err("need numeric height"))?;
    if width < 0.0 || height < 0.0 {
        return Err(Error::err("height or width cannot be negative"));
    }
    let metres = unit(ctx.arg(at + 2))?;
    Ok((Shape::Box { width: width * metres, height: height * metres }, metres))
}

/// The position of a member, which must exist if its key does.
fn member_position(ctx: &Ctx<'_>, key: &[u8], member: &[u8]) -> Result<Option<Point>, Error> {
    match typed::peek::<Zset>(ctx.db, key)? {
        None => Ok(None),
        zset => match position(zset, member) {
            None => Err(Error::err("could not decode requested zset member")),
            found => Ok(found),
        },
    }
}

fn query<'a>(ctx: &Ctx<'a>, form: Form) -> Result<Query<'a>, Error> {
    let (key_at, first) = form.layout();
    let key = ctx.arg(key_at);
    let mut query = Query {
        centre: None,
        is_nowhere: false,
        shape: None,
        metres: 1.0,
        with_distance: false,
        with_hash: false,
        with_point: false,
        order: None,
        count: 0,
        any: false,
        store: (form == Form::SearchStore).then(|| ctx.arg(1)),
        store_distances: false,
    };
    match form {
        Form::Around { .. } => {
            query.centre = Some(point(ctx, 2)?);
            let (shape, metres) = circle(ctx, 4)?;
            (query.shape, query.metres) = (Some(shape), metres);
        }
        Form::AroundMember { .. } => {
            query.centre = member_position(ctx, key, ctx.arg(2))?;
            if query.centre.is_some() {
                let (shape, metres) = circle(ctx, 3)?;
                (query.shape, query.metres) = (Some(shape), metres);
            }
        }
        Form::Search | Form::SearchStore => {}
    }
    let mut at = first;
    while at < ctx.argc() {
        at += option(ctx, form, key, at, &mut query)?;
    }
    check(ctx, form, &query)?;
    Ok(query)
}

/// Parses the option at `at`; returns the number of arguments consumed.
fn option<'a>(
    ctx: &Ctx<'a>,
    form: Form,
    key: &[u8],
    at: usize,
    query: &mut Query<'a>,
) -> Result<usize, Error> {
    let more = ctx.argc() - at - 1;
    let searches = form.is_search();
    match ctx.arg(at).to_ascii_lowercase().as_slice() {
        b"withdist" => query.with_distance = true,
        b"withhash" => query.with_hash = true,
        b"withcoord" => query.with_point = true,
        b"any" => query.any = true,
        b"asc" => query.order = Some(Order::Ascending),
        b"desc" => query.order = Some(Order::Descending),
        b"count" if more >= 1 => {
            let count = ctx.int(at + 1)?;
            query.count = usize::try_from(count)
                .ok()
                .filter(|count| *count > 0)
                .ok_or_else(|| Error::err("COUNT must be > 0"))?;
            return Ok(2);
        }
        word @ (b"store" | b"storedist") if more >= 1 && form.takes_store() => {
            query.store = Some(ctx.arg(at + 1));
            query.store_distances = word == b"storedist";
            return Ok(2);
        }
        b"storedist" if form == Form::SearchStore => query.store_distances = true,
        b"frommember" if more >= 1 && searches && (query.centre.is_none() || query.is_nowhere) => {
            query.centre = member_position(ctx, key, ctx.arg(at + 1))?;
            query.is_nowhere = query.centre.is_none();
            return Ok(2);
        }
        b"fromlonlat" if more >= 2 && searches && query.centre.is_none() && !query.is_nowhere => {
            query.centre = Some(point(ctx, at + 1)?);
            return Ok(3);
        }
        b"byradius" if more >= 2 && searches && !matches!(query.shape, Some(Shape::Box { .. })) => {
            let (shape, metres) = circle(ctx, at + 1)?;
            (query.shape, query.metres) = (Some(shape), metres);
            return Ok(3);
        }
        b"bybox" if more >= 3 && searches && !matches!(query.shape, Some(Shape::Circle { .. })) => {
            let (shape, metres) = rectangle(ctx, at + 1)?;
            (query.shape, query.metres) = (Some(shape), metres);
            return Ok(4);
        }
        _ => return Err(Error::SYNTAX),
    }
    Ok(1)
}

fn check(ctx: &Ctx<'_>, form: Form, query: &Query<'_>) -> Done {
    let name = String::from_utf8_lossy(ctx.arg(0));
    if query.store.is_some() && (query.with_distance || query.with_hash || query.with_point) {
        let what = if form == Form::SearchStore { "GEOSEARCHSTORE" } else { "STORE option in GEORADIUS" };
        return Err(Error::err(format_args!(
            "{what} is not compatible with WITHDIST, WITHHASH and WITHCOORD options"
        )));
    }
    if form.is_search() && query.centre.is_none() && !query.is_nowhere {
        return Err(Error::err(format_args!(
            "exactly one of FROMMEMBER or FROMLONLAT can be specified for {name}"
        )));
    }
    if form.is_search() && query.shape.is_none() {
        return Err(Error::err(format_args!(
            "exactly one of BYRADIUS and BYBOX can be specified for {name}"
        )));
    }
    if query.any && query.count == 0 {
        return Err(Error::err("the ANY argument requires COUNT argument"));
    }
    Ok(())
}

/// The members in the area, in the requested order.
fn find(zset: &Zset, query: &Query<'_>) -> Vec<Found> {
    let (Some(centre), Some(shape)) = (query.centre, query.shape) else { return Vec::new() };
    let most = if query.any { query.count } else { usize::MAX };
    let mut found = Vec::new();
    for (low, high) in area::covering(centre, shape) {
        let first = zset.rank_where(|score, _| score < low);
        for (member, score) in zset.range(first, usize::MAX).take_while(|(_, score)| *score < high) {
            if found.len() >= most {
                return sorted(found, query);
            }
            let point = Point::of_score(score);
            if let Some(distance) = shape.distance_inside(centre, point) {
                found.push(Found { member: member.to_vec(), score, point, distance });
            }
        }
    }
    sorted(found, query)
}

fn sorted(mut found: Vec<Found>, query: &Query<'_>) -> Vec<Found> {
    // COUNT without an order would return arbitrary members.
    let order = query.order.or((query.count > 0 && !query.any).then_some(Order::Ascending));
    match order {
        Some(Order::Ascending) => found.sort_by(|a, b| a.distance.total_cmp(&b.distance)),
        Some(Order::Descending) => found.sort_by(|a, b| b.distance.total_cmp(&a.distance)),
        None => {}
    }
    if query.count > 0 {
        found.truncate(query.count);
    }
    found
}

fn search(ctx: &mut Ctx<'_>, form: Form) -> Done {
    let key = ctx.arg(form.layout().0);
    typed::get::<Zset>(ctx.db, key)?;
    let query = query(ctx, form)?;
    let found = typed::peek::<Zset>(ctx.db, key)?.map_or_else(Vec::new, |zset| find(zset, &query));
    match query.store {
        Some(to) => store(ctx, form, to, &found, &query),
        None => show(ctx, &found, &query),
    }
    Ok(())
}

fn show(ctx: &mut Ctx<'_>, found: &[Found], query: &Query<'_>) {
    let extras =
        usize::from(query.with_distance) + usize::from(query.with_hash) + usize::from(query.with_point);
    let out = &mut ctx.out;
    out.array(found.len());
    for place in found {
        if extras > 0 {
            out.array(1 + extras);
        }
        out.bulk(&place.member);
        if query.with_distance {
            write_distance(out, place.distance / query.metres);
        }
        if query.with_hash {
            out.integer(place.score as i64);
        }
        if query.with_point {
            write_point(out, place.point);
        }
    }
}

/// Stores the result. The scores are propagated: another machine may round a distance differently.
fn store(ctx: &mut Ctx<'_>, form: Form, to: &[u8], found: &[Found], query: &Query<'_>) {
    let limits = ctx.limits();
    let mut zset = Zset::new();
    for place in found {
        let score = if query.store_distances { place.distance / query.metres } else { place.score };
        zset.insert(&place.member, score, &limits);
    }
    let event = if form == Form::SearchStore { "geosearchstore" } else { "georadiusstore" };
    let scores: Vec<String> = found
        .iter()
        .filter_map(|place| zset.score(&place.member))
        .map(crate::value::number::format_g17)
        .collect();
    let was_there = ctx.db.contains(to);
    if ctx.store(to, zset, class::ZSET, event) {
        ctx.ready(to);
    }
    if was_there {
        ctx.rewrite(&[b"DEL", to]);
    }
    if !found.is_empty() {
        let mut words = vec![b"ZADD".as_slice(), to];
        words.extend(scores.iter().zip(found).flat_map(|(score, place)| [score.as_bytes(), &place.member]));
        ctx.rewrite(&words);
    }
    ctx.out.integer(found.len() as i64);
}
