//! The servers of a client command: from the flag, the environment, the context file or the default, in this order.
//!
//! Invariant: an invalid address is an error that names its source; falling through to the next source could reach the
//! wrong cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use moim_node::config::split_host_port;
use serde::{Deserialize, Serialize};

use crate::config::units::parse_millis;
use crate::exit::{Failure, Outcome};

pub(crate) const CONTEXT: &str = ".moim/context.toml";

#[allow(dead_code)] // commands of the coordination core and of the cluster use the others
/// A service of a node, with the flag and the variable that name its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// The queue (Kafka protocol).
    Kafka,
    /// The store (Redis protocol).
    Redis,
    /// The coordination core (etcd protocol).
    Etcd,
    /// Health, metrics and the admin API.
    Admin,
}

impl Service {
    const fn flag(self) -> &'static str {
        match self {
            Self::Kafka => "--kafka",
            Self::Redis => "--redis",
            Self::Etcd => "--etcd",
            Self::Admin => "--admin",
        }
    }

    const fn env(self) -> &'static str {
        match self {
            Self::Kafka => "MOIM_KAFKA",
            Self::Redis => "MOIM_REDIS",
            Self::Etcd => "MOIM_ETCD",
            Self::Admin => "MOIM_ADMIN",
        }
    }

    const fn default(self) -> &'static str {
        match self {
            Self::Kafka => "127.0.0.1:9092",
            Self::Redis => "127.0.0.1:6379",
            Self::Etcd => "127.0.0.1:2379",
            Self::Admin => "127.0.0.1:9644",
        }
    }
}

/// The flags of every command that talks to the queue.
#[derive(Clone, Debug, Args)]
pub(crate) struct ClientArgs {
    /// Kafka servers [default: $MOIM_KAFKA, else the nearest .moim/context.toml, else 127.0.0.1:9092]
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    kafka: Option<String>,
    /// How long a command may wait for servers
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub(crate) timeout: Duration,
}

/// The flags of every command that talks to the coordination core, or to an etcd.
#[derive(Clone, Debug, Args)]
pub(crate) struct EtcdArgs {
    /// etcd servers [default: $MOIM_ETCD, else the nearest .moim/context.toml, else 127.0.0.1:2379]
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    etcd: Option<String>,
    /// How long a command may wait for servers
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub(crate) timeout: Duration,
}

/// The flags of every command that asks a node's admin port.
#[derive(Clone, Debug, Args)]
pub(crate) struct AdminArgs {
    /// Admin ports [default: $MOIM_ADMIN, else the nearest .moim/context.toml, else 127.0.0.1:9644]
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    admin: Option<String>,
    /// How long a command may wait
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub(crate) timeout: Duration,
}

impl AdminArgs {
    /// The admin ports of this command.
    pub(crate) fn target(&self) -> Outcome<Target> {
        target(Service::Admin, self.admin.as_deref())
    }
}

/// Addresses of servers, and the source that named them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Host and port, in the order in which they are tried.
    pub(crate) addresses: Vec<(String, u16)>,
    /// For messages: `--kafka`, `MOIM_KAFKA`, a file, or `default`.
    pub(crate) named_by: String,
}

impl ClientArgs {
    /// The servers of this command.
    pub(crate) fn target(&self) -> Outcome<Target> {
        target(Service::Kafka, self.kafka.as_deref())
    }
}

impl EtcdArgs {
    /// The servers of this command.
    pub(crate) fn target(&self) -> Outcome<Target> {
        target(Service::Etcd, self.etcd.as_deref())
    }
}

/// The servers of a service, with the value of its flag.
pub(crate) fn target(service: Service, flag: Option<&str>) -> Outcome<Target> {
    let env = std::env::var(service.env()).ok();
    let here = std::env::current_dir().unwrap_or_default();
    resolve(service, flag, env.as_deref(), &here)
}

fn resolve(service: Service, flag: Option<&str>, env: Option<&str>, here: &Path) -> Outcome<Target> {
    if let Some(list) = flag {
        return parse(list, service.flag());
    }
    if let Some(list) = env.filter(|list| !list.trim().is_empty()) {
        return parse(list, service.env());
    }
    match nearest_context(service, here) {
        Some((file, list)) => parse(&list?, &file.display().to_string()),
        None => parse(service.default(), "default"),
    }
}

