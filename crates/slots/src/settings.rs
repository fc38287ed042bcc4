//! CONFIG: the settings that clients and tools read and change at run time.
//!
//! Settings with an effect are mirrored in fields that the hot path reads without a lock; the others are stored
//! because tools expect to read back what they wrote. A change lasts until the node restarts, as in a Redis without a
//! configuration file.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::error::Error;
use crate::events::class;
use crate::keyspace::lfu::Lfu;
use crate::output_limit::OutputLimits;
use crate::value::limits::Limits;

/// `maxmemory-policy`: which keys are evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Policy {
    NoEviction,
    AllKeysLru,
    AllKeysLfu,
    AllKeysRandom,
    VolatileLru,
    VolatileLfu,
    VolatileRandom,
    VolatileTtl,
}

const POLICIES: [(&str, Policy); 8] = [
    ("noeviction", Policy::NoEviction),
    ("allkeys-lru", Policy::AllKeysLru),
    ("allkeys-lfu", Policy::AllKeysLfu),
    ("allkeys-random", Policy::AllKeysRandom),
    ("volatile-lru", Policy::VolatileLru),
    ("volatile-lfu", Policy::VolatileLfu),
    ("volatile-random", Policy::VolatileRandom),
    ("volatile-ttl", Policy::VolatileTtl),
];

#[derive(Clone, Copy)]
enum Kind {
    /// Arbitrary text.
    Text,
    /// An integer within inclusive bounds.
    Number(i64, i64),
    /// A memory size with an optional unit (`k`, `mb` …).
    Bytes,
    YesNo,
    Policy,
    Notify,
    /// `client-output-buffer-limit`: three numbers per client class.
    OutputLimits,
    /// Read-only setting.
    Fixed,
}

