//! Watches: ordered, exactly once, complete, from any revision, many on one stream.

use std::collections::BTreeMap;

use etcd_client::{DeleteOptions, Txn, TxnOp, WatchFilterType, WatchOptions, WatchStream};

use crate::support::*;

async fn watch(t: &mut Scene, name: &str, options: WatchOptions) -> WatchStream {
    let key = t.key(name);
    let mut watch = t.client.watch(key, Some(options)).await.unwrap();
    created(&mut watch).await;
    watch
}

pub(crate) async fn events_arrive_in_revision_order(t: &mut Scene) {
    let mut one = watch(t, "k", WatchOptions::new()).await;
    let mut all = watch(t, "", WatchOptions::new().with_prefix()).await;
    let a = t.put("k", "1").await;
    let b = t.put("other", "1").await;
    let c = t.put("k", "2").await;
    let d = t.delete("k").await;
    let prefix = t.prefix();
    let of_k = [format!("+k=1@{a}"), format!("+k=2@{c}"), format!("-k@{d}")];
    assert_eq!(events(&mut one, &prefix, 3).await, of_k);
    let of_all = [format!("+k=1@{a}"), format!("+other=1@{b}"), format!("+k=2@{c}"), format!("-k@{d}")];
    assert_eq!(events(&mut all, &prefix, 4).await, of_all);
    t.put("k", "3").await;
    let response = next(&mut one).await;
    let kv = response.events()[0].kv().unwrap();
    assert_eq!((kv.version(), kv.create_revision()), (1, kv.mod_revision()));
    assert!(revision(response.header()) >= kv.mod_revision());
}

pub(crate) async fn watch_replays_history_from_a_revision(t: &mut Scene) {
    let mut expected = Vec::new();
    for i in 0..50 {
        let at = t.put(&format!("k{}", i % 3), &i.to_string()).await;
        expected.push(format!("+k{}={i}@{at}", i % 3));
    }
    let start: i64 = expected[10].rsplit('@').next().unwrap().parse().unwrap();
    let options = || WatchOptions::new().with_prefix().with_start_revision(start);
    let mut from = watch(t, "", options()).await;
    let prefix = t.prefix();
    assert_eq!(events(&mut from, &prefix, 40).await, expected[10..]);
    let at = t.put("k0", "live").await;
    assert_eq!(
        events(&mut from, &prefix, 1).await,
        [format!("+k0=live@{at}")],
        "and goes on with what is new"
    );
    let mut one = watch(t, "k1", WatchOptions::new().with_start_revision(start)).await;
    let of_one: Vec<String> =
        expected[10..].iter().filter(|event| event.starts_with("+k1=")).cloned().collect();
    assert_eq!(events(&mut one, &prefix, of_one.len()).await, of_one);
}

pub(crate) async fn watch_from_a_future_revision_waits(t: &mut Scene) {
    let now = t.put("k", "now").await;
    // Other cases write too, so the revision is reached without this case; what matters is that no earlier event is
    // sent.
    let from = now + 20;
    let mut later = watch(t, "k", WatchOptions::new().with_start_revision(from)).await;
    let mut first = None;
    for i in 0..60 {
        let at = t.put("k", &i.to_string()).await;
        if at >= from && first.is_none() {
            first = Some(format!("+k={i}@{at}"));
        }
    }
    let prefix = t.prefix();
    assert_eq!(events(&mut later, &prefix, 1).await.first(), first.as_ref());
}

pub(crate) async fn transaction_events_arrive_in_one_response(t: &mut Scene) {
    let mut all = watch(t, "", WatchOptions::new().with_prefix()).await;
    let ops: Vec<TxnOp> =
        (0..100).map(|i| TxnOp::put(t.key(&format!("{i:03}")), vec![b'x'; 1000], None)).collect();
    let done = t.client.txn(Txn::new().and_then(ops)).await.unwrap();
    let response = next(&mut all).await;
    assert_eq!(response.events().len(), 100, "all of a revision in one message");
    let at = revision(done.header());
    assert!(response.events().iter().all(|event| event.kv().unwrap().mod_revision() == at));
    let gone = t.client.delete(t.prefix(), Some(DeleteOptions::new().with_prefix())).await.unwrap();
    let response = next(&mut all).await;
    assert_eq!((response.events().len(), gone.deleted()), (100, 100));
    let keys: Vec<String> = response.events().iter().map(|event| t.name_of(event.kv().unwrap())).collect();
    assert!(keys.is_sorted(), "a range is deleted in order: {keys:?}");
}

pub(crate) async fn watch_returns_prev_kv_on_request(t: &mut Scene) {
    let mut with = watch(t, "k", WatchOptions::new().with_prev_key()).await;
    let mut without = watch(t, "k", WatchOptions::new()).await;
    t.put("k", "1").await;
    t.put("k", "2").await;
    t.delete("k").await;
    t.put("k", "3").await;
    let mut before = Vec::new();
    while before.len() < 4 {
        for event in next(&mut with).await.events() {
            before.push(event.prev_kv().map(|kv| kv.value_str().unwrap().to_owned()));
        }
    }
    let value = |text: &str| Some(text.to_owned());
    assert_eq!(before, [None, value("1"), value("2"), None]);
    let mut seen = 0;
    while seen < 4 {
        let response = next(&mut without).await;
        assert!(response.events().iter().all(|event| event.prev_kv().is_none()));
        seen += response.events().len();
    }
}

