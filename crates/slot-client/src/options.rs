//! Client options. Every default is meant for production.

use std::time::Duration;

use moim_base::task::{Scope, Shutdown};

use crate::address::{Address, Seed};
use crate::client::Client;
use crate::error::Error;

/// Read preference: the replicas of a slot that may serve a read-only command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadFrom {
    /// The primary only: every read sees every acknowledged write.
    #[default]
    Primary,
    /// The primary; a replica while the primary is unreachable.
    PrimaryPreferred,
    /// Replicas only.
    Replica,
    /// A replica; the primary while none is reachable.
    ReplicaPreferred,
    /// Primary or replica, round robin.
    Any,
}

/// Delivery of a command whose connection failed before the reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// The command is retried: it is executed at least once. An INCR may count twice, and a repeated SET or
    /// DEL may undo a concurrent write of another client.
    #[default]
    AtLeastOnce,
    /// Reads are retried. Any command that may write fails with [`Error::Interrupted`]: it was executed once
    /// or not at all.
    AtMostOnce,
}

/// All settings of a client.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) seeds: Vec<Address>,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) hung_after: Duration,
    pub(crate) read_from: ReadFrom,
    pub(crate) delivery: Delivery,
    pub(crate) max_redirects: u32,
    pub(crate) queue_commands: usize,
    pub(crate) queue_bytes: usize,
    pub(crate) max_reply: usize,
    pub(crate) reconnect_max: Duration,
    pub(crate) reconnects_until_refresh: u32,
    pub(crate) refresh_every: Option<Duration>,
    pub(crate) refresh_at_most_every: Duration,
    pub(crate) refresh_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seeds: Vec::new(),
            username: None,
            password: None,
            name: None,
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            hung_after: Duration::from_millis(2500),
            read_from: ReadFrom::Primary,
            delivery: Delivery::AtLeastOnce,
            max_redirects: 5,
            queue_commands: 65_536,
            queue_bytes: 64 << 20,
            max_reply: 1 << 30,
            reconnect_max: Duration::from_secs(30),
            reconnects_until_refresh: 3,
            refresh_every: Some(Duration::from_secs(60)),
            refresh_at_most_every: Duration::from_millis(250),
            refresh_timeout: Duration::from_secs(1),
        }
    }
}

/// Builder of a client.
///
/// ```no_run
/// # async fn example() -> Result<(), moim_slot_client::Error> {
/// use std::time::Duration;
/// use moim_slot_client::{Client, ReadFrom};
/// let client = Client::builder("10.0.0.1:6379")
///     .seed("10.0.0.2:6379")
///     .timeout(Duration::from_secs(2))
///     .read_from(ReadFrom::ReplicaPreferred)
///     .connect()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a client exists after connect()"]
pub struct Builder {
    options: Result<Options, Error>,
    shutdown: Shutdown_,
}

/// [`Shutdown`] has no debug output.
struct Shutdown_(Shutdown);

impl std::fmt::Debug for Shutdown_ {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shutdown")
    }
}

impl Builder {
    pub(crate) fn new(seed: &str) -> Self {
        Self { options: Ok(Options::default()), shutdown: Shutdown_(Shutdown::new()) }.seed(seed)
    }

    fn with(mut self, change: impl FnOnce(&mut Options)) -> Self {
        if let Ok(options) = &mut self.options {
            change(options);
        }
        self
    }

    /// Adds a seed node: `host:port` or `redis://user:password@host:port`. Comma-separated for several.
    pub fn seed(mut self, seeds: &str) -> Self {
        for text in seeds.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            match Seed::parse(text) {
                Ok(seed) => {
                    self = self.with(|options| {
                        options.seeds.push(seed.address);
                        options.username = seed.username.or(options.username.take());
                        options.password = seed.password.or(options.password.take());
                    });
                }
                Err(error) => self.options = self.options.and(Err(error)),
            }
        }
        self
    }

    /// Credentials.
    pub fn credentials(self, username: Option<&str>, password: &str) -> Self {
        self.with(|options| {
            options.username = username.map(str::to_owned);
            options.password = Some(password.to_owned());
        })
    }

    /// The name in `CLIENT LIST`.
    pub fn name(self, name: impl Into<String>) -> Self {
        self.with(|options| options.name = Some(name.into()))
    }

    /// Total timeout of a command, including redirections and retries (5 s).
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with(|options| options.timeout = timeout)
    }

    /// Connect timeout (2 s).
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        self.with(|options| options.connect_timeout = timeout)
    }

    /// Timeout of a silent connection with outstanding replies; it is closed then (2.5 s). Must be longer
    /// than the longest script or `KEYS` of the application.
    pub fn hung_after(self, after: Duration) -> Self {
        self.with(|options| options.hung_after = after)
    }

    /// Read preference.
    pub fn read_from(self, read_from: ReadFrom) -> Self {
        self.with(|options| options.read_from = read_from)
    }

    /// Delivery after a connection failure.
    pub fn delivery(self, delivery: Delivery) -> Self {
        self.with(|options| options.delivery = delivery)
    }

    /// Maximum number of consecutive redirections of a command (5); then it backs off and starts again.
    pub fn max_redirects(self, redirects: u32) -> Self {
        self.with(|options| options.max_redirects = redirects)
    }

    /// Maximum number of commands, and their bytes, queued on one connection (65,536 and 64 MiB). Beyond
    /// that, callers wait for capacity until their deadline.
    pub fn queue(self, commands: usize, bytes: usize) -> Self {
        self.with(|options| {
            options.queue_commands = commands.max(1);
            options.queue_bytes = bytes.max(1);
        })
    }

    /// Maximum reply size (1 GiB).
    pub fn max_reply(self, bytes: usize) -> Self {
        self.with(|options| options.max_reply = bytes)
    }

    /// Interval of periodic topology refreshes (60 s); `None` for none.
    pub fn refresh_every(self, period: Option<Duration>) -> Self {
        self.with(|options| options.refresh_every = period)
    }

    /// Minimum interval between two refreshes, for all triggers (250 ms). It doubles, up to 4 times as much,
    /// while refreshes bring no change.
    pub fn refresh_at_most_every(self, period: Duration) -> Self {
        self.with(|options| options.refresh_at_most_every = period)
    }

    /// Timeout of a node's topology reply (1 s).
    pub fn refresh_timeout(self, timeout: Duration) -> Self {
        self.with(|options| options.refresh_timeout = timeout)
    }

    /// Number of failed reconnects that trigger a refresh (3), and the maximum reconnect backoff (30 s).
    pub fn reconnect(self, attempts_until_refresh: u32, longest_wait: Duration) -> Self {
        self.with(|options| {
            options.reconnects_until_refresh = attempts_until_refresh.max(1);
            options.reconnect_max = longest_wait;
        })
    }

    /// The signal to which a panic in one of the client's tasks is reported.
    pub fn shutdown(mut self, shutdown: Shutdown) -> Self {
        self.shutdown = Shutdown_(shutdown);
        self
    }

    /// Loads the topology from the seeds. Fails when none of them responds within the command timeout.
    pub async fn connect(self) -> Result<Client, Error> {
        let options = self.options?;
        if options.seeds.is_empty() {
            return Err(Error::Config("no address to connect to".to_owned()));
        }
        Client::start(options, Scope::new(self.shutdown.0)).await
    }
}
