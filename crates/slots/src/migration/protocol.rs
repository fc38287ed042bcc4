//! The slot migration protocol between the primaries of target and source: one response per request, over a connection
//! of the peer port (`peer.rs`).
//!
//! The target asks and keeps the position; the source keeps no state that a new primary would miss. The serialized
//! names are part of the wire format: a variant that is renamed keeps its name on the wire.

use serde::{Deserialize, Serialize};

/// A request of the target to the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MigrationRequest {
    /// Start a snapshot of the keys in the slots of a migration.
    #[serde(rename = "Begin")]
    StartSnapshot {
        /// The migration id.
        id: u64,
    },
    /// The next keys of the snapshot.
    #[serde(rename = "More")]
    NextKeys {
        /// The migration id.
        id: u64,
    },
    /// The effects on these slots from an offset of the source's journal on.
    Tail {
        /// The migration id.
        id: u64,
        /// The journal offset.
        from: i64,
    },
    /// Freeze the slots: their keys must not change any more.
    Freeze {
        /// The migration id.
        id: u64,
        /// The attempt under which they are frozen.
        attempt: u32,
    },
}

impl MigrationRequest {
    /// The migration id.
    pub(crate) fn id(&self) -> u64 {
        match self {
            Self::StartSnapshot { id }
            | Self::NextKeys { id }
            | Self::Tail { id, .. }
            | Self::Freeze { id, .. } => *id,
        }
    }
}

/// The response of the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MigrationResponse {
    /// The snapshot shows the source's journal up to this offset.
    #[serde(rename = "Begun")]
    SnapshotStarted {
        /// The journal offset.
        position: i64,
    },
    /// The next bytes of the keys, cut anywhere.
    Keys {
        /// True if the snapshot is complete.
        is_last: bool,
        /// How much later a timer fired on the source while it worked on these keys.
        #[serde(default)]
        late_us: u64,
        /// True if the source served clients meanwhile.
        #[serde(default)]
        is_shared: bool,
    },
    /// Effects up to the offset `next`.
    Tail {
        /// The offset after the last effect.
        next: i64,
        /// True if that was the high watermark of the source.
        is_all: bool,
    },
    /// The slots are frozen: every effect on them is below this offset.
    Frozen {
        /// The journal offset.
        end: i64,
    },
    /// The snapshot or the journal range is gone: the target must import from the start.
    #[serde(rename = "Gone")]
    Restart,
    /// This node does not lead the shard, or knows no such migration.
    #[serde(rename = "NotHere")]
    NotPrimary,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_responses_keep_their_names_on_the_wire() {
        let json = |request: &MigrationRequest| serde_json::to_string(request).unwrap();
        assert_eq!(json(&MigrationRequest::StartSnapshot { id: 7 }), r#"{"Begin":{"id":7}}"#);
        assert_eq!(json(&MigrationRequest::NextKeys { id: 7 }), r#"{"More":{"id":7}}"#);
        assert_eq!(json(&MigrationRequest::Tail { id: 7, from: 3 }), r#"{"Tail":{"id":7,"from":3}}"#);
        assert_eq!(
            json(&MigrationRequest::Freeze { id: 7, attempt: 1 }),
            r#"{"Freeze":{"id":7,"attempt":1}}"#
        );
        let json = |response: &MigrationResponse| serde_json::to_string(response).unwrap();
        assert_eq!(json(&MigrationResponse::SnapshotStarted { position: 3 }), r#"{"Begun":{"position":3}}"#);
        let keys = MigrationResponse::Keys { is_last: true, late_us: 1, is_shared: false };
        assert_eq!(json(&keys), r#"{"Keys":{"is_last":true,"late_us":1,"is_shared":false}}"#);
        assert_eq!(
            json(&MigrationResponse::Tail { next: 3, is_all: true }),
            r#"{"Tail":{"next":3,"is_all":true}}"#
        );
        assert_eq!(json(&MigrationResponse::Frozen { end: 3 }), r#"{"Frozen":{"end":3}}"#);
        assert_eq!(json(&MigrationResponse::Restart), r#""Gone""#);
        assert_eq!(json(&MigrationResponse::NotPrimary), r#""NotHere""#);
        assert_eq!(
            serde_json::from_str::<MigrationResponse>(r#"{"Keys":{"is_last":false}}"#).unwrap(),
            MigrationResponse::Keys { is_last: false, late_us: 0, is_shared: false },
            "of a version without a throttle"
        );
    }
}
