//! Valid and invalid configurations, loaded as `moim serve` does.

use moim_node::config::Config;

use super::layers::{Effective, FlagValue, Origin, load};
use crate::exit::Status;

fn try_load(
    file: &str,
    env: &[(&str, &str)],
    flags: &[(&'static str, &'static str, &str)],
) -> Result<Effective, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("moim.toml");
    std::fs::write(&path, file).unwrap();
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let flags: Vec<_> =
        flags.iter().map(|(flag, key, value)| FlagValue { flag, key, value: (*value).to_owned() }).collect();
    load(Some(&path), env, &flags).map_err(|failure| {
        assert_eq!(failure.status, Status::Usage);
        let folder = format!("{}/", dir.path().display());
        format!("{} | {}", failure.message, failure.hint.unwrap_or_default()).replace(&folder, "")
    })
}

#[test]
fn an_empty_file_is_the_default() {
    let effective = try_load("", &[], &[]).unwrap();
    assert_eq!(effective.config, Config::default());
    assert!(effective.entries().iter().all(|(_, _, origin)| *origin == Origin::Default));
    assert!(effective.entries().len() > 30);
}

#[test]
fn flag_beats_environment_beats_file() {
    let file = "[kafka]\nport = 1\nmax_connections = 1\n[admin]\nport = 1\n";
    let env = [("MOIM__KAFKA__PORT", "2"), ("MOIM__ADMIN__PORT", "2"), ("MOIM_KAFKA", "not:configuration")];
    let effective = try_load(file, &env, &[("--kafka-port", "kafka.port", "3")]).unwrap();
    let config = &effective.config;
    assert_eq!((config.kafka.port, config.admin.port, config.kafka.max_connections), (3, 2, 1));
    let origin = |key: &str| effective.origins[key].to_string();
    assert_eq!(origin("kafka.port"), "--kafka-port");
    assert_eq!(origin("admin.port"), "MOIM__ADMIN__PORT");
    assert!(origin("kafka.max_connections").ends_with("moim.toml:3"));
}

#[test]
fn numbers_may_carry_a_unit_where_the_key_names_one() {
    let file = "[log]\nretention_ms = \"1h30m\"\nsegment_bytes = \"64MiB\"\nretention_bytes = 0x10\n";
    let log = try_load(file, &[("MOIM__JOURNAL__MIN_FREE_BYTES", "1g")], &[]).unwrap().config;
    assert_eq!(
        (log.log.retention_ms, log.log.segment_bytes, log.log.retention_bytes),
        (5_400_000, 64 << 20, 16)
    );
    assert_eq!(log.journal.min_free_bytes, 1 << 30);
}

