//! What a connection has agreed with its client, and the mailbox through which others reach it.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use bytes::Bytes;
use moim_wire_resp::{OwnedArgs, Protocol};

use crate::cmd::Spec;
use crate::ctx::OnTimeout;
use crate::error::Error;
use crate::events::WatchFlag;
use crate::shard::Shard;
use crate::shared::About;
use crate::tracking::Wish;

/// One client.
pub struct Session {
    /// Unique in the life of the node.
    pub id: u64,
    /// What CLIENT SETNAME said.
    pub name: Vec<u8>,
    /// What CLIENT SETINFO said: library and version.
    pub library: [Vec<u8>; 2],
    /// What HELLO said.
    pub protocol: Protocol,
    /// Where the client is.
    pub peer: String,
    /// Where it connected to.
    pub local: String,
    /// Whether it may run commands.
    pub authenticated: bool,
    /// ASKING came just before.
    pub asking: bool,
    /// READONLY is on.
    pub readonly: bool,
    /// Between MULTI and EXEC.
    pub multi: Option<Multi>,
    /// The keys of WATCH.
    pub watched: Vec<Box<[u8]>>,
    /// What keys of WATCH and names of channels take, see [`kept_bytes`].
    pub watched_bytes: usize,
    /// See `watched_bytes`.
    pub listens_bytes: usize,
    /// Set when one of them changed.
    pub watch_flag: WatchFlag,
    /// The command that just ran wants to wait.
    pub block: Option<Block>,
    /// The command that just came has to wait for a slot that is on its way; it comes again.
    pub held: bool,
    /// The command ran before and made its client wait; it runs again.
    pub resumed: bool,
    /// It stands for a client that waits while its command runs away from the loops.
    pub away: bool,
    /// While a transaction of CLUSTER commands runs: the changes it asks for.
    pub planned: Option<Vec<crate::ops::MapChange>>,
    /// The connection ends when its answers are sent.
    pub closing: bool,
    /// Which answers it wants.
    pub replies: Replies,
    /// The shard it is connected to.
    pub shard: Option<Arc<Shard>>,
    /// What CLIENT LIST shows.
    pub about: Arc<Mutex<About>>,
    /// How others reach it.
    pub mailbox: Arc<Mailbox>,
    /// Channels, patterns and sharded channels it listens to.
    pub subscriptions: usize,
    /// Their names: channels, patterns, channels of slots.
    pub listens: [BTreeSet<Box<[u8]>>; 3],
    /// What CLIENT TRACKING ON asked for.
    pub tracking: Option<Arc<Wish>>,
    /// What CLIENT CACHING said about the next command.
    pub caching: Option<bool>,
    /// CLIENT NO-EVICT, CLIENT NO-TOUCH.
    pub no_evict: bool,
    /// When it connected, in milliseconds since 1970.
    pub since_ms: i64,
    /// The last command, for CLIENT LIST.
    pub last_command: &'static str,
    /// The number of the command that runs.
    pub(crate) command: u16,
    /// When that was.
    pub last_ms: i64,
}

/// CLIENT REPLY.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Replies {
    /// All of them.
    #[default]
    On,
    /// None.
    Off,
    /// Not the next one.
    SkipNext,
    /// Not this one.
    Skip,
}

/// The commands that EXEC will run.
#[derive(Default)]
pub struct Multi {
    /// In order.
    pub commands: Vec<(&'static Spec, OwnedArgs)>,
    /// One was refused: EXEC will be, too.
    pub broken: bool,
    /// Why EXEC refuses all of them, found when it came.
    pub refused: Option<Error>,
    /// The slot of the keys so far.
    pub slot: Option<u16>,
    /// Bytes of the queued arguments.
    pub bytes: usize,
}

/// A command that waits.
#[derive(Clone, Debug)]
pub struct Block {
    /// What it waits for.
    pub keys: Vec<Box<[u8]>>,
    /// When it gives up, in milliseconds since 1970.
    pub deadline: Option<i64>,
    /// What it answers then.
    pub on_timeout: OnTimeout,
    /// To be run again.
    pub command: OwnedArgs,
    /// Whether it waits for keys at all (WAIT does not).
    pub on_keys: bool,
    /// It waits until so many replicas have the journal up to there: (end, replicas).
    pub replicas: Option<(i64, i64)>,
    /// Whether it also wants to hear that a key is gone (XREADGROUP).
    pub on_gone: bool,
}

impl Session {
    /// A client that has just connected.
    pub fn new(id: u64, peer: String, local: String, now: i64) -> Self {
        Self {
            id,
            name: Vec::new(),
            library: Default::default(),
            protocol: Protocol::Resp2,
            peer,
            local,
            authenticated: true,
            asking: false,
            readonly: false,
            multi: None,
            watched: Vec::new(),
            watched_bytes: 0,
            listens_bytes: 0,
            watch_flag: WatchFlag::default(),
            block: None,
            held: false,
            resumed: false,
            away: false,
            planned: None,
            closing: false,
            replies: Replies::On,
            shard: None,
            about: Arc::default(),
            mailbox: Arc::default(),
            subscriptions: 0,
            listens: Default::default(),
            tracking: None,
            caching: None,
            no_evict: false,
            since_ms: now,
            last_command: "NULL",
            command: 0,
            last_ms: now,
        }
    }

    /// Nobody: for replaying the journal.
    pub fn nobody() -> Self {
        Self::new(0, String::new(), String::new(), 0)
    }

