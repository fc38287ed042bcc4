//! INFO: node statistics for monitoring tools.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::Done;
use crate::shard::Role;
use crate::shared::lock;

pub(crate) const COMMANDS: &[Spec] = &[Spec::new(
    "info",
    -1,
    LOADING | STALE,
    Keys::None,
    "server",
    "Returns information and statistics about the server.",
    info,
)];

type Section = (&'static str, fn(&Ctx<'_>, &mut String));

const SECTIONS: [Section; 11] = [
    ("server", server),
    ("clients", clients),
    ("memory", memory),
    ("persistence", persistence),
    ("stats", stats),
    ("replication", replication),
    ("cpu", cpu),
    ("commandstats", command_stats),
    ("errorstats", errors),
    ("cluster", cluster),
    ("keyspace", keyspace),
];

fn info(ctx: &mut Ctx<'_>) -> Done {
    let wanted: Vec<String> =
        ctx.args.from(1).iter().map(|name| String::from_utf8_lossy(name).to_lowercase()).collect();
    let has = |name: &str| wanted.iter().any(|wanted| wanted == name);
    let all = has("all") || has("everything");
    let default = wanted.is_empty() || has("default");
    let mut text = String::new();
    ctx.events.command_stats.counts.report(&ctx.shared.stats);
    for (name, write) in SECTIONS {
        if all || default && name != "commandstats" || has(name) {
            if !text.is_empty() {
                text.push_str("\r\n");
            }
            let mut title = name.to_owned();
            title[..1].make_ascii_uppercase();
            let title = if title == "Cpu" { "CPU".to_owned() } else { title };
            let _ = write!(text, "# {title}\r\n");
            write(ctx, &mut text);
        }
    }
    ctx.out.verbatim(b"txt", text.as_bytes());
    Ok(())
}

fn line(text: &mut String, name: &str, value: impl std::fmt::Display) {
    let _ = write!(text, "{name}:{value}\r\n");
}

fn server(ctx: &Ctx<'_>, text: &mut String) {
    let up = (ctx.now - ctx.shared.started_ms) / 1_000;
    let port = ctx.session.local.rsplit(':').next().unwrap_or("0").to_owned();
    line(text, "redis_version", super::REDIS_VERSION);
    line(text, "redis_git_sha1", "00000000");
    line(text, "redis_git_dirty", 0);
    line(text, "redis_build_id", 0);
    line(text, "redis_mode", "cluster");
    line(text, "moim_version", env!("CARGO_PKG_VERSION"));
    line(text, "os", std::env::consts::OS);
    line(text, "arch_bits", 64);
    line(text, "multiplexing_api", "epoll");
    line(text, "process_id", std::process::id());
    line(text, "run_id", &ctx.shared.run_id);
    line(text, "tcp_port", port);
    line(text, "server_time_usec", ctx.now * 1_000);
    line(text, "uptime_in_seconds", up);
    line(text, "uptime_in_days", up / 86_400);
    line(text, "hz", 10);
    line(text, "configured_hz", 10);
    line(text, "executable", "moim");
    line(text, "config_file", "");
    line(text, "io_threads_active", 0);
}

fn clients(ctx: &Ctx<'_>, text: &mut String) {
    line(text, "connected_clients", ctx.shared.connections.load(Ordering::Relaxed));
    line(text, "cluster_connections", 0);
    line(text, "maxclients", ctx.shared.settings.number("maxclients"));
    line(text, "client_recent_max_input_buffer", 0);
    line(text, "client_recent_max_output_buffer", 0);
    let paused = ctx.shared.paused_clients.load(Ordering::Relaxed);
    line(text, "blocked_clients", ctx.events.blocked + paused);
    let tracked = ctx.shared.tracking.counts();
    line(text, "tracking_clients", tracked.clients);
    line(text, "clients_in_timeout_table", 0);
}

fn human(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        b if b < 1024.0 => format!("{b}B"),
        b if b < 1024.0 * 1024.0 => format!("{:.2}K", b / 1024.0),
        b if b < 1024.0 * 1024.0 * 1024.0 => format!("{:.2}M", b / 1024.0 / 1024.0),
        b => format!("{:.2}G", b / 1024.0 / 1024.0 / 1024.0),
    }
}

