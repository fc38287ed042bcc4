//! Server commands: CONFIG, TIME, SLOWLOG, MEMORY, LATENCY, DEBUG, ROLE, WAIT, ACL, SAVE and related ones.

use std::sync::atomic::Ordering;

use super::scan::glob;
use super::{Keys, Spec, flag::*};
use crate::ctx::{Ctx, OnTimeout};
use crate::error::{Done, Error};
use crate::session::Block;
use crate::shard::Role;
use crate::shared::lock;

const ANY: u32 = LOADING | STALE;

const fn server(
    name: &'static str,
    arity: i32,
    flags: u32,
    summary: &'static str,
    run: fn(&mut Ctx<'_>) -> Done,
) -> Spec {
    Spec::new(name, arity, flags, Keys::None, "server", summary, run)
}

const KEY_2: Keys = Keys::Range { first: 2, last: 2, step: 1 };

pub(crate) const COMMANDS: &[Spec] = &[
    server("config", -2, 0, "A container for server configuration commands.", |ctx| Err(super::unknown_subcommand(&ctx.args)))
        .with(&[
            server("config|get", -3, ADMIN | NOSCRIPT | ANY, "Returns the effective values of configuration parameters.", config_get),
            server("config|set", -4, ADMIN | NOSCRIPT | ANY, "Sets configuration parameters in-flight.", config_set),
            server("config|resetstat", 2, ADMIN | NOSCRIPT | ANY, "Resets the server's statistics.", |ctx| {
                ctx.shared.stats.reset();
                ctx.events.command_stats.reset();
                // This call is the first one after the reset.
                ctx.events.command_stats.on_call(ctx.session.command);
                crate::ctx::ok(ctx)
            }),
            server("config|rewrite", 2, ADMIN | NOSCRIPT | ANY, "Persists the effective configuration to file.", |_| {
                Err(Error::err("The server is running without a config file"))
            }),
            server("config|help", 2, ANY, "Returns helpful text about the different subcommands.", |ctx| {
                super::help(ctx, &[
                    "CONFIG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
                    "GET <pattern>", "    Return parameters matching the glob-like <pattern> and their values.",
                    "SET <directive> <value>", "    Set the configuration <directive> to <value>.",
                    "RESETSTAT", "    Reset statistics reported by the INFO command.",
                    "REWRITE", "    Rewrite the configuration file.",
                    "HELP", "    Prints this help.",
                ])
            }),
        ]),
    server("time", 1, ANY | FAST, "Returns the server time.", |ctx| {
        let now = ctx.shared.clock.wall_ms();
        ctx.out.array(2);
        ctx.out.bulk((now / 1_000).to_string().as_bytes());
        ctx.out.bulk((now % 1_000 * 1_000).to_string().as_bytes());
        Ok(())
    }),
    server("slowlog", -2, 0, "A container for slow log commands.", |ctx| Err(super::unknown_subcommand(&ctx.args))).with(&[
        server("slowlog|get", -2, ADMIN | ANY, "Returns the slow log's entries.", slowlog_get),
        server("slowlog|len", 2, ADMIN | ANY, "Returns the number of entries in the slow log.", |ctx| {
            ctx.out.integer(lock(&ctx.shared.slow).entries.len() as i64);
            Ok(())
        }),
        server("slowlog|reset", 2, ADMIN | ANY, "Clears all entries from the slow log.", |ctx| {
            lock(&ctx.shared.slow).entries.clear();
            crate::ctx::ok(ctx)
        }),
        server("slowlog|help", 2, ANY, "Show helpful text about the different subcommands", |ctx| {
            super::help(ctx, &[
                "SLOWLOG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
                "GET [<count>]", "    Return top <count> entries from the slowlog (default: 10, -1 mean all).",
                "LEN", "    Return the length of the slowlog.",
                "RESET", "    Reset the slowlog.",
                "HELP", "    Prints this help.",
            ])
        }),
    ]),
    server("memory", -2, 0, "A container for memory diagnostics commands.", |ctx| Err(super::unknown_subcommand(&ctx.args))).with(&[
        Spec::new("memory|usage", -3, READONLY, KEY_2, "server", "Estimates the memory usage of a key.", memory_usage),
        server("memory|doctor", 2, 0, "Outputs a memory problems report.", |ctx| {
            ctx.out.verbatim(b"txt", b"Sam, I detected a few issues in this Redis instance memory implants: none.");
            Ok(())
        }),
        server("memory|stats", 2, 0, "Returns details about memory usage.", memory_stats),
        server("memory|purge", 2, 0, "Asks the allocator to release memory.", crate::ctx::ok),
        server("memory|malloc-stats", 2, 0, "Returns the allocator statistics.", |ctx| {
            ctx.out.verbatim(b"txt", b"mimalloc");
            Ok(())
        }),
        server("memory|help", 2, ANY, "Returns helpful text about the different subcommands.", |ctx| {
            super::help(ctx, &[
                "MEMORY <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
                "STATS", "    Return information about the memory usage of the server.",
                "USAGE <key> [SAMPLES <count>]", "    Return memory in bytes used by <key> and its value.",
                "HELP", "    Prints this help.",
            ])
        }),
    ]),
    server("latency", -2, 0, "A container for latency diagnostics commands.", |ctx| Err(super::unknown_subcommand(&ctx.args))).with(&[
        server("latency|latest", 2, ADMIN | ANY, "Returns the latest latency samples for all events.", none),
        server("latency|history", 3, ADMIN | ANY, "Returns timestamp-latency samples for an event.", none),
        server("latency|reset", -2, ADMIN | ANY, "Resets the latency data for one or more events.", |ctx| {
            ctx.out.integer(0);
            Ok(())
        }),
        server("latency|doctor", 2, ADMIN | ANY, "Returns a human-readable latency analysis report.", |ctx| {
            ctx.out.verbatim(b"txt", b"Dave, no latency spike was observed during the lifetime of this Redis instance, not in the slightest bit. I honestly think you ought to sit down calmly, take a stress pill, and think things over.");
            Ok(())
        }),
        server("latency|histogram", -2, ADMIN | ANY, "Returns the cumulative distribution of latencies of a subset or all commands.", latency_histogram),
    ]),
    server("debug", -2, ADMIN | NOSCRIPT | ANY, "A container for debugging commands.", debug),
    server("role", 1, ANY | FAST | NOSCRIPT, "Returns the replication role.", role),
    Spec::new("wait", 3, BLOCKING, Keys::None, "generic", "Blocks until the asynchronous replication of all preceding write commands sent by the connection is completed.", wait),
    server("acl", -2, 0, "A container for Access List Control commands.", |ctx| Err(super::unknown_subcommand(&ctx.args))).with(&[
        server("acl|whoami", 2, NOSCRIPT | ANY, "Returns the authenticated username of the current connection.", |ctx| {
            ctx.out.bulk(b"default");
            Ok(())
        }),
        server("acl|users", 2, ADMIN | NOSCRIPT | ANY, "Lists all ACL users.", |ctx| {
            ctx.out.array(1);
            ctx.out.bulk(b"default");
            Ok(())
        }),
        server("acl|list", 2, ADMIN | NOSCRIPT | ANY, "Dumps the effective rules in ACL file format.", |ctx| {
            ctx.out.array(1);
            let is_open = ctx.shared.settings.get("requirepass").is_none_or(|password| password.is_empty());
            ctx.out.bulk(if is_open { &b"user default on nopass ~* &* +@all"[..] } else { b"user default on sanitize-payload ~* &* +@all" });
            Ok(())
        }),
        server("acl|cat", -2, NOSCRIPT | ANY, "Lists the ACL categories, or the commands inside a category.", acl_cat),
    ]),
    server("save", 1, ADMIN | NOSCRIPT | NO_MULTI, "Synchronously saves the database(s) to disk.", crate::ctx::ok),
    server("bgsave", -1, ADMIN | NOSCRIPT, "Asynchronously saves the database(s) to disk.", |ctx| {
        ctx.out.simple("Background saving started");
        Ok(())
    }),
    server("bgrewriteaof", 1, ADMIN | NOSCRIPT, "Asynchronously rewrites the append-only file to disk.", |ctx| {
        ctx.out.simple("Background append only file rewriting started");
        Ok(())
    }),
    server("lastsave", 1, ANY | FAST, "Returns the Unix timestamp of the last successful save to disk.", |ctx| {
        ctx.out.integer(ctx.shared.started_ms / 1_000);
        Ok(())
    }),
    server("monitor", 1, ADMIN | NOSCRIPT | ANY, "Listens for all requests received by the server in real-time.", |ctx| {
        ctx.shared.monitors.add(ctx.session.id, &ctx.session.mailbox);
        lock(&ctx.session.about).monitors = true;
        crate::ctx::ok(ctx)
    }),
    server("shutdown", -1, ADMIN | NOSCRIPT | NO_MULTI | ANY | ALLOW_BUSY, "Synchronously saves the database(s) to disk and shuts down the Redis server.", |_| {
        Err(Error::err("Errors trying to SHUTDOWN. The node serves more than this store; stop its process."))
    }),
    server("replicaof", 3, ADMIN | NOSCRIPT | STALE, "Configures a server as replica of another, or promotes it to a master.", no_replicaof),
    server("slaveof", 3, ADMIN | NOSCRIPT | STALE, "Sets a Redis server as a replica of another, or promotes it to being a master.", no_replicaof),
    server("lolwut", -1, READONLY | FAST, "Displays computer art and the Redis version", |ctx| {
        let text = format!("Redis ver. {}\n", super::REDIS_VERSION);
        ctx.out.verbatim(b"txt", text.as_bytes());
        Ok(())
    }),
];

fn none(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.array(0);
    Ok(())
}

fn no_replicaof(_: &mut Ctx<'_>) -> Done {
    Err(Error::err("REPLICAOF not allowed in cluster mode."))
}

/// True if a pattern selects a setting. Test-only settings must be named exactly.
fn is_selected(pattern: &[u8], name: &[u8]) -> bool {
    const HIDDEN: &[u8] = b"key-load-delay";
    if name == HIDDEN { pattern.eq_ignore_ascii_case(name) } else { glob(pattern, name, true) }
}

fn config_get(ctx: &mut Ctx<'_>) -> Done {
    let patterns: Vec<&[u8]> = ctx.args.from(2).iter().collect();
    let found = ctx
        .shared
        .settings
        .matching(|name| patterns.iter().any(|pattern| is_selected(pattern, name.as_bytes())));
    ctx.out.map(found.len());
    for (name, value) in found {
        ctx.out.bulk(name.as_bytes());
        ctx.out.bulk(value.as_bytes());
    }
    Ok(())
}

fn config_set(ctx: &mut Ctx<'_>) -> Done {
    if !ctx.argc().is_multiple_of(2) {
        return Err(Error::arity("config|set"));
    }
    let text = |at: usize| String::from_utf8_lossy(ctx.arg(at)).into_owned();
    let pairs: Vec<_> = (2..ctx.argc()).step_by(2).map(|at| (text(at), text(at + 1))).collect();
    ctx.shared.settings.set_all(&pairs)?;
    ctx.events.notify = ctx.shared.settings.notify.load(Ordering::Relaxed);
    ctx.out.ok();
    Ok(())
}

fn slowlog_get(ctx: &mut Ctx<'_>) -> Done {
    let most = if ctx.argc() > 2 { ctx.int(2).unwrap_or(i64::MIN) } else { 10 };
    if most < -1 {
        return Err(Error::err("count should be greater than or equal to -1"));
    }
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let slow = lock(&ctx.shared.slow);
    ctx.out.array(slow.entries.len().min(most));
    for entry in slow.entries.iter().take(most) {
        ctx.out.array(6);
        ctx.out.integer(entry.id as i64);
        ctx.out.integer(entry.at_s);
        ctx.out.integer(entry.took_us);
        ctx.out.array(entry.args.len());
        entry.args.iter().for_each(|arg| ctx.out.bulk(arg));
        ctx.out.bulk(entry.peer.as_bytes());
        ctx.out.bulk(entry.name.as_bytes());
    }
    Ok(())
}

fn memory_usage(ctx: &mut Ctx<'_>) -> Done {
    match ctx.argc() {
        3 => {}
        5 if ctx.is(3, "SAMPLES") => {
            if ctx.int(4)? < 0 {
                return Err(Error::SYNTAX);
            }
        }
        _ => return Err(Error::SYNTAX),
    }
    match ctx.db.memory_of(ctx.arg(2)) {
        None => ctx.out.null(),
        Some(bytes) => ctx.out.integer(bytes as i64),
    }
    Ok(())
}

fn memory_stats(ctx: &mut Ctx<'_>) -> Done {
    let (used, keys) = (ctx.db.memory() as i64, ctx.db.len() as i64);
    let all = [
        ("peak.allocated", used),
        ("total.allocated", used),
        ("startup.allocated", 0),
        ("keys.count", keys),
        ("keys.bytes-per-key", if keys == 0 { 0 } else { used / keys }),
        ("dataset.bytes", used),
    ];
    ctx.out.map(all.len());
    for (name, number) in all {
        ctx.out.bulk(name.as_bytes());
        ctx.out.integer(number);
    }
    Ok(())
}

/// Histograms of the named commands (a container command stands for its subcommands), or of all commands that ran.
fn latency_histogram(ctx: &mut Ctx<'_>) -> Done {
    let wanted: Vec<String> =
        ctx.args.from(2).iter().map(|name| String::from_utf8_lossy(name).to_lowercase()).collect();
    let is_wanted = |name: &str| {
        wanted.is_empty()
            || wanted.iter().any(|wanted| name == wanted || name.split('|').next() == Some(wanted))
    };
    let ran: Vec<_> = super::numbered()
        .map(|(number, spec)| (spec.name, ctx.events.command_stats.get(number)))
        .filter(|(name, stat)| stat.calls > 0 && is_wanted(name))
        .collect();
    ctx.out.map(ran.len());
    for (name, stat) in ran {
        ctx.out.bulk(name.as_bytes());
        ctx.out.map(2);
        ctx.out.bulk(b"calls");
        ctx.out.integer(stat.calls as i64);
        ctx.out.bulk(b"histogram_usec");
        let buckets = stat.histogram();
        ctx.out.map(buckets.len());
        for (bound, count) in buckets {
            ctx.out.integer(bound as i64);
            ctx.out.integer(count as i64);
        }
    }
    Ok(())
}

fn debug(ctx: &mut Ctx<'_>) -> Done {
    match ctx.arg(1).to_ascii_lowercase().as_slice() {
        b"sleep" => {
            let seconds = ctx.float(2)?;
            // As in Redis, all clients wait; here all clients of this shard. At most ten seconds.
            std::thread::sleep(std::time::Duration::from_secs_f64(seconds.clamp(0.0, 10.0)));
        }
        b"jmap"
        | b"set-active-expire"
        | b"quicklist-packed-threshold"
        | b"change-repl-id"
        | b"stringmatch-len"
        | b"replicate"
        | b"set-disable-deny-scripts"
        | b"reload"
        | b"loadaof"
        | b"flushall" => {}
        b"object" => {
            if !ctx.db.contains(ctx.arg(2)) {
                return Err(Error::NO_SUCH_KEY);
            }
            ctx.out
                .simple("Value at:0x0 refcount:1 encoding:raw serializedlength:1 lru:0 lru_seconds_idle:0");
            return Ok(());
        }
        _ => return Err(super::unknown_subcommand(&ctx.args)),
    }
    ctx.out.ok();
    Ok(())
}

fn role(ctx: &mut Ctx<'_>) -> Done {
    let Some(shard) = ctx.session.shard.clone() else { return Err(Error::SYNTAX) };
    let view = ctx.shared.view.load();
    let primary = view.primary(shard.index);
    if shard.role() != Role::Replica {
        let nodes =
            view.shards.get(usize::from(shard.index)).map(|shard| &shard.nodes[..]).unwrap_or_default();
        let replicas: Vec<_> = nodes.iter().skip(1).collect();
        ctx.out.array(3);
        ctx.out.bulk(b"master");
        ctx.out.integer(shard.committed().max(1));
        ctx.out.array(replicas.len());
        for node in replicas {
            ctx.out.array(3);
            ctx.out.bulk(node.host.as_bytes());
            ctx.out.bulk(node.port.to_string().as_bytes());
            ctx.out.bulk(shard.committed().to_string().as_bytes());
        }
        return Ok(());
    }
    ctx.out.array(5);
    ctx.out.bulk(b"slave");
    ctx.out.bulk(primary.map_or("", |node| node.host.as_str()).as_bytes());
    ctx.out.integer(primary.map_or(0, |node| i64::from(node.port)));
    ctx.out.bulk(b"connected");
    ctx.out.integer(shard.committed().max(1));
    Ok(())
}

fn wait(ctx: &mut Ctx<'_>) -> Done {
    let wanted = ctx.int(1)?;
    let timeout_ms = ctx.int(2).map_err(|_| Error::err("timeout is not an integer or out of range"))?;
    if timeout_ms < 0 {
        return Err(Error::NEGATIVE_TIMEOUT);
    }
    let Some(shard) = ctx.session.shard.clone() else { return Err(Error::SYNTAX) };
    if shard.role() == Role::Replica {
        return Err(Error::err(
            "WAIT cannot be used with replica instances. Please also note that since Redis 4.0 if a replica is configured to be writable (which is not the default) writes to replicas are just local and are not propagated.",
        ));
    }
    // The reply itself waits for the commit of all previous writes, and a committed write is on the in-sync replicas.
    let end = ctx.events.hazards.batch - i64::from(ctx.fx.is_empty());
    let have = shard.log.replicas_with(end) as i64;
    if have >= wanted || !ctx.may_block() {
        ctx.out.integer(have);
        return Ok(());
    }
    let deadline = (timeout_ms > 0).then(|| ctx.now.saturating_add(timeout_ms));
    ctx.session.block = Some(Block {
        keys: Vec::new(),
        deadline,
        on_timeout: OnTimeout::Number(have),
        command: ctx.args.to_owned(),
        on_keys: false,
        replicas: Some((end, wanted)),
        wake_on_delete: false,
    });
    Ok(())
}

fn acl_cat(ctx: &mut Ctx<'_>) -> Done {
    let known = [
        "keyspace",
        "read",
        "write",
        "set",
        "sortedset",
        "list",
        "hash",
        "string",
        "bitmap",
        "hyperloglog",
        "geo",
        "stream",
        "pubsub",
        "admin",
        "fast",
        "slow",
        "blocking",
        "dangerous",
        "connection",
        "transaction",
        "scripting",
    ];
    if ctx.argc() == 2 {
        ctx.out.array(known.len());
        known.iter().for_each(|name| ctx.out.bulk(name.as_bytes()));
        return Ok(());
    }
    let wanted = String::from_utf8_lossy(ctx.arg(2)).to_lowercase();
    if !known.contains(&wanted.as_str()) {
        return Err(Error::err(format_args!("Unknown category '{wanted}'")));
    }
    let wanted = format!("@{wanted}");
    let names: Vec<_> = super::all()
        .filter(|spec| super::introspect::categories(spec).contains(&wanted.as_str()))
        .map(|spec| spec.name)
        .collect();
    ctx.out.array(names.len());
    names.iter().for_each(|name| ctx.out.bulk(name.as_bytes()));
    Ok(())
}
