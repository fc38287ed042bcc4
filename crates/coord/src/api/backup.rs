//! A snapshot as a file: what `etcdctl snapshot save` writes and what a cluster is restored from.
//!
//! ```text
//!  the snapshot's own frames │ zeros │ length of the zeros and itself (4 bytes) │ SHA-256 of all before (32 bytes)
//! ```
//!
//! etcdctl takes a file for complete when its length is 32 more than a multiple of 512, as a database of pages with a
//! checksum at the end is; the zeros make that so.

use bytes::{Bytes, BytesMut};
use sha2::{Digest as _, Sha256};

use crate::snapshot::{Restorer, SnapshotError};
use crate::state::State;

const PAGE_BYTES: usize = 512;
const PADDING_LENGTH_BYTES: usize = 4;
const CHECKSUM_BYTES: usize = 32;

/// A piece of the file.
pub(super) struct Piece {
    pub(super) bytes: Bytes,
    /// Whether it is the checksum.
    pub(super) is_last: bool,
}

/// Turns the pieces of a snapshot into the pieces of a file.
pub(super) struct Backup<I> {
    /// `None` when everything but the checksum was given.
    pieces: Option<I>,
    digest: Option<Sha256>,
    length: usize,
}

impl<I, E> Backup<I>
where
    I: Iterator<Item = Result<Bytes, E>>,
{
    pub(super) fn new(pieces: I) -> Self {
        Self { pieces: Some(pieces), digest: Some(Sha256::new()), length: 0 }
    }

    /// The next piece. An error is the last.
    pub(super) fn next(&mut self) -> Option<Result<Piece, E>> {
        let digest = self.digest.as_mut()?;
        if let Some(pieces) = &mut self.pieces {
            let bytes = match pieces.next() {
                Some(Ok(bytes)) => bytes,
                Some(Err(error)) => {
                    self.digest = None;
                    return Some(Err(error));
                }
                None => {
                    self.pieces = None;
                    padding_after(self.length)
                }
            };
            digest.update(&bytes);
            self.length += bytes.len();
            return Some(Ok(Piece { bytes, is_last: false }));
        }
        let checksum = self.digest.take()?.finalize();
        Some(Ok(Piece { bytes: Bytes::copy_from_slice(&checksum), is_last: true }))
    }
}

fn padding_after(length: usize) -> Bytes {
    let padding = (length + PADDING_LENGTH_BYTES).next_multiple_of(PAGE_BYTES) - length;
    let mut bytes = BytesMut::zeroed(padding - PADDING_LENGTH_BYTES);
    bytes.extend_from_slice(&u32::try_from(padding).unwrap_or_default().to_be_bytes());
    bytes.freeze()
}

/// Why a file is no snapshot to restore from.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// It is too short, or not of whole pages.
    #[error("the file is not complete, or no snapshot of this store")]
    Incomplete,
    /// Its content is not what was written.
    #[error("the checksum at the end of the file is not that of its content")]
    Checksum,
    /// The frames inside are wrong.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
}

/// The state that a snapshot file holds, when the file is whole.
pub fn read_backup(file: &[u8]) -> Result<State, BackupError> {
    let content_length = file.len().checked_sub(CHECKSUM_BYTES).ok_or(BackupError::Incomplete)?;
    let (content, checksum) = file.split_at(content_length);
    if !content_length.is_multiple_of(PAGE_BYTES) {
        return Err(BackupError::Incomplete);
    }
    if Sha256::digest(content)[..] != *checksum {
        return Err(BackupError::Checksum);
    }
    let padding = content.last_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes) as usize);
    let frames = content_length.checked_sub(padding).ok_or(BackupError::Incomplete)?;
    let mut restorer = Restorer::new();
    restorer.push(&content[..frames])?;
    Ok(restorer.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Command, Op, PutRequest};
    use crate::{RangeRequest, SpaceId};

    fn file_of(state: &mut State) -> Vec<u8> {
        let mut cursor = state.begin_snapshot(100);
        let pieces = std::iter::from_fn(|| cursor.next_chunk(state).transpose());
        let mut backup = Backup::new(pieces);
        let mut file = Vec::new();
        while let Some(piece) = backup.next() {
            let piece = piece.unwrap();
            assert_eq!(piece.is_last, piece.bytes.len() == CHECKSUM_BYTES && file.len() % PAGE_BYTES == 0);
            file.extend_from_slice(&piece.bytes);
        }
        file
    }

    #[test]
    fn a_file_is_whole_pages_and_a_checksum_and_can_be_restored() {
        let mut state = State::new();
        for keys in 0..40 {
            let put = PutRequest::new(format!("key-{keys}"), vec![b'x'; keys]);
            state.apply(keys as u64 + 1, Command::client(Op::Put(put)));
            let file = file_of(&mut state);
            assert_eq!(file.len() % PAGE_BYTES, CHECKSUM_BYTES);
            let restored = read_backup(&file).unwrap();
            assert_eq!(restored.revision(SpaceId::User), state.revision(SpaceId::User));
            let everything = RangeRequest::between(&b"\0"[..], &b"\0"[..]);
            assert_eq!(restored.range(&everything), state.range(&everything));
        }
    }

    #[test]
    fn a_damaged_file_is_refused() {
        let mut state = State::new();
        state.apply(1, Command::client(Op::Put(PutRequest::new("k", "v"))));
        let file = file_of(&mut state);
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(matches!(read_backup(&damaged), Err(BackupError::Checksum)), "byte {at}");
        }
        for length in 0..file.len() {
            assert!(read_backup(&file[..length]).is_err(), "{length} bytes");
        }
    }
}
