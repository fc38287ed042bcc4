//! Process statistics from the kernel: CPU time, memory, file descriptors.
//!
//! Owns the parsing of `/proc`. CPU time has the resolution of the scheduler tick (10 ms), so it must not be used for
//! intervals below about a second.

use std::fs;
use std::io;
use std::time::Duration;

/// CPU time of the whole machine since boot, split as comparisons need it.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// User, nice, system and steal time of all cores. Interrupts are left out: they cannot be attributed to a
    /// process.
    pub busy: Duration,
    /// The part of `busy` spent by kernel threads (write-back, journal commits): a delayed cost of earlier writes,
    /// not a competing process.
    pub kernel_threads: Duration,
}

/// Memory of one process, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory {
    /// Resident set: everything mapped and present, file pages of the binary included.
    pub resident: u64,
    /// The anonymous part of it: heap and stacks.
    pub anonymous: u64,
}

/// Duration of one scheduler tick in `/proc`.
fn tick() -> Duration {
    Duration::from_secs(1) / u32::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(100)
}

fn ticks(count: u64) -> Duration {
    tick() * u32::try_from(count).unwrap_or(u32::MAX)
}

/// User and system time of a process, its finished threads included.
pub fn cpu_of(pid: u32) -> io::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, used) = parse_stat(&stat).ok_or_else(|| io::Error::other("unreadable /proc/PID/stat"))?;
    Ok(ticks(used))
}

/// CPU time of this process.
pub fn cpu_of_self() -> io::Result<Duration> {
    cpu_of(std::process::id())
}

/// CPU time of the calling thread, at nanosecond resolution.
#[must_use]
pub fn cpu_of_thread() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// CPU time of this process's threads whose name begins with `prefix`.
pub fn cpu_of_threads(prefix: &str) -> io::Result<Duration> {
    let mut used = 0;
    for entry in fs::read_dir("/proc/self/task")?.flatten() {
        // A thread may exit between the listing and the reading.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let named = stat.split_once('(').is_some_and(|(_, rest)| rest.starts_with(prefix));
        if let (true, Some((_, ticks))) = (named, parse_stat(&stat)) {
            used += ticks;
        }
    }
    Ok(ticks(used))
}

/// The parent and the used ticks of a `/proc/PID/stat` line. The command name may contain spaces and brackets, so
/// fields are counted after the last bracket.
fn parse_stat(stat: &str) -> Option<(u32, u64)> {
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    let parent = fields.get(1)?.parse().ok()?;
    let user: u64 = fields.get(11)?.parse().ok()?;
    let system: u64 = fields.get(12)?.parse().ok()?;
    Some((parent, user + system))
}

/// The busy ticks of the first line of `/proc/stat`.
fn parse_busy(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    let [user, nice, system, _idle, _wait, _irq, _softirq, steal, ..] = fields[..] else { return None };
    Some(user + nice + system + steal)
}

/// Reads the machine's counters; walks `/proc` once for the kernel threads.
pub fn machine() -> io::Result<Machine> {
    let stat = fs::read_to_string("/proc/stat")?;
    let busy = parse_busy(&stat).ok_or_else(|| io::Error::other("unreadable /proc/stat"))?;
    let mut kernel = 0;
    for entry in fs::read_dir("/proc")?.flatten() {
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // A process may exit between the listing and the reading; then it is not a kernel thread.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        if let Some((2, used)) = parse_stat(&stat) {
            kernel += used;
        }
    }
    Ok(Machine { busy: ticks(busy), kernel_threads: ticks(kernel) })
}

/// Memory of a process.
pub fn memory_of(pid: u32) -> io::Result<Memory> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok(Memory { resident: kib_field(&status, "VmRSS:"), anonymous: kib_field(&status, "RssAnon:") })
}

fn kib_field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Memory available to programs, in bytes.
pub fn available_memory() -> io::Result<u64> {
    Ok(kib_field(&fs::read_to_string("/proc/meminfo")?, "MemAvailable:"))
}

/// Number of file descriptors of a process.
pub fn descriptors_of(pid: u32) -> io::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Number of cores available to this process.
#[must_use]
pub fn cores() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_a_command_with_brackets_and_spaces() {
        let line = "7 (a) b (c) S 2 7 7 0 -1 4194560 100 0 0 0 30 12 5 6 20 0 1 0 1 1 1";
        assert_eq!(parse_stat(line), Some((2, 42)));
        assert_eq!(parse_stat("garbage"), None);
    }

    #[test]
    fn idle_and_interrupt_time_is_not_busy() {
        assert_eq!(parse_busy("cpu  1 2 4 1000 1000 500 500 8 0 0\ncpu0 …"), Some(15));
        assert_eq!(parse_busy("intr 1"), None);
    }

    #[test]
    fn a_busy_thread_shows_in_its_process() {
        let (process, thread) = (cpu_of_self().unwrap(), cpu_of_thread());
        let mut x = 1_u64;
        while cpu_of_thread() - thread < Duration::from_millis(60) {
            x = std::hint::black_box(x.wrapping_mul(31));
        }
        assert!(cpu_of_self().unwrap() - process >= Duration::from_millis(40));
        assert!(machine().unwrap().busy >= cpu_of_self().unwrap());
    }

    #[test]
    fn this_process_has_memory_and_descriptors() {
        let memory = memory_of(std::process::id()).unwrap();
        assert!(memory.resident > memory.anonymous && memory.anonymous > 0);
        assert!(descriptors_of(std::process::id()).unwrap() >= 3);
    }
}
