//! An in-memory disk that can lose power.
//!
//! It separates written data from durable data: every write, length change and name change stays pending until a sync
//! covers it. [`SimDisk::crash`] keeps a random subset of the pending ones, sector by sector, and drops the rest, which
//! is harsher than any real file system. Faults can be injected at the n-th operation. It never reads a clock and draws
//! randomness only from the seed it is given.
//!
//! Limit: a cross-folder rename is atomic here, and pending name changes are kept or lost one by one, each only if it
//! still applies after the ones lost before it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{Disk, DiskEntry, DiskFile, DiskStat};
use crate::codec::Locked;

const SECTOR: usize = 512;

/// A fault injected at an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// That operation alone fails with an I/O error.
    Io,
    /// That operation alone fails for lack of space.
    NoSpace,
    /// Power cut: all operations after that one fail, until [`SimDisk::crash`].
    PowerCut,
}

/// How many of the pending changes survive a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// Only synced changes.
    Nothing,
    /// Everything, as after kill -9.
    Everything,
    /// Each sector and each name change with probability one half.
    Random,
}

/// An in-memory disk. Clones share the same disk.
#[derive(Clone, Default)]
pub struct SimDisk {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Clone, Default)]
struct Content {
    bytes: Vec<u8>,
}

enum Pending {
    Write { pos: usize, bytes: Vec<u8> },
    SetLen(usize),
}

#[derive(Default)]
struct Node {
    durable: Content,
    current: Content,
    pending: Vec<Pending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Dir,
    File(u64),
}

type Names = BTreeMap<PathBuf, Target>;

#[derive(Clone, Debug)]
enum NameOp {
    Add(PathBuf, Target),
    Remove(PathBuf),
    Rename(PathBuf, PathBuf),
}

#[derive(Default)]
struct Inner {
    nodes: BTreeMap<u64, Node>,
    next_node: u64,
    durable_names: Names,
    names: Names,
    pending_names: Vec<(NameOp, BTreeSet<PathBuf>)>,
    operations: u64,
    fault: Option<(u64, Fault)>,
    off: bool,
    free_bytes: Option<u64>,
    used_bytes: u64,
}

struct SimFile {
    disk: Arc<Mutex<Inner>>,
    node: u64,
}

impl SimDisk {
    /// An empty disk.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of changing operations so far.
    pub fn operations(&self) -> u64 {
        self.inner.locked().operations
    }

    /// Injects a fault at the operation with this number (see [`SimDisk::operations`]); `None` removes it.
    pub fn set_fault(&self, fault: Option<(u64, Fault)>) {
        self.inner.locked().fault = fault;
    }

    /// Limits the free space; writes that grow files past it fail.
    pub fn set_free_bytes(&self, free: Option<u64>) {
        self.inner.locked().free_bytes = free;
    }

    /// Crashes and restarts: synced changes survive, of the others a subset drawn from the seed. Handles opened before
    /// the crash fail.
    pub fn crash(&self, survival: Survival, seed: u64) -> SimDisk {
        let mut inner = self.inner.locked();
        inner.off = true;
        let mut random = Coin { state: seed ^ 0x9e37_79b9_7f4a_7c15, survival };
        let mut after =
            Inner { next_node: inner.next_node, free_bytes: inner.free_bytes, ..Inner::default() };
        let mut names = inner.durable_names.clone();
        for (op, _) in &inner.pending_names {
            if random.keep() {
                apply(&mut names, op);
            }
        }
        // A name whose folder was lost is lost with it.
        let kept: Vec<PathBuf> = names.keys().filter(|path| !has_folder(&names, path)).cloned().collect();
        for path in kept {
            names.remove(&path);
        }
        for (number, node) in &inner.nodes {
            let content = survive(node, &mut random);
            after.used_bytes += content.bytes.len() as u64;
            let node = Node { durable: content.clone(), current: content, pending: Vec::new() };
            after.nodes.insert(*number, node);
        }
        after.durable_names = names.clone();
        after.names = names;
        SimDisk { inner: Arc::new(Mutex::new(after)) }
    }

    /// Flips the lowest bit of a byte of a file, as a failing medium would.
    pub fn flip_bit(&self, path: &Path, byte: u64) {
        self.rot(path, byte * 8);
    }

    /// Bit rot: flips one bit of a file at rest, in current reads and in what survives a crash.
    pub fn rot(&self, path: &Path, bit: u64) {
        let mut inner = self.inner.locked();
        if let Some(Target::File(number)) = inner.names.get(path).copied()
            && let Some(node) = inner.nodes.get_mut(&number)
        {
            let at = usize::try_from(bit / 8).expect("a file in memory");
            for content in [&mut node.current, &mut node.durable] {
                if let Some(byte) = content.bytes.get_mut(at) {
                    *byte ^= 1 << (bit % 8);
                }
            }
        }
    }

    /// All file paths, sorted.
    pub fn files(&self) -> Vec<PathBuf> {
        let inner = self.inner.locked();
        inner
            .names
            .iter()
            .filter(|(_, target)| **target != Target::Dir)
            .map(|(path, _)| path.clone())
            .collect()
    }
}

