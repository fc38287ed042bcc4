//! A request to a node before, or without, being a member of its cluster: one connection, one request, one reply.
//!
//! Visitors reach the node service and nothing else; the node decides what it answers to strangers.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpStream;

use super::hello::{self, Standing};
use super::{Frame, MAX_FRAME, REPLY, REQUEST, bad, read_frame, write_frame};
use crate::transport::TransportError;
use crate::transport::service::{self, ServiceError, ServiceId};
use crate::types::GroupId;

/// The maximum request size of a visitor: visitors are not trusted with more memory.
pub(super) const MAX_VISIT: usize = 256 << 10;

/// True if a connection of this kind may call this group or service.
pub(super) fn is_allowed(standing: Standing, group: GroupId) -> bool {
    match standing {
        Standing::Member => true,
        Standing::Stream => false,
        Standing::Visitor => group == ServiceId::NODE.as_group(),
    }
}

/// Calls the node service at `address`, `timeout` at most. Works in every cluster and in none.
pub async fn visit(address: &str, request: Bytes, timeout: Duration) -> Result<Bytes, ServiceError> {
    if request.len() > MAX_VISIT {
        return Err(TransportError::Broken("a request is too long".to_owned()).into());
    }
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        hello::greet_as_visitor(&mut stream).await?;
        let frame = Frame { kind: REQUEST, call: 0, group: ServiceId::NODE.as_group(), payload: request };
        write_frame(&mut stream, &frame).await?;
        let reply = read_frame(&mut stream, MAX_FRAME).await?;
        if reply.kind == REPLY { Ok(reply.payload) } else { Err(bad("the listening side called")) }
    };
    let answer: io::Result<Bytes> = match tokio::time::timeout(timeout, asked).await {
        Ok(answer) => answer,
        Err(_) => return Err(TransportError::TimedOut.into()),
    };
    let answer = answer.map_err(|error| {
        let what = match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                "closes the connection without an answer; is it a peer port?".into()
            }
            _ => error.to_string(),
        };
        TransportError::Unreachable(format!("{address}: {what}"))
    })?;
    service::open_reply(answer)
}
