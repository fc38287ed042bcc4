//! Tolerance for servers that are unavailable: a restart or a leader election is no reason to fail at once.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::Transient;

/// Tolerates [transient](Transient) errors until they have lasted for a limit. A success ends the outage.
#[derive(Default)]
pub struct OutageTolerance {
    /// The first transient error since the last success.
    since: Option<Instant>,
}

impl OutageTolerance {
    /// `None` for a transient error while the outage is shorter than `limit`; the caller backs off and retries.
    pub fn tolerate<T, E: Transient>(
        &mut self,
        result: Result<T, E>,
        limit: Duration,
    ) -> Result<Option<T>, E> {
        match result {
            Ok(value) => {
                self.since = None;
                Ok(Some(value))
            }
            Err(error) if error.is_transient() => {
                let since = *self.since.get_or_insert_with(Instant::now);
                if since.elapsed() >= limit { Err(error) } else { Ok(None) }
            }
            Err(error) => Err(error),
        }
    }
}