/// The context file with servers of this service, in this directory or the nearest one above.
fn nearest_context(service: Service, here: &Path) -> Option<(PathBuf, Outcome<String>)> {
    here.ancestors().find_map(|folder| {
        let file = folder.join(CONTEXT);
        let text = std::fs::read_to_string(&file).ok()?;
        match toml::from_str::<Context>(&text) {
            Ok(context) => context.of(service).map(|list| (file, Ok(list))),
            Err(error) => {
                let failure = Failure::usage(format!("{}: {}", file.display(), error.message()));
                Some((file, Err(failure)))
            }
        }
    })
}

/// The context file: the addresses of the cluster of a directory.
#[derive(Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Context {
    /// Kafka servers, with commas between.
    pub(crate) kafka: Option<String>,
    /// Redis servers, with commas between.
    pub(crate) redis: Option<String>,
    /// etcd servers, with commas between.
    pub(crate) etcd: Option<String>,
    /// Admin ports, with commas between.
    pub(crate) admin: Option<String>,
}

impl Context {
    fn of(self, service: Service) -> Option<String> {
        match service {
            Service::Kafka => self.kafka,
            Service::Redis => self.redis,
            Service::Etcd => self.etcd,
            Service::Admin => self.admin,
        }
    }
}

fn parse(list: &str, named_by: &str) -> Outcome<Target> {
    let one = |text: &str| {
        let wrong = || Failure::usage(format!("{named_by}: `{text}` is not HOST:PORT"));
        split_host_port(text.trim()).ok_or_else(wrong)
    };
    let addresses = list.split(',').map(one).collect::<Outcome<Vec<_>>>()?;
    Ok(Target { addresses, named_by: named_by.to_owned() })
}

/// A duration of a flag: positive, with a unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match parse_millis(text).and_then(|ms| u64::try_from(ms).ok()) {
        Some(ms) if ms > 0 => Ok(Duration::from_millis(ms)),
        _ => Err("must be a duration such as 500ms, 30s or 5m".to_owned()),
    }
}

/// A duration where a bare number is seconds, as etcd's tools have it.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        Ok(_) => Err("must be more than 0".to_owned()),
        Err(_) => duration(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_beats_environment_beats_context_beats_default() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b");
        std::fs::create_dir_all(&deep).unwrap();
        let of = |service, flag, env| {
            resolve(service, flag, env, &deep).map(|target| (target.addresses[0].1, target.named_by))
        };
        let at = |flag, env| of(Service::Kafka, flag, env);
        assert_eq!(at(None, None).unwrap(), (9092, "default".into()));
        std::fs::create_dir(dir.path().join(".moim")).unwrap();
        let context = dir.path().join(CONTEXT);
        std::fs::write(&context, "kafka = \"a:3,b:4\"\nadmin = \"a:5\"\n").unwrap();
        assert_eq!(at(None, None).unwrap(), (3, context.display().to_string()));
        assert_eq!(at(None, Some("")).unwrap().0, 3);
        assert_eq!(at(None, Some("a:2")).unwrap(), (2, "MOIM_KAFKA".into()));
        assert_eq!(at(Some("a:1,[::1]:9"), Some("a:2")).unwrap(), (1, "--kafka".into()));
        assert_eq!(at(Some("nonsense"), None).unwrap_err().message, "--kafka: `nonsense` is not HOST:PORT");
        assert_eq!(of(Service::Admin, None, None).unwrap().0, 5);
        assert_eq!(of(Service::Etcd, None, None).unwrap(), (2379, "default".into()));
        assert_eq!(of(Service::Etcd, None, Some("a:7")).unwrap(), (7, "MOIM_ETCD".into()));
        std::fs::write(&context, "kafka = 5").unwrap();
        assert!(at(None, None).is_err());
    }

    #[test]
    fn a_timeout_is_a_positive_duration() {
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(
            (seconds("2"), seconds("1500ms")),
            (Ok(Duration::from_secs(2)), Ok(Duration::from_millis(1_500)))
        );
        assert!(seconds("0").is_err());
        assert!(duration("0").is_err() && duration("-1").is_err() && duration("x").is_err());
    }
}
