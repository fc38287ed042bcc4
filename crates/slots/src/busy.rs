//! What is answered while a script holds the shard for too long: almost nothing. A transaction may begin and end, but not run.

use bytes::BytesMut;
use moim_wire_resp::{Args, Encoder};

use crate::error::Error;
use crate::session::{Multi, Session};
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
    let kills = args.name().eq_ignore_ascii_case(b"script") || args.name().eq_ignore_ascii_case(b"function");
    if kills && sub.eq_ignore_ascii_case(b"kill") {
        match shard.kill_script() {
            Ok(()) => to.ok(),
            Err(error) => to.error(error.0.as_bytes()),
        }
        return;
    }
    let is = |name: &str| args.name().eq_ignore_ascii_case(name.as_bytes());
    if session.multi.is_some() && is("exec") {
        session.multi = None;
        to.error(format!("EXECABORT Transaction discarded because of: {}", Error::BUSY.0));
        return;
    }
    if session.multi.is_some() && is("discard") && args.len() == 1 {
        session.multi = None;
        to.ok();
        return;
    }
    if session.multi.is_none() && is("multi") && args.len() == 1 {
        session.multi = Some(Multi::default());
        to.ok();
        return;
    }
    if let Some(multi) = &mut session.multi {
        multi.broken = true;
    }
    to.error(Error::BUSY.0.as_bytes());
}