#[test]
fn mistakes_name_the_place_and_the_nearest_key() {
    let everything = "| `moim config show` lists every key";
    for (file, wanted) in [
        ("[kafka]\n\nprot = 1\n", "unknown key `kafka.prot` (moim.toml:3) | did you mean `kafka.port`?"),
        (
            "[kafka]\nretention_ms = 1\n",
            "unknown key `kafka.retention_ms` (moim.toml:2) | did you mean `log.retention_ms`?",
        ),
        ("[kafka]\nfrobnicate = 1\n", &format!("unknown key `kafka.frobnicate` (moim.toml:2) {everything}")),
        ("[kafak]\nport = 1\n", "unknown section [kafak] (moim.toml:1) | did you mean [kafka]?"),
        ("durability = 1\n", "unknown key `durability` (moim.toml:1) | did you mean `log.durability`?"),
        (
            "[kafka]\nport = 70000\n",
            "`kafka.port` (moim.toml:2): invalid value: integer `70000`, expected u16 | ",
        ),
        ("[kafka]\nport = \"x\"\n", "`kafka.port` (moim.toml:2): must be a whole number, not string | "),
        (
            "[kafka]\nauto_create_topics = 1\n",
            "`kafka.auto_create_topics` (moim.toml:2): must be true or false, not integer | ",
        ),
        (
            "[log]\nretention_ms = \"soon\"\n",
            "`log.retention_ms` (moim.toml:2): must be milliseconds or a duration such as \"7d\", not string | ",
        ),
        (
            "[log]\ndurability = \"none\"\n",
            "`log.durability` (moim.toml:2): unknown variant `none`, expected `fsync` or `replicated` | ",
        ),
        (
            "[log]\nsegment_bytes = 1\n",
            "`log.segment_bytes` (moim.toml:2): must be between 4 KiB and 2 GiB | ",
        ),
        ("[kafka]\nadvertise = \"nowhere\"\n", "`kafka.advertise` (moim.toml:2): must be HOST:PORT | "),
        (
            "[kafka]\ngroup_min_session_timeout_ms = \"2h\"\n",
            "`kafka.group_min_session_timeout_ms` (moim.toml:2): must not be above kafka.group_max_session_timeout_ms | ",
        ),
    ] {
        assert_eq!(try_load(file, &[], &[]).unwrap_err(), wanted, "for {file:?}");
    }
    let syntax = try_load("[kafka\n", &[], &[]).unwrap_err();
    assert!(syntax.starts_with("moim.toml:1: "), "{syntax}");
    let env = try_load("", &[("MOIM__KAFKA__PROT", "1")], &[]).unwrap_err();
    assert_eq!(env, "unknown key `kafka.prot` (MOIM__KAFKA__PROT) | did you mean `kafka.port`?");
}

#[test]
fn every_rule_can_refuse() {
    for (key, value) in [
        ("node.id", "-1"),
        ("node.data", ""),
        ("node.host", ""),
        ("node.log_level", "[["),
        ("node.shutdown_timeout_ms", "0"),
        ("kafka.advertise", "nowhere"),
        ("kafka.max_connections", "0"),
        ("kafka.max_request_bytes", "1023"),
        ("kafka.max_request_bytes", "2g"),
        ("kafka.request_memory_bytes", "1m"),
        ("kafka.response_memory_bytes", "1m"),
        ("kafka.num_partitions", "0"),
        ("kafka.num_partitions", "10001"),
        ("kafka.offsets_topic_partitions", "0"),
        ("kafka.transaction_topic_partitions", "-1"),
        ("kafka.group_min_session_timeout_ms", "1h"),
        ("kafka.transaction_max_timeout_ms", "0"),
        ("log.retention_ms", "-2"),
        ("log.retention_bytes", "-2"),
        ("log.segment_bytes", "4095"),
        ("log.max_message_bytes", "101m"),
        ("log.retention_check_interval_ms", "0"),
        ("admin.max_connections", "0"),
        ("journal.commit_file_bytes", "1k"),
        ("journal.recent_bytes", "1k"),
        ("journal.bypass_bytes", "32m"),
        ("etcd.advertise", "nowhere"),
        ("etcd.max_connections", "0"),
        ("etcd.quota_bytes", "1m"),
        ("etcd.compaction_retention_ms", "5"),
        ("peer.advertise", "nowhere"),
        ("cluster.initial", "2=a:1"),
        ("cluster.initial", "1=a:1,2"),
        ("cluster.join", "nowhere"),
    ] {
        let error = try_load("", &[], &[("--flag", key, value)]).unwrap_err();
        assert!(error.starts_with(&format!("`{key}` (--flag): must ")), "{key} = {value}: {error}");
    }
}

#[test]
fn a_node_founds_a_cluster_or_joins_one() {
    let flags = [("--initial-cluster", "cluster.initial", "1=a:1"), ("--join", "cluster.join", "b:1")];
    let error = try_load("", &[], &flags).unwrap_err();
    assert!(error.starts_with("`cluster.join` (--join): must be empty when"), "{error}");
}

#[test]
fn a_named_file_must_be_there() {
    let failure = load(Some("/nonexistent/moim.toml".as_ref()), std::iter::empty(), &[]).unwrap_err();
    assert_eq!(failure.status, Status::Usage);
}
