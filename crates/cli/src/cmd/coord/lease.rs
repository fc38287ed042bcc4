//! `moim coord lease …`.

use std::io::Write as _;
use std::time::Duration;

use moim_cluster::EtcdClient;
use serde::Serialize;
use serde_json::Value;

use super::LeaseVerb;
use crate::coordination::{change_failure, connect, failure, lease_text, shown_bytes};
use crate::exit::{Failure, Outcome, Status};
use crate::format::bytes_json;
use crate::output::{Format, Output, Report, Section, note_empty};
use crate::target::EtcdArgs;

pub(super) async fn run(client: &EtcdArgs, verb: LeaseVerb, output: Output) -> Outcome {
    let client = connect(client).await?;
    match verb {
        LeaseVerb::Grant { ttl, id } => grant(&client, ttl, id.unwrap_or(0), output).await,
        LeaseVerb::Revoke { id } => {
            client.lease_revoke(id).await.map_err(|error| change_failure(&error))?;
            output.print(&Revoked { id: text(id), revoked: true })
        }
        LeaseVerb::KeepAlive { id, once } => keep_alive(&client, id, once, output).await,
        LeaseVerb::Ttl { id, keys } => ttl(&client, id, keys, output).await,
        LeaseVerb::List => list(&client, output).await,
    }
}

fn text(id: i64) -> String {
    lease_text(id).unwrap_or_else(|| "0".to_owned())
}

fn missing(id: i64) -> Failure {
    Failure::new(Status::NotFound, format!("there is no lease {}", text(id)))
}

#[derive(Serialize)]
struct Granted {
    id: String,
    ttl_seconds: i64,
}

impl Report for Granted {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([("lease", self.id.clone()), ("ttl", format!("{} s", self.ttl_seconds))])]
    }
}

async fn grant(client: &EtcdClient, ttl: Duration, id: i64, output: Output) -> Outcome {
    let seconds = i64::try_from(ttl.as_millis().div_ceil(1_000)).unwrap_or(i64::MAX);
    let granted = client.lease_grant(seconds, id).await.map_err(|error| change_failure(&error))?;
    output.print(&Granted { id: text(granted.id), ttl_seconds: granted.ttl })
}

#[derive(Serialize)]
struct Revoked {
    id: String,
    revoked: bool,
}

impl Report for Revoked {
    fn sections(&self) -> Vec<Section> {
        vec![Section::pairs([("revoked", self.id.clone())])]
    }
}

/// Renews three times in each life, and prints each renewal.
async fn keep_alive(client: &EtcdClient, id: i64, once: bool, output: Output) -> Outcome {
    loop {
        let renewed = client.lease_keep_alive(id).await.map_err(|error| failure(&error))?;
        if renewed.ttl <= 0 {
            return Err(missing(id));
        }
        let granted = Granted { id: text(id), ttl_seconds: renewed.ttl };
        match output.format {
            Format::Table => writeln!(std::io::stdout(), "{} renewed for {} s", granted.id, renewed.ttl)?,
            Format::Json => writeln!(std::io::stdout(), "{}", serde_json::to_string(&granted)?)?,
        }
        if once {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs(u64::try_from(renewed.ttl).unwrap_or(1)) / 3).await;
    }
}

#[derive(Serialize)]
struct Left {
    id: String,
    ttl_seconds: i64,
    granted_seconds: i64,
    keys: Option<Vec<LeasedKey>>,
    #[serde(skip)]
    key_rows: Option<Section>,
}

#[derive(Serialize)]
struct LeasedKey {
    key: Value,
    key_encoding: Value,
}

impl Report for Left {
    fn sections(&self) -> Vec<Section> {
        let mut sections = vec![Section::pairs([
            ("lease", self.id.clone()),
            ("left", format!("{} s", self.ttl_seconds)),
            ("granted", format!("{} s", self.granted_seconds)),
        ])];
        sections.extend(self.key_rows.clone());
        sections
    }
}

async fn ttl(client: &EtcdClient, id: i64, keys: bool, output: Output) -> Outcome {
    let left = client.lease_time_to_live(id, keys).await.map_err(|error| failure(&error))?;
    if left.ttl < 0 {
        return Err(missing(id));
    }
    let mut rows = Section::new(&["KEY"]);
    for key in &left.keys {
        rows.row(vec![shown_bytes(key)]);
    }
    let leased = |key: &bytes::Bytes| {
        let (key, key_encoding) = bytes_json(Some(key));
        LeasedKey { key, key_encoding }
    };
    output.print(&Left {
        id: text(id),
        ttl_seconds: left.ttl,
        granted_seconds: left.granted_ttl,
        keys: keys.then(|| left.keys.iter().map(leased).collect()),
        key_rows: keys.then_some(rows),
    })
}

#[derive(Serialize)]
struct Leases {
    leases: Vec<String>,
}

impl Report for Leases {
    fn sections(&self) -> Vec<Section> {
        let mut table = Section::new(&["LEASE"]);
        for lease in &self.leases {
            table.row(vec![lease.clone()]);
        }
        vec![table]
    }
}

async fn list(client: &EtcdClient, output: Output) -> Outcome {
    let all = client.leases().await.map_err(|error| failure(&error))?;
    let leases: Vec<_> = all.leases.iter().map(|lease| text(lease.id)).collect();
    let none = leases.is_empty();
    output.print(&Leases { leases })?;
    if none {
        note_empty(output, "no leases");
    }
    Ok(())
}
