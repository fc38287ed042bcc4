//! Client session state (the negotiated protocol, MULTI state, watched keys, subscriptions) and the mailbox through
//! which other tasks reach the connection.

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
use crate::tracking::TrackingOptions;

/// The state of one client connection.
pub struct Session {
    /// Client id, unique for the lifetime of the node.
    pub id: u64,
    /// Connection name set by CLIENT SETNAME.
    pub name: Vec<u8>,
    /// Client library name and version set by CLIENT SETINFO.
    pub library: [Vec<u8>; 2],
    /// RESP version negotiated by HELLO.
    pub protocol: Protocol,
    /// Remote address of the client.
    pub peer: String,
    /// Local address that the client connected to.
    pub local: String,
    /// True once the client has authenticated; only then may it run commands.
    pub authenticated: bool,
    /// ASKING preceded this command: an importing slot may be served.
    pub asking: bool,
    /// READONLY mode: a replica may serve this client's reads.
    pub readonly: bool,
    /// MULTI state; present between MULTI and EXEC.
    pub multi: Option<Multi>,
    /// Watched keys (WATCH).
    pub watched: Vec<Box<[u8]>>,
    /// Memory charged for watched keys, see [`registration_bytes`].
    pub watched_bytes: usize,
    /// Memory charged for the names of subscribed channels, see [`registration_bytes`].
    pub subscriptions_bytes: usize,
    /// Set when a watched key is modified; EXEC then aborts.
    pub watch_flag: WatchFlag,
    /// Set when the command that just ran blocks its client.
    pub block: Option<Block>,
    /// The command that just arrived waits for a slot migration; it is executed again later.
    pub held: bool,
    /// The command runs again for a blocked client whose key became ready.
    pub resumed: bool,
    /// This session stands in for a blocked client whose command was offloaded from the event loops.
    pub away: bool,
    /// Slot map changes requested so far by a running transaction of CLUSTER commands.
    pub planned: Option<Vec<crate::ops::MapChange>>,
    /// The connection closes once its replies are sent.
    pub closing: bool,
    /// CLIENT REPLY mode.
    pub replies: Replies,
    /// The shard that the client is connected to.
    pub shard: Option<Arc<Shard>>,
    /// Client description for CLIENT LIST.
    pub about: Arc<Mutex<About>>,
    /// Mailbox through which other tasks reach this connection.
    pub mailbox: Arc<Mailbox>,
    /// Number of subscribed channels, patterns and sharded channels.
    pub subscriptions: usize,
    /// Names of the subscribed channels, patterns and sharded channels.
    pub subscribed: [BTreeSet<Box<[u8]>>; 3],
    /// Options of CLIENT TRACKING ON.
    pub tracking: Option<Arc<TrackingOptions>>,
    /// CLIENT CACHING YES or NO for the next command.
    pub caching: Option<bool>,
    /// CLIENT NO-EVICT and CLIENT NO-TOUCH.
    pub no_evict: bool,
    /// Connection time, in milliseconds since 1970.
    pub since_ms: i64,
    /// Name of the last command, for CLIENT LIST.
    pub last_command: &'static str,
    /// Index of the running command in the command table.
    pub(crate) command: u16,
    /// Time of the last command, in milliseconds since 1970.
    pub last_ms: i64,
}

/// CLIENT REPLY modes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Replies {
    /// Every reply is sent.
    #[default]
    On,
    /// No reply is sent.
    Off,
    /// The reply of the next command is suppressed.
    SkipNext,
    /// The reply of this command is suppressed.
    Skip,
}

/// MULTI state: the commands queued for EXEC.
#[derive(Default)]
pub struct Multi {
    /// Queued commands, in order.
    pub commands: Vec<(&'static Spec, OwnedArgs)>,
    /// A command was rejected while queueing: EXEC replies EXECABORT.
    pub dirty_exec: bool,
    /// Why EXEC rejects all commands, determined when EXEC arrived.
    pub refused: Option<Error>,
    /// The hash slot of all keys queued so far.
    pub slot: Option<u16>,
    /// Bytes of the queued arguments.
    pub bytes: usize,
}

/// The blocking state of a client.
#[derive(Clone, Debug)]
pub struct Block {
    /// The keys that the client is blocked on.
    pub keys: Vec<Box<[u8]>>,
    /// Timeout, in milliseconds since 1970.
    pub deadline: Option<i64>,
    /// The reply on timeout.
    pub on_timeout: OnTimeout,
    /// The command to execute again when a key is ready.
    pub command: OwnedArgs,
    /// True if the client is blocked on keys (WAIT is not).
    pub on_keys: bool,
    /// WAIT: blocked until this many replicas have acknowledged the journal up to an end: (end, replicas).
    pub replicas: Option<(i64, i64)>,
    /// The client is also woken when a key is deleted (XREADGROUP).
    pub wake_on_delete: bool,
}

impl Session {
    /// The session of a client that has just connected.
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
            subscriptions_bytes: 0,
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
            subscribed: Default::default(),
            tracking: None,
            caching: None,
            no_evict: false,
            since_ms: now,
            last_command: "NULL",
            command: 0,
            last_ms: now,
        }
    }

    /// A session without a client, for journal replay and other internal execution.
    pub fn internal() -> Self {
        Self::new(0, String::new(), String::new(), 0)
    }

    /// True if a watched key was modified since WATCH.
    pub fn is_dirty(&self) -> bool {
        self.watch_flag.load(Ordering::Acquire)
    }
}

