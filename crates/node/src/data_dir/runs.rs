//! The runs of this folder and of the other voters: what tells a current folder from an older copy of it.
//!
//! Every start of a folder is a *run*: a number that only grows, and a random nonce, both in `node.json` before anything
//! is done in their name. The other voters write the newest run of each voter into their own folders (`runs.json`), so
//! a folder that was put back from an older copy cannot claim a run that is greater than the recorded one.
//!
//! A folder that was shown to be rolled back is *set aside*: a mark in `node.json` first, then, at the next start, all of
//! its content is moved into a folder beside, and the node asks for a place as one that lost its folder. Nothing is
//! deleted.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Admission, CHECKSUM, IDENTITY, IDENTITY_NEW, Identity, LOCK, checksum, random_id, write_file};
use crate::exit::{Failure, Outcome};
use crate::journals::LOST_DIRECTORY;

const RUNS: &str = "runs.json";
/// What the names of folders begin with that hold what was set aside.
const ASIDE: &str = "rolled-back-";

/// The newest run of a voter that this folder has confirmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownRun {
    /// Its number.
    pub(crate) run: u64,
    /// Tells it apart from another start with the same number.
    pub(crate) nonce: String,
    /// Where it was reached.
    pub(crate) peer: String,
    /// The last Raft entry that it had committed and on stable storage, as it said last.
    #[serde(default)]
    pub(crate) index: u64,
}

impl KnownRun {
    /// Whether a claim of `other` was made by a folder that does not know of this run.
    pub(crate) fn outdates(&self, other: &Self) -> bool {
        other.run < self.run || (other.run == self.run && other.nonce != self.nonce)
    }
}

/// What is known of the runs of other voters, by voter id.
pub(super) type Runs = BTreeMap<u64, KnownRun>;

pub(super) fn read(path: &Path) -> Outcome<Runs> {
    let file = path.join(RUNS);
    match fs::read(&file) {
        Ok(bytes) => decode(&bytes).map_err(|why| {
            Failure::error(format!("{} is damaged: {why}", file.display())).hint(LOST_DIRECTORY)
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Runs::new()),
        Err(error) => Err(Failure::error(format!("cannot read {}: {error}", file.display()))),
    }
}

/// A run that reads differently than it was written makes a healthy voter look rolled back, or hides a rollback.
fn decode(bytes: &[u8]) -> Result<Runs, String> {
    let mut value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let known = value.as_object_mut().and_then(|fields| fields.remove(CHECKSUM));
    // A file from before there were checksums has none. A key that was one and is damaged is no voter, and refused below.
    if known.is_some_and(|known| known != checksum(&value)) {
        return Err("checksum mismatch".to_owned());
    }
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn encode(runs: &Runs) -> Result<Vec<u8>, serde_json::Error> {
    let mut value = serde_json::to_value(runs)?;
    let sum = checksum(&value);
    if let Some(fields) = value.as_object_mut() {
        fields.insert(CHECKSUM.to_owned(), sum.into());
    }
    serde_json::to_vec_pretty(&value)
}

pub(super) fn write(path: &Path, runs: &Runs) -> Outcome {
    let bytes = encode(runs).map_err(|error| Failure::error(format!("cannot encode {RUNS}: {error}")))?;
    write_file(path, RUNS, &bytes)
        .map_err(|error| Failure::error(format!("cannot write {RUNS} in {}: {error}", path.display())))
}

/// The folder was rolled back, and the next start sets its content aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Aside {
    /// Where the content goes.
    pub(crate) folder: String,
    /// What showed that it was rolled back.
    pub(crate) why: String,
    /// Where other nodes were reached.
    pub(crate) peers: Vec<String>,
}

impl Aside {
    pub(crate) fn new(why: String, peers: Vec<String>, run: u64) -> Self {
        Self { folder: format!("{ASIDE}{run}"), why, peers }
    }
}

/// The folder that this one stands in for: the same node's, which was rolled back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Replaces {
    /// Its id.
    pub(crate) directory_id: String,
    /// The secret of its cluster.
    pub(crate) secret: String,
    /// What showed that it was rolled back.
    pub(crate) why: String,
    /// Where other nodes were reached.
    pub(crate) peers: Vec<String>,
}

/// Moves the content of a rolled-back folder aside and answers the identity of the empty one that is left. A start that is
/// interrupted in between is finished by the next.
pub(super) fn set_aside(path: &Path, identity: Identity, aside: Aside) -> io::Result<Identity> {
    let target = path.join(&aside.folder);
    fs::create_dir_all(&target)?;
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        let stays = [IDENTITY, IDENTITY_NEW, LOCK, "lost+found"].iter().any(|ours| name == *ours)
            || name.to_string_lossy().starts_with(ASIDE);
        if !stays {
            fs::rename(path.join(&name), target.join(&name))?;
        }
    }
    fs::copy(path.join(IDENTITY), target.join(IDENTITY))?;
    File::open(&target)?.sync_all()?;
    File::open(path)?.sync_all()?;
    tracing::warn!(
        folder = %target.display(),
        why = aside.why,
        "data directory set aside; its content is refetched from the other nodes"
    );
    let replaces = Replaces {
        directory_id: identity.directory_id,
        secret: identity.secret,
        why: aside.why,
        peers: aside.peers,
    };
    Ok(Identity {
        cluster_id: String::new(),
        incarnation: identity.incarnation + 1,
        directory_id: random_id(),
        voter: 0,
        admission: Admission::New,
        founders: Vec::new(),
        intact_since: None,
        nonce: random_id(),
        secret: String::new(),
        replaces: Some(replaces),
        aside: None,
        ..identity
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_outdated_unless_its_run_is_greater_or_the_same_start() {
        let run = |run, nonce: &str| KnownRun { run, nonce: nonce.into(), peer: String::new(), index: 0 };
        let known = run(5, "a");
        for (claim, outdated) in
            [(run(4, "a"), true), (run(5, "b"), true), (run(5, "a"), false), (run(6, "b"), false)]
        {
            assert_eq!(known.outdates(&claim), outdated, "{claim:?}");
        }
    }

    #[test]
    fn no_flipped_bit_changes_what_is_known_of_a_run() {
        let run = |run, index| KnownRun { run, nonce: "a".into(), peer: "127.0.0.1:7400".into(), index };
        let runs = Runs::from([(1, run(5, 900)), (2, run(17, 1_234))]);
        let bytes = encode(&runs).unwrap();
        assert_eq!(decode(&bytes).unwrap(), runs);
        for at in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            // A bit of white space says nothing.
            assert!(
                decode(&flipped).is_ok_and(|known| known == runs) || decode(&flipped).is_err(),
                "bit {at}"
            );
        }
    }
}
