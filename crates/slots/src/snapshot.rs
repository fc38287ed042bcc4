//! Snapshots of a shard: the keyspace at one offset of its journal, as a file with a checksum.
//!
//! A restart loads the newest snapshot and replays the journal from there; a follower that is behind the leader's log
//! start installs the leader's snapshot. The keyspace is written slot by slot while the shard serves
//! (`keyspace/image.rs`), so there is neither a copy of it nor a long pause. A snapshot is published once everything in
//! it is committed; then the journal below it may be deleted.
//!
//! File `<end>.snap`: magic and version (8), shard (4), end (8), epoch (4), time (8), the slot migrations (length and
//! JSON; since version 2), the functions (length and a FUNCTION DUMP payload; since version 3), then per key: length,
//! key, expiry, length, type and body as in a DUMP payload; then the end mark in place of a length, the number of keys
//! (8) and a CRC32C of everything before (4). Written under another name, synced, renamed: a file with this name is
//! complete, and its checksum is verified all the same.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{Buf, Bytes};
use moim_base::{LeaderEpoch, Offset};
use moim_replica::machine::{InstallError, Snapshot};

use crate::error::Error;
use crate::keyspace::image::SNAPSHOT;
use crate::keyspace::{Item, Keyspace, Owned};
use crate::migration::state::Migrations;
use crate::rdb::{self, Object, ObjectRef};
use crate::script::library;
use crate::shard::Shard;
use crate::value::Value;
use crate::value::limits::Limits;

const MAGIC: &[u8; 7] = b"MOIMSHD";
/// The version that is written; versions 1 and 2 can be read, too.
const VERSION: u8 = 3;
const HEADER: usize = 8 + 4 + 8 + 4 + 8;
const NO_EXPIRY: i64 = i64::MIN;
/// Bytes that are serialized under the lock at a time.
const STEP_BYTES: usize = 256 << 10;
/// Bytes between two syncs.
const SYNC_BYTES: u64 = 8 << 20;
/// The end mark of the keys.
const END: u32 = u32::MAX;
/// In place of a body length that needs 64 bits; the length follows.
const LONG: u32 = u32::MAX;

/// The snapshot folder of a shard.
pub fn folder(data: &Path, shard: u16) -> PathBuf {
    data.join("slots").join(format!("snapshots-{shard}"))
}

/// Serializes a key for a snapshot or a slot migration.
pub(crate) fn write_key(out: &mut Vec<u8>, key: &[u8], item: Item<'_>, expires_at: Option<i64>) {
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(key);
    out.extend_from_slice(&expires_at.unwrap_or(NO_EXPIRY).to_le_bytes());
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    rdb::write_object(out, object(item));
    let len = out.len() - at - 4;
    match u32::try_from(len).ok().filter(|len| *len != LONG) {
        Some(len) => out[at..at + 4].copy_from_slice(&len.to_le_bytes()),
        None => {
            out[at..at + 4].copy_from_slice(&LONG.to_le_bytes());
            out.splice(at + 4..at + 4, (len as u64).to_le_bytes());
        }
    }
}

/// Reads the length of a value's body.
fn body_len(bytes: &mut &[u8]) -> Option<usize> {
    match bytes.try_get_u32_le().ok()? {
        LONG => usize::try_from(bytes.try_get_u64_le().ok()?).ok(),
        len => Some(len as usize),
    }
}

/// The length of the serialized key at the start of `bytes`; `None` if it is incomplete.
fn key_len(bytes: &[u8]) -> Option<usize> {
    let mut rest = bytes;
    let key = rest.try_get_u32_le().ok()? as usize;
    rest = rest.get(key.checked_add(8)?..)?;
    let body = body_len(&mut rest)?;
    (body <= rest.len()).then(|| bytes.len() - rest.len() + body)
}

/// The length of the complete keys at the start of `bytes`: as many keys as fit `most` bytes, but at least one.
pub(crate) fn whole_keys(bytes: &[u8], most: usize) -> usize {
    let mut end = 0;
    while let Some(len) = key_len(&bytes[end..]).filter(|len| end == 0 || end + len <= most) {
        end += len;
    }
    end
}

