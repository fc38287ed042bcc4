//! Takes over the metadata of a data folder that was written before there was a coordination core.
//!
//! Such a folder keeps its topics and settings in a journal of the single-node repository. They are copied into the
//! core before anything else looks at it; a mark in the core says that the copy is whole, and only then the journal
//! goes. A crash at any point is mended by the next start: copying again changes nothing that is there.

use std::sync::Arc;

use moim_base::Clock;
use moim_cluster::repository::{MAX_TXN_BYTES, MAX_TXN_OPS};
use moim_cluster::{Compare, Entry, LocalRepository, Op, RepositoryError, StateRepository, Txn, TxnOutcome};
use moim_journal::Store;

/// Says that nothing is left to copy.
const MARK: &str = "/moim/cluster/migrated";
/// Bytes of keys and values in one transaction, with room for what surrounds them.
const CHUNK_BYTES: usize = MAX_TXN_BYTES / 2;

/// Copies what the folder's own journal holds into `core`, once. `tag` is the journal's name for the durable sink.
pub(crate) async fn migrate(
    store: &Store,
    clock: Arc<dyn Clock>,
    tag: u64,
    core: &dyn StateRepository,
) -> Result<(), RepositoryError> {
    let journal = moim_cluster::local::JOURNAL;
    if !store.journals().iter().any(|(id, _)| *id == journal) {
        return Ok(());
    }
    if core.get(MARK).await?.is_none() {
        let local = LocalRepository::open(store, clock, tag)?;
        let (_, entries) = local.list("").await?;
        // What hangs on a lease belonged to a process that is gone.
        let entries: Vec<_> = entries.into_iter().filter(|entry| entry.lease.is_none()).collect();
        tracing::info!(keys = entries.len(), "moving the metadata of this folder into the coordination core");
        copy(&entries, core).await?;
        core.txn(Txn::new().put(MARK, "1")).await?;
    }
    store.delete(journal).map_err(|error| RepositoryError::Unavailable(error.to_string()))
}

async fn copy(entries: &[Entry], core: &dyn StateRepository) -> Result<(), RepositoryError> {
    let mut rest = entries;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(chunk(rest));
        put_missing(now, core).await?;
        rest = later;
    }
    Ok(())
}

/// How many of these fit into one transaction: at least one.
fn chunk(entries: &[Entry]) -> usize {
    let mut bytes = 0;
    let fit = entries.iter().take(MAX_TXN_OPS).take_while(|entry| {
        // Each key is there twice: compared and put.
        bytes += 2 * entry.key.len() + entry.value.len() + 64;
        bytes <= CHUNK_BYTES
    });
    fit.count().max(1)
}

/// Puts those that are not there. What is there came from an earlier try.
async fn put_missing(entries: &[Entry], core: &dyn StateRepository) -> Result<(), RepositoryError> {
    let mut missing: Vec<&Entry> = entries.iter().collect();
    while !missing.is_empty() {
        let compares = missing.iter().map(|entry| Compare::Absent(entry.key.clone())).collect();
        let put =
            |entry: &&Entry| Op::Put { key: entry.key.clone(), value: entry.value.clone(), lease: None };
        let ops = missing.iter().map(put).collect();
        match core.txn(Txn { compares, ops }).await? {
            TxnOutcome::Done { .. } => return Ok(()),
            TxnOutcome::Conflict { current, .. } => {
                let mut found = current.into_iter();
                missing.retain(|_| found.next().flatten().is_none());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use moim_base::SystemClock;
    use moim_cluster::MemoryRepository;
    use moim_journal::{RealDisk, StoreOptions};

    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn clock() -> Arc<dyn Clock> {
        Arc::new(SystemClock::new())
    }

    fn open(dir: &std::path::Path) -> Store {
        let options = StoreOptions { min_free_bytes: 0, ..StoreOptions::default() };
        let store = Store::open(dir, Arc::new(RealDisk), clock(), options).unwrap();
        store.start();
        store
    }

    /// A folder whose journal holds `count` topics and one key under a lease.
    async fn old_folder(store: &Store, count: usize) {
        let local = LocalRepository::open(store, clock(), 7).unwrap();
        for at in 0..count {
            let txn = Txn::new().put(format!("/moim/topics/t{at:04}"), format!("v{at}"));
            local.txn(txn).await.unwrap();
        }
        let lease = local.grant(std::time::Duration::from_secs(100)).await.unwrap().id;
        local.txn(Txn::new().put_leased("/moim/leased", "x", lease)).await.unwrap();
    }

    #[test]
    fn everything_arrives_once_and_the_journal_goes() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        block_on(async {
            let count = MAX_TXN_OPS * 2 + 5;
            old_folder(&store, count).await;
            let core = MemoryRepository::new(clock());
            // As an earlier try that crashed left it.
            core.txn(Txn::new().put("/moim/topics/t0001", "v1").put("/moim/topics/t0200", "v200"))
                .await
                .unwrap();
            migrate(&store, clock(), 7, &core).await.unwrap();
            let (_, topics) = core.list("/moim/topics/").await.unwrap();
            assert_eq!(topics.len(), count);
            for (at, topic) in topics.iter().enumerate() {
                assert_eq!(
                    (topic.key.as_str(), &topic.value[..]),
                    (&*format!("/moim/topics/t{at:04}"), format!("v{at}").as_bytes())
                );
            }
            assert!(core.get("/moim/leased").await.unwrap().is_none());
            assert!(!store.journals().iter().any(|(id, _)| *id == moim_cluster::local::JOURNAL));
        });
        store.close().unwrap();
    }

    #[test]
    fn what_was_deleted_since_does_not_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        block_on(async {
            old_folder(&store, 3).await;
            let core = MemoryRepository::new(clock());
            // The copy was whole, and the crash came before the journal went.
            core.txn(Txn::new().put(MARK, "1")).await.unwrap();
            migrate(&store, clock(), 7, &core).await.unwrap();
            let (_, topics) = core.list("/moim/topics/").await.unwrap();
            assert!(topics.is_empty());
            assert!(!store.journals().iter().any(|(id, _)| *id == moim_cluster::local::JOURNAL));
        });
        store.close().unwrap();
    }

    #[test]
    fn large_values_share_no_transaction() {
        let entry = |bytes: usize| Entry {
            key: "k".into(),
            value: vec![0; bytes].into(),
            create_revision: 1,
            mod_revision: 1,
            version: 1,
            lease: None,
        };
        assert_eq!(chunk(&[entry(CHUNK_BYTES), entry(1)]), 1);
        assert_eq!(chunk(&[entry(CHUNK_BYTES / 2 - 100), entry(CHUNK_BYTES / 2 - 100), entry(1000)]), 2);
        assert_eq!(chunk(&vec![entry(1); 1000]), MAX_TXN_OPS);
    }
}
