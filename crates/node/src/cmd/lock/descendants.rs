//! The processes that descend from one: found in /proc, so that a command that started others, or moved them
//! to another group or session, is killed whole.
//!
//! Orphans count too as long as the ancestor is their reaper (`PR_SET_CHILD_SUBREAPER`): they become its
//! children. What this cannot catch is a process that forks faster than /proc can be read; a kill is repeated
//! until a look finds nobody.

use std::collections::BTreeMap;

use rustix::process::{Pid, Signal, kill_process};

/// Looks at most so often; each one kills what the last one's victims had started meanwhile.
const PASSES: usize = 50;

/// Sends a signal to every living descendant of `ancestor` but `spared`. Says how many there were.
pub(super) fn signal(ancestor: u32, spared: u32, signal: Signal) -> usize {
    let found = living(ancestor, spared);
    for pid in &found {
        if let Some(pid) = i32::try_from(*pid).ok().and_then(Pid::from_raw) {
            // One that has ended meanwhile is as we want it.
            let _ = kill_process(pid, signal);
        }
    }
    found.len()
}

/// Kills every descendant of `ancestor` but `spared`, and those they start meanwhile.
pub(super) fn kill(ancestor: u32, spared: u32) {
    for _ in 0..PASSES {
        if signal(ancestor, spared, Signal::KILL) == 0 {
            return;
        }
    }
}

fn living(ancestor: u32, spared: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some((state, parent)) = parse(&stat)
            && state != 'Z'
            && state != 'X'
        {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut open = vec![ancestor];
    while let Some(parent) = open.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            if child != spared {
                found.push(child);
                open.push(child);
            }
        }
    }
    found
}

/// State and parent of a line `PID (NAME) STATE PARENT …`. The name may hold anything, brackets too.
fn parse(stat: &str) -> Option<(char, u32)> {
    let mut words = stat.rsplit_once(')')?.1.split_whitespace();
    let state = words.next()?.chars().next()?;
    Some((state, words.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_name_with_brackets_is_no_trap() {
        assert_eq!(parse("12 (a) S 1) S 7 12 12 0"), Some(('S', 7)));
        assert_eq!(parse("12 (sh) Z 1 1"), Some(('Z', 1)));
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
        assert_eq!(living(root.id(), 0), [grandchild]);
        kill(root.id(), 0);
        assert!(root.wait().unwrap().code().is_some(), "the shell saw its child die");
        assert!(other.try_wait().unwrap().is_none(), "another tree is left alone");
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
