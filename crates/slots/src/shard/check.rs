//! Replicas are compared with their primary: a hash of the keyspace at one position of the journal.
//!
//! Every [`Shard::set_check_interval`] in which something changed, the primary records CHECK. Every replica, and the primary itself, begins an
//! image of the keyspace where that step stands (`keyspace/image.rs`) and walks it in the background, a few hundred keys
//! under the lock at a time. The hash is a sum of hashes of keys, so the order of keys and of members does not matter. The
//! primary records what it found (HASH); a replica whose own hash differs reads its snapshot and journal anew. One that
//! differs again is disabled: it leaves the in-sync set and is not elected.
//!
//! Limits: of a string over [`BYTES`] its two ends are hashed, of a collection over [`MEMBERS`] its size and, where it has an
//! order, its ends; consumers of streams are not.

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

/// A hash is to be made of the keyspace as it is here.
pub(crate) const CHECK: &[u8] = b"\0check";
/// What the primary found.
pub(crate) const HASH: &[u8] = b"\0hash";

/// The image that is walked; those of moves have small numbers.
const IMAGE: u64 = u64::MAX;
/// Bytes of digests that are made under the lock at a time.
const STEP: usize = 512 * 8;
/// Between two of these steps.
const PAUSE: Duration = Duration::from_millis(1);
/// Between looks.
const TICK: Duration = Duration::from_millis(500);
/// A longer string is hashed in part.
const BYTES: usize = 64 << 10;
/// A larger collection is hashed in part.
const MEMBERS: usize = 1_024;

/// The checks of a shard, as one replica knows them.
#[derive(Default)]
pub(crate) struct Checks {
    /// The check whose image is to be walked.
    open: Option<u64>,
    ours: Option<(u64, u64)>,
    theirs: Option<(u64, u64)>,
    /// Where the journal ended when the last check was recorded.
    end: i64,
    /// When that was, on the monotonic clock.
    at_ms: u64,
    mismatches: u32,
}

impl Checks {
    /// The keyspace is read anew.
    pub(super) fn forget(&mut self) {
        (self.open, self.ours, self.theirs) = (None, None, None);
    }

    /// Whether both hashes of one check are there and differ. Asked once.
    fn take_mismatch(&mut self) -> Option<u64> {
        let ((id, ours), (of, theirs)) = (self.ours?, self.theirs?);
        if id != of {
            return None;
        }
        (self.ours, self.theirs) = (None, None);
        (ours != theirs).then_some(id)
    }
}

impl State {
    /// CHECK: the image begins here.
    pub(crate) fn begin_check(&mut self, id: u64) {
        self.db.begin_image(IMAGE, None, write_digest);
        self.checks.open = Some(id);
    }

    /// HASH: what the primary found.
    pub(crate) fn end_check(&mut self, id: u64, hash: u64) {
        self.checks.theirs = Some((id, hash));
    }
}

/// Walks a step of the image: `None` when it was given up, otherwise whether it is over.
fn walk(db: &mut Keyspace, sum: &mut u64) -> Option<bool> {
    let mut digests = Vec::with_capacity(STEP);
    let is_over = db.image_step(IMAGE, STEP, &mut digests)?;
    for digest in digests.chunks_exact(8) {
        *sum = sum.wrapping_add(digest.try_into().map_or(0, u64::from_le_bytes));
    }
    Some(is_over)
}

/// Compares the replicas of a shard until it is gone.
pub(crate) async fn run(shared: Arc<Shared>, shard: Arc<Shard>) {
    loop {
        tokio::select! {
            biased;
            () = shard.gone.stopped() => return,
            () = rest(TICK) => {}
        }
        if shard.role() != Role::Loading
            && let Some(id) = look(&shared, &shard)
        {
            walk_all(&shared, &shard, id).await;
        }
    }
}

/// Acts on what was found, and begins a check where it is time. Gives the one whose image is to be walked.
fn look(shared: &Shared, shard: &Shard) -> Option<u64> {
    let interval_ms = shard.check_interval_ms.load(Ordering::Relaxed);
    let mut turn = shard.turn(shared)?;
    if let Some(id) = turn.state.checks.take_mismatch() {
        on_mismatch(shard, &mut turn.state, id);
        turn.finish();
        return None;
    }
    let now_ms = shared.clock.monotonic_ms();
    let state = &mut *turn.state;
    let is_due = now_ms.saturating_sub(state.checks.at_ms) >= interval_ms;
    if shard.role() == Role::Primary && state.checks.open.is_none() && is_due {
        state.checks.at_ms = now_ms;
        if state.applied > state.checks.end {
            let id = state.end().to_string();
            turn.step(&[CHECK, id.as_bytes()]);
        }
    }
    let open = turn.state.checks.open;
    turn.finish();
    open
}

/// Walks the image of a check, and records the hash where this node leads.
async fn walk_all(shared: &Arc<Shared>, shard: &Arc<Shard>, id: u64) {
    let mut sum = 0;
    loop {
        let whose = Arc::clone(shard);
        let walked = offload(move || {
            let mut state = whose.lock();
            let is_open = state.checks.open == Some(id);
            let step = if is_open { walk(&mut state.db, &mut sum) } else { None };
            if step.is_none() && is_open {
                state.checks.open = None;
            }
            Ok((step, sum))
        });
        match walked.await {
            Ok((Some(is_over), so_far)) => {
                sum = so_far;
                if is_over {
                    break;
                }
            }
            // The keyspace was read anew, or another check began.
            Ok((None, _)) | Err(_) => return,
        }
        tokio::time::sleep(PAUSE).await;
    }
    let (shared, shard) = (Arc::clone(shared), Arc::clone(shard));
    let noted = offload(move || {
        note(&shared, &shard, id, sum);
        Ok(())
    });
    if let Err(error) = noted.await {
        tracing::error!(%error, "keyspace hash not recorded");
    }
}

