//! `moim coord get`.

use std::io::Write as _;

use moim_wire_grpc::etcd::{KeyValue, RangeRequest, SortOrder, SortTarget};
use serde::Serialize;

use super::{GetArgs, SortBy};
use crate::coordination::{EntryJson, connect, failure, lease_text, shown_bytes};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, note_empty};
use crate::target::EtcdArgs;

#[derive(Serialize)]
struct Found {
    revision: i64,
    count: i64,
    more: bool,
    entries: Vec<EntryJson>,
    #[serde(skip)]
    rows: Section,
}

/// The answer to a question for one key: the entry itself.
#[derive(Serialize)]
struct FoundOne {
    #[serde(flatten)]
    entry: EntryJson,
    revision: i64,
    #[serde(skip)]
    rows: Section,
}

impl Report for FoundOne {
    fn sections(&self) -> Vec<Section> {
        vec![self.rows.clone()]
    }
}

impl Report for Found {
    fn sections(&self) -> Vec<Section> {
        vec![self.rows.clone()]
    }
}

pub(super) async fn run(client: &EtcdArgs, args: &GetArgs, output: Output) -> Outcome {
    let (key, range_end) = args.range.range(&args.key)?;
    let request = RangeRequest {
        key: key.into(),
        range_end: range_end.into(),
        limit: args.limit,
        revision: args.rev.unwrap_or(0),
        sort_order: order(args) as i32,
        sort_target: target(args.sort_by) as i32,
        serializable: args.serializable,
        keys_only: args.keys_only,
        count_only: args.count_only,
        ..Default::default()
    };
    let response = connect(client).await?.range(&request).await.map_err(|error| failure(&error))?;
    if args.range.is_one() && response.count == 0 && !args.count_only {
        return Err(Failure::new(Status::NotFound, format!("there is no key `{}`", args.key)));
    }
    if args.value_only {
        return print_values(&response.kvs);
    }
    let rows = if args.count_only { count(response.count) } else { table(&response.kvs, args.keys_only) };
    let revision = response.header.map_or(0, |header| header.revision);
    if args.range.is_one()
        && let Some(entry) = response.kvs.first().map(EntryJson::from)
    {
        return output.print(&FoundOne { entry, revision, rows });
    }
    let found = Found {
        revision,
        count: response.count,
        more: response.more,
        entries: response.kvs.iter().map(EntryJson::from).collect(),
        rows,
    };
    output.print(&found)?;
    if found.entries.is_empty() && !args.count_only {
        note_empty(output, "no keys");
    }
    Ok(())
}

fn order(args: &GetArgs) -> SortOrder {
    match (args.descending, args.sort_by) {
        (true, _) => SortOrder::Descend,
        (false, SortBy::Key) => SortOrder::None,
        (false, _) => SortOrder::Ascend,
    }
}

fn target(by: SortBy) -> SortTarget {
    match by {
        SortBy::Key => SortTarget::Key,
        SortBy::Version => SortTarget::Version,
        SortBy::Create => SortTarget::Create,
        SortBy::Mod => SortTarget::Mod,
        SortBy::Value => SortTarget::Value,
    }
}

fn print_values(entries: &[KeyValue]) -> Outcome {
    let mut out = std::io::stdout().lock();
    for entry in entries {
        out.write_all(&entry.value)?;
        out.write_all(b"\n")?;
    }
    out.flush()?;
    Ok(())
}

fn count(count: i64) -> Section {
    Section::pairs([("count", count.to_string())])
}

/// Entries as a table.
pub(super) fn table(entries: &[KeyValue], keys_only: bool) -> Section {
    let mut table = if keys_only {
        Section::new(&["KEY", ">VERSION", ">CREATED", ">MODIFIED", "LEASE"])
    } else {
        Section::new(&["KEY", "VALUE", ">VERSION", ">CREATED", ">MODIFIED", "LEASE"])
    };
    for entry in entries {
        let mut row = vec![shown_bytes(&entry.key)];
        if !keys_only {
            row.push(shown_bytes(&entry.value));
        }
        let numbers = [entry.version, entry.create_revision, entry.mod_revision];
        row.extend(numbers.iter().map(ToString::to_string));
        row.push(lease_text(entry.lease).unwrap_or_else(|| "-".to_owned()));
        table.row(row);
    }
    table
}
