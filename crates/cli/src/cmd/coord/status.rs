//! `moim coord status`: every server is asked by itself, so that one that is gone does not hide the others.

use std::time::Duration;

use moim_wire_grpc::etcd::StatusResponse;
use serde::Serialize;

use crate::config::units::show_bytes;
use crate::coordination::{address, failure, open};
use crate::exit::{Failure, Outcome};
use crate::output::{Output, Report, Section};
use crate::target::{EtcdArgs, Target};

/// For one server.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Serialize)]
struct Servers {
    servers: Vec<Server>,
}

#[derive(Serialize)]
struct Server {
    address: String,
    reachable: bool,
    member: Option<String>,
    version: Option<String>,
    is_leader: Option<bool>,
    is_learner: Option<bool>,
    raft_term: Option<u64>,
    raft_index: Option<u64>,
    raft_applied_index: Option<u64>,
    db_size_bytes: Option<i64>,
    db_size_in_use_bytes: Option<i64>,
    errors: Vec<String>,
}

impl Report for Servers {
    fn sections(&self) -> Vec<Section> {
        let columns =
            ["ADDRESS", "MEMBER", "VERSION", "ROLE", ">TERM", ">INDEX", ">APPLIED", ">SIZE", "ERRORS"];
        let mut table = Section::new(&columns);
        for server in &self.servers {
            let role = match (server.is_leader, server.is_learner) {
                (Some(true), _) => "leader",
                (_, Some(true)) => "learner",
                (Some(false), _) => "follower",
                (None, _) => "-",
            };
            let size = server.db_size_in_use_bytes.and_then(|bytes| u64::try_from(bytes).ok());
            table.row(vec![
                server.address.clone(),
                super::super::or_dash(server.member.clone()),
                super::super::or_dash(server.version.clone()),
                role.to_owned(),
                super::super::or_dash(server.raft_term),
                super::super::or_dash(server.raft_index),
                super::super::or_dash(server.raft_applied_index),
                size.map_or_else(|| "-".to_owned(), show_bytes),
                server.errors.join("; "),
            ]);
        }
        vec![table]
    }
}

pub(super) async fn run(client: &EtcdArgs, output: Output) -> Outcome {
    let target = client.target()?;
    let mut servers = Vec::new();
    let mut failed: Option<Failure> = None;
    for (host, port) in target.addresses {
        let name = address(&host, port);
        let one = Target { addresses: vec![(host, port)], named_by: target.named_by.clone() };
        // A server that is silent must not keep the others from being shown.
        let session = open(&one, client).with_timeout(client.timeout.min(PATIENCE));
        let asked = match session.probe().await {
            Ok(()) => session.status().await,
            Err(error) => Err(error),
        };
        match asked {
            Ok(status) => servers.push(server(name, &status)),
            Err(error) => {
                servers.push(unreachable(name.clone(), error.to_string()));
                failed.get_or_insert(failure(&error).context(name));
            }
        }
    }
    output.print(&Servers { servers })?;
    failed.map_or(Ok(()), Err)
}

fn server(address: String, status: &StatusResponse) -> Server {
    let member = status.header.as_ref().map_or(0, |header| header.member_id);
    Server {
        address,
        reachable: true,
        member: Some(format!("{member:x}")),
        version: Some(status.version.clone()),
        is_leader: Some(status.leader == member),
        is_learner: Some(status.is_learner),
        raft_term: Some(status.raft_term),
        raft_index: Some(status.raft_index),
        raft_applied_index: Some(status.raft_applied_index),
        db_size_bytes: Some(status.db_size),
        db_size_in_use_bytes: Some(status.db_size_in_use),
        errors: status.errors.clone(),
    }
}

fn unreachable(address: String, error: String) -> Server {
    Server {
        address,
        reachable: false,
        member: None,
        version: None,
        is_leader: None,
        is_learner: None,
        raft_term: None,
        raft_index: None,
        raft_applied_index: None,
        db_size_bytes: None,
        db_size_in_use_bytes: None,
        errors: vec![error],
    }
}