/// Memory of an empty keyspace: the table of slots.
const STARTUP_BYTES: u64 = (crate::SLOTS * size_of::<usize>()) as u64;

/// Resident memory of the process in bytes; 0 if the system does not report it.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4096
}

fn memory(ctx: &Ctx<'_>, text: &mut String) {
    let dataset = ctx.db.memory() as u64;
    let used = STARTUP_BYTES + dataset;
    let rss = resident();
    let limit = ctx.shared.settings.max_memory.load(Ordering::Relaxed);
    line(text, "used_memory", used);
    line(text, "used_memory_human", human(used));
    line(text, "used_memory_rss", rss);
    line(text, "used_memory_rss_human", human(rss));
    line(text, "used_memory_peak", used);
    line(text, "used_memory_peak_human", human(used));
    line(text, "used_memory_overhead", STARTUP_BYTES);
    line(text, "used_memory_startup", STARTUP_BYTES);
    line(text, "used_memory_dataset", dataset);
    line(text, "used_memory_lua", 0);
    line(text, "used_memory_scripts", 0);
    line(text, "number_of_cached_scripts", 0);
    line(text, "mem_not_counted_for_evict", 0);
    line(text, "maxmemory", limit);
    line(text, "maxmemory_human", human(limit));
    line(text, "maxmemory_policy", ctx.shared.settings.get("maxmemory-policy").unwrap_or_default());
    line(text, "allocator_allocated", ctx.db.held_bytes());
    line(text, "mem_fragmentation_ratio", format!("{:.2}", rss as f64 / used.max(1) as f64));
    line(text, "mem_allocator", "mimalloc");
    line(text, "lazyfree_pending_objects", 0);
}

fn persistence(ctx: &Ctx<'_>, text: &mut String) {
    let is_loading = ctx.session.shard.as_ref().is_some_and(|shard| shard.role() == Role::Loading);
    line(text, "loading", u8::from(is_loading));
    line(text, "async_loading", 0);
    line(text, "current_cow_size", 0);
    line(text, "rdb_changes_since_last_save", ctx.events.command_stats.changes);
    line(text, "rdb_bgsave_in_progress", 0);
    line(text, "rdb_last_save_time", ctx.shared.started_ms / 1_000);
    line(text, "rdb_last_bgsave_status", "ok");
    line(text, "rdb_last_bgsave_time_sec", 0);
    line(text, "aof_enabled", 1);
    line(text, "aof_rewrite_in_progress", 0);
    line(text, "aof_last_bgrewrite_status", "ok");
    line(text, "aof_last_write_status", "ok");
}

fn stats(ctx: &Ctx<'_>, text: &mut String) {
    let stats = &ctx.shared.stats;
    let tracked = ctx.shared.tracking.counts();
    line(text, "tracking_total_keys", tracked.keys);
    line(text, "tracking_total_items", tracked.items);
    line(text, "tracking_total_prefixes", tracked.prefixes);
    line(text, "total_connections_received", stats.connections.get());
    line(text, "total_commands_processed", stats.commands.get());
    line(text, "instantaneous_ops_per_sec", 0);
    line(text, "total_net_input_bytes", stats.read_bytes.get());
    line(text, "total_net_output_bytes", stats.written_bytes.get());
    line(text, "rejected_connections", stats.refused.get());
    line(text, "sync_full", 0);
    line(text, "sync_partial_ok", 0);
    line(text, "sync_partial_err", 0);
    line(text, "expired_keys", stats.expired.get());
    line(text, "expired_stale_perc", "0.00");
    line(text, "evicted_keys", stats.evicted.get());
    line(text, "keyspace_hits", stats.hits.get());
    line(text, "keyspace_misses", stats.misses.get());
    line(text, "pubsub_channels", 0);
    line(text, "pubsub_patterns", 0);
    line(text, "latest_fork_usec", 0);
    line(text, "total_forks", 0);
    line(text, "migrate_cached_sockets", 0);
    line(text, "total_error_replies", stats.errors().iter().map(|(_, count)| count).sum::<u64>());
    line(text, "slowlog_entries", lock(&ctx.shared.slow).entries.len());
}

