//! CLUSTER: the slot map and the nodes, as cluster clients and `redis-cli --cluster` request them.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::{Keys, Spec, flag::*};
use crate::SLOTS;
use crate::cluster::{NodeView, View};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::ops::{self, MapChange, OpKind};
use crate::shard::Role;

const ANY: u32 = LOADING | STALE;

const fn ask(
    name: &'static str,
    arity: i32,
    flags: u32,
    summary: &'static str,
    run: fn(&mut Ctx<'_>) -> Done,
) -> Spec {
    Spec::new(name, arity, flags, Keys::None, "cluster", summary, run)
}

pub(crate) const COMMANDS: &[Spec] =
    &[ask("cluster", -2, 0, "A container for Redis Cluster commands.", |ctx| {
        Err(super::unknown_subcommand(&ctx.args))
    })
    .with(&[
        ask("cluster|slots", 2, ANY, "Returns the mapping of cluster slots to nodes.", slots),
        ask("cluster|shards", 2, ANY, "Returns the mapping of cluster slots to shards.", shards),
        ask("cluster|nodes", 2, ANY, "Returns the cluster configuration for a node.", nodes),
        ask("cluster|info", 2, ANY, "Returns information about the state of a node.", info),
        ask("cluster|myid", 2, ANY, "Returns the ID of a node.", |ctx| {
            let id = me(ctx);
            ctx.out.bulk(id.as_bytes());
            Ok(())
        }),
        ask("cluster|myshardid", 2, ANY, "Returns the shard ID of a node.", |ctx| {
            let shard = ctx.session.shard.as_ref().map_or(0, |shard| shard.index);
            ctx.out.bulk(format!("{shard:040x}").as_bytes());
            Ok(())
        }),
        ask("cluster|keyslot", 3, ANY, "Returns the hash slot for a key.", |ctx| {
            ctx.out.integer(i64::from(crate::slot_of(ctx.arg(2))));
            Ok(())
        }),
        ask("cluster|countkeysinslot", 3, ANY | WHOLE, "Returns the number of keys in a hash slot.", |ctx| {
            let slot = slot_arg(ctx, 2)?;
            ctx.out.integer(ctx.db.slot_len(slot) as i64);
            Ok(())
        }),
        ask("cluster|getkeysinslot", 4, ANY | WHOLE, "Returns the key names in a hash slot.", |ctx| {
            let slot = slot_arg(ctx, 2)?;
            let most =
                usize::try_from(ctx.int(3)?).map_err(|_| Error::err("Invalid slot or number of keys"))?;
            let keys = ctx.db.keys_in_slot(slot, most);
            ctx.out.array(keys.len());
            keys.iter().for_each(|key| ctx.out.bulk(key));
            Ok(())
        }),
        ask("cluster|links", 2, ANY, "Returns a list of all TCP links to and from peer nodes.", links),
        ask("cluster|replicas", 3, ADMIN | ANY, "Lists the replica nodes of a master node.", replicas),
        ask("cluster|slaves", 3, ADMIN | ANY, "Lists the replica nodes of a master node.", replicas),
        ask(
            "cluster|count-failure-reports",
            3,
            ADMIN | ANY,
            "Returns the number of active failure reports active for a node.",
            |ctx| {
                known_node(ctx, 2)?;
                ctx.out.integer(0);
                Ok(())
            },
        ),
        // There is no gossip: every member of the cluster knows the others, so MEET has nothing to do.
        ask(
            "cluster|meet",
            -4,
            ADMIN | NO_ASYNC_LOADING | STALE,
            "Forces a node to handshake with another node.",
            |ctx| {
                let port = ctx.int(3).map_err(|_| {
                    Error::err(format_args!(
                        "Invalid base port specified: {}",
                        String::from_utf8_lossy(ctx.arg(3))
                    ))
                })?;
                if !(1..=65_535).contains(&port) {
                    return Err(Error::err(format_args!(
                        "Invalid node address specified: {}:{port}",
                        String::from_utf8_lossy(ctx.arg(2))
                    )));
                }
                crate::ctx::ok(ctx)
            },
        ),
        ask("cluster|setslot", -4, ADMIN | NO_ASYNC_LOADING | STALE, "Binds a hash slot to a node.", setslot),
        ask("cluster|addslots", -3, ADMIN | STALE, "Assigns new hash slots to a node.", |ctx| {
            let slots = (2..ctx.argc()).map(|at| slot_arg(ctx, at)).collect::<Result<Vec<_>, _>>()?;
            change_slots(ctx, slots, MapChange::Add)
        }),
        ask("cluster|addslotsrange", -4, ADMIN | STALE, "Assigns new hash slot ranges to a node.", |ctx| {
            let slots = slot_ranges(ctx)?;
            change_slots(ctx, slots, MapChange::Add)
        }),
        ask("cluster|delslots", -3, ADMIN | STALE, "Sets hash slots as unbound for a node.", |ctx| {
            let slots = (2..ctx.argc()).map(|at| slot_arg(ctx, at)).collect::<Result<Vec<_>, _>>()?;
            change_slots(ctx, slots, MapChange::Remove)
        }),
        ask(
            "cluster|delslotsrange",
            -4,
            ADMIN | STALE,
            "Sets hash slot ranges as unbound for a node.",
            |ctx| {
                let slots = slot_ranges(ctx)?;
                change_slots(ctx, slots, MapChange::Remove)
            },
        ),
        ask(
            "cluster|failover",
            -2,
            ADMIN | STALE,
            "Forces a replica to perform a manual failover of its master.",
            |ctx| {
                let options_fit =
                    ctx.argc() == 2 || ctx.argc() == 3 && (ctx.is(2, "FORCE") || ctx.is(2, "TAKEOVER"));
                if !options_fit {
                    return Err(Error::SYNTAX);
                }
                if !is_role(ctx, Role::Replica) {
                    return Err(Error::err("You should send CLUSTER FAILOVER to a replica"));
                }
                ops::submit(ctx, OpKind::Failover)
            },
        ),
        // The controller places the replicas; a request that matches the current placement succeeds.
        ask("cluster|replicate", 3, ADMIN | STALE, "Configure a node as replica of a master node.", |ctx| {
            let shard = known_node(ctx, 2)?;
            if ctx.session.shard.as_ref().is_some_and(|mine| mine.index == shard)
                && is_role(ctx, Role::Replica)
            {
                return crate::ctx::ok(ctx);
            }
            Err(Error::err("To set a master the node must be empty and without assigned slots."))
        }),
        ask("cluster|forget", 3, ADMIN | STALE, "Removes a node from the nodes table.", |ctx| {
            known_node(ctx, 2)?;
            Err(Error::err("Can't forget a node of this cluster; use moim cluster remove"))
        }),
        ask("cluster|reset", -2, ADMIN | STALE | NOSCRIPT, "Resets a node.", |_| {
            Err(Error::err("CLUSTER RESET can't be called with master nodes containing keys"))
        }),
        ask("cluster|flushslots", 2, ADMIN | STALE, "Deletes all slots information from a node.", |_| {
            Err(Error::err("DB must be empty to perform CLUSTER FLUSHSLOTS."))
        }),
        ask(
            "cluster|saveconfig",
            2,
            ADMIN | STALE,
            "Forces a node to save the cluster configuration to disk.",
            crate::ctx::ok,
        ),
        ask("cluster|bumpepoch", 2, ADMIN | STALE, "Advances the cluster config epoch.", |ctx| {
            let epoch = ctx.shared.view.load().epoch;
            ctx.out.simple(format!("STILL {epoch}"));
            Ok(())
        }),
        ask(
            "cluster|set-config-epoch",
            3,
            ADMIN | STALE,
            "Sets the configuration epoch for a new node.",
            |_| {
                Err(Error::err(
                    "The user can assign a config epoch only when the node does not know any other node.",
                ))
            },
        ),
        ask("cluster|help", 2, ANY, "Returns helpful text about the different subcommands.", |ctx| {
            super::help(
                ctx,
                &[
                    "CLUSTER <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
                    "COUNTKEYSINSLOT <slot>",
                    "    Return the number of keys in <slot>.",
                    "GETKEYSINSLOT <slot> <count>",
                    "    Return key names stored by current node in a slot.",
                    "INFO",
                    "    Return information about the cluster.",
                    "KEYSLOT <key>",
                    "    Return the hash slot for <key>.",
                    "MYID",
                    "    Return the node id.",
                    "NODES",
                    "    Return cluster configuration seen by node.",
                    "REPLICAS <node-id>",
                    "    Return <node-id> replicas.",
                    "SLOTS",
                    "    Return information about slots range mappings.",
                    "SHARDS",
                    "    Return information about slot range mappings and the nodes associated with them.",
                    "LINKS",
                    "    Return information about all network links between this node and its peers.",
                    "HELP",
                    "    Prints this help.",
                ],
            )
        }),
    ])];

fn me(ctx: &Ctx<'_>) -> String {
    ctx.session.shard.as_ref().map_or_else(|| ctx.shared.run_id.clone(), |shard| shard.id.clone())
}

fn slot_arg(ctx: &Ctx<'_>, at: usize) -> Result<u16, Error> {
    let wrong = || Error::err("Invalid or out of range slot");
    let slot = ctx.int(at).map_err(|_| wrong())?;
    u16::try_from(slot).ok().filter(|slot| usize::from(*slot) < SLOTS).ok_or_else(wrong)
}

fn is_role(ctx: &Ctx<'_>, role: Role) -> bool {
    ctx.session.shard.as_ref().is_some_and(|shard| shard.role() == role)
}

fn change_slots(ctx: &mut Ctx<'_>, slots: Vec<u16>, change: fn(Vec<u16>) -> MapChange) -> Done {
    if !is_role(ctx, Role::Primary) {
        return Err(Error::err("Please use SETSLOT only with masters."));
    }
    let mut seen = slots.clone();
    seen.sort_unstable();
    if let Some(twice) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::err(format_args!("Slot {} specified multiple times", twice[0])));
    }
    ops::submit(ctx, OpKind::Map(change(slots)))
}

