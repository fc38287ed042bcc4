//! The data folder: made once, locked while in use, and bound to one node by `node.json`.
//!
//! `node.json` also says how far the folder has come on its way into a cluster ([`Admission`]). Each step is written
//! down before it is acted on, so that a node that crashed midway goes on where it was: a voter id belongs to one
//! folder for ever, and a folder without its Raft log must never be taken for one that has not begun yet.
//!
//! Invariants: one process per folder (an exclusive `flock` held until the end of the process; the kernel
//! lets go of it even after kill -9); `node.json` is replaced as a whole or not at all; a folder that holds
//! something else, belongs to another node or was written by a newer format is never touched.

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
pub(crate) const FORMAT: u32 = 3;
/// The layout before the coordination core: one node, its metadata in a journal of its own.
const FORMAT_ALONE: u32 = 1;
const IDENTITY: &str = "node.json";
const IDENTITY_NEW: &str = "node.json.new";
const LOCK: &str = "node.lock";
/// The field of `node.json` that covers the others.
const CHECKSUM: &str = "checksum";

/// `node.json`: who the folder belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Layout of the folder.
    pub(crate) format: u32,
    /// The cluster, in the 22 letters Kafka clients know; empty until there is one.
    pub(crate) cluster_id: String,
    /// The stable node number.
    pub(crate) node_id: i32,
    /// Told apart from every earlier folder of this node: the moment it was made, in ms since 1970.
    pub(crate) incarnation: u64,
    /// The Moim that wrote this last.
    pub(crate) version: String,
    /// The folder itself, told apart from every other one, in 22 letters.
    #[serde(default)]
    pub(crate) directory_id: String,
    /// The Raft voter this folder is; 0 until the cluster has said so.
    #[serde(default)]
    pub(crate) voter: u64,
    /// How far the folder is.
    #[serde(default)]
    pub(crate) admission: Admission,
    /// Who founded the cluster, if this folder was one of them.
    #[serde(default)]
    pub(crate) founders: Vec<Founder>,
    /// The broker epoch since which this folder has lost no written byte. Written when the node registers, taken away by
    /// a start that finds that the last stop was not in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) intact_since: Option<i64>,
    /// What this folder adds to the secret of a cluster that it founds with others. Empty in a folder from before there
    /// were secrets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) nonce: String,
    /// What only members of the cluster know, in 22 letters; empty in a cluster from before there were secrets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) secret: String,
    /// Counts the starts of the folder. Written before anything is done in its name.
    #[serde(default)]
    pub(crate) run: u64,
    /// Tells the run apart from one with the same number of an older copy of the folder.
    #[serde(default)]
    pub(crate) run_nonce: String,
    /// An operator accepted that the folder is an older copy (`moim cluster recover`), until its run is confirmed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) forced: bool,
    /// The folder was shown to be rolled back: the next start sets its content aside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) aside: Option<Aside>,
    /// The rolled-back folder of the same node whose place this one asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replaces: Option<Replaces>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// How far a folder has come on its way into a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Admission {
    /// In no cluster.
    #[default]
    New,
    /// One of the founders, and all have agreed. The Raft log may not be there yet.
    Founding,
    /// Let in by the others under a voter id of its own. The Raft log may not be there yet.
    Joining,
    /// The Raft log is there, or the folder is damaged.
    Member,
}

/// One of the nodes that founded a cluster. Its voter id is its place in the list, from 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Founder {
    /// The stable node number.
    pub(crate) node_id: i32,
    /// Its data folder.
    pub(crate) directory_id: String,
    /// Where the others reached it.
    pub(crate) peer: String,
    /// Its part of the secret. Shown to other founders until they agree, and never afterwards.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) nonce: String,
}

impl Identity {
    /// The secret as the peer port uses it.
    pub(crate) fn secret_number(&self) -> u128 {
        decode_id(&self.secret).unwrap_or(0)
    }
}

/// A data folder that this process alone may use.
#[derive(Debug)]
pub(crate) struct DataDir {
    /// The folder.
    pub(crate) path: PathBuf,
    /// Whose it is, as written down last.
    identity: Mutex<Identity>,
    /// Held while `node.json` or `runs.json` is written: readers do not wait for the disk.
    writing: Mutex<()>,
    /// The runs of other voters that this folder has confirmed, as written down last.
    runs: Mutex<Runs>,
    _lock: File,
}