fn object(item: Item<'_>) -> ObjectRef<'_> {
    match item {
        Item::Str(string) => ObjectRef::String(string),
        Item::Value(value) => match value {
            Value::Str(string) => ObjectRef::String(string),
            Value::Hash(hash) => ObjectRef::Hash(hash),
            Value::List(list) => ObjectRef::List(list),
            Value::Set(set) => ObjectRef::Set(set),
            Value::Zset(zset) => ObjectRef::Zset(zset),
            Value::Stream(stream) => ObjectRef::Stream(stream),
        },
    }
}

fn owned(object: Object) -> Owned {
    match object {
        Object::String(string) => Owned::Str(string),
        Object::List(list) => Owned::Value(Value::List(list)),
        Object::Set(set) => Owned::Value(Value::Set(set)),
        Object::Hash(hash) => Owned::Value(Value::Hash(hash)),
        Object::Zset(zset) => Owned::Value(Value::Zset(zset)),
        Object::Stream(stream) => Owned::Value(Value::Stream(stream)),
    }
}

/// A decoded snapshot.
pub(crate) struct LoadedSnapshot {
    pub(crate) db: Keyspace,
    pub(crate) end: i64,
    pub(crate) time_ms: i64,
    pub(crate) migrations: Migrations,
}

/// Decodes a snapshot and verifies its checksum.
pub(crate) fn decode(bytes: &[u8], shard: u16) -> Result<LoadedSnapshot, InstallError> {
    let bad = |why: &str| InstallError(why.to_owned());
    if bytes.len() < HEADER + 16 || &bytes[..7] != MAGIC || !(1..=VERSION).contains(&bytes[7]) {
        return Err(bad("unknown snapshot magic or version"));
    }
    let (covered, mut sum) = bytes.split_at(bytes.len() - 4);
    if crc32c::crc32c(covered) != sum.get_u32_le() {
        return Err(bad("snapshot checksum mismatch"));
    }
    let mut rest = &covered[8..];
    if rest.get_u32_le() != u32::from(shard) {
        return Err(bad("snapshot of another shard"));
    }
    let (end, _epoch, time_ms) = (rest.get_i64_le(), rest.get_i32_le(), rest.get_i64_le());
    let mut migrations = Migrations::default();
    if bytes[7] > 1 {
        let len = rest.try_get_u32_le().map_err(|_| bad("truncated snapshot"))? as usize;
        let (json, tail) = rest.split_at_checked(len).ok_or_else(|| bad("truncated snapshot"))?;
        migrations =
            Migrations::decode(json).ok_or_else(|| bad("undecodable slot migrations in snapshot"))?;
        rest = tail;
    }
    let mut db = Keyspace::new(fastrand::u64(..));
    if bytes[7] > 2 {
        let len = rest.try_get_u32_le().map_err(|_| bad("truncated snapshot"))? as usize;
        let (payload, tail) = rest.split_at_checked(len).ok_or_else(|| bad("truncated snapshot"))?;
        read_functions(&mut db, payload).map_err(|error| InstallError(error.0.into_owned()))?;
        rest = tail;
    }
    migrations.hide_staged(&mut db);
    let limits = Limits::default();
    while read_key(&mut rest, &mut db, &limits)? {}
    let keys = rest.try_get_u64_le().map_err(|_| bad("truncated snapshot"))?;
    if keys != db.total() as u64 {
        return Err(bad("wrong number of keys in snapshot"));
    }
    drop(db.take_garbage());
    Ok(LoadedSnapshot { db, end, time_ms, migrations })
}

/// Reads a key that [`write_key`] serialized into the keyspace; false at the end mark.
fn read_key(rest: &mut &[u8], db: &mut Keyspace, limits: &Limits) -> Result<bool, InstallError> {
    let short = || InstallError("truncated key".to_owned());
    let len = rest.try_get_u32_le().map_err(|_| short())?;
    if len == END {
        return Ok(false);
    }
    let (key, tail) = rest.split_at_checked(len as usize).ok_or_else(short)?;
    *rest = tail;
    let expires_at = rest.try_get_i64_le().map_err(|_| short())?;
    let len = body_len(rest).ok_or_else(short)?;
    let (body, tail) = rest.split_at_checked(len).ok_or_else(short)?;
    *rest = tail;
    let object = rdb::read_object(body, limits).map_err(|_| InstallError("undecodable value".to_owned()))?;
    db.put_owned(key, owned(object), Some(expires_at).filter(|at| *at != NO_EXPIRY));
    Ok(true)
}

/// Reads consecutive keys that [`write_key`] serialized into the keyspace.
pub(crate) fn read_keys(mut bytes: &[u8], db: &mut Keyspace) -> Result<(), InstallError> {
    let limits = Limits::default();
    while !bytes.is_empty() {
        read_key(&mut bytes, db, &limits)?;
    }
    drop(db.take_garbage());
    Ok(())
}

fn read_functions(db: &mut Keyspace, payload: &[u8]) -> Result<(), Error> {
    let codes = rdb::restore_functions(payload).map_err(|error| Error::coded(error.to_string()))?;
    for code in codes {
        db.functions.add(library::load(&code, None)?, true)?;
    }
    Ok(())
}

/// The newest snapshot in a folder: its end and its path.
fn newest(folder: &Path) -> Option<(i64, PathBuf)> {
    let entries = fs::read_dir(folder).ok()?;
    entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let end = path.file_name()?.to_str()?.strip_suffix(".snap")?.parse().ok()?;
            Some((end, path))
        })
        .max()
}

