//! Hand-off storage: the state that an owner records for the next owner of a partition.
//!
//! | size | where |
//! |---|---|
//! | small | inline in the assignment record |
//! | over [`HandoffOptions::compress_over`] | inline, compressed (LZ4) |
//! | over [`HandoffOptions::refer_over`] after that | in separate chunks; the record holds a reference |
//! | over [`HandoffOptions::max_bytes`] | rejected |
//!
//! Invariants: chunks are written before the record that refers to them, under a unique prefix, and deleted
//! after the record refers to other chunks; a reader verifies length and checksum. A record therefore never
//! refers to a partial write, and a crash leaves at most orphaned chunks, which the next hand-off of the
//! partition deletes.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::backoff;
use crate::keys;
use crate::repository::{BoxFuture, Expect, RepositoryError, StateRepository};

/// Timeout for the write or read of one chunk.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);

/// The state that an owner records for the next owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handoff {
    /// The checkpoint of the work; opaque to the library.
    pub checkpoint: Bytes,
    /// The stage of the work; for operators and for the handler.
    pub stage_state: String,
    /// Time of the last processed work item, by the owner's wall clock.
    pub last_processed_at: i64,
}

/// A hand-off as stored in the assignment record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StoredHandoff {
    /// The checkpoint in the format given by `encoding`; empty for a checkpoint stored by reference.
    pub checkpoint: String,
    /// `utf8`, `base64`, `lz4` (then base64), or `reference`.
    pub encoding: String,
    /// The stage of the work.
    pub stage_state: String,
    /// Time of the last processed work item, by the owner's wall clock.
    pub last_processed_at: i64,
    /// Location of a checkpoint that is stored by reference.
    pub reference: Option<Reference>,
}

/// Location of a checkpoint that is stored outside of the assignment record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Reference {
    /// Key prefix of the chunks.
    pub key: String,
    /// Number of chunks.
    pub pieces: usize,
    /// Uncompressed length in bytes.
    pub bytes: usize,
    /// Compressed length in bytes.
    pub stored_bytes: usize,
    /// CRC32C of the compressed bytes.
    pub crc32c: u32,
}

/// Failure to record or to read a hand-off.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// The hand-off exceeds the size limit.
    #[error("a hand-off of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Size of the hand-off.
        bytes: usize,
        /// The configured limit.
        limit: usize,
    },
    /// The stored bytes do not match the recorded length, checksum or encoding.
    #[error("the hand-off is damaged: {0}")]
    Damaged(String),
    /// Another member owns the partition: the caller's record is stale.
    #[error("the partition {0} has another owner")]
    NotOwner(String),
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// Size thresholds and expiry of hand-offs.
#[derive(Clone, Debug)]
pub struct HandoffOptions {
    /// Compress a checkpoint above this size, in bytes.
    pub compress_over: usize,
    /// Store a checkpoint by reference above this size, in bytes.
    pub refer_over: usize,
    /// Reject a hand-off above this size, in bytes.
    pub max_bytes: usize,
    /// Maximum age of a hand-off, by the wall clocks of the writer and of the reader; an older hand-off is
    /// not used. `None` means no expiry: a wall clock jump then loses no hand-off. Must be longer than the
    /// period from which the work can be reprocessed.
    pub ttl: Option<Duration>,
}

impl Default for HandoffOptions {
    fn default() -> Self {
        Self { compress_over: 4 << 10, refer_over: 128 << 10, max_bytes: 256 << 20, ttl: None }
    }
}

/// Storage for checkpoints that are too large for a record: an object store, a shared folder. The default
/// stores them in the state repository, in chunks.
pub trait BlobStore: Send + Sync {
    /// Writes one chunk. Idempotent.
    fn put<'a>(&'a self, key: &'a str, piece: Bytes) -> BoxFuture<'a, Result<(), RepositoryError>>;
    /// Reads one chunk.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Bytes>, RepositoryError>>;
    /// Deletes every chunk under `prefix` except those under `keep`.
    fn sweep<'a>(&'a self, prefix: &'a str, keep: &'a str) -> BoxFuture<'a, Result<(), RepositoryError>>;
}

