//! Confirmed runs of the other voters, for rollback detection, and the setting aside of a rolled-back data directory.
//!
//! Every start of a data directory is a *run*: a growing number and a random nonce, recorded in `node.json` before they
//! have any effect. The other voters record the newest run of each voter in their own data directories (`runs.json`),
//! so a data directory that was restored from an older copy cannot claim a run that is higher than the recorded one.
//!
//! A rolled-back data directory is *set aside*: first `node.json` is marked; at the next start its content is moved
//! into a subdirectory, and the node requests admission like one that lost its data directory. Nothing is deleted.

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
/// Name prefix of the subdirectories that hold content set aside.
const ASIDE: &str = "rolled-back-";

/// The newest confirmed run of a voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownRun {
    /// Run number.
    pub(crate) run: u64,
    /// Nonce of the run.
    pub(crate) nonce: String,
    /// Peer address of the run.
    pub(crate) peer: String,
    /// Index of the last Raft entry that was committed and on stable storage there, as last claimed.
    #[serde(default)]
    pub(crate) index: u64,
}

impl KnownRun {
    /// True if `other` is a lower run, or the same run number with another nonce: a claim of an older copy.
    pub(crate) fn outdates(&self, other: &Self) -> bool {
        other.run < self.run || (other.run == self.run && other.nonce != self.nonce)
    }
}

/// Confirmed runs, by voter id.
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

/// Decodes `runs.json` and verifies its checksum: a corrupted run would make a current voter look rolled back, or hide
/// a rollback.
fn decode(bytes: &[u8]) -> Result<Runs, String> {
    let mut value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let known = value.as_object_mut().and_then(|fields| fields.remove(CHECKSUM));
    // A file from before checksums has none. A damaged checksum key is not a voter id, and rejected below.
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

/// Mark of a rolled-back or damaged data directory, whose content the next start sets aside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Aside {
    /// Target subdirectory.
    pub(crate) folder: String,
    /// The evidence of the rollback or damage.
    pub(crate) why: String,
    /// Peer addresses of the other nodes.
    pub(crate) peers: Vec<String>,
}

impl Aside {
    pub(crate) fn new(why: String, peers: Vec<String>, run: u64) -> Self {
        Self { folder: format!("{ASIDE}{run}"), why, peers }
    }
}

/// The rolled-back or damaged data directory of the same node that this one replaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Replaces {
    /// Directory id.
    pub(crate) directory_id: String,
    /// Secret of its cluster.
    pub(crate) secret: String,
    /// The evidence of the rollback or damage.
    pub(crate) why: String,
    /// Peer addresses of the other nodes.
    pub(crate) peers: Vec<String>,
}

/// Moves the content of a rolled-back data directory aside and returns the identity of the empty one that remains.
/// After a crash in between, the next start completes it.
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
    fn claim_is_outdated_unless_its_run_is_higher_or_has_the_same_nonce() {
        let run = |run, nonce: &str| KnownRun { run, nonce: nonce.into(), peer: String::new(), index: 0 };
        let known = run(5, "a");
        for (claim, outdated) in
            [(run(4, "a"), true), (run(5, "b"), true), (run(5, "a"), false), (run(6, "b"), false)]
        {
            assert_eq!(known.outdates(&claim), outdated, "{claim:?}");
        }
    }

    #[test]
    fn bit_flip_in_runs_json_never_changes_a_run() {
        let run = |run, index| KnownRun { run, nonce: "a".into(), peer: "127.0.0.1:7400".into(), index };
        let runs = Runs::from([(1, run(5, 900)), (2, run(17, 1_234))]);
        let bytes = encode(&runs).unwrap();
        assert_eq!(decode(&bytes).unwrap(), runs);
        for at in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            // A flip in white space may change nothing.
            assert!(
                decode(&flipped).is_ok_and(|known| known == runs) || decode(&flipped).is_err(),
                "bit {at}"
            );
        }
    }
}
