//! A minimal Kafka client: one request per connection, with a short timeout.
//!
//! A request without a response has an unknown outcome. This file must never retry: the caller knows which requests
//! may be repeated.

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
use crate::testbed::{NODES, host_of, locked};

/// Why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RequestError {
    /// A broker rejected the request with this error code; it had no effect.
    Rejected(i16),
    /// The outcome is unknown.
    Unknown,
}

impl RequestError {
    pub(super) fn is(self, code: ErrorCode) -> bool {
        self == Self::Rejected(code as i16)
    }
}

/// Converts an error code to a result.
pub(super) fn check_code(code: i16) -> Result<(), RequestError> {
    if code == 0 { Ok(()) } else { Err(RequestError::Rejected(code)) }
}

/// Client of the brokers, on the clients' host.
pub(super) struct KafkaClient {
    shared: Arc<Shared>,
    host: usize,
    /// The newest known leader epoch of each partition.
    epochs: Mutex<BTreeMap<(&'static str, i32), i32>>,
}

impl KafkaClient {
    pub(super) fn new(shared: Arc<Shared>, host: usize) -> Self {
        Self { shared, host, epochs: Mutex::default() }
    }

    /// Sends one request to a broker.
    pub(super) async fn request<Q: Message, S: Message>(
        &self,
        to: usize,
        request: &Q,
        version: i16,
    ) -> Result<S, RequestError> {
        let timeout = Duration::from_millis(fastrand::u64(200..1_500));
        let response = tokio::time::timeout(timeout, self.exchange(to, request, version)).await;
        response.unwrap_or(Err(RequestError::Unknown))
    }

    async fn exchange<Q: Message, S: Message>(
        &self,
        to: usize,
        request: &Q,
        version: i16,
    ) -> Result<S, RequestError> {
        let header = RequestHeader {
            api_key: Q::KEY as i16,
            api_version: version,
            correlation_id: 1,
            client_id: Some("sim".into()),
        };
        let frame = encode_request(&header, request).expect("the version supports every field");
        let mut socket = node::connect(&self.shared, self.host, to).map_err(|_| RequestError::Unknown)?;
        write_all(socket.as_mut(), &frame).await.map_err(|_| RequestError::Unknown)?;
        let mut frame = BytesMut::new();
        read_until(socket.as_mut(), &mut frame, 4).await.map_err(|_| RequestError::Unknown)?;
        let size = frame.get_u32() as usize;
        read_until(socket.as_mut(), &mut frame, size).await.map_err(|_| RequestError::Unknown)?;
        let (_, response) =
            decode_response(frame.freeze(), version).expect("responses of a broker are valid");
        Ok(response)
    }

    /// Leader and leader epoch of a partition, according to a random broker. An epoch older than a known one is
    /// ignored: a partitioned node would direct clients back to itself.
    pub(super) async fn leader(
        &self,
        topic: &'static str,
        partition: i32,
    ) -> Result<(usize, i32), RequestError> {
        let topic_request = MetadataRequestTopic { name: Some(topic.into()), ..Default::default() };
        let request = MetadataRequest { topics: Some(vec![topic_request]), ..Default::default() };
        let response: MetadataResponse = self.request(fastrand::usize(..NODES), &request, 7).await?;
        let partitions = response.topics.iter().flat_map(|topic| &topic.partitions);
        let led = partitions.filter(|known| known.partition_index == partition && known.leader_id > 0);
        let led = led.last().ok_or(RequestError::Rejected(ErrorCode::LeaderNotAvailable as i16))?;
        let mut epochs = locked(&self.epochs);
        let newest = epochs.entry((topic, partition)).or_insert(led.leader_epoch);
        if led.leader_epoch < *newest {
            return Err(RequestError::Rejected(ErrorCode::LeaderNotAvailable as i16));
        }
        *newest = led.leader_epoch;
        Ok((host_of(BrokerId(led.leader_id)), led.leader_epoch))
    }

    /// Coordinator of a group (`transactional` false) or of a transactional id.
    pub(super) async fn coordinator(&self, key: &str, transactional: bool) -> Result<usize, RequestError> {
        let request = FindCoordinatorRequest {
            key: key.into(),
            key_type: i8::from(transactional),
            ..Default::default()
        };
        let response: FindCoordinatorResponse = self.request(fastrand::usize(..NODES), &request, 3).await?;
        check_code(response.error_code)?;
        Ok(host_of(BrokerId(response.node_id)))
    }
}