/// Name, kind and default value of every setting.
const SETTINGS: &[(&str, Kind, &str)] = &[
    ("maxmemory", Kind::Bytes, "0"),
    ("maxmemory-policy", Kind::Policy, "noeviction"),
    ("maxmemory-samples", Kind::Number(1, 64), "5"),
    ("maxmemory-eviction-tenacity", Kind::Number(0, 100), "10"),
    ("maxmemory-clients", Kind::Bytes, "0"),
    ("maxclients", Kind::Number(1, 1_000_000), "10000"),
    ("timeout", Kind::Number(0, i32::MAX as i64), "0"),
    ("tcp-keepalive", Kind::Number(0, i32::MAX as i64), "300"),
    ("tcp-backlog", Kind::Fixed, "4096"),
    ("hz", Kind::Number(0, 500), "10"),
    ("dynamic-hz", Kind::YesNo, "yes"),
    ("slowlog-log-slower-than", Kind::Number(-1, i64::MAX), "10000"),
    ("slowlog-max-len", Kind::Number(0, 1_000_000), "128"),
    ("latency-monitor-threshold", Kind::Number(0, i64::MAX), "0"),
    ("latency-tracking", Kind::YesNo, "yes"),
    ("notify-keyspace-events", Kind::Notify, ""),
    ("save", Kind::Text, ""),
    ("appendonly", Kind::YesNo, "yes"),
    ("appendfsync", Kind::Text, "always"),
    ("no-appendfsync-on-rewrite", Kind::YesNo, "no"),
    ("auto-aof-rewrite-percentage", Kind::Number(0, i32::MAX as i64), "100"),
    ("auto-aof-rewrite-min-size", Kind::Bytes, "67108864"),
    ("aof-use-rdb-preamble", Kind::YesNo, "yes"),
    ("rdbcompression", Kind::YesNo, "yes"),
    ("rdbchecksum", Kind::YesNo, "yes"),
    ("stop-writes-on-bgsave-error", Kind::YesNo, "yes"),
    ("databases", Kind::Fixed, "1"),
    ("replicaof", Kind::Fixed, ""),
    ("port", Kind::Fixed, "6379"),
    ("bind", Kind::Text, "127.0.0.1"),
    ("protected-mode", Kind::YesNo, "no"),
    ("requirepass", Kind::Text, ""),
    ("masterauth", Kind::Text, ""),
    ("masteruser", Kind::Text, ""),
    ("loglevel", Kind::Text, "notice"),
    ("logfile", Kind::Text, ""),
    ("dir", Kind::Fixed, "/"),
    ("dbfilename", Kind::Text, "dump.rdb"),
    ("daemonize", Kind::Fixed, "no"),
    ("cluster-enabled", Kind::Fixed, "yes"),
    ("cluster-node-timeout", Kind::Number(0, i64::MAX), "600"),
    ("cluster-require-full-coverage", Kind::YesNo, "yes"),
    ("cluster-allow-reads-when-down", Kind::YesNo, "no"),
    ("cluster-allow-pubsubshard-when-down", Kind::YesNo, "yes"),
    ("cluster-migration-barrier", Kind::Number(0, i32::MAX as i64), "1"),
    ("cluster-replica-no-failover", Kind::YesNo, "no"),
    ("cluster-announce-hostname", Kind::Text, ""),
    ("cluster-preferred-endpoint-type", Kind::Text, "ip"),
    ("replica-read-only", Kind::YesNo, "yes"),
    ("replica-serve-stale-data", Kind::YesNo, "yes"),
    ("min-replicas-to-write", Kind::Number(0, i32::MAX as i64), "0"),
    ("repl-diskless-sync", Kind::YesNo, "yes"),
    ("repl-diskless-sync-delay", Kind::Number(0, i32::MAX as i64), "5"),
    ("repl-ping-replica-period", Kind::Number(1, i32::MAX as i64), "10"),
    ("repl-timeout", Kind::Number(1, i32::MAX as i64), "60"),
    ("repl-backlog-size", Kind::Bytes, "1048576"),
    ("lazyfree-lazy-eviction", Kind::YesNo, "yes"),
    ("lazyfree-lazy-expire", Kind::YesNo, "yes"),
    ("lazyfree-lazy-server-del", Kind::YesNo, "yes"),
    ("lazyfree-lazy-user-del", Kind::YesNo, "yes"),
    ("lazyfree-lazy-user-flush", Kind::YesNo, "yes"),
    ("replica-lazy-flush", Kind::YesNo, "yes"),
    ("activedefrag", Kind::YesNo, "no"),
    ("activerehashing", Kind::YesNo, "yes"),
    ("active-expire-effort", Kind::Number(1, 10), "1"),
    ("lfu-log-factor", Kind::Number(0, i32::MAX as i64), "10"),
    ("lfu-decay-time", Kind::Number(0, i32::MAX as i64), "1"),
    ("proto-max-bulk-len", Kind::Bytes, "536870912"),
    ("client-query-buffer-limit", Kind::Bytes, "1073741824"),
    (
        "client-output-buffer-limit",
        Kind::OutputLimits,
        "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60",
    ),
    ("lua-time-limit", Kind::Number(0, i64::MAX), "5000"),
    ("busy-reply-threshold", Kind::Number(0, i64::MAX), "5000"),
    ("hash-max-listpack-entries", Kind::Number(0, i64::MAX), "128"),
    ("hash-max-listpack-value", Kind::Number(0, i64::MAX), "64"),
    ("list-max-listpack-size", Kind::Number(i32::MIN as i64, i32::MAX as i64), "-2"),
    ("list-compress-depth", Kind::Number(0, i32::MAX as i64), "0"),
    ("set-max-intset-entries", Kind::Number(0, i64::MAX), "512"),
    ("set-max-listpack-entries", Kind::Number(0, i64::MAX), "128"),
    ("set-max-listpack-value", Kind::Number(0, i64::MAX), "64"),
    ("zset-max-listpack-entries", Kind::Number(0, i64::MAX), "128"),
    ("zset-max-listpack-value", Kind::Number(0, i64::MAX), "64"),
    ("hll-sparse-max-bytes", Kind::Bytes, "3000"),
    ("stream-node-max-bytes", Kind::Bytes, "4096"),
    ("stream-node-max-entries", Kind::Number(0, i64::MAX), "100"),
    ("tracking-table-max-keys", Kind::Number(0, i64::MAX), "1000000"),
    ("acllog-max-len", Kind::Number(0, i64::MAX), "128"),
    ("jemalloc-bg-thread", Kind::YesNo, "yes"),
    ("close-on-oom", Kind::YesNo, "no"),
    ("sanitize-dump-payload", Kind::Text, "no"),
    ("oom-score-adj", Kind::Text, "no"),
    ("disable-thp", Kind::YesNo, "yes"),
    ("key-load-delay", Kind::Number(i64::MIN, i64::MAX), "0"),
    ("io-threads", Kind::Fixed, "1"),
    ("unixsocket", Kind::Fixed, ""),
];

