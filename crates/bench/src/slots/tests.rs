//! The loads on a real Redis, if installed: the counted operations equal those the server executed.

use super::*;
use crate::load::Until;

fn options() -> Option<Options> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join("redis-server"))
        .find(|program| program.is_file());
    if found.is_none() {
        eprintln!("SKIPPED: no redis-server on this machine");
    }
    let plan = Plan { pairs: 1, slice: Duration::from_millis(100), noise_limit: 10.0 };
    let scratch = std::env::temp_dir().join(format!("moim-bench-slots-{}", std::process::id()));
    Some(Options {
        metrics: vec![8, 11, 14, 22],
        plan,
        moim: None,
        redis: Some(found?),
        scratch,
        keys: 10_000,
        moved_bytes: 1 << 20,
    })
}

#[test]
fn counted_operations_equal_the_servers_count() {
    let Some(options) = options() else { return };
    let bench = Bench { options: &options, runtime: load::runtime().unwrap() };
    let server = bench.start_redis(options.redis.as_ref().unwrap(), "always").unwrap();
    let run = |command, depth| {
        let load = Load { command, clients: 5, depth };
        bench.runtime.block_on(loads::run(server.addr, load, Until::Operations(4)))
    };
    assert!(run(Doing::Get, 1).is_err(), "a get that finds nothing is no get");
    bench.runtime.block_on(loads::fill(server.addr, loads::KEYS)).unwrap();
    let work = run(Doing::Get, 16).unwrap();
    assert_eq!((work.ops, work.latency.unwrap().len()), (5 * 4 * 16, 5 * 4));
    assert_eq!(run(Doing::Incr, 3).unwrap().ops, 60);
    let size = bench.runtime.block_on(loads::ask(server.addr, &["DBSIZE"])).unwrap();
    let size: u64 = size.trim_start_matches(':').parse().unwrap();
    assert!(size > loads::KEYS && size <= loads::KEYS + 60, "{size}");
    // A server that replies with errors is not a fast server.
    bench.runtime.block_on(loads::ask(server.addr, &["CONFIG", "SET", "maxmemory", "1"])).unwrap();
    assert!(run(Doing::Set, 1).unwrap_err().to_string().contains("OOM"));
    let _ = fs::remove_dir_all(&options.scratch);
}

#[test]
fn a_short_run_reports_every_metric() {
    let Some(options) = options() else { return };
    let scratch = options.scratch.join("short");
    let options = Options { scratch, ..options };
    let report = run(&options, &mut |_| ()).unwrap();
    let numbers: Vec<u8> = report.metrics.iter().map(|metric| metric.number).collect();
    assert_eq!((numbers, report.notes.as_slice()), (vec![8, 8, 8, 11, 14, 22], &[][..]));
    assert!(
        report.metrics.iter().any(|metric| metric.figures.iter().any(|figure| figure.side == "slot-client"))
    );
}
