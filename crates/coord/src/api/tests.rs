//! The etcd port against a raw HTTP/2 client: a test can send what a client library would not.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, StatusCode};
use moim_base::task::{Scope, Shutdown};
use moim_wire_grpc::{Code, FrameReader, Message, Status, encode_frame, status as grpc_status};
use tokio::net::TcpStream;

use super::{EtcdOptions, EtcdServer, Serving};
use crate::engine::CoordinatorOptions;
use crate::testing::TestCluster;

mod concurrency;
mod kv;
mod memory;
mod plain;
mod transport;
mod watch;

/// A cluster with an etcd port on each node.
struct Ports {
    cluster: TestCluster,
    addresses: Vec<SocketAddr>,
    shutdown: Shutdown,
    serving: Vec<Serving>,
}

impl Ports {
    fn open(nodes: usize) -> Self {
        Self::open_with(nodes, &EtcdOptions::default())
    }

    fn open_with(nodes: usize, options: &EtcdOptions) -> Self {
        let cluster = TestCluster::start(nodes, |options: &mut CoordinatorOptions| {
            options.progress_interval = Duration::from_millis(200);
        });
        cluster.settle();
        let shutdown = Shutdown::new();
        let scope = Scope::new(shutdown.clone());
        let opened = (0..nodes).map(|at| {
            let server = EtcdServer::bind(([127, 0, 0, 1], 0).into(), options.clone()).unwrap();
            let address = server.local_addr();
            let _there = cluster.runtime(at).enter();
            (address, server.serve(cluster.node(at), &scope).unwrap())
        });
        let (addresses, serving) = opened.unzip();
        Self { cluster, addresses, shutdown, serving }
    }

    /// Runs a test with a client of the first node.
    fn with_client<T>(nodes: usize, test: impl AsyncFnOnce(&Ports, Client) -> T) -> T {
        Self::with_options(nodes, &EtcdOptions::default(), test)
    }

    fn with_options<T>(
        nodes: usize,
        options: &EtcdOptions,
        test: impl AsyncFnOnce(&Ports, Client) -> T,
    ) -> T {
        let mut ports = Self::open_with(nodes, options);
        let outcome = ports.run(async {
            let client = Client::connect(ports.addresses[0]).await;
            test(&ports, client).await
        });
        ports.shutdown.stop();
        let serving = std::mem::take(&mut ports.serving);
        ports.run(async {
            for node in serving {
                node.ended().await;
            }
        });
        outcome
    }

    fn run<F: Future>(&self, test: F) -> F::Output {
        self.cluster.wait(test)
    }
}

/// An HTTP/2 connection.
#[derive(Clone)]
struct Client {
    send: SendRequest<Bytes>,
}

/// A call of which only the headers were sent.
struct Stream {
    body: SendStream<Bytes>,
    response: h2::client::ResponseFuture,
}

/// The response of a call in progress.
struct Answer {
    stream: RecvStream,
    frames: FrameReader,
}

impl Client {
    async fn connect(address: SocketAddr) -> Self {
        let mut builder = h2::client::Builder::new();
        // Hundreds of small responses may arrive at once.
        builder.data_frame_budget(1 << 20);
        // A stream that is not read must not block the others.
        builder.initial_connection_window_size(16 << 20);
        Self::connect_with(address, &builder).await
    }

    async fn connect_with(address: SocketAddr, builder: &h2::client::Builder) -> Self {
        let socket = TcpStream::connect(address).await.unwrap();
        let (send, connection) = builder.handshake(socket).await.unwrap();
        Scope::new(Shutdown::new()).spawn("client", async {
            let _ = connection.await;
        });
        Self { send }
    }

