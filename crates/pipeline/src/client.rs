//! A load client: sends lines to any gateway, keeps unacknowledged lines, and resends them on its next connection.
//!
//! The sequence number of a line is its position in the client's input, counted from 1, so a client that returns with
//! the same lines continues where it stopped. The client's identity (its incarnation, and lines typed by a user) is
//! on disk before anything is sent.

mod state;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::frame::{self, Frame, FrameError};
use crate::identity::{self, Claim, Secret};
use crate::latency::Latency;
use crate::store::{DIGEST, digest_of, digest_of_all};
use crate::tls::{ClientTls, Socket};

pub use self::state::{ClientState, StateError};

/// Read timeout: without a frame from the gateway for this long, the client tries another.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a rate-limited client checks whether it may send again.
const RATE_CHECK: Duration = Duration::from_millis(2);
/// Maximum bytes per write.
const CHUNK: usize = 64 << 10;

/// Settings of a load client.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Name of the client.
    pub client: String,
    /// Incarnation of the client; from [`ClientState::begin`].
    pub incarnation: u64,
    /// Addresses of the gateways; any of them may be used.
    pub gateways: Vec<SocketAddr>,
    /// The secret shared by clients and gateways.
    pub secret: Secret,
    /// TLS of the connection; plain text if none.
    pub tls: Option<ClientTls>,
    /// How long to retry without any acknowledgement; no limit if none.
    pub patience: Option<Duration>,
    /// Rate limit, in lines per second.
    pub rate: Option<f64>,
}

/// Progress of a client, for observers.
#[derive(Debug, Default)]
pub struct Sending {
    /// Lines written to a socket, resends included.
    pub written: AtomicU64,
    /// Lines acknowledged.
    pub acked: AtomicU64,
    /// Number of reconnects.
    pub reconnects: AtomicU64,
    /// True once gateways and client agree on the lines sent earlier.
    pub is_known: AtomicBool,
    /// Message latency, if it is measured.
    pub latency: OnceLock<Arc<Latency>>,
}

/// Why a client stopped.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// A gateway refused the client for a reason that every gateway would give.
    #[error("refused: {0}")]
    Refused(String),
    /// No gateway acknowledged anything within the patience.
    #[error("nothing was acknowledged for {} s: {last}", .waited.as_secs())]
    GaveUp {
        /// Time without an acknowledgement.
        waited: Duration,
        /// The last refusal or connection error.
        last: String,
    },
    /// Everything was relayed, but the count is blocked by a missing message.
    #[error("message {1} of {0} is missing in the queue: it and what follows it is not counted")]
    Missing(String, u64),
    /// The list of gateways is empty.
    #[error("no gateway was given")]
    NoGateway,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("{0}")]
    Refused(String),
    #[error("refused for good: {0}")]
    Final(String),
    #[error("message {0} is missing in the queue")]
    Missing(u64),
    #[error("silent")]
    Silent,
}

/// Sends all lines and returns once they are in the queue. Not cancel-safe, but lines that were sent are not lost:
/// the next incarnation of the client continues.
pub async fn send(
    options: &ClientOptions,
    lines: &[Bytes],
    sending: &Arc<Sending>,
) -> Result<(), ClientError> {
    if options.gateways.is_empty() {
        return Err(ClientError::NoGateway);
    }
    let mut at = usize::try_from(options.incarnation).unwrap_or(0) + options.client.len();
    let mut pause = Duration::from_millis(20);
    let mut progressed_at = Instant::now();
    loop {
        let before = sending.acked.load(Ordering::Relaxed);
        let error = match run_connection(
            options,
            options.gateways[at % options.gateways.len()],
            lines,
            sending,
        )
        .await
        {
            Ok(()) => return Ok(()),
            Err(ConnectionError::Final(reason)) => return Err(ClientError::Refused(reason)),
            Err(ConnectionError::Missing(sn)) => {
                return Err(ClientError::Missing(options.client.clone(), sn));
            }
            Err(error) => error,
        };
        tracing::debug!(client = options.client, error = %error, "gateway connection failed; trying another gateway");
        sending.reconnects.fetch_add(1, Ordering::Relaxed);
        at += 1;
        let has_progressed = sending.acked.load(Ordering::Relaxed) > before;
        if has_progressed {
            progressed_at = Instant::now();
        }
        let waited = progressed_at.elapsed();
        if options.patience.is_some_and(|patience| waited >= patience) {
            return Err(ClientError::GaveUp { waited, last: error.to_string() });
        }
        pause =
            if has_progressed { Duration::from_millis(20) } else { (pause * 2).min(Duration::from_secs(1)) };
        // Jitter, so that many clients do not reconnect at the same time.
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
    }
}