impl DataDir {
    /// Opens the folder for `node_id`, making it and its identity if it is new.
    pub(crate) fn open(path: &Path, node_id: i32, clock: &dyn Clock) -> Outcome<Self> {
        let at =
            |what: &str, error: &io::Error| Failure::error(format!("{what} {}: {error}", path.display()));
        fs::create_dir_all(path).map_err(|error| at("cannot make the data folder", &error))?;
        let lock = lock(path)?;
        let mut identity = match read_identity(path)? {
            Some(identity) => check_identity(path, identity, node_id)?,
            None => {
                refuse_foreign(path)?;
                new_identity(node_id, clock)
            }
        };
        if let Some(aside) = identity.aside.clone() {
            identity = runs::set_aside(path, identity, aside)
                .map_err(|error| at("cannot set the content aside of", &error))?;
        }
        // A start is a run of its own, and written down as one before it does anything.
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

    /// Whose it is.
    pub(crate) fn identity(&self) -> Identity {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The newest run of a voter that this folder has confirmed.
    pub(crate) fn known_run(&self, voter: u64) -> Option<KnownRun> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner).get(&voter).cloned()
    }

    /// The voters whose runs this folder has confirmed, and where they were reached.
    pub(crate) fn known_peers(&self) -> Vec<(u64, String)> {
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter().map(|(voter, run)| (*voter, run.peer.clone())).collect()
    }

    /// Confirms a run of another voter: it is on stable storage when this returns. False if the voter has claimed it, or a
    /// later one, with another start. Blocks.
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

    /// Since which run nothing written was lost, or (`None`) since the next one.
    pub(crate) fn set_intact_since(&self, since: Option<i64>) -> Outcome {
        self.update(|identity| identity.intact_since = since)
    }

    /// Writes the next step down; it counts when this returns.
    pub(crate) fn record(&self, next: Identity) -> Outcome {
        self.update(|identity| *identity = next)
    }

    /// Changes the identity and writes it down, one change at a time.
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

/// 16 random bytes in 22 letters.
pub(crate) fn random_id() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the system gives random bytes");
    // No id is 0: that stands for none.
    encode_id(u128::from_be_bytes(bytes).max(1))
}

/// The 22 letters of a 16-byte id.
pub(crate) fn encode_id(id: u128) -> String {
    URL_SAFE_NO_PAD.encode(id.to_be_bytes())
}

/// The 16 bytes of an id in 22 letters.
pub(crate) fn decode_id(text: &str) -> Option<u128> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
    bytes.try_into().ok().map(u128::from_be_bytes)
}

fn lock(path: &Path) -> Outcome<File> {
    let file = path.join(LOCK);
    let cannot = |error: io::Error| Failure::error(format!("cannot lock {}: {error}", file.display()));
    let mut lock =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&file).map_err(cannot)?;
    if let Err(error) = flock_soon(&lock) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(cannot(error.into()));
        }
        let mut owner = String::new();
        let _ = lock.read_to_string(&mut owner);
        let owner = owner.trim();
        let owner = if owner.is_empty() { String::new() } else { format!(" (process {owner})") };
        let message = format!("{} is in use by another moim{owner}", path.display());
        return Err(
            Failure::new(Status::Conflict, message).hint("stop it first, or pass another folder with --data")
        );
    }
    // Only a courtesy to the next one who is refused; the lock itself is the flock.
    lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(cannot)?;
    Ok(lock)
}

/// Takes the lock, patiently: after kill -9 the kernel keeps it until it has freed the memory of the dead
/// process, and whoever restarts a node at once should not be told that it still runs.
fn flock_soon(lock: &File) -> rustix::io::Result<()> {
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
    // A file from before there were checksums has none.
    if known.is_some_and(|known| known != checksum(&value)) {
        return Err(damaged("checksum mismatch".to_owned()));
    }
    // The format next: a newer one may have fields this build cannot read.
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
    serde_json::from_value(value).map(Some).map_err(|error| damaged(error.to_string()))
}

/// Covers all other fields, also those that this build does not know.
fn checksum(fields: &Value) -> String {
    format!("{:08x}", crc32c::crc32c(fields.to_string().as_bytes()))
}

fn check_identity(path: &Path, mut identity: Identity, node_id: i32) -> Outcome<Identity> {
    if identity.node_id != node_id {
        let message =
            format!("{} belongs to node {}, not to node {node_id}", path.display(), identity.node_id);
        let hint = format!("pass --node-id {} or another folder with --data", identity.node_id);
        return Err(Failure::new(Status::Conflict, message).hint(hint));
    }
    let undecodable = |id: &str| decode_id(id).is_none_or(|id| id == 0);
    if identity.format == FORMAT_ALONE {
        // It was a cluster of one all along; now it has a Raft log to begin.
        identity.directory_id = random_id();
        identity.voter = 1;
        identity.admission = Admission::Founding;
    } else if undecodable(&identity.directory_id)
        || (identity.admission != Admission::New && undecodable(&identity.cluster_id))
        || (identity.admission != Admission::New && identity.voter == 0)
    {
        let file = path.join(IDENTITY);
        return Err(Failure::error(format!("{} is damaged: its ids make no sense", file.display()))
            .hint(LOST_DIRECTORY));
    }
    identity.version = env!("CARGO_PKG_VERSION").to_owned();
    identity.format = FORMAT;
    Ok(identity)
}