/// Messages from other tasks to a connection.
#[derive(Default)]
pub struct Mailbox {
    inner: Mutex<MailboxContents>,
}

/// Memory charged for a watched key or a subscribed channel name: both the session and the shared registry store it.
pub fn registration_bytes(name: &[u8]) -> usize {
    2 * name.len() + 128
}

/// An out-of-band message: a Pub/Sub message or a tracking invalidation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    /// The encoded message.
    pub bytes: Bytes,
    /// Journal end of the client's shard that must be committed before the message is sent; 0 if it need not wait.
    pub gate: i64,
    /// The shard's count of voided replies when the message was created.
    pub voided: u64,
}

/// The contents of a [`Mailbox`].
#[derive(Default)]
pub struct MailboxContents {
    /// Out-of-band messages.
    pub pushes: VecDeque<Push>,
    /// Total bytes of `pushes`.
    pub bytes: usize,
    /// Bytes of messages that wait for the commit of another shard.
    pub deferred: usize,
    /// Reply of the blocked command, with its commit gate.
    pub reply: Option<(Bytes, i64)>,
    /// The shard's count of voided replies when the reply was created.
    pub reply_made_under: Option<u64>,
    /// Sharded channels whose slots have left the shard: the client is unsubscribed from them.
    pub removed_channels: Vec<Box<[u8]>>,
    /// The blocked or held command may be able to proceed: retry it.
    pub retry_requested: bool,
    /// The connection must close: CLIENT KILL, or the client reads too slowly.
    pub killed: bool,
    waker: Option<Waker>,
}

impl Mailbox {
    /// Output buffer bound: a client with more unread bytes than this is disconnected.
    const MAX_BYTES: usize = 32 << 20;

    fn with<T>(&self, act: impl FnOnce(&mut MailboxContents) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends a message that reports no uncommitted change.
    pub fn push(&self, message: Bytes) {
        self.push_gated(Push { bytes: message, gate: 0, voided: 0 });
    }

    /// Sends a message once the journal is committed up to its gate.
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

    /// Charges bytes of messages that wait elsewhere for a commit to this client's output buffer. Returns false if
    /// the limit is exceeded.
    pub(crate) fn defer(&self, bytes: usize) -> bool {
        self.with(|mail| {
            mail.deferred += bytes;
            mail.killed |= mail.bytes + mail.deferred > Self::MAX_BYTES;
            !mail.killed
        })
    }

    /// Releases bytes charged by [`Mailbox::defer`].
    pub(crate) fn undefer(&self, bytes: usize) {
        self.with(|mail| mail.deferred = mail.deferred.saturating_sub(bytes));
    }

    /// Delivers the reply of the blocked command.
    pub fn deliver_reply(&self, reply: Bytes, gate: i64) {
        self.deliver(|mail| mail.reply = Some((reply, gate)));
    }

    /// Delivers a reply that becomes void if the shard has voided replies since.
    pub fn deliver_reply_under(&self, reply: Bytes, gate: i64, voided: u64) {
        self.deliver(|mail| (mail.reply, mail.reply_made_under) = (Some((reply, gate)), Some(voided)));
    }

    /// Unsubscribes the client from a sharded channel whose slot has left the shard.
    pub fn remove_sharded_channel(&self, channel: &[u8]) {
        self.deliver(|mail| mail.removed_channels.push(channel.into()));
    }

    /// Lets the connection retry its blocked or held command.
    pub fn request_retry(&self) {
        self.deliver(|mail| mail.retry_requested = true);
    }

    /// Closes the connection.
    pub fn kill(&self) {
        self.deliver(|mail| mail.killed = true);
    }

    /// Wakes the connection.
    pub fn wake(&self) {
        self.deliver(|_| {});
    }

    fn deliver(&self, change: impl FnOnce(&mut MailboxContents)) {
        let waker = self.with(|mail| {
            change(mail);
            mail.waker.take()
        });
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// True if the mailbox has contents; otherwise `waker` is woken when it does.
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

    /// Takes the contents.
    pub fn take(&self) -> MailboxContents {
        self.with(|mail| {
            let waker = mail.waker.take();
            let (killed, deferred) = (mail.killed, mail.deferred);
            let taken = std::mem::take(mail);
            (mail.waker, mail.killed, mail.deferred) = (waker, killed, deferred);
            taken
        })
    }
}

impl MailboxContents {
    /// True if there is anything to process.
    pub fn has_any(&self) -> bool {
        !self.pushes.is_empty()
            || !self.removed_channels.is_empty()
            || self.reply.is_some()
            || self.retry_requested
            || self.killed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_reader_is_disconnected() {
        let mailbox = Mailbox::default();
        for _ in 0..40 {
            mailbox.push(vec![0; 1 << 20].into());
        }
        let mail = mailbox.take();
        assert!(mail.killed && mail.pushes.is_empty());
    }

    #[test]
    fn mailbox_contents_are_taken_once() {
        let mailbox = Mailbox::default();
        let push = Push { bytes: Bytes::from_static(b"m"), gate: 3, voided: 7 };
        mailbox.push_gated(push.clone());
        mailbox.deliver_reply(Bytes::from_static(b"a"), 4);
        let mail = mailbox.take();
        assert_eq!(mail.pushes.front(), Some(&push));
        assert_eq!(mail.reply, Some((Bytes::from_static(b"a"), 4)));
        assert!(!mailbox.take().has_any());
    }
}
