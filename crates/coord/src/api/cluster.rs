//! The Cluster service: the member list and membership changes.
//!
//! A member id is the id in the Raft group. Every new member starts as a learner: a voter that does not run yet would
//! count against the majority and gain nothing. A node that was added here takes over its member id when it joins from
//! the announced address, and becomes a voter when it has caught up.

use bytes::Bytes;
use moim_raft::{Member, VoterId};
use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::{Code, Status};

use super::{Api, status};
use crate::engine::{CoordError, MemberInfo};
use crate::request::{
    Compare, CompareResult, CompareTarget, Origin, PutRequest, RangeRequest, TxnOp, TxnRequest,
};

/// Key of the next member id, as a decimal number.
const NEXT_VOTER: &[u8] = b"/moim/voters/next";

pub(super) async fn list(
    api: &Api,
    request: wire::MemberListRequest,
) -> Result<wire::MemberListResponse, Status> {
    if request.linearizable {
        api.coordinator.linearizable().await?;
    }
    Ok(wire::MemberListResponse { header: Some(api.header_now()), members: members(api) })
}

pub(super) async fn add(
    api: &Api,
    request: wire::MemberAddRequest,
) -> Result<wire::MemberAddResponse, Status> {
    let address = peer_address(&request.peer_urls)?;
    let id = new_voter(api).await?;
    api.coordinator.add_learner(Member { id, address: address.clone() }).await?;
    let members = members(api);
    let member = members.iter().find(|member| member.id == id.0).cloned().unwrap_or(wire::Member {
        id: id.0,
        peer_urls: vec![url(&address)],
        is_learner: true,
        ..Default::default()
    });
    Ok(wire::MemberAddResponse { header: Some(api.header_now()), member: Some(member), members })
}

/// An id that no member has or had, from the counter that joining nodes use.
async fn new_voter(api: &Api) -> Result<VoterId, Status> {
    let key = Bytes::from_static(NEXT_VOTER);
    loop {
        let reply = api.coordinator.range(RangeRequest::key(key.clone()), false).await?;
        let (id, seen_at) = match reply.kvs.first() {
            Some(kv) => {
                let number = std::str::from_utf8(&kv.value).ok().and_then(|text| text.parse().ok());
                (number.ok_or_else(status::mismatched)?, kv.mod_revision)
            }
            None => {
                let members = api.coordinator.members();
                (members.iter().map(|member| member.voter.0).max().unwrap_or(0) + 1, 0)
            }
        };
        let unchanged = Compare {
            key: key.clone(),
            range_end: Bytes::new(),
            target: CompareTarget::Mod(seen_at),
            result: CompareResult::Equal,
        };
        let next = PutRequest::new(key.clone(), (id + 1).to_string());
        let txn =
            TxnRequest { compares: vec![unchanged], success: vec![TxnOp::Put(next)], failure: Vec::new() };
        if api.coordinator.txn(Origin::Node, txn, false).await?.succeeded {
            return Ok(VoterId(id));
        }
    }
}

pub(super) async fn remove(
    api: &Api,
    request: wire::MemberRemoveRequest,
) -> Result<wire::MemberRemoveResponse, Status> {
    api.coordinator.remove_member(VoterId(request.id)).await?;
    Ok(wire::MemberRemoveResponse { header: Some(api.header_now()), members: members(api) })
}

pub(super) async fn update(
    api: &Api,
    request: wire::MemberUpdateRequest,
) -> Result<wire::MemberUpdateResponse, Status> {
    let address = peer_address(&request.peer_urls)?;
    let id = VoterId(request.id);
    let taken = |member: &MemberInfo| member.peer_addr == address && member.voter != id;
    if api.coordinator.members().iter().any(taken) {
        return Err(CoordError::MemberExists.into());
    }
    api.coordinator.update_member(Member { id, address }).await?;
    Ok(wire::MemberUpdateResponse { header: Some(api.header_now()), members: members(api) })
}

pub(super) async fn promote(
    api: &Api,
    request: wire::MemberPromoteRequest,
) -> Result<wire::MemberPromoteResponse, Status> {
    api.coordinator.promote_member(VoterId(request.id)).await?;
    Ok(wire::MemberPromoteResponse { header: Some(api.header_now()), members: members(api) })
}

fn members(api: &Api) -> Vec<wire::Member> {
    let member = |info: MemberInfo| wire::Member {
        id: info.voter.0,
        name: info.name,
        peer_urls: vec![url(&info.peer_addr)],
        client_urls: info.client_urls,
        is_learner: info.learner,
    };
    api.coordinator.members().into_iter().map(member).collect()
}

fn url(address: &str) -> String {
    format!("http://{address}")
}

/// The single address in a list of peer URLs.
fn peer_address(urls: &[String]) -> Result<String, Status> {
    let bad = || Status::new(Code::InvalidArgument, "etcdserver: given member URLs are invalid");
    let url = urls.first().ok_or_else(bad)?;
    let address = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")).ok_or_else(bad)?;
    let address = address.strip_suffix('/').unwrap_or(address);
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    let is_host = !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
    if is_host && port.parse::<u16>().is_ok_and(|port| port != 0) {
        Ok(address.to_owned())
    } else {
        Err(bad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_urls_are_checked() {
        let cases = [
            ("http://127.0.0.1:2380", Some("127.0.0.1:2380")),
            ("https://host:1/", Some("host:1")),
            ("http://[::1]:2380", Some("[::1]:2380")),
            ("127.0.0.1:2380", None),
            ("http://", None),
            ("http://host", None),
            ("http://host:0", None),
            ("http://host:99999", None),
            ("http://:2380", None),
            ("http://host/path:1", None),
            ("unix://x:1", None),
        ];
        for (url, expected) in cases {
            let found = peer_address(&[url.to_owned()]).ok();
            assert_eq!(found.as_deref(), expected, "{url}");
        }
        assert!(peer_address(&[]).is_err());
    }
}