fn replication(ctx: &Ctx<'_>, text: &mut String) {
    let view = ctx.shared.view.load();
    let Some(shard) = &ctx.session.shard else { return };
    let nodes = view.shards.get(usize::from(shard.index)).map(|shard| &shard.nodes[..]).unwrap_or_default();
    // Some clients never read from a replica whose offset is zero.
    let offset = shard.committed().max(1);
    if shard.role() == Role::Replica {
        let primary = view.primary(shard.index);
        line(text, "role", "slave");
        line(text, "master_host", primary.map_or("", |node| node.host.as_str()));
        line(text, "master_port", primary.map_or(0, |node| node.port));
        line(text, "master_link_status", if primary.is_some() { "up" } else { "down" });
        line(text, "master_last_io_seconds_ago", 0);
        line(text, "master_sync_in_progress", 0);
        line(text, "slave_read_repl_offset", offset);
        line(text, "slave_repl_offset", offset);
        line(text, "slave_priority", 100);
        line(text, "slave_read_only", 1);
        line(text, "connected_slaves", 0);
    } else {
        line(text, "role", "master");
        line(text, "connected_slaves", nodes.len().saturating_sub(1));
        for (at, node) in nodes.iter().skip(1).enumerate() {
            let state = if node.is_up { "online" } else { "wait_bgsave" };
            let value = format!("ip={},port={},state={state},offset={offset},lag=0", node.host, node.port);
            line(text, &format!("slave{at}"), value);
        }
    }
    line(text, "master_failover_state", "no-failover");
    line(text, "master_replid", &ctx.shared.run_id);
    line(text, "master_replid2", "0".repeat(40));
    line(text, "master_repl_offset", offset);
    line(text, "second_repl_offset", -1);
    line(text, "repl_backlog_active", 1);
    line(text, "repl_backlog_size", 1_048_576);
    line(text, "repl_backlog_first_byte_offset", 1);
    line(text, "repl_backlog_histlen", offset);
}

fn cpu(_: &Ctx<'_>, text: &mut String) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks =
        |at: usize| after.split(' ').nth(at).and_then(|t| t.parse::<f64>().ok()).unwrap_or(0.0) / 100.0;
    line(text, "used_cpu_sys", format!("{:.6}", ticks(12)));
    line(text, "used_cpu_user", format!("{:.6}", ticks(11)));
    line(text, "used_cpu_sys_children", "0.000000");
    line(text, "used_cpu_user_children", "0.000000");
}

fn command_stats(ctx: &Ctx<'_>, text: &mut String) {
    for (number, spec) in super::numbered() {
        let stat = ctx.events.command_stats.get(number);
        if stat.calls == 0 && stat.rejected == 0 {
            continue;
        }
        let usec = stat.usec();
        let value = format!(
            "calls={},usec={},usec_per_call={:.2},rejected_calls={},failed_calls={}",
            stat.calls,
            usec as u64,
            if stat.calls == 0 { 0.0 } else { usec / stat.calls as f64 },
            stat.rejected,
            stat.failed
        );
        line(text, &format!("cmdstat_{}", spec.name), value);
    }
}

fn errors(ctx: &Ctx<'_>, text: &mut String) {
    for (code, count) in ctx.shared.stats.errors() {
        line(text, &format!("errorstat_{code}"), format!("count={count}"));
    }
}

fn cluster(_: &Ctx<'_>, text: &mut String) {
    line(text, "cluster_enabled", 1);
}

fn keyspace(ctx: &Ctx<'_>, text: &mut String) {
    if !ctx.db.is_empty() {
        let value = format!(
            "keys={},expires={},avg_ttl={}",
            ctx.db.len(),
            ctx.db.expiring(),
            ctx.db.average_ttl(ctx.now)
        );
        line(text, "db0", value);
    }
}
