//! Upgrade of a data directory from the previous format version, before recovery.
//!
//! Only the commit log and the checkpoint differ between the versions. The upgrade copies every record past the
//! checkpoint's floor into new commit-log files, with their LSNs, then replaces the checkpoint by one of the same
//! content whose floor is the beginning of the copy, and then removes the old commit-log files. Recovery continues with
//! a directory that is of the current version as a whole.
//!
//! The rename of the checkpoint is the commit point. Before it, old files are only read: an interrupted upgrade is
//! repeated, and its unfinished copy removed. After it, files of the previous version hold nothing that the checkpoint
//! needs, and are removed by this start or the next one. The copy needs as much free space as the log has bytes past
//! the floor.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::recover::at;
use crate::checkpoint::{Checkpoint, CheckpointWriter, LogPoint};
use crate::commit::log::{self, CommitLog, Found, LogFile, OpenLog};
use crate::commit::{BLOCK, Record, Staged, previous_format};
use crate::disk::{Disk, replace_file};
use crate::types::{OpenError, StoreOptions};

/// Bytes of records that are copied with one fsync.
const GROUP_BYTES: usize = 4 << 20;

/// Returns checkpoint and commit-log files in the current format version; does nothing if they are.
pub(super) fn upgrade(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    options: &StoreOptions,
    checkpoint: Checkpoint,
    found: Found,
) -> Result<(Checkpoint, Found), OpenError> {
    let folder = dir.join("commit");
    let is_previous = match checkpoint.version {
        Some(version) => version == previous_format::VERSION,
        None => !found.previous.is_empty(),
    };
    if !is_previous && found.previous.is_empty() {
        return Ok((checkpoint, found));
    }
    let checkpoint = if is_previous {
        tracing::info!(dir = %dir.display(), "upgrading data directory to the current format version");
        remove(&**disk, &folder, &found.files)?;
        let floor = copy_log(disk, &folder, options, checkpoint.floor, &found)?;
        replace_checkpoint(&**disk, dir, checkpoint, floor)?
    } else {
        checkpoint
    };
    remove(&**disk, &folder, &found.previous)?;
    let upgraded = log::find(&**disk, &folder)?;
    Ok((checkpoint, upgraded))
}

/// Copies the records past the floor into files of the current version. Returns the beginning of the copy.
fn copy_log(
    disk: &Arc<dyn Disk>,
    folder: &Path,
    options: &StoreOptions,
    floor: LogPoint,
    found: &Found,
) -> Result<LogPoint, OpenError> {
    let has_floor_file = found.previous.iter().any(|file| file.generation == floor.generation);
    if floor.position > BLOCK && !has_floor_file {
        return Err(OpenError::CommitLogDamaged {
            path: folder.display().to_string(),
            position: floor.position,
            what: format!("the file of generation {} is missing", floor.generation),
        });
    }
    let nothing = Found {
        files: Vec::new(),
        previous: Vec::new(),
        unused: Vec::new(),
        bad_headers: Vec::new(),
        foreign: Vec::new(),
        next_number: found.next_number,
    };
    // Generations continue from the greatest one of any file, those of an unfinished upgrade included.
    let newest = found.newest_generation().max(floor.generation);
    let open = OpenLog {
        folder: folder.to_owned(),
        file_bytes: options.commit_file_bytes,
        first_file_bytes: options.first_commit_file_bytes,
        floor: LogPoint { generation: newest, ..floor },
        found: nothing,
        next_lsn: floor.next_lsn,
        // The log before the copy ends where the copy begins; its first group may need a larger file than the first
        // one.
        end: (newest + 1, BLOCK),
    };
    let log = at(folder, CommitLog::open(disk.clone(), open))?;
    let begin = log.durable_point();
    assert_eq!((begin.generation, begin.position), (newest + 1, BLOCK), "the copy begins at its first file");
    let mut group = Vec::new();
    let mut bytes = 0;
    let copied = previous_format::scan(&found.previous, floor, &mut |entry, payload| {
        let staged = staged(entry.record, payload);
        bytes += staged.bytes();
        group.push(staged);
        if bytes < GROUP_BYTES {
            return Ok(());
        }
        bytes = 0;
        commit(&log, &mut group)
    });
    at(folder, copied.and_then(|()| commit(&log, &mut group)))?;
    Ok(begin)
}

fn commit(log: &CommitLog, group: &mut Vec<Staged>) -> std::io::Result<()> {
    if !group.is_empty() {
        log.ensure_space(group)?;
        log.commit(group)?;
        group.clear();
    }
    Ok(())
}

fn staged(record: Record, payload: Bytes) -> Staged {
    let payload_crc = crc32c::crc32c(&payload);
    Staged { record, payload, payload_crc, journal: None, done: None }
}

/// The same content, with the floor at the beginning of the copied log.
fn replace_checkpoint(
    disk: &dyn Disk,
    dir: &Path,
    checkpoint: Checkpoint,
    floor: LogPoint,
) -> Result<Checkpoint, OpenError> {
    let mut writer = CheckpointWriter::new(floor);
    checkpoint.journals.values().for_each(|image| writer.push(image));
    let path = dir.join("checkpoint");
    at(&path, replace_file(disk, &path, &writer.finish()))?;
    Ok(Checkpoint { floor, ..checkpoint })
}

fn remove(disk: &dyn Disk, folder: &Path, files: &[LogFile]) -> Result<(), OpenError> {
    for file in files {
        let path = log::path_of(folder, file.number);
        at(&path, disk.remove(&path))?;
    }
    at(folder, disk.sync_dir(folder))
}

#[cfg(test)]
mod tests;
