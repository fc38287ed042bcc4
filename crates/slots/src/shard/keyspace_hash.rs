//! Keyspace hash check: primary and replicas hash the keyspace at one journal offset and compare.
//!
//! Every [`Shard::set_check_interval`] in which something changed, the primary records CHECK. Every replica, and the
//! primary itself, begins an image of the keyspace at that offset (`keyspace/image.rs`) and hashes it in the
//! background, a few hundred keys under the lock at a time. The hash is a sum of hashes of keys, so the order of keys
//! and of members does not matter. The primary records its hash (HASH); a replica whose own hash differs replays its
//! snapshot and journal again. A second mismatch disables the replica: it leaves the in-sync set and is not elected.
//!
//! Limits: of a string over [`MAX_STRING_BYTES`] its two ends are hashed, of a collection over [`MAX_MEMBERS`] its size
//! and, where it has an order, its ends; consumers of streams are not hashed.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::offload;

use super::{Role, Shard, State};
use crate::keyspace::{Item, Keyspace};
use crate::shared::Shared;
use crate::value::Value;

/// Effect: hash the keyspace at this journal offset.
pub(crate) const CHECK: &[u8] = b"\0check";
/// Effect: the hash of the primary.
pub(crate) const HASH: &[u8] = b"\0hash";

/// The id of the image that is hashed; images of slot migrations have small ids.
const IMAGE: u64 = u64::MAX;
/// Bytes of digests that are computed under the lock at a time.
const STEP_BYTES: usize = 512 * 8;
/// The pause between two steps.
const STEP_PAUSE: Duration = Duration::from_millis(1);
/// How often a due check or a mismatch is looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Of a longer string only both ends are hashed.
const MAX_STRING_BYTES: usize = 64 << 10;
/// Of a larger collection only a part is hashed.
const MAX_MEMBERS: usize = 1_024;

/// The keyspace hash checks of one replica.
#[derive(Default)]
pub(crate) struct HashChecks {
    /// The check whose image is to be hashed.
    open: Option<u64>,
    own: Option<(u64, u64)>,
    primary: Option<(u64, u64)>,
    /// The journal end when the last check was recorded.
    end: i64,
    /// The time of the last check on the monotonic clock.
    at_ms: u64,
    mismatches: u32,
}

impl HashChecks {
    /// The keyspace was discarded: hashes of it are worthless.
    pub(super) fn reset(&mut self) {
        (self.open, self.own, self.primary) = (None, None, None);
    }

    /// The check whose two hashes are known and differ. Returned once.
    fn take_mismatch(&mut self) -> Option<u64> {
        let ((id, own), (of, primary)) = (self.own?, self.primary?);
        if id != of {
            return None;
        }
        (self.own, self.primary) = (None, None);
        (own != primary).then_some(id)
    }
}

impl State {
    /// CHECK: begins the image at this offset.
    pub(crate) fn begin_check(&mut self, id: u64) {
        self.db.begin_image(IMAGE, None, write_digest);
        self.hash_checks.open = Some(id);
    }

    /// HASH: the hash of the primary.
    pub(crate) fn end_check(&mut self, id: u64, hash: u64) {
        self.hash_checks.primary = Some((id, hash));
    }
}

/// Hashes one step of the image: `None` if the image was dropped, otherwise whether it is complete.
fn hash_step(db: &mut Keyspace, sum: &mut u64) -> Option<bool> {
    let mut digests = Vec::with_capacity(STEP_BYTES);
    let is_over = db.image_step(IMAGE, STEP_BYTES, &mut digests)?;
    for digest in digests.chunks_exact(8) {
        *sum = sum.wrapping_add(digest.try_into().map_or(0, u64::from_le_bytes));
    }
    Some(is_over)
}

/// Runs keyspace hash checks until the shard leaves this node.
pub(crate) async fn run(shared: Arc<Shared>, shard: Arc<Shard>) {
    loop {
        tokio::select! {
            biased;
            () = shard.removed.stopped() => return,
            () = rest(POLL_INTERVAL) => {}
        }
        if shard.role() != Role::Loading
            && let Some(id) = maybe_begin_check(&shared, &shard)
        {
            hash_image(&shared, &shard, id).await;
        }
    }
}

/// Handles a mismatch, and begins a check if one is due. Returns the check whose image is to be hashed.
fn maybe_begin_check(shared: &Shared, shard: &Shard) -> Option<u64> {
    let interval_ms = shard.check_interval_ms.load(Ordering::Relaxed);
    let mut turn = shard.turn(shared)?;
    if let Some(id) = turn.state.hash_checks.take_mismatch() {
        on_mismatch(shard, &mut turn.state, id);
        turn.finish();
        return None;
    }
    let now_ms = shared.clock.monotonic_ms();
    let state = &mut *turn.state;
    let is_due = now_ms.saturating_sub(state.hash_checks.at_ms) >= interval_ms;
    if shard.role() == Role::Primary && state.hash_checks.open.is_none() && is_due {
        state.hash_checks.at_ms = now_ms;
        if state.applied > state.hash_checks.end {
            let id = state.end().to_string();
            turn.step(&[CHECK, id.as_bytes()]);
        }
    }
    let open = turn.state.hash_checks.open;
    turn.finish();
    open
}

