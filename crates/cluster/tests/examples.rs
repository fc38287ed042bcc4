//! Runs the examples and checks their results.

#[path = "../examples/fleet_raft.rs"]
mod fleet_raft;
#[path = "../examples/range_service.rs"]
mod range_service;
#[path = "../examples/singleton_job.rs"]
mod singleton_job;

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(std::time::Duration::from_secs(60), future).await.expect("test timeout")
    })
}

#[test]
fn job_runs_on_one_node_at_a_time() {
    let rows = block_on(singleton_job::run()).unwrap();
    assert_eq!(rows.len(), 15, "{rows:?}");
    // The steps of one node are never interleaved with another's.
    for steps in rows.chunks(5) {
        let who: std::collections::BTreeSet<&str> =
            steps.iter().filter_map(|row| row.split(' ').next()).collect();
        assert_eq!(who.len(), 1, "{rows:?}");
    }
}

#[test]
fn fleet_hands_over_every_stroke() {
    let (counted, total) = block_on(fleet_raft::run()).unwrap();
    assert_eq!((counted, total), (240, 240));
}

#[test]
fn range_service_counts_exactly() {
    let (sent, counted) = block_on(range_service::run()).unwrap();
    assert_eq!((sent, counted), (208, 208));
}
