//! Shared by the commands for the coordination core, or for an etcd: the session, the exit status of an error, and keys
//! and leases as text.

use moim_base::task::{Scope, Shutdown};
use moim_cluster::EtcdClient;
use moim_cluster::etcd::{EtcdError, EtcdOptions, prefix_range};
use moim_wire_grpc::Code;
use moim_wire_grpc::etcd::KeyValue;
use serde::Serialize;
use serde_json::Value;

use crate::exit::{Failure, Outcome, Status};
use crate::format::bytes_json;
use crate::target::{EtcdArgs, Target};

/// A session with the servers that these flags name. Fails if none accepts a connection.
pub(crate) async fn connect(args: &EtcdArgs) -> Outcome<EtcdClient> {
    let target = args.target()?;
    let client = open(&target, args);
    client.probe().await.map_err(|error| match error {
        EtcdError::Unreachable(why) => {
            let message = format!("no server answers at {} ({}): {why}", shown(&target), target.named_by);
            Failure::new(Status::Unreachable, message)
                .hint("start a node with `moim serve`, or name one with --etcd")
        }
        error => failure(&error),
    })?;
    Ok(client)
}

/// Creates a client of these servers, without connecting.
pub(crate) fn open(target: &Target, args: &EtcdArgs) -> EtcdClient {
    let mut options = EtcdOptions::new(target.addresses.iter().map(|(host, port)| address(host, *port)));
    options.call_timeout = args.timeout;
    EtcdClient::new(options, &Scope::new(Shutdown::new()))
}

/// `HOST:PORT`, also for an IPv6 address.
pub(crate) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn shown(target: &Target) -> String {
    let all: Vec<_> = target.addresses.iter().map(|(host, port)| address(host, *port)).collect();
    all.join(",")
}

/// The failure, with its exit status, of an etcd error.
pub(crate) fn failure(error: &EtcdError) -> Failure {
    let status = match error {
        EtcdError::Unreachable(_) => Status::Unreachable,
        EtcdError::Unknown(_) => Status::Timeout,
        EtcdError::Refused(status) => match status.code {
            Code::NotFound | Code::OutOfRange => Status::NotFound,
            Code::InvalidArgument => Status::Usage,
            Code::PermissionDenied
            | Code::Unauthenticated
            | Code::ResourceExhausted
            | Code::Unimplemented => Status::NotAllowed,
            Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted => Status::Conflict,
            Code::DeadlineExceeded | Code::Canceled => Status::Timeout,
            Code::Unavailable if error.may_have_happened() => Status::Timeout,
            Code::Unavailable => Status::Unreachable,
            Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => Status::Error,
        },
    };
    Failure::new(status, error.to_string())
}

/// The same for a write: without a response it may have been executed.
pub(crate) fn change_failure(error: &EtcdError) -> Failure {
    let failure = failure(error);
    if error.may_have_happened() {
        return failure.hint("the change may or may not have happened; read before doing it again");
    }
    failure
}

/// Key range flags.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RangeArgs {
    /// Every key that starts with KEY
    #[arg(short, long, conflicts_with = "from_key")]
    pub(crate) prefix: bool,
    /// KEY and every key after it
    #[arg(long)]
    pub(crate) from_key: bool,
}

impl RangeArgs {
    /// True if it is a single key.
    pub(crate) fn is_one(&self) -> bool {
        !self.prefix && !self.from_key
    }

    /// `key` and `range_end` of the request.
    pub(crate) fn range(&self, key: &str) -> Outcome<(Vec<u8>, Vec<u8>)> {
        if self.is_one() {
            if key.is_empty() {
                return Err(Failure::usage("a key cannot be empty").hint("--prefix with \"\" is every key"));
            }
            return Ok((key.into(), Vec::new()));
        }
        if self.prefix {
            return Ok(prefix_range(key.as_bytes()));
        }
        let start = if key.is_empty() { vec![0] } else { key.into() };
        Ok((start, vec![0]))
    }
}

/// A key-value pair in JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct EntryJson {
    key: Value,
    key_encoding: Value,
    value: Value,
    value_encoding: Value,
    create_revision: i64,
    mod_revision: i64,
    version: i64,
    lease: Option<String>,
}

impl From<&KeyValue> for EntryJson {
    fn from(kv: &KeyValue) -> Self {
        let (key, key_encoding) = bytes_json(Some(&kv.key));
        let (value, value_encoding) = bytes_json(Some(&kv.value));
        Self {
            key,
            key_encoding,
            value,
            value_encoding,
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: lease_text(kv.lease),
        }
    }
}

/// Bytes for a table: UTF-8 text unchanged, other bytes escaped.
pub(crate) fn shown_bytes(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.escape_ascii().to_string(),
    }
}

/// A lease id in hexadecimal, as etcdctl prints it; `None` for no lease.
pub(crate) fn lease_text(id: i64) -> Option<String> {
    (id != 0).then(|| format!("{id:x}"))
}

/// Parses a lease id in hexadecimal.
pub(crate) fn parse_lease(text: &str) -> Result<i64, String> {
    // A lease id is a bit pattern: one above i64::MAX is a negative number.
    let id = u64::from_str_radix(text, 16).map_err(|_| "must be a lease id in hexadecimal".to_owned())?;
    Ok(id.cast_signed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_ids_round_trip() {
        for id in [1, i64::MAX, -1, 0x694d_77aa_9e38_260f] {
            assert_eq!(parse_lease(&lease_text(id).unwrap()), Ok(id));
        }
        assert!(parse_lease("").is_err() && parse_lease("xyz").is_err());
        assert_eq!(lease_text(0), None);
    }

    #[test]
    fn flags_become_key_and_range_end() {
        let args = |prefix, from_key| RangeArgs { prefix, from_key };
        let range = |args: RangeArgs, key| args.range(key).ok();
        assert_eq!(range(args(false, false), "k"), Some((b"k".to_vec(), vec![])));
        assert_eq!(range(args(false, false), ""), None);
        assert_eq!(range(args(true, false), "k"), Some((b"k".to_vec(), b"l".to_vec())));
        assert_eq!(range(args(true, false), ""), Some((vec![0], vec![0])));
        assert_eq!(range(args(false, true), "k"), Some((b"k".to_vec(), vec![0])));
    }

    #[test]
    fn an_ipv6_address_has_brackets() {
        assert_eq!(address("::1", 2379), "[::1]:2379");
        assert_eq!(address("db", 2379), "db:2379");
    }
}
