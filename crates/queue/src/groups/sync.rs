//! SyncGroup: the leader sends the assignment, every member fetches its own.
//!
//! Invariant: no member gets an assignment before the log has it.

use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;

use super::api::{Response, Sync, Token};
use super::codes::ErrorCode;
use super::group::{Group, Phase};
use super::join::not_synced;
use super::outbox::{OnWritten, Outbox};
use super::records;

impl Group {
    pub(super) fn sync(&mut self, out: &mut Outbox, token: Token, sync: Sync) {
        let error = self.check_sync(&sync);
        let Some(member) = self.members.get_mut(&sync.member_id).filter(|_| error == ErrorCode::None) else {
            return out.reply(token, Response::Sync(not_synced(error)));
        };
        member.pending_sync = false;
        member.touch(out.now);
        if self.phase == Phase::Completing {
            if let Some(stale) = member.awaiting_sync.replace(token) {
                out.reply(stale, Response::Sync(not_synced(ErrorCode::RebalanceInProgress)));
            }
            if self.is_leader(&sync.member_id) {
                self.write_assignment(out, sync.assignments);
            }
        } else if let Some(member) = self.members.get(&sync.member_id) {
            out.reply(token, Response::Sync(self.synced(member)));
        }
        if self.members.values().all(|member| !member.pending_sync) {
            self.sync_deadline = None;
        }
    }

    fn check_sync(&self, sync: &Sync) -> ErrorCode {
        let error = self.check_member(&sync.member_id, sync.instance_id.as_deref());
        let differs = |asked: &Option<Arc<str>>, ours: &Option<Arc<str>>| asked.is_some() && asked != ours;
        if error != ErrorCode::None {
            error
        } else if sync.generation != self.generation {
            ErrorCode::IllegalGeneration
        } else if differs(&sync.protocol_type, &self.protocol_type) || differs(&sync.protocol, &self.protocol)
        {
            ErrorCode::InconsistentGroupProtocol
        } else {
            match self.phase {
                Phase::Empty => ErrorCode::UnknownMemberId,
                Phase::Preparing { .. } => ErrorCode::RebalanceInProgress,
                Phase::Completing | Phase::Stable => ErrorCode::None,
            }
        }
    }

    /// A member without an entry gets an empty assignment; an entry of an unknown member is ignored.
    fn write_assignment(&mut self, out: &mut Outbox, assignments: Vec<(Arc<str>, Bytes)>) {
        let mut given: HashMap<Arc<str>, Bytes> = assignments.into_iter().collect();
        let take = |id: &Arc<str>| {
            let bytes = given.remove(id).unwrap_or_default();
            (id.clone(), Bytes::copy_from_slice(&bytes))
        };
        let assignments: Vec<(Arc<str>, Bytes)> = self.members.keys().map(take).collect();
        // Both are ordered by member id.
        let mut in_order = assignments.iter();
        let mut value = self.value(|_, _| Bytes::new());
        for member in &mut value.members {
            member.assignment = in_order.next().map(|(_, bytes)| bytes.clone()).unwrap_or_default();
        }
        let record = (records::group_key(&self.name), Some(records::group_value(&value)));
        let write = out.persist(&self.name, vec![record], None, OnWritten::Assignment { assignments });
        self.syncing = Some(write);
    }
}