/// Deprecated names and their replacements.
const ALIASES: &[(&str, &str)] = &[
    ("slaveof", "replicaof"),
    ("hash-max-ziplist-entries", "hash-max-listpack-entries"),
    ("hash-max-ziplist-value", "hash-max-listpack-value"),
    ("list-max-ziplist-size", "list-max-listpack-size"),
    ("zset-max-ziplist-entries", "zset-max-listpack-entries"),
    ("zset-max-ziplist-value", "zset-max-listpack-value"),
];

/// The settings of a node.
pub struct Settings {
    values: RwLock<BTreeMap<&'static str, String>>,
    /// Incremented on every change, so that holders of a copy can detect that it is stale.
    pub version: AtomicU64,
    /// `maxmemory` in bytes, 0 for no limit.
    pub max_memory: AtomicU64,
    policy: AtomicU8,
    /// `notify-keyspace-events`
    pub notify: AtomicU32,
    /// `slowlog-log-slower-than`, in microseconds.
    pub slower_than_us: AtomicI64,
    /// Idle client `timeout`, in seconds.
    pub timeout_s: AtomicI64,
    /// `client-output-buffer-limit`.
    pub output: OutputLimits,
    /// Encoding limits: `hash-max-listpack-entries` and similar settings.
    limits: RwLock<Limits>,
}

impl Default for Settings {
    fn default() -> Self {
        let output = OutputLimits::default();
        let known = SETTINGS.iter().find(|(name, ..)| *name == "client-output-buffer-limit");
        known.iter().for_each(|(.., value)| output.set(value));
        Self {
            output,
            values: RwLock::new(
                SETTINGS.iter().map(|(name, _, value)| (*name, (*value).to_owned())).collect(),
            ),
            version: AtomicU64::new(1),
            max_memory: AtomicU64::new(0),
            policy: AtomicU8::new(0),
            notify: AtomicU32::new(0),
            slower_than_us: AtomicI64::new(10_000),
            timeout_s: AtomicI64::new(0),
            limits: RwLock::default(),
        }
    }
}

