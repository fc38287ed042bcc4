//! `moim coord del`.

use moim_wire_grpc::etcd::{
    DeleteRangeRequest, DeleteRangeResponse, RequestOp, RequestOpKind, ResponseOpKind, TxnRequest,
};
use serde::Serialize;

use super::DelArgs;
use super::put::is_at;
use crate::coordination::{EntryJson, change_failure, connect};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, confirm};
use crate::target::EtcdArgs;

#[derive(Serialize)]
struct Deleted {
    deleted: i64,
    revision: i64,
    previous: Vec<EntryJson>,
    #[serde(skip)]
    rows: Option<Section>,
}

impl Report for Deleted {
    fn sections(&self) -> Vec<Section> {
        let mut sections = vec![Section::pairs([
            ("deleted", self.deleted.to_string()),
            ("revision", self.revision.to_string()),
        ])];
        sections.extend(self.rows.clone());
        sections
    }
}

pub(super) async fn run(client: &EtcdArgs, args: &DelArgs, output: Output) -> Outcome {
    let (key, range_end) = args.range.range(&args.key)?;
    if !args.range.is_one() {
        let what = if args.range.prefix { "every key that starts with" } else { "every key from" };
        let on = if args.range.prefix { "" } else { " on" };
        confirm(&format!("delete {what} `{}`{on}", args.key), args.yes)?;
    }
    let client = connect(client).await?;
    let request = DeleteRangeRequest { key: key.into(), range_end: range_end.into(), prev_kv: args.prev };
    let done = match args.if_revision {
        None => client.delete(&request).await.map_err(|error| change_failure(&error))?,
        Some(revision) => {
            let step = RequestOp { op: Some(RequestOpKind::DeleteRange(request)) };
            let request = TxnRequest {
                compare: vec![is_at(&args.key, revision)],
                success: vec![step],
                failure: vec![],
            };
            let done = client.txn(&request).await.map_err(|error| change_failure(&error))?;
            if !done.succeeded {
                let message = format!("`{}` is not at revision {revision}; nothing was deleted", args.key);
                return Err(Failure::new(Status::Conflict, message));
            }
            let inner = done.responses.into_iter().find_map(|response| match response.op {
                Some(ResponseOpKind::DeleteRange(response)) => Some(response),
                _ => None,
            });
            DeleteRangeResponse { header: done.header, ..inner.unwrap_or_default() }
        }
    };
    if done.deleted == 0 && args.range.is_one() {
        return Err(Failure::new(Status::NotFound, format!("there is no key `{}`", args.key)));
    }
    output.print(&Deleted {
        deleted: done.deleted,
        revision: done.header.map_or(0, |header| header.revision),
        previous: done.prev_kvs.iter().map(EntryJson::from).collect(),
        rows: (!done.prev_kvs.is_empty()).then(|| super::get::table(&done.prev_kvs, false)),
    })
}
