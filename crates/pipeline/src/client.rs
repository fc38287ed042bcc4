//! A load client: sends lines to any gateway, keeps what is not acknowledged, and sends it again wherever it connects next.
//!
//! A line's sequence number is its place in what the client sends, counted from 1, so a client that comes back with the
//! same lines goes on where it was. What makes it *this* client (its incarnation, and lines typed by a person) is on
//! disk before anything is sent.

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

/// No word from a gateway for so long: try another.
const SILENCE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(3);
/// How often a client that is held back looks whether it may send again.
const PACE: Duration = Duration::from_millis(2);
/// At most so much is written at once.
const CHUNK: usize = 64 << 10;

/// Who sends, and where to.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Its name.
    pub client: String,
    /// Which of its lives; from [`ClientState::begin`].
    pub incarnation: u64,
    /// Gateways, any of which will do.
    pub gateways: Vec<SocketAddr>,
    /// What clients and gateways share.
    pub secret: Secret,
    /// How gateways are spoken to in secret; none is in the clear.
    pub tls: Option<ClientTls>,
    /// How long to go on trying while nothing is acknowledged; none is for ever.
    pub patience: Option<Duration>,
    /// At most so many lines a second.
    pub rate: Option<f64>,
}

/// How far a client has got, for whoever watches.
#[derive(Debug, Default)]
pub struct Sending {
    /// Lines written to a socket, repeats included.
    pub written: AtomicU64,
    /// Lines that are safe.
    pub acked: AtomicU64,
    /// How often it had to connect again.
    pub reconnects: AtomicU64,
    /// Whether gateways and client agree on what was sent before.
    pub is_known: AtomicBool,
    /// How long messages take, where somebody measures it.
    pub latency: OnceLock<Arc<Latency>>,
}

