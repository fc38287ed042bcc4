//! Plain HTTP/1.1 on the same port.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

async fn ask(address: SocketAddr, request: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    // Slowly, so that what is spoken cannot be told from the first piece.
    let (first, rest) = request.split_at(request.len().min(2));
    socket.write_all(first.as_bytes()).await.unwrap();
    tokio::task::yield_now().await;
    socket.write_all(rest.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

#[test]
fn health_version_and_what_is_not_there() {
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
fn an_alarm_is_shown() {
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