pub(crate) async fn filters_exclude_event_types(t: &mut Scene) {
    let filter = |kinds: &[WatchFilterType]| WatchOptions::new().with_prefix().with_filters(kinds);
    let mut puts = watch(t, "", filter(&[WatchFilterType::NoDelete])).await;
    let mut deletes = watch(t, "", filter(&[WatchFilterType::NoPut])).await;
    let a = t.put("k", "1").await;
    let b = t.delete("k").await;
    let c = t.put("k", "2").await;
    let d = t.delete("k").await;
    let prefix = t.prefix();
    assert_eq!(events(&mut puts, &prefix, 2).await, [format!("+k=1@{a}"), format!("+k=2@{c}")]);
    assert_eq!(events(&mut deletes, &prefix, 2).await, [format!("-k@{b}"), format!("-k@{d}")]);
}

pub(crate) async fn one_stream_carries_many_watches(t: &mut Scene) {
    const WATCHERS: usize = 200;
    let mut stream = t.client.watch(t.key("k000"), None).await.unwrap();
    let mut keys = BTreeMap::from([(created(&mut stream).await.watch_id(), 0)]);
    for i in 1..WATCHERS {
        stream.watch(t.key(&format!("k{i:03}")), None).await.unwrap();
        keys.insert(created(&mut stream).await.watch_id(), i);
    }
    assert_eq!(keys.len(), WATCHERS, "ids are distinct");
    for round in 0..2 {
        for i in 0..WATCHERS {
            t.put(&format!("k{i:03}"), &round.to_string()).await;
        }
    }
    let mut seen = vec![0; WATCHERS];
    while seen.iter().sum::<usize>() < 2 * WATCHERS {
        let response = next(&mut stream).await;
        let i = keys[&response.watch_id()];
        for event in response.events() {
            let kv = event.kv().unwrap();
            assert_eq!(t.name_of(kv), format!("k{i:03}"), "events go to the watcher of their key");
            assert_eq!(kv.value_str().unwrap(), seen[i].to_string());
            seen[i] += 1;
        }
    }
}

pub(crate) async fn cancelled_watch_sends_no_events(t: &mut Scene) {
    let mut stream = t.client.watch(t.key("a"), None).await.unwrap();
    let first = created(&mut stream).await.watch_id();
    stream.watch(t.key("b"), None).await.unwrap();
    let second = created(&mut stream).await.watch_id();
    assert_ne!(first, second);
    stream.cancel(first).await.unwrap();
    let cancelled = next(&mut stream).await;
    assert!(cancelled.canceled(), "{cancelled:?}");
    assert_eq!((cancelled.watch_id(), cancelled.compact_revision()), (first, 0));
    t.put("a", "unseen").await;
    let at = t.put("b", "seen").await;
    let response = next(&mut stream).await;
    assert_eq!(response.watch_id(), second);
    assert_eq!(described(&response, &t.prefix()), [format!("+b=seen@{at}")]);
}

pub(crate) async fn client_chosen_watch_ids_are_unique(t: &mut Scene) {
    let with = |id| Some(WatchOptions::new().with_watch_id(id));
    let mut stream = t.client.watch(t.key("a"), with(77)).await.unwrap();
    assert_eq!(created(&mut stream).await.watch_id(), 77);
    stream.watch(t.key("b"), with(77)).await.unwrap();
    let refused = next(&mut stream).await;
    assert!(refused.canceled(), "{refused:?}");
    assert_eq!(refused.watch_id(), -1);
    assert!(refused.cancel_reason().contains("duplicate watch ID"), "{refused:?}");
    stream.watch(t.key("b"), None).await.unwrap();
    assert_ne!(created(&mut stream).await.watch_id(), 77);
    let at = t.put("a", "1").await;
    let response = next(&mut stream).await;
    assert_eq!((response.watch_id(), described(&response, &t.prefix())), (77, vec![format!("+a=1@{at}")]));
}

pub(crate) async fn empty_range_is_refused(t: &mut Scene) {
    let backwards = WatchOptions::new().with_range(t.key("a"));
    let mut stream = t.client.watch(t.key("b"), Some(backwards)).await.unwrap();
    let refused = next(&mut stream).await;
    assert!(refused.canceled(), "{refused:?}");
    assert_eq!(refused.watch_id(), -1);
    stream.watch(t.key("k"), None).await.unwrap();
    created(&mut stream).await;
    let at = t.put("k", "1").await;
    assert_eq!(events(&mut stream, &t.prefix(), 1).await, [format!("+k=1@{at}")], "the stream goes on");
}

