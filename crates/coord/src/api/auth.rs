//! The Auth service of a store without users: the replies of an etcd without authentication.
//!
//! Requests that would create a user or a role are refused, since they would protect nothing.

use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::{Code, Status, method};

use super::Api;

pub(super) async fn status(
    api: &Api,
    _: wire::AuthStatusRequest,
) -> Result<wire::AuthStatusResponse, Status> {
    let header = Some(api.header_now());
    Ok(wire::AuthStatusResponse { header, enabled: false, auth_revision: 1 })
}

/// The response to every other method, whatever the request; `None` for an unknown method.
///
/// The list methods and `AuthDisable` have responses without content: a header, which is field 1 in all of them.
pub(super) fn respond(api: &Api, path: &str) -> Option<Result<wire::AuthStatusResponse, Status>> {
    let refused = |text| Some(Err(Status::new(Code::FailedPrecondition, text)));
    match path.strip_prefix(method::auth::PREFIX)? {
        "AuthDisable" | "UserList" | "RoleList" => {
            Some(Ok(wire::AuthStatusResponse { header: Some(api.header_now()), ..Default::default() }))
        }
        "AuthEnable" => refused("etcdserver: root user does not exist"),
        "UserGet" | "UserDelete" | "UserChangePassword" | "UserGrantRole" | "UserRevokeRole" => {
            refused("etcdserver: user name not found")
        }
        "RoleGet" | "RoleDelete" | "RoleGrantPermission" | "RoleRevokePermission" => {
            refused("etcdserver: role name not found")
        }
        "Authenticate" | "UserAdd" | "RoleAdd" => refused("etcdserver: authentication is not enabled"),
        _ => None,
    }
}