fn slot_ranges(ctx: &Ctx<'_>) -> Result<Vec<u16>, Error> {
    if !ctx.argc().is_multiple_of(2) {
        return Err(Error::arity("cluster|addslotsrange"));
    }
    let mut slots = Vec::new();
    for at in (2..ctx.argc()).step_by(2) {
        let (first, last) = (slot_arg(ctx, at)?, slot_arg(ctx, at + 1)?);
        if first > last {
            return Err(Error::err(format_args!(
                "start slot number {first} is greater than end slot number {last}"
            )));
        }
        slots.extend(first..=last);
    }
    Ok(slots)
}

fn setslot(ctx: &mut Ctx<'_>) -> Done {
    if !is_role(ctx, Role::Primary) {
        return Err(Error::err("Please use SETSLOT only with masters."));
    }
    let slot = slot_arg(ctx, 2)?;
    let how = ctx.arg(3).to_ascii_uppercase();
    let change = match (how.as_slice(), ctx.argc()) {
        (b"STABLE", 4) => MapChange::Stable(slot),
        (b"MIGRATING", 5) => MapChange::Migrate(slot, primary_node(ctx, 4)?),
        (b"IMPORTING", 5) => MapChange::Import(slot, primary_node(ctx, 4)?),
        (b"NODE", 5) => MapChange::Assign(slot, primary_node(ctx, 4)?),
        _ => {
            return Err(Error::err(
                "Invalid CLUSTER SETSLOT action or number of arguments. Try CLUSTER HELP",
            ));
        }
    };
    ops::submit(ctx, OpKind::Map(change))
}