/// A folder without `node.json` must be empty: `--data ~` is a slip, not a wish.
fn refuse_foreign(path: &Path) -> Outcome {
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if ![LOCK, IDENTITY_NEW, "lost+found"].iter().any(|ours| name == *ours) {
            let message =
                format!("{} is not a data folder: it holds {name:?} but no node.json", path.display());
            return Err(
                Failure::new(Status::Conflict, message).hint("pass an empty or new folder with --data")
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

/// Changes the identity of a folder that no process uses.
pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Identity)) -> Outcome<Identity> {
    let none = || Failure::new(Status::NotFound, format!("{} is not a data folder", path.display()));
    if !path.join(IDENTITY).exists() {
        return Err(none());
    }
    let _lock = lock(path)?;
    let mut identity = read_identity(path)?.ok_or_else(none)?;
    change(&mut identity);
    write_identity(path, &identity)?;
    Ok(identity)
}

/// Write, sync, rename, sync the folder: after a crash the old file or the new one is there, whole.
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
    fn no_flipped_bit_gives_a_folder_another_identity() {
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
    fn the_identity_survives_and_the_lock_is_exclusive() {
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

    /// All of it but the run, which is another one after every start.
    fn without_run(identity: Identity) -> Identity {
        Identity { run: 0, run_nonce: String::new(), ..identity }
    }

    #[test]
    fn every_start_is_a_run_of_its_own_and_a_copy_cannot_claim_a_newer_one() {
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
        assert!(other.confirm_run(1, claim(&second)).unwrap(), "saying it again is fine");
        fs::write(data.join(IDENTITY), copy).unwrap();
        let restored = open(&data, 1).unwrap().identity();
        assert_eq!(restored.run, second.run);
        assert!(!other.confirm_run(1, claim(&restored)).unwrap());
        drop(other);
        let other = open(&dir.path().join("other"), 2).unwrap();
        assert_eq!(other.known_run(1), Some(claim(&second)), "it survives a restart");
    }

    #[test]
    fn a_rolled_back_folder_is_set_aside_and_begins_anew() {
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
        let aside = Aside::new("it was shown".into(), vec!["h:1".into()], old.run);
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
    fn a_lock_that_is_let_go_soon_is_waited_for() {
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
    fn what_is_not_ours_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let node_json = dir.path().join(IDENTITY);
        drop(open(dir.path(), 1).unwrap());
        let ours = fs::read_to_string(&node_json).unwrap();
        for (text, node_id, status, wanted) in [
            (ours.as_str(), 2, Status::Conflict, "belongs to node 1"),
            (r#"{"format":4,"news":[]}"#, 1, Status::Error, "has format 4"),
            ("{", 1, Status::Error, "is damaged"),
            (r#"{"format":1}"#, 1, Status::Error, "is damaged"),
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
    fn a_folder_of_the_older_format_becomes_a_cluster_of_one() {
        let dir = tempfile::tempdir().unwrap();
        let old =
            r#"{"format":1,"cluster_id":"AAAAAAAAAAAAAAAAAAAAAQ","node_id":1,"incarnation":5,"version":"0"}"#;
        fs::write(dir.path().join(IDENTITY), old).unwrap();
        let identity = open(dir.path(), 1).unwrap().identity();
        assert_eq!((identity.format, identity.voter, identity.incarnation), (FORMAT, 1, 5));
        assert_eq!(identity.cluster_id, "AAAAAAAAAAAAAAAAAAAAAQ");
        assert_eq!(identity.admission, Admission::Founding);
        let again = open(dir.path(), 1).unwrap().identity();
        assert_eq!(without_run(again), without_run(identity), "once is enough");
    }

    #[test]
    fn a_step_is_written_down_before_it_counts() {
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
    fn ids_read_back() {
        for id in [1, 0xC0FFEE, u128::MAX] {
            assert_eq!(decode_id(&encode_id(id)), Some(id));
        }
        assert_eq!(decode_id("short"), None);
    }

    #[test]
    fn a_crash_before_the_rename_leaves_a_usable_folder() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(IDENTITY_NEW), "{\"for").unwrap();
        assert!(open(dir.path(), 1).is_ok());
    }
}
