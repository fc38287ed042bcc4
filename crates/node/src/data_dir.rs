//! The data directory: created once, locked while in use, and bound to one node by `node.json`.
//!
//! `node.json` also holds the formation state of the data directory ([`Admission`]). Each step is recorded before it
//! takes effect, so that a node resumes after a crash in between: a voter id belongs to one data directory for ever,
//! and a data directory that lost its Raft log must never be taken for a new one.
//!
//! Invariants: one process per data directory (an exclusive `flock` held until the process ends; the kernel releases it
//! even after kill -9). `node.json` is replaced atomically. A directory with foreign files, of another node, or of an
//! unsupported format is never modified.

mod runs;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use moim_base::Clock;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::runs::Runs;
pub(crate) use self::runs::{Aside, KnownRun, Replaces};
use crate::exit::{Failure, Outcome, Status};
use crate::journals::LOST_DIRECTORY;

/// The newest layout of the data folder this build reads and writes.
pub const FORMAT: u32 = 3;
/// Oldest format of the data directory that this build reads.
const OLDEST_FORMAT: u32 = 2;
const IDENTITY: &str = "node.json";
const IDENTITY_NEW: &str = "node.json.new";
const LOCK: &str = "node.lock";
/// Field of `node.json` with the checksum of the other fields.
const CHECKSUM: &str = "checksum";

/// `node.json`: identity of the data directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Format of the data directory.
    pub(crate) format: u32,
    /// Cluster id in the 22 characters of a Kafka cluster id; empty before the node is in a cluster.
    pub(crate) cluster_id: String,
    /// Node id.
    pub(crate) node_id: i32,
    /// Incarnation, higher than that of every earlier data directory of this node: its creation time, in ms since 1970.
    pub(crate) incarnation: u64,
    /// Moim version that wrote this file.
    pub(crate) version: String,
    /// Directory id, globally unique, in 22 characters.
    #[serde(default)]
    pub(crate) directory_id: String,
    /// Raft voter id of the data directory; 0 before its admission.
    #[serde(default)]
    pub(crate) voter: u64,
    /// Formation state.
    #[serde(default)]
    pub(crate) admission: Admission,
    /// Founders of the cluster, if this data directory is one of them.
    #[serde(default)]
    pub(crate) founders: Vec<Founder>,
    /// Broker epoch since which no written byte was lost. Set when the node registers, cleared by a start after an
    /// unclean shutdown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) intact_since: Option<i64>,
    /// This data directory's share of the secret of a cluster that it founds. Empty in one from before cluster secrets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) nonce: String,
    /// Cluster secret, in 22 characters; empty in a cluster from before cluster secrets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) secret: String,
    /// Run number: counts the starts. Recorded before the run has any effect.
    #[serde(default)]
    pub(crate) run: u64,
    /// Nonce of the run; the same run number of a copy of the data directory has another one.
    #[serde(default)]
    pub(crate) run_nonce: String,
    /// True if an operator accepted that this is an older copy (`moim cluster recover`), until the run is confirmed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) forced: bool,
    /// Set if the data directory was rolled back or damaged: the next start sets its content aside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) aside: Option<Aside>,
    /// The rolled-back or damaged data directory of the same node that this one replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replaces: Option<Replaces>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Formation state of a data directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Admission {
    /// Not in a cluster.
    #[default]
    New,
    /// A founder, after the founders agreed. The Raft log may not exist yet.
    Founding,
    /// Admitted under its own voter id. The Raft log may not exist yet.
    Joining,
    /// The Raft log exists; without it the data directory is damaged.
    Member,
}

/// A founder of a cluster. Its voter id is its position in the list, from 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Founder {
    /// Node id.
    pub(crate) node_id: i32,
    /// Directory id of its data directory.
    pub(crate) directory_id: String,
    /// Peer address during the founding.
    pub(crate) peer: String,
    /// Its share of the cluster secret. Disclosed to the other founders until they agree, never afterwards.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) nonce: String,
}

impl Identity {
    /// The cluster secret as the peer port uses it.
    pub(crate) fn secret_number(&self) -> u128 {
        decode_id(&self.secret).unwrap_or(0)
    }
}

