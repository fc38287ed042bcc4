//! The spill file alone, with storage that is slow, fails or corrupts; and a state with one beside a state without.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use crate::range::SpaceId;
use crate::request::{Command, DeleteRequest, Op, PutRequest, RangeRequest};
use crate::snapshot::Restorer;
use crate::state::State;

use super::*;

/// In-memory storage with controlled faults.
#[derive(Default)]
struct TestStorage {
    bytes: Mutex<Vec<u8>>,
    fails: AtomicBool,
    refused: AtomicUsize,
    lies: AtomicBool,
    /// Writes block until it is true.
    goes: Mutex<bool>,
    moved: Condvar,
}

impl TestStorage {
    fn new(goes: bool) -> Arc<Self> {
        Arc::new(Self { goes: Mutex::new(goes), ..Self::default() })
    }

    fn go(&self) {
        *self.goes.lock().unwrap() = true;
        self.moved.notify_all();
    }

    fn length(&self) -> usize {
        self.bytes.lock().unwrap().len()
    }
}

impl SpillStorage for Arc<TestStorage> {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        drop(self.moved.wait_while(self.goes.lock().unwrap(), |goes| !*goes).unwrap());
        if self.fails.load(Ordering::Relaxed) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut file = self.bytes.lock().unwrap();
        let (at, end) = (at as usize, at as usize + bytes.len());
        let length = file.len().max(end);
        file.resize(length, 0);
        file[at..end].copy_from_slice(bytes);
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let file = self.bytes.lock().unwrap();
        buffer.copy_from_slice(&file[at as usize..at as usize + buffer.len()]);
        if self.lies.load(Ordering::Relaxed) {
            buffer[0] ^= 1;
        }
        Ok(())
    }
}

fn text(n: usize, length: usize) -> Bytes {
    n.to_string().into_bytes().into_iter().cycle().take(length).collect::<Vec<_>>().into()
}

/// Spills values; returns them with their expected bytes.
fn spill_all(writer: &mut SpillWriter, lengths: impl IntoIterator<Item = usize>) -> Vec<(Value, Bytes)> {
    let values = lengths.into_iter().enumerate().map(|(n, length)| {
        let (bytes, mut value) = (text(n + 1, length), Value::InMemory(text(n + 1, length)));
        writer.spill(&mut value);
        (value, bytes)
    });
    values.collect()
}

fn is_written(value: &Value) -> bool {
    matches!(value, Value::Spilled(spilled) if matches!(*spilled.block.data(), BlockData::File(_)))
}

/// Waits for the writer thread.
fn wait_until(done: impl Fn() -> bool) {
    for _ in 0..60_000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the spill thread made no progress");
}

fn wait_written(values: &[(Value, Bytes)], count: usize) {
    wait_until(|| values.iter().filter(|(value, _)| is_written(value)).count() >= count);
}

fn all_read(values: &[(Value, Bytes)]) -> bool {
    values.iter().all(|(value, bytes)| value.bytes() == *bytes && value.len() == bytes.len())
}

#[test]
fn value_reads_the_same_before_and_after_its_block_is_written() {
    let toy = TestStorage::new(false);
    let mut writer = SpillWriter::new(Some(SpillFile::new(Arc::clone(&toy)).unwrap()));
    let lengths = [50, 1_500, 3_000, 70, 3 * EXTENT_BYTES + 7, 48, EXTENT_BYTES, EXTENT_BYTES + 1, 90];
    let values = spill_all(&mut writer, lengths);
    assert!(values.iter().all(|(value, _)| matches!(value, Value::Spilled(_)) && !is_written(value)));
    assert!(all_read(&values));
    toy.go();
    // All but the last, whose block is not full.
    wait_written(&values, lengths.len() - 1);
    assert!(all_read(&values));
}

#[test]
fn short_values_are_not_spilled() {
    let mut writer = SpillWriter::new(Some(SpillFile::new(TestStorage::new(true)).unwrap()));
    let values = spill_all(&mut writer, [0, 1, MIN_VALUE_BYTES - 1]);
    assert!(values.iter().all(|(value, _)| matches!(value, Value::InMemory(_))));
}

