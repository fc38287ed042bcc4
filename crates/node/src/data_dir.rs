//! The data folder: made once, locked while in use, and bound to one node by `node.json`.
//!
//! Invariants: one process per folder (an exclusive `flock` held until the end of the process; the kernel
//! lets go of it even after kill -9); `node.json` is replaced as a whole or not at all; a folder that holds
//! something else, belongs to another node or was written by a newer format is never touched.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use moim_base::Clock;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::exit::{Failure, Outcome, Status};

/// The newest layout of the data folder this build reads and writes.
pub(crate) const FORMAT: u32 = 1;
const IDENTITY: &str = "node.json";
const IDENTITY_NEW: &str = "node.json.new";
const LOCK: &str = "node.lock";

/// `node.json`: who the folder belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Layout of the folder.
    pub(crate) format: u32,
    /// The cluster, in the 22 letters Kafka clients know.
    pub(crate) cluster_id: String,
    /// The stable node number.
    pub(crate) node_id: i32,
    /// Told apart from every earlier folder of this node: the moment it was made, in ms since 1970.
    pub(crate) incarnation: u64,
    /// The Moim that wrote this last.
    pub(crate) version: String,
}

/// A data folder that this process alone may use.
#[derive(Debug)]
pub(crate) struct DataDir {
    /// The folder.
    #[allow(dead_code)] // the queue's recovery starts from it
    pub(crate) path: PathBuf,
    /// Whose it is.
    pub(crate) identity: Identity,
    _lock: File,
}

impl DataDir {
    /// Opens the folder for `node_id`, making it and its identity if it is new.
    pub(crate) fn open(path: &Path, node_id: i32, clock: &dyn Clock) -> Outcome<Self> {
        let at =
            |what: &str, error: &io::Error| Failure::error(format!("{what} {}: {error}", path.display()));
        fs::create_dir_all(path).map_err(|error| at("cannot make the data folder", &error))?;
        let lock = lock(path)?;
        let identity = match read_identity(path)? {
            Some(identity) => check_identity(path, identity, node_id)?,
            None => {
                refuse_foreign(path)?;
                let identity = new_identity(node_id, clock);
                write_identity(path, &identity).map_err(|error| at("cannot write node.json in", &error))?;
                identity
            }
        };
        Ok(Self { path: path.to_owned(), identity, _lock: lock })
    }
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
    let damaged = |why: String| {
        Failure::error(format!("{} is damaged: {why}", file.display()))
            .hint("restore it from a copy; without it nobody knows whose data this is")
    };
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::error(format!("cannot read {}: {error}", file.display()))),
    };
    // The format first: a newer one may have fields this build cannot read.
    let FormatOnly { format } = serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
    if format > FORMAT {
        let message = format!(
            "{} has format {format}, but this moim ({}) reads up to format {FORMAT}",
            path.display(),
            env!("CARGO_PKG_VERSION")
        );
        return Err(Failure::error(message).hint("run the newer moim that wrote it"));
    }
    serde_json::from_str(&text).map(Some).map_err(|error| damaged(error.to_string()))
}

fn check_identity(path: &Path, mut identity: Identity, node_id: i32) -> Outcome<Identity> {
    if identity.node_id != node_id {
        let message =
            format!("{} belongs to node {}, not to node {node_id}", path.display(), identity.node_id);
        let hint = format!("pass --node-id {} or another folder with --data", identity.node_id);
        return Err(Failure::new(Status::Conflict, message).hint(hint));
    }
    if identity.version != env!("CARGO_PKG_VERSION") || identity.format != FORMAT {
        identity.version = env!("CARGO_PKG_VERSION").to_owned();
        identity.format = FORMAT;
        write_identity(path, &identity)?;
    }
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
    let id: [u8; 16] = std::array::from_fn(|_| fastrand::u8(..));
    Identity {
        format: FORMAT,
        cluster_id: URL_SAFE_NO_PAD.encode(id),
        node_id,
        incarnation: u64::try_from(clock.wall_ms()).unwrap_or(1),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Write, sync, rename, sync the folder: after a crash the old file or the new one is there, whole.
fn write_identity(path: &Path, identity: &Identity) -> io::Result<()> {
    let new = path.join(IDENTITY_NEW);
    let mut file = File::create(&new)?;
    serde_json::to_writer_pretty(&mut file, identity)?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    fs::rename(&new, path.join(IDENTITY))?;
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
    fn the_identity_survives_and_the_lock_is_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/data");
        let first = open(&path, 1).unwrap();
        assert_eq!(first.identity.cluster_id.len(), 22);
        let refused = open(&path, 1).unwrap_err();
        assert_eq!(refused.status, Status::Conflict);
        assert!(
            refused.message.contains(&format!("(process {})", std::process::id())),
            "{}",
            refused.message
        );
        let identity = first.identity.clone();
        drop(first);
        assert_eq!(open(&path, 1).unwrap().identity, identity);
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
            (r#"{"format":2,"news":[]}"#, 1, Status::Error, "has format 2"),
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
    fn a_crash_before_the_rename_leaves_a_usable_folder() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(IDENTITY_NEW), "{\"for").unwrap();
        assert!(open(dir.path(), 1).is_ok());
    }
}