struct Coin {
    state: u64,
    survival: Survival,
}

impl Coin {
    fn keep(&mut self) -> bool {
        match self.survival {
            Survival::Nothing => false,
            Survival::Everything => true,
            Survival::Random => {
                // splitmix64: sufficient here, and the same on every machine.
                self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = self.state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                (z ^ (z >> 31)) & 1 == 1
            }
        }
    }
}

impl Content {
    fn write(&mut self, pos: usize, bytes: &[u8]) {
        if self.bytes.len() < pos + bytes.len() {
            self.bytes.resize(pos + bytes.len(), 0);
        }
        self.bytes[pos..pos + bytes.len()].copy_from_slice(bytes);
    }
}

impl Node {
    /// A sync: the pending changes become durable, at the cost of the changes alone.
    fn make_durable(&mut self) {
        for pending in std::mem::take(&mut self.pending) {
            match pending {
                Pending::Write { pos, bytes } => self.durable.write(pos, &bytes),
                Pending::SetLen(len) => self.durable.bytes.resize(len, 0),
            }
        }
    }
}

fn survive(node: &Node, random: &mut Coin) -> Content {
    let mut content = node.durable.clone();
    for pending in &node.pending {
        match pending {
            Pending::SetLen(len) => {
                if random.keep() {
                    content.bytes.resize(*len, 0);
                }
            }
            Pending::Write { pos, bytes } => {
                let mut at = 0;
                while at < bytes.len() {
                    let until = ((pos + at) / SECTOR + 1) * SECTOR - pos;
                    let until = until.min(bytes.len());
                    if random.keep() {
                        content.write(pos + at, &bytes[at..until]);
                    }
                    at = until;
                }
            }
        }
    }
    content
}

fn has_folder(names: &Names, path: &Path) -> bool {
    match path.parent() {
        None => true,
        Some(parent) if parent.as_os_str().is_empty() || parent == Path::new("/") => true,
        Some(parent) => names.get(parent) == Some(&Target::Dir) && has_folder(names, parent),
    }
}

fn apply(names: &mut Names, op: &NameOp) {
    match op {
        NameOp::Add(path, target) => {
            names.insert(path.clone(), *target);
        }
        NameOp::Remove(path) => {
            names.remove(path);
        }
        NameOp::Rename(from, to) => {
            if !names.contains_key(from) {
                return;
            }
            let moved: Vec<PathBuf> = names.keys().filter(|path| path.starts_with(from)).cloned().collect();
            for path in moved {
                let target = names.remove(&path).expect("the key was just listed");
                let tail = path.strip_prefix(from).expect("the prefix was just checked");
                let path = if tail.as_os_str().is_empty() { to.clone() } else { to.join(tail) };
                names.insert(path, target);
            }
        }
    }
}

fn crashed() -> io::Error {
    io::Error::other("simulated power cut")
}

impl Inner {
    /// Counts a changing operation and returns the fault injected at it.
    fn step(&mut self) -> io::Result<()> {
        if self.off {
            return Err(crashed());
        }
        let number = self.operations;
        self.operations += 1;
        match self.fault {
            Some((at, fault)) if at == number => match fault {
                Fault::Io => Err(io::Error::from_raw_os_error(5)),
                Fault::NoSpace => Err(io::ErrorKind::StorageFull.into()),
                Fault::PowerCut => Ok(()),
            },
            Some((at, Fault::PowerCut)) if number > at => {
                self.off = true;
                Err(crashed())
            }
            _ => Ok(()),
        }
    }

    fn alive(&self) -> io::Result<()> {
        if self.off { Err(crashed()) } else { Ok(()) }
    }

    fn change(&mut self, op: NameOp, folders: &[&Path]) {
        apply(&mut self.names, &op);
        let waiting = folders.iter().filter_map(|path| path.parent()).map(Path::to_path_buf).collect();
        self.pending_names.push((op, waiting));
    }

    fn grow(&mut self, by: u64) -> io::Result<()> {
        if let Some(free) = &mut self.free_bytes {
            *free = free.checked_sub(by).ok_or(io::ErrorKind::StorageFull)?;
        }
        self.used_bytes += by;
        Ok(())
    }

    fn release(&mut self, by: u64) {
        if let Some(free) = &mut self.free_bytes {
            *free += by;
        }
        self.used_bytes = self.used_bytes.saturating_sub(by);
    }

    fn make_names_durable(&mut self, done: impl Fn(&Path) -> bool) {
        let mut rest = Vec::new();
        for (op, mut waiting) in std::mem::take(&mut self.pending_names) {
            waiting.retain(|folder| !done(folder));
            if waiting.is_empty() {
                apply(&mut self.durable_names, &op);
            } else {
                rest.push((op, waiting));
            }
        }
        self.pending_names = rest;
    }

