//! Client commands against addresses where no Kafka server is, or one that misbehaves.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use crate::support::moim;

/// Answers every connection with `behave` until the test's process ends; gives its address.
fn stranger(behave: impl Fn(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || listener.incoming().flatten().for_each(behave));
    address
}

#[test]
fn nobody_there_is_unreachable_and_says_what_to_do() {
    // Bound and dropped: nobody listens there now.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let done = moim(&["topic", "list", "--kafka", &address]);
    assert_eq!(done.status, 4, "{done:?}");
    assert!(done.stderr.contains(&format!("cannot reach {address}: connection refused")), "{done:?}");
    assert!(done.stderr.contains("is `moim serve` running?"), "{done:?}");
    assert_eq!(done.stdout, "");
}

#[test]
fn a_server_that_hangs_up_is_unreachable() {
    let address = stranger(drop);
    let done = moim(&["group", "list", "--kafka", &address]);
    assert_eq!(done.status, 4, "{done:?}");
}

#[test]
fn a_server_that_never_answers_is_a_timeout() {
    let held = std::sync::Mutex::new(Vec::new());
    let address = stranger(move |stream| held.lock().unwrap().push(stream));
    let done = moim(&["topic", "list", "--kafka", &address, "--timeout", "200ms"]);
    assert_eq!(done.status, 6, "{done:?}");
    assert!(done.stderr.contains("--timeout"), "{done:?}");
}

#[test]
fn a_server_of_another_kind_is_named_as_such() {
    let address = stranger(|mut stream| {
        let _ = stream.read(&mut [0; 64]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let done = moim(&["topic", "list", "--kafka", &address]);
    assert!(done.stderr.contains("absurd length"), "{done:?}");

    let address = stranger(|mut stream| {
        let _ = stream.read(&mut [0; 64]);
        let _ = stream.write_all(&[0, 0, 0, 6, 0, 0, 0, 1, 0xff, 0xff]);
    });
    let done = moim(&["topic", "list", "--kafka", &address]);
    assert!(done.stderr.contains("does not answer like a Kafka server"), "{done:?}");
    assert_eq!(done.status, 1, "{done:?}");
}

#[test]
fn wrong_words_never_reach_a_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    for (args, wanted) in [
        (&["topic", "delete", "x"][..], "add --yes to do it"),
        (&["group", "delete", "x"], "add --yes to do it"),
        (&["topic", "consume", "x", "--offset", "soon"], "`soon` is not a place"),
        (&["topic", "consume", "x", "-f", "%q"], "unknown field %q"),
        (&["topic", "consume", "x", "-f", "%v", "-o", "json"], "choose one"),
        (&["topic", "produce", "x", "-z", "brotli"], "must be none, gzip, snappy, lz4 or zstd"),
        (&["topic", "produce", "x", "-f", "%k%v"], "two fields need something between them"),
        (&["group", "seek", "x", "--to", "soon"], "`soon` is not a place"),
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
