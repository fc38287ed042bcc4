//! The commit-log files: writing groups, switching files, recycling, finding them at start.
//!
//! A file is prewritten with zeros once and recycled: each use has a new generation, written into the file's first
//! block and synced before any record of that generation. Invariants:
//! - generations grow in the order files are used; a file's records carry its generation;
//! - LSNs are contiguous across files; a group starts at a block boundary;
//! - a file is recycled only below the floor of a durable checkpoint;
//! - the first group of a file use starts with a Begin record that names the end of the log before it.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::previous_format;
use super::scan::LogReader;
use super::{BLOCK, Kind, MAX_FILE, RECORD_HEADER, Record, Staged, Stamp, encode_record};
use crate::checkpoint::LogPoint;
use crate::codec::{Input, Locked, Output};
use crate::disk::{Disk, DiskFile, write_at};
use crate::types::OpenError;

pub(super) const MAGIC: &[u8; 8] = b"MOIMLOG\n";
/// Format version of a commit-log file.
pub(crate) const VERSION: u32 = 2;
/// Zeros are written in steps of this size, each synced, so that a concurrent group commit never waits for all of it.
const PREWRITE_STEP: usize = 1 << 20;
static ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];

/// One commit-log file in some use.
#[derive(Clone)]
pub(crate) struct LogFile {
    pub(crate) number: u64,
    pub(crate) generation: u64,
    pub(crate) size: u64,
    pub(crate) file: Arc<dyn DiskFile>,
}

struct Files {
    /// In order of generation; the last one is being written.
    live: VecDeque<LogFile>,
    spare: Option<LogFile>,
    free: Vec<LogFile>,
    next_number: u64,
    next_generation: u64,
}

struct Writer {
    file: LogFile,
    position: u64,
    next_lsn: u64,
    /// End of the last record: (generation, position).
    end: (u64, u64),
    headers: Vec<u8>,
}

/// The commit log, open for writing.
pub(crate) struct CommitLog {
    folder: PathBuf,
    disk: Arc<dyn Disk>,
    file_bytes: u64,
    writer: Mutex<Writer>,
    files: Mutex<Files>,
    /// Position of the next group; everything before is durable.
    durable: Mutex<LogPoint>,
    /// Number of live files, readable without waiting for one that is being prewritten.
    live: AtomicUsize,
}

/// The commit-log files found at start.
pub(crate) struct Found {
    /// Files with a valid header, in order of generation.
    pub(crate) files: Vec<LogFile>,
    /// The same of the previous format version; they are never written to.
    pub(crate) previous: Vec<LogFile>,
    /// Our own files without records: never used, or prepared for a use that never began.
    pub(crate) unused: Vec<LogFile>,
    /// Files of ours whose header is damaged. Their records carry the generation, so nothing is lost.
    pub(crate) bad_headers: Vec<PathBuf>,
    /// Files with a matching name that are not ours.
    pub(crate) foreign: Vec<PathBuf>,
    pub(crate) next_number: u64,
}

pub(crate) fn path_of(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number:06}.log"))
}

fn encode_header(generation: u64, size: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(BLOCK as usize);
    out.put(MAGIC);
    out.put_u32(VERSION);
    out.put_u32(0);
    out.put_u64(generation);
    out.put_u64(size);
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out.resize(BLOCK as usize, 0);
    out
}

enum Header {
    Generation(u64),
    /// A header of the previous format version.
    Previous(u64),
    Blank,
    /// Not a header, or a damaged one: the records decide.
    Bad,
}

fn decode_header(bytes: &[u8], path: &Path) -> Result<Header, OpenError> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Header::Blank);
    }
    let mut input = Input::new(bytes);
    let mut read = || {
        let (magic, version) = (input.bytes(8)?, input.u32()?);
        input.bytes(4)?;
        let generation = input.u64()?;
        input.u64()?;
        let whole = input.u32()? == crc32c::crc32c(bytes.get(..32)?);
        (magic == MAGIC && whole).then_some((version, generation))
    };
    // The checksum first: a flipped bit in the version is no other version.
    let Some((found, generation)) = read() else { return Ok(Header::Bad) };
    match found {
        VERSION => Ok(Header::Generation(generation)),
        previous_format::VERSION => Ok(Header::Previous(generation)),
        _ => Err(OpenError::unknown_version(&path.display().to_string(), found, VERSION)),
    }
}

