//! Metric 14, the store's part: memory per key.

use anyhow::Result;

use super::{Bench, Running, loads};
use crate::procfs;
use crate::report::{Aim, Figure, Metric};

pub(super) fn memory(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let mut figures = Vec::new();
    let mut servers: Vec<Box<dyn Fn() -> Result<Running> + '_>> = Vec::new();
    if let Some(program) = &bench.options.moim {
        servers.push(Box::new(|| bench.start_moim(program)));
    }
    if let Some(program) = &bench.options.redis {
        servers.push(Box::new(|| bench.start_redis(program, "none")));
    }
    for start in servers {
        let running = start()?;
        progress(&format!("metric 14: memory of {}", running.label));
        let before = procfs::memory_of(running.child.id())?.resident;
        bench.runtime.block_on(loads::fill(running.addr, bench.options.keys))?;
        let after = procfs::memory_of(running.child.id())?.resident;
        let per_key = after.saturating_sub(before) as f64 / bench.options.keys as f64;
        let at_rest = before as f64 / f64::from(1 << 20);
        figures.push(Figure::new(running.label, "memory at rest", at_rest, "MiB", None));
        let aim = (running.label == "Moim").then_some(Aim::AtMost(100.0));
        let what = format!("memory per key, {} keys of 16 bytes with values of 64", bench.options.keys);
        figures.push(Figure::new(running.label, &what, per_key, "bytes", aim));
    }
    Ok(Metric { number: 14, title: "memory of the store".into(), figures, ..Metric::default() })
}
