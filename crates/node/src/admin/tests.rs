//! The admin port over HTTP.

use super::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

fn admin() -> Arc<Admin> {
    let facts = NodeFacts {
        node_id: 7,
        cluster_id: "c".into(),
        incarnation: 1,
        version: "v".into(),
        zone: None,
        pid: 1,
        started_at_ms: 5,
    };
    Arc::new(Admin {
        readiness: Readiness::not_ready_because("recovering"),
        metrics: Arc::new(Metrics::new()),
        facts: Mutex::new(facts),
        cluster: OnceLock::new(),
        slots: OnceLock::new(),
        listeners: Mutex::default(),
    })
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn liveness_does_not_depend_on_readiness() {
    let admin = admin();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let scope = Scope::new(Shutdown::new());
    serve(listener, admin.clone(), 8, &scope);

    assert_eq!(get(address, "/livez").await, (200, "ok\n".into()));
    assert_eq!(get(address, "/readyz").await, (503, "not ready: recovering\n".into()));
    admin.readiness.ready();
    assert_eq!(get(address, "/readyz").await, (200, "ready\n".into()));
    admin.readiness.not_ready("stopping");
    assert_eq!(get(address, "/readyz").await.0, 503);

    let (status, body) = get(address, "/api/v1/node").await;
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["node_id"], &body["ready"]), (200, &7.into(), &false.into()));
    assert_eq!(
        body["listeners"],
        serde_json::json!({"kafka": null, "redis": null, "etcd": null, "admin": null, "peer": null})
    );
    assert_eq!(body["zone"], serde_json::Value::Null);

    assert_eq!(get(address, "/api/v1/cluster").await.0, 503, "not in a cluster yet");
    admin.readiness.ready();
    admin.readiness.set_failing("quorum", "no quorum");
    assert_eq!(get(address, "/readyz").await, (503, "not ready: no quorum\n".into()));
    admin.readiness.clear_failing("quorum");
    assert_eq!(get(address, "/readyz").await.0, 200);

    assert!(get(address, "/").await.1.contains("/metrics"));
    assert_eq!(get(address, "/nothing").await.0, 404);
    let (status, body) = get(address, "/metrics").await;
    assert_eq!((status, body.trim()), (200, "# EOF"));
}
