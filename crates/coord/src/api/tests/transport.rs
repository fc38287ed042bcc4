//! Calls that are invalid gRPC or HTTP/2: each gets an error, and other calls are unaffected.

use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

fn put(key: &str, value: impl Into<Bytes>) -> wire::PutRequest {
    wire::PutRequest { key: key.to_owned().into(), value: value.into(), ..Default::default() }
}

fn framed(flag: u8, length: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![flag];
    bytes.extend(length.to_be_bytes());
    bytes.extend(body);
    bytes
}

type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], Vec<u8>, u16, Code, &'a str);

#[test]
fn invalid_calls_get_protocol_errors() {
    let good = encode_frame(&put("k", "v")).to_vec();
    let too_long = 4 << 20;
    let cases: Vec<Case<'_>> = vec![
        (method::kv::PUT, &[], good.clone(), 200, Code::Ok, ""),
        (method::kv::PUT, &[("content-type", "application/grpc+proto")], good.clone(), 200, Code::Ok, ""),
        (method::kv::PUT, &[("content-type", "application/grpc;x")], good.clone(), 200, Code::Ok, ""),
        (
            method::kv::PUT,
            &[("content-type", "application/json")],
            good.clone(),
            415,
            Code::InvalidArgument,
            "invalid gRPC request content-type \"application/json\"",
        ),
        (
            method::kv::PUT,
            &[("content-type", "application/grpc-web")],
            good.clone(),
            415,
            Code::InvalidArgument,
            "invalid gRPC request content-type \"application/grpc-web\"",
        ),
        (method::kv::PUT, &[("grpc-encoding", "identity")], good.clone(), 200, Code::Ok, ""),
        (
            method::kv::PUT,
            &[("grpc-encoding", "gzip")],
            good.clone(),
            200,
            Code::Unimplemented,
            "grpc: Decompressor is not installed for grpc-encoding \"gzip\"",
        ),
        (
            method::kv::PUT,
            &[("grpc-timeout", "soon")],
            good.clone(),
            200,
            Code::Internal,
            "malformed grpc-timeout: soon",
        ),
        (method::kv::PUT, &[("grpc-timeout", "10S")], good.clone(), 200, Code::Ok, ""),
        (
            method::kv::PUT,
            &[("grpc-timeout", "0n")],
            good.clone(),
            200,
            Code::DeadlineExceeded,
            "context deadline exceeded",
        ),
        (
            "/etcdserverpb.KV/Pat",
            &[],
            good.clone(),
            200,
            Code::Unimplemented,
            "unknown method Pat for service etcdserverpb.KV",
        ),
        ("/pets.Dog/Pat", &[], good.clone(), 200, Code::Unimplemented, "unknown service pets.Dog"),
        ("/", &[], good.clone(), 200, Code::Unimplemented, "malformed method name: \"/\""),
        (
            method::kv::PUT,
            &[],
            Vec::new(),
            200,
            Code::Internal,
            "grpc: the call ended without a request message",
        ),
        (method::kv::PUT, &[], vec![0, 0], 200, Code::Internal, "unexpected EOF"),
        (method::kv::PUT, &[], framed(0, 10, b"short"), 200, Code::Internal, "unexpected EOF"),
        (
            method::kv::PUT,
            &[],
            framed(1, 0, b""),
            200,
            Code::Internal,
            "grpc: compressed flag set with identity or empty encoding",
        ),
        (
            method::kv::PUT,
            &[],
            framed(9, 0, b""),
            200,
            Code::Internal,
            "grpc: received unexpected payload format 9",
        ),
        (
            method::kv::PUT,
            &[],
            framed(0, too_long, b""),
            200,
            Code::ResourceExhausted,
            "grpc: received message larger than max (4194304 vs. 2097152)",
        ),
        (
            method::watch::WATCH,
            &[],
            framed(0, 3, b"\xff\xff\xff"),
            200,
            Code::Internal,
            "grpc: error unmarshalling request",
        ),
        (
            method::lease::KEEP_ALIVE,
            &[],
            framed(7, 0, b""),
            200,
            Code::Internal,
            "grpc: received unexpected payload format 7",
        ),
    ];
    Ports::with_client(1, async |_, client| {
        for (path, headers, body, http_status, code, text) in cases {
            let (found, status) = client.raw(path, headers, body).await;
            let shown = format!("{path} {headers:?}: {found} {status}");
            assert_eq!((found.as_u16(), status.code), (http_status, code), "{shown}");
            assert!(status.message.starts_with(text), "{shown}");
        }
        let get = Request::get("http://moim/etcdserverpb.KV/Put").body(()).unwrap();
        let (response, _) = client.send.clone().ready().await.unwrap().send_request(get, true).unwrap();
        assert_eq!(response.await.unwrap().status(), 405);
    });
}

#[test]
fn unsupported_encoding_is_answered_with_the_supported_one() {
    Ports::with_client(1, async |_, client| {
        let mut stream = client.open(method::kv::PUT, &[("grpc-encoding", "gzip")]).await;
        stream.send(&put("k", "v"), true);
        let response = stream.response.await.unwrap();
        assert_eq!(response.headers()["grpc-accept-encoding"], "identity");
    });
}

