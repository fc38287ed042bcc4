//! Clients that make the etcd port hold memory: how much, for how long, and the effect on other clients.

use moim_base::MemoryBudget;
use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::method;

use super::*;

const MIB: usize = 1 << 20;
/// A connection may hold a quarter of it.
const TOTAL: usize = 16 * MIB;
const PATIENCE: Duration = Duration::from_secs(20);

fn options() -> (MemoryBudget, EtcdOptions) {
    let memory = MemoryBudget::new(TOTAL);
    let stall = Duration::from_millis(300);
    (memory.clone(), EtcdOptions { memory: Some(memory), stall, ..EtcdOptions::default() })
}

fn used(memory: &MemoryBudget) -> usize {
    memory.used().iter().filter(|(name, ..)| *name == "etcd messages").map(|(_, used, _)| used).sum()
}

/// Waits until the condition holds, and checks the bound of one connection meanwhile.
async fn until(memory: &MemoryBudget, what: &str, mut holds: impl FnMut(usize) -> bool) {
    let begun = tokio::time::Instant::now();
    loop {
        let used = used(memory);
        assert!(used <= TOTAL / 4, "{used} bytes are more than the share of a connection");
        if holds(used) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}: {used} bytes are held");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn put(client: &Client, key: &str, bytes: usize) {
    let request = wire::PutRequest {
        key: key.to_owned().into(),
        value: vec![b'v'; bytes].into(),
        ..Default::default()
    };
    let _: wire::PutResponse = client.call(method::kv::PUT, &request).await.unwrap();
}

async fn get(client: &Client, key: &str) -> usize {
    let request = wire::RangeRequest { key: key.to_owned().into(), ..Default::default() };
    let answer: wire::RangeResponse = client.call(method::kv::RANGE, &request).await.unwrap();
    answer.kvs[0].value.len()
}

#[test]
fn unread_watches_hold_at_most_their_share_and_end_when_memory_is_short() {
    let (memory, options) = options();
    Ports::with_options(1, &options, async |ports, client| {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1_000).initial_connection_window_size(65_535);
        let rude = Client::connect_with(ports.addresses[0], &builder).await;
        let mut unread = Vec::new();
        for _ in 0..40 {
            let mut stream = rude.open(method::watch::WATCH, &[]).await;
            let create = wire::WatchCreateRequest { key: "k".into(), ..Default::default() };
            let request = wire::WatchRequest { request: Some(wire::WatchRequestKind::Create(create)) };
            stream.send(&request, false);
            let (body, mut answer) = stream.talk().await;
            assert!(answer.next::<wire::WatchResponse>().await.unwrap().created);
            unread.push((body, answer));
        }
        put(&client, "k", MIB).await;
        until(&memory, "some of them hold the event", |used| used >= MIB).await;
        assert_eq!(get(&client, "k").await, MIB, "others are served");
        until(&memory, "those that hold memory end", |used| used <= TOTAL / 8).await;
        let mut ended = 0;
        for (_, answer) in &mut unread {
            while let Some(piece) = tokio::time::timeout(PATIENCE, answer.stream.data()).await.unwrap() {
                let Ok(piece) = piece else {
                    ended += 1;
                    break;
                };
                let _ = answer.stream.flow_control().release_capacity(piece.len());
                if answer.frames.held_bytes() + piece.len() > MIB {
                    break;
                }
                answer.frames.push(piece);
            }
        }
        assert!(ended > 0 && ended < 40, "{ended} of 40 streams ended");
        drop(unread);
        drop(rude);
        until(&memory, "all memory is released", |used| used == 0).await;
    });
}

#[test]
fn unread_responses_are_counted_until_the_connection_is_closed() {
    let (memory, options) = options();
    Ports::with_options(1, &options, async |ports, client| {
        put(&client, "k", 300_000).await;
        let socket = TcpStream::connect(ports.addresses[0]).await.unwrap();
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 30).initial_connection_window_size(1 << 30);
        let (send, connection) = builder.handshake::<_, Bytes>(socket).await.unwrap();
        let mut connection = Box::pin(connection);
        let request = wire::RangeRequest { key: "k".into(), ..Default::default() };
        let mut responses = Vec::new();
        for _ in 0..200 {
            let head = Request::post(format!("http://moim{}", method::kv::RANGE))
                .header("content-type", "application/grpc");
            let mut send = send.clone().ready().await.unwrap();
            let (response, mut body) = send.send_request(head.body(()).unwrap(), false).unwrap();
            body.send_data(encode_frame(&request), true).unwrap();
            responses.push(response);
        }
        // The requests are sent; then the socket is not read any more.
        assert!(futures_util::poll!(connection.as_mut()).is_pending());
        until(&memory, "answers wait for the socket", |used| used >= TOTAL / 8).await;
        assert_eq!(get(&client, "k").await, 300_000, "others are served");
        until(&memory, "the client is closed", |used| used == 0).await;
    });
}

#[test]
fn incomplete_messages_hold_at_most_their_share_until_the_stall_timeout() {
    let (memory, options) = options();
    Ports::with_options(1, &options, async |ports, client| {
        let rude = Client::connect(ports.addresses[0]).await;
        let request =
            wire::PutRequest { key: "k".into(), value: vec![b'v'; MIB].into(), ..Default::default() };
        let frame = encode_frame(&request);
        let mut begun = Vec::new();
        for _ in 0..100 {
            let mut stream = rude.open(method::kv::PUT, &[]).await;
            stream.body.send_data(frame.slice(..200_000), false).unwrap();
            begun.push(stream);
        }
        until(&memory, "beginnings are counted", |used| used >= MIB).await;
        put(&client, "other", MIB).await;
        let mut refused = 0;
        for stream in begun {
            match refusal(stream.answer().await.map(|_| ())).as_str() {
                "ResourceExhausted: etcdserver: too many requests" => refused += 1,
                "Canceled: grpc: request message not completed in time" => {}
                other => panic!("{other}"),
            }
        }
        assert!(refused > 0 && refused < 100, "{refused} of 100 were refused");
        until(&memory, "all memory is released", |used| used == 0).await;
    });
}
