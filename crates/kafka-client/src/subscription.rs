//! The `consumer` embedded protocol: subscription and assignment of a group member, opaque to the coordinator, and the
//! range assignor. Version 0 of both messages, which every client reads.

use std::collections::BTreeMap;

use bytes::Bytes;
use moim_wire_kafka::{DecodeError, Decoder, EncodeError, Encoder, KString};

use crate::client::TopicPartition;

/// Encodes the topics that a member subscribes to.
pub(crate) fn encode_subscription(topics: &[KString]) -> Result<Bytes, EncodeError> {
    let mut e = Encoder::new();
    e.i16(0);
    e.length(Some(topics.len()))?;
    for topic in topics {
        e.classic_nullable_string(Some(topic))?;
    }
    e.nullable_bytes(None)?;
    Ok(e.finish().0.freeze())
}

/// The topics that a member subscribes to; ignores the fields of newer versions.
pub(crate) fn decode_subscription(bytes: Bytes) -> Result<Vec<KString>, DecodeError> {
    let mut d = Decoder::new(bytes);
    d.i16()?;
    let count = d.length()?.unwrap_or(0);
    (0..count).map(|_| Ok(d.classic_nullable_string()?.unwrap_or_default())).collect()
}

/// Encodes the partitions that are assigned to a member.
pub(crate) fn encode_assignment(partitions: &[TopicPartition]) -> Result<Bytes, EncodeError> {
    let mut by_topic: BTreeMap<&KString, Vec<i32>> = BTreeMap::new();
    for one in partitions {
        by_topic.entry(&one.topic).or_default().push(one.partition);
    }
    let mut e = Encoder::new();
    e.i16(0);
    e.length(Some(by_topic.len()))?;
    for (topic, partitions) in by_topic {
        e.classic_nullable_string(Some(topic))?;
        e.length(Some(partitions.len()))?;
        for partition in partitions {
            e.i32(partition);
        }
    }
    e.nullable_bytes(None)?;
    Ok(e.finish().0.freeze())
}

/// The partitions that are assigned to a member. The coordinator sends empty bytes before the first SyncGroup: none.
pub fn decode_assignment(bytes: Bytes) -> Result<Vec<TopicPartition>, DecodeError> {
    let mut all = Vec::new();
    if bytes.is_empty() {
        return Ok(all);
    }
    let mut d = Decoder::new(bytes);
    d.i16()?;
    for _ in 0..d.length()?.unwrap_or(0) {
        let topic = d.classic_nullable_string()?.unwrap_or_default();
        for _ in 0..d.length()?.unwrap_or(0) {
            all.push(TopicPartition { topic: topic.clone(), partition: d.i32()? });
        }
    }
    Ok(all)
}

/// Kafka's range assignor: per topic, the subscribed members, in order of their ids, get contiguous partitions; the first
/// members get one more if the number does not divide.
pub(crate) fn assign_range(
    subscriptions: &BTreeMap<KString, Vec<KString>>,
    partitions: &BTreeMap<KString, i32>,
) -> BTreeMap<KString, Vec<TopicPartition>> {
    let mut assignments: BTreeMap<KString, Vec<TopicPartition>> =
        subscriptions.keys().map(|member| (member.clone(), Vec::new())).collect();
    for (topic, count) in partitions {
        let members: Vec<_> = subscriptions
            .iter()
            .filter(|(_, topics)| topics.contains(topic))
            .map(|(member, _)| member)
            .collect();
        let count = usize::try_from(*count).unwrap_or(0);
        let (Some(each), Some(extra)) = (count.checked_div(members.len()), count.checked_rem(members.len()))
        else {
            continue;
        };
        let mut next = 0_usize;
        for (index, member) in members.into_iter().enumerate() {
            let end = next + each + usize::from(index < extra);
            let assigned = (next..end).filter_map(|partition| i32::try_from(partition).ok());
            let assigned = assigned.map(|partition| TopicPartition { topic: topic.clone(), partition });
            assignments.entry(member.clone()).or_default().extend(assigned);
            next = end;
        }
    }
    assignments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(topic: &str, partition: i32) -> TopicPartition {
        TopicPartition { topic: topic.into(), partition }
    }

    #[test]
    fn both_messages_round_trip_and_truncated_bytes_are_errors() {
        let topics = vec![KString::from("b"), KString::from("a")];
        let bytes = encode_subscription(&topics).unwrap();
        assert_eq!(decode_subscription(bytes.clone()).unwrap(), topics);
        assert!(decode_subscription(bytes.slice(..bytes.len() - 6)).is_err());

        let assigned = vec![partition("a", 0), partition("a", 2), partition("b", 1)];
        let bytes = encode_assignment(&assigned).unwrap();
        assert_eq!(decode_assignment(bytes.clone()).unwrap(), assigned);
        assert!(decode_assignment(bytes.slice(..bytes.len() - 6)).is_err());
        assert_eq!(decode_assignment(Bytes::new()).unwrap(), []);
    }

    #[test]
    fn an_oversized_count_is_an_error_without_allocation() {
        let bytes = Bytes::from_static(&[0, 0, 0x7f, 0xff, 0xff, 0xff]);
        assert!(decode_assignment(bytes.clone()).is_err());
        assert!(decode_subscription(bytes).is_err());
    }

    #[test]
    fn range_assigns_contiguous_partitions_and_the_remainder_to_the_first_members() {
        let topics = |names: &[&str]| names.iter().map(|name| KString::from(*name)).collect::<Vec<_>>();
        let subscriptions = BTreeMap::from([
            ("m1".into(), topics(&["a", "b"])),
            ("m2".into(), topics(&["a"])),
            ("m3".into(), topics(&["gone"])),
        ]);
        let assignments = assign_range(&subscriptions, &BTreeMap::from([("a".into(), 3), ("b".into(), 1)]));
        assert_eq!(assignments["m1"], [partition("a", 0), partition("a", 1), partition("b", 0)]);
        assert_eq!(assignments["m2"], [partition("a", 2)]);
        assert_eq!(assignments["m3"], []);
    }
}