    /// Opens a call with the usual headers and additional ones.
    async fn open(&self, path: &str, others: &[(&str, &str)]) -> Stream {
        let mut request = Request::post(format!("http://moim{path}"));
        if !others.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/grpc");
        }
        for (name, value) in others {
            request = request.header(*name, *value);
        }
        let mut send = self.send.clone().ready().await.unwrap();
        let (response, body) = send.send_request(request.body(()).unwrap(), false).unwrap();
        Stream { body, response }
    }

    /// A unary call.
    async fn call<M: Message, A: Message + Default>(&self, path: &str, message: &M) -> Result<A, Status> {
        self.call_with(path, &[], message).await
    }

    async fn call_with<M: Message, A: Message + Default>(
        &self,
        path: &str,
        others: &[(&str, &str)],
        message: &M,
    ) -> Result<A, Status> {
        let mut stream = self.open(path, others).await;
        stream.send(message, true);
        let mut answer = stream.answer().await?;
        let message = answer.next().await;
        answer.end().await.map(|()| message.expect("a call that went well has an answer"))
    }

    /// Sends raw bytes; returns the HTTP status and the gRPC status.
    async fn raw(&self, path: &str, others: &[(&str, &str)], bytes: Vec<u8>) -> (StatusCode, Status) {
        let mut stream = self.open(path, others).await;
        stream.body.send_data(bytes.into(), true).unwrap();
        let response = stream.response.await.unwrap();
        let http_status = response.status();
        let headers = response.headers().clone();
        if let Some(status) = status_of(&headers) {
            return (http_status, status);
        }
        let mut body = response.into_body();
        while let Some(piece) = body.data().await {
            let _ = body.flow_control().release_capacity(piece.unwrap().len());
        }
        let trailers = body.trailers().await.unwrap().unwrap();
        (http_status, status_of(&trailers).unwrap())
    }
}

impl Stream {
    fn send<M: Message>(&mut self, message: &M, is_last: bool) {
        self.body.send_data(encode_frame(message), is_last).unwrap();
    }

    /// Waits for the response headers.
    async fn answer(self) -> Result<Answer, Status> {
        let response = self.response.await.expect("the connection stays");
        if let Some(status) = status_of(response.headers()) {
            return Err(status);
        }
        Ok(Answer { stream: response.into_body(), frames: FrameReader::new(64 << 20) })
    }

    /// Splits off the request side, for calls that continue to send.
    async fn talk(self) -> (SendStream<Bytes>, Answer) {
        let Self { body, response } = self;
        let response = response.await.expect("the connection stays");
        assert_eq!(status_of(response.headers()), None);
        (body, Answer { stream: response.into_body(), frames: FrameReader::new(64 << 20) })
    }
}

impl Answer {
    /// The next message; `None` at the end.
    async fn next<M: Message + Default>(&mut self) -> Option<M> {
        loop {
            if let Some(frame) = self.frames.next_frame().unwrap() {
                return Some(moim_wire_grpc::decode(frame).unwrap());
            }
            let piece = self.stream.data().await?.unwrap();
            let _ = self.stream.flow_control().release_capacity(piece.len());
            self.frames.push(piece);
        }
    }

    /// The status of the call.
    async fn end(mut self) -> Result<(), Status> {
        while let Some(piece) = self.stream.data().await {
            let _ = self.stream.flow_control().release_capacity(piece.unwrap().len());
        }
        let trailers = self.stream.trailers().await.unwrap().expect("a call ends with trailers");
        match status_of(&trailers).expect("trailers have a status") {
            status if status.code == Code::Ok => Ok(()),
            status => Err(status),
        }
    }
}

fn status_of(headers: &HeaderMap) -> Option<Status> {
    let code = Code::from_header(headers.get("grpc-status")?.as_bytes());
    let text = headers.get("grpc-message").map_or(&b""[..], |value| value.as_bytes());
    Some(Status::new(code, grpc_status::decode_message(text)))
}

/// A refusal as `code: text`.
fn refusal<T: std::fmt::Debug>(outcome: Result<T, Status>) -> String {
    let status = outcome.expect_err("a refusal");
    format!("{:?}: {}", status.code, status.message)
}
