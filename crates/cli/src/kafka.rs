//! The Kafka client as the commands use it: servers from the flags, and its errors as failures with an exit status.

pub(crate) mod errors;

use moim_kafka_client::{Client, ClientOptions, Error, ErrorKind, OffsetReset, Transient};

use crate::exit::{Failure, Outcome, Status};
use crate::output::note;
use crate::target::ClientArgs;

/// A session with the servers that these flags name.
pub(crate) async fn connect(args: &ClientArgs) -> Outcome<Client> {
    let target = args.target()?;
    let bootstrap_hint = match target.named_by.as_str() {
        "default" => "is `moim serve` running? pass --kafka HOST:PORT or set MOIM_KAFKA".to_owned(),
        named_by => format!("is `moim serve` running? the address comes from {named_by}"),
    };
    let options = ClientOptions { addresses: target.addresses, timeout: args.timeout, bootstrap_hint };
    Ok(Client::connect(options).await?)
}

/// Reports on stderr that a fetch position was out of range and continues at the log start offset.
pub(crate) fn note_reset(reset: OffsetReset<'_>) {
    let OffsetReset { partition, from, to } = reset;
    note(format_args!("moim: {partition}: offset {from} is gone; going on at {to}"));
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error.kind {
            ErrorKind::Other => Status::Error,
            ErrorKind::InvalidRequest => Status::Usage,
            ErrorKind::NotFound => Status::NotFound,
            ErrorKind::Unreachable => Status::Unreachable,
            ErrorKind::NotAllowed => Status::NotAllowed,
            ErrorKind::Timeout => Status::Timeout,
            ErrorKind::Conflict => Status::Conflict,
        };
        let failure = Self::new(status, error.message);
        match error.hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl Transient for Failure {
    fn is_transient(&self) -> bool {
        matches!(self.status, Status::Unreachable | Status::Timeout)
    }
}
