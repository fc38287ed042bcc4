//! Streams in payloads: blocks as listpacks, then the stream metadata, then consumer groups with their pending
//! entries.
//!
//! Three encodings, which differ in later additions: first id and counters (7.0), active time of consumers (7.2). We
//! write the second.

use super::packed::{self, Entry};
use super::read::Reader;
use super::{BadFormat, write_length, write_string};
use crate::value::stream::group::Group;
use crate::value::stream::{Id, RawEntry, Stream};

/// Encodings from this one on contain the number of added entries, the first id and the highest deleted id.
const WITH_COUNTS: u8 = 19;
/// Encodings from this one on contain the active time of a consumer.
const WITH_ACTIVITY: u8 = 21;

pub(super) fn write(to: &mut Vec<u8>, stream: &Stream) {
    write_length(to, stream.blocks().len() as u64);
    for (base, block) in stream.blocks() {
        write_string(to, &raw(base));
        write_string(to, &block.to_listpack());
    }
    write_length(to, stream.len());
    write_id(to, stream.last_id);
    write_id(to, stream.first_id());
    write_id(to, stream.max_deleted);
    write_length(to, stream.added);
    write_length(to, stream.groups.len() as u64);
    for (name, group) in &stream.groups {
        write_string(to, name);
        write_group(to, group);
    }
}

fn write_group(to: &mut Vec<u8>, group: &Group) {
    write_id(to, group.last_id);
    // Unknown is -1, encoded as an unsigned length.
    write_length(to, group.entries_read.unwrap_or(u64::MAX));
    write_length(to, group.pending_len() as u64);
    for (id, pending) in group.pending_from(Id::MIN) {
        to.extend_from_slice(&raw(id));
        to.extend_from_slice(&pending.delivered_ms.to_le_bytes());
        write_length(to, pending.deliveries);
    }
    write_length(to, group.consumers().len() as u64);
    for (name, consumer) in group.consumers() {
        write_string(to, name);
        to.extend_from_slice(&consumer.seen_ms.to_le_bytes());
        write_length(to, consumer.pending_len() as u64);
        consumer.pending_from(Id::MIN).for_each(|id| to.extend_from_slice(&raw(id)));
    }
}

fn write_id(to: &mut Vec<u8>, id: Id) {
    write_length(to, id.ms);
    write_length(to, id.seq);
}

/// An id in big-endian bytes, whose order is that of ids.
fn raw(id: Id) -> [u8; 16] {
    (u128::from(id.ms) << 64 | u128::from(id.seq)).to_be_bytes()
}

fn from_raw(bytes: &[u8]) -> Result<Id, BadFormat> {
    let number = u128::from_be_bytes(bytes.try_into().map_err(|_| BadFormat)?);
    Ok(Id { ms: (number >> 64) as u64, seq: number as u64 })
}

fn read_id(reader: &mut Reader<'_>) -> Result<Id, BadFormat> {
    Ok(Id { ms: reader.length_u64()?, seq: reader.length_u64()? })
}

pub(super) fn read(reader: &mut Reader<'_>, form: u8) -> Result<Box<Stream>, BadFormat> {
    let mut stream = Box::<Stream>::default();
    for _ in 0..reader.length()? {
        let base = from_raw(&reader.string()?)?;
        read_block(&mut stream, base, &reader.string()?)?;
    }
    let length = reader.length_u64()?;
    stream.last_id = read_id(reader)?;
    if form >= WITH_COUNTS {
        let _first = read_id(reader)?;
        stream.max_deleted = read_id(reader)?;
        stream.added = reader.length_u64()?;
    } else {
        stream.added = length;
    }
    let beyond = stream.last_entry_id().is_some_and(|last| last > stream.last_id);
    if stream.len() != length || beyond {
        return Err(BadFormat);
    }
    for _ in 0..reader.length()? {
        let name = reader.string()?;
        let group = read_group(reader, form, &stream)?;
        if stream.groups.insert(name.into(), group).is_some() {
            return Err(BadFormat);
        }
    }
    Ok(stream)
}

/// The elements of a listpack, in sequence.
struct Pieces<'a> {
    texts: &'a [Vec<u8>],
    at: usize,
}