/// Loads the newest snapshot of a shard, if there is one. Blocks. A damaged snapshot makes the whole replica worthless:
/// the journal below it is deleted.
pub(crate) fn load(shard: &Shard) -> io::Result<Option<LoadedSnapshot>> {
    let Some(folder) = shard.folder() else { return Ok(None) };
    let Some((_, path)) = newest(folder) else { return Ok(None) };
    let bytes = fs::read(&path)?;
    let loaded = decode(&bytes, shard.index).map_err(|error| {
        let why = format!("{}: {error}", path.display());
        shard.log.journal().set_damaged(&why);
        io::Error::other(why)
    })?;
    Ok(Some(loaded))
}

/// Verifies the newest snapshot, and writes a new one from memory if it is damaged. Blocks.
pub(crate) fn scrub(shard: &Arc<Shard>) -> io::Result<()> {
    let Some((_, path)) = shard.folder().and_then(newest) else { return Ok(()) };
    match has_valid_checksum(&path) {
        Ok(true) => Ok(()),
        // A newer snapshot has replaced it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(false) => {
            tracing::error!(shard = shard.index, path = %path.display(), "snapshot checksum mismatch; snapshot rewritten");
            write_snapshot(shard).map(drop)
        }
    }
}

/// True if the checksum at the end of a file matches.
fn has_valid_checksum(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let Some(mut rest) = len.checked_sub(4) else { return Ok(false) };
    let (mut sum, mut buffer) = (0, vec![0; 1 << 20]);
    while rest > 0 {
        let want = usize::try_from(rest).map_or(buffer.len(), |rest| rest.min(buffer.len()));
        file.read_exact(&mut buffer[..want])?;
        sum = crc32c::crc32c_append(sum, &buffer[..want]);
        rest -= want as u64;
    }
    let mut known = [0; 4];
    file.read_exact(&mut known)?;
    Ok(u32::from_le_bytes(known) == sum)
}