/// The hash of this replica is known.
fn note(shared: &Shared, shard: &Shard, id: u64, sum: u64) {
    let mut turn = shard.turn_away(shared);
    if turn.state.checks.open.take_if(|open| *open == id).is_some() {
        turn.state.checks.ours = Some((id, sum));
        if shard.role() == Role::Primary && turn.state.epoch != -1 {
            turn.step(&[HASH, id.to_string().as_bytes(), sum.to_string().as_bytes()]);
            turn.append();
            turn.state.checks.end = turn.state.end();
        }
    }
    turn.finish();
}

fn on_mismatch(shard: &Shard, state: &mut State, id: u64) {
    state.checks.mismatches += 1;
    shard.mismatches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let mismatches = state.checks.mismatches;
    tracing::error!(
        shard = shard.index,
        check = id,
        mismatches,
        "keyspace hash mismatch between primary and replica"
    );
    if shard.role() != Role::Replica {
        // Its replicas have read the same journal: those that differ from it read theirs anew.
        return;
    }
    shard.set_role(Role::Loading);
    shard.void_answers();
    state.forget();
    if mismatches > 1 {
        shard.disable(state.applied, &"keyspace hash mismatch again after the replica was read anew");
    }
}

/// The hash of one key, whatever form its value has.
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
    if string.len() <= BYTES {
        hasher.write(string);
    } else {
        hasher.write(&string[..BYTES / 2]);
        hasher.write(&string[string.len() - BYTES / 2..]);
    }
}

fn hash_value(hasher: &mut DefaultHasher, value: &Value) {
    match value {
        Value::Str(string) => hash_string(hasher, string),
        Value::List(list) => {
            list.len().hash(hasher);
            list.iter().take(MEMBERS).for_each(|element| hash_string(hasher, element));
            list.iter().rev().take(MEMBERS).for_each(|element| hash_string(hasher, element));
        }
        Value::Set(set) => {
            set.len().hash(hasher);
            let few = if set.len() <= MEMBERS { MEMBERS } else { 0 };
            unordered(set.iter().take(few).map(|member| digest(&[member.as_ref()]))).hash(hasher);
        }
        Value::Hash(hash) => {
            hash.len().hash(hasher);
            let few = if hash.len() <= MEMBERS { MEMBERS } else { 0 };
            unordered(hash.iter().take(few).map(|(field, value)| digest(&[field, value]))).hash(hasher);
        }
        Value::Zset(zset) => {
            zset.len().hash(hasher);
            for (member, score) in zset.iter().take(MEMBERS) {
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
    use crate::shard::tests::frames::Bed;

    fn hash(state: &mut State) -> u64 {
        state.begin_check(1);
        let mut sum = 0;
        while walk(&mut state.db, &mut sum) == Some(false) {}
        sum
    }

    fn replica(bed: &Bed) -> State {
        let mut state = State::empty();
        for (_, payload) in bed.frames() {
            let frame = effects::parse(&payload).unwrap();
            state.replay_frame(&bed.shared, &mut Session::nobody(), frame).unwrap();
        }
        state
    }

    #[test]
    fn a_replica_has_the_hash_of_its_primary_until_anything_differs() {
        let mut bed = Bed::new();
        for n in 0..300 {
            let (key, member) = (format!("key:{n}"), format!("m{}", n * 7 % 300));
            bed.turn(&[&["SET", &key, &member], &["SADD", "set", &member], &["HSET", "hash", &member, &key]]);
            bed.turn(&[
                &["ZADD", "zset", "1", &member],
                &["RPUSH", "list", &member],
                &["XADD", "x", "*", "f", "v"],
            ]);
        }
        bed.turn(&[&["PEXPIREAT", "key:1", "99000000"], &["SREM", "set", "m5"], &["LPOP", "list"]]);
        let wanted = hash(&mut bed.shard.lock());
        assert_eq!(hash(&mut replica(&bed)), wanted, "other seeds, other forms");
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
            let mut differs = replica(&bed);
            change(&mut differs);
            assert_ne!(hash(&mut differs), wanted, "change {number}");
        }
    }

    #[test]
    fn the_hash_is_of_the_position_of_its_check() {
        let mut bed = Bed::new();
        bed.turn(&[&["SET", "a", "1"], &["SET", "b", "1"]]);
        let wanted = hash(&mut bed.shard.lock());
        let mut turn = bed.shard.turn(&bed.shared).unwrap();
        turn.step(&[CHECK, b"7"]);
        turn.finish();
        // The primary has gone on when it walks, and so has the replica.
        bed.turn(&[&["SET", "a", "2"], &["DEL", "b"]]);
        assert_eq!(bed.shard.lock().checks.open, Some(7));
        let mut sum = 0;
        while walk(&mut bed.shard.lock().db, &mut sum) == Some(false) {}
        note(&bed.shared, &bed.shard, 7, sum);
        let mut same = replica(&bed);
        assert_eq!(same.checks.theirs, Some((7, wanted)));
        let mut sum = 0;
        while walk(&mut same.db, &mut sum) == Some(false) {}
        same.checks.ours = Some((7, sum));
        assert_eq!(same.checks.take_mismatch(), None);
        (same.checks.ours, same.checks.theirs) = (Some((8, 1)), Some((8, 2)));
        assert_eq!(same.checks.take_mismatch(), Some(8));
        assert_eq!(same.checks.take_mismatch(), None, "told once");
        (same.checks.ours, same.checks.theirs) = (Some((8, 1)), Some((9, 2)));
        assert_eq!(same.checks.take_mismatch(), None, "hashes of two checks are not compared");
    }
}
