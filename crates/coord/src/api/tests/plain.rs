//! Plain HTTP/1.1 on the same port.

use std::sync::Arc;

use moim_base::metrics::Metrics;
use moim_wire_grpc::{etcd as wire, method};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

async fn ask(address: SocketAddr, request: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    // Slowly, so that the protocol cannot be detected from the first bytes.
    let (first, rest) = request.split_at(request.len().min(2));
    socket.write_all(first.as_bytes()).await.unwrap();
    tokio::task::yield_now().await;
    socket.write_all(rest.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

#[test]
fn health_version_and_unknown_paths() {
    let ports = Ports::open(1);
    let cases = [
        ("GET /health HTTP/1.1", "200 OK", "{\"health\":\"true\",\"reason\":\"\"}"),
        ("GET /health?serializable=true HTTP/1.1", "200 OK", "{\"health\":\"true\",\"reason\":\"\"}"),
        ("GET /version HTTP/1.1", "200 OK", "{\"etcdserver\":\"3.5.21\",\"etcdcluster\":\"3.5.0\"}"),
        ("HEAD /version HTTP/1.1", "200 OK", ""),
        ("GET /livez HTTP/1.1", "200 OK", "ok\n"),
        ("GET /readyz HTTP/1.1", "200 OK", "ok\n"),
        ("GET /metrics HTTP/1.1", "404 Not Found", "no metrics are kept\n"),
        ("GET /v2/keys HTTP/1.1", "404 Not Found", "404 page not found\n"),
        ("POST /v3/kv/range HTTP/1.1", "405 Method Not Allowed", "only GET; the etcd API is gRPC\n"),
    ];
    ports.run(async {
        for (line, status, body) in cases {
            let answer = ask(ports.addresses[0], &format!("{line}\r\nhost: x\r\n\r\n")).await;
            let (head, found) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{line}: {answer}");
            assert_eq!(found, body, "{line}");
        }
        let endless = format!("GET /health HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(20_000));
        let mut socket = TcpStream::connect(ports.addresses[0]).await.unwrap();
        let _ = socket.write_all(endless.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer).await;
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 200"));
    });
}

#[test]
fn calls_and_connections_are_counted() {
    let ports = Ports::open(1);
    let metrics = Arc::new(Metrics::new());
    let options =
        EtcdOptions { metrics: Some(Arc::clone(&metrics)), max_connections: 2, ..Default::default() };
    let server = EtcdServer::bind(([127, 0, 0, 1], 0).into(), options).unwrap();
    let address = server.local_addr();
    let _serving = {
        let _there = ports.cluster.runtime(0).enter();
        server.serve(ports.cluster.node(0), &Scope::new(ports.shutdown.clone())).unwrap()
    };
    ports.run(async {
        let client = Client::connect(address).await;
        let put = wire::PutRequest { key: "k".into(), ..Default::default() };
        let _: wire::PutResponse = client.call(method::kv::PUT, &put).await.unwrap();
        let empty = client.call::<_, wire::PutResponse>(method::kv::PUT, &wire::PutRequest::default()).await;
        assert!(empty.is_err());
        let shown = ask(address, "GET /metrics HTTP/1.1\r\n\r\n").await;
        for line in [
            "moim_etcd_calls_total{method=\"Put\"} 2",
            "moim_etcd_failed_calls_total 1",
            "moim_etcd_connections 2",
        ] {
            assert!(shown.contains(line), "{line}: {shown}");
        }
        while !metrics.render().contains("moim_etcd_connections 1") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // One connection above the limit is closed at once.
        let second = Client::connect(address).await;
        let mut third = TcpStream::connect(address).await.unwrap();
        let mut rest = Vec::new();
        let _ = third.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
        let _: wire::PutResponse = second.call(method::kv::PUT, &put).await.unwrap();
        assert!(metrics.render().contains("moim_etcd_refused_connections_total 1"));
    });
}

#[test]
fn health_reports_an_alarm() {
    let ports = Ports::open(1);
    ports.run(async {
        let alarm = crate::Alarm { kind: crate::AlarmKind::NoSpace, member: 1 };
        ports.cluster.node(0).alarm_on(alarm).await.unwrap();
        let answer = ask(ports.addresses[0], "GET /health HTTP/1.1\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(answer.ends_with("{\"health\":\"false\",\"reason\":\"ALARM NOSPACE\"}"), "{answer}");
        let answer = ask(ports.addresses[0], "GET /health?exclude=NOSPACE HTTP/1.1\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    });
}