impl Found {
    /// Classifies a file without a readable header by its records, so that it is never taken for blank.
    fn add_without_header(&mut self, file: LogFile, path: PathBuf, is_blank: bool) -> io::Result<()> {
        if let Some(generation) = LogReader::new(&file).newest_generation()? {
            self.files.push(LogFile { generation, ..file });
            self.bad_headers.push(path);
        } else if let Some(generation) = previous_format::reader(&file).newest_generation()? {
            self.previous.push(LogFile { generation, ..file });
            self.bad_headers.push(path);
        } else if is_blank {
            self.unused.push(file);
        } else {
            self.foreign.push(path);
        }
        Ok(())
    }

    /// The greatest generation of any file.
    pub(crate) fn newest_generation(&self) -> u64 {
        let newest = |files: &[LogFile]| files.last().map_or(0, |file| file.generation);
        newest(&self.files).max(newest(&self.previous))
    }
}

/// Reads the log's folder.
pub(crate) fn find(disk: &dyn Disk, folder: &Path) -> Result<Found, OpenError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |source| OpenError::Io { path, source }
    };
    let mut found = Found {
        files: Vec::new(),
        previous: Vec::new(),
        unused: Vec::new(),
        bad_headers: Vec::new(),
        foreign: Vec::new(),
        next_number: 0,
    };
    for entry in disk.list(folder).map_err(io(folder))? {
        let number = entry.name.strip_suffix(".log").and_then(|digits| digits.parse::<u64>().ok());
        let Some(number) = number.filter(|_| !entry.is_dir) else { continue };
        let path = folder.join(&entry.name);
        found.next_number = found.next_number.max(number + 1);
        let file = disk.open(&path).map_err(io(&path))?;
        let size = file.len().map_err(io(&path))?;
        let mut header = vec![0; 64];
        let got = file.pread(0, &mut header).map_err(io(&path))?;
        header.truncate(got);
        let header = decode_header(&header, &path)?;
        let file = LogFile { number, generation: 0, size, file };
        match header {
            Header::Generation(generation) => found.files.push(LogFile { generation, ..file }),
            Header::Previous(generation) => found.previous.push(LogFile { generation, ..file }),
            Header::Blank | Header::Bad => {
                let is_blank = matches!(header, Header::Blank);
                found.add_without_header(file, path.clone(), is_blank).map_err(io(&path))?;
            }
        }
    }
    found.files.sort_by_key(|file| file.generation);
    found.previous.sort_by_key(|file| file.generation);
    Ok(found)
}

/// Parameters for opening the log.
pub(crate) struct OpenLog {
    pub(crate) folder: PathBuf,
    pub(crate) file_bytes: u64,
    pub(crate) first_file_bytes: u64,
    pub(crate) found: Found,
    pub(crate) floor: LogPoint,
    pub(crate) next_lsn: u64,
    /// The end of the log found by the scan: (generation, position).
    pub(crate) end: (u64, u64),
}

impl CommitLog {
    /// Opens the log for writing in a new file use; files at or past the floor stay live.
    pub(crate) fn open(disk: Arc<dyn Disk>, open: OpenLog) -> io::Result<Self> {
        let OpenLog { folder, file_bytes, first_file_bytes, found, floor, next_lsn, end } = open;
        let file_bytes = file_bytes.min(MAX_FILE);
        let newest = found.newest_generation().max(floor.generation);
        let (live, free): (Vec<_>, Vec<_>) =
            found.files.into_iter().partition(|file| file.generation >= floor.generation);
        let mut files = Files {
            live: live.into(),
            spare: None,
            free: free.into_iter().chain(found.unused).collect(),
            next_number: found.next_number,
            next_generation: newest + 1,
        };
        // Any existing file is quicker than a new one.
        files.free.sort_by_key(|file| file.size);
        let reuse = files.free.pop().filter(|file| file.size >= first_file_bytes.min(file_bytes));
        let first = match reuse {
            Some(file) => file,
            None => create_file(&*disk, &folder, &mut files, first_file_bytes.min(file_bytes))?,
        };
        let first = begin_use(first, &mut files)?;
        files.live.push_back(first.clone());
        let live_count = files.live.len();
        let point = LogPoint { generation: first.generation, position: BLOCK, next_lsn };
        let writer = Writer { file: first, position: BLOCK, next_lsn, end, headers: Vec::new() };
        Ok(Self {
            folder,
            disk,
            file_bytes,
            writer: Mutex::new(writer),
            files: Mutex::new(files),
            durable: Mutex::new(point),
            live: AtomicUsize::new(live_count),
        })
    }