#[test]
fn malformed_bytes_close_only_their_connection() {
    Ports::with_client(1, async |ports, client| {
        let garbage: [&[u8]; 5] = [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"hello there\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnot a frame of this protocol at all",
            b"PRI ? what is this\r\n\r\n",
            b"\0",
        ];
        for bytes in garbage {
            let mut socket = TcpStream::connect(ports.addresses[0]).await.unwrap();
            socket.write_all(bytes).await.unwrap();
            socket.shutdown().await.unwrap();
            let mut rest = Vec::new();
            // Closed by the server, in any way.
            let _ = socket.read_to_end(&mut rest).await;
        }
        let _: wire::PutResponse = client.call(method::kv::PUT, &put("k", "v")).await.unwrap();
    });
}

#[test]
fn many_calls_run_concurrently_on_one_connection() {
    Ports::with_client(1, async |_, client| {
        let calls = (0..500).map(|number| {
            let client = client.clone();
            async move {
                let request = put(&format!("key-{number}"), vec![b'x'; number]);
                client.call::<_, wire::PutResponse>(method::kv::PUT, &request).await.unwrap()
            }
        });
        let answers = futures_util::future::join_all(calls).await;
        let mut revisions: Vec<_> =
            answers.into_iter().map(|answer| answer.header.unwrap().revision).collect();
        revisions.sort_unstable();
        assert_eq!(revisions, (2..502).collect::<Vec<_>>());
    });
}

#[test]
fn large_response_passes_a_small_window() {
    let ports = Ports::open(1);
    ports.run(async {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1_000).initial_connection_window_size(65_535);
        let client = Client::connect_with(ports.addresses[0], &builder).await;
        let value = Bytes::from(vec![b'v'; 1 << 20]);
        for number in 0..8 {
            let request = put(&format!("big-{number}"), value.clone());
            let _: wire::PutResponse = client.call(method::kv::PUT, &request).await.unwrap();
        }
        let everything =
            wire::RangeRequest { key: "big-".into(), range_end: "big.".into(), ..Default::default() };
        let answer: wire::RangeResponse = client.call(method::kv::RANGE, &everything).await.unwrap();
        assert_eq!((answer.count, answer.kvs.len()), (8, 8));
        assert!(answer.kvs.iter().all(|kv| kv.value == value));
    });
}

#[test]
fn client_that_does_not_read_a_large_response_does_not_affect_others() {
    Ports::with_client(1, async |ports, client| {
        let value = Bytes::from(vec![b'v'; 1 << 20]);
        for number in 0..4 {
            let request = put(&format!("big-{number}"), value.clone());
            let _: wire::PutResponse = client.call(method::kv::PUT, &request).await.unwrap();
        }
        let everything =
            wire::RangeRequest { key: "big-".into(), range_end: "big.".into(), ..Default::default() };
        let mut builder = h2::client::Builder::new();
        builder.initial_connection_window_size(16 << 20);
        let rude = Client::connect_with(ports.addresses[0], &builder).await;
        let mut held = Vec::new();
        for _ in 0..20 {
            let mut stream = rude.open(method::kv::RANGE, &[]).await;
            stream.send(&everything, true);
            held.push(stream);
        }
        for number in 0..50 {
            let request = put("small", number.to_string());
            let _: wire::PutResponse = client.call(method::kv::PUT, &request).await.unwrap();
        }
        // On the same connection too: a call has its own window.
        let count = wire::RangeRequest { count_only: true, ..everything };
        let answer: wire::RangeResponse = rude.call(method::kv::RANGE, &count).await.unwrap();
        assert_eq!(answer.count, 4);
    });
}

#[test]
fn stop_ends_streams_with_a_status_and_connections_with_goaway() {
    Ports::with_client(1, async |ports, client| {
        let mut stream = client.open(method::watch::WATCH, &[]).await;
        let create = wire::WatchCreateRequest { key: "k".into(), ..Default::default() };
        let request = wire::WatchRequest { request: Some(wire::WatchRequestKind::Create(create)) };
        stream.send(&request, false);
        let (_body, mut answer) = stream.talk().await;
        assert!(answer.next::<wire::WatchResponse>().await.unwrap().created);
        ports.shutdown.stop();
        assert_eq!(answer.next::<wire::WatchResponse>().await, None);
        assert_eq!(refusal(answer.end().await), "Unavailable: etcdserver: server stopped");
        // New calls are refused.
        let ready = client.send.clone().ready().await;
        let refused = match ready {
            Err(_) => true,
            Ok(mut send) => {
                let request = Request::post("http://moim/x").body(()).unwrap();
                match send.send_request(request, true) {
                    Err(_) => true,
                    Ok((response, _)) => response.await.is_err(),
                }
            }
        };
        assert!(refused);
    });
}

#[test]
fn message_in_many_chunks_is_assembled_and_an_abandoned_one_dropped() {
    Ports::with_client(1, async |_, client| {
        let frame = encode_frame(&put("k", vec![b'x'; 200_000]));
        let mut abandoned = client.open(method::kv::PUT, &[]).await;
        abandoned.body.send_data(frame.slice(..30_000), false).unwrap();
        let mut stream = client.open(method::kv::PUT, &[]).await;
        for piece in frame.chunks(7_001) {
            stream.body.send_data(Bytes::copy_from_slice(piece), false).unwrap();
            tokio::task::yield_now().await;
        }
        let mut answer = stream.answer().await.unwrap();
        assert_eq!(answer.next::<wire::PutResponse>().await.unwrap().header.unwrap().revision, 2);
        drop(abandoned);
        let get = wire::RangeRequest { key: "k".into(), ..Default::default() };
        let answer: wire::RangeResponse = client.call(method::kv::RANGE, &get).await.unwrap();
        assert_eq!(answer.kvs[0].value.len(), 200_000);
    });
}
