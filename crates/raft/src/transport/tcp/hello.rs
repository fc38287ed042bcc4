//! The handshake: establishes the identity of both ends before anything else is sent.
//!
//! Both sides send a hello: magic, format version, cluster, their own voter id, the intended voter id, and a
//! challenge. Then both prove that they know the cluster secret: an HMAC-SHA256 of both hellos under it, the listener
//! first. A cluster id is public (every client learns it), its secret is known to members only.
//!
//! Invariant: after [`greet`] and [`welcome`] a *member* connection joins two nodes of one cluster, and the listener
//! is the voter that the dialler intended. A message for voter 2 is never answered by a voter that took over its
//! address: a vote under another voter's id could elect a second history. Nothing sent on a connection without the
//! proof reaches a group, a service or a stream.
//!
//! A node that is in no cluster yet, or that asks to join one, is a *visitor*: it may call the node's own service and
//! no group.
//!
//! Limits: the proof covers the start of a connection, not its bytes; on a network that strangers can write to, TLS
//! is needed. A cluster whose directories were created before secrets existed has the secret 0, which proves nothing.
//!
//! A hello with the other magic requests a raw stream: its content afterwards belongs to the stream handler of the
//! listener (journal replication). Only members get one.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::types::VoterId;

const MAGIC: [u8; 8] = *b"moimpeer";
const STREAM_MAGIC: [u8; 8] = *b"moimdata";
const VERSION: u32 = 2;
pub(super) const HELLO: usize = 60;
pub(super) const PROOF: usize = 32;
/// The handshake timeout of the dialler.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The handshake timeout of the listener: a dialler sends its hello as soon as it is connected.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(2);

/// A node's identity towards its peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerId {
    /// The cluster. Never 0.
    pub cluster: u128,
    /// The voter id. Never 0.
    pub voter: VoterId,
    /// The cluster secret, known to members only.
    pub secret: u128,
}

/// The identity of this process; none until it has joined a cluster.
#[derive(Clone, Default)]
pub struct LocalPeer {
    id: Arc<RwLock<Option<PeerId>>>,
}

impl LocalPeer {
    /// A process that is in no cluster yet.
    pub fn unjoined() -> Self {
        Self::default()
    }

    /// A member of a cluster.
    pub fn member(id: PeerId) -> Self {
        let peer = Self::default();
        peer.become_member(id);
        peer
    }

    /// Sets the identity under which connections are made and accepted from now on.
    pub fn become_member(&self, id: PeerId) {
        *self.id.write().unwrap_or_else(PoisonError::into_inner) = Some(id);
    }

    /// The present identity.
    pub fn id(&self) -> Option<PeerId> {
        *self.id.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The permitted use of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// All member traffic.
    Member,
    /// A raw stream of a member.
    Stream,
    /// The node's own service only.
    Visitor,
}

/// Why a handshake failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Unwelcome {
    #[error("it does not speak the language of Moim's peer port")]
    Stranger,
    #[error("it speaks version {0} of the peer protocol, this build speaks version {VERSION}")]
    Version(u32),
    #[error("it belongs to another cluster")]
    OtherCluster,
    #[error("it has not joined a cluster")]
    NotJoined,
    #[error("voter {wanted} was meant, but voter {found} is there")]
    OtherVoter { wanted: VoterId, found: VoterId },
    #[error("it does not prove that it is a member of the cluster")]
    Unproven,
}

impl From<Unwelcome> for io::Error {
    fn from(why: Unwelcome) -> Self {
        Self::new(io::ErrorKind::InvalidData, why)
    }
}

/// One side's hello. Zero stands for "none".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hello {
    stream: bool,
    cluster: u128,
    from: u64,
    to: u64,
    challenge: u128,
}

/// The listener's knowledge of an accepted dialler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Guest {
    pub(super) standing: Standing,
    /// Its voter id; 0 for a visitor.
    pub(super) voter: VoterId,
}

impl Hello {
    /// The hello of a dialler that intends this voter.
    pub(super) fn to_member(id: PeerId, to: VoterId) -> Self {
        Self { stream: false, cluster: id.cluster, from: id.voter.0, to: to.0, challenge: fastrand::u128(..) }
    }