    /// Ensures that the next group fits, switching files if it must. The only step of a commit that may fail for lack
    /// of space; nothing is lost then, the group waits.
    pub(crate) fn ensure_space(&self, group: &[Staged]) -> io::Result<()> {
        let mut writer = self.writer.locked();
        let bytes = group_bytes(group);
        if writer.position + bytes > writer.file.size {
            self.switch_file(&mut writer, bytes)?;
        }
        Ok(())
    }

    /// Writes one group and syncs it; space was ensured. Returns the bytes written.
    pub(crate) fn commit(&self, group: &[Staged]) -> io::Result<u64> {
        let mut writer = self.writer.locked();
        let Writer { file, position, next_lsn, end, headers } = &mut *writer;
        let start = *position;
        assert!(start + group_bytes(group) <= file.size, "commit without ensure_space");
        headers.clear();
        let mut stamp = Stamp { generation: file.generation, lsn: *next_lsn, group: start };
        let first = start == BLOCK;
        if first {
            encode_record(headers, &begin_record(*end), stamp, 0, 0);
        }
        for staged in group {
            encode_record(headers, &staged.record, stamp, staged.payload.len(), staged.payload_crc);
            stamp.lsn += u64::from(staged.record.kind.has_lsn());
        }
        let mut bufs = Vec::with_capacity(group.len() * 2 + 2);
        let (begin, headers) = headers.split_at(if first { RECORD_HEADER } else { 0 });
        if first {
            bufs.push(IoSlice::new(begin));
        }
        let mut bytes = begin.len() as u64;
        for (header, staged) in headers.chunks(RECORD_HEADER).zip(group) {
            bytes += staged.bytes() as u64;
            bufs.push(IoSlice::new(header));
            if !staged.payload.is_empty() {
                bufs.push(IoSlice::new(&staged.payload));
            }
        }
        // Whole blocks only: a partial page of an uncached file would have to be read first.
        let block_end = (start + bytes).next_multiple_of(BLOCK).min(file.size);
        let padding = usize::try_from(block_end - start - bytes).expect("under one block");
        if padding > 0 {
            bufs.push(IoSlice::new(&ZEROS[..padding]));
        }
        file.file.pwritev(start, &bufs)?;
        file.file.sync_data()?;
        *next_lsn = stamp.lsn;
        *position = block_end;
        *end = (file.generation, start + bytes);
        *self.durable.locked() =
            LogPoint { generation: file.generation, position: block_end, next_lsn: stamp.lsn };
        Ok(bytes)
    }

    fn switch_file(&self, writer: &mut Writer, bytes: u64) -> io::Result<()> {
        let mut files = self.files.locked();
        let spare = match files.spare.take() {
            Some(spare) if spare.size >= BLOCK + bytes => spare,
            _ => self.make_spare(&mut files, self.file_bytes.max((BLOCK + bytes).next_multiple_of(BLOCK)))?,
        };
        files.live.push_back(spare.clone());
        self.live.store(files.live.len(), Ordering::Relaxed);
        writer.file = spare;
        writer.position = BLOCK;
        Ok(())
    }

    fn make_spare(&self, files: &mut Files, size: u64) -> io::Result<LogFile> {
        let at = files.free.iter().position(|file| file.size >= size);
        let file = match at {
            Some(at) => files.free.swap_remove(at),
            None => create_file(&*self.disk, &self.folder, files, size)?,
        };
        begin_use(file, files)
    }

