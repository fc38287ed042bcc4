//! Which APIs and versions this codec reads and writes.
//!
//! This is what the codec *can* do; what the broker *advertises* is the broker's decision and a subset of it.
//! Versions that Kafka 4 removed are left out, except Produce 0-2 and OffsetCommit 0-1, which old clients
//! still look for.

use std::ops::RangeInclusive;

use crate::codec::{DecodeError, EncodeError};

/// Stands in the table for APIs that have no flexible version yet.
const NEVER: i16 = i16::MAX;

macro_rules! apis {
    ($( $name:ident = $key:literal, $versions:expr, flexible from $flexible:expr; )+) => {
        /// The APIs, by the number that stands in a request header.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(i16)]
        pub enum ApiKey {
            $( #[doc = concat!(stringify!($name), ", key ", $key, ".")] $name = $key, )+
        }

        impl ApiKey {
            /// Every API, in order of its key.
            pub const ALL: &'static [ApiKey] = &[$( ApiKey::$name, )+];

            /// The name in Kafka's documentation.
            pub const fn name(self) -> &'static str {
                match self {
                    $( Self::$name => stringify!($name), )+
                }
            }

            /// The versions this codec reads and writes.
            pub const fn versions(self) -> RangeInclusive<i16> {
                match self {
                    $( Self::$name => $versions, )+
                }
            }

            const fn first_flexible(self) -> i16 {
                match self {
                    $( Self::$name => $flexible, )+
                }
            }
        }

        impl TryFrom<i16> for ApiKey {
            type Error = DecodeError;

            fn try_from(key: i16) -> Result<Self, DecodeError> {
                match key {
                    $( $key => Ok(Self::$name), )+
                    _ => Err(DecodeError::UnknownApi(key)),
                }
            }
        }
    };
}

apis! {
    Produce = 0, 0..=13, flexible from 9;
    Fetch = 1, 4..=18, flexible from 12;
    ListOffsets = 2, 1..=11, flexible from 6;
    Metadata = 3, 0..=13, flexible from 9;
    OffsetCommit = 8, 0..=10, flexible from 8;
    OffsetFetch = 9, 1..=10, flexible from 6;
    FindCoordinator = 10, 0..=6, flexible from 3;
    JoinGroup = 11, 0..=9, flexible from 6;
    Heartbeat = 12, 0..=4, flexible from 4;
    LeaveGroup = 13, 0..=5, flexible from 4;
    SyncGroup = 14, 0..=5, flexible from 4;
    DescribeGroups = 15, 0..=6, flexible from 5;
    ListGroups = 16, 0..=5, flexible from 3;
    SaslHandshake = 17, 0..=1, flexible from NEVER;
    ApiVersions = 18, 0..=4, flexible from 3;
    CreateTopics = 19, 2..=7, flexible from 5;
    DeleteTopics = 20, 1..=6, flexible from 4;
    DeleteRecords = 21, 0..=2, flexible from 2;
    InitProducerId = 22, 0..=5, flexible from 2;
    OffsetForLeaderEpoch = 23, 2..=4, flexible from 4;
    AddPartitionsToTxn = 24, 0..=5, flexible from 3;
    AddOffsetsToTxn = 25, 0..=4, flexible from 3;
    EndTxn = 26, 0..=5, flexible from 3;
    WriteTxnMarkers = 27, 1..=2, flexible from 1;
    TxnOffsetCommit = 28, 0..=5, flexible from 3;
    DescribeAcls = 29, 1..=3, flexible from 2;
    CreateAcls = 30, 1..=3, flexible from 2;
    DeleteAcls = 31, 1..=3, flexible from 2;
    DescribeConfigs = 32, 1..=4, flexible from 4;
    AlterConfigs = 33, 0..=2, flexible from 2;
    AlterReplicaLogDirs = 34, 1..=2, flexible from 2;
    DescribeLogDirs = 35, 1..=5, flexible from 2;
    SaslAuthenticate = 36, 0..=2, flexible from 2;
    CreatePartitions = 37, 0..=3, flexible from 2;
    DeleteGroups = 42, 0..=2, flexible from 2;
    ElectLeaders = 43, 0..=2, flexible from 2;
    IncrementalAlterConfigs = 44, 0..=1, flexible from 1;
    AlterPartitionReassignments = 45, 0..=1, flexible from 0;
    ListPartitionReassignments = 46, 0..=0, flexible from 0;
    OffsetDelete = 47, 0..=0, flexible from NEVER;
    DescribeClientQuotas = 48, 0..=1, flexible from 1;
    AlterClientQuotas = 49, 0..=1, flexible from 1;
    DescribeUserScramCredentials = 50, 0..=0, flexible from 0;
    AlterUserScramCredentials = 51, 0..=0, flexible from 0;
    DescribeCluster = 60, 0..=2, flexible from 0;
    DescribeProducers = 61, 0..=0, flexible from 0;
    DescribeTransactions = 65, 0..=0, flexible from 0;
    ListTransactions = 66, 0..=2, flexible from 0;
    ConsumerGroupHeartbeat = 68, 0..=1, flexible from 0;
    ConsumerGroupDescribe = 69, 0..=1, flexible from 0;
    DescribeTopicPartitions = 75, 0..=0, flexible from 0;
}

