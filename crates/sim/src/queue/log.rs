//! `read_committed` fetches of a partition: without aborted records and without transaction markers.

use hashbrown::HashSet;
use moim_wire_kafka::messages::{FetchPartition, FetchRequest, FetchResponse, FetchTopic};
use moim_wire_kafka::records::{ControlKind, control_kind, decode_batch, split_batches};
use moim_wire_kafka::{ErrorCode, Records};

use super::kafka_client::{KafkaClient, RequestError, check_code};

/// The result of one fetch.
pub(super) struct Page {
    pub(super) values: Vec<(i64, String)>,
    /// Next fetch offset.
    pub(super) next: i64,
    /// Last stable offset.
    pub(super) stable: i64,
    /// The high watermark.
    pub(super) end: i64,
}

/// Sends one fetch.
pub(super) async fn fetch(
    kafka: &KafkaClient,
    topic: &'static str,
    partition: i32,
    from: i64,
) -> Result<Page, RequestError> {
    let (leader, current_leader_epoch) = kafka.leader(topic, partition).await?;
    let fetch_partition = FetchPartition {
        partition,
        current_leader_epoch,
        fetch_offset: from,
        partition_max_bytes: 4_096,
        ..Default::default()
    };
    let request = FetchRequest {
        max_wait_ms: 100,
        min_bytes: 1,
        max_bytes: 4_096,
        isolation_level: 1,
        topics: vec![FetchTopic {
            topic: topic.into(),
            partitions: vec![fetch_partition],
            ..Default::default()
        }],
        ..Default::default()
    };
    let response: FetchResponse = kafka.request(leader, &request, 11).await?;
    check_code(response.error_code)?;
    let mut parts = response.responses.into_iter().flat_map(|topic| topic.partitions);
    let data = parts.next().ok_or(RequestError::Rejected(ErrorCode::UnknownTopicOrPartition as i16))?;
    check_code(data.error_code)?;
    let mut aborted = data.aborted_transactions.unwrap_or_default();
    aborted.sort_by_key(|aborted| aborted.first_offset);
    let mut aborted = aborted.into_iter().peekable();
    let mut hidden = HashSet::new();
    let mut page =
        Page { values: Vec::new(), next: from, stable: data.last_stable_offset, end: data.high_watermark };
    let Some(Records::Bytes(records)) = data.records else { return Ok(page) };
    for batch in split_batches(&records).map_while(Result::ok) {
        let (header, records) = decode_batch(&batch, 1 << 20).expect("stored batches are valid");
        while let Some(txn) = aborted.next_if(|txn| txn.first_offset <= header.base_offset) {
            hidden.insert(txn.producer_id);
        }
        page.next = page.next.max(header.last_offset() + 1);
        if header.is_control() {
            if control_kind(&batch) == Some(ControlKind::Abort) {
                hidden.remove(&header.producer_id);
            }
            continue;
        }
        if header.is_transactional() && hidden.contains(&header.producer_id) {
            continue;
        }
        for record in records.into_iter().filter(|record| record.offset >= from) {
            let value = record.value.unwrap_or_default();
            page.values.push((record.offset, String::from_utf8_lossy(&value).into_owned()));
        }
    }
    Ok(page)
}
