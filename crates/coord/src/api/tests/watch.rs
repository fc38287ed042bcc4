//! Watch streams: ids, order, filters, progress, compaction, slow readers, lost quorum.

use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::method;

use super::*;

fn put(key: &str, value: impl Into<Bytes>) -> wire::PutRequest {
    wire::PutRequest { key: key.to_owned().into(), value: value.into(), ..Default::default() }
}

fn watch(key: &str) -> wire::WatchCreateRequest {
    wire::WatchCreateRequest { key: key.to_owned().into(), ..Default::default() }
}

/// A watch stream, from the client's side.
struct Watch {
    body: SendStream<Bytes>,
    answer: Answer,
}

impl Watch {
    async fn open(client: &Client, headers: &[(&str, &str)]) -> Self {
        let (body, answer) = client.open(method::watch::WATCH, headers).await.talk().await;
        Self { body, answer }
    }

    fn say(&mut self, kind: wire::WatchRequestKind) {
        let request = wire::WatchRequest { request: Some(kind) };
        self.body.send_data(encode_frame(&request), false).unwrap();
    }

    async fn create(&mut self, request: wire::WatchCreateRequest) -> wire::WatchResponse {
        self.say(wire::WatchRequestKind::Create(request));
        let created = self.next().await;
        assert!(created.created, "{created:?}");
        created
    }

    async fn next(&mut self) -> wire::WatchResponse {
        self.answer.next().await.expect("the stream continues")
    }

    /// The next events, as `PUT key=value` and `DEL key`, in any number of messages.
    async fn events(&mut self, count: usize) -> Vec<String> {
        let mut events = Vec::new();
        while events.len() < count {
            let response = self.next().await;
            assert!(!response.canceled, "{response:?}");
            for event in response.events {
                let kv = event.kv.unwrap();
                let (key, value) = (String::from_utf8_lossy(&kv.key), String::from_utf8_lossy(&kv.value));
                events.push(match event.kind {
                    0 => format!("PUT {key}={value}"),
                    _ => format!("DEL {key}"),
                });
            }
        }
        events
    }
}

async fn change(client: &Client, key: &str, value: impl Into<Bytes>) -> i64 {
    let answer: wire::PutResponse = client.call(method::kv::PUT, &put(key, value)).await.unwrap();
    answer.header.unwrap().revision
}

async fn delete(client: &Client, key: &str) {
    let request = wire::DeleteRangeRequest { key: key.to_owned().into(), ..Default::default() };
    let _: wire::DeleteRangeResponse = client.call(method::kv::DELETE_RANGE, &request).await.unwrap();
}

#[test]
fn watch_ids_are_chosen_by_client_or_server_and_unique() {
    Ports::with_client(1, async |_, client| {
        let mut stream = Watch::open(&client, &[]).await;
        assert_eq!(stream.create(watch("a")).await.watch_id, 0);
        assert_eq!(stream.create(watch("a")).await.watch_id, 1);
        assert_eq!(stream.create(wire::WatchCreateRequest { watch_id: 2, ..watch("a") }).await.watch_id, 2);
        assert_eq!(stream.create(watch("a")).await.watch_id, 3);
        let twice = stream.create(wire::WatchCreateRequest { watch_id: 2, ..watch("a") }).await;
        assert_eq!((twice.watch_id, twice.canceled), (-1, true));
        assert_eq!(twice.cancel_reason, "mvcc: duplicate watch ID provided on the WatchStream");
        let empty = wire::WatchCreateRequest { range_end: "a".into(), ..watch("b") };
        let refused = stream.create(empty).await;
        assert_eq!((refused.watch_id, refused.canceled), (-1, true));
        assert_eq!(refused.cancel_reason, "mvcc: watcher range is empty");
        let past = stream.create(wire::WatchCreateRequest { start_revision: -5, ..watch("b") }).await;
        assert_eq!((past.watch_id, past.canceled), (-1, true));
        assert_eq!(past.cancel_reason, "etcdserver: mvcc: required revision has been compacted");
        // Watch ids are per stream.
        let mut other = Watch::open(&client, &[]).await;
        assert_eq!(other.create(watch("a")).await.watch_id, 0);
        // Canceling an unknown watch has no response; the next response is about another watch.
        stream.say(wire::WatchRequestKind::Cancel(wire::WatchCancelRequest { watch_id: 77 }));
        stream.say(wire::WatchRequestKind::Cancel(wire::WatchCancelRequest { watch_id: 2 }));
        let canceled = stream.next().await;
        assert_eq!((canceled.watch_id, canceled.canceled, canceled.created), (2, true, false));
        assert_eq!(stream.create(wire::WatchCreateRequest { watch_id: 2, ..watch("a") }).await.watch_id, 2);
    });
}