/// Why a client gave up.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// A gateway said no, and another would say the same.
    #[error("refused: {0}")]
    Refused(String),
    /// No gateway has taken anything for as long as was to be waited.
    #[error("nothing was acknowledged for {} s: {last}", .waited.as_secs())]
    GaveUp {
        /// How long.
        waited: Duration,
        /// What the last gateway said, or what came in the way.
        last: String,
    },
    /// Everything went into the queue, and not everything can be counted.
    #[error("message {1} of {0} is missing in the queue: it and what follows it is not counted")]
    Missing(String, u64),
    /// There is no gateway to try.
    #[error("no gateway was given")]
    NoGateway,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Broken {
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

/// Sends all lines and returns once the queue has them. Not cancel-safe, but whatever was sent is not lost: the next life
/// of the client goes on.
pub async fn send(
    options: &ClientOptions,
    lines: &[Bytes],
    watched: &Arc<Sending>,
) -> Result<(), ClientError> {
    if options.gateways.is_empty() {
        return Err(ClientError::NoGateway);
    }
    let mut at = usize::try_from(options.incarnation).unwrap_or(0) + options.client.len();
    let mut pause = Duration::from_millis(20);
    let mut moved_at = Instant::now();
    loop {
        let before = watched.acked.load(Ordering::Relaxed);
        let broken = match talk(options, options.gateways[at % options.gateways.len()], lines, watched).await
        {
            Ok(()) => return Ok(()),
            Err(Broken::Final(reason)) => return Err(ClientError::Refused(reason)),
            Err(Broken::Missing(sn)) => return Err(ClientError::Missing(options.client.clone(), sn)),
            Err(error) => error,
        };
        tracing::debug!(client = options.client, error = %broken, "trying another gateway");
        watched.reconnects.fetch_add(1, Ordering::Relaxed);
        at += 1;
        let moved = watched.acked.load(Ordering::Relaxed) > before;
        if moved {
            moved_at = Instant::now();
        }
        let waited = moved_at.elapsed();
        if options.patience.is_some_and(|patience| waited >= patience) {
            return Err(ClientError::GaveUp { waited, last: broken.to_string() });
        }
        pause = if moved { Duration::from_millis(20) } else { (pause * 2).min(Duration::from_secs(1)) };
        // A little of chance, so that many clients do not come back together.
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

async fn talk(
    options: &ClientOptions,
    gateway: SocketAddr,
    lines: &[Bytes],
    watched: &Sending,
) -> Result<(), Broken> {
    let stream =
        tokio::time::timeout(CONNECT, connect(options, gateway)).await.map_err(|_| Broken::Silent)??;
    let mut talk = Talk {
        stream,
        input: BytesMut::new(),
        output: BytesMut::new(),
        lines,
        watched,
        acked: 0,
        next: 1,
        window: 0,
        beyond: BTreeSet::new(),
        said_bye: false,
        client: &options.client,
        pace: options.rate.map(|rate| Pace { rate, since: Instant::now(), from: 0 }),
    };
    talk.greet(options).await?;
    talk.run().await
}

/// Writes what there is, or flushes when there is nothing; says whether to come again. Cancel-safe.
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

struct Talk<'a> {
    stream: Socket,
    input: BytesMut,
    output: BytesMut,
    lines: &'a [Bytes],
    watched: &'a Sending,
    acked: u64,
    next: u64,
    window: u64,
    beyond: BTreeSet<u64>,
    said_bye: bool,
    client: &'a str,
    pace: Option<Pace>,
}

/// A client that is not to send as fast as it can.
struct Pace {
    rate: f64,
    since: Instant,
    /// What had been acknowledged by then.
    from: u64,
}

impl Pace {
    /// The last line that may go out by now.
    fn allowed(&self) -> u64 {
        self.from + (self.since.elapsed().as_secs_f64() * self.rate) as u64
    }
}

impl Talk<'_> {
    async fn frame(&mut self) -> Result<Frame, Broken> {
        loop {
            if let Some(frame) = frame::decode(&mut self.input)? {
                return match frame {
                    Frame::Refused { retry: false, reason } => Err(Broken::Final(reason)),
                    Frame::Refused { retry: true, reason } => Err(Broken::Refused(reason)),
                    frame => Ok(frame),
                };
            }
            let read = tokio::time::timeout(SILENCE, self.stream.read_buf(&mut self.input));
            if read.await.map_err(|_| Broken::Silent)?? == 0 {
                return Err(Broken::Refused("the gateway closed the connection".into()));
            }
        }
    }

    async fn say(&mut self, frame: &Frame) -> Result<(), Broken> {
        frame::encode(frame, &mut self.output);
        self.stream.write_all_buf(&mut self.output).await?;
        Ok(self.stream.flush().await?)
    }

    async fn greet(&mut self, options: &ClientOptions) -> Result<(), Broken> {
        let (client, incarnation) = (options.client.clone(), options.incarnation);
        let nonce = identity::random()?;
        self.say(&Frame::Hello { client, incarnation, nonce }).await?;
        let Frame::Challenge { nonce: challenge } = self.frame().await? else {
            return Err(Broken::Refused("no challenge".into()));
        };
        let claim =
            Claim { client: &options.client, incarnation, client_nonce: &nonce, gateway_nonce: &challenge };
        self.say(&Frame::Proof { mac: options.secret.prove(&claim) }).await?;
        let Frame::Welcome { acked, window } = self.frame().await? else {
            return Err(Broken::Refused("no welcome".into()));
        };
        if acked > self.lines.len() as u64 {
            return Err(Broken::Final(format!(
                "{acked} messages of {} are known already, and there are {} to send: is it another run's name?",
                options.client,
                self.lines.len()
            )));
        }
        self.on_ack(acked, window, Vec::new());
        self.next = acked + 1;
        if acked > 0 && !self.watched.is_known.load(Ordering::Relaxed) {
            let digest = digest_of_lines(&self.lines[..acked as usize]);
            frame::encode(&Frame::Check { upto: acked, digest }, &mut self.output);
        }
        if let Some(pace) = &mut self.pace {
            (pace.since, pace.from) = (Instant::now(), acked);
        }
        Ok(())
    }

    fn on_ack(&mut self, acked: u64, window: u32, beyond: Vec<u64>) {
        self.acked = self.acked.max(acked);
        self.window = u64::from(window);
        self.beyond.extend(beyond);
        self.beyond = self.beyond.split_off(&(self.acked + 1));
        self.watched.acked.fetch_max(self.acked, Ordering::Relaxed);
    }

    /// Puts lines into the output, as many as the window allows.
    fn fill(&mut self) {
        let last = self.lines.len() as u64;
        let until = self.pace.as_ref().map_or(last, Pace::allowed).min(last).min(self.acked + self.window);
        let (first, mut written) = (self.next, 0);
        while self.output.len() < CHUNK && self.next <= until {
            let sn = self.next;
            self.next += 1;
            // Those are few, and none as a rule.
            if !self.beyond.is_empty() && self.beyond.contains(&sn) {
                continue;
            }
            frame::encode_data(sn, &self.lines[sn as usize - 1], &mut self.output);
            written += 1;
        }
        if written > 0 {
            self.watched.written.fetch_add(written, Ordering::Relaxed);
            if let Some(latency) = self.watched.latency.get() {
                latency.on_sent(self.client, first..self.next);
            }
        }
        if self.next > last && !self.said_bye && self.output.len() < CHUNK {
            self.said_bye = true;
            let digest = Some(digest_of_lines(self.lines));
            frame::encode(&Frame::Bye { sent: last, digest }, &mut self.output);
        }
    }

    async fn run(&mut self) -> Result<(), Broken> {
        let mut heard = Instant::now();
        let mut unflushed = false;
        loop {
            self.fill();
            while let Some(frame) = frame::decode(&mut self.input)? {
                heard = Instant::now();
                match frame {
                    Frame::Ack { acked, window, beyond } => self.on_ack(acked, window, beyond),
                    Frame::Done { missing: 0 } => {
                        self.watched.is_known.store(true, Ordering::Relaxed);
                        return Ok(());
                    }
                    Frame::Done { missing } => return Err(Broken::Missing(missing)),
                    Frame::Refused { retry: false, reason } => return Err(Broken::Final(reason)),
                    Frame::Refused { retry: true, reason } => return Err(Broken::Refused(reason)),
                    _ => return Err(Broken::Refused("an unexpected frame".into())),
                }
                self.fill();
            }
            let (mut reader, mut writer) = tokio::io::split(&mut self.stream);
            tokio::select! {
                read = reader.read_buf(&mut self.input) => {
                    if read? == 0 {
                        return Err(Broken::Refused("the gateway closed the connection".into()));
                    }
                }
                written = push(&mut writer, &mut self.output), if unflushed || !self.output.is_empty() => {
                    unflushed = written?;
                }
                () = tokio::time::sleep(PACE), if self.pace.is_some() && !self.said_bye => {}
                // With everything said, the queue may take its time; without, silence is a fault.
                () = tokio::time::sleep_until(heard + SILENCE), if self.acked < self.lines.len() as u64 => {
                    return Err(Broken::Silent);
                }
            }
        }
    }
}
