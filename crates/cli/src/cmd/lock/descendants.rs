//! The processes that descend from one: found in /proc, so that a command that started others, or moved them
//! to another group or session, is killed whole.
//!
//! Orphans count too. While the ancestor lives it is their reaper (`PR_SET_CHILD_SUBREAPER`): they become its children.
//! Once it is gone they are identified by the mark that they inherited in their environment, or because an earlier scan
//! saw them. Not found are a process that forks faster than /proc can be read, and one that cleared its environment and
//! was never seen; a kill is repeated until two scans find no process.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// The limit of scans; each one kills the processes that were started during the previous one.
const PASSES: usize = 50;
/// The pause between two scans: a killed process needs time to end, and one in `execve` has no environment for a moment.
const PAUSE: Duration = Duration::from_millis(2);
/// The variable with the marks of every `lock run` around a process, separated by `:`.
pub(super) const MARKS: &str = "MOIM_LOCK_RUNS";

/// Everything that one process has started.
pub(super) struct Family {
    ancestor: u32,
    spared: u32,
    mark: String,
    /// The start time of each process that was seen: a process id alone may be reused.
    seen: BTreeMap<u32, u64>,
}

/// A process that runs.
struct Process {
    pid: u32,
    parent: u32,
    started: u64,
}

impl Family {
    /// The descendants of `ancestor` but `spared`, with those whose [`MARKS`] hold `mark`.
    pub(super) fn new(ancestor: u32, spared: u32, mark: &str) -> Self {
        Self { ancestor, spared, mark: mark.to_owned(), seen: BTreeMap::new() }
    }

    /// Scans for the present members.
    pub(super) fn look(&mut self) {
        let all = processes();
        self.seen = self.members(&all, false).into_iter().map(|one| (one.pid, one.started)).collect();
    }

    /// Sends a signal to every living member; returns how many there were.
    pub(super) fn signal(&mut self, signal: Signal) -> usize {
        let all = processes();
        let found = self.members(&all, true);
        for one in &found {
            if let Some(pid) = i32::try_from(one.pid).ok().and_then(Pid::from_raw) {
                // A process that has ended needs no signal.
                let _ = kill_process(pid, signal);
            }
        }
        self.seen.extend(found.iter().map(|one| (one.pid, one.started)));
        found.len()
    }

    /// Kills every member, and those they start meanwhile.
    pub(super) fn kill(&mut self) {
        let mut empty_scans = 0;
        for _ in 0..PASSES {
            empty_scans = if self.signal(Signal::KILL) == 0 { empty_scans + 1 } else { 0 };
            if empty_scans == 2 {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn members<'a>(&self, all: &'a [Process], marked: bool) -> Vec<&'a Process> {
        let mut children: BTreeMap<u32, Vec<&Process>> = BTreeMap::new();
        let mut open = Vec::new();
        for one in all {
            children.entry(one.parent).or_default().push(one);
            let known = one.parent == self.ancestor
                || self.seen.get(&one.pid) == Some(&one.started)
                || (marked && is_marked(one.pid, &self.mark));
            if known {
                open.push(one);
            }
        }
        let mut taken = BTreeSet::from([self.ancestor, self.spared]);
        let mut found = Vec::new();
        while let Some(one) = open.pop() {
            if taken.insert(one.pid) {
                found.push(one);
                open.extend(children.remove(&one.pid).unwrap_or_default());
            }
        }
        found
    }
}

/// The marks for the environment of a command: those around this process, and one more.
pub(super) fn marks_with(mark: &str) -> String {
    match std::env::var(MARKS) {
        Ok(outer) if !outer.is_empty() => format!("{outer}:{mark}"),
        _ => mark.to_owned(),
    }
}

fn is_marked(pid: u32, mark: &str) -> bool {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| {
        variable
            .strip_prefix(MARKS.as_bytes())
            .and_then(|rest| rest.strip_prefix(b"="))
            .is_some_and(|marks| marks.split(|byte| *byte == b':').any(|one| one == mark.as_bytes()))
    })
}

fn processes() -> Vec<Process> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some((state, parent, started)) = parse(&stat)
            && state != 'Z'
            && state != 'X'
        {
            all.push(Process { pid, parent, started });
        }
    }
    all
}

/// State, parent and start of a line `PID (NAME) STATE PARENT …`. The name may hold anything, brackets too.
fn parse(stat: &str) -> Option<(char, u32, u64)> {
    let mut words = stat.rsplit_once(')')?.1.split_whitespace();
    let state = words.next()?.chars().next()?;
    let parent = words.next()?.parse().ok()?;
    // The 22nd of the line.
    Some((state, parent, words.nth(17)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_name_with_brackets_is_no_trap() {
        assert_eq!(parse("12 (a) S 1) S 7 12 12 0 -1 8 0 0 0 0 1 2 3 4 20 0 1 0 99 5"), Some(('S', 7, 99)));
        assert_eq!(parse("12 (sh) Z 1 1"), None);
        assert_eq!(parse("garbage"), None);
    }

    #[test]
    fn grandchildren_are_killed_and_the_spared_one_is_not() {
        let start = |script: &str| {
            let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            let mut said = BufReader::new(child.stdout.take().unwrap());
            said.read_line(&mut line).unwrap();
            (child, line.trim().parse::<u32>().unwrap())
        };
        let (mut root, grandchild) = start("sleep 60 & echo $!; wait");
        let (mut other, _) = start("echo 1; exec sleep 60");
        let mut family = Family::new(root.id(), 0, "none");
        let all = processes();
        let members: Vec<u32> = family.members(&all, true).iter().map(|one| one.pid).collect();
        assert_eq!(members, [grandchild]);
        family.kill();
        assert!(root.wait().unwrap().code().is_some(), "the shell saw its child die");
        assert!(other.try_wait().unwrap().is_none(), "another tree is left alone");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn orphans_are_known_by_their_mark_or_because_they_were_seen() {
        for marked in [true, false] {
            let mut root = Command::new("sh")
                .args(["-c", "sleep 60 & echo $!; read line; kill -9 $$"])
                .env(MARKS, if marked { "outer:one" } else { "one more" })
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(root.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let orphan: u32 = line.trim().parse().unwrap();
            let mut family = Family::new(root.id(), 0, "one");
            if !marked {
                family.look();
            }
            drop(root.stdin.take());
            root.wait().unwrap();
            assert_eq!(Family::new(u32::MAX, 0, "on").signal(Signal::KILL), 0, "another mark");
            family.kill();
            assert!(!processes().iter().any(|one| one.pid == orphan), "marked: {marked}");
        }
    }
}