#[test]
fn events_arrive_in_order_with_requested_options() {
    Ports::with_client(1, async |_, client| {
        let mut stream = Watch::open(&client, &[]).await;
        let all = wire::WatchCreateRequest { range_end: "l".into(), prev_kv: true, ..watch("k") };
        stream.create(all.clone()).await;
        change(&client, "k1", "a").await;
        change(&client, "other", "x").await;
        change(&client, "k1", "b").await;
        delete(&client, "k1").await;
        let mut seen = Vec::new();
        while seen.len() < 3 {
            seen.extend(stream.next().await.events);
        }
        let prev: Vec<_> = seen.iter().map(|event| event.prev_kv.clone().map(|kv| kv.value)).collect();
        assert_eq!(prev, [None, Some("a".into()), Some("b".into())]);
        let deleted = seen[2].kv.clone().unwrap();
        assert_eq!((seen[2].kind, deleted.mod_revision, &deleted.value[..]), (1, 5, &b""[..]));
        // From a past revision, without puts, and without deletions.
        let mut filtered = Watch::open(&client, &[]).await;
        filtered
            .create(wire::WatchCreateRequest { start_revision: 1, filters: vec![0], ..all.clone() })
            .await;
        assert_eq!(filtered.events(1).await, ["DEL k1"]);
        let mut filtered = Watch::open(&client, &[]).await;
        filtered.create(wire::WatchCreateRequest { start_revision: 1, filters: vec![1], ..all }).await;
        assert_eq!(filtered.events(2).await, ["PUT k1=a", "PUT k1=b"]);
    });
}

#[test]
fn half_closed_client_still_receives_events() {
    Ports::with_client(1, async |_, client| {
        let mut stream = Watch::open(&client, &[]).await;
        stream.create(watch("k")).await;
        stream.body.send_data(Bytes::new(), true).unwrap();
        change(&client, "k", "v").await;
        assert_eq!(stream.events(1).await, ["PUT k=v"]);
    });
}

#[test]
fn compacted_start_revision_cancels_after_created() {
    Ports::with_client(1, async |_, client| {
        for number in 0..10 {
            change(&client, "k", number.to_string()).await;
        }
        let compact = wire::CompactionRequest { revision: 8, physical: false };
        let _: wire::CompactionResponse = client.call(method::kv::COMPACT, &compact).await.unwrap();
        let mut stream = Watch::open(&client, &[]).await;
        let created = stream.create(wire::WatchCreateRequest { start_revision: 3, ..watch("k") }).await;
        assert!(!created.canceled);
        let canceled = stream.next().await;
        assert_eq!(
            (canceled.watch_id, canceled.canceled, canceled.created, canceled.compact_revision),
            (created.watch_id, true, false, 8)
        );
        // The stream continues.
        stream.create(wire::WatchCreateRequest { start_revision: 8, ..watch("k") }).await;
        assert_eq!(stream.events(4).await, ["PUT k=6", "PUT k=7", "PUT k=8", "PUT k=9"]);
    });
}