/// A data directory, locked by this process.
#[derive(Debug)]
pub(crate) struct DataDir {
    /// Path of the data directory.
    pub(crate) path: PathBuf,
    /// Identity as last written to `node.json`.
    identity: Mutex<Identity>,
    /// Held during a write of `node.json` or `runs.json`, so that readers do not wait for the disk.
    writing: Mutex<()>,
    /// Confirmed runs of other voters, as last written to `runs.json`.
    runs: Mutex<Runs>,
    _lock: File,
}

impl DataDir {
    /// Opens the data directory of `node_id`, and creates it and its identity if it is new.
    pub(crate) fn open(path: &Path, node_id: i32, clock: &dyn Clock) -> Outcome<Self> {
        let at =
            |what: &str, error: &io::Error| Failure::error(format!("{what} {}: {error}", path.display()));
        fs::create_dir_all(path).map_err(|error| at("cannot create the data directory", &error))?;
        let lock = lock(path)?;
        let mut identity = match read_identity(path)? {
            Some(identity) => check_identity(path, identity, node_id)?,
            None => {
                reject_foreign_directory(path)?;
                new_identity(node_id, clock)
            }
        };
        if let Some(aside) = identity.aside.clone() {
            identity = runs::set_aside(path, identity, aside)
                .map_err(|error| at("cannot set the content aside of", &error))?;
        }
        // Every start is a new run, recorded before it has any effect.
        identity.run += 1;
        identity.run_nonce = random_id();
        write_identity(path, &identity).map_err(|error| at("cannot write node.json in", &error))?;
        let runs = runs::read(path)?;
        Ok(Self {
            path: path.to_owned(),
            identity: Mutex::new(identity),
            writing: Mutex::new(()),
            runs: Mutex::new(runs),
            _lock: lock,
        })
    }

    /// Identity as last written.
    pub(crate) fn identity(&self) -> Identity {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The newest confirmed run of a voter.
    pub(crate) fn known_run(&self, voter: u64) -> Option<KnownRun> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).get(&voter).cloned()
    }

    /// The voters with confirmed runs, and their last known peer addresses.
    pub(crate) fn known_peers(&self) -> Vec<(u64, String)> {
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter().map(|(voter, run)| (*voter, run.peer.clone())).collect()
    }

    /// Records the confirmed run of another voter on stable storage. False if the same run number with another nonce,
    /// or a higher run number, was confirmed before. Blocks.
    pub(crate) fn confirm_run(&self, voter: u64, run: KnownRun) -> Outcome<bool> {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match runs.get(&voter) {
            Some(known) if known.outdates(&run) => return Ok(false),
            Some(known) if *known == run => return Ok(true),
            Some(_) | None => runs.insert(voter, run),
        };
        runs::write(&self.path, &runs)?;
        *self.runs.lock().unwrap_or_else(PoisonError::into_inner) = runs;
        Ok(true)
    }

    /// Sets the broker epoch since which no written byte was lost; `None` until the next registration.
    pub(crate) fn set_intact_since(&self, since: Option<i64>) -> Outcome {
        self.update(|identity| identity.intact_since = since)
    }

    /// Replaces the identity; durable when this returns.
    pub(crate) fn record(&self, next: Identity) -> Outcome {
        self.update(|identity| *identity = next)
    }

    /// Changes the identity and writes `node.json`, one change at a time.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Identity)) -> Outcome {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.identity();
        let mut identity = before.clone();
        change(&mut identity);
        if identity == before {
            return Ok(());
        }
        write_identity(&self.path, &identity).map_err(|error| {
            Failure::error(format!("cannot write node.json in {}: {error}", self.path.display()))
        })?;
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
        Ok(())
    }
}

/// A random 16-byte id in 22 characters.
pub(crate) fn random_id() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("system random bytes");
    // Id 0 is reserved for no id.
    encode_id(u128::from_be_bytes(bytes).max(1))
}

/// Encodes a 16-byte id in 22 characters.
pub(crate) fn encode_id(id: u128) -> String {
    URL_SAFE_NO_PAD.encode(id.to_be_bytes())
}

/// Decodes a 16-byte id from 22 characters.
pub(crate) fn decode_id(text: &str) -> Option<u128> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    bytes.try_into().ok().map(u128::from_be_bytes)
}

