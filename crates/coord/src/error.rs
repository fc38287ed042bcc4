//! Refusals of requests, with the gRPC code and the text that etcd clients match on.
//!
//! Invariant: code and text of an etcd error are etcd's, byte for byte. Errors are part of replies between nodes, so a
//! variant's number in the codec never changes.

/// The gRPC status codes used here, with their protocol numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Code {
    /// The request is invalid in any state.
    InvalidArgument = 3,
    /// The named object does not exist.
    NotFound = 5,
    /// The caller is not allowed to do this.
    PermissionDenied = 7,
    /// No space left.
    ResourceExhausted = 8,
    /// The current state does not allow it.
    FailedPrecondition = 9,
    /// The number is out of the valid range.
    OutOfRange = 11,
    /// Temporarily unavailable; the same request may succeed later.
    Unavailable = 14,
    /// The data cannot be trusted.
    DataLoss = 15,
}

/// Why a request was refused. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[repr(u8)]
pub enum Error {
    /// A key is empty.
    #[error("etcdserver: key is not provided")]
    EmptyKey = 1,
    /// A put with `ignore_value` or `ignore_lease` on a key that does not exist.
    #[error("etcdserver: key not found")]
    KeyNotFound = 2,
    /// A put with both a value and `ignore_value`.
    #[error("etcdserver: value is provided")]
    ValueProvided = 3,
    /// A put with both a lease and `ignore_lease`.
    #[error("etcdserver: lease is provided")]
    LeaseProvided = 4,
    /// More than 128 compares or operations.
    #[error("etcdserver: too many operations in txn request")]
    TooManyOps = 5,
    /// A transaction changes a key twice.
    #[error("etcdserver: duplicate key given in txn request")]
    DuplicateKey = 6,
    /// An unknown sort order or target.
    #[error("etcdserver: invalid sort option")]
    InvalidSortOption = 7,
    /// The revision has been compacted.
    #[error("etcdserver: mvcc: required revision has been compacted")]
    Compacted = 8,
    /// The revision does not exist yet.
    #[error("etcdserver: mvcc: required revision is a future revision")]
    FutureRevision = 9,
    /// The NOSPACE alarm is active.
    #[error("etcdserver: mvcc: database space exceeded")]
    NoSpace = 10,
    /// The lease was never granted, was revoked, or has expired.
    #[error("etcdserver: requested lease not found")]
    LeaseNotFound = 11,
    /// A lease of this id exists.
    #[error("etcdserver: lease already exists")]
    LeaseExists = 12,
    /// A TTL of more than 9,000,000,000 seconds.
    #[error("etcdserver: too large lease TTL")]
    LeaseTtlTooLarge = 13,
    /// A request of more than 1.5 MiB.
    #[error("etcdserver: request is too large")]
    RequestTooLarge = 14,
    /// A client tried to write keys or leases of the nodes.
    #[error("etcdserver: permission denied")]
    PermissionDenied = 15,
    /// The CORRUPT alarm is active.
    #[error("etcdserver: corrupt cluster")]
    Corrupt = 16,
    /// A watch on an empty key range.
    #[error("mvcc: watcher range is empty")]
    EmptyWatchRange = 17,
    /// A transaction with system keys and user keys, which have separate revisions.
    #[error("moim: a txn cannot span system keys and other keys")]
    TxnAcrossSpaces = 18,
}

impl Error {
    /// The gRPC status code.
    pub fn code(self) -> Code {
        match self {
            Self::EmptyKey
            | Self::KeyNotFound
            | Self::ValueProvided
            | Self::LeaseProvided
            | Self::TooManyOps
            | Self::DuplicateKey
            | Self::InvalidSortOption
            | Self::RequestTooLarge
            | Self::EmptyWatchRange
            | Self::TxnAcrossSpaces => Code::InvalidArgument,
            Self::Compacted | Self::FutureRevision | Self::LeaseTtlTooLarge => Code::OutOfRange,
            Self::NoSpace => Code::ResourceExhausted,
            Self::LeaseNotFound => Code::NotFound,
            Self::LeaseExists => Code::FailedPrecondition,
            Self::PermissionDenied => Code::PermissionDenied,
            Self::Corrupt => Code::DataLoss,
        }
    }

    /// The error text of the gRPC status.
    pub fn message(self) -> String {
        self.to_string()
    }

    /// Every error, in the order of its codec number.
    pub const ALL: [Self; 18] = [
        Self::EmptyKey,
        Self::KeyNotFound,
        Self::ValueProvided,
        Self::LeaseProvided,
        Self::TooManyOps,
        Self::DuplicateKey,
        Self::InvalidSortOption,
        Self::Compacted,
        Self::FutureRevision,
        Self::NoSpace,
        Self::LeaseNotFound,
        Self::LeaseExists,
        Self::LeaseTtlTooLarge,
        Self::RequestTooLarge,
        Self::PermissionDenied,
        Self::Corrupt,
        Self::EmptyWatchRange,
        Self::TxnAcrossSpaces,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_match_their_positions() {
        for (at, error) in Error::ALL.into_iter().enumerate() {
            assert_eq!(error as usize, at + 1, "{error:?}");
        }
    }

    #[test]
    fn codes_and_texts_match_etcd() {
        let cases = [
            (Error::Compacted, 11, "etcdserver: mvcc: required revision has been compacted"),
            (Error::FutureRevision, 11, "etcdserver: mvcc: required revision is a future revision"),
            (Error::LeaseNotFound, 5, "etcdserver: requested lease not found"),
            (Error::LeaseExists, 9, "etcdserver: lease already exists"),
            (Error::LeaseTtlTooLarge, 11, "etcdserver: too large lease TTL"),
            (Error::DuplicateKey, 3, "etcdserver: duplicate key given in txn request"),
            (Error::TooManyOps, 3, "etcdserver: too many operations in txn request"),
            (Error::EmptyKey, 3, "etcdserver: key is not provided"),
            (Error::KeyNotFound, 3, "etcdserver: key not found"),
            (Error::ValueProvided, 3, "etcdserver: value is provided"),
            (Error::LeaseProvided, 3, "etcdserver: lease is provided"),
            (Error::RequestTooLarge, 3, "etcdserver: request is too large"),
            (Error::NoSpace, 8, "etcdserver: mvcc: database space exceeded"),
            (Error::PermissionDenied, 7, "etcdserver: permission denied"),
            (Error::Corrupt, 15, "etcdserver: corrupt cluster"),
        ];
        for (error, code, message) in cases {
            assert_eq!((error.code() as u8, error.message().as_str()), (code, message));
        }
    }
}
