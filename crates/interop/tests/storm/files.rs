//! Damage to data directories, by an operator or a failing disk: a flipped bit, a clone, a rollback.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Collects every file below a directory.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&entry.path(), found),
            Ok(kind) if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
}

/// The kind of a file: its layer, and its name without numbers.
fn kind(data: &Path, path: &Path) -> String {
    let below = path.strip_prefix(data).unwrap().display().to_string();
    let layer = below.split('/').next().unwrap().to_owned();
    let name = path.file_name().unwrap().to_string_lossy();
    let name: String =
        name.chars().filter(|letter| !letter.is_ascii_hexdigit() || letter.is_alphabetic()).collect();
    if layer == below { name } else { format!("{layer}/{name}") }
}

/// The non-empty files of a data directory, by kind.
pub(super) fn kinds(data: &Path) -> BTreeMap<String, Vec<PathBuf>> {
    let mut files = Vec::new();
    walk(data, &mut files);
    let mut kinds: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for file in files {
        let is_empty = file.metadata().map_or(true, |meta| meta.len() == 0);
        if !is_empty && !file.ends_with("lock") {
            kinds.entry(kind(data, &file)).or_default().push(file);
        }
    }
    kinds.values_mut().for_each(|files| files.sort());
    kinds
}

/// Flips one bit, in a written part of the file if one is found; returns the position.
pub(super) fn flip(path: &Path, rng: &mut fastrand::Rng) -> u64 {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let mut byte = [0];
    let mut at = 0;
    for _ in 0..64 {
        at = rng.u64(..len);
        file.read_exact_at(&mut byte, at).unwrap();
        if byte[0] != 0 {
            break;
        }
    }
    byte[0] ^= 1 << rng.u32(..8);
    file.write_all_at(&byte, at).unwrap();
    file.sync_all().unwrap();
    at
}

/// Copies a directory, also one in use: files that vanish meanwhile are left out.
pub(super) fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    let Ok(entries) = std::fs::read_dir(from) else { return };
    for entry in entries.filter_map(Result::ok) {
        let target = to.join(entry.file_name());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => copy(&entry.path(), &target),
            Ok(kind) if kind.is_file() => drop(std::fs::copy(entry.path(), target)),
            _ => {}
        }
    }
}

/// Removes the directory that a node moved aside when it detected a rollback.
pub(super) fn remove_aside(data: &Path) -> bool {
    let entries = std::fs::read_dir(data).unwrap().filter_map(Result::ok);
    let aside = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("rolled-back-"));
    aside.map(|entry| std::fs::remove_dir_all(entry.path()).unwrap()).count() > 0
}
