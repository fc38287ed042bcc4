//! What clients ask brokers: one request on a connection of its own, with a patience that is short.
//!
//! Whatever has no answer may have happened. It must never retry by itself: whoever asks knows what may be asked twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use moim_base::BrokerId;
use moim_base::socket::{read_until, write_all};
use moim_wire_kafka::messages::{
    FindCoordinatorRequest, FindCoordinatorResponse, MetadataRequest, MetadataRequestTopic, MetadataResponse,
};
use moim_wire_kafka::{ErrorCode, Message, RequestHeader, decode_response, encode_request};

use super::{Shared, node};
use crate::site::{NODES, host_of, locked};

/// Why there is nothing to go on with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lost {
    /// A broker said so; it had no effect.
    Refused(i16),
    /// Nobody knows.
    Unknown,
}

impl Lost {
    pub(super) fn is(self, code: ErrorCode) -> bool {
        self == Self::Refused(code as i16)
    }
}

/// An error code as a result.
pub(super) fn said(code: i16) -> Result<(), Lost> {
    if code == 0 { Ok(()) } else { Err(Lost::Refused(code)) }
}

/// The way from the clients' machine to the brokers.
pub(super) struct Wire {
    shared: Arc<Shared>,
    host: usize,
    /// The newest leadership of each partition that any client has heard of.
    epochs: Mutex<BTreeMap<(&'static str, i32), i32>>,
}

impl Wire {
    pub(super) fn new(shared: Arc<Shared>, host: usize) -> Self {
        Self { shared, host, epochs: Mutex::default() }
    }

    /// Asks a broker once.
    pub(super) async fn ask<Q: Message, S: Message>(
        &self,
        to: usize,
        question: &Q,
        version: i16,
    ) -> Result<S, Lost> {
        let patience = Duration::from_millis(fastrand::u64(200..1_500));
        let answer = tokio::time::timeout(patience, self.exchange(to, question, version)).await;
        answer.unwrap_or(Err(Lost::Unknown))
    }

    async fn exchange<Q: Message, S: Message>(
        &self,
        to: usize,
        question: &Q,
        version: i16,
    ) -> Result<S, Lost> {
        let header = RequestHeader {
            api_key: Q::KEY as i16,
            api_version: version,
            correlation_id: 1,
            client_id: Some("sim".into()),
        };
        let frame = encode_request(&header, question).expect("the questions here have a version that fits");
        let mut socket = node::connect(&self.shared, self.host, to).map_err(|_| Lost::Unknown)?;
        write_all(socket.as_mut(), &frame).await.map_err(|_| Lost::Unknown)?;
        let mut answer = BytesMut::new();
        read_until(socket.as_mut(), &mut answer, 4).await.map_err(|_| Lost::Unknown)?;
        let size = answer.get_u32() as usize;
        read_until(socket.as_mut(), &mut answer, size).await.map_err(|_| Lost::Unknown)?;
        let (_, response) = decode_response(answer.freeze(), version).expect("a broker's answer can be read");
        Ok(response)
    }

    /// Who leads a partition, in which leadership, as some broker believes. What is older than what was heard before is not
    /// believed: a node that has lost touch would send clients back to itself.
    pub(super) async fn leader(&self, topic: &'static str, partition: i32) -> Result<(usize, i32), Lost> {
        let asked = MetadataRequestTopic { name: Some(topic.into()), ..Default::default() };
        let question = MetadataRequest { topics: Some(vec![asked]), ..Default::default() };
        let answer: MetadataResponse = self.ask(fastrand::usize(..NODES), &question, 7).await?;
        let partitions = answer.topics.iter().flat_map(|topic| &topic.partitions);
        let led = partitions.filter(|known| known.partition_index == partition && known.leader_id > 0);
        let led = led.last().ok_or(Lost::Refused(ErrorCode::LeaderNotAvailable as i16))?;
        let mut epochs = locked(&self.epochs);
        let newest = epochs.entry((topic, partition)).or_insert(led.leader_epoch);
        if led.leader_epoch < *newest {
            return Err(Lost::Refused(ErrorCode::LeaderNotAvailable as i16));
        }
        *newest = led.leader_epoch;
        Ok((host_of(BrokerId(led.leader_id)), led.leader_epoch))
    }

    /// Who coordinates a group (`transactional` false) or a transactional id.
    pub(super) async fn coordinator(&self, key: &str, transactional: bool) -> Result<usize, Lost> {
        let question = FindCoordinatorRequest {
            key: key.into(),
            key_type: i8::from(transactional),
            ..Default::default()
        };
        let answer: FindCoordinatorResponse = self.ask(fastrand::usize(..NODES), &question, 3).await?;
        said(answer.error_code)?;
        Ok(host_of(BrokerId(answer.node_id)))
    }
}