fn lock(path: &Path) -> Outcome<File> {
    let file = path.join(LOCK);
    let cannot = |error: io::Error| Failure::error(format!("cannot lock {}: {error}", file.display()));
    let mut lock =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&file).map_err(cannot)?;
    if let Err(error) = flock_with_retry(&lock) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(cannot(error.into()));
        }
        let mut owner = String::new();
        let _ = lock.read_to_string(&mut owner);
        let owner = owner.trim();
        let owner = if owner.is_empty() { String::new() } else { format!(" (process {owner})") };
        let message = format!("{} is in use by another moim{owner}", path.display());
        return Err(Failure::new(Status::Conflict, message)
            .hint("stop it first, or pass another data directory with --data"));
    }
    // The process id is for the error message of a rejected process only; the flock is the lock.
    lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(cannot)?;
    Ok(lock)
}

/// Acquires the lock, with retries: after kill -9 the kernel holds it until it has freed the memory of the dead
/// process, and an immediate restart must not fail because of that.
fn flock_with_retry(lock: &File) -> rustix::io::Result<()> {
    const PAUSE: Duration = Duration::from_millis(20);
    for _ in 0..50 {
        match flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
    flock(lock, FlockOperation::NonBlockingLockExclusive)
}

fn read_identity(path: &Path) -> Outcome<Option<Identity>> {
    #[derive(Deserialize)]
    struct FormatOnly {
        format: u32,
    }
    let file = path.join(IDENTITY);
    let damaged =
        |why: String| Failure::error(format!("{} is damaged: {why}", file.display())).hint(LOST_DIRECTORY);
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::error(format!("cannot read {}: {error}", file.display()))),
    };
    let mut value: Value = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
    let known = value.as_object_mut().and_then(|fields| fields.remove(CHECKSUM));
    // A file from before checksums has none.
    if known.is_some_and(|known| known != checksum(&value)) {
        return Err(damaged("checksum mismatch".to_owned()));
    }
    // Before the other fields: another format may have fields that this build cannot decode.
    let FormatOnly { format } =
        FormatOnly::deserialize(&value).map_err(|error| damaged(error.to_string()))?;
    if format > FORMAT {
        let message = format!(
            "{} has format {format}, but this moim ({}) reads up to format {FORMAT}",
            path.display(),
            env!("CARGO_PKG_VERSION")
        );
        return Err(Failure::error(message).hint("run the newer moim that wrote it"));
    }
    if format < OLDEST_FORMAT {
        let message = format!(
            "{} has format {format}, but this moim ({}) reads format {OLDEST_FORMAT} to {FORMAT}",
            path.display(),
            env!("CARGO_PKG_VERSION")
        );
        return Err(Failure::error(message).hint("start with an empty data directory"));
    }
    serde_json::from_value(value).map(Some).map_err(|error| damaged(error.to_string()))
}

/// Checksum of all other fields, including fields that this build does not know.
fn checksum(fields: &Value) -> String {
    format!("{:08x}", crc32c::crc32c(fields.to_string().as_bytes()))
}

fn check_identity(path: &Path, mut identity: Identity, node_id: i32) -> Outcome<Identity> {
    if identity.node_id != node_id {
        let message =
            format!("{} belongs to node {}, not to node {node_id}", path.display(), identity.node_id);
        let hint = format!("pass --node-id {} or another data directory with --data", identity.node_id);
        return Err(Failure::new(Status::Conflict, message).hint(hint));
    }
    let undecodable = |id: &str| decode_id(id).is_none_or(|id| id == 0);
    if undecodable(&identity.directory_id)
        || (identity.admission != Admission::New && undecodable(&identity.cluster_id))
        || (identity.admission != Admission::New && identity.voter == 0)
    {
        let file = path.join(IDENTITY);
        return Err(Failure::error(format!("{} is damaged: undecodable or missing ids", file.display()))
            .hint(LOST_DIRECTORY));
    }
    identity.version = env!("CARGO_PKG_VERSION").to_owned();
    identity.format = FORMAT;
    Ok(identity)
}

/// Rejects a non-empty directory without `node.json`, such as `--data ~` by mistake.
fn reject_foreign_directory(path: &Path) -> Outcome {
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if ![LOCK, IDENTITY_NEW, "lost+found"].iter().any(|ours| name == *ours) {
            let message =
                format!("{} is not a data directory: it holds {name:?} but no node.json", path.display());
            return Err(
                Failure::new(Status::Conflict, message).hint("pass an empty or new directory with --data")
            );
        }
    }
    Ok(())
}