async fn connect(options: &ClientOptions, gateway: SocketAddr) -> std::io::Result<Socket> {
    let stream = TcpStream::connect(gateway).await?;
    stream.set_nodelay(true)?;
    match &options.tls {
        None => Ok(Socket::Plain(stream)),
        Some(tls) => tls.connect(gateway, stream).await,
    }
}

async fn run_connection(
    options: &ClientOptions,
    gateway: SocketAddr,
    lines: &[Bytes],
    sending: &Sending,
) -> Result<(), ConnectionError> {
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, connect(options, gateway))
        .await
        .map_err(|_| ConnectionError::Silent)??;
    let mut run_connection = Connection {
        stream,
        input: BytesMut::new(),
        output: BytesMut::new(),
        lines,
        sending,
        acked: 0,
        next: 1,
        window: 0,
        beyond: BTreeSet::new(),
        bye_sent: false,
        client: &options.client,
        rate_limit: options.rate.map(|rate| RateLimit { rate, since: Instant::now(), from: 0 }),
    };
    run_connection.handshake(options).await?;
    run_connection.run().await
}

/// Writes the buffered output, or flushes if it is empty; returns whether a flush is still due. Cancel-safe.
async fn push(writer: &mut (impl AsyncWrite + Unpin), output: &mut BytesMut) -> std::io::Result<bool> {
    if output.is_empty() {
        writer.flush().await?;
        return Ok(false);
    }
    writer.write_buf(output).await?;
    Ok(true)
}

fn digest_of_lines(lines: &[Bytes]) -> [u8; DIGEST] {
    let digests: Vec<_> = lines.iter().map(|line| digest_of(line)).collect();
    digest_of_all(&digests)
}

struct Connection<'a> {
    stream: Socket,
    input: BytesMut,
    output: BytesMut,
    lines: &'a [Bytes],
    sending: &'a Sending,
    acked: u64,
    next: u64,
    window: u64,
    beyond: BTreeSet<u64>,
    bye_sent: bool,
    client: &'a str,
    rate_limit: Option<RateLimit>,
}

/// Rate limit of a client.
struct RateLimit {
    rate: f64,
    since: Instant,
    /// Sequence number acknowledged at `since`.
    from: u64,
}

impl RateLimit {
    /// The last line that the rate limit allows by now.
    fn allowed(&self) -> u64 {
        self.from + (self.since.elapsed().as_secs_f64() * self.rate) as u64
    }
}

