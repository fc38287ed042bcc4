//! Connection limits and isolation: what one connection may do to itself and to others.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moim_journal::StoreOptions;
use moim_queue::{MemorySocket, Socket as _};
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::delete_records::{
    DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsResponse, DeleteRecordsTopic,
};
use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic};
use moim_wire_kafka::messages::list_offsets::{ListOffsetsPartition, ListOffsetsTopic};
use moim_wire_kafka::messages::*;

use crate::support::{Client, batch_of, one_batch, start, start_on, start_with};

#[test]
fn pipelined_requests_with_large_responses_are_all_answered() {
    const REQUESTS: usize = 600;
    let running = start();
    let mut client = Client::connect(&running);
    client.create_topic("wide", 1_000);
    let request = MetadataRequest { topics: None, ..Default::default() };
    let frames: Vec<u8> = (0..REQUESTS).flat_map(|_| client.frame(&request, 9)).collect();
    client.stream.write_all(&frames).unwrap();
    for _ in 0..REQUESTS {
        let mut size = [0; 4];
        client.stream.read_exact(&mut size).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(size) as usize];
        client.stream.read_exact(&mut answer).unwrap();
    }
}

#[test]
fn slow_disk_delays_producers_and_rejects_none() {
    const BATCHES: i64 = 600;
    // Memory for a few batches only: the broker must stop reading again and again.
    let store = StoreOptions { recent_bytes: 64 << 10, ..StoreOptions::default() };
    let running = start_on(store, |_| {});
    let mut client = Client::connect(&running);
    client.create_topic("t", 1);
    let mut writer = client.stream.try_clone().unwrap();
    let frames: Vec<Vec<u8>> =
        (0..BATCHES).map(|_| client.frame(&one_batch("t", &vec![7; 16 << 10]), 9)).collect();
    let sender = std::thread::spawn(move || frames.iter().for_each(|frame| writer.write_all(frame).unwrap()));
    for expected in 0..BATCHES {
        let response: ProduceResponse = client.answer(9).unwrap();
        let partition = &response.responses[0].partition_responses[0];
        assert_eq!((partition.error_code, partition.base_offset), (0, expected));
    }
    sender.join().unwrap();
}

#[test]
fn incomplete_large_requests_leave_memory_for_small_ones() {
    // The broker reserves up to 4 MiB for the first MiB: more than there is, less than twice as much.
    let running = start_with(|options| options.request_memory_bytes = 3 << 20);
    let mut slow = Client::connect(&running);
    slow.stream.write_all(&(50i32 << 20).to_be_bytes()).unwrap();
    // The broker may close the connection as soon as the reservation fails.
    let began = slow.stream.write_all(&vec![0; 1 << 20]);
    let mut other = Client::connect(&running);
    other.create_topic("t", 1);
    // A frame far beyond the memory limit is rejected.
    let written = began.and_then(|()| slow.stream.write_all(&vec![0; 20 << 20]));
    let read = written.and_then(|()| slow.stream.read(&mut [0]));
    let cut = read.as_ref().map_or_else(|e| e.kind() != ErrorKind::WouldBlock, |n| *n == 0);
    assert!(cut, "one request holds many times the memory limit of all: {read:?}");
    other.create_topic("u", 1);
}