impl ApiKey {
    /// True when `version` has compact lengths and tagged fields.
    pub const fn flexible(self, version: i16) -> bool {
        version >= self.first_flexible()
    }

    /// 2 with tagged fields, else 1.
    pub const fn request_header_version(self, version: i16) -> i16 {
        if self.flexible(version) { 2 } else { 1 }
    }

    /// 1 with tagged fields, else 0. ApiVersions stays at 0: its reader does not know the broker yet.
    pub const fn response_header_version(self, version: i16) -> i16 {
        match self {
            Self::ApiVersions => 0,
            _ if self.flexible(version) => 1,
            _ => 0,
        }
    }

    /// Fails for a version this codec lacks, else says whether it is flexible.
    pub(crate) fn check_decode(self, version: i16) -> Result<bool, DecodeError> {
        match self.versions().contains(&version) {
            true => Ok(self.flexible(version)),
            false => Err(DecodeError::UnsupportedVersion { key: self as i16, version }),
        }
    }

    /// As [`Self::check_decode`], for the other direction.
    pub(crate) fn check_encode(self, version: i16) -> Result<bool, EncodeError> {
        match self.versions().contains(&version) {
            true => Ok(self.flexible(version)),
            false => Err(EncodeError::UnsupportedVersion { key: self as i16, version }),
        }
    }
}

impl std::fmt::Display for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_the_trip_through_numbers() {
        for key in ApiKey::ALL {
            assert_eq!(ApiKey::try_from(*key as i16), Ok(*key));
            assert!(!key.versions().is_empty());
        }
        assert_eq!(ApiKey::try_from(4), Err(DecodeError::UnknownApi(4)));
        assert_eq!(ApiKey::try_from(-1), Err(DecodeError::UnknownApi(-1)));
    }

    #[test]
    fn header_versions_follow_flexibility_except_for_the_answer_to_api_versions() {
        let check = |key: ApiKey, version, request, response| {
            assert_eq!(key.request_header_version(version), request, "{key} {version}");
            assert_eq!(key.response_header_version(version), response, "{key} {version}");
        };
        check(ApiKey::Produce, 8, 1, 0);
        check(ApiKey::Produce, 9, 2, 1);
        check(ApiKey::ApiVersions, 2, 1, 0);
        check(ApiKey::ApiVersions, 3, 2, 0);
        check(ApiKey::SaslHandshake, 1, 1, 0);
        check(ApiKey::DescribeCluster, 0, 2, 1);
    }
}