impl<'a> Pieces<'a> {
    fn text(&mut self) -> Result<&'a [u8], BadFormat> {
        let text = self.texts.get(self.at).ok_or(BadFormat)?;
        self.at += 1;
        Ok(text)
    }

    fn int(&mut self) -> Result<i64, BadFormat> {
        moim_wire_resp::number::parse_i64(self.text()?).ok_or(BadFormat)
    }

    /// A number of elements, bounded by the remaining elements.
    fn count(&mut self) -> Result<usize, BadFormat> {
        let count = usize::try_from(self.int()?).map_err(|_| BadFormat)?;
        if count > self.texts.len() { Err(BadFormat) } else { Ok(count) }
    }
}

fn read_block(stream: &mut Stream, base: Id, listpack: &[u8]) -> Result<(), BadFormat> {
    let texts: Vec<Vec<u8>> = packed::listpack(listpack)?.into_iter().map(Entry::into_bytes).collect();
    let mut pieces = Pieces { texts: &texts, at: 0 };
    let (live, dead) = (pieces.count()?, pieces.count()?);
    let names = (0..pieces.count()?).map(|_| pieces.text()).collect::<Result<Vec<_>, _>>()?;
    if pieces.int()? != 0 {
        return Err(BadFormat);
    }
    let mut entries = Vec::new();
    for _ in 0..live + dead {
        entries.push(read_entry(&mut pieces, base, &names)?);
    }
    let deleted = entries.iter().filter(|entry| entry.is_deleted).count();
    if pieces.at != texts.len() || deleted != dead || !stream.push_block(base, &names, &entries) {
        return Err(BadFormat);
    }
    Ok(())
}

fn read_entry<'a>(pieces: &mut Pieces<'a>, base: Id, names: &[&'a [u8]]) -> Result<RawEntry<'a>, BadFormat> {
    let start = pieces.at;
    let flags = pieces.int()?;
    if !(0..4).contains(&flags) {
        return Err(BadFormat);
    }
    let id = Id {
        ms: base.ms.wrapping_add(pieces.int()? as u64),
        seq: base.seq.wrapping_add(pieces.int()? as u64),
    };
    let mut pairs = Vec::new();
    if flags & 2 != 0 {
        for name in names {
            pairs.push((*name, pieces.text()?));
        }
    } else {
        for _ in 0..pieces.count()? {
            pairs.push((pieces.text()?, pieces.text()?));
        }
    }
    let elements = pieces.at - start;
    if pieces.count()? != elements {
        return Err(BadFormat);
    }
    Ok(RawEntry { id, is_deleted: flags & 1 != 0, pairs })
}

fn read_group(reader: &mut Reader<'_>, form: u8, stream: &Stream) -> Result<Group, BadFormat> {
    let last_id = read_id(reader)?;
    let entries_read = if form >= WITH_COUNTS {
        Some(reader.length_u64()?).filter(|read| *read <= i64::MAX as u64)
    } else {
        stream.count_up_to(last_id)
    };
    let mut group = Group::new(last_id, entries_read);
    let mut pending = std::collections::BTreeMap::new();
    for _ in 0..reader.length()? {
        let id = from_raw(reader.take(16)?)?;
        let delivered_ms = reader.int_le(8)?;
        if pending.insert(id, (delivered_ms, reader.length_u64()?)).is_some() {
            return Err(BadFormat);
        }
    }
    for _ in 0..reader.length()? {
        let name = reader.string()?;
        let seen_ms = reader.int_le(8)?;
        if form >= WITH_ACTIVITY {
            reader.int_le(8)?;
        }
        let (name, is_new) = group.touch_consumer(&name, seen_ms);
        if !is_new {
            return Err(BadFormat);
        }
        for _ in 0..reader.length()? {
            let id = from_raw(reader.take(16)?)?;
            let (delivered_ms, deliveries) = pending.remove(&id).ok_or(BadFormat)?;
            group.assign(id, &name, delivered_ms, deliveries);
        }
    }
    if pending.is_empty() { Ok(group) } else { Err(BadFormat) }
}
