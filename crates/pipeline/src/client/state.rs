//! Persistent state of a client: its incarnation, and the lines that a user typed.
//!
//! Invariant: a line is written and synced before it is sent.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Why the state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// An I/O error.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// The state file cannot be parsed.
    #[error("{0}: not the state of a client: {1}")]
    Damaged(PathBuf, String),
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    format: u32,
    incarnation: u64,
}

/// The state of one client, in a directory.
#[derive(Debug)]
pub struct ClientState {
    incarnation: u64,
    outbox: PathBuf,
}

impl ClientState {
    /// Starts a new incarnation of the client. `now_ms` is a lower bound, so that a client that has lost its
    /// directory does not appear older than its previous incarnation.
    pub fn begin(folder: &Path, client: &str, now_ms: u64) -> Result<Self, StateError> {
        let name = client.replace(':', "_");
        let path = folder.join(format!("{name}.json"));
        let io = |error| StateError::Io(path.clone(), error);
        fs::create_dir_all(folder).map_err(io)?;
        let before = match fs::read(&path) {
            Ok(bytes) => {
                serde_json::from_slice::<StateFile>(&bytes)
                    .map_err(|error| StateError::Damaged(path.clone(), error.to_string()))?
                    .incarnation
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(io(error)),
        };
        let incarnation = (before + 1).max(now_ms);
        let state = StateFile { format: 1, incarnation };
        let temporary = folder.join(format!("{name}.json.new"));
        let mut file = File::create(&temporary).map_err(io)?;
        serde_json::to_writer(&mut file, &state).map_err(|error| io(error.into()))?;
        file.sync_all().map_err(io)?;
        fs::rename(&temporary, &path).map_err(io)?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)?;
        Ok(Self { incarnation, outbox: folder.join(format!("{name}.outbox")) })
    }

    /// The current incarnation.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Lines typed in earlier incarnations, in order.
    pub fn typed(&self) -> Result<Vec<Bytes>, StateError> {
        match File::open(&self.outbox) {
            Ok(file) => BufReader::new(file)
                .split(b'\n')
                .map(|line| line.map(Bytes::from).map_err(|e| StateError::Io(self.outbox.clone(), e)))
                .collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(StateError::Io(self.outbox.clone(), error)),
        }
    }

    /// Persists a line before it is sent.
    pub fn keep(&self, line: &str) -> Result<(), StateError> {
        let io = |error| StateError::Io(self.outbox.clone(), error);
        let mut file = OpenOptions::new().create(true).append(true).open(&self.outbox).map_err(io)?;
        file.write_all(format!("{line}\n").as_bytes()).map_err(io)?;
        file.sync_data().map_err(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_incarnation_is_newer_than_the_previous() {
        let folder = tempfile::tempdir().unwrap();
        let first = ClientState::begin(folder.path(), "a:b", 1_000).unwrap();
        first.keep("one").unwrap();
        first.keep("two").unwrap();
        let second = ClientState::begin(folder.path(), "a:b", 5).unwrap();
        assert_eq!((first.incarnation(), second.incarnation()), (1_000, 1_001));
        assert_eq!(second.typed().unwrap(), ["one", "two"]);
        fs::write(folder.path().join("a_b.json"), "{").unwrap();
        assert!(matches!(ClientState::begin(folder.path(), "a:b", 5), Err(StateError::Damaged(..))));
    }
}
