//! A power loss at every single disk operation of a log's life; acknowledged writes must survive.

use std::sync::atomic::{AtomicU64, Ordering};

use moim_journal::disk::{Fault, SimDisk, Survival};

use super::*;

/// What a reader finds in a log.
#[derive(Clone, Debug, PartialEq, Default)]
struct Found {
    vote: Option<Vote>,
    purged: Option<LogId>,
    entries: Vec<Entry>,
}

/// One change to a log.
#[derive(Clone, Debug)]
enum Change {
    Vote(u64),
    Append(u64, std::ops::Range<u64>),
    Truncate(LogId),
    Purge(LogId),
}

/// A life: two leaders, a conflict, a snapshot of our own and one that is ahead of the log.
fn life() -> Vec<Change> {
    vec![
        Change::Vote(1),
        Change::Append(1, 0..4),
        Change::Append(1, 4..10),
        Change::Vote(2),
        Change::Truncate(at(1, 5)),
        Change::Append(2, 6..9),
        Change::Purge(at(1, 3)),
        Change::Vote(3),
        Change::Append(3, 9..12),
        Change::Purge(at(4, 20)),
        Change::Append(5, 21..24),
        Change::Truncate(at(5, 21)),
        Change::Vote(6),
    ]
}

impl Change {
    async fn make(&self, log: &mut LogStore) -> Result<(), String> {
        match self {
            Self::Vote(term) => log.save_vote(&Vote::new(*term, 1)).await.map_err(|error| error.to_string()),
            Self::Append(term, range) => {
                log.blocking_append(puts(*term, range.clone())).await.map_err(|error| error.to_string())
            }
            Self::Truncate(after) => {
                log.truncate_after(Some(*after)).await.map_err(|error| error.to_string())
            }
            Self::Purge(through) => log.purge(*through).await.map_err(|error| error.to_string()),
        }
    }

    /// The states that may be found after a power loss during the change, the complete change last.
    fn outcomes(&self, before: &Found) -> Vec<Found> {
        let mut after = before.clone();
        let mut outcomes = vec![before.clone()];
        match self {
            Self::Vote(term) => after.vote = Some(Vote::new(*term, 1)),
            Self::Append(term, range) => {
                for entry in puts(*term, range.clone()) {
                    after.entries.push(entry);
                    outcomes.push(after.clone());
                }
            }
            Self::Truncate(last) => after.entries.retain(|entry| entry.log_id.index <= last.index),
            Self::Purge(through) => {
                after.purged = Some(*through);
                after.entries.retain(|entry| entry.log_id.index > through.index);
            }
        }
        outcomes.push(after);
        outcomes
    }
}

struct Machine {
    opened: Option<Opened>,
    dead: Arc<Notify>,
}

/// Opens the log on a simulated disk; `None` if its power is lost meanwhile.
async fn switch_on(disk: &SimDisk) -> Option<Machine> {
    let dead = Arc::new(Notify::new());
    let (tell, logs) = (Arc::clone(&dead), Logs::default());
    let options = StoreOptions {
        commit_file_bytes: 64 << 10,
        first_commit_file_bytes: 64 << 10,
        min_free_bytes: 0,
        checkpoint_ms: 1,
        fatal: Arc::new(move |_, _| tell.notify_one()),
        ..StoreOptions::default()
    };
    let clock = Arc::new(SystemClock::new());
    let store = Store::open(Path::new("/data"), Arc::new(disk.clone()), clock, options).ok()?;
    store.set_sink(Arc::new(Sink(logs.clone())));
    store.start();
    let log = tokio::select! {
        biased;
        log = LogStore::open(&store, &logs, place()) => log.ok()?,
        () = dead.notified() => return None,
    };
    Some(Machine { opened: Some(Opened { log, store }), dead })
}

/// Runs until a power loss at the `operation`th operation. Returns the states that may be found then.
async fn live(disk: &SimDisk, operation: u64, finished: &AtomicU64) -> Vec<Found> {
    disk.set_fault(Some((operation, Fault::PowerCut)));
    let mut outcomes = vec![Found::default()];
    let Some(mut machine) = switch_on(disk).await else { return outcomes };
    let mut opened = machine.opened.take().expect("it was just opened");
    for change in life() {
        let before = outcomes.pop().expect("there is always one");
        outcomes = change.outcomes(&before);
        let made = tokio::select! {
            biased;
            made = change.make(&mut opened.log) => made.is_ok(),
            () = machine.dead.notified() => false,
        };
        if !made {
            return outcomes;
        }
        finished.fetch_add(1, Ordering::Relaxed);
        outcomes = outcomes.split_off(outcomes.len() - 1);
    }
    outcomes
}

#[test]
fn acknowledged_log_writes_survive_power_loss_at_any_operation() {
    block_on(async {
        let (disk, finished) = (SimDisk::new(), AtomicU64::new(0));
        live(&disk, u64::MAX, &finished).await;
        assert_eq!(finished.into_inner(), life().len() as u64, "without a power cut it lives to the end");
        let (operations, mut partial) = (disk.operations(), 0);
        for operation in 0..operations {
            let (disk, finished) = (SimDisk::new(), AtomicU64::new(0));
            let outcomes = live(&disk, operation, &finished).await;
            partial += u64::from((1..life().len() as u64).contains(&finished.into_inner()));
            for (seed, survival) in
                [Survival::Nothing, Survival::Everything, Survival::Random].iter().enumerate()
            {
                let disk = disk.crash(*survival, seed as u64);
                let mut opened = switch_on(&disk).await.expect("it starts again").opened.expect("opened");
                let found = Found {
                    vote: opened.log.read_vote().await.unwrap(),
                    purged: opened.log.get_log_state().await.unwrap().last_purged_log_id,
                    entries: all(&mut opened.log).await,
                };
                assert!(
                    outcomes.contains(&found),
                    "operation {operation}, {survival:?}: {found:?} is none of {outcomes:?}"
                );
            }
        }
        assert!(partial > 20, "the power went {partial} times of {operations} in the middle of a life");
    });
}
