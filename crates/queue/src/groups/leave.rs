//! LeaveGroup: members that leave, and static members that an administrator removes.

use super::api::{Leave, LeavingMember};
use super::codes::ErrorCode;
use super::group::Group;
use super::outbox::Outbox;

impl Group {
    pub(super) fn leave(&mut self, out: &mut Outbox, leave: Leave) -> Vec<(LeavingMember, ErrorCode)> {
        let each = |member: LeavingMember| {
            let error = self.leave_one(out, &member);
            (member, error)
        };
        let results = leave.members.into_iter().map(each).collect();
        self.maybe_complete_join(out);
        results
    }

    fn leave_one(&mut self, out: &mut Outbox, leaving: &LeavingMember) -> ErrorCode {
        let reason = leaving.reason.as_deref().unwrap_or("left the group");
        if leaving.member_id.is_empty() {
            // An administrator names the group instance id and not its current member id.
            let owner =
                leaving.instance_id.as_ref().and_then(|instance| self.instances.get(instance)).cloned();
            let Some(id) = owner else { return ErrorCode::UnknownMemberId };
            self.remove_member(out, &id, reason);
            return ErrorCode::None;
        }
        if self.pending.remove(&leaving.member_id).is_some() {
            return ErrorCode::None;
        }
        let error = self.check_member(&leaving.member_id, leaving.instance_id.as_deref());
        if error == ErrorCode::None {
            self.remove_member(out, &leaving.member_id, reason);
        }
        error
    }
}