/// The shard of the primary named by an argument.
fn primary_node(ctx: &Ctx<'_>, at: usize) -> Result<u16, Error> {
    let id = String::from_utf8_lossy(ctx.arg(at)).into_owned();
    let view = ctx.shared.view.load();
    let (shard, _) =
        view.find(&id).ok_or_else(|| Error::err(format_args!("I don't know about node {id}")))?;
    match view.primary(shard) {
        Some(primary) if primary.id == id => Ok(shard),
        _ => Err(Error::err("Target node is not a master")),
    }
}

fn known_node(ctx: &Ctx<'_>, at: usize) -> Result<u16, Error> {
    let id = String::from_utf8_lossy(ctx.arg(at)).into_owned();
    let view = ctx.shared.view.load();
    view.find(&id).map(|(shard, _)| shard).ok_or_else(|| Error::err(format_args!("Unknown node {id}")))
}

fn write_node(ctx: &mut Ctx<'_>, node: &NodeView) {
    ctx.out.array(4);
    ctx.out.bulk(node.host.as_bytes());
    ctx.out.integer(i64::from(node.port));
    ctx.out.bulk(node.id.as_bytes());
    ctx.out.array(0);
}

fn slots(ctx: &mut Ctx<'_>) -> Done {
    let view = ctx.shared.view.load_full();
    let mut rows: Vec<(u16, u16, u16)> = Vec::new();
    for shard in 0..view.shards.len() as u16 {
        if view.primary(shard).is_some() {
            rows.extend(view.ranges(shard).into_iter().map(|(first, last)| (first, last, shard)));
        }
    }
    rows.sort_unstable();
    ctx.out.array(rows.len());
    for (first, last, shard) in rows {
        let nodes: Vec<_> = up(&view, shard).cloned().collect();
        ctx.out.array(2 + nodes.len());
        ctx.out.integer(i64::from(first));
        ctx.out.integer(i64::from(last));
        nodes.iter().for_each(|node| write_node(ctx, node));
    }
    Ok(())
}

fn up(view: &View, shard: u16) -> impl Iterator<Item = &NodeView> {
    let shard = &view.shards[usize::from(shard)];
    shard.nodes.iter().enumerate().filter(|(at, node)| *at == 0 || node.is_up).map(|(_, node)| node)
}

