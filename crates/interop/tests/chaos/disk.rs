//! A small memory file system for one node, which can be filled without affecting the machine. Mounting needs
//! privileges that not every machine grants; without them the disk-full fault is skipped.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system; unmounted when dropped.
pub(super) struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    pub(super) fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().ok()?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=320m", "moim-chaos"])
            .arg(folder.path())
            .output()
            .is_ok_and(|done| done.status.success());
        if !mounted {
            println!("no rights to mount: disks do not get full in this run");
        }
        mounted.then_some(Self { folder })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    /// Fills the disk except for about a megabyte.
    pub(super) fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        let block = vec![1; 1 << 20];
        while file.write_all(&block).is_ok() {}
    }

    pub(super) fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The node on it may still be exiting.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}
