//! `moim coord snapshot save|restore|status`: the bytes a server streams, with their SHA-256 at the end, as etcdctl
//! writes them too.
//!
//! Invariant: a file under the name that was asked for is whole, checked and durable; until then it has
//! another name.

mod restore;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use moim_cluster::EtcdClient;
use moim_coord::api::read_backup;
use moim_coord::{SpaceId, State};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::SnapshotVerb;
use crate::config::units::show_bytes;
use crate::coordination::{connect, failure};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section};
use crate::target::EtcdArgs;

/// The checksum at the end.
const TRAILER: usize = 32;

pub(super) async fn run(client: &EtcdArgs, verb: SnapshotVerb, output: Output) -> Outcome {
    match verb {
        SnapshotVerb::Save { file } => save(&connect(client).await?, &file, output).await,
        SnapshotVerb::Restore { file, data, node_id } => restore::run(&file, &data, node_id, output),
        SnapshotVerb::Status { file } => {
            let read = Snapshot::read(&file)?;
            output.print(&read.summary(&file))
        }
    }
}

#[derive(Serialize)]
struct Saved {
    file: String,
    bytes: u64,
    sha256: String,
}

impl Report for Saved {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("saved", self.file.clone()),
            ("size", show_bytes(self.bytes)),
            ("sha256", self.sha256.clone()),
        ])]
    }
}

async fn save(client: &EtcdClient, path: &Path, output: Output) -> Outcome {
    if path.exists() {
        return Err(Failure::new(Status::Conflict, format!("{} exists already", path.display())));
    }
    let part = PathBuf::from(format!("{}.part", path.display()));
    let mut file = File::create(&part)
        .map_err(|error| Failure::error(format!("cannot write {}: {error}", part.display())))?;
    let saved = write(client, &mut file).await;
    let (bytes, sha256) = match saved {
        Ok(saved) => saved,
        Err(failure) => {
            // It is not a snapshot; the failure is what matters.
            let _ = fs::remove_file(&part);
            return Err(failure);
        }
    };
    file.sync_all()?;
    fs::rename(&part, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()?;
    output.print(&Saved { file: path.display().to_string(), bytes, sha256 })
}

/// Writes all pieces and checks the sum of what came before the last 32 bytes against them.
async fn write(client: &EtcdClient, file: &mut File) -> Outcome<(u64, String)> {
    let mut pieces = client.snapshot().await.map_err(|error| failure(&error))?;
    let mut sum = TrailedSum::default();
    let mut bytes = 0;
    while let Some(piece) = pieces.next().await.map_err(|error| failure(&error))? {
        file.write_all(&piece)?;
        bytes += piece.len() as u64;
        sum.update(&piece);
    }
    let sum = sum.finish().ok_or_else(|| Failure::error("what arrived is damaged: its checksum is wrong"))?;
    Ok((bytes, sum))
}

/// A sum over everything but the last 32 bytes, which must be that sum.
#[derive(Default)]
struct TrailedSum {
    hasher: Sha256,
    tail: Vec<u8>,
}

impl TrailedSum {
    fn update(&mut self, piece: &[u8]) {
        self.tail.extend_from_slice(piece);
        let whole = self.tail.len().saturating_sub(TRAILER);
        self.hasher.update(&self.tail[..whole]);
        self.tail.drain(..whole);
    }

    /// The sum in hexadecimal, if it is the right one.
    fn finish(self) -> Option<String> {
        let sum = self.hasher.finalize();
        (self.tail == sum[..]).then(|| hex(&sum))
    }
}

/// A file that was read and found whole.
pub(super) struct Snapshot {
    /// What was saved.
    pub(super) state: State,
    bytes: u64,
    sha256: String,
}

impl Snapshot {
    /// Reads and checks a file.
    pub(super) fn read(path: &Path) -> Outcome<Self> {
        let file = fs::read(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                Failure::new(Status::NotFound, format!("there is no {}", path.display()))
            }
            _ => Failure::error(format!("cannot read {}: {error}", path.display())),
        })?;
        let state =
            read_backup(&file).map_err(|error| Failure::error(format!("{}: {error}", path.display())))?;
        let content = &file[..file.len().saturating_sub(TRAILER)];
        Ok(Self { state, bytes: file.len() as u64, sha256: hex(&Sha256::digest(content)) })
    }

    fn summary(&self, path: &Path) -> Summary {
        Summary {
            file: path.display().to_string(),
            bytes: self.bytes,
            sha256: self.sha256.clone(),
            revision: self.state.revision(SpaceId::User),
            compacted_revision: self.state.compact_revision(SpaceId::User),
            keys: self.state.live_keys(SpaceId::User),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[derive(Serialize)]
struct Summary {
    file: String,
    bytes: u64,
    sha256: String,
    revision: i64,
    compacted_revision: i64,
    keys: usize,
}

impl Report for Summary {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([
            ("file", self.file.clone()),
            ("size", show_bytes(self.bytes)),
            ("sha256", self.sha256.clone()),
            ("revision", self.revision.to_string()),
            ("history begins at", self.compacted_revision.to_string()),
            ("keys", self.keys.to_string()),
        ])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_over_pieces_of_any_size_finds_every_damage() {
        let mut file: Vec<u8> = (0..1000_u32).map(|i| i.to_le_bytes()[0]).collect();
        file.extend_from_slice(&Sha256::digest(&file));
        for size in [1, 31, 32, 33, 500, 2000] {
            let sum = |file: &[u8]| {
                let mut sum = TrailedSum::default();
                file.chunks(size).for_each(|piece| sum.update(piece));
                sum.finish()
            };
            assert!(sum(&file).is_some(), "{size}");
            for damage in [0, 999, 1000, 1031] {
                let mut file = file.clone();
                file[damage] ^= 1;
                assert_eq!(sum(&file), None, "{size} {damage}");
            }
            assert_eq!(sum(&file[..1031]), None);
            assert_eq!(sum(&file[..20]), None);
        }
    }
}