/// Hashes the image of a check, and records the hash if this node leads.
async fn hash_image(shared: &Arc<Shared>, shard: &Arc<Shard>, id: u64) {
    let mut sum = 0;
    loop {
        let whose = Arc::clone(shard);
        let hashed = offload(move || {
            let mut state = whose.lock();
            let is_open = state.hash_checks.open == Some(id);
            let step = if is_open { hash_step(&mut state.db, &mut sum) } else { None };
            if step.is_none() && is_open {
                state.hash_checks.open = None;
            }
            Ok((step, sum))
        });
        match hashed.await {
            Ok((Some(is_over), so_far)) => {
                sum = so_far;
                if is_over {
                    break;
                }
            }
            // The keyspace was discarded, or another check began.
            Ok((None, _)) | Err(_) => return,
        }
        tokio::time::sleep(STEP_PAUSE).await;
    }
    let (shared, shard) = (Arc::clone(shared), Arc::clone(shard));
    let recorded = offload(move || {
        record_hash(&shared, &shard, id, sum);
        Ok(())
    });
    if let Err(error) = recorded.await {
        tracing::error!(%error, "keyspace hash not recorded");
    }
}

/// The hash of this replica is complete: stores it, and records it in the journal on the primary.
fn record_hash(shared: &Shared, shard: &Shard, id: u64, sum: u64) {
    let mut turn = shard.turn_blocking(shared);
    if turn.state.hash_checks.open.take_if(|open| *open == id).is_some() {
        turn.state.hash_checks.own = Some((id, sum));
        if shard.role() == Role::Primary && turn.state.epoch != -1 {
            turn.step(&[HASH, id.to_string().as_bytes(), sum.to_string().as_bytes()]);
            turn.append();
            turn.state.hash_checks.end = turn.state.end();
        }
    }
    turn.finish();
}

fn on_mismatch(shard: &Shard, state: &mut State, id: u64) {
    state.hash_checks.mismatches += 1;
    shard.mismatches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let mismatches = state.hash_checks.mismatches;
    tracing::error!(
        shard = shard.index,
        check = id,
        mismatches,
        "keyspace hash mismatch between primary and replica"
    );
    if shard.role() != Role::Replica {
        // The replicas have replayed the same journal: each that differs resets itself.
        return;
    }
    shard.set_role(Role::Loading);
    shard.void_pending_replies();
    state.reset();
    if mismatches > 1 {
        shard.disable(state.applied, &"keyspace hash mismatch again after the replica was replayed");
    }
}

/// Writes the digest of one key; independent of the encoding of its value.
fn write_digest(out: &mut Vec<u8>, key: &[u8], item: Item<'_>, expires_at: Option<i64>) {
    let mut hasher = DefaultHasher::new();
    (key, expires_at).hash(&mut hasher);
    match item {
        Item::Str(string) => hash_string(&mut hasher, string),
        Item::Value(value) => hash_value(&mut hasher, value),
    }
    out.extend_from_slice(&hasher.finish().to_le_bytes());
}

fn hash_string(hasher: &mut DefaultHasher, string: &[u8]) {
    string.len().hash(hasher);
    if string.len() <= MAX_STRING_BYTES {
        hasher.write(string);
    } else {
        hasher.write(&string[..MAX_STRING_BYTES / 2]);
        hasher.write(&string[string.len() - MAX_STRING_BYTES / 2..]);
    }
}

fn hash_value(hasher: &mut DefaultHasher, value: &Value) {
    match value {
        Value::Str(string) => hash_string(hasher, string),
        Value::List(list) => {
            list.len().hash(hasher);
            list.iter().take(MAX_MEMBERS).for_each(|element| hash_string(hasher, element));
            list.iter().rev().take(MAX_MEMBERS).for_each(|element| hash_string(hasher, element));
        }
        Value::Set(set) => {
            set.len().hash(hasher);
            let few = if set.len() <= MAX_MEMBERS { MAX_MEMBERS } else { 0 };
            unordered(set.iter().take(few).map(|member| digest(&[member.as_ref()]))).hash(hasher);
        }
        Value::Hash(hash) => {
            hash.len().hash(hasher);
            let few = if hash.len() <= MAX_MEMBERS { MAX_MEMBERS } else { 0 };
            unordered(hash.iter().take(few).map(|(field, value)| digest(&[field, value]))).hash(hasher);
        }
        Value::Zset(zset) => {
            zset.len().hash(hasher);
            for (member, score) in zset.iter().take(MAX_MEMBERS) {
                hash_string(hasher, member);
                score.to_bits().hash(hasher);
            }
        }
        Value::Stream(stream) => {
            let id = |id: crate::value::stream::Id| (id.ms, id.seq);
            (stream.len(), id(stream.first_id()), stream.last_entry_id().map(id)).hash(hasher);
        }
    }
}

