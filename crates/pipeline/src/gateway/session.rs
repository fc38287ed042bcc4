//! A client connection: authenticates the client, writes its messages to the store and acknowledges them.
//!
//! At most one store write is in flight; messages that arrive meanwhile go into the next one. Backpressure: a client
//! is read only while its relay has capacity, so the socket buffer fills and the client waits.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::frame::{self, Frame, FrameError};
use crate::gateway::Shared;
use crate::gateway::relay_task::RelayHandle;
use crate::identity::{self, Claim};
use crate::progress;
use crate::store::{DIGEST, StoreError, TakeOver, digest_of_all};
use crate::tls::Socket;

/// Time limit for the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Messages and bytes per store write.
const BATCH_MESSAGES: usize = 1_024;
const BATCH_BYTES: usize = 512 << 10;
/// Read buffer size of a client under load, and of any other.
const READ_LARGE: usize = 64 << 10;
const READ_SMALL: usize = 8 << 10;

/// Why a session ends.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("{1}")]
    Refuse(bool, String),
    #[error("closed")]
    Closed,
}

pub(super) async fn run(shared: Arc<Shared>, stream: TcpStream, peer: SocketAddr) {
    let _ = stream.set_nodelay(true);
    let stream = match &shared.options.tls {
        None => Socket::Plain(stream),
        Some(tls) => match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return tracing::debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => return tracing::debug!(%peer, "TLS handshake timed out"),
        },
    };
    let mut wire = Wire { stream, input: BytesMut::new(), output: BytesMut::new(), read_size: READ_SMALL };
    let end = match serve(&shared, &mut wire).await {
        Ok(never) => match never {},
        Err(end) => end,
    };
    let refusal = match &end {
        End::Closed | End::Io(_) => None,
        End::Frame(error) => Some((false, error.to_string())),
        End::Refuse(retry, reason) => Some((*retry, reason.clone())),
    };
    tracing::debug!(%peer, %end, "session ended");
    if let Some((retry, reason)) = refusal {
        wire.queue(&Frame::Refused { retry, reason });
        let _ = tokio::time::timeout(Duration::from_secs(1), wire.flush()).await;
    }
}

struct Wire {
    stream: Socket,
    input: BytesMut,
    output: BytesMut,
    /// Bytes to read at once.
    read_size: usize,
}

impl Wire {
    fn queue(&mut self, frame: &Frame) {
        frame::encode(frame, &mut self.output);
    }

    async fn flush(&mut self) -> io::Result<()> {
        self.stream.write_all_buf(&mut self.output).await?;
        self.stream.flush().await
    }