    /// Prepares the next file off the commit path, once the current one is half full.
    pub(crate) fn maybe_make_spare(&self) -> io::Result<bool> {
        let point = *self.durable.locked();
        let mut files = self.files.locked();
        let Some(current) = files.live.back() else { return Ok(false) };
        if files.spare.is_some()
            || (current.generation == point.generation && point.position < current.size / 2)
        {
            return Ok(false);
        }
        files.spare = Some(self.make_spare(&mut files, self.file_bytes)?);
        Ok(true)
    }

    /// Everything before this point is durable.
    pub(crate) fn durable_point(&self) -> LogPoint {
        *self.durable.locked()
    }

    /// Number of live files.
    pub(crate) fn live_count(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Approximate bytes of records past a floor.
    pub(crate) fn bytes_since(&self, floor: LogPoint) -> u64 {
        let point = *self.durable.locked();
        let files = self.files.locked();
        let whole: u64 = files
            .live
            .iter()
            .filter(|file| file.generation >= floor.generation && file.generation < point.generation)
            .map(|file| file.size)
            .sum();
        let skipped = if files.live.iter().any(|file| file.generation == floor.generation) {
            floor.position
        } else {
            0
        };
        (whole + point.position).saturating_sub(skipped.max(BLOCK))
    }

    /// Recycles every file below the floor of a durable checkpoint.
    pub(crate) fn recycle(&self, floor: LogPoint) -> io::Result<()> {
        let mut files = self.files.locked();
        while files.live.front().is_some_and(|file| file.generation < floor.generation) {
            let Some(file) = files.live.pop_front() else { break };
            if file.size == self.file_bytes && files.free.len() < 4 {
                files.free.push(file);
            } else {
                self.disk.remove(&path_of(&self.folder, file.number))?;
            }
        }
        self.live.store(files.live.len(), Ordering::Relaxed);
        Ok(())
    }
}

/// Bytes that a group needs: the group, and the Begin record of a file use.
fn group_bytes(group: &[Staged]) -> u64 {
    group.iter().map(|staged| staged.bytes() as u64).sum::<u64>() + RECORD_HEADER as u64
}

/// The first record of a file use: the end of the log before it.
fn begin_record((generation, position): (u64, u64)) -> Record {
    let number = |value: u64| i64::try_from(value).expect("generations and positions are counted up");
    Record { last: number(position), ..Record::of_log(Kind::Begin, number(generation)) }
}

fn create_file(disk: &dyn Disk, folder: &Path, files: &mut Files, size: u64) -> io::Result<LogFile> {
    let number = files.next_number;
    let path = path_of(folder, number);
    let file = disk.create(&path)?;
    files.next_number += 1;
    let prewritten = prewrite(&*file, size).and_then(|()| disk.sync_dir(folder));
    if let Err(error) = prewritten {
        // Most likely no space: leave nothing behind, the caller may retry later.
        disk.remove(&path)?;
        return Err(error);
    }
    Ok(LogFile { number, generation: 0, size, file })
}

fn prewrite(file: &dyn DiskFile, size: u64) -> io::Result<()> {
    let zeros = vec![0; PREWRITE_STEP.min(usize::try_from(size).unwrap_or(PREWRITE_STEP))];
    let mut position = 0;
    while position < size {
        let step = usize::try_from(size - position).map_or(zeros.len(), |rest| rest.min(zeros.len()));
        write_at(file, position, &zeros[..step])?;
        position += step as u64;
        if position % (16 << 20) == 0 {
            file.sync_data()?;
        }
    }
    file.sync_data()
}

/// Gives a file its next generation; durable before the first record of that generation can be written.
fn begin_use(mut file: LogFile, files: &mut Files) -> io::Result<LogFile> {
    file.generation = files.next_generation;
    files.next_generation += 1;
    write_at(&*file.file, 0, &encode_header(file.generation, file.size))?;
    file.file.sync_data()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::super::scan;
    use super::*;
    use crate::disk::SimDisk;
    use crate::types::JournalId;

    fn record(base: i64) -> Record {
        Record::control(Kind::Epoch, JournalId { incarnation: 1, part: 1 }, base)
    }

    /// A file of generation 2 with these (generation, LSN) records, each a group of one block.
    fn file_with(records: &[(u64, u64)]) -> LogFile {
        let disk = SimDisk::new();
        let file = disk.create(Path::new("/log")).unwrap();
        write_at(&*file, 0, &encode_header(2, 1 << 20)).unwrap();
        for (at, (generation, lsn)) in records.iter().enumerate() {
            let group = (at as u64 + 1) * BLOCK;
            let stamp = Stamp { generation: *generation, lsn: *lsn, group };
            let mut bytes = Vec::new();
            if at == 0 {
                encode_record(&mut bytes, &begin_record((0, 0)), stamp, 0, 0);
            }
            encode_record(&mut bytes, &record(7), stamp, 0, 0);
            write_at(&*file, group, &bytes).unwrap();
        }
        LogFile { number: 0, generation: 2, size: 1 << 20, file }
    }

    /// The LSNs that are read back, and the position of damage.
    fn lsns(files: &[LogFile]) -> (Vec<u64>, Option<u64>) {
        let mut seen = Vec::new();
        let floor = LogPoint { generation: 0, position: 0, next_lsn: 5 };
        let scan = scan::scan(files, floor, &mut |entry, _| {
            seen.push(entry.lsn);
            Ok(())
        })
        .unwrap();
        assert_eq!(scan.next_lsn, 5 + seen.len() as u64);
        (seen, scan.damage.map(|damage| damage.position))
    }

    #[test]
    fn stale_bytes_end_the_log_unless_a_later_group_follows() {
        let after_one = BLOCK + 2 * RECORD_HEADER as u64;
        assert_eq!(lsns(&[file_with(&[(2, 5), (2, 6), (2, 7)])]), (vec![5, 6, 7], None));
        assert_eq!(lsns(&[file_with(&[(2, 5), (1, 6), (1, 7)])]), (vec![5], None), "an older generation");
        assert_eq!(lsns(&[file_with(&[(2, 5), (3, 6)])]), (vec![5], None), "a generation that never was");
        assert_eq!(lsns(&[file_with(&[(2, 5), (1, 6), (2, 7)])]), (vec![5], Some(after_one)));
    }

    #[test]
    fn lsn_gap_is_damage() {
        let after_one = BLOCK + 2 * RECORD_HEADER as u64;
        assert_eq!(lsns(&[file_with(&[(2, 5), (2, 7)])]), (vec![5], Some(after_one)));
        assert_eq!(lsns(&[file_with(&[(2, 5), (2, 5)])]), (vec![5], Some(after_one)));
        assert_eq!(lsns(&[file_with(&[(2, 6)])]), (vec![], Some(BLOCK)));
    }

    #[test]
    fn file_with_unreadable_header_is_not_blank() {
        let disk = SimDisk::new();
        let folder = Path::new("/commit");
        disk.create_dir(folder).unwrap();
        let make = |number: u64, bytes: &[u8]| {
            let file = disk.create(&path_of(folder, number)).unwrap();
            write_at(&*file, 0, &[0; 3 * BLOCK as usize]).unwrap();
            write_at(&*file, 0, bytes).unwrap();
            file
        };
        make(0, &[]);
        let mut bad = encode_header(4, 3 * BLOCK);
        bad[20] ^= 1;
        let used = make(1, &bad);
        let mut bytes = Vec::new();
        let stamp = Stamp { generation: 3, lsn: 9, group: 2 * BLOCK };
        encode_record(&mut bytes, &record(7), stamp, 0, 0);
        write_at(&*used, 2 * BLOCK, &bytes).unwrap();
        make(2, b"not a commit-log file");
        let found = find(&disk, folder).unwrap();
        let numbers = |files: &[LogFile]| files.iter().map(|file| file.number).collect::<Vec<_>>();
        assert_eq!((numbers(&found.unused), numbers(&found.files)), (vec![0], vec![1]));
        assert_eq!(found.files[0].generation, 3, "the records say which");
        assert_eq!((found.bad_headers, found.foreign), (vec![path_of(folder, 1)], vec![path_of(folder, 2)]));
    }

    #[test]
    fn golden_file_header() {
        let hex: String = encode_header(3, 4096)[..40].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "4d4f494d4c4f470a0200000000000000030000000000000000100000000000005eb4371d00000000");
    }
}
