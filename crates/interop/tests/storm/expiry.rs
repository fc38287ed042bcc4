//! Keys with a TTL: none may expire early, and none may stay for much longer, whatever the clocks do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use redis::cluster::ClusterClientBuilder;

const KEYS: usize = 8;
const TTL: Duration = Duration::from_secs(4);
/// Latest expiry. Shard time runs at half rate while it is ahead of the wall clock, and stands still while a shard
/// has no primary.
const LATEST_EXPIRY: Duration = Duration::from_secs(40);
const PATIENCE: Duration = Duration::from_millis(1_500);

pub(super) struct Expiry {
    stop: Arc<AtomicBool>,
    client: JoinHandle<u64>,
}

impl Expiry {
    pub(super) fn start(cluster: &Cluster) -> Self {
        let seeds: Vec<_> =
            (0..3).map(|node| format!("redis://{}/", cluster.server(node).unwrap().redis())).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, client: std::thread::spawn(move || watch(&seeds, &stopped)) }
    }

    /// Stops the clients; returns how many keys expired when they should.
    pub(super) fn finish(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.client.join().unwrap()
    }
}

/// A key that was set.
struct Set {
    value: u64,
    /// When the command was sent, and when it was acknowledged.
    sent: Instant,
    acked: Instant,
}

fn watch(seeds: &[String], stop: &AtomicBool) -> u64 {
    let client = ClusterClientBuilder::new(seeds.to_vec())
        .connection_timeout(PATIENCE)
        .response_timeout(PATIENCE)
        .retries(0)
        .build()
        .unwrap();
    let (mut connection, mut ended, mut value) = (None, 0, 0);
    let mut keys: [Option<Set>; KEYS] = Default::default();
    while !stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(60));
        if connection.is_none() {
            connection = client.get_connection().ok();
        }
        let Some(open) = &mut connection else { continue };
        for (place, key) in keys.iter_mut().enumerate() {
            let name = format!("expiry:{place}");
            let Some(set) = key else {
                value += 1;
                let sent = Instant::now();
                let mut command = redis::cmd("SET");
                command.arg(&name).arg(value).arg("PX").arg(TTL.as_millis() as u64);
                match command.query::<()>(open) {
                    Ok(()) => *key = Some(Set { value, sent, acked: Instant::now() }),
                    // The outcome of the SET is unknown: the next one overwrites the key.
                    Err(_) => connection = None,
                }
                break;
            };
            let asked = Instant::now();
            let Ok(found) = redis::cmd("GET").arg(&name).query::<Option<u64>>(open) else {
                connection = None;
                break;
            };
            let lived = set.sent.elapsed();
            match found {
                Some(found) => {
                    assert_eq!(found, set.value, "{name}");
                    let over = asked.saturating_duration_since(set.acked);
                    assert!(over < LATEST_EXPIRY, "{name} outlives its time to live of {TTL:?}: {over:?}");
                }
                None => {
                    let early = lived + Duration::from_millis(50) < TTL;
                    assert!(!early, "{name} ended after {lived:?}, before its time to live of {TTL:?}");
                    ended += 1;
                    *key = None;
                }
            }
        }
    }
    ended
}
