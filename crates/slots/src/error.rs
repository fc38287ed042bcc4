//! What a command answers when it does not do what was asked. The texts are those of Redis 7: clients compare them.

use std::borrow::Cow;

/// An error, its code included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(pub Cow<'static, str>);

/// How a command ends. `Ok` has written one answer; after `Err` what it wrote is thrown away.
pub type Done = Result<(), Error>;

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        impl Error {
            $($(#[$doc])* pub const $name: Error = Error(Cow::Borrowed($text));)*
        }
    };
}

errors! {
    /// The key holds something else.
    WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value";
    /// Arguments that make no sense.
    SYNTAX = "ERR syntax error";
    /// Not an integer of 64 bits.
    NOT_INTEGER = "ERR value is not an integer or out of range";
    /// Not a number.
    NOT_FLOAT = "ERR value is not a valid float";
    /// A key that must be there is not.
    NO_SUCH_KEY = "ERR no such key";
    /// A negative number where none may be.
    OUT_OF_RANGE = "ERR value is out of range, must be positive";
    /// Beyond `proto-max-bulk-len`.
    STRING_TOO_LONG = "ERR string exceeds maximum allowed size (proto-max-bulk-len)";
    /// An increment past the end.
    OVERFLOW = "ERR increment or decrement would overflow";
    /// An increment to something that is no number.
    NAN = "ERR increment would produce NaN or Infinity";
    /// An offset that is none.
    BAD_OFFSET = "ERR offset is out of range";
    /// An index past the end.
    BAD_INDEX = "ERR index out of range";
    /// A cursor that is no number.
    BAD_CURSOR = "ERR invalid cursor";
    /// A timeout that is no number.
    BAD_TIMEOUT = "ERR timeout is not a float or out of range";
    /// A timeout in the past.
    NEGATIVE_TIMEOUT = "ERR timeout is negative";
    /// Keys of several slots.
    CROSS_SLOT = "CROSSSLOT Keys in request don't hash to the same slot";
    /// `maxmemory` is reached.
    OOM = "OOM command not allowed when used memory > 'maxmemory'.";
    /// Nobody said who this is.
    NO_AUTH = "NOAUTH Authentication required.";
    /// Some command of the transaction was refused.
    EXEC_ABORT = "EXECABORT Transaction discarded because of previous errors.";
    /// The lead ended while a client waited.
    UNBLOCKED = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)";
    /// A write to a replica.
    READ_ONLY = "READONLY You can't write against a read only replica.";
    /// A script has run for too long.
    BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.";
    /// A function has.
    BUSY_FUNCTION = "BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.";
    /// The shard is being read from disk.
    LOADING = "LOADING Redis is loading the dataset in memory";
    /// Nobody may answer for the shard at the moment.
    CLUSTER_DOWN = "CLUSTERDOWN The cluster is down";
    /// Some slots have no owner here.
    SLOT_DOWN = "CLUSTERDOWN Hash slot not served";
    /// Never sent: the command waits for its slot and comes again.
    HELD = "HELD";
    /// Fewer replicas are in sync than a write needs.
    NO_REPLICAS = "NOREPLICAS Not enough good replicas to write.";
    /// The journal takes nothing: the disk is full.
    DISK_FULL = "MISCONF Errors writing to the AOF file: No space left on device";
}

impl Error {
    /// An error with `ERR` before its text.
    pub fn err(text: impl std::fmt::Display) -> Self {
        Self(Cow::Owned(format!("ERR {text}")))
    }

    /// An error whose text has its code already.
    pub fn coded(text: impl Into<String>) -> Self {
        Self(Cow::Owned(text.into()))
    }

    /// Too few or too many arguments.
    pub fn arity(command: &str) -> Self {
        Self::err(format_args!("wrong number of arguments for '{command}' command"))
    }

    /// An expiry that cannot be.
    pub fn expire_time(command: &str) -> Self {
        Self::err(format_args!("invalid expire time in '{command}' command"))
    }

    /// The code: the first word.
    pub fn code(&self) -> &str {
        self.0.split(' ').next().unwrap_or_default()
    }
}
