//! Client commands against an address without a Kafka server, or with a misbehaving one.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use crate::support::moim;

/// A server that handles every connection with `behave`, until the test process exits. Returns its address.
fn bad_server(behave: impl Fn(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || listener.incoming().flatten().for_each(behave));
    address
}

#[test]
fn refused_connection_is_unreachable_with_a_hint() {
    // Bound and dropped, so connections are refused.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let done = moim(&["topic", "list", "--kafka", &address]);
    assert_eq!(done.status, 4, "{done:?}");
    assert!(done.stderr.contains(&format!("cannot reach {address}: connection refused")), "{done:?}");
    assert!(done.stderr.contains("is `moim serve` running?"), "{done:?}");
    assert_eq!(done.stdout, "");
}

#[test]
fn server_that_closes_the_connection_is_unreachable() {
    let address = bad_server(drop);
    let done = moim(&["group", "list", "--kafka", &address]);
    assert_eq!(done.status, 4, "{done:?}");
}

#[test]
fn server_without_a_response_is_a_timeout() {
    let held = std::sync::Mutex::new(Vec::new());
    let address = bad_server(move |stream| held.lock().unwrap().push(stream));
    let done = moim(&["topic", "list", "--kafka", &address, "--timeout", "200ms"]);
    assert_eq!(done.status, 6, "{done:?}");
    assert!(done.stderr.contains("--timeout"), "{done:?}");
}

#[test]
fn server_of_another_protocol_is_reported() {
    let address = bad_server(|mut stream| {
        let _ = stream.read(&mut [0; 64]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let done = moim(&["topic", "list", "--kafka", &address]);
    assert!(done.stderr.contains("absurd length"), "{done:?}");

    let address = bad_server(|mut stream| {
        let _ = stream.read(&mut [0; 64]);
        let _ = stream.write_all(&[0, 0, 0, 6, 0, 0, 0, 1, 0xff, 0xff]);
    });
    let done = moim(&["topic", "list", "--kafka", &address]);
    assert!(done.stderr.contains("does not answer like a Kafka server"), "{done:?}");
    assert_eq!(done.status, 1, "{done:?}");
}

#[test]
fn invalid_arguments_are_rejected_before_a_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    for (args, wanted) in [
        (&["topic", "delete", "x"][..], "add --yes to do it"),
        (&["group", "delete", "x"], "add --yes to do it"),
        (&["topic", "consume", "x", "--offset", "soon"], "`soon` is not an offset position"),
        (&["topic", "consume", "x", "-f", "%q"], "unknown field %q"),
        (&["topic", "consume", "x", "-f", "%v", "-o", "json"], "choose one"),
        (&["topic", "produce", "x", "-z", "brotli"], "must be none, gzip, snappy, lz4 or zstd"),
        (&["topic", "produce", "x", "-f", "%k%v"], "two fields need something between them"),
        (&["group", "seek", "x", "--to", "soon"], "`soon` is not an offset position"),
        (&["topic", "alter", "x"], "--config"),
        (&["topic", "create", "x", "-p", "0"], "0 is not in"),
        (&["topic", "list", "--kafka", "nowhere"], "--kafka: `nowhere` is not HOST:PORT"),
    ] {
        let kafka = if args.contains(&"--kafka") { &[][..] } else { &["--kafka", address.as_str()] };
        let done = moim(&[args, kafka].concat());
        assert_eq!(done.status, 2, "{args:?} {done:?}");
        assert!(done.stderr.contains(wanted), "{args:?} {done:?}");
        assert_eq!(done.stdout, "");
        assert_eq!(
            listener.accept().unwrap_err().kind(),
            std::io::ErrorKind::WouldBlock,
            "{args:?} connected"
        );
    }
}
