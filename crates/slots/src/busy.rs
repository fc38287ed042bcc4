//! What is answered while a script holds the shard for too long: almost nothing.

use bytes::BytesMut;
use moim_wire_resp::{Args, Encoder};

use crate::error::Error;
use crate::session::Session;
use crate::shard::Shard;
use crate::shared::Shared;

/// Answers without the shard's lock.
pub(crate) fn answer(
    shard: &Shard,
    _shared: &Shared,
    session: &mut Session,
    args: &Args<'_>,
    out: &mut BytesMut,
) {
    let mut to = Encoder::new(out, session.protocol);
    let sub = args.get(1).unwrap_or_default();
    if args.name().eq_ignore_ascii_case(b"script") && sub.eq_ignore_ascii_case(b"kill") {
        match shard.kill_script() {
            Ok(()) => to.ok(),
            Err(error) => to.error(error.0.as_bytes()),
        }
        return;
    }
    if let Some(multi) = &mut session.multi {
        multi.broken = true;
    }
    to.error(Error::BUSY.0.as_bytes());
}