fn new_identity(node_id: i32, clock: &dyn Clock) -> Identity {
    Identity {
        format: FORMAT,
        cluster_id: String::new(),
        node_id,
        incarnation: u64::try_from(clock.wall_ms()).unwrap_or(1),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        directory_id: random_id(),
        voter: 0,
        admission: Admission::New,
        founders: Vec::new(),
        intact_since: None,
        nonce: random_id(),
        ..Identity::default()
    }
}

/// Changes the identity of a data directory that no process uses.
pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Identity)) -> Outcome<Identity> {
    let none = || Failure::new(Status::NotFound, format!("{} is not a data directory", path.display()));
    if !path.join(IDENTITY).exists() {
        return Err(none());
    }
    let _lock = lock(path)?;
    let mut identity = read_identity(path)?.ok_or_else(none)?;
    change(&mut identity);
    write_identity(path, &identity)?;
    Ok(identity)
}

/// Writes `node.json` atomically: write, fsync, rename, fsync of the directory. After a crash the old or the new file
/// exists, complete.
fn write_identity(path: &Path, identity: &Identity) -> io::Result<()> {
    let mut value = serde_json::to_value(identity)?;
    let sum = checksum(&value);
    if let Some(fields) = value.as_object_mut() {
        fields.insert(CHECKSUM.to_owned(), sum.into());
    }
    let mut bytes = serde_json::to_vec_pretty(&value)?;
    bytes.push(b'\n');
    write_file(path, IDENTITY, &bytes)
}