/// Chunks in the state repository.
struct RepositoryBlobs(Arc<dyn StateRepository>);

impl BlobStore for RepositoryBlobs {
    fn put<'a>(&'a self, key: &'a str, piece: Bytes) -> BoxFuture<'a, Result<(), RepositoryError>> {
        Box::pin(async move {
            // Putting the same bytes twice is idempotent, so an unknown outcome is retried.
            let put = || self.0.compare_and_swap(key, Expect::Any, Some(piece.clone()), None);
            backoff::read(CHUNK_TIMEOUT, put).await.map(drop)
        })
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Bytes>, RepositoryError>> {
        Box::pin(async move {
            Ok(backoff::read(CHUNK_TIMEOUT, || self.0.get(key)).await?.map(|entry| entry.value))
        })
    }

    fn sweep<'a>(&'a self, prefix: &'a str, keep: &'a str) -> BoxFuture<'a, Result<(), RepositoryError>> {
        Box::pin(async move {
            for entry in self.0.list(prefix).await?.1 {
                if keep.is_empty() || !entry.key.starts_with(keep) {
                    self.0.compare_and_swap(&entry.key, Expect::Any, None, None).await?;
                }
            }
            Ok(())
        })
    }
}

/// Chunk size of a large hand-off: well below the request size limit.
const CHUNK_BYTES: usize = 512 << 10;

/// Writes and reads hand-offs. Cheap to clone.
#[derive(Clone)]
pub struct HandoffStore {
    blobs: Arc<dyn BlobStore>,
    options: HandoffOptions,
}

impl HandoffStore {
    /// Stores large hand-offs in the state repository, in chunks.
    pub fn new(repository: Arc<dyn StateRepository>, options: HandoffOptions) -> Self {
        Self { blobs: Arc::new(RepositoryBlobs(repository)), options }
    }

    /// Stores large hand-offs in `blobs`.
    pub fn with_blobs(blobs: Arc<dyn BlobStore>, options: HandoffOptions) -> Self {
        Self { blobs, options }
    }

    /// Encodes a hand-off for its record. A large hand-off is stored when this returns.
    pub async fn save(
        &self,
        group: &str,
        partition: &str,
        handoff: &Handoff,
    ) -> Result<StoredHandoff, HandoffError> {
        let body = &handoff.checkpoint;
        if body.len() > self.options.max_bytes {
            return Err(HandoffError::TooLarge { bytes: body.len(), limit: self.options.max_bytes });
        }
        let mut stored = StoredHandoff {
            stage_state: handoff.stage_state.clone(),
            last_processed_at: handoff.last_processed_at,
            ..StoredHandoff::default()
        };
        if body.len() <= self.options.compress_over {
            (stored.encoding, stored.checkpoint) = match std::str::from_utf8(body) {
                Ok(text) => ("utf8".to_owned(), text.to_owned()),
                Err(_) => ("base64".to_owned(), STANDARD.encode(body)),
            };
            return Ok(stored);
        }
        let small = Bytes::from(lz4_flex::compress_prepend_size(body));
        if small.len() <= self.options.refer_over {
            stored.encoding = "lz4".to_owned();
            stored.checkpoint = STANDARD.encode(&small);
            return Ok(stored);
        }
        let key = keys::handoff(group, partition, &format!("{:016x}", fastrand::u64(..)));
        let pieces = small.len().div_ceil(CHUNK_BYTES);
        for at in 0..pieces {
            let piece = small.slice(at * CHUNK_BYTES..small.len().min((at + 1) * CHUNK_BYTES));
            self.blobs.put(&format!("{key}{at:06}"), piece).await?;
        }
        stored.encoding = "reference".to_owned();
        stored.reference = Some(Reference {
            key,
            pieces,
            bytes: body.len(),
            stored_bytes: small.len(),
            crc32c: crc32c::crc32c(&small),
        });
        Ok(stored)
    }

