//! Hand-offs: what an owner leaves for the next one.
//!
//! | size | where |
//! |---|---|
//! | small | in the partition's record, as it is |
//! | over [`HandoffOptions::compress_over`] | there, compressed (LZ4) |
//! | over [`HandoffOptions::refer_over`] after that | in pieces of its own; the record holds a reference |
//! | over [`HandoffOptions::max_bytes`] | refused |
//!
//! Invariants: pieces are written before the record that refers to them, under a name of their own, and removed after
//! the record refers to others; a reader checks length and checksum. So a record never refers to something half
//! written, and a crash leaves at most pieces that the next hand-off of the partition sweeps away.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::backoff;
use crate::keys;
use crate::repository::{BoxFuture, Expect, RepositoryError, StateRepository};

/// Patience for one piece.
const PATIENCE: Duration = Duration::from_secs(30);

/// What an owner leaves for the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handoff {
    /// The state of the work, as only the work understands it.
    pub checkpoint: Bytes,
    /// In which stage the work is; for people and for the work.
    pub stage_state: String,
    /// When the last piece of work was done, by the owner's wall clock.
    pub last_processed_at: i64,
}

/// A hand-off as a record keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StoredHandoff {
    /// The checkpoint, as `encoding` says; empty for one that is kept elsewhere.
    pub checkpoint: String,
    /// `utf8`, `base64`, `lz4` (then base64), or `reference`.
    pub encoding: String,
    /// In which stage the work is.
    pub stage_state: String,
    /// When the last piece of work was done.
    pub last_processed_at: i64,
    /// Where a large checkpoint is.
    pub reference: Option<Reference>,
}

/// Where a large checkpoint is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Reference {
    /// Before which keys.
    pub key: String,
    /// How many pieces.
    pub pieces: usize,
    /// How long it is.
    pub bytes: usize,
    /// How long it is compressed.
    pub stored_bytes: usize,
    /// CRC32C of the compressed bytes.
    pub crc32c: u32,
}

/// Why a hand-off cannot be recorded or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// It is larger than allowed.
    #[error("a hand-off of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// What was stored is not what was recorded.
    #[error("the hand-off is damaged: {0}")]
    Damaged(String),
    /// Somebody else owns the partition: what we know is old.
    #[error("the partition {0} has another owner")]
    NotOwner(String),
    /// The store gave no answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// Sizes from which a hand-off is kept differently.
#[derive(Clone, Debug)]
pub struct HandoffOptions {
    /// Compress above.
    pub compress_over: usize,
    /// Keep elsewhere above.
    pub refer_over: usize,
    /// Refuse above.
    pub max_bytes: usize,
    /// One that is older, by the wall clocks of whoever wrote it and whoever reads it, is not used any more. Never, if
    /// there is no such time: a clock that jumps cannot lose anything then. Longer than the work can be repeated from.
    pub ttl: Option<Duration>,
}

impl Default for HandoffOptions {
    fn default() -> Self {
        Self { compress_over: 4 << 10, refer_over: 128 << 10, max_bytes: 256 << 20, ttl: None }
    }
}

/// Keeps what is too large for a record: an object store, a shared folder. The default keeps it in the state
/// repository, in pieces.
pub trait BlobStore: Send + Sync {
    /// Keeps one piece. Writing the same again is fine.
    fn put<'a>(&'a self, key: &'a str, piece: Bytes) -> BoxFuture<'a, Result<(), RepositoryError>>;
    /// Reads one piece.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Bytes>, RepositoryError>>;
    /// Forgets every piece under `prefix` except those under `keep`.
    fn sweep<'a>(&'a self, prefix: &'a str, keep: &'a str) -> BoxFuture<'a, Result<(), RepositoryError>>;
}

/// Pieces in the state repository.
struct RepositoryBlobs(Arc<dyn StateRepository>);

impl BlobStore for RepositoryBlobs {
    fn put<'a>(&'a self, key: &'a str, piece: Bytes) -> BoxFuture<'a, Result<(), RepositoryError>> {
        Box::pin(async move {
            // Putting the same bytes twice is as good as once, so an unknown outcome is tried again.
            let put = || self.0.compare_and_swap(key, Expect::Any, Some(piece.clone()), None);
            backoff::read(PATIENCE, put).await.map(drop)
        })
    }

    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Bytes>, RepositoryError>> {
        Box::pin(
            async move { Ok(backoff::read(PATIENCE, || self.0.get(key)).await?.map(|entry| entry.value)) },
        )
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

/// A piece of a large hand-off: well below what one request may hold.
const PIECE: usize = 512 << 10;

/// Records and reads hand-offs. Cheap to clone.
#[derive(Clone)]
pub struct HandoffStore {
    blobs: Arc<dyn BlobStore>,
    options: HandoffOptions,
}

impl HandoffStore {
    /// Large ones go to the state repository, in pieces.
    pub fn new(repository: Arc<dyn StateRepository>, options: HandoffOptions) -> Self {
        Self { blobs: Arc::new(RepositoryBlobs(repository)), options }
    }

    /// Large ones go where the application says.
    pub fn with_blobs(blobs: Arc<dyn BlobStore>, options: HandoffOptions) -> Self {
        Self { blobs, options }
    }

    /// Makes a hand-off ready for its record. A large one is stored when this returns.
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
        let pieces = small.len().div_ceil(PIECE);
        for at in 0..pieces {
            let piece = small.slice(at * PIECE..small.len().min((at + 1) * PIECE));
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

    /// Whether what was recorded at `recorded_ms` is too old to be used at `now_ms`, both by wall clocks.
    pub fn is_expired(&self, recorded_ms: i64, now_ms: i64) -> bool {
        let age = u128::try_from(now_ms.saturating_sub(recorded_ms)).unwrap_or(0);
        self.options.ttl.is_some_and(|ttl| age > ttl.as_millis())
    }

    /// What was handed over.
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
            (other, _) => return Err(damaged(&format!("its encoding is {other:?}"))),
        };
        Ok(Handoff {
            checkpoint,
            stage_state: stored.stage_state.clone(),
            last_processed_at: stored.last_processed_at,
        })
    }

    async fn fetch(&self, reference: &Reference) -> Result<Bytes, HandoffError> {
        let damaged = |what: String| HandoffError::Damaged(what);
        if reference.bytes > self.options.max_bytes || reference.pieces > self.options.max_bytes / PIECE + 2 {
            return Err(HandoffError::TooLarge { bytes: reference.bytes, limit: self.options.max_bytes });
        }
        let mut small = BytesMut::new();
        for at in 0..reference.pieces {
            let piece = self.blobs.get(&format!("{}{at:06}", reference.key)).await?;
            small.extend_from_slice(&piece.ok_or_else(|| damaged(format!("piece {at} is gone")))?);
        }
        if small.len() != reference.stored_bytes || crc32c::crc32c(&small) != reference.crc32c {
            return Err(damaged("its pieces are not those that were recorded".to_owned()));
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

    /// Forgets what earlier hand-offs of a partition left, after its record refers to `current`.
    pub async fn sweep(&self, group: &str, partition: &str, current: Option<&StoredHandoff>) {
        let keep =
            current.and_then(|current| current.reference.as_ref()).map_or("", |reference| &reference.key);
        let prefix = format!("{}{}/{}/", keys::HANDOFFS, keys::segment(group), keys::segment(partition));
        if let Err(error) = self.blobs.sweep(&prefix, keep).await {
            // Only space is lost, until the next one.
            tracing::debug!(%error, group, partition, "old hand-offs were not removed");
        }
    }
}