    /// Whether a watched key has changed.
    pub fn is_dirty(&self) -> bool {
        self.watch_flag.load(Ordering::Acquire)
    }
}

/// What others have for a connection.
#[derive(Default)]
pub struct Mailbox {
    inner: Mutex<Mail>,
}

/// What a watched key or the name of a channel takes: it is kept by the session and by the table of those who are told.
pub fn kept_bytes(name: &[u8]) -> usize {
    2 * name.len() + 128
}

/// A message of a channel or of tracking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// As it is sent.
    pub bytes: Bytes,
    /// The journal end of the client's shard that it waits for; 0 is none.
    pub gate: i64,
    /// The shard's count of voided answers when it was made.
    pub voided: u64,
}

/// Mail: see [`Mailbox`].
#[derive(Default)]
pub struct Mail {
    /// Messages that the client has not asked for.
    pub pushes: VecDeque<Push>,
    /// Bytes in them.
    pub bytes: usize,
    /// Bytes of messages that wait for the commit of another shard.
    pub deferred: usize,
    /// The answer of the command that waits.
    pub answer: Option<(Bytes, i64)>,
    /// The shard's count of voided answers when it was made.
    pub answered_under: Option<u64>,
    /// Channels of slots that have left the shard: the client is unsubscribed from them.
    pub left_channels: Vec<Box<[u8]>>,
    /// What the client's command waits for may be there.
    pub nudged: bool,
    /// CLIENT KILL, or it reads too slowly.
    pub killed: bool,
    waker: Option<Waker>,
}

impl Mailbox {
    /// A client that lets more than this pile up is disconnected.
    const MAX_BYTES: usize = 32 << 20;

    fn with<T>(&self, act: impl FnOnce(&mut Mail) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends a message that tells of nothing that could still be lost.
    pub fn push(&self, message: Bytes) {
        self.push_gated(Push { bytes: message, gate: 0, voided: 0 });
    }

    /// Sends a message that may leave when the journal is committed up to its gate.
    pub fn push_gated(&self, push: Push) {
        self.deliver(|mail| {
            mail.bytes += push.bytes.len();
            mail.killed |= mail.bytes + mail.deferred > Self::MAX_BYTES;
            if mail.killed {
                mail.pushes.clear();
            } else {
                mail.pushes.push_back(push);
            }
        });
    }

    /// So many bytes of messages wait elsewhere for a commit, and count like those that are here. Answers whether they may.
    pub(crate) fn defer(&self, bytes: usize) -> bool {
        self.with(|mail| {
            mail.deferred += bytes;
            mail.killed |= mail.bytes + mail.deferred > Self::MAX_BYTES;
            !mail.killed
        })
    }

    /// They wait no more.
    pub(crate) fn undefer(&self, bytes: usize) {
        self.with(|mail| mail.deferred = mail.deferred.saturating_sub(bytes));
    }

    /// Answers the command that waits.
    pub fn answer(&self, answer: Bytes, gate: i64) {
        self.deliver(|mail| mail.answer = Some((answer, gate)));
    }

    /// The same, for an answer that is void once the shard has voided others since.
    pub fn answer_under(&self, answer: Bytes, gate: i64, voided: u64) {
        self.deliver(|mail| (mail.answer, mail.answered_under) = (Some((answer, gate)), Some(voided)));
    }

    /// The slot of a sharded channel has left the shard.
    pub fn leave_channel(&self, channel: &[u8]) {
        self.deliver(|mail| mail.left_channels.push(channel.into()));
    }

    /// A command that waits may be tried again.
    pub fn nudge(&self) {
        self.deliver(|mail| mail.nudged = true);
    }

    /// Ends the connection.
    pub fn kill(&self) {
        self.deliver(|mail| mail.killed = true);
    }

    /// Wakes the connection.
    pub fn wake(&self) {
        self.deliver(|_| {});
    }

    fn deliver(&self, change: impl FnOnce(&mut Mail)) {
        let waker = self.with(|mail| {
            change(mail);
            mail.waker.take()
        });
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether there is mail; if not, `waker` is woken when there is.
    pub fn poll(&self, waker: &Waker) -> bool {
        self.with(|mail| {
            if mail.has_any() {
                return true;
            }
            match &mut mail.waker {
                Some(known) => known.clone_from(waker),
                none => *none = Some(waker.clone()),
            }
            false
        })
    }

    /// Takes what there is.
    pub fn take(&self) -> Mail {
        self.with(|mail| {
            let waker = mail.waker.take();
            let (killed, deferred) = (mail.killed, mail.deferred);
            let taken = std::mem::take(mail);
            (mail.waker, mail.killed, mail.deferred) = (waker, killed, deferred);
            taken
        })
    }
}

impl Mail {
    /// Whether anything is in it.
    pub fn has_any(&self) -> bool {
        !self.pushes.is_empty()
            || !self.left_channels.is_empty()
            || self.answer.is_some()
            || self.nudged
            || self.killed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_does_not_read_is_let_go() {
        let mailbox = Mailbox::default();
        for _ in 0..40 {
            mailbox.push(vec![0; 1 << 20].into());
        }
        let mail = mailbox.take();
        assert!(mail.killed && mail.pushes.is_empty());
    }

    #[test]
    fn mail_is_taken_once() {
        let mailbox = Mailbox::default();
        let push = Push { bytes: Bytes::from_static(b"m"), gate: 3, voided: 7 };
        mailbox.push_gated(push.clone());
        mailbox.answer(Bytes::from_static(b"a"), 4);
        let mail = mailbox.take();
        assert_eq!(mail.pushes.front(), Some(&push));
        assert_eq!(mail.answer, Some((Bytes::from_static(b"a"), 4)));
        assert!(!mailbox.take().has_any());
    }
}