    /// True if a hand-off recorded at `recorded_ms` has expired at `now_ms`, both by wall clocks.
    pub fn is_expired(&self, recorded_ms: i64, now_ms: i64) -> bool {
        let age = u128::try_from(now_ms.saturating_sub(recorded_ms)).unwrap_or(0);
        self.options.ttl.is_some_and(|ttl| age > ttl.as_millis())
    }

    /// Decodes a stored hand-off; reads the chunks of one that is stored by reference.
    pub async fn load(&self, stored: &StoredHandoff) -> Result<Handoff, HandoffError> {
        let damaged = |what: &str| HandoffError::Damaged(what.to_owned());
        let checkpoint = match (stored.encoding.as_str(), &stored.reference) {
            ("utf8" | "", _) => stored.checkpoint.clone().into_bytes().into(),
            ("base64", _) => {
                STANDARD.decode(&stored.checkpoint).map_err(|error| damaged(&error.to_string()))?.into()
            }
            ("lz4", _) => {
                let small =
                    STANDARD.decode(&stored.checkpoint).map_err(|error| damaged(&error.to_string()))?;
                self.expand(&small)?
            }
            ("reference", Some(reference)) => self.fetch(reference).await?,
            (other, _) => return Err(damaged(&format!("unknown encoding {other:?}"))),
        };
        Ok(Handoff {
            checkpoint,
            stage_state: stored.stage_state.clone(),
            last_processed_at: stored.last_processed_at,
        })
    }

    async fn fetch(&self, reference: &Reference) -> Result<Bytes, HandoffError> {
        let damaged = |what: String| HandoffError::Damaged(what);
        if reference.bytes > self.options.max_bytes
            || reference.pieces > self.options.max_bytes / CHUNK_BYTES + 2
        {
            return Err(HandoffError::TooLarge { bytes: reference.bytes, limit: self.options.max_bytes });
        }
        let mut small = BytesMut::new();
        for at in 0..reference.pieces {
            let piece = self.blobs.get(&format!("{}{at:06}", reference.key)).await?;
            small.extend_from_slice(&piece.ok_or_else(|| damaged(format!("chunk {at} is missing")))?);
        }
        if small.len() != reference.stored_bytes || crc32c::crc32c(&small) != reference.crc32c {
            return Err(damaged("length or checksum mismatch of the chunks".to_owned()));
        }
        self.expand(&small)
    }

    fn expand(&self, small: &[u8]) -> Result<Bytes, HandoffError> {
        let damaged = |what: String| HandoffError::Damaged(what);
        let (bytes, _) =
            lz4_flex::block::uncompressed_size(small).map_err(|error| damaged(error.to_string()))?;
        if bytes > self.options.max_bytes {
            return Err(HandoffError::TooLarge { bytes, limit: self.options.max_bytes });
        }
        lz4_flex::decompress_size_prepended(small)
            .map(Bytes::from)
            .map_err(|error| damaged(error.to_string()))
    }

    /// Deletes the chunks of earlier hand-offs of a partition, after its record refers to `current`.
    pub async fn sweep(&self, group: &str, partition: &str, current: Option<&StoredHandoff>) {
        let keep =
            current.and_then(|current| current.reference.as_ref()).map_or("", |reference| &reference.key);
        let prefix = format!("{}{}/{}/", keys::HANDOFFS, keys::segment(group), keys::segment(partition));
        if let Err(error) = self.blobs.sweep(&prefix, keep).await {
            // An orphaned chunk costs only space until the next hand-off.
            tracing::debug!(%error, group, partition, "cleanup of old hand-off chunks failed");
        }
    }
}