fn write_file(path: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = path.join(format!("{name}.new"));
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path.join(name))?;
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moim_base::ManualClock;

    fn open(path: &Path, node_id: i32) -> Outcome<DataDir> {
        DataDir::open(path, node_id, &ManualClock::at(1_700_000_000_000))
    }

    #[test]
    fn bit_flip_in_node_json_never_changes_the_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let first = open(&path, 1).unwrap();
        first.update(|identity| (identity.voter, identity.intact_since) = (3, Some(77))).unwrap();
        let identity = first.identity();
        drop(first);
        let file = path.join(IDENTITY);
        let whole = fs::read(&file).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut rotten = whole.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            fs::write(&file, &rotten).unwrap();
            match read_identity(&path) {
                Ok(found) => assert_eq!(found.as_ref(), Some(&identity), "bit {bit}"),
                Err(failure) => assert!(!failure.message.is_empty()),
            }
        }
    }

    #[test]
    fn identity_survives_a_restart_and_the_lock_is_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/data");
        let first = open(&path, 1).unwrap();
        assert_eq!(first.identity().directory_id.len(), 22);
        let refused = open(&path, 1).unwrap_err();
        assert_eq!(refused.status, Status::Conflict);
        assert!(
            refused.message.contains(&format!("(process {})", std::process::id())),
            "{}",
            refused.message
        );
        let identity = first.identity();
        drop(first);
        assert_eq!(without_run(open(&path, 1).unwrap().identity()), without_run(identity));
    }

    /// The identity without the run, which changes with every start.
    fn without_run(identity: Identity) -> Identity {
        Identity { run: 0, run_nonce: String::new(), ..identity }
    }

    #[test]
    fn each_start_is_a_new_run_and_an_older_copy_is_not_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let (data, other) = (dir.path().join("data"), open(&dir.path().join("other"), 2).unwrap());
        let claim = |identity: &Identity| KnownRun {
            run: identity.run,
            nonce: identity.run_nonce.clone(),
            peer: "h:1".into(),
            index: 0,
        };
        let first = open(&data, 1).unwrap().identity();
        assert!(other.confirm_run(1, claim(&first)).unwrap());
        let copy = fs::read(data.join(IDENTITY)).unwrap();
        let second = open(&data, 1).unwrap().identity();
        assert_eq!((first.run, second.run), (1, 2));
        assert!(other.confirm_run(1, claim(&second)).unwrap());
        assert!(other.confirm_run(1, claim(&second)).unwrap(), "idempotent");
        fs::write(data.join(IDENTITY), copy).unwrap();
        let restored = open(&data, 1).unwrap().identity();
        assert_eq!(restored.run, second.run);
        assert!(!other.confirm_run(1, claim(&restored)).unwrap());
        drop(other);
        let other = open(&dir.path().join("other"), 2).unwrap();
        assert_eq!(other.known_run(1), Some(claim(&second)), "confirmed runs survive a restart");
    }

    #[test]
    fn rolled_back_directory_is_set_aside_and_starts_empty() {
        let dir = tempfile::tempdir().unwrap();
        let data = open(dir.path(), 1).unwrap();
        fs::create_dir(dir.path().join("raft")).unwrap();
        fs::write(dir.path().join("raft/log"), "entries").unwrap();
        let old = Identity {
            cluster_id: encode_id(7),
            secret: encode_id(8),
            voter: 3,
            admission: Admission::Member,
            ..data.identity()
        };
        data.record(old.clone()).unwrap();
        let aside = Aside::new("evidence".into(), vec!["h:1".into()], old.run);
        data.update(|identity| identity.aside = Some(aside.clone())).unwrap();
        drop(data);
        let fresh = open(dir.path(), 1).unwrap().identity();
        assert_eq!((fresh.admission, fresh.voter, fresh.aside), (Admission::New, 0, None));
        assert_ne!(fresh.directory_id, old.directory_id);
        let replaces = fresh.replaces.unwrap();
        assert_eq!((replaces.directory_id, replaces.secret), (old.directory_id, old.secret));
        let kept = dir.path().join(&aside.folder);
        assert_eq!(fs::read_to_string(kept.join("raft/log")).unwrap(), "entries");
        assert!(kept.join(IDENTITY).exists() && !dir.path().join("raft").exists());
        assert_eq!(open(dir.path(), 1).unwrap().identity().directory_id, fresh.directory_id);
    }

    #[test]
    fn open_waits_for_a_lock_that_is_released_soon() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path(), 1).unwrap();
        let dying = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(first);
        });
        open(dir.path(), 1).unwrap();
        dying.join().unwrap();
    }

    #[test]
    fn foreign_or_unsupported_directory_is_not_modified() {
        let dir = tempfile::tempdir().unwrap();
        let node_json = dir.path().join(IDENTITY);
        drop(open(dir.path(), 1).unwrap());
        let ours = fs::read_to_string(&node_json).unwrap();
        for (text, node_id, status, wanted) in [
            (ours.as_str(), 2, Status::Conflict, "belongs to node 1"),
            (r#"{"format":4,"news":[]}"#, 1, Status::Error, "has format 4"),
            ("{", 1, Status::Error, "is damaged"),
            (r#"{"format":1}"#, 1, Status::Error, "has format 1"),
            (r#"{"format":2}"#, 1, Status::Error, "is damaged"),
        ] {
            fs::write(&node_json, text).unwrap();
            let failure = open(dir.path(), node_id).unwrap_err();
            assert_eq!(failure.status, status, "{text}");
            assert!(failure.message.contains(wanted), "{}", failure.message);
            assert_eq!(fs::read_to_string(&node_json).unwrap(), text);
        }
        fs::remove_file(&node_json).unwrap();
        fs::write(dir.path().join("letter.txt"), "dear").unwrap();
        assert_eq!(open(dir.path(), 1).unwrap_err().status, Status::Conflict);
        assert!(!node_json.exists());
    }

    #[test]
    fn formation_state_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let data = open(dir.path(), 1).unwrap();
        assert_eq!(data.identity().admission, Admission::New);
        let cluster_id = encode_id(7);
        let next = Identity { cluster_id, voter: 3, admission: Admission::Joining, ..data.identity() };
        data.record(next.clone()).unwrap();
        drop(data);
        assert_eq!(without_run(open(dir.path(), 1).unwrap().identity()), without_run(next.clone()));
        let broken = Identity { voter: 0, ..next };
        write_identity(dir.path(), &broken).unwrap();
        assert!(open(dir.path(), 1).unwrap_err().message.contains("is damaged"));
    }

    #[test]
    fn ids_survive_their_encoding() {
        for id in [1, 0xC0FFEE, u128::MAX] {
            assert_eq!(decode_id(&encode_id(id)), Some(id));
        }
        assert_eq!(decode_id("short"), None);
    }

    #[test]
    fn crash_before_the_rename_leaves_a_usable_directory() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(IDENTITY_NEW), "{\"for").unwrap();
        assert!(open(dir.path(), 1).is_ok());
    }
}
