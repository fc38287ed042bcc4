//! `moim coord put`.

use std::io::Read as _;

use bytes::Bytes;
use moim_cluster::EtcdClient;
use moim_wire_grpc::etcd::{
    Compare, CompareResult, CompareTarget, CompareValue, KeyValue, PutRequest, RequestOp, RequestOpKind,
    ResponseOpKind, TxnRequest,
};
use serde::Serialize;

use super::PutArgs;
use crate::coordination::{EntryJson, change_failure, connect};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section};
use crate::target::EtcdArgs;

#[derive(Serialize)]
struct Written {
    key: String,
    revision: i64,
    previous: Option<EntryJson>,
    #[serde(skip)]
    rows: Option<Section>,
}

impl Report for Written {
    fn sections(&self) -> Vec<Section> {
        let mut sections = vec![Section::pairs([("revision", self.revision.to_string())])];
        sections.extend(self.rows.clone());
        sections
    }
}

pub(super) async fn run(client: &EtcdArgs, args: &PutArgs, output: Output) -> Outcome {
    let value = match &args.value {
        Some(value) => value.clone().into_bytes(),
        None => {
            let mut value = Vec::new();
            std::io::stdin().lock().read_to_end(&mut value)?;
            value
        }
    };
    let put = PutRequest {
        key: args.key.clone().into(),
        value: value.into(),
        lease: args.lease.unwrap_or(0),
        prev_kv: args.prev,
        ..Default::default()
    };
    let client = connect(client).await?;
    let (revision, previous) = match condition(args) {
        Some(condition) => put_if(&client, put, condition).await?,
        None => {
            let done = client.put(&put).await.map_err(|error| change_failure(&error))?;
            (done.header.map_or(0, |header| header.revision), done.prev_kv)
        }
    };
    output.print(&Written {
        key: args.key.clone(),
        revision,
        previous: previous.as_ref().map(EntryJson::from),
        rows: previous.map(|previous| super::get::table(&[previous], false)),
    })
}

fn condition(args: &PutArgs) -> Option<Compare> {
    match (args.if_absent, args.if_revision) {
        (true, _) => Some(is_at(&args.key, 0)),
        (false, Some(revision)) => Some(is_at(&args.key, revision)),
        (false, None) => None,
    }
}

/// The key was last changed at this revision; 0 is a key that does not exist.
pub(super) fn is_at(key: &str, revision: i64) -> Compare {
    Compare {
        result: CompareResult::Equal as i32,
        target: CompareTarget::Mod as i32,
        key: Bytes::copy_from_slice(key.as_bytes()),
        value: Some(CompareValue::ModRevision(revision)),
        range_end: Bytes::new(),
    }
}

async fn put_if(
    client: &EtcdClient,
    put: PutRequest,
    condition: Compare,
) -> Outcome<(i64, Option<KeyValue>)> {
    let key = put.key.clone();
    let request = TxnRequest {
        compare: vec![condition],
        success: vec![RequestOp { op: Some(RequestOpKind::Put(put)) }],
        failure: vec![],
    };
    let done = client.txn(&request).await.map_err(|error| change_failure(&error))?;
    if !done.succeeded {
        let message = format!("`{}` is not as expected; nothing was written", key.escape_ascii());
        return Err(Failure::new(Status::Conflict, message));
    }
    let previous = done.responses.into_iter().find_map(|response| match response.op {
        Some(ResponseOpKind::Put(put)) => put.prev_kv,
        _ => None,
    });
    Ok((done.header.map_or(0, |header| header.revision), previous))
}