    /// Reads the available bytes. Cancel-safe.
    async fn fill(&mut self) -> Result<(), End> {
        if self.input.capacity() - self.input.len() < self.read_size / 4 {
            self.input.reserve(self.read_size);
        }
        let read_size = self.input.capacity() - self.input.len();
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(End::Closed),
            read => {
                self.read_size = if read == read_size { READ_LARGE } else { READ_SMALL };
                Ok(())
            }
        }
    }

    /// Reads until the socket has no more bytes: more messages per store write means fewer writes. Cancel-safe.
    async fn fill_all(&mut self) -> Result<(), End> {
        self.fill().await?;
        while self.input.len() < 2 * READ_LARGE {
            match self.fill().now_or_never() {
                Some(Ok(())) => {}
                // The next read reports the end of the stream again, after the bytes before it are processed.
                Some(Err(_)) | None => break,
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Frame, End> {
        loop {
            if let Some(frame) = frame::decode(&mut self.input)? {
                return Ok(frame);
            }
            self.fill().await?;
        }
    }
}

enum Never {}

async fn serve(shared: &Arc<Shared>, wire: &mut Wire) -> Result<Never, End> {
    let authenticated = tokio::time::timeout(HANDSHAKE_TIMEOUT, authenticate(shared, wire)).await;
    let (client, incarnation) =
        authenticated.unwrap_or(Err(End::Refuse(false, "too slow to say who it is".into())))?;
    let (attempt, acked, stored) = take_over(shared, &client, incarnation).await?;
    let relay = shared.relay(&client, attempt, acked, stored).await.map_err(unavailable)?;
    let mut session = Session {
        shared: Arc::clone(shared),
        stored: relay.stored(),
        relay,
        client,
        attempt,
        acked,
        bye: None,
        unrecorded_bye: None,
        check: None,
        beyond: Vec::new(),
    };
    let client_acked = session.client_acked();
    wire.queue(&Frame::Welcome { acked: client_acked, window: shared.options.window });
    wire.flush().await?;
    session.run(wire).await
}

async fn authenticate(shared: &Shared, wire: &mut Wire) -> Result<(String, u64), End> {
    let Frame::Hello { client, incarnation, nonce } = wire.next().await? else {
        return Err(End::Refuse(false, "the first frame says who the client is".into()));
    };
    let challenge = identity::random()?;
    wire.queue(&Frame::Challenge { nonce: challenge });
    wire.flush().await?;
    let Frame::Proof { mac } = wire.next().await? else {
        return Err(End::Refuse(false, "a proof was expected".into()));
    };
    let claim = Claim { client: &client, incarnation, client_nonce: &nonce, gateway_nonce: &challenge };
    if !shared.secret.is_proof(&claim, &mac) {
        return Err(End::Refuse(
            false,
            format!("the proof of {client} is wrong: is it the same token file?"),
        ));
    }
    Ok((client, incarnation))
}

async fn take_over(shared: &Shared, client: &str, incarnation: u64) -> Result<(u64, u64, u64), End> {
    shared.store.register_client(client).await.map_err(unavailable)?;
    match shared.store.take_over(client, incarnation).await.map_err(unavailable)? {
        TakeOver::Granted { attempt, acked, stored } => Ok((attempt, acked, stored)),
        TakeOver::Stale { incarnation } => Err(End::Refuse(
            false,
            format!("a newer client of the name {client} has connected (incarnation {incarnation})"),
        )),
        TakeOver::Busy => Err(End::Refuse(true, "try again".into())),
    }
}

fn unavailable(error: StoreError) -> End {
    End::Refuse(true, error.to_string())
}

struct Session {
    shared: Arc<Shared>,
    relay: RelayHandle,
    stored: watch::Receiver<u64>,
    client: String,
    attempt: u64,
    /// Everything up to this sequence number is in the store.
    acked: u64,
    /// The last sequence number, as announced by the client's `Bye`.
    bye: Option<u64>,
    /// The same with its digest, until it is recorded in the store.
    unrecorded_bye: Option<(u64, Option<[u8; DIGEST]>)>,
    /// Digest that the client claims for the messages accepted earlier, until it is compared with the store.
    check: Option<(u64, [u8; DIGEST])>,
    /// Messages that the store holds behind a gap. They go to the relay once the gap is closed.
    beyond: Vec<(u64, Bytes)>,
}

impl Session {
    async fn run(&mut self, wire: &mut Wire) -> Result<Never, End> {
        let mut last_ack = self.client_acked();
        loop {
            let batch = self.gather(wire)?;
            if let Some((upto, digest)) = self.check.take() {
                self.verify_digest(upto, &digest).await?;
            }
            if !batch.is_empty() {
                self.keep(batch).await?;
            }
            if let Some((sent, digest)) = self.unrecorded_bye.take() {
                self.shared.store.record_sent(&self.client, sent, digest).await.map_err(unavailable)?;
            }
            let client_acked = self.client_acked();
            if client_acked > last_ack {
                last_ack = client_acked;
                let beyond = self.beyond.iter().map(|(sn, _)| *sn).take(1_000).collect();
                let beyond = if self.shared.options.ack_after_queue { Vec::new() } else { beyond };
                wire.queue(&Frame::Ack { acked: client_acked, window: self.shared.options.window, beyond });
            }
            if self.bye.is_some_and(|sent| *self.stored.borrow() >= sent) {
                self.bye = None;
                let missing = self.shared.store.blocked(&self.client).await.map_err(unavailable)?;
                wire.queue(&Frame::Done { missing: missing.unwrap_or(0) });
            }
            wire.flush().await?;
            if has_frame(&wire.input) {
                continue;
            }
            tokio::select! {
                filled = wire.fill_all() => filled?,
                changed = self.stored.changed() => {
                    if changed.is_err() {
                        return Err(End::Refuse(true, "another gateway relays for this client".into()));
                    }
                }
            }
        }
    }

    /// The sequence number up to which the client may discard its messages.
    fn client_acked(&self) -> u64 {
        if self.shared.options.ack_after_queue { *self.stored.borrow() } else { self.acked }
    }

    /// The messages that have arrived, at most as many as one store write takes.
    fn gather(&mut self, wire: &mut Wire) -> Result<Vec<(u64, Bytes)>, End> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH_MESSAGES && bytes < BATCH_BYTES {
            match frame::decode(&mut wire.input)? {
                None => break,
                Some(Frame::Data { sn, message }) => {
                    self.check(sn, &message)?;
                    bytes += message.len();
                    batch.push((sn, message));
                }
                Some(Frame::Bye { sent, digest }) => {
                    (self.bye, self.unrecorded_bye) = (Some(sent), Some((sent, digest)));
                }
                Some(Frame::Check { upto, digest }) => self.check = Some((upto, digest)),
                Some(_) => return Err(End::Refuse(false, "only messages are expected here".into())),
            }
        }
        Ok(batch)
    }

    /// Compares the digest of the messages accepted under this client name with the client's own. Without it, a name
    /// that is reused for different lines would pass as already sent.
    async fn verify_digest(&self, upto: u64, digest: &[u8; DIGEST]) -> Result<(), End> {
        let upto = upto.min(self.acked);
        let lines = self.shared.store.lines(&self.client).await.map_err(unavailable)?;
        let known: Vec<_> = lines.range(1..=upto).map(|(_, digest)| digest).collect();
        // An earlier version did not store the digests.
        if known.len() as u64 == upto && digest_of_all(known) != *digest {
            let name = &self.client;
            let why = format!(
                "the first {upto} messages of {name} are others than these: is {name} another run's name?"
            );
            return Err(End::Refuse(false, why));
        }
        Ok(())
    }

    fn check(&self, sn: u64, message: &Bytes) -> Result<(), End> {
        if message.len() > frame::MAX_MESSAGE {
            return Err(End::Refuse(false, format!("message {sn} has {} bytes", message.len())));
        }
        // Twice the window: messages that were sent before an acknowledgement arrived may overlap.
        let furthest = self.acked.saturating_add(2 * u64::from(self.shared.options.window));
        if sn == 0 || sn > furthest {
            return Err(End::Refuse(
                false,
                format!("message {sn} is outside the window: {} is the last acknowledged", self.acked),
            ));
        }
        Ok(())
    }

    async fn keep(&mut self, mut batch: Vec<(u64, Bytes)>) -> Result<(), End> {
        progress::add(&self.shared.progress.sent, batch.len() as u64);
        // A client that has not received the acknowledgement yet resends messages that the store holds.
        batch.retain(|(sn, _)| *sn > self.acked);
        if batch.is_empty() {
            return Ok(());
        }
        let kept = loop {
            match self.shared.store.persist(&self.client, self.attempt, &batch).await {
                // Nothing is acknowledged meanwhile, so the client waits as well.
                Err(StoreError::Unavailable(why)) => {
                    tracing::debug!(client = self.client, why, "store write failed; retrying");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => return Err(End::Refuse(true, error.to_string())),
                Ok(Err(_)) => return Err(End::Refuse(true, "another gateway serves this client".into())),
                Ok(Ok(acked)) => break acked,
            }
        };
        let before = self.acked;
        if kept < before {
            return Err(End::Refuse(true, "the store has lost messages that it had acknowledged".into()));
        }
        self.acked = kept;
        progress::add(&self.shared.progress.kept, kept - before);
        let are_next = batch.iter().map(|(sn, _)| *sn).eq(before + 1..=kept);
        let ready = if self.beyond.is_empty() && are_next {
            batch
        } else {
            self.beyond.extend(batch);
            self.beyond.sort_by_key(|(sn, _)| *sn);
            self.beyond.dedup_by_key(|(sn, _)| *sn);
            let behind = self.beyond.partition_point(|(sn, _)| *sn <= kept);
            self.beyond.drain(..behind).collect()
        };
        if !self.relay_ready(before, kept, ready).await? {
            return Err(End::Refuse(true, "another gateway relays for this client".into()));
        }
        Ok(())
    }

    /// Hands messages without a gap before them to the relay. Messages that another session wrote are read from the
    /// store.
    async fn relay_ready(&mut self, before: u64, kept: u64, ready: Vec<(u64, Bytes)>) -> Result<bool, End> {
        let wanted = kept - before;
        let ready = if ready.len() as u64 == wanted {
            ready
        } else {
            self.shared.store.load_messages(&self.client, before + 1, kept).await.map_err(unavailable)?
        };
        if ready.len() as u64 != wanted {
            return Err(End::Refuse(true, "the store has lost messages that it had acknowledged".into()));
        }
        Ok(ready.is_empty() || self.relay.push(ready).await)
    }
}

/// True if the next frame is complete in the input.
fn has_frame(input: &BytesMut) -> bool {
    input.first_chunk::<4>().is_some_and(|head| input.len() >= 4 + u32::from_be_bytes(*head) as usize)
}