pub(crate) async fn progress_request_is_answered(t: &mut Scene) {
    let mut stream = watch(t, "k", WatchOptions::new()).await;
    let at = t.put("k", "1").await;
    assert_eq!(events(&mut stream, &t.prefix(), 1).await, [format!("+k=1@{at}")]);
    let other = t.put("other", "1").await;
    // A node that is behind sends the events it has, until it has caught up.
    loop {
        stream.request_progress().await.unwrap();
        let progress = next(&mut stream).await;
        assert!(progress.events().is_empty() && !progress.canceled() && !progress.created(), "{progress:?}");
        assert_eq!(progress.watch_id(), -1);
        if revision(progress.header()) >= other {
            break;
        }
    }
}

pub(crate) async fn large_revision_is_fragmented_only_on_request(t: &mut Scene) {
    const KEYS: usize = 60;
    let mut last = 0;
    for i in 0..KEYS {
        let key = t.key(&format!("{i:02}"));
        last = revision(t.client.put(key, vec![b'x'; 100 << 10], None).await.unwrap().header());
    }
    let mut client = t.client.watch_client().max_decoding_message_size(64 << 20);
    // From this revision on: a node that is behind would send the puts as well.
    let options = || WatchOptions::new().with_prefix().with_prev_key().with_start_revision(last + 1);
    let mut whole = client.watch(t.prefix(), Some(options())).await.unwrap();
    let mut split = client.watch(t.prefix(), Some(options().with_fragment())).await.unwrap();
    created(&mut whole).await;
    created(&mut split).await;
    let gone = t.client.delete(t.prefix(), Some(DeleteOptions::new().with_prefix())).await.unwrap();
    assert_eq!(gone.deleted(), i64::try_from(KEYS).unwrap());
    let response = next(&mut whole).await;
    assert_eq!(response.events().len(), KEYS, "a revision is not split unasked");
    let (mut messages, mut names) = (0, Vec::new());
    while names.len() < KEYS {
        let response = next(&mut split).await;
        messages += 1;
        for event in response.events() {
            assert_eq!(event.kv().unwrap().mod_revision(), revision(gone.header()));
            assert_eq!(event.prev_kv().unwrap().value().len(), 100 << 10);
            names.push(t.name_of(event.kv().unwrap()));
        }
    }
    assert!(messages > 1, "{messages} message for 6 MB");
    let expected: Vec<String> = (0..KEYS).map(|i| format!("{i:02}")).collect();
    assert_eq!(names, expected, "in order, each once");
}

pub(crate) async fn watch_misses_no_event_across_nodes(t: &mut Scene) {
    const EACH: usize = 60;
    let mut nodes = t.nodes().await;
    let mut watches = Vec::new();
    for node in &mut nodes {
        let options = WatchOptions::new().with_prefix();
        let mut watch = node.watch(t.prefix(), Some(options)).await.unwrap();
        created(&mut watch).await;
        watches.push(watch);
    }
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..3 {
        let mut client = nodes[writer % nodes.len()].clone();
        let prefix = t.prefix();
        writers.spawn(async move {
            for i in 0..EACH {
                client.put(format!("{prefix}{writer}"), i.to_string(), None).await.unwrap();
            }
        });
    }
    let mut histories = Vec::new();
    for watch in &mut watches {
        histories.push(events(watch, &t.prefix(), 3 * EACH).await);
    }
    while let Some(writer) = writers.join_next().await {
        writer.unwrap();
    }
    for history in &histories {
        assert_eq!(history, &histories[0], "every node tells the same history");
        let revisions: Vec<i64> =
            history.iter().map(|event| event.rsplit('@').next().unwrap().parse().unwrap()).collect();
        assert!(revisions.is_sorted_by(|a, b| a < b), "{revisions:?}");
        for writer in 0..3 {
            let start = format!("+{writer}=");
            let values: Vec<&str> =
                history.iter().filter_map(|e| e.strip_prefix(&start)?.split('@').next()).collect();
            let expected: Vec<String> = (0..EACH).map(|i| i.to_string()).collect();
            assert_eq!(values, expected);
        }
    }
}

pub(crate) async fn watch_of_a_range_and_from_a_key(t: &mut Scene) {
    let end = t.key("c");
    let mut range = watch(t, "a", WatchOptions::new().with_range(end)).await;
    let mut from = watch(t, "b", WatchOptions::new().with_from_key()).await;
    for name in ["a", "b", "c"] {
        t.put(name, "x").await;
    }
    let names = |events: Vec<String>| -> Vec<String> {
        events.into_iter().map(|event| event[1..].split('=').next().unwrap().to_owned()).collect()
    };
    let prefix = t.prefix();
    assert_eq!(names(events(&mut range, &prefix, 2).await), ["a", "b"]);
    // Concurrent cases have keys after ours in the range: their events are seen as well.
    let mut mine = Vec::new();
    while mine.len() < 2 {
        let response = next(&mut from).await;
        let ours = response.events().iter().filter(|e| e.kv().unwrap().key().starts_with(prefix.as_bytes()));
        mine.extend(ours.map(|event| t.name_of(event.kv().unwrap())));
    }
    assert_eq!(mine, ["b", "c"]);
}