#[test]
fn progress_is_sent_on_request_and_periodically() {
    Ports::with_client(1, async |_, client| {
        let mut stream = Watch::open(&client, &[]).await;
        stream.create(watch("k")).await;
        let revision = change(&client, "elsewhere", "v").await;
        stream.say(wire::WatchRequestKind::Progress(wire::WatchProgressRequest {}));
        let progress = stream.next().await;
        assert_eq!((progress.watch_id, progress.header.unwrap().revision), (-1, revision));
        assert!(progress.events.is_empty() && !progress.created && !progress.canceled);
        let mut notified = Watch::open(&client, &[]).await;
        notified.create(wire::WatchCreateRequest { progress_notify: true, watch_id: 9, ..watch("k") }).await;
        let progress = notified.next().await;
        assert_eq!((progress.watch_id, progress.header.unwrap().revision), (9, revision));
        assert!(progress.events.is_empty());
    });
}

#[test]
fn revision_larger_than_a_message_is_fragmented_on_request() {
    Ports::with_client(1, async |_, client| {
        let mut whole = Watch::open(&client, &[]).await;
        let range = wire::WatchCreateRequest { range_end: "l".into(), ..watch("k") };
        whole.create(range.clone()).await;
        let mut pieces = Watch::open(&client, &[]).await;
        pieces.create(wire::WatchCreateRequest { fragment: true, ..range }).await;
        // One revision larger than a batch: keys of one lease, deleted together with their previous values.
        let puts = (0..120).map(|number| {
            let put = put(&format!("k{number:03}"), vec![b'x'; 12_000]);
            wire::RequestOp { op: Some(wire::RequestOpKind::Put(put)) }
        });
        let txn = wire::TxnRequest { success: puts.collect(), ..Default::default() };
        let answer: wire::TxnResponse = client.call(method::kv::TXN, &txn).await.unwrap();
        let revision = answer.header.unwrap().revision;
        let response = whole.next().await;
        assert_eq!((response.events.len(), response.fragment), (120, false));
        let (mut count, mut messages) = (0, 0);
        loop {
            let response = pieces.next().await;
            messages += 1;
            count += response.events.len();
            assert!(response.events.iter().all(|event| event.kv.as_ref().unwrap().mod_revision == revision));
            if !response.fragment {
                break;
            }
        }
        assert_eq!(count, 120);
        assert!(messages > 1, "{messages}");
    });
}

#[test]
fn unread_stream_does_not_affect_others_and_loses_nothing() {
    Ports::with_client(1, async |ports, client| {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(2_000).initial_connection_window_size(65_535);
        let slow = Client::connect_with(ports.addresses[0], &builder).await;
        let mut unread = Watch::open(&slow, &[]).await;
        unread.create(watch("k")).await;
        let mut prompt = Watch::open(&client, &[]).await;
        prompt.create(watch("k")).await;
        let count = 300;
        for number in 0..count {
            change(&client, "k", format!("{number:05}{}", "x".repeat(2_000))).await;
            let seen = prompt.events(1).await;
            assert!(seen[0].starts_with(&format!("PUT k={number:05}")), "{seen:?}");
        }
        let seen = unread.events(count).await;
        for (number, event) in seen.iter().enumerate() {
            assert!(event.starts_with(&format!("PUT k={number:05}")), "{number}: {event:.20}");
        }
    });
}

#[test]
fn streams_that_require_a_leader_end_when_the_quorum_is_lost() {
    Ports::with_client(3, async |ports, client| {
        let mut needy = Watch::open(&client, &[("hasleader", "true")]).await;
        needy.create(watch("k")).await;
        let mut patient = Watch::open(&client, &[]).await;
        patient.create(watch("k")).await;
        change(&client, "k", "v").await;
        assert_eq!(needy.events(1).await, ["PUT k=v"]);
        assert_eq!(patient.events(1).await, ["PUT k=v"]);
        ports.cluster.isolate(0);
        assert_eq!(needy.answer.next::<wire::WatchResponse>().await, None);
        assert_eq!(refusal(needy.answer.end().await), "Unavailable: etcdserver: no leader");
        // The stream without `hasleader` stays open, and serializable reads are served.
        patient.create(watch("k")).await;
        let stale = wire::RangeRequest { key: "k".into(), serializable: true, ..Default::default() };
        let answer: wire::RangeResponse = client.call(method::kv::RANGE, &stale).await.unwrap();
        assert_eq!(answer.count, 1);
    });
}