fn digest(parts: &[&[u8]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.iter().for_each(|part| hash_string(&mut hasher, part));
    hasher.finish()
}

fn unordered(digests: impl Iterator<Item = u64>) -> u64 {
    digests.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effects;
    use crate::session::Session;
    use crate::shard::tests::frames::Fixture;

    fn hash(state: &mut State) -> u64 {
        state.begin_check(1);
        let mut sum = 0;
        while hash_step(&mut state.db, &mut sum) == Some(false) {}
        sum
    }

    fn replica(fixture: &Fixture) -> State {
        let mut state = State::empty();
        for (_, payload) in fixture.frames() {
            let frame = effects::parse(&payload).unwrap();
            state.replay_frame(&fixture.shared, &mut Session::internal(), frame).unwrap();
        }
        state
    }

    #[test]
    fn primary_and_replica_have_the_same_hash_until_a_key_differs() {
        let mut fixture = Fixture::new();
        for n in 0..300 {
            let (key, member) = (format!("key:{n}"), format!("m{}", n * 7 % 300));
            fixture.turn(&[
                &["SET", &key, &member],
                &["SADD", "set", &member],
                &["HSET", "hash", &member, &key],
            ]);
            fixture.turn(&[
                &["ZADD", "zset", "1", &member],
                &["RPUSH", "list", &member],
                &["XADD", "x", "*", "f", "v"],
            ]);
        }
        fixture.turn(&[&["PEXPIREAT", "key:1", "99000000"], &["SREM", "set", "m5"], &["LPOP", "list"]]);
        let wanted = hash(&mut fixture.shard.lock());
        assert_eq!(hash(&mut replica(&fixture)), wanted, "other hash seeds, other encodings");
        let changes: [fn(&mut State); 6] = [
            |state| state.db.set_str(b"key:7", b"other", None),
            |state| {
                state.db.set_expiry(b"key:1", None);
            },
            |state| {
                state.db.remove(b"key:250");
            },
            |state| state.db.set_str(b"new", b"", None),
            |state| state.db.set_str(b"list", b"not a list", None),
            |state| {
                state.db.set_expiry(b"hash", Some(99_000_000));
            },
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut differs = replica(&fixture);
            change(&mut differs);
            assert_ne!(hash(&mut differs), wanted, "change {number}");
        }
    }

    #[test]
    fn the_hash_shows_the_keyspace_at_the_offset_of_its_check() {
        let mut fixture = Fixture::new();
        fixture.turn(&[&["SET", "a", "1"], &["SET", "b", "1"]]);
        let wanted = hash(&mut fixture.shard.lock());
        let mut turn = fixture.shard.turn(&fixture.shared).unwrap();
        turn.step(&[CHECK, b"7"]);
        turn.finish();
        // Both primary and replica have executed more commands when they hash.
        fixture.turn(&[&["SET", "a", "2"], &["DEL", "b"]]);
        assert_eq!(fixture.shard.lock().hash_checks.open, Some(7));
        let mut sum = 0;
        while hash_step(&mut fixture.shard.lock().db, &mut sum) == Some(false) {}
        record_hash(&fixture.shared, &fixture.shard, 7, sum);
        let mut same = replica(&fixture);
        assert_eq!(same.hash_checks.primary, Some((7, wanted)));
        let mut sum = 0;
        while hash_step(&mut same.db, &mut sum) == Some(false) {}
        same.hash_checks.own = Some((7, sum));
        assert_eq!(same.hash_checks.take_mismatch(), None);
        (same.hash_checks.own, same.hash_checks.primary) = (Some((8, 1)), Some((8, 2)));
        assert_eq!(same.hash_checks.take_mismatch(), Some(8));
        assert_eq!(same.hash_checks.take_mismatch(), None, "reported once");
        (same.hash_checks.own, same.hash_checks.primary) = (Some((8, 1)), Some((9, 2)));
        assert_eq!(same.hash_checks.take_mismatch(), None, "hashes of two checks are not compared");
    }
    #[test]
    fn replica_with_a_hash_mismatch_is_rebuilt_and_after_a_second_one_disabled() {
        let mut fixture = Fixture::new();
        fixture.turn(&[&["SET", "a", "1"]]);
        let mismatch = |role| {
            fixture.shard.set_role(role);
            let mut state = fixture.shard.lock();
            (state.hash_checks.own, state.hash_checks.primary) = (Some((8, 1)), Some((8, 2)));
            drop(state);
            maybe_begin_check(&fixture.shared, &fixture.shard);
        };
        mismatch(Role::Primary);
        assert_eq!(
            (fixture.shard.role(), fixture.shard.lock().applied),
            (Role::Primary, 1),
            "the replicas differ from it"
        );
        fixture.shard.lock().hash_checks.mismatches = 0;
        mismatch(Role::Replica);
        assert_eq!(
            (fixture.shard.role(), fixture.shard.lock().applied),
            (Role::Loading, 0),
            "read from the journal again"
        );
        assert!(!fixture.shard.is_disabled());
        mismatch(Role::Replica);
        assert!(
            fixture.shard.is_disabled() && fixture.shard.log.journal().is_damaged(),
            "it cannot be elected"
        );
    }
}