    /// The hello of a dialler that requests a raw stream to this voter.
    pub(super) fn to_stream(id: PeerId, to: VoterId) -> Self {
        Self { stream: true, ..Self::to_member(id, to) }
    }

    /// The hello of a visitor.
    pub(super) fn visitor() -> Self {
        Self { stream: false, cluster: 0, from: 0, to: 0, challenge: 0 }
    }

    /// The hello of the listener.
    fn listener(id: Option<PeerId>) -> Self {
        match id {
            Some(id) => Self::to_member(id, VoterId(0)),
            None => Self::visitor(),
        }
    }

    pub(super) fn encode(self) -> BytesMut {
        let mut out = BytesMut::with_capacity(HELLO);
        out.put_slice(if self.stream { &STREAM_MAGIC } else { &MAGIC });
        out.put_u32_le(VERSION);
        out.put_u128_le(self.cluster);
        out.put_u64_le(self.from);
        out.put_u64_le(self.to);
        out.put_u128_le(self.challenge);
        out
    }

    fn decode(bytes: [u8; HELLO]) -> Result<Self, Unwelcome> {
        let mut bytes = &bytes[..];
        let magic = bytes.copy_to_bytes(MAGIC.len());
        let version = bytes.get_u32_le();
        let stream = magic == STREAM_MAGIC[..];
        if magic != MAGIC[..] && !stream {
            return Err(Unwelcome::Stranger);
        }
        if version != VERSION {
            return Err(Unwelcome::Version(version));
        }
        Ok(Self {
            stream,
            cluster: bytes.get_u128_le(),
            from: bytes.get_u64_le(),
            to: bytes.get_u64_le(),
            challenge: bytes.get_u128_le(),
        })
    }
}

/// The listener's decision about a dialler.
fn judge(dialler: Hello, listener: Hello) -> Result<Standing, Unwelcome> {
    if dialler.cluster == 0 && !dialler.stream {
        return Ok(Standing::Visitor);
    }
    if listener.cluster == 0 {
        return Err(Unwelcome::NotJoined);
    }
    if dialler.cluster != listener.cluster {
        return Err(Unwelcome::OtherCluster);
    }
    if dialler.to != listener.from {
        return Err(Unwelcome::OtherVoter { wanted: VoterId(dialler.to), found: VoterId(listener.from) });
    }
    Ok(if dialler.stream { Standing::Stream } else { Standing::Member })
}

/// One side's proof that it knows the secret, bound to both hellos.
fn proof(secret: u128, side: &[u8], dialler: Hello, listener: Hello) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(&secret.to_le_bytes()).expect("HMAC takes a key of any length");
    mac.update(side);
    mac.update(&dialler.encode());
    mac.update(&listener.encode());
    mac
}

const DIALLER: &[u8] = b"moim dialler";
const LISTENER: &[u8] = b"moim listener";

async fn check_proof(stream: &mut (impl AsyncRead + Unpin), wanted: Hmac<Sha256>) -> io::Result<()> {
    let mut bytes = [0; PROOF];
    stream.read_exact(&mut bytes).await?;
    Ok(wanted.verify_slice(&bytes).map_err(|_| Unwelcome::Unproven)?)
}

/// The listener's half of the handshake: `local` returns the member for the cluster that the dialler names, 0 for a
/// visitor. It answers before it decides, so that the dialler learns why it is refused.
pub(super) async fn welcome<T>(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    local: impl FnOnce(u128) -> (Option<PeerId>, T),
) -> io::Result<(Guest, T)> {
    in_time(WELCOME_TIMEOUT, async {
        let theirs = read_hello(stream).await?;
        let (id, found) = local(theirs.cluster);
        let ours = Hello::listener(id);
        let mut answer = ours.encode();
        let judged = judge(theirs, ours);
        if let (Ok(Standing::Member | Standing::Stream), Some(id)) = (&judged, id) {
            answer.put_slice(&proof(id.secret, LISTENER, theirs, ours).finalize().into_bytes());
        }
        stream.write_all(&answer).await?;
        let standing = judged?;
        match (standing, id) {
            (Standing::Visitor, _) => {}
            (_, Some(id)) => check_proof(stream, proof(id.secret, DIALLER, theirs, ours)).await?,
            (_, None) => return Err(Unwelcome::NotJoined.into()),
        }
        Ok((Guest { standing, voter: VoterId(theirs.from) }, found))
    })
    .await
}