#[test]
fn incomplete_large_requests_are_closed_when_memory_is_short() {
    const MEMORY: usize = 8 << 20;
    let running = start_with(|options| {
        options.request_memory_bytes = MEMORY / 2;
        options.max_request_bytes = MEMORY / 2;
        options.event_loops = 1;
    });
    let mut slow: Vec<Client> = (0..4).map(|_| Client::connect(&running)).collect();
    for client in &mut slow {
        client.stream.write_all(&(3i32 << 20).to_be_bytes()).unwrap();
        // Some of it stays in the socket when the memory is exhausted.
        client.stream.write_all(&vec![0; 200 << 10]).unwrap();
    }
    let mut other = Client::connect(&running);
    other.stream.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
    other.create_topic("t", 1);
    let deadline = Instant::now() + Duration::from_secs(20);
    while running.broker.request_memory_bytes() < MEMORY / 2 {
        assert!(Instant::now() < deadline, "an incomplete request holds no memory");
        std::thread::sleep(Duration::from_millis(1));
    }
    other.produce("t", b"small requests do not wait");
    // A large one waits until the clients that make no progress are disconnected.
    other.produce("t", &vec![7; 900_000]);
    assert!(running.broker.request_memory_bytes() <= MEMORY);
    let mut left = 0;
    for client in &mut slow {
        client.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        left += usize::from(client.stream.read(&mut [0]).is_ok_and(|read| read > 0));
    }
    assert_eq!(left, 0);
    while running.broker.request_memory_bytes() > 0 {
        assert!(
            Instant::now() < deadline + Duration::from_secs(20),
            "memory of disconnected clients is not released"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn client_that_never_reads_responses_is_disconnected() {
    // Longer than a busy machine takes between two of the requests below.
    let running = start_with(|options| options.idle_connection_ms = 3_000);
    let mut client = Client::connect(&running);
    client.create_topic("t", 1);
    for _ in 0..24 {
        client.produce("t", &vec![7; 1_000_000]);
    }
    let partition = FetchPartition { partition: 0, partition_max_bytes: i32::MAX, ..Default::default() };
    let topic = FetchTopic { topic: "t".into(), partitions: vec![partition], ..Default::default() };
    let fetch = FetchRequest { max_bytes: i32::MAX, topics: vec![topic], ..Default::default() };
    // More than all buffers between the broker and its client hold.
    for _ in 0..4 {
        let frame = client.frame(&fetch, 6);
        client.stream.write_all(&frame).unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while running.broker.summary().connections > 0 {
        assert!(Instant::now() < deadline, "the connection is never closed");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn clients_that_never_read_are_limited_and_disconnected_when_memory_is_short() {
    const MEMORY: usize = 4 << 20;
    // Everything stays in memory, where responses would hold it.
    let store = StoreOptions { recent_bytes: 256 << 20, ..StoreOptions::default() };
    let running = start_on(store, |options| {
        options.response_memory_bytes = MEMORY;
        options.event_loops = 1;
    });
    let mut client = Client::connect(&running);
    client.create_topic("t", 1);
    for _ in 0..24 {
        client.produce("t", &vec![7; 1_000_000]);
    }
    let fetch = |offset: i64| {
        let partition =
            FetchPartition { fetch_offset: offset, partition_max_bytes: i32::MAX, ..Default::default() };
        let topic = FetchTopic { topic: "t".into(), partitions: vec![partition], ..Default::default() };
        FetchRequest { max_bytes: i32::MAX, topics: vec![topic], ..Default::default() }
    };
    let mut hung: Vec<Client> = (0..6).map(|_| Client::connect(&running)).collect();
    for client in &mut hung {
        for _ in 0..24 {
            let frame = client.frame(&fetch(0), 6);
            client.stream.write_all(&frame).unwrap();
        }
    }
    // Another client waits at most until the clients that read nothing are disconnected, and no producer waits for
    // them.
    for offset in 0..24 {
        let response: FetchResponse = client.call(&fetch(offset), 6).unwrap();
        let partition = &response.responses[0].partitions[0];
        assert_eq!(partition.error_code, 0);
        assert!(partition.records.as_ref().is_some_and(|records| records.len() >= 1_000_000));
        assert!(running.broker.response_memory_bytes() <= MEMORY);
        client.produce("t", b"on");
    }
    drop(hung);
    let deadline = Instant::now() + Duration::from_secs(20);
    while running.broker.response_memory_bytes() > 0 {
        assert!(Instant::now() < deadline, "memory of disconnected clients is not released");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn request_with_many_topics_does_not_stall_the_loop() {
    const TOPICS: usize = 60_000;
    let running = start();
    let mut client = Client::connect(&running);
    let name = |i: usize| format!("{i:0>200}/illegal");
    let topics = (0..TOPICS).map(|i| create_topics::CreatableTopic {
        name: name(i).into(),
        num_partitions: 1,
        replication_factor: 1,
        ..Default::default()
    });
    let request = create_topics::CreateTopicsRequest { topics: topics.collect(), ..Default::default() };
    let response: create_topics::CreateTopicsResponse = client.call(&request, 5).unwrap();
    assert_eq!(response.topics.len(), TOPICS);
}

#[test]
fn continuous_requests_do_not_starve_other_clients() {
    check_fairness(3_000, |greedy| {
        let request = MetadataRequest { topics: None, ..Default::default() };
        greedy.frame(&request, 9)
    });
}

#[test]
fn many_queued_fetches_do_not_starve_other_clients() {
    // Queueing a fetch is cheap, reading its partitions is not: all queued fetches were read at once.
    check_fairness(1_000, |greedy| {
        let partition =
            |partition: i32| FetchPartition { partition, partition_max_bytes: 1_000, ..Default::default() };
        let partitions = (0..500).map(partition).collect();
        let topic = FetchTopic { topic: "wide".into(), partitions, ..Default::default() };
        greedy.frame(&FetchRequest { max_bytes: 1_000, topics: vec![topic], ..Default::default() }, 6)
    });
}

/// One client sends many requests at once, another one a single one: few of the first may be served before it.
fn check_fairness(requests: usize, frame: impl Fn(&mut Client) -> Vec<u8>) {
    const FAIR: usize = 200;
    let running = start_with(|options| options.event_loops = 1);
    let mut greedy = Client::connect(&running);
    greedy.create_topic("wide", 500);
    let frames: Vec<u8> = (0..requests).flat_map(|_| frame(&mut greedy)).collect();
    let mut writer = greedy.stream.try_clone().unwrap();
    let answered = AtomicUsize::new(0);
    let mut other = Client::connect(&running);
    let _: ApiVersionsResponse = other.call(&ApiVersionsRequest::default(), 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| writer.write_all(&frames).unwrap());
        scope.spawn(|| {
            for _ in 0..requests {
                let mut size = [0; 4];
                greedy.stream.read_exact(&mut size).unwrap();
                let mut answer = vec![0; u32::from_be_bytes(size) as usize];
                greedy.stream.read_exact(&mut answer).unwrap();
                answered.fetch_add(1, Ordering::SeqCst);
            }
        });
        while answered.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let before = answered.load(Ordering::SeqCst);
        let _: ApiVersionsResponse = other.call(&ApiVersionsRequest::default(), 0).unwrap();
        let meanwhile = answered.load(Ordering::SeqCst) - before;
        assert!(meanwhile < FAIR, "{meanwhile} requests of another client were served first");
    });
}

#[test]
fn continuous_requests_do_not_block_shutdown() {
    /// More responses than all buffers between the broker and its client hold.
    const BUFFERED: usize = 2_000;
    let running = start_with(|options| options.event_loops = 1);
    let mut greedy = Client::connect(&running);
    greedy.create_topic("wide", 500);
    let request = MetadataRequest { topics: None, ..Default::default() };
    let frames: Vec<u8> = (0..100).flat_map(|_| greedy.frame(&request, 9)).collect();
    let mut writer = greedy.stream.try_clone().unwrap();
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| while writer.write_all(&frames).is_ok() {});
        scope.spawn(|| {
            let mut size = [0; 4];
            while greedy.stream.read_exact(&mut size).is_ok() {
                let mut answer = vec![0; u32::from_be_bytes(size) as usize];
                if greedy.stream.read_exact(&mut answer).is_err() {
                    return;
                }
                answered.fetch_add(1, Ordering::SeqCst);
            }
        });
        while answered.load(Ordering::SeqCst) < 100 {
            std::thread::yield_now();
        }
        let before = answered.load(Ordering::SeqCst);
        drop(running);
        let after = answered.load(Ordering::SeqCst) - before;
        assert!(after < BUFFERED, "{after} requests were still served");
    });
}

#[test]
fn in_memory_socket_is_served_by_the_same_code() {
    let running = start();
    let mut client = Client::connect(&running);
    client.create_topic("t", 1);
    let request = client.frame(&one_batch("t", b"by memory"), 9);
    let (mut near, far) = MemorySocket::pair();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime.block_on(async {
        let written = near.try_write(&[std::io::IoSlice::new(&request)]).unwrap();
        assert_eq!(written, request.len());
        let mut answer = bytes::BytesMut::with_capacity(1 << 10);
        let read = std::future::poll_fn(|cx| near.poll_read(cx, &mut answer));
        tokio::select! {
            () = running.broker.serve(Box::new(far), running.address) => panic!("the connection ended"),
            read = read => read.unwrap(),
        };
        answer.freeze()
    });
    let (_, response) = moim_wire_kafka::decode_response::<ProduceResponse>(answer.slice(4..), 9).unwrap();
    assert_eq!(response.responses[0].partition_responses[0].error_code, 0);
    assert_eq!(client.produce("t", b"by TCP"), 1);
}

#[test]
fn isolated_broker_disconnects_clients() {
    let running = start();
    let mut waiting = Client::connect(&running);
    waiting.create_topic("t", 1);
    let partition = FetchPartition { partition: 0, partition_max_bytes: 1_000, ..Default::default() };
    let topic = FetchTopic { topic: "t".into(), partitions: vec![partition], ..Default::default() };
    let fetch =
        FetchRequest { max_wait_ms: 600_000, min_bytes: 1, topics: vec![topic], ..Default::default() };
    let frame = waiting.frame(&fetch, 6);
    waiting.stream.write_all(&frame).unwrap();
    let mut idle = Client::connect(&running);
    idle.create_topic("u", 1);
    let mut early = Client::connect(&running);

    running.broker.set_in_touch(false);
    let is_closed = |mut client: Client| match client.stream.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    assert!(is_closed(waiting), "a client with a delayed fetch");
    assert!(is_closed(idle), "an idle client");
    // A new client gets ApiVersions: some clients take a connection that closes earlier for an incompatible broker,
    // and give up. Any other request closes it.
    let mut newcomer = Client::connect(&running);
    let mut returns = Client::connect(&running);
    // So does a client that connected before and has sent no other request yet.
    for client in [&mut newcomer, &mut returns, &mut early] {
        let spoken: ApiVersionsResponse = client.call(&software(), 3).unwrap();
        assert!(spoken.error_code == 0 && !spoken.api_keys.is_empty());
    }
    let frame = newcomer.frame(&MetadataRequest::default(), 9);
    newcomer.stream.write_all(&frame).unwrap();
    assert!(is_closed(newcomer), "a new client");

    running.broker.set_in_touch(true);
    assert_eq!(returns.produce("t", b"on the connection made meanwhile"), 0);
    running.broker.set_in_touch(false);
    assert!(is_closed(returns), "it is now a client like any other");
    running.broker.set_in_touch(true);
    assert_eq!(Client::connect(&running).produce("t", b"again"), 1);
}

fn software() -> ApiVersionsRequest {
    ApiVersionsRequest { client_software_name: "test".into(), client_software_version: "1".into() }
}

#[test]
fn pipelined_request_sees_the_mutation_before_it() {
    const ROUNDS: i64 = 50;
    let running = start();
    let mut client = Client::connect(&running);
    client.create_topic("t", 1);
    for _ in 0..=ROUNDS {
        client.produce("t", b"x");
    }
    for offset in 1..=ROUNDS {
        let partition = DeleteRecordsPartition { partition_index: 0, offset };
        let topic = DeleteRecordsTopic { name: "t".into(), partitions: vec![partition] };
        let delete = DeleteRecordsRequest { topics: vec![topic], timeout_ms: 10_000 };
        let partition = ListOffsetsPartition { partition_index: 0, timestamp: -2, ..Default::default() };
        let topic = ListOffsetsTopic { name: "t".into(), partitions: vec![partition] };
        let earliest = ListOffsetsRequest { replica_id: -1, topics: vec![topic], ..Default::default() };
        let mut frames = client.frame(&delete, 1);
        frames.extend(client.frame(&earliest, 2));
        client.stream.write_all(&frames).unwrap();
        let deleted: DeleteRecordsResponse = client.answer(1).unwrap();
        assert_eq!(deleted.topics[0].partitions[0].error_code, 0);
        let listed: ListOffsetsResponse = client.answer(2).unwrap();
        assert_eq!(listed.topics[0].partitions[0].offset, offset, "the log start offset before the deletion");
    }
}

#[test]
fn batch_after_an_early_batch_is_not_accepted_as_the_first() {
    let running = start();
    let mut client = Client::connect(&running);
    let offer = |client: &mut Client, sequence: i32| {
        let response: ProduceResponse = client.call(&batch_of("t", 7, sequence), 9).unwrap();
        let partition = &response.responses[0].partition_responses[0];
        (partition.error_code, partition.base_offset)
    };
    let too_early = (ErrorCode::UnknownTopicOrPartition as i16, -1);
    assert_eq!(offer(&mut client, 0), too_early);
    Client::connect(&running).create_topic("t", 1);
    // A batch already in flight. Accepted as the first, it would shut out the first one for ever.
    assert_eq!(offer(&mut client, 1), too_early);
    assert_eq!(offer(&mut client, 0), (0, 0));
    assert_eq!(offer(&mut client, 1), (0, 1));
    // A producer without earlier batches may begin anywhere: its state may have expired.
    let response: ProduceResponse = client.call(&batch_of("t", 8, 5), 9).unwrap();
    assert_eq!(response.responses[0].partition_responses[0].error_code, 0);
}
