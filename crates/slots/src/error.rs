//! Error replies. The texts are those of Redis 7: clients compare them.

use std::borrow::Cow;

/// An error reply, including its code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub Cow<'static, str>);

/// The result of a command. `Ok`: one reply was written. `Err`: whatever was written is discarded.
pub type Done = Result<(), Error>;

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        impl Error {
            $($(#[$doc])* pub const $name: Error = Error(Cow::Borrowed($text));)*
        }
    };
}

errors! {
    /// The key holds a value of another type.
    WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value";
    /// The arguments cannot be parsed.
    SYNTAX = "ERR syntax error";
    /// Not a 64-bit integer.
    NOT_INTEGER = "ERR value is not an integer or out of range";
    /// Not a float.
    NOT_FLOAT = "ERR value is not a valid float";
    /// A required key does not exist.
    NO_SUCH_KEY = "ERR no such key";
    /// A negative number where only positive ones are valid.
    OUT_OF_RANGE = "ERR value is out of range, must be positive";
    /// The string would exceed `proto-max-bulk-len`.
    STRING_TOO_LONG = "ERR string exceeds maximum allowed size (proto-max-bulk-len)";
    /// The increment overflows.
    OVERFLOW = "ERR increment or decrement would overflow";
    /// The increment gives NaN or infinity.
    NAN = "ERR increment would produce NaN or Infinity";
    /// The bit or byte offset is invalid.
    BAD_OFFSET = "ERR offset is out of range";
    /// The index is past the end.
    BAD_INDEX = "ERR index out of range";
    /// The scan cursor is not a number.
    BAD_CURSOR = "ERR invalid cursor";
    /// The timeout is not a number.
    BAD_TIMEOUT = "ERR timeout is not a float or out of range";
    /// The timeout is negative.
    NEGATIVE_TIMEOUT = "ERR timeout is negative";
    /// The keys belong to several hash slots.
    CROSS_SLOT = "CROSSSLOT Keys in request don't hash to the same slot";
    /// `maxmemory` is reached.
    OOM = "OOM command not allowed when used memory > 'maxmemory'.";
    /// The client has not authenticated.
    NO_AUTH = "NOAUTH Authentication required.";
    /// A command of the transaction was rejected while queueing.
    EXEC_ABORT = "EXECABORT Transaction discarded because of previous errors.";
    /// The shard lost leadership while the client was blocked.
    UNBLOCKED = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)";
    /// A write was sent to a replica.
    READ_ONLY = "READONLY You can't write against a read only replica.";
    /// A script exceeds `lua-time-limit`.
    BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.";
    /// A function exceeds `lua-time-limit`.
    BUSY_FUNCTION = "BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.";
    /// The shard is being loaded from disk.
    LOADING = "LOADING Redis is loading the dataset in memory";
    /// No node may serve the shard at the moment.
    CLUSTER_DOWN = "CLUSTERDOWN The cluster is down";
    /// Some slots are not served by this node.
    SLOT_DOWN = "CLUSTERDOWN Hash slot not served";
    /// Never sent: the command waits for a slot migration and is executed again.
    HELD = "HELD";
    /// Fewer replicas are in sync than `min-replicas-to-write` requires.
    NO_REPLICAS = "NOREPLICAS Not enough good replicas to write.";
    /// The journal rejects appends: the disk is full.
    DISK_FULL = "MISCONF Errors writing to the AOF file: No space left on device";
}

impl Error {
    /// An error with the generic code `ERR`.
    pub fn err(text: impl std::fmt::Display) -> Self {
        Self(Cow::Owned(format!("ERR {text}")))
    }

    /// An error whose text already includes its code.
    pub fn coded(text: impl Into<String>) -> Self {
        Self(Cow::Owned(text.into()))
    }

    /// Wrong number of arguments.
    pub fn arity(command: &str) -> Self {
        Self::err(format_args!("wrong number of arguments for '{command}' command"))
    }

    /// Invalid expire time.
    pub fn expire_time(command: &str) -> Self {
        Self::err(format_args!("invalid expire time in '{command}' command"))
    }

    /// The error code: the first word.
    pub fn code(&self) -> &str {
        self.0.split(' ').next().unwrap_or_default()
    }
}