impl Connection<'_> {
    async fn frame(&mut self) -> Result<Frame, ConnectionError> {
        loop {
            if let Some(frame) = frame::decode(&mut self.input)? {
                return match frame {
                    Frame::Refused { retry: false, reason } => Err(ConnectionError::Final(reason)),
                    Frame::Refused { retry: true, reason } => Err(ConnectionError::Refused(reason)),
                    frame => Ok(frame),
                };
            }
            let read = tokio::time::timeout(READ_TIMEOUT, self.stream.read_buf(&mut self.input));
            if read.await.map_err(|_| ConnectionError::Silent)?? == 0 {
                return Err(ConnectionError::Refused("the gateway closed the connection".into()));
            }
        }
    }

    async fn send_frame(&mut self, frame: &Frame) -> Result<(), ConnectionError> {
        frame::encode(frame, &mut self.output);
        self.stream.write_all_buf(&mut self.output).await?;
        Ok(self.stream.flush().await?)
    }

    async fn handshake(&mut self, options: &ClientOptions) -> Result<(), ConnectionError> {
        let (client, incarnation) = (options.client.clone(), options.incarnation);
        let nonce = identity::random()?;
        self.send_frame(&Frame::Hello { client, incarnation, nonce }).await?;
        let Frame::Challenge { nonce: challenge } = self.frame().await? else {
            return Err(ConnectionError::Refused("no challenge".into()));
        };
        let claim =
            Claim { client: &options.client, incarnation, client_nonce: &nonce, gateway_nonce: &challenge };
        self.send_frame(&Frame::Proof { mac: options.secret.prove(&claim) }).await?;
        let Frame::Welcome { acked, window } = self.frame().await? else {
            return Err(ConnectionError::Refused("no welcome".into()));
        };
        if acked > self.lines.len() as u64 {
            return Err(ConnectionError::Final(format!(
                "{acked} messages of {} are known already, and there are {} to send: is it another run's name?",
                options.client,
                self.lines.len()
            )));
        }
        self.on_ack(acked, window, Vec::new());
        self.next = acked + 1;
        if acked > 0 && !self.sending.is_known.load(Ordering::Relaxed) {
            let digest = digest_of_lines(&self.lines[..acked as usize]);
            frame::encode(&Frame::Check { upto: acked, digest }, &mut self.output);
        }
        if let Some(rate_limit) = &mut self.rate_limit {
            (rate_limit.since, rate_limit.from) = (Instant::now(), acked);
        }
        Ok(())
    }

    fn on_ack(&mut self, acked: u64, window: u32, beyond: Vec<u64>) {
        self.acked = self.acked.max(acked);
        self.window = u64::from(window);
        self.beyond.extend(beyond);
        self.beyond = self.beyond.split_off(&(self.acked + 1));
        self.sending.acked.fetch_max(self.acked, Ordering::Relaxed);
    }

    /// Encodes lines into the output, as many as the window allows.
    fn fill(&mut self) {
        let last = self.lines.len() as u64;
        let until =
            self.rate_limit.as_ref().map_or(last, RateLimit::allowed).min(last).min(self.acked + self.window);
        let (first, mut written) = (self.next, 0);
        while self.output.len() < CHUNK && self.next <= until {
            let sn = self.next;
            self.next += 1;
            // Acknowledged lines beyond a gap are rare.
            if !self.beyond.is_empty() && self.beyond.contains(&sn) {
                continue;
            }
            frame::encode_data(sn, &self.lines[sn as usize - 1], &mut self.output);
            written += 1;
        }
        if written > 0 {
            self.sending.written.fetch_add(written, Ordering::Relaxed);
            if let Some(latency) = self.sending.latency.get() {
                latency.on_sent(self.client, first..self.next);
            }
        }
        if self.next > last && !self.bye_sent && self.output.len() < CHUNK {
            self.bye_sent = true;
            let digest = Some(digest_of_lines(self.lines));
            frame::encode(&Frame::Bye { sent: last, digest }, &mut self.output);
        }
    }

    async fn run(&mut self) -> Result<(), ConnectionError> {
        let mut last_frame_at = Instant::now();
        let mut unflushed = false;
        loop {
            self.fill();
            while let Some(frame) = frame::decode(&mut self.input)? {
                last_frame_at = Instant::now();
                match frame {
                    Frame::Ack { acked, window, beyond } => self.on_ack(acked, window, beyond),
                    Frame::Done { missing: 0 } => {
                        self.sending.is_known.store(true, Ordering::Relaxed);
                        return Ok(());
                    }
                    Frame::Done { missing } => return Err(ConnectionError::Missing(missing)),
                    Frame::Refused { retry: false, reason } => return Err(ConnectionError::Final(reason)),
                    Frame::Refused { retry: true, reason } => return Err(ConnectionError::Refused(reason)),
                    _ => return Err(ConnectionError::Refused("an unexpected frame".into())),
                }
                self.fill();
            }
            let (mut reader, mut writer) = tokio::io::split(&mut self.stream);
            tokio::select! {
                read = reader.read_buf(&mut self.input) => {
                    if read? == 0 {
                        return Err(ConnectionError::Refused("the gateway closed the connection".into()));
                    }
                }
                written = push(&mut writer, &mut self.output), if unflushed || !self.output.is_empty() => {
                    unflushed = written?;
                }
                () = tokio::time::sleep(RATE_CHECK), if self.rate_limit.is_some() && !self.bye_sent => {}
                // Once everything is acknowledged, the queue may take its time; before that, silence is a fault.
                () = tokio::time::sleep_until(last_frame_at + READ_TIMEOUT), if self.acked < self.lines.len() as u64 => {
                    return Err(ConnectionError::Silent);
                }
            }
        }
    }
}