#[test]
fn full_disk_keeps_values_in_memory_and_spilling_resumes() {
    let toy = TestStorage::new(true);
    toy.fails.store(true, Ordering::Relaxed);
    let mut writer = SpillWriter::new(Some(SpillFile::new(Arc::clone(&toy)).unwrap()));
    let refused = spill_all(&mut writer, [EXTENT_BYTES; 3]);
    // The third is open; two are refused. Then writes succeed again.
    wait_until(|| toy.refused.load(Ordering::Relaxed) == 2);
    assert!(all_read(&refused) && refused.iter().all(|(value, _)| !is_written(value)));
    toy.fails.store(false, Ordering::Relaxed);
    let taken = spill_all(&mut writer, [EXTENT_BYTES; 3]);
    wait_written(&taken, 2);
    assert!(all_read(&refused) && all_read(&taken));
}

#[test]
fn extents_of_dropped_values_are_reused() {
    let toy = TestStorage::new(true);
    let mut writer = SpillWriter::new(Some(SpillFile::new(Arc::clone(&toy)).unwrap()));
    for _ in 0..20 {
        let values = spill_all(&mut writer, [EXTENT_BYTES; 5]);
        wait_written(&values, 4);
        assert!(all_read(&values));
    }
    assert!(toy.length() <= 11 * EXTENT_BYTES, "{} bytes", toy.length());
}

#[test]
fn slow_disk_does_not_block_spilling() {
    let toy = TestStorage::new(false);
    let mut writer = SpillWriter::new(Some(SpillFile::new(Arc::clone(&toy)).unwrap()));
    let values = spill_all(&mut writer, [EXTENT_BYTES; 40]);
    assert!(all_read(&values) && values.iter().all(|(value, _)| !is_written(value)));
    toy.go();
    wait_written(&values, 39);
    assert!(all_read(&values));
}

#[test]
#[should_panic(expected = "spilled value checksum mismatch")]
fn corrupted_spilled_value_panics() {
    let toy = TestStorage::new(true);
    let mut writer = SpillWriter::new(Some(SpillFile::new(Arc::clone(&toy)).unwrap()));
    let values = spill_all(&mut writer, [EXTENT_BYTES; 2]);
    wait_written(&values, 1);
    toy.lies.store(true, Ordering::Relaxed);
    values[0].0.bytes();
}

#[derive(Clone, Debug)]
enum Step {
    Put { key: u8, length: usize },
    Delete { key: u8 },
    Compact { back: u8 },
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0..6_u8, 0..2_000_usize).prop_map(|(key, length)| Step::Put { key, length }),
        2 => (0..6_u8).prop_map(|key| Step::Delete { key }),
        1 => (0..40_u8).prop_map(|back| Step::Compact { back }),
        1 => Just(Step::Restore),
    ]
}

fn command(step: &Step, n: usize, state: &State) -> Option<Command> {
    let revision = state.revision(SpaceId::User);
    let op = match step {
        Step::Put { key, length } => Op::Put(PutRequest::new(vec![b'k', *key], text(n, *length))),
        Step::Delete { key } => Op::Delete(DeleteRequest::key(vec![b'k', *key])),
        Step::Compact { back } => {
            Op::Compact { space: SpaceId::User, revision: (revision - i64::from(*back)).max(1) }
        }
        Step::Restore => return None,
    };
    Some(Command::client(op))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn state_with_spill_file_replies_like_one_without(steps in proptest::collection::vec(step(), 1..160)) {
        let spill = SpillFile::new(TestStorage::new(true)).unwrap();
        let (mut with, mut without) = (State::with_spill(Some(spill.clone())), State::new());
        for (n, step) in steps.iter().enumerate() {
            let index = with.applied_index() + 1;
            match command(step, n, &without) {
                Some(command) => prop_assert_eq!(with.apply(index, command.clone()), without.apply(index, command)),
                None => {
                    let mut restorer = Restorer::with_spill(Some(spill.clone()));
                    with.snapshot().for_each(|chunk| restorer.push(&chunk).unwrap());
                    with = restorer.finish().unwrap();
                }
            }
        }
        let oldest = without.compact_revision(SpaceId::User).max(1);
        for revision in oldest..=without.revision(SpaceId::User) {
            let all = RangeRequest { revision, ..RangeRequest::between("k", "l") };
            prop_assert_eq!(with.range(&all), without.range(&all));
        }
        prop_assert_eq!(with.hash_kv(SpaceId::User, 0), without.hash_kv(SpaceId::User, 0));
        let bytes = |state: &State| state.snapshot().flatten().collect::<Vec<u8>>();
        prop_assert_eq!(bytes(&with), bytes(&without));
    }
}
