//! `moim coord watch`: prints changes as they happen, across restarts of the server.

use std::io::Write as _;

use moim_cluster::etcd::{WatchError, WatchOptions};
use moim_wire_grpc::etcd::{Event, EventType};
use serde::Serialize;
use serde_json::Value;

use super::WatchArgs;
use crate::coordination::{EntryJson, connect, failure, shown_bytes};
use crate::exit::{Failure, Outcome, Status};
use crate::format::bytes_json;
use crate::output::{Format, Output, escape_control};
use crate::target::EtcdArgs;

/// One change, on one line.
#[derive(Serialize)]
struct Change {
    #[serde(rename = "type")]
    kind: &'static str,
    key: Value,
    key_encoding: Value,
    value: Value,
    value_encoding: Value,
    revision: i64,
    create_revision: i64,
    version: i64,
    lease: Option<String>,
    previous: Option<EntryJson>,
}

pub(super) async fn run(client: &EtcdArgs, args: &WatchArgs, output: Output) -> Outcome {
    let (key, range_end) = args.range.range(&args.key)?;
    let options = WatchOptions {
        key: key.into(),
        range_end: range_end.into(),
        start_revision: args.rev,
        prev_kv: args.prev,
        ..Default::default()
    };
    let client = connect(client).await?;
    let mut watch = client.watch(options).await.map_err(|error| ended(&error))?;
    let mut left = args.num.unwrap_or(u64::MAX);
    while left > 0 {
        let batch = watch.next().await.map_err(|error| ended(&error))?;
        let mut out = std::io::stdout().lock();
        for event in batch.events {
            if left == 0 {
                break;
            }
            left -= 1;
            match output.format {
                Format::Json => writeln!(out, "{}", serde_json::to_string(&change(&event))?)?,
                Format::Table => writeln!(out, "{}", line(&event))?,
            }
        }
        out.flush()?;
    }
    Ok(())
}

fn kind(event: &Event) -> &'static str {
    if event.kind == EventType::Delete as i32 { "delete" } else { "put" }
}

fn change(event: &Event) -> Change {
    let kv = event.kv.clone().unwrap_or_default();
    let deleted = kind(event) == "delete";
    let (key, key_encoding) = bytes_json(Some(&kv.key));
    let (value, value_encoding) = bytes_json((!deleted).then_some(&kv.value));
    Change {
        kind: kind(event),
        key,
        key_encoding,
        value,
        value_encoding,
        revision: kv.mod_revision,
        create_revision: kv.create_revision,
        version: kv.version,
        lease: crate::coordination::lease_text(kv.lease),
        previous: event.prev_kv.as_ref().map(EntryJson::from),
    }
}

/// `17  put  color  blue`, with tabs between.
fn line(event: &Event) -> String {
    let kv = event.kv.clone().unwrap_or_default();
    let (key, value) = (shown_bytes(&kv.key), shown_bytes(&kv.value));
    let mut line = format!("{}\t{}\t{}", kv.mod_revision, kind(event), escape_control(&key));
    if kind(event) == "put" {
        line.push_str(&format!("\t{}", escape_control(&value)));
    }
    if let Some(previous) = &event.prev_kv {
        line.push_str(&format!("\t(was {})", escape_control(&shown_bytes(&previous.value))));
    }
    line
}

fn ended(error: &WatchError) -> Failure {
    match error {
        WatchError::Compacted { oldest } => Failure::new(Status::NotFound, error.to_string())
            .hint(format!("read the keys again, and watch from revision {oldest} or later")),
        WatchError::Refused(_) => Failure::new(Status::NotAllowed, error.to_string()),
        WatchError::Failed(error) => failure(error),
    }
}
