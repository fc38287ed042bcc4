//! Node records from founding to removal, on the in-memory repository.

use moim_base::SystemClock;
use moim_state::MemoryRepository;
use moim_state::nodes::nodes;

use super::*;

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn repository() -> MemoryRepository {
    MemoryRepository::new(std::sync::Arc::new(SystemClock::new()))
}

fn founder(node_id: i32) -> Founder {
    Founder {
        node_id,
        directory_id: format!("d{node_id}"),
        peer: format!("h{node_id}:1"),
        nonce: String::new(),
    }
}

fn card(node_id: i32, directory_id: &str) -> Card {
    Card { node_id, directory_id: directory_id.into(), incarnation: 5, ..Card::default() }
}

async fn voters(repository: &dyn StateRepository) -> Vec<(i32, u64)> {
    let (_, nodes) = nodes(repository).await.unwrap();
    nodes.iter().map(|node| (node.node_id, node.voter)).collect()
}

async fn gone(repository: &dyn StateRepository) -> Vec<u64> {
    let (_, entries) = repository.list(GONE).await.unwrap();
    entries.iter().filter_map(|entry| gone_voter(&entry.key)).collect()
}

#[test]
fn founding_records_are_written_once() {
    block_on(async {
        let repository = repository();
        let founders = [founder(1), founder(2), founder(7)];
        for _ in 0..2 {
            found_cluster(&repository, &founders).await.unwrap();
        }
        assert_eq!(voters(&repository).await, [(1, 1), (2, 2), (7, 3)]);
        let next = repository.get(NEXT_VOTER).await.unwrap().unwrap();
        assert_eq!((next_voter(&next.value).unwrap(), next.version), (4, 1));
        let level = repository.get(FEATURE_LEVEL).await.unwrap().unwrap();
        assert_eq!(feature_level(&level.value).unwrap(), SUPPORTED_LEVEL);
    });
}

#[test]
fn publish_is_rejected_for_another_data_directory_or_an_unknown_node() {
    block_on(async {
        let repository = repository();
        found_cluster(&repository, &[founder(1)]).await.unwrap();
        let mine = NodeRecord {
            node_id: 1,
            voter: 1,
            directory_id: "d1".into(),
            kafka: "k:1".into(),
            ..Default::default()
        };
        publish(&repository, &mine).await.unwrap();
        assert_eq!(get(&repository, 1).await.unwrap().unwrap().1, mine);
        let other = NodeRecord { directory_id: "d9".into(), ..mine.clone() };
        assert!(matches!(publish(&repository, &other).await, Err(RecordError::OtherDirectory(1))));
        let unknown = NodeRecord { node_id: 4, ..mine };
        assert!(matches!(publish(&repository, &unknown).await, Err(RecordError::NoSuchNode(4))));
    });
}

#[test]
fn voter_ids_are_never_reused() {
    block_on(async {
        let repository = repository();
        found_cluster(&repository, &[founder(1)]).await.unwrap();
        assert_eq!(admit(&repository, &card(2, "d2"), None).await.unwrap().voter, 2);
        // The node id is in use now.
        assert!(matches!(admit(&repository, &card(2, "d3"), None).await, Err(RecordError::Conflict)));

        replace(&repository, 2).await.unwrap();
        replace(&repository, 2).await.unwrap();
        assert_eq!(voters(&repository).await, [(1, 1), (2, 0)]);
        assert_eq!(gone(&repository).await, [2]);
        let known = get(&repository, 2).await.unwrap();
        let again = admit(&repository, &card(2, "d4"), known).await.unwrap();
        assert_eq!((again.voter, again.incarnation), (3, 6), "a new voter id, a higher incarnation");

        remove(&repository, 2).await.unwrap();
        assert_eq!(voters(&repository).await, [(1, 1)]);
        assert_eq!(gone(&repository).await, [2, 3]);
        assert_eq!(admit(&repository, &card(3, "d5"), None).await.unwrap().voter, 4);
        delete_gone_voter(&repository, 2).await.unwrap();
        assert_eq!(gone(&repository).await, [3]);
    });
}

#[test]
fn last_node_cannot_be_removed() {
    block_on(async {
        let repository = repository();
        found_cluster(&repository, &[founder(1)]).await.unwrap();
        assert!(matches!(remove(&repository, 1).await, Err(RecordError::LastNode(1))));
        assert!(matches!(remove(&repository, 2).await, Err(RecordError::NoSuchNode(2))));
        assert!(matches!(replace(&repository, 2).await, Err(RecordError::NoSuchNode(2))));
    });
}

#[test]
fn feature_level_is_raised_by_compare_and_swap() {
    block_on(async {
        let repository = repository();
        found_cluster(&repository, &[founder(1)]).await.unwrap();
        assert!(matches!(raise_level(&repository, 7, 8).await, Err(RecordError::Conflict)));
        raise_level(&repository, SUPPORTED_LEVEL, 2).await.unwrap();
        let level = repository.get(FEATURE_LEVEL).await.unwrap().unwrap();
        assert_eq!(feature_level(&level.value).unwrap(), 2);
    });
}