fn shards(ctx: &mut Ctx<'_>) -> Done {
    let view = ctx.shared.view.load_full();
    let offset = ctx.session.shard.as_ref().map_or(0, |shard| shard.committed());
    ctx.out.array(view.shards.len());
    for (at, shard) in view.shards.iter().enumerate() {
        ctx.out.map(2);
        ctx.out.bulk(b"slots");
        let ranges = view.ranges(at as u16);
        ctx.out.array(ranges.len() * 2);
        for (first, last) in ranges {
            ctx.out.integer(i64::from(first));
            ctx.out.integer(i64::from(last));
        }
        ctx.out.bulk(b"nodes");
        ctx.out.array(shard.nodes.len());
        for (n, node) in shard.nodes.iter().enumerate() {
            ctx.out.map(7);
            ctx.out.bulk(b"id");
            ctx.out.bulk(node.id.as_bytes());
            ctx.out.bulk(b"port");
            ctx.out.integer(i64::from(node.port));
            ctx.out.bulk(b"ip");
            ctx.out.bulk(node.host.as_bytes());
            ctx.out.bulk(b"endpoint");
            ctx.out.bulk(node.host.as_bytes());
            ctx.out.bulk(b"role");
            ctx.out.bulk(if n == 0 && shard.has_primary { b"master" } else { b"replica" });
            ctx.out.bulk(b"replication-offset");
            ctx.out.integer(offset);
            ctx.out.bulk(b"health");
            ctx.out.bulk(if node.is_up { b"online" } else { b"fail" });
        }
    }
    Ok(())
}

fn nodes(ctx: &mut Ctx<'_>) -> Done {
    let text = ctx.shared.view.load().nodes_text(&me(ctx));
    ctx.out.verbatim(b"txt", text.as_bytes());
    Ok(())
}

fn info(ctx: &mut Ctx<'_>) -> Done {
    let view = ctx.shared.view.load();
    let (assigned, served) = (view.assigned(), view.served());
    let full = served == SLOTS && !ctx.shared.isolated.load(Ordering::Relaxed);
    let sizes = (0..view.shards.len() as u16).filter(|shard| !view.ranges(*shard).is_empty()).count();
    let mut text = String::new();
    let mut line = |name: &str, value: &dyn std::fmt::Display| {
        let _ = write!(text, "{name}:{value}\r\n");
    };
    line("cluster_state", &if full { "ok" } else { "fail" });
    line("cluster_slots_assigned", &assigned);
    line("cluster_slots_ok", &served);
    line("cluster_slots_pfail", &0);
    line("cluster_slots_fail", &(assigned - served));
    line("cluster_known_nodes", &view.nodes().count());
    line("cluster_size", &sizes);
    line("cluster_current_epoch", &view.epoch.max(1));
    let mine = ctx.session.shard.as_ref().and_then(|shard| view.shards.get(usize::from(shard.index)));
    line("cluster_my_epoch", &mine.map_or(view.epoch, |shard| shard.epoch).max(1));
    line("cluster_stats_messages_sent", &0);
    line("cluster_stats_messages_received", &0);
    line("total_cluster_links_buffer_limit_exceeded", &0);
    drop(view);
    ctx.out.verbatim(b"txt", text.as_bytes());
    Ok(())
}

fn links(ctx: &mut Ctx<'_>) -> Done {
    let mine = me(ctx);
    let view = ctx.shared.view.load_full();
    let others: Vec<_> = view.nodes().filter(|(_, node, _)| node.id != mine && node.is_up).collect();
    ctx.out.array(others.len());
    for (_, node, _) in others {
        ctx.out.map(6);
        for (name, value) in [("direction", "to"), ("node", node.id.as_str())] {
            ctx.out.bulk(name.as_bytes());
            ctx.out.bulk(value.as_bytes());
        }
        ctx.out.bulk(b"create-time");
        ctx.out.integer(ctx.shared.started_ms);
        ctx.out.bulk(b"events");
        ctx.out.bulk(b"rw");
        ctx.out.bulk(b"send-buffer-allocated");
        ctx.out.integer(0);
        ctx.out.bulk(b"send-buffer-used");
        ctx.out.integer(0);
    }
    Ok(())
}

fn replicas(ctx: &mut Ctx<'_>) -> Done {
    let shard = known_node(ctx, 2)?;
    let view = ctx.shared.view.load_full();
    let id = String::from_utf8_lossy(ctx.arg(2)).into_owned();
    if view.primary(shard).is_none_or(|primary| primary.id != id) {
        return Err(Error::err("The specified node is not a master"));
    }
    let text = view.nodes_text(&me(ctx));
    let nodes = &view.shards[usize::from(shard)].nodes[1..];
    let lines: Vec<&str> =
        text.lines().filter(|line| nodes.iter().any(|node| line.starts_with(&node.id))).collect();
    ctx.out.array(lines.len());
    lines.iter().for_each(|line| ctx.out.bulk(line.as_bytes()));
    Ok(())
}
