//! A dedicated disk for one node: an ext4 file system in a file, which can be frozen and filled.
//!
//! Mounting and freezing need privileges that not every machine grants; without them the tests print that and are
//! skipped.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system; unmounted when dropped.
pub(super) struct Disk {
    folder: tempfile::TempDir,
}

/// Thaws its disk when dropped: a process on a frozen disk cannot even be killed.
pub(super) struct Frozen<'a>(&'a Disk);

fn run(program: &str, args: &[&str], path: &Path) -> Result<(), String> {
    let done = Command::new(program).args(args).arg(path).output();
    match done {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

impl Disk {
    /// Creates and mounts a disk of this size; the image file is below `parent`.
    pub(super) fn mount(parent: &Path, bytes: u64) -> Result<Self, String> {
        let folder = tempfile::tempdir_in(parent).map_err(|error| error.to_string())?;
        let image = folder.path().join("image");
        let file = File::create(&image).and_then(|file| file.set_len(bytes));
        file.map_err(|error| error.to_string())?;
        std::fs::create_dir(folder.path().join("disk")).map_err(|error| error.to_string())?;
        let disk = Self { folder };
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1"], &image)?;
        run("mount", &["-o", "loop", &image.display().to_string()], &disk.path())?;
        Ok(disk)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// Freezes the disk: every write blocks.
    pub(super) fn freeze(&self) -> Frozen<'_> {
        run("fsfreeze", &["-f"], &self.path()).unwrap();
        Frozen(self)
    }

    /// Checks whether freezing is permitted.
    pub(super) fn check_freeze(&self) -> Result<(), String> {
        run("fsfreeze", &["-f"], &self.path())?;
        run("fsfreeze", &["-u"], &self.path())
    }

    /// Fills the disk completely.
    pub(super) fn fill(&self) {
        let mut file = File::create(self.path().join("filler")).unwrap();
        let mut block = vec![1; 1 << 20];
        while !block.is_empty() {
            if file.write_all(&block).is_err() {
                block.truncate(block.len() / 2);
            }
        }
    }

    pub(super) fn free(&self) {
        std::fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = run("fsfreeze", &["-u"], &self.0.path());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The node on it may still be exiting.
        let _ = run("umount", &["-l"], &self.path());
    }
}