impl Settings {
    /// The value of a setting.
    pub fn get(&self, name: &str) -> Option<String> {
        let name = canonical(name);
        self.values.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// The value of a numeric setting.
    pub fn number(&self, name: &str) -> i64 {
        self.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// All settings whose name matches.
    pub fn matching(&self, fits: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let values = self.values.read().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<_> = values
            .iter()
            .filter(|(name, _)| fits(name))
            .map(|(name, value)| (*name, value.clone()))
            .collect();
        let old = ALIASES.iter().filter(|(old, _)| fits(old));
        found.extend(old.filter_map(|(old, new)| Some((*old, values.get(new)?.clone()))));
        found
    }

    /// The eviction policy (`maxmemory-policy`).
    pub fn policy(&self) -> Policy {
        POLICIES[usize::from(self.policy.load(Ordering::Relaxed)) % POLICIES.len()].1
    }

    /// The LFU counter parameters, if the eviction policy is an LFU policy.
    pub(crate) fn lfu(&self, seed: u64) -> Option<Lfu> {
        let counts = matches!(self.policy(), Policy::AllKeysLfu | Policy::VolatileLfu);
        let number = |name: &str| u32::try_from(self.number(name)).unwrap_or(0);
        counts.then(|| Lfu::new(number("lfu-log-factor"), number("lfu-decay-time"), seed))
    }

    /// The limits of the compact encodings.
    pub fn limits(&self) -> Limits {
        *self.limits.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_limit(&self, name: &str, value: i64) {
        let mut limits = self.limits.write().unwrap_or_else(PoisonError::into_inner);
        let count = usize::try_from(value).unwrap_or(0);
        match name {
            "hash-max-listpack-entries" => limits.hash_entries = count,
            "hash-max-listpack-value" => limits.hash_value = count,
            "list-max-listpack-size" => limits.list_chunk = value,
            "set-max-intset-entries" => limits.set_ints = count,
            "set-max-listpack-entries" => limits.set_entries = count,
            "set-max-listpack-value" => limits.set_value = count,
            "zset-max-listpack-entries" => limits.zset_entries = count,
            "zset-max-listpack-value" => limits.zset_value = count,
            "stream-node-max-bytes" => limits.stream_bytes = count,
            "stream-node-max-entries" => limits.stream_entries = count,
            _ => {}
        }
    }

    /// Validates pairs of names and values and applies them; nothing changes unless all are valid.
    pub fn set_all(&self, pairs: &[(String, String)]) -> Result<(), Error> {
        let mut changes = Vec::new();
        for (name, value) in pairs {
            let name = name.to_lowercase();
            let Some((known, kind, _)) = SETTINGS.iter().find(|(known, _, _)| *known == canonical(&name))
            else {
                return Err(Error::err(format_args!(
                    "Unknown option or number of arguments for CONFIG SET - '{name}'"
                )));
            };
            let is_twice = changes.iter().any(|(other, _)| other == known);
            let is_port = *known == "port" && self.get("port").is_some_and(|port| port == *value);
            let checked = match kind {
                _ if is_twice => Err("duplicate parameter".to_owned()),
                // Redis would listen on the new port; here the port stays unchanged.
                Kind::Fixed if is_port => Ok(value.clone()),
                Kind::OutputLimits => self.check_output_limits(value),
                kind => check(*kind, value),
            };
            let value = checked.map_err(|why| {
                Error::err(format_args!("CONFIG SET failed (possibly related to argument '{name}') - {why}"))
            })?;
            changes.push((*known, value));
        }
        for (name, value) in changes {
            self.put(name, value);
        }
        Ok(())
    }

    /// Merges the limits of the named client classes; the others stay unchanged.
    fn check_output_limits(&self, value: &str) -> Result<String, String> {
        let mut all = OutputLimits::read(&self.get("client-output-buffer-limit").unwrap_or_default())?;
        for (known, limit) in all.iter_mut().zip(OutputLimits::read(value)?) {
            *known = limit.or(*known);
        }
        Ok(OutputLimits::write(all))
    }

    /// Sets a setting that clients cannot change.
    pub fn fix(&self, name: &'static str, value: String) {
        self.put(name, value);
    }

    fn put(&self, name: &'static str, value: String) {
        let number = || value.parse::<i64>().unwrap_or(0);
        match name {
            "maxmemory" => self.max_memory.store(value.parse().unwrap_or(0), Ordering::Relaxed),
            "maxmemory-policy" => {
                let at = POLICIES.iter().position(|(known, _)| *known == value).unwrap_or(0);
                self.policy.store(at as u8, Ordering::Relaxed);
            }
            "notify-keyspace-events" => {
                self.notify.store(read_classes(&value).unwrap_or(0), Ordering::Relaxed)
            }
            "slowlog-log-slower-than" => self.slower_than_us.store(number(), Ordering::Relaxed),
            "client-output-buffer-limit" => self.output.set(&value),
            "timeout" => self.timeout_s.store(number(), Ordering::Relaxed),
            _ => self.put_limit(name, number()),
        }
        self.values.write().unwrap_or_else(PoisonError::into_inner).insert(name, value);
        self.version.fetch_add(1, Ordering::Release);
    }
}

fn canonical(name: &str) -> &str {
    ALIASES.iter().find(|(old, _)| *old == name).map_or(name, |(_, new)| new)
}

/// The normalized value, or why it is invalid.
fn check(kind: Kind, value: &str) -> Result<String, String> {
    match kind {
        Kind::Text | Kind::OutputLimits => Ok(value.to_owned()),
        Kind::Fixed => Err("can't set immutable config".to_owned()),
        Kind::YesNo => match value.to_lowercase().as_str() {
            yes @ ("yes" | "no") => Ok(yes.to_owned()),
            _ => Err("argument must be 'yes' or 'no'".to_owned()),
        },
        Kind::Number(low, high) => {
            let number: i64 =
                value.parse().map_err(|_| "argument couldn't be parsed into an integer".to_owned())?;
            if number < low || number > high {
                return Err(format!("argument must be between {low} and {high} inclusive"));
            }
            Ok(number.to_string())
        }
        Kind::Bytes => bytes(value)
            .map(|number| number.to_string())
            .ok_or_else(|| "argument must be a memory value".to_owned()),
        Kind::Policy => {
            let wanted = value.to_lowercase();
            if POLICIES.iter().any(|(name, _)| *name == wanted) {
                return Ok(wanted);
            }
            Err("argument(s) must be one of the following: volatile-lru, volatile-lfu, volatile-random, volatile-ttl, allkeys-lru, allkeys-lfu, allkeys-random, noeviction".to_owned())
        }
        Kind::Notify => {
            let classes = read_classes(value)
                .ok_or_else(|| "Invalid event class character. Use 'Ag$lshzxeKEtmdn'.".to_owned())?;
            Ok(write_classes(classes))
        }
    }
}

pub(crate) fn bytes(text: &str) -> Option<u64> {
    let lower = text.to_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &lower[digits.len()..] {
        "" | "b" => 1,
        "k" => 1_000,
        "kb" => 1 << 10,
        "m" => 1_000_000,
        "mb" => 1 << 20,
        "g" => 1_000_000_000,
        "gb" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

const CLASSES: [(char, u32); 14] = [
    ('g', class::GENERIC),
    ('$', class::STRING),
    ('l', class::LIST),
    ('s', class::SET),
    ('h', class::HASH),
    ('z', class::ZSET),
    ('x', class::EXPIRED),
    ('e', class::EVICTED),
    ('K', class::KEYSPACE),
    ('E', class::KEYEVENT),
    ('t', class::STREAM),
    ('m', class::MISS),
    ('d', class::MODULE),
    ('n', class::NEW),
];

fn read_classes(text: &str) -> Option<u32> {
    text.chars().try_fold(0, |all, c| {
        if c == 'A' {
            return Some(all | class::ALL);
        }
        CLASSES.iter().find(|(name, _)| *name == c).map(|(_, bit)| all | bit)
    })
}

fn write_classes(classes: u32) -> String {
    let mut text = String::new();
    let all = classes & class::ALL == class::ALL;
    if all {
        text.push('A');
    }
    let rest = CLASSES.iter().filter(|(_, bit)| classes & bit != 0 && !(all && class::ALL & bit != 0));
    text.extend(rest.map(|(name, _)| name));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_set_is_atomic() {
        let settings = Settings::default();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert!(settings.set_all(&[pair("maxmemory", "1gb"), pair("hz", "-3")]).is_err());
        assert_eq!(settings.get("maxmemory").unwrap(), "0");
        settings.set_all(&[pair("maxmemory", "1gb"), pair("MAXMEMORY-POLICY", "allkeys-lru")]).unwrap();
        assert_eq!(settings.max_memory.load(Ordering::Relaxed), 1 << 30);
        assert_eq!(settings.policy(), Policy::AllKeysLru);
        assert!(settings.set_all(&[pair("port", "1")]).is_err());
        assert!(settings.set_all(&[pair("no-such", "1")]).is_err());
        settings.set_all(&[pair("notify-keyspace-events", "KEA")]).unwrap();
        assert_eq!(settings.get("notify-keyspace-events").unwrap(), "AKE");
        settings.set_all(&[pair("hash-max-ziplist-entries", "7")]).unwrap();
        assert_eq!(settings.number("hash-max-listpack-entries"), 7);
    }
}
