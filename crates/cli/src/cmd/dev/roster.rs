//! cluster.json, the list of nodes that other programs read, and .moim/context.toml, which client commands
//! read.
//!
//! Invariants: both files are replaced atomically; cluster.json is rewritten before the start or the end of a node is
//! reported, so a reader finds the state that was reported.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::plan::{Member, Plan};
use crate::exit::{Failure, Outcome};
use crate::target::{CONTEXT, Context};

const FILE: &str = "cluster.json";

/// cluster.json.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listing {
    /// Every node, running or not.
    pub(super) nodes: Vec<Member>,
    /// The first port.
    pub(super) base_port: u16,
    /// The process id of the supervisor, while it runs.
    pub(super) supervisor: Option<u32>,
}

impl Listing {
    /// The list of an earlier start in this directory.
    pub(super) fn read(data: &Path) -> Outcome<Option<Self>> {
        let path = data.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::error(format!("cannot read {}: {error}", path.display()))),
        };
        let listing = serde_json::from_slice(&text).map_err(|error| {
            Failure::error(format!("{} is not understood: {error}", path.display()))
                .hint("`moim dev purge` makes room for a new cluster")
        })?;
        Ok(Some(listing))
    }

    /// The plan it was made by.
    pub(super) fn plan(&self) -> Outcome<Plan> {
        Plan::new(u16::try_from(self.nodes.len()).unwrap_or(u16::MAX), self.base_port)
    }
}

/// The running cluster's list.
pub(super) struct Roster {
    data: PathBuf,
    listing: Mutex<Listing>,
}

impl Roster {
    /// A list in which nothing runs yet but the supervisor, this process.
    pub(super) fn new(data: &Path, plan: Plan) -> Outcome<Self> {
        let listing =
            Listing { nodes: plan.members(), base_port: plan.base, supervisor: Some(std::process::id()) };
        let roster = Self { data: data.to_owned(), listing: Mutex::new(listing) };
        roster.change(|_| ())?;
        Ok(roster)
    }

    /// The list as it is now.
    pub(super) fn listing(&self) -> Listing {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records that the process of a node started or ended.
    pub(super) fn set_pid(&self, id: i32, pid: Option<u32>) -> Outcome {
        self.change(|listing| {
            for node in listing.nodes.iter_mut().filter(|node| node.id == id) {
                node.pid = pid;
            }
        })
    }

    /// Records that the supervisor has ended.
    pub(super) fn close(&self) -> Outcome {
        self.change(|listing| {
            listing.supervisor = None;
            listing.nodes.iter_mut().for_each(|node| node.pid = None);
        })
    }

    fn change(&self, change: impl FnOnce(&mut Listing)) -> Outcome {
        let mut listing = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut listing);
        let mut text = serde_json::to_vec_pretty(&*listing)?;
        text.push(b'\n');
        replace(&self.data.join(FILE), &text)
    }
}

/// Writes the context file: client commands in `folder` and below find the cluster.
pub(super) fn write_context(folder: &Path, nodes: &[Member]) -> Outcome {
    let text = context(nodes)?;
    let path = folder.join(CONTEXT);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    replace(&path, text.as_bytes())
}

/// Removes the context file, unless it names another cluster by now.
pub(super) fn remove_context(folder: &Path, nodes: &[Member]) -> Outcome {
    let path = folder.join(CONTEXT);
    if fs::read_to_string(&path).is_ok_and(|text| context(nodes).is_ok_and(|ours| ours == text)) {
        fs::remove_file(&path)?;
    }
    Ok(())
}

fn context(nodes: &[Member]) -> Outcome<String> {
    let context = Context {
        kafka: Some(listed(nodes, |node| &node.kafka)),
        redis: nodes
            .iter()
            .map(|node| node.redis.clone())
            .collect::<Option<Vec<_>>>()
            .map(|all| all.join(",")),
        etcd: Some(listed(nodes, |node| &node.etcd)),
        admin: Some(listed(nodes, |node| &node.admin)),
    };
    let text = toml::to_string(&context)
        .map_err(|error| Failure::error(format!("the context cannot be written: {error}")))?;
    Ok(format!("# Written by `moim dev`; gone when the cluster stops.\n{text}"))
}

/// One address of every node, with commas between.
pub(super) fn listed(nodes: &[Member], address: impl Fn(&Member) -> &String) -> String {
    nodes.iter().map(|node| address(node).as_str()).collect::<Vec<_>>().join(",")
}

/// Replaces a file atomically: readers see the old content or the new one.
fn replace(path: &Path, text: &[u8]) -> Outcome {
    let new = path.with_extension("new");
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, path))
        .map_err(|error| Failure::error(format!("cannot write {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_on_disk_when_it_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let roster = Roster::new(dir.path(), Plan::new(2, 20_000).unwrap()).unwrap();
        roster.set_pid(2, Some(77)).unwrap();
        let listing = Listing::read(dir.path()).unwrap().unwrap();
        assert_eq!(listing, roster.listing());
        assert_eq!(listing.nodes.iter().map(|node| node.pid).collect::<Vec<_>>(), [None, Some(77)]);
        assert_eq!(listing.plan().unwrap(), Plan::new(2, 20_000).unwrap());
        let json: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.path().join(FILE)).unwrap()).unwrap();
        let keys: Vec<_> = json["nodes"][0].as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys, ["id", "pid", "kafka", "redis", "etcd", "admin", "peer"]);
        roster.close().unwrap();
        let listing = Listing::read(dir.path()).unwrap().unwrap();
        assert_eq!((listing.supervisor, listing.nodes[1].pid), (None, None));
    }

    #[test]
    fn a_context_of_somebody_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) =
            (Plan::new(1, 20_000).unwrap().members(), Plan::new(1, 30_000).unwrap().members());
        write_context(dir.path(), &theirs).unwrap();
        remove_context(dir.path(), &ours).unwrap();
        assert!(dir.path().join(CONTEXT).exists());
        remove_context(dir.path(), &theirs).unwrap();
        assert!(!dir.path().join(CONTEXT).exists());
    }
}