/// The dialler's half of the handshake, as a member.
pub(super) async fn greet(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ours: Hello,
    secret: u128,
) -> io::Result<()> {
    in_time(HELLO_TIMEOUT, async {
        stream.write_all(&ours.encode()).await?;
        let theirs = read_hello(stream).await?;
        judge(ours, theirs)?;
        check_proof(stream, proof(secret, LISTENER, ours, theirs)).await?;
        stream.write_all(&proof(secret, DIALLER, ours, theirs).finalize().into_bytes()).await
    })
    .await
}

/// The dialler's half of the handshake, as a visitor.
pub(super) async fn greet_as_visitor(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    in_time(HELLO_TIMEOUT, async {
        stream.write_all(&Hello::visitor().encode()).await?;
        let theirs = read_hello(stream).await?;
        Ok(judge(Hello::visitor(), theirs).map(drop)?)
    })
    .await
}

async fn read_hello(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Hello> {
    let mut bytes = [0; HELLO];
    // A stranger is detected by its first bytes; it need not send a whole hello.
    stream.read_exact(&mut bytes[..MAGIC.len()]).await?;
    if bytes[..MAGIC.len()] != MAGIC && bytes[..MAGIC.len()] != STREAM_MAGIC {
        return Err(Unwelcome::Stranger.into());
    }
    stream.read_exact(&mut bytes[MAGIC.len()..]).await?;
    Ok(Hello::decode(bytes)?)
}

async fn in_time<T>(patience: Duration, greeting: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(patience, greeting).await.unwrap_or(Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_voter_that_was_meant_is_talked_to() {
        let at = |cluster, voter| PeerId { cluster, voter: VoterId(voter), secret: 7 };
        let listener = |id| Hello::listener(id);
        let cases = [
            (Hello::to_member(at(5, 1), VoterId(2)), listener(Some(at(5, 2))), Ok(Standing::Member)),
            (Hello::to_stream(at(5, 1), VoterId(2)), listener(Some(at(5, 2))), Ok(Standing::Stream)),
            (
                Hello { stream: true, ..Hello::visitor() },
                listener(Some(at(5, 2))),
                Err(Unwelcome::OtherCluster),
            ),
            (Hello::visitor(), listener(Some(at(5, 2))), Ok(Standing::Visitor)),
            (Hello::visitor(), listener(None), Ok(Standing::Visitor)),
            (Hello::to_member(at(5, 1), VoterId(2)), listener(None), Err(Unwelcome::NotJoined)),
            (Hello::to_member(at(5, 1), VoterId(2)), listener(Some(at(6, 2))), Err(Unwelcome::OtherCluster)),
            (
                Hello::to_member(at(5, 1), VoterId(2)),
                listener(Some(at(5, 4))),
                Err(Unwelcome::OtherVoter { wanted: VoterId(2), found: VoterId(4) }),
            ),
        ];
        for (dialler, listener, wanted) in cases {
            assert_eq!(judge(dialler, listener), wanted, "{dialler:?} {listener:?}");
        }
    }

    #[test]
    fn a_hello_survives_the_wire_and_nothing_else_does() {
        let hello = Hello::to_member(PeerId { cluster: 7, voter: VoterId(1), secret: 7 }, VoterId(3));
        let bytes: [u8; HELLO] = hello.encode()[..].try_into().unwrap();
        assert_eq!(Hello::decode(bytes), Ok(hello));
        let stream = Hello { stream: true, ..hello };
        assert_eq!(Hello::decode(stream.encode()[..].try_into().unwrap()), Ok(stream));
        let mut newer = bytes;
        newer[8] = 9;
        assert_eq!(Hello::decode(newer), Err(Unwelcome::Version(9)));
        assert_eq!(Hello::decode([b'x'; HELLO]), Err(Unwelcome::Stranger));
    }
}
