//! The compaction state: what compaction has removed for good, kept in a small file beside the segments.
//!
//! A tombstone or a transaction marker that compaction removes is missing for replicas that have not fetched it yet: a
//! replica that was offline meanwhile still holds the records it ended. So the log records the offset below which such
//! frames may be missing ([`Cleaned::below`]), and a replica whose log ends below that is rebuilt from scratch. The
//! file is durable before the first such frame is removed.
//!
//! It also records when offsets were first compacted by this node's clock: removals wait for that time, not for the
//! timestamps that clients gave their records.
//!
//! The file: magic, version, incarnation and part of the journal, `below`, count of rounds, (until, at) of each,
//! CRC32C. An unreadable file counts as "everything may be missing".

use std::io;

use bytes::{Buf, BufMut};

use super::Journal;
use crate::codec::Locked;
use crate::disk::{create_dirs, read_all, replace_file};

const NAME: &str = "cleaned";
const MAGIC: u32 = 0x4d43_4c4e; // "MCLN"
const VERSION: u16 = 1;
/// Maximum number of rounds; older ones are merged, with the later of their times.
const MAX_ROUNDS: usize = 64;

/// The compaction state of a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Below this offset tombstones and transaction markers may be missing.
    pub below: i64,
    /// (until, at): offsets below `until`, and not below the previous round, were first compacted at this wall-clock
    /// time.
    rounds: Vec<(i64, i64)>,
}

impl Cleaned {
    /// Records a compaction of everything below `until`. Returns true if part of it was compacted for the first time.
    pub fn note_round(&mut self, until: i64, now_ms: i64) -> bool {
        if self.rounds.last().is_some_and(|(known, _)| *known >= until) {
            return false;
        }
        self.rounds.push((until, now_ms));
        if self.rounds.len() > MAX_ROUNDS {
            let (_, first_ms) = self.rounds.remove(0);
            self.rounds[0].1 = self.rounds[0].1.max(first_ms);
        }
        true
    }

    /// The offset below which everything was first compacted at `ms` or earlier.
    pub fn compacted_by(&self, ms: i64) -> i64 {
        let old = self.rounds.iter().take_while(|(_, at)| *at <= ms);
        old.last().map_or(0, |(until, _)| *until)
    }

    fn encode(&self, journal: &Journal) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + 16 * self.rounds.len());
        out.put_u32(MAGIC);
        out.put_u16(VERSION);
        out.put_u128(journal.id.incarnation);
        out.put_u32(journal.id.part);
        out.put_i64(self.below);
        out.put_u32(u32::try_from(self.rounds.len()).expect("there are few rounds"));
        for (until, at_ms) in &self.rounds {
            out.put_i64(*until);
            out.put_i64(*at_ms);
        }
        out.put_u32(crc32c::crc32c(&out));
        out
    }

    fn decode(bytes: &[u8], journal: &Journal) -> Option<Self> {
        let (mut body, mut crc) = bytes.split_last_chunk::<4>().map(|(body, crc)| (body, &crc[..]))?;
        const FIXED: usize = 4 + 2 + 16 + 4 + 8 + 4;
        if body.len() < FIXED || crc32c::crc32c(body) != crc.get_u32() {
            return None;
        }
        let known = body.get_u32() == MAGIC && body.get_u16() == VERSION;
        let same = body.get_u128() == journal.id.incarnation && body.get_u32() == journal.id.part;
        let (below, count) = (body.get_i64(), body.get_u32() as usize);
        if !known || !same || count > MAX_ROUNDS || body.len() != 16 * count {
            return None;
        }
        let rounds = (0..count).map(|_| (body.get_i64(), body.get_i64())).collect();
        Some(Self { below, rounds })
    }
}

impl Journal {
    /// The compaction state of this log, including that of the logs it was copied from.
    pub fn cleaned(&self) -> Cleaned {
        self.with_cleaned(|cleaned| cleaned.clone())
    }

    /// Below this offset tombstones and transaction markers may be missing.
    pub fn cleaned_below(&self) -> i64 {
        self.with_cleaned(|cleaned| cleaned.below)
    }

    fn with_cleaned<T>(&self, read: impl FnOnce(&Cleaned) -> T) -> T {
        let mut cleaned = self.cleaned.locked();
        read(cleaned.get_or_insert_with(|| self.load_cleaned()))
    }

    fn load_cleaned(&self) -> Cleaned {
        let path = self.folder_path().join(NAME);
        let bytes = self.store.disk.open(&path).and_then(|file| read_all(&*file));
        match bytes.map(|bytes| Cleaned::decode(&bytes, self)) {
            Ok(Some(cleaned)) => cleaned,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Cleaned::default(),
            Ok(None) | Err(_) => {
                tracing::warn!(journal = %self.id, "compaction state unreadable; replicas behind this log are rebuilt");
                Cleaned { below: self.end(), rounds: Vec::new() }
            }
        }
    }

    /// Records what compaction has removed, or is about to; durable when it returns. `below` never decreases.
    pub fn note_cleaned(&self, cleaned: Cleaned) -> io::Result<()> {
        let mut known = self.cleaned.locked();
        let before = known.get_or_insert_with(|| self.load_cleaned());
        let next = Cleaned { below: cleaned.below.max(before.below), ..cleaned };
        if next == *before {
            return Ok(());
        }
        let dirs = create_dirs(&*self.store.disk, &self.store.dir, self.folder.as_ref())?;
        for dir in &dirs {
            self.store.disk.sync_dir(dir)?;
        }
        replace_file(&*self.store.disk, &self.folder_path().join(NAME), &next.encode(self))?;
        *before = next;
        Ok(())
    }
}
