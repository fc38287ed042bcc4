//! Requests to other brokers, in the protocol clients use: markers of transactions, questions about them.
//!
//! A connection carries one request at a time and is kept for the next. Every request ends, with an answer or an error,
//! within `peer_timeout_ms`; at most [`MAX_IDLE`] connections to a broker are kept. After an error nobody knows whether the
//! other side has acted: what is asked here may be asked again.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use hashbrown::HashMap;
use tokio::net::TcpStream;

use moim_base::socket::{Socket, read_until, write_all};
use moim_cluster::BoxFuture;
use moim_wire_kafka::messages::{
    SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest, SaslHandshakeResponse,
};
use moim_wire_kafka::{ErrorCode, Message, RequestHeader, decode_response, encode_request};

use crate::brokers::LiveBroker;
use crate::loops::lock;
use crate::sasl::Users;

/// Idle connections kept to one broker.
const MAX_IDLE: usize = 8;
/// The largest answer.
const MAX_ANSWER: usize = 16 << 20;

/// Connects to other brokers.
pub trait Reach: Send + Sync + 'static {
    /// A new connection to where a broker says that it takes clients in.
    fn reach(&self, host: String, port: u16) -> BoxFuture<'_, io::Result<Box<dyn Socket>>>;
}

/// Over the network.
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
    /// The longest an answer may take.
    patience: Duration,
    reach: OnceLock<Arc<dyn Reach>>,
    idle: Mutex<HashMap<Address, Vec<Box<dyn Socket>>>>,
    correlation: AtomicI32,
}

impl Peers {
    pub(crate) fn new(users: Users, patience: Duration) -> Self {
        let (idle, correlation) = (Mutex::default(), AtomicI32::new(1));
        Self { users, patience, reach: OnceLock::new(), idle, correlation }
    }

    /// From now on by this way, if no other was taken before.
    pub(crate) fn reach_by(&self, reach: Arc<dyn Reach>) {
        let _ = self.reach.set(reach);
    }

    /// Asks a broker and waits for its answer.
    pub(crate) async fn call<Q: Message, S: Message>(
        &self,
        to: &LiveBroker,
        request: &Q,
        version: i16,
    ) -> Result<S, ErrorCode> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::debug!(broker = to.id.0, api = Q::KEY.name(), %error, "another broker gave no answer");
        };
        match tokio::time::timeout(self.patience, self.exchange(to, request, version)).await {
            Ok(Ok(answer)) => Ok(answer),
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
        let kept = lock(&self.idle).get_mut(&address).and_then(Vec::pop);
        if let Some(mut stream) = kept {
            // It may have been closed while nobody looked; then a new one is tried.
            if let Ok(answer) = self.ask(stream.as_mut(), request, version).await {
                self.keep(address, stream);
                return Ok(answer);
            }
        }
        let reach = self.reach.get_or_init(|| Arc::new(Tcp));
        let mut stream = reach.reach(to.host.clone(), to.port).await?;
        self.authenticate(stream.as_mut()).await?;
        let answer = self.ask(stream.as_mut(), request, version).await?;
        self.keep(address, stream);
        Ok(answer)
    }

    fn keep(&self, address: Address, stream: Box<dyn Socket>) {
        let mut idle = lock(&self.idle);
        let kept = idle.entry(address).or_default();
        if kept.len() < MAX_IDLE {
            kept.push(stream);
        }
    }

    /// Brokers of one cluster have the same users; this one comes as the first of them.
    async fn authenticate(&self, stream: &mut dyn Socket) -> io::Result<()> {
        let Some(token) = self.users.token() else { return Ok(()) };
        let refused = |code: i16| match code {
            0 => Ok(()),
            code => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("error {code}"))),
        };
        let handshake = SaslHandshakeRequest { mechanism: "PLAIN".into() };
        let answer: SaslHandshakeResponse = self.ask(stream, &handshake, 1).await?;
        refused(answer.error_code)?;
        let authenticate = SaslAuthenticateRequest { auth_bytes: token };
        let answer: SaslAuthenticateResponse = self.ask(stream, &authenticate, 2).await?;
        refused(answer.error_code)
    }

    async fn ask<Q: Message, S: Message>(
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
        let mut answer = BytesMut::new();
        read_until(stream, &mut answer, 4).await?;
        let size = usize::try_from(answer.get_i32()).ok().filter(|size| *size <= MAX_ANSWER);
        let size = size.ok_or_else(|| wrong("an answer of impossible size".into()))?;
        read_until(stream, &mut answer, size).await?;
        let (answered, response) =
            decode_response::<S>(answer.freeze(), version).map_err(|e| wrong(e.to_string()))?;
        if answered.correlation_id != correlation_id {
            return Err(wrong("an answer to another question".into()));
        }
        Ok(response)
    }
}
