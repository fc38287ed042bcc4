//! Limits of the compact encodings. The names are those of Redis settings.

/// Thresholds at which a value changes from its compact encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `hash-max-listpack-entries`
    pub hash_entries: usize,
    /// `hash-max-listpack-value`
    pub hash_value: usize,
    /// `list-max-listpack-size`: negative is a size class (-1 4 KiB … -5 64 KiB), positive a count.
    pub list_chunk: i64,
    /// `set-max-intset-entries`
    pub set_ints: usize,
    /// `set-max-listpack-entries`
    pub set_entries: usize,
    /// `set-max-listpack-value`
    pub set_value: usize,
    /// `zset-max-listpack-entries`
    pub zset_entries: usize,
    /// `zset-max-listpack-value`
    pub zset_value: usize,
    /// `stream-node-max-bytes`, 0 for no limit.
    pub stream_bytes: usize,
    /// `stream-node-max-entries`, 0 for no limit.
    pub stream_entries: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            hash_entries: 128,
            hash_value: 64,
            list_chunk: -2,
            set_ints: 512,
            set_entries: 128,
            set_value: 64,
            zset_entries: 128,
            zset_value: 64,
            stream_bytes: 4096,
            stream_entries: 100,
        }
    }
}

impl Limits {
    /// Size at which a stream block accepts no more entries. Never more than a payload can hold.
    pub(crate) fn stream_block_bytes(&self) -> usize {
        const MAX_BLOCK_BYTES: usize = 1 << 30;
        if self.stream_bytes == 0 { MAX_BLOCK_BYTES } else { self.stream_bytes.min(MAX_BLOCK_BYTES) }
    }

    /// True if a list chunk with this many entries and bytes is full.
    pub(crate) fn chunk_full(&self, entries: usize, bytes: usize) -> bool {
        match self.list_chunk {
            count if count > 0 => entries > count as usize || bytes > 8192,
            class => bytes > 4096 << (-class - 1).clamp(0, 4),
        }
    }
}
