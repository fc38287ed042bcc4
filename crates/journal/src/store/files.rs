//! Files and folders of the store: creates segments, moves files aside, syncs names, bounds open descriptors.
//!
//! This module may delete: files of journals, by exact name, that the log says are dropped; and anything inside
//! `trash/`, which only this module fills. Other files in the way are moved to `lost+found/` and reported.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Inner;
use crate::codec::Locked;
use crate::commit::Kind;
use crate::commit::stage::Lane;
use crate::commit::{Record, Staged};
use crate::disk::{DiskFile, create_dirs, write_at};
use crate::segment;
use crate::types::{JournalError, JournalId};

/// Open segment files, oldest first; closed by second chance when there are too many.
pub(super) type OpenFiles = VecDeque<(JournalId, i64)>;

impl Inner {
    /// Creates a segment file with its header, and its folder if missing.
    pub(crate) fn create_segment(
        &self,
        id: JournalId,
        folder: &str,
        base: i64,
    ) -> io::Result<Arc<dyn DiskFile>> {
        let path = self.dir.join(folder);
        let changed = create_dirs(&*self.disk, &self.dir, Path::new(folder))?;
        self.dirty_dirs.locked().extend(changed);
        let name = segment::path_of(&path, base, "log");
        let file = match self.disk.create(&name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let moved = self.move_aside(&name, "in the way of a new segment")?;
                self.recovery.locked().moved_aside.push(moved);
                self.disk.create(&name)?
            }
            other => other?,
        };
        self.note_dirty_dir(path);
        if let Err(error) = write_at(&*file, 0, &segment::encode_header(id, base)) {
            self.disk.remove(&name)?;
            return Err(error);
        }
        Ok(file)
    }

    /// Marks a folder whose names changed.
    pub(crate) fn note_dirty_dir(&self, path: PathBuf) {
        self.dirty_dirs.locked().insert(path);
        self.note_dirty();
    }

    /// Syncs every folder whose names changed. The set stays locked meanwhile: an empty set means that all are synced.
    pub(crate) fn sync_dirs(&self) -> io::Result<()> {
        let mut dirs = self.dirty_dirs.locked();
        for path in dirs.iter() {
            match self.disk.sync_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {} // renamed since, with all its names
                other => other?,
            }
        }
        dirs.clear();
        Ok(())
    }

    /// Syncs a folder under the data directory and its parents.
    pub(crate) fn sync_dir_chain(&self, path: &Path) -> io::Result<()> {
        for folder in path.ancestors().take_while(|folder| folder.starts_with(&self.dir)) {
            self.disk.sync_dir(folder)?;
        }
        Ok(())
    }

    /// A number that no swap of this data directory had before: generations of the commit log only grow, and each run
    /// starts a new one.
    pub(crate) fn next_swap(&self) -> String {
        format!("{}-{}", self.first_generation, self.swaps.fetch_add(1, Ordering::Relaxed))
    }

    /// Removes a file of ours, if it exists.
    pub(crate) fn remove_if_exists(&self, path: &Path) -> io::Result<()> {
        match self.disk.remove(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Moves a file to `lost+found`, durably. Returns the line to report.
    pub(crate) fn move_aside(&self, path: &Path, why: &str) -> io::Result<String> {
        let moved =
            move_aside(&*self.disk, &self.dir, path, self.aside.fetch_add(1, Ordering::Relaxed), why)?;
        tracing::warn!(%moved, "file moved to lost+found");
        Ok(moved)
    }

    /// On an opened segment file: closes others if there are too many.
    pub(crate) fn note_open(&self, id: JournalId, base: i64) {
        let mut attempts = 0;
        loop {
            let oldest = {
                let mut open = self.open_files.locked();
                if attempts == 0 {
                    open.push_back((id, base));
                }
                if open.len() <= self.options.open_files || attempts > 64 {
                    return;
                }
                open.pop_front()
            };
            attempts += 1;
            let Some((id, base)) = oldest else { return };
            let closed = self.find(id).is_none_or(|journal| journal.close_if_unused(base) == Some(true));
            if !closed {
                self.open_files.locked().push_back((id, base));
            }
        }
    }

    /// Deletes a journal: a durable record, then the folder moves to the trash.
    pub(super) fn delete_journal(&self, id: JournalId) -> Result<(), JournalError> {
        let folder = match self.find(id) {
            Some(journal) => {
                let known = journal.begin_delete()?;
                known.then(|| journal.folder.clone())
            }
            None => {
                let image = self.images.locked().get(&id).map(|found| found.image.folder.clone());
                let Some(folder) = image else { return Ok(()) };
                let record = Record::control(Kind::Delete, id, 0);
                let staged =
                    Staged { record, payload: Default::default(), payload_crc: 0, journal: None, done: None };
                self.log_and_wait(Lane::Normal, staged)?;
                Some(folder)
            }
        };
        if let Some(folder) = folder {
            self.move_to_trash(id, &folder)?;
        }
        // Only now may another journal use the folder.
        self.images.locked().remove(&id);
        self.journals.write().expect("journal map lock poisoned").remove(&id);
        self.note_dirty();
        Ok(())
    }

    fn move_to_trash(&self, id: JournalId, folder: &str) -> io::Result<()> {
        let from = self.dir.join(folder);
        if self.disk.stat(&from)?.is_none() {
            return Ok(());
        }
        self.dirty_dirs.locked().extend(create_dirs(&*self.disk, &self.dir, Path::new("trash"))?);
        let to = self.dir.join("trash").join(id.to_string());
        self.disk.rename(&from, &to)?;
        self.behind.locked().trash.push(to);
        let parent = from.parent().map(Path::to_path_buf);
        self.dirty_dirs.locked().extend([self.dir.join("trash")].into_iter().chain(parent));
        if let Err(error) = self.sync_dirs() {
            self.fatal("syncing a folder", &error);
            return Err(error);
        }
        Ok(())
    }

    /// Unlinks one deleted journal. True if there was one.
    pub(super) fn empty_trash(&self) -> io::Result<bool> {
        let Some(folder) = self.behind.locked().trash.pop() else { return Ok(false) };
        remove_tree(self, &folder)?;
        Ok(true)
    }
}

fn remove_tree(inner: &Inner, folder: &Path) -> io::Result<()> {
    for entry in inner.disk.list(folder)? {
        let path = folder.join(&entry.name);
        if entry.is_dir { remove_tree(inner, &path)? } else { inner.remove_if_exists(&path)? }
    }
    inner.disk.remove_dir(folder)
}

/// Moves a file to `lost+found` under a name that tells its origin.
pub(super) fn move_aside(
    disk: &dyn crate::disk::Disk,
    dir: &Path,
    path: &Path,
    mut number: u64,
    why: &str,
) -> io::Result<String> {
    for changed in create_dirs(disk, dir, Path::new("lost+found"))? {
        disk.sync_dir(&changed)?;
    }
    let lost = dir.join("lost+found");
    let name = path.strip_prefix(dir).unwrap_or(path).to_string_lossy().replace('/', "_");
    let to = loop {
        let to = lost.join(format!("{number}-{name}"));
        if disk.stat(&to)?.is_none() {
            break to;
        }
        number += 1;
    };
    disk.rename(path, &to)?;
    disk.sync_dir(&lost)?;
    if let Some(parent) = path.parent() {
        disk.sync_dir(parent)?;
    }
    Ok(format!("{} was {why}: moved to {}", path.display(), to.display()))
}
