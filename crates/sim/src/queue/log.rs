//! Reading a partition as a client does that wants what is committed: without what was aborted, and without markers.

use hashbrown::HashSet;
use moim_wire_kafka::messages::{FetchPartition, FetchRequest, FetchResponse, FetchTopic};
use moim_wire_kafka::records::{ControlKind, control_kind, decode_batch, split_batches};
use moim_wire_kafka::{ErrorCode, Records};

use super::wire::{Lost, Wire, said};

/// What one fetch brought.
pub(super) struct Page {
    pub(super) values: Vec<(i64, String)>,
    /// Where to go on.
    pub(super) next: i64,
    /// Up to where transactions are decided.
    pub(super) stable: i64,
    /// The high watermark.
    pub(super) end: i64,
}

/// Fetches once.
pub(super) async fn fetch(wire: &Wire, topic: &'static str, partition: i32, from: i64) -> Result<Page, Lost> {
    let (at, current_leader_epoch) = wire.leader(topic, partition).await?;
    let wanted = FetchPartition {
        partition,
        current_leader_epoch,
        fetch_offset: from,
        partition_max_bytes: 4_096,
        ..Default::default()
    };
    let question = FetchRequest {
        max_wait_ms: 100,
        min_bytes: 1,
        max_bytes: 4_096,
        isolation_level: 1,
        topics: vec![FetchTopic { topic: topic.into(), partitions: vec![wanted], ..Default::default() }],
        ..Default::default()
    };
    let answer: FetchResponse = wire.ask(at, &question, 11).await?;
    said(answer.error_code)?;
    let mut parts = answer.responses.into_iter().flat_map(|topic| topic.partitions);
    let data = parts.next().ok_or(Lost::Refused(ErrorCode::UnknownTopicOrPartition as i16))?;
    said(data.error_code)?;
    let mut aborted = data.aborted_transactions.unwrap_or_default();
    aborted.sort_by_key(|aborted| aborted.first_offset);
    let mut aborted = aborted.into_iter().peekable();
    let mut hidden = HashSet::new();
    let mut page =
        Page { values: Vec::new(), next: from, stable: data.last_stable_offset, end: data.high_watermark };
    let Some(Records::Bytes(records)) = data.records else { return Ok(page) };
    for batch in split_batches(&records).map_while(Result::ok) {
        let (header, records) = decode_batch(&batch, 1 << 20).expect("what is stored can be read");
        while let Some(one) = aborted.next_if(|one| one.first_offset <= header.base_offset) {
            hidden.insert(one.producer_id);
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
