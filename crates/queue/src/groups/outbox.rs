//! The context of a coordinator step besides the group itself: time, configuration, member ids, and the resulting
//! effects and writes.
//!
//! Invariant: a token of a pending response is in exactly one place: a waiting member, a write in flight, or an
//! effect. Tokens of writes grow with the order of their effects.

use std::sync::Arc;

use hashbrown::HashMap;

use super::api::{
    Effect, GroupRecord, JoinResponse, PersistToken, Response, Token, TopicErrors, TxnProducer,
};
use super::codes::ErrorCode;
use super::offsets::TopicPartition;
use super::{Config, records};

/// The step context; see the module comment.
pub(super) struct Outbox {
    pub(super) config: Config,
    pub(super) now: u64,
    /// Wall time minus `now`: timestamps in records are wall time, deadlines never are.
    pub(super) wall_minus_now_ms: i64,
    pub(super) effects: Vec<Effect>,
    pub(super) writes: HashMap<PersistToken, Write>,
    pub(super) deletes: HashMap<Token, DeleteBatch>,
    pub(super) last_write: u64,
    pub(super) ids: MemberIds,
}

/// A write in flight.
pub(super) struct Write {
    pub(super) group: Arc<str>,
    pub(super) then: OnWritten,
}

/// What a completed write triggers.
pub(super) enum OnWritten {
    /// Nothing: the write only saves work after a restart.
    Nothing,
    /// The leader's assignment, to distribute to the waiting members.
    Assignment { assignments: Vec<(Arc<str>, bytes::Bytes)> },
    /// A static member that rejoined under a new member id.
    StaticJoin { token: Token, response: JoinResponse },
    /// Offsets; the group holds them under the write's token.
    Commit { token: Token, response: Vec<TopicErrors> },
    /// Offsets of a transaction; the group holds them under the write's token.
    TxnCommit { token: Token, response: Vec<TopicErrors>, producer_id: i64 },
    /// Tombstones of offsets, and the response if a request caused them.
    Tombstones { keys: Vec<TopicPartition>, asked: Option<(Token, Vec<TopicErrors>)> },
    /// Tombstones of a whole group that was empty in this generation.
    DeleteGroup { token: Token, index: usize, keys: Vec<TopicPartition>, generation: i32 },
}

/// A DeleteGroups request whose tombstones are being written.
pub(super) struct DeleteBatch {
    pub(super) results: Vec<(Arc<str>, ErrorCode)>,
    pub(super) in_flight: usize,
}

impl Outbox {
    pub(super) fn wall_ms(&self) -> i64 {
        self.wall_minus_now_ms.saturating_add_unsigned(self.now)
    }

    pub(super) fn reply(&mut self, token: Token, response: Response) {
        self.effects.push(Effect::Reply(token, response));
    }

    /// The token of the next write.
    pub(super) fn next_write(&self) -> PersistToken {
        PersistToken(self.last_write + 1)
    }

    pub(super) fn persist(
        &mut self,
        group: &Arc<str>,
        records: Vec<GroupRecord>,
        txn: Option<TxnProducer>,
        then: OnWritten,
    ) -> PersistToken {
        let token = self.next_write();
        self.last_write = token.0;
        self.effects.push(Effect::Persist { group: group.clone(), records, txn, then: token });
        self.writes.insert(token, Write { group: group.clone(), then });
        token
    }

    /// Tombstones for these offsets and, if it has a record, for the group itself.
    pub(super) fn tombstones(group: &str, keys: &[TopicPartition], with_group: bool) -> Vec<GroupRecord> {
        let offset =
            |(topic, partition): &TopicPartition| (records::offset_key(group, topic, *partition), None);
        let of_group = with_group.then(|| (records::group_key(group), None));
        keys.iter().map(offset).chain(of_group).collect()
    }
}

/// Generates member ids that are unique across processes and restarts: a random seed and a counter.
pub(super) struct MemberIds {
    seed: u128,
    count: u64,
}

impl MemberIds {
    pub(super) fn new(seed: u128) -> Self {
        Self { seed, count: 0 }
    }

    /// An id as Kafka forms it: the instance id or the client id, a dash, a UUID.
    pub(super) fn next(&mut self, prefix: &str) -> Arc<str> {
        self.count += 1;
        let high = mix(self.count ^ (self.seed >> 64) as u64);
        let low = mix(self.count.wrapping_add(high) ^ self.seed as u64);
        let hex = format!("{high:016x}{low:016x}");
        let cut = (0..=prefix.len().min(MAX_PREFIX)).rev().find(|at| prefix.is_char_boundary(*at));
        let prefix = &prefix[..cut.unwrap_or(0)];
        let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        Arc::from(format!("{prefix}-{a}-{b}-{c}-{d}-{e}"))
    }
}

/// Keeps ids well below the maximum string length of a record; no real client comes near it.
const MAX_PREFIX: usize = 1024;

/// A bijection that scatters the bits (the finisher of splitmix64), so that ids do not look like a counter.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
