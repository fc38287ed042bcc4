//! The subscriber's side of a manager's stream: connects to any of the managers, sends the hello, applies
//! snapshots and deltas, and reconnects elsewhere when the stream breaks.
//!
//! Invariant: the published table only gets newer; a delta is applied to exactly the table it starts from,
//! and a delta that does not fit is followed by a snapshot request.

use std::sync::Arc;
use std::time::Duration;

use moim_wire_grpc::routing::{
    Ack, Command, FollowRequest, FollowRequestKind, FollowResponse, FollowResponseKind, Hello, Snapshot,
    method,
};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::table::{RouteEntry, RoutingTable};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::etcd::{Channel, EtcdError, EtcdOptions, Stream};

/// Timeout of a connection to a manager.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A subscriber.
pub(crate) struct Follower {
    pub(crate) context: Context,
    pub(crate) managers: Vec<String>,
    pub(crate) channel: Channel,
    pub(crate) namespace: String,
    /// Server id; empty for an SDK.
    pub(crate) node_id: String,
    pub(crate) table: watch::Sender<Arc<RoutingTable>>,
    /// Commands of the manager; SDKs get none.
    pub(crate) commands: Option<mpsc::Sender<Command>>,
    /// Acknowledgements of the commands.
    pub(crate) acks: Option<mpsc::Receiver<Ack>>,
    /// Partitions that a server has drained for operations in progress.
    pub(crate) drained: Box<dyn Fn() -> Vec<String> + Send + Sync>,
}

/// A channel to any of the managers.
pub(crate) fn channel(context: &Context, managers: &[String]) -> Channel {
    let mut options = EtcdOptions::new(managers);
    // Managers accept frequent pings, and a silent manager must be detected soon.
    options.ping_interval = Duration::from_secs(1);
    options.ping_timeout = Duration::from_secs(1);
    // Distribute the subscribers over the managers.
    fastrand::shuffle(&mut options.endpoints);
    Channel::new(options, &context.scope)
}

impl Follower {
    /// Follows without limit.
    pub(crate) async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
        let mut want_snapshot = false;
        let mut is_redirected = false;
        loop {
            match self.follow(&mut want_snapshot, &mut backoff).await {
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!(%error, "manager connection lost");
                    // Servers follow the leading manager; any other one redirects.
                    if let Some(leader) = leader_redirect(&error) {
                        self.channel = channel(&self.context, &[leader]);
                        is_redirected = true;
                    } else if std::mem::take(&mut is_redirected) {
                        self.channel = channel(&self.context, &self.managers);
                    }
                }
            }
            backoff.pause().await;
        }
    }

    async fn follow(&mut self, want_snapshot: &mut bool, backoff: &mut Backoff) -> Result<(), EtcdError> {
        let link = self.channel.link(Instant::now() + CONNECT_TIMEOUT, false).await?;
        let followed = self.follow_on(&link, want_snapshot, backoff).await;
        self.channel.leave(&link);
        followed
    }

    async fn follow_on(
        &mut self,
        link: &crate::etcd::Link,
        want_snapshot: &mut bool,
        backoff: &mut Backoff,
    ) -> Result<(), EtcdError> {
        let mut stream = Stream::open(link, method::FOLLOW, None).await?;
        let have = self.table.borrow().clone();
        let hello = Hello {
            namespace: self.namespace.clone(),
            node_id: self.node_id.clone(),
            incarnation: if *want_snapshot { 0 } else { have.incarnation },
            have_version: if *want_snapshot { 0 } else { have.version },
            drained: (self.drained)(),
        };
        drop(have);
        stream.send(&FollowRequest { kind: Some(FollowRequestKind::Hello(hello)) }, false)?;
        let mut parts: Vec<RouteEntry> = Vec::new();
        loop {
            let ack = async {
                match &mut self.acks {
                    Some(acks) => acks.recv().await,
                    None => std::future::pending().await,
                }
            };
            let message = tokio::select! {
                message = stream.next::<FollowResponse>() => message?,
                Some(ack) = ack => {
                    stream.send(&FollowRequest { kind: Some(FollowRequestKind::Ack(ack)) }, false)?;
                    continue;
                }
            };
            let Some(message) = message else { return Ok(()) };
            backoff.reset();
            match message.kind {
                Some(FollowResponseKind::Snapshot(part)) => {
                    if let Some(table) = gather(&mut parts, part) {
                        *want_snapshot = false;
                        self.publish(table);
                    }
                }
                Some(FollowResponseKind::Delta(delta)) => {
                    let table = self.table.borrow().clone();
                    match table.apply(delta) {
                        Ok(next) => self.publish(next),
                        Err(error) => {
                            tracing::debug!(%error, "delta mismatch; requesting a snapshot");
                            *want_snapshot = true;
                            return Ok(());
                        }
                    }
                }
                Some(FollowResponseKind::Command(command)) => {
                    if let Some(commands) = &self.commands
                        && commands.send(command).await.is_err()
                    {
                        return Ok(());
                    }
                }
                None => {}
            }
        }
    }

    fn publish(&self, next: RoutingTable) {
        self.table.send_if_modified(|table| {
            let is_newer = next.incarnation != table.incarnation || next.version > table.version;
            if is_newer {
                *table = Arc::new(next);
            }
            is_newer
        });
    }
}

/// Prefix of the redirect message of a manager that is not the leader.
pub(crate) const LEADER_IS: &str = "the leader is ";
/// Message of a manager that knows no leader.
pub(crate) const NO_LEADER: &str = "no manager leads";

/// The leader's address, if the error is a redirect.
pub(crate) fn leader_redirect(error: &EtcdError) -> Option<String> {
    match error {
        EtcdError::Refused(status) => status.message.strip_prefix(LEADER_IS).map(str::to_owned),
        EtcdError::Unreachable(_) | EtcdError::Unknown(_) => None,
    }
}

/// Adds a snapshot part; returns the table after the last one.
fn gather(parts: &mut Vec<RouteEntry>, part: Snapshot) -> Option<RoutingTable> {
    if part.index == 0 {
        parts.clear();
    }
    parts.extend(part.routes.into_iter().map(RouteEntry::from_wire));
    if part.index + 1 < part.count {
        return None;
    }
    let entries = std::mem::take(parts);
    match RoutingTable::new(part.version, entries) {
        Ok(table) => Some(table.of(part.incarnation)),
        Err(error) => {
            tracing::warn!(%error, "undecodable routing table from manager");
            None
        }
    }
}
