//! Requests to other brokers over the Kafka protocol: WriteTxnMarkers and AddPartitionsToTxn.
//!
//! A connection carries one request at a time and is reused. Every request ends, with a response or an error, within
//! `peer_timeout_ms`; at most [`MAX_IDLE`] idle connections to a broker are kept. After an error the outcome is
//! unknown: every request sent here must be safe to repeat.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use hashbrown::HashMap;
use tokio::net::TcpStream;

use moim_base::socket::{Socket, read_until, write_all};
use moim_state::BoxFuture;
use moim_wire_kafka::messages::{
    SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest, SaslHandshakeResponse,
};
use moim_wire_kafka::{ErrorCode, Message, RequestHeader, decode_response, encode_request};

use crate::brokers::LiveBroker;
use crate::loops::lock;
use crate::sasl::Users;

/// Maximum number of idle connections to one broker.
const MAX_IDLE: usize = 8;
/// Maximum response size.
const MAX_RESPONSE: usize = 16 << 20;

/// Connects to other brokers.
pub trait Reach: Send + Sync + 'static {
    /// Opens a connection to a broker's advertised address.
    fn reach(&self, host: String, port: u16) -> BoxFuture<'_, io::Result<Box<dyn Socket>>>;
}

/// Connects over TCP.
struct Tcp;

impl Reach for Tcp {
    fn reach(&self, host: String, port: u16) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Socket>)
        })
    }
}

/// Host and port.
type Address = (String, u16);

/// Connections to the other brokers.
pub(crate) struct Peers {
    users: Users,
    /// Timeout of a request.
    timeout: Duration,
    reach: OnceLock<Arc<dyn Reach>>,
    idle: Mutex<HashMap<Address, Vec<Box<dyn Socket>>>>,
    correlation: AtomicI32,
}

impl Peers {
    pub(crate) fn new(users: Users, timeout: Duration) -> Self {
        let (idle, correlation) = (Mutex::default(), AtomicI32::new(1));
        Self { users, timeout, reach: OnceLock::new(), idle, correlation }
    }

    /// Replaces TCP by `reach`; the first call wins.
    pub(crate) fn reach_by(&self, reach: Arc<dyn Reach>) {
        let _ = self.reach.set(reach);
    }

    /// Sends a request to a broker and waits for its response.
    pub(crate) async fn call<Q: Message, S: Message>(
        &self,
        to: &LiveBroker,
        request: &Q,
        version: i16,
    ) -> Result<S, ErrorCode> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::debug!(broker = to.id.0, api = Q::KEY.name(), %error, "request to peer broker failed");
        };
        match tokio::time::timeout(self.timeout, self.exchange(to, request, version)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => {
                failed(&error);
                Err(ErrorCode::NetworkException)
            }
            Err(elapsed) => {
                failed(&elapsed);
                Err(ErrorCode::RequestTimedOut)
            }
        }
    }

    async fn exchange<Q: Message, S: Message>(
        &self,
        to: &LiveBroker,
        request: &Q,
        version: i16,
    ) -> io::Result<S> {
        let address = (to.host.clone(), to.port);
        let idle_stream = lock(&self.idle).get_mut(&address).and_then(Vec::pop);
        if let Some(mut stream) = idle_stream {
            // An idle connection may have been closed by the peer; then a new one is opened.
            if let Ok(response) = self.send_request(stream.as_mut(), request, version).await {
                self.return_idle(address, stream);
                return Ok(response);
            }
        }
        let reach = self.reach.get_or_init(|| Arc::new(Tcp));
        let mut stream = reach.reach(to.host.clone(), to.port).await?;
        self.authenticate(stream.as_mut()).await?;
        let response = self.send_request(stream.as_mut(), request, version).await?;
        self.return_idle(address, stream);
        Ok(response)
    }

    fn return_idle(&self, address: Address, stream: Box<dyn Socket>) {
        let mut idle = lock(&self.idle);
        let idle_stream = idle.entry(address).or_default();
        if idle_stream.len() < MAX_IDLE {
            idle_stream.push(stream);
        }
    }

    /// Authenticates as the first user: all brokers of a cluster have the same users.
    async fn authenticate(&self, stream: &mut dyn Socket) -> io::Result<()> {
        let Some(token) = self.users.token() else { return Ok(()) };
        let refused = |code: i16| match code {
            0 => Ok(()),
            code => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("error {code}"))),
        };
        let handshake = SaslHandshakeRequest { mechanism: "PLAIN".into() };
        let response: SaslHandshakeResponse = self.send_request(stream, &handshake, 1).await?;
        refused(response.error_code)?;
        let authenticate = SaslAuthenticateRequest { auth_bytes: token };
        let response: SaslAuthenticateResponse = self.send_request(stream, &authenticate, 2).await?;
        refused(response.error_code)
    }

    async fn send_request<Q: Message, S: Message>(
        &self,
        stream: &mut dyn Socket,
        request: &Q,
        version: i16,
    ) -> io::Result<S> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let correlation_id = self.correlation.fetch_add(1, Ordering::Relaxed);
        let header = RequestHeader {
            api_key: Q::KEY as i16,
            api_version: version,
            correlation_id,
            client_id: Some("moim-broker".into()),
        };
        let frame = encode_request(&header, request).map_err(|e| wrong(e.to_string()))?;
        write_all(stream, &frame).await?;
        let mut response = BytesMut::new();
        read_until(stream, &mut response, 4).await?;
        let size = usize::try_from(response.get_i32()).ok().filter(|size| *size <= MAX_RESPONSE);
        let size = size.ok_or_else(|| wrong("response size out of range".into()))?;
        read_until(stream, &mut response, size).await?;
        let (answered, response) =
            decode_response::<S>(response.freeze(), version).map_err(|e| wrong(e.to_string()))?;
        if answered.correlation_id != correlation_id {
            return Err(wrong("correlation id mismatch".into()));
        }
        Ok(response)
    }
}
