//! The snapshot file format: written by `etcdctl snapshot save`, and read to restore a cluster.
//!
//! ```text
//!  an etcd database (crate::bolt): whole pages │ SHA-256 of everything before (32 bytes)
//! ```
//!
//! etcdctl accepts a file as complete if its length is 32 more than a multiple of 512.

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use crate::bolt::{self, BoltError};
use crate::state::State;

const SECTOR_BYTES: usize = 512;
const CHECKSUM_BYTES: usize = 32;

/// A chunk of the file.
pub(super) struct Chunk {
    pub(super) bytes: Bytes,
    /// True for the checksum.
    pub(super) is_last: bool,
}

/// Turns the chunks of a database into the chunks of a snapshot file.
pub(super) struct Backup<I> {
    chunks: I,
    /// `None` after the checksum was returned.
    digest: Option<Sha256>,
}

impl<I, E> Backup<I>
where
    I: Iterator<Item = Result<Bytes, E>>,
{
    pub(super) fn new(chunks: I) -> Self {
        Self { chunks, digest: Some(Sha256::new()) }
    }

    pub(super) fn database(&self) -> &I {
        &self.chunks
    }

    /// The next chunk. An error ends the file.
    pub(super) fn next(&mut self) -> Option<Result<Chunk, E>> {
        let digest = self.digest.as_mut()?;
        match self.chunks.next() {
            Some(Ok(bytes)) => {
                digest.update(&bytes);
                Some(Ok(Chunk { bytes, is_last: false }))
            }
            Some(Err(error)) => {
                self.digest = None;
                Some(Err(error))
            }
            None => {
                let checksum = self.digest.take()?.finalize();
                Some(Ok(Chunk { bytes: Bytes::copy_from_slice(&checksum), is_last: true }))
            }
        }
    }
}

/// Why a file cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// Too short, or not whole pages.
    #[error("the file is incomplete or not a snapshot")]
    Incomplete,
    /// The checksum of the content is wrong.
    #[error("snapshot file checksum mismatch")]
    Checksum,
    /// The database inside is invalid.
    #[error(transparent)]
    Database(#[from] BoltError),
}

/// The state in a complete snapshot file. The file may be ours or etcd's.
pub fn read_backup(file: &[u8]) -> Result<State, BackupError> {
    let content_length = file.len().checked_sub(CHECKSUM_BYTES).ok_or(BackupError::Incomplete)?;
    let (content, checksum) = file.split_at(content_length);
    if !content_length.is_multiple_of(SECTOR_BYTES) {
        return Err(BackupError::Incomplete);
    }
    if Sha256::digest(content)[..] != *checksum {
        return Err(BackupError::Checksum);
    }
    Ok(bolt::read(content)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bolt::Step;
    use crate::request::{Command, Op, PutRequest};
    use crate::{RangeRequest, SpaceId};

    fn file_of(state: &mut State) -> Vec<u8> {
        let mut cursor = state.begin_bolt();
        let chunks = std::iter::from_fn(|| match cursor.step(state) {
            Ok(Step::Measuring) => Some(Ok(Bytes::new())),
            Ok(Step::Chunk(bytes)) => Some(Ok(bytes)),
            Ok(Step::Done) => None,
            Err(error) => Some(Err(error)),
        });
        let mut backup = Backup::new(chunks);
        let mut file = Vec::new();
        while let Some(piece) = backup.next() {
            let piece = piece.unwrap();
            assert_eq!(piece.is_last, piece.bytes.len() == CHECKSUM_BYTES && file.len() % SECTOR_BYTES == 0);
            file.extend_from_slice(&piece.bytes);
        }
        file
    }

    #[test]
    fn snapshot_file_is_whole_pages_and_a_checksum_and_restores() {
        let mut state = State::new();
        for keys in 0..40 {
            let put = PutRequest::new(format!("key-{keys}"), vec![b'x'; keys]);
            state.apply(keys as u64 + 1, Command::client(Op::Put(put)));
            let file = file_of(&mut state);
            assert_eq!(file.len() % SECTOR_BYTES, CHECKSUM_BYTES);
            let restored = read_backup(&file).unwrap();
            assert_eq!(restored.revision(SpaceId::User), state.revision(SpaceId::User));
            let everything = RangeRequest::between(&b"\0"[..], &b"\0"[..]);
            assert_eq!(restored.range(&everything), state.range(&everything));
        }
    }

    #[test]
    fn damaged_snapshot_file_is_refused() {
        let mut state = State::new();
        state.apply(1, Command::client(Op::Put(PutRequest::new("k", "v"))));
        let file = file_of(&mut state);
        for at in (0..file.len()).step_by(7) {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(matches!(read_backup(&damaged), Err(BackupError::Checksum)), "byte {at}");
        }
        for length in (0..file.len()).step_by(11) {
            assert!(read_backup(&file[..length]).is_err(), "{length} bytes");
        }
    }
}