/// Removes the snapshots of a replica that restarts empty. Blocks.
pub(crate) fn remove_all(shard: &Shard) -> io::Result<()> {
    shard.enable();
    let Some(folder) = shard.folder() else { return Ok(()) };
    while let Some((_, path)) = newest(folder) {
        fs::remove_file(path)?;
    }
    match File::open(folder) {
        Ok(folder) => folder.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes a snapshot of a shard, waits until everything in it is committed, and deletes the journal below it. Returns
/// its end; `None` if the role changed meanwhile. Blocks.
pub(crate) fn write_snapshot(shard: &Arc<Shard>) -> io::Result<Option<i64>> {
    let Some(folder) = shard.folder() else { return Ok(None) };
    fs::create_dir_all(folder)?;
    let voided = shard.voided();
    let (end, epoch, time_ms, migrations, functions) = {
        let mut state = shard.lock();
        // A snapshot contains complete batches only: a journal that started inside of a group could not be replayed.
        if !state.fx.is_settled() || state.groups.is_open() || state.db.has_image(SNAPSHOT) {
            return Ok(None);
        }
        state.db.begin_image(SNAPSHOT, None, write_key);
        // Not the newest epoch: the log of a replica may continue in an epoch of which the snapshot contains nothing.
        let epoch = shard.log.journal().epoch_before(state.applied);
        let epoch = epoch.unwrap_or_else(|| shard.log.last_epoch());
        (state.applied, epoch, state.time_ms, state.migrations.encode(), state.db.functions.payload())
    };
    let path = folder.join(format!("{end:020}.snap"));
    let partial = folder.join(format!("{end:020}.partial"));
    let header = header(shard.index, (end, epoch, time_ms), &migrations, &functions);
    let written = write_file(shard, &partial, &header, voided);
    shard.lock().db.drop_image(SNAPSHOT);
    if !written? {
        let _ = fs::remove_file(&partial);
        return Ok(None);
    }
    while shard.committed() < end {
        if shard.voided() != voided {
            let _ = fs::remove_file(&partial);
            return Ok(None);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    if shard.voided() != voided {
        let _ = fs::remove_file(&partial);
        return Ok(None);
    }
    publish(folder, &partial, &path)?;
    // A slot migration that reads the journal still needs the part below.
    let start = end.min(shard.journal_retained_from());
    shard.log.journal().set_start(start).map_err(io::Error::other)?;
    Ok(Some(end))
}

fn publish(folder: &Path, partial: &Path, path: &Path) -> io::Result<()> {
    fs::rename(partial, path)?;
    File::open(folder)?.sync_all()?;
    for entry in fs::read_dir(folder)? {
        let old = entry?.path();
        // Never a newer one: the leader's snapshot may have been installed meanwhile.
        if old.as_path() < path {
            fs::remove_file(&old)?;
        }
    }
    Ok(())
}

fn header(
    shard: u16,
    (end, epoch, time_ms): (i64, i32, i64),
    migrations: &[u8],
    functions: &[u8],
) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER + 8 + migrations.len() + functions.len());
    header.extend_from_slice(MAGIC);
    header.push(VERSION);
    header.extend_from_slice(&u32::from(shard).to_le_bytes());
    header.extend_from_slice(&end.to_le_bytes());
    header.extend_from_slice(&epoch.to_le_bytes());
    header.extend_from_slice(&time_ms.to_le_bytes());
    header.extend_from_slice(&(migrations.len() as u32).to_le_bytes());
    header.extend_from_slice(migrations);
    header.extend_from_slice(&(functions.len() as u32).to_le_bytes());
    header.extend_from_slice(functions);
    header
}

/// Writes the snapshot file; false if the image was dropped.
fn write_file(shard: &Shard, path: &Path, header: &[u8], voided: u64) -> io::Result<bool> {
    let mut file = io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut sum = crc32c::crc32c(header);
    file.write_all(header)?;
    let (mut keys, mut written, mut synced) = (0u64, 0u64, 0u64);
    let mut bytes = Vec::with_capacity(STEP_BYTES * 5 / 4);
    loop {
        bytes.clear();
        let step = {
            let mut state = shard.lock();
            if shard.voided() != voided {
                None
            } else {
                state.db.image_step(SNAPSHOT, STEP_BYTES, &mut bytes)
            }
        };
        let Some(done) = step else { return Ok(false) };
        keys += count_keys(&bytes);
        sum = crc32c::crc32c_append(sum, &bytes);
        file.write_all(&bytes)?;
        written += bytes.len() as u64;
        if written - synced >= SYNC_BYTES {
            sync_and_drop_cache(&mut file)?;
            synced = written;
        }
        if done {
            break;
        }
        // Clients wait for the lock, too.
        std::thread::yield_now();
    }
    let mut footer = END.to_le_bytes().to_vec();
    footer.extend_from_slice(&keys.to_le_bytes());
    sum = crc32c::crc32c_append(sum, &footer);
    footer.extend_from_slice(&sum.to_le_bytes());
    file.write_all(&footer)?;
    file.into_inner().map_err(|error| error.into_error())?.sync_all()?;
    Ok(true)
}

/// Syncs the bytes written so far and drops them from the page cache. One sync at the end would delay the syncs of the
/// journals, and the cached bytes would displace others.
fn sync_and_drop_cache(file: &mut io::BufWriter<File>) -> io::Result<()> {
    file.flush()?;
    file.get_ref().sync_data()?;
    let _ = rustix::fs::fadvise(file.get_ref(), 0, None, rustix::fs::Advice::DontNeed);
    Ok(())
}

fn count_keys(mut bytes: &[u8]) -> u64 {
    let mut keys = 0;
    while let Some(len) = key_len(bytes) {
        bytes.advance(len);
        keys += 1;
    }
    keys
}

/// The newest snapshot, for a follower.
pub(crate) fn newest_for_follower(shard: &Arc<Shard>) -> Option<Snapshot> {
    let (end, path) = newest(shard.folder()?)?;
    let bytes = fs::read(&path).ok()?;
    let (covered, mut sum) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
    if crc32c::crc32c(covered) != sum.get_u32_le() {
        shard.log.journal().set_damaged(&format!("{}: snapshot checksum mismatch", path.display()));
        return None;
    }
    let epoch = bytes.get(20..24).map(|mut epoch| epoch.get_i32_le())?;
    Some(Snapshot { end: Offset(end), last_epoch: LeaderEpoch(epoch), bytes: Bytes::from(bytes) })
}

/// Installs a snapshot of the leader durably, in place of this replica's data.
pub(crate) fn install(shard: &Arc<Shard>, snapshot: Snapshot) -> Result<(), InstallError> {
    let loaded = decode(&snapshot.bytes, shard.index)?;
    let folder = shard.folder().ok_or_else(|| InstallError("shard without a snapshot folder".to_owned()))?;
    let end = loaded.end;
    let store = || -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("{end:020}.snap"));
        let partial = folder.join(format!("{end:020}.partial"));
        let mut file = File::create(&partial)?;
        file.write_all(&snapshot.bytes)?;
        file.sync_all()?;
        publish(folder, &partial, &path)
    };
    store().map_err(|error| InstallError(error.to_string()))?;
    shard.install(loaded);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(db: &mut Keyspace, migrations: &Migrations) -> Vec<u8> {
        db.begin_image(SNAPSHOT, None, write_key);
        let mut file = header(7, (42, 3, 99), &migrations.encode(), &db.functions.payload());
        let mut keys = 0;
        loop {
            let start = file.len();
            let done = db.image_step(SNAPSHOT, 100, &mut file).unwrap();
            keys += count_keys(&file[start..]);
            if done {
                break;
            }
        }
        file.extend_from_slice(&END.to_le_bytes());
        file.extend_from_slice(&keys.to_le_bytes());
        let sum = crc32c::crc32c(&file);
        file.extend_from_slice(&sum.to_le_bytes());
        file
    }

    #[test]
    fn serialized_keys_are_split_between_keys() {
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for size in [0, 10, 200, 30] {
            write_key(&mut bytes, b"key", Item::Str(&vec![b'v'; size]), None);
            ends.push(bytes.len());
        }
        for have in 0..=bytes.len() {
            for most in [1, ends[0], ends[1], ends[1] + 1, usize::MAX] {
                let fit = ends.iter().filter(|end| **end <= have && (**end <= most || **end == ends[0]));
                assert_eq!(
                    whole_keys(&bytes[..have], most),
                    fit.max().copied().unwrap_or(0),
                    "{have} {most}"
                );
            }
        }
        assert_eq!(count_keys(&bytes), 4);
        // A 64-bit body length, and the same bytes with a 32-bit one.
        let at = 4 + 3 + 8;
        let mut long = bytes[..ends[0]].to_vec();
        let len = u64::from(u32::from_le_bytes(long[at..at + 4].try_into().unwrap()));
        long[at..at + 4].copy_from_slice(&LONG.to_le_bytes());
        long.splice(at + 4..at + 4, len.to_le_bytes());
        assert_eq!(whole_keys(&long, 1), long.len());
        let mut db = Keyspace::new(1);
        read_keys(&long, &mut db).unwrap();
        assert!(db.contains(b"key"));
        assert!((0..long.len()).all(|cut| whole_keys(&long[..cut], 1) == 0));
    }

    #[test]
    fn scrub_detects_any_damage() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("42.snap");
        let file = written(&mut Keyspace::new(1), &Migrations::default());
        fs::write(&path, &file).unwrap();
        assert!(has_valid_checksum(&path).unwrap());
        for bit in (0..file.len() * 8).step_by(5) {
            let mut rotten = file.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &rotten).unwrap();
            assert!(!has_valid_checksum(&path).unwrap(), "bit {bit}");
        }
        fs::write(&path, b"ab").unwrap();
        assert!(!has_valid_checksum(&path).unwrap());
    }

    #[test]
    fn a_snapshot_is_decoded_and_any_damage_is_detected() {
        let mut db = Keyspace::new(1);
        for n in 0..500 {
            let key = format!("key:{n}");
            db.set_str(key.as_bytes(), &vec![b'v'; n * 7], (n % 3 == 0).then_some(1_000 + n as i64));
        }
        let code = b"#!lua name=lib\nredis.register_function('f', function() return 1 end)";
        db.functions.add(library::load(code, None).unwrap(), false).unwrap();
        let file = written(&mut db, &Migrations::default());
        let loaded = decode(&file, 7).unwrap();
        assert_eq!((loaded.end, loaded.time_ms, loaded.db.len()), (42, 99, 500));
        assert_eq!(loaded.db.functions.find("f").unwrap().0.name, "lib");
        db.for_each(|key, item, expires_at| {
            let Item::Str(wanted) = item else { panic!("a string") };
            let Some(Item::Str(got)) = loaded.db.get(key) else { panic!("a string") };
            assert_eq!((got, loaded.db.expiry(key)), (wanted, Some(expires_at)));
        });
        assert!(decode(&file, 8).is_err(), "a snapshot of another shard");
        for at in (0..file.len()).step_by(997).chain([file.len() - 1]) {
            let mut broken = file.clone();
            broken[at] ^= 1;
            assert!(decode(&broken, 7).is_err(), "byte {at}");
            assert!(decode(&file[..at], 7).is_err(), "cut at {at}");
        }
    }
}