    fn node(&mut self, number: u64) -> io::Result<&mut Node> {
        self.nodes.get_mut(&number).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl DiskFile for SimFile {
    fn pwritev(&self, pos: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let mut inner = self.disk.locked();
        inner.step()?;
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        let pos = usize::try_from(pos).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let len = inner.node(self.node)?.current.bytes.len();
        inner.grow((pos + bytes.len()).saturating_sub(len) as u64)?;
        let node = inner.node(self.node)?;
        node.current.write(pos, &bytes);
        node.pending.push(Pending::Write { pos, bytes });
        Ok(())
    }

    fn pread(&self, pos: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut inner = self.disk.locked();
        inner.alive()?;
        let content = &inner.node(self.node)?.current.bytes;
        let from = usize::try_from(pos).unwrap_or(usize::MAX).min(content.len());
        let got = buf.len().min(content.len() - from);
        buf[..got].copy_from_slice(&content[from..from + got]);
        Ok(got)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut inner = self.disk.locked();
        inner.step()?;
        inner.node(self.node)?.make_durable();
        Ok(())
    }

    fn allocate(&self, _pos: u64, _len: u64) -> io::Result<()> {
        let mut inner = self.disk.locked();
        inner.step()?;
        if inner.free_bytes == Some(0) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut inner = self.disk.locked();
        inner.step()?;
        let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let node = inner.node(self.node)?;
        let old = node.current.bytes.len();
        node.current.bytes.resize(len, 0);
        node.pending.push(Pending::SetLen(len));
        inner.release(old.saturating_sub(len) as u64);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        let mut inner = self.disk.locked();
        inner.alive()?;
        Ok(inner.node(self.node)?.current.bytes.len() as u64)
    }

    fn raw(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Disk for SimDisk {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let inner = self.inner.locked();
        inner.alive()?;
        match inner.names.get(path) {
            Some(Target::File(node)) => Ok(Arc::new(SimFile { disk: self.inner.clone(), node: *node })),
            Some(Target::Dir) => Err(io::ErrorKind::IsADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let mut inner = self.inner.locked();
        inner.step()?;
        if inner.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if !has_folder(&inner.names, path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let node = inner.next_node;
        inner.next_node += 1;
        inner.nodes.insert(node, Node::default());
        inner.change(NameOp::Add(path.to_path_buf(), Target::File(node)), &[path]);
        Ok(Arc::new(SimFile { disk: self.inner.clone(), node }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut inner = self.inner.locked();
        inner.step()?;
        let target = inner.names.get(from).copied();
        let there = inner.names.get(to).copied();
        if target.is_none() || !has_folder(&inner.names, to) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if there == Some(Target::Dir) || (there.is_some() && target == Some(Target::Dir)) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        inner.change(NameOp::Rename(from.to_path_buf(), to.to_path_buf()), &[from, to]);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.inner.locked();
        inner.step()?;
        let Some(Target::File(number)) = inner.names.get(path).copied() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let len = inner.node(number)?.current.bytes.len() as u64;
        inner.release(len);
        inner.change(NameOp::Remove(path.to_path_buf()), &[path]);
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.inner.locked();
        inner.step()?;
        if inner.names.get(path) != Some(&Target::Dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if inner.names.keys().any(|other| other != path && other.starts_with(path)) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        inner.change(NameOp::Remove(path.to_path_buf()), &[path]);
        Ok(())
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.inner.locked();
        inner.alive()?;
        if inner.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        inner.step()?;
        if !has_folder(&inner.names, path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        inner.change(NameOp::Add(path.to_path_buf(), Target::Dir), &[path]);
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>> {
        let inner = self.inner.locked();
        inner.alive()?;
        if inner.names.get(path) != Some(&Target::Dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let entry = |(name, target): (&PathBuf, &Target)| {
            let name = name.file_name()?.to_str()?.to_owned();
            Some(DiskEntry { name, is_dir: *target == Target::Dir })
        };
        Ok(inner.names.iter().filter(|(name, _)| name.parent() == Some(path)).filter_map(entry).collect())
    }

    fn stat(&self, path: &Path) -> io::Result<Option<DiskStat>> {
        let mut inner = self.inner.locked();
        inner.alive()?;
        match inner.names.get(path).copied() {
            None => Ok(None),
            Some(Target::Dir) => Ok(Some(DiskStat { len: 0, is_dir: true })),
            Some(Target::File(number)) => {
                Ok(Some(DiskStat { len: inner.node(number)?.current.bytes.len() as u64, is_dir: false }))
            }
        }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut inner = self.inner.locked();
        inner.step()?;
        inner.make_names_durable(|folder| folder == path);
        Ok(())
    }

    fn syncfs(&self, _path: &Path) -> io::Result<()> {
        let mut inner = self.inner.locked();
        inner.step()?;
        inner.make_names_durable(|_| true);
        inner.nodes.values_mut().for_each(Node::make_durable);
        Ok(())
    }

    fn free_bytes(&self, _path: &Path) -> io::Result<u64> {
        let inner = self.inner.locked();
        inner.alive()?;
        Ok(inner.free_bytes.unwrap_or(1 << 40))
    }

    fn lock(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        if self.stat(path)?.is_some() { self.open(path) } else { self.create(path) }
    }
}
